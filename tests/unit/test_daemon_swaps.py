"""Staging and commits in a daemon: jobs, the workers that run them, aborts, digests."""

from __future__ import annotations

import copy

import pytest

from refitd.daemon import actions as act
from refitd.daemon.router import handle
from refitd.protocol import cluster, local, sidecar
from refitd.states import Log, Tick
from tests.support.daemon_harness import SHARD, SOURCE, TARGET, Harness
from tests.support.shards import whole


def test_staging_is_done_when_every_worker_is() -> None:
    h = Harness()
    _, target = h.fleet()
    runs = h.stage()
    assert {worker for worker, _ in runs} == {0, 1}
    h.done(runs[:1])
    assert not h.said(cluster.StageDone)
    h.done(runs[1:])
    (done,) = h.said(cluster.StageDone)
    assert done.bytes == sum(t.numel() * 2 for t in whole(1).values())
    assert h.daemon.members[target].state.staged == "s"


def test_a_job_is_loaded_once_per_version_slot_and_then_only_run() -> None:
    h = Harness()
    source, target = h.fleet()
    h.done(h.stage("s1"))
    assert sum(isinstance(m, sidecar.LoadJob) for _, m in h.to_worker) == 2
    h.feed(act.CoordinatorSaid(0, cluster.EndSwap(swap="s1")))
    h.commit(target, "s1")
    for version, loads in ((2, 2), (3, 0), (4, 0)):  # two slots: a job each
        assert h.publish(source, version) == local.Done()
        h.done(h.stage(f"s{version}", version))
        assert sum(isinstance(m, sidecar.LoadJob) for _, m in h.to_worker) == loads
        h.feed(act.CoordinatorSaid(0, cluster.EndSwap(swap=f"s{version}")))
        h.commit(target, f"s{version}", version)


def test_an_abort_costs_another_model_s_swap_nothing_but_time() -> None:
    h = Harness()
    h.fleet()
    h.fleet("other", "q")
    h.stage("a")
    runs = h.stage("b", plan="q")
    h.done(runs[:1])
    h.to_worker.clear()
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="a", reason="x")))
    assert h.restarted == [0, 1]
    again = h.runs()
    assert [worker for worker, _ in again] == [runs[1][0]], "what was done for it is done"
    told = [m for worker, m in h.to_worker if worker == runs[1][0]]
    assert [type(m) for m in told[-2:]] == [sidecar.LoadJob, sidecar.RunJob], "the fresh worker knows no job"
    h.done(runs[1:])  # a late message of the old worker
    assert not h.said(cluster.StageDone)
    h.done(again)
    (done,) = h.said(cluster.StageDone)
    assert done.swap == "b" and not done.reason


def test_what_was_aborted_is_not_run_again() -> None:
    h = Harness()
    h.fleet()
    h.fleet("other", "q")
    h.stage("a")
    h.stage("b", plan="q")
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="b", reason="x")))
    h.to_worker.clear()
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="a", reason="x")))
    assert not h.runs() and not h.said(cluster.StageDone)


def test_a_job_that_could_not_be_handed_over_fails_the_swap_by_name_and_is_handed_over_next_time() -> None:
    h = Harness()
    h.fleet()
    h.stage()
    worker, load = next((w, m) for w, m in h.to_worker if isinstance(m, sidecar.LoadJob))
    h.feed(act.NotSent(worker, load, "Too many open files"))
    (failed,) = h.said(cluster.StageDone)
    assert failed.where == f"worker {worker} on node n0" and "Too many open files" in failed.reason
    # the worker's failure for the unknown run is ignored
    run = next(m.run for w, m in h.to_worker if isinstance(m, sidecar.RunJob) and w == worker)
    h.feed(act.WorkerSaid(worker, sidecar.RunDone(run=run, reason="job 1 is not loaded")))
    assert len(h.said(cluster.StageDone)) == 1
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="s", reason="x")))
    h.done(h.stage("s2"))
    assert (worker, load.job) in [(w, m.job) for w, m in h.to_worker if isinstance(m, sidecar.LoadJob)]
    assert h.said(cluster.StageDone)


