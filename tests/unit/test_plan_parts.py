"""What coordinator and daemon say about parts of plans: each is sent once, and again to a node that has lost it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from refitd.coordinator.plan_parts import HeldParts, PackedEpoch, PackedParts
from refitd.daemon import actions as act
from refitd.daemon.plan_parts import MAX_ROWS, KeptParts, Missing
from refitd.describe.roster import Roster
from refitd.plan.build import plan_copies
from refitd.plan.routes import routes_of
from refitd.plan.table import CopyTable
from refitd.protocol import cluster, local
from refitd.protocol.base import Secret
from refitd.protocol.codec import pack
from refitd.protocol.shards import metadata_of
from tests.support.coordinator_harness import Harness, kinds, reports
from tests.support.daemon_harness import SHARD
from tests.support.daemon_harness import Harness as Daemon

# --- the coordinator --------------------------------------------------------------------------------------


def loads(sent: list[object]) -> list[cluster.LoadPlan]:
    return [message for message in sent if isinstance(message, cluster.LoadPlan)]


def fleet(*, keeps_parts: bool = True) -> Harness:
    """A source and an engine on one node, version 1 published."""
    h = Harness().join("n0", keeps_parts=keeps_parts)
    h.add("src")
    h.add("a")
    h.say("n0", cluster.ShardPublished(member="src", version=1))
    return h


def swapped(h: Harness, version: int) -> cluster.LoadPlan:
    """Have a version swapped; return the plan as it was sent, if it was."""
    (load,) = loads(h.say("n0", local.StartSwap("m"), request=2))
    h.say("n0", cluster.PlanLoaded(plan=load.plan))
    swap = h.state.models["m"].running.swap.swap  # type: ignore[union-attr]
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    for replica in sorted(replica for replica, _ in h.state.models["m"].membership.targets):
        h.say("n0", cluster.MemberCommitted(swap=swap, member=replica, paused_s=0.0))
    h.say("n0", cluster.ShardPublished(member="src", version=version + 1))
    return load


def test_a_node_that_keeps_parts_is_sent_each_once() -> None:
    h = fleet()
    first = swapped(h, 1)
    assert first.parts and set(first.given) == set(first.parts) and not first.table
    h.say("n0", cluster.RemoveShard(member="a", reason="it has ended"))
    h.add("b")
    again = swapped(h, 2)
    assert again.plan == first.plan and again.parts == first.parts and not again.given


def test_a_node_that_does_not_keep_parts_is_sent_rows() -> None:
    load = swapped(fleet(keeps_parts=False), 1)
    assert load.table["rows"] == 1 and not (load.parts or load.uses or load.given)


def test_a_node_that_lacks_parts_is_sent_all_of_them_and_the_swap_goes_on() -> None:
    h = fleet()
    swapped(h, 1)
    h.say("n0", cluster.RemoveShard(member="a", reason="it has ended"))
    h.add("b")
    (load,) = loads(h.say("n0", local.StartSwap("m"), request=2))
    assert not load.given
    (again,) = loads(h.say("n0", cluster.PartsMissing(plan=load.plan, epoch="", missing=1)))
    assert again.parts == load.parts and set(again.given) == set(load.parts)
    assert kinds(h.say("n0", cluster.PlanLoaded(plan=load.plan))) == ["Stage"]


def test_a_node_that_lacks_parts_that_it_was_just_sent_ends_the_swap_by_name_and_the_next_one_works() -> None:
    h = fleet()
    (load,) = loads(h.say("n0", local.StartSwap("m"), request=2))
    missing = cluster.PartsMissing(plan=load.plan, epoch="", missing=1)
    assert kinds(h.say("n0", missing)) == ["LoadPlan"]
    (report,) = reports(h.say("n0", missing))
    assert report.outcome == "aborted" and "node n0: it lacks 1 parts of the plan" in report.reason
    assert swapped(h, 1).given


def test_a_daemon_that_has_started_again_is_sent_everything() -> None:
    h = fleet()
    swapped(h, 1)
    h.now += 6.0  # its predecessor is gone
    h.join("n0", pid=11, keeps_parts=True)
    h.add("src")
    h.add("a")
    h.say("n0", cluster.ShardPublished(member="src", version=3))
    (load,) = loads(h.say("n0", local.StartSwap("m"), request=2))
    assert set(load.given) == set(load.parts) != set()


def test_who_says_that_parts_of_nothing_are_missing_changes_nothing() -> None:
    h = fleet()
    assert h.say("n0", cluster.PartsMissing(plan="another", epoch="", missing=1)) == []
    h = fleet(keeps_parts=False)
    h.say("n0", local.StartSwap("m"), request=2)
    assert h.say("n0", cluster.PartsMissing(plan="another", epoch="e", missing=1)) == []


def test_an_epochs_nodes_travel_in_parts_of_which_one_changes_with_a_node() -> None:
    def packed(nodes: int) -> PackedEpoch:
        names = tuple(sorted(f"n{i}" for i in range(nodes)))
        return PackedEpoch.of(cluster.EpochPlan("e", "gloo", names, names, 1, 1, 1.0, Secret(bytes(32))))

    held = HeldParts()
    assert len(held.lacking(packed(300).parts)) == 16
    assert len(held.lacking(packed(301).parts)) == 1


# --- the daemon -------------------------------------------------------------------------------------------


def in_parts(h: Daemon) -> cluster.LoadPlan:
    """A plan between two members of a node, in parts, all of them given."""
    members = h.fleet(plan_id="before")
    plan = plan_copies([Roster(0, metadata_of(SHARD, 0)), Roster(1, (), metadata_of(SHARD, 1))])
    found = routes_of(plan.shared, {0: "n0", 1: "n0"}).inner.table
    packed = PackedParts().of(found.parts)
    return cluster.LoadPlan(
        plan="p",
        model="m",
        ranks=(0, 1),
        members=members,
        table={},
        uses={"table": found.uses.to_wire()},
        parts=tuple(part.digest for part in packed),
        given={part.digest: part.data for part in packed},
    )


def said(h: Daemon, load: cluster.LoadPlan) -> object:
    h.feed(act.CoordinatorSaid(0, load))
    return h.to_coordinator[-1]


def test_parts_that_a_daemon_has_need_not_be_given_again() -> None:
    h = Daemon()
    load = in_parts(h)
    assert said(h, load) == cluster.PlanLoaded(plan="p")
    h.feed(act.CoordinatorSaid(0, cluster.DropPlan(plan="p")))
    assert said(h, structs.replace(load, plan="p2", given={})) == cluster.PlanLoaded(plan="p2")
    assert h.stage(plan="p2")


def test_a_daemon_says_which_parts_it_lacks_and_uses_the_plan_once_it_has_them() -> None:
    h = Daemon()
    load = in_parts(h)
    lacking = cluster.PartsMissing(plan="p", epoch="", missing=1)
    assert said(h, structs.replace(load, given={})) == lacking
    damaged = {digest: data[:-3] for digest, data in load.given.items()}
    assert said(h, structs.replace(load, given=damaged)) == lacking
    wrong = dict.fromkeys(load.given, pack(cluster.PlanPart(CopyTable.from_wire(EMPTY).to_wire())))
    assert said(h, structs.replace(load, given=wrong)) == lacking
    assert said(h, load) == cluster.PlanLoaded(plan="p")
    assert said(h, structs.replace(load, given=damaged)) == lacking, "what has just come is judged, not what was kept"
    assert said(h, load) == cluster.PlanLoaded(plan="p")


EMPTY = {
    name: [] if name in ("tensors", "locals") else b""
    for name in ("size", "locals", "element_size", "tensors", "tensor", "src_rank", "dst_rank", "src_local",
                 "dst_local", "task_id", "src_offset", "src_stride", "dst_offset", "dst_stride")
} | {"rows": 0, "dims": 1}  # fmt: skip


@pytest.mark.parametrize(
    "spoil",
    [
        lambda uses: uses | {"part": (7).to_bytes(4, "little")},
        lambda uses: uses | {"part": (-1).to_bytes(4, "little", signed=True)},
        lambda uses: uses | {"part": b"\0"},
        lambda uses: uses | {"part": uses["part"] * 2},
        lambda uses: uses | {"count": (1).to_bytes(4, "little"), "ranks": uses["ranks"][:4]},
        lambda uses: uses | {"count": (3).to_bytes(4, "little")},
        lambda uses: uses | {"ranks": b""},
    ],
)
def test_uses_that_make_no_table_are_refused(spoil: Callable[[dict[str, bytes]], dict[str, bytes]]) -> None:
    h = Daemon()
    load = in_parts(h)
    answer = said(h, structs.replace(load, uses={"table": spoil(load.uses["table"])}))
    assert isinstance(answer, cluster.PlanRefused) and "uses of plan parts" in answer.reason


def test_few_bytes_cannot_ask_for_many_rows() -> None:
    h = Daemon()
    load = in_parts(h)
    many = {name: column * (MAX_ROWS + 1) for name, column in load.uses["table"].items()}
    answer = said(h, structs.replace(load, uses={"table": many}))
    assert isinstance(answer, cluster.PlanRefused) and f"the limit is {MAX_ROWS}" in answer.reason


def test_what_is_kept_is_bounded_and_what_was_used_last_is_kept() -> None:
    load = in_parts(Daemon())
    kept = KeptParts(max_bytes=sum(map(len, load.given.values())))
    kept.tables(load)
    assert not isinstance(kept.tables(structs.replace(load, given={})), Missing)
    kept = KeptParts(max_bytes=10)
    assert not isinstance(kept.tables(load), Missing)
    found = kept.tables(structs.replace(load, given={}))
    assert isinstance(found, Missing) and "is not here" in found.reason
