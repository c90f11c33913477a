"""Incomplete descriptions are completed exactly from other ranks' descriptions, or refused by name."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest

from refitd import ParameterMetadata, PlanError, Roster
from refitd.coordinator.descriptions import Registered, ShardReader
from refitd.plan.build import plan_copies
from refitd.protocol.shards import shard_of
from refitd.testing import oracle
from tests.support.layouts import replicated, rosters, tp

Side = dict[int, ParameterMetadata]


def through_the_service(found: list[Roster]) -> list[Roster]:
    """Return the rosters as the coordinator reads them from registrations."""
    pools: list[list[Registered]] = [[], []]
    for r in found:
        for is_source, metas in ((True, r.source), (False, r.destination)):
            if metas:
                shard = shard_of(metas)
                pools[not is_source].append(Registered(r.rank, r.label, r.node, is_source, repr(shard), shard))
    return ShardReader().rosters(pools)


def silent(side: Side) -> Side:
    return {rank: replace(m, partition_sizes=None) for rank, m in side.items()}


def test_blocks_declared_on_one_side_are_the_other_sides_too() -> None:
    rng = Random(7)
    for _ in range(150):
        sizes = [rng.choice((1, 2, 3, 4)) for _ in range(2)]
        blocks = [12 * rng.randint(0, 3) for _ in range(rng.randint(1, 4))]
        if not sum(blocks):
            continue
        dim = rng.randint(0, 1)
        sides = []
        for size, first in zip(sizes, (0, 4), strict=True):
            shape = [3, 3]
            shape[dim] = sum(blocks) // size
            ranks = list(range(first, first + size))
            local = [block // size for block in blocks]
            side = tp("w", tuple(shape), ranks, dim, partition_sizes=local)
            if size == 1 and rng.random() < 0.5:  # described as whole; it still knows the blocks
                side = {r: replace(m, is_tp=False, tensor_parallel_group_ranks=None) for r, m in side.items()}
            sides.append(side)
        whole = [3, 3]
        whole[dim] = sum(blocks)
        full = rosters([sides[0]], [sides[1]])
        for side in (0, 1):
            said = list(sides)
            said[side] = silent(said[side])
            found = rosters([said[0]], [said[1]])
            for read in (found, through_the_service(found)):
                oracle.check(plan_copies(read).table, full, {"w": tuple(whole)})


def test_blocks_that_a_whole_tensor_declares_are_checked_and_are_those_of_every_replica() -> None:
    (whole,) = tp("w", (8,), [8], partition_sizes=[6, 2]).values()
    whole = replace(whole, is_tp=False, tensor_parallel_group_ranks=None)
    sides = tp("w", (4,), [0, 1], partition_sizes=[3, 1]), tp("w", (4,), [4, 5], partition_sizes=[3, 1])
    full = rosters([sides[0]], [sides[1], {8: whole}])
    found = rosters([silent(sides[0])], [silent(sides[1]), {8: whole}])
    for read in (found, through_the_service(found)):
        oracle.check(plan_copies(read).table, full, {"w": (8,)})
    for wrong in ({"partition_sizes": [6, 3]}, {"partition_dim": 1}):
        with pytest.raises(PlanError, match="w: partition_sizes"):
            plan_copies(rosters([{0: replace(whole, owner_rank=0)}], [{8: replace(whole, **wrong)}]))


def test_blocks_that_do_not_divide_over_the_other_side_are_refused_by_name() -> None:
    found = rosters([tp("w", (6,), [0, 1], partition_sizes=[3, 3])], [tp("w", (4,), [2, 3, 4])])
    with pytest.raises(PlanError, match=r"w: rank 0 \(source\) declares partition_sizes, .*\[6, 6\]"):
        plan_copies(rosters([tp("w", (6,), [0, 1], partition_sizes=[3, 3])], [tp("w", (3,), [2, 3, 4, 5])]))
    plan_copies(found)  # 6 over 3 ranks


def test_blocks_that_others_contradict_are_refused_by_name() -> None:
    sides = [tp("w", (4,), [0, 1], partition_sizes=[1, 3])], [tp("w", (4,), [2, 3], partition_sizes=[2, 2])]
    with pytest.raises(PlanError, match=r"w: its packed blocks are .* and rank 4 \(destination\) declares no"):
        plan_copies(rosters(sides[0], [*sides[1], tp("w", (4,), [4, 5])]))


def missing(side: Side) -> Side:
    """Describe a side as grouped experts do: with a group, but without a declared split over it."""
    return {rank: replace(m, is_tp=False, partition_dim=0, partition_stride=1) for rank, m in side.items()}


@pytest.mark.parametrize(
    ("sizes", "stride", "dim"), list(itertools.product(((1, 2), (2, 1), (2, 2), (4, 2)), (1, 2), (0, 1)))
)
def test_a_split_that_one_side_does_not_mention_is_the_other_sides(
    sizes: tuple[int, int], stride: int, dim: int
) -> None:
    sides = []
    for size, first in zip(sizes, (0, 4), strict=True):
        shape = [8, 8]
        shape[dim] = 16 // size
        ranks = list(range(first, first + size))
        sides.append(tp("e", tuple(shape), ranks, dim, partition_stride=stride))
    whole = [8, 8]
    whole[dim] = 16
    full = rosters([sides[0]], [sides[1]])
    for side in (0, 1):
        said = list(sides)
        if sizes[1 - side] == 1:
            continue  # then no side describes blocks: see the digests of replicas
        said[side] = missing(said[side])
        found = rosters([said[0]], [said[1]])
        for read in (found, through_the_service(found)):
            oracle.check(plan_copies(read).table, full, {"e": tuple(whole)})


def unknown(side: Side) -> Side:
    return {rank: replace(m, stride_is_known=False, partition_stride=1) for rank, m in side.items()}


def test_a_stride_that_nobody_knows_is_refused_where_it_matters() -> None:
    two, four = tp("experts.e", (8, 2), [0, 1]), tp("experts.e", (4, 2), [4, 5, 6, 7])
    for found in (
        rosters([unknown(two)], [unknown(four)]),
        rosters([unknown(two)], [replicated("experts.e", (16, 2), [4])]),
    ):
        for read in (found, through_the_service(found)):
            with pytest.raises(PlanError, match=r"experts.e: an expert's fc1.*gated_linear_unit"):
                plan_copies(read)
    same = tp("experts.e", (8, 2), [4, 5])
    found = rosters([unknown(two)], [unknown(same)])
    oracle.check(plan_copies(found).table, found, {"experts.e": (16, 2)})


def test_a_dense_stride_that_nobody_knows_is_as_stamped() -> None:
    two, four = tp("fc1", (8, 2), [0, 1]), tp("fc1", (4, 2), [4, 5, 6, 7])
    found = rosters([unknown(two)], [unknown(four)])
    for read in (found, through_the_service(found)):
        oracle.check(plan_copies(read).table, found, {"fc1": (16, 2)})


def test_a_stride_that_somebody_knows_is_everybodys() -> None:
    two, four = tp("e", (8, 2), [0, 1], partition_stride=2), tp("e", (4, 2), [4, 5, 6, 7], partition_stride=2)
    full = rosters([two], [four])
    for sides in ((two, unknown(four)), (unknown(two), four)):
        found = rosters([sides[0]], [sides[1]])
        for read in (found, through_the_service(found)):
            oracle.check(plan_copies(read).table, full, {"e": (16, 2)})


def test_descriptions_that_say_all_are_read_once() -> None:
    full = rosters([tp("w", (4,), [0, 1], partition_sizes=[1, 3])], [tp("w", (8,), [2], partition_sizes=[2, 6])])
    read = through_the_service(full)
    metas: list[ParameterMetadata] = [m for r in read for m in (*r.source, *r.destination)]
    assert all(m.owner_rank is None for m in metas)


PACKED = tp("w", (8,), [0, 1], partition_sizes=[3, 5])  # 6 and 10


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (tp("w", (4,), [4, 5, 6, 7], partition_sizes=[2, 2]), "partition_sizes [2, 2] over 4 ranks"),
        (tp("w", (8,), [4, 5], partition_sizes=[5, 3]), "partition_sizes [5, 3] over 2 ranks"),
        (tp("w", (8,), [4, 5], partition_sizes=[3, 2, 3]), "partition_sizes [3, 2, 3] over 2 ranks"),
        (tp("w", (16,), [4], partition_sizes=[10, 6]), "partition_sizes [10, 6] over 1 rank"),
        (tp("w", (4,), [4, 5, 6, 7], partition_stride=2), "partition_stride 2"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_parts_that_the_two_sides_say_differently_are_refused_by_name(other: Side, words: str, turned: bool) -> None:
    found = rosters([other], [PACKED]) if turned else rosters([PACKED], [other])
    for read in (found, through_the_service(found)):
        with pytest.raises(PlanError) as caught:
            plan_copies(read)
        (said,) = caught.value.violations
        assert said.startswith("w: the parts that dim 0 consists of are ") and "explicit tiles" in said
        sides = ("destination", "source") if turned else ("source", "destination")
        for text, side, rank in (("partition_sizes [3, 5] over 2 ranks", sides[0], 0), (words, sides[1], 4)):
            assert f"{text} on rank {rank} ({side})" in said


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PACKED, tp("w", (4,), [4, 5, 6, 7], partition_sizes=[4])),  # one run a rank
        (tp("w", (8,), [0, 1], partition_sizes=[4, 4]), tp("w", (4,), [4, 5, 6, 7], partition_stride=2)),
        (tp("w", (8,), [0, 1], partition_sizes=[0, 4, 4]), tp("w", (4,), [4, 5, 6, 7], partition_sizes=[2, 0, 2])),
        (tp("w", (8, 2), [0, 1], partition_sizes=[4, 4]), tp("w", (16, 1), [4, 5], 1, partition_sizes=[1])),
        (tp("w", (12,), [0, 1], partition_stride=2), tp("w", (6,), [4, 5, 6, 7], partition_stride=3)),
        (tp("w", (8,), [0, 1], partition_stride=2), tp("w", (4,), [4, 5, 6, 7])),
    ],
)
def test_cuts_that_differ_and_can_both_be_true_are_planned(one: Side, other: Side) -> None:
    found = rosters([one], [other])
    size = sum(m.shape[0] for m in one.values())
    whole = (size, 2) if len(one[0].shape) > 1 else (size,)
    for read in (found, through_the_service(found)):
        oracle.check(plan_copies(read).table, found, {"w": whole})


@pytest.mark.parametrize(
    "wrong", [{"partition_stride": 2}, {"partition_dim": 1, "shape": (16, 1)}, {"partition_sizes": [3, 5]}]
)
@pytest.mark.parametrize("side", ["source", "destination"])
def test_ranks_of_one_group_that_are_cut_otherwise_are_refused_by_name(wrong: dict[str, object], side: str) -> None:
    good, other = tp("w", (8, 2), [0, 1]), tp("w", (8, 2), [4, 5])
    group, more = {0: good[0], 1: replace(good[1], **wrong)}, tp("w", (8, 2), [2, 3])
    if "partition_sizes" in wrong:
        group[0] = replace(group[0], partition_sizes=[5, 3])
    # other ranks of that side have the whole tensor, so no element is missing
    found = rosters([group, more], [other]) if side == "source" else rosters([other], [group, more])
    for read in (found, through_the_service(found)):
        with pytest.raises(PlanError) as caught:
            plan_copies(read)
        assert str(caught.value).startswith("w: ")
        assert f"rank 0 ({side})" in str(caught.value) and f"rank 1 ({side})" in str(caught.value)
