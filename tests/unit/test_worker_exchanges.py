"""Epochs of workers: joining, leaving, and the jobs over them."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from refitd.addressing.paths import TransferList
from refitd.buffers import handoff
from refitd.copy_services import Backend, Capabilities, Epoch
from refitd.copy_services.registry import Registry, installed
from refitd.copy_services.wires import Wires, listen_at
from refitd.daemon.actions import ToCoordinator, ToWorker
from refitd.daemon.effects import Effects
from refitd.daemon.jobs import COLD_PATIENCE_TICKS, PATIENCE_TICKS, WARM_UP_TICKS, LocalEpochs, WorkerArenas
from refitd.errors import DeadlineExceeded, TransportError
from refitd.protocol import cluster, sidecar
from refitd.protocol.base import Decoder, Secret, encode
from refitd.protocol.sidecar import HeldBase, JoinEpoch
from refitd.worker.exchanges import Exchanges
from refitd.worker.main import DaemonLink, Worker
from tests.support.arenas import arena_of
from tests.support.shares import everyone


class Noting:
    """The methods of an ExchangeService that a worker calls while it prepares."""

    ranks = (0, 1)

    def __init__(self) -> None:
        self.noted: list[tuple[int, int]] = []
        self.held: list[list[tuple[int, int]]] = []

    def send(self, task_id: int, piece: Any, peer: int, *, part: int, route: Any) -> None:
        self.noted.append((task_id, part))

    receive = send

    def use(self, arenas: Any) -> None:
        """It registers no memory."""

    def hold(self) -> None:
        self.held.append(self.noted)
        self.noted = []


def receives(*offsets: int) -> bytes:
    """Receives of 10 bytes each, at these offsets of arena 3."""
    n = len(offsets)

    def column(value: int) -> np.ndarray:
        return np.full(n, value, np.int64)

    numbers = np.arange(n, dtype=np.int64)
    return TransferList(
        is_send=column(0),
        peer=column(1),
        task_id=numbers,
        part=column(0),
        size=np.full((n, 1), 10, np.int64),
        element_size=column(1),
        cast=column(0),
        path=column(0),
        hop=column(0),
        arena=column(3),
        offset=np.array(offsets, np.int64),
        stride=np.ones((n, 1), np.int64),
        origin=numbers,
    ).to_bytes()


def joined(service: Any, timeout_s: float, arenas: Any = None) -> Exchanges:
    """A worker that has joined epoch "e" over a backend that `service` makes of the epoch."""
    capabilities = Capabilities(is_one_sided=False, crosses_nodes=True)
    backend = Backend("noting", capabilities, lambda: "", join=service)
    exchanges = Exchanges(Registry([backend]), arenas or {}, Wires(None))
    message = JoinEpoch(
        epoch="e",
        service="noting",
        index=0,
        labels=("worker 0 on node a",),
        address="127.0.0.1",
        staging_bytes=1 << 20,
        timeout_s=timeout_s,
        key=Secret(bytes(32)),
    )
    exchanges.join(message)
    return exchanges


class Looking(Noting):
    """A service without transfers; it reads the bases of the noted pieces before and after each progress report."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Any] = []
        self.bases: list[list[str | None]] = []

    def send(self, task_id: int, piece: Any, peer: int, *, part: int, route: Any) -> None:
        self.pieces.append(piece)

    receive = send

    def run(self, timeout: float, transfers: Any, *, verify: bool, on_progress: Any, on_wrong_base: Any) -> Any:
        from refitd.copy_services import ExchangeResult

        for _ in range(3):
            self.bases.append([piece.base and piece.base.version for piece in self.pieces])
            on_progress(0)
        return ExchangeResult(0, 0, 0, 0, 0.0)


