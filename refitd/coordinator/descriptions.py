"""Descriptions of shards: checked, cached by digest, and turned into rosters for the planner.

Each distinct description is read once, however many ranks share it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from refitd.caches import BoundedCache
from refitd.describe.layout import without_ranks
from refitd.describe.metadata import ParameterMetadata, Roster
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import PlanError, ProtocolError, RefusedError
from refitd.mxfp8.parts import MARK, converted_by_senders, part_of
from refitd.plan.completion import Said
from refitd.protocol.base import unpack
from refitd.protocol.cluster import AddShard
from refitd.protocol.roles import check_tensor_names
from refitd.protocol.shards import Shard, WireTensor, metadata_of

# Limits: bytes of one shard, or of one node's share of a swap (the sum of thousands fits a message's integers), and
# unused descriptions, by their tensors, tiles and group entries (some hundred megabytes) and by their number.
MAX_BYTES = 1 << 48
MAX_UNUSED_PARTS = 1 << 20
MAX_UNUSED_SHARDS = 256

# Limit on cached pools, by their descriptions.
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
class Described:
    """A description and the values derived from it, computed once for all ranks that share it."""

    shard: Shard
    bytes: int
    wants: frozenset[tuple[str, str]] = frozenset()  # (canonical tensor, rounding) of all that arrives in MXFP8


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
        # keyed by the digests of a pool: most replicas have equal descriptions, and share one result
        self._even: BoundedCache[frozenset[str], bool] = BoundedCache(POOLS)
        self._complete: BoundedCache[frozenset[str], bool] = BoundedCache(POOLS)

    def rosters(self, pools: Iterable[Sequence[Registered]]) -> list[Roster]:
        """Return every rank's roster; ranks of equal shards share one sequence, which the planner reads once.

        Each rank gets its own sequence, with its groups, if its pool is split unevenly or a description has problems,
        because the planner must distinguish splits and name ranks. The same is true for pools where some shards omit
        tensors that others describe (`refitd.plan.completion`).
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
        # seeds hold converted parts
        return found if any(r.as_held for pool in pools for r in pool) else converted_by_senders(found)

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
        """Return the descriptions without the casts that made the tensors."""
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


# --- the coordinator's cache ------------------------------------------------------------------------------


class UnknownShard(RefusedError):
    """A member's description was not sent, or was discarded."""

    code = "unknown-shard"


def unpack_shard(packed: bytes, digest: str) -> ShardRead:
    """Unpack, check and read a description. Large ones take seconds.

    Raises:
        ProtocolError: it is damaged, does not match `digest`, or exceeds a limit.
    """
    shard = unpack(packed, Shard, digest)
    check_shard(shard)
    return read_shard(shard)


class Descriptions:
    """Descriptions by digest: all used ones, and some unused ones, which restarted engines need not send again.

    Attributes:
        reader: makes rosters of them.
    """

    def __init__(self) -> None:
        self.reader = ShardReader()
        self._known: dict[str, Described] = {}

    def take(self, digest: str, read: ShardRead, used: Container[str]) -> None:
        """Store a description, and forget the oldest unused ones beyond the limits.

        The coordinator asks a daemon that refers to a forgotten one to send it again. `used` are the digests in use.
        """
        unused = [d for d in self._known if d not in used]
        parts = sum(parts_of(self._known[d].shard) for d in unused)
        for count, old in zip(range(len(unused), 0, -1), unused, strict=True):
            if count <= MAX_UNUSED_SHARDS and parts <= MAX_UNUSED_PARTS:
                break
            parts -= parts_of(self._known.pop(old).shard)
        self.reader.keep(self._known.keys())
        self._known[digest] = _described(read.shard)
        self.reader.learn(digest, read)

    def of(self, added: AddShard) -> Described:
        """Return a rank's description.

        Raises:
            UnknownShard: it is not known here.
        """
        found = self._known.get(added.digest)
        if found is None:
            raise UnknownShard(f"{added.member}: no shard {added.digest} has been described to this coordinator")
        return found


def _described(shard: Shard) -> Described:
    nbytes = sum(prod(t.shape) * ELEMENT_SIZES.get(t.dtype, 0) for t in shard.tensors)
    return Described(shard, nbytes, wanted_parts(shard))


def check_shard(shard: Shard) -> None:
    """Refuse a description whose byte count exceeds what messages can carry.

    Raises:
        ProtocolError, RefusedError: names the tensor, or says why its name is invalid.
    """
    check_tensor_names(shard)
    total = 0
    for tensor in shard.tensors:
        total += prod(tensor.shape) * ELEMENT_SIZES.get(tensor.dtype, 0)
        if total > MAX_BYTES:
            raise ProtocolError(f"{tensor.name}: a shard of more than {MAX_BYTES} bytes, shape {tensor.shape}")
    if (kept := sum(tensor.nbytes for tensor in shard.kept)) > MAX_BYTES:
        raise ProtocolError(f"{shard.kept[0].name}: {kept} bytes are kept, at most {MAX_BYTES} are believed")


def parts_of(shard: Shard) -> int:
    """Return roughly how many values a description holds, as a measure of its memory."""
    tiles = sum(len(tensor.tiles or ()) + len(tensor.aliases) for tensor in shard.tensors)
    kept = sum(1 + len(tensor.tensors) for tensor in shard.kept)
    return len(shard.tensors) + tiles + sum(len(group) for group in shard.groups) + kept


def canonical_names(tensor: WireTensor) -> set[str]:
    """Return the canonical tensors that a local tensor holds (parts of)."""
    if tensor.tiles is not None:
        return {tile.tensor for tile in tensor.tiles}
    return {tensor.resolved_name or tensor.name}


def wanted_parts(shard: Shard) -> frozenset[tuple[str, str]]:
    """Return (canonical tensor, rounding) of all that arrives in MXFP8. Aliased tensors are left to the planner."""
    found = set()
    for tensor in shard.tensors:
        if MARK in tensor.name and not tensor.aliases:
            parts = [part_of(name) for name in canonical_names(tensor)]
            found |= {(part.tensor, part.rounding) for part in parts if part is not None}
    return frozenset(found)
