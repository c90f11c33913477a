"""Plan one parameter for one receiver, with the reference's rules.

`plan_copies` plans everything at once and balances bytes; these functions need only the metadata of one parameter.
"""

from __future__ import annotations

from dataclasses import replace

from refitd.describe.layout import is_sharded
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.roster import Roster
from refitd.errors import PlanError
from refitd.plan.build import plan_reshard
from refitd.plan.lcm import Transfer, plan_lcm_transfers, sharding_descriptors


def plan_replicated_transfers(
    param_name: str,
    src_metadata: ParameterMetadata,
    dst_metadata: ParameterMetadata,
    my_global_rank: int,
) -> list[Transfer]:
    """Return the one whole-tensor copy that a receiver of a replicated parameter needs.

    A rank outside the destination's data-parallel group, if there is one, receives nothing. A receiver copies from
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

    A rank outside the destination's group receives nothing. Even splits of one dimension use LCM tiling, tensors that
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
