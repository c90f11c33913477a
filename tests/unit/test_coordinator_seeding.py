"""Catch-ups that replicas seed: who is chosen, who is done without, and when the sources are read after all."""

from __future__ import annotations

import pytest

from refitd import ParameterMetadata
from refitd.protocol import cluster, local, shards
from refitd.protocol.codec import digest_of, pack
from tests.support.coordinator_harness import Harness, kinds, reports, stages


def serving(*seeds: tuple[str, str]) -> Harness:
    """Version 1 of a source is live in these (replica, node), which hold it in an arena."""
    h = Harness()
    for number in range(3):
        h.join(f"n{number}", pid=10 + number, workers=(1,))
    h.add("src", "n0")
    for member, node in seeds:
        h.add(member, node)
    h.say("n0", cluster.ShardPublished(member="src", version=1), request=4)
    h.say("n0", local.StartSwap("m"), request=9)
    finish(h, dict(seeds))
    return h


def loads(h: Harness) -> dict[str, cluster.LoadPlan]:
    """The plans that were sent last, by node."""
    return {node: message for node, _, message in h.sent if isinstance(message, cluster.LoadPlan)}


def begun(h: Harness) -> str:
    """Have every node load the plan that was sent; return the swap that is staged."""
    found: list[object] = []
    for node, load in loads(h).items():
        epoch = load.epoch.id if load.epoch is not None else ""
        found += h.say(node, cluster.PlanLoaded(plan=load.plan, epoch=epoch))
    return stages(found)[0].swap


