"""Choose the poll in which each rank of a replica flips: before one step of the engine, from the ranks' poll counts.

Each rank answers a decision with its poll count, and waits in its next poll for FlipAt. Two things identify one point
on all ranks of a lockstep replica:

*A count from a common origin*: the caller's own step, or the version that all ranks last committed together. The ranks
flip in the first poll that no rank has passed:

    rank 0 has polled 41 times, rank 1 42 times  ->  both flip in their poll 43

*All ranks waiting in a poll together.* A new replica has no common origin, and neither has a rank that returned alone.
Counts far apart do not count the same steps. But no rank can end a step before every rank has begun it. So if all ranks
wait in a poll, they are before the same step: they flip there, and count from there.

A rank in `wait` flips immediately, before its next poll. If another rank has begun the step after that poll, the common
origin does not help: they flip once all of them wait, or once that rank has left its `wait`.

A daemon chooses the point for a replica whose ranks are all on its node and have one (`refitd.daemon.commits`); the
coordinator chooses it for all other replicas (`FlipSteps`). A rank that got the decision inside a step cannot flip yet:
the waiting ranks are released for one poll, and all meet in the next.

    rank 0 waits in poll 7, rank 1 is in the step after it  ->  rank 0 passes  ->  both wait before the next step

A rank that does not answer may be in any step. The others wait until it answers or leaves. After
`client.commit_state.IN_STEP_S` they drop the version and serve none, rather than flip apart. They wait for a rank that
was lost with its node until its permit has ended. That rank serves no version from its next poll on, so the others end
one more step with it, and flip before the next. The same is true for a rank that has returned without the version.

If a replica serves no version yet, each of its ranks flips in its next poll: no step can see two versions. Ranks that
never meet (several polled by one thread, say) do the same, and the log and the swap's report name them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from refitd.protocol.cluster import AddShard

# The origin of polls that are counted by the caller, from 1 for its step 0: all ranks have the same numbers.
CALLERS_STEP = "step"

# Poll counts further apart do not count the same steps: pipelines have fewer steps in flight.
LOCKSTEP = 16


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a rank has polled."""

    step: int  # the number of its last poll
    origin: str = ""  # the event from which it counts
    stands: str = ""  # "poll": held in poll `step`; "wait": blocked in wait(), and computes no step
    thread: tuple[str, int, int] | None = None  # the (node, process, thread) that polls it

    @property
    def earliest(self) -> int:
        """The first poll where the rank can flip. A waiting rank has begun the step of its last poll."""
        return self.step if self.stands == "poll" else self.step + 1


def meeting(said: Mapping[str, Reached]) -> dict[str, int] | None:
    """Return the poll where each rank flips, one point for all; None while that point is unknown."""
    polls = {who: where.earliest for who, where in said.items()}
    steps = [where.step for where in said.values()]
    origins = {where.origin for where in said.values()}
    point = max(polls.values())
    is_too_early = any(where.stands == "wait" and where.earliest < point for where in said.values())
    is_counted = len(origins) == 1 and ("" not in origins or in_turn(said)) and not is_too_early
    if len(said) == 1 or (is_counted and (CALLERS_STEP in origins or max(steps) - min(steps) <= LOCKSTEP)):
        return dict.fromkeys(said, point)
    return polls if all(where.stands for where in said.values()) else None


def meeting_late(where: Reached, told: Mapping[str, int]) -> int | None:
    """Return the poll where a late rank flips together with the others; None if it has passed their point.

    Args:
        where: how far the rank has polled.
        told: the poll where the others flip, by the origin of their counts.
    """
    point = told.get(where.origin)
    if (
        point is None
        or not where.origin
        or where.earliest > point
        or (where.stands == "wait" and where.earliest < point)
    ):
        return None
    # the others have begun the step before
    return point if where.origin == CALLERS_STEP or point - 1 - where.step <= LOCKSTEP else None


def in_turn(said: Mapping[str, Reached]) -> bool:
    """Whether one thread polls several ranks: they can never all wait in a poll together."""
    threads = Counter(where.thread for where in said.values() if where.thread is not None)
    return any(count > 1 for count in threads.values())


# --- the coordinator's choice -----------------------------------------------------------------------------

# The shortest wait for a rank that is not registered: it may not have reached a new coordinator yet. The log names a
# registered rank that has not answered for this long.
MISSING_S = 3.0

