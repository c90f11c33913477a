"""DTensors: uneven ones, and each rank's elements compared with torch's `full_tensor`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import refitd
from refitd import ParameterMetadata, PlanError, Tile, extract_param_metadata
from refitd.describe.dtensors import MeshSplit, cut_order, mesh_splits, split_tiles
from refitd.describe.module import describe_module
from refitd.inprocess.uneven_dtensor import (
    filter_unflattened_state_dict,
    gather_and_compute_chunk_metadata,
    get_unflattened_state_dict,
)
from refitd.plan.boxes import layout_violations, slice_intersection, slice_moved
from refitd.testing import oracle


def test_boxes_that_tile_a_tensor_have_no_violations() -> None:
    assert layout_violations((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 1)), ((2, 1), (2, 3))]) == []
    assert layout_violations((), [((), ())]) == []
    assert layout_violations((0, 3), []) == []
    assert layout_violations((3,), [((0,), (3,)), ((3,), (0,))]) == []


def test_an_interior_gap_is_found_though_every_border_is_touched() -> None:
    ring = [((0, 0), (1, 3)), ((2, 0), (1, 3)), ((1, 0), (1, 1)), ((1, 2), (1, 1))]

    assert layout_violations((3, 3), ring) == ["no chunk holds [1:2, 1:2]"]


def test_overlaps_and_chunks_outside_are_found() -> None:
    found = layout_violations((4,), [((0,), (3,)), ((2,), (2,)), ((3,), (2,))])

    assert "chunk [3:5] lies outside the tensor [0:4]" in found
    assert "chunks [0:3] and [2:4] overlap" in found


@pytest.mark.parametrize("seed", range(60))
def test_violations_agree_with_counting_elements(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    boxes = []
    for _ in range(rng.randint(0, 5)):
        offset = tuple(rng.randrange(n) for n in shape)
        boxes.append((offset, tuple(rng.randint(0, n - o) for n, o in zip(shape, offset, strict=True))))
    counts = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for offset, size in boxes:
        for place in itertools.product(*(range(o, o + n) for o, n in zip(offset, size, strict=True))):
            counts[place] += 1
    found = layout_violations(shape, boxes)

    assert any("overlap" in line for line in found) == any(count > 1 for count in counts.values())
    assert any("no chunk" in line for line in found) == any(count == 0 for count in counts.values())


def test_paths_of_a_nested_dict_and_what_is_there() -> None:
    tree = {"a": {"b": 1, "c": "x"}, "d": 2}

    assert filter_unflattened_state_dict(tree, visit_condition=lambda v: isinstance(v, int)) == [["a", "b"], ["d"]]
    assert filter_unflattened_state_dict(tree, ["top"], lambda v: v == "x") == [["top", "a", "c"]]
    assert filter_unflattened_state_dict(tree) == []
    assert get_unflattened_state_dict(tree, ["a", "c"]) == "x"
    assert get_unflattened_state_dict(tree) is tree
    with pytest.raises(KeyError, match=r"no 'q' at a; there is \['b', 'c'\]"):
        get_unflattened_state_dict(tree, ["a", "q"])
    with pytest.raises(KeyError, match="there is a int"):
        get_unflattened_state_dict(tree, ["d", "q"])


def test_slices_meet_and_move() -> None:
    assert slice_intersection(slice(0, 5), slice(3, 9)) == slice(3, 5)
    assert slice_intersection(slice(0, 2), slice(3, 9)) == slice(3, 3)
    assert slice_moved(slice(3, 5), -3) == slice(0, 2)


@pytest.mark.parametrize(
    "function",
    [
        refitd.gather_uneven_dtensor_to_full_tensor,
        refitd.update_uneven_dtensor_chunk_metadata,
        refitd.validate_uneven_dtensor,
        lambda tensor: refitd.split_dtensor(tensor, 2),
        gather_and_compute_chunk_metadata,
    ],
)
def test_a_plain_tensor_is_refused_by_type_before_any_rank_is_asked(function: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"found a Parameter of shape \(4, 3\), expected a DTensor"):
        function(torch.nn.Parameter(torch.zeros(4, 3)))
    with pytest.raises(TypeError, match="found a list, expected a DTensor"):
        function([1])


# --- Each rank's elements of a DTensor, compared with torch's `full_tensor` over every rank of a mesh in one process.


MOST_RANKS = 24


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Open a process group that sends no data."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    _clear_sharding_prop_cache()  # the cache stores meshes, which contain the rank of the previous world
    try:
        yield
    finally:
        dist.destroy_process_group()


def spec_of(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], **fields: Any) -> DTensorSpec:
    meta = TensorMeta(torch.Size(shape), torch.empty(tuple(shape), device="meta").stride(), torch.int64)
    return DTensorSpec(mesh, tuple(placements), meta, **fields)


def described(spec: DTensorSpec, rank: int, coordinate: Sequence[int]) -> ParameterMetadata:
    """Describe the shard of one rank of a layout."""
    assert spec.tensor_meta is not None
    mesh = SimpleNamespace(
        shape=tuple(spec.mesh.shape), size=lambda dim: spec.mesh.shape[dim], get_coordinate=lambda: list(coordinate)
    )
    param: Any = SimpleNamespace(
        shape=spec.tensor_meta.shape,
        dtype=torch.int64,
        element_size=lambda: 8,
        device_mesh=mesh,
        placements=spec.placements,
        _spec=spec,
        _local_tensor=SimpleNamespace(),
    )
    param._local_tensor.shape, _ = split_tiles("w", param.shape, [split for _, split in mesh_splits(param)])
    return extract_param_metadata(param, "w", rank, None)


def put_together(spec: DTensorSpec, whole: np.ndarray[Any, Any]) -> bool:
    """Whether torch gathers the whole tensor from shards filled by the descriptions."""
    held = {}
    for rank, coordinate in enumerate(itertools.product(*map(range, spec.mesh.shape))):
        found = described(spec, rank, coordinate)
        held[rank] = torch.from_numpy(oracle.local_tensor(found, rank, {"w": whole}))
    gathered = DTensor(LocalTensor(held), spec, requires_grad=False).full_tensor()
    each = gathered._local_tensors.values() if isinstance(gathered, LocalTensor) else [gathered]
    return all(torch.equal(full, torch.from_numpy(whole)) for full in each)


@pytest.fixture
def all_ranks() -> Iterator[dict[tuple[int, ...], DeviceMesh]]:
    """Yield meshes by shape; a collective over a mesh computes the result for every rank."""
    with fake_world(0, MOST_RANKS):
        yield {}


def mesh_of(meshes: dict[tuple[int, ...], DeviceMesh], shape: tuple[int, ...]) -> DeviceMesh:
    if shape not in meshes:
        ranks = int(np.prod(shape))
        meshes[shape] = DeviceMesh("cpu", torch.arange(ranks).view(shape))
    return meshes[shape]


def layouts(seed: int, count: int) -> Iterator[tuple[tuple[int, ...], list[int], list[Placement], dict[str, Any]]]:
    """Yield (mesh shape, tensor shape, placements, further fields of the spec), most of them uneven."""
    rng = random.Random(seed)
    shapes = [
        shape
        for dims in (1, 2, 3)
        for shape in itertools.product((1, 2, 3, 4, 6, 8, 12, 24), repeat=dims)
        if 1 < np.prod(shape) <= MOST_RANKS
    ]
    for _ in range(count):
        mesh = rng.choice(shapes)
        shape = [rng.choice([rng.randint(1, 200), rng.randint(1, 30)]), *rng.sample([1, 5, 8], rng.randint(0, 1))]
        placements: list[Placement] = []
        for _ in mesh:
            dim, kind = rng.choice([0, 0, len(shape) - 1]), rng.random()
            factor = rng.choice([1, 2, 3, 5, *mesh, int(np.prod(mesh[1:]))])
            if kind < 0.15:
                placements.append(Replicate())
            else:
                placements.append(Shard(dim) if kind < 0.6 else _StridedShard(dim, split_factor=factor))
        fields: dict[str, Any] = {}
        if rng.random() < 0.4:  # an explicit order of shards
            entries = []
            for dim in range(len(shape)):
                on = [m for m, p in enumerate(placements) if getattr(p, "dim", None) == dim]
                rng.shuffle(on)
                entries += [ShardOrderEntry(dim, tuple(on))] if on else []
            fields = {"shard_order": tuple(entries), "use_strided_shard_as_shard_order": False}
        yield mesh, shape, placements, fields


def check_layouts(meshes: dict[tuple[int, ...], DeviceMesh], seed: int, count: int) -> None:
    right, refused, unjudged = 0, 0, 0
    for mesh, shape, placements, fields in layouts(seed, count):
        what = f"{shape} {placements} on {mesh} {fields}"
        whole = oracle.canonical_tensors({"w": tuple(shape)})["w"]
        with LocalTensorMode(int(np.prod(mesh))):
            spec = spec_of(mesh_of(meshes, mesh), placements, shape, **fields)
            try:
                assert put_together(spec, whole), what
                right += 1
            except PlanError as error:
                assert "torch itself does not gather" in str(error), what
                assert any(isinstance(p, _StridedShard) for p in placements), what
                refused += 1
            except AssertionError as error:
                # the judge's own limit: it wants equal sizes on all ranks where a strided shard cuts what others left
                if "rank results must be equal" not in str(error):
                    raise
                assert fields, what
                unjudged += 1
    assert right > count / 2 and refused and unjudged < count / 5


def test_torch_gathers_the_whole_from_shards_as_they_are_described(
    all_ranks: dict[tuple[int, ...], DeviceMesh],
) -> None:
    check_layouts(all_ranks, 0, 30)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 9))
def test_torch_gathers_the_whole_from_shards_as_they_are_described_at_length(
    all_ranks: dict[tuple[int, ...], DeviceMesh], seed: int
) -> None:
    check_layouts(all_ranks, seed, 60)


def chunks(held: Sequence[int], count: int) -> list[Sequence[int]]:
    """Deal elements as torch.chunk does."""
    each = -(-len(held) // count)
    return [held[i * each : (i + 1) * each] for i in range(count)]


def elements_of(tiles: Sequence[Tile]) -> list[int]:
    return [n for tile in tiles for n in range(tile.offset[0], tile.offset[0] + tile.size[0])]


def check_order(mesh: tuple[int, ...], order: Sequence[int], sizes: Sequence[int]) -> None:
    """Compare the tiles of a dimension that all mesh dimensions split, in this order, with repeated splits."""
    factors = [
        int(np.prod([mesh[m] for m in order[: order.index(mesh_dim)] if m > mesh_dim])) for mesh_dim in range(len(mesh))
    ]
    for size in sizes:
        whole = range(size)
        for coordinate in itertools.product(*map(range, mesh)):
            held: Sequence[int] = whole
            for mesh_dim in order:
                held = chunks(held, mesh[mesh_dim])[coordinate[mesh_dim]]
            splits = [MeshSplit(0, mesh[m], coordinate[m], factors[m]) for m in range(len(mesh))]
            found = cut_order(splits)
            assert found is not None
            cuts = [MeshSplit(0, mesh[m], coordinate[m]) for m in found]
            assert elements_of(split_tiles("w", (size,), cuts)[1]) == list(held), (mesh, order, size, coordinate)


def test_a_split_factor_says_which_mesh_dimensions_cut_first() -> None:
    for mesh in [(5,), (2, 2), (3, 2), (4, 6), (2, 3, 2), (3, 1, 4), (2, 2, 6)]:
        for order in itertools.permutations(range(len(mesh))):
            check_order(mesh, order, [1, 2, 7, 13, 50, 199])
    assert cut_order([MeshSplit(0, 2, 0, 3), MeshSplit(0, 2, 0)]) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_size_on_every_mesh_of_up_to_24_ranks() -> None:
    for dims in (1, 2, 3):
        for mesh in itertools.product(range(1, MOST_RANKS + 1), repeat=dims):
            if np.prod(mesh) > MOST_RANKS:
                continue
            for order in itertools.permutations(range(dims)):
                check_order(mesh, order, range(1, 201))


class Stack(nn.Module):
    """A column-parallel, a row-parallel and a replicated tensor of each size."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(3, n) for n in sizes)
        self.down = nn.ModuleList(nn.Linear(n, 3) for n in sizes)
        self.norm = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in sizes)


