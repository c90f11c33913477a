"""Epochs that are given up end at once in the workers that are joining them, or the workers end."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator

import pytest
from msgspec import structs

from refitd.buffers import handoff
from refitd.copy_services.registry import installed
from refitd.daemon.actions import Instruction, ToCoordinator, ToWorker
from refitd.daemon.epochs import COLD_PATIENCE_TICKS, PATIENCE_TICKS, WARM_UP_TICKS, LocalEpochs
from refitd.errors import PeerLost
from refitd.protocol import cluster, sidecar
from refitd.protocol.base import Secret
from refitd.protocol.codec import Decoder, encode
from refitd.worker.main import DaemonLink, Worker

EPOCH = cluster.EpochPlan(
    id="e1",
    service="gloo",
    nodes=("n0", "n1"),
    hosts=("h", "h"),
    lanes=2,
    staging_bytes=1 << 20,
    timeout_s=5.0,
    key=Secret(bytes(32)),
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ends
    for end in ends:
        end.close()


def test_a_worker_leaves_an_epoch_that_was_given_up_before_it_came_to_it(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    here, there = pair
    worker = DaemonLink(here)
    for epoch in ("e2", "e1"):
        handoff.send(there, encode(0, sidecar.LeaveEpoch(epoch=epoch)))
    with pytest.raises(PeerLost, match="given up"):
        worker.await_value("e1", "0/0", {}, 60.0)
    # the word about e2 has been read while the worker waited for e1: there is nothing left to wait for
    with pytest.raises(PeerLost, match="given up"):
        worker.await_value("e2", "0/0", {}, 60.0)
    assert [worker.next()[0].epoch for _ in range(2)] == ["e2", "e1"]  # type: ignore[union-attr]


def stuck_after(
    ticks: int, *said: sidecar.LanePut | sidecar.EpochJoined | sidecar.EpochFailed, is_warm: bool = True
) -> list[int]:
    out: list[Instruction] = []
    epochs = LocalEpochs("n0", "127.0.0.1", out.append, lambda plan, epoch: None)
    epochs.join("plan", EPOCH)
    epochs.worker_said(0, sidecar.EpochJoined(epoch="e1"))
    if is_warm:
        epochs.worker_said(1, sidecar.LanePut(epoch="e1", key="0/0", value=b""))
    epochs.leave("e1")
    assert [i.worker for i in out if isinstance(i, ToWorker) and isinstance(i.message, sidecar.LeaveEpoch)] == [0, 1]
    for message in said:
        epochs.worker_said(1, message)
    found: list[int] = []
    for _ in range(ticks):
        found = [worker for worker, _ in epochs.tick()]
    return found


def test_only_a_worker_that_does_not_come_out_is_stuck() -> None:
    assert stuck_after(PATIENCE_TICKS) == []
    assert stuck_after(PATIENCE_TICKS + 1) == [1]
    assert stuck_after(PATIENCE_TICKS + 1, sidecar.EpochFailed(epoch="e1", reason="given up")) == []
    assert stuck_after(PATIENCE_TICKS + 1, sidecar.EpochJoined(epoch="e1")) == []


def test_a_worker_that_still_loads_what_its_first_epoch_needs_is_given_longer() -> None:
    assert stuck_after(PATIENCE_TICKS + 1, is_warm=False) == []
    assert stuck_after(COLD_PATIENCE_TICKS + 1, is_warm=False) == [1]


def test_workers_of_a_fleet_load_what_their_first_epoch_needs_before_there_is_one() -> None:
    out: list[Instruction] = []
    epochs = LocalEpochs("n0", "127.0.0.1", out.append, lambda plan, epoch: None, workers=3, warms="gloo")
    epochs.worker_gone(2, "worker 2 on node n0", "it died")
    epochs.worker_said(1, sidecar.LanePut(epoch="e1", key="0/0", value=b""))  # it has loaded that already
    for _ in range(WARM_UP_TICKS - 1):
        epochs.tick()
    assert out == []
    for _ in range(3):
        epochs.tick()
    assert out == [ToWorker(worker, sidecar.WarmUp(service="gloo")) for worker in (0, 2)]
    epochs.worker_gone(1, "worker 1 on node n0", "it died")
    for _ in range(WARM_UP_TICKS - 1):
        epochs.tick()
    assert len(out) == 2, "what it is given again comes first"
    for _ in range(3):
        epochs.tick()
    assert out[2:] == [ToWorker(1, sidecar.WarmUp(service="gloo"))]


def test_an_epoch_that_a_stuck_worker_never_came_to_waits_for_its_successor() -> None:
    out: list[Instruction] = []
    joined: list[tuple[str, str]] = []
    epochs = LocalEpochs("n0", "127.0.0.1", out.append, lambda plan, epoch: joined.append((plan, epoch)))
    epochs.join("plan", EPOCH)
    epochs.worker_said(1, sidecar.LanePut(epoch="e1", key="here/0", value=b""))
    epochs.leave("e1")
    epochs.worker_said(0, sidecar.EpochFailed(epoch="e1", reason="given up"))
    epochs.join("plan", structs.replace(EPOCH, id="e2"))
    epochs.value(cluster.EpochValue(epoch="e2", lane=1, key="here/1", value=b"there"))
    out.clear()
    epochs.worker_gone(1, "worker 1 on node n0", "it did not come out of epoch e1, which was given up")
    assert [type(i.message) for i in out if isinstance(i, ToWorker)] == [sidecar.JoinEpoch, sidecar.LaneValue]
    assert not [i for i in out if isinstance(i, ToCoordinator)]  # nothing is lost
    for worker in (0, 1):
        epochs.worker_said(worker, sidecar.EpochJoined(epoch="e2"))
    assert joined == [("plan", "e2")]
    out.clear()
    epochs.worker_gone(1, "worker 1 on node n0", "was killed")  # now it was in it
    assert [type(i.message) for i in out if isinstance(i, ToCoordinator)] == [cluster.EpochLost]


def test_a_worker_does_not_go_on_with_a_value_of_an_epoch_it_is_to_leave(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    here, there = pair
    handoff.send(there, encode(0, sidecar.LaneValue(epoch="e1", key="0/0", value=b"here")))
    values: dict[tuple[str, str], bytes] = {}
    worker = DaemonLink(here)
    assert worker.await_value("e1", "0/0", values, 60.0) == b"here"
    handoff.send(there, encode(0, sidecar.LeaveEpoch(epoch="e1")))
    with pytest.raises(PeerLost, match="given up"):
        worker.await_value("e1", "0/0", values, 60.0)


def test_a_worker_that_met_nobody_keeps_no_descriptor_of_it(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    worker = Worker(here, installed(), 1)
    worker._handle(sidecar.WarmUp(service="no such service"), ())
    worker._handle(sidecar.WarmUp(service="gloo"), ())  # what it takes to load torch is not part of joining
    open_files: list[int] = []
    gc.disable()  # it may run at any time, or not for long
    try:
        for number in range(4):
            meet = sidecar.JoinEpoch(
                epoch=f"e{number}",
                service="gloo",
                index=0,
                labels=("worker 0 on node n0", "worker 0 on node n1"),
                address="127.0.0.1",
                staging_bytes=1 << 20,
                timeout_s=0.5,
                key=Secret(bytes(32)),
            )
            worker._handle(meet, ())
            open_files.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    assert len(set(open_files[1:])) == 1, open_files
    there.settimeout(1.0)
    decoder: Decoder[sidecar.FromWorker] = Decoder(sidecar.FromWorker, handoff.MAX_DATAGRAM)
    said = [decoder.decode(handoff.receive(there)[0])[1] for _ in range(8)]
    assert [type(message) for message in said] == [sidecar.LanePut, sidecar.EpochFailed] * 4
