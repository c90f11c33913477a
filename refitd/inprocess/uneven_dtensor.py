"""DTensors whose shards differ in size in ways that placements do not tell (Megatron-FSDP, split tensors).

The ranks exchange their shards' sizes, one mesh dimension after the other, and compute each shard's place from them.
The mesh dimensions that cut one tensor dimension are ordered from the outermost cut to the innermost:

    [Shard(0), Shard(0)] on a 2 x 2 mesh, 10 rows:   mesh dim 0 cuts first
        rank (0,0) rows 0:4   rank (0,1) rows 4:5   rank (1,0) rows 5:5   rank (1,1) rows 5:10
    [_StridedShard(0, split_factor=2), Shard(0)]:    mesh dim 1 cuts first (FSDP over TP)

The resulting chunk is stored on the local tensor, where torch.distributed.checkpoint and refitd's planner look
for it. Functions that talk to other ranks are collective over the DTensor's mesh and end at a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from refitd.copy_services.peers import Peers
from refitd.copy_services.waits import Deadline
from refitd.describe.dtensors import mesh_splits
from refitd.errors import PlanError
from refitd.plan.boxes import Box, layout_violations, slice_intersection, slice_moved

DEFAULT_TIMEOUT_S = 300.0


class UnevenLayoutError(PlanError, AssertionError):
    """The chunks of a DTensor do not make up the tensor."""


def gather_and_compute_chunk_metadata(dtensor: DTensor, *, timeout: float = DEFAULT_TIMEOUT_S) -> ChunkStorageMetadata:
    """Return the place of this rank's shard in the whole tensor. Collective over the mesh.

    Raises:
        TypeError: the argument is not a DTensor.
        UnevenLayoutError: the shards' sizes do not add up to the tensor's shape, or a placement is not one of
            Shard, _StridedShard, Replicate.
        DeadlineExceeded, PeerLost: a rank of the mesh did not take part.
    """
    check_is_dtensor(dtensor)
    deadline = Deadline.after(timeout)
    local = local_shard(dtensor)
    offset = [0] * dtensor.dim()
    problems = []
    for dim, cuts in enumerate(_cuts(dtensor)):
        size = local.shape[dim]
        for mesh_dim in reversed(cuts):  # the union of the inner chunks is one chunk of the next outer cut
            sizes = _along(dtensor, mesh_dim, torch.tensor([size]), deadline).reshape(-1).tolist()
            offset[dim] += sum(sizes[: _coordinate(dtensor)[mesh_dim]])
            size = sum(sizes)
        if size != dtensor.shape[dim]:
            problems.append(f"dim {dim}: the shards have {size} elements together, expected {dtensor.shape[dim]}")
    if problems:
        raise UnevenLayoutError([f"DTensor {tuple(dtensor.shape)} {dtensor.placements}: {p}" for p in problems])
    return ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(local.shape))


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
    """Compute this rank's place in the whole tensor and store it on the local tensor. Collective over the mesh.

    torch.distributed.checkpoint then saves and loads the DTensor by it. Raises what `gather_and_compute_chunk_metadata`
    raises.
    """
    _keep_chunk(dtensor, gather_and_compute_chunk_metadata(dtensor, timeout=timeout))


def validate_uneven_dtensor(dtensor: DTensor, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
    """Check that the chunks of all ranks make up the whole tensor: each element in exactly one. Collective.

    A chunk that the DTensor carries is checked unchanged; a missing chunk is computed. Replicas must have equal chunks.

    Raises:
        TypeError: the argument is not a DTensor.
        UnevenLayoutError (an AssertionError): on every rank, with all chunks that leave the tensor, overlap or
            differ between replicas, and the first place that no chunk holds.
    """
    check_is_dtensor(dtensor)
    deadline = Deadline.after(timeout)
    chunk, local = _chunk(dtensor, deadline), local_shard(dtensor)
    mine = torch.tensor([*chunk.offsets, *chunk.sizes, *local.shape], dtype=torch.int64)
    rows = mine.unsqueeze(0)
    replicas = [placement.is_replicate() for placement in dtensor.placements]
    problems = []
    for mesh_dim, is_replicated in enumerate(replicas):
        found = _along(dtensor, mesh_dim, rows, deadline)
        if is_replicated:
            if not bool((found == found[:1]).all()):
                problems.append(f"replicas along mesh dim {mesh_dim} have different chunks: {found.tolist()}")
            rows = found[0]
        else:
            rows = found.reshape(-1, rows.shape[1])
    dims = dtensor.dim()
    # only some ranks have seen replicas that differ; share the problems
    problems = _from_all(dtensor, problems, deadline)
    boxes: list[Box] = []
    for row in rows.tolist():
        offset, size, shape = tuple(row[:dims]), tuple(row[dims : 2 * dims]), tuple(row[2 * dims :])
        if size != shape:
            problems.append(f"a chunk of size {size} describes a local tensor of shape {shape}")
        boxes.append((offset, size))
    problems += layout_violations(tuple(dtensor.shape), boxes)
    if problems:
        raise UnevenLayoutError([f"DTensor {tuple(dtensor.shape)} {dtensor.placements}: {p}" for p in problems])


def filter_unflattened_state_dict(
    state_dict: Any, key_chain: Sequence[str] = (), visit_condition: Callable[[Any], bool] = lambda value: False
) -> list[list[str]]:
    """Return the paths, as lists of keys, of all values of a nested dict that the condition holds for.

    A value that is chosen is not entered. `key_chain` is put in front of every path.
    """
    if visit_condition(state_dict):
        return [list(key_chain)]
    if not isinstance(state_dict, dict):
        return []
    return [
        path
        for key, value in state_dict.items()
        for path in filter_unflattened_state_dict(value, [*key_chain, key], visit_condition)
    ]


def get_unflattened_state_dict(state_dict: Any, key_chain: Sequence[str] = ()) -> Any:
    """Return the value at a path of a nested dict.

    Raises:
        KeyError: naming the path, and the keys that are there instead.
    """
    value = state_dict
    for depth, key in enumerate(key_chain):
        if not isinstance(value, dict) or key not in value:
            there = sorted(map(str, value))[:10] if isinstance(value, dict) else f"a {type(value).__name__}"
            raise KeyError(f"no {key!r} at {'.'.join(map(str, key_chain[:depth])) or 'the top'}; there is {there}")
        value = value[key]
    return value


def preprocess_state_dict_for_uneven_dtensor(
    state_dict: dict[str, Any], *, timeout: float = DEFAULT_TIMEOUT_S
) -> dict[str, Any]:
    """Make every DTensor in a (nested) state dict ready to be saved or loaded; return the same dict. Collective.

    Every rank must hold the same keys: they are visited in sorted order.
    """
    deadline = Deadline.after(timeout)
    paths = filter_unflattened_state_dict(state_dict, visit_condition=lambda value: isinstance(value, DTensor))
    for path in sorted(paths, key=lambda path: [str(key) for key in path]):
        dtensor = get_unflattened_state_dict(state_dict, path)
        update_uneven_dtensor_chunk_metadata(dtensor, timeout=deadline.left().total_seconds())
    return state_dict


def gather_uneven_dtensor_to_full_tensor(
    dtensor: DTensor, target_device: torch.device | None = None, *, timeout: float = DEFAULT_TIMEOUT_S
) -> DTensor:
    """Return the whole tensor, replicated on every rank of the mesh. Collective.

    Shards of different size are padded on the way, since not every backend gathers unequal ones.

    Args:
        dtensor: the tensor; its local shards must make it up in the order of the mesh.
        target_device: the device of the result; by default the device of the shards.
        timeout: seconds until every wait ends.

    Raises:
        TypeError, UnevenLayoutError, DeadlineExceeded, PeerLost: as `gather_and_compute_chunk_metadata`.
    """
    check_is_dtensor(dtensor)
    deadline = Deadline.after(timeout)
    full = _assembled(dtensor, deadline)
    if target_device is not None:
        full = full.to(target_device)
    return _dtensor(full, dtensor, [Replicate()] * dtensor.device_mesh.ndim, tuple(dtensor.shape))


def split_dtensor(
    dtensor: DTensor,
    split_size_or_sections: int | Sequence[int],
    dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> Iterator[DTensor]:
    """Yield the sections of a DTensor along a dimension, with its placements, without sending or copying.

    Each rank keeps its own part of each section: an uneven shard, perhaps an empty one. The sections' local tensors are
    views, and carry their chunks.

        6 rows over 2 ranks, sections [4, 2]:   rank 0 has 3 rows and 0 rows, rank 1 has 1 row and 2 rows

    Collective where the DTensor does not carry its chunk yet, or with `update_uneven_dtensor_chunk_meta`.

    Args:
        dtensor: the tensor to split.
        split_size_or_sections: the size of each section (the last may be smaller), or the sizes of all.
        dim: the dimension, negative ones from the end.
        update_uneven_dtensor_chunk_meta: compute the chunks from all ranks' sizes instead of from this rank's chunk.
        timeout: seconds until every wait ends.

    Raises:
        TypeError: the argument is not a DTensor. Raised at the call, not when iterated.
        UnevenLayoutError: see `gather_and_compute_chunk_metadata`.
        ValueError: sizes that are negative or do not add up to the dimension's. Raised at the call, not when iterated.
    """
    check_is_dtensor(dtensor)
    deadline = Deadline.after(timeout)
    if not -dtensor.dim() <= dim < dtensor.dim():
        raise ValueError(f"dim is {dim}, expected {-dtensor.dim()} to {dtensor.dim() - 1}")
    dim %= dtensor.dim()
    sections = _sections(int(dtensor.shape[dim]), split_size_or_sections, dim)
    chunk = _chunk(dtensor, deadline)
    return _split(dtensor, chunk, sections, dim, deadline if update_uneven_dtensor_chunk_meta else None)


def check_is_dtensor(value: object) -> None:
    """Raise TypeError unless the value is a DTensor. Only this rank raises, before any message."""
    if not isinstance(value, DTensor):
        found = f"{type(value).__name__} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else None
        raise TypeError(
            f"found a {found or type(value).__name__}, expected a DTensor; make one of this rank's shard with "
            "DTensor.from_local(shard, mesh, placements), or use a plain tensor as it is: it is whole"
        )


def local_shard(dtensor: DTensor) -> torch.Tensor:
    """Return the tensor that holds this rank's elements, without autograd history but with its chunk."""
    local: torch.Tensor = dtensor._local_tensor
    return local


