"""The paths of a plan's bytes: how each row travels, by the memories at its ends and the abilities of the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from refitd.addressing.paths import MAIN_MEMORY, Abilities, Path, path
from refitd.coordinator.plans import Routed
from refitd.plan.columns import Ints, numbered
from refitd.plan.cost import Flows, flows_of
from refitd.protocol.plan_reports import PathTraffic
from refitd.protocol.reports import NodeStatus


@dataclass(frozen=True)
class Wiring:
    """The facts that decide the paths of a plan.

    Attributes:
        device_of: plan-wide rank -> its GPU; ranks in main memory are omitted.
        abilities: of the nodes' GPUs, by node.
        service: moves rows between nodes.
        gpu_service: moves rows between two ranks in `gpu_ranks` of different nodes.
        gpu_ranks: plan-wide ranks.
    """

    device_of: Mapping[int, str]
    abilities: Mapping[str, Abilities]
    service: str
    gpu_service: str = ""
    gpu_ranks: frozenset[int] = frozenset()


def abilities_of(status: NodeStatus) -> Abilities:
    """Return what a node's daemon says about its GPUs."""
    pairs = [(lane.gpu, status.lanes[peer].gpu) for lane in status.lanes for peer in lane.reaches]
    return Abilities(status.has_kernels, can_pin=True, peers=frozenset(pairs))


def paths_of(routed: Routed, wiring: Wiring) -> tuple[PathTraffic, ...]:
    """Return the traffic on each path, most bytes first."""
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for shared, kind in ((routed.inner, _within), (routed.onward, _within), (routed.crossing, _between)):
        for src, dst, converts, rows, nbytes in _classes(flows_of(shared.table), routed.node_of, wiring):
            total = found.setdefault(kind(src, dst, converts, routed.node_of, wiring), [0, 0])
            total[0] += rows
            total[1] += nbytes
    return tuple(
        PathTraffic(source, target, way, rows, nbytes, reason)
        for (source, target, way, reason), (rows, nbytes) in sorted(found.items(), key=lambda item: -item[1][1])
    )


def _classes(flows: Flows, node_of: Mapping[int, str], wiring: Wiring) -> list[tuple[int, int, bool, int, int]]:
    """Return (source rank, destination rank, whether elements are converted, rows, bytes).

    All pairs of ranks that have equal paths are summed, as one of these pairs.
    """
    size = 1 + max(node_of, default=-1)
    alike, numbers = np.zeros(size, np.int64), {("", "", False): 0}  # main memory of all nodes is alike
    for rank, gpu in wiring.device_of.items():
        alike[rank] = numbers.setdefault((node_of[rank], gpu, rank in wiring.gpu_ranks), len(numbers))
    first, which = numbered((alike[flows.src] * len(numbers) + alike[flows.dst]) * 2 + flows.converts)
    rows, nbytes = _summed(flows.rows, which, len(first)), _summed(flows.bytes, which, len(first))
    columns = (flows.src[first], flows.dst[first], flows.converts[first], rows, nbytes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _summed(column: Ints, which: Ints, size: int) -> Ints:
    total = np.zeros(size, np.int64)
    np.add.at(total, which, column)
    return total


def _within(
    src: int, dst: int, converts: bool, node_of: Mapping[int, str], wiring: Wiring
) -> tuple[str, str, str, str]:
    """Return (memory, memory, path, reason) of rows within a node."""
    source, target = wiring.device_of.get(src, MAIN_MEMORY), wiring.device_of.get(dst, MAIN_MEMORY)
    abilities = wiring.abilities.get(node_of[dst], Abilities())
    way, there, reason = path(source, target, abilities), _kind(target), ""
    if source and target:
        there = "same GPU" if source == target else "other GPU"
        if source != target and (target, source) not in abilities.peers:
            reason = "the GPUs cannot address each other's memory"
        elif not abilities.has_kernels:
            reason = "Triton is not installed"
    if converts and (source or target):
        return _kind(source), there, Path.TENSORS.value, "elements are converted"
    return _kind(source), there, way.value, reason


def _between(
    src: int, dst: int, converts: bool, node_of: Mapping[int, str], wiring: Wiring
) -> tuple[str, str, str, str]:
    """Return (memory, memory, service, reason) of rows between nodes."""
    source, target = wiring.device_of.get(src, MAIN_MEMORY), wiring.device_of.get(dst, MAIN_MEMORY)
    way, reason = wiring.service, ""
    if src in wiring.gpu_ranks and dst in wiring.gpu_ranks:
        way = wiring.gpu_service
    elif source or target:
        way, reason = f"{way} through main memory", f"{way} moves main memory"
    return _kind(source), f"{_kind(target)} of another node", way, reason


def _kind(device: str) -> str:
    return "GPU" if device else "main memory"
