"""Test functions with DTensors. Every function is called on all eight ranks together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import refitd
from refitd.describe.dtensors import mesh_splits, split_tiles
from refitd.inprocess import uneven_dtensor
from refitd.inprocess.uneven_dtensor import UnevenLayoutError
from tests.spmd.cases import TIMEOUT_S, World, bits, linear, numbers, refused

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh(*shape: int) -> DeviceMesh:
    """Return a mesh of all ranks; making one is collective."""
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh("cpu", shape)
    return _meshes[shape]


def dealt(rng: random.Random, whole: int, ranks: int) -> list[int]:
    """Return sizes that sum to `whole`, some of them 0."""
    cuts = sorted(rng.choices(range(whole + 1), k=ranks - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, whole], strict=True)]


def uneven(
    whole: torch.Tensor, on: DeviceMesh, placements: Sequence[Any], rng: random.Random
) -> tuple[DTensor, tuple[slice, ...]]:
    """Deal a tensor unevenly, the same way on every rank; return the DTensor and the box of this rank's shard.

    The mesh dimensions are dealt in the order of the mesh, strided ones last.
    """
    box = [slice(0, n) for n in whole.shape]
    order = sorted(range(on.ndim), key=lambda m: isinstance(placements[m], _StridedShard))
    coordinate = on.get_coordinate()
    assert coordinate is not None
    for m in order:
        placement = placements[m]
        if not isinstance(placement, Shard | _StridedShard):
            continue
        held = box[placement.dim]
        # ranks with equal shares so far get equal further sizes, because all draw from one stream
        table = {}
        for n in range(max(whole.shape) + 1):
            table[n] = dealt(rng, n, on.size(m))
        sizes = table[held.stop - held.start]
        start = held.start + sum(sizes[: coordinate[m]])
        box[placement.dim] = slice(start, start + sizes[coordinate[m]])
    index = tuple(box)
    local = whole[index].clone()
    return shard_of(whole.shape, local, on, placements), index


def shard_of(shape: Sequence[int], local: torch.Tensor, on: DeviceMesh, placements: Sequence[Any]) -> DTensor:
    """A tensor of this shape; this rank holds `local`, also if the placements give it another share."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, on, placements, run_check=False, shape=torch.Size(shape), stride=stride)


LAYOUTS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((8,), [Shard(0)]),
    ((8,), [Shard(1)]),
    ((8,), [Replicate()]),
    ((2, 4), [Shard(0), Shard(0)]),
    ((4, 2), [Shard(0), Shard(0)]),
    ((2, 4), [Shard(0), Shard(1)]),
    ((4, 2), [Shard(1), Shard(0)]),
    ((2, 4), [Replicate(), Shard(0)]),
    ((4, 2), [Shard(2), Replicate()]),
    ((2, 4), [_StridedShard(0, split_factor=4), Shard(0)]),
    ((2, 2, 2), [Shard(0), Shard(0), Shard(0)]),
    ((2, 2, 2), [Shard(0), Shard(1), Shard(0)]),
    ((2, 2, 2), [Replicate(), _StridedShard(1, split_factor=2), Shard(1)]),
]