def _split(
    dtensor: DTensor, chunk: ChunkStorageMetadata, sections: Sequence[int], dim: int, deadline: Deadline | None
) -> Iterator[DTensor]:
    local = dtensor.to_local()
    held = slice(chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim])
    for start, size in zip(accumulate(sections, initial=0), sections, strict=False):
        mine = slice_intersection(held, slice(start, start + size))
        here = slice_moved(mine, -held.start)
        # an empty part may begin behind the shard's end
        first = min(max(here.start, 0), local.shape[dim])
        part = local.narrow(dim, first, here.stop - here.start)
        shape = (*dtensor.shape[:dim], size, *dtensor.shape[dim + 1 :])
        section = _dtensor(part, dtensor, list(dtensor.placements), shape)
        offset = list(chunk.offsets)
        offset[dim] = min(max(mine.start - start, 0), size)
        _keep_chunk(section, ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(part.shape)))
        if deadline is not None:
            update_uneven_dtensor_chunk_metadata(section, timeout=deadline.left().total_seconds())
        yield section


def _sections(whole: int, split: int | Sequence[int], dim: int) -> list[int]:
    if isinstance(split, int):
        if split < 1:
            raise ValueError(f"split size is {split}, expected 1 or more")
        return [min(split, whole - start) for start in range(0, whole, split)] or [0]
    sections = [int(size) for size in split]
    if any(size < 0 for size in sections) or sum(sections) != whole:
        raise ValueError(
            f"sections {sections} sum to {sum(sections)}, expected sizes of 0 or more that sum to {whole}, the size "
            f"of dim {dim}"
        )
    return sections


