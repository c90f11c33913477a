"""The explored coordinator: the real machine of a swap, and the code of its process around that machine.

`heard` and the other functions take a Fleet and return the next one with messages for nodes and writes for the journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from refitd.commit import decision
from refitd.commit import decision as d
from refitd.commit import swap_events as e
from refitd.commit.decision import FINAL, Limits, Phase, Swap, Verdict
from refitd.errors import IllegalTransition
from tests.exploration.nodes import WHY, Message, Refused

LIMITS = Limits(1.0, 1.0, 1.0)
FAR = 1e12  # a time after every deadline
NODES = ("n0", "n1")
CONTROLLER = "ca"  # of replica a, on node n0
SOURCE = "src"


class Member(NamedTuple):
    """A registered rank, as the coordinator knows it."""

    node: int
    index: int  # of its replica
    number: int
    version: int | None
    staged: str | None = None
    spare: int | None = None
    suspended: bool = False

    @property
    def name(self) -> str:
        """Its id."""
        return f"{'ab'[self.index]}{self.node}.{self.number}"


class Send(NamedTuple):
    """Effect: a message for a node."""

    node: int
    message: Message


class Write(NamedTuple):
    """Effect: the journal is to write that this swap is decided."""

    swap: str
    version: int
    ranks: frozenset[tuple[int, int]]  # that are registered


Effect = Send | Write


class Fleet(NamedTuple):
    """One coordinator; `swap` is the running swap."""

    boot: int = 1
    live: int = 1
    swap: Swap | None = None
    kind: str = ""  # "swap", "catch-up" or "rollback"
    held: bool = False  # the decision waits for permits to end
    known: tuple[bool, bool] = (True, True)
    members: tuple[Member, ...] = ()
    absent: frozenset[tuple[int, int, int]] = frozenset()  # ranks out of reach that may still serve; number 0: any
    begun: int = 0
    wanted: int = 2  # swaps that the operator will still ask for
    controlled: bool = False  # replica a has a controller, which pauses it
    in_place: bool = False
    early: bool = False  # the trainer still writes a version when its swap begins
    called: str = ""  # the decided swap for which the controller has yet to resume its engine

    @property
    def runs(self) -> bool:
        """Whether a swap is running."""
        return self.swap is not None

    def member(self, node: int, index: int, number: int) -> Member | None:
        """Return a registered rank."""
        return next((m for m in self.members if m[:3] == (node, index, number)), None)

    def changed(self, old: Member, **fields: Any) -> Fleet:
        """Return the fleet with one member changed."""
        return self._replace(members=tuple(m._replace(**fields) if m is old else m for m in self.members))


def canonical(swap: Swap) -> Swap:
    """Return a swap without its times and texts: no decision depends on them."""
    return replace(
        swap,
        deadline=0.0,
        failed_phase=None,
        reason=WHY if swap.reason else "",
        culprit="",
        cause=d.SwapCause.NONE,
        progress={},
        copies=0,
        paused={},
        failed=dict.fromkeys(sorted(swap.failed), WHY),
        entered={phase: 0.0 for phase in Phase if phase in swap.entered},
        history=(),
    )


class Coordinator:
    """Steps a fleet, and collects what it sends."""

    def __init__(self, fleet: Fleet, decided: Mapping[str, int]) -> None:
        """`decided` maps the swaps that the journal knows as decided to their versions."""
        self.fleet, self.decided = fleet, decided
        self.effects: list[Effect] = []

    # --- the machine --------------------------------------------------------------------------------------

    def step(self, event: e.Event, now: float = 0.0) -> None:
        """Step the swap's machine and carry out its instructions."""
        swap = self.fleet.swap
        assert swap is not None
        try:
            after, instructions = d.step(swap, event, now)
        except IllegalTransition as exc:
            raise Refused(str(exc)) from exc
        self.fleet = self.fleet._replace(swap=canonical(after))
        for instruction in instructions:
            self._perform(after, instruction)
        if after.phase in FINAL:
            self.fleet = self.fleet._replace(swap=None, kind="", held=False)

    def _perform(self, swap: Swap, instruction: e.Instruction) -> None:
        fleet = self.fleet
        match instruction:
            case e.SendPlan(node):
                self._send(node, ("load",))
            case e.PauseOn(node, _):
                self._send(node, ("pause", swap.swap))
            case e.StageOn(node):
                kind = "spare" if fleet.kind == "rollback" else "stage"
                there = tuple(
                    sorted("ab".index(m[0]) for m, on in swap.members.items() if on == node and m != CONTROLLER)
                )
                self._send(node, (kind, swap.swap, swap.version, there))
            case e.JournalDecision():
                self._decide()
            case e.CommitOn(node):
                for member in self.fleet.members:
                    if member.name in swap.members and NODES[member.node] == node:
                        self.fleet = self.fleet.changed(member, staged=swap.swap)
                self._send(node, ("commit", swap.swap, swap.version))
            case e.AbortOn(node):
                self._send(node, ("abort", swap.swap))
            case e.Finished():
                if swap.phase is Phase.ABORTED:
                    for member in [m for m in self.fleet.members if m.name in swap.poisoned]:
                        self.fleet = self.fleet.changed(member, version=None)
                    if CONTROLLER in swap.members:
                        self._send(NODES[0], ("resume", swap.swap))
            case _:
                pass

    def _send(self, node: str, message: Message) -> None:
        index = NODES.index(node)
        if self.fleet.known[index]:
            self.effects.append(Send(index, message))

    def _decide(self) -> None:
        fleet = self.fleet
        assert fleet.swap is not None
        if fleet.absent and fleet.swap.version != fleet.live:
            self.fleet = fleet._replace(held=True)
            self.step(e.DecisionHeld(0.0))
            return
        self.fleet = fleet._replace(held=False)
        self.step(e.DecisionSubmitted())
        ranks = frozenset(m[:2] for m in fleet.members)
        self.effects.append(Write(fleet.swap.swap, fleet.swap.version, ranks))

    # --- the operator and time ----------------------------------------------------------------------------

    def begin(self, kind: str, version: int, ranks: Iterable[Member]) -> None:
        """Begin a swap of these ranks."""
        members = list(ranks)
        number = self.fleet.begun + 1
        names = dict.fromkeys(
            [*(m.name for m in members), SOURCE, *([CONTROLLER] if self._controls(members) else [])], ""
        )
        swap = d.begin(f"s{number}", "m", version, LIMITS, names, 0.0)
        self.fleet = self.fleet._replace(swap=canonical(swap), begun=number, kind=kind, held=False)

    def _controls(self, members: Iterable[Member]) -> bool:
        is_paused = self.fleet.in_place or any(m.index == 0 for m in members)
        return self.fleet.controlled and is_paused and self.fleet.known[0]

    def planned(self) -> None:
        """Continue once the plan is made."""
        swap = self.fleet.swap
        assert swap is not None
        ranks = [m for m in self.fleet.members if m.name in swap.names]
        members = {m.name: NODES[m.node] for m in ranks}
        nodes = frozenset(members.values())
        asked, in_place = frozenset[str](), frozenset[str]()
        if CONTROLLER in swap.names:
            members[CONTROLLER] = NODES[0]
            asked = frozenset({CONTROLLER})
        halts = asked if self.fleet.in_place else frozenset[str]()
        in_place = frozenset(m.name for m in ranks) if self.fleet.in_place else in_place
        loaded = nodes if self.fleet.kind == "rollback" else frozenset[str]()  # an exchange needs no plan
        writes = frozenset({SOURCE}) if self.fleet.early and self.fleet.kind == "swap" else frozenset[str]()
        self.step(e.PlanReady(members, nodes, 1, asked, halts, in_place, loaded, writes))

    def journalled(self, is_written: bool) -> None:
        """Hear the journal's answer."""
        swap = self.fleet.swap
        assert swap is not None
        if not is_written:
            self.step(e.NotJournalled(WHY))
            for member in [m for m in self.fleet.members if m.staged == swap.swap]:  # they returned while it wrote
                self._abort(member, swap.swap)
            return
        self.fleet = self.fleet._replace(live=swap.version)
        for member in self.fleet.members:
            if member.name not in swap.members:
                self._fence(member)
        if CONTROLLER in swap.members:
            self.fleet = self.fleet._replace(called=swap.swap)
        self.step(e.Journalled())
        self._look()

    def permits_ended(self) -> None:
        """Continue once no rank out of reach may serve."""
        self.fleet = self.fleet._replace(absent=frozenset())
        if self.fleet.held and self.fleet.runs:
            self._decide()

    def evict(self, member: Member) -> None:
        """Evict a rank."""
        self._send(NODES[member.node], ("evict", member.index, member.number))
        self._remove(member)
        self._look()

    # --- nodes --------------------------------------------------------------------------------------------

    def hear(self, node: int, message: Message) -> None:
        """Handle a message of a node."""
        name = NODES[node]
        match message:
            case ("hello", _):
                self.lose(node)
                fleet = self.fleet
                known = (True, fleet.known[1]) if node == 0 else (fleet.known[0], True)
                self.fleet = fleet._replace(known=known)
                self._send(name, ("welcome", fleet.boot))
            case ("loaded",):
                if self._takes_part(node, after=Phase.IDLE):
                    self.step(e.NodeLoaded(name))
            case ("lost-epoch",):
                if self._takes_part(node, after=Phase.IDLE) and self.fleet.kind != "rollback":
                    self.step(e.PlanLost(name, name, WHY))
            case ("staged", swap):
                if self._is_current(swap):
                    self.step(e.NodeProgress(name, 1))
                    self.step(e.NodeStaged(name, 1, 1))
            case ("failed", swap):
                if self._is_current(swap):
                    self.step(e.NodeFailed(name, name, WHY))
            case ("paused", swap):
                if self._is_current(swap):
                    self.step(e.QuietReported(CONTROLLER))
            case ("committed", swap, index, number, spare):
                self._committed(swap, node, index, number, spare)
            case ("commit-failed", swap, index, number):
                self._failed(swap, node, index, number)
            case ("add", index, number, version, staged, _, spare, suspended):
                self._add(Member(node, index, number, version, staged, spare, suspended))
            case ("all", *added):
                for one in added:
                    self.hear(node, one)
            case ("left", index, number):
                if (member := self.fleet.member(node, index, number)) is not None:
                    self._remove(member)
            case ("suspend", index, number, True):
                self._suspend(node, index, number)
            case ("suspend", index, number, False, is_lost):
                if (member := self.fleet.member(node, index, number)) is not None:
                    version = None if is_lost else member.version
                    self.fleet = self.fleet.changed(member, suspended=False, version=version)
                    self._fence(member._replace(version=version))
        self._look()

    def _is_current(self, swap: str) -> bool:
        return self.fleet.swap is not None and self.fleet.swap.swap == swap

    def _takes_part(self, node: int, after: Phase) -> bool:
        swap = self.fleet.swap
        return swap is not None and swap.phase is not after and NODES[node] in swap.nodes

    def _committed(self, swap: str, node: int, index: int, number: int, spare: int | None) -> None:
        member = self.fleet.member(node, index, number)
        if member is not None and member.staged == swap:
            version = self.decided.get(swap)
            if self._is_current(swap) and self.fleet.swap is not None:
                version = self.fleet.swap.version
            self.fleet = self.fleet.changed(member, staged=None, version=version, spare=spare)
            if not self._is_current(swap):
                self._fence(member._replace(version=version))
        if self._is_current(swap) and self.fleet.swap is not None:
            name = Member(node, index, number, None).name
            if name in self.fleet.swap.members:
                self.step(e.CommitReported(name, 0.0))

    def _failed(self, swap: str, node: int, index: int, number: int) -> None:
        member = self.fleet.member(node, index, number)
        if member is not None and member.staged == swap:
            self.fleet = self.fleet.changed(member, staged=None, version=None)
        if self._is_current(swap) and self.fleet.swap is not None:
            name = Member(node, index, number, None).name
            if name in self.fleet.swap.members:
                self.step(e.MemberFailed(name, WHY))

    def _add(self, member: Member) -> None:
        fleet = self.fleet
        members = tuple(sorted((*fleet.members, member), key=lambda m: m[:3]))
        self.fleet = fleet._replace(members=members, absent=fleet.absent - {member[:3], (*member[:2], 0)})
        if member.staged is not None:
            version = self.decided.get(member.staged)
            running = self.fleet.swap
            deciding = running is not None and running.swap == member.staged and running.phase is Phase.DECIDING
            match decision.verdict(is_decided=version is not None, may_be_decided=deciding):
                case Verdict.COMMIT:
                    self._send(NODES[member.node], ("commit", member.staged, version))
                case Verdict.ABORT:
                    self._abort(member, member.staged)
                case Verdict.WAIT:
                    pass
        else:
            self._fence(member)
        self._send(NODES[member.node], ("admitted", member.index, member.number))
        if self.fleet.held and self.fleet.runs and not self.fleet.absent:
            self._decide()

    def _abort(self, member: Member, swap: str) -> None:
        self.fleet = self.fleet.changed(member, staged=None)
        self._send(NODES[member.node], ("abort", swap))
        self._fence(member)

    def _remove(self, member: Member) -> None:
        self.fleet = self.fleet._replace(members=tuple(m for m in self.fleet.members if m is not member))
        swap = self.fleet.swap
        if swap is not None and member.name in swap.names:
            self.step(e.MemberLost(member.name, WHY))

    def lose(self, node: int) -> None:
        """Forget a node that is silent, or has introduced itself again: its ranks may still serve."""
        fleet = self.fleet
        if not fleet.known[node]:
            return
        known = (False, fleet.known[1]) if node == 0 else (fleet.known[0], False)
        gone = [m for m in fleet.members if m.node == node]
        absent = fleet.absent | {m[:3] for m in gone}
        self.fleet = fleet._replace(known=known, absent=absent)
        for member in gone:
            if (there := self.fleet.member(*member[:3])) is not None:
                self._remove(there)
        swap = self.fleet.swap
        if node == 0:
            self.fleet = self.fleet._replace(called="")
        if node == 0 and swap is not None and CONTROLLER in swap.names:
            self.step(e.MemberLost(CONTROLLER, WHY))
        self._look()

    def _suspend(self, node: int, index: int, number: int) -> None:
        member = self.fleet.member(node, index, number)
        swap = self.fleet.swap
        takes_part = member is not None and swap is not None and member.name in swap.names
        deciding = takes_part and swap is not None and swap.phase in (Phase.DECIDING, Phase.COMMITTING)
        is_allowed = member is not None and member.staged is None and not deciding
        if is_allowed and member is not None:
            if takes_part:
                self.step(e.MemberLost(member.name, WHY))
                member = self.fleet.member(node, index, number)
                assert member is not None
            self.fleet = self.fleet.changed(member, suspended=True)
            self._fence(member)
        self._send(NODES[node], ("suspended", index, number, is_allowed))

    def _fence(self, member: Member) -> None:
        if member.staged is not None and self.decided.get(member.staged) == self.fleet.live:
            return
        if reason := decision.fence_reason(member.version, "", self.fleet.live, ""):
            self._send(NODES[member.node], ("fence", member.index, member.number, reason))

    def _look(self) -> None:
        """Resume a controller's engine once no rank of its replica has the version pending."""
        called = self.fleet.called
        if not called or any(m.staged == called and (m.index == 0 or self.fleet.in_place) for m in self.fleet.members):
            return
        self.fleet = self.fleet._replace(called="")
        self._send(NODES[0], ("resume", called))
        if self._is_current(called):
            self.step(e.CommitReported(CONTROLLER, 0.0))

    # --- what may begin -----------------------------------------------------------------------------------

    def due(self) -> list[tuple[str, int, list[Member]]]:
        """Return the swaps that may begin now: their kind, version and ranks."""
        fleet = self.fleet
        if fleet.runs:
            return []
        replicas = [[m for m in fleet.members if m.index == index and not m.suspended] for index in range(2)]
        complete = [ranks for ranks in replicas if len({m.node for m in ranks}) == 2]
        found: list[tuple[str, int, list[Member]]] = []
        for ranks in complete:
            if any(m.version != fleet.live for m in ranks) and all(m.staged is None for m in ranks):
                found.append(("catch-up", fleet.live, ranks))
        if any(m.staged is not None for m in fleet.members):
            return found
        everyone = [m for ranks in complete for m in ranks]
        if fleet.wanted and everyone:
            spares = {m.spare for m in everyone}
            if len(complete) == 2 and len(spares) == 1 and (spare := spares.pop()) is not None and spare != fleet.live:
                found.append(("rollback", spare, everyone))
            found.append(("swap", fleet.begun + 2, everyone))
        return found
