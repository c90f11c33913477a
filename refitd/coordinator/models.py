"""What the coordinator knows of one model: its ranks, what is live, which swap runs and which ones wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from refitd.commit.journal import Record
from refitd.commit.machine import Phase, Swap
from refitd.coordinator.fleet import Member, Model
from refitd.coordinator.plans import LoadedPlan
from refitd.errors import RefusedError
from refitd.protocol import local
from refitd.protocol.reports import SourceReport, SwapReport

# How far back the journal is searched for the version before the live one, and what one answer shows at most.
MAX_HISTORY = 1000

# A daemon's connection and the number of its request.
Waiter = tuple[bytes, int]

# The last swaps of a model ("": of all), the newest first, at most so many.
Recent = Callable[[str, int], Sequence[Record]]


@dataclass(slots=True)
class Running:
    """A swap under way and who waits for it."""

    swap: Swap
    version: int
    waiters: list[Waiter]
    kind: str
    fleet: Model  # the whole model, or what a catch-up brings to its live version
    members: dict[str, Member]  # as they were when it began: those that leave are reported too
    sources: tuple[SourceReport, ...] = ()  # likewise: a lent version ends when it has been read
    plan: LoadedPlan | None = None
    gives_way: bool = False  # a catch-up that was ended for the sake of a swap that somebody asked for


@dataclass(frozen=True, slots=True)
class Queued:
    """A swap that waits for the running one."""

    asked: local.StartSwap
    waiter: Waiter
    deadline: float


@dataclass(slots=True)
class ModelState:
    """One model."""

    fleet: Model
    live: int | None = None  # the version that was decided last
    newest: int = -1  # the highest version that a swap was begun to
    plan: LoadedPlan | None = None  # of the present members; None after any change
    running: Running | None = None
    queue: list[Queued] = field(default_factory=list)
    last: SwapReport | None = None

    def takes_part(self, member: Member) -> bool:
        """Return whether the running swap needs this rank."""
        if self.running is None:
            return False
        if member.added.role == "target":
            return member.id in self.running.swap.members or self.running.swap.phase is Phase.IDLE
        # once everything is staged nobody needs the source any more
        return not self.running.swap.is_staged


class Models(dict[str, ModelState]):
    """The models by name."""

    def named(self, name: str) -> ModelState:
        """Return a model.

        Raises:
            RefusedError: there is none of that name.
        """
        state = self.get(name)
        if state is None:
            known = ", ".join(sorted(self)) or "none"
            raise RefusedError(f"no model {name!r} is registered; registered models: {known}")
        return state

    def swapping(self, swap: str) -> ModelState | None:
        """Return the model whose running swap this is."""
        return next((s for s in self.values() if s.running is not None and s.running.swap.swap == swap), None)
