"""A worker's jobs over an epoch: one that cannot be prepared leaves nothing behind for the next one."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from refitd.addressing.between_nodes import TransferList
from refitd.buffers import arena as memory
from refitd.buffers.arena import MappedArena
from refitd.copy_services.base import Capabilities
from refitd.copy_services.epoch import Epoch
from refitd.copy_services.registry import Backend, Registry
from refitd.errors import DeadlineExceeded, TransportError
from refitd.protocol.base import Secret
from refitd.protocol.sidecar import HeldBase, JoinEpoch
from refitd.worker.exchanges import Exchanges


class Noting:
    """What of an ExchangeService a worker asks for while it prepares."""

    ranks = (0, 1)

    def __init__(self) -> None:
        self.noted: list[tuple[int, int]] = []
        self.held: list[list[tuple[int, int]]] = []

    def send(self, task_id: int, piece: Any, peer: int, *, part: int, route: Any) -> None:
        self.noted.append((task_id, part))

    receive = send

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
        pid=column(0),
        offset=np.array(offsets, np.int64),
        stride=np.ones((n, 1), np.int64),
        origin=numbers,
    ).to_bytes()


def joined(service: Any, timeout_s: float, arenas: Any = None) -> Exchanges:
    """A worker that has joined epoch "e" over a backend that `service` makes of the epoch."""
    capabilities = Capabilities(is_one_sided=False, crosses_nodes=True)
    exchanges = Exchanges(Registry([Backend("noting", capabilities, lambda: "", join=service)]), arenas or {})
    message = JoinEpoch(
        epoch="e",
        service="noting",
        index=0,
        labels=("worker 0 on node a", "worker 0 on node b"),
        address="127.0.0.1",
        staging_bytes=1 << 20,
        timeout_s=timeout_s,
        key=Secret(bytes(32)),
    )
    exchanges.join(message, service)
    return exchanges


class Looking(Noting):
    """Runs nothing, and looks at the bases of the noted pieces before and after each report of progress."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Any] = []
        self.bases: list[list[str | None]] = []

    def send(self, task_id: int, piece: Any, peer: int, *, part: int, route: Any) -> None:
        self.pieces.append(piece)

    receive = send

    def run(self, timeout: float, transfers: Any, *, verify: bool, on_progress: Any, on_wrong_base: Any) -> Any:
        from refitd.copy_services.exchange import ExchangeResult

        for _ in range(3):
            self.bases.append([piece.base and piece.base.version for piece in self.pieces])
            on_progress(0)
        return ExchangeResult(0, 0, 0, 0, 0.0)


def test_a_job_uses_the_bases_of_a_run_until_it_is_told_that_they_are_wanted() -> None:
    pytest.importorskip("torch")
    arenas = {}
    for number in (3, 4, 5):
        fd = memory.create(4096, "test")
        arenas[number] = MappedArena(fd, 4096, write=number != 4)
        os.close(fd)
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
    fd = memory.create(4096, "test")
    arenas = {3: MappedArena(fd, 4096, write=True)}
    os.close(fd)
    service = Noting()
    anything: Any = service
    exchanges = joined(lambda epoch: anything, 5.0, arenas)

    with pytest.raises(TransportError, match="leave an arena"):
        exchanges.prepare("e", receives(0, 100, 4090))
    exchanges.prepare("e", receives(0, 100))

    assert service.held[-1] == [(0, 0), (1, 0)] and not service.noted
