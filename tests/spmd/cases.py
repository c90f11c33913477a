"""Test functions that the processes of a pool run. Every function is called on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import refitd
from refitd.copy_services import gloo
from refitd.copy_services.pieces import TensorPiece
from refitd.describe.module import RankGroups, describe_module
from tests.spmd.layouts import Built, Layout, bits, build, random_pair

TIMEOUT_S = 60.0


class World:
    """One process's place, and groups of the first n ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.first = {n: dist.new_group(list(range(n))) for n in range(2, size)}
        self.first[size] = dist.group.WORLD


def ranks_of_group(world: World) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(world.first[world.size]))


# --- random layouts -----------------------------------------------------------------------------------------


def random_pairs(world: World, seeds: Sequence[int]) -> int:
    for seed in seeds:
        size = min(world.size, (2, 3, 4, 5, 3, 6, 4, 7, 8)[seed % 9])
        if world.rank >= size:
            continue
        source, target, kind = random_pair(seed, size)
        swap_and_check(world, source, target, seed, f"seed {seed} ({kind}): {source} -> {target}", size)
    return len(seeds)


def swap_and_check(world: World, source_layout: Layout, target_layout: Layout, seed: int, what: str, size: int) -> None:
    source = build(source_layout, world.rank, seed, is_filled=True)
    target = build(target_layout, world.rank, seed, is_filled=False)
    pointers = {} if target is None else {name: t.data_ptr() for name, t in target.tensors.items()}
    refitd.swap_model_weights(
        source and source.module, target and target.module, "gloo", world.first[size], timeout=TIMEOUT_S
    )
    if target is not None:
        check(target, what, pointers)
    if source is not None:
        check(source, f"{what}: source", {name: t.data_ptr() for name, t in source.tensors.items()})


def check(built: Built, what: str, pointers: Mapping[str, int]) -> None:
    for name, expected in built.expected.items():
        found = built.tensors[name]
        assert bits(found) == bits(expected), f"{what}: {name} is wrong"
        assert found.data_ptr() == pointers[name], f"{what}: {name} has moved"
        assert found.dtype == expected.dtype


# --- plans --------------------------------------------------------------------------------------------------


def plan_is_the_pure_one(world: World, seeds: Sequence[int]) -> None:
    for seed in seeds:
        layouts = random_pair(seed, world.size)[:2]
        rosters = []
        for rank in range(world.size):
            sides = []
            for layout in layouts:
                built = build(layout, rank, seed, is_filled=False)
                sides.append([] if built is None else describe_module(built.module, rank))
            rosters.append(refitd.Roster(rank, *sides, node="one"))
        modules = [build(layout, world.rank, seed, is_filled=False) for layout in layouts]
        plan = refitd.build_centralized_reshard_plan(*(b and b.module for b in modules), timeout=TIMEOUT_S)
        pure = refitd.plan_reshard(rosters)[world.rank]
        assert list(plan.send_ops) == list(pure.send_ops), seed
        assert list(plan.recv_ops) == list(pure.recv_ops), seed


def idle_everywhere(world: World) -> tuple[int, int]:
    plan = refitd.build_centralized_reshard_plan(None, None, timeout=TIMEOUT_S)
    refitd.swap_model_weights(None, None, "gloo", timeout=TIMEOUT_S)
    return len(plan.send_ops), len(plan.recv_ops)


def linear(tensors: Mapping[str, torch.Tensor], dim: int | None = None, tp: Sequence[int] | None = None) -> nn.Module:
    """Return a module with these parameters, split on `dim` over the ranks `tp` where they are given."""
    module = nn.Module()
    module.pg_collection = RankGroups(tp=tp)
    for name, tensor in tensors.items():
        param = nn.Parameter(tensor, requires_grad=False)
        if dim is not None:
            param.tensor_model_parallel, param.partition_dim = True, dim
        module.register_parameter(name, param)
    return module


def numbers(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) + start).view(shape).to(dtype)


