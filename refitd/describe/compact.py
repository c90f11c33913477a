"""Descriptions without ranks: ranks that hold the same elements have equal ones, which are sent and read once.

    rank 0: w, split over [0, 1]    rank 2: w, split over [2, 3]    both: rows 0:4 of w [8, 4]

The planner reads a description sequence that names no rank once for all rosters that share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from refitd.describe.layout import canonical_name, global_shape_of, is_sharded, tiles_of
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.tiles import Tile
from refitd.dtypes import dtype_name


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
