"""Turn a tensor's metadata into tiles and the canonical tensor's shape.

The rules, for a local tensor of `n` elements along the split dimension on rank r of W:

    contiguous        global size n*W, this rank holds [r*n, (r+1)*n)
    stride s          the global dimension is s parts (gate | up), each split over the group separately:
                          W=2, s=2, n=4:  rank 0 holds [0:2] [4:6], rank 1 holds [2:4] [6:8]
    partition_sizes   like a stride, with parts of unequal size: local block sizes [b0, b1, ...]
    uneven            contiguous, but the ranks' sizes differ: the caller passes all of them
    replicated        everything else: one tile that is the whole tensor

These numbers are checked against bounds here before anything is allocated from them.

A description that names no rank is equal on all ranks that hold the same elements, so it is sent and read once:

    rank 0: w, split over [0, 1]    rank 2: w, split over [2, 3]    both: rows 0:4 of w [8, 4]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from refitd.describe.metadata import ParameterMetadata, Repeat, Tile
from refitd.dtypes import PAIRS, cast_problem, dtype_name, element_size, fill_problem
from refitd.errors import PlanError

MAX_ELEMENTS = 2**48
MAX_CANONICAL_DIMS = 6  # two fewer than a copy's box may have, which also needs one each for parts and repeats


def canonical_name(meta: ParameterMetadata) -> str:
    """Return the name for matching the tensor: `resolved_name` if set, else `name`."""
    return meta.name if meta.resolved_name is None else meta.resolved_name


def same_places(one: ParameterMetadata, other: ParameterMetadata) -> bool:
    """Return whether two tensors hold the same elements of canonical tensors of one shape, names aside.

    Returns False if a description is invalid.
    """
    try:
        places = [
            [replace(t, tensor="" if t.tensor == tied else t.tensor) for t in tiles_of(meta)]
            for meta in (one, other)
            for tied in (meta.tiles[0].tensor if meta.tiles else canonical_name(meta),)
        ]
    except PlanError:
        return False
    shapes = [shape for meta in (one, other) if (shape := global_shape_of(meta)) is not None]
    return places[0] == places[1] and (len(shapes) < 2 or shapes[0] == shapes[1])


def is_sharded(meta: ParameterMetadata) -> bool:
    """Return whether the fields, rather than tiles, say that the tensor is split over a group of several ranks."""
    group = meta.tensor_parallel_group_ranks
    return meta.tiles is None and meta.is_tp and group is not None and len(group) > 1


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a tensor of this shape laid out row-major."""
    strides = list(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)) if shape else []
    return tuple(reversed(strides))