def _cuts(dtensor: DTensor) -> list[list[int]]:
    """Return, for each tensor dimension, the mesh dimensions that cut it, the outermost cut first."""
    cuts: list[list[int]] = [[] for _ in range(dtensor.dim())]
    try:
        splits = mesh_splits(dtensor)
    except PlanError as error:
        raise UnevenLayoutError(f"DTensor {tuple(dtensor.shape)}: {error}") from error
    for mesh_dim, split in splits:
        if split.factor > 1:
            raise UnevenLayoutError(
                f"DTensor {tuple(dtensor.shape)} {dtensor.placements}: split factor {split.factor} is not the number "
                "of shards that other mesh dimensions make, so a shard is not one chunk"
            )
        cuts[split.dim].append(mesh_dim)
    return cuts


def _assembled(dtensor: DTensor, deadline: Deadline) -> torch.Tensor:
    """Merge the chunks along each cut, the innermost first."""
    gather_and_compute_chunk_metadata(dtensor, timeout=deadline.left().total_seconds())  # raises if sizes do not add up
    full = local_shard(dtensor).detach()
    for dim, cuts in enumerate(_cuts(dtensor)):
        for mesh_dim in reversed(cuts):
            shapes = _along(dtensor, mesh_dim, torch.tensor([full.shape]), deadline).reshape(-1, dtensor.dim())
            others = [d for d in range(dtensor.dim()) if d != dim]
            sizes = shapes[:, dim].tolist()
            # an empty shard may have size 0 in other dimensions, too
            solid = shapes[shapes[:, dim] > 0][:, others]
            if len(solid) and not bool((solid == solid[:1]).all()):
                raise UnevenLayoutError(
                    f"DTensor {tuple(dtensor.shape)} {dtensor.placements}: shards along mesh dim {mesh_dim} have "
                    f"shapes {shapes.tolist()}, expected them to differ in dim {dim} only"
                )
            padded_shape = list(full.shape)
            for d, n in zip(others, solid[0].tolist() if len(solid) else [], strict=False):
                padded_shape[d] = n
            padded_shape[dim] = max(sizes)
            if not prod(padded_shape):
                full = full.new_zeros([sum(sizes) if d == dim else n for d, n in enumerate(padded_shape)])
                continue
            padded = full.new_zeros(padded_shape)
            if full.shape[dim]:
                padded.narrow(dim, 0, full.shape[dim]).copy_(full)
            # bytes, since backends do not gather every dtype
            rows = _along(dtensor, mesh_dim, padded.reshape(-1).view(torch.uint8), deadline)
            parts = [row.view(full.dtype).view(padded_shape) for row in rows]
            full = torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)
    return full


