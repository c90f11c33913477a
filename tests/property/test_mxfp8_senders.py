"""Plans in which senders convert to MXFP8: for any split of both ends the bytes are those of the whole tensor."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd import ParameterMetadata, Roster, Tile
from refitd.addressing.copies import address
from refitd.addressing.places import LocalTensor
from refitd.buffers.layout import row_major_strides
from refitd.copy_services.shm import SharedMemoryService
from refitd.mxfp8.blocks import converted_by_senders
from refitd.mxfp8.format import Rounding, quantize
from refitd.mxfp8.parts import parts_of
from refitd.plan.build import plan_copies
from tests.support.arenas import arena_of
from tests.support.places import by_rank

Box = tuple[slice, slice]


@st.composite
def grids(draw: Any, rows: int, blocks: int) -> list[Box]:
    """Cut rows and blocks at any borders; each rank has one box."""
    edges = [sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=3))}) for extent in (rows, blocks)]
    spans = [[slice(a, b) for a, b in itertools.pairwise(each)] for each in edges]
    return [(high, slice(32 * wide.start, 32 * wide.stop)) for high in spans[0] for wide in spans[1]]


@st.composite
def splits(draw: Any) -> tuple[int, int, list[Box], list[Box]]:
    rows, blocks = draw(st.integers(1, 40)), draw(st.integers(1, 9))
    return rows, blocks, draw(grids(rows, blocks)), draw(grids(rows, blocks))


def described(box: Box, shape: tuple[int, int], dtype: str) -> ParameterMetadata:
    size = tuple(part.stop - part.start for part in box)
    tile = Tile("w", tuple(part.start for part in box), size, 0, (size[1], 1))
    return ParameterMetadata("w", size, dtype, {"bfloat16": 2, "float32": 4}[dtype], tiles=(tile,), global_shape=shape,
                             cast_to="bfloat16" if dtype == "float32" else None)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(splits(), st.sampled_from(Rounding), st.sampled_from(("bfloat16", "float32")), st.integers(0, 2**32))
def test_any_split_gives_the_bytes_of_the_whole_tensor(
    split: tuple[int, int, list[Box], list[Box]], rounding: Rounding, dtype: str, seed: int
) -> None:
    rows, blocks, held, wanted = split
    shape = (rows, 32 * blocks)
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32).view(np.uint32) & 0xFFFF0000
    words = (values >> 16).astype(np.uint16) if dtype == "bfloat16" else values
    arenas = {1: arena_of(1 << 20), 2: arena_of(1 << 20)}
    rosters, sources, destinations, places = [], {}, {}, []
    at = 0
    for rank, box in enumerate(held):
        mine = np.ascontiguousarray(words[box])
        arenas[1].bytes[at : at + mine.nbytes] = mine.reshape(-1).view(np.uint8)
        sources[rank, "w"] = LocalTensor(1, at, mine.shape, row_major_strides(mine.shape, mine.itemsize))
        rosters.append(Roster(rank, [described(box, shape, dtype)]))
        at += mine.nbytes
    at = 0
    for rank, box in enumerate(wanted, len(held)):
        parts = parts_of(described(box, shape, "bfloat16"), rounding)
        for part in parts:
            place = LocalTensor(2, at, part.shape, row_major_strides(part.shape, 1))
            destinations[rank, part.name] = place
            places.append((place, box))
            at += int(np.prod(part.shape))
        rosters.append(Roster(rank, (), list(parts)))
    plan = plan_copies(converted_by_senders(rosters))
    copies = address(plan.table, by_rank(sources), by_rank(destinations))
    SharedMemoryService().prepare(copies, arenas).run(verify=True, on_progress=lambda done: None)

    data, scale = np.empty(shape, np.uint8), np.empty((rows, blocks), np.uint8)
    quantize((values >> 16).astype(np.uint16), data, scale, rounding)
    assert int(copies.row_bytes.sum()) == data.nbytes + scale.nbytes
    for number, (place, box) in enumerate(places):
        found = arenas[2].bytes[place.offset : place.offset + int(np.prod(place.shape))].reshape(place.shape)
        of_blocks = (box[0], slice(box[1].start // 32, box[1].stop // 32))
        np.testing.assert_array_equal(found, scale[of_blocks] if number % 2 else data[box])
