"""Padding: every element of a destination is written with the declared value, or the plan is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from refitd import Roster, Tile
from refitd.dtypes import ELEMENT_SIZES, fill_pattern
from refitd.plan.boxes import left_out
from refitd.plan.build import plan_copies, plan_reshard
from refitd.plan.table import FillTable
from refitd.testing import oracle
from tests.support.fused import without_padding
from tests.support.layouts import meta, refusal, replicated, rosters, tp
from tests.support.plans import violations

# (rank, local tensor, pattern, offset, size, stride)
Fill = tuple[int, str, int, int, list[int], list[int]]


def listed(fills: FillTable) -> list[Fill]:
    return [
        (
            int(fills.rank[i]),
            fills.locals[fills.local[i]],
            int(fills.pattern[i]),
            int(fills.offset[i]),
            fills.size[i].tolist(),
            fills.stride[i].tolist(),
        )
        for i in range(len(fills))
    ]


def vocabulary(source: float | None, destination: float | None) -> list[Roster]:
    """10 rows of 3, padded to 12 over TP2 at the source and to 16 over TP4 at the destination."""
    held = {r: without_padding(m, (10, 3), source) for r, m in tp("emb", (6, 3), range(2)).items()}
    wanted = {r: without_padding(m, (10, 3), destination) for r, m in tp("emb", (4, 3), range(10, 14)).items()}
    return rosters([held], [wanted])


def test_the_rows_that_no_vocabulary_reaches_are_filled() -> None:
    # destinations hold rows 0:4 4:8 8:12 12:16 of 10: rank 12 fills its rows 2:4, rank 13 all four
    found = vocabulary(None, -1.5)
    plan = plan_copies(found)
    assert listed(plan.fills) == [(12, "emb", 0xBFC0, 6, [6], [1]), (13, "emb", 0xBFC0, 0, [12], [1])]
    assert plan.fills.row_bytes.tolist() == [12, 24]
    oracle.check(plan.table, found, {"emb": (10, 3)}, plan.fills)
    assert violations(plan, found) == []


def test_gaps_between_the_parts_of_a_fused_tensor_are_filled_once() -> None:
    tiles = (Tile("a", (0,), (3,), 1, (1,)), Tile("b", (0,), (2,), 6, (1,)))
    fused = meta("ab", (9,), 1, tiles=tiles, fill=1.0)
    plan = plan_copies(rosters([replicated("a", (3,), [0]), replicated("b", (2,), [0])], [{1: fused}]))
    # elements 0 and 8 in one box, 4 and 5 in another
    assert listed(plan.fills) == [(1, "ab", 0x3F80, 0, [2, 1], [8, 1]), (1, "ab", 0x3F80, 4, [1, 2], [0, 1])]


def test_every_rank_reads_its_own_fills() -> None:
    plans = plan_reshard(vocabulary(None, 0.0))
    assert plans[0].fills is None and plans[11].fills is None
    assert plans[13].fills is not None and listed(plans[13].fills) == [(13, "emb", 0, 0, [12], [1])]


def test_ranks_that_pad_alike_share_their_fills() -> None:
    wanted = {r: without_padding(meta("w", (4,), r), (3,), 0.0) for r in range(1, 9)}
    shared = plan_copies(rosters([replicated("w", (3,), [0])], [wanted])).shared
    assert len(shared.fills.rank) == 8 and len(shared.fills.offset) == 1


def test_fills_survive_the_wire() -> None:
    fills = plan_copies(vocabulary(None, 3.0)).fills
    again = FillTable.from_wire(fills.to_wire())
    assert again == fills and listed(again) == listed(fills)
    assert FillTable.from_wire(plan_copies([]).fills.to_wire()) == plan_copies([]).fills
    for change in ({"rows": 3}, {"offset": b""}, {"locals": []}, {"rank": None}):
        with pytest.raises(ValueError, match="plan table"):
            FillTable.from_wire(fills.to_wire() | change)


def test_the_fill_is_part_of_what_plans_are_known_by() -> None:
    fills = (0.0, -0.0, 1.0, math.nan, float("nan"))
    digests = [plan_copies(vocabulary(None, fill)).digest for fill in fills]
    assert len(set(digests)) == 4 and digests[3] == digests[4]


def test_padding_that_a_destination_does_not_declare_is_refused() -> None:
    assert refusal(vocabulary(0.0, None)) == (
        "emb: rank 12 has 6 of the 12 elements of its local tensor (4, 3) in no tile, the first at element 6; expected "
        "every element to be written: declare what padding holds (fill=...), or check the tiles"
    )


def test_ends_that_pad_differently_are_refused_with_both_values() -> None:
    said = refusal(vocabulary(1.0, 0.0))
    assert said.startswith("emb: rank 1 (source) pads it with 1.0, rank 12") and "(destination) with 0.0" in said
    plan_copies(vocabulary(0.0, 0.0))
    plan_copies(vocabulary(math.nan, math.nan))


def test_tiles_too_fine_to_be_filled_are_refused() -> None:
    side = 2**24
    fine = meta("w", (side, 2), 1, tiles=(Tile("w", (0,), (side,), 0, (2,)),), fill=0.0)
    said = refusal(rosters([replicated("w", (side,), [0])], [{1: fine}]))
    assert said.startswith("w: rank 1 has elements that belong to no tile, interleaved too finely")


@pytest.mark.parametrize(
    ("fill", "dtype", "why"),
    [
        (0.1, "bfloat16", "fill is 0.1, which is not exactly an element of dtype bfloat16"),
        (1e39, "float32", "not exactly an element of dtype float32"),
        (0.5, "int8", "not exactly an element of dtype int8"),
        (-1, "uint8", "-1.0, which is not exactly an element"),
        (math.inf, "int64", "inf, which is not exactly"),
        (2**60 + 1, "int64", "which no 64 bit float is"),
        (True, "bool", "is True, expected a number"),
        ("0", "float32", "is '0', expected a number"),
        (449.0, "float8_e4m3fn", "not exactly"),
    ],
)
def test_a_value_that_the_dtype_does_not_have_is_refused(fill: Any, dtype: str, why: str) -> None:
    bad = meta("w", (4,), 1, dtype=dtype, element_size=ELEMENT_SIZES[dtype], fill=fill)
    said = refusal([Roster(1, (), [bad])])
    assert said.startswith("rank 1 destination: w: fill ") and why in said
    assert "declare what the padding holds" in said


def test_patterns_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    values = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -1.5, 2.0**-9, 448.0, 240.0, 57344.0, 2.0**-16, 127.0, 1 / 3, 2.0**100]
    values += [math.inf, -math.inf, math.nan]
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
    for name, size in ELEMENT_SIZES.items():
        dtype = getattr(torch, name)
        found = 0
        for value in values:
            try:
                pattern = fill_pattern(value, name)
            except ValueError:
                continue
            found += 1
            made = torch.tensor([value], dtype=torch.float64).to(dtype)
            want = int(made.view(words[size])[0]) % 2 ** (8 * min(size, 8))
            assert pattern == want or math.isnan(value), (name, value)
            bits = torch.tensor([pattern - 2**63 * 2 if pattern >= 2**63 else pattern]).view(torch.uint8)
            if dtype.is_floating_point:
                back = float(bits[:size].view(dtype).to(torch.float64)[0])
                assert repr(back) == repr(float(value)), (name, value)
        assert found >= 2, name


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_every_small_float_has_the_pattern_it_came_from(name: str) -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8)
    for code, value in enumerate(codes.view(getattr(torch, name)).to(torch.float64).tolist()):
        if not math.isnan(value):
            assert fill_pattern(value, name) == code


def test_what_boxes_leave_out_is_found_in_few_boxes() -> None:
    # the box 0:2, 0:3, 0:4 of 3 x 4 x 5 is taken
    rest = left_out([(0, (2, 3, 4), (20, 5, 1))], 60)
    assert int(rest.size.prod(axis=1).sum()) == 60 - 24
    assert len(rest.dst_offset) <= 4


def damaged(fills: FillTable, **columns: Any) -> FillTable:
    changed = {name: getattr(fills, name).copy() for name in columns}
    for name, value in columns.items():
        changed[name][0] = value
    return replace(fills, **changed)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"pattern": 1}, "emb: rank 12 would fill with other bits than those of 2.0"),
        ({"element_size": 4}, "emb: rank 12 would fill with other bits"),
        ({"offset": 5}, "emb: rank 12 would fill elements that belong to a tile"),
        ({"offset": 7}, "emb: rank 12 would fill elements outside its local tensor (4, 3)"),
        ({"size": 5}, "emb: rank 12 would fill 5 elements of its local tensor (4, 3), and 6 belong to no tile"),
        ({"stride": 0}, "emb: rank 12 would fill elements that belong to a tile, or one twice"),
        ({"rank": 10}, "emb: rank 10 would fill 6 elements of its local tensor (4, 3), and 0 belong to no tile"),
        ({"rank": 0}, "rank 0: the plan says it fills, but it wants no tensor"),
    ],
)
def test_the_validator_finds_wrong_fills(columns: dict[str, int], why: str) -> None:
    found = vocabulary(None, 2.0)
    plan = plan_copies(found)
    said = violations(plan.table, found, damaged(plan.fills, **columns))
    assert any(line.startswith(why) for line in said), said
