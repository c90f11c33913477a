"""LCM tiling: which source shard holds which part of a destination shard, in closed form.

The formula is that of Megatron-Core's resharding planner (`megatron/core/resharding/planner.py`).

Both sides split one dimension of `extent` elements evenly. A side with world W and stride s cuts it into W*s
segments; segment g is part g // W of shard g % W. With L = lcm(W_src*s_src, W_dst*s_dst) the dimension is L units, each
inside one segment of either side:

    extent 16, source W=2 s=2 (segments of 4), destination W=4 s=1 (segments of 4), L=4, unit 4
    unit 0 -> source shard 0 part 0, destination shard 0      unit 2 -> source shard 0 part 1, destination shard 2

The planner uses `lcm_tiling` for every tensor whose boxes allow it, and intersects the others (intersect.py). Where
the closed form applies, both give the same result; tests compare them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from refitd.describe.layout import canonical_name, global_shape_of, is_sharded, layout_problems
from refitd.describe.metadata import ParameterMetadata
from refitd.errors import PlanError
from refitd.plan.columns import Ints
from refitd.plan.intersect import Cells, Pieces
from refitd.plan.ops import ShardingDescriptor

# (source rank, slices of its tensor, slices of the receiver's tensor)
Transfer = tuple[int, tuple[slice, ...], tuple[slice, ...]]


@dataclass(frozen=True, slots=True)
class Overlap:
    """`length` elements along the dimension, from `src_start` in a source shard to `dst_start` in a destination's."""

    src_shard: int
    dst_shard: int
    src_start: int
    dst_start: int
    length: int


