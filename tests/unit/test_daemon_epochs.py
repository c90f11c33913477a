"""A daemon whose plan reaches another node: its epoch's lanes, from joining to their end."""

from __future__ import annotations

import pytest

from refitd.daemon import actions as act
from refitd.daemon.effects import Effects, ToCoordinator, ToWorker
from refitd.daemon.jobs import LocalEpochs, WorkerArenas
from refitd.describe.metadata import Roster
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import PROTOCOL_VERSION, Message, Secret
from refitd.protocol.shards import metadata_of
from tests.support.daemon_harness import SHARD, SOURCE, Harness
from tests.support.shares import everyone, load_of


def crossing_plan(h: Harness, epoch: str = "e1", lanes: int = 2) -> cluster.LoadPlan:
    """Return a plan from rank 0 on this node to a target on n1."""
    source = h.ask(SOURCE)
    assert h.publish(source.member, 1) == local.Done()
    rosters = [Roster(0, metadata_of(SHARD, 0), node="n0"), Roster(1, (), metadata_of(SHARD, 1), "n1")]
    formed = cluster.EpochPlan(epoch, "gloo", ("n0", "n1"), ("h", "h1"), lanes, 1 << 20, 9.0, Secret(bytes(32)))
    return load_of(rosters, (source.member, "far"), node="n0", epoch=formed)


def crossing(*joined: int) -> Harness:
    """Return a daemon with that plan after the given workers have joined the epoch."""
    h = Harness()
    h.feed(act.CoordinatorSaid(0, crossing_plan(h)))
    for worker in joined:
        h.feed(act.WorkerSaid(worker, sidecar.EpochJoined(epoch="e1")))
    return h


def test_a_plan_between_nodes_is_loaded_once_every_lane_has_met_its_peer() -> None:
    h = crossing()
    joins = [(worker, m) for worker, m in h.to_worker if isinstance(m, sidecar.JoinEpoch)]
    assert [(worker, m.index, m.labels[1]) for worker, m in joins] == [
        (0, 0, "worker 0 on node n1 (host h1)"),
        (1, 0, "worker 1 on node n1 (host h1)"),
    ]
    h.feed(act.WorkerSaid(0, sidecar.EpochJoined(epoch="e1")))
    assert cluster.PlanLoaded(plan="p", epoch="e1") not in h.to_coordinator
    h.feed(act.WorkerSaid(1, sidecar.EpochJoined(epoch="e1")))
    assert h.to_coordinator[-1] == cluster.PlanLoaded(plan="p", epoch="e1")


@pytest.mark.parametrize("loaded", [True, False])
def test_a_new_coordinator_finds_no_plan_nor_epoch_of_the_one_before(loaded: bool) -> None:
    h = crossing(*((0, 1) if loaded else (0,)))
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="other")))
    assert {(w, m.epoch) for w, m in h.to_worker if isinstance(m, sidecar.LeaveEpoch)} == {(0, "e1"), (1, "e1")}
    assert h.stage() == []
    assert "does not have plan p" in h.said(cluster.StageDone)[0].reason


def test_a_source_node_reports_staged_with_nothing_received() -> None:
    h = crossing(0, 1)
    runs = h.stage()
    assert [worker for worker, _ in runs] == [0, 1]
    for worker, run in runs:
        h.feed(act.WorkerSaid(worker, sidecar.RunDone(run=run, copies=0, bytes=0, seconds=0.5, staging_bytes=7)))
    done = h.to_coordinator[-1]
    assert (done.copies, done.bytes, done.crossing_s, done.staging_bytes) == (0, 0, 0.5, 7)


def test_a_worker_that_dies_takes_its_epoch_with_it() -> None:
    h = crossing()
    h.to_worker.clear()
    h.feed(act.WorkerDied(0, "was killed by SIGKILL"))
    lost = [m for m in h.to_coordinator if isinstance(m, cluster.PlanLoaded)]
    assert [(m.plan, m.epoch, m.reason) for m in lost] == [("p", "e1", "was killed by SIGKILL")]
    assert "worker 0" in lost[0].where
    assert (1, sidecar.LeaveEpoch(epoch="e1")) in h.to_worker
    assert (0, sidecar.WarmUp(service="gloo")) in h.to_worker


def test_an_abort_ends_the_workers_that_exchange_and_says_that_their_epoch_is_over() -> None:
    h = crossing(0, 1)
    h.stage()
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="s", reason="x")))
    assert h.restarted == [0, 1]
    assert [m.epoch for m in h.to_coordinator if isinstance(m, cluster.PlanLoaded) and m.reason] == ["e1"]