def check_fully_sharded(mesh: tuple[int, ...], sizes: Sequence[int]) -> None:
    """Shard a model with torch's own functions on each rank; its tiles are where its elements come from."""
    counts: dict[str, np.ndarray[Any, Any]] = {}
    ranks = int(np.prod(mesh))
    names = ("replicate", "shard", "tp")[-len(mesh) :]
    for rank in range(ranks):
        with fake_world(rank, ranks):
            on = init_device_mesh("cpu", mesh, mesh_dim_names=names)
            model = Stack(sizes)
            shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
            whole = oracle.canonical_tensors(shapes)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(torch.from_numpy(whole[name].astype(np.float32)))
            plan = {"up.*": ColwiseParallel(), "down.*": RowwiseParallel()}
            parallelize_module(model, on["tp"], plan, src_data_rank=None)
            fully_shard(model, mesh=on[names[:-1]])
            for found in describe_module(model, rank):
                parameter = model.get_parameter(found.name)
                assert isinstance(parameter, DTensor) and found.tiles is not None
                expected = oracle.local_tensor(found, rank, whole).astype(np.float32)
                np.testing.assert_array_equal(expected, parameter._local_tensor.detach().numpy(), err_msg=found.name)
                count = counts.setdefault(found.name, np.zeros(shapes[found.name], np.int64))
                for tile in found.tiles:
                    count[tuple(slice(o, o + n) for o, n in zip(tile.offset, tile.size, strict=True))] += 1
    replicas = mesh[0] if len(mesh) == 3 else 1
    for name, count in counts.items():
        # each element once per replica; bias of a row-parallel layer and the norms also once per rank of tp
        expected = replicas * (1 if "up" in name or ("down" in name and "weight" in name) else mesh[-1])
        assert (count == expected).all(), (name, mesh)


