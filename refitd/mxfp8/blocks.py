"""Conversions to MXFP8 and FP8 by senders: a plan reads blocks of elements, and writes their data or their scales.

Workers convert a block when they read it, so half the bytes cross between nodes. In such a plan a block is one element:
no copy cuts it, and every result equals that of converting the whole tensor.

    w, at a source                [256, 512] bfloat16    [256, 16] of 64 bytes
    w|fp8.rceil.data, wanted      [256, 512] bytes       [256, 16] of 32 bytes
    w|fp8.rceil.scale, wanted     [256, 16]  bytes       [256, 16] of 1 byte

For FP8 a block is a tile of 128 x 128, whose rows are apart in memory (`refitd.addressing.tiles`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from refitd.describe.casts import BLOCK_CASTS, Words, cast_number, converted
from refitd.describe.layout import canonical_name
from refitd.describe.metadata import ParameterMetadata, Roster
from refitd.dtypes import dtype_name, element_size
from refitd.errors import PlanError, RefusedError
from refitd.mxfp8.format import BLOCK, Rounding, Scratch, quantize, scales_of
from refitd.mxfp8.fp8 import TILE, quantize_tiles
from refitd.mxfp8.parts import (
    DATA_DTYPE,
    MARK,
    TILES,
    check_blocks,
    check_tiles,
    in_blocks,
    is_convertible,
    part_of,
    parts_of,
)

_ROUND_TO_BFLOAT16 = cast_number("float32", "bfloat16") or 0


class Converter:
    """Converts elements and blocks for one thread. It keeps memory between calls, because first touches are slow."""

    def __init__(self) -> None:
        self._scratch: Scratch | None = None

    def __call__(self, cast: int, words: Words) -> Words:
        """Return elements or blocks after the conversion with this number, in an array of equal shape.

        Blocks are void items of the sizes in `refitd.describe.casts`; tiles are [..., 128, 128]. float32 is rounded to
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
        """Return a rank's source descriptions, and those of the parts that it can make."""
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
    return {name for metas in lists for meta in metas if MARK in meta.name for name in _names(meta)}
