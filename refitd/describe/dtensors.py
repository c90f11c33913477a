"""Describe how a mesh splits a DTensor, as splits and tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from refitd.describe.layout import elements, row_major
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.placements import MeshSplit, cut_order, split_tiles
from refitd.describe.tiles import Tile
from refitd.errors import PlanError

if TYPE_CHECKING:
    pass


def mesh_splits(dtensor: Any) -> list[tuple[int, MeshSplit]]:
    """Return (mesh dimension, split) pairs of a DTensor on this rank; a dimension's outermost split comes first.

    All of refitd reads placements here, as torch does: `shard_order` gives the order in which mesh dimensions split;
    without it, strided shards do, if their factors can be read as an order.

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
            "metadata (update_uneven_dtensor_chunk_metadata), and distribute_tensor cuts strided shards otherwise "
            "than full_tensor reads them"
        )


def _chunk_tiles(name: str, shape: tuple[int, ...], chunks: Sequence[Any]) -> tuple[Tile, ...]:
    if elements(shape) == 0:
        return ()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != shape:
        found = [(tuple(c.offsets), tuple(c.sizes)) for c in chunks]
        raise PlanError(f"chunk metadata {found} does not describe the local tensor {shape} as one box")
    return (Tile(name, tuple(chunks[0].offsets), shape, 0, row_major(shape)),)
