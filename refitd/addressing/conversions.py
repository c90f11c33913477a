"""Conversions once everything has arrived: bfloat16 quantized to MXFP8, and scales swizzled, in pieces for workers.

A piece holds whole blocks, and for swizzled scales whole tiles of 128 rows. So the result does not depend on how a
tensor is cut into pieces:

    row-major    the tensor as one row: 2**20 elements a piece
    swizzled    a multiple of 128 rows, about 2**20 elements a piece
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from refitd.addressing.places import Int64
from refitd.addressing.work import WorkList
from refitd.errors import TransportError
from refitd.mxfp8 import BLOCK, ROUNDINGS, TILE_ROWS, Rounding, swizzled_bytes

PIECE = 1 << 20  # elements
GPU_PIECE = 1 << 28  # a GPU converts smaller pieces faster than they can be queued
QUANTIZE, QUANTIZE_SWIZZLED, SWIZZLE = 0, 1, 2
ELEMENT_BYTES = 2  # of bfloat16, the dtype that is quantized


@dataclass(frozen=True, slots=True)
class Made:
    """One conversion. Offsets are in bytes; `data` is unused if only scales are swizzled."""

    kind: int
    shape: tuple[int, ...]  # in elements
    read: int  # the arena that it reads, at `source`
    arena: int  # the arena that it writes; it may be the same
    source: int
    data: int
    scale: int
    rounding: Rounding = Rounding.RCEIL


@dataclass(frozen=True, eq=False)
class ConversionList(WorkList):
    """Pieces of conversions, one row each.

    `size` is [rows, columns] of the piece. A row-major piece is one row, a swizzled one consists of whole tensor rows.
    """

    ARENAS = ("read", "arena")

    kind: Int64
    rounding: Int64  # index into ROUNDINGS
    read: Int64
    arena: Int64
    source: Int64  # bytes from the arena's start
    data: Int64
    scale: Int64

    @property
    def row_bytes(self) -> Int64:
        """Bytes that each piece reads, shape [n]."""
        elements: Int64 = np.prod(self.size, axis=1, dtype=np.int64)
        return np.where(self.kind == SWIZZLE, elements // BLOCK, elements * ELEMENT_BYTES)


def check_piece(pieces: ConversionList, row: int) -> tuple[int, int, int, int]:
    """Return kind, rows, columns and rounding of a piece.

    Raises:
        TransportError: there is no such conversion.
    """
    kind, rounding = int(pieces.kind[row]), int(pieces.rounding[row])
    rows, columns = pieces.size[row].tolist()
    fits = QUANTIZE <= kind <= SWIZZLE and 0 <= rounding < len(ROUNDINGS) and rows > 0 and columns >= BLOCK
    if not fits or columns % BLOCK:
        raise TransportError(
            f"conversion {row}: there is no conversion {kind} of [{rows}, {columns}], rounding {rounding}"
        )
    return kind, rows, columns, rounding


def pieces_of(made: Sequence[Made], piece: int = PIECE, on_gpus: Collection[int] = ()) -> ConversionList:
    """Cut conversions into pieces of about `piece` elements; those on GPUs into pieces of GPU_PIECE or more."""
    sizes = {one.arena: max(piece, GPU_PIECE) if one.arena in on_gpus else piece for one in made}
    found: list[tuple[int, ...]] = []
    for one in made:
        total = prod(one.shape)
        piece = sizes[one.arena]
        head = (one.kind, ROUNDINGS.index(one.rounding), one.read, one.arena)
        if not total:
            continue
        if one.kind == QUANTIZE:
            for start in range(0, total, piece):
                places = one.source + start * ELEMENT_BYTES, one.data + start, one.scale + start // BLOCK
                found.append((*head, *places, 1, min(piece, total - start)))
            continue
        columns = one.shape[-1]
        blocks, rows = columns // BLOCK, total // columns
        high = max(1, piece // (TILE_ROWS * columns)) * TILE_ROWS
        for row in range(0, rows, high):
            source = one.source + row * (blocks if one.kind == SWIZZLE else columns * ELEMENT_BYTES)
            places = source, one.data + row * columns, one.scale + swizzled_bytes(row, blocks)
            found.append((*head, *places, min(high, rows - row), columns))
    table = np.array(found, np.int64).reshape(len(found), 9)
    return ConversionList(table[:, 7:], *table[:, :7].T)
