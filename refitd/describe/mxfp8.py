"""MXFP8 in descriptions: the two tensors a bfloat16 one travels as where its source converts, and which cuts allow it.

    w                          [256, 512] bfloat16
    w|mxfp8.rceil.data         [256, 512] float8_e4m3fn
    w|mxfp8.rceil.scale        [256, 16]  uint8, one for every 32 elements of the last dimension

The rounding of scales is part of the names: ends that round differently do not find each other, in any plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from refitd.describe.layout import canonical_name, global_shape_of, layout_problems, tiles_of
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.tiles import Repeat, Tile
from refitd.dtypes import dtype_name, element_size
from refitd.errors import RefusedError
from refitd.mxfp8 import BLOCK, ROUNDINGS

DATA_DTYPE, SCALE_DTYPE = "float8_e4m3fn", "uint8"

# no parameter of a module has it in its name
MARK = "|mxfp8."


@dataclass(frozen=True, slots=True)
class MXFP8Part:
    """What the name of a part says: the tensor it is of, how its scales are rounded, "data" or "scale"."""

    tensor: str
    rounding: str
    which: str


def part_name(name: str, rounding: str, which: str) -> str:
    """Return the name of the "data" or "scale" of a tensor."""
    return f"{name}{MARK}{rounding}.{which}"


def part_of(name: str) -> MXFP8Part | None:
    """Return what the name of a part says, None for any other tensor's."""
    tensor, mark, rest = name.rpartition(MARK)
    rounding, _, which = rest.partition(".")
    if not mark or rounding not in ROUNDINGS or which not in ("data", "scale"):
        return None
    return MXFP8Part(tensor, rounding, which)


def check_blocks(meta: ParameterMetadata) -> None:
    """Check that blocks of 32 of the local tensor are whole blocks of the canonical one.

    Only then are the bytes those of converting the whole tensor once, however it is cut.

    Raises:
        RefusedError: they are not, or the description has problems; names the tensor.
    """
    if problems := layout_problems(meta):
        raise RefusedError("; ".join(problems))
    if not meta.shape or meta.shape[-1] % BLOCK or not meta.shape[-1]:
        raise RefusedError(
            f"{meta.name}: its shape is {list(meta.shape)}, and MXFP8 needs a last dimension of a multiple of {BLOCK}"
        )
    whole = global_shape_of(meta)
    if whole and whole[-1] % BLOCK:
        raise RefusedError(
            f"{meta.name}: the last dimension of the whole tensor is {whole[-1]}, and MXFP8 needs a multiple of {BLOCK}"
        )
    for tile in tiles_of(meta):
        if problem := _cut_block(tile):
            raise RefusedError(
                f"{meta.name}: {problem}, so that a block of {BLOCK} here is none of the whole tensor and its bytes "
                f"would not be those of converting the whole; cut the last dimension at multiples of {BLOCK}"
            )


def parts_of(meta: ParameterMetadata, rounding: str) -> tuple[ParameterMetadata, ParameterMetadata]:
    """Return the descriptions of data and scales of a tensor, cut as it is.

    Raises:
        RefusedError: it cannot be cut so; names the tensor, and the way out.
    """
    if MARK in meta.name or MARK in canonical_name(meta):
        raise RefusedError(f"{meta.name}: {MARK!r} stands for parts of MXFP8 tensors; give it another name")
    try:
        check_blocks(meta)
    except RefusedError as exc:
        raise RefusedError(f"{exc}; or convert it at the receivers, which put such blocks together") from exc
    if meta.fill not in (None, 0.0):
        raise RefusedError(
            f"{meta.name}: it is filled up with {meta.fill}, and where sources convert only zeros can be; convert it "
            "at the receivers"
        )
    return _part(meta, rounding, "data"), _part(meta, rounding, "scale")


def _part(meta: ParameterMetadata, rounding: str, which: str) -> ParameterMetadata:
    def named(name: str) -> str:
        return part_name(name, rounding, which)

    is_scale = which == "scale"
    dtype = SCALE_DTYPE if is_scale else DATA_DTYPE
    tiles = meta.tiles
    if tiles is not None:
        tiles = tuple(replace(_scale_tile(tile) if is_scale else tile, tensor=named(tile.tensor)) for tile in tiles)
    last = len(meta.shape) - 1
    sizes = meta.partition_sizes
    if sizes is not None and is_scale and meta.partition_dim == last:
        # where they end inside a block of scales the tensor is whole (check_blocks), and its scales have no such parts
        sizes = None if any(size % BLOCK for size in sizes) else [size // BLOCK for size in sizes]
    return replace(
        meta,
        name=named(meta.name),
        shape=_scale_shape(meta.shape) if is_scale else tuple(meta.shape),
        dtype=dtype,
        element_size=element_size(dtype),
        resolved_name=None if meta.resolved_name is None else named(meta.resolved_name),
        partition_sizes=sizes,
        tiles=tiles,
        global_shape=_scale_shape(meta.global_shape) if is_scale and meta.global_shape else meta.global_shape,
        fill=None if meta.fill is None else 0.0,
        aliases=tuple(named(alias) for alias in meta.aliases),
        cast_from=None,
    )


def _scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return *shape[:-1], shape[-1] // BLOCK


def _scale_tile(tile: Tile) -> Tile:
    """Return the place of a tile's scales: whole blocks, so that everything along them divides."""
    strides = [stride // BLOCK for stride in tile.local_stride[:-1]]
    last = len(tile.size) - 1
    repeat = tile.repeat
    if repeat is not None:
        step = repeat.step // BLOCK if repeat.dim == last else repeat.step
        repeat = Repeat(repeat.dim, repeat.count, step, repeat.local_step // BLOCK)
    return Tile(
        tile.tensor,
        (*tile.offset[:-1], tile.offset[-1] // BLOCK),
        _scale_shape(tile.size),
        tile.local_offset // BLOCK,
        (*strides, 1),
        repeat,
    )


def _cut_block(tile: Tile) -> str:
    """Return how a tile cuts blocks, here or in the whole tensor, or ""."""
    if not tile.size:
        return f"{tile.tensor} has no dimensions"
    low, size = tile.offset[-1], tile.size[-1]
    if low % BLOCK or size % BLOCK:
        return f"it holds {low}:{low + size} of the last dimension of {tile.tensor}"
    outer = [stride for stride, n in zip(tile.local_stride[:-1], tile.size[:-1], strict=True) if n > 1]
    steps = [tile.local_offset, *outer]
    if tile.repeat is not None and tile.repeat.count > 1:
        steps.append(tile.repeat.local_step)
        if tile.repeat.dim == len(tile.size) - 1 and tile.repeat.step % BLOCK:
            return f"it holds parts of the last dimension of {tile.tensor} {tile.repeat.step} apart"
    if tile.local_stride[-1] != 1 or any(step % BLOCK for step in steps):
        return f"the last dimension of {tile.tensor} lies in parts of other than {BLOCK} elements in it"
    return ""


def is_convertible(dtype: object) -> bool:
    """Whether a source may offer tensors of this dtype in MXFP8; float32 is rounded to bfloat16 before."""
    return dtype_name(str(dtype)) in ("bfloat16", "float32")
