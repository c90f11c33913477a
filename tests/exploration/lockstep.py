"""Explore two ranks of a replica that poll in lockstep: no step of their engine may see two versions.

The poll counters (`refitd.client.commit_state`) and the coordinator's choice of polls (`refitd.commit.lockstep`) are
the real ones. A step of the engine is collective: no rank ends it before both ranks have begun it.

    rank 0:  poll 1 | step 1 | poll 2 | step 2        step 2 is broken if rank 0 flips in poll 2
    rank 1:  poll 1 | step 1 | poll 2 | step 2        and rank 1 does not
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from refitd.client.commit_state import PollSteps
from refitd.commit.lockstep import CommitAtStep, FlipSteps, Pass, Reached
from tests.exploration.worlds import Found, Violation

LEASE_S = 10.0
FREE_STEPS = 3  # a message to a rank takes at most this many steps of its engine
MAX_STEPS = 12  # a version that is not live after so many steps never will be


class Polls(NamedTuple):
    """The subject of one exploration of polls."""

    before: tuple[int, int] = (0, 0)  # polls of each rank before the first decision
    is_numbered: bool = False  # the caller gives the numbers of its steps
    swaps: int = 1
    faults: int = 0  # how often the link of rank 1 may break
    is_prompt: bool = False  # patience only ends if nothing else can happen


class Added(NamedTuple):
    """What the coordinator knows of a rank's registration."""

    replica: str
    rank: int
    world_size: int


class Member(NamedTuple):
    """A rank, as the coordinator knows it."""

    id: str
    added: Added
    version: int | None
    staged: str | None
    staged_version: int | None
    in_lockstep: bool = True


class Rank(NamedTuple):
    """One rank. `polls` is its pickled counter."""

    polls: bytes
    version: int | None = 1
    begun: int = 0  # steps of the engine
    is_inside: bool = False  # a step
    is_held: bool = False  # in a poll
    pending: int = 0  # the decided version
    has_permit: bool = True
    down: tuple[tuple[Any, ...], ...] = ()
    up: tuple[tuple[Any, ...], ...] = ()


class World(NamedTuple):
    """A state: the ranks, and the coordinator with its pickled choice of polls."""

    ranks: tuple[Rank, Rank]
    members: tuple[Member, Member]
    known: tuple[bool, bool]
    choice: bytes
    now: float
    absent_until: float
    version: int  # decided last
    faults: int
    is_apart: bool = False  # the coordinator has given up and said so; or has let a rank pass whose steps are numbered


