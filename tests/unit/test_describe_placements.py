"""DTensors as tiles, against torch's own cutting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from refitd import PlanError, Roster, Tile, extract_param_metadata
from refitd.describe.placements import MeshSplit, split_tiles
from refitd.plan.build import plan_copies
from refitd.testing import oracle
from tests.support.layouts import meta


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """A process group in which nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_one_split_is_one_tile() -> None:
    assert split_tiles("w", (8, 3), [MeshSplit(0, 4, 2)]) == ((2, 3), (Tile("w", (4, 0), (2, 3), 0, (3, 1)),))


def test_chunks_are_rounded_up_so_that_the_last_ranks_hold_less_or_nothing() -> None:
    # torch.chunk of 5 over 4: 2, 2, 1, nothing
    assert [split_tiles("w", (5,), [MeshSplit(0, 4, i)])[0] for i in range(4)] == [(2,), (2,), (1,), (0,)]
    assert split_tiles("w", (5,), [MeshSplit(0, 4, 3)])[1] == ()


def test_a_split_factor_deals_round_robin() -> None:
    shape, tiles = split_tiles("w", (12,), [MeshSplit(0, 2, 1, factor=2)])
    assert shape == (6,)
    assert tiles == (Tile("w", (3,), (3,), 0, (1,)), Tile("w", (9,), (3,), 3, (1,)))


def test_two_splits_of_one_dimension_nest_and_neighbours_join() -> None:
    # FSDP over TP: rank (1, 0) of 2 x 2 holds the second half of TP rank 0's half of 8 rows
    assert split_tiles("w", (8,), [MeshSplit(0, 2, 1, factor=2), MeshSplit(0, 2, 0)])[1] == (
        Tile("w", (2,), (2,), 0, (1,)),
    )


LAYOUTS: list[tuple[tuple[int, ...], tuple[int, ...], list[Placement]]] = [
    ((8, 3), (4,), [Shard(0)]),
    ((5, 3), (4,), [Shard(0)]),
    ((3, 9), (4,), [Shard(1)]),
    ((7,), (4,), [Replicate()]),
    ((8, 6), (2, 2), [Shard(0), Shard(1)]),
    ((8, 6), (2, 2), [Shard(1), Shard(0)]),
    ((10, 3), (2, 2), [Shard(0), Shard(0)]),
    ((7, 3), (2, 2), [Shard(0), Shard(0)]),
    ((7, 3), (2, 2), [Replicate(), Shard(0)]),
    ((16, 3), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((4, 6, 5), (2, 2), [Shard(2), Shard(0)]),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), LAYOUTS, ids=str)
def test_tiles_are_where_torch_puts_the_elements(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: list[Placement]
) -> None:
    whole = oracle.canonical_tensors({"w": shape})
    rosters = []
    for rank in range(4):
        with fake_world(rank, 4):
            mesh = init_device_mesh("cpu", mesh_shape)
            param = distribute_tensor(torch.from_numpy(whole["w"].copy()), mesh, placements, src_data_rank=None)
            found = extract_param_metadata(param, "w", rank, None)
            local = param._local_tensor.numpy()
        assert (found.shape, found.global_shape) == (local.shape, shape)
        np.testing.assert_array_equal(oracle.local_tensor(found, rank, whole), local)
        rosters.append(Roster(rank, [found]))
    rosters.append(Roster(9, (), [meta("w", shape, 9, dtype="int64", element_size=8)]))
    oracle.check(plan_copies(rosters).table, rosters, {"w": shape})


def test_uneven_dtensors_say_where_their_chunk_lies() -> None:
    with fake_world(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        param = DTensor.from_local(torch.zeros(5, 2), mesh, [Shard(0)], run_check=False, shape=(8, 2), stride=(2, 1))
        with pytest.raises(PlanError, match=r"local tensor is \(5, 2\), expected \(4, 2\)"):
            extract_param_metadata(param, "w", 1, None)
        chunk = SimpleNamespace(offsets=(3, 0), sizes=(5, 2))
        param._local_tensor.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]
        assert extract_param_metadata(param, "w", 1, None).tiles == (Tile("w", (3, 0), (5, 2), 0, (2, 1)),)


def test_a_pending_sum_is_refused() -> None:
    with fake_world(0, 2):
        param = DTensor.from_local(torch.zeros(4), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
        with pytest.raises(PlanError, match="pending sum"):
            extract_param_metadata(param, "w", 0, None)
