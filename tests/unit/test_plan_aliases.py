"""Tied embeddings: read under the name that the source has, if either end declares the tie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from refitd import ParameterMetadata, Roster, Tile
from refitd.describe.layout import without_ranks
from refitd.plan.build import plan_copies
from refitd.protocol.shards import metadata_of, shard_of
from tests.support.layouts import meta, refusals, replicated, rosters, tp
from tests.support.plans import violations

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


TWICE = [(EMBEDDING, EMBEDDING, EMBEDDING, 0), (EMBEDDING, EMBEDDING, OUTPUT, 0)]
EACH = [(EMBEDDING, EMBEDDING, EMBEDDING, 0), (OUTPUT, OUTPUT, OUTPUT, 0)]
ALIASED = [meta(EMBEDDING, (4, 2), 1), meta(OUTPUT, (4, 2), 1, aliases=(EMBEDDING,))]
UNEVEN = {r: tp(OUTPUT, (n,), [1, 2])[r] for r, n in ((1, 3), (2, 2))}
TILED = meta("module.embed", (4,), 0, tiles=(Tile(EMBEDDING, (0,), (4,), 0, (1,)),), aliases=(OUTPUT,))
FED: dict[str, tuple[list[Roster], list[Copy]]] = {
    "a tied source, an untied destination": ([Roster(0, [tied(0)]), Roster(1, (), both(1))], TWICE),
    "the destination says so": ([Roster(0, [meta(EMBEDDING, (4, 2), 0)]), Roster(1, (), ALIASED)], TWICE),
    "a tied destination is fed from the name that the source has": (
        [Roster(0, [meta(OUTPUT, (4, 2), 0)]), Roster(1, (), [tied(1)])],
        [(OUTPUT, OUTPUT, EMBEDDING, 0)],
    ),
    "both ends": ([Roster(0, [tied(0)]), Roster(1, (), [tied(1)])], TWICE[:1]),
    "not needed": ([Roster(0, [tied(0)]), Roster(1, (), [meta(EMBEDDING, (4, 2), 1)])], TWICE[:1]),
    "a source has both": ([Roster(0, [tied(0), meta(OUTPUT, (4, 2), 0)]), Roster(1, (), both(1))], EACH),
    "another source, as the last pipeline stage, has the other": (
        [Roster(0, [tied(0)]), Roster(1, [meta(OUTPUT, (4, 2), 1)]), Roster(2, (), both(2))],
        EACH,
    ),
    "uneven shards": (
        rosters([replicated(EMBEDDING, (5,), [0], aliases=(OUTPUT,))], [UNEVEN]),
        [(EMBEDDING, EMBEDDING, OUTPUT, 0), (EMBEDDING, EMBEDDING, OUTPUT, 0)],
    ),
    "three names": (
        [
            Roster(0, [meta("a", (4,), 0, aliases=("b", "c"))]),
            Roster(1, (), [meta("c", (4,), 1), meta("b", (4,), 1, aliases=("a",))]),
        ],
        [("a", "a", "b", 0), ("a", "a", "c", 0)],
    ),
    "tiles": ([Roster(0, [TILED]), Roster(1, (), [meta(OUTPUT, (4,), 1)])], [(EMBEDDING, "module.embed", OUTPUT, 0)]),
}


@pytest.mark.parametrize("tie", FED)
def test_a_tie_that_either_end_declares_feeds_each_name_from_one_that_a_source_has(tie: str) -> None:
    found, expected = FED[tie]
    assert copies(found) == expected


def chain(*links: tuple[str, tuple[str, ...]]) -> list[Roster]:
    held = [meta(name, (4,), 0, aliases=aliases) for name, aliases in links]
    return [Roster(0, held), Roster(1, (), [meta("c", (4,), 1)])]


FUSED = (Tile("a", (0,), (3,), 0, (1,)), Tile("b", (0,), (3,), 3, (1,)))
CHAINED = "a: its aliases form a chain or a cycle (rank 0 (source) ties a to b; rank 0 (source) ties"
REFUSED: dict[str, tuple[list[Roster], str, str]] = {
    "a chain": (chain(("a", ("b",)), ("b", ("c",))), CHAINED, "expected one declaration with all of a, b, c"),
    "a cycle": (
        chain(("a", ("b",)), ("b", ("c",)), ("c", ("a",))),
        CHAINED,
        "expected one declaration with all of a, b, c",
    ),
    "itself": (
        [Roster(0, [meta("a", (4,), 0, aliases=("a",))])],
        "rank 0 source: a: it is declared an alias of itself",
        "",
    ),
    "several tensors in one": (
        [Roster(0, [meta("ab", (6,), 0, tiles=FUSED, aliases=("c",))])],
        "rank 0 source: ab: it has aliases ('c',) and holds several canonical tensors",
        "",
    ),
    "another shape": (
        [Roster(0, [tied(0)]), Roster(1, (), [meta(OUTPUT, (5, 2), 1)])],
        f"{EMBEDDING}: global shape is (4, 2) on rank 0 (source), (5, 2) on rank 1 (destination)",
        f"{OUTPUT} is fed from it as its alias",
    ),
    "a bad tensor, whose tie is not reported again": (
        [Roster(0, [replace(tied(0), shape=(-1,))]), Roster(1, (), both(1))],
        "rank 0 source: embedding.weight: local shape",
        "",
    ),
    "no source": (
        [Roster(0, [meta("x", (4,), 0)]), Roster(1, (), [meta(OUTPUT, (4,), 1, aliases=("nowhere", "elsewhere"))])],
        f"{OUTPUT}: no source has it, nor elsewhere, nowhere, which rank 1 (destination) declares to be the same "
        "weight; check the names, or which source ranks have registered",
        "",
    ),
    **{
        f"no names: {aliases!r}": ([Roster(0, [meta("a", (4,), 0, aliases=aliases)])], "", "a tuple of canonical names")
        for aliases in (["b"], ("",), (1,), "b")
    },
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_tie_that_cannot_be_is_refused_by_name(why: str) -> None:
    found, start, words = REFUSED[why]
    (said,) = refusals(found)
    assert said.startswith(start) and words in said


def test_declarations_survive_the_wire_and_compaction() -> None:
    held = [meta("a", (4,), 0, aliases=("b", "c"), fill=1.5)]
    assert metadata_of(shard_of(held), owner_rank=0) == held
    bare = without_ranks(held)
    assert (bare[0].aliases, bare[0].fill) == (("b", "c"), 1.5)
