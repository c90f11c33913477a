"""The cost of a plan: bytes per pair of ranks and per tensor, and the load of each node's cable.

Cables say how fast each node can send and receive. Both directions are independent, and only the nodes' own cables
limit a transfer:

    n0 sends      134 MB at 50 MB/s     2.7 s
    n2 receives   134 MB at 12.5 MB/s  10.7 s     the bytes need 10.7 s at least, n2 receiving
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from refitd.plan.columns import Bools, Ints, numbered, offsets_of, ranges
from refitd.plan.shared import GlobalPlan
from refitd.plan.table import CopyTable, Parted, weights_of

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cables:
    """Bytes per second of each node's cable, in each direction. Nodes that are not listed have the default.

    Attributes:
        name: the origin of the figures; "" if the speeds are unknown, and all cables count as equally fast.
        default: of every node that is not listed, each way.
        send: node -> what it sends.
        receive: node -> what it receives.
    """

    name: str = ""
    default: float = 1.0
    send: Mapping[str, float] = field(default_factory=dict)
    receive: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for speed in (self.default, *self.send.values(), *self.receive.values()):
            if not (speed > 0 and math.isfinite(speed)):
                raise ValueError(f"a cable's speed must be finite and above 0 bytes per second, found {speed}")

    @property
    def are_known(self) -> bool:
        """Whether the figures are bytes per second."""
        return bool(self.name)

    @property
    def key(self) -> tuple[object, ...]:
        """A value that is equal for cables that lead to equal plans."""
        return self.default, tuple(sorted(self.send.items())), tuple(sorted(self.receive.items()))

    def sends(self, nodes: Sequence[str]) -> Floats:
        """Return what each of these nodes sends."""
        return np.array([self.send.get(node, self.default) for node in nodes], np.float64)

    def receives(self, nodes: Sequence[str]) -> Floats:
        """Return what each of these nodes receives."""
        return np.array([self.receive.get(node, self.default) for node in nodes], np.float64)


EQUAL = Cables()


@dataclass(frozen=True, slots=True)
class CableLoad:
    """The bytes that a node's cable carries one way, and its speed."""

    node: str
    is_send: bool
    nbytes: int
    speed: float  # bytes per second

    @property
    def seconds(self) -> float:
        """The least time of these bytes."""
        return self.nbytes / self.speed


def loads_of(links: Iterable[tuple[str, str, int]], cables: Cables) -> list[CableLoad]:
    """Return the load of every cable, the slowest one first.

    Args:
        links: (from node, to node, bytes), of different nodes.
        cables: their speeds.
    """
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    for source, target, nbytes in links:
        sent[source] = sent.get(source, 0) + nbytes
        received[target] = received.get(target, 0) + nbytes
    found = [
        CableLoad(node, is_send, nbytes, speeds.get(node, cables.default))
        for is_send, through, speeds in ((True, sent, cables.send), (False, received, cables.receive))
        for node, nbytes in through.items()
    ]
    return sorted(found, key=lambda load: (-load.seconds, load.node, load.is_send))


@dataclass(frozen=True, eq=False)
class Traffic:
    """The traffic of a plan. Pairs are sorted by (destination, source); a pair of equal ranks is a local copy."""

    src: Ints  # [pairs] rank
    dst: Ints  # [pairs] rank
    bytes: Ints  # [pairs]
    copies: Ints  # [pairs]
    tensors: tuple[str, ...]
    tensor_bytes: Ints  # [tensors]
    tensor_copies: Ints  # [tensors]

    @property
    def total_bytes(self) -> int:
        """Bytes moved by all copies, local ones included."""
        return int(self.bytes.sum())

    @property
    def total_copies(self) -> int:
        """Number of copies."""
        return int(self.copies.sum())

    @property
    def local_bytes(self) -> int:
        """Bytes that stay on their rank."""
        return int(self.bytes[self.src == self.dst].sum())

    def largest_tensors(self) -> list[tuple[str, int, int]]:
        """Return (name, bytes, copies) of every tensor that moves, largest first, equal ones by name."""
        order = np.lexsort((np.arange(len(self.tensors)), -self.tensor_bytes)).tolist()
        return [
            (self.tensors[i], int(self.tensor_bytes[i]), int(self.tensor_copies[i]))
            for i in order
            if self.tensor_copies[i]
        ]