def test_an_arena_that_a_worker_was_not_told_of_is_mapped_before_the_next_job_that_needs_it() -> None:
    h = Harness()
    _, target = h.fleet()
    staging = h.daemon.members[target].memory.staging
    h.feed(act.NotSent(1, sidecar.MapArena(arena=staging, nbytes=1, write=True), "Too many open files"))
    h.done(h.stage())
    told = [(worker, m) for worker, m in h.to_worker if isinstance(m, sidecar.MapArena | sidecar.LoadJob)]
    maps = [(worker, m.arena, m.write) for worker, m in told if isinstance(m, sidecar.MapArena)]
    assert maps == [(1, staging, True)]
    mine = [m for worker, m in told if worker == 1]
    assert isinstance(mine[0], sidecar.MapArena) and isinstance(mine[1], sidecar.LoadJob)


def test_a_job_that_failed_in_a_worker_is_loaded_anew() -> None:
    h = Harness()
    h.fleet()
    (worker, run), *_ = h.stage()
    h.feed(act.WorkerSaid(worker, sidecar.RunDone(run=run, reason="arena 1 is not mapped here")))
    assert [w for w, m in h.to_worker if isinstance(m, sidecar.DropJob)] == [worker]
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="s", reason="x")))
    h.done(h.stage("s2"))
    assert worker in [w for w, m in h.to_worker if isinstance(m, sidecar.LoadJob)]


def test_arenas_on_a_gpu_are_counted_and_say_so_to_workers_and_in_the_status() -> None:
    h = Harness()
    assert isinstance(h.ask(local.CreateArena(nbytes=4096, device="GPU-a")), local.ArenaDescriptor)
    target = local.RegisterTarget(model="m", replica="r", rank=0, world_size=1, shard=SHARD, device="GPU-a")
    registered = h.ask(target)
    assert isinstance(registered, local.Registered)
    (gpu,) = h.daemon.status().gpus
    assert (gpu.device, gpu.arenas, gpu.arena_bytes) == ("GPU-a", 2, 4096 + registered.nbytes)
    mapped = [(worker, m.device) for worker, m in h.to_worker if isinstance(m, sidecar.MapArena)]
    assert mapped == [(0, "GPU-a"), (0, "GPU-a")]
    h.feed(act.SessionClosed(1, "died"))
    assert h.daemon.status().gpus == () and len(h.closed) == 2


def test_a_version_of_another_run_is_never_staged_for_the_one_that_was_asked_for() -> None:
    h = Harness()
    h.fleet()
    h.feed(act.CoordinatorSaid(0, cluster.Stage(swap="s", plan="p", version=1, run="other")))
    (failed,) = h.said(cluster.StageDone)
    assert "no longer held" in failed.reason


def test_a_worker_that_dies_before_it_has_said_who_it_is_has_no_pid() -> None:
    h = Harness()
    h.fleet()
    h.stage()
    h.feed(act.WorkerDied(0, "was killed by SIGKILL"))
    (failed,) = h.said(cluster.StageDone)
    assert "pid" not in failed.where and failed.where.startswith("worker 0 on node")


def test_a_source_that_withdraws_a_staged_version_leaves_the_target_ready_to_commit() -> None:
    """The coordinator may have decided the swap already; tests/exploration found that the version was lost."""
    h = Harness()
    source, target = h.fleet()
    h.done(h.stage())
    assert h.ask(local.Withdraw(member=source, version=1)) == local.Done()
    assert h.said(cluster.StageDone), "before the decision the coordinator aborts the swap"
    assert h.daemon.members[target].state.staged == "s"
    h.commit(target)
    assert h.daemon.members[target].state.version == 1


