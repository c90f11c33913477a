"""MXFP8 and FP8 in descriptions: a bfloat16 tensor that senders convert travels as two tensors, data and scale.

    w                        [256, 512] bfloat16
    w|fp8.rceil.data         [256, 512] float8_e4m3fn
    w|fp8.rceil.scale        [256, 16]  uint8, one for every 32 elements of the last dimension
    w|fp8.tiles.data         [256, 512] float8_e4m3fn
    w|fp8.tiles.scale        [2, 4]     float32, one for every tile of 128 x 128

The names contain the rounding of MXFP8's scales, or "tiles", so a plan never matches ends that convert differently.

Workers convert a block when they read it, so half the bytes cross between nodes. In such a plan a block is one element:
no copy cuts it, and every result equals the conversion of the whole tensor.

    w, at a source                [256, 512] bfloat16    [256, 16] of 64 bytes
    w|fp8.rceil.data, wanted      [256, 512] bytes       [256, 16] of 32 bytes
    w|fp8.rceil.scale, wanted     [256, 16]  bytes       [256, 16] of 1 byte

For FP8 a block is a tile of 128 x 128 with rows that are apart in memory (`refitd.addressing.places`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from refitd.describe.layout import canonical_name, global_shape_of, layout_problems, tiles_of
from refitd.describe.metadata import ParameterMetadata, Repeat, Roster, Tile, kinds_of
from refitd.dtypes import BLOCK_CASTS, Words, cast_number, converted, dtype_name, element_size
from refitd.errors import PlanError, RefusedError
from refitd.mxfp8.format import BLOCK, ROUNDINGS, TILE, Rounding, Scratch, quantize, quantize_tiles, scales_of

DATA_DTYPE, SCALE_DTYPE = "float8_e4m3fn", "uint8"
# never part of a module's parameter name
MARK = "|fp8."
TILES = "tiles"


@dataclass(frozen=True, slots=True)
class MXFP8Part:
    """A parsed part name: the tensor, the rounding of its scales or TILES, and "data" or "scale"."""

    tensor: str
    rounding: str
    which: str


def part_name(name: str, rounding: str, which: str) -> str:
    """Return the name of the "data" or "scale" of a tensor."""
    return f"{name}{MARK}{rounding}.{which}"


def part_of(name: str) -> MXFP8Part | None:
    """Return the parsed name of a part, None for any other name."""
    tensor, mark, rest = name.rpartition(MARK)
    rounding, _, which = rest.partition(".")
    if not mark or rounding not in (*ROUNDINGS, TILES) or which not in ("data", "scale"):
        return None
    return MXFP8Part(tensor, rounding, which)


def check_blocks(meta: ParameterMetadata) -> None:
    """Check that the local tensor's blocks of 32 are whole blocks of the canonical tensor.

    Only then does converting the shard give the same bytes as converting the whole tensor.

    Raises:
        RefusedError: they are not, or the description is invalid; names the tensor.
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
                f"{meta.name}: {problem}, and a block of {BLOCK} here is no block of the whole tensor: converting the "
                f"shard would give other bytes; cut the last dimension at multiples of {BLOCK}"
            )


