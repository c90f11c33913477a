"""Plans in which senders convert to MXFP8 or FP8: any split gives the bytes of the whole tensor."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from refitd import ParameterMetadata, Roster, Tile
from refitd.addressing.copies import CopyList, address
from refitd.addressing.places import LocalTensor
from refitd.buffers.layout import extent, row_major_strides
from refitd.copy_services.pieces import box_of
from refitd.copy_services.shm import SharedMemoryService
from refitd.dtypes import ELEMENT_SIZES
from refitd.mxfp8.format import Rounding, quantize, quantize_tiles
from refitd.mxfp8.parts import converted_by_senders, parts_of
from refitd.plan.build import plan_copies
from tests.support.arenas import arena_of
from tests.support.places import by_rank

Box = tuple[slice, slice]
UNITS = {"rceil": (1, 32), "floor": (1, 32), "tiles": (128, 128)}
MOST = {"rceil": (40, 9), "floor": (40, 9), "tiles": (3, 3)}
ROOM = 2 << 20


@st.composite
def grids(draw: Any, counts: tuple[int, int], unit: tuple[int, int]) -> list[Box]:
    """Cut both dimensions between any blocks; each rank has one box."""
    edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in counts]
    high, wide = (
        [slice(a * step, b * step) for a, b in itertools.pairwise(each)] for each, step in zip(edges, unit, strict=True)
    )
    return list(itertools.product(high, wide))


@st.composite
def splits(draw: Any) -> tuple[str, tuple[int, int], list[Box], list[Box]]:
    form = draw(st.sampled_from(sorted(UNITS)))
    counts = tuple(draw(st.integers(1, most)) for most in MOST[form])
    shape = tuple(n * step for n, step in zip(counts, UNITS[form], strict=True))
    return form, shape, draw(grids(counts, UNITS[form])), draw(grids(counts, UNITS[form]))


def described(box: Box, shape: tuple[int, int], dtype: str) -> ParameterMetadata:
    size = tuple(part.stop - part.start for part in box)
    tile = Tile("w", tuple(part.start for part in box), size, 0, (size[1], 1))
    return ParameterMetadata("w", size, dtype, ELEMENT_SIZES[dtype], tiles=(tile,), global_shape=shape)


def whole(words: np.ndarray, form: str) -> dict[str, np.ndarray]:
    data, (high, wide) = np.empty(words.shape, np.uint8), UNITS[form]
    shape = (words.shape[0] // high, words.shape[1] // wide)
    scale = np.empty(shape, np.float32 if form == "tiles" else np.uint8)
    if form == "tiles":
        quantize_tiles(words, data, scale)
    else:
        quantize(words, data, scale, Rounding(form))
    return {"data": data, "scale": scale}


def by_messages(copies: CopyList, arenas: dict[int, Any]) -> None:
    """Perform the copies as two workers do: packed at one end, unpacked at the other, in parts."""
    for row in range(len(copies)):
        ends = [
            box_of(
                arenas[int(getattr(copies, f"{side}_arena")[row])],
                int(getattr(copies, f"{side}_offset")[row]),
                copies.size[row].tolist(),
                getattr(copies, f"{side}_stride")[row].tolist(),
                int(copies.cast[row]) if side == "src" else 0,
                int(copies.element_size[row]),
                f"{row}",
            )
            for side in ("src", "dst")
        ]
        assert ends[0].nbytes == ends[1].nbytes and ends[0].itemsize == ends[1].itemsize
        import torch

        step = max(1, 40_000 // ends[0].itemsize) * ends[0].itemsize
        for start in range(0, ends[0].nbytes, step):
            end = min(start + step, ends[0].nbytes)
            message = torch.empty(end - start, dtype=torch.uint8)
            ends[0].pack(start, end, message)
            ends[1].unpack(start, end, message)


@settings(deadline=None, max_examples=60)
@given(
    splits(),
    st.sampled_from(("bfloat16", "float32")),
    st.sampled_from((0, 3)),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_any_split_gives_the_bytes_of_the_whole_tensor(
    split: tuple[str, tuple[int, int], list[Box], list[Box]], dtype: str, gap: int, crosses: bool, seed: int
) -> None:
    form, shape, held, wanted = split
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32).view(np.uint32) & 0xFFFF0000
    words = (values >> 16).astype(np.uint16) if dtype == "bfloat16" else values
    arenas = {1: arena_of(ROOM), 2: arena_of(ROOM)}
    rosters, sources, destinations, places, at = [], {}, {}, [], 0
    for rank, box in enumerate(held):
        mine = words[box]
        strides = ((mine.shape[1] + gap) * mine.itemsize, mine.itemsize)
        np.ndarray(mine.shape, mine.dtype, arenas[1].bytes.data, at, strides)[...] = mine
        sources[rank, "w"] = LocalTensor(1, at, mine.shape, strides)
        rosters.append(Roster(rank, [described(box, shape, dtype)]))
        at += extent(mine.shape, strides, mine.itemsize)
    at = 0
    for rank, box in enumerate(wanted, len(held)):
        parts = dict(zip(("data", "scale"), parts_of(described(box, shape, "bfloat16"), form), strict=True))
        for which, part in parts.items():
            strides = row_major_strides(part.shape, part.element_size)
            destinations[rank, part.name] = place = LocalTensor(2, at, part.shape, strides)
            places.append((which, place, box))
            at += -(-extent(part.shape, strides, part.element_size) // 4) * 4
        rosters.append(Roster(rank, (), list(parts.values())))
    plan = plan_copies(converted_by_senders(rosters))
    copies = address(plan.table, by_rank(sources), by_rank(destinations))
    if crosses:
        by_messages(copies, arenas)
    else:
        SharedMemoryService().prepare(copies, arenas).run(verify=True, on_progress=lambda done: None)

    want = whole((values >> 16).astype(np.uint16), form)
    assert int(copies.row_bytes.sum()) == sum(made.nbytes for made in want.values())
    for which, place, box in places:
        found = np.ndarray(place.shape, want[which].dtype, arenas[2].bytes.data, place.offset, place.strides)
        units = UNITS[form] if which == "scale" else (1, 1)
        part = tuple(slice(p.start // unit, p.stop // unit) for p, unit in zip(box, units, strict=True))
        np.testing.assert_array_equal(found, want[which][part])
