"""Tied embeddings: fed from the name that a source has, whichever end knows of the tie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from refitd import ParameterMetadata, PlanError, Roster, Tile
from refitd.describe.compact import without_ranks
from refitd.describe.fused import without_padding
from refitd.plan.build import plan_copies, plan_reshard
from refitd.plan.validate import violations
from refitd.protocol.shards import metadata_of, shard_of
from tests.support.layouts import meta, refusals, replicated, rosters, tp

EMBEDDING, OUTPUT = "embedding.weight", "output.weight"

# (canonical name, source's local tensor, destination's local tensor, offset there)
Copy = tuple[str, str, str, int]


def copies(found: list[Roster]) -> list[Copy]:
    plan = plan_copies(found)
    table = plan.table
    assert violations(plan, found) == []
    assert violations(table, found, plan.fills) == []
    return sorted(
        (
            table.tensors[table.tensor[i]],
            table.locals[table.src_local[i]],
            table.locals[table.dst_local[i]],
            int(table.dst_offset[i]),
        )
        for i in range(len(table))
    )


def both(rank: int) -> list[ParameterMetadata]:
    return [meta(EMBEDDING, (4, 2), rank), meta(OUTPUT, (4, 2), rank)]


def tied(rank: int) -> ParameterMetadata:
    return meta(EMBEDDING, (4, 2), rank, aliases=(OUTPUT,))


def test_a_tied_source_feeds_both_of_an_untied_destination() -> None:
    assert copies([Roster(0, [tied(0)]), Roster(1, (), both(1))]) == [
        (EMBEDDING, EMBEDDING, EMBEDDING, 0),
        (EMBEDDING, EMBEDDING, OUTPUT, 0),
    ]


def test_the_destination_may_say_so_instead() -> None:
    wanted = [meta(EMBEDDING, (4, 2), 1), meta(OUTPUT, (4, 2), 1, aliases=(EMBEDDING,))]
    assert copies([Roster(0, [meta(EMBEDDING, (4, 2), 0)]), Roster(1, (), wanted)]) == [
        (EMBEDDING, EMBEDDING, EMBEDDING, 0),
        (EMBEDDING, EMBEDDING, OUTPUT, 0),
    ]


def test_a_tied_destination_is_fed_from_the_name_the_source_has() -> None:
    assert copies([Roster(0, [meta(OUTPUT, (4, 2), 0)]), Roster(1, (), [tied(1)])]) == [(OUTPUT, OUTPUT, EMBEDDING, 0)]


def test_tied_at_both_ends_is_one_copy() -> None:
    assert copies([Roster(0, [tied(0)]), Roster(1, (), [tied(1)])]) == [(EMBEDDING, EMBEDDING, EMBEDDING, 0)]


def test_what_a_source_has_under_both_names_is_used_as_it_is() -> None:
    held = [tied(0), meta(OUTPUT, (4, 2), 0)]
    assert copies([Roster(0, held), Roster(1, (), both(1))]) == [
        (EMBEDDING, EMBEDDING, EMBEDDING, 0),
        (OUTPUT, OUTPUT, OUTPUT, 0),
    ]


def test_another_source_with_the_other_name_is_used_as_it_is() -> None:
    # the last stage of a pipeline has a copy of its own
    found = [Roster(0, [tied(0)]), Roster(1, [meta(OUTPUT, (4, 2), 1)]), Roster(2, (), both(2))]
    assert [row[:3] for row in copies(found)] == [(EMBEDDING, EMBEDDING, EMBEDDING), (OUTPUT, OUTPUT, OUTPUT)]


def test_ties_hold_for_every_layout() -> None:
    # rows 0:4 4:8 at the source; each of 4 ranks wants two rows of both, in tensors of different shapes
    source = tp(EMBEDDING, (4, 2), [0, 1], aliases=(OUTPUT,))
    output = {r: replace(m, tiles=None) for r, m in tp(OUTPUT, (2, 2), [2, 3, 4, 5]).items()}
    found = rosters([source], [tp(EMBEDDING, (2, 2), [2, 3, 4, 5]), output])
    assert len(copies(found)) == 8
    ops = plan_reshard(found)[3].recv_ops
    assert [(op.param_name, op.peer_rank, op.peer_slice[0]) for op in ops] == [
        (EMBEDDING, 0, slice(2, 4)),
        (OUTPUT, 0, slice(2, 4)),
    ]
    assert len({op.task_id for op in ops}) == 2


def test_uneven_shards_of_an_alias_follow_each_other() -> None:
    output = {r: tp(OUTPUT, (n,), [1, 2])[r] for r, n in ((1, 3), (2, 2))}
    found = rosters([replicated(EMBEDDING, (5,), [0], aliases=(OUTPUT,))], [output])
    assert copies(found) == [(EMBEDDING, EMBEDDING, OUTPUT, 0), (EMBEDDING, EMBEDDING, OUTPUT, 0)]


def test_padding_of_an_alias_is_filled() -> None:
    padded = without_padding(meta(OUTPUT, (6, 2), 1), (4, 2), 0.0)
    found = [Roster(0, [tied(0)]), Roster(1, (), [padded])]
    assert copies(found) == [(EMBEDDING, EMBEDDING, OUTPUT, 0)]
    assert plan_copies(found).fills.offset.tolist() == [8]


def test_an_alias_inside_a_fused_tensor_is_fed() -> None:
    tiles = (Tile(EMBEDDING, (0,), (3,), 0, (1,)), Tile(OUTPUT, (0,), (3,), 3, (1,)))
    found = [Roster(0, [meta(EMBEDDING, (3,), 0, aliases=(OUTPUT,))]), Roster(1, (), [meta("both", (6,), tiles=tiles)])]
    assert copies(found) == [(EMBEDDING, EMBEDDING, "both", 0), (EMBEDDING, EMBEDDING, "both", 3)]
    ops = plan_reshard(found)[1].recv_ops
    assert [(op.my_slice, op.peer_slice) for op in ops] == [
        ((slice(0, 3),), (slice(0, 3),)),
        ((slice(3, 6),), (slice(0, 3),)),
    ]


def test_three_names_of_one_weight() -> None:
    held = meta("a", (4,), 0, aliases=("b", "c"))
    found = [Roster(0, [held]), Roster(1, (), [meta("c", (4,), 1), meta("b", (4,), 1, aliases=("a",))])]
    assert copies(found) == [("a", "a", "b", 0), ("a", "a", "c", 0)]


def test_aliases_are_declared_by_tiles_too() -> None:
    tile = Tile(EMBEDDING, (0,), (4,), 0, (1,))
    held = meta("module.embed", (4,), 0, tiles=(tile,), aliases=(OUTPUT,))
    assert copies([Roster(0, [held]), Roster(1, (), [meta(OUTPUT, (4,), 1)])]) == [
        (EMBEDDING, "module.embed", OUTPUT, 0)
    ]


def test_the_order_of_rosters_and_who_says_it_change_nothing() -> None:
    found = [Roster(0, [tied(0)]), Roster(1, (), both(1)), Roster(2, (), both(2))]
    assert plan_copies(found).table.to_wire() == plan_copies(found[::-1]).table.to_wire()
    silent = [Roster(0, [meta(EMBEDDING, (4, 2), 0)]), *found[1:]]
    with pytest.raises(PlanError):
        plan_copies(silent)


def test_a_tie_that_no_source_knows_is_refused_with_all_names() -> None:
    wanted = meta(OUTPUT, (4,), 1, aliases=("nowhere", "elsewhere"))
    assert refusals([Roster(0, [meta("x", (4,), 0)]), Roster(1, (), [wanted])]) == [
        f"{OUTPUT}: no source has it, nor elsewhere, nowhere, which rank 1 (destination) declares to be the same "
        "weight; check the names, or which source ranks have registered"
    ]


def test_a_tie_that_is_not_needed_is_no_problem() -> None:
    assert copies([Roster(0, [tied(0)]), Roster(1, (), [meta(EMBEDDING, (4, 2), 1)])]) != []


@pytest.mark.parametrize("links", [[("a", ("b",)), ("b", ("c",))], [("a", ("b",)), ("b", ("c",)), ("c", ("a",))]])
def test_chains_and_cycles_are_refused_with_all_names(links: list[tuple[str, tuple[str, ...]]]) -> None:
    held = [meta(name, (4,), 0, aliases=aliases) for name, aliases in links]
    (said,) = refusals([Roster(0, held), Roster(1, (), [meta("c", (4,), 1)])])
    assert said.startswith("a: its aliases form a chain or a cycle (rank 0 (source) ties a to b; rank 0 (source) ties")
    assert "expected one declaration with all of a, b, c" in said


def test_an_alias_of_itself_is_refused() -> None:
    (said,) = refusals([Roster(0, [meta("a", (4,), 0, aliases=("a",))])])
    assert said.startswith("rank 0 source: a: it is declared an alias of itself")


@pytest.mark.parametrize("aliases", [["b"], ("",), (1,), "b"])
def test_aliases_that_are_no_names_are_refused(aliases: object) -> None:
    (said,) = refusals([Roster(0, [meta("a", (4,), 0, aliases=aliases)])])
    assert "expected a tuple of canonical names" in said


def test_aliases_of_several_tensors_in_one_are_refused() -> None:
    tiles = (Tile("a", (0,), (3,), 0, (1,)), Tile("b", (0,), (3,), 3, (1,)))
    (said,) = refusals([Roster(0, [meta("ab", (6,), 0, tiles=tiles, aliases=("c",))])])
    assert said.startswith("rank 0 source: ab: it has aliases ('c',) and holds several canonical tensors")


def test_a_shape_that_differs_is_refused_with_both_names() -> None:
    (said,) = refusals([Roster(0, [tied(0)]), Roster(1, (), [meta(OUTPUT, (5, 2), 1)])])
    assert said.startswith(f"{EMBEDDING}: global shape is (4, 2) on rank 0 (source), (5, 2) on rank 1 (destination)")
    assert said.endswith(f"{OUTPUT} is fed from it as its alias")


def test_what_is_tied_to_a_bad_tensor_is_not_reported_again() -> None:
    bad = replace(tied(0), shape=(-1,))
    (said,) = refusals([Roster(0, [bad]), Roster(1, (), both(1))])
    assert said.startswith("rank 0 source: embedding.weight: local shape")


def test_declarations_survive_the_wire_and_compaction() -> None:
    held = [meta("a", (4,), 0, aliases=("b", "c"), fill=1.5)]
    assert metadata_of(shard_of(held), owner_rank=0) == held
    bare = without_ranks(held)
    assert (bare[0].aliases, bare[0].fill) == (("b", "c"), 1.5)
