"""Plans by hand: offsets, task ids, the ops of each rank, and the choice of the replica that sends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from refitd import (
    ParameterMetadata,
    PlanError,
    ReshardPlan,
    Roster,
    Tile,
    TransferOp,
    plan_reshard,
    select_src_metadata_balanced,
)
from refitd.plan.build import plan_copies
from refitd.plan.ops import slices_of
from refitd.plan.table import CopyTable
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


def test_gated_tp2_to_plain_tp4_finds_each_quarter_in_one_half() -> None:
    # rank 2 wants 0:4 (rank 0's gate), 3: 4:8 (rank 1's gate), 4: 8:12 (rank 0's up), 5: 12:16 (rank 1's up)
    found = rosters([tp("w", (8,), [0, 1], partition_stride=2)], [tp("w", (4,), [2, 3, 4, 5])])
    assert copies(found) == [
        (0, 2, [4], 0, [1], 0, [1]),
        (0, 4, [4], 4, [1], 0, [1]),
        (1, 3, [4], 0, [1], 0, [1]),
        (1, 5, [4], 4, [1], 0, [1]),
    ]


def test_a_group_of_one_or_none_is_not_split() -> None:
    alone = {0: meta("w", (4,), 0, is_tp=True, tensor_parallel_group_ranks=[0])}
    unknown = {1: meta("w", (4,), 1, is_tp=True, tensor_parallel_group_ranks=None)}
    assert copies(rosters([alone], [unknown])) == [(0, 1, [4], 0, [1], 0, [1])]


def test_0d_tensors_and_empty_shards_are_planned() -> None:
    step = replicated("step", (), [0]), replicated("step", (), [1])
    empty = replicated("none", (0, 4), [0]), replicated("none", (0, 4), [1])
    assert copies(rosters([step[0], empty[0]], [step[1], empty[1]])) == [(0, 1, [1], 0, [0], 0, [0])]


def test_canonical_names_match_across_pipeline_and_expert_numbering() -> None:
    stage = {1: meta("layers.0.experts.weight0", (4,), 1, resolved_name="layers.16.experts.weight4")}
    engine = {2: meta("model.layers.16.w", (4,), 2, resolved_name="layers.16.experts.weight4")}
    table = plan_copies(rosters([stage], [engine])).table
    assert table.tensors[table.tensor[0]] == "layers.16.experts.weight4"
    assert table.locals[table.src_local[0]] == "layers.0.experts.weight0"
    assert table.locals[table.dst_local[0]] == "model.layers.16.w"


def test_nothing_to_do_is_a_plan() -> None:
    assert copies([]) == []
    assert copies(rosters([replicated("w", (4,), [0])], [])) == []
    assert copies([Roster(0), Roster(1)]) == []


# --- Task ids and choices stay the same under another order of rosters, and when a rank is appended. ----


def fleet(engines: int = 3) -> list[Roster]:
    held = [tp("fc1", (8, 4), [0, 1], partition_stride=2), replicated("norm", (4,), [0, 1])]
    wanted = []
    for first in range(2, 2 + 2 * engines, 2):
        ranks = [first, first + 1]
        wanted += [tp("fc1", (8, 4), ranks, partition_stride=2), replicated("norm", (4,), ranks)]
    return rosters(held, wanted)


def ids(table: CopyTable) -> set[tuple[int, int, int, int]]:
    columns = (table.task_id, table.dst_rank, table.dst_local, table.dst_offset)
    return set(zip(*(column.tolist() for column in columns), strict=True))


def test_task_ids_are_unique_and_not_negative() -> None:
    table = plan_copies(fleet(20)).table
    assert len(np.unique(table.task_id)) == len(table)
    assert table.task_id.min() >= 0


def test_an_appended_destination_keeps_existing_task_ids_and_sources() -> None:
    before, after = plan_copies(fleet(3)).table, plan_copies(fleet(4)).table
    assert ids(before) < ids(after)
    kept = after.select(after.dst_rank < 8)
    assert kept.src_rank.tolist() == before.src_rank.tolist()


def test_an_appended_source_keeps_existing_task_ids() -> None:
    found = fleet(3)
    extra = Roster(99, source=[meta("fc1", (16, 4), 99), meta("norm", (4,), 99)])
    before, after = plan_copies(found).table, plan_copies([*found, extra]).table
    assert 99 in after.src_rank
    # a place that is written under both plans has one id
    same = {row[1:]: row[0] for row in ids(before)}
    assert all(same[row[1:]] == row[0] for row in ids(after) if row[1:] in same)
    assert any(row[1:] in same for row in ids(after))


def test_task_ids_do_not_depend_on_the_source() -> None:
    one = plan_copies(rosters([replicated("w", (4,), [0])], [replicated("w", (4,), [5])])).table
    two = plan_copies(rosters([replicated("w", (4,), [1])], [replicated("w", (4,), [5])])).table
    assert one.task_id.tolist() == two.task_id.tolist()


def test_two_models_of_equal_sizes_have_different_plans() -> None:
    one = rosters([replicated("a", (4,), [0])], [replicated("a", (4,), [1])])
    two = rosters([replicated("b", (4,), [0])], [replicated("b", (4,), [1])])
    assert plan_copies(one).digest != plan_copies(two).digest


# --- A rank's plan as TransferOps. ----------------------------------------------------------------------


def test_an_op_names_the_local_tensor_of_its_own_side() -> None:
    held = {0: meta("layers.0.w", (4, 2), 0, resolved_name="w")}
    wanted = {1: meta("model.w", (4, 2), 1, resolved_name="w")}
    plans = plan_reshard(rosters([held], [wanted]))
    whole = (slice(0, 4), slice(0, 2))
    task = plans[0].send_ops[0].task_id
    assert list(plans[0].send_ops) == [TransferOp("layers.0.w", 1, True, whole, whole, task)]
    assert list(plans[1].recv_ops) == [TransferOp("model.w", 0, False, whole, whole, task)]


def test_a_flat_slice_meets_a_matrix_with_as_many_elements_in_the_same_order() -> None:
    # elements 2:6 of a flattened [4, 2] tensor are its rows 1 and 2
    tile = Tile("w", (1, 0), (2, 2), 0, (2, 1))
    flat = {1: meta("flat", (4,), 1, tiles=(tile,), global_shape=(4, 2))}
    op = plan_reshard(rosters([replicated("w", (4, 2), [0])], [flat]))[1].recv_ops[0]
    assert (op.my_slice, op.peer_slice) == ((slice(0, 4),), (slice(1, 3), slice(0, 2)))


def test_a_0d_tensor_has_an_empty_tuple_of_slices() -> None:
    op = plan_reshard(rosters([replicated("s", (), [0])], [replicated("s", (), [1])]))[1].recv_ops[0]
    assert op.my_slice == () == op.peer_slice
    assert np.zeros(())[op.my_slice].shape == ()


def test_idle_ranks_have_empty_plans() -> None:
    plans = plan_reshard([Roster(4), *rosters([replicated("w", (4,), [0])], [replicated("w", (4,), [1])])])
    assert set(plans) == {0, 1, 4}
    assert len(plans[4].send_ops) == len(plans[4].recv_ops) == 0
    assert str(plans[0]) == "ReshardPlan(sends=1, receives=0)"
    assert isinstance(plans[0], ReshardPlan)


def test_slices_of_a_box() -> None:
    assert slices_of((4, 6), 13, (2, 3), (6, 1)) == (slice(2, 4), slice(1, 4))
    assert slices_of((4, 6), 0, (24,), (1,)) == (slice(0, 4), slice(0, 6))
    assert slices_of((4, 6), 6, (12,), (1,)) == (slice(1, 3), slice(0, 6))
    assert slices_of((4, 1, 6), 12, (2, 1, 6), (6, 6, 1)) == (slice(2, 4), slice(0, 1), slice(0, 6))


def test_what_no_slices_can_say_is_none() -> None:
    assert slices_of((4, 6), 3, (6,), (1,)) is None  # across the end of a row
    assert slices_of((4, 6), 0, (6, 4), (1, 6)) is None  # transposed
    assert slices_of((4, 6), 0, (2, 6), (12, 1)) is None  # every other row


# --- The choice of the replica that feeds each destination. ---------------------------------------------


Side = dict[int, ParameterMetadata]


def senders(found: Sequence[Roster]) -> dict[int, int]:
    """Return destination rank -> its only source rank."""
    table = plan_copies(found).table
    assert len(np.unique(table.dst_rank)) == len(table)
    return dict(zip(table.dst_rank.tolist(), table.src_rank.tolist(), strict=True))


def max_over_mean(found: Sequence[Roster]) -> float:
    """Return the busiest sender's bytes divided by the mean; local copies are not sent."""
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