def refused(call: Callable[[], object], *kinds: type[Exception]) -> str:
    with pytest.raises(kinds or (refitd.PlanError,)) as caught:
        call()
    return str(caught.value)


def errors_reach_every_rank(world: World) -> list[str]:
    whole = numbers(8, 3)
    holder = linear({"w": whole}) if world.rank == 0 else None
    said = [
        refused(
            lambda: refitd.build_centralized_reshard_plan(
                holder, linear({"w": whole, "extra": whole.clone()}) if world.rank else None, timeout=TIMEOUT_S
            )
        )
    ]
    # invalid modules on single ranks; the second one even raises an unforeseen error
    broken = linear({"w": whole}, dim=5 if world.rank in (3, 5) else 0, tp=range(world.size))
    said.append(refused(lambda: refitd.swap_model_weights(holder, broken, "gloo", timeout=TIMEOUT_S)))
    odd: Any = object() if world.rank == 2 else None
    said.append(refused(lambda: refitd.swap_model_weights(None, odd, "gloo", timeout=TIMEOUT_S), Exception))
    target = linear({"w": torch.zeros(8, 3)})
    refitd.swap_model_weights(holder, target, "gloo", timeout=TIMEOUT_S)
    assert torch.equal(target.w, whole)
    return said


# --- dtypes and memory --------------------------------------------------------------------------------------


def dtypes(world: World) -> str:
    whole = numbers(64, 3) / 7
    source = linear({"w": whole.chunk(2)[world.rank].clone()}, 0, [0, 1]) if world.rank < 2 else None
    target = linear({"w": torch.zeros(64, 3, dtype=torch.bfloat16)})
    said = refused(lambda: refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S))
    refitd.swap_model_weights(source, target, "gloo", casts={"w": torch.bfloat16}, timeout=TIMEOUT_S)
    assert torch.equal(target.w, whole.to(torch.bfloat16))
    small = gloo.GlooService(message_bytes=64)
    target.w.zero_()
    refitd.reshard_model_weights(source, target, small, casts={"*": torch.bfloat16}, timeout=TIMEOUT_S)
    assert torch.equal(target.w, whole.to(torch.bfloat16))
    return said


def tensors_with_strides_of_their_own(world: World) -> None:
    whole = {"a": numbers(12, 8), "b": numbers(12, 8, start=1000)}
    tp = list(range(4))
    source = target = None
    if world.rank < 4:
        source = linear({n: t.chunk(4)[world.rank].t().contiguous().t() for n, t in whole.items()}, 0, tp)
    else:
        backing = torch.full((12, 6), -1.0)
        target = linear({"a": backing[:, 1:5:2], "b": torch.zeros(2, 12).t()}, 1, [4, 5, 6, 7])
        assert not target.a.is_contiguous() and not target.b.is_contiguous()
    refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S)
    if target is not None:
        for name, tensor in whole.items():
            assert torch.equal(target.get_parameter(name), tensor.chunk(4, 1)[world.rank - 4])
        backing[:, 1:5:2] = -1
        assert (backing == -1).all()


def every_dtype(world: World) -> None:
    generator = torch.Generator().manual_seed(1)
    names = ["bool", "uint8", "int16", "float16", "bfloat16", "int32", "int64", "float64", "complex64", "complex128"]
    names += ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
    whole = {}
    for name in names:
        dtype = getattr(torch, name)
        raw = torch.randint(0, 2 if name == "bool" else 256, (24 * 5 * dtype.itemsize,), generator=generator)
        whole[f"w_{name}"] = raw.to(torch.uint8).view(dtype).view(24, 5)
    source = linear({n: t[world.rank * 3 : world.rank * 3 + 3].clone() for n, t in whole.items()}, 0, range(8))
    target = linear({n: torch.zeros_like(t) for n, t in whole.items()})
    for message_bytes in (None, 32):
        service = gloo.GlooService(message_bytes=message_bytes)
        refitd.reshard_model_weights(source, target, service, timeout=TIMEOUT_S)
        for name, value in whole.items():
            assert bits(target.get_parameter(name)) == bits(value), name
            target.get_parameter(name).data.view(torch.uint8).zero_()


