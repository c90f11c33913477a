"""Describe how FSDP and device meshes split a tensor: placements of DTensors, and FSDP1's flat parameters, as tiles.

Any number of mesh dimensions may split any tensor dimensions. Each split divides what the outer splits left, as
torch.chunk does: ceil(n / ranks) elements each, so the last ranks may hold fewer elements, or none. The outermost split
is not always the first mesh dimension: FSDP over TP splits for TP first, though FSDP's mesh dimension comes first.
torch writes that as a _StridedShard. Its split factor is the number of shards that the outer splits have made;
`cut_order` reads it:

    7 rows, [_StridedShard(0, split_factor=2), Shard(0)] on 2 x 2, TP inside the mesh and outside the cut:
        rank (0,0) rows 0:2   rank (0,1) rows 4:6   rank (1,0) rows 2:4   rank (1,1) rows 6:7

A split that keeps a factor f > 1 first divides the dimension into f chunks, then each chunk over its ranks. A strided
shard means this if it is the only split of its dimension (a view of a fused tensor):

    7 elements, f=2 over 2 ranks:  rank 0 holds [0:2] [4:6], rank 1 holds [2:4] [6:7]
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from refitd.describe.layout import elements, row_major
from refitd.describe.metadata import ParameterMetadata, Tile
from refitd.errors import PlanError

if TYPE_CHECKING:
    from torch import nn

Run = tuple[int, int]  # first element, number of elements


@dataclass(frozen=True, slots=True)
class MeshSplit:
    """One mesh dimension's split: this rank is `index` of `count` along tensor dimension `dim`.

    `factor` is torch's split factor; once `cut_order` has read the order from it, the number of chunks made first.
    """

    dim: int
    count: int
    index: int
    factor: int = 1


def cut_order(splits: Sequence[MeshSplit]) -> list[int] | None:
    """Return the positions of the splits, for each tensor dimension from the outermost to the innermost.

    `splits` are in the order of the mesh. A split with factor f is inside splits of later mesh dimensions that together
    make f shards. Returns None if no splits do, because the factors then give no order.
    """
    orders: dict[int, list[int]] = {}
    for position in reversed(range(len(splits))):
        split = splits[position]
        order = orders.setdefault(split.dim, [])
        outside = itertools.accumulate((splits[other].count for other in order), operator.mul, initial=1)
        place = next((i for i, shards in enumerate(outside) if shards == split.factor), None)
        if place is None:
            return None
        order.insert(place, position)
    return [position for order in orders.values() for position in order]


def split_tiles(
    tensor: str, global_shape: Sequence[int], splits: Sequence[MeshSplit]
) -> tuple[tuple[int, ...], tuple[Tile, ...]]:
    """Return this rank's local shape and tiles after the splits, which are given outermost first."""
    runs: list[list[Run]] = [[(0, size)] for size in global_shape]
    for split in splits:
        runs[split.dim] = _take(runs[split.dim], split)
    shape = tuple(sum(size for _, size in dim_runs) for dim_runs in runs)
    strides = row_major(shape)
    placed = [_with_local_starts(dim_runs) for dim_runs in runs]
    tiles = tuple(
        Tile(
            tensor,
            tuple(start for start, _, _ in box),
            tuple(size for _, size, _ in box),
            sum(local * stride for (_, _, local), stride in zip(box, strides, strict=True)),
            strides,
        )
        for box in itertools.product(*placed)
    )
    return shape, tiles if 0 not in shape else ()


