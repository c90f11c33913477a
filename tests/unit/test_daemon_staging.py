"""Staging in a daemon: jobs, the workers that run them, and aborts."""

from __future__ import annotations

from refitd.daemon import actions as act
from refitd.protocol import cluster, local, sidecar
from tests.support.daemon_harness import SHARD, Harness
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


def test_an_abort_replaces_the_workers_that_are_still_copying_and_only_those() -> None:
    h = Harness()
    _, target = h.fleet()
    runs = h.stage()
    h.done(runs[:1])
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="s", reason="x")))
    assert h.restarted == [runs[1][0]]
    # what the old worker may still have said counts for nothing
    h.done(runs[1:])
    assert not h.said(cluster.StageDone)
    assert h.daemon.members[target].state.staged is None
    # the fresh worker is given arenas and job anew
    again = h.stage("s2")
    loads = [worker for worker, m in h.to_worker if isinstance(m, sidecar.LoadJob)]
    assert loads == h.restarted
    h.done(again)
    assert h.said(cluster.StageDone)


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
    h.done(runs[1:])  # the old worker's word
    assert not h.said(cluster.StageDone)
    h.done(again)
    (done,) = h.said(cluster.StageDone)
    assert done.swap == "b" and not h.said(cluster.StageFailed)


def test_what_was_aborted_is_not_run_again() -> None:
    h = Harness()
    h.fleet()
    h.fleet("other", "q")
    h.stage("a")
    h.stage("b", plan="q")
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="b", reason="x")))
    h.to_worker.clear()
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="a", reason="x")))
    assert not h.runs() and not h.said(cluster.StageFailed)


def test_a_dead_worker_fails_the_staging_with_its_name_once() -> None:
    h = Harness()
    h.fleet()
    runs = h.stage()
    for worker, _ in runs:
        h.feed(act.WorkerDied(worker, "was killed by SIGKILL"))
    (failed,) = h.said(cluster.StageFailed)
    assert "worker 0" in failed.where and "SIGKILL" in failed.reason


def test_a_job_that_could_not_be_handed_over_fails_the_swap_by_name_and_is_handed_over_next_time() -> None:
    h = Harness()
    h.fleet()
    h.stage()
    worker, load = next((w, m) for w, m in h.to_worker if isinstance(m, sidecar.LoadJob))
    h.feed(act.NotSent(worker, load, "Too many open files"))
    (failed,) = h.said(cluster.StageFailed)
    assert failed.where == f"worker {worker} on node n0" and "Too many open files" in failed.reason
    # what the worker says of the run that it knows nothing of changes nothing
    run = next(m.run for w, m in h.to_worker if isinstance(m, sidecar.RunJob) and w == worker)
    h.feed(act.WorkerSaid(worker, sidecar.RunFailed(run=run, reason="job 1 is not loaded")))
    assert len(h.said(cluster.StageFailed)) == 1
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="s", reason="x")))
    h.done(h.stage("s2"))
    assert (worker, load.job) in [(w, m.job) for w, m in h.to_worker if isinstance(m, sidecar.LoadJob)]
    assert h.said(cluster.StageDone)


def test_an_arena_that_a_worker_was_not_told_of_is_mapped_before_the_next_job_that_needs_it() -> None:
    h = Harness()
    _, target = h.fleet()
    staging = h.daemon.members[target].staging
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
    h.feed(act.WorkerSaid(worker, sidecar.RunFailed(run=run, reason="arena 1 is not mapped here")))
    assert [w for w, m in h.to_worker if isinstance(m, sidecar.DropJob)] == [worker]
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="s", reason="x")))
    h.done(h.stage("s2"))
    assert worker in [w for w, m in h.to_worker if isinstance(m, sidecar.LoadJob)]


def test_arenas_on_a_gpu_are_counted_and_say_so_to_workers_and_in_the_status() -> None:
    h = Harness()
    assert isinstance(h.ask(local.CreateArena(nbytes=4096, device="GPU-a")), local.ArenaCreated)
    target = local.RegisterTarget(model="m", replica="r", rank=0, world_size=1, shard=SHARD, device="GPU-a")
    registered = h.ask(target)
    assert isinstance(registered, local.TargetRegistered)
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
    (failed,) = h.said(cluster.StageFailed)
    assert "no longer held" in failed.reason


def test_a_worker_that_dies_before_it_has_said_who_it_is_has_no_pid() -> None:
    h = Harness()
    h.fleet()
    h.stage()
    h.feed(act.WorkerDied(0, "was killed by SIGKILL"))
    (failed,) = h.said(cluster.StageFailed)
    assert "pid" not in failed.where and failed.where.startswith("worker 0 on node")
