"""ParameterMetadata: what one rank says about one of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from refitd.describe.tiles import Tile

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class ParameterMetadata:
    """One local tensor of one rank: its shape here and how it is cut out of the canonical tensor.

    The fields up to `global_expert_index` are the reference's. It is mutable because name resolution fills
    in `resolved_name` and `global_expert_index` afterwards (see `refitd.describe.names`).

    Attributes:
        name: the tensor's name in its own module.
        shape: the local shape, in elements.
        dtype: a torch.dtype, or its name without "torch." in processes that do not load torch.
        element_size: bytes per element.
        is_tp: whether the tensor is split over the tensor-parallel group.
        partition_dim: the dimension it is split on.
        partition_stride: how many interleaved pieces each rank holds along it (gated fc1: 2).
        partition_sizes: local sizes of packed blocks along `partition_dim`, each split over the group on its own.
        is_ep: whether the tensor belongs to experts split over the expert-parallel group.
        num_experts: experts in the whole model.
        owner_rank: the rank that holds this tensor.
        tensor_parallel_group_ranks: the ranks it is split over, in shard order (None: not split).
        expert_parallel_group_ranks: the ranks the experts are split over, in order.
        data_parallel_group_ranks: ranks that hold the same tensor.
        pipeline_parallel_group_ranks: the ranks of the pipeline, in stage order.
        resolved_name: the canonical name, equal on every rank and in every layout.
        global_expert_index: the expert's index in the whole model, for per-expert tensors.
        tiles: the exact places, for layouts that the fields above cannot say; they then replace them.
        global_shape: the canonical tensor's shape, where tiles alone do not determine it.
        fill: what the elements of the local tensor hold that belong to no tile. A destination with such elements
            must declare it, and they are written; a source may, and then both must declare the same.
        aliases: other canonical names of the same weight (tied embeddings). A destination tensor that no source has
            is fed from one that is tied to it, whichever end says so; see `refitd.plan.aliases`.
        cast_from: the dtype that sources hold, where a destination wants it converted to its own; says nothing of a
            source. Which casts there are: `refitd.describe.casts`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    element_size: int
    is_tp: bool = False
    partition_dim: int = 0
    partition_stride: int = 1
    partition_sizes: list[int] | None = None
    is_ep: bool = False
    num_experts: int | None = None
    owner_rank: int | None = None
    tensor_parallel_group_ranks: list[int] | None = None
    expert_parallel_group_ranks: list[int] | None = None
    data_parallel_group_ranks: list[int] | None = None
    pipeline_parallel_group_ranks: list[int] | None = None
    resolved_name: str | None = None
    global_expert_index: int | None = None
    tiles: tuple[Tile, ...] | None = None
    global_shape: tuple[int, ...] | None = None
    fill: float | None = None
    aliases: tuple[str, ...] = ()
    cast_from: str | None = None
