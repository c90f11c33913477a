"""Ranks in lockstep whose node settles among them in which poll they flip."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from refitd.daemon.lockstep import LocalSteps
from refitd.daemon.target_state import Step, TargetState
from refitd.lockstep import LOCKSTEP
from refitd.protocol import local
from tests.support.daemon_harness import TARGET


class Ranks:
    """The ranks of one replica on a node, in the swap "s", and what was said of them."""

    def __init__(self, here: int, world: int) -> None:
        self.members: dict[str, Any] = {}
        for rank in range(here):
            registration = local.RegisterTarget("m", "r", rank, world, TARGET.shard)
            state = TargetState(step=Step.COMMITTING, swap="s")
            self.members[f"r{rank}"] = SimpleNamespace(
                id=f"r{rank}", pid=100 + rank, registration=registration, state=state
            )
        self.told: list[local.FlipAt] = []
        self.handed_over: list[local.StepReached] = []
        self.steps = LocalSteps(
            self.members,
            lambda member, flip: self.told.append(flip),
            lambda member, said: self.handed_over.append(said),
        )

    def say(self, rank: int, step: int, origin: str = "before", stands: str = "", thread: int = 0) -> None:
        said = local.StepReached("s", f"r{rank}", step, origin, stands, thread)
        self.steps.reached(self.members[f"r{rank}"], said)


def test_ranks_with_counts_from_one_origin_flip_in_the_poll_that_none_has_passed() -> None:
    ranks = Ranks(3, 3)
    ranks.say(0, 41), ranks.say(2, 41)
    assert not ranks.told
    ranks.say(1, 42)
    assert ranks.told == [local.FlipAt("s", f"r{rank}", 43, "s") for rank in (0, 2, 1)]
    assert not ranks.handed_over
    ranks.say(2, 42)  # asked again, by a coordinator that has just started
    assert ranks.told[3:] == [local.FlipAt("s", "r2", 43, "s")]


def test_ranks_that_all_stand_flip_where_they_stand_whatever_they_have_counted() -> None:
    ranks = Ranks(2, 2)
    ranks.say(0, 7, "", "wait"), ranks.say(1, 900, "", "poll")
    assert [(flip.member, flip.step) for flip in ranks.told] == [("r0", 8), ("r1", 900)]


def test_a_rank_that_has_left_its_wait_does_not_stand() -> None:
    ranks = Ranks(2, 2)
    ranks.say(0, 7, "", "wait"), ranks.say(0, 7, "")
    ranks.say(1, 3, "", "wait")
    assert not ranks.told and [said.stands for said in ranks.handed_over] == ["", "wait"]


def test_ranks_of_a_replica_on_several_nodes_are_the_coordinators() -> None:
    ranks = Ranks(2, 4)
    ranks.say(0, 41), ranks.say(1, 41)
    ranks.steps.tick()
    assert not ranks.told and [said.member for said in ranks.handed_over] == ["r0", "r1"]


def test_ranks_that_have_no_common_point_yet_are_the_coordinators_from_then_on() -> None:
    for second in ((LOCKSTEP + 42, "before"), (41, "after")):
        ranks = Ranks(2, 2)
        ranks.say(0, 41), ranks.say(1, *second)
        assert not ranks.told and [said.member for said in ranks.handed_over] == ["r0", "r1"]
        ranks.say(0, 42, stands="poll")
        ranks.say(1, 9, stands="poll")
        assert not ranks.told and [said.step for said in ranks.handed_over[2:]] == [42, 9]


def test_one_thread_that_polls_all_ranks_flips_them_in_the_same_poll() -> None:
    ranks = Ranks(2, 2)
    for member in ranks.members.values():
        member.pid = 100
    ranks.say(0, 5, "", thread=9), ranks.say(1, 5, "", thread=9)
    assert [flip.step for flip in ranks.told] == [6, 6]


def test_a_rank_that_does_not_answer_or_has_gone_leaves_the_others_to_the_coordinator() -> None:
    for has_gone in (False, True):
        ranks = Ranks(2, 2)
        ranks.say(0, 41)
        if has_gone:
            del ranks.members["r1"]
        ranks.steps.tick()
        assert not ranks.told and [said.member for said in ranks.handed_over] == ["r0"]
        ranks.steps.tick()
        assert len(ranks.handed_over) == 1


def test_what_is_over_is_forgotten() -> None:
    ranks = Ranks(1, 1)
    ranks.say(0, 1)
    assert ranks.told
    ranks.members["r0"].state = TargetState()
    ranks.steps.tick()
    assert not ranks.steps._replicas
