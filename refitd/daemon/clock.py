"""The offset between the coordinator's clock and this daemon's, estimated from the round trips of heartbeats."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

# Round trips that are kept, one per second. The shortest is the most accurate; clocks drift, so old ones expire.
KEPT = 32

# Limit on unanswered heartbeats that are remembered.
_MAX_SENT = 64


@dataclass(frozen=True, slots=True)
class Alignment:
    """The seconds to add to this clock to get the coordinator's, and the largest possible error."""

    offset_s: float
    error_s: float


class CoordinatorClock:
    """Compares two monotonic clocks.

    A heartbeat leaves at `sent` and its answer, with the coordinator's time `there`, arrives at `now`. `there` was
    between both, so the offset is `there - (sent + now) / 2`, wrong by at most half of the round trip.
    """

    def __init__(self) -> None:
        self._sent: dict[int, float] = {}
        self._found: deque[Alignment] = deque(maxlen=KEPT)

    def forget(self) -> None:
        """Start again: another coordinator answers, perhaps on another host."""
        self._found.clear()

    def sent(self, number: int, now: float) -> None:
        """Record that a heartbeat was sent."""
        self._sent[number] = now
        if len(self._sent) > _MAX_SENT:
            del self._sent[next(iter(self._sent))]

    def heard(self, number: int, there: float, now: float) -> None:
        """Record the answer to a heartbeat."""
        since = self._sent.pop(number, None)
        if since is not None:
            self._found.append(Alignment(there - (since + now) / 2, (now - since) / 2))

    @property
    def alignment(self) -> Alignment | None:
        """The best estimate; None before the first answer."""
        return min(self._found, key=lambda found: found.error_s, default=None)
