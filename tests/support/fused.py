"""Tiles of tensors that hold several canonical tensors, or that are padded.

    interleaved_qkv   Megatron's linear_qkv: per query group its q heads, then one k head, then one v head
    packed_qkv        an engine's qkv_proj: all q heads of this rank, then its k heads, then its v heads
    packed            an engine's gate_up_proj: this rank's share of each part, one after the other
    stacked           fused experts: one canonical tensor per index of the first dimension
    without_padding   a vocabulary padded further than the canonical one

All but the last return the `tiles` of a ParameterMetadata. Names are canonical names, and sizes are of whole canonical
tensors. `trailing` is the shape after the rows: (hidden,) for weights, () for biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from refitd.describe.layout import elements, global_shape_of, row_major, tiles_of
from refitd.describe.metadata import ParameterMetadata, Repeat, Tile
from refitd.errors import PlanError


def interleaved_qkv(
    names: tuple[str, str, str],
    query_groups: int,
    heads_per_group: int,
    head_dim: int,
    trailing: Sequence[int],
    tp_size: int = 1,
    tp_index: int = 0,
) -> tuple[Tile, ...]:
    """Return the tiles of a QKV tensor interleaved by query group.

        2 groups of 2 q heads:  rows q0 q1 k0 v0 q2 q3 k1 v1, head_dim rows each

    Raises:
        PlanError: the groups do not divide over the ranks.
    """
    here = _share(names[0], "query groups", query_groups, tp_size)
    rows_per_group = (heads_per_group + 2) * head_dim
    found = []
    for name, heads, before in ((names[0], heads_per_group, 0), (names[1], 1, -2), (names[2], 1, -1)):
        rows = heads * head_dim
        start = (before % (heads_per_group + 2)) * head_dim
        repeat = Repeat(0, here, rows, rows_per_group * elements(trailing)) if here > 1 else None
        found.append(_rows(name, tp_index * here * rows, rows, trailing, start, repeat))
    return tuple(found)


def packed_qkv(
    names: tuple[str, str, str],
    heads: int,
    kv_heads: int,
    head_dim: int,
    trailing: Sequence[int],
    tp_size: int = 1,
    tp_index: int = 0,
) -> tuple[Tile, ...]:
    """Return the tiles of q, k and v packed one after the other; more ranks than kv heads replicate these.

        8 heads, 2 kv heads, TP4:  ranks 0 and 1 hold kv head 0, ranks 2 and 3 kv head 1

    Raises:
        PlanError: the ranks do not divide the heads, or neither of ranks and kv heads divides the other.
    """
    q_rows = _share(names[0], "heads", heads, tp_size) * head_dim
    if tp_size > kv_heads and tp_size % kv_heads == 0:
        kv_rows, kv_start = head_dim, tp_index // (tp_size // kv_heads) * head_dim
    else:
        kv_rows = _share(names[1], "kv heads", kv_heads, tp_size) * head_dim
        kv_start = tp_index * kv_rows
    return (
        _rows(names[0], tp_index * q_rows, q_rows, trailing, 0),
        _rows(names[1], kv_start, kv_rows, trailing, q_rows),
        _rows(names[2], kv_start, kv_rows, trailing, q_rows + kv_rows),
    )


def packed(
    parts: Sequence[tuple[str, int]], trailing: Sequence[int], tp_size: int = 1, tp_index: int = 0
) -> tuple[Tile, ...]:
    """Return the tiles of (name, rows) parts, each split over the ranks separately, packed one after the other.

    Raises:
        PlanError: a part does not divide over the ranks.
    """
    found, local = [], 0
    for name, rows in parts:
        here = _share(name, "rows", rows, tp_size)
        found.append(_rows(name, tp_index * here, here, trailing, local))
        local += here
    return tuple(found)


def stacked(names: Sequence[str], shape: Sequence[int]) -> tuple[Tile, ...]:
    """Return the tiles of a tensor [len(names), *shape] that holds canonical tensor names[i] at index i."""
    size, zero = elements(shape), (0,) * len(shape)
    return tuple(Tile(name, zero, tuple(shape), i * size, row_major(shape)) for i, name in enumerate(names))


def without_padding(
    meta: ParameterMetadata, global_shape: Sequence[int], fill: float | None = None
) -> ParameterMetadata:
    """Return the description of a padded tensor with its tiles clipped to the true canonical shape.

    The padding belongs to no tile: it is never read from a source. In a destination it is written with `fill` (by
    default the description's own), which a destination must therefore declare.

        vocabulary of 10 padded to 12 over TP2, rank 1: rows 6:12 become rows 6:10, and two rows of fill

    Raises:
        PlanError: the description is invalid, or the padded shape does not contain the true one.
    """
    tiles, padded = tiles_of(meta), global_shape_of(meta)
    true = tuple(global_shape)
    if padded is None or len(padded) != len(true) or any(a < b for a, b in zip(padded, true, strict=True)):
        raise PlanError(f"{meta.name}: the padded shape is {padded}, expected {true} or larger in every dimension")
    found = []
    for tile in tiles:
        for i in range(tile.repeat.count if tile.repeat else 1):
            offset, local = list(tile.offset), tile.local_offset
            if tile.repeat:
                offset[tile.repeat.dim] += i * tile.repeat.step
                local += i * tile.repeat.local_step
            size = tuple(max(0, min(n, end - o)) for o, n, end in zip(offset, tile.size, true, strict=True))
            if elements(size):
                found.append(Tile(tile.tensor, tuple(offset), size, local, tile.local_stride))
    return replace(meta, tiles=tuple(found), global_shape=true, fill=meta.fill if fill is None else fill)


def _share(name: str, what: str, count: int, ranks: int) -> int:
    if count % ranks:
        raise PlanError(f"{name}: {count} {what} do not divide over {ranks} ranks; describe it with explicit tiles")
    return count // ranks


def _rows(
    name: str, start: int, rows: int, trailing: Sequence[int], local_row: int, repeat: Repeat | None = None
) -> Tile:
    """Return the tile of canonical rows start : start + rows that begins at local row `local_row`."""
    shape = (rows, *trailing)
    offset = (start, *(0 for _ in trailing))
    return Tile(name, offset, shape, local_row * elements(trailing), row_major(shape), repeat)
