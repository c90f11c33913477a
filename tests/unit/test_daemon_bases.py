"""Which version a daemon lets its workers take deltas from, and how a trainer gets the memory of one back."""

from __future__ import annotations

import pytest
from msgspec import structs

from refitd.daemon import actions as act
from refitd.daemon.base_trust import BaseTrust
from refitd.describe.roster import Roster
from refitd.plan.build import plan_copies
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import Secret
from refitd.protocol.shards import metadata_of
from tests.support.daemon_harness import SHARD, SOURCE, TARGET, Harness


def crossing(member: str, rank: int) -> tuple[Harness, str]:
    """A daemon with a source of rank 0, or a target of rank 1, whose counterpart is on another node."""
    h = Harness()
    registered = h.ask(SOURCE if member == "source" else TARGET)
    assert isinstance(registered, local.SourceRegistered | local.TargetRegistered)
    table = plan_copies([Roster(0, source=metadata_of(SHARD, 0)), Roster(1, destination=metadata_of(SHARD, 1))]).table
    members = (registered.member, "far") if rank == 0 else ("far", registered.member)
    plan = cluster.LoadPlan(
        plan="p",
        model="m",
        ranks=(0, 1),
        members=members,
        table=table.select(slice(0, 0)).to_wire(),
        crossing=table.to_wire(),
        crossing_nodes=(0, 1) if rank == 0 else (1, 0),
        epoch=cluster.EpochPlan("e1", "gloo", ("n0", "n1"), ("h", "h1"), 2, 1 << 20, 9.0, Secret(bytes(32))),
    )
    h.feed(act.CoordinatorSaid(0, plan), *(act.WorkerSaid(w, sidecar.EpochJoined(epoch="e1")) for w in (0, 1)))
    return h, registered.member


def stage(h: Harness, swap: str, version: int, base: int | None, **changed: object) -> list[sidecar.RunJob]:
    """Stage; return what the workers were told to run."""
    h.to_worker.clear()
    told = cluster.Stage(swap=swap, plan="p", version=version, base=base)
    h.feed(act.CoordinatorSaid(0, structs.replace(told, **changed)))
    return [m for _, m in h.to_worker if isinstance(m, sidecar.RunJob)]


def bases(runs: list[sidecar.RunJob]) -> set[tuple[int, int]]:
    """Arenas, and where their bases are held, as both workers were told."""
    assert len(runs) == 2 and runs[0].bases == runs[1].bases
    return {(base.arena, base.held_in) for base in runs[0].bases}


def done(h: Harness, runs: list[sidecar.RunJob]) -> None:
    h.done([(worker, run.run) for worker, run in enumerate(runs)])


def test_a_source_compares_two_slots_and_names_the_version_as_every_node_does() -> None:
    h, source = crossing("source", 0)
    for version in (1, 2):
        assert h.publish(source, version) == local.Done()
    first, second = (slot.arena for slot in h.daemon.members[source].slots)
    runs = stage(h, "s", 2, base=1)
    assert bases(runs) == {(second, first)}
    far, target = crossing("target", 1)
    done(far, stage(far, "s0", 1, base=None))
    far.commit(target, "s0", 1)
    assert stage(far, "s", 2, base=1)[0].bases[0].version == runs[0].bases[0].version


@pytest.mark.parametrize(("base", "run"), [(None, ""), (0, ""), (1, "other")])
def test_a_source_that_does_not_hold_the_base_compares_nothing(base: int | None, run: str) -> None:
    h, source = crossing("source", 0)
    for version in (1, 2):
        h.publish(source, version)
    assert bases(stage(h, "s", 2, base=base, base_run=run)) == set()
    assert not any(slot.compared for slot in h.daemon.members[source].slots)


def test_a_publish_gets_the_slot_once_no_worker_compares_with_it() -> None:
    h, source = crossing("source", 0)
    for version in (1, 2):
        h.publish(source, version)
    runs = stage(h, "s", 2, base=1)
    h.to_worker.clear()
    begin = local.BeginPublish(member=source, version=3, timeout_s=5.0)
    assert h.ask(begin) is None
    assert h.to_worker == [(w, sidecar.DropBases(run=run.run)) for w, run in enumerate(runs)]
    h.feed(act.WorkerSaid(0, sidecar.BasesDropped(run=runs[0].run)))
    assert not h.to_client
    h.feed(act.WorkerSaid(1, sidecar.RunDone(run=runs[1].run, copies=0, bytes=0, seconds=0.1)))  # it had just ended
    assert [m for *_, m in h.to_client] == [local.SlotGranted(slot=0)]
    assert stage(h, "t", 2, base=1)[0].bases == (), "that version is gone"


def test_a_publish_after_the_workers_have_ended_waits_for_nobody() -> None:
    h, source = crossing("source", 0)
    for version in (1, 2):
        h.publish(source, version)
    done(h, stage(h, "s", 2, base=1))
    assert h.publish(source, 3) == local.Done()


def test_a_target_has_a_base_from_a_commit_until_something_is_staged() -> None:
    h, target = crossing("target", 1)
    staging = h.daemon.members[target].staging
    runs = stage(h, "s1", 1, base=None)
    assert bases(runs) == set()
    done(h, runs)
    h.commit(target, "s1", 1)
    assert bases(stage(h, "s2", 2, base=1)) == {(staging, staging)}
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="s2", reason="x")))
    h.feed(act.CoordinatorSaid(0, cluster.DropPlan(plan="p")))
    assert h.daemon.members[target].state.holds is None


def test_a_base_that_is_wrong_is_not_used_until_a_full_version_is_committed() -> None:
    trust = BaseTrust()
    assert trust.may_use((1, "")) and trust.doubt((1, "")) and not trust.may_use((1, ""))
    trust.differed()
    assert not trust.may_use((1, "")), "the mark names this version"
    assert trust.may_use((2, "")), "version 2 came in full"
    for wrong, full in ((2, 1), (3, 3), (4, 7)):
        assert trust.doubt((wrong, "wrong"))
        trust.differed()
        assert [trust.may_use((5, "")) for _ in range(full + 1)] == [False] * full + [True]


def test_a_base_whose_digest_matches_is_used_again_once() -> None:
    trust = BaseTrust()
    assert trust.doubt((1, "")) and not trust.doubt((1, "")), "compared once"
    trust.matched((1, ""))
    assert trust.may_use((1, ""))
    assert not trust.doubt((1, "")) and not trust.may_use((1, "")), "its deltas keep going wrong"
    assert trust.may_use((2, ""))


def test_a_rank_that_copies_gets_one_full_version_after_a_wrong_delta() -> None:
    h, target = crossing("target", 1)
    done(h, stage(h, "s1", 1, base=None))
    h.commit(target, "s1", 1)
    runs = stage(h, "s2", 2, base=1)
    h.feed(act.WorkerSaid(0, sidecar.BaseWrong(run=runs[0].run)))
    h.feed(act.WorkerSaid(0, sidecar.RunFailed(run=runs[0].run, reason="differs", differs=True)))
    assert h.said(cluster.StageFailed)
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="s2", reason="x")))
    runs = stage(h, "s3", 2, base=1)
    assert bases(runs) == set()
    done(h, runs)
    h.commit(target, "s3", 2)
    assert bases(stage(h, "s4", 3, base=2))