def test_a_job_uses_the_bases_of_a_run_until_it_is_told_that_they_are_wanted() -> None:
    pytest.importorskip("torch")
    arenas = {number: arena_of(4096, write=number != 4) for number in (3, 4, 5)}
    arenas[5].bytes[:] = 5
    service = Looking()
    anything: Any = service
    exchanges = joined(lambda epoch: anything, 5.0, arenas)
    rows = TransferList.from_bytes(receives(0, 100))
    both = replace(rows, is_send=np.array([1, 0]), arena=np.array([4, 3]))
    job = exchanges.prepare("e", both.to_bytes())
    bases = (HeldBase(4, 5, "v1"), HeldBase(3, 3, "v1"), HeldBase(9, 9, "v1"))  # the last is in no row
    asked = iter([False, True, False])
    job.use(bases, ends_comparing=lambda: next(asked), on_wrong_base=list)
    job.run(verify=True, on_progress=lambda arrived: None)
    assert service.bases == [["v1", "v1"], ["v1", "v1"], [None, "v1"]], "what is received still needs its base"
    sent, received = service.pieces
    assert received.base.piece is received
    job.use((HeldBase(4, 5, "v2"),), ends_comparing=lambda: False, on_wrong_base=list)
    assert sent.base.version == "v2" and received.base is None
    packed = torch_bytes(10)
    sent.base.piece.pack(0, 10, packed)
    assert packed.tolist() == [5] * 10
    job.use((), ends_comparing=lambda: False, on_wrong_base=list)
    assert sent.base is None


def torch_bytes(count: int) -> Any:
    import torch

    return torch.zeros(count, dtype=torch.uint8)


