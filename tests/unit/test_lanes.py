"""The GPU, NUMA node and network card of each worker, on trees like /sys; workers that use them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from msgspec import structs

from refitd.daemon.workers import Gpu, Kit, Workers, cpus_of, gpus_of, lanes_of, spot_of, variables
from refitd.errors import ConfigError
from refitd.protocol import sidecar
from refitd.protocol.reports import GpuStatus, LaneStatus, NodeStatus, StatusReport
from refitd.testing import eventually
from refitd_cli import view
from refitd_cli.commands import doctor
from tests.support import fake_cuda
from tests.support.cli import FakeClient
from tests.support.sysfs import Tree, dgx, gpu_address


def gpus(count: int) -> list[Gpu]:
    return [Gpu(f"GPU-{i}", gpu_address(i)) for i in range(count)]


def chosen(tree: Tree, count: int, workers: int, **wanted: str) -> list[tuple[int | None, str]]:
    return [(lane.numa, lane.card) for lane in lanes_of(gpus(count), workers, wanted, tree.root)]


def test_each_gpu_of_eight_gets_the_card_at_its_switch_and_main_memory_the_free_ones(tmp_path: Path) -> None:
    tree = dgx(tmp_path)
    assert chosen(tree, 8, 10) == [
        *((gpu // 4, f"mlx5_{gpu + 1}") for gpu in range(8)),
        (None, "mlx5_0"),
        (None, "mlx5_9"),
    ]
    assert spot_of("0000:1A:00.0", tree.root).path == ("pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:1a:00.0")


def numa_only(tree: Tree) -> None:
    """Both GPUs and cards have roots of their own."""
    for gpu in range(4):
        tree.pci(f"a{gpu}", gpu_address(gpu), gpu // 2)
    for card, numa in enumerate((1, 0, 1, 0)):
        tree.rdma(f"mlx5_{card}", tree.pci(f"b{card}", f"0000:b{card}:00.0", numa))


def without_numa(tree: Tree) -> None:
    for gpu in range(4):
        tree.pci("00", gpu_address(gpu), -1)
    for card in range(2):
        tree.interface(f"eth{card}", tree.pci("00", f"0000:00:0{card}.0", -1) / f"virtio{card}")


def interfaces(tree: Tree) -> None:
    """Only eth1 can be used: the others are virtual, down, or a member of a bond."""
    for gpu in range(4):
        tree.pci("00", gpu_address(gpu))
    devices = [tree.pci("00", f"0000:00:0{i}.0", 1) for i in range(3)]
    for name in ("lo", "bond0", "docker0", "eth1.100"):
        tree.interface(name, None)
    tree.interface("eth0", devices[0], "down")
    tree.interface("eth1", devices[1])
    tree.interface("eth2", devices[2], master="bond0")
    tree.rdma("mlx5_0", devices[0], "1: DOWN")
    tree.rdma("mlx5_1", devices[1], has_file=False)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (numa_only, [(0, "mlx5_1"), (0, "mlx5_3"), (1, "mlx5_0"), (1, "mlx5_2"), (None, "mlx5_0")]),
        (without_numa, [(None, "eth0"), (None, "eth1"), (None, "eth0"), (None, "eth1"), (None, "eth0")]),
        (interfaces, [(None, "eth1")] * 5),
        (lambda tree: None, [(None, "")] * 5),
    ],
)
def test_cards_are_chosen_by_numa_node_then_by_use_and_virtual_ones_never(tmp_path: Path, build, expected) -> None:
    tree = Tree(tmp_path)
    build(tree)
    assert chosen(tree, 4, 5) == expected


def test_the_configuration_overrides_and_a_wrong_name_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    interfaces(tree)
    assert chosen(tree, 2, 3, **{"GPU-0": "bond0", "1": "eth0", "main": "eth1.100"}) == [
        (None, "bond0"),
        (None, "eth0"),
        (None, "eth1.100"),
    ]
    for wanted, message in (
        ({"GPU-7": "eth1"}, r"'GPU-7' is no GPU of this node; GPUs: 0 \(GPU-0\), 1 \(GPU-1\); or 'main'"),
        ({"0": "mlx5_0"}, "'0' has 'mlx5_0', .* not up; network cards: bond0, docker0, eth0, eth1, eth1.100, eth2, lo"),
    ):
        with pytest.raises(ConfigError, match=message):
            lanes_of(gpus(2), 2, wanted, tree.root)


INTERFACES = ",".join(f"ens{i}" for i in range(8))
RDMA = {"NCCL_IB_HCA": "=mlx5_2:1", "UCX_NET_DEVICES": f"mlx5_2:1,{INTERFACES}", "NVSHMEM_HCA_LIST": "mlx5_2:1"}


@pytest.mark.parametrize(
    ("card", "wanted", "environ", "expected"),
    [
        ("mlx5_2", {}, {}, RDMA),
        ("mlx5_2", {}, {"NCCL_IB_HCA": "mlx5_9"}, {name: text for name, text in RDMA.items() if name != "NCCL_IB_HCA"}),
        ("ens0", {"0": "ens0"}, {}, {"NCCL_SOCKET_IFNAME": "=ens0", "UCX_NET_DEVICES": "ens0"}),
        ("ens0", {}, {}, {}),
        ("", {}, {}, {}),
    ],
)
def test_libraries_are_told_the_card_unless_the_user_told_them(tmp_path: Path, card, wanted, environ, expected) -> None:
    assert variables(LaneStatus(card=card), wanted, environ, dgx(tmp_path).root) == expected


def ready(workers: Workers, worker: int) -> int:
    """Wait for a worker's first message; return its pid."""
    said: list[sidecar.FromWorker] = []
    eventually(lambda: said.extend(workers.receive(worker)) or said, "the worker is ready")
    assert isinstance(said[0], sidecar.WorkerReady)
    return said[0].pid