def test_fsdp_over_tensor_parallelism_as_torch_shards_it() -> None:
    check_fully_sharded((3, 2), [*range(1, 17), 97])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 3), (4, 6), (12, 2), (2, 2, 2), (2, 3, 2), (2, 2, 6)])
def test_fsdp_over_tensor_parallelism_as_torch_shards_every_size(mesh: tuple[int, ...]) -> None:
    check_fully_sharded(mesh, range(1, 201))


@pytest.mark.parametrize("mesh", [(3, 2), (4, 3), (5, 4), (3, 8)])
def test_shards_that_torch_would_gather_wrong_are_refused_by_some_rank(mesh: tuple[int, int]) -> None:
    """distribute_tensor cuts strided shards in the order of the mesh; full_tensor reads them by their factors."""
    placements: list[Placement] = [_StridedShard(0, split_factor=mesh[1]), Shard(0)]
    wrong, refused = set(), set()
    for rank in range(mesh[0] * mesh[1]):
        with fake_world(rank, mesh[0] * mesh[1]):
            on = init_device_mesh("cpu", mesh)
            for size in range(1, 41):
                whole = oracle.canonical_tensors({"w": (size,)})
                param = distribute_tensor(torch.from_numpy(whole["w"]), on, placements, src_data_rank=None)
                try:
                    found = extract_param_metadata(param, "w", rank, None)
                except PlanError as error:
                    assert "distribute_tensor does not cut strided shards" in str(error)
                    refused.add(size)
                    continue
                if not np.array_equal(oracle.local_tensor(found, rank, whole), param._local_tensor.numpy()):
                    wrong.add(size)
    assert wrong <= refused and refused


