"""Tiles: boxes of canonical tensors at places of local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


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


def spaced(spots: Sequence[tuple[int, int]], size: int, dim: int) -> list[tuple[int, int, Repeat | None]]:
    """Join runs of one size along `dim` into one with a repeat if they are equally far apart at both ends.

    Args:
        spots: (first element of the canonical tensor along `dim`, local offset) of each run.
        size: the number of elements of each run along `dim`.
        dim: the dimension.
    """
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(spots)}
    if len(steps) == 1:
        ((far, local_far),) = steps
        if far >= size and local_far >= 0:
            return [(*spots[0], Repeat(dim, len(spots), far, local_far))]
    return [(*spot, None) for spot in spots]