def test_workers_start_with_their_card_on_the_cpus_of_their_gpu(tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    tree = dgx(tmp_path, (f"{usable[0]},4090-4095", f"{usable[-1]}"))
    lanes = lanes_of([gpus(8)[0], gpus(8)[7]], 3, {}, tree.root)
    kits = [Kit(variables(lane, {}, {}, tree.root), cpus_of(lane, tree.root)) for lane in lanes]
    workers = Workers(kits, lambda fd, events: None)
    try:
        workers.restart(1)
        for worker, card, cpus in ((0, "mlx5_1", {usable[0]}), (1, "mlx5_8", {usable[-1]}), (2, "mlx5_0", {*usable})):
            pid = ready(workers, worker)
            assert os.sched_getaffinity(pid) == cpus
            assert f"NCCL_IB_HCA=={card}:1".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert os.sched_getaffinity(0) == {*usable}
    finally:
        workers.close()


def test_the_driver_tells_addresses_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_cuda.install(monkeypatch, 1 << 20, visible="0,1,2")
    monkeypatch.setenv("FAKE_CUDA_PEERS", "01,10,12")
    from refitd.buffers.cuda_driver import Driver

    assert gpus_of(Driver()) == [
        Gpu(made.name(0), gpu_address(0), (1,)),
        Gpu(made.name(1), gpu_address(1), (0, 2)),
        Gpu(made.name(2), gpu_address(2)),
    ]


def test_doctor_and_status_show_each_gpu_with_its_card(tmp_path: Path) -> None:
    tree = dgx(tmp_path / "dgx")
    found = doctor.network_cards(gpus(5), tree.root).found
    assert found.startswith("10: mlx5_0 (NUMA node 0), mlx5_1 ") and "; GPU-4 (NUMA node 1): mlx5_5" in found
    assert "none but virtual ones" in doctor.network_cards(gpus(1), tmp_path / "nothing").found
    assert [*doctor.peer_access(gpus(1))] == []
    linked = [Gpu("GPU-0", "", (1,)), Gpu("GPU-1", "", (0,))]
    assert [found.state for found in doctor.peer_access(linked)] == ["ok"]
    (apart,) = doctor.peer_access([linked[0], Gpu("GPU-1", "")])
    assert (apart.state, apart.found) == ("warn", "no peer access: GPU-1 -> GPU-0")
    lanes = lanes_of([Gpu("GPU-0", gpu_address(0), (1,)), Gpu("GPU-1", "0000:ff:00.0")], 3, {}, tree.root)
    node = NodeStatus("n0", "h", 1, (), 0, 3, 30, lanes=tuple(lanes), gpus=(GpuStatus("GPU-0", 2, 20),))
    here = structs.replace(node, host=socket.gethostname())
    client = FakeClient(status_result=StatusReport(coordinator_pid=3, uptime_s=1.0, nodes=(here,), models=()))
    assert doctor.daemon(lambda: client).found.endswith("workers of n0: mlx5_1, mlx5_0, mlx5_2")
    assert [*view._gpus(node)] == [
        ("n0", "0", "GPU-0", "2", "20 B", "0", "mlx5_1", "GPU-1"),
        ("n0", "1", "GPU-1", "0", "0 B", "unknown", "mlx5_0", "no other"),
    ]