def lcm_overlaps(extent: int, src_world: int, src_stride: int, dst_world: int, dst_stride: int) -> list[Overlap]:
    """Return all overlaps of two even splits of `extent` elements, in canonical order, adjacent ones merged.

    Raises:
        PlanError: `extent` does not divide into a side's equal segments.
    """
    for side, segments in (("source", src_world * src_stride), ("destination", dst_world * dst_stride)):
        if extent % segments:
            raise PlanError(f"{extent} elements do not divide into the {side}'s {segments} equal segments")
    src_segment, dst_segment, place, length = _runs(extent, src_world * src_stride, dst_world * dst_stride)

    def located(segment: Ints, world: int, stride: int) -> tuple[list[int], list[int]]:
        each = extent // (world * stride)
        return (segment % world).tolist(), (segment // world * each + place - segment * each).tolist()

    src_shard, src_start = located(src_segment, src_world, src_stride)
    dst_shard, dst_start = located(dst_segment, dst_world, dst_stride)
    found: list[Overlap] = []
    for fields in zip(src_shard, dst_shard, src_start, dst_start, length.tolist(), strict=True):
        overlap = Overlap(*fields)
        if found and _joins(found[-1], overlap):
            last = found.pop()
            overlap = replace(last, length=last.length + overlap.length)
        found.append(overlap)
    return [overlap for overlap in found if overlap.length]


def lcm_tiling(held_offset: Ints, held_size: Ints, want_offset: Ints, want_size: Ints) -> tuple[Cells, Pieces] | None:
    """Return the result of `intersect` for these boxes in closed form; None if it does not apply.

    It applies if the distinct boxes of both sides are equal segments of the same box along the same dimension: world
    times stride segments on each side, or a single one that is the whole box.
    """
    held, wanted = _segments(held_offset, held_size), _segments(want_offset, want_size)
    if held is None or wanted is None:
        return None
    dim = held.dim if len(held.order) > 1 else wanted.dim
    if len(wanted.order) > 1 and wanted.dim != dim:
        return None
    if (held.start != wanted.start).any() or (held.whole != wanted.whole).any():
        return None
    src, dst, place, length = _runs(int(held.whole[dim]), len(held.order), len(wanted.order))
    offset, size = np.tile(held.start, (len(place), 1)), np.tile(held.whole, (len(place), 1))
    offset[:, dim] += place
    size[:, dim] = length
    each = np.arange(len(held_offset))
    return Cells(held_offset, held_size, each, each), Pieces(wanted.order[dst], held.order[src], offset, size)


@dataclass(frozen=True, slots=True)
class _Segments:
    """A box (start, size `whole`), cut along `dim` into equal boxes; `order` sorts their indices along it."""

    start: Ints
    whole: Ints
    dim: int
    order: Ints


def _segments(offset: Ints, size: Ints) -> _Segments | None:
    """Return the box that distinct boxes divide evenly along one dimension; None if they do not."""
    if len(offset) == 1:
        return _Segments(offset[0], size[0], 0, np.zeros(1, np.int64))
    moves = (offset != offset[:1]).any(axis=0)
    if moves.sum() != 1 or (size != size[:1]).any():
        return None
    dim = int(moves.argmax())
    order = np.argsort(offset[:, dim])
    first, step, whole = offset[order[0]], size[0, dim], size[0].copy()
    if (offset[order, dim] != first[dim] + np.arange(len(order)) * step).any():
        return None
    whole[dim] *= len(order)
    return _Segments(first, whole, dim, order)


def _runs(extent: int, src_segments: int, dst_segments: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (source segment, destination segment, first element, elements) of every run of units inside one of each.

    A run begins where a segment of either side begins; the L units form S + D - gcd(S, D) runs.
    """
    units = math.lcm(src_segments, dst_segments)
    src_units, dst_units = units // src_segments, units // dst_segments
    first = np.union1d(np.arange(src_segments) * src_units, np.arange(dst_segments) * dst_units)
    length = np.diff(first, append=units) * (extent // units)
    return first // src_units, first // dst_units, first * (extent // units), length


def _joins(first: Overlap, second: Overlap) -> bool:
    return (
        first.src_shard == second.src_shard
        and first.dst_shard == second.dst_shard
        and first.src_start + first.length == second.src_start
        and first.dst_start + first.length == second.dst_start
    )


def sharding_descriptors(src_metadata: ParameterMetadata, dst_metadata: ParameterMetadata) -> list[ShardingDescriptor]:
    """Return how a parameter is split on both sides: one "tp" descriptor if LCM tiling applies, else none.

    It applies if at least one side is split, and split sides are split evenly along the same dimension, without
    `partition_sizes` or explicit tiles.

    Raises:
        PlanError: a description is invalid, or the canonical shapes differ.
    """
    problems = [p for meta in (src_metadata, dst_metadata) for p in layout_problems(meta)]
    if problems:
        raise PlanError(problems)
    src_shape, dst_shape = global_shape_of(src_metadata), global_shape_of(dst_metadata)
    if src_shape is not None and dst_shape is not None and src_shape != dst_shape:
        raise PlanError(
            f"{canonical_name(dst_metadata)}: the source's global shape is {src_shape}, the destination's "
            f"{dst_shape}; a tensor that is replicated must not say is_tp"
        )
    split = [meta for meta in (src_metadata, dst_metadata) if is_sharded(meta)]
    if not split or len({meta.partition_dim for meta in split}) != 1:
        return []
    if any(m.tiles is not None or (is_sharded(m) and m.partition_sizes) for m in (src_metadata, dst_metadata)):
        return []
    return [
        ShardingDescriptor(
            name="tp",
            dim=split[0].partition_dim,
            src_stride=src_metadata.partition_stride if is_sharded(src_metadata) else 1,
            dst_stride=dst_metadata.partition_stride if is_sharded(dst_metadata) else 1,
            src_dim_ranks=_shard_ranks(src_metadata),
            dst_dim_ranks=_shard_ranks(dst_metadata),
        )
    ]


def plan_lcm_transfers(
    param_name: str,
    src_metadata: ParameterMetadata,
    dst_metadata: ParameterMetadata,
    descriptors: list[ShardingDescriptor],
    my_global_rank: int,
) -> list[Transfer]:
    """Return what `my_global_rank` receives of a parameter, by LCM tiling, in canonical order.

    A rank outside the destination's group receives nothing.

    Raises:
        PlanError: there is not exactly one descriptor, or the two sides' sizes differ.
    """
    if len(descriptors) != 1 or descriptors[0].name != "tp":
        names = [descriptor.name for descriptor in descriptors]
        raise PlanError(f"{param_name}: LCM tiling needs one tp descriptor, found {names}")
    split = descriptors[0]
    if my_global_rank not in split.dst_dim_ranks:
        return []
    me = split.dst_dim_ranks.index(my_global_rank)
    extent = dst_metadata.shape[split.dim] * len(split.dst_dim_ranks)
    if extent != src_metadata.shape[split.dim] * len(split.src_dim_ranks):
        raise PlanError(
            f"{param_name}: dim {split.dim} has {src_metadata.shape[split.dim] * len(split.src_dim_ranks)} elements "
            f"at the source and {extent} at the destination; check the tensor-parallel groups"
        )

    def along(start: int, length: int) -> tuple[slice, ...]:
        whole = [slice(0, size) for size in dst_metadata.shape]
        whole[split.dim] = slice(start, start + length)
        return tuple(whole)

    overlaps = lcm_overlaps(
        extent, len(split.src_dim_ranks), split.src_stride, len(split.dst_dim_ranks), split.dst_stride
    )
    return [
        (split.src_dim_ranks[o.src_shard], along(o.src_start, o.length), along(o.dst_start, o.length))
        for o in overlaps
        if o.dst_shard == me
    ]


def _shard_ranks(meta: ParameterMetadata) -> list[int]:
    if is_sharded(meta):
        return list(meta.tensor_parallel_group_ranks or ())
    if meta.owner_rank is None:
        raise PlanError(f"{canonical_name(meta)}: owner_rank is not set")
    return [meta.owner_rank]
