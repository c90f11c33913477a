"""The bases that workers use for deltas, and the versions in other arenas."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from refitd.buffers.layout import row_major_strides
from refitd.commit.target_state import Step, TargetState
from refitd.daemon import actions as act
from refitd.daemon.members import BaseTrust
from refitd.describe.metadata import Roster
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import Secret
from refitd.protocol.shards import Place, metadata_of
from refitd.states import Tick
from tests.support.daemon_harness import SHARD, SOURCE, TARGET, Harness, live_in_arena
from tests.support.shares import load_of


def crossing(member: str, rank: int, *, flips: bool = False) -> tuple[Harness, str]:
    """Return a daemon with a source of rank 0 or a target of rank 1; the counterpart is on another node."""
    h = Harness()
    target = structs.replace(TARGET, live=live_in_arena(h), flips=True) if flips else TARGET
    registered = h.ask(SOURCE if member == "source" else target)
    members = (registered.member, "far") if rank == 0 else ("far", registered.member)
    nodes = ("n0", "n1") if rank == 0 else ("n1", "n0")
    rosters = [Roster(0, metadata_of(SHARD, 0), node=nodes[0]), Roster(1, (), metadata_of(SHARD, 1), nodes[1])]
    epoch = cluster.EpochPlan("e1", "gloo", ("n0", "n1"), ("h", "h1"), 2, 1 << 20, 9.0, Secret(bytes(32)))
    plan = load_of(rosters, members, node="n0", epoch=epoch)
    h.feed(act.CoordinatorSaid(0, plan), *(act.WorkerSaid(w, sidecar.EpochJoined(epoch="e1")) for w in (0, 1)))
    return h, registered.member


def stage(h: Harness, swap: str, version: int, base: int | None, **changed: object) -> list[sidecar.RunJob]:
    """Stage; return the runs that the workers were told to start."""
    h.to_worker.clear()
    told = cluster.Stage(swap=swap, plan="p", version=version, base=base)
    h.feed(act.CoordinatorSaid(0, structs.replace(told, **changed)))
    return [m for _, m in h.to_worker if isinstance(m, sidecar.RunJob)]


def bases(runs: list[sidecar.RunJob]) -> set[tuple[int, int]]:
    """Return each arena and the location of its base; both workers were told equal values."""
    assert len(runs) == 2 and runs[0].bases == runs[1].bases
    return {(base.arena, base.held_in) for base in runs[0].bases}


def done(h: Harness, runs: list[sidecar.RunJob]) -> None:
    h.done([(worker, run.run) for worker, run in enumerate(runs)])


def test_a_source_compares_two_slots_and_names_the_version_as_every_node_does() -> None:
    h, source = crossing("source", 0)
    for version in (1, 2):
        assert h.publish(source, version) == local.Done()
    first, second = (slot.arena for slot in h.daemon.members[source].source.slots)
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
    assert not any(slot.compared for slot in h.daemon.members[source].source.slots)


def test_a_publish_after_the_workers_have_ended_waits_for_nobody() -> None:
    h, source = crossing("source", 0)
    for version in (1, 2):
        h.publish(source, version)
    done(h, stage(h, "s", 2, base=1))
    assert h.publish(source, 3) == local.Done()


def test_a_target_has_a_base_from_a_commit_until_something_is_staged() -> None:
    h, target = crossing("target", 1)
    staging = h.daemon.members[target].memory.staging
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
    h.feed(act.WorkerSaid(0, sidecar.RunDone(run=runs[0].run, reason="differs", differs=True)))
    assert h.said(cluster.StageDone)
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="s2", reason="x")))
    runs = stage(h, "s3", 2, base=1)
    assert bases(runs) == set()
    done(h, runs)
    h.commit(target, "s3", 2)
    assert bases(stage(h, "s4", 3, base=2))


# --- Before a daemon treats the version in the other arena as staged, workers compare it with its digests.


class Node:
    """A node with a target that has flipped to versions 1 and 2; its other arena contains version 1."""

    def __init__(self, *, verify: bool = True) -> None:
        self.h = h = Harness(workers=1)
        h.ask(local.CreateArena(nbytes=65536))
        places, at = [], 0
        for t in SHARD.tensors:
            places.append(Place(h.arenas, at, row_major_strides(t.shape, 2)))
            at += 2 * int(np.prod(t.shape))
        self.source, self.target = h.fleet(live=tuple(places), flips=True)
        for version in (1, 2):
            if version == 2:
                h.publish(self.source, 2)
            stage = cluster.Stage(swap=f"s{version}", plan="p", version=version, verify=verify)
            h.to_worker.clear()
            h.feed(act.CoordinatorSaid(0, stage))
            h.done(h.runs())
            h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap=f"s{version}", version=version)))
            h.to_worker.clear()
            h.ask(local.CommitDone(swap=f"s{version}", member=self.target, paused_s=0.0, exchanged=True))
            self.digested()
        self.h.to_coordinator.clear()

    def digested(self, byte: int = 0, reason: str = "") -> int:
        """Answer all digest requests for the worker; return their number."""
        asked = 0
        while wanted := [m for _, m in self.h.to_worker if isinstance(m, sidecar.ReadSpans)]:
            self.h.to_worker.clear()
            for m in wanted:
                asked += 1
                digests = bytes([byte]) * 8 * len(m.spans)
                taken = sidecar.SpansRead(run=m.run, digests=b"" if reason else digests, reason=reason)
                self.h.feed(act.WorkerSaid(0, taken))
        return asked

    def roll_back(self, swap: str = "back") -> None:
        spare = cluster.Stage(swap=swap, plan="", version=1, run=self.state.spare_run, members=(self.target,))
        self.h.feed(act.CoordinatorSaid(0, spare))

    @property
    def state(self) -> TargetState:
        return self.h.daemon.members[self.target].state


def test_a_rollback_waits_until_the_other_arena_is_compared_and_later_ones_do_not() -> None:
    node = Node()
    node.roll_back()
    assert not node.h.said(cluster.StageDone) and node.state.step is Step.IDLE
    assert node.digested() == 1
    (done,) = node.h.said(cluster.StageDone)
    assert done.swap == "back" and node.state.step is Step.STAGED
    node.h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="back", reason="x")))
    node.roll_back("again")
    assert node.digested() == 0 and node.state.staged == "again"


def test_it_is_compared_in_the_background_where_nobody_waits() -> None:
    node = Node()
    node.h.feed(Tick())
    assert node.digested() == 1
    node.roll_back()
    assert node.state.staged == "back" and node.digested() == 0


@pytest.mark.parametrize(("byte", "reason"), [(1, ""), (0, "the worker cannot read it")])
def test_what_differs_or_cannot_be_read_is_not_staged_and_the_coordinator_forgets_it(byte: int, reason: str) -> None:
    node = Node()
    node.roll_back()
    node.digested(byte, reason)
    (failed,) = node.h.said(cluster.StageDone)
    assert failed.where == node.target and (reason or "its memory has changed since version 1") in failed.reason
    (update,) = node.h.said(cluster.NodeUpdate)
    assert [moved.spare_lost for moved in update.moved] == [True] and node.state.step is Step.IDLE
    node.roll_back("again")
    assert len(node.h.said(cluster.StageDone)) == 2 and node.digested() == 0


def test_a_rollback_that_is_aborted_meanwhile_stages_nothing() -> None:
    node = Node()
    node.roll_back()
    node.h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="back", reason="x")))
    assert node.digested() == 1
    assert not node.h.said(cluster.StageDone) and node.state.step is Step.IDLE


def test_what_is_not_verified_is_not_compared() -> None:
    node = Node(verify=False)
    node.roll_back()
    assert node.state.staged == "back" and node.digested() == 0


def test_what_is_live_again_and_differs_is_fenced() -> None:
    node = Node()
    node.h.feed(Tick())
    node.digested()
    node.roll_back()
    node.h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap="back", version=1)))
    node.h.ask(local.CommitDone(swap="back", member=node.target, paused_s=0.0, exchanged=True))
    node.h.to_client.clear()
    node.digested(1)
    (fence,) = [m for _, _, m in node.h.to_client if isinstance(m, local.Fence)]
    assert "its memory has changed since version 1" in fence.reason and not node.state.may_serve