class PollExploration:
    """One exploration; `run` does it."""

    def __init__(self, setting: Polls) -> None:
        self.setting = setting
        self._parents: dict[World, tuple[World, str] | None] = {}

    def first(self) -> World:
        """Return the first world: a version is decided, and both ranks serve version 1."""
        ranks = []
        for before in self.setting.before:
            polls = PollSteps()
            for number in range(before):
                polls.count(number if self.setting.is_numbered else None)
            ranks.append(Rank(pickle.dumps(polls), begun=0))
        members = tuple(Member(f"m{n}", Added("a", n, 2), 1, None, None) for n in range(2))
        world = World(
            (ranks[0], ranks[1]),
            (members[0], members[1]),
            (True, True),
            pickle.dumps(FlipSteps()),
            0.0,
            0.0,
            1,
            self.setting.faults,
        )
        return self._decided(world)

    def run(self) -> Found:
        """Explore everything.

        Raises:
            Violation: an order of events breaks a rule; it is a shortest one.
        """
        began, first = time.monotonic(), self.first()
        self._parents[first] = None
        queue, transitions, ends = deque([first]), 0, 0
        while queue:
            world = queue.popleft()
            if world.is_apart:
                continue
            is_end = True
            for name, after in self.events(world):
                transitions += 1
                is_end = False
                if after not in self._parents:
                    self._parents[after] = (world, name)
                    self.check(after)
                    queue.append(after)
            if is_end:
                ends += 1
                there = [n for n in range(2) if world.known[n]]
                if any(world.ranks[n].pending or world.members[n].staged for n in there):
                    raise self._violation("a rank waits, and no answer can come", world)
        return Found(len(self._parents), transitions, ends, time.monotonic() - began)

    def check(self, world: World) -> None:
        """Check the rules of every world.

        Raises:
            Violation: one is broken.
        """
        one, two = world.ranks
        served = [r.version if r.has_permit else None for r in world.ranks]
        same_step = one.is_inside and two.is_inside and one.begun == two.begun
        if same_step and None not in served and served[0] != served[1]:
            raise self._violation(f"step {one.begun} sees versions {served[0]} and {served[1]}", world)
        if one.begun > MAX_STEPS:
            raise self._violation(f"version {world.version} is not live after {one.begun} steps", world)
        if world.is_apart and self.setting.is_prompt and not self.setting.faults:
            raise self._violation("the ranks do not flip where they meet", world)

    def _violation(self, reason: str, world: World) -> Violation:
        trace, parent = list[str](), self._parents[world]
        while parent is not None:
            trace.append(parent[1])
            parent = self._parents[parent[0]]
        return Violation(reason, trace[::-1])

    # --- what may happen ----------------------------------------------------------------------------------

    def events(self, world: World) -> Iterator[tuple[str, World]]:
        """Yield what may happen."""
        found = [*self._of_ranks(world), *self._of_coordinator(world)]
        yield from found
        due_at = pickle.loads(world.choice).next_deadline()
        if due_at is not None and not (self.setting.is_prompt and found):
            yield "time passes", self._look(_at(world, due_at))
        elif not all(world.known) and world.ranks[1].has_permit and not (self.setting.is_prompt and found):
            yield "the permit of rank 1 ends", self._look(_at(world, world.absent_until))
        if world.faults and all(world.known):
            lost = world.ranks[1]._replace(up=(), down=())
            cut = _with(world, 1, lost)._replace(
                known=(True, False), faults=world.faults - 1, absent_until=world.now + LEASE_S
            )
            yield "the link of rank 1 breaks", self._look(cut)

    def _of_ranks(self, world: World) -> Iterator[tuple[str, World]]:
        for n, rank in enumerate(world.ranks):
            other = world.ranks[1 - n]
            if rank.down:
                yield f"rank {n} hears {rank.down[0]}", _with(world, n, self._told(n, rank))
            if rank.is_held:
                if not world.known[n] and not rank.has_permit:
                    gives_up = rank._replace(is_held=False, pending=0, version=None)
                    yield f"rank {n} gives up", _with(world, n, _begun(gives_up))
            elif rank.is_inside:
                if other.begun >= rank.begun:
                    yield f"rank {n} ends step {rank.begun}", _with(world, n, rank._replace(is_inside=False))
            elif rank.begun < FREE_STEPS or rank.pending or (other.pending and not rank.down):
                yield f"rank {n} polls", _with(world, n, self._polled(n, rank))

    def _polled(self, n: int, rank: Rank) -> Rank:
        polls: PollSteps = pickle.loads(rank.polls)
        polls.count(rank.begun + self.setting.before[n] if self.setting.is_numbered else None)
        if not rank.pending:
            return _begun(rank._replace(polls=pickle.dumps(polls)))
        if polls.flip_at is None:
            said = polls.reached(f"s{rank.pending}", f"m{n}", "poll")
            return rank._replace(polls=pickle.dumps(polls), is_held=True, up=(*rank.up, ("reached", said)))
        return self._leaves(rank, polls)

    def _leaves(self, rank: Rank, polls: PollSteps) -> Rank:
        """Return the rank once its poll returns: with the pending version, if it is due there."""
        if polls.is_due():
            swap, version = f"s{rank.pending}", rank.pending
            polls.flipped()
            rank = rank._replace(version=version, pending=0, up=(*rank.up, ("committed", swap, version)))
        return _begun(rank._replace(polls=pickle.dumps(polls), is_held=False))

    def _told(self, n: int, rank: Rank) -> Rank:
        message, rank = rank.down[0], rank._replace(down=rank.down[1:])
        polls: PollSteps = pickle.loads(rank.polls)
        match message:
            case ("decided", version):
                polls.decided()
                said = polls.reached(f"s{version}", f"m{n}")
                return rank._replace(pending=version, polls=pickle.dumps(polls), up=(*rank.up, ("reached", said)))
            case ("flip", version, step, origin) if rank.pending == version:
                polls.flip(step, origin)
            case ("pass", version) if rank.pending == version:
                polls.passed()
            case _:
                return rank
        return self._leaves(rank, polls) if rank.is_held else rank._replace(polls=pickle.dumps(polls))

    # --- the coordinator ----------------------------------------------------------------------------------

    def _decided(self, world: World) -> World:
        version = world.version + 1
        one, two = (m._replace(staged=f"s{version}", staged_version=version) for m in world.members)
        world = world._replace(version=version, members=(one, two))
        for n in range(2):
            world = _sent(world, n, ("decided", version))
        return world

    def _of_coordinator(self, world: World) -> Iterator[tuple[str, World]]:
        for n, rank in enumerate(world.ranks):
            if rank.up and world.known[n]:
                after = _with(world, n, rank._replace(up=rank.up[1:]))
                yield f"the coordinator hears rank {n}: {rank.up[0]}", self._look(self._heard(after, n, rank.up[0]))
        if (
            world.version <= self.setting.swaps
            and all(world.known)
            and not any(member.staged for member in world.members)
        ):
            yield "the next version is decided", self._decided(world)

    def _heard(self, world: World, n: int, message: tuple[Any, ...]) -> World:
        member = world.members[n]
        match message:
            case ("reached", said) if member.staged == said.swap:
                choice: FlipSteps = pickle.loads(world.choice)
                thread: Any = f"n{n}", n, said.thread
                choice.reached(said.swap, _any(member), Reached(said.step, said.origin, said.stands, thread), world.now)
                return world._replace(choice=pickle.dumps(choice))
            case ("committed", swap, version) if member.staged == swap:
                member = member._replace(staged=None, staged_version=None, version=version)
                return world._replace(members=(member, world.members[1]) if n == 0 else (world.members[0], member))
        return world

    def _look(self, world: World) -> World:
        """Send the orders that are due."""
        choice: FlipSteps = pickle.loads(world.choice)
        there = [_any(member) for n, member in enumerate(world.members) if world.known[n]]
        absent = {} if all(world.known) or world.now >= world.absent_until else {"a": world.absent_until}
        orders = choice.due(there, world.now, absent)
        world = world._replace(choice=pickle.dumps(choice))
        for order in orders:
            n, version = order.member.added.rank, int(order.swap[1:])
            if isinstance(order, CommitAtStep):
                world = _sent(world, n, ("flip", version, order.step, order.origin))
                world = world._replace(is_apart=world.is_apart or bool(order.apart))
            elif isinstance(order, Pass):
                world = _sent(world, n, ("pass", version))
                world = world._replace(is_apart=world.is_apart or self.setting.is_numbered)
        return world