def _along(dtensor: DTensor, mesh_dim: int, tensor: torch.Tensor, deadline: Deadline) -> torch.Tensor:
    """Gather every rank's tensor along a mesh dimension, stacked: [n, *shape], on the input's device."""
    peers = Peers(dtensor.device_mesh.get_group(mesh_dim))
    found = peers.all_gather_tensor(tensor.to(peers.device), deadline, f"gathering along mesh dim {mesh_dim}")
    return found.to(tensor.device)


def _from_all(dtensor: DTensor, problems: list[str], deadline: Deadline) -> list[str]:
    """Return the first problem of any rank of the mesh, identical on all ranks; [] if no rank has one."""
    said = problems[0] if problems else ""
    for mesh_dim in range(dtensor.device_mesh.ndim):
        peers = Peers(dtensor.device_mesh.get_group(mesh_dim))
        said = peers.first_trouble(said, deadline, "comparing chunks")
    return [said] if said else []


def _coordinate(dtensor: DTensor) -> list[int]:
    coordinate = dtensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise UnevenLayoutError(f"DTensor {tuple(dtensor.shape)}: this rank is not in its mesh")
    return [int(index) for index in coordinate]


def _chunk(dtensor: DTensor, deadline: Deadline) -> ChunkStorageMetadata:
    """Return the chunk stored on the DTensor, else compute it from the shards' sizes (collective)."""
    local: Any = local_shard(dtensor)
    if hasattr(local, "__create_chunk_list__"):
        chunk: ChunkStorageMetadata = local.__create_chunk_list__()[0]
        return chunk
    return gather_and_compute_chunk_metadata(dtensor, timeout=deadline.left().total_seconds())


def _keep_chunk(dtensor: DTensor, chunk: ChunkStorageMetadata) -> None:
    """Store the chunk, and the hooks that torch.distributed.checkpoint calls to write it, on the local tensor."""
    local: Any = local_shard(dtensor)

    def write_items(fqn: str, tensor: DTensor) -> list[WriteItem]:
        if not prod(chunk.sizes):  # it would begin at the next shard's offset, and be mistaken for the next shard
            return []
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(tensor.to_local()),
                    size=tensor.size(),
                ),
            )
        ]

    local.__create_chunk_list__ = lambda: [chunk]
    local.__create_write_items__ = write_items


def _dtensor(
    local: torch.Tensor, like: DTensor, placements: Sequence[Shard | Replicate | Any], shape: tuple[int, ...]
) -> DTensor:
    """Return a DTensor on the mesh of `like`; the local tensor may be on another device."""
    stride = tuple(accumulate(reversed(shape[1:]), lambda a, b: a * max(1, b), initial=1))[::-1] if shape else ()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    if tuple(placements) == tuple(like.placements):  # also keep the order of the cuts
        spec = replace(like._spec, tensor_meta=meta)
    else:
        spec = DTensorSpec(like.device_mesh, tuple(placements), meta)
    return DTensor(local.detach(), spec, requires_grad=False)
