"""Each group of a region has the same elements, and each pair of ranks is compared in all elements that both have."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from refitd.describe.layout import tiles_of
from refitd.describe.metadata import ParameterMetadata, Roster
from refitd.errors import PlanError
from refitd.plan.build import plan_copies
from refitd.plan.completion import completed
from refitd.plan.table import RegionTable
from refitd.protocol.shards import metadata_of, shard_of


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[ParameterMetadata]]:
    """A shape, and descriptions of one weight in several cuts: whole, split with a stride, or as tiles."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 4, 6, 12]), min_size=1, max_size=3)))
    metas: list[ParameterMetadata] = []
    for _ in range(draw(st.integers(1, 4))):
        dim = draw(st.integers(0, len(shape) - 1))
        parts = draw(st.sampled_from([1, 2, 3]))
        world = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if shape[dim] % (n * parts) == 0] or [1]))
        group = list(range(len(metas), len(metas) + world))
        local = tuple(n // world if d == dim else n for d, n in enumerate(shape))
        held = [
            ParameterMetadata(
                name="w",
                shape=local,
                dtype=torch.int16,
                element_size=2,
                is_tp=world > 1,
                partition_dim=dim,
                partition_stride=parts if world > 1 else 1,
                owner_rank=rank,
                tensor_parallel_group_ranks=group if world > 1 else None,
            )
            for rank in group
        ]
        blocks = [local[dim] // parts] * parts
        told = draw(st.sampled_from(["stride", "blocks", "tiles"]))
        if told == "blocks" and world > 1:
            held = [replace(meta, partition_stride=1, partition_sizes=blocks) for meta in held]
        if told == "tiles":
            held = [
                ParameterMetadata(
                    "w", local, torch.int16, 2, owner_rank=m.owner_rank, tiles=tiles_of(m), global_shape=shape
                )
                for m in held
            ]
        metas += held
    return shape, metas


def indices(shape: tuple[int, ...], meta: ParameterMetadata) -> np.ndarray:
    """The canonical index of every element of a rank's local tensor, row-major."""
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    held = np.full(int(np.prod(meta.shape)), -1)
    for tile in tiles_of(meta):
        repeat = tile.repeat
        for i in range(repeat.count if repeat else 1):
            offset, at = list(tile.offset), tile.local_offset
            if repeat:
                offset[repeat.dim] += i * repeat.step
                at += i * repeat.local_step
            box = whole[tuple(slice(o, o + n) for o, n in zip(offset, tile.size, strict=True))]
            where = at + sum(
                (np.arange(n) * s).reshape([-1 if d == k else 1 for k in range(len(shape))])
                for d, (n, s) in enumerate(zip(tile.size, tile.local_stride, strict=True))
            )
            held[where] = box
    return held


def region(table: RegionTable, row: int, held: np.ndarray) -> tuple[int, ...]:
    """The canonical indices of a row, in its order."""
    at = np.array(table.offset[row])
    for size, stride in zip(table.size[row], table.stride[row], strict=True):
        at = at[..., None] + np.arange(size) * stride
    return tuple(held[at.reshape(-1)].tolist())


@settings(max_examples=150)
@given(cuts(), st.booleans())
def test_groups_hold_the_same_elements_and_leave_out_none_that_two_ranks_hold(
    case: tuple[tuple[int, ...], list[ParameterMetadata]], travels: bool
) -> None:
    shape, metas = case
    ranks = len(metas)
    wanted = ParameterMetadata("w", shape, torch.int16, 2, owner_rank=ranks)
    rosters, _ = completed([*(Roster(m.owner_rank, (m,)) for m in metas), Roster(ranks, destination=(wanted,))])
    metas = [roster.source[0] for roster in rosters[:ranks]]  # some get the blocks of other ranks
    if travels:  # as the coordinator reads it
        rosters = [Roster(r.rank, metadata_of(shard_of(r.source), r.rank), r.destination) for r in rosters]
    try:
        plan = plan_copies(rosters)
    except PlanError:
        reject()
    table = RegionTable.from_wire(plan.regions.table.to_wire())
    held = [indices(shape, meta) for meta in metas]

    groups: dict[int, dict[int, tuple[int, ...]]] = {}
    for rank in range(ranks):
        if rank in plan.regions.holder_of:
            for row in plan.regions.rows_of(rank).tolist():
                groups.setdefault(int(table.group[row]), {})[rank] = region(table, row, held[rank])
    for members in groups.values():
        assert len(members) > 1 and len(set(members.values())) == 1
    for one, other in combinations(range(ranks), 2):
        compared = {i for members in groups.values() if one in members and other in members for i in members[one]}
        assert compared == set(held[one].tolist()) & set(held[other].tolist())
