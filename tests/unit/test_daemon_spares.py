"""What a daemon does before it takes the version in another arena as staged: workers compare that with its digests."""

from __future__ import annotations

import numpy as np
import pytest

from refitd.buffers.layout import row_major_strides
from refitd.daemon import actions as act
from refitd.daemon.target_state import Step, TargetState
from refitd.events import Tick
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.shards import Place
from tests.support.daemon_harness import SHARD, Harness


class Node:
    """A node with a target that has flipped to versions 1 and 2, so that its other arena holds 1."""

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
        """Have the worker answer all that it was asked to digest; return how often it was."""
        asked = 0
        while wanted := [m for _, m in self.h.to_worker if isinstance(m, sidecar.TakeDigests)]:
            self.h.to_worker.clear()
            for m in wanted:
                asked += 1
                digests = bytes([byte]) * 8 * len(m.spans)
                taken = sidecar.DigestsTaken(run=m.run, digests=b"" if reason else digests, reason=reason)
                self.h.feed(act.WorkerSaid(0, taken))
        return asked

    def roll_back(self, swap: str = "back") -> None:
        spare = cluster.StageSpare(swap=swap, version=1, run=self.state.spare_run, members=(self.target,))
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
    (failed,) = node.h.said(cluster.StageFailed)
    assert failed.where == node.target and (reason or "its memory has changed since version 1") in failed.reason
    (update,) = node.h.said(cluster.NodeUpdate)
    assert [moved.spare_lost for moved in update.moved] == [True] and node.state.step is Step.IDLE
    node.roll_back("again")
    assert len(node.h.said(cluster.StageFailed)) == 2 and node.digested() == 0


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
