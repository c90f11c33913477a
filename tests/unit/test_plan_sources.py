"""The choice of the replica that feeds each destination."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from refitd import ParameterMetadata, PlanError, Roster, select_src_metadata_balanced
from refitd.plan.build import plan_copies
from tests.support.layouts import meta, replicated, rosters, tp

Side = dict[int, ParameterMetadata]


def senders(found: Sequence[Roster]) -> dict[int, int]:
    """Return destination rank -> its only source rank."""
    table = plan_copies(found).table
    assert len(np.unique(table.dst_rank)) == len(table)
    return dict(zip(table.dst_rank.tolist(), table.src_rank.tolist(), strict=True))


def max_over_mean(found: Sequence[Roster]) -> float:
    """Return how much more than the mean the busiest sender sends; local copies are not sent."""
    table = plan_copies(found).table
    remote = table.select(table.src_rank != table.dst_rank)
    sent = np.bincount(remote.src_rank, weights=remote.row_bytes, minlength=1000)
    holders = [r.rank for r in found if r.source]
    return float(sent[holders].max() / sent[holders].mean())


def model(layers: int, world: int, ranks: Sequence[int]) -> list[Side]:
    """Some layers of a transformer, split over consecutive groups of `world` ranks."""
    found: list[Side] = []
    for group in (ranks[i : i + world] for i in range(0, len(ranks), world)):
        for i in range(layers):
            found += [
                tp(f"{i}.qkv", (48 // world, 16), group),
                tp(f"{i}.proj", (16, 16 // world), group, dim=1),
                tp(f"{i}.fc1", (128 // world, 16), group, partition_stride=2),
                tp(f"{i}.fc2", (16, 64 // world), group, dim=1),
                replicated(f"{i}.norm", (16,), group),
            ]
    return found


def test_a_rank_copies_from_itself_when_it_can() -> None:
    assert senders(rosters([replicated("w", (4,), [0, 1, 2])], [replicated("w", (4,), [2, 1])])) == {1: 1, 2: 2}


def test_a_holder_on_the_same_node_comes_before_others() -> None:
    nodes = {0: "a", 1: "b", 2: "a", 3: "b", 4: "b", 5: "c"}
    found = rosters([replicated("w", (4,), [0, 1])], [replicated("w", (4,), [2, 3, 4, 5])], nodes)
    assert senders(found) == {2: 0, 3: 1, 4: 1, 5: 0}


def test_destinations_take_turns_among_replicas() -> None:
    found = rosters([replicated("w", (4,), [0, 1])], [replicated("w", (4,), [2, 3, 4, 5])])
    assert senders(found) == {2: 0, 3: 1, 4: 0, 5: 1}


@pytest.mark.parametrize("engines", [1, 3, 5, 8, 11])
def test_eight_whole_replicas_send_equal_bytes(engines: int) -> None:
    # the destinations of 4 are not a multiple of the 8 senders
    wanted = model(24, 4, range(8, 8 + 4 * engines))
    assert max_over_mean(rosters(model(24, 1, range(8)), wanted)) < 1.10


@pytest.mark.parametrize(("world", "replicas", "engines"), [(2, 3, 4), (4, 5, 3), (8, 2, 7)])
def test_data_parallel_trainers_send_equal_bytes(world: int, replicas: int, engines: int) -> None:
    trainers = world * replicas
    wanted = model(24, 2, range(trainers, trainers + 2 * engines))
    assert max_over_mean(rosters(model(24, world, range(trainers)), wanted)) < 1.10


def test_replicas_in_different_layouts_send_equal_bytes() -> None:
    # a trainer of TP2 DP2 and an engine of TP1 that serves the same version feed five new engines
    sources = [*model(24, 2, range(4)), *model(24, 1, [4])]
    assert max_over_mean(rosters(sources, model(24, 1, range(5, 10)))) < 1.10


def test_a_few_huge_tensors_do_not_unbalance_the_rest() -> None:
    sources = [*model(40, 1, range(4)), replicated("embedding", (512, 16), range(4))]
    wanted = [*model(40, 1, range(4, 9)), replicated("embedding", (512, 16), range(4, 9))]
    assert max_over_mean(rosters(sources, wanted)) < 1.10


def dp_meta(rank: int, group: list[int], **fields: object) -> ParameterMetadata:
    return meta("w", (4,), rank, data_parallel_group_ranks=group, **fields)


def test_select_prefers_the_receivers_own_copy() -> None:
    metas = [dp_meta(rank, [0, 1, 2]) for rank in (0, 1, 2)]
    assert select_src_metadata_balanced(metas, meta("w", (4,), 1), 1).owner_rank == 1


def test_select_takes_data_parallel_groups_in_turn_then_their_members() -> None:
    metas = [dp_meta(rank, group) for group in ([0, 2], [1, 3]) for rank in group]
    picked = [select_src_metadata_balanced(metas, meta("w", (4,), r), r).owner_rank for r in range(8, 16)]
    assert picked == [0, 1, 2, 3, 0, 1, 2, 3]
    assert picked == [select_src_metadata_balanced(metas[::-1], meta("w", (4,), r), r).owner_rank for r in range(8, 16)]


def test_select_keeps_to_the_same_expert_position_where_groups_are_equally_large() -> None:
    metas = [dp_meta(rank, [rank], expert_parallel_group_ranks=[0, 1]) for rank in (0, 1)]
    wanted = meta("w", (4,), 9, expert_parallel_group_ranks=[8, 9])
    assert {select_src_metadata_balanced(metas, wanted, 9).owner_rank for _ in range(4)} == {1}
    wider = meta("w", (4,), 9, expert_parallel_group_ranks=[8, 9, 10, 11])
    assert {select_src_metadata_balanced(metas, wider, r).owner_rank for r in (8, 9)} == {0, 1}


def test_select_from_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="w: no source has it, and rank 3 wants it"):
        select_src_metadata_balanced([], meta("w", (4,), 3), 3)
