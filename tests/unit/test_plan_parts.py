"""What coordinator and daemon say about parts of plans: each is sent once, and again to a node that has lost it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from refitd.coordinator.plan_parts import MAX_HELD, MAX_SHARES, HeldParts, Packed, PackedEpoch, PackedParts
from refitd.daemon import actions as act
from refitd.daemon.plan_parts import MAX_ROWS, KeptParts, Missing
from refitd.describe.roster import Roster
from refitd.plan.build import plan_copies
from refitd.plan.routes import routes_of
from refitd.plan.table import CopyTable
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION, Secret
from refitd.protocol.codec import digest_of, pack, unpack
from refitd.protocol.shards import metadata_of
from tests.support.coordinator_harness import Harness, kinds, reports
from tests.support.daemon_harness import SHARD
from tests.support.daemon_harness import Harness as Daemon

# --- the coordinator --------------------------------------------------------------------------------------


Load = cluster.LoadPlan | cluster.LoadShare

# The last version whose daemons keep parts and know no shares.
OLDER = 3_002


def loads(sent: list[object]) -> list[Load]:
    return [message for message in sent if isinstance(message, Load)]


def fleet(*, keeps_parts: bool = True, protocol: int = PROTOCOL_VERSION) -> Harness:
    """A source and an engine on one node, version 1 published."""
    h = Harness().join("n0", keeps_parts=keeps_parts, protocol=protocol)
    h.add("src")
    h.add("a")
    h.say("n0", cluster.ShardPublished(member="src", version=1))
    return h


def swapped(h: Harness, version: int) -> Load:
    """Have a version swapped; return the plan as it was sent, if it was."""
    (load,) = loads(h.say("n0", local.StartSwap("m"), request=2))
    h.say("n0", cluster.PlanLoaded(plan=load.plan))
    swap = h.state.models["m"].running.swap.swap  # type: ignore[union-attr]
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    for replica in sorted(replica for replica, _ in h.state.models["m"].membership.targets):
        h.say("n0", cluster.MemberCommitted(swap=swap, member=replica, paused_s=0.0))
    h.say("n0", cluster.ShardPublished(member="src", version=version + 1))
    return load


def replaced(h: Harness, member: str) -> Load:
    """Have the engine end, and one like it register; return the plan by which that one is caught up."""
    h.say("n0", cluster.RemoveShard(member="a", reason="it has ended"))
    (load,) = loads(h.add(member))
    return load


def named(load: Load) -> set[str]:
    """Return the digests of all that a message is made of, which it must give."""
    if isinstance(load, cluster.LoadPlan):
        return set(load.parts)
    share = unpack(load.given[load.share], cluster.NodeShare, load.share)
    return {load.share, load.ranks, *share.parts}


def test_a_node_that_keeps_parts_is_sent_each_once() -> None:
    h = fleet()
    first = swapped(h, 1)
    assert isinstance(first, cluster.LoadShare) and set(first.given) == named(first)
    assert replaced(h, "a") == structs.replace(first, given={}), "nothing has changed"
    assert swapped(h, 2) == structs.replace(first, given={})
    other = replaced(h, "b")
    assert isinstance(other, cluster.LoadShare) and set(other.given) == {other.share} != {first.share}
    assert other.ranks == first.ranks


def test_a_node_that_knows_no_shares_is_sent_each_part_once() -> None:
    h = fleet(protocol=OLDER)
    first = swapped(h, 1)
    assert isinstance(first, cluster.LoadPlan) and first.parts and set(first.given) == named(first) and not first.table
    replaced(h, "b")
    again = swapped(h, 2)
    assert isinstance(again, cluster.LoadPlan)
    assert again.plan == first.plan and again.parts == first.parts and not again.given


def test_a_node_that_does_not_keep_parts_is_sent_rows() -> None:
    load = swapped(fleet(keeps_parts=False), 1)
    assert isinstance(load, cluster.LoadPlan)
    assert load.table["rows"] == 1 and not (load.parts or load.uses or load.given)


@pytest.mark.parametrize("protocol", [OLDER, PROTOCOL_VERSION])
def test_a_node_that_lacks_parts_is_sent_all_of_them_and_the_swap_goes_on(protocol: int) -> None:
    h = fleet(protocol=protocol)
    swapped(h, 1)
    replaced(h, "a")
    (load,) = loads(h.say("n0", local.StartSwap("m"), request=2))
    assert not load.given
    (again,) = loads(h.say("n0", cluster.PartsMissing(plan=load.plan, epoch="", missing=1)))
    assert again == structs.replace(load, given=again.given) and set(again.given) == named(again)
    assert kinds(h.say("n0", cluster.PlanLoaded(plan=load.plan))) == ["Stage"]


@pytest.mark.parametrize("protocol", [OLDER, PROTOCOL_VERSION])
def test_a_node_that_lacks_parts_that_it_was_just_sent_ends_the_swap_by_name_and_the_next_one_works(
    protocol: int,
) -> None:
    h = fleet(protocol=protocol)
    (load,) = loads(h.say("n0", local.StartSwap("m"), request=2))
    missing = cluster.PartsMissing(plan=load.plan, epoch="", missing=1)
    assert loads(h.say("n0", missing)) == [load]
    (report,) = reports(h.say("n0", missing))
    assert report.outcome == "aborted" and "node n0: it lacks 1 parts of the plan" in report.reason
    assert swapped(h, 1).given


@pytest.mark.parametrize("protocol", [OLDER, PROTOCOL_VERSION])
def test_a_daemon_that_has_started_again_is_sent_everything(protocol: int) -> None:
    h = fleet()
    swapped(h, 1)
    h.now += 6.0  # its predecessor is gone
    h.join("n0", pid=11, keeps_parts=True, protocol=protocol)
    h.add("src")
    h.add("a")
    h.say("n0", cluster.ShardPublished(member="src", version=3))
    (load,) = loads(h.say("n0", local.StartSwap("m"), request=2))
    assert set(load.given) == named(load) != set()


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


def test_what_a_node_is_taken_to_hold_is_bounded() -> None:
    held = HeldParts()
    parts = [Packed(f"{number}", b"part") for number in range(MAX_HELD + 1)]
    assert len(held.lacking(parts)) == len(parts)
    assert list(held.lacking(parts[:2])) == ["0"], "the oldest one only"
    assert all(held.lacks_share(f"{number}") for number in range(MAX_SHARES + 1))
    assert held.lacks_share("0") and not held.lacks_share(f"{MAX_SHARES}")


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


def said(h: Daemon, load: Load) -> object:
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


def in_shares(h: Daemon) -> cluster.LoadShare:
    """The same plan as a share."""
    load = in_parts(h)
    ranks = dict(zip(load.ranks, range(2), strict=True))
    share = cluster.NodeShare(load.members, (), (), (), load.uses, load.parts)  # ranks 0 and 1 are their positions
    numbers = cluster.ShareRanks(tuple(ranks))
    given = {digest_of(value): pack(value) for value in (share, numbers)}
    return cluster.LoadShare("p", "m", digest_of(share), digest_of(numbers), given=load.given | given)


def test_a_share_that_a_daemon_has_need_not_be_given_again() -> None:
    h = Daemon()
    load = in_shares(h)
    assert said(h, load) == cluster.PlanLoaded(plan="p")
    assert said(h, structs.replace(load, plan="p2", given={})) == cluster.PlanLoaded(plan="p2")
    assert h.stage(plan="p2")


def test_a_daemon_that_lacks_a_share_or_what_it_is_made_of_says_so() -> None:
    h = Daemon()
    load = in_shares(h)
    for digest in load.given:
        some = {other: data for other, data in load.given.items() if other != digest}
        fresh = Daemon()
        in_shares(fresh)  # its members
        lacking = cluster.PartsMissing(plan="p", epoch="", missing=1)
        assert said(fresh, structs.replace(load, given=some)) == lacking
        assert said(fresh, structs.replace(load, given=some | {digest: b"damaged"})) == lacking
        assert said(fresh, load) == cluster.PlanLoaded(plan="p")
    assert said(h, structs.replace(load, given={})) == cluster.PartsMissing(plan="p", epoch="", missing=2)


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
    load = in_shares(h)
    share = structs.replace(unpack(load.given[load.share], cluster.NodeShare, load.share), **changes)
    given = load.given | {digest_of(share): pack(share)}
    answer = said(h, structs.replace(load, share=digest_of(share), given=given))
    assert isinstance(answer, cluster.PlanRefused) and said_of_it in answer.reason
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
