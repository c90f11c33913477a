"""LCM tiling and the routing of one parameter."""

from __future__ import annotations

import numpy as np
import pytest

from refitd import PlanError, ShardingDescriptor
from refitd.inprocess.one_parameter import (
    Overlap,
    lcm_overlaps,
    plan_lcm_transfers,
    plan_param_transfers,
    plan_replicated_transfers,
    sharding_descriptors,
)
from refitd.plan.boxes import lcm_tiling
from refitd.plan.columns import Ints
from tests.support.layouts import meta, replicated, tp


def test_4_to_3_of_12() -> None:
    assert lcm_overlaps(12, 4, 1, 3, 1) == [
        Overlap(0, 0, 0, 0, 3),
        Overlap(1, 0, 0, 3, 1),
        Overlap(1, 1, 1, 0, 2),
        Overlap(2, 1, 0, 2, 2),
        Overlap(2, 2, 2, 0, 1),
        Overlap(3, 2, 0, 1, 3),
    ]


def test_no_elements_have_no_overlaps() -> None:
    assert lcm_overlaps(0, 2, 1, 3, 1) == []


def test_segments_that_would_not_be_equal_are_refused() -> None:
    with pytest.raises(PlanError, match="13 elements do not divide into the source's 4 equal segments"):
        lcm_overlaps(13, 4, 1, 13, 1)


def boxes(*spans: tuple[tuple[int, int], ...]) -> tuple[Ints, Ints]:
    """Return the columns (offset, size) of boxes that are given as [start, end) of each dimension."""
    edges = np.array(spans, np.int64)
    return edges[:, :, 0], edges[:, :, 1] - edges[:, :, 0]


ROWS_0_4, ROWS_4_8, ROWS_8_12 = ((0, 4), (0, 5)), ((4, 8), (0, 5)), ((8, 12), (0, 5))


def test_boxes_of_two_even_splits_are_tiled_in_closed_form() -> None:
    held, wanted = boxes(ROWS_8_12, ROWS_0_4, ROWS_4_8), boxes(((6, 12), (0, 5)), ((0, 6), (0, 5)))
    tiling = lcm_tiling(*held, *wanted)
    cells, pieces = tiling
    assert cells.box.tolist() == cells.cell.tolist() == [0, 1, 2]
    assert pieces.want.tolist() == [1, 1, 0, 0]
    assert pieces.cell.tolist() == [1, 2, 2, 0]
    assert pieces.offset.tolist() == [[0, 0], [4, 0], [6, 0], [8, 0]]
    assert pieces.size.tolist() == [[4, 5], [2, 5], [2, 5], [4, 5]]


def test_a_whole_tensor_is_an_even_split_along_any_dimension() -> None:
    halves, whole = boxes(((0, 8), (0, 2)), ((0, 8), (2, 4))), boxes(((0, 8), (0, 4)))
    gathered, dealt, copied = (lcm_tiling(*a, *b) for a, b in ((halves, whole), (whole, halves), (whole, whole)))
    assert gathered is not None and gathered[1].size.tolist() == [[8, 2], [8, 2]]
    assert dealt is not None and dealt[1].offset.tolist() == [[0, 0], [0, 2]]
    assert copied is not None and copied[1].size.tolist() == [[8, 4]]


@pytest.mark.parametrize(
    ("why", "held", "wanted"),
    [
        ("uneven", boxes(ROWS_0_4, ((4, 12), (0, 5))), boxes(((0, 12), (0, 5)))),
        ("a gap", boxes(ROWS_0_4, ROWS_8_12), boxes(((0, 12), (0, 5)))),
        ("replicas that split it differently", boxes(ROWS_0_4, ROWS_4_8, ((0, 8), (0, 5))), boxes(((0, 8), (0, 5)))),
        ("a grid", boxes(*[((a, a + 2), (b, b + 2)) for a in (0, 2) for b in (0, 2)]), boxes(((0, 4), (0, 4)))),
        ("two dimensions", boxes(((0, 2), (0, 4)), ((2, 4), (0, 4))), boxes(((0, 4), (0, 2)), ((0, 4), (2, 4)))),
        ("a part of it is wanted", boxes(ROWS_0_4, ROWS_4_8), boxes(ROWS_0_4)),
        ("not enough is held", boxes(ROWS_0_4, ROWS_4_8), boxes(ROWS_0_4, ROWS_4_8, ROWS_8_12)),
    ],
)
def test_what_is_no_even_split_of_one_box_is_left_to_intersection(
    why: str, held: tuple[Ints, Ints], wanted: tuple[Ints, Ints]
) -> None:
    assert lcm_tiling(*held, *wanted) is None, why


