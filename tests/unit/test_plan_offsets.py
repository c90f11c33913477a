"""Plans against offsets worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

from refitd import Repeat, Roster, Tile
from refitd.plan.build import plan_copies
from tests.support.layouts import meta, replicated, rosters, tp

# (src rank, dst rank, size, src offset, src stride, dst offset, dst stride)
Copy = tuple[int, int, list[int], int, list[int], int, list[int]]


def copies(found: Sequence[Roster]) -> list[Copy]:
    table = plan_copies(found).table
    return sorted(
        (
            int(table.src_rank[i]),
            int(table.dst_rank[i]),
            table.size[i].tolist(),
            int(table.src_offset[i]),
            table.src_stride[i].tolist(),
            int(table.dst_offset[i]),
            table.dst_stride[i].tolist(),
        )
        for i in range(len(table))
    )


def test_tp2_to_tp4_halves_each_shard() -> None:
    # [8, 4]: rank 0 holds rows 0:4, rank 1 rows 4:8; ranks 2..5 want two rows each
    found = rosters([tp("w", (4, 4), [0, 1])], [tp("w", (2, 4), [2, 3, 4, 5])])
    assert copies(found) == [
        (0, 2, [2, 4], 0, [4, 1], 0, [4, 1]),
        (0, 3, [2, 4], 8, [4, 1], 0, [4, 1]),
        (1, 4, [2, 4], 0, [4, 1], 0, [4, 1]),
        (1, 5, [2, 4], 8, [4, 1], 0, [4, 1]),
    ]


def test_tp_on_the_last_dim_reads_columns() -> None:
    # [2, 8]: rank 0 holds columns 0:4; ranks 2..5 want two columns each
    found = rosters([tp("w", (2, 4), [0, 1], dim=1)], [tp("w", (2, 2), [2, 3, 4, 5], dim=1)])
    assert copies(found) == [
        (0, 2, [2, 2], 0, [4, 1], 0, [2, 1]),
        (0, 3, [2, 2], 2, [4, 1], 0, [2, 1]),
        (1, 4, [2, 2], 0, [4, 1], 0, [2, 1]),
        (1, 5, [2, 2], 2, [4, 1], 0, [2, 1]),
    ]


def test_gated_tp2_to_gated_tp4_sends_both_halves_in_one_copy() -> None:
    # 16 rows: gate 0:8, up 8:16. Rank 0 holds 0:4 and 8:12; rank 2 wants 0:2 and 8:10, rank 3 2:4 and 10:12
    found = rosters([tp("w", (8, 1), [0, 1], partition_stride=2)], [tp("w", (4, 1), [2, 3, 4, 5], partition_stride=2)])
    assert copies(found) == [
        (0, 2, [2, 2, 1], 0, [4, 1, 1], 0, [2, 1, 1]),
        (0, 3, [2, 2, 1], 2, [4, 1, 1], 0, [2, 1, 1]),
        (1, 4, [2, 2, 1], 0, [4, 1, 1], 0, [2, 1, 1]),
        (1, 5, [2, 2, 1], 2, [4, 1, 1], 0, [2, 1, 1]),
    ]


def test_gated_tp2_to_plain_tp4_finds_each_quarter_in_one_half() -> None:
    # rank 2 wants 0:4 (rank 0's gate), 3: 4:8 (rank 1's gate), 4: 8:12 (rank 0's up), 5: 12:16 (rank 1's up)
    found = rosters([tp("w", (8,), [0, 1], partition_stride=2)], [tp("w", (4,), [2, 3, 4, 5])])
    assert copies(found) == [
        (0, 2, [4], 0, [1], 0, [1]),
        (0, 4, [4], 4, [1], 0, [1]),
        (1, 3, [4], 0, [1], 0, [1]),
        (1, 5, [4], 4, [1], 0, [1]),
    ]


def test_4_to_3_of_12_cuts_where_neither_divides_the_other() -> None:
    # sources hold 0:3 3:6 6:9 9:12, destinations want 0:4 4:8 8:12
    found = rosters([tp("w", (3,), [0, 1, 2, 3])], [tp("w", (4,), [4, 5, 6])])
    assert copies(found) == [
        (0, 4, [3], 0, [1], 0, [1]),
        (1, 4, [1], 0, [1], 3, [1]),
        (1, 5, [2], 1, [1], 0, [1]),
        (2, 5, [2], 0, [1], 2, [1]),
        (2, 6, [1], 2, [1], 0, [1]),
        (3, 6, [3], 0, [1], 1, [1]),
    ]


def test_uneven_shards_follow_each_other() -> None:
    # 13 rows over 4 ranks as 4, 3, 3, 3; one destination wants them all
    sizes = [4, 3, 3, 3]
    source = {rank: tp("w", (size,), [0, 1, 2, 3])[rank] for rank, size in enumerate(sizes)}
    assert copies(rosters([source], [replicated("w", (13,), [9])])) == [
        (0, 9, [4], 0, [1], 0, [1]),
        (1, 9, [3], 0, [1], 4, [1]),
        (2, 9, [3], 0, [1], 7, [1]),
        (3, 9, [3], 0, [1], 10, [1]),
    ]


def test_partition_sizes_split_each_block_on_its_own() -> None:
    # local blocks 2 and 1 over 2 ranks: global blocks 0:4 and 4:6. Rank 0 holds 0:2 and 4:5, rank 1 2:4 and 5:6
    found = rosters([tp("w", (3,), [0, 1], partition_sizes=[2, 1])], [replicated("w", (6,), [2])])
    assert copies(found) == [
        (0, 2, [1], 2, [1], 4, [1]),
        (0, 2, [2], 0, [1], 0, [1]),
        (1, 2, [1], 2, [1], 5, [1]),
        (1, 2, [2], 0, [1], 2, [1]),
    ]


def test_rows_to_columns_exchanges_blocks() -> None:
    # [4, 4]: rank 0 holds rows 0:2, 1 rows 2:4; rank 2 wants columns 0:2, 3 columns 2:4
    found = rosters([tp("w", (2, 4), [0, 1])], [tp("w", (4, 2), [2, 3], dim=1)])
    assert copies(found) == [
        (0, 2, [2, 2], 0, [4, 1], 0, [2, 1]),
        (0, 3, [2, 2], 2, [4, 1], 0, [2, 1]),
        (1, 2, [2, 2], 0, [4, 1], 4, [2, 1]),
        (1, 3, [2, 2], 2, [4, 1], 4, [2, 1]),
    ]


def test_sharded_to_replicated_gathers_and_back_slices() -> None:
    gather = rosters([tp("w", (2,), [0, 1])], [replicated("w", (4,), [2])])
    assert copies(gather) == [(0, 2, [2], 0, [1], 0, [1]), (1, 2, [2], 0, [1], 2, [1])]
    scatter = rosters([replicated("w", (4,), [2])], [tp("w", (2,), [0, 1])])
    assert copies(scatter) == [(2, 0, [2], 0, [1], 0, [1]), (2, 1, [2], 2, [1], 0, [1])]


def test_a_group_of_one_or_none_is_not_split() -> None:
    alone = {0: meta("w", (4,), 0, is_tp=True, tensor_parallel_group_ranks=[0])}
    unknown = {1: meta("w", (4,), 1, is_tp=True, tensor_parallel_group_ranks=None)}
    assert copies(rosters([alone], [unknown])) == [(0, 1, [4], 0, [1], 0, [1])]


def test_0d_tensors_and_empty_shards_are_planned() -> None:
    step = replicated("step", (), [0]), replicated("step", (), [1])
    empty = replicated("none", (0, 4), [0]), replicated("none", (0, 4), [1])
    assert copies(rosters([step[0], empty[0]], [step[1], empty[1]])) == [(0, 1, [1], 0, [0], 0, [0])]


def test_interleaved_qkv_becomes_separate_tensors() -> None:
    # 2 query groups of 2 q heads, 1 k, 1 v, one row per head: local rows q q k v q q k v; 3 columns
    fused = meta(
        "qkv",
        (8, 3),
        0,
        tiles=(
            Tile("q", (0, 0), (2, 3), 0, (3, 1), Repeat(0, 2, 2, 12)),
            Tile("k", (0, 0), (1, 3), 6, (3, 1), Repeat(0, 2, 1, 12)),
            Tile("v", (0, 0), (1, 3), 9, (3, 1), Repeat(0, 2, 1, 12)),
        ),
    )
    separate = [replicated("q", (4, 3), [1]), replicated("k", (2, 3), [1]), replicated("v", (2, 3), [1])]
    table = plan_copies(rosters([{0: fused}], separate)).table
    rows = {
        table.tensors[table.tensor[i]]: (
            table.size[i].tolist(),
            int(table.src_offset[i]),
            table.src_stride[i].tolist(),
            int(table.dst_offset[i]),
            table.dst_stride[i].tolist(),
        )
        for i in range(len(table))
    }
    # each in one copy: query groups lie 4 rows = 12 elements apart in the source
    assert rows == {
        "q": ([2, 2, 3], 0, [12, 3, 1], 0, [6, 3, 1]),
        "k": ([2, 1, 3], 6, [12, 3, 1], 0, [3, 3, 1]),
        "v": ([2, 1, 3], 9, [12, 3, 1], 0, [3, 3, 1]),
    }


def test_kv_heads_replicated_beyond_their_number_come_from_either_holder() -> None:
    # 2 kv heads over TP4: ranks 0, 1 hold head 0, ranks 2, 3 head 1; two engines want both heads whole
    def head(rank: int, index: int) -> dict[int, object]:
        tile = Tile("k", (index, 0), (1, 4), 0, (4, 1))
        return {rank: meta("k", (1, 4), rank, tiles=(tile,), global_shape=(2, 4))}

    source = [head(0, 0), head(1, 0), head(2, 1), head(3, 1)]
    found = rosters(source, [replicated("k", (2, 4), [8, 9])])  # type: ignore[arg-type]
    assert copies(found) == [
        (0, 8, [1, 4], 0, [4, 1], 0, [4, 1]),
        (1, 9, [1, 4], 0, [4, 1], 0, [4, 1]),
        (2, 8, [1, 4], 0, [4, 1], 4, [4, 1]),
        (3, 9, [1, 4], 0, [4, 1], 4, [4, 1]),
    ]


def test_canonical_names_match_across_pipeline_and_expert_numbering() -> None:
    stage = {1: meta("layers.0.experts.weight0", (4,), 1, resolved_name="layers.16.experts.weight4")}
    engine = {2: meta("model.layers.16.w", (4,), 2, resolved_name="layers.16.experts.weight4")}
    table = plan_copies(rosters([stage], [engine])).table
    assert table.tensors[table.tensor[0]] == "layers.16.experts.weight4"
    assert table.locals[table.src_local[0]] == "layers.0.experts.weight0"
    assert table.locals[table.dst_local[0]] == "model.layers.16.w"


def test_replicas_in_different_layouts_are_cut_and_joined_again() -> None:
    # rank 0 holds all of it, ranks 1 and 2 a half each; rank 0 copies its own in one piece
    sources = [replicated("w", (8,), [0]), tp("w", (4,), [1, 2])]
    assert copies(rosters(sources, [replicated("w", (8,), [0])])) == [(0, 0, [8], 0, [1], 0, [1])]


def test_nothing_to_do_is_a_plan() -> None:
    assert copies([]) == []
    assert copies(rosters([replicated("w", (4,), [0])], [])) == []
    assert copies([Roster(0), Roster(1)]) == []
