"""What is said of tensors that ranks describe differently, and that what it says to write is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from refitd import ParameterMetadata, PlanError, Roster
from refitd.describe.renames import rename
from refitd.names import Padded
from refitd.plan.build import plan_copies
from tests.support.layouts import meta, tp

WORDS = "embedding.word_embeddings.weight"
Side = dict[int, Sequence[ParameterMetadata]]


def cut(name: str, rows: int, ways: int, first: int = 0) -> Side:
    ranks = range(first, first + ways)
    return {rank: [m] for rank, m in tp(name, (rows // ways, 5), ranks).items()}


def named(side: Side, rows: int, *, is_target: bool) -> Side:
    names = {WORDS: Padded(WORDS, rows=rows), "{rest}": "{rest}"}
    return {rank: rename(metas, names, is_target=is_target) for rank, metas in side.items()}


def planned(source: Side, destination: Side) -> int:
    rosters = [Roster(rank, source=tuple(m)) for rank, m in source.items()]
    rosters += [Roster(rank, destination=tuple(m)) for rank, m in destination.items()]
    return plan_copies(rosters).table.total_bytes


def refused(source: Side, destination: Side) -> str:
    with pytest.raises(PlanError) as caught:
        planned(source, destination)
    (line,) = caught.value.violations
    return line


@pytest.mark.parametrize(("mine", "theirs"), [((12, 2), (16, 4)), ((16, 4), (12, 2)), ((12, 1), (16, 1))])
def test_vocabularies_padded_differently_are_refused_with_the_names_to_write(
    mine: tuple[int, int], theirs: tuple[int, int]
) -> None:
    source, destination = cut(WORDS, *mine), cut(WORDS, *theirs, first=10)
    said = refused(source, destination)
    assert f"({mine[0]}, 5) on rank 0 (source), ({theirs[0]}, 5) on rank 10 (destination)" in said
    assert "looks like a vocabulary padded to 16 rows on one side and 12 on the other" in said
    assert f"names={{'{WORDS}': Padded('{WORDS}', rows=N), '{{rest}}': '{{rest}}'}}" in said
    assert "N is the tokenizer's size, at most 12" in said
    ten = named(source, 10, is_target=False), named(destination, 10, is_target=True)
    assert planned(*ten) == 10 * 5 * 2


def test_the_real_rows_are_named_if_one_side_has_stated_them() -> None:
    source, destination = cut(WORDS, 12, 2), cut(WORDS, 16, 4, first=10)
    for said in (
        refused(named(source, 10, is_target=False), destination),
        refused(source, named(destination, 10, is_target=True)),
    ):
        assert "rows=10)" in said and "10 rows are real, as the padded ranks of the other side say" in said


def test_other_tensors_of_other_sizes_are_not_taken_for_vocabularies() -> None:
    said = refused(cut("fc.weight", 12, 2), cut("fc.weight", 16, 4, first=10))
    assert "check the parallel groups; if a tensor is only some rows of this one" in said
    assert "Part('fc.weight', rows=..., first=..., whole=16)" in said
    said = refused({0: [meta("fc.weight", (4, 5))]}, {1: [meta("fc.weight", (4, 6))]})
    assert said.endswith("it must be the same everywhere, check the parallel groups")
