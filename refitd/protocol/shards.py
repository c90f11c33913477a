"""Describe one rank's tensors on the wire: descriptions, places in arenas, conversions, staging layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

import msgspec

from refitd.buffers.layout import packed_offsets
from refitd.describe.metadata import ParameterMetadata, Repeat, Tile, plain
from refitd.dtypes import ELEMENT_SIZES, dtype_name
from refitd.errors import ProtocolError
from refitd.mxfp8.format import Rounding
from refitd.protocol.base import Count, Label, Name, Small, Step, Value

# A limit above the number of dimensions in any array library: a product of too many numbers is not a usable size.
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]


class WireRepeat(Value, frozen=True, array_like=True):
    """`refitd.describe.Repeat` on the wire."""

    dim: Small
    count: Count
    step: Count
    local_step: Count


class WireTile(Value, frozen=True, array_like=True):
    """`refitd.describe.Tile` on the wire."""

    tensor: Name
    offset: Shape
    size: Shape
    local_offset: Count
    local_stride: Shape
    repeat: WireRepeat | None = None


class WireTensor(Value, frozen=True, omit_defaults=True):
    """`ParameterMetadata` on the wire; groups are indices into `Shard.groups`.

    Data- and pipeline-parallel groups are not sent: replicas are found from each rank's tensors.
    """

    name: Name
    shape: Shape
    dtype: Name
    is_tp: bool = False
    partition_dim: int = 0
    partition_stride: Small = 1
    partition_sizes: tuple[Count, ...] | None = None
    is_ep: bool = False
    num_experts: Small | None = None
    tp_group: Small | None = None
    ep_group: Small | None = None
    resolved_name: Name | None = None
    global_expert_index: Small | None = None
    tiles: tuple[WireTile, ...] | None = None
    global_shape: Shape | None = None
    fill: float | None = None
    aliases: tuple[Name, ...] = ()
    cast_from: Name | None = None
    stride_is_known: bool = True
    cast_to: Name | None = None


class KeptTensor(Value, frozen=True, array_like=True):
    """A target's tensor that no swap writes; `tensors` are the canonical tensors in it, aliases included."""

    name: Name
    tensors: tuple[Name, ...]
    nbytes: Count


class SharedTensor(Value, frozen=True, array_like=True):
    """A target's tensor whose memory is written by versions of another `model`, where it is a target of `replica`."""

    name: Name
    model: Name
    replica: Name


class VersionOf(Value, frozen=True, array_like=True):
    """A version of a model, by number and run."""

    model: Name
    version: Count
    run: Label = ""


class Shard(Value, frozen=True, omit_defaults=True):
    """All tensors of one rank. `groups` has each rank list once, relative to the rank itself.

    Rank 5 of [4, 5, 6, 7] sends (-1, 0, 1, 2), so ranks with equal shards (data parallel) send equal bytes.
    """

    tensors: tuple[WireTensor, ...]
    groups: tuple[tuple[Step, ...], ...] = ()
    is_partial: bool = False  # source: the sources together offer only some of the targets' tensors
    kept: tuple[KeptTensor, ...] = ()  # target: tensors that no swap writes
    keeps_rest: bool = False  # target: it keeps all tensors that are not offered; its replica must use all offered ones


class Place(Value, frozen=True, array_like=True):
    """The offset of a tensor's first element in an arena, and its strides there, in bytes."""

    arena: Count
    offset: Count
    strides: Shape


