"""Turns registered shards into rosters; each distinct description is read once, however many ranks share it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from refitd.caches import BoundedCache
from refitd.describe.compact import without_ranks
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.roster import Roster
from refitd.errors import PlanError
from refitd.plan.completion import Said
from refitd.protocol.shards import Shard, metadata_of

# Distinct pools, by their descriptions, that are remembered.
POOLS = 256


@dataclass(frozen=True, slots=True)
class Registered:
    """One rank with its plan-wide number and its description."""

    rank: int
    label: str
    node: str
    is_source: bool
    digest: str
    shard: Shard
    as_held: bool = False  # plan from the held tensors, not from the arriving ones: casts have been applied


# (dimension, local size, ranks that split it, stride). If these are equal on all ranks of a tensor, the split is even,
# and a rank can compute its own position alone.
_Cut = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class ShardRead:
    """A description that was read, with `ShardReader`'s notes on it."""

    shard: Shard
    compact: tuple[ParameterMetadata, ...] | None
    cuts: dict[str, _Cut]


def read_shard(shard: Shard) -> ShardRead:
    """Read a description once, for every rank that has it.

    Raises:
        ProtocolError: as `metadata_of`.
    """
    return ShardRead(shard, _compact(shard, 0), _cuts(shard))


class ShardReader:
    """Caches read descriptions by digest. Owned by the coordinator; `keep` limits it."""

    def __init__(self) -> None:
        self._compact: dict[str, tuple[ParameterMetadata, ...] | None] = {}
        self._cuts: dict[str, dict[str, _Cut]] = {}
        self._said: dict[str, Said] = {}
        # by the digests of a pool: replicas are mostly described alike, and what holds for one of them holds for all
        self._even: BoundedCache[frozenset[str], bool] = BoundedCache(POOLS)
        self._complete: BoundedCache[frozenset[str], bool] = BoundedCache(POOLS)

    def rosters(self, pools: Iterable[Sequence[Registered]]) -> list[Roster]:
        """Return every rank's roster; ranks of equal shards share one sequence, which the planner reads once.

        Each rank gets its own sequence, with its groups, if its pool is split unevenly or a description has problems,
        so that the planner can tell splits apart and name ranks. The same holds for pools in which some shards leave
        out what others describe (`refitd.plan.completion`).
        """
        found: list[Roster] = []
        pools = list(pools)
        is_complete = self._is_complete({r.digest: r.shard for pool in pools for r in pool})
        for pool in pools:
            even = is_complete and self._is_even({r.digest: r.shard for r in pool})
            for r in pool:
                held = self._without_ranks(r) if even else None
                described: Sequence[ParameterMetadata] = metadata_of(r.shard, r.rank) if held is None else held
                if r.as_held:
                    described = self._as_held(r.digest, described)
                source, destination = (described, ()) if r.is_source else ((), described)
                found.append(Roster(r.rank, source=source, destination=destination, node=r.node, label=r.label))
        return found

    def learn(self, digest: str, read: ShardRead) -> None:
        """Store a description that was read elsewhere."""
        self._compact[digest] = read.compact
        self._cuts[digest] = read.cuts

    def keep(self, digests: Collection[str]) -> None:
        """Forget all other descriptions."""
        for known in (self._compact, self._cuts, self._said):
            for digest in [d for d in known if d not in digests]:
                del known[digest]

    def _without_ranks(self, r: Registered) -> tuple[ParameterMetadata, ...] | None:
        if r.digest not in self._compact:
            self._compact[r.digest] = _compact(r.shard, r.rank)
        return self._compact[r.digest]

    def _as_held(self, digest: str, described: Sequence[ParameterMetadata]) -> Sequence[ParameterMetadata]:
        """Return the descriptions without the casts by which the tensors were made."""
        if all(meta.cast_from is None and meta.cast_to is None for meta in described):
            return described
        key = f"{digest} as held"
        found = self._compact.get(key) if isinstance(described, tuple) else None
        if found is None:
            found = tuple(replace(meta, cast_from=None, cast_to=None) for meta in described)
            if isinstance(described, tuple):  # shared by ranks
                self._compact[key] = found
        return found

    def _is_complete(self, shards: dict[str, Shard]) -> bool:
        key = frozenset(shards)
        found = self._complete.get(key)
        if found is None:
            self._complete.put(key, found := self._none_left_out(shards))
        return found

    def _none_left_out(self, shards: dict[str, Shard]) -> bool:
        together = Said()
        for digest, shard in shards.items():
            if digest not in self._said:
                self._said[digest] = _said(shard)
            together.join(self._said[digest])
        return not together.incomplete()

    def _is_even(self, shards: dict[str, Shard]) -> bool:
        key = frozenset(shards)
        found = self._even.get(key)
        if found is None:
            self._even.put(key, found := self._cut_alike(shards))
        return found

    def _cut_alike(self, shards: dict[str, Shard]) -> bool:
        common: dict[str, _Cut] = {}
        for digest, shard in shards.items():
            if digest not in self._cuts:
                self._cuts[digest] = _cuts(shard)
            for name, cut in self._cuts[digest].items():
                if common.setdefault(name, cut) != cut:
                    return False
        return True


def _said(shard: Shard) -> Said:
    said = Said()
    for t in shard.tensors:
        group = shard.groups[t.tp_group] if t.tp_group is not None and t.tp_group < len(shard.groups) else ()
        if t.tiles is None and (t.is_tp or group or t.partition_sizes is not None):
            said.see(t.resolved_name or t.name, t, len(group))
    return said


def _compact(shard: Shard, rank: int) -> tuple[ParameterMetadata, ...] | None:
    try:
        return tuple(without_ranks(metadata_of(shard, rank)))
    except PlanError:
        return None  # the planner reports it, with the labels of the ranks


def _cuts(shard: Shard) -> dict[str, _Cut]:
    found: dict[str, _Cut] = {}
    for t in shard.tensors:
        if t.is_tp and t.tp_group is not None and t.tp_group < len(shard.groups) and t.tiles is None:
            dim = t.partition_dim
            size = t.shape[dim] if -len(t.shape) <= dim < len(t.shape) else -1
            found[t.resolved_name or t.name] = (dim, size, len(shard.groups[t.tp_group]), t.partition_stride)
    return found
