"""Trees like /sys with GPUs, network cards and NUMA nodes, in a folder of a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class Tree:
    """Begins without any device; `root` stands for /sys, and the folder "dev" beside it for /dev."""

    def __init__(self, folder: Path, cpus: Mapping[int, str] | None = None) -> None:
        self.root = root = folder / "sys"
        for numa, listed in (cpus or {}).items():
            self._write(root / f"devices/system/node/node{numa}/cpulist", listed)

    def pci(self, path: str, address: str, numa: int | None = None) -> Path:
        """Add a PCI device `address` below `path` (a root bus and bridges: "16/16:01.0"); return its folder."""
        bus, *bridges = path.split("/")
        folder = self.root.joinpath("devices", f"pci0000:{bus}", *(f"0000:{bridge}" for bridge in bridges), address)
        folder.mkdir(parents=True)
        if numa is not None:
            self._write(folder / "numa_node", str(numa))
        self._link(self.root / "bus/pci/devices" / address, folder)
        return folder

    def interface(self, name: str, device: Path | None, state: str = "up", master: str = "") -> None:
        """Add a network interface; without a device it is virtual."""
        folder = (device or self.root / "devices/virtual") / "net" / name
        self._write(folder / "operstate", state)
        if device is not None:
            self._link(folder / "device", device)
        if master:
            self._link(folder / "master", self.root / "class/net" / master)
        self._link(self.root / "class/net" / name, folder)

    def rdma(self, name: str, device: Path, state: str = "4: ACTIVE", *, has_file: bool = True) -> None:
        """Add an RDMA device; containers see those of their host without a file in /dev."""
        folder = device / "infiniband" / name
        self._write(device / f"infiniband_verbs/u{name}/dev", "231:192")
        if has_file:
            self._write(self.root.parent / f"dev/infiniband/u{name}", "")
        self._write(folder / "ports/1/state", state)
        self._link(folder / "device", device)
        self._link(self.root / "class/infiniband" / name, folder)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    @staticmethod
    def _link(path: Path, target: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)


def gpu_address(gpu: int) -> str:
    """The PCI address of GPU `gpu`, as fake_cuda.c answers it."""
    return f"0000:{0x1A + 0x10 * gpu:02x}:00.0"


def dgx(folder: Path, cpus: tuple[str, str] = ("0", "1")) -> Tree:
    """8 GPUs, 8 RDMA cards and 2 more for storage, on 2 NUMA nodes.

    GPU i and card mlx5_(i+1) share a switch, 2 GPUs a root; mlx5_0 and mlx5_9 are for storage.
    """
    tree = Tree(folder, dict(enumerate(cpus)))
    for gpu in range(8):
        pair, numa = gpu // 2, gpu // 4
        switch = f"{pair}0/{pair}0:01.0/{pair}1:0{gpu % 2}.0"
        tree.pci(switch, gpu_address(gpu), numa)
        card = tree.pci(switch, f"0000:{gpu + 1}f:00.0", numa)
        tree.rdma(f"mlx5_{gpu + 1}", card)
        tree.interface(f"ens{gpu}", card)
    for number, numa in ((0, 0), (9, 1)):
        tree.rdma(f"mlx5_{number}", tree.pci(f"f{numa}", f"0000:f{numa}:00.0", numa))
    return tree
