"""Plans of equal descriptions on other ranks: the cache of the last plan changes no plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.models import small_case
from benchmarks.plan import registrations, rosters_from
from refitd.describe.metadata import ParameterMetadata, Roster
from refitd.errors import PlanError
from refitd.plan.build import Remembered, plan_copies

Rosters = list[Roster]


@pytest.fixture(scope="module")
def rosters() -> Rosters:
    """Return a trainer of 32 ranks and two engines of 16 ranks with equal descriptions."""
    return rosters_from(registrations(small_case()))


def joined(rosters: Rosters) -> Rosters:
    """Return them with one more engine."""
    return rosters + [replace(each, rank=each.rank + 16, node=f"new{each.rank}") for each in rosters[-16:]]


CHANGES: dict[str, Callable[[Rosters], Rosters]] = {
    "nothing": lambda rosters: rosters,
    "an engine joins": joined,
    "an engine leaves": lambda rosters: rosters[:-16],
    "the first engine leaves": lambda rosters: rosters[:32] + rosters[48:],
    "ranks have other numbers": lambda rosters: [replace(each, rank=3 * each.rank) for each in rosters],
    "ranks are elsewhere": lambda rosters: [replace(each, node=f"n{each.rank % 5}") for each in rosters],
    "another order": lambda rosters: rosters[::-1],
    "one rank is described otherwise": lambda rosters: [*rosters[:-1], other(rosters[-1])],
}


def other(roster: Roster) -> Roster:
    """Return a rank without one tensor."""
    return replace(roster, destination=tuple(roster.destination)[1:])


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_the_same_whatever_is_remembered(rosters: Rosters, change: str) -> None:
    remembered = Remembered()
    plan_copies(rosters, remembered)
    changed = CHANGES[change](rosters)
    assert (remembered.again(changed) is None) == (change == "one rank is described otherwise")
    found, want = plan_copies(changed, remembered), plan_copies(changed)
    assert found.digest == want.digest and found.regions.digest == want.regions.digest
    assert found.unused_sources == want.unused_sources
    for column in ("src_rank", "dst_rank", "task_id", "src_offset", "dst_offset", "size"):
        assert np.array_equal(getattr(found.table, column), getattr(want.table, column))
    assert remembered.again(changed) is not None


def test_what_several_sources_hold_is_compared_whatever_is_remembered() -> None:
    def fleet(sources: int) -> Rosters:
        return [Roster(i, source=held) for i in range(sources)] + [Roster(9, destination=held)]

    held = (ParameterMetadata("w", (4, 4), "bfloat16", 2),)
    remembered = Remembered()
    for sources in (1, 2, 3, 1):
        found, want = plan_copies(fleet(sources), remembered), plan_copies(fleet(sources))
        assert found.regions.digest == want.regions.digest
        assert len(found.regions) == (sources > 1)


@pytest.mark.parametrize(
    "bad",
    [
        lambda rosters: [*rosters, rosters[0]],
        lambda rosters: [*rosters, Roster(-1, destination=rosters[-1].destination)],
        lambda rosters: [*rosters, Roster(1000, destination=(*rosters[-1].destination, rosters[-1].destination[0]))],
    ],
)
def test_problems_are_found_whatever_is_remembered(rosters: Rosters, bad: Callable[[Rosters], Rosters]) -> None:
    remembered = Remembered()
    plan_copies(rosters, remembered)
    with pytest.raises(PlanError) as without:
        plan_copies(bad(rosters))
    with pytest.raises(PlanError) as found:
        plan_copies(bad(rosters), remembered)
    assert str(found.value) == str(without.value)


@pytest.mark.parametrize("kind", ["a list", "its rank", "its group"])
def test_what_names_ranks_or_may_change_is_not_remembered(kind: str) -> None:
    def held(rank: int) -> tuple[ParameterMetadata, ...] | list[ParameterMetadata]:
        group = [0, 1] if rank < 2 else [2, 3]
        metas = [
            ParameterMetadata("w", (4, 4), "bfloat16", 2, is_tp=kind == "its group", owner_rank=rank)
            if kind != "a list"
            else ParameterMetadata("w", (4, 4), "bfloat16", 2)
        ]
        if kind == "its group":
            metas = [replace(m, owner_rank=None, tensor_parallel_group_ranks=group) for m in metas]
        return metas if kind == "a list" else tuple(metas)

    rosters = [Roster(r, source=held(r)) for r in (0, 1)] + [Roster(r, destination=held(r)) for r in (2, 3)]
    remembered = Remembered()
    plan_copies(rosters, remembered)
    assert remembered.again(rosters) is None


def test_a_fleet_is_remembered_while_who_joins_it_is_planned_for(rosters: Rosters) -> None:
    remembered = Remembered()
    plan_copies(rosters, remembered)
    joins = [*rosters[:32], *map(other, rosters[-16:])]
    for _ in range(2):
        plan_copies(joins, remembered)
        assert remembered.again(joined(rosters)) is not None and remembered.again(joins) is not None