def test_a_descriptor_says_how_both_sides_split_the_dim() -> None:
    source, destination = tp("w", (8, 4), [0, 1], partition_stride=2)[0], tp("w", (4, 4), [2, 3, 4, 5])[2]
    assert sharding_descriptors(source, destination) == [ShardingDescriptor("tp", 0, 2, 1, [0, 1], [2, 3, 4, 5])]


def test_replicated_tensors_other_dims_and_blocks_have_no_descriptor() -> None:
    rows, columns = tp("w", (4, 8), [0, 1])[0], tp("w", (8, 4), [2, 3], dim=1)[2]
    blocks = tp("w", (4, 8), [0, 1], partition_sizes=[1, 3])[0]
    assert sharding_descriptors(meta("w", (8, 8), 0), meta("w", (8, 8), 1)) == []
    assert sharding_descriptors(rows, columns) == []
    assert sharding_descriptors(blocks, rows) == []


def test_shapes_that_do_not_conserve_the_size_are_refused() -> None:
    with pytest.raises(PlanError, match=r"global shape is \(8, 4\), the destination's \(16, 4\)"):
        sharding_descriptors(tp("w", (4, 4), [0, 1])[0], tp("w", (4, 4), [2, 3, 4, 5])[2])


def test_lcm_needs_exactly_one_descriptor() -> None:
    source, destination = tp("w", (4,), [0, 1])[0], tp("w", (2,), [2, 3, 4, 5])[2]
    descriptors = sharding_descriptors(source, destination)
    for wrong in (descriptors * 2, []):
        with pytest.raises(PlanError, match="one tp descriptor"):
            plan_lcm_transfers("w", source, destination, wrong, 2)


def test_a_rank_outside_the_destination_receives_nothing() -> None:
    source, destination = tp("w", (4,), [0, 1])[0], tp("w", (2,), [2, 3, 4, 5])[2]
    descriptors = sharding_descriptors(source, destination)
    assert plan_lcm_transfers("w", source, destination, descriptors, 9) == []
    copies = [meta("w", (4,), rank, data_parallel_group_ranks=[rank, rank + 1]) for rank in (0, 2)]
    assert plan_replicated_transfers("w", *copies, 0) == []  # not even its own copy
    assert len(plan_replicated_transfers("w", *copies, 2)) == 1
    assert plan_param_transfers("w", *copies, 9) == plan_param_transfers("w", source, destination, 9) == []
    columns = tp("w", (4, 1), [2, 3], dim=1)[2]
    assert plan_param_transfers("w", tp("w", (2, 2), [0, 1])[0], columns, 9) == []  # tiles are intersected


def test_a_split_parameter_without_its_group_is_no_replicated_one() -> None:
    source = meta("w", (4,), 0, is_tp=True)
    with pytest.raises(PlanError, match=r"global shape is \(4,\)"):
        sharding_descriptors(source, meta("w", (8,), 0, tensor_parallel_group_ranks=[0]))


def test_replicated_transfers_are_local_or_take_turns() -> None:
    whole = (slice(0, 4),)
    source = meta("w", (4,), 0, data_parallel_group_ranks=[0, 1])
    same = meta("w", (4,), 1, data_parallel_group_ranks=[0, 1])
    other = meta("w", (4,), 5, data_parallel_group_ranks=[4, 5])
    assert plan_replicated_transfers("w", source, same, 1) == [(1, whole, whole)]
    assert plan_replicated_transfers("w", source, other, 4) == [(0, whole, whole)]
    assert plan_replicated_transfers("w", source, other, 5) == [(1, whole, whole)]
    with pytest.raises(PlanError, match="neither is split"):
        plan_replicated_transfers("w", source, meta("w", (5,), 5), 5)


def test_routing_takes_the_form_that_fits() -> None:
    rows, columns = tp("w", (2, 4), [0, 1])[0], tp("w", (4, 2), [2, 3], dim=1)[3]
    assert plan_param_transfers("w", rows, columns, 3) == [
        (0, (slice(0, 2), slice(2, 4)), (slice(0, 2), slice(0, 2))),
        (1, (slice(0, 2), slice(2, 4)), (slice(2, 4), slice(0, 2))),
    ]
    gathered = replicated("w", (4, 4), [7])[7]
    assert [rank for rank, _, _ in plan_param_transfers("w", rows, gathered, 7)] == [0, 1]
    assert plan_param_transfers("w", gathered, gathered, 7)[0][0] == 7
