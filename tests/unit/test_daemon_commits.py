"""Commits in a daemon: workers that write live tensors, digests, and who is evicted in between."""

from __future__ import annotations

import torch

from refitd.daemon import actions as act
from refitd.events import Log, Tick
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.shards import Place
from tests.support.daemon_harness import SHARD, TARGET, Harness


def committing(h: Harness) -> str:
    """Have a worker write the live tensors of a target, which is returned."""
    h.ask(local.CreateArena(nbytes=65536))
    places, at = [], 0
    for t in SHARD.tensors:
        strides = tuple(2 * s for s in torch.empty(t.shape).stride())
        places.append(Place(h.arenas, at, strides))
        at += 2 * torch.empty(t.shape).numel()
    _, target = h.fleet(live=tuple(places))
    h.done(h.stage())
    h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap="s", version=1)))
    assert h.to_client[-1][2] == local.PrepareCommit(swap="s", member=target, version=1, by_worker=True)
    h.to_worker.clear()
    h.ask(local.CommitQuiet(swap="s", member=target))
    return target


def test_a_commit_copy_is_repeated_by_the_worker_that_replaces_one_of_an_aborted_swap() -> None:
    h = Harness(workers=1)
    target = committing(h)
    ((worker, run),) = h.runs()
    h.fleet("other", "q")
    h.stage("b", plan="q")
    h.to_worker.clear()
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="b", reason="x")))
    assert h.restarted == [worker]
    h.to_client.clear()
    h.done([(worker, run)])  # the old worker's word
    assert not h.to_client
    h.done(h.runs())
    assert h.to_client == [(1, 0, local.CommitApplied(swap="s", member=target, reason=""))]


def test_a_commit_copy_is_repeated_when_a_worker_dies_and_given_up_after_three() -> None:
    h = Harness(workers=1)
    target = committing(h)
    for _ in range(3):
        assert not [m for _, _, m in h.to_client if isinstance(m, local.CommitApplied)]
        h.feed(act.WorkerDied(0, "was killed by SIGBUS"))
    assert sum(isinstance(m, sidecar.RunJob) for _, m in h.to_worker) == 3
    (applied,) = [m for _, _, m in h.to_client if isinstance(m, local.CommitApplied)]
    assert "3 attempts failed" in applied.reason
    h.ask(local.CommitFailed(swap="s", member=target, reason=applied.reason))
    assert h.daemon.members[target].state.version is None


def test_a_swap_that_is_not_verified_compares_nothing_and_leaves_no_digests() -> None:
    for verify in (True, False):
        h = Harness()
        _, target = h.fleet()
        h.to_worker.clear()
        h.feed(act.CoordinatorSaid(0, cluster.Stage(swap="s", plan="p", version=1, verify=verify)))
        runs = [(worker, m) for worker, m in h.to_worker if isinstance(m, sidecar.RunJob)]
        assert runs and all(m.verify is verify for _, m in runs)
        h.done([(worker, m.run) for worker, m in runs])
        h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap="s", version=1)))
        assert h.daemon.members[target].state.holds is None  # it is not committed yet
        h.to_worker.clear()
        h.ask(local.CommitDone(swap="s", member=target, paused_s=0.0))
        assert not h.to_worker  # another swap may be about to begin
        h.feed(Tick())
        taken = [m for _, m in h.to_worker if isinstance(m, sidecar.TakeDigests)]
        assert bool(taken) is verify


def test_digests_wait_for_swaps_and_are_forgotten_when_one_writes_over_what_they_are_of() -> None:
    h = Harness()
    source, target = h.fleet()
    h.done(h.stage())
    h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap="s", version=1)))
    h.to_worker.clear()
    h.ask(local.CommitDone(swap="s", member=target, paused_s=0.0))
    h.feed(Tick())
    ((worker, message),) = [(w, m) for w, m in h.to_worker if isinstance(m, sidecar.TakeDigests)]
    h.feed(act.CoordinatorSaid(0, cluster.EndSwap(swap="s")))
    assert h.publish(source, 2) == local.Done()
    assert h.stage("s2", 2)  # at once: it waits for nothing
    h.feed(act.WorkerSaid(worker, sidecar.DigestsTaken(run=message.run, digests=bytes(8 * len(message.spans)))))
    assert h.daemon.members[target].proof is None


def test_a_rank_that_is_left_out_is_fenced_again_with_each_decision_and_that_is_logged_once() -> None:
    h = Harness()
    _, target = h.fleet()
    h.done(h.stage())
    h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap="s", version=1)))
    h.ask(local.CommitDone(swap="s", member=target, paused_s=0.0))
    h.to_client.clear()
    logged: list[str] = []
    for live in (2, 3, 4):
        fence = cluster.FenceMember(member=target, reason=f"it holds version 1, and {live} is live")
        done = h.daemon.handle(act.CoordinatorSaid(0, fence), h.now)
        told = [one.message for one in done if isinstance(one, act.ToClient)]
        assert told == [local.Fence(member=target, reason=fence.reason)]
        logged += [one.event for one in done if isinstance(one, Log)]
    assert logged == ["fenced"]


def test_an_evicted_member_is_told_and_whatever_it_says_afterwards_is_refused() -> None:
    h = Harness()
    _, target = h.fleet()
    h.done(h.stage())
    h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap="s", version=1)))
    h.to_client.clear(), h.to_coordinator.clear()
    h.feed(act.CoordinatorSaid(0, cluster.EvictMember(member=target, reason="it hangs")))
    ((_, _, told),) = h.to_client
    assert told == local.Evicted(member=target, reason="it hangs")
    assert target not in h.daemon.members and h.closed
    assert not h.said(cluster.RemoveShard)  # whoever said so knows
    refused = h.ask(local.CommitDone(swap="s", member=target, paused_s=0.0))
    assert isinstance(refused, local.Failure) and "register again" in refused.message
    assert not h.said(cluster.MemberCommitted)
    assert isinstance(h.ask(TARGET), local.TargetRegistered)


def test_a_commit_is_reported_before_what_went_live_is_listed_for_its_digests() -> None:
    h = Harness()
    _, target = h.fleet()
    h.done(h.stage())
    h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap="s", version=1)))
    done = h.daemon.handle(act.ClientSaid(1, 0, local.CommitDone(swap="s", member=target, paused_s=0.0)), h.now)
    assert [one.message.member for one in done if isinstance(one, act.ToCoordinator)] == [target]
    (then,) = [one.event for one in done if isinstance(one, act.Follow)]
    assert then == act.TookOver(target, exchanged=False)
    h.feed(then, Tick())
    assert any(isinstance(message, sidecar.TakeDigests) for _, message in h.to_worker)
