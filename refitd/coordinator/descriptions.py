"""Descriptions of shards: checked, cached by digest, and turned into rosters for the planner.

Each distinct description is read once, however many ranks share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from math import prod
from operator import attrgetter
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import xxhash
from msgspec.structs import replace

from refitd.caches import BoundedCache
from refitd.describe.layout import without_ranks
from refitd.describe.metadata import Alike, Names, ParameterMetadata, Roster, kinds_of
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import PlanError, ProtocolError, RefusedError
from refitd.mxfp8.parts import MARK, converted_by_senders, part_of
from refitd.plan.completion import Said
from refitd.protocol.base import decoded, fields_of, inflated
from refitd.protocol.cluster import AddShard
from refitd.protocol.keys import check_tensor_names
from refitd.protocol.shards import Shard, WireTensor, metadata_of
from refitd.text import called

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
    list_digest: str = ""  # other descriptions may share its list of tensors
    listed: int = 0  # roughly its values

    @property
    def own(self) -> int:
        """Roughly the values beside the list of tensors."""
        return sum(map(len, self.shard.groups)) + sum(1 + len(tensor.tensors) for tensor in self.shard.kept)


@dataclass(frozen=True, eq=False)
class Listed:
    """A list of tensors, and what was derived from it once for all shards that hold it and differ in their groups."""

    digest: str
    tensors: tuple[WireTensor, ...]
    names: Names
    bytes: int
    wants: frozenset[tuple[str, str]]  # (canonical tensor, rounding) of all that arrives in MXFP8
    parts: int  # roughly the values in it, as a measure of its memory


@dataclass(frozen=True, eq=False)
class ShardRead:
    """A description that was read: `compact` are its descriptions without ranks, `cuts` those of each kind of tensor.

    `compact` is None if the description has problems.
    """

    shard: Shard
    listed: Listed
    compact: Alike | None
    cuts: tuple[_Cut | None, ...]


def read_shard(shard: Shard, listed: Listed | None = None) -> ShardRead:
    """Read a description once, for every rank that has it; `listed` is that of its tensors, if they are known.

    Raises:
        ProtocolError, RefusedError: a dtype is unknown, a group index is out of range, a name is invalid or occurs
            twice, or the tensors are too large.
    """
    listed = listed or list_tensors(xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(shard.tensors)), shard.tensors)
    few = replace(shard, tensors=tuple(shard.tensors[i] for i in listed.names.first))
    described = metadata_of(few, 0)
    try:
        compact = Alike(listed.names, without_ranks(described))
    except PlanError:
        compact = None  # the planner reports it, with the labels of the ranks
    return ShardRead(shard, listed, compact, tuple(_cut_of(t, shard.groups) for t in few.tensors))


# The fields that tensors of one kind have in common.
_KIND = attrgetter(
    "shape", "dtype", "is_tp", "partition_dim", "partition_stride", "partition_sizes", "is_ep", "num_experts",
    "tp_group", "ep_group", "global_shape", "stride_is_known",
)  # fmt: skip


def list_tensors(digest: str, tensors: tuple[WireTensor, ...]) -> Listed:
    """Check a list of tensors, and number the kinds in it.

    Raises:
        ProtocolError, RefusedError: a name is invalid or occurs twice, or the tensors are too large.
    """
    check_shard(Shard(tensors))
    kinds: dict[Any, int] = {}
    first: list[int] = []
    kind: list[int] = []
    seen: set[str] = set()
    for number, t in enumerate(tensors):
        if t.name in seen:
            raise ProtocolError(f"{t.name}: described twice in one shard; names must be unique")
        seen.add(t.name)
        is_plain = t.tiles is None and t.fill is None and t.cast_from is None and t.cast_to is None and not t.aliases
        key = _KIND(t) if is_plain and MARK not in t.name else t.name
        found = kinds.setdefault(key, len(first))
        if found == len(first):
            first.append(number)
        kind.append(found)
    names = Names(
        local=tuple(t.name for t in tensors),
        canonical=tuple(t.name if t.resolved_name is None else t.resolved_name for t in tensors),
        experts=tuple(t.global_expert_index for t in tensors),
        kind=tuple(kind),
        first=tuple(first),
    )
    nbytes = sum(prod(t.shape) * ELEMENT_SIZES.get(t.dtype, 0) for t in tensors)
    parts = len(tensors) + sum(len(t.tiles or ()) + len(t.aliases) for t in tensors)
    return Listed(digest, tensors, names, nbytes, wanted_parts(Shard(tensors)), parts)


class ShardReader:
    """Caches read descriptions by digest. Owned by the coordinator; `keep` limits it."""

    def __init__(self) -> None:
        self._read: dict[str, ShardRead] = {}
        self._held: dict[str, Sequence[ParameterMetadata]] = {}  # without the casts that made the tensors
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
        reads = [{r.digest: self._read_of(r) for r in {r.digest: r for r in pool}.values()} for pool in pools]
        is_complete = self._is_complete({digest: read for pool in reads for digest, read in pool.items()})
        for pool, known in zip(pools, reads, strict=True):
            even = is_complete and self._is_even(known)
            for r in pool:
                held = known[r.digest].compact if even else None
                described: Sequence[ParameterMetadata] = metadata_of(r.shard, r.rank) if held is None else held
                if r.as_held:
                    described = self._as_held(r.digest, described)
                source, destination = (described, ()) if r.is_source else ((), described)
                found.append(Roster(r.rank, source=source, destination=destination, node=r.node, label=r.label))
        # seeds hold converted parts
        return found if any(r.as_held for pool in pools for r in pool) else converted_by_senders(found)

    def learn(self, digest: str, read: ShardRead) -> None:
        """Store a description that was read elsewhere."""
        self._read[digest] = read

    def keep(self, digests: Collection[str]) -> None:
        """Forget all other descriptions."""
        for known in (self._read, self._held, self._said):
            for digest in [d for d in known if d not in digests]:
                del known[digest]

    def _read_of(self, r: Registered) -> ShardRead:
        if r.digest not in self._read:
            self._read[r.digest] = read_shard(r.shard)
        return self._read[r.digest]

    def _as_held(self, digest: str, described: Sequence[ParameterMetadata]) -> Sequence[ParameterMetadata]:
        """Return the descriptions without the casts that made the tensors."""
        if all(meta.cast_from is None and meta.cast_to is None for meta in kinds_of(described)):
            return described
        is_shared = isinstance(described, Alike)
        if is_shared and digest in self._held:
            return self._held[digest]
        found = tuple(changed(meta, cast_from=None, cast_to=None) for meta in described)
        if is_shared:
            self._held[digest] = found
        return found

    def _is_complete(self, reads: dict[str, ShardRead]) -> bool:
        key = frozenset(reads)
        found = self._complete.get(key)
        if found is None:
            self._complete.put(key, found := self._none_left_out(reads))
        return found

    def _none_left_out(self, reads: dict[str, ShardRead]) -> bool:
        together = Said()
        sizes = {digest: tuple(map(len, read.shard.groups)) for digest, read in reads.items()}
        # of one list, split over equally large groups, all shards say the same
        for digest in {(id(read.listed), sizes[digest]): digest for digest, read in reads.items()}.values():
            if digest not in self._said:
                self._said[digest] = _said(reads[digest].shard)
            together.join(self._said[digest])
        return not together.incomplete()

    def _is_even(self, reads: dict[str, ShardRead]) -> bool:
        key = frozenset(reads)
        found = self._even.get(key)
        if found is None:
            self._even.put(key, found := _cut_alike(reads.values()))
        return found


def _cut_alike(reads: Iterable[ShardRead]) -> bool:
    common: dict[str, _Cut] = {}
    for read in {(id(read.listed), read.cuts): read for read in reads}.values():
        names = read.listed.names
        for name, kind in zip(names.canonical, names.kind, strict=True):
            if (cut := read.cuts[kind]) is not None and common.setdefault(name, cut) != cut:
                return False
    return True


def _said(shard: Shard) -> Said:
    said = Said()
    for t in shard.tensors:
        group = shard.groups[t.tp_group] if t.tp_group is not None and t.tp_group < len(shard.groups) else ()
        if t.tiles is None and (t.is_tp or group or t.partition_sizes is not None):
            said.see(t.resolved_name or t.name, t, len(group))
    return said


def _cut_of(t: WireTensor, groups: Sequence[Sequence[int]]) -> _Cut | None:
    if not t.is_tp or t.tp_group is None or t.tp_group >= len(groups) or t.tiles is not None:
        return None
    size = t.shape[t.partition_dim] if -len(t.shape) <= t.partition_dim < len(t.shape) else -1
    return t.partition_dim, size, len(groups[t.tp_group]), t.partition_stride


# --- the coordinator's cache ------------------------------------------------------------------------------


class UnknownShard(RefusedError):
    """A member's description was not sent, or was discarded."""

    code = "unknown-shard"


