"""The connection to the coordinator: when it was last heard, and which requests await its answer."""

from __future__ import annotations

from collections.abc import Callable

from refitd.daemon.actions import Instruction, ToCoordinator
from refitd.daemon.pending import About, Waiting
from refitd.errors import RefusedError, TransportError
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.protocol.reports import SwapProgress

# The coordinator answers every update (one a second). After this long without a message it counts as gone.
COORDINATOR_SILENCE_S = 5.0


class CoordinatorLink:
    """Numbers requests and keeps them until they are answered. Instructions go to `out`.

    `answered(waiting, reply)` receives every answer, also the failures that this node makes up while the coordinator is
    away.
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
        self._unreachable = ""  # the reason, if known
        self._has_left = False  # it announced its end
        self.now = 0.0
        self.boot = ""  # id of the coordinator's incarnation; "" until it welcomes this node

    @property
    def is_up(self) -> bool:
        """Whether a coordinator has been heard lately."""
        return bool(self.boot) and not self._has_left and not self.is_silent

    @property
    def is_silent(self) -> bool:
        """Whether the coordinator has been silent for so long that it counts as gone."""
        return self.now - self._heard >= COORDINATOR_SILENCE_S

    @property
    def unheard_s(self) -> float:
        """How long no coordinator has been heard; 0 while one answers."""
        return 0.0 if self.is_up else self.now - self._heard

    def heard(self) -> None:
        """Note that the coordinator sent something."""
        self._heard, self._unreachable, self._has_left = self.now, "", False

    def left(self, reason: str) -> None:
        """Note that the coordinator announced its end: it counts as silent, and a successor is looked for at once."""
        self._unreachable, self._has_left = reason, True
        self.fail_all(reason)

    def was_busy(self, seconds: float) -> None:
        """Do not count time in which this process was busy as silence of the coordinator."""
        self._heard = min(self.now, self._heard + seconds)

    def unreachable(self, reason: str) -> None:
        """Note why no connection could be made."""
        self._unreachable = reason

    def check(self) -> None:
        """Raise TransportError if no coordinator answers."""
        if not self.is_up:
            raise TransportError(self._absence())

    def next_number(self) -> int:
        """Return a number that no request or registration of this daemon has used."""
        self._numbers += 1
        return self._numbers

    def say(self, message: Message, request: int = 0) -> None:
        """Send a message; a non-zero `request` asks for an answer."""
        self._out(ToCoordinator(request, message))

    def ask(self, session: int, request: int, message: Message, about: About) -> None:
        """Send a request; without a coordinator, answer it with a failure at once."""
        waiting = Waiting(session, request, about)
        if not self.is_up:
            self._answered(waiting, _failed(self._absence()))
            return
        number = self.next_number()
        self._waiting[number] = waiting
        self.say(message, number)

    def waits_for(self, request: int) -> bool:
        """Return whether a request with this number awaits an answer."""
        return request in self._waiting

    def reply(self, request: int, message: Message) -> None:
        """Handle the coordinator's answer, or progress, for a waiting request."""
        waiting = self._waiting[request]
        if not isinstance(message, SwapProgress):
            del self._waiting[request]
        self._answered(waiting, message)

    def unsent(self, request: int, lost: bool) -> None:
        """Fail a request that did not fit in the queue to the coordinator, or whose connection is `lost`."""
        if (waiting := self._waiting.pop(request, None)) is not None:
            text = f"node {self._node}: too much waits to be sent to the coordinator; try again"
            failure = local.Failure(code=RefusedError.code, message=text)
            self._answered(waiting, _failed(self._absence()) if lost else failure)

    def fail_all(self, reason: str) -> None:
        """Fail all waiting requests: the coordinator that had them is gone."""
        waiting, self._waiting = self._waiting, {}
        for one in waiting.values():
            self._answered(one, _failed(reason))

    def count(self, session: int) -> int:
        """Return how many requests of a session are waiting."""
        return sum(waiting.session == session for waiting in self._waiting.values())

    def __len__(self) -> int:
        """Return how many requests are waiting."""
        return len(self._waiting)

    def _absence(self) -> str:
        reason = self._unreachable or "check that it runs, then try again"
        return f"node {self._node} has no coordinator at present; {reason}"


def _failed(reason: str) -> local.Failure:
    return local.Failure(code=TransportError.code, message=reason)
