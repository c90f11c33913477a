"""One node's state without sockets: a made-up coordinator, client and workers talk to it."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from refitd.daemon import actions as act
from refitd.describe.roster import Roster
from refitd.errors import ArenaError, RefusedError
from refitd.events import Busy, Tick
from refitd.plan.build import plan_copies
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.shards import Place, metadata_of
from tests.support.daemon_harness import SHARD, SOURCE, TARGET, Harness
from tests.support.shards import whole


def test_whoever_was_halted_for_a_swap_that_never_began_is_told_to_go_on() -> None:
    h = Harness()
    _, target = h.fleet()
    h.feed(act.CoordinatorSaid(0, cluster.Pause(swap="s", version=1, members=(target,))))
    h.to_client.clear()
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=1, boot="another")))
    (resume,) = [message for _, _, message in h.to_client if isinstance(message, local.Resume)]
    assert (resume.swap, resume.member, resume.is_poisoned) == ("s", target, False)


def test_a_heartbeat_tells_where_targets_stand_that_have_moved_since_the_last_one() -> None:
    h = Harness()
    _, target = h.fleet()

    def told() -> list[tuple[str, str, int]]:
        h.to_coordinator.clear()
        h.feed(Tick())
        (update,) = h.said(cluster.NodeUpdate)
        assert isinstance(update, cluster.NodeUpdate)
        return [(moved.member, moved.step, len(moved.events)) for moved in update.moved]

    assert (told(), told()) == ([(target, "idle, empty", 0)], [])
    h.done(h.stage())
    assert (told(), told()) == ([(target, "staged swap s, empty", 2)], [])
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=1, boot="another")))
    assert told() == [(target, "staged swap s, empty", 2)]


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


def test_a_slot_that_is_being_read_is_not_overwritten() -> None:
    h = Harness()
    source, _ = h.fleet()
    runs = h.stage()
    assert h.publish(source, 2) == local.Done()  # the other slot
    assert h.ask(local.BeginPublish(member=source, version=3, timeout_s=5.0)) == local.SlotGranted(slot=1)
    assert h.said(cluster.ShardWithdrawn) == [cluster.ShardWithdrawn(member=source, version=2)]
    # now both are taken: the next one waits, and is served when the swap has read
    assert h.ask(local.BeginPublish(member=source, version=4, timeout_s=5.0)) is None
    h.done(runs)
    h.feed(act.CoordinatorSaid(0, cluster.EndSwap(swap="s")))
    assert (1, 7, local.SlotGranted(slot=0)) in h.to_client


def test_a_publish_that_waits_too_long_is_told_who_reads() -> None:
    h = Harness()
    source, _ = h.fleet()
    h.stage()
    h.ask(local.BeginPublish(member=source, version=2, timeout_s=5.0))
    assert h.ask(local.BeginPublish(member=source, version=3, timeout_s=5.0)) is None
    h.now = 6.0
    h.feed(act.CoordinatorSaid(0, local.Done()), Tick())
    (failure,) = [m for _, _, m in h.to_client if isinstance(m, local.Failure)]
    assert "no snapshot slot became free for version 3" in failure.message and "['s']" in failure.message


def test_a_registration_the_coordinator_refuses_leaves_no_arena() -> None:
    h = Harness()
    h.refuse_with = local.Failure(code="refused", message="rank 0 is already registered")
    assert h.ask(SOURCE) == h.refuse_with
    assert not h.daemon.members and not h.daemon.arenas and h.closed == [1, 2]


def test_without_a_coordinator_requests_fail_at_once() -> None:
    h = Harness()
    h.now = 100.0
    for request in (SOURCE, local.StartSwap(model="m"), local.GetStatus()):
        failure = h.ask(request)
        assert isinstance(failure, local.Failure) and "no coordinator" in failure.message


def test_a_coordinator_that_falls_silent_fails_what_waits_for_it() -> None:
    h = Harness()
    assert h.ask(local.StartSwap(model="m")) is None
    h.now = 6.0
    h.feed(Tick())
    (failure,) = [m for _, _, m in h.to_client if isinstance(m, local.Failure)]
    assert "has said nothing for 5 s" in failure.message
    assert isinstance(h.to_coordinator[-1], cluster.NodeUpdate | cluster.NodeHello)


def test_a_new_coordinator_is_told_of_every_member_and_what_it_holds() -> None:
    h = Harness()
    source, target = h.fleet()
    h.done(h.stage())
    h.to_coordinator.clear()
    h.feed(act.CoordinatorSaid(0, local.Failure(code="unknown-node", message="hello?")))
    assert h.said(cluster.NodeHello)
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=1, boot="other")))
    added = {m.member: m for m in h.said(cluster.AddShard)}
    assert added[source].versions == (1,)
    assert added[target].staged == "s"


def test_a_trainer_that_leaves_keeps_its_versions_and_an_engine_that_leaves_nothing() -> None:
    h = Harness()
    source, target = h.fleet()
    h.feed(act.SessionClosed(1, "died"))
    assert list(h.daemon.members) == [source]
    assert h.said(cluster.DetachShard) and h.said(cluster.RemoveShard)[0].member == target
    assert len(h.daemon.arenas) == 2
    # its rank registers again and takes the place
    h.feed(act.SessionOpened(2, 200, "again"))
    assert isinstance(h.ask(SOURCE, session=2), local.SourceRegistered)
    assert source not in h.daemon.members and len(h.daemon.members) == 1
    assert len(h.daemon.arenas) == 2


def test_a_client_that_dies_while_its_arenas_are_made_leaves_none() -> None:
    h = Harness()
    instructions = h.daemon.handle(act.ClientSaid(1, 1, SOURCE), 0.0)
    (make,) = [i for i in instructions if isinstance(i, act.MakeArenas)]
    h.feed(act.SessionClosed(1, "died"), act.ArenasMade(make.ticket, (11, 12)))
    assert h.closed == [11, 12]
    assert not h.daemon.arenas and not h.daemon.members


@pytest.mark.parametrize(
    ("live", "why"),
    [
        ((Place(99, 0, (96, 2)),) * 4, "arena 99 is not one of this client's"),
        ((Place(1, 0, (96, 2)),), "1 places for 4 tensors"),
        ((Place(1, 0, (2,)),) * 4, "1 strides for shape"),
        ((Place(1, 4000, (96, 2)),) * 4, "which has 4096"),
    ],
)
def test_live_places_outside_the_clients_own_arenas_are_refused(live: tuple[Place, ...], why: str) -> None:
    h = Harness()
    assert isinstance(h.ask(local.CreateArena(nbytes=4096)), local.ArenaCreated)
    failure = h.ask(local.RegisterTarget(model="m", replica="r", rank=0, world_size=1, shard=SHARD, live=live))
    assert isinstance(failure, local.Failure) and why in failure.message
    assert len(h.daemon.arenas) == 1


def test_an_arena_is_handed_only_to_its_own_session_and_as_it_may_be() -> None:
    h = Harness()
    target = h.ask(TARGET)
    assert isinstance(target, local.TargetRegistered)
    assert h.daemon.may_fetch(1, target.staging, False).nbytes == target.nbytes
    with pytest.raises(RefusedError, match="for reading only"):
        h.daemon.may_fetch(1, target.staging, True)
    with pytest.raises(RefusedError, match="not one of this session's"):
        h.daemon.may_fetch(2, target.staging, False)


def test_the_limit_on_arenas_counts_those_being_made() -> None:
    h = Harness()
    half = local.CreateArena(nbytes=600 << 20)
    assert [type(i) for i in h.daemon.handle(act.ClientSaid(1, 1, half), 0.0)] == [act.MakeArenas]
    (refused,) = [i for i in h.daemon.handle(act.ClientSaid(1, 2, half), 0.0) if isinstance(i, act.ToClient)]
    assert refused.message.code == ArenaError.code and "node.max_arena_bytes" in refused.message.message


def committing(h: Harness) -> str:
    """Have a worker write the live tensors of a target, which is returned."""
    source = h.ask(SOURCE)
    size = 65536
    h.ask(local.CreateArena(nbytes=size))
    places, at = [], 0
    for t in SHARD.tensors:
        strides = tuple(2 * s for s in torch.empty(t.shape).stride())
        places.append(Place(h.arenas, at, strides))
        at += 2 * torch.empty(t.shape).numel()
    target = h.ask(local.RegisterTarget(model="m", replica="r", rank=0, world_size=1, shard=SHARD, live=tuple(places)))
    assert isinstance(source, local.SourceRegistered) and isinstance(target, local.TargetRegistered)
    h.publish(source.member, 1)
    rosters = [Roster(0, source=metadata_of(SHARD, 0)), Roster(1, destination=metadata_of(SHARD, 1))]
    members = (source.member, target.member)
    table = plan_copies(rosters).table.to_wire()
    h.feed(act.CoordinatorSaid(0, cluster.LoadPlan(plan="p", model="m", ranks=(0, 1), members=members, table=table)))
    h.done(h.stage())
    h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap="s", version=1)))
    assert h.to_client[-1][2] == local.PrepareCommit(swap="s", member=target.member, version=1, by_worker=True)
    h.to_worker.clear()
    h.ask(local.CommitQuiet(swap="s", member=target.member))
    return target.member


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


def test_a_description_is_sent_once_per_layout_and_again_when_it_was_forgotten() -> None:
    h = Harness()
    for rank in range(3):
        registration = local.RegisterTarget(model="m", replica="r", rank=rank, world_size=3, shard=SHARD)
        assert isinstance(h.ask(registration), local.TargetRegistered)
    assert len(h.said(cluster.DescribeShard)) == 1
    assert len({m.digest for m in h.said(cluster.AddShard)}) == 1
    h.refuse_with = local.Failure(code="unknown-shard", message="forgotten")
    answer = h.ask(local.RegisterTarget(model="m", replica="q", rank=0, world_size=1, shard=SHARD))
    # it was described again, once; a coordinator that still does not know it refuses the registration
    assert len(h.said(cluster.DescribeShard)) == 2
    assert answer == h.refuse_with


def test_arenas_are_asked_for_with_the_sizes_of_all_there_will_be() -> None:
    h = Harness()
    h.ask(local.CreateArena(nbytes=1000))
    asked = [
        i
        for request in (1, 2)
        for i in h.daemon.handle(act.ClientSaid(1, request, local.CreateArena(nbytes=2000 * request)), 0.0)
        if isinstance(i, act.MakeArenas)
    ]
    assert [make.held for make in asked] == [(1000,), (1000, 2000)]


def test_the_coordinator_is_told_in_which_way_each_version_is_given() -> None:
    h = Harness()
    source = h.ask(SOURCE)
    assert isinstance(source, local.SourceRegistered)
    h.publish(source.member, 1)
    addresses = (1 << 20,) * len(SHARD.tensors)
    assert h.ask(local.Lend(member=source.member, version=2, addresses=addresses, reason="it is fast")) == local.Done()
    assert h.said(cluster.ShardPublished) == [
        cluster.ShardPublished(member=source.member, version=1, mode="copied"),
        cluster.ShardPublished(member=source.member, version=2, mode="pulled", mode_reason="it is fast"),
    ]
    # a coordinator that starts anew learns the same
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=1, boot="other")))
    added = h.said(cluster.AddShard)[-1]
    assert (added.versions, added.modes) == ((1, 2), ("copied", "pulled"))
    assert (added.mode, added.mode_reason) == ("pulled", "it is fast")


def test_a_client_has_only_its_own_memory_measured() -> None:
    h = Harness()
    source = h.ask(SOURCE)
    assert isinstance(source, local.SourceRegistered)
    h.feed(act.SessionOpened(2, 200, "other"))
    measure = local.MeasurePull(member=source.member, spans=((4096, 2, 100),))
    refused = h.ask(measure, session=2)
    assert isinstance(refused, local.Failure) and "not a registration of this session" in refused.message
    assert h.daemon.handle(act.ClientSaid(1, 7, measure), 0.0) == [act.TimePull(1, 7, 100, ((4096, 2, 100),))]


def crossing_plan(h: Harness, epoch: str = "e1", lanes: int = 2) -> cluster.LoadPlan:
    """A plan whose source is here, rank 0, and whose target is on n1."""
    source = h.ask(SOURCE)
    assert isinstance(source, local.SourceRegistered)
    assert h.publish(source.member, 1) == local.Done()
    table = plan_copies([Roster(0, source=metadata_of(SHARD, 0)), Roster(1, destination=metadata_of(SHARD, 1))]).table
    return cluster.LoadPlan(
        plan="p",
        model="m",
        ranks=(0, 1),
        members=(source.member, "far"),
        table=table.select(slice(0, 0)).to_wire(),
        crossing=table.to_wire(),
        crossing_nodes=(0, 1),
        epoch=cluster.EpochPlan(
            id=epoch,
            service="gloo",
            nodes=("n0", "n1"),
            hosts=("h", "h1"),
            lanes=lanes,
            staging_bytes=1 << 20,
            timeout_s=9.0,
        ),
    )


def test_a_plan_between_nodes_is_loaded_once_every_lane_has_met_its_peer() -> None:
    h = Harness()
    h.feed(act.CoordinatorSaid(0, crossing_plan(h)))
    joins = [(worker, m) for worker, m in h.to_worker if isinstance(m, sidecar.JoinEpoch)]
    assert [(worker, m.index, m.labels[1]) for worker, m in joins] == [
        (0, 0, "worker 0 on node n1 (host h1)"),
        (1, 0, "worker 1 on node n1 (host h1)"),
    ]
    h.feed(act.WorkerSaid(1, sidecar.LanePut(epoch="e1", key="k", value=b"v")))
    assert h.to_coordinator[-1] == cluster.EpochPut(epoch="e1", lane=1, key="k", value=b"v")
    h.feed(act.CoordinatorSaid(0, cluster.EpochValue(epoch="e1", lane=1, key="q", value=b"w")))
    assert h.to_worker[-1] == (1, sidecar.LaneValue(epoch="e1", key="q", value=b"w"))
    h.feed(act.WorkerSaid(0, sidecar.EpochJoined(epoch="e1")))
    assert cluster.PlanLoaded(plan="p", epoch="e1") not in h.to_coordinator
    h.feed(act.WorkerSaid(1, sidecar.EpochJoined(epoch="e1")))
    assert h.to_coordinator[-1] == cluster.PlanLoaded(plan="p", epoch="e1")


@pytest.mark.parametrize("loaded", [True, False])
def test_a_new_coordinator_finds_no_plan_nor_epoch_of_the_one_before(loaded: bool) -> None:
    h = Harness()
    h.feed(act.CoordinatorSaid(0, crossing_plan(h)))
    for worker in (0, 1) if loaded else (0,):
        h.feed(act.WorkerSaid(worker, sidecar.EpochJoined(epoch="e1")))
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=1, boot="other")))
    assert {(w, m.epoch) for w, m in h.to_worker if isinstance(m, sidecar.LeaveEpoch)} == {(0, "e1"), (1, "e1")}
    assert h.stage() == []
    assert "does not have plan p" in h.said(cluster.StageFailed)[0].reason


def test_a_source_node_reports_staged_with_nothing_received() -> None:
    h = Harness()
    h.feed(act.CoordinatorSaid(0, crossing_plan(h)))
    for worker in (0, 1):
        h.feed(act.WorkerSaid(worker, sidecar.EpochJoined(epoch="e1")))
    runs = h.stage()
    assert [worker for worker, _ in runs] == [0, 1]
    for worker, run in runs:
        h.feed(act.WorkerSaid(worker, sidecar.RunDone(run=run, copies=0, bytes=0, seconds=0.5, staging_bytes=7)))
    done = h.to_coordinator[-1]
    assert isinstance(done, cluster.StageDone)
    assert (done.copies, done.bytes, done.crossing_s, done.staging_bytes) == (0, 0, 0.5, 7)


def test_a_worker_that_dies_takes_its_epoch_with_it() -> None:
    h = Harness()
    h.feed(act.CoordinatorSaid(0, crossing_plan(h)))
    h.to_worker.clear()
    h.feed(act.WorkerDied(0, "was killed by SIGKILL"))
    lost = [m for m in h.to_coordinator if isinstance(m, cluster.EpochLost)]
    assert [(m.plan, m.epoch, m.reason) for m in lost] == [("p", "e1", "was killed by SIGKILL")]
    assert "worker 0" in lost[0].where
    assert (1, sidecar.LeaveEpoch(epoch="e1")) in h.to_worker
    assert (0, sidecar.WarmUp(service="gloo")) in h.to_worker


def test_an_abort_ends_the_workers_that_exchange_and_says_that_their_epoch_is_over() -> None:
    h = Harness()
    h.feed(act.CoordinatorSaid(0, crossing_plan(h)))
    for worker in (0, 1):
        h.feed(act.WorkerSaid(worker, sidecar.EpochJoined(epoch="e1")))
    h.stage()
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="s", reason="x")))
    assert h.restarted == [0, 1]
    assert [m.epoch for m in h.to_coordinator if isinstance(m, cluster.EpochLost)] == ["e1"]


def test_an_abort_ends_what_another_model_exchanges_between_nodes_by_name() -> None:
    h = Harness()
    h.feed(act.CoordinatorSaid(0, crossing_plan(h)))
    for worker in (0, 1):
        h.feed(act.WorkerSaid(worker, sidecar.EpochJoined(epoch="e1")))
    h.fleet("other", "q")
    h.stage("crossing")
    h.stage("b", plan="q")
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="b", reason="x")))
    (failed,) = h.said(cluster.StageFailed)
    assert (failed.swap, failed.where) == ("crossing", "worker 0 on node n0")
    assert failed.reason == "it was replaced, as swap b was aborted"


def test_a_plan_that_does_not_fit_the_node_is_refused_with_a_reason() -> None:
    h = Harness()
    h.feed(act.CoordinatorSaid(0, crossing_plan(h, lanes=3)))
    refused = h.to_coordinator[-1]
    assert isinstance(refused, cluster.PlanRefused)
    assert (refused.plan, refused.epoch) == ("p", "e1") and "3 lanes" in refused.reason


def test_what_was_being_staged_is_forgotten_when_a_coordinator_takes_the_node_back_in() -> None:
    h = Harness()
    source, _ = h.fleet()
    h.stage()
    h.feed(act.CoordinatorSaid(0, local.Failure(code="unknown-node", message="hello?")))
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=1, boot="b")))
    assert h.restarted == [0, 1], "nothing is written for it any more"
    assert h.publish(source, 2) == local.Done() and h.publish(source, 3) == local.Done(), "and nothing holds a slot"


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


# --- whose numbers, and whose slots -----------------------------------------------------------------------


def test_a_version_that_the_coordinator_refuses_is_not_held_and_its_slot_is_free() -> None:
    h = Harness()
    source, _ = h.fleet()
    h.refuse_with = local.Failure(code="refused", message="version 2 was live with other contents; publish 5 or above")
    assert isinstance(h.publish(source, 2), local.Failure)
    assert h.daemon.members[source].held() == [1]
    h.refuse_with = None
    assert h.publish(source, 2) == local.Done()


def test_a_source_that_was_admitted_above_what_was_live_is_refused_lower_numbers_before_it_copies() -> None:
    h = Harness()
    h.refuse_with = cluster.SourceAdmitted(run="r2", next_version=12)
    source = h.ask(SOURCE)
    assert isinstance(source, local.SourceRegistered) and (source.next_version, source.run) == (12, "r2")
    h.refuse_with = None
    refused = h.ask(local.BeginPublish(member=source.member, version=3, timeout_s=5.0))
    assert isinstance(refused, local.Failure) and "publish 12 or above" in refused.message
    assert h.publish(source.member, 12) == local.Done()
    # whoever coordinates next is told what it may not publish again, and whose versions these are
    h.to_coordinator.clear()
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=1, boot="another")))
    (again,) = h.said(cluster.AddShard)
    assert (again.run, again.newest, again.versions) == ("r2", 12, (12,))


def test_a_daemon_says_what_it_was_told_is_live_to_a_coordinator_that_does_not_know_it() -> None:
    h = Harness()
    claim = cluster.LiveClaim("m", 4, "r", 9, "s", "journal", 4)
    h.feed(act.CoordinatorSaid(0, cluster.LiveIs(live=claim)))
    h.feed(act.CoordinatorSaid(0, local.Failure(code="unknown-node", message="who?")))
    assert h.said(cluster.NodeHello)[-1].live == (claim,)


def test_a_version_of_another_run_is_never_staged_for_the_one_that_was_asked_for() -> None:
    h = Harness()
    h.fleet()
    h.feed(act.CoordinatorSaid(0, cluster.Stage(swap="s", plan="p", version=1, run="other")))
    (failed,) = h.said(cluster.StageFailed)
    assert "no longer held" in failed.reason


def test_what_a_target_was_told_to_commit_is_said_to_the_next_coordinator() -> None:
    h = Harness()
    _, target = h.fleet()
    h.done(h.stage())
    h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap="s", version=1)))
    h.to_coordinator.clear()
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=1, boot="another")))
    told = {m.member: m for m in h.said(cluster.AddShard)}
    assert (told[target].staged, told[target].staged_version, told[target].committing) == ("s", 1, True)


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


def test_a_worker_that_dies_before_it_has_said_who_it_is_has_no_pid() -> None:
    h = Harness()
    h.fleet()
    h.stage()
    h.feed(act.WorkerDied(0, "was killed by SIGKILL"))
    (failed,) = h.said(cluster.StageFailed)
    assert "pid" not in failed.where and failed.where.startswith("worker 0 on node")


def test_a_daemon_that_was_busy_does_not_call_its_coordinator_silent() -> None:
    h = Harness()
    h.now = 6.0
    h.feed(Busy(5.5), Tick())
    assert h.daemon.is_coordinated
    h.feed(act.CoordinatorSaid(0, local.Done()), Busy(5.5))  # what was heard since is excused nothing
    h.now = 12.0
    h.feed(Tick())
    assert not h.daemon.is_coordinated


def test_a_registration_that_was_looked_at_beside_the_loop_is_like_any_other() -> None:
    h = Harness()
    for message, kind in ((SOURCE, local.SourceRegistered), (TARGET, local.TargetRegistered)):
        h.to_client.clear()
        h.feed(act.ClientSaid(1, 7, message, h.daemon.prepare(1, message)()))
        (found,) = [m for _, request, m in h.to_client if request == 7]
        assert isinstance(found, kind)
        assert h.daemon.members[found.member].id == found.member
    bad = local.RegisterSource(model="m", rank=3, world_size=1, shard=SHARD)
    h.to_client.clear()
    h.feed(act.ClientSaid(1, 7, bad, h.daemon.prepare(1, bad)()))
    (failure,) = [m for _, request, m in h.to_client if request == 7]
    assert isinstance(failure, local.Failure) and "rank 3 is not in 0..0" in failure.message


# --- what is refused changes nothing (all requests: tests/property/test_refused_requests.py) --------------


def test_a_rank_for_which_there_is_no_permit_leaves_what_is_retained_for_it() -> None:
    h = Harness(keep_targets_s=60.0)
    _, target = h.fleet()
    h.done(h.stage())
    h.commit(target)
    h.feed(act.SessionClosed(1, "died"), act.SessionOpened(1, 100, "again"))
    free, h.daemon._permits._free = h.daemon._permits._free, []
    refused = h.ask(TARGET)
    assert isinstance(refused, local.Failure) and "registered target ranks already" in refused.message
    h.daemon._permits._free = free
    again = h.ask(TARGET)
    assert isinstance(again, local.TargetRegistered) and again.restores


@pytest.mark.parametrize("code", ["refused", "protocol"])
def test_a_version_that_the_coordinator_refuses_leaves_the_source_as_it_was(code: str) -> None:
    h = Harness()
    source, _ = h.fleet()
    member = h.daemon.members[source]
    before = (member.newest, member.mode, member.mode_reason, member.held(), member.where(1))
    h.refuse_with = local.Failure(code=code, message="no")
    lent = local.Lend(member=source, version=2, addresses=(1, 2, 3, 4), reason="fast")
    assert h.ask(lent) == h.refuse_with
    assert (
        member.newest,
        member.mode,
        member.mode_reason,
        member.held(),
        member.where(1),
    ) == before


def test_without_a_coordinator_nothing_is_published() -> None:
    h = Harness()
    source, _ = h.fleet()
    h.now = 100.0
    for failed in (h.publish(source, 2), h.ask(local.Lend(member=source, version=2, addresses=(1, 2, 3, 4)))):
        assert isinstance(failed, local.Failure) and "no coordinator" in failed.message
    h.feed(act.CoordinatorSaid(0, local.Done()))
    assert h.daemon.members[source].held() == [1]
    assert h.publish(source, 2) == local.Done()


@pytest.mark.parametrize(("short", "frees"), [(0, False), (1, True), (1 << 40, False)])
def test_retained_memory_is_given_up_only_for_as_much_as_it_is(short: int, frees: bool) -> None:
    h = Harness(keep_targets_s=60.0)
    _, target = h.fleet()
    h.done(h.stage())
    h.commit(target)
    h.feed(act.SessionClosed(1, "died"), act.SessionOpened(1, 100, "again"))
    h.no_memory = ArenaError("there is no memory", short=short)
    made = h.ask(local.CreateArena(nbytes=4096))
    assert isinstance(made, local.ArenaCreated) is frees
    assert bool(h.daemon._retained.arenas()) is not frees and bool(h.closed) is frees


@pytest.mark.parametrize("lacking", ["the node's limit", "the system's memory"])
@pytest.mark.parametrize("refuses", [True, False])
def test_retained_memory_makes_room_for_a_rank_only_if_the_coordinator_takes_it_in(lacking: str, refuses: bool) -> None:
    h = Harness(keep_targets_s=60.0)
    _, target = h.fleet()
    h.done(h.stage())
    h.commit(target)
    h.feed(act.SessionClosed(1, "died"), act.SessionOpened(1, 100, "again"))
    retained = h.daemon._retained.arenas()
    if lacking == "the node's limit":
        h.daemon.arenas._max_bytes = sum(arena.nbytes for arena in h.daemon.arenas.values())
    else:
        h.no_memory, h.no_memory_times = ArenaError("there is no memory", short=1), 1 if refuses else 2
    h.refuse_with = local.Failure(code="refused", message="nobody expects it") if refuses else None
    h.to_coordinator.clear()
    answer = h.ask(structs.replace(TARGET, replica="another"))
    questions = [m.is_question for m in h.said(cluster.AddShard) if isinstance(m, cluster.AddShard)]
    if refuses:
        assert answer == h.refuse_with and questions == [True]
        assert h.daemon._retained.arenas() == retained and not h.closed
    else:
        assert isinstance(answer, local.TargetRegistered) and questions == [True, False]
        assert not h.daemon._retained.arenas() and {*h.closed} == retained


def test_a_coordinator_that_has_forgotten_a_description_is_sent_it_again_once() -> None:
    h = Harness()
    assert isinstance(h.ask(TARGET), local.TargetRegistered)
    h.to_coordinator.clear()
    h.refuse_with = local.Failure(code="unknown-shard", message="which?")
    refused = h.ask(structs.replace(TARGET, replica="another"))
    assert refused == h.refuse_with
    assert [type(m) for m in h.to_coordinator] == [cluster.AddShard, cluster.DescribeShard, cluster.AddShard]


def test_an_engine_that_the_coordinator_does_not_take_back_leaves_what_is_retained_for_it() -> None:
    h = Harness(keep_targets_s=60.0)
    _, target = h.fleet()
    h.done(h.stage())
    h.commit(target)
    h.feed(act.SessionClosed(1, "died"), act.SessionOpened(1, 100, "again"))
    retained, members = h.daemon._retained.arenas(), {*h.daemon.members}
    for _ in range(2):
        again = h.ask(TARGET)
        assert isinstance(again, local.TargetRegistered) and again.restores
        h.refuse_with = local.Failure(code="refused", message="no")
        assert h.ask(local.Restored(member=again.member)) == h.refuse_with
        h.refuse_with = None
        assert h.daemon._retained.arenas() == retained and {*h.daemon.members} == members and not h.closed


def test_a_registration_whose_tensors_are_freed_while_its_arenas_are_made_is_refused_and_leaves_none() -> None:
    h = Harness()
    assert isinstance(h.ask(local.CreateArena(nbytes=1 << 20)), local.ArenaCreated)
    live = tuple(Place(1, 0, tuple(2 * s for s in torch.empty(t.shape).stride())) for t in SHARD.tensors)
    asked = h.daemon.handle(act.ClientSaid(1, 8, structs.replace(TARGET, live=live)), 0.0)
    (make,) = [i for i in asked if isinstance(i, act.MakeArenas)]
    assert h.ask(local.FreeArena(arena=1)) == local.Done()
    h.feed(act.ArenasMade(make.ticket, (7,)))
    failed = h.to_client[-1][2]
    assert isinstance(failed, local.Failure) and "have been freed" in failed.message
    assert h.closed == [1, 7] and not h.daemon.arenas and not h.daemon.members
