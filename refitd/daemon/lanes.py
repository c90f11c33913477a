"""What each worker of a node uses: a GPU, the CPUs of its NUMA node, and a network card. Read from sysfs.

The card of a GPU has the longest PCI path in common with it:

    GPU     0000:17:00.0    pci0000:16 / 16:00.0 / 17:00.0
    mlx5_0  0000:18:00.0    pci0000:16 / 16:00.0 / 18:00.0    two steps in common: this one
    mlx5_1  0000:3a:00.0    pci0000:39 / 39:00.0 / 3a:00.0    none

Of equally long ones the card on the GPU's NUMA node is closest, then the card that fewer workers use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from refitd.buffers.cuda_driver import Driver
from refitd.errors import ArenaError, ConfigError
from refitd.protocol.reports import LaneStatus

SYSFS = Path("/sys")
MAIN_MEMORY = "main"  # in node.cards: the workers without a GPU

_PCI = re.compile(r"pci[0-9a-f]+:[0-9a-f]+|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its name (refitd.buffers.cuda.name_of), its PCI address, and the numbers of the GPUs that it reaches."""

    name: str
    address: str
    reaches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Spot:
    """The place of a device: the PCI addresses from its root to it, () if unknown, and its NUMA node, None likewise."""

    path: tuple[str, ...] = ()
    numa: int | None = None

    def steps_with(self, other: Spot) -> int:
        """Return how many steps of the two paths are the same, from the root on."""
        pairs = zip(self.path, other.path, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.path), len(other.path)))


@dataclass(frozen=True, slots=True)
class Card:
    """A network card that is up. `port` is the first active port of an RDMA device, 0 for an interface without RDMA."""

    name: str
    spot: Spot
    port: int = 0