# --- Commits in a daemon: digests are read, and members may be evicted in between.


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
        taken = [m for _, m in h.to_worker if isinstance(m, sidecar.ReadSpans)]
        assert bool(taken) is verify


def test_a_rank_that_is_left_out_is_fenced_again_with_each_decision_and_that_is_logged_once() -> None:
    h = Harness()
    _, target = h.fleet()
    h.done(h.stage())
    h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap="s", version=1)))
    h.ask(local.CommitDone(swap="s", member=target, paused_s=0.0))
    h.to_client.clear()
    logged: list[str] = []
    for live in (2, 3, 4):
        fence = local.Fence(member=target, reason=f"it holds version 1, and {live} is live")
        done = handle(h.daemon, act.CoordinatorSaid(0, fence), h.now)
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
    h.feed(act.CoordinatorSaid(0, local.Evicted(member=target, reason="it hangs")))
    ((_, _, told),) = h.to_client
    assert told == local.Evicted(member=target, reason="it hangs")
    assert target not in h.daemon.members and h.closed
    assert not h.said(local.Deregister)  # the coordinator itself sent the eviction
    refused = h.ask(local.CommitDone(swap="s", member=target, paused_s=0.0))
    assert isinstance(refused, local.Failure) and "register again" in refused.message
    assert not h.said(local.CommitDone)
    assert isinstance(h.ask(TARGET), local.Registered)


def test_a_commit_is_reported_before_what_went_live_is_listed_for_its_digests() -> None:
    h = Harness()
    _, target = h.fleet()
    h.done(h.stage())
    h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap="s", version=1)))
    done = handle(h.daemon, act.ClientSaid(1, 0, local.CommitDone(swap="s", member=target, paused_s=0.0)), h.now)
    assert [one.message.member for one in done if isinstance(one, act.ToCoordinator)] == [target]
    (then,) = [one.event for one in done if isinstance(one, act.Follow)]
    assert then == act.TookOver(target, exchanged=False)
    h.feed(then, Tick())
    assert any(isinstance(message, sidecar.ReadSpans) for _, message in h.to_worker)


# --- The daemon's state is a value: a copy handles events without a change of the original. -------------


def events(h: Harness, target: str, runs: list[tuple[int, int]]) -> list[act.Event]:
    """Return the remaining events of a swap that is being staged, and other events that a node can see."""
    done = [act.WorkerSaid(worker, sidecar.RunDone(run, 1, 1, 0.1)) for worker, run in runs]
    return [
        *done,
        act.CoordinatorSaid(0, cluster.CommitStaged(swap="s", version=1)),
        act.ClientSaid(1, 8, local.CommitDone(swap="s", member=target, paused_s=0.0)),
        act.TookOver(target, exchanged=False),
        Tick(),
        act.ClientSaid(1, 9, SOURCE),
        act.ClientSaid(1, 10, TARGET),
        act.ClientSaid(1, 11, local.StartSwap(model="m")),
        act.WorkerDied(0, "was killed"),
        act.CoordinatorSaid(0, cluster.CheckMembers(check="c", members=(target,), timeout_s=5.0)),
        act.CoordinatorSaid(0, cluster.Abort(swap="s", reason="r")),
        act.SessionClosed(1, "gone"),
    ]


@pytest.mark.parametrize("keep_targets_s", [0.0, 60.0])
def test_a_copy_of_the_state_answers_alone_as_the_original_would(keep_targets_s: float) -> None:
    h = Harness(keep_targets_s=keep_targets_s)
    _, target = h.fleet()
    runs = h.stage()
    assert runs
    copied, history = copy.deepcopy(h.daemon), events(h, target, runs)
    by_copy = [handle(copied, event, 1.0) for event in history]
    assert sum(map(len, by_copy)) > len(history)
    untouched = h.daemon.members[target]
    assert (untouched.state.swap, len(h.daemon.sessions), len(h.daemon.jobs.runs)) == ("s", 1, len(runs))
    assert [handle(h.daemon, event, 1.0) for event in history] == by_copy
