"""Coordinator and daemon exchange shares of plans: each is sent once, and again to a node that lost it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from refitd.coordinator.plans import MAX_HELD, MAX_SHARES, HeldParts, Packed, PackedEpoch
from refitd.daemon import actions as act
from refitd.daemon.plans import MAX_ROWS, KeptParts, Missing
from refitd.describe.metadata import Roster
from refitd.plan.table import CopyTable
from refitd.protocol import cluster, local
from refitd.protocol.base import Secret, digest_of, pack, unpack
from refitd.protocol.shards import metadata_of
from tests.support.coordinator_harness import Harness, kinds, reports
from tests.support.daemon_harness import SHARD
from tests.support.daemon_harness import Harness as Daemon
from tests.support.shares import load_of

# --- the coordinator --------------------------------------------------------------------------------------


def loads(sent: list[object]) -> list[cluster.LoadPlan]:
    return [message for message in sent if isinstance(message, cluster.LoadPlan)]


def fleet() -> Harness:
    """A source and an engine on one node, version 1 published."""
    h = Harness().join("n0")
    h.add("src")
    h.add("a")
    h.say("n0", local.Publish(member="src", version=1))
    return h


def swapped(h: Harness, version: int) -> cluster.LoadPlan:
    """Swap a version; return the plan message, if one was sent."""
    (load,) = loads(h.say("n0", local.StartSwap("m"), request=2))
    h.say("n0", cluster.PlanLoaded(plan=load.plan))
    swap = h.state.models["m"].running.swap.swap
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    for replica in sorted(replica for replica, _ in h.state.models["m"].membership.targets):
        h.say("n0", local.CommitDone(swap=swap, member=replica, paused_s=0.0))
    h.say("n0", local.Publish(member="src", version=version + 1))
    return load


def replaced(h: Harness, member: str) -> cluster.LoadPlan:
    """End the engine and register an equal one; return the plan of its catch-up."""
    h.say("n0", local.Deregister(member="a", reason="it has ended"))
    (load,) = loads(h.add(member))
    return load


def named(load: cluster.LoadPlan) -> set[str]:
    """Return the digests of all shares that a message refers to; it must contain them."""
    share = unpack(load.given[load.share], cluster.NodeShare, load.share)
    return {load.share, load.ranks, *share.parts}


def test_a_node_that_lacks_parts_is_sent_all_of_them_and_the_swap_goes_on() -> None:
    h = fleet()
    swapped(h, 1)
    replaced(h, "a")
    (load,) = loads(h.say("n0", local.StartSwap("m"), request=2))
    assert not load.given
    (again,) = loads(h.say("n0", cluster.PlanLoaded(plan=load.plan, epoch="", missing=1)))
    assert again == structs.replace(load, given=again.given) and set(again.given) == named(again)
    assert kinds(h.say("n0", cluster.PlanLoaded(plan=load.plan))) == ["Stage"]


def test_a_node_that_lacks_parts_that_it_was_just_sent_ends_the_swap_by_name_and_the_next_one_works() -> None:
    h = fleet()
    (load,) = loads(h.say("n0", local.StartSwap("m"), request=2))
    missing = cluster.PlanLoaded(plan=load.plan, epoch="", missing=1)
    assert loads(h.say("n0", missing)) == [load]
    (report,) = reports(h.say("n0", missing))
    assert report.outcome == "aborted" and "node n0: it lacks 1 parts of the plan" in report.reason
    assert swapped(h, 1).given


def test_a_daemon_that_has_started_again_is_sent_everything() -> None:
    h = fleet()
    swapped(h, 1)
    h.now += 6.0  # its predecessor is gone
    h.join("n0", pid=11)
    h.add("src")
    h.add("a")
    h.say("n0", local.Publish(member="src", version=3))
    (load,) = loads(h.say("n0", local.StartSwap("m"), request=2))
    assert set(load.given) == named(load) != set()


def test_who_says_that_parts_of_nothing_are_missing_changes_nothing() -> None:
    h = fleet()
    assert h.say("n0", cluster.PlanLoaded(plan="another", epoch="", missing=1)) == []
    h.say("n0", local.StartSwap("m"), request=2)
    assert h.say("n0", cluster.PlanLoaded(plan="another", epoch="e", missing=1)) == []


@pytest.mark.parametrize(("service", "peers"), [("", "n2 n3"), ("nixl", "n2 n3"), ("nccl", "n1 n2 n3")])
def test_a_node_is_told_its_peers_and_the_group_of_its_gpus(service: str, peers: str) -> None:
    told = peers.split()
    names = tuple(f"n{i}" for i in range(300))
    gpus = tuple((f"GPU-{name}",) for name in names) if service else ()
    epoch = cluster.EpochPlan("e", "gloo", names, names, 1, 1, 1.0, Secret(bytes(32)), service, gpus)
    met = {"n1": {"n2"}, "n2": {"n1", "n3"}, "n3": {"n2"}, "n4": {"n5"}, "n5": {"n4"}}
    packed = PackedEpoch.of(epoch, met).peers_of("n3", ["n2", "not in the epoch"])
    found = unpack(packed.data, cluster.PeerTable, packed.digest)
    assert list(found.nodes) == list(found.hosts) == told
    assert found.gpus == tuple((f"GPU-{name}",) for name in told if service)


def test_what_a_node_is_taken_to_hold_is_bounded() -> None:
    held = HeldParts()
    parts = [Packed(f"{number}", b"part") for number in range(MAX_HELD + 1)]
    assert len(held.lacking(parts)) == len(parts)
    assert list(held.lacking(parts[:2])) == ["0"], "the oldest one only"
    assert all(held.lacks_share(f"{number}") for number in range(MAX_SHARES + 1))
    assert held.lacks_share("0") and not held.lacks_share(f"{MAX_SHARES}")


# --- the daemon -------------------------------------------------------------------------------------------


def in_parts(h: Daemon) -> cluster.LoadPlan:
    """Return a plan between two members of a node, with all that the message names included."""
    return load_of([Roster(0, metadata_of(SHARD, 0)), Roster(1, (), metadata_of(SHARD, 1))], h.pair())


def part_of(load: cluster.LoadPlan) -> str:
    """Return the digest of the message's part of a table."""
    (part,) = unpack(load.given[load.share], cluster.NodeShare, load.share).parts
    return part


