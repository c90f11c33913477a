"""The poll in which the ranks of a replica flip, from how far each has polled: before the same step on all of them.

Each rank answers a decision with its poll count, and holds at its next poll until it is told where to flip. Two things
identify one point on all ranks of a lockstep replica:

*A count from a common origin*: the caller's own step, or the version that all ranks last committed together. The ranks
flip in the first poll that no rank has passed:

    rank 0 has polled 41 times, rank 1 42 times  ->  both flip in their poll 43

*All ranks standing in a poll at once.* A new replica has no common origin, nor has a rank that returned alone; counts
that lie far apart do not count the same steps. But no rank can end a step that another has not begun. So if all ranks
stand in a poll, they stand before the same step: they flip there, and count from there.

A rank in `wait` flips at once, which is before its next poll. If another rank has begun the step after that, only the
second holds: they flip once all stand, or once it has left its `wait`.
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
    origin: str = ""  # what it counts from
    stands: str = ""  # "poll": held in poll `step`; "wait": blocked in wait(), computes nothing
    thread: tuple[str, int, int] | None = None  # the (node, process, thread) that polls it

    @property
    def earliest(self) -> int:
        """The first poll in which the rank can flip; one that waits has begun the step of its last one."""
        return self.step if self.stands == "poll" else self.step + 1


def meeting(said: Mapping[str, Reached]) -> dict[str, int] | None:
    """Return the poll in which each rank flips, the same point for all; None if no such point is known yet."""
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
    """Return the poll in which a rank flips that answers when others have been told; None if it cannot be theirs.

    Args:
        where: how far the rank has polled.
        told: the poll in which others flip, by the origin from which they count.
    """
    point = told.get(where.origin)
    if (
        point is None
        or not where.origin
        or where.earliest > point
        or (where.stands == "wait" and where.earliest < point)
    ):
        return None
    # those that were told have begun the step before
    return point if where.origin == CALLERS_STEP or point - 1 - where.step <= LOCKSTEP else None


def in_turn(said: Mapping[str, Reached]) -> bool:
    """Whether one thread polls several ranks, so that they can never all stand in a poll at once."""
    threads = Counter(where.thread for where in said.values() if where.thread is not None)
    return any(count > 1 for count in threads.values())