# How long standing ranks wait for the others; doubled in each round.
PATIENCE_S = 0.1
ROUNDS = 5  # 3.1 s in all


class Rank(Protocol):
    """A target rank, as the coordinator knows it."""

    added: AddShard
    version: int | None  # served

    @property
    def id(self) -> str:
        """The id that its daemon gave it."""

    @property
    def node(self) -> str:
        """The node where it runs."""

    @property
    def staged(self) -> str | None:
        """The decided swap that it has not committed."""

    @property
    def staged_version(self) -> int | None:
        """The version of that swap."""

    @property
    def in_lockstep(self) -> bool:
        """Whether it commits in the same poll as the other ranks of its replica."""


@dataclass(frozen=True, slots=True)
class CommitAtStep:
    """Order: the member commits in its poll `step`; all ranks then count from there (`origin`)."""

    swap: str
    member: Rank
    step: int
    origin: str = ""
    apart: str = ""  # why the other ranks may flip at another point


@dataclass(frozen=True, slots=True)
class Pass:
    """Order: the member leaves its poll with its present version, and waits in the next poll."""

    swap: str
    member: Rank


@dataclass(frozen=True, slots=True)
class Silent:
    """A note for the log: a member has not answered; the other ranks of its replica wait for it."""

    swap: str
    member: Rank


Order = CommitAtStep | Pass | Silent


@dataclass(slots=True)
class _Waiting:
    since: float
    changed: float  # when a rank last reported, or was let through
    said: dict[str, Reached] = field(default_factory=dict)  # by member
    rounds: int = 0  # how often standing ranks were let through
    flips: dict[str, CommitAtStep] | None = None  # the orders, once known
    told: dict[str, int] = field(default_factory=dict)  # the poll that ranks were told, by the origin of their count
    asked: set[str] = field(default_factory=set)  # ranks that have reported since
    named: set[str] = field(default_factory=set)  # ranks that were named as silent
    has_passed: bool = False  # waiting ranks were released once, because a rank is lost
    due_at: float | None = None