@pytest.mark.parametrize("timeout_s", [0.01, 0.4])
def test_a_worker_that_was_slow_to_load_does_not_blame_the_others(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    monkeypatch.setattr("refitd.worker.exchanges.torch_with_one_thread", lambda: time.sleep(0.3))

    def nobody_comes(epoch: Epoch) -> Any:
        raise DeadlineExceeded("worker 0 on node b did not come to epoch e")

    with pytest.raises(DeadlineExceeded, match=r"worker 0 on node a took \d+\.\d s of the .* deadlines\.plan_s"):
        joined(nobody_comes, timeout_s)


def test_a_worker_that_was_ready_names_who_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refitd.worker.exchanges.torch_with_one_thread", lambda: None)

    def nobody_comes(epoch: Epoch) -> Any:
        raise DeadlineExceeded("worker 0 on node b did not come to epoch e")

    with pytest.raises(DeadlineExceeded, match=r"^worker 0 on node b did not come to epoch e$"):
        joined(nobody_comes, 60.0)


def test_a_job_that_cannot_be_prepared_leaves_no_halves_for_the_next_one() -> None:
    pytest.importorskip("torch")
    arenas = {3: arena_of(4096)}
    service = Noting()
    anything: Any = service
    exchanges = joined(lambda epoch: anything, 5.0, arenas)

    with pytest.raises(TransportError, match="leave an arena"):
        exchanges.prepare("e", receives(0, 100, 4090))
    exchanges.prepare("e", receives(0, 100))

    assert service.held[-1] == [(0, 0), (1, 1)] and not service.noted


# --- An abandoned epoch ends immediately in workers that are joining it; a worker that cannot leave it is ended.


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


def test_a_worker_sees_that_an_epoch_was_given_up_and_keeps_the_messages(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    here, there = pair
    worker = DaemonLink(here)
    assert not worker.is_given_up("e1")
    for epoch in ("e2", "e1"):
        handoff.send(there, encode(0, sidecar.LeaveEpoch(epoch=epoch)))
    assert worker.is_given_up("e1") and worker.is_given_up("e2") and not worker.is_given_up("e3")
    assert [worker.next()[0].epoch for _ in range(2)] == ["e2", "e1"]  # type: ignore[union-attr]


def stuck_after(ticks: int, *said: sidecar.EpochJoined, is_warm: bool = True) -> list[int]:
    out = Effects(0.0)
    epochs = LocalEpochs("n0", "127.0.0.1", WorkerArenas(3))
    epochs.join(out, "plan", EPOCH, everyone(EPOCH))
    epochs.worker_said(out, 0, sidecar.EpochJoined(epoch="e1"))
    if is_warm:
        epochs.worker_said(out, 1, sidecar.EpochJoined(epoch="e0"))
    epochs.leave(out, "e1")
    assert [i.worker for i in out if isinstance(i, ToWorker) and isinstance(i.message, sidecar.LeaveEpoch)] == [0, 1]
    for message in said:
        epochs.worker_said(out, 1, message)
    found: list[int] = []
    for _ in range(ticks):
        found = [worker for worker, _ in epochs.tick(out)]
    return found


def test_only_a_worker_that_does_not_come_out_is_stuck() -> None:
    assert stuck_after(PATIENCE_TICKS) == []
    assert stuck_after(PATIENCE_TICKS + 1) == [1]
    assert stuck_after(PATIENCE_TICKS + 1, sidecar.EpochJoined(epoch="e1", reason="given up")) == []
    assert stuck_after(PATIENCE_TICKS + 1, sidecar.EpochJoined(epoch="e1")) == []


def test_a_worker_that_still_loads_what_its_first_epoch_needs_is_given_longer() -> None:
    assert stuck_after(PATIENCE_TICKS + 1, is_warm=False) == []
    assert stuck_after(COLD_PATIENCE_TICKS + 1, is_warm=False) == [1]


def test_workers_of_a_fleet_load_what_their_first_epoch_needs_before_there_is_one() -> None:
    out = Effects(0.0)
    epochs = LocalEpochs("n0", "127.0.0.1", WorkerArenas(3), workers=3, warms="gloo")
    epochs.worker_gone(out, 2, "worker 2 on node n0", "it died")
    epochs.worker_said(out, 1, sidecar.EpochJoined(epoch="e1"))  # already loaded
    for _ in range(WARM_UP_TICKS - 1):
        epochs.tick(out)
    assert out == []
    for _ in range(3):
        epochs.tick(out)
    assert out == [ToWorker(worker, sidecar.WarmUp(service="gloo")) for worker in (0, 2)]
    epochs.worker_gone(out, 1, "worker 1 on node n0", "it died")
    for _ in range(WARM_UP_TICKS - 1):
        epochs.tick(out)
    assert len(out) == 2, "what it is given again comes first"
    for _ in range(3):
        epochs.tick(out)
    assert out[2:] == [ToWorker(1, sidecar.WarmUp(service="gloo"))]


def test_an_epoch_that_a_stuck_worker_never_came_to_waits_for_its_successor() -> None:
    out = Effects(0.0)
    epochs = LocalEpochs("n0", "127.0.0.1", WorkerArenas(3))
    epochs.join(out, "plan", EPOCH, everyone(EPOCH))
    epochs.worker_said(out, 1, sidecar.EpochJoined(epoch="e0"))
    epochs.leave(out, "e1")
    epochs.worker_said(out, 0, sidecar.EpochJoined(epoch="e1", reason="given up"))
    epochs.join(out, "plan", structs.replace(EPOCH, id="e2"), everyone(EPOCH))
    out.clear()
    epochs.worker_gone(out, 1, "worker 1 on node n0", "it did not come out of epoch e1, which was given up")
    assert [type(i.message) for i in out if isinstance(i, ToWorker)] == [sidecar.JoinEpoch]
    assert not [i for i in out if isinstance(i, ToCoordinator)]  # epoch e2 is not lost
    joined = [epochs.worker_said(out, worker, sidecar.EpochJoined(epoch="e2")) for worker in (0, 1)]
    assert joined == [None, ("plan", "e2")]
    out.clear()
    epochs.worker_gone(out, 1, "worker 1 on node n0", "was killed")  # now the worker was in the epoch
    assert [type(i.message) for i in out if isinstance(i, ToCoordinator)] == [cluster.PlanLoaded]


def test_a_worker_that_met_nobody_keeps_no_descriptor_of_it(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    door = listen_at("127.0.0.1")
    worker = Worker(here, installed(), door)
    worker._handle(sidecar.WarmUp(service="no such service"), ())
    worker._handle(sidecar.WarmUp(service="gloo"), ())  # load torch now, because its open files are not part of joining
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()  # a collection may run at any time, or not for long
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
                doors=("", ""),
            )
            worker._handle(meet, ())
            assert len(os.listdir("/proc/self/fd")) <= before, "the failed epoch keeps no descriptor"
    finally:
        gc.enable()
    there.settimeout(1.0)
    decoder: Decoder[sidecar.FromWorker] = Decoder(sidecar.FromWorker, handoff.MAX_DATAGRAM)
    said = [decoder.decode(handoff.receive(there)[0])[1] for _ in range(4)]
    assert all("worker 0 on node n1 did not come" in message.reason for message in said)  # type: ignore[union-attr]
    door.close()


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "[/__w/p/third_party/gloo/tcp/pair.cc:78] Connection closed by peer [::1]:5",
            "Connection closed by peer [::1]:5",
        ),
        (
            "\U0001f41b Gloo connectFullMesh failed with [../gloo/x.cc:14] no error\nmore",
            "Gloo connectFullMesh failed with no error",
        ),
        ("", "RuntimeError"),
    ],
)
def test_errors_of_a_library_are_shown_without_its_internals(said: str, shown: str) -> None:
    from refitd.copy_services.peers import first_line

    assert first_line(RuntimeError(said)) == shown
