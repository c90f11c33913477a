"""Count a rank's polls, and decide in which poll it commits a pending version (lockstep)."""

from __future__ import annotations

import threading

from refitd.errors import RefusedError
from refitd.lockstep import CALLERS_STEP
from refitd.protocol.local import StepReached


class PollSteps:
    """The poll counter of one target, guarded by the target's lock. See `refitd.lockstep` for its purpose."""

    def __init__(self) -> None:
        self.flip_at: int | None = None  # the poll in which the pending version is committed; None until known
        self.stands = ""  # "poll" or "wait": the call in which the rank waits for `flip_at`, already reported; else ""
        self._step = 0
        self._origin = ""  # the event from which polls are counted; "": this rank's registration
        self._flip_origin = ""
        self._thread = 0

    def count(self, step: int | None, *, begin: bool = True) -> None:
        """Count a poll: the caller's number, or the next one. 0 is before the first poll, also of a caller's step 0.

        Without `begin` the caller's step does not begin with this poll, so the rank may poll before it again.

        Raises:
            RefusedError: the caller's numbers go down.
        """
        if step is None:
            self._origin = "" if self._origin == CALLERS_STEP else self._origin
            self._step += 1
        elif self._origin == CALLERS_STEP and step + begin < self._step:
            raise RefusedError(
                f"step is {step}, after {self._step - 1} in the poll before; give a number that only goes up, and is "
                "the same on all ranks of the replica"
            )
        else:
            self._origin = CALLERS_STEP
            self._step = step + 1
        self._thread = threading.get_ident()

    def stay(self) -> None:
        """Uncount a poll of the caller's step that does not begin with it."""
        if self._origin == CALLERS_STEP:
            self._step -= 1

    def decided(self) -> None:
        """Note that a version is decided; the poll to commit it in is not known yet."""
        self.flip_at, self.stands = None, ""

    def reached(self, swap: str, member: str, stands: str = "") -> StepReached:
        """Return the report of this rank's step; a nonempty `stands` says that the rank waits there."""
        self.stands = stands
        self._thread = threading.get_ident() if stands else self._thread
        # if flip_at is known, a new coordinator asks again, and other ranks may have committed: repeat the old answer
        step = self._step if self.flip_at is None else max(0, self.flip_at - 1)
        return StepReached(swap, member, step, self._origin, stands, self._thread)

    def flip(self, step: int, origin: str) -> None:
        """Commit the version in poll `step`; with an `origin`, all ranks count from that poll on."""
        # Older clients number that poll 0: none of them may seem to count from the same origin.
        self.flip_at, self._flip_origin, self.stands = step, origin and f"{origin}/1", ""

    def passed(self) -> None:
        """Let the rank continue from the poll in which it waits."""
        self.stands = ""

    def is_due(self) -> bool:
        """Return whether the version is to be committed in this poll."""
        return self.flip_at is not None and self._step >= self.flip_at

    def is_early(self) -> bool:
        """Return whether others commit only after a step that this rank has not begun."""
        return self.flip_at is not None and self._step + 1 < self.flip_at

    def flipped(self) -> None:
        """Note that the version is committed: ranks that committed together count from here, even after a `wait`.

        The poll in which others committed is number 1: to one that committed in a `wait`, it is the next. One that was
        early shares no origin with them.
        """
        if self.flip_at is not None and self._origin != CALLERS_STEP:
            self._origin = "" if self.is_early() else self._flip_origin
            self._step = int(self.is_due()) if self._origin else self._step
        self.decided()