def random_uneven(world: World, seeds: Sequence[int]) -> int:
    """Shards of any size are found, gathered and split like the whole tensor they came from."""
    for seed in seeds:
        shape, placements = LAYOUTS[seed % len(LAYOUTS)]
        rng = random.Random(seed)
        dims = rng.randint(max([getattr(p, "dim", 0) for p in placements]) + 1, 3)
        sizes = [rng.choice([1, 2, 5, 7, 8, 13]) for _ in range(dims)]
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.bool, torch.int64])
        whole = (numbers(*sizes, dtype=torch.int64, start=seed) % 251).to(dtype)
        dtensor, index = uneven(whole, mesh(*shape), placements, rng)
        what = f"seed {seed}: {tuple(sizes)} {placements} on {shape}"

        chunk = uneven_dtensor.gather_and_compute_chunk_metadata(dtensor, timeout=TIMEOUT_S)
        assert tuple(chunk.sizes) == tuple(s.stop - s.start for s in index), what
        assert tuple(chunk.offsets) == tuple(s.start for s in index), what

        refitd.update_uneven_dtensor_chunk_metadata(dtensor, timeout=TIMEOUT_S)
        assert dtensor.__create_chunk_list__() == [chunk], what
        refitd.validate_uneven_dtensor(dtensor, timeout=TIMEOUT_S)

        full = refitd.gather_uneven_dtensor_to_full_tensor(dtensor, timeout=TIMEOUT_S)
        assert all(p.is_replicate() for p in full.placements) and full.shape == whole.shape, what
        assert bits(full.to_local()) == bits(whole), what

        dim = rng.randrange(dims)
        sections = dealt(rng, sizes[dim], 3)
        parts = list(refitd.split_dtensor(dtensor, sections, dim - dims, timeout=TIMEOUT_S))
        edges = [0, *accumulate(sections)]
        for low, high, part in zip(edges, edges[1:], parts, strict=False):
            expected = whole.narrow(dim, low, high - low)
            assert part.shape == expected.shape and tuple(part.placements) == tuple(placements), what
            found = part.__create_chunk_list__()[0]
            mine = expected[tuple(slice(o, o + n) for o, n in zip(found.offsets, found.sizes, strict=True))]
            assert bits(part.to_local()) == bits(mine), what
            refitd.validate_uneven_dtensor(part, timeout=TIMEOUT_S)
            gathered = refitd.gather_uneven_dtensor_to_full_tensor(part, timeout=TIMEOUT_S)
            assert bits(gathered.to_local()) == bits(expected), what
            if part.to_local().numel():
                assert part.to_local().untyped_storage().data_ptr() == dtensor.to_local().untyped_storage().data_ptr()
    return len(seeds)


def torchs_own_shards(world: World) -> None:
    """Where placements alone determine the chunks, they equal the chunks that torch computes."""
    for shape, placements in LAYOUTS:
        whole = numbers(11, 6, 5)
        if any(isinstance(p, _StridedShard) for p in placements):
            whole = numbers(16, 8, 4)
        on = mesh(*shape)
        strided = any(isinstance(p, _StridedShard) for p in placements)
        dtensor = (
            distribute_tensor(whole, on, placements)
            if not strided
            else uneven(whole, on, placements, random.Random(1))[0]
        )
        if not strided:
            expected = dtensor.__create_chunk_list__()[0]
            found = uneven_dtensor.gather_and_compute_chunk_metadata(dtensor, timeout=TIMEOUT_S)
            assert found.sizes == expected.sizes
            if dtensor.to_local().numel():
                assert found.offsets == expected.offsets
        full = uneven_dtensor.gather_uneven_dtensor_to_full_tensor(dtensor, torch.device("cpu"), timeout=TIMEOUT_S)
        assert torch.equal(full.to_local(), whole)


def splits(world: World) -> list[str]:
    whole = numbers(10, 4)
    dtensor, _ = uneven(whole, mesh(8), [Shard(0)], random.Random(3))
    assert [tuple(part.shape) for part in refitd.split_dtensor(dtensor, 4, timeout=TIMEOUT_S)] == [
        (4, 4),
        (4, 4),
        (2, 4),
    ]
    parts = list(refitd.split_dtensor(dtensor, [3, 7], update_uneven_dtensor_chunk_meta=True, timeout=TIMEOUT_S))
    assert torch.equal(refitd.gather_uneven_dtensor_to_full_tensor(parts[1], timeout=TIMEOUT_S).to_local(), whole[3:])
    said = []
    for sections, dim in (([3, 6], 0), ([12, -2], 0), (0, 0), ([4], 5)):
        with pytest.raises(ValueError) as caught:
            refitd.split_dtensor(dtensor, sections, dim)
        said.append(str(caught.value))
    return said


def violations(world: World) -> list[str]:
    said = []
    on = mesh(8)
    rows = numbers(16, 3)

    def with_chunk(offset: int, size: int, layout: DeviceMesh = on, placements: Sequence[Any] = (Shard(0),)) -> DTensor:
        local = rows[offset : offset + size].clone()
        dtensor = shard_of((16, 3), local, layout, placements)
        chunk = ChunkStorageMetadata(torch.Size((offset, 0)), torch.Size((size, 3)))
        uneven_dtensor._keep_chunk(dtensor, chunk)
        return dtensor

    def invalid(dtensor: DTensor) -> None:
        def check() -> None:
            refitd.validate_uneven_dtensor(dtensor, timeout=TIMEOUT_S)

        said.append(refused(check, UnevenLayoutError))
        with pytest.raises(AssertionError):
            check()

    r = world.rank
    refitd.validate_uneven_dtensor(with_chunk(2 * r, 2), timeout=TIMEOUT_S)
    invalid(with_chunk(2 * r, 1 if r == 3 else 2))  # an interior gap, though every border is touched
    invalid(with_chunk(2 * r - (r == 4), 2))  # an overlap, and a gap behind it
    invalid(with_chunk(2 * r + (r == 7), 2 - (r == 7)))
    grid = mesh(2, 4)
    column = r % 4
    invalid(with_chunk(4 * column + (r == 5), 4 - (r == 5), grid, (Replicate(), Shard(0))))
    local = rows[:2].clone()
    short = shard_of((17, 3), local, on, [Shard(0)])
    said.append(
        refused(lambda: uneven_dtensor.gather_and_compute_chunk_metadata(short, timeout=TIMEOUT_S), UnevenLayoutError)
    )
    return said