def _any(member: Member) -> Any:
    """Return a member as the coordinator's own type: it has the attributes that the choice of polls reads."""
    return member


def _with(world: World, n: int, rank: Rank) -> World:
    return world._replace(ranks=(rank, world.ranks[1]) if n == 0 else (world.ranks[0], rank))


def _sent(world: World, n: int, message: tuple[Any, ...]) -> World:
    if not world.known[n]:
        return world
    return _with(world, n, world.ranks[n]._replace(down=(*world.ranks[n].down, message)))


def _begun(rank: Rank) -> Rank:
    return rank._replace(begun=rank.begun + 1, is_inside=True)


def _at(world: World, now: float) -> World:
    """Return the world at a later time; the permit of a lost rank may have ended."""
    world = world._replace(now=max(world.now, now))
    has_ended = not all(world.known) and world.now >= world.absent_until
    return _with(world, 1, world.ranks[1]._replace(has_permit=False)) if has_ended else world


POLLS = {
    "ranks with equal counts": Polls(),
    "ranks with different counts": Polls(before=(1, 3), is_prompt=True),
    "steps numbered by the caller": Polls(is_numbered=True, is_prompt=True),
    "two versions, counted from the first one": Polls(swaps=2, is_prompt=True),
    "a rank whose link breaks": Polls(faults=1, is_prompt=True),
}
