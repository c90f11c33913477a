"""LCM tiling: which source shard holds which part of a destination shard, in closed form.

Both sides split one dimension of `extent` elements evenly. A side with world W and stride s cuts it into W*s
segments; segment g belongs to shard g % W and is its part g // W. With L = lcm(W_src*s_src, W_dst*s_dst) the
dimension is L units, each inside one segment of either side:

    extent 16, source W=2 s=2 (segments of 4), destination W=4 s=1 (segments of 4), L=4, unit 4
    unit 0 -> source shard 0 part 0, destination shard 0      unit 2 -> source shard 0 part 1, destination shard 2

The planner itself intersects tiles, which covers these layouts and all others (intersect.py); this is the form
for one parameter, and each is the other's test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from refitd.describe.layout import canonical_name, global_shape_of, is_sharded, layout_problems
from refitd.describe.metadata import ParameterMetadata
from refitd.errors import PlanError
from refitd.plan.ops import ShardingDescriptor

# (source rank, slices of its tensor, slices of the receiver's tensor)
Transfer = tuple[int, tuple[slice, ...], tuple[slice, ...]]


@dataclass(frozen=True, slots=True)
class Overlap:
    """`length` elements along the dimension: from `src_start` in a source shard to `dst_start` in another."""

    src_shard: int
    dst_shard: int
    src_start: int
    dst_start: int
    length: int


def lcm_overlaps(extent: int, src_world: int, src_stride: int, dst_world: int, dst_stride: int) -> list[Overlap]:
    """Return all overlaps of two even splits of `extent` elements, in canonical order, neighbours joined.

    Raises:
        PlanError: a side's segments would not be equal.
    """
    for side, segments in (("source", src_world * src_stride), ("destination", dst_world * dst_stride)):
        if extent % segments:
            raise PlanError(f"{extent} elements do not divide into the {side}'s {segments} equal segments")
    units = math.lcm(src_world * src_stride, dst_world * dst_stride)
    place = np.arange(units) * (extent // units)

    def located(world: int, stride: int) -> tuple[list[int], list[int]]:
        segment = extent // (world * stride)
        number = place // segment if segment else np.arange(units)
        start = number // world * segment + place - number * segment
        return (number % world).tolist(), start.tolist()

    src_shard, src_start = located(src_world, src_stride)
    dst_shard, dst_start = located(dst_world, dst_stride)
    found: list[Overlap] = []
    for ends in zip(src_shard, dst_shard, src_start, dst_start, strict=True):
        overlap = Overlap(*ends, length=extent // units)
        if found and _joins(found[-1], overlap):
            last = found.pop()
            overlap = Overlap(
                last.src_shard, last.dst_shard, last.src_start, last.dst_start, last.length + overlap.length
            )
        found.append(overlap)
    return [overlap for overlap in found if overlap.length]


def _joins(first: Overlap, second: Overlap) -> bool:
    return (
        first.src_shard == second.src_shard
        and first.dst_shard == second.dst_shard
        and first.src_start + first.length == second.src_start
        and first.dst_start + first.length == second.dst_start
    )


def sharding_descriptors(src_metadata: ParameterMetadata, dst_metadata: ParameterMetadata) -> list[ShardingDescriptor]:
    """Return how a parameter is split on both sides: one "tp" descriptor where LCM tiling applies, else none.

    It applies where at least one side is split, both along the same dimension, evenly, without `partition_sizes`
    or explicit tiles. The canonical shapes must be equal.

    Raises:
        PlanError: a description has problems, or the canonical shapes differ.
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

    Raises:
        PlanError: there is not exactly one descriptor, or the rank is not one of its destinations.
    """
    if len(descriptors) != 1 or descriptors[0].name != "tp":
        names = [descriptor.name for descriptor in descriptors]
        raise PlanError(f"{param_name}: LCM tiling needs one tp descriptor, found {names}")
    split = descriptors[0]
    if my_global_rank not in split.dst_dim_ranks:
        raise PlanError(f"{param_name}: rank {my_global_rank} is not among the destination ranks {split.dst_dim_ranks}")
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
