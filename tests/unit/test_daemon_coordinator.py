"""A daemon and its coordinator, which may be absent, silent or new: messages, permits and polls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from refitd.commit.lockstep import LOCKSTEP
from refitd.commit.target_state import Step, TargetState
from refitd.daemon import actions as act
from refitd.daemon.actions import ToClient, ToCoordinator
from refitd.daemon.commits import LocalSteps
from refitd.daemon.effects import Effects
from refitd.errors import RefusedError, TransportError
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.states import Busy, Tick
from tests.support.daemon_harness import SHARD, TARGET, Harness


def test_a_coordinator_that_falls_silent_fails_what_waits_for_it() -> None:
    h = Harness()
    assert h.ask(local.StartSwap(model="m")) is None
    h.now = 6.0
    h.feed(Tick())
    (failure,) = [m for _, _, m in h.to_client if isinstance(m, local.Failure)]
    assert "has said nothing for 5 s" in failure.message
    assert isinstance(h.to_coordinator[-1], cluster.NodeUpdate | cluster.NodeHello)


def test_a_description_is_sent_once_per_layout_and_again_when_it_was_forgotten() -> None:
    h = Harness()
    for rank in range(3):
        registration = local.RegisterTarget(model="m", replica="r", rank=rank, world_size=3, shard=SHARD)
        assert isinstance(h.ask(registration), local.Registered)
    assert len(h.said(cluster.DescribeShard)) == 1
    assert len({m.digest for m in h.said(cluster.AddShard)}) == 1
    h.refuse_with = local.Failure(code="unknown-shard", message="forgotten")
    answer = h.ask(local.RegisterTarget(model="m", replica="q", rank=0, world_size=1, shard=SHARD))
    # it was described again, once; a coordinator that still does not know it refuses the registration
    assert len(h.said(cluster.DescribeShard)) == 2
    assert answer == h.refuse_with


def test_what_was_being_staged_is_forgotten_when_a_coordinator_takes_the_node_back_in() -> None:
    h = Harness()
    source, _ = h.fleet()
    h.stage()
    h.feed(act.CoordinatorSaid(0, local.Failure(code="unknown-node", message="hello?")))
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="b")))
    assert h.restarted == [0, 1], "nothing is written for it any more"
    assert h.publish(source, 2) == local.Done() and h.publish(source, 3) == local.Done(), "and nothing holds a slot"


def test_a_daemon_says_what_it_was_told_is_live_to_a_coordinator_that_does_not_know_it() -> None:
    h = Harness()
    claim = cluster.LiveClaim("m", 4, "r", 9, "s", "journal", 4)
    h.feed(act.CoordinatorSaid(0, cluster.LiveIs(live=claim)))
    h.feed(act.CoordinatorSaid(0, local.Failure(code="unknown-node", message="who?")))
    assert h.said(cluster.NodeHello)[-1].live == (claim,)


def test_what_a_target_was_told_to_commit_is_said_to_the_next_coordinator() -> None:
    h = Harness()
    _, target = h.fleet()
    h.done(h.stage())
    h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap="s", version=1)))
    h.to_coordinator.clear()
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="another")))
    told = {m.member: m for m in h.said(cluster.AddShard)}
    assert (told[target].staged, told[target].staged_version, told[target].committing) == ("s", 1, True)


def test_a_daemon_that_was_busy_does_not_call_its_coordinator_silent() -> None:
    h = Harness()
    h.now = 6.0
    h.feed(Busy(5.5), Tick())
    assert h.daemon.link.is_up
    h.feed(act.CoordinatorSaid(0, local.Done()), Busy(5.5))  # earlier busy time does not extend the deadline
    h.now = 12.0
    h.feed(Tick())
    assert not h.daemon.link.is_up


# --- Permits of a node's ranks while coordinators come and go. ------------------------------------------


LEASE_S = 20.0


def welcome(boot: str) -> cluster.NodeWelcome:
    return cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot=boot, lease_s=LEASE_S)


class Node(Harness):
    """A node with one target that serves version 1, and the expiry of the target's permit."""

    def __init__(self) -> None:
        self.until = -1.0
        self.is_silent = False  # the coordinator
        self.unanswered: list[int] = []  # numbers of requests that it did not answer
        super().__init__()
        self.feed(act.CoordinatorSaid(0, welcome("first")))
        (_, target) = self.fleet()
        self.member = target
        self.done(self.stage())
        self.commit(target)
        self.beat(0.0)
        assert self.until == LEASE_S

    def handle(self, event: act.Event) -> list[act.Instruction]:
        done = super().handle(event)
        for one in done:
            if isinstance(one, act.SetPermit):
                self.until = one.until
        if self.is_silent:
            self.unanswered += [one.request for one in done if isinstance(one, act.ToCoordinator) and one.request]
            done = [one for one in done if not isinstance(one, act.ToCoordinator)]
        return done

    def beat(self, now: float) -> None:
        """Let a second pass; the coordinator answers the heartbeat unless it is silent."""
        self.now = now
        self.feed(act.Tick())


def test_a_rank_serves_on_until_its_permit_ends_while_the_next_coordinator_admits_it() -> None:
    node = Node()
    node.is_silent = True
    node.beat(0.5)
    node.feed(act.CoordinatorSaid(node.unanswered[-1], welcome("second")))  # the answer about the rank is on its way
    for now in (1.0, 2.0, 3.0):
        node.beat(now)
        assert node.until == LEASE_S, "neither revoked nor prolonged by a coordinator that does not know the rank"
    node.is_silent = False
    node.feed(act.CoordinatorSaid(0, welcome("third")))
    node.beat(4.0)
    assert node.until == 4.0 + LEASE_S


