"""LCM tiling and the routing of one parameter."""

from __future__ import annotations

import pytest

from refitd import PlanError, ShardingDescriptor
from refitd.plan.lcm import Overlap, lcm_overlaps, plan_lcm_transfers, sharding_descriptors
from refitd.plan.routing import plan_param_transfers, plan_replicated_transfers
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


def test_gated_tp2_to_plain_tp4() -> None:
    # segments of 4: gate of shard 0, gate of 1, up of 0, up of 1
    assert lcm_overlaps(16, 2, 2, 4, 1) == [
        Overlap(0, 0, 0, 0, 4),
        Overlap(1, 1, 0, 0, 4),
        Overlap(0, 2, 4, 0, 4),
        Overlap(1, 3, 4, 0, 4),
    ]


def test_equal_splits_are_one_overlap_per_segment() -> None:
    assert lcm_overlaps(16, 2, 2, 2, 2) == [
        Overlap(0, 0, 0, 0, 4),
        Overlap(1, 1, 0, 0, 4),
        Overlap(0, 0, 4, 4, 4),
        Overlap(1, 1, 4, 4, 4),
    ]


def test_no_elements_have_no_overlaps() -> None:
    assert lcm_overlaps(0, 2, 1, 3, 1) == []


def test_segments_that_would_not_be_equal_are_refused() -> None:
    with pytest.raises(PlanError, match="13 elements do not divide into the source's 4 equal segments"):
        lcm_overlaps(13, 4, 1, 13, 1)


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


def test_lcm_transfers_are_slices_of_both_tensors() -> None:
    source, destination = tp("w", (5, 4), [0, 1], dim=1)[0], tp("w", (5, 2), [2, 3, 4, 5], dim=1)[3]
    found = plan_lcm_transfers("w", source, destination, sharding_descriptors(source, destination), 3)
    assert found == [(0, (slice(0, 5), slice(2, 4)), (slice(0, 5), slice(0, 2)))]


def test_lcm_needs_exactly_one_descriptor_and_a_destination_rank() -> None:
    source, destination = tp("w", (4,), [0, 1])[0], tp("w", (2,), [2, 3, 4, 5])[2]
    descriptors = sharding_descriptors(source, destination)
    with pytest.raises(PlanError, match="one tp descriptor"):
        plan_lcm_transfers("w", source, destination, descriptors * 2, 2)
    with pytest.raises(PlanError, match="rank 9 is not among the destination ranks"):
        plan_lcm_transfers("w", source, destination, descriptors, 9)


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
