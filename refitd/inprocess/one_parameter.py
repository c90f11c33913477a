"""Plan one parameter for one receiver, by the rules of the reference (Megatron-Core's resharding).

`refitd.plan.build` plans all tensors of all ranks together and balances bytes. These functions need only the metadata
of one parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from refitd.describe.layout import canonical_name, global_shape_of, is_sharded, layout_problems
from refitd.describe.metadata import ParameterMetadata, Roster
from refitd.errors import PlanError
from refitd.plan.boxes import segment_runs
from refitd.plan.build import plan_reshard
from refitd.plan.columns import Ints
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
    src_segment, dst_segment, place, length = segment_runs(extent, src_world * src_stride, dst_world * dst_stride)

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

    A rank outside the destination's group gets an empty list.

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


def plan_replicated_transfers(
    param_name: str,
    src_metadata: ParameterMetadata,
    dst_metadata: ParameterMetadata,
    my_global_rank: int,
) -> list[Transfer]:
    """Return the one whole-tensor copy that a receiver of a replicated parameter needs.

    A rank outside the destination's data-parallel group, if any, gets an empty list. A receiver copies from
    itself if it owns the source, or if both sides have the same data-parallel group and it is in it; otherwise
    receivers take the source's replicas in turn.

    Raises:
        PlanError: the shapes differ, or the source has no owner.
    """
    if tuple(src_metadata.shape) != tuple(dst_metadata.shape):
        raise PlanError(
            f"{param_name}: the source's shape is {tuple(src_metadata.shape)}, the destination's "
            f"{tuple(dst_metadata.shape)}, and neither is split"
        )
    receivers = dst_metadata.data_parallel_group_ranks
    if receivers is not None and my_global_rank not in receivers:
        return []
    replicas = list(src_metadata.data_parallel_group_ranks or ())
    if not replicas and src_metadata.owner_rank is not None:
        replicas = [src_metadata.owner_rank]
    if not replicas:
        raise PlanError(f"{param_name}: the source has neither an owner_rank nor a data-parallel group")
    whole = tuple(slice(0, size) for size in dst_metadata.shape)
    same_group = replicas == list(dst_metadata.data_parallel_group_ranks or ())
    is_local = my_global_rank == src_metadata.owner_rank or (same_group and my_global_rank in replicas)
    return [(my_global_rank if is_local else replicas[my_global_rank % len(replicas)], whole, whole)]


def plan_param_transfers(
    param_name: str,
    src_metadata: ParameterMetadata,
    dst_metadata: ParameterMetadata,
    my_global_rank: int,
) -> list[Transfer]:
    """Return what `my_global_rank` receives of one parameter, from the ranks of one source description's group.

    A rank outside the destination's group gets an empty list. Even splits of one dimension use LCM tiling, tensors that
    neither side splits one replica, and all others (blocks of different size, another dimension, explicit tiles) tile
    intersection.

    Raises:
        PlanError: the two descriptions contradict each other.
    """
    descriptors = sharding_descriptors(src_metadata, dst_metadata)
    if descriptors:
        return plan_lcm_transfers(param_name, src_metadata, dst_metadata, descriptors, my_global_rank)
    if not any(is_sharded(m) or m.tiles is not None for m in (src_metadata, dst_metadata)):
        return plan_replicated_transfers(param_name, src_metadata, dst_metadata, my_global_rank)
    if is_sharded(dst_metadata) and my_global_rank not in (dst_metadata.tensor_parallel_group_ranks or ()):
        return []
    ranks = [src_metadata.owner_rank]
    if is_sharded(src_metadata):
        ranks = list(src_metadata.tensor_parallel_group_ranks or ())
    wanted = replace(dst_metadata, owner_rank=my_global_rank)
    rosters = {
        rank: Roster(rank, source=(replace(src_metadata, owner_rank=rank),)) for rank in ranks if rank is not None
    }
    mine = rosters.get(my_global_rank, Roster(my_global_rank))
    rosters[my_global_rank] = replace(mine, destination=(wanted,))
    ops = plan_reshard(list(rosters.values()))[my_global_rank].recv_ops
    return [(op.peer_rank, op.peer_slice, op.my_slice) for op in ops]


def select_src_metadata_balanced(
    src_meta_list: Sequence[ParameterMetadata], dst_metadata: ParameterMetadata, dst_rank: int
) -> ParameterMetadata:
    """Choose the source description that `dst_rank` plans against.

    The rank's own description comes first. Otherwise, if both sides split experts over equally many ranks, only sources
    at the destination's position are candidates. Destinations take the candidates' data-parallel groups in turn, and
    within a group its members in turn.

    Raises:
        PlanError: the list is empty.
    """
    if not src_meta_list:
        raise PlanError(f"{canonical_name(dst_metadata)}: no source has it, and rank {dst_rank} wants it")
    for meta in src_meta_list:
        if meta.owner_rank == dst_rank:
            return meta
    candidates = _at_same_expert_position(src_meta_list, dst_metadata, dst_rank) or list(src_meta_list)
    groups: dict[tuple[int, ...], list[ParameterMetadata]] = {}
    for meta in sorted(candidates, key=lambda m: -1 if m.owner_rank is None else m.owner_rank):
        groups.setdefault(tuple(meta.data_parallel_group_ranks or ()), []).append(meta)
    members = groups[sorted(groups)[dst_rank % len(groups)]]
    return members[dst_rank // len(groups) % len(members)]


def _at_same_expert_position(
    src_meta_list: Sequence[ParameterMetadata], dst_metadata: ParameterMetadata, dst_rank: int
) -> list[ParameterMetadata]:
    """Return the sources at the destination's expert-parallel position; [] if the groups' sizes differ."""
    group = dst_metadata.expert_parallel_group_ranks
    if not group or dst_rank not in group:
        return []
    found = []
    for meta in src_meta_list:
        theirs = meta.expert_parallel_group_ranks
        if not theirs or len(theirs) != len(group):
            return []
        if meta.owner_rank in theirs and theirs.index(meta.owner_rank) == group.index(dst_rank):
            found.append(meta)
    return found