def saved_and_loaded(world: World, directory: str) -> None:
    whole = {"a": numbers(13, 4), "b": numbers(5, 6, start=100)}
    rng = random.Random(5)
    held = {
        "outer": {"a": uneven(whole["a"], mesh(8), [Shard(0)], rng)[0]},
        "b": uneven(whole["b"], mesh(2, 4), [Shard(0), Shard(0)], rng)[0],
        "step": 7,
    }
    assert refitd.preprocess_state_dict_for_uneven_dtensor(held, timeout=TIMEOUT_S) is held
    checkpoint.save(held, checkpoint_id=directory)
    fresh = {
        "outer": {"a": uneven(torch.zeros(13, 4), mesh(8), [Shard(0)], random.Random(6))[0]},
        "b": uneven(torch.zeros(5, 6), mesh(2, 4), [Shard(0), Shard(0)], random.Random(7))[0],
        "step": 0,
    }
    refitd.preprocess_state_dict_for_uneven_dtensor(fresh, timeout=TIMEOUT_S)
    checkpoint.load(fresh, checkpoint_id=directory)
    for name, dtensor in (("a", fresh["outer"]["a"]), ("b", fresh["b"])):
        full = refitd.gather_uneven_dtensor_to_full_tensor(dtensor, timeout=TIMEOUT_S)
        assert torch.equal(full.to_local(), whole[name])


def fsdp_to_tensor_parallel_and_back(world: World) -> None:
    whole = {"up": numbers(22, 6), "down": numbers(6, 24, start=500), "bias": numbers(5)}
    placements: dict[str, tuple[tuple[int, ...], list[Any]]] = {
        "up": ((8,), [Shard(0)]),
        "down": ((2, 4), [Shard(1), Shard(1)]),
        "bias": ((2, 4), [Replicate(), Shard(0)]),
    }

    def sharded(seed: int | None, *, is_empty: bool) -> nn.Module:
        module = nn.Module()
        for name, (shape, how) in placements.items():
            value = torch.zeros_like(whole[name]) if is_empty else whole[name]
            if seed is None:
                dtensor = distribute_tensor(value, mesh(*shape), how)
            else:
                dtensor = uneven(value, mesh(*shape), how, random.Random(seed))[0]
            module.register_parameter(name, nn.Parameter(dtensor, requires_grad=False))
        if seed is not None:
            refitd.preprocess_state_dict_for_uneven_dtensor(dict(module.named_parameters()), timeout=TIMEOUT_S)
        return module

    for seed in (None, 1, 2):
        tensor_parallel = linear({"up": torch.zeros(11, 6)}, 0, [world.rank & 6, world.rank | 1])
        tensor_parallel.register_parameter("down", nn.Parameter(torch.zeros(6, 24)))
        tensor_parallel.register_parameter("bias", nn.Parameter(torch.zeros(5)))
        refitd.swap_model_weights(sharded(seed, is_empty=False), tensor_parallel, "gloo", timeout=TIMEOUT_S)
        assert torch.equal(tensor_parallel.up, whole["up"].chunk(2)[world.rank % 2])
        assert torch.equal(tensor_parallel.down, whole["down"]) and torch.equal(tensor_parallel.bias, whole["bias"])
        back = sharded(3 if seed == 2 else seed, is_empty=True)
        refitd.swap_model_weights(tensor_parallel, back, "gloo", timeout=TIMEOUT_S)
        for name, value in whole.items():
            full = refitd.gather_uneven_dtensor_to_full_tensor(back.get_parameter(name).data, timeout=TIMEOUT_S)
            assert torch.equal(full.to_local(), value), (seed, name)