def test_an_abort_ends_what_another_model_exchanges_between_nodes_by_name() -> None:
    h = crossing(0, 1)
    h.fleet("other", "q")
    h.stage("crossing")
    h.stage("b", plan="q")
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="b", reason="x")))
    (failed,) = h.said(cluster.StageDone)
    assert (failed.swap, failed.where) == ("crossing", "worker 0 on node n0")
    assert failed.reason == "it was replaced, as swap b was aborted"


def test_a_plan_that_does_not_fit_the_node_is_refused_with_a_reason() -> None:
    h = Harness()
    h.feed(act.CoordinatorSaid(0, crossing_plan(h, lanes=3)))
    refused = h.to_coordinator[-1]
    assert (refused.plan, refused.epoch) == ("p", "e1") and "3 lanes" in refused.reason


def gpu_epoch(*own: str) -> cluster.EpochPlan:
    """An epoch of n0, with these GPUs, and n1, with two."""
    return cluster.EpochPlan(
        "e1",
        "gloo",
        ("n0", "n1"),
        ("h", "h1"),
        1,
        1 << 20,
        9.0,
        Secret(bytes(32)),
        gpu_service="nccl",
        gpus=(own, ("GPU-a", "GPU-b")),
    )


def orders(out: Effects) -> list[tuple[int, Message]]:
    found = [(effect.worker, effect.message) for effect in out if isinstance(effect, ToWorker)]
    out.clear()
    return found


def test_the_workers_of_gpus_join_one_group_after_their_lanes_and_the_plan_waits_for_both() -> None:
    out, maps = Effects(0.0), WorkerArenas(2, ("GPU-b", "GPU-a"))
    epochs = LocalEpochs("n0", "127.0.0.1", maps)
    epochs.join(out, "p", made := gpu_epoch("GPU-a", "GPU-b"), everyone(made))
    joins = [(worker, message) for worker, message in orders(out) if isinstance(message, sidecar.JoinEpoch)]
    assert [(worker, m.epoch, m.service, m.index, m.device) for worker, m in joins] == [
        (0, "e1", "gloo", 0, ""),
        (0, "e1/gpus", "nccl", 1, "GPU-b"),
        (1, "e1/gpus", "nccl", 0, "GPU-a"),
    ]
    assert joins[1][1].labels[3] == "GPU-b on node n1 (host h1)"
    told = [epochs.worker_said(out, w, sidecar.EpochJoined(epoch=name)) for w, name in ((0, "e1"), (0, "e1/gpus"))]
    assert told == [None, None]
    assert epochs.worker_said(out, 1, sidecar.EpochJoined(epoch="e1/gpus")) == ("p", "e1")
    out.clear()
    epochs.worker_gone(out, 1, "worker 1", "was killed")
    assert [effect.message.epoch for effect in out if isinstance(effect, ToCoordinator)] == ["e1"]
    left = [(worker, message.epoch) for worker, message in orders(out) if isinstance(message, sidecar.LeaveEpoch)]
    assert left == [(0, "e1"), (0, "e1/gpus")]


def test_a_node_without_a_gpu_in_the_epoch_has_only_lanes() -> None:
    out = Effects(0.0)
    epochs = LocalEpochs("n0", "127.0.0.1", WorkerArenas(2, ("GPU-a", "GPU-b")))
    epochs.join(out, "p", made := gpu_epoch(), everyone(made))
    assert [message.epoch for _, message in orders(out) if isinstance(message, sidecar.JoinEpoch)] == ["e1"]
    assert epochs.worker_said(out, 0, sidecar.EpochJoined(epoch="e1")) == ("p", "e1")


def test_two_gpus_with_one_worker_are_refused_by_name() -> None:
    epochs = LocalEpochs("n0", "127.0.0.1", WorkerArenas(1))
    with pytest.raises(ValueError, match=r"GPU-a and GPU-b share worker 0 of node n0.*set node\.workers"):
        epochs.gpu_workers(gpu_epoch("GPU-a", "GPU-b"))


def test_why_an_epoch_was_not_formed_is_shown_until_its_nodes_form_one_or_for_ten_minutes() -> None:
    out, epochs = Effects(5.0), LocalEpochs("n0", "127.0.0.1", WorkerArenas(1))
    for reason, shown in (("n1 is out of reach", ("12 s ago: n1 is out of reach",)), ("", ())):
        epochs.join(out, "p", made := gpu_epoch(), everyone(made))
        epochs.worker_said(out, 0, sidecar.EpochJoined(epoch="e1", reason=reason))
        assert [epochs.problems(now) for now in (17.0, 606.0)] == [shown, ()]
        epochs.leave(out, "e1")
    assert out.is_news