def gpus_of(driver: Driver) -> list[Gpu]:
    """Return the GPUs that this process sees; raises ArenaError if the driver fails."""
    everyone = range(driver.count())
    return [
        Gpu(driver.name(gpu), driver.bus_id(gpu), tuple(peer for peer in everyone if driver.reaches(gpu, peer)))
        for gpu in everyone
    ]


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that this process sees; [] without a driver that can share memory."""
    with suppress(ArenaError):
        return gpus_of(Driver())
    return []


def spot_of(address: str, sysfs: Path) -> Spot:
    """Return the place of the device with this PCI address, such as 0000:17:00.0."""
    return _spot(sysfs / "bus/pci/devices" / address.lower())


def _spot(device: Path) -> Spot:
    if not device.exists():
        return Spot()
    numa: int | None = None
    steps = [step for step in Path(os.path.realpath(device)).parts if _PCI.fullmatch(step)]
    for folder in (device.resolve(), *device.resolve().parents):  # a virtio interface is below its PCI device
        if (found := _text(folder / "numa_node")) and steps:
            numa = int(found) if int(found) >= 0 else None  # -1: the firmware does not tell
            break
    return Spot(tuple(steps), numa)


def cards(sysfs: Path) -> list[Card]:
    """Return the RDMA devices with an active port; without any, the physical network interfaces that are up.

    Containers see the RDMA devices of their host, but can use only those that have a file in /dev. Bridges, VLANs and
    other virtual interfaces have no device.
    """
    found = []
    for device in _folders(sysfs / "class/infiniband"):
        active = [int(port.name) for port in _folders(device / "ports") if "ACTIVE" in _text(port / "state")]
        files = [sysfs.parent / "dev/infiniband" / one.name for one in _folders(device / "device/infiniband_verbs")]
        if active and any(os.access(file, os.R_OK | os.W_OK) for file in files):
            found.append(Card(device.name, _spot(device / "device"), min(active)))
    return found or [
        Card(device.name, _spot(device / "device"))
        for device in _folders(sysfs / "class/net")
        if (device / "device").exists() and _is_up(device)
    ]


def lanes_of(gpus: Sequence[Gpu], workers: int, chosen: Mapping[str, str], sysfs: Path) -> list[LaneStatus]:
    """Return what each worker uses: worker i has GPU i, the workers after the last GPU only main memory.

    Args:
        gpus: the node's GPUs.
        workers: at least as many.
        chosen: node.cards: a GPU's name or number, or MAIN_MEMORY -> the card to use instead of the closest one.
        sysfs: the root of the tree.

    Raises:
        ConfigError: `chosen` names a GPU or a card that is not there; names those that are.
    """
    there = cards(sysfs)
    names = {card.name: card for card in there} | {
        path.name: Card(path.name, _spot(path / "device")) for path in _folders(sysfs / "class/net")
    }
    known = {str(i): i for i in range(len(gpus))} | {gpu.name: i for i, gpu in enumerate(gpus)}
    wanted: dict[int | None, Card] = {}
    for owner, name in chosen.items():
        if owner != MAIN_MEMORY and owner not in known:
            told = ", ".join(f"{i} ({gpu.name})" for i, gpu in enumerate(gpus)) or "none"
            raise ConfigError(f"node.cards: {owner!r} is no GPU of this node; GPUs: {told}; or {MAIN_MEMORY!r}")
        if name not in names:
            told = ", ".join(sorted(names)) or "none"
            raise ConfigError(f"node.cards: {owner!r} has {name!r}, which is not here or not up; network cards: {told}")
        wanted[None if owner == MAIN_MEMORY else known[owner]] = names[name]
    uses = dict.fromkeys(names, 0)
    lanes = []
    for worker in range(workers):
        gpu = gpus[worker] if worker < len(gpus) else None
        spot = spot_of(gpu.address, sysfs) if gpu is not None else Spot()
        card = wanted.get(worker if gpu is not None else None) or _closest(spot, there, uses)
        if card is not None:
            uses[card.name] += 1
        lanes.append(
            LaneStatus(
                gpu=gpu.name if gpu is not None else "",
                numa=spot.numa,
                card=card.name if card is not None else "",
                reaches=gpu.reaches if gpu is not None else (),
            )
        )
    return lanes


def _closest(spot: Spot, there: Sequence[Card], uses: Mapping[str, int]) -> Card | None:
    def distance(card: Card) -> tuple[int, bool, int]:
        is_apart = spot.numa is None or card.spot.numa != spot.numa
        return -spot.steps_with(card.spot), is_apart, uses[card.name]

    return min(there, key=distance, default=None)


def variables(lane: LaneStatus, chosen: Mapping[str, str], environ: Mapping[str, str], sysfs: Path) -> dict[str, str]:
    """Return the variables by which the libraries of a worker use its card; those in `environ` are left alone.

    An interface without RDMA is named to them only if the configuration chose it: it may have no address, and the
    libraries choose among those that have one. Gloo listens on node.address and reads no variable.
    """
    card = next((card for card in cards(sysfs) if card.name == lane.card), None)
    if card is not None and card.port:
        at = f"{card.name}:{card.port}"
        # by the interfaces UCX reaches nodes without RDMA
        ucx = [at, *(interface.name for interface in _folders(sysfs / "class/net") if _is_up(interface))]
        wanted = {"NCCL_IB_HCA": f"={at}", "UCX_NET_DEVICES": ",".join(ucx), "NVSHMEM_HCA_LIST": at}
    elif lane.card in chosen.values():
        wanted = {"NCCL_SOCKET_IFNAME": f"={lane.card}", "UCX_NET_DEVICES": lane.card}
    else:
        wanted = {}
    return {name: value for name, value in wanted.items() if name not in environ}


def cpus_of(lane: LaneStatus, sysfs: Path) -> set[int]:
    """Return the CPUs for the worker of a GPU: those of the GPU's NUMA node that this process may use; () for any.

    Workers of main memory copy between all NUMA nodes, and are not bound.
    """
    if not lane.gpu or lane.numa is None:
        return set()
    found: set[int] = set()
    for part in _text(sysfs / f"devices/system/node/node{lane.numa}/cpulist").split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found & os.sched_getaffinity(0)


def _is_up(interface: Path) -> bool:
    """Return whether a network interface is up and no member of a bond or bridge, which has no address of its own."""
    return _text(interface / "operstate") == "up" and not (interface / "master").exists()


def _folders(path: Path) -> list[Path]:
    def numbered(entry: Path) -> list[int | str]:  # mlx5_2 before mlx5_10
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", entry.name)]

    with suppress(OSError):
        return sorted(path.iterdir(), key=numbered)
    return []


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