Lists = WeakValueDictionary[str, Listed]
_NO_TENSORS = msgspec.Raw(msgspec.msgpack.encode(()))


def unpack_shard(packed: bytes, digest: str, lists: Lists) -> ShardRead:
    """Unpack, check and read a description. Large ones take a second.

    Args:
        packed: the description.
        digest: its digest.
        lists: the lists of tensors that some description in use holds, by their digests. A known list is not read
            again: the ranks of a tensor-parallel group have one list, and differ in their positions.

    Raises:
        ProtocolError, RefusedError: it is damaged, does not match `digest`, exceeds a limit, or as `read_shard`.
    """
    fields = fields_of(inflated(packed, Shard.__name__, digest), Shard)
    tensors = fields.get("tensors", _NO_TENSORS)
    key = xxhash.xxh3_128_hexdigest(tensors)
    listed = lists.get(key)
    if listed is None:
        listed = list_tensors(key, decoded(tensors, tuple[WireTensor, ...], Shard.__name__))
        lists[key] = listed
    few = msgspec.msgpack.encode(fields | {"tensors": _NO_TENSORS} if "tensors" in fields else fields)
    shard: Shard = replace(decoded(few, Shard, Shard.__name__), tensors=listed.tensors)
    check_shard(replace(shard, tensors=()))
    return read_shard(shard, listed)