def elements(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape (1 for a 0-d tensor)."""
    total = 1
    for size in shape:
        total *= size
    return total


def tiles_of(meta: ParameterMetadata, shard_sizes: Sequence[int] | None = None) -> tuple[Tile, ...]:
    """Return the tiles of a local tensor; an empty shard has none.

    Args:
        meta: one local tensor.
        shard_sizes: the local sizes along `partition_dim` of all ranks of the tensor-parallel group, in group order;
            by default they all equal this one.

    Raises:
        PlanError: the description is invalid; the error carries every problem found.
    """
    if problems := layout_problems(meta, shard_sizes):
        raise PlanError(problems)
    name, shape = canonical_name(meta), meta.shape
    if meta.tiles is not None:
        return tuple(tile for tile in meta.tiles if elements(tile.size))
    if not elements(shape):
        return ()
    whole = Tile(name, (0,) * len(shape), tuple(shape), 0, row_major(shape))
    if not is_sharded(meta):
        return (whole,)
    return tuple(_shard_tiles(meta, whole, shard_sizes))


def global_shape_of(meta: ParameterMetadata, shard_sizes: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """Return the canonical tensor's shape; None if explicit tiles come without a `global_shape`.

    `shard_sizes` as in `tiles_of`. The description must be free of `layout_problems`.
    """
    if meta.tiles is not None:
        return None if meta.global_shape is None else tuple(meta.global_shape)
    return _derived_global_shape(meta, shard_sizes)


def same_elements(one: ParameterMetadata, other: ParameterMetadata) -> bool:
    """Return whether two local tensors hold the same elements of one canonical tensor."""
    try:
        return canonical_name(one) == canonical_name(other) and tiles_of(one) == tiles_of(other)
    except PlanError:
        return False


def layout_problems(meta: ParameterMetadata, shard_sizes: Sequence[int] | None = None) -> list[str]:
    """Return every problem of a description, each as a sentence that names the tensor."""
    name = canonical_name(meta)
    if problem := _shape_problem(meta.shape):
        return [f"{name}: local shape {problem}"]
    problems = _dtype_problems(meta)
    if meta.global_shape is not None and (problem := _shape_problem(meta.global_shape)):
        return [*problems, f"{name}: global shape {problem}"]
    if meta.tiles is not None:
        problems += _tile_problems(meta)
    else:
        problems += _group_problems(meta)
        if not problems:
            problems += _shard_problems(meta, shard_sizes) if is_sharded(meta) else _block_problems(meta)
        if not problems:
            derived = _derived_global_shape(meta, shard_sizes)
            if problem := _shape_problem(derived):
                problems.append(f"{name}: global shape {problem}")
            elif meta.global_shape is not None and tuple(meta.global_shape) != derived:
                problems.append(
                    f"{name}: global shape {tuple(meta.global_shape)} is declared, expected {derived} from the "
                    f"local shape {tuple(meta.shape)}; check partition_dim and the tensor-parallel group"
                )
    return problems


def _derived_global_shape(meta: ParameterMetadata, shard_sizes: Sequence[int] | None) -> tuple[int, ...]:
    shape = list(meta.shape)
    if is_sharded(meta):
        group = meta.tensor_parallel_group_ranks or ()
        shape[meta.partition_dim] = sum(shard_sizes) if shard_sizes else shape[meta.partition_dim] * len(group)
    return tuple(shape)


def _shard_tiles(meta: ParameterMetadata, whole: Tile, shard_sizes: Sequence[int] | None) -> list[Tile]:
    """Return the tiles of one shard of a split tensor; `whole` is the local tensor as a tile."""
    dim, group = meta.partition_dim, meta.tensor_parallel_group_ranks or []
    index = group.index(meta.owner_rank if meta.owner_rank is not None else -1)
    held, step = meta.shape[dim], whole.local_stride[dim]

    def piece(start: int, size: int, local: int, repeat: Repeat | None = None) -> Tile:
        offset, sizes = list(whole.offset), list(whole.size)
        offset[dim], sizes[dim] = start, size
        return Tile(whole.tensor, tuple(offset), tuple(sizes), local * step, whole.local_stride, repeat)

    if meta.partition_sizes is not None:
        starts = [0, *accumulate(meta.partition_sizes)]
        return [
            piece(start * len(group) + index * size, size, start)
            for start, size in zip(starts, meta.partition_sizes, strict=False)
            if size
        ]
    parts = meta.partition_stride
    sizes = shard_sizes or [held] * len(group)
    part, before, total = held // parts, sum(sizes[:index]) // parts, sum(sizes) // parts
    return [piece(before, part, 0, Repeat(dim, parts, total, part * step) if parts > 1 else None)]


def _shape_problem(shape: Any) -> str:
    """Return what is wrong with a shape, or ""."""
    if not isinstance(shape, list | tuple):
        return f"is {shape!r}, expected a tuple of sizes"
    if len(shape) > MAX_CANONICAL_DIMS:
        return f"{tuple(shape)} has {len(shape)} dimensions, expected at most {MAX_CANONICAL_DIMS}"
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 0 for size in shape):
        return f"{tuple(shape)} has a size that is not a whole number of elements, 0 or more"
    if elements(shape) > MAX_ELEMENTS or max(shape, default=0) > MAX_ELEMENTS:
        return f"{tuple(shape)} has {elements(shape)} elements, expected at most 2**48"
    return ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ELEMENTS


def _dtype_problems(meta: ParameterMetadata) -> list[str]:
    name = canonical_name(meta)
    try:
        want = element_size(meta.dtype)
    except ValueError as error:
        return [f"{name}: {error}"]
    if meta.element_size != want:
        return [f"{name}: element_size is {meta.element_size!r}, expected {want} bytes for {dtype_name(meta.dtype)}"]
    if meta.fill is not None and (problem := fill_problem(meta.fill, dtype_name(meta.dtype))):
        return [f"{name}: fill {problem}; declare what the padding holds after conversion to the tensor's dtype"]
    if meta.cast_from is not None and (problem := cast_problem(meta.cast_from, meta.dtype)):
        return [f"{name}: cast_from {problem}; convert one side before, or leave it out where dtypes are equal"]
    if meta.cast_to is not None and cast_problem(own := dtype_name(meta.dtype), meta.cast_to):
        return [
            f"{name}: cast_to is {meta.cast_to!r} for a tensor of {own}, expected one of the casts that there are: "
            f"{PAIRS}; leave it out where no destination holds another dtype"
        ]
    return []


def _group_problems(meta: ParameterMetadata) -> list[str]:
    name, group = canonical_name(meta), meta.tensor_parallel_group_ranks
    if not meta.is_tp or group is None:
        return []
    if len(set(group)) != len(group):
        return [f"{name}: its tensor-parallel group {group} names a rank twice"]
    if group and meta.owner_rank not in group:
        return [
            f"{name}: rank {meta.owner_rank} is not in its tensor-parallel group {group}; "
            "check owner_rank and rank_offset"
        ]
    return []


def _shard_problems(meta: ParameterMetadata, shard_sizes: Sequence[int] | None) -> list[str]:
    name, shape = canonical_name(meta), tuple(meta.shape)
    dim, parts, blocks = meta.partition_dim, meta.partition_stride, meta.partition_sizes
    if not _is_count(dim) or dim >= len(shape):
        return [
            f"{name}: partition_dim is {dim!r}, expected 0 to {len(shape) - 1} for local shape {shape}; "
            "a tensor that is not split must not say is_tp"
        ]
    if not _is_count(parts) or parts < 1:
        return [f"{name}: partition_stride is {parts!r}, expected 1 or more"]
    if blocks is not None:
        if problems := _block_problems(meta):
            return problems
        if parts != 1 and (len(set(blocks)) != 1 or len(blocks) != parts):
            return [f"{name}: partition_sizes {blocks} contradict partition_stride {parts}; give one of them"]
    elif shape[dim] % parts:
        return [f"{name}: dim {dim} has {shape[dim]} elements here, expected a multiple of partition_stride {parts}"]
    if shard_sizes is None or len(set(shard_sizes)) == 1:
        return []
    if blocks is not None or any(size % parts for size in shard_sizes):
        return [
            f"{name}: dim {dim} has {list(shard_sizes)} elements on the ranks of its group, which cannot be cut "
            f"into {len(blocks) if blocks else parts} parts each; describe it with explicit tiles"
        ]
    return []


def _block_problems(meta: ParameterMetadata) -> list[str]:
    """Return what is wrong with the packed blocks of a split or whole tensor."""
    name, dim, blocks = canonical_name(meta), meta.partition_dim, meta.partition_sizes
    if blocks is None:
        return []
    if not _is_count(dim) or dim >= len(meta.shape):
        return [f"{name}: partition_sizes {blocks} are those of dim {dim!r}, and its local shape is {meta.shape}"]
    if any(not _is_count(size) for size in blocks):
        return [f"{name}: partition_sizes {blocks} must be whole numbers, 0 or more"]
    if sum(blocks) != meta.shape[dim]:
        return [
            f"{name}: partition_sizes {blocks} sum to {sum(blocks)}, expected {meta.shape[dim]}, the local size of "
            f"dim {dim}; they are local sizes, not global ones"
        ]
    return []


def _tile_problems(meta: ParameterMetadata) -> list[str]:
    problems = []
    shapes = meta.tiles or ()
    if meta.global_shape is not None and len({tile.tensor for tile in shapes}) > 1:
        problems.append(
            f"{meta.name}: one global_shape is declared for tiles of several tensors; leave it out, or register "
            "each tensor on its own"
        )
    for number, tile in enumerate(shapes):
        if problem := _tile_problem(tile, meta):
            problems.append(f"{meta.name}: tile {number} of {tile.tensor!r} {problem}")
    return problems


def _tile_problem(tile: Tile, meta: ParameterMetadata) -> str:
    if not len(tile.offset) == len(tile.size) == len(tile.local_stride):
        return "has offset, size and local_stride of different lengths"
    for what, values in (("size", tile.size), ("offset", tile.offset), ("local_stride", tile.local_stride)):
        if problem := _shape_problem(values if what == "size" else [min(v, 1) for v in values]):
            return f"{what} {problem if what == 'size' else f'{values} must hold whole numbers, 0 or more'}"
    if not _is_count(tile.local_offset):
        return f"local_offset {tile.local_offset!r} must be a whole number, 0 or more"
    if not elements(tile.size):
        return ""
    if not _is_nested(tile):
        return f"has local strides {tile.local_stride} for size {tile.size}, which put two elements in one place"
    end = [offset + size for offset, size in zip(tile.offset, tile.size, strict=True)]
    last = tile.local_offset + sum((n - 1) * s for n, s in zip(tile.size, tile.local_stride, strict=True))
    if repeat := tile.repeat:
        if not all(_is_count(v) for v in (repeat.dim, repeat.count, repeat.step, repeat.local_step)):
            return f"repeat {repeat} must hold whole numbers, 0 or more"
        if repeat.dim >= len(tile.size) or repeat.count < 1:
            return f"repeat {repeat} needs a dim below {len(tile.size)} and a count of 1 or more"
        if repeat.count > 1 and repeat.step < tile.size[repeat.dim]:
            return f"repeat {repeat} steps less than its size {tile.size[repeat.dim]}, so it overlaps itself"
        end[repeat.dim] += (repeat.count - 1) * repeat.step
        last += (repeat.count - 1) * repeat.local_step
    if last >= elements(meta.shape):
        return f"ends at element {last}, outside the local tensor of {elements(meta.shape)} elements"
    if problem := _shape_problem(end):
        return f"ends at {problem}"
    if meta.global_shape is not None and not _within(end, meta.global_shape):
        return f"ends at {tuple(end)}, outside the global shape {tuple(meta.global_shape)}"
    return ""


def _is_nested(tile: Tile) -> bool:
    """Return whether each stride exceeds the reach of all smaller ones, as in any permuted or padded layout."""
    reach = 0
    for stride, size in sorted(zip(tile.local_stride, tile.size, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _within(end: Sequence[int], shape: Sequence[int]) -> bool:
    return len(end) == len(shape) and all(e <= s for e, s in zip(end, shape, strict=True))


def tile_elements(tile: Tile) -> int:
    """Return the number of elements of a tile, with its repeats."""
    return elements(tile.size) * (tile.repeat.count if tile.repeat else 1)


def occurrences(tile: Tile) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield (canonical offset, local offset) of each occurrence of a tile."""
    repeat = tile.repeat
    if repeat is None:
        yield tuple(tile.offset), tile.local_offset
        return
    for i in range(repeat.count):
        offset = list(tile.offset)
        offset[repeat.dim] += i * repeat.step
        yield tuple(offset), tile.local_offset + i * repeat.local_step


def spot_of(group: Sequence[int], rank: int) -> tuple[int, int]:
    """Return (the rank's position in the group, the group's size); position -1 marks an invalid group."""
    ranks = list(group)
    valid = rank in ranks and len(set(ranks)) == len(ranks)
    return (ranks.index(rank) if valid else -1), len(ranks)


def nameless(tiles: Sequence[Tile], default: Sequence[str]) -> tuple[Sequence[str], tuple[Any, ...]]:
    """Return the tiles' tensors, and the tiles with each name replaced by its position in the list of tensors."""
    if len(tiles) == 1:
        t = tiles[0]
        return (t.tensor,), (t.offset, t.size, t.local_offset, t.local_stride, t.repeat)
    number = {tensor: i for i, tensor in enumerate(dict.fromkeys(t.tensor for t in tiles))}
    parts = tuple((number[t.tensor], t.offset, t.size, t.local_offset, t.local_stride, t.repeat) for t in tiles)
    return tuple(number) or default, parts


def without_ranks(metas: Sequence[ParameterMetadata]) -> tuple[ParameterMetadata, ...]:
    """Return the descriptions with group fields replaced by explicit tiles.

    One rank alone cannot tell an uneven split from an even one: give unevenly split tensors explicit tiles before.

    Raises:
        PlanError: a description is invalid.
    """
    cuts: dict[tuple[object, ...], tuple[tuple[Tile, ...], tuple[int, ...] | None]] = {}
    found = []
    for meta in metas:
        tiles, whole = meta.tiles, meta.global_shape
        name = canonical_name(meta)
        if is_sharded(meta):
            key = _split_key(meta)
            if key not in cuts:
                cuts[key] = tiles_of(meta), global_shape_of(meta)
            cut, whole = cuts[key]
            tiles = tuple(replace(tile, tensor=name) for tile in cut)
        found.append(
            ParameterMetadata(
                name=meta.name,
                shape=tuple(meta.shape),
                dtype=dtype_name(meta.dtype),
                element_size=meta.element_size,
                resolved_name=name,
                global_expert_index=meta.global_expert_index,
                tiles=tiles,
                global_shape=whole,
                fill=meta.fill,
                aliases=meta.aliases,
                cast_from=meta.cast_from,
                cast_to=meta.cast_to,
            )
        )
    return tuple(found)


def _split_key(meta: ParameterMetadata) -> tuple[object, ...]:
    group = meta.tensor_parallel_group_ranks or []
    sizes = None if meta.partition_sizes is None else tuple(meta.partition_sizes)
    return (
        tuple(meta.shape),
        dtype_name(meta.dtype),
        meta.element_size,
        meta.partition_dim,
        meta.partition_stride,
        sizes,
        meta.global_shape,
        meta.owner_rank,
        tuple(group),
    )