def test_a_rank_that_the_next_coordinator_refuses_serves_no_longer() -> None:
    node = Node()
    node.refuse_with = local.Failure(code=RefusedError.code, message="replica 'r' is not listed")
    node.feed(act.CoordinatorSaid(0, welcome("second")))
    assert node.until == 0.0
    node.refuse_with = None
    node.beat(1.0)
    assert node.until == 1.0 + LEASE_S, "it is announced again"


def test_a_rank_whose_announcement_was_lost_is_announced_again() -> None:
    node = Node()
    node.refuse_with = local.Failure(code=TransportError.code, message="lost on its way")
    node.feed(act.CoordinatorSaid(0, welcome("second")))
    assert node.until == LEASE_S
    node.refuse_with = None
    node.beat(1.0)
    assert node.until == 1.0 + LEASE_S


@pytest.mark.parametrize("reason", ["it holds version 1, and 2 is live"])
def test_a_fence_revokes_a_permit_of_the_previous_coordinator_for_good(reason: str) -> None:
    node = Node()
    node.is_silent = True
    node.feed(act.CoordinatorSaid(0, welcome("second")))
    node.feed(act.CoordinatorSaid(0, local.Fence(member=node.member, reason=reason)))
    assert node.until == 0.0
    node.beat(1.0)
    assert node.until == 0.0


def test_a_new_rank_has_no_permit_before_it_is_admitted() -> None:
    node = Node()
    node.is_silent = True
    node.ask(structs.replace(TARGET, replica="q"))
    assert node.until == 0.0


# --- Ranks in lockstep on one node: the daemon decides the poll where they flip. ------------------------


class Ranks:
    """The ranks of one replica on a node in the swap "s", and the messages about them."""

    def __init__(self, here: int, world: int) -> None:
        self.members: dict[str, Any] = {}
        for rank in range(here):
            request = local.RegisterTarget("m", "r", rank, world, TARGET.shard)
            state = TargetState(step=Step.COMMITTING, swap="s")
            self.members[f"r{rank}"] = SimpleNamespace(
                id=f"r{rank}",
                session=1,
                registration=SimpleNamespace(request=request, pid=100 + rank),
                state=state,
            )
        self.told: list[local.FlipAt] = []
        self.handed_over: list[local.StepReached] = []
        self.steps = LocalSteps(self.members)

    def say(self, rank: int, step: int, origin: str = "before", stands: str = "", thread: int = 0) -> None:
        said = local.StepReached("s", f"r{rank}", step, origin, stands, thread)
        effects = Effects(0.0)
        self.steps.reached(effects, self.members[f"r{rank}"], said)
        self._sort(effects)

    def tick(self) -> None:
        effects = Effects(0.0)
        self.steps.tick(effects)
        self._sort(effects)

    def _sort(self, effects: Effects) -> None:
        """Record the messages to ranks and to the coordinator."""
        for do in effects:
            if isinstance(do, ToClient):
                assert isinstance(do.message, local.FlipAt)
                self.told.append(do.message)
            else:
                assert isinstance(do, ToCoordinator) and isinstance(do.message, local.StepReached)
                self.handed_over.append(do.message)


def test_ranks_with_counts_from_one_origin_flip_in_the_poll_that_none_has_passed() -> None:
    ranks = Ranks(3, 3)
    ranks.say(0, 41), ranks.say(2, 41)
    assert not ranks.told
    ranks.say(1, 42)
    assert ranks.told == [local.FlipAt("s", f"r{rank}", 43, "s") for rank in (0, 2, 1)]
    assert not ranks.handed_over
    ranks.say(2, 42)  # asked again, by a coordinator that has just started
    assert ranks.told[3:] == [local.FlipAt("s", "r2", 43, "s")]


def test_ranks_of_a_replica_on_several_nodes_are_the_coordinators() -> None:
    ranks = Ranks(2, 4)
    ranks.say(0, 41), ranks.say(1, 41)
    assert len(ranks.handed_over) == 2, "a tick comes later"
    ranks.tick()
    assert not ranks.told and [said.member for said in ranks.handed_over] == ["r0", "r1"]


def test_ranks_that_have_no_common_point_yet_are_the_coordinators_from_then_on() -> None:
    for second in ((LOCKSTEP + 42, "before"), (41, "after")):
        ranks = Ranks(2, 2)
        ranks.say(0, 41), ranks.say(1, *second)
        assert not ranks.told and [said.member for said in ranks.handed_over] == ["r0", "r1"]
        ranks.say(0, 42, stands="poll")
        ranks.say(1, 9, stands="poll")
        assert not ranks.told and [said.step for said in ranks.handed_over[2:]] == [42, 9]


def test_a_rank_that_does_not_answer_or_has_gone_leaves_the_others_to_the_coordinator() -> None:
    for has_gone in (False, True):
        ranks = Ranks(2, 2)
        ranks.say(0, 41)
        if has_gone:
            del ranks.members["r1"]
        ranks.tick()
        assert not ranks.told and [said.member for said in ranks.handed_over] == ["r0"]
        ranks.tick()
        assert len(ranks.handed_over) == 1


def test_what_is_over_is_forgotten() -> None:
    ranks = Ranks(1, 1)
    ranks.say(0, 1)
    assert ranks.told
    ranks.members["r0"].state = TargetState()
    ranks.tick()
    assert not ranks.steps._replicas
