"""A rank's plan as TransferOps."""

from __future__ import annotations

import numpy as np

from refitd import ReshardPlan, Roster, Tile, TransferOp, plan_reshard
from refitd.plan.views import slices_of
from tests.support.layouts import meta, replicated, rosters, tp


def test_both_ends_of_a_transfer_mirror_each_other() -> None:
    plans = plan_reshard(rosters([tp("w", (2, 4), [0, 1])], [tp("w", (4, 2), [2, 3], dim=1)]))
    assert plans[0].recv_ops == [] and plans[2].send_ops == []
    sends = {op.task_id: (rank, op) for rank in (0, 1) for op in plans[rank].send_ops}
    assert len(sends) == 4
    for rank in (2, 3):
        for op in plans[rank].recv_ops:
            sender, send = sends[op.task_id]
            assert (op.peer_rank, send.peer_rank) == (sender, rank)
            assert (op.my_slice, op.peer_slice) == (send.peer_slice, send.my_slice)
            assert send.is_send and not op.is_send


def test_an_op_names_the_local_tensor_of_its_own_side() -> None:
    held = {0: meta("layers.0.w", (4, 2), 0, resolved_name="w")}
    wanted = {1: meta("model.w", (4, 2), 1, resolved_name="w")}
    plans = plan_reshard(rosters([held], [wanted]))
    whole = (slice(0, 4), slice(0, 2))
    task = plans[0].send_ops[0].task_id
    assert list(plans[0].send_ops) == [TransferOp("layers.0.w", 1, True, whole, whole, task)]
    assert list(plans[1].recv_ops) == [TransferOp("model.w", 0, False, whole, whole, task)]


def test_a_copy_within_one_rank_is_a_send_and_a_receive() -> None:
    plan = plan_reshard(rosters([replicated("w", (4,), [0])], [replicated("w", (4,), [0])]))[0]
    assert plan.send_ops[0].peer_rank == plan.recv_ops[0].peer_rank == 0
    assert plan.send_ops[0].task_id == plan.recv_ops[0].task_id


def test_gated_halves_are_two_ops_with_ids_of_their_own() -> None:
    found = rosters([tp("w", (8, 3), [0, 1], partition_stride=2)], [replicated("w", (16, 3), [2])])
    plans = plan_reshard(found)
    columns = slice(0, 3)
    assert [(op.peer_rank, op.my_slice, op.peer_slice) for op in plans[2].recv_ops] == [
        (0, (slice(0, 4), columns), (slice(0, 4), columns)),
        (0, (slice(8, 12), columns), (slice(4, 8), columns)),
        (1, (slice(4, 8), columns), (slice(0, 4), columns)),
        (1, (slice(12, 16), columns), (slice(4, 8), columns)),
    ]
    ids = [op.task_id for op in plans[2].recv_ops]
    assert len(set(ids)) == 4
    assert ids == [op.task_id for rank in (0, 1) for op in plans[rank].send_ops]


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
