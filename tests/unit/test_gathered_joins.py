"""Replicas that join within a moment are caught up together: the cables carry the version once for all of them."""

from __future__ import annotations

from refitd import ParameterMetadata
from refitd.coordinator.schedule import GATHER_AT_MOST_S, GATHER_S
from refitd.protocol import cluster, local, shards
from refitd.protocol.codec import digest_of, pack
from tests.support.coordinator_harness import Harness

SHAPE = (8192, 8192)


class Fleet(Harness):
    """A source on n0 and a replica on n1 that serves its version 1, of 128 MiB."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(4):
            self.join(f"n{number}", pid=10 + number, workers=(1,))
        self.register("src", "n0")
        self.register("a", "n1")
        self.say("n0", cluster.ShardPublished(member="src", version=1), request=4)
        self.say("n0", local.StartSwap("m"), request=9)
        self.finish({"a": "n1"})

    def register(self, member: str, node: str) -> None:
        shard = shards.shard_of([ParameterMetadata("w", SHAPE, "bfloat16", 2, resolved_name="w")])
        self.say(node, cluster.DescribeShard(digest=digest_of(shard), packed=pack(shard)))
        self.add(member, node, digest=digest_of(shard))

    def loads(self) -> dict[str, cluster.LoadPlan]:
        return {node: message for node, _, message in self.sent if isinstance(message, cluster.LoadPlan)}

    def finish(self, members: dict[str, str]) -> None:
        loads, running = self.loads(), self.state.models["m"].running
        assert running is not None
        swap = running.swap.swap
        for node, load in loads.items():
            epoch = load.epoch.id if load.epoch is not None else ""
            self.say(node, cluster.PlanLoaded(plan=load.plan, epoch=epoch))
        for node in loads:
            self.say(node, cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
        for member, node in members.items():
            self.say(node, cluster.MemberCommitted(swap, member, 0.0, seeds=True))

    def at(self, now: float) -> set[str]:
        """Let the time be `now`; return the replicas of the catch-up that this has begun."""
        self.now = now
        self.tick()
        running = self.state.models["m"].running
        return set() if running is None else {replica for replica, _ in running.membership.targets}


def test_those_that_join_within_a_moment_are_caught_up_together() -> None:
    h = Fleet()
    h.register("b", "n2")
    assert not h.loads()
    assert h.state.next_deadline() == GATHER_S
    assert h.at(0.6 * GATHER_S) == set()
    h.register("c", "n3")
    assert h.at(1.5 * GATHER_S) == set()
    assert h.at(1.6 * GATHER_S) == {"b", "c"}
    assert h.loads().keys() == {"n1", "n2", "n3"}
    h.finish({"b": "n2", "c": "n3"})
    fleet = h.state.models["m"].membership
    assert [fleet.targets[name, 0].version for name in "abc"] == [1, 1, 1]
    assert h.state.models["m"].running is None and h.state.models["m"].gathers_until is None


def test_nobody_waits_for_others_without_end() -> None:
    h = Fleet()
    joined = 0
    while not h.at(0.9 * GATHER_S * joined):
        h.register(f"r{joined}", "n2")
        joined += 1
    assert GATHER_AT_MOST_S <= h.now < GATHER_AT_MOST_S + GATHER_S


def test_a_swap_that_is_asked_for_does_not_wait_for_those_that_join() -> None:
    h = Fleet()
    h.register("b", "n2")
    h.say("n0", cluster.ShardPublished(member="src", version=2), request=4)
    h.say("n0", local.StartSwap("m"), request=9)
    assert h.at(0.0) == {"a", "b"} and h.state.models["m"].gathers_until is None


def test_a_replica_that_leaves_meanwhile_is_forgotten() -> None:
    h = Fleet()
    h.register("b", "n2")
    h.say("n2", cluster.RemoveShard(member="b", reason="gone"))
    assert h.at(2 * GATHER_S) == set() and h.state.models["m"].gathers_until is None