class Descriptions:
    """Descriptions by digest: all used ones, and some unused ones, which restarted engines need not send again.

    Attributes:
        reader: makes rosters of them.
        lists: the lists of tensors in them, for `unpack_shard`.
    """

    def __init__(self) -> None:
        self.reader = ShardReader()
        self.lists: Lists = Lists()
        self._known: dict[str, Described] = {}
        self._sharing: Counter[str] = Counter()  # the number of descriptions with each list of tensors
        self._unused = 0, 0  # at most so many unused descriptions, and values in them

    def take(self, digest: str, read: ShardRead, used: Callable[[], Container[str]]) -> None:
        """Store a description, and forget the oldest unused ones beyond the limits.

        The coordinator asks a daemon that refers to a forgotten one to send it again. `used` returns the digests in
        use; it is called only when the limits may be exceeded.
        """
        self._pop(digest)
        shards, parts = self._unused
        if shards > MAX_UNUSED_SHARDS or parts > MAX_UNUSED_PARTS:
            shards, parts = self._forget(used())
        listed = read.listed
        found = Described(read.shard, listed.bytes, listed.wants, listed.digest, listed.parts)
        self._known[digest] = found
        self._sharing[found.list_digest] += 1
        self._unused = shards + 1, parts + self._alone(found)
        self.reader.learn(digest, read)

    def _forget(self, used: Container[str]) -> tuple[int, int]:
        """Forget unused descriptions beyond the limits; return the number of the others, and of the values in them."""
        unused = [d for d in self._known if d not in used]
        lists = {known.list_digest: known.listed for known in map(self._known.__getitem__, unused)}
        parts = sum(lists.values()) + sum(self._known[d].own for d in unused)
        for count, old in zip(range(len(unused), 0, -1), unused, strict=True):
            if count <= MAX_UNUSED_SHARDS and parts <= MAX_UNUSED_PARTS:
                break
            parts -= self._pop(old)
        self.reader.keep(self._known.keys())
        return sum(d in self._known for d in unused), parts

    def _pop(self, digest: str) -> int:
        """Forget a description if it is known; return how many values less there are."""
        found = self._known.pop(digest, None)
        if found is None:
            return 0
        alone = self._alone(found)
        self._sharing[found.list_digest] -= 1
        if not self._sharing[found.list_digest]:
            del self._sharing[found.list_digest]
        return alone

    def _alone(self, known: Described) -> int:
        """Return roughly how many values only this description holds."""
        return known.own + (known.listed if self._sharing[known.list_digest] == 1 else 0)

    def of(self, added: AddShard) -> Described:
        """Return a rank's description.

        Raises:
            UnknownShard: it is not known here.
        """
        found = self._known.get(added.digest)
        if found is None:
            raise UnknownShard(f"{called(added.member)}: this coordinator knows no shard {added.digest}")
        return found


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
