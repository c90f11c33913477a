"""Catch-ups: which replicas seed them, and who is caught up together."""

from __future__ import annotations

import pytest

from refitd import ParameterMetadata
from refitd.coordinator.descriptions import Described
from refitd.coordinator.schedule import GATHER_AT_MOST_S, GATHER_S
from refitd.protocol import cluster, local, shards
from refitd.protocol.base import digest_of, pack
from tests.support.coordinator_harness import Harness, kinds, reports, stages


def serving(*seeds: tuple[str, str]) -> Harness:
    """Return a fleet where these (replica, node) serve version 1 of a source from an arena."""
    h = Harness()
    for number in range(3):
        h.join(f"n{number}", pid=10 + number, workers=(1,))
    h.add("src", "n0")
    for member, node in seeds:
        h.add(member, node)
    h.say("n0", local.Publish(member="src", version=1), request=4)
    h.say("n0", local.StartSwap("m"), request=9)
    finish(h, dict(seeds))
    return h


def loads(h: Harness) -> dict[str, cluster.LoadPlan]:
    """The plans that were sent last, by node."""
    return {node: message for node, _, message in h.sent if isinstance(message, cluster.LoadPlan)}


def begun(h: Harness) -> str:
    """Let every node load the plan; return the swap that is staged."""
    found: list[object] = []
    for node, load in loads(h).items():
        epoch = load.epoch.id if load.epoch is not None else ""
        found += h.say(node, cluster.PlanLoaded(plan=load.plan, epoch=epoch))
    return stages(found)[0].swap


