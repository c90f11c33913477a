"""A plan that cannot be exact is refused; the error names the parameter, the rank and the next check."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from refitd import ParameterMetadata, Repeat, Roster, Tile
from refitd.plan import match
from refitd.plan.build import plan_copies
from tests.support.layouts import meta, refusal, refusals, replicated, rosters, tp


def pair(source: ParameterMetadata, destination: ParameterMetadata) -> list[Roster]:
    return rosters([{0: source}], [{1: destination}])


W = meta("w", (4,))
HALF = {0: tp("w", (4, 2), [0, 1])[0]}
HUGE = meta("w", (2**40,), 0, is_tp=True, tensor_parallel_group_ranks=list(range(2**9)))
MEETING = (Tile("a", (0,), (3,), 0, (1,)), Tile("b", (0,), (3,), 2, (1,)))
MISSING = {rank: tp("w", (rows,), [0, 1, 2])[rank] for rank, rows in ((0, 4), (1, 3))}
REFUSED: dict[str, tuple[list[Roster], str, list[str]]] = {  # the start of the refusal, and what else it says
    "no source": (
        rosters([replicated("a", (4,), [0])], [replicated("a", (4,), [1]), replicated("b", (4,), [1])]),
        "b: rank 1",
        ["no source has it"],
    ),
    "a source of a part": (
        rosters([HALF], [replicated("w", (8, 2), [2])]),
        "w: rank 2",
        ["8 of these 16 elements", "[0:8, 0:2]"],
    ),
    "global shapes": (
        rosters([tp("w", (4,), [0, 1])], [tp("w", (4,), [2, 3, 4])]),
        "w: global shape is (8,) on rank 0 (source), (12,) on rank 2 (destination)",
        [],
    ),
    "dtypes": (
        pair(W, meta("w", (4,), dtype="float32", element_size=4)),
        "w: dtype",
        ["bfloat16", "float32", "rank 1"],
    ),
    "a label": (
        [Roster(0, [meta("a", (4,))]), Roster(1, (), [meta("b", (4,))], label="engine-a rank 1")],
        "b: engine-a rank 1 (b) wants it",
        [],
    ),
    "many ranks": (rosters([], [replicated("w", (4,), range(10))]), "", ["rank 0 and 9 more like it"]),
    "a rank twice": ([Roster(3, [W], label="x"), Roster(3, (), [W], label="y")], "", ["y", "x", "rank 3"]),
    "a negative rank": ([Roster(-1)], "", ["expected 0 to"]),
    "an absurd rank": ([Roster(2**20)], "", ["expected 0 to"]),
    "half a rank": ([Roster(1.5)], "", ["expected 0 to"]),
    "a rank outside its group": (
        rosters([{0: meta("w", (4,), 0, is_tp=True, tensor_parallel_group_ranks=[1, 2])}], []),
        "",
        ["rank 0 is not in its tensor-parallel group [1, 2]"],
    ),
    "a rank twice in its group": (
        rosters([{0: meta("w", (4,), 0, is_tp=True, tensor_parallel_group_ranks=[0, 1, 0])}], []),
        "",
        ["names a rank twice"],
    ),
    "another owner": ([Roster(0, [meta("w", (4,), 7)])], "", ["owner_rank is 7, expected 0"]),
    "a name twice": ([Roster(0, [W, W])], "", ["listed twice"]),
    "a huge global shape": ([Roster(0, [HUGE])], "", ["at most 2**48"]),
    "tiles that meet": (
        rosters([replicated("a", (3,), [0]), replicated("b", (3,), [0])], [{1: meta("ab", (5,), tiles=MEETING)}]),
        "",
        ["ab: two of its tiles on rank 1 share a place"],
    ),
    "a missing member": (rosters([MISSING], []), "", ["global shape"]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_plan_that_cannot_be_exact_is_refused_by_name(why: str) -> None:
    found, start, words = REFUSED[why]
    said = refusal(found)
    assert said.startswith(start) and all(word in said for word in words), said


def test_a_tensor_under_another_name_is_refused_with_the_nearest_ones() -> None:
    here = [replicated(f"model.layers.{n}.self_attn.q_proj.weight", (4,), [0]) for n in range(7)]
    other = replicated("model.layers.3.attention.q_proj.weight", (4,), [1])
    said = refusal(rosters([*here, replicated("lm_head.bias", (4,), [0])], [other]))
    close = said.partition("(nearest: ")[2].partition(")")[0].split(", ")
    assert len(close) == 5 and "model.layers.3.self_attn.q_proj.weight" in close and "lm_head.bias" not in close


def test_names_of_a_large_model_of_which_none_matches_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(match, "nearest", lambda name, held: told.append(len(held)) or [])
    here = [replicated(f"layers.{n}.{kind}", (4,), [0]) for n in range(700) for kind in ("weight", "bias")]
    theirs = [replicated(f"blocks.{n}.weight", (4,), [1]) for n in range(700)]
    assert "no source has it" in refusals(rosters(here, theirs))[0]
    assert told == [match.COMPARED] * match.NEAREST_OF


def test_torch_dtypes_and_their_names_are_the_same() -> None:
    torch = pytest.importorskip("torch")
    assert len(plan_copies(pair(meta("w", (4,), dtype=torch.bfloat16), meta("w", (4,)))).table) == 1


def test_all_problems_are_reported_together() -> None:
    held = [replicated("a", (4,), [0]), replicated("b", (4,), [0]), replicated("c", (4,), [0], element_size=4)]
    wanted = [replicated("a", (5,), [1]), replicated("b", (4,), [1], dtype="int16"), replicated("d", (4,), [1])]
    violations = refusals(rosters(held, wanted))
    assert [v.split(":")[0] for v in violations] == ["rank 0 source", "a", "b", "d"]


def test_an_unused_source_is_reported_and_not_refused() -> None:
    found = rosters([replicated("a", (4,), [0]), replicated("extra", (4,), [0])], [replicated("a", (4,), [1])])
    assert plan_copies(found).unused_sources == ("extra",)


@pytest.mark.parametrize(
    "shape", [(-1,), (4, -2), (2**49,), (2**30, 2**30), (math.nan,), (1.5,), ("4",), (1,) * 9, (True,)]
)
def test_absurd_shapes_are_refused_before_anything_is_allocated(shape: tuple[int, ...]) -> None:
    assert "shape" in refusal([Roster(0, [meta("w", shape)])])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"partition_dim": 2}, "partition_dim is 2, expected 0 to 1"),
        ({"partition_dim": -1}, "partition_dim is -1"),
        ({"partition_stride": 0}, "partition_stride is 0"),
        ({"partition_stride": 3}, "multiple of partition_stride 3"),
        ({"partition_sizes": [2, 1]}, "sum to 3, expected 4"),
        ({"partition_sizes": [5, -1]}, "whole numbers"),
        ({"partition_sizes": [1, 3], "partition_stride": 2}, "contradict"),
        ({"global_shape": (4, 2)}, "global shape (4, 2) is declared, expected (8, 2)"),
        ({"element_size": 4}, "element_size is 4, expected 2"),
        ({"dtype": "bf17"}, "unknown dtype 'bf17'"),
    ],
)
def test_contradictions_in_a_shard_are_refused(fields: dict[str, object], why: str) -> None:
    shard = replace(tp("w", (4, 2), [0, 1])[0], **fields)
    assert why in refusal([Roster(0, [shard])])


@pytest.mark.parametrize(
    ("tile", "why"),
    [
        (Tile("w", (0,), (4, 1), 0, (1,)), "different lengths"),
        (Tile("w", (0,), (5,), 0, (1,)), "ends at element 4, outside the local tensor of 4"),
        (Tile("w", (0,), (4,), 1, (1,)), "ends at element 4"),
        (Tile("w", (5,), (4,), 0, (1,)), "outside the global shape (8,)"),
        (Tile("w", (0,), (2,), 0, (0,)), "put two elements in one place"),
        (Tile("w", (-1,), (2,), 0, (1,)), "offset"),
        (Tile("w", (0,), (2,), -1, (1,)), "local_offset"),
        (Tile("w", (0,), (2,), 0, (1,), Repeat(0, 2, 1, 2)), "overlaps itself"),
        (Tile("w", (0,), (2,), 0, (1,), Repeat(1, 2, 2, 2)), "needs a dim below 1"),
        (Tile("w", (0,), (2**49,), 0, (1,)), "size"),
    ],
)
def test_impossible_tiles_are_refused(tile: Tile, why: str) -> None:
    assert why in refusal([Roster(0, [meta("w", (4,), tiles=(tile,), global_shape=(8,))])])


def test_what_a_source_holds_twice_it_gives_once() -> None:
    """One expert in two places (EPLB), or an engine as a source."""
    found = rosters([replicated("v", (4,), [0], resolved_name="w"), replicated("w", (4,), [0])], [])
    found[0] = replace(found[0], destination=[meta("w", (4,), 0)])
    assert len(plan_copies(found).table) == 1


def test_tiles_that_stop_short_of_the_tensor_are_refused_unless_declared() -> None:
    short = meta("w", (3,), tiles=(Tile("w", (0,), (3,), 0, (1,)),))
    said = refusal(pair(meta("w", (4,)), short))
    assert "reach to (4,)" in said and "(3,)" in said and "global_shape" in said
    assert len(plan_copies(pair(meta("w", (4,)), replace(short, global_shape=(4,)))).table) == 1


def test_a_tensor_with_another_number_of_dims_is_refused() -> None:
    said = refusals(pair(meta("w", (4, 1)), meta("w", (4,))))
    assert all(line.startswith("w: ") for line in said)