def finish(h: Harness, members: dict[str, str]) -> None:
    """Have the swap that was begun commit everywhere."""
    there = loads(h)
    swap = begun(h)
    for node in there:
        h.say(node, cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    for member, node in members.items():
        h.say(node, cluster.MemberCommitted(swap, member, 0.0, seeds=True))


def read(h: Harness) -> set[str]:
    """The members that the plans read that were sent last."""
    found = set()
    for load in loads(h).values():
        names = dict(zip(load.ranks, load.members, strict=True))
        assert not any(names[rank].startswith("src") for rank in load.seeds)
        found |= {names[rank] for rank in load.seeds} or {name for name in names.values() if name.startswith("src")}
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
    h.say("n2", cluster.MemberCommitted(swap, "b", 0.0, seeds=True))
    assert h.state.models["m"].last.seeds == ("a",)  # type: ignore[union-attr]
    assert [m.replica for m in h.state.models["m"].last.members] == ["b"]  # type: ignore[union-attr]


@pytest.mark.parametrize("gone", ["a", "src"])
def test_without_seeds_sources_are_read_and_without_sources_seeds(gone: str) -> None:
    h = serving(("a", "n1"))
    h.say("n1" if gone == "a" else "n0", cluster.RemoveShard(member=gone, reason="gone"))
    h.add("b", "n2")
    assert read(h) == ({"src"} if gone == "a" else {"a"})


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
    h.say("n1", cluster.StageFailed(swap=swap, where=min(first), reason="its memory has changed"))
    second = read(h)
    assert first | second == {"a", "b"} and not first & second
    report = h.state.models["m"].last
    assert report is not None and f"{min(first)} rank 0 (node n1, host h, pid 5): its memory" in report.reason
    h.say("n1", cluster.RemoveShard(member=min(second), reason="its process has ended"))
    assert read(h) == {"src"}, "nobody else is left"
    assert not reports(h.tick())


def test_a_seed_that_the_plan_does_not_need_may_leave() -> None:
    h = serving(("a", "n1"), ("b", "n1"))
    h.add("c", "n2")
    (used,) = read(h)  # there is one tensor
    swap = begun(h)
    other = "b" if used == "a" else "a"
    h.say("n1", cluster.RemoveShard(member=other, reason="its process has ended"))
    assert h.state.models["m"].running is not None and h.state.models["m"].running.swap.swap == swap


def test_a_catch_up_that_fails_for_another_reason_is_tried_again_from_the_sources() -> None:
    h = serving(("a", "n1"))
    h.add("b", "n2")
    swap = begun(h)
    h.say("n2", cluster.StageFailed(swap=swap, where="worker 0 on node n2", reason="it broke"))
    assert h.state.models["m"].running is None
    h.now = 4.0
    h.tick()
    assert read(h) == {"src"}


def test_those_that_join_meanwhile_are_seeded_by_the_one_that_came_first() -> None:
    """What crosses a cable once, for the first of a node, is copied there for the others."""
    h = serving(("a", "n1"))
    h.add("b", "n2")
    there = loads(h)
    for late in ("c", "d"):
        h.add(late, "n2")
        assert not loads(h)
    h.sent = [(node, 0, load) for node, load in there.items()]
    finish(h, {"b": "n2"})
    assert read(h) == {"b"} and loads(h).keys() == {"n2"}
    assert {name for load in loads(h).values() for name in load.members} == {"b", "c", "d"}


def test_copying_replicas_seed_nobody_once_something_else_was_staged() -> None:
    h = serving(("a", "n1"))
    h.say("n0", cluster.ShardPublished(member="src", version=2), request=4)
    (stage, _) = stages(h.say("n0", local.StartSwap("m"), request=9))
    h.say("n1", cluster.StageFailed(swap=stage.swap, where="w", reason="it broke"))
    h.add("b", "n2")
    assert read(h) == {"src"}


@pytest.mark.parametrize("what", ["suspended", "observes", "converted", "staged", "another dtype", "not whole"])
def test_who_cannot_seed(what: str) -> None:
    h = serving(("a", "n1"))
    member = h.state.models["m"].membership.targets["a", 0]
    match what:
        case "suspended":
            h.say("n1", cluster.MemberSuspended(member="a", suspended=True), request=5)
        case "observes":
            h.say("n1", cluster.RemoveShard(member="a", reason="it registers anew"))
            h.add("a", "n1", version=1, run="run1", seeds=True, observes=True)
        case "converted":
            h.say("n1", cluster.RemoveShard(member="a", reason="it registers anew"))
            h.add("a", "n1", version=1, run="run1")
        case "staged":
            member.staged = "late"
        case "not whole":
            h.say("n1", cluster.RemoveShard(member="a", reason="it registers anew"))
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
    h.say("n0", cluster.RemoveShard(member="src", reason="gone"))
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
    """What descriptions say of tensors may agree, and those that hold them lack elements."""
    h = serving(("a", "n1"))
    fleet = h.state.models["m"].membership
    part = ParameterMetadata("w", (2, 4), "bfloat16", 2, resolved_name="w", is_tp=True)
    part.tensor_parallel_group_ranks = [0, 1]  # type: ignore[misc]
    fleet.targets["a", 0].shard = shards.shard_of([part])
    fleet.targets["a", 0].added = cluster.AddShard("a", "m", "target", "a", 0, 1, 5, digest_of(shards.shard_of([part])))
    h.add("b", "n2")
    assert read(h) == {"src"}
    last = h.state.models["m"].last
    assert last is not None and "the plan was refused" in last.reason
    assert kinds(h.tick()) == []


def test_a_replica_that_no_plan_fits_keeps_no_other_from_being_seeded() -> None:
    h = serving(("a", "n1"))
    h.say("n0", cluster.RemoveShard(member="src", reason="the trainer has gone"))
    half = ParameterMetadata("w", (2, 4), "bfloat16", 2, resolved_name="w")  # it lacks what the others have
    shard = shards.shard_of([half])
    h.say("n2", cluster.DescribeShard(digest=digest_of(shard), packed=pack(shard)))
    h.say("n1", cluster.MemberSuspended(member="a", suspended=True), request=5)  # until both have joined
    h.say("n2", cluster.AddShard("bad", "m", "target", "bad", 0, 1, 5, digest_of(shard)), request=3)
    h.add("good", "n2")
    h.say("n1", cluster.MemberSuspended(member="a", suspended=False), request=5)
    assert read(h) == {"a"} and "good" in loads(h)["n2"].members
    finish(h, {"good": "n2"})
    ended = [(record.state, record.reason[:20]) for record in h.journal.values()]
    assert ended.count(("aborted", "the plan was refused")) == 3, ended  # of both, of one, of it with another seed
    assert h.state.models["m"].membership.targets["good", 0].version == 1
    assert h.state.models["m"].running is None