def finish(h: Harness, members: dict[str, str]) -> None:
    """Commit the current swap everywhere."""
    there = loads(h)
    swap = begun(h)
    for node in there:
        h.say(node, cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    for member, node in members.items():
        h.say(node, local.CommitDone(swap, member, 0.0, seeds=True))


def read(h: Harness) -> set[str]:
    """Return the members that the last plans read."""
    found = set()
    for load in loads(h).values():
        said = h.shares.open(load)
        names = dict(zip(said.ranks, said.members, strict=True))
        assert not any(names[rank].startswith("src") for rank in said.seeds)
        found |= {names[rank] for rank in said.seeds} or {name for name in names.values() if name.startswith("src")}
    return found


def test_a_replica_that_joins_is_seeded_and_no_source_hears_of_it() -> None:
    h = serving(("a", "n1"))
    h.add("b", "n2")
    assert loads(h).keys() == {"n1", "n2"} and read(h) == {"a"}
    there = loads(h)
    swap = begun(h)
    assert h.state.models["m"].running is not None
    assert h.state.models["m"].running.sources[0].replica == "a"
    told: list[tuple[str, str]] = []
    for node in there:
        h.say(node, cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
        told += [(kind, to) for to, _, m in h.sent if (kind := type(m).__name__) in ("EndSwap", "CommitStaged")]
    assert told == [("EndSwap", "n1"), ("CommitStaged", "n2")], "the source's versions are as they were"
    h.say("n2", local.CommitDone(swap, "b", 0.0, seeds=True))
    assert h.state.models["m"].last.seeds == ("a",)  # type: ignore[union-attr]
    assert [m.replica for m in h.state.models["m"].last.members] == ["b"]  # type: ignore[union-attr]


def test_seeds_on_the_nodes_of_those_that_join_come_first_and_sources_there_before_seeds_elsewhere() -> None:
    h = serving(("a", "n1"), ("b", "n2"))
    h.add("c", "n2")
    assert read(h) == {"b"} and loads(h).keys() == {"n2"}
    h = serving(("a", "n1"))
    h.add("b", "n0")
    assert read(h) == {"src"} and loads(h).keys() == {"n0"}


def test_a_seed_that_fails_is_done_without_at_once() -> None:
    h = serving(("a", "n1"), ("b", "n1"))
    h.add("c", "n2")
    first = read(h)
    swap = begun(h)
    h.say("n1", cluster.StageDone(swap=swap, where=min(first), reason="its memory has changed"))
    second = read(h)
    assert first | second == {"a", "b"} and not first & second
    report = h.state.models["m"].last
    assert report is not None and f"replica {min(first)!r} rank 0 (node n1, host h, pid 5): its memory" in report.reason
    h.say("n1", local.Deregister(member=min(second), reason="its process has ended"))
    assert read(h) == {"src"}, "nobody else is left"
    assert not reports(h.tick())


def test_a_seed_that_the_plan_does_not_need_may_leave() -> None:
    h = serving(("a", "n1"), ("b", "n1"))
    h.add("c", "n2")
    (used,) = read(h)  # there is one tensor
    swap = begun(h)
    other = "b" if used == "a" else "a"
    h.say("n1", local.Deregister(member=other, reason="its process has ended"))
    assert h.state.models["m"].running is not None and h.state.models["m"].running.swap.swap == swap


def test_a_catch_up_that_fails_for_another_reason_is_tried_again_from_the_sources() -> None:
    h = serving(("a", "n1"))
    h.add("b", "n2")
    swap = begun(h)
    h.say("n2", cluster.StageDone(swap=swap, where="worker 0 on node n2", reason="it broke"))
    assert h.state.models["m"].running is None
    h.now = 4.0
    h.tick()
    assert read(h) == {"src"}


def test_copying_replicas_seed_nobody_once_something_else_was_staged() -> None:
    h = serving(("a", "n1"))
    h.say("n0", local.Publish(member="src", version=2), request=4)
    (stage, _) = stages(h.say("n0", local.StartSwap("m"), request=9))
    h.say("n1", cluster.StageDone(swap=stage.swap, where="w", reason="it broke"))
    h.add("b", "n2")
    assert read(h) == {"src"}


@pytest.mark.parametrize("what", ["suspended", "observes", "converted", "staged", "another dtype", "not whole"])
def test_who_cannot_seed(what: str) -> None:
    h = serving(("a", "n1"))
    member = h.state.models["m"].membership.targets["a", 0]
    match what:
        case "suspended":
            h.say("n1", local.Suspend(member="a", suspended=True), request=5)
        case "observes":
            h.say("n1", local.Deregister(member="a", reason="it registers anew"))
            h.add("a", "n1", version=1, run="run1", seeds=True, observes=True)
        case "converted":
            h.say("n1", local.Deregister(member="a", reason="it registers anew"))
            h.add("a", "n1", version=1, run="run1")
        case "staged":
            member.pending = "late", 1
        case "not whole":
            h.say("n1", local.Deregister(member="a", reason="it registers anew"))
            h.add("a", "n1", version=1, run="run1", seeds=True, world_size=2)
    if what != "another dtype":
        h.add("b", "n2")
        assert read(h) == {"src"}
        return
    shard = shards.shard_of([ParameterMetadata("w", (4, 4), "float32", 4, resolved_name="w", cast_from="bfloat16")])
    h.say("n2", cluster.DescribeShard(digest=digest_of(shard), packed=pack(shard)))
    h.say("n2", cluster.AddShard("b", "m", "target", "b", 0, 1, 5, digest_of(shard)), request=3)
    assert read(h) == {"src"}


def test_whom_nobody_can_give_the_live_version_is_named_with_what_is_missing() -> None:
    h = serving(("a", "n1"))
    h.say("n0", local.Deregister(member="src", reason="gone"))
    assert not h.unbegun
    shard = shards.shard_of([ParameterMetadata("w", (4, 4), "float32", 4, resolved_name="w", cast_from="bfloat16")])
    h.say("n2", cluster.DescribeShard(digest=digest_of(shard), packed=pack(shard)))
    h.say("n2", cluster.AddShard("b", "m", "target", "b", 0, 1, 5, digest_of(shard)), request=3)
    (said,) = h.unbegun
    assert isinstance(said, str)
    assert (
        "nobody gives version 1, which is live, to 'b': it has no sources, and 'a' can give it to none of them" in said
    )
    assert said.endswith("publish and swap a newer version")
    h.tick()
    assert len(h.unbegun) == 1, "it is said once"


def test_seeds_that_no_plan_fits_are_not_asked_again() -> None:
    """Descriptions of a tensor may agree although its holders lack elements."""
    h = serving(("a", "n1"))
    fleet = h.state.models["m"].membership
    part = ParameterMetadata("w", (2, 4), "bfloat16", 2, resolved_name="w", is_tp=True)
    part.tensor_parallel_group_ranks = [0, 1]  # type: ignore[misc]
    fleet.targets["a", 0].described = Described(shards.shard_of([part]), 16)
    fleet.targets["a", 0].added = cluster.AddShard("a", "m", "target", "a", 0, 1, 5, digest_of(shards.shard_of([part])))
    h.add("b", "n2")
    assert read(h) == {"src"}
    last = h.state.models["m"].last
    assert last is not None and "the plan was refused" in last.reason
    assert kinds(h.tick()) == []


def test_a_replica_that_no_plan_fits_keeps_no_other_from_being_seeded() -> None:
    h = serving(("a", "n1"))
    h.say("n0", local.Deregister(member="src", reason="the trainer has gone"))
    half = ParameterMetadata("w", (2, 4), "bfloat16", 2, resolved_name="w")  # it lacks what the others have
    shard = shards.shard_of([half])
    h.say("n2", cluster.DescribeShard(digest=digest_of(shard), packed=pack(shard)))
    h.say("n1", local.Suspend(member="a", suspended=True), request=5)  # until both have joined
    h.say("n2", cluster.AddShard("bad", "m", "target", "bad", 0, 1, 5, digest_of(shard)), request=3)
    h.add("good", "n2")
    h.say("n1", local.Suspend(member="a", suspended=False), request=5)
    assert read(h) == {"a"} and "good" in h.shares.open(loads(h)["n2"]).members
    finish(h, {"good": "n2"})
    ended = [(record.state, record.reason[:20]) for record in h.journal.values()]
    assert ended.count(("aborted", "the plan was refused")) == 3, ended  # of both, of one, of it with another seed
    assert h.state.models["m"].membership.targets["good", 0].version == 1
    assert h.state.models["m"].running is None


# --- Replicas that join at nearly one time are caught up together: the version crosses the cables once for all.


SHAPE = (8192, 8192)


class Fleet(Harness):
    """A source on n0 and a replica on n1 that serves its version 1, of 128 MiB."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(4):
            self.join(f"n{number}", pid=10 + number, workers=(1,))
        self.register("src", "n0")
        self.register("a", "n1")
        self.say("n0", local.Publish(member="src", version=1), request=4)
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
            self.say(node, local.CommitDone(swap, member, 0.0, seeds=True))

    def at(self, now: float) -> set[str]:
        """Set the time to `now`; return the replicas of the catch-up that begins."""
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
    h.say("n0", local.Publish(member="src", version=2), request=4)
    h.say("n0", local.StartSwap("m"), request=9)
    assert h.at(0.0) == {"a", "b"} and h.state.models["m"].gathers_until is None


def test_a_replica_that_leaves_meanwhile_is_forgotten() -> None:
    h = Fleet()
    h.register("b", "n2")
    h.say("n2", local.Deregister(member="b", reason="gone"))
    assert h.at(2 * GATHER_S) == set() and h.state.models["m"].gathers_until is None