class Layers(nn.Module):
    """Column- and row-parallel layers of uneven sizes, and a norm that no mesh dimension of tp cuts."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(3, n) for n in sizes)
        # full_tensor itself is wrong where tp leaves a rank no column and FSDP cuts rows: sizes that 4 ranks share
        self.down = nn.ModuleList(nn.Linear(n, 3, bias=False) for n in sizes if n in (7, 8, 13, 16, 97))
        self.norm = nn.LayerNorm(7)


def fsdp_over_tensor_parallelism(world: World, shape: Sequence[int], sizes: Sequence[int]) -> None:
    """Models sharded by torch's functions send and receive every element, as full_tensor shows it."""
    names = ("replicate", "shard", "tp")[-len(shape) :]
    on = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)

    def sharded(start: int | None) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        model = Layers(sizes).requires_grad_(False)
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.zeros(()) if start is None else numbers(*parameter.shape, start=start + 1000 * i))
        whole = {name: parameter.clone() for name, parameter in model.named_parameters()}
        parallelize_module(model, on["tp"], {"up.*": ColwiseParallel(), "down.*": RowwiseParallel()})
        fully_shard(model, mesh=on[names[:-1]])
        return model, whole

    source, whole = sharded(7)
    for name, parameter in source.named_parameters():
        assert isinstance(parameter, DTensor) and torch.equal(parameter.full_tensor(), whole[name]), name
        found = uneven_dtensor.gather_uneven_dtensor_to_full_tensor(parameter.data, timeout=TIMEOUT_S)
        assert torch.equal(found.to_local(), whole[name]), name
    plain = Layers(sizes).requires_grad_(False)
    for parameter in plain.parameters():
        parameter.zero_()
    refitd.swap_model_weights(source, plain, "gloo", timeout=TIMEOUT_S)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, whole[name]), name
    back = sharded(None)[0]
    refitd.swap_model_weights(plain, back, "gloo", timeout=TIMEOUT_S)
    for name, parameter in back.named_parameters():
        assert isinstance(parameter, DTensor) and torch.equal(parameter.full_tensor(), whole[name]), name


def shards_in_an_order_of_their_own(world: World) -> None:
    """A shard_order says which mesh dimension cuts first; a strided shard without a valid order cuts as it states."""
    cases: list[tuple[tuple[int, ...], list[Any], dict[str, Any]]] = [
        ((2, 4), [Shard(0), Shard(0)], {"shard_order": (ShardOrderEntry(0, (1, 0)),)}),
        ((2, 2, 2), [Shard(0), Shard(0), Shard(0)], {"shard_order": (ShardOrderEntry(0, (2, 0, 1)),)}),
        ((8,), [_StridedShard(0, split_factor=3)], {}),
        ((2, 4), [_StridedShard(0, split_factor=3), Shard(1)], {}),
        ((2, 4), [Shard(0), _StridedShard(0, split_factor=2)], {"use_strided_shard_as_shard_order": False}),
    ]
    for rows in (1, 5, 13, 30):
        for shape, placements, fields in cases:
            whole = numbers(rows, 6)
            meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
            spec = DTensorSpec(mesh(*shape), tuple(placements), meta, **fields)
            splits = [split for _, split in mesh_splits(DTensor(whole, spec, requires_grad=False))]
            local, tiles = split_tiles("w", whole.shape, splits)
            held = torch.zeros(local)
            for tile in tiles:
                part = whole[tuple(slice(o, o + n) for o, n in zip(tile.offset, tile.size, strict=True))]
                held.as_strided(tile.size, tile.local_stride, tile.local_offset).copy_(part)
            dtensor = DTensor(held, spec, requires_grad=False)
            assert torch.equal(dtensor.full_tensor(), whole), (rows, shape, placements)
            source, target = nn.Module(), nn.Module()
            source.register_parameter("w", nn.Parameter(dtensor, requires_grad=False))
            source.w._spec = spec  # torch's detach forgets the order
            target.register_parameter("w", nn.Parameter(torch.zeros(rows, 6), requires_grad=False))
            refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S)
            assert torch.equal(target.w, whole), (rows, shape, placements)
            if all(split.factor == 1 for split in splits):
                found = uneven_dtensor.gather_uneven_dtensor_to_full_tensor(dtensor, timeout=TIMEOUT_S)
                assert torch.equal(found.to_local(), whole)
                for part in refitd.split_dtensor(dtensor, [rows // 2, rows - rows // 2], timeout=TIMEOUT_S):
                    refitd.validate_uneven_dtensor(part, timeout=TIMEOUT_S)
