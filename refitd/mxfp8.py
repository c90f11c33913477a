"""Constants of the MXFP8 format: blocks, tiles, roundings, sizes. `refitd.transforms` has the arithmetic."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

BLOCK: Final = 32  # elements of the last dimension that share a scale
TILE_ROWS: Final = 128
TILE_BLOCKS: Final = 4


class Rounding(StrEnum):
    """How a block's scale is rounded from its largest magnitude."""

    RCEIL = "rceil"  # up, so that nothing saturates: cuBLAS, Transformer Engine, Megatron-Core
    FLOOR = "floor"  # down: OCP MX 1.0, section 6.3


ROUNDINGS = tuple(Rounding)  # jobs store a rounding as its index here


def swizzled_bytes(rows: int, blocks: int) -> int:
    """Return the bytes of the swizzled scales of [rows, blocks]: whole tiles of 128 x 4, padded with zeros."""
    return -(-rows // TILE_ROWS) * -(-blocks // TILE_BLOCKS) * TILE_ROWS * TILE_BLOCKS