def changed(load: cluster.LoadPlan, **changes: object) -> cluster.LoadPlan:
    """Return the message with a changed share."""
    share = structs.replace(unpack(load.given[load.share], cluster.NodeShare, load.share), **changes)
    given = load.given | {digest_of(share): pack(share)}
    return structs.replace(load, share=digest_of(share), given=given)


def uses_of(load: cluster.LoadPlan) -> dict[str, bytes]:
    return unpack(load.given[load.share], cluster.NodeShare, load.share).uses["table"]


def said(h: Daemon, load: cluster.LoadPlan) -> object:
    h.feed(act.CoordinatorSaid(0, load))
    return h.to_coordinator[-1]


def test_a_daemon_says_which_parts_it_lacks_and_uses_the_plan_once_it_has_them() -> None:
    h = Daemon()
    load = in_parts(h)
    lacking, part, whole = cluster.PlanLoaded(plan="p", epoch="", missing=1), part_of(load), load.given
    assert said(h, structs.replace(load, given={d: data for d, data in whole.items() if d != part})) == lacking
    damaged = structs.replace(load, given=whole | {part: whole[part][:-3]})
    assert said(h, damaged) == lacking
    wrong = pack(cluster.PlanPart(CopyTable.from_wire(EMPTY).to_wire()))
    assert said(h, structs.replace(load, given=whole | {part: wrong})) == lacking
    assert said(h, load) == cluster.PlanLoaded(plan="p")
    assert said(h, damaged) == lacking, "what has just come is judged, not what was kept"
    assert said(h, load) == cluster.PlanLoaded(plan="p")


def test_a_daemon_that_lacks_a_share_or_what_it_is_made_of_says_so() -> None:
    h = Daemon()
    load = in_parts(h)
    for digest in load.given:
        some = {other: data for other, data in load.given.items() if other != digest}
        fresh = Daemon()
        in_parts(fresh)  # its members
        lacking = cluster.PlanLoaded(plan="p", epoch="", missing=1)
        assert said(fresh, structs.replace(load, given=some)) == lacking
        assert said(fresh, structs.replace(load, given=some | {digest: b"damaged"})) == lacking
        assert said(fresh, load) == cluster.PlanLoaded(plan="p")
    assert said(h, structs.replace(load, given={})) == cluster.PlanLoaded(plan="p", epoch="", missing=2)


@pytest.mark.parametrize(
    ("changes", "said_of_it"),
    [
        ({"members": ("one",)}, "a share of 1 members, 2 ranks"),
        ({"seeds": (2,)}, "names a member or a node"),
        ({"at": (0, 0)}, "names a member or a node"),
        ({"uses": {"table": {"ranks": (2).to_bytes(4, "little")}}}, "name members"),
        ({"uses": {"table": {"ranks": (-1).to_bytes(4, "little", signed=True)}}}, "name members"),
        ({"uses": {"table": {"ranks": b"123"}}}, ""),
    ],
)
def test_a_share_that_does_not_fit_is_refused(changes: dict[str, object], said_of_it: str) -> None:
    h = Daemon()
    load = in_parts(h)
    answer = said(h, changed(load, **changes))
    assert isinstance(answer, cluster.PlanLoaded) and said_of_it in answer.reason
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
    answer = said(h, changed(load, uses={"table": spoil(uses_of(load))}))
    assert isinstance(answer, cluster.PlanLoaded) and "uses of plan parts" in answer.reason


def test_few_bytes_cannot_ask_for_many_rows() -> None:
    h = Daemon()
    load = in_parts(h)
    many = {name: column * (MAX_ROWS + 1) for name, column in uses_of(load).items()}
    answer = said(h, changed(load, uses={"table": many}))
    assert isinstance(answer, cluster.PlanLoaded) and f"the limit is {MAX_ROWS}" in answer.reason


def test_what_is_kept_is_bounded_and_what_was_used_last_is_kept() -> None:
    load = in_parts(Daemon())
    kept = KeptParts(max_bytes=sum(map(len, load.given.values())))
    kept.tables(load)
    assert not isinstance(kept.tables(structs.replace(load, given={})), Missing)
    kept = KeptParts(max_bytes=10)
    assert not isinstance(kept.tables(load), Missing)
    found = kept.tables(structs.replace(load, given={}))
    assert isinstance(found, Missing) and "is not here" in found.reason
