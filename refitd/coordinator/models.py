"""The coordinator's state of one model: its ranks, live version, running swap and queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from refitd.coordinator.decision import Phase, Swap
from refitd.coordinator.members import Member
from refitd.coordinator.membership import Membership
from refitd.coordinator.plans import LoadedPlan
from refitd.coordinator.records import LiveVersion, SwapRecord
from refitd.coordinator.region_comparison import RegionComparison
from refitd.coordinator.steps import FlipSteps
from refitd.errors import RefusedError
from refitd.protocol import local
from refitd.protocol.reports import Crossing, SourceReport, SwapReport

# Limit on journal entries in one answer.
MAX_HISTORY = 1000

# Who waits for an answer: (connection of a daemon, number of its request).
Waiter = tuple[bytes, int]

# Returns a model's last swaps ("": all models'), the newest first, up to a limit.
Recent = Callable[[str, int], Sequence[SwapRecord]]


@dataclass(slots=True)
class Together:
    """Swaps of several models that are decided together, and their reports so far."""

    models: tuple[str, ...]
    waiter: Waiter
    reports: dict[str, SwapReport] = field(default_factory=dict)
    aborted: str = ""  # why one of them was aborted: the others are, too


@dataclass(slots=True)
class Running:
    """A running swap and who waits for it."""

    swap: Swap
    version: int
    waiters: list[Waiter]
    run: str
    kind: str
    membership: Membership  # the whole model, or the replicas of a catch-up
    members: dict[str, Member]  # at the swap's begin; members that leave are reported too
    sources: tuple[SourceReport, ...] = ()  # likewise; a lent version ends once it has been read
    answer_by: float | None = None  # when callers get an interim answer; None: only at the end
    plan: LoadedPlan | None = None
    comparison: RegionComparison | None = None  # of its sources, if needed
    held_until: float | None = None  # when unreachable engines have stopped serving; the decision waits until then
    flips_back: bool = False  # it has no plan: targets exchange their arenas
    together: Together | None = None  # swaps that are decided with it
    suspended: tuple[str, ...] = ()  # replicas that it leaves out
    drained: tuple[str, ...] = ()  # likewise, because of drained nodes
    apart: dict[tuple[str, int], str] = field(default_factory=dict)  # ranks that may have flipped apart
    gives_way: bool = False  # an undecided catch-up that was ended in favour of a requested swap
    crossing: Crossing = field(default_factory=Crossing)  # what has come from other nodes so far
    is_watched: bool = False  # `waiters` are sent its progress

    def base(self) -> tuple[int, str] | None:
        """Return the version (number, run) that most targets serve, unless it is this swap's own."""
        served = Counter((m.version, m.run) for m in self.membership.targets.values())
        found = [(number, run) for (number, run), _ in served.most_common() if number is not None]
        return found[0] if found and found[0] != (self.version, self.run) else None

    def is_live(self, live: LiveVersion | None) -> bool:
        """Whether its version is already live."""
        return live is not None and live.is_at(self.version, self.run)

    def look_again(self, now: float) -> None:
        """Have a held decision considered anew: a rank that it waits for is reachable."""
        if self.held_until is not None:
            self.held_until = min(self.held_until, now)

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

    membership: Membership
    live: LiveVersion | None = None  # the version that was decided last
    highest: int = -1  # the highest version that was ever decided
    tried: tuple[int, str] = (-1, "")  # (version, run) of the highest swap begun in the last run
    bases: dict[str, int] = field(default_factory=dict)  # run -> the highest number used up before it
    published: dict[tuple[str, int], int] = field(default_factory=dict)  # (run, rank) -> highest number
    wants_room: dict[str, int] = field(default_factory=dict)  # source rank waiting for a slot -> its slot count
    plan: LoadedPlan | None = None  # of the present members; None after any change
    running: Running | None = None
    gathers_until: float | None = None  # a catch-up that is due waits so long for others that join
    unbegun: dict[str, str] = field(default_factory=dict)  # what begins by itself and could not -> why, as logged
    queue: list[Queued] = field(default_factory=list)
    last: SwapReport | None = None
    steps: FlipSteps = field(default_factory=FlipSteps)  # how far ranks with a decided version have polled

    def takes_part(self, member: Member) -> bool:
        """Return whether this rank takes part in the running swap."""
        return self.running is not None and member.id in self.running.members

    def reads(self, member: Member) -> bool:
        """Return whether the running swap reads this source rank; False while its plan is not made."""
        running = self.running
        return (
            running is not None
            and running.plan is not None
            and running.plan.members.get(member.id) in running.plan.senders
        )


class Models(dict[str, ModelState]):
    """The models by name."""

    def named(self, name: str) -> ModelState:
        """Return a model's state.

        Raises:
            RefusedError: no model has this name.
        """
        state = self.get(name)
        if state is None:
            known = ", ".join(sorted(self)) or "none"
            raise RefusedError(f"no model {name!r} is registered; registered models: {known}")
        return state

    def swapping(self, swap: str) -> ModelState | None:
        """Return the model whose running swap this is."""
        return next((s for s in self.values() if s.running is not None and s.running.swap.swap == swap), None)