def test_pending_sums_and_placements_of_others_are_refused_by_name() -> None:
    class Ragged(Shard):
        """A user-defined placement."""

    with fake_world(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        for placement, said in ((Partial(), "pending sum"), (Ragged(0), "Ragged"), (Shard(3), "cuts dim 3")):
            spec = spec_of(mesh, [Shard(0)], (4, 2))
            spec.placements = (placement,)
            param = DTensor(torch.zeros(2, 2), spec, requires_grad=False)
            with pytest.raises(PlanError, match=rf"w on rank 0: .*{said}"):
                extract_param_metadata(param, "w", 0, None)
        pending: Any = DTensor(torch.zeros(4, 2), spec_of(mesh, [Partial()], (4, 2)), requires_grad=False)
        pending._local_tensor.__create_chunk_list__ = lambda: [SimpleNamespace(offsets=(0, 0), sizes=(4, 2))]
        with pytest.raises(PlanError, match="pending sum"):
            extract_param_metadata(pending, "w", 0, None)


def test_uneven_dtensors_say_where_their_chunk_lies() -> None:
    with fake_world(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        param = DTensor.from_local(torch.zeros(5, 2), mesh, [Shard(0)], run_check=False, shape=(8, 2), stride=(2, 1))
        with pytest.raises(PlanError, match=r"local tensor is \(5, 2\), expected \(4, 2\)"):
            extract_param_metadata(param, "w", 1, None)
        chunk = SimpleNamespace(offsets=(3, 0), sizes=(5, 2))
        param._local_tensor.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]
        assert extract_param_metadata(param, "w", 1, None).tiles == (Tile("w", (3, 0), (5, 2), 0, (2, 1)),)