class FlipSteps:
    """Poll counts of one model's ranks while a decided version waits to be committed."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[str, str], _Waiting] = {}  # by swap and replica

    def reached(self, swap: str, member: Rank, where: Reached, now: float) -> None:
        """Record how far a rank has polled."""
        waiting = self.waiting.setdefault((swap, member.added.replica), _Waiting(now, now))
        waiting.said[member.id] = where
        waiting.changed = now
        waiting.asked.add(member.id)

    def next_deadline(self) -> float | None:
        """Return when `due` must be called without a new event; None: never."""
        return min((w.due_at for w in self.waiting.values() if w.due_at is not None), default=None)

    def due(self, targets: Iterable[Rank], now: float, absent: Mapping[str, float] | None = None) -> list[Order]:
        """Return the orders to send now.

        Args:
            targets: all target members of the model.
            now: the time, as given to `reached`.
            absent: by replica, until when a rank of it that is out of reach may serve what it served before.
        """
        replicas: dict[str, list[Rank]] = {}
        for member in targets if self.waiting else ():
            replicas.setdefault(member.added.replica, []).append(member)
        found: list[Order] = []
        for (swap, replica), waiting in list(self.waiting.items()):
            ranks = replicas.get(replica, [])
            concerned = {m.id: m for m in ranks if m.staged == swap and m.in_lockstep}
            said = {id_: where for id_, where in waiting.said.items() if id_ in concerned}
            waiting.due_at = None
            if waiting.flips is not None:
                if concerned:
                    found += self._again(swap, waiting, concerned, said)
                else:
                    del self.waiting[(swap, replica)]
            elif not said:  # they have left, or have committed
                if now >= waiting.since + MISSING_S:
                    del self.waiting[(swap, replica)]
            elif len(ranks) < ranks[0].added.world_size and now < (
                until := max(waiting.since + MISSING_S, (absent or {}).get(replica, 0.0))
            ):
                waiting.due_at = until
            elif len(said) < len(concerned) and now < waiting.since + MISSING_S:
                waiting.due_at = waiting.since + MISSING_S
            elif (silent := concerned.keys() - said.keys()) and any(m.version is not None for m in ranks):
                found += [Silent(swap, concerned[id_]) for id_ in sorted(silent - waiting.named)]
                waiting.named |= silent
            else:
                found += self._tell(swap, waiting, ranks, concerned, said, now)
        return found

    def _tell(
        self,
        swap: str,
        waiting: _Waiting,
        ranks: list[Rank],
        concerned: dict[str, Rank],
        said: dict[str, Reached],
        now: float,
    ) -> list[Order]:
        apart, steps = "", meeting(said)
        serves_nothing = all(member.version is None for member in ranks)
        if _lacks_one(ranks, concerned) and not in_turn(said) and not serves_nothing:
            # the lost rank may have begun the next step; these ranks end that step with it
            if not all(where.stands for where in said.values()):
                return []
            if not waiting.has_passed and (standing := _in_poll(said)):
                waiting.has_passed = True
                return self._let_through(swap, waiting, concerned, standing)
        if steps is None and not in_turn(said) and not serves_nothing:
            if not any(where.stands for where in said.values()):
                return []
            waiting.due_at = waiting.changed + PATIENCE_S * 2**waiting.rounds
            if now < waiting.due_at:
                return []
            waiting.rounds, waiting.changed = waiting.rounds + 1, now
            waiting.due_at = now + PATIENCE_S * 2**waiting.rounds
            if waiting.rounds < ROUNDS:
                return self._let_through(swap, waiting, concerned, _in_poll(said))
        waiting.due_at, is_together = None, steps is not None
        if steps is None:
            steps = {id_: where.earliest for id_, where in said.items()}
        if not is_together and not serves_nothing:
            counts = ", ".join(f"rank {concerned[id_].added.rank}: {where.step}" for id_, where in said.items())
            if in_turn(said):
                apart = apart or f"one thread polls several ranks, whose counts differ ({counts})"
            others = [concerned[id_] for id_, where in said.items() if not where.stands]
            apart = apart or f"{_named(others)} stood in no poll while others did, {ROUNDS} times (counts: {counts})"
        # only ranks that were all given the same poll share a new origin
        origin = swap if is_together and not apart and len(said) == len(ranks) == ranks[0].added.world_size else ""
        waiting.flips = {id_: CommitAtStep(swap, concerned[id_], step, origin, apart) for id_, step in steps.items()}
        polls: dict[str, set[int]] = {}
        for id_, step in steps.items():
            polls.setdefault(said[id_].origin, set()).add(step)
        waiting.told = {origin: found.pop() for origin, found in polls.items() if len(found) == 1}
        waiting.asked.clear()
        return list(waiting.flips.values())

    @staticmethod
    def _let_through(swap: str, waiting: _Waiting, concerned: dict[str, Rank], standing: list[str]) -> list[Order]:
        waiting.said |= {id_: replace(waiting.said[id_], stands="") for id_ in standing}
        return [Pass(swap, concerned[id_]) for id_ in standing]

    def _again(self, swap: str, waiting: _Waiting, concerned: dict[str, Rank], said: dict[str, Reached]) -> list[Order]:
        """Answer ranks that reported again, or too late."""
        assert waiting.flips is not None
        asked, waiting.asked = waiting.asked & said.keys(), set()
        found: list[Order] = [replace(waiting.flips[id_], apart="") for id_ in asked & waiting.flips.keys()]
        for id_ in asked - waiting.flips.keys():
            point = meeting_late(said[id_], waiting.told)
            late = "" if point is not None else "it said in which poll it is after the others had been told theirs"
            step = said[id_].earliest if point is None else point
            waiting.flips[id_] = CommitAtStep(swap, concerned[id_], step, apart=late)
            found.append(waiting.flips[id_])
        return found


def _lacks_one(ranks: list[Rank], concerned: Mapping[str, Rank]) -> bool:
    """Whether a rank of the replica is lost, or back with the version that it served before."""
    versions = {None, *(member.staged_version for member in concerned.values())}
    return len(ranks) < ranks[0].added.world_size or any(
        member.in_lockstep and member.id not in concerned and member.version not in versions for member in ranks
    )


def _in_poll(said: Mapping[str, Reached]) -> list[str]:
    """Return the ranks that are held in a poll."""
    return [id_ for id_, where in said.items() if where.stands == "poll"]


def _named(members: Iterable[Rank]) -> str:
    return ", ".join(f"rank {rank}" for rank in sorted(member.added.rank for member in members))
