"""MXFP8 refits between real processes: in all layouts and modes, the bytes equal one conversion."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import refitd
from refitd.describe.module import RankGroups
from refitd.mxfp8.format import BLOCK, Rounding
from tests.spmd.cases import TIMEOUT_S, World, linear, refused
from tests.spmd.layouts import Layout, Model, Whole, bits, build, random_pair
from tests.support.mxfp8 import quantized_once

MODEL = Model(
    layer={
        "norm.weight": Whole((10,), dtype=torch.float32),
        "norm.wide": Whole((64,)),
        "qkv.weight": Whole((72, 64), 0),
        "qkv.bias": Whole((768,), 0),
        "proj.weight": Whole((5, 192), 1),  # cut into 24, 48 or 96: inside blocks
        "wide.weight": Whole((3, 768), 1),
        "gated.weight": Whole((2, 3, 384), 2, stride=2),
        "mlp.fc1.weight": Whole((96, 32), 0, stride=2),
        "mixer.in_proj.weight": Whole((120, 96), 0, blocks=(24, 72, 24)),
        "mixer.out_proj.weight": Whole((130, 480), 1, blocks=(96, 288, 96)),
    },
    expert={"linear_fc1.weight": Whole((48, 32), 0, stride=2), "linear_fc2.weight": Whole((4, 192), 1)},
    outer={"embedding.weight": (0, Whole((240, 160), 0)), "head.scale": (-1, Whole((), dtype=torch.float64))},
)
EXPERTS = set(MODEL.expert)


def kinds(source: Layout, target: Layout, *, on_send: bool) -> dict[str, bool]:
    """Return which tensors of the model can be converted, by the ends of their names."""
    found = {}
    for name, whole in {**MODEL.layer, **MODEL.expert, "embedding.weight": MODEL.outer["embedding.weight"][1]}.items():
        counts = [(at.expert_tp if name in EXPERTS else at.tp) for at in (source, target)]
        last = whole.dim == len(whole.shape) - 1
        fits = whole.dtype == torch.bfloat16 and whole.shape[-1] // (counts[1] if last else 1) % BLOCK == 0
        if on_send and last:
            sizes = whole.blocks or (whole.shape[-1] // whole.stride,) * whole.stride
            fits = fits and all(size // count % BLOCK == 0 for size in sizes for count in counts)
        found[name] = fits
    return found


def random_refits(world: World, seeds: Sequence[int]) -> tuple[int, int]:
    """Return how many tensors were converted on the way, and how many of them had blocks that were cut."""
    count = cut = 0
    for seed in seeds:
        size = min(world.size, (2, 3, 4, 5, 6, 8)[seed % 6])
        if world.rank < size:
            found = _random_refit(world, seed, size)
            count, cut = count + found[0], cut + found[1]
    return count, cut


def _random_refit(world: World, seed: int, size: int) -> tuple[int, int]:
    rng = random.Random(seed)
    source_layout, target_layout, kind = random_pair(seed, size)
    on_send, is_swizzled, rounding = seed % 2 == 1, rng.random() < 0.5, rng.choice(list(Rounding))
    senders_have_one = on_send or rng.random() < 0.5
    what = f"seed {seed} ({kind}, on_send={on_send}, swizzled={is_swizzled}): {source_layout} -> {target_layout}"
    source = build(source_layout, world.rank, seed, is_filled=True, model=MODEL)
    target = build(target_layout, world.rank, seed, is_filled=False, model=MODEL)
    can = kinds(source_layout, target_layout, on_send=on_send)

    def converted(name: str) -> bool:
        return any(fits and f".{kind}" in f".{name}" for kind, fits in can.items())

    buffers = {
        name: refitd.MXFP8Buffer.empty(tuple(tensor.shape), is_swizzled=is_swizzled)
        for name, tensor in (target.tensors if target else {}).items()
        if converted(name)
    }
    for buffer in buffers.values():
        buffer.data.fill_(0xEE), buffer.scale.fill_(0xEE)
    pointers = {name: (buffer.data.data_ptr(), buffer.scale.data_ptr()) for name, buffer in buffers.items()}
    names = {name for side in (source, target) if side for name in side.tensors if converted(name)}
    transform = None
    if target is not None or senders_have_one:
        transform = refitd.MXFP8ReshardTransform(names, buffers, "", on_send, rounding=rounding)
    for _ in range(2):  # the second swap uses the cached plan of the first
        refitd.swap_model_weights(
            source and source.module,
            target and target.module,
            "gloo",
            world.first[size],
            transform=transform,
            timeout=TIMEOUT_S,
        )
    if target is None:
        return 0, 0
    for name, expected in target.expected.items():
        found = target.tensors[name]
        if name not in buffers:
            assert bits(found) == bits(expected), f"{what}: {name} is wrong"
            continue
        data, scale = quantized_once(expected, rounding, is_swizzled=is_swizzled)
        assert bits(buffers[name].data) == bits(data), f"{what}: data of {name}"
        assert bits(buffers[name].scale) == bits(scale), f"{what}: scale of {name}"
        assert (buffers[name].data.data_ptr(), buffers[name].scale.data_ptr()) == pointers[name]
        assert not any(bits(found)), f"{what}: the module's {name} was written"
    inside = [name for name in buffers if _is_cut(name, source_layout)]
    return len(buffers), len(inside)


def _is_cut(name: str, source: Layout) -> bool:
    """Return whether ranks of the source have pieces of blocks."""
    for kind, whole in {**MODEL.layer, **MODEL.expert}.items():
        if f".{kind}" in f".{name}" and whole.dim == len(whole.shape) - 1:
            count = source.expert_tp if kind in EXPERTS else source.tp
            sizes = whole.blocks or (whole.shape[-1] // whole.stride,) * whole.stride
            return any(size // count % BLOCK for size in sizes)
    return False


# --- one tensor ---------------------------------------------------------------------------------------------


def values(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)


def swap(source: nn.Module | None, target: nn.Module | None, transform: Any, **options: Any) -> Any:
    return refitd.swap_model_weights(source, target, "gloo", transform=transform, timeout=TIMEOUT_S, **options)


def check_buffer(buffer: refitd.MXFP8Buffer, expected: torch.Tensor, rounding: Rounding = Rounding.RCEIL) -> None:
    data, scale = quantized_once(expected, rounding, is_swizzled=buffer.is_swizzled)
    assert bits(buffer.data) == bits(data) and bits(buffer.scale) == bits(scale)


def odd_sources(world: World) -> None:
    """Strided tensors, uneven DTensor cuts along either dimension, float32 that is declared, names with a prefix."""
    whole = values(130, 192)
    mesh = init_device_mesh("cpu", (world.size,))
    for on_send in (False, True):
        for dim, is_strided in ((0, False), (1, False), (None, True)):
            if dim is None:
                held = whole.t().contiguous().t() if is_strided else whole
                source = linear({"decoder": held}) if world.rank == 3 else None
            else:
                # 130 rows over 8 ranks, or 192 columns in parts of 24
                mine = whole.chunk(world.size, dim)
                local = mine[world.rank] if world.rank < len(mine) else whole.narrow(dim, 0, 0)
                shard = DTensor.from_local(
                    local.contiguous(), mesh, [Shard(dim)], shape=whole.shape, stride=whole.stride(), run_check=False
                )
                source = nn.Module()
                source.register_parameter("decoder", nn.Parameter(shard, requires_grad=False))
            target = linear({"decoder": torch.zeros(130, 192, dtype=torch.bfloat16)}) if world.rank % 3 == 0 else None
            buffer = refitd.MXFP8Buffer.empty((130, 192), is_swizzled=dim != 0)
            buffers = {"coder": buffer} if target else {}
            transform = refitd.MXFP8ReshardTransform({"decoder"}, buffers, "de", on_send)
            if on_send and dim == 1:
                said = refused(lambda s=source, d=target, t=transform: swap(s, d, t), refitd.RefusedError)
                assert "decoder" in said and "cuts a block of 32" in said, said
                assert not buffer.data.any() and not buffer.scale.any()
                continue
            swap(source, target, transform)
            if target:
                check_buffer(buffer, whole)


def wide_sources(world: World) -> None:
    """Senders convert float32 directly, or through bfloat16 where that is declared; a module may be in E4M3."""
    whole = (torch.randn(6, 64, generator=torch.Generator().manual_seed(3)) * 0.02).contiguous()
    for on_send, casts in ((False, {"w": torch.bfloat16}), (True, {"w": torch.bfloat16}), (True, None)):
        source = linear({"w": whole}) if world.rank == 1 else None
        target = linear({"w": torch.zeros(6, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)})
        buffer = refitd.MXFP8Buffer(target.w.data, torch.zeros(6, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu))
        transform = refitd.MXFP8ReshardTransform({"w"}, {"w": buffer}, "", on_send)
        swap(source, target, transform, casts=casts)
        check_buffer(buffer, whole if casts is None else whole.to(torch.bfloat16))
    source = linear({"w": whole}) if world.rank == 1 else None
    held = {"w": torch.zeros(6, 64, dtype=torch.bfloat16)}
    for on_send in (False, True):
        held["w"].zero_()
        target = linear({"w": torch.zeros(6, 64, dtype=torch.bfloat16)})
        swap(source, target, refitd.CastTransform({"w"}, held, "", on_send))
        assert bits(held["w"]) == bits(whole.to(torch.bfloat16)) and not target.w.any()


class Quantized(torch.Tensor):
    """A parameter as in Transformer Engine: bfloat16 by name, MXFP8 inside."""

    _rowwise_data: torch.Tensor
    _rowwise_scale_inv: torch.Tensor

    @staticmethod
    def of(values: torch.Tensor) -> Quantized:
        made = torch.Tensor._make_wrapper_subclass(Quantized, values.shape, dtype=torch.bfloat16)
        buffer = refitd.MXFP8Buffer.empty(tuple(values.shape))
        buffer.quantize(values)
        made._rowwise_data, made._rowwise_scale_inv = buffer.data, buffer.scale
        return made

    def detach(self) -> Quantized:
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        raise NotImplementedError(f"{func} would dequantize it")


def quantized_sources(world: World) -> str:
    whole = values(40, 96)
    source = None
    if world.rank < 2:
        source = nn.Module()
        source.pg_collection = RankGroups(tp=[0, 1])
        param = nn.Parameter(Quantized.of(whole.chunk(2)[world.rank]), requires_grad=False)
        param.tensor_model_parallel, param.partition_dim = True, 0
        source.register_parameter("w", param)
    target = linear({"w": torch.zeros(40, 96, dtype=torch.bfloat16)}) if world.rank % 2 else None
    buffer = refitd.MXFP8Buffer.empty((40, 96), is_swizzled=True)

    def transform(on_send: bool, **options: bool) -> refitd.MXFP8ReshardTransform:
        return refitd.MXFP8ReshardTransform({"w"}, {"w": buffer} if target else {}, "", on_send, **options)

    said = refused(lambda: swap(source, target, transform(False)))
    held = refitd.MXFP8Buffer.empty((40, 96))
    held.quantize(whole)
    # after dequantizing and quantizing again the values are equal; the scales may differ
    for chosen, expected in ((transform(True), whole), (transform(False, dequantize=True), held.dequantize())):
        buffer.data.zero_(), buffer.scale.zero_()
        swap(source, target, chosen)
        if target:
            check_buffer(buffer, expected)
            assert torch.equal(buffer.dequantize(), held.dequantize())
    return said


# --- refusals -----------------------------------------------------------------------------------------------


def refusals(world: World) -> dict[str, str]:
    """Return the error texts where the ends do not match; in all of them the target is unchanged."""
    buffer = refitd.MXFP8Buffer.empty((8, 64))
    small = refitd.MXFP8Buffer.empty((8, 32))
    is_target = world.rank >= 4

    def attempt(senders: Any, receivers: Any, dtype: torch.dtype = torch.bfloat16) -> str:
        source = linear({"v": torch.ones(3), "w": torch.ones(8, 64).to(dtype)}) if world.rank == 0 else None
        target = linear({"v": torch.zeros(3), "w": torch.zeros(8, 64).to(torch.bfloat16)}) if is_target else None
        said = refused(
            lambda: swap(source, target, receivers() if is_target else senders()), refitd.PlanError, refitd.RefusedError
        )
        assert not buffer.data.any() and not buffer.scale.any()
        assert target is None or (not target.w.any() and not target.v.any())
        return said

    def on_send(held: Mapping[str, Any]) -> Any:
        return lambda: refitd.MXFP8ReshardTransform({"w"}, held, "", True)

    def on_receive(held: Mapping[str, Any]) -> Any:
        return lambda: refitd.MXFP8ReshardTransform({"w"}, held)

    def nothing() -> None:
        return None

    return {
        "only senders": attempt(on_send({}), nothing),
        "only receivers": attempt(nothing, on_send({"w": buffer})),
        "modes differ": attempt(on_send({}), on_receive({"w": buffer})),
        "shape": attempt(nothing, on_receive({"w": small})),
        "no buffer": attempt(nothing, on_receive({"decoder.w": buffer})),
        "float32 arrives": attempt(nothing, on_receive({"w": buffer}), torch.float32),
        "float16 source": attempt(on_send({}), on_send({"w": buffer}), torch.float16),
    }


def two_tensors_per_transfer_stay_apart(world: World) -> tuple[int, int]:
    """Every rank is source and destination, also for itself, in two halves of the ranks."""
    whole = values(64, 128)
    half = world.size // 2
    first = world.rank // half * half
    source = linear({"w": whole.chunk(half)[world.rank % half].clone()}, 0, range(first, first + half))
    target = linear({"w": torch.zeros(64, 128, dtype=torch.bfloat16)})
    totals = []
    for on_send in (False, True):
        buffer = refitd.MXFP8Buffer.empty((64, 128), is_swizzled=True)
        result = swap(source, target, refitd.MXFP8ReshardTransform({"w"}, {"w": buffer}, "", on_send))
        check_buffer(buffer, whole)
        totals.append(result.received_bytes + result.local_bytes)
    return totals[0], totals[1]
