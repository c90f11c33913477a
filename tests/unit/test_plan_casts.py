"""Different dtypes: refused unless the destination declares the cast; then every row names the cast."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from refitd import ParameterMetadata, Roster, Tile
from refitd.describe.layout import without_ranks
from refitd.dtypes import CASTS, ELEMENT_SIZES, Offered, cast_number, unrounded
from refitd.plan.build import plan_copies
from refitd.plan.table import CopyTable
from refitd.protocol.shards import metadata_of, shard_of
from tests.support.layouts import meta, refusal
from tests.support.plans import violations


def of(dtype: str, rank: int, **fields: Any) -> ParameterMetadata:
    return meta("w", (4, 2), rank, dtype=dtype, element_size=ELEMENT_SIZES[dtype], **fields)


@pytest.mark.parametrize(("held", "wanted"), CASTS.values())
def test_every_cast_that_there_is_can_be_planned(held: str, wanted: str) -> None:
    table = plan_copies([Roster(0, [of(held, 0)]), Roster(1, (), [of(wanted, 1, cast_from=held)])]).table
    assert table.cast.tolist() == [cast_number(held, wanted)]


def test_a_cast_that_is_not_declared_is_refused() -> None:
    said = refusal([Roster(0, [of("float32", 0)]), Roster(1, (), [of("bfloat16", 1)])])
    assert said == (
        "w: dtype is float32 on rank 0 (source), bfloat16 on rank 1 (destination); it must be the same everywhere, "
        "convert one side, or let the destination receive it converted: register_target(cast=True)"
    )


def test_a_source_that_holds_another_dtype_than_declared_is_refused() -> None:
    said = refusal([Roster(0, [of("float16", 0)]), Roster(1, (), [of("bfloat16", 1, cast_from="float32")])])
    assert said.startswith("w: dtype is float16 on rank 0 (source), float32 on rank 1 (destination, cast to bfloat16)")


@pytest.mark.parametrize(("holds", "advice"), [("bfloat16", "leave it out"), ("float32", "state bfloat16")])
def test_a_cast_that_states_another_dtype_than_sources_hold_is_to_be_corrected(holds: str, advice: str) -> None:
    stated = "float32" if holds == "bfloat16" else "float16"
    said = refusal([Roster(0, [of("bfloat16", 0)]), Roster(1, (), [of(holds, 1, cast_from=stated)])])
    assert said.endswith(
        f"and the cast of this destination says that sources hold {stated}: {advice}, or register with cast=True"
    )


def test_sources_that_differ_are_refused_whatever_is_declared() -> None:
    found = [Roster(0, [of("float32", 0)]), Roster(1, [of("float16", 1)])]
    assert "float32 on rank 0 (source), float16 on rank 1 (source)" in refusal(
        [*found, Roster(2, (), [of("bfloat16", 2, cast_from="float32")])]
    )


@pytest.mark.parametrize(
    ("dtype", "cast"),
    [("bfloat16", "float64"), ("float8_e4m3fn", "bfloat16"), ("int32", "float32"), ("float16", "bfloat16")],
)
def test_a_cast_that_there_is_not_is_refused_with_those_that_there_are(dtype: str, cast: str) -> None:
    said = refusal([Roster(1, (), [of(dtype, 1, cast_from=cast)])])
    assert said.startswith(f"rank 1 destination: w: cast_from is {cast!r} for a tensor of {dtype}, expected one of")
    assert "float32 to bfloat16, bfloat16 to float32, float32 to float16, float16 to float32" in said


@pytest.mark.parametrize("cast", [1, "", "float99"])
def test_a_cast_from_nothing_is_refused(cast: Any) -> None:
    assert "cast_from is" in refusal([Roster(1, (), [of("bfloat16", 1, cast_from=cast)])])


def test_casts_survive_the_wire_and_compaction() -> None:
    wanted = of("bfloat16", 1, cast_from="float32")
    assert metadata_of(shard_of([wanted]), owner_rank=1) == [wanted]
    assert without_ranks([wanted])[0].cast_from == "float32"


def test_a_table_without_casts_travels_as_before_and_reads_as_zeros() -> None:
    table = plan_copies([Roster(0, [of("float32", 0)]), Roster(1, (), [of("float32", 1)])]).table
    wire = table.to_wire()
    assert "cast" not in wire
    assert CopyTable.from_wire(wire).cast.tolist() == [0]


def converting() -> tuple[CopyTable, list[Roster]]:
    found = [Roster(0, [of("float32", 0)]), Roster(1, (), [of("bfloat16", 1, cast_from="float32")])]
    return plan_copies(found).table, found


@pytest.mark.parametrize("cast", [5, -1, 2])
def test_a_table_with_a_cast_that_there_is_not_is_refused(cast: int) -> None:
    wire = replace(converting()[0], cast=np.array([cast], np.int32)).to_wire()
    with pytest.raises(ValueError, match="plan table: a cast"):
        CopyTable.from_wire(wire)


@pytest.mark.parametrize("cast", [0, 2, 3, 9, -1])
def test_the_validator_finds_a_wrong_cast(cast: int) -> None:
    table, found = converting()
    said = violations(replace(table, cast=np.array([cast], np.int32)), found)
    assert any("would put other elements there" in line for line in said)


ROUNDED = of("bfloat16", 0, cast_from="float32")
EXACT = of("float32", 0, cast_to="bfloat16")


@pytest.mark.parametrize(
    ("source", "holds", "declares", "cast"),
    [
        (ROUNDED, "bfloat16", None, 0),
        (ROUNDED, "bfloat16", "float32", 0),  # rounded by the source already
        (ROUNDED, "float32", "bfloat16", 2),
        (EXACT, "bfloat16", None, 1),  # the source allows it
        (EXACT, "bfloat16", "float32", 1),
        (EXACT, "float32", None, 0),
        (EXACT, "float32", "bfloat16", 0),
        (EXACT, "float16", "float32", 3),
    ],
)
def test_a_destination_of_a_rounding_source_reads_what_its_own_dtype_needs(
    source: ParameterMetadata, holds: str, declares: str | None, cast: int
) -> None:
    found = [Roster(0, [source]), Roster(1, (), [of(holds, 1, cast_from=declares)])]
    plan = plan_copies(found)
    assert plan.table.cast.tolist() == [cast] and violations(plan, found) == []


@pytest.mark.parametrize(("holds", "declares"), [("float32", None), ("float16", "float32")])
def test_a_rounded_tensor_is_refused_by_name_where_more_is_needed(holds: str, declares: str | None) -> None:
    said = refusal([Roster(0, [ROUNDED]), Roster(1, (), [of(holds, 1, cast_from=declares)])])
    assert said.startswith("w: dtype is bfloat16 on rank 0 (source), float32 on rank 1 (destination")
    assert "its source has rounded these versions from float32 to bfloat16" in said


def test_a_permission_allows_no_other_dtype_than_it_names() -> None:
    said = refusal([Roster(0, [EXACT]), Roster(1, (), [of("float16", 1)])])
    assert "float32 on rank 0 (source), float16 on rank 1 (destination)" in said
    assert "cast_to is" not in said
    said = refusal([Roster(0, [of("float32", 0, cast_to="int8")]), Roster(1, (), [of("float32", 1)])])
    assert (
        "w: cast_to is 'int8' for a tensor of float32, expected one of the casts that there are: float32 to bfloat16"
        in said
    )


def test_a_fused_destination_casts_each_of_its_tensors_by_its_own_source() -> None:
    tiles = (Tile("a", (0,), (3,), 0, (1,)), Tile("b", (0,), (3,), 3, (1,)))
    held = [
        meta("a", (3,), 0, dtype="float32", element_size=4, cast_to="bfloat16"),
        meta("b", (3,), 0, dtype="bfloat16", element_size=2, cast_from="float32"),
    ]
    found = [Roster(0, held), Roster(1, (), [meta("ab", (6,), 1, tiles=tiles, cast_from="float32")])]
    plan = plan_copies(found)
    assert sorted(plan.table.cast.tolist()) == [0, 1] and violations(plan, found) == []


def test_only_what_a_destination_needs_is_unrounded() -> None:
    offered = {"w": Offered("bfloat16", "float32"), "wide": Offered("float32", "bfloat16")}
    for held, needed in (
        (("bfloat16", None), False),
        (("bfloat16", "float32"), False),
        (("float32", None), True),
        (("float16", "float32"), True),
        (("float32", "bfloat16"), False),  # it declares the cast
        (("float8_e4m3fn", None), False),  # no worker can convert either type to it
        (("int32", None), False),
    ):
        assert bool(unrounded(offered, {"w": [held]})) is needed, held
    # bfloat16 that is offered as float32: unrounded is the narrower
    assert unrounded(offered, {"wide": [("bfloat16", None)], "w": [("bfloat16", None)]}) == {"wide"}
