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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

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