def _take(runs: list[Run], split: MeshSplit) -> list[Run]:
    """Return the part of `runs` that this rank keeps, in order, with adjacent runs joined."""
    total = sum(size for _, size in runs)
    part = -(-total // split.factor)
    kept: list[Run] = []
    for first in range(0, total, max(part, 1)):
        end = min(first + part, total)
        chunk = -(-(end - first) // split.count)
        begin = first + split.index * chunk
        for start, size in _between(runs, min(begin, end), min(begin + chunk, end)):
            if kept and sum(kept[-1]) == start:
                kept[-1] = (kept[-1][0], kept[-1][1] + size)
            else:
                kept.append((start, size))
    return kept


def _between(runs: list[Run], begin: int, end: int) -> list[Run]:
    """Return the part of the concatenated runs from position `begin` to `end`."""
    found, position = [], 0
    for start, size in runs:
        low, high = max(begin, position), min(end, position + size)
        if low < high:
            found.append((start + low - position, high - low))
        position += size
    return found


def _with_local_starts(runs: list[Run]) -> list[tuple[int, int, int]]:
    """Return (global start, size, local start) of each run."""
    starts = itertools.accumulate((size for _, size in runs), initial=0)
    return [(start, size, local) for (start, size), local in zip(runs, starts, strict=False)]


def mesh_splits(dtensor: Any) -> list[tuple[int, MeshSplit]]:
    """Return (mesh dimension, split) pairs of a DTensor on this rank; a dimension's outermost split comes first.

    All of refitd reads placements here, as torch does: `shard_order` gives the order of splits; without it, the factors
    of strided shards do, if they can be read as an order.

    Raises:
        PlanError: a placement does not say which rank holds which elements (a pending sum, a custom placement), or
            torch itself cannot reassemble the tensor (`full_tensor` is wrong or fails).
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    mesh, spec, dims = dtensor.device_mesh, dtensor._spec, len(dtensor.shape)
    what = f"placements {tuple(dtensor.placements)}"
    _refuse_pending_sums(dtensor)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise PlanError("this rank is not in the DTensor's mesh")
    found: dict[int, MeshSplit] = {}
    strided = []
    for mesh_dim, placement in enumerate(dtensor.placements):
        if placement.is_replicate():
            continue
        if type(placement) not in (Shard, _StridedShard):
            raise PlanError(
                f"placement {placement} ({type(placement).__name__}) is none of Shard, Replicate and torch's "
                "_StridedShard; redistribute it, or give its tiles in a ParameterMetadata"
            )
        dim = int(placement.dim)
        if not -dims <= dim < dims:
            raise PlanError(f"placement {placement} cuts dim {dim} of a tensor of {dims} dimensions")
        if type(placement) is _StridedShard:
            strided.append(mesh_dim)
        factor = int(getattr(placement, "split_factor", 1))
        found[mesh_dim] = MeshSplit(dim % dims, int(mesh.size(mesh_dim)), int(coordinate[mesh_dim]), factor)
    mesh_dims = list(found)
    # False: strided shards come from a view of a fused tensor, and their factors are meant literally
    if strided and getattr(spec, "use_strided_shard_as_shard_order", None) is not False:
        order = cut_order(list(found.values()))
        if order is not None:
            return [(mesh_dims[i], replace(found[mesh_dims[i]], factor=1)) for i in order]
        cuts = [split.dim for split in found.values()]
        for mesh_dim in strided:
            split = found[mesh_dim]
            if cuts.count(split.dim) > 1:
                raise PlanError(
                    f"{what} on a mesh of {tuple(mesh.shape)} cut dim {split.dim} {cuts.count(split.dim)} times, and "
                    "their split factors are not the numbers of shards that other cuts make: torch itself does not "
                    "gather such a tensor right; redistribute it first"
                )
    entries = getattr(spec, "shard_order", None)
    if entries:
        mesh_dims = [mesh_dim for entry in entries for mesh_dim in entry.mesh_dims]
        if sorted(mesh_dims) != sorted(found):
            raise PlanError(f"{what} and shard order {tuple(entries)} name different mesh dimensions")
    return [(mesh_dim, found[mesh_dim]) for mesh_dim in mesh_dims]


def _refuse_pending_sums(dtensor: Any) -> None:
    for placement in dtensor.placements:
        if placement.is_partial():
            raise PlanError(f"placement {placement} is a pending sum, not a weight; redistribute it first")


def describe_dtensor(meta: ParameterMetadata, param: Any) -> None:
    """Set the shapes and tiles of a DTensor's description; raises PlanError if it cannot be described."""
    local = param._local_tensor
    meta.global_shape, meta.shape = tuple(param.shape), tuple(local.shape)
    name = meta.resolved_name or meta.name
    try:
        if hasattr(local, "__create_chunk_list__"):  # uneven shards list their own boxes
            _refuse_pending_sums(param)
            meta.tiles = _chunk_tiles(name, meta.shape, local.__create_chunk_list__())
            return
        splits = [split for _, split in mesh_splits(param)]
    except PlanError as error:
        raise PlanError(f"{meta.name} on rank {meta.owner_rank}: {error}") from error
    shape, meta.tiles = split_tiles(name, meta.global_shape, splits)
    if shape != meta.shape and (elements(shape) or elements(meta.shape)):
        raise PlanError(
            f"{meta.name} on rank {meta.owner_rank}: the local tensor is {meta.shape}, expected {shape} from "
            f"placements {tuple(param.placements)} of {meta.global_shape}; an uneven DTensor must carry its chunk "
            "metadata (update_uneven_dtensor_chunk_metadata); distribute_tensor does not cut strided shards as "
            "full_tensor reads them"
        )


def _chunk_tiles(name: str, shape: tuple[int, ...], chunks: Sequence[Any]) -> tuple[Tile, ...]:
    if elements(shape) == 0:
        return ()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != shape:
        found = [(tuple(c.offsets), tuple(c.sizes)) for c in chunks]
        raise PlanError(f"chunk metadata {found} does not describe the local tensor {shape} as one box")
    return (Tile(name, tuple(chunks[0].offsets), shape, 0, row_major(shape)),)


def flat_tiles(tensor: str, shape: Sequence[int], start: int, stop: int, local_offset: int = 0) -> tuple[Tile, ...]:
    """Return elements [start, stop) of a row-major tensor as boxes, in local order.

        [3, 4], elements 2 to 9:   row 0 columns 2:4, row 1 whole, row 2 column 0

    FSDP1 and DeepSpeed ZeRO-3 cut parameters in this way. There are at most 2 * len(shape) - 1 boxes.

    Args:
        tensor: canonical name.
        shape: of the whole tensor.
        start: first element.
        stop: the element after the last one.
        local_offset: element of the local tensor at which the run begins.

    Raises:
        ValueError: the run leaves the tensor.
    """
    whole = tuple(shape)
    if not 0 <= start <= stop <= prod(whole):
        raise ValueError(f"{tensor}: elements {start}..{stop} are not all of a tensor of shape {list(whole)}")
    tiles: list[Tile] = []
    while start < stop:
        # the largest box that begins here: whole inner dimensions, as many rows of the outer one as remain in the run
        dim, inner = len(whole), 1
        while dim and start % (inner * whole[dim - 1]) == 0 and inner * whole[dim - 1] <= stop - start:
            dim -= 1
            inner *= whole[dim]
        offset, rest = [], start
        for n in range(len(whole)):
            step = prod(whole[n + 1 :])
            offset.append(rest // step)
            rest %= step
        size = [1] * dim + list(whole[dim:])
        if dim:
            size[dim - 1] = min((stop - start) // inner, whole[dim - 1] - offset[dim - 1])
        strides = tuple(prod(size[n + 1 :]) for n in range(len(size)))
        tiles.append(Tile(tensor, tuple(offset), tuple(size), local_offset, strides))
        count = prod(size)
        start, local_offset = start + count, local_offset + count
    return tuple(tiles)


def flattened_problem(module: nn.Module) -> str:
    """Return which framework has flattened a module's parameters and cut them anywhere, and what to do; "" if none."""
    for path, unit in module.named_modules():
        is_fsdp1 = any(
            kind.__name__ == "FullyShardedDataParallel" and kind.__module__.startswith("torch.")
            for kind in type(unit).__mro__
        )
        if is_fsdp1 and getattr(getattr(unit, "_handle", None), "uses_sharded_strategy", False):
            return (
                f"{path or 'the module'}: FSDP1 has flattened its parameters and holds runs of their elements; "
                "register what refitd.adapters.fsdp1.fsdp1_tensors(model, rank) returns"
            )
    for name, param in module.named_parameters():
        if hasattr(param, "ds_tensor"):
            return (
                f"{name}: DeepSpeed ZeRO-3 has partitioned it and holds a run of its elements; register what "
                "refitd.adapters.fsdp1.zero3_tensors(engine.module, rank) returns"
            )
    return ""
