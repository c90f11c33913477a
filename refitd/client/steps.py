"""How far a rank has polled, counted from where, and in which poll it takes a decided version over."""

from __future__ import annotations

import threading

from refitd.errors import RefusedError
from refitd.protocol.local import CALLERS_STEP, StepReached


class PollSteps:
    """The counter of one target, guarded by its lock; `refitd.coordinator.steps` says what it is for."""

    def __init__(self) -> None:
        self.flip_at: int | None = None  # the poll in which what is pending is taken over, once that is known
        self.stands = ""  # "poll" or "wait": where the rank waits to be told, and has said so
        self._step = 0
        self._origin = ""  # what is counted from; "": from this rank's own registration
        self._flip_origin = ""
        self._thread = 0

    def count(self, step: int | None) -> None:
        """Count a poll: the caller's number, or the next one.

        Raises:
            RefusedError: the caller's numbers go down.
        """
        if step is None:
            step = self._step + 1
            self._origin = "" if self._origin == CALLERS_STEP else self._origin
        elif self._origin == CALLERS_STEP and step < self._step:
            raise RefusedError(
                f"step is {step}, after {self._step} in the poll before; give a number that only goes up, and is the "
                "same on all ranks of the replica"
            )
        else:
            self._origin = CALLERS_STEP
        self._step, self._thread = step, threading.get_ident()

    def stay(self) -> None:
        """The poll was before a step that has not begun: the rank may poll before it again."""
        if self._origin == CALLERS_STEP:
            self._step = max(0, self._step - 1)

    def decided(self) -> None:
        """Another version is to be taken over; in which poll is not known yet."""
        self.flip_at, self.stands = None, ""

    def reached(self, swap: str, member: str, stands: str = "") -> StepReached:
        """Return where this rank is; `stands` says that it stays there."""
        self.stands = stands
        self._thread = threading.get_ident() if stands else self._thread
        # known already: another coordinator asks, and other ranks may have flipped
        step = self._step if self.flip_at is None else self.flip_at - 1
        return StepReached(swap, member, step, self._origin, stands, self._thread)

    def flip(self, step: int, origin: str) -> None:
        """The version is taken over in poll `step`, from which all ranks count if there is an `origin`."""
        self.flip_at, self._flip_origin, self.stands = step, origin, ""

    def passed(self) -> None:
        """The rank goes on from the poll in which it stands."""
        self.stands = ""

    def is_due(self) -> bool:
        """Whether the version is taken over in this poll."""
        return self.flip_at is not None and self._step >= self.flip_at

    def flipped(self) -> None:
        """The version has been taken over: ranks that did together count from here on, also where one waited for it."""
        if self.flip_at is not None and self._origin != CALLERS_STEP:
            self._step, self._origin = 0 if self._flip_origin else self._step, self._flip_origin
        self.decided()
