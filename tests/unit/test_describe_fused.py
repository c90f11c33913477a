"""Tensors that hold several canonical tensors, planned to and from separate ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from refitd import ParameterMetadata, PlanError, Repeat, Roster, Tile
from refitd.describe.layout import tiles_of, without_ranks
from refitd.plan.build import plan_copies
from refitd.testing import oracle
from tests.support.fused import interleaved_qkv, packed, packed_qkv, stacked, without_padding
from tests.support.layouts import meta, replicated, rosters, tp
from tests.support.plans import violations

Side = dict[int, ParameterMetadata]
QKV = ("q", "k", "v")
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 8, 4, 2, 3
SHAPES = {"q": (HEADS * HEAD_DIM, HIDDEN), "k": (KV_HEADS * HEAD_DIM, HIDDEN), "v": (KV_HEADS * HEAD_DIM, HIDDEN)}


def checked(sources: list[Side], destinations: list[Side], shapes: dict[str, tuple[int, ...]]) -> int:
    """Plan and compare with slicing; return the number of copies."""
    found = rosters(sources, destinations)
    plan = plan_copies(found)
    oracle.check(plan.table, found, shapes, plan.fills)
    assert violations(plan, found) == []
    return len(plan.table)


def interleaved(ranks: range) -> Side:
    rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM // len(ranks)
    found = {}
    for i, rank in enumerate(ranks):
        tiles = interleaved_qkv(QKV, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, (HIDDEN,), len(ranks), i)
        found[rank] = meta("linear_qkv", (rows, HIDDEN), rank, tiles=tiles)
    return found


def engine(ranks: range) -> Side:
    found = {}
    for i, rank in enumerate(ranks):
        tiles = packed_qkv(QKV, HEADS, KV_HEADS, HEAD_DIM, (HIDDEN,), len(ranks), i)
        rows = sum(tile.size[0] for tile in tiles)
        found[rank] = meta("qkv_proj", (rows, HIDDEN), rank, tiles=tiles)
    return found


def separate(ranks: range) -> list[Side]:
    return [tp(name, (rows // len(ranks), cols), ranks) for name, (rows, cols) in SHAPES.items()]


def test_interleaved_qkv_repeats_by_query_group() -> None:
    # 4 groups of 2 q heads, 2 rows each, over 2 ranks: rank 1 holds groups 2 and 3, 8 rows apart
    q, k, v = interleaved_qkv(QKV, 4, 2, 2, (3,), tp_size=2, tp_index=1)
    assert q == Tile("q", (8, 0), (4, 3), 0, (3, 1), Repeat(0, 2, 4, 24))
    assert k == Tile("k", (4, 0), (2, 3), 12, (3, 1), Repeat(0, 2, 2, 24))
    assert v == Tile("v", (4, 0), (2, 3), 18, (3, 1), Repeat(0, 2, 2, 24))


def test_packed_qkv_replicates_kv_heads_beyond_their_number() -> None:
    tiles = [packed_qkv(QKV, 8, 2, 1, (), 4, i) for i in range(4)]
    assert [t[1].offset for t in tiles] == [(0,), (0,), (1,), (1,)]
    assert tiles[3] == (Tile("q", (6,), (2,), 0, (1,)), Tile("k", (1,), (1,), 2, (1,)), Tile("v", (1,), (1,), 3, (1,)))


@pytest.mark.parametrize("trainers", [1, 2, 4])
@pytest.mark.parametrize("engines", [1, 2, 4, 8])
def test_interleaved_qkv_to_and_from_an_engines_and_separate_ones(trainers: int, engines: int) -> None:
    held, wanted = range(trainers), range(10, 10 + engines)
    checked([interleaved(held)], [engine(wanted)], SHAPES)
    checked([engine(wanted)], [interleaved(held)], SHAPES)
    checked([interleaved(held)], separate(wanted), SHAPES)
    checked(separate(held), [engine(wanted)], SHAPES)


def test_every_query_group_of_a_pair_of_ranks_goes_in_one_copy_per_part() -> None:
    assert checked([interleaved(range(2))], [engine(range(10, 12))], SHAPES) == 2 * 3


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_a_gated_fc1_becomes_gate_and_up(engines: int) -> None:
    shapes = {"fc1": (24, 2), "gate": (12, 2), "up": (12, 2)}
    halves = packed([("gate", 12), ("up", 12)], (2,), 2, 1)
    assert halves == (Tile("gate", (6, 0), (6, 2), 0, (2, 1)), Tile("up", (6, 0), (6, 2), 12, (2, 1)))
    trainer = {
        rank: meta("fc1", (12, 2), rank, tiles=packed([("gate", 12), ("up", 12)], (2,), 2, rank)) for rank in (0, 1)
    }
    wanted = range(10, 10 + engines)
    checked([trainer], [tp("gate", (12 // engines, 2), wanted), tp("up", (12 // engines, 2), wanted)], shapes)


def test_fused_experts_meet_tensors_of_single_experts() -> None:
    names = [f"experts.linear_fc1.weight{i}" for i in range(5)]
    shapes = dict.fromkeys(names, (4, 3))
    # 5 experts over EP2: 3 and 2; an engine fuses them over EP3: 2, 2 and 1
    single = [{0 if i < 3 else 1: meta(name, (4, 3), 0 if i < 3 else 1)} for i, name in enumerate(names)]
    fused = {
        10 + i: meta("w13", (len(part), 4, 3), 10 + i, tiles=stacked(part, (4, 3)))
        for i, part in enumerate((names[:2], names[2:4], names[4:]))
    }
    checked(single, [fused], shapes)
    checked([fused], single, shapes)


def test_vocabularies_padded_differently_meet_in_the_true_one() -> None:
    # 10 rows, padded to 12 over TP2 here and to 16 over TP4 there
    held = {r: without_padding(m, (10, 3)) for r, m in tp("embedding", (6, 3), range(2)).items()}
    wanted = {r: without_padding(m, (10, 3), fill=0.0) for r, m in tp("embedding", (4, 3), range(10, 14)).items()}
    assert held[1].tiles == (Tile("embedding", (6, 0), (4, 3), 0, (3, 1)),)
    assert wanted[13].tiles == ()
    checked([held], [wanted], {"embedding": (10, 3)})


def test_padding_that_is_not_declared_is_refused() -> None:
    with pytest.raises(PlanError, match=r"global shape is \(12, 3\).*\(16, 3\)"):
        plan_copies(rosters([tp("embedding", (6, 3), range(2))], [tp("embedding", (4, 3), range(10, 14))]))


def test_padding_of_a_tensor_in_parts_is_cut_part_by_part() -> None:
    shard = tp("w", (4,), [0, 1], partition_stride=2)[1]  # rows 2:4 and 6:8
    assert without_padding(shard, (7,)).tiles == (Tile("w", (2,), (2,), 0, (1,)), Tile("w", (6,), (1,), 2, (1,)))


def test_what_does_not_divide_or_contain_is_refused() -> None:
    with pytest.raises(PlanError, match="q: 4 query groups do not divide over 3 ranks"):
        interleaved_qkv(QKV, 4, 2, 2, (3,), 3, 0)
    with pytest.raises(PlanError, match="k: 4 kv heads do not divide over 6 ranks"):
        packed_qkv(QKV, 12, 4, 2, (3,), 6, 0)
    with pytest.raises(PlanError, match="gate: 5 rows do not divide over 2 ranks"):
        packed([("gate", 5)], (), 2, 0)
    with pytest.raises(PlanError, match=r"padded shape is \(12, 3\), expected \(13, 3\) or larger"):
        without_padding(tp("w", (6, 3), range(2))[0], (13, 3))


def test_descriptions_without_ranks_are_equal_where_ranks_hold_the_same() -> None:
    first, second = tp("w", (4, 2), [0, 1]), tp("w", (4, 2), [2, 3])
    assert without_ranks([first[1]]) == without_ranks([second[3]])
    assert without_ranks([first[0]]) != without_ranks([first[1]])
    assert tiles_of(without_ranks([first[1]])[0]) == tiles_of(first[1])


def test_a_plan_is_the_same_with_and_without_ranks() -> None:
    found = rosters(
        [tp("w", (4, 2), [0, 1], partition_stride=2), replicated("n", (3,), [0, 1])],
        [tp("w", (2, 2), [4, 5, 6, 7]), replicated("n", (3,), [4, 5, 6, 7])],
    )
    bare = [Roster(r.rank, without_ranks(r.source), without_ranks(r.destination), r.node, r.label) for r in found]
    assert plan_copies(bare).table.to_wire() == plan_copies(found).table.to_wire()


def test_a_shared_description_serves_every_rank() -> None:
    shared = without_ranks([meta("w", (4,), 0)])
    found = [Roster(0, shared), Roster(1, (), shared), Roster(2, shared, shared)]
    table = plan_copies(found).table
    assert list(zip(table.src_rank.tolist(), table.dst_rank.tolist(), strict=True)) == [(0, 1), (2, 2)]
    bad = (replace(shared[0], shape=(-1,)),)
    with pytest.raises(PlanError, match="local shape"):
        plan_copies([Roster(0, bad), Roster(1, (), bad)])
