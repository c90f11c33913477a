"""Explore every order of events of a small cluster that swaps versions, with some faults anywhere.

The cluster is one coordinator with its journal, two nodes, and two replicas of two ranks, one on each node. The
machines come from `refitd.commit`. A world is a tuple of numbers: each part of the cluster is stored once, and the
events of a part are computed once. Worlds that differ only in the names of nodes or replicas count as one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from refitd.commit import decision as d
from refitd.commit import swap_events as e
from refitd.commit.decision import Phase
from tests.exploration.fleet import CONTROLLER, FAR, NODES, SOURCE, Coordinator, Effect, Fleet, Member, Write
from tests.exploration.moves import node_moves, quick, resumptions
from tests.exploration.nodes import WHY, Move, Node, Refused, running
from tests.exploration.rules import Rules
from tests.exploration.symmetry import Symmetry
from tests.exploration.worlds import Broken, Found, Journal, Setting, Store, Violation, World, on_disk

# Orders that a daemon handles before anything else but faults: they commute with everything else.
EAGER = ("load", "admitted", "resume", "welcome")

Outcome = tuple[str, int, tuple[Effect, ...], int]  # name, fleet, effects, faults


class Exploration:
    """One exploration; `run` does it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.fleets, self.nodes, self.journals = Store(), Store(), Store()
        self._moves: dict[tuple[int, bool, bool], list[tuple[str, int, int]]] = {}
        self._hears: dict[tuple[int, int, Any, int], tuple[int, tuple[Effect, ...]] | str] = {}
        self._plans: dict[tuple[int, int, bool, bool], list[Outcome] | str] = {}
        self._pushes: dict[tuple[int, Any], int] = {}
        self._rules = Rules(self.fleets, self.nodes, self.journals)
        self._symmetry = Symmetry(self.fleets, self.nodes, self.journals)
        self._parents: dict[World, World | None] = {}
        self._real: World | None = None  # the end of the last trace, under its own names

    # --- the search ---------------------------------------------------------------------------------------

    def first(self) -> World:
        """Return the first world: all ranks serve version 1."""
        s = self.setting
        members = tuple(
            Member(node, index, 1, 1, suspended=s.asleep and index == 1) for node in range(2) for index in range(2)
        )
        absent = frozenset({(0, 0, 99)} if s.held else ())
        fleet = Fleet(
            members=members,
            wanted=s.swaps,
            controlled=s.controlled,
            in_place=s.mode.in_place,
            early=s.early,
            absent=absent,
        )
        node = self.nodes(running(s.mode, asleep=s.asleep))
        return World(self.fleets(fleet), self.journals(Journal()), (node, node), s.faults, s.delays or 0)

    def run(self, until_s: float = 1e9) -> Found:
        """Explore everything.

        Raises:
            Violation: an order of events breaks a rule; it is a shortest one.
            TimeoutError: `until_s` seconds were too few.
        """
        began = time.monotonic()
        layer = [self.first()]
        self._parents[layer[0]] = None
        transitions = ends = 0
        while layer:
            following: list[World] = []
            for number, world in enumerate(layer):
                if number % 1024 == 0 and time.monotonic() - began > until_s:
                    states = f"{len(self._parents)} states, {transitions} transitions, {ends} ends"
                    raise TimeoutError(f"{states} in {until_s:.0f} s, and it is not at its end")
                is_end = True
                try:
                    for _, next_world, faults in self.events(world):
                        transitions += 1
                        is_end &= faults > 0
                        after = self.canonical(next_world)
                        if after not in self._parents:
                            self._parents[after] = world
                            following.append(after)
                            self._rules.check(after)
                    if is_end:
                        ends += 1
                        self._rules.check_end(world)
                except Broken as exc:
                    raise self._violation(exc, world) from None
            layer = following
        return Found(len(self._parents), transitions, ends, time.monotonic() - began)

    def _violation(self, broken: Broken, world: World) -> Violation:
        """Return a violation with its trace, the last event under its own names."""
        trace = self.trace(broken.world or world)
        if broken.world is None and self._real is not None:
            try:
                list(self.events(self._real))
            except Broken as exc:
                broken = exc
        return Violation(broken.reason, [*trace, *broken.last])

    def trace(self, world: World) -> list[str]:
        """Return the events that led to a world, under the names that nodes and replicas have at the start."""
        path = [world]
        while (parent := self._parents[path[-1]]) is not None:
            path.append(parent)
        real, found = path.pop(), list[str]()
        while path:
            wanted = path.pop()
            # a mirrored world may have another representative than the one that was explored
            alike = ((n, w) for n, w, _ in self.events(real) if self.canonical(w) == wanted)
            name, real = next(alike, ("an event that leads to a world with other names", wanted))
            found.append(name)
        self._real = real
        return found

    def canonical(self, world: World) -> World:
        """Return the representative of all worlds that differ from this one in names of nodes and replicas."""
        return world if self.setting.controlled else self._symmetry.canonical(world)

    # --- what may happen ----------------------------------------------------------------------------------

    def events(self, world: World) -> Iterator[tuple[str, World, int]]:
        """Yield what `successors` does. With a limit on delays, the first event that is no fault comes next."""
        if self.setting.delays is None:
            yield from self.successors(world)
            return
        is_first = True
        for name, after, faults in self.successors(world):
            if faults or is_first or world.delays:
                delays = world.delays if faults or is_first else world.delays - 1
                is_first &= faults > 0
                yield name, World(*after[:4], delays), faults

    def successors(self, world: World) -> Iterator[tuple[str, World, int]]:
        """Yield the events that may happen, the world afterwards, and how many faults each is."""
        fleet, journal, nodes, left, _ = world
        is_led = fleet >= 0
        for index in range(2):
            node = self.nodes.values[nodes[index]]
            if is_led and node.up and node.up[0][0] == "hello":
                yield self._delivered(world, index, node)
                return
            if node.down and node.down[0][0] in EAGER:
                name, after, faults = self._node_moves(nodes[index], is_led, False)[0]
                both = (after, nodes[1]) if index == 0 else (nodes[0], after)
                yield f"{NODES[index]}: {name}", World(fleet, journal, both, left), faults
                return
        for index in range(2):
            for name, after, faults in self._node_moves(nodes[index], is_led, left > 0):
                if faults <= left:
                    both = (after, nodes[1]) if index == 0 else (nodes[0], after)
                    yield f"{NODES[index]}: {name}", World(fleet, journal, both, left - faults), faults
            node = self.nodes.values[nodes[index]]
            if is_led and node.up:
                yield self._delivered(world, index, node)
        if not is_led:
            yield self._taken_over(world)
            return
        for name, after, effects, faults in self._fleet_moves(world):
            if faults <= left:
                yield self._affected(name, world, after, effects, left - faults, faults)
        yield from self._journal_moves(world)
        for index in range(2):
            for move in resumptions(self.nodes.values[nodes[index]]):
                after = self.nodes(move.node)
                both = (after, nodes[1]) if index == 0 else (nodes[0], after)
                yield f"{NODES[index]}: {move.name}", World(fleet, journal, both, left), 0

    def _node_moves(self, node: int, is_led: bool, may_fail: bool) -> list[tuple[str, int, int]]:
        found = self._moves.get((node, is_led, may_fail))
        if found is None:
            value = self.nodes.values[node]
            try:
                moves: list[Move] = list(node_moves(value, self.setting.mode, is_led=is_led, may_fail=may_fail))
                if not self.setting.mode.is_slow:
                    moves = [move._replace(node=quick(move.node)) for move in moves]
            except Refused as exc:
                raise Broken(f"an event was refused: {exc}") from None
            found = [(m.name, self.nodes(m.node), m.faults) for m in moves if m.node != value]
            self._moves[node, is_led, may_fail] = found
        return found

    def _delivered(self, world: World, index: int, node: Node) -> tuple[str, World, int]:
        message = node.up[0]
        journal: Journal = self.journals.values[world.journal]
        key = (world.fleet, index, message, world.journal)
        found = self._hears.get(key)
        if found is None:
            coordinator = Coordinator(self.fleets.values[world.fleet], dict(journal.decided))
            try:
                coordinator.hear(index, message)
                found = self.fleets(coordinator.fleet), tuple(coordinator.effects)
            except Refused as exc:
                found = str(exc)
            self._hears[key] = found
        name = f"the coordinator handles {message} of {NODES[index]}"
        if isinstance(found, str):
            raise Broken(f"an event was refused: {found}", last=[name])
        rest = self._heard(world.nodes[index])
        both = (rest, world.nodes[1]) if index == 0 else (world.nodes[0], rest)
        return self._affected(name, world._replace(nodes=both), found[0], found[1], world.faults, 0)

    def _affected(
        self, name: str, world: World, fleet: int, effects: tuple[Effect, ...], left: int, faults: int
    ) -> tuple[str, World, int]:
        """Carry out what the coordinator sends and writes."""
        if not effects:
            return name, World(fleet, world.journal, world.nodes, left), faults
        nodes, journal = list(world.nodes), self.journals.values[world.journal]
        for effect in effects:
            if isinstance(effect, Write):
                if journal.write is not None:
                    raise Broken("two decisions are written at a time", last=[name])
                if (swap := self.fleets.values[fleet].swap) is not None and swap.publishing:
                    raise Broken(f"swap {effect.swap} is decided, and its version is not published", last=[name])
                if self._is_unpaused(world, fleet):
                    raise Broken(f"swap {effect.swap} is decided, and its controller has not paused", last=[name])
                ranks = journal.ranks if effect.version == journal.live else frozenset()
                journal = journal._replace(write=effect, ranks=ranks)
                continue
            kind, message = effect.message[0], effect.message
            if kind == "abort" and message[1] in dict(journal.decided):
                raise Broken(f"swap {message[1]} is decided, and is aborted", last=[name])
            if kind == "commit" and message[1] not in dict(journal.decided):
                raise Broken(f"swap {message[1]} is committed, and is not decided", last=[name])
            if kind == "admitted" and journal.write is not None:
                journal = journal._replace(ranks=journal.ranks | {(effect.node, message[1])})
            if kind == "abort" and world.faults == self.setting.faults and left == world.faults:
                raise Broken(f"swap {message[1]} is aborted, and nothing has failed", last=[name])
            if kind == "stage" and self.setting.mode.in_place and self._is_unpaused(world, fleet):
                raise Broken(f"swap {message[1]} writes live tensors of engines that are not paused", last=[name])
            nodes[effect.node] = self._pushed(nodes[effect.node], message)
        return name, World(fleet, self.journals(journal), (nodes[0], nodes[1]), left), faults

    def _is_unpaused(self, world: World, fleet: int) -> bool:
        """Whether the running swap has a controller, and its engine is not paused; a node out of contact is unknown."""
        node, now = self.nodes.values[world.nodes[0]], self.fleets.values[fleet]
        is_known = node.linked and not node.greets and node.boot == now.boot
        return is_known and now.swap is not None and CONTROLLER in now.swap.members and node.paused != now.swap.swap

    def _pushed(self, node: int, message: Any) -> int:
        key = (node, message)
        found = self._pushes.get(key)
        if found is None:
            value: Node = self.nodes.values[node]
            found = self.nodes(value._replace(down=(*value.down, message)) if value.linked else value)
            self._pushes[key] = found
        return found

    def _fleet_moves(self, world: World) -> list[Outcome]:
        is_late = any(rank.is_hung for n in world.nodes for rank in self.nodes.values[n].ranks)
        key = (world.fleet, world.journal, world.faults > 0, is_late)
        found = self._plans.get(key)
        if found is None:
            try:
                found = list(
                    self._of_fleet(self.fleets.values[world.fleet], self.journals.values[world.journal], *key[2:])
                )
            except Refused as exc:
                found = str(exc)
            self._plans[key] = found
        if isinstance(found, str):
            raise Broken(f"an event was refused: {found}")
        nodes = [self.nodes.values[n] for n in world.nodes]
        fleet: Fleet = self.fleets.values[world.fleet]
        ranks = [(nodes[n].ranks[i], number) for n, i, number in fleet.absent]
        may_end = not any(rank.permit and number in (0, rank.number) for rank, number in ranks)
        silent = [f"{NODES[n]} is silent" for n in range(2) if not nodes[n].linked]
        shown = []
        for outcome in found:
            name = outcome[0]
            if (name == "the permits of absent ranks have ended" and not may_end) or (
                name.endswith("is silent") and name not in silent
            ):
                continue
            shown.append(outcome)
        return shown

    def _of_fleet(self, fleet: Fleet, journal: Journal, may_fail: bool, is_late: bool) -> Iterator[Outcome]:
        decided = dict(journal.decided)

        def then(name: str, do: Callable[[Coordinator], None], faults: int = 0) -> Outcome:
            coordinator = Coordinator(fleet, decided)
            do(coordinator)
            return name, self.fleets(coordinator.fleet), tuple(coordinator.effects), faults

        def begins(kind: str, version: int, ranks: list[Member]) -> Callable[[Coordinator], None]:
            def do(coordinator: Coordinator) -> None:
                if kind != "catch-up":
                    coordinator.fleet = coordinator.fleet._replace(wanted=fleet.wanted - 1)
                coordinator.begin(kind, version, ranks)

            return do

        if journal.write is None:
            for kind, version, ranks in Coordinator(fleet, decided).due():
                who = ", ".join(m.name for m in ranks)
                yield then(f"a {kind} to version {version} begins: {who}", begins(kind, version, ranks))
        if fleet.absent:
            yield then("the permits of absent ranks have ended", Coordinator.permits_ended)
        for node in range(2):
            if fleet.known[node]:
                yield then(f"{NODES[node]} is silent", lambda c, node=node: c.lose(node))
        swap = fleet.swap
        if swap is None:
            return
        if swap.phase is Phase.IDLE:
            yield then("the plan is ready", Coordinator.planned)
        if SOURCE in swap.publishing:
            yield then("the trainer has published the version", lambda c: c.step(e.SourceFinished(SOURCE)))
        early, _ = d.step(swap, e.TimePassed(), -1.0)
        if early is not swap:
            raise Refused("a deadline passes before its time")
        if may_fail or is_late:
            yield then("the deadline passes", lambda c: c.step(e.TimePassed(), FAR), int(not is_late))
        if not may_fail:
            return
        if swap.phase is not Phase.COMMITTING:
            yield then("the operator aborts", lambda c: c.step(e.AbortAsked(WHY)), 1)
        for member in fleet.members:
            yield then(f"the operator evicts {member.name}", lambda c, m=member: c.evict(m), 1)
        if SOURCE in swap.names:
            yield then("the trainer leaves", lambda c: c.step(e.MemberLost(SOURCE, WHY)), 1)
        if CONTROLLER in swap.waiting and swap.phase in (Phase.HALTING, Phase.PAUSING, Phase.COMMITTING):
            yield then("the controller's hook fails", lambda c: c.step(e.MemberFailed(CONTROLLER, WHY)), 1)

    # --- the journal and the coordinators -----------------------------------------------------------------

    def _journal_moves(self, world: World) -> Iterator[tuple[str, World, int]]:
        journal: Journal = self.journals.values[world.journal]
        left = world.faults
        asked = journal.write is not None and not journal.is_written
        if asked:
            yield "the journal writes the decision", world._replace(journal=self.journals(on_disk(journal))), 0
        elif journal.write is not None:
            yield self._answered("the journal answers", world, is_written=True, faults=0)
        if left and asked:
            yield self._answered("the journal refuses the decision", world, is_written=False, faults=1)
            yield self._crashed("the coordinator crashes, its write is not carried out", world, journal)
            yield self._crashed("the coordinator crashes, its write is carried out", world, on_disk(journal))
        elif left:
            yield self._crashed("the coordinator crashes", world, journal)

    def _answered(self, name: str, world: World, *, is_written: bool, faults: int) -> tuple[str, World, int]:
        journal: Journal = self.journals.values[world.journal]
        coordinator = Coordinator(self.fleets.values[world.fleet], dict(journal.decided))
        try:
            coordinator.journalled(is_written)
        except Refused as exc:
            raise Broken(f"an event was refused: {exc}", last=[name]) from None
        world = world._replace(journal=self.journals(journal._replace(write=None, is_written=False)))
        fleet = self.fleets(coordinator.fleet)
        return self._affected(name, world, fleet, tuple(coordinator.effects), world.faults - faults, faults)

    def _crashed(self, name: str, world: World, journal: Journal) -> tuple[str, World, int]:
        fleet: Fleet = self.fleets.values[world.fleet]
        left = fleet.boot, fleet.begun, fleet.wanted
        after = self.journals(journal._replace(write=None, is_written=False, crashed=left))
        nodes = self._cut(world.nodes[0]), self._cut(world.nodes[1])
        return name, World(-1, after, nodes, world.faults - 1), 1

    def _cut(self, node: int) -> int:
        """Return a node whose coordinator has ended; orders that were sent before still arrive."""
        found = self._pushes.get((node, "cut"))
        if found is None:
            found = self.nodes(self.nodes.values[node]._replace(linked=False, up=()))
            self._pushes[node, "cut"] = found
        return found

    def _heard(self, node: int) -> int:
        """Return a node without the message that the coordinator has handled."""
        found = self._pushes.get((node, "heard"))
        if found is None:
            value: Node = self.nodes.values[node]
            found = self._pushes[node, "heard"] = self.nodes(value._replace(up=value.up[1:]))
        return found

    def _taken_over(self, world: World) -> tuple[str, World, int]:
        journal: Journal = self.journals.values[world.journal]
        boot, begun, wanted = journal.crashed
        s = self.setting
        fleet = Fleet(
            boot=boot + 1,
            live=journal.live,
            known=(False, False),
            absent=frozenset((node, index, 0) for node in range(2) for index in range(2)),
            begun=begun,
            wanted=wanted,
            controlled=s.controlled,
            in_place=s.mode.in_place,
            early=s.early,
        )
        after = self.journals(journal._replace(crashed=(0, 0, 0)))
        return "a standby takes over", World(self.fleets(fleet), after, world.nodes, world.faults), 0