def traffic_of(plan: GlobalPlan) -> Traffic:
    """Return a plan's traffic, without expanding it to a row per copy."""
    shared = plan.few
    rows, families = shared.rows, shared.families
    weight, row_bytes = weights_of(families, rows.tensor), shared.row_bytes
    before, before_copies = (np.append(0, np.cumsum(each)) for each in (row_bytes, weight))
    low, high = shared.row_start[shared.job_rows], shared.row_start[shared.job_rows + 1]
    # usually one job per pair, but a plan may split a pair's copies over several
    key = shared.job_dst.astype(np.int64) << 32 | shared.job_src.astype(np.int64)
    begin = np.flatnonzero(np.append(True, np.diff(key) != 0)[: len(key)])  # jobs are sorted
    pairs = key[begin]
    moved, copies = (
        np.add.reduceat(of, begin) if len(begin) else of
        for of in (before[high] - before[low], before_copies[high] - before_copies[low])
    )
    times = np.bincount(shared.job_rows, minlength=len(shared.row_start) - 1).astype(np.int64)
    performed = np.repeat(times, np.diff(shared.row_start))
    tensor_bytes, tensor_copies = np.zeros(len(shared.tensors), np.int64), np.zeros(len(shared.tensors), np.int64)
    np.add.at(tensor_bytes, rows.tensor, row_bytes // weight * performed)
    np.add.at(tensor_copies, rows.tensor, performed)
    if families is not None:
        tensor_bytes, tensor_copies = families.spread(tensor_bytes), families.spread(tensor_copies)
    return Traffic(
        src=pairs & (2**32 - 1),
        dst=pairs >> 32,
        bytes=moved,
        copies=copies,
        tensors=shared.tensors if families is None else families.tensors,
        tensor_bytes=tensor_bytes,
        tensor_copies=tensor_copies,
    )


@dataclass(frozen=True, eq=False)
class Flows:
    """The rows of a table by pair of ranks, and whether they convert elements. A pair may occur more than once."""

    src: Ints  # [n] rank
    dst: Ints  # [n] rank
    converts: Bools  # [n]
    rows: Ints  # [n]
    bytes: Ints  # [n]


def flows_of(table: Parted[Any]) -> Flows:
    """Return the rows and bytes of a CopyTable in parts, by pair of ranks, without expanding it to a row per copy."""
    rows: CopyTable = table.parts.rows
    uses = table.uses
    part = np.repeat(np.arange(len(table.parts)), np.diff(table.parts.start))
    slots = 1 + max(int(rows.src_rank.max(initial=0)), int(rows.dst_rank.max(initial=0)))
    first, which = numbered(((part * slots + rows.src_rank) * slots + rows.dst_rank) * 2 + (rows.cast > 0))
    weight = weights_of(table.parts.families, rows.tensor)
    count, nbytes = np.zeros(len(first), np.int64), np.zeros(len(first), np.int64)
    np.add.at(count, which, weight)
    np.add.at(nbytes, which, rows.row_bytes * weight)
    begin = offsets_of(part[first], len(table.parts))  # `first` is in the order of the parts
    of, at = ranges(begin[uses.part], begin[uses.part + 1] - begin[uses.part])
    ranks_at = (np.cumsum(uses.count, dtype=np.int64) - uses.count)[of]
    src, dst = (uses.ranks[ranks_at + column[first][at]].astype(np.int64) for column in (rows.src_rank, rows.dst_rank))
    return Flows(src, dst, rows.cast[first][at] > 0, count[at], nbytes[at])
