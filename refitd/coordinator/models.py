"""The coordinator's state of one model: its ranks, live version, running swap and queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from refitd.coordinator.decision import Phase, Swap
from refitd.coordinator.membership import Member, Model
from refitd.coordinator.plans import LoadedPlan
from refitd.coordinator.records import LiveVersion, Record
from refitd.coordinator.region_comparison import RegionComparison
from refitd.coordinator.steps import FlipSteps
from refitd.errors import RefusedError
from refitd.protocol import local
from refitd.protocol.reports import SourceReport, SwapReport

# What one answer shows of the journal at most.
MAX_HISTORY = 1000

# A daemon's connection and the number of its request.
Waiter = tuple[bytes, int]

# The last swaps of a model ("": of all), the newest first, at most so many.
Recent = Callable[[str, int], Sequence[Record]]


@dataclass(slots=True)
class Running:
    """A running swap and who waits for it."""

    swap: Swap
    version: int
    waiters: list[Waiter]
    run: str
    kind: str
    fleet: Model  # the whole model, or what a catch-up brings to its live version
    members: dict[str, Member]  # as they were when it began: those that leave are reported too
    sources: tuple[SourceReport, ...] = ()  # likewise: a lent version ends when it has been read
    answer_by: float | None = None  # when whoever waits is told how it stands; None: when it has ended
    plan: LoadedPlan | None = None
    comparison: RegionComparison | None = None  # of its sources, where that is needed
    held_until: float | None = None  # when engines out of reach will have stopped serving: it is decided then
    apart: dict[tuple[str, int], str] = field(default_factory=dict)  # ranks that may not have flipped with the others
    gives_way: bool = False  # a catch-up that was ended for the sake of a swap that somebody asked for

    def is_live(self, live: LiveVersion | None) -> bool:
        """Whether its version is already live."""
        return live is not None and live.is_at(self.version, self.run)

    def is_due(self, now: float) -> bool:
        """Whether the held decision can be written now, before the deadline."""
        held = self.held_until is not None and self.swap.phase is Phase.STAGED
        return held and self.held_until is not None and self.held_until <= now < self.swap.deadline


@dataclass(frozen=True, slots=True)
class Queued:
    """A swap that waits for the running one."""

    asked: local.StartSwap
    waiter: Waiter
    since: float
    deadline: float


@dataclass(slots=True)
class ModelState:
    """One model."""

    fleet: Model
    live: LiveVersion | None = None  # the version that was decided last
    highest: int = -1  # the highest version that was ever decided
    tried: tuple[int, str] = (-1, "")  # the highest version of the last run that a swap was begun to
    bases: dict[str, int] = field(default_factory=dict)  # run -> the highest number that others had used up before it
    published: dict[tuple[str, int], int] = field(default_factory=dict)  # (run, rank) -> its highest number so far
    wants_room: dict[str, int] = field(default_factory=dict)  # source ranks that wait for a slot, and how many each has
    plan: LoadedPlan | None = None  # of the present members; None after any change
    running: Running | None = None
    queue: list[Queued] = field(default_factory=list)
    last: SwapReport | None = None
    steps: FlipSteps = field(default_factory=FlipSteps)  # where ranks are that have a decided version to take over

    def takes_part(self, member: Member) -> bool:
        """Return whether this rank takes part in the running swap."""
        return self.running is not None and member.id in self.running.swap.names

    def reads(self, member: Member) -> bool:
        """Return whether the running swap reads this source rank; of a plan that is not made yet nobody knows."""
        running = self.running
        return (
            running is not None
            and running.plan is not None
            and running.plan.members.get(member.id) in running.plan.senders
        )


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
