"""Daemons on trees like /sys: each worker gets the card and the CPUs closest to its GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from refitd.testing import Daemon
from refitd.testing.processes import ProcessFailed
from tests.support import fake_cuda, sysfs
from tests.support.gpu_tensors import DEADLINES

pytestmark = pytest.mark.real_starts  # its daemon imports another tree of /sys


def test_workers_use_the_cards_and_the_cpus_closest_to_their_gpus(
    gpus: fake_cuda.FakeGpus,
    start_daemon: Callable[..., Daemon],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    cpu = min(os.sched_getaffinity(0))
    monkeypatch.setenv("FAKE_SYSFS", str(sysfs.dgx(tmp_path, (str(cpu), str(cpu))).root))
    monkeypatch.setenv("FAKE_CUDA_PEERS", "10")
    monkeypatch.setenv("NVSHMEM_HCA_LIST", "mine")
    daemon = start_daemon(DEADLINES + '[node]\ncards = { 1 = "mlx5_9" }\n', workers=3)
    node = daemon.node_of("n0")
    found = [(lane.gpu, lane.numa, lane.card, lane.reaches) for lane in node.lanes]
    assert found == [
        (gpus.name(0), 0, "mlx5_1", ()),
        (gpus.name(1), 0, "mlx5_9", (0,)),
        ("", None, "mlx5_0", ()),
    ]
    for pid, lane in zip(node.workers, node.lanes, strict=True):
        words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        assert {f"NCCL_IB_HCA=={lane.card}:1", "NVSHMEM_HCA_LIST=mine"} <= {*words}
        assert any(word.startswith(f"UCX_NET_DEVICES={lane.card}:1,ens0,") for word in words)
        assert os.sched_getaffinity(pid) == ({cpu} if lane.gpu else os.sched_getaffinity(0))

    with pytest.raises(ProcessFailed, match=r"node\.cards: '1' has 'mlx5_77', .* network cards: .*mlx5_0, mlx5_1, "):
        start_daemon(DEADLINES + '[node]\ncards = { 1 = "mlx5_77" }\n', name="n1")