def one_tensor_in_both_models(world: World) -> str:
    shared = numbers(6, 2)
    source, target = linear({"w": shared}), linear({"w": shared})
    refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S)
    assert torch.equal(shared, numbers(6, 2))
    rows = numbers(3, 2)
    moved = linear({"w": rows if world.rank < 2 else rows.clone()}, 0, [world.rank & 6, world.rank | 1])
    other = linear({"w": rows}, 0, [world.rank | 1, world.rank & 6])
    return refused(lambda: refitd.swap_model_weights(moved, other, "gloo", timeout=TIMEOUT_S), refitd.RefusedError)


# --- caches -------------------------------------------------------------------------------------------------


def caches(world: World) -> None:
    from refitd.inprocess.refit import _caches

    refitd.clear_all_caches()
    whole = numbers(16, 2)
    forward, backward = list(range(8)), list(reversed(range(8)))
    for order in (forward, backward, forward, backward):
        target = linear({"w": torch.zeros(2, 2)}, 0, order)
        refitd.swap_model_weights(linear({"w": whole}) if world.rank == 0 else None, target, "gloo", timeout=TIMEOUT_S)
        assert torch.equal(target.w, whole.chunk(8)[order.index(world.rank)])
    assert len(_caches.plans) == 2 and len(_caches.services) == 1
    service = refitd.get_or_create_service("gloo")
    assert service is refitd.get_or_create_service("gloo") is refitd.get_or_create_service("gloo", world.first[8])
    if world.rank < 3:
        other = refitd.get_or_create_service("gloo", world.first[3])
        assert other is not service and other.ranks == (0, 1, 2)
    with pytest.raises(refitd.ConfigError, match="nvshmem"):
        refitd.get_or_create_service("nvshmem")
    # a rank that has lost its cached plan must not leave the others with theirs
    if world.rank == 4:
        refitd.clear_plan_cache()
    target.w.zero_()
    refitd.swap_model_weights(linear({"w": whole}) if world.rank == 0 else None, target, "gloo", timeout=TIMEOUT_S)
    assert torch.equal(target.w, whole.chunk(8)[backward.index(world.rank)])
    refitd.clear_service_cache()
    assert not service.is_usable and refitd.get_or_create_service("gloo") is not service


def ranks_of_two_worlds(world: World) -> None:
    """The engines number their world from 0: ranks 3 to 7 of ours."""
    whole = numbers(10, 3)
    source = linear({"w": whole.chunk(2)[world.rank].clone()}, 0, [0, 1]) if world.rank < 2 else None
    target = linear({"w": torch.zeros(2, 3)}, 0, range(5)) if world.rank >= 3 else None
    refitd.swap_model_weights(source, target, "gloo", None, 0, 3, timeout=TIMEOUT_S)
    if target is not None:
        assert torch.equal(target.w, whole.chunk(5)[world.rank - 3])


def wrapped_models(world: World) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    whole = numbers(4, 4)
    source = Wrapper(Wrapper(linear({"w": whole}))) if world.rank == 7 else None
    target = linear({"w": torch.zeros(4, 4)})
    refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S)
    assert torch.equal(target.w, whole)


# --- transforms ---------------------------------------------------------------------------------------------