def shard_of(
    metadata: Sequence[ParameterMetadata],
    *,
    is_partial: bool = False,
    kept: Sequence[KeptTensor] = (),
    keeps_rest: bool = False,
) -> Shard:
    """Pack the descriptions of one rank for the wire; groups become relative to their `owner_rank` (None: 0).

    Raises:
        ProtocolError: the descriptions belong to several ranks.
        PlanError: a field has a wrong type; the error names the tensor and field.
    """
    metadata = [plain(m) for m in metadata]
    owners = {m.owner_rank or 0 for m in metadata}
    if len(owners) > 1:
        raise ProtocolError(f"one shard is what one rank holds; found owner_rank {sorted(owners)}")
    owner = owners.pop() if owners else 0
    groups: dict[tuple[int, ...], int] = {}

    def group(ranks: Sequence[int] | None) -> int | None:
        return None if ranks is None else groups.setdefault(tuple(r - owner for r in ranks), len(groups))

    tensors = tuple(
        WireTensor(
            name=m.name,
            shape=tuple(m.shape),
            dtype=dtype_name(m.dtype),
            is_tp=m.is_tp,
            partition_dim=m.partition_dim,
            partition_stride=m.partition_stride,
            partition_sizes=None if m.partition_sizes is None else tuple(m.partition_sizes),
            is_ep=m.is_ep,
            num_experts=m.num_experts,
            tp_group=group(m.tensor_parallel_group_ranks),
            ep_group=group(m.expert_parallel_group_ranks),
            resolved_name=m.resolved_name,
            global_expert_index=m.global_expert_index,
            tiles=None if m.tiles is None else tuple(_wire_tile(tile) for tile in m.tiles),
            global_shape=m.global_shape,
            fill=m.fill,
            aliases=m.aliases,
            cast_from=m.cast_from,
            stride_is_known=m.stride_is_known,
            cast_to=m.cast_to,
        )
        for m in metadata
    )
    return Shard(tensors, tuple(groups), is_partial, tuple(kept), keeps_rest)


def check_shard(shard: Shard) -> None:
    """Check that `metadata_of` will succeed, without building anything.

    Raises:
        ProtocolError: a dtype is unknown, a group index is out of range, or a name occurs twice.
    """
    groups = len(shard.groups)
    names: set[str] = set()
    for t in shard.tensors:
        if t.dtype not in ELEMENT_SIZES:
            raise ProtocolError(f"{t.name}: unknown dtype {t.dtype!r}; known: {', '.join(ELEMENT_SIZES)}")
        if t.name in names:
            raise ProtocolError(f"{t.name}: described twice in one shard; names must be unique")
        names.add(t.name)
        for index in (t.tp_group, t.ep_group):
            if index is not None and index >= groups:
                raise ProtocolError(f"{t.name}: group {index} is not among the {groups} groups sent")


def metadata_of(shard: Shard, owner_rank: int) -> list[ParameterMetadata]:
    """Unpack the descriptions of rank `owner_rank`; groups become absolute ranks.

    Raises:
        ProtocolError: a dtype is unknown, a group index is out of range, or a name occurs twice.
    """
    check_shard(shard)
    lists = [[owner_rank + step for step in steps] for steps in shard.groups]
    found: list[ParameterMetadata] = []
    for t in shard.tensors:
        found.append(
            ParameterMetadata(
                name=t.name,
                shape=t.shape,
                dtype=t.dtype,
                element_size=ELEMENT_SIZES[t.dtype],
                is_tp=t.is_tp,
                partition_dim=t.partition_dim,
                partition_stride=t.partition_stride,
                partition_sizes=None if t.partition_sizes is None else list(t.partition_sizes),
                is_ep=t.is_ep,
                num_experts=t.num_experts,
                owner_rank=owner_rank,
                tensor_parallel_group_ranks=None if t.tp_group is None else lists[t.tp_group],
                expert_parallel_group_ranks=None if t.ep_group is None else lists[t.ep_group],
                resolved_name=t.resolved_name,
                global_expert_index=t.global_expert_index,
                tiles=None if t.tiles is None else tuple(_tile(tile) for tile in t.tiles),
                global_shape=t.global_shape,
                fill=t.fill,
                aliases=t.aliases,
                cast_from=t.cast_from,
                stride_is_known=t.stride_is_known,
                cast_to=t.cast_to,
            )
        )
    return found


