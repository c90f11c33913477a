"""Registered shards become rosters: ranks with equal shards share metadata, others do not."""

from __future__ import annotations

import pytest

from refitd import ParameterMetadata, PlanError
from refitd.coordinator.descriptions import Registered, ShardReader
from refitd.plan.build import plan_copies
from refitd.protocol.base import digest_of
from refitd.protocol.shards import shard_of


def split(rank: int, group: list[int], rows: int) -> ParameterMetadata:
    return ParameterMetadata(
        "w", (rows, 4), "float32", 4, is_tp=True, owner_rank=rank, tensor_parallel_group_ranks=group, resolved_name="w"
    )


def pool(metadata: list[ParameterMetadata], is_source: bool, first: int = 0) -> list[Registered]:
    found = []
    for m in metadata:
        shard = shard_of([m])
        rank = first + (m.owner_rank or 0)
        found.append(Registered(rank, f"rank {rank}", "n", is_source, digest_of(shard), shard))
    return found


WHOLE = ParameterMetadata("w", (8, 4), "float32", 4, owner_rank=0, resolved_name="w")


def test_ranks_that_hold_the_same_share_one_sequence() -> None:
    ranks = [split(rank, [rank // 2 * 2, rank // 2 * 2 + 1], 4) for rank in range(6)]
    rosters = ShardReader().rosters([pool(ranks, True), pool([WHOLE], False, 6)])
    assert len({id(r.source) for r in rosters[:6]}) == 2
    assert rosters[0].source is rosters[2].source is rosters[4].source
    plan = plan_copies(rosters)
    assert plan.table.total_bytes == 8 * 4 * 4


def test_shards_that_are_cut_unevenly_keep_their_groups() -> None:
    ranks = [split(0, [0, 1], 5), split(1, [0, 1], 3)]
    rosters = ShardReader().rosters([pool(ranks, True), pool([WHOLE], False, 2)])
    assert [m.tensor_parallel_group_ranks for r in rosters[:2] for m in r.source] == [[0, 1], [0, 1]]
    table = plan_copies(rosters).table
    assert sorted(zip(table.src_rank.tolist(), table.dst_offset.tolist(), strict=True)) == [(0, 0), (1, 20)]


def test_a_description_with_problems_is_refused_by_the_planner_with_the_rank() -> None:
    wrong = split(0, [3, 4], 4)
    rosters = ShardReader().rosters([pool([wrong], True), pool([WHOLE], False, 1)])
    with pytest.raises(PlanError, match="rank 0"):
        plan_copies(rosters)


def test_what_is_not_kept_is_read_again() -> None:
    reader, ranks = ShardReader(), pool([WHOLE], True)
    first = reader.rosters([ranks])[0].source
    assert reader.rosters([ranks])[0].source is first
    reader.keep({ranks[0].digest})
    assert reader.rosters([ranks])[0].source is first
    reader.keep(set())
    assert reader.rosters([ranks])[0].source is not first