class Negated(refitd.ReshardTransform):
    """Keeps the negated values in separate buffers."""

    def __init__(self, buffers: Mapping[str, torch.Tensor], parts: int = 1) -> None:
        self.buffers = buffers
        self.parts = parts

    def should_transform(self, param_name: str) -> bool:
        return param_name == "w"

    def prepare_send(self, param_name: str, src_slice: Any, src_param: torch.Tensor) -> list[torch.Tensor]:
        piece = src_param[src_slice]
        return [piece] if self.parts == 1 else [piece * 2, (piece.sum(),)[0].reshape(1).to(torch.float64)]

    def prepare_recv(self, param_name: str, dst_slice: Any) -> list[torch.Tensor]:
        piece = torch.empty_like(self.buffers[param_name][dst_slice])
        return [piece] if self.parts == 1 else [piece, torch.empty(1, dtype=torch.float64)]

    def finalize_recv(self, param_name: str, dst_slice: Any, recv_buffers: list[torch.Tensor]) -> None:
        piece = recv_buffers[0] / self.parts
        if self.parts == 2:
            assert piece.sum() == recv_buffers[1]
        self.buffers[param_name][dst_slice] = -piece


def transforms(world: World) -> None:
    """The gated halves of a destination are one row of the plan and two pieces."""
    whole = numbers(16, 3)
    gate, up = whole.chunk(2)
    held = torch.cat([gate.chunk(2)[world.rank % 2], up.chunk(2)[world.rank % 2]])
    for parts in (1, 2):
        source = linear({"w": whole, "v": whole}) if world.rank in (0, 4) else None
        target = linear({"w": torch.zeros(8, 3), "v": torch.zeros(8, 3)}, 0, [world.rank & 6, world.rank | 1])
        target.w.partition_stride = target.v.partition_stride = 2
        buffers = {"w": torch.zeros(8, 3)}
        transform = Negated(buffers, parts)
        if parts == 1 and source is None:
            refitd.swap_model_weights(source, target, "gloo", transform=transform, timeout=TIMEOUT_S)
        elif parts == 1:  # a sender needs none
            mine = Negated(buffers) if world.rank == 0 else None
            refitd.swap_model_weights(source, target, "gloo", transform=mine, timeout=TIMEOUT_S)
            if mine is None:
                assert torch.equal(target.w, held)
                buffers["w"] = -held
        else:
            refitd.swap_model_weights(source, target, "gloo", transform=transform, timeout=TIMEOUT_S)
        assert torch.equal(buffers["w"], -held)
        assert torch.equal(target.v, held)


def failing_transform(world: World) -> str:
    class Failing(Negated):
        def finalize_recv(self, param_name: str, dst_slice: Any, recv_buffers: list[torch.Tensor]) -> None:
            raise ValueError("no room")

    source = linear({"w": numbers(4, 4)}) if world.rank == 0 else None
    transform = Failing({"w": torch.zeros(4, 4)}) if world.rank == 6 else None
    target = linear({"w": torch.zeros(4, 4)})

    def swap() -> object:
        return refitd.swap_model_weights(source, target, "gloo", transform=transform, timeout=TIMEOUT_S)

    return refused(swap, refitd.RefitFailed)


# --- the service --------------------------------------------------------------------------------------------


def wrong_bytes(world: World, service: Any) -> str:
    class Lossy(TensorPiece):
        def unpack(self, start: int, end: int, found: torch.Tensor) -> None:
            pass

    if world.rank == 0:
        service.send(1, torch.ones(9), 5)
    if world.rank == 5:
        service.receive(1, Lossy(torch.zeros(9, 2)[:, 0], torch.float32), 0)
    said = refused(lambda: service.run(TIMEOUT_S), refitd.TransportError)
    service.run(TIMEOUT_S)
    return said


# --- time ---------------------------------------------------------------------------------------------------


def too_few_come(world: World, timeout: float) -> str:
    target = linear({"w": torch.zeros(4)})
    return refused(lambda: refitd.swap_model_weights(None, target, "gloo", timeout=timeout), refitd.TransportError)


def service_waits_no_longer(world: World, timeout: float) -> tuple[str, bool]:
    service = gloo.GlooService()
    said = refused(lambda: service.run(timeout), refitd.TransportError)
    said += " / " + refused(lambda: service.run(timeout), refitd.TransportError)
    return said, service.is_usable