def _wire_tile(tile: Tile) -> WireTile:
    r = tile.repeat
    repeat = None if r is None else WireRepeat(r.dim, r.count, r.step, r.local_step)
    return WireTile(tile.tensor, tile.offset, tile.size, tile.local_offset, tile.local_stride, repeat)


def _tile(tile: WireTile) -> Tile:
    r = tile.repeat
    repeat = None if r is None else Repeat(r.dim, r.count, r.step, r.local_step)
    return Tile(tile.tensor, tile.offset, tile.size, tile.local_offset, tile.local_stride, repeat)


class HeldTensor(Value, frozen=True, omit_defaults=True):
    """One live tensor of a target; `wire` is its index in the shard, None if a conversion makes it."""

    name: Name
    shape: Shape
    dtype: Name
    wire: Small | None = None


class Conversion(Value, frozen=True, omit_defaults=True):
    """How workers make live tensors from a received one, once all tensors were received.

    quantize: `wire` in bfloat16 becomes `held` (data, scale), row-major or `swizzled`.
    swizzle:  `wire`, row-major scales, becomes `held` (scale), swizzled.
    quantize-tiles: `wire` in bfloat16 becomes `held` (data, scale) in FP8, with a float32 scale per tile of 128 x 128.
    """

    kind: Literal["quantize", "swizzle", "quantize-tiles"]
    wire: Small
    held: tuple[Small, ...]
    rounding: Rounding = Rounding.RCEIL
    swizzled: bool = False


class DerivedTensor(Value, frozen=True):
    """A tensor that a target computes from weights (a workspace, a fused copy). Stale unless a hook refreshes it."""

    name: Name
    sources: tuple[Name, ...]
    is_refreshed: bool


@dataclass(frozen=True, slots=True)
class Staged:
    """Offsets in a staging arena, and the arena's size."""

    wire: tuple[int, ...]
    held: tuple[int, ...]
    nbytes: int


def held_bytes(held: HeldTensor | WireTensor) -> int:
    """Return the bytes of a live tensor."""
    return prod(held.shape) * ELEMENT_SIZES[held.dtype]


def staged(shard: Shard, held: Sequence[HeldTensor]) -> Staged:
    """Return the layout of a staging arena. Without `held`, the live tensors equal the received ones.

    All dtypes must be known, and every `wire` must be an index into the shard.
    """
    sizes = [prod(t.shape) * ELEMENT_SIZES[t.dtype] for t in shard.tensors]
    made = [i for i, tensor in enumerate(held) if tensor.wire is None]
    offsets, nbytes = packed_offsets(sizes + [held_bytes(held[i]) for i in made])
    wire, rest = offsets[: len(sizes)], dict(zip(made, offsets[len(sizes) :], strict=True))
    if not held:
        return Staged(tuple(wire), tuple(wire), nbytes)
    lies = [rest[i] if tensor.wire is None else wire[tensor.wire] for i, tensor in enumerate(held)]
    return Staged(tuple(wire), tuple(lies), nbytes)


def landed(shard: Shard, conversions: Sequence[Conversion]) -> tuple[dict[int, int], int]:
    """Return the landing arena of a flipping target: {index in the shard: offset} of tensors to convert, and its bytes.

    Such a target's staging arena has the layout of its live arena, so it has no place for tensors before conversion.
    """
    wires = [conversion.wire for conversion in conversions]
    tensors = [shard.tensors[wire] for wire in wires]
    offsets, nbytes = packed_offsets([prod(t.shape) * ELEMENT_SIZES[t.dtype] for t in tensors])
    return dict(zip(wires, offsets, strict=True)), nbytes if wires else 0


def converted_bytes(shard: Shard, conversions: Sequence[Conversion]) -> int:
    """Return how many bytes conversions read."""
    tensors = [shard.tensors[conversion.wire] for conversion in conversions]
    return sum(prod(t.shape) * ELEMENT_SIZES[t.dtype] for t in tensors)
