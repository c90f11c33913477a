"""Tiles: boxes of canonical tensors at places of local tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Repeat:
    """Repeat a tile `count` times, each `step` further along canonical `dim` and `local_step` further locally."""

    dim: int
    count: int
    step: int
    local_step: int


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of a canonical tensor at a place of a local tensor. All numbers count elements.

        TP2 rank 1 of a [8, 4] tensor, split on dim 0, local shape [4, 4]:
        Tile("w", offset=(4, 0), size=(4, 4), local_offset=0, local_stride=(4, 1))

    `local_offset` and `local_stride` address the local tensor as if it were row-major, whatever its strides in memory
    are; `local_stride` has one entry per canonical dimension.
    """

    tensor: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    local_offset: int
    local_stride: tuple[int, ...]
    repeat: Repeat | None = None