def check_tiles(meta: ParameterMetadata) -> None:
    """Check that tiles of 128 x 128 of the local tensor are whole tiles of the canonical tensor, as `check_blocks`.

    Raises:
        RefusedError: they are not, or the description is invalid; names the tensor.
    """
    if problems := layout_problems(meta):
        raise RefusedError("; ".join(problems))
    whole = global_shape_of(meta)
    for tile in tiles_of(meta):
        columns = meta.shape[-1] if len(meta.shape) > 1 else 0
        ends = [low + n for low, n in zip(tile.offset, tile.size, strict=True)]
        is_odd = len(tile.size) != len(meta.shape) or len(meta.shape) < 2 or tile.local_stride[-2:] != (columns, 1)
        if not is_odd:
            row, column = divmod(tile.local_offset, columns)
            last = zip(ends[-2:], tile.size[-2:], (whole or ends)[-2:], strict=True)
            is_odd = any(n % TILE and end != extent for end, n, extent in last)
            is_odd |= any(n % TILE for n in (*tile.offset[-2:], row % meta.shape[-2], column))
            is_odd |= tile.repeat is not None and any(
                n % TILE for n in (tile.repeat.step, tile.size[-2], tile.repeat.local_step // columns)
            )
        if is_odd:
            raise RefusedError(
                f"{meta.name}: its part of {tile.tensor} at {list(tile.offset)} of {list(tile.size)} cuts tiles of "
                f"{TILE} x {TILE}; FP8 needs dimensions that are cut at multiples of {TILE}"
            )


def parts_of(meta: ParameterMetadata, rounding: str) -> tuple[ParameterMetadata, ParameterMetadata]:
    """Return the descriptions of a tensor's data and scales, split like the tensor.

    Raises:
        RefusedError: the split cuts MXFP8 blocks; names the tensor and what to do.
    """
    if MARK in meta.name or MARK in canonical_name(meta):
        raise RefusedError(f"{meta.name}: {MARK!r} marks parts of MXFP8 tensors; give it another name")
    try:
        (check_tiles if rounding == TILES else check_blocks)(meta)
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

    part = replace(
        meta,
        name=named(meta.name),
        shape=tuple(meta.shape),
        dtype=DATA_DTYPE,
        element_size=element_size(DATA_DTYPE),
        resolved_name=None if meta.resolved_name is None else named(meta.resolved_name),
        tiles=None if meta.tiles is None else tuple(replace(tile, tensor=named(tile.tensor)) for tile in meta.tiles),
        fill=None if meta.fill is None else 0.0,
        aliases=tuple(named(alias) for alias in meta.aliases),
        cast_from=None,
        cast_to=None,
    )
    if which == "scale":
        return in_blocks(part, "float32" if rounding == TILES else SCALE_DTYPE, rounding)
    return part


def in_blocks(meta: ParameterMetadata, dtype: str, rounding: str = "") -> ParameterMetadata:
    """Return a description with one element, of this dtype, for every block (or tile) of the described tensor."""
    unit = (TILE, TILE) if rounding == TILES else (1, BLOCK)
    sizes, dim = meta.partition_sizes, meta.partition_dim - len(meta.shape)
    if sizes is not None and dim in (-1, -2):
        # sizes that end inside a block occur only in whole tensors (check_blocks); their blocks need no parts
        sizes = None if any(size % unit[dim] for size in sizes) else [size // unit[dim] for size in sizes]
    return replace(
        meta,
        shape=_shape_in(unit, meta.shape),
        dtype=dtype,
        element_size=element_size(dtype),
        partition_sizes=sizes,
        tiles=None if meta.tiles is None else tuple(_tile_in(unit, tile, meta.shape[-1]) for tile in meta.tiles),
        global_shape=_shape_in(unit, meta.global_shape) if meta.global_shape else meta.global_shape,
    )


def _shape_in(unit: tuple[int, int], shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) < 2:
        return *shape[:-1], shape[-1] // unit[1]
    return *shape[:-2], -(-shape[-2] // unit[0]), -(-shape[-1] // unit[1])


def _tile_in(unit: tuple[int, int], tile: Tile, columns: int) -> Tile:
    """Return a tile that counts blocks; all its numbers divide, because it holds whole blocks.

    Args:
        unit: rows and columns of a block.
        tile: the tile.
        columns: of the local tensor.
    """
    rows, wide = unit
    area, last = rows * wide, len(tile.size) - 1

    def along(dim: int) -> int:
        """Return the elements of a block along a dimension."""
        return wide if dim == last else rows if dim == last - 1 else 1

    strides = [stride * along(dim) // area for dim, stride in enumerate(tile.local_stride[:-1])]
    local = tile.local_offset // wide
    if rows > 1:
        row, column = divmod(tile.local_offset, columns)
        local = row // rows * -(-columns // wide) + column // wide
    repeat = tile.repeat
    if repeat is not None:
        each = wide if repeat.dim == last else area
        repeat = Repeat(repeat.dim, repeat.count, repeat.step // along(repeat.dim), repeat.local_step // each)
    offset = tuple(low // along(dim) for dim, low in enumerate(tile.offset))
    return Tile(tile.tensor, offset, _shape_in(unit, tile.size), local, (*strides, 1), repeat)


def _cut_block(tile: Tile) -> str:
    """Return how a tile cuts blocks of the local or the canonical tensor, "" if it cuts none."""
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
    """Return whether a source may offer this dtype in MXFP8; float32 is rounded to bfloat16 first."""
    return dtype_name(str(dtype)) in ("bfloat16", "float32")


# --- conversions by senders -------------------------------------------------------------------------------

_ROUND_TO_BFLOAT16 = cast_number("float32", "bfloat16") or 0


class Converter:
    """Converts elements and blocks for one thread. It keeps memory between calls, because first touches are slow."""

    def __init__(self) -> None:
        self._scratch: Scratch | None = None

    def __call__(self, cast: int, words: Words) -> Words:
        """Return elements or blocks after the conversion with this number, in an array of equal shape.

        Blocks are void items of the sizes in `refitd.dtypes`; tiles are [..., 128, 128]. float32 is rounded to
        bfloat16 first.
        """
        if cast not in BLOCK_CASTS:
            return converted(cast, words)
        held, wanted = BLOCK_CASTS[cast]
        _, rounding, which = wanted.split(".")
        is_wide = held.startswith("float32")
        flat = np.ascontiguousarray(words).reshape(-1).view(np.uint32 if is_wide else np.uint16)
        if is_wide:
            flat = converted(_ROUND_TO_BFLOAT16, flat)
        if rounding == TILES:
            tiles = flat.reshape(-1, TILE, TILE)
            made, numbers = np.empty(tiles.shape, np.uint8), np.empty((len(tiles), 1, 1), np.float32)
            for tile, code, number in zip(tiles, made, numbers, strict=True):
                quantize_tiles(tile, code, number)
            found = made if which == "data" else numbers.view(np.uint32)
            return found.reshape(words.shape if which == "data" else words.shape[:-2])
        self._scratch = self._scratch or Scratch.of(np.uint16)
        if which == "scale":
            return scales_of(flat, Rounding(rounding), self._scratch).reshape(words.shape)
        data, scales = np.empty((1, flat.size), np.uint8), np.empty((1, flat.size // BLOCK), np.uint8)
        quantize(flat[None], data, scales, Rounding(rounding), self._scratch)
        return data.view(f"V{BLOCK}").reshape(words.shape)


def converted_by_senders(rosters: Sequence[Roster]) -> list[Roster]:
    """Return rosters in which sources offer the parts that destinations want and no source has converted.

    Called before planning. Descriptions that several rosters share stay shared.

    Raises:
        PlanError: a source's part of such a tensor cuts blocks; names the tensors.
    """
    wanted = _parts_in(r.destination for r in rosters)
    if wanted:
        wanted -= _parts_in(r.source for r in rosters)
    if not wanted:
        return list(rosters)
    reader = _Reader(wanted)
    sources = [reader.sources(r) for r in rosters]
    found = [
        replace(r, source=source, destination=reader.destinations(r))
        for r, source in zip(rosters, sources, strict=True)
    ]
    if reader.problems:
        raise PlanError(sorted(reader.problems))
    return found


class _Reader:
    """Describes tensors in blocks. Results are kept by the identity of shared descriptions."""

    def __init__(self, wanted: set[str]) -> None:
        self.problems: set[str] = set()
        self._roundings: dict[str, set[str]] = {}  # by tensor
        self._held: dict[str, str] = {}  # the dtype of each part's blocks at its sources
        self._done: dict[int, tuple[object, Sequence[ParameterMetadata]]] = {}
        for part in map(part_of, wanted):
            if part is not None:
                self._roundings.setdefault(part.tensor, set()).add(part.rounding)

    def sources(self, roster: Roster) -> Sequence[ParameterMetadata]:
        """Return a rank's source descriptions, and descriptions of the parts that it can make."""
        metas = roster.source
        if id(metas) not in self._done:
            added = [part for meta in metas for part in self._offered(meta, roster.rank)]
            self._done[id(metas)] = metas, (*metas, *added) if added else metas
        return self._done[id(metas)][1]

    def _offered(self, meta: ParameterMetadata, rank: int) -> Iterator[ParameterMetadata]:
        roundings = {rounding for name in _names(meta) for rounding in self._roundings.get(name, ())}
        held = dtype_name(meta.dtype)
        for rounding in sorted(roundings) if is_convertible(held) else ():
            dtype = f"{held}[{TILE}x{TILE}]" if rounding == TILES else f"{held}[{BLOCK}]"
            try:
                parts = parts_of(replace(meta, owner_rank=rank), rounding)
            except RefusedError as exc:
                self.problems.add(f"{exc} (convert_on_send=False)")
                return
            for part in parts:
                self._held |= dict.fromkeys(_names(part), dtype)
                yield _in_blocks(replace(part, owner_rank=meta.owner_rank), dtype, rounding)

    def destinations(self, roster: Roster) -> Sequence[ParameterMetadata]:
        """Return a rank's destination descriptions, with the parts that sources make in blocks."""
        metas = roster.destination
        if id(metas) not in self._done:
            found = [self._wanted(meta, roster.rank) for meta in metas]
            is_same = all(one is meta for one, meta in zip(found, metas, strict=True))
            self._done[id(metas)] = metas, metas if is_same else tuple(found)
        return self._done[id(metas)][1]

    def _wanted(self, meta: ParameterMetadata, rank: int) -> ParameterMetadata:
        held = next((self._held[name] for name in _names(meta) if name in self._held), None)
        part = part_of(_names(meta)[0])
        if held is None or part is None:
            return meta
        try:
            if part.which == "data":
                (check_tiles if part.rounding == TILES else check_blocks)(replace(meta, owner_rank=rank))
            if meta.fill is not None:
                raise RefusedError(f"{meta.name}: it is filled up with {meta.fill}, and blocks cannot be")
        except RefusedError as exc:
            self.problems.add(f"{exc}; convert it at the receivers (convert_on_send=False)")
            return meta
        return replace(_in_blocks(meta, f"fp8.{part.rounding}.{part.which}", part.rounding), cast_from=held)


def _in_blocks(part: ParameterMetadata, dtype: str, rounding: str) -> ParameterMetadata:
    """Return a part's description with one element of this dtype for every block; scales are so already."""
    if part.dtype != DATA_DTYPE:
        return replace(part, dtype=dtype, element_size=element_size(dtype))
    return in_blocks(part, dtype, rounding)


def _names(meta: ParameterMetadata) -> list[str]:
    """Return the canonical tensors in a local tensor, and their aliases."""
    return [*([tile.tensor for tile in meta.tiles] if meta.tiles else [canonical_name(meta)]), *meta.aliases]


def _parts_in(sides: Iterable[Sequence[ParameterMetadata]]) -> set[str]:
    """Return the names of all parts of MXFP8 tensors in descriptions."""
    lists = {id(metas): metas for metas in sides}.values()
    return {name for metas in lists for meta in kinds_of(metas) if MARK in meta.name for name in _names(meta)}
