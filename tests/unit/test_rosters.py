"""Registered shards become rosters: ranks with equal shards share metadata, others do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from refitd import ParameterMetadata, PlanError
from refitd.coordinator.descriptions import Lists, Registered, ShardReader, unpack_shard
from refitd.describe.layout import without_ranks
from refitd.describe.metadata import Tile
from refitd.plan.build import plan_copies
from refitd.protocol.base import digest_of, pack
from refitd.protocol.shards import metadata_of, shard_of


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


def layers(rank: int, shape: tuple[int, ...] = (4, 4), **fields: object) -> list[ParameterMetadata]:
    """Return three split layers, two of one kind, beside tensors with an alias, with tiles, and not split."""
    cut = replace(split(rank, [0, 1], 4), shape=shape, **fields)
    tiled = Tile("tiled", (0,), (3,), 0, (1,))
    named = [replace(cut, name=f"layers.{i}.w", resolved_name=f"model.{i}.w") for i in range(2)]
    alone = [
        replace(cut, name="tied", resolved_name="tied", aliases=("head",)),
        replace(WHOLE, name="t", shape=(3,), owner_rank=rank, resolved_name=None, tiles=(tiled,)),
        replace(WHOLE, name="norm", owner_rank=rank, resolved_name=None),
        replace(cut, name="wide", resolved_name="wide", shape=(*shape[:-1], 8)),
    ]
    return [named[0], *alone, named[1]]


def test_ranks_that_differ_in_their_groups_share_one_list() -> None:
    lists, shards = Lists(), [shard_of(layers(rank)) for rank in range(2)]
    reads = [unpack_shard(pack(shard), digest_of(shard), lists) for shard in shards]
    assert reads[0].listed is reads[1].listed and reads[0].shard == shards[0] != shards[1] == reads[1].shard
    for rank, read in enumerate(reads):
        described = without_ranks(metadata_of(shards[rank], rank))
        assert tuple(read.compact) == described == read.compact[:] and read.compact[-1] == described[-1]
        assert len(read.compact.kinds) == len(described) - 1
    del reads, read
    assert not lists
    wanted = [replace(m, owner_rank=2) for m in [*layers(0)[2:4]]]
    wanted += [
        replace(WHOLE, name=name, resolved_name=None, owner_rank=2) for name in ("model.0.w", "head", "model.1.w")
    ]
    engine = Registered(2, "e", "n", False, "engine", shard_of(wanted))
    trainer = [Registered(rank, f"rank {rank}", "n", True, str(rank), shard) for rank, shard in enumerate(shards)]
    one = plan_copies(ShardReader().rosters([trainer, [engine]]))
    rosters = [
        *(replace(r, source=tuple(r.source)) for r in ShardReader().rosters([trainer])),
        *ShardReader().rosters([[engine]]),
    ]
    assert one.digest == plan_copies(rosters).digest and one.table.total_bytes == 4 * (3 * 8 * 4 + 3 + 32)


def test_every_tensor_of_a_kind_with_problems_is_named() -> None:
    source = [Registered(0, "rank 0", "n", True, "s", shard_of(layers(0, dtype="float64", element_size=8)))]
    wrong = [replace(m, owner_rank=1) for m in layers(1, shape=(3, 4), partition_stride=2)]
    with pytest.raises(PlanError) as caught:
        plan_copies(ShardReader().rosters([source, [Registered(1, "e", "n", False, "d", shard_of(wrong))]]))
    said = "\n".join(caught.value.violations)
    assert all(f"model.{i}.w: dim 0 has 3 elements here" in said for i in range(2))
