"""Collects and compares the digests of regions that several source ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from refitd.coordinator.members import Member, by_node
from refitd.errors import ProtocolError
from refitd.plan.regions import Regions, differences
from refitd.protocol.base import Message
from refitd.protocol.cluster import DigestRegions


@dataclass(slots=True, eq=False)
class RegionComparison:
    """Collects the digests of a plan's regions. `held` are the source ranks that hold them, in order."""

    key: str
    regions: Regions
    held: Sequence[Member]
    deadline: float
    waiting: set[str] = field(default_factory=set)  # nodes that have not answered
    _digests: dict[int, npt.NDArray[np.uint64]] = field(default_factory=dict)  # by rank
    _there: dict[str, list[Member]] = field(init=False)  # node -> its ranks

    def __post_init__(self) -> None:
        self._there = by_node(self.held)

    @property
    def nodes(self) -> list[str]:
        """The nodes that are asked for digests."""
        return sorted(self._there)

    def requests(self, swap: str, version: int, run: str, timeout_s: float) -> Iterator[tuple[str, Message]]:
        """Yield (node, request) for each node."""
        table, holder_of = self.regions.table, self.regions.holder_of
        for node in self.nodes:
            self.waiting.add(node)
            here = self._there[node]
            ranks = tuple(member.added.rank for member in here)
            holders = tuple(holder_of[rank] for rank in ranks)
            wire = table.select(np.isin(table.holder, holders)).with_own_names().to_wire()
            members = tuple(member.id for member in here)
            yield node, DigestRegions(swap, version, run, members, ranks, holders, wire, timeout_s)

    def answered(self, node: str, digests: bytes) -> bool:
        """Store a node's digests; return whether all nodes have answered.

        Raises:
            ProtocolError: the number of digests is wrong.
        """
        if node not in self.waiting:
            return False
        here = self._there[node]
        counts = [len(self.regions.rows_of(member.added.rank)) for member in here]
        if len(digests) != 8 * sum(counts):
            raise ProtocolError(f"node {node} sent {len(digests)} bytes of digests for {sum(counts)} regions")
        parts = np.split(np.frombuffer(digests, "<u8"), np.cumsum(counts)[:-1])
        self._digests |= zip((member.added.rank for member in here), parts, strict=True)
        self.waiting.discard(node)
        return not self.waiting

    def problems(self) -> list[str]:
        """Name the tensors whose digests differ between ranks; call it once all nodes have answered."""
        return differences(
            [self.regions.digested(m.describe(), m.added.rank, self._digests[m.added.rank]) for m in self.held]
        )
