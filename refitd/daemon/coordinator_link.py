"""The link to the coordinator: when it was heard, and which requests wait for its answers."""

from __future__ import annotations

from collections.abc import Callable

from refitd.daemon.actions import Instruction, ToCoordinator
from refitd.daemon.pending import About, Waiting
from refitd.errors import RefusedError, TransportError
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.protocol.reports import SwapProgress

# The coordinator answers every update (one a second); this long without a word and it counts as gone.
COORDINATOR_SILENCE_S = 5.0


class CoordinatorLink:
    """Numbers requests and keeps them until they are answered. Instructions go to `out`.

    `answered(waiting, reply)` takes every answer, also the failures that this node answers with in the coordinator's
    place.
    """

    def __init__(
        self, node: str, out: Callable[[Instruction], None], answered: Callable[[Waiting, Message], None]
    ) -> None:
        self._node = node
        self._out = out
        self._answered = answered
        self._numbers = 0
        self._waiting: dict[int, Waiting] = {}
        self._heard = -1e9
        self._unreachable = ""  # why, as far as is known
        self.now = 0.0
        self.boot = ""  # of the coordinator; "" while none has welcomed this node

    @property
    def is_up(self) -> bool:
        """Whether a coordinator has been heard lately."""
        return bool(self.boot) and self.now - self._heard < COORDINATOR_SILENCE_S

    @property
    def unheard_s(self) -> float:
        """How long no coordinator has been heard; 0 while one answers."""
        return 0.0 if self.is_up else self.now - self._heard

    def heard(self) -> None:
        """The coordinator has said something."""
        self._heard, self._unreachable = self.now, ""

    def was_busy(self, seconds: float) -> None:
        """Count a time in which this process heard nobody as no silence of the coordinator's."""
        self._heard = min(self.now, self._heard + seconds)

    def unreachable(self, reason: str) -> None:
        """No connection has come about, for this reason."""
        self._unreachable = reason

    def check(self) -> None:
        """Raise TransportError where no coordinator answers."""
        if not self.is_up:
            raise TransportError(self._absence())

    def next_number(self) -> int:
        """Return a number that no request and no registration of this daemon has had."""
        self._numbers += 1
        return self._numbers

    def say(self, message: Message, request: int = 0) -> None:
        """Send a message; `request` numbers one whose answer is wanted."""
        self._out(ToCoordinator(request, message))

    def ask(self, session: int, request: int, message: Message, about: About) -> None:
        """Send a request; without a coordinator it is answered with a failure at once."""
        waiting = Waiting(session, request, about)
        if not self.is_up:
            self._answered(waiting, _failed(self._absence()))
            return
        number = self.next_number()
        self._waiting[number] = waiting
        self.say(message, number)

    def waits_for(self, request: int) -> bool:
        """Return whether a request with this number waits."""
        return request in self._waiting

    def reply(self, request: int, message: Message) -> None:
        """Take the coordinator's answer to a request that waits, or its progress."""
        waiting = self._waiting[request]
        if not isinstance(message, SwapProgress):
            del self._waiting[request]
        self._answered(waiting, message)

    def unsent(self, request: int) -> None:
        """A request found no room in the queue to the coordinator."""
        if (waiting := self._waiting.pop(request, None)) is not None:
            text = f"node {self._node}: too much waits to be sent to the coordinator; try again"
            self._answered(waiting, local.Failure(code=RefusedError.code, message=text))

    def fail_all(self, reason: str) -> None:
        """The coordinator that was asked is gone, and what it would have answered."""
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            self._answered(one, _failed(reason))

    def count(self, session: int) -> int:
        """Return how many requests of a session wait."""
        return sum(waiting.session == session for waiting in self._waiting.values())

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._waiting)

    def _absence(self) -> str:
        reason = self._unreachable or "check that it runs, then try again"
        return f"node {self._node} has no coordinator at present; {reason}"


def _failed(reason: str) -> local.Failure:
    return local.Failure(code=TransportError.code, message=reason)
