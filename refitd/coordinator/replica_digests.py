"""Compare what source ranks hold of the same elements.

Where ranks hold equal pieces, their digests came with each rank's first version. Where one's piece is a part of
another's, or crosses it, the nodes digest what they have in common before the first swap of such sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from refitd.caches import BoundedCache
from refitd.describe.replica_pieces import piece_count
from refitd.describe.roster import Roster
from refitd.errors import PlanError, ProtocolError
from refitd.plan.regions import RegionTable
from refitd.plan.replica_digests import Twin, differences, twins_of
from refitd.protocol.cluster import DigestRegions
from refitd.protocol.shards import Shard, metadata_of

# Comparisons of regions that a model remembers: one for each way to choose its replicas, until ranks register anew.
MAX_EQUAL = 16


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaDigests:
    """Digests of one rank's pieces at a version; 0 where none was taken."""

    version: int
    digests: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class HeldReplica:
    """One source rank."""

    rank: int
    label: str
    description: str  # the digest of its shard
    shard: Shard
    replicas: ReplicaDigests


@dataclass(frozen=True, slots=True)
class HeldRegions:
    """A source rank that holds regions."""

    member: str
    node: str
    label: str


@dataclass(slots=True)
class Compared:
    """Remembers what has been compared. Owned by the model; its swaps of some replicas share it."""

    _key: tuple[object, ...] = ()
    _problems: tuple[str, ...] = ()
    _kept: list[object] = field(default_factory=list)  # what the key names by identity
    equal: BoundedCache[str, bool] = field(default_factory=lambda: BoundedCache(MAX_EQUAL))  # keys of RegionComparison

    def problems(self, held: Sequence[HeldReplica], wanted: Mapping[str, Shard]) -> tuple[str, ...]:
        """Return the tensors, of those that `wanted` shards want, whose bytes differ between ranks at one version."""
        if len(held) < 2:
            return ()
        key = (tuple((h.rank, h.label, h.description, id(h.replicas)) for h in held), tuple(sorted(wanted)))
        if key != self._key:
            self._problems = _problems(held, wanted)
            self._key, self._kept = key, [h.replicas for h in held]
        return self._problems


@dataclass(slots=True, eq=False)
class RegionComparison:
    """The digests of a plan's regions while they come in. `members` are the source ranks that hold them."""

    key: str
    table: RegionTable
    members: Mapping[int, HeldRegions]
    deadline: float
    _rows: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)  # of nodes that have not answered
    _digests: dict[int, int] = field(default_factory=dict)  # by row

    def requests(self, swap: str, version: int, run: str, timeout_s: float) -> Iterator[tuple[str, DigestRegions]]:
        """Yield what each node is asked for."""
        nodes = np.array([self.members[rank].node for rank in self.table.rank.tolist()])
        for node in sorted(set(nodes.tolist())):
            rows = self._rows[node] = np.flatnonzero(nodes == node)
            here = {rank: held for rank, held in self.members.items() if held.node == node}
            members = tuple(held.member for held in here.values())
            wire = self.table.select(rows).to_wire()
            yield node, DigestRegions(swap, version, run, tuple(here), members, wire, timeout_s)

    @property
    def waiting(self) -> list[str]:
        """The nodes that have not answered."""
        return sorted(self._rows)

    def answered(self, node: str, digests: bytes) -> bool:
        """Take a node's digests; return whether all have come.

        Raises:
            ProtocolError: there are not as many as rows were asked for.
        """
        rows = self._rows.get(node)
        if rows is None:
            return False
        if len(digests) != 8 * len(rows):
            raise ProtocolError(f"node {node} sent {len(digests)} bytes of digests for {len(rows)} regions")
        self._digests |= zip(rows.tolist(), np.frombuffer(digests, "<u8").tolist(), strict=True)
        del self._rows[node]
        return not self._rows

    def problems(self) -> list[str]:
        """Return the tensors that ranks hold different values of, once all digests have come."""
        table, held = self.table, []
        for rank, member in self.members.items():
            rows = np.flatnonzero(table.rank == rank).tolist()
            twins = [
                Twin(0, table.locals[table.local[r]], int(table.group[r]), table.tensors[table.tensor[r]]) for r in rows
            ]
            held.append((member.label, twins, np.array([self._digests[r] for r in rows], np.uint64)))
        return differences(held)


def region_comparison(table: RegionTable, members: Mapping[int, HeldRegions], deadline: float) -> RegionComparison:
    """Return the comparison of the regions of a plan; its key says which registrations and which regions it is of."""
    held = {rank: members[rank] for rank in np.unique(table.rank).tolist()}
    content = [(rank, one.member) for rank, one in held.items()], sorted(table.to_wire().items())
    return RegionComparison(xxhash.xxh3_128_hexdigest(repr(content).encode()), table, held, deadline)


def read_digests(who: str, shard: Shard, version: int, packed: bytes) -> ReplicaDigests:
    """Decode the digests of a rank's pieces at a version.

    Raises:
        ProtocolError: there are not as many as the shard has pieces.
    """
    pieces = sum(map(piece_count, shard.tensors))
    if len(packed) != 8 * pieces:
        raise ProtocolError(f"{who}: {len(packed)} bytes of replica digests, expected 8 for each of {pieces} pieces")
    return ReplicaDigests(version, np.frombuffer(packed, "<u8"))


def _problems(held: Sequence[HeldReplica], wanted: Mapping[str, Shard]) -> tuple[str, ...]:
    # ranks that say and hold the same differ from others in the same places: one of them is looked at
    distinct = {(h.description, h.replicas.version, h.replicas.digests.tobytes()): h for h in reversed(held)}
    first = sorted(distinct.values(), key=lambda h: h.rank)
    if len(first) < 2:
        return ()
    rosters = [Roster(h.rank, metadata_of(h.shard, h.rank)) for h in first]
    at = max(h.rank for h in held) + 1
    rosters += [Roster(at + i, (), metadata_of(shard, at + i)) for i, shard in enumerate(wanted.values())]
    try:
        twins = twins_of(rosters)
    except PlanError:
        return ()  # what is wrong with descriptions is the planner's to say
    lines: list[str] = []
    for version in sorted({h.replicas.version for h in first}):
        same = [(h.label, twins.get(h.rank, []), h.replicas.digests) for h in first if h.replicas.version == version]
        lines = differences((label, mine, digests[[t.number for t in mine]]) for label, mine, digests in same)
        if lines:
            break
    return tuple(lines)
