"""Refusals of tensors that ranks describe differently; following their advice gives an accepted plan."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from refitd import ParameterMetadata, PlanError, Roster
from refitd.describe.renames import Names, rename
from refitd.names import Padded, Part
from refitd.plan.build import plan_copies
from tests.support.layouts import tp

WORDS = "embedding.word_embeddings.weight"
Side = dict[int, Sequence[ParameterMetadata]]


def cut(name: str, rows: int, ways: int, first: int = 0) -> Side:
    ranks = range(first, first + ways)
    return {rank: [m] for rank, m in tp(name, (rows // ways, 5), ranks).items()}


def renamed(side: Side, names: Names, *, is_target: bool) -> Side:
    return {rank: rename(metas, {**names, "{rest}": "{rest}"}, is_target=is_target) for rank, metas in side.items()}


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
    assert f"names= (refitd.names): {{its name: Padded('{WORDS}', rows=N), '{{rest}}': '{{rest}}'}}" in said
    names = {WORDS: Padded(WORDS, rows=10)}
    assert planned(renamed(source, names, is_target=False), renamed(destination, names, is_target=True)) == 10 * 5 * 2


def test_the_number_of_real_rows_must_be_the_same_on_both_sides() -> None:
    source, destination = cut(WORDS, 12, 2), cut(WORDS, 16, 4, first=10)
    ten = renamed(source, {WORDS: Padded(WORDS, rows=10)}, is_target=False)
    eleven = renamed(destination, {WORDS: Padded(WORDS, rows=11)}, is_target=True)
    for target, rows in ((destination, 16), (eleven, 11)):
        assert f"(10, 5) on rank 0 (source), ({rows}, 5)" in refused(ten, target)


def test_a_destination_may_ask_for_the_first_of_the_real_rows() -> None:
    source = renamed(cut(WORDS, 16, 2), {WORDS: Padded(WORDS, rows=14)}, is_target=False)
    destination = cut(WORDS, 10, 1, first=10)
    assert f"Part({WORDS!r}, rows=, first=, whole=)" in refused(source, destination)
    part = renamed(destination, {WORDS: Part(WORDS, rows=10, whole=14)}, is_target=True)
    assert planned(source, part) == 10 * 5 * 2
