"""Trainers and replicas of a small model with two tensors that are converted to MXFP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

import refitd
from refitd import MXFP8Buffer, MXFP8Offer, ParameterMetadata, Rounding
from tests.support import mxfp8, shards
from tests.support.names import named

# name -> shape, the dimension that is split, or None; `w` and `v` are converted
SHAPES: shards.Model = {
    "v": ((192, 256), 1),
    "w": ((320, 128), 0),
    "norm": ((128,), None),
}
CONVERTED = ("v", "w")
OFFER = MXFP8Offer(CONVERTED)
Shard = dict[str, torch.Tensor]


def model(seed: int, dtype: torch.dtype = torch.bfloat16) -> Shard:
    generator = torch.Generator().manual_seed(seed)
    full = {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, _) in SHAPES.items()}
    full["v"][3, 32:64] = 0.0  # a block of zeros
    full["v"][5, 70] = 1e30
    return full


def cut(full: Mapping[str, torch.Tensor], rank: int, world: int) -> Shard:
    return shards.cut(full, rank, world, SHAPES)


def describe(shard: Mapping[str, torch.Tensor], rank: int, world: int, **fields: object) -> list[ParameterMetadata]:
    found = shards.describe(shard, rank, world, SHAPES)
    return [replace(meta, **fields) if meta.name in CONVERTED else meta for meta in found]


def oracle(full: torch.Tensor, rounding: Rounding = Rounding.RCEIL) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole tensor, converted once: data and row-major scales."""
    buffer = MXFP8Buffer(*(t.clone() for t in empty_parts(tuple(full.shape), False)), rounding=rounding)
    buffer.quantize(full.to(torch.bfloat16))
    return buffer.data, buffer.scale


def empty_parts(shape: tuple[int, ...], swizzled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    made = MXFP8Buffer.empty(shape, is_swizzled=swizzled)
    return made.data, made.scale


def expected(full: Shard, rank: int, world: int, swizzled: bool, rounding: Rounding = Rounding.RCEIL) -> Shard:
    """Return the expected tensors of one rank, by `name.data`, `name.scale`, or name."""
    found = {}
    for name, tensor in full.items():
        if name not in CONVERTED:
            found[name] = tensor.to(torch.bfloat16)
            continue
        dim = SHAPES[name][1] or 0
        data, scale = (part.chunk(world, dim)[rank].contiguous() for part in oracle(tensor, rounding))
        found[f"{name}.data"] = data
        found[f"{name}.scale"] = torch.from_numpy(mxfp8.swizzled(scale.numpy())) if swizzled else scale
    return found


class Replica:
    """Ranks of one replica, in MXFP8."""

    def __init__(
        self,
        clients: tuple[refitd.Client, ...],
        name: str,
        world: int,
        *,
        swizzled: bool = False,
        in_arena: bool = False,
        flips: bool = False,
        rounding: Rounding | None = None,
        cast_from: str | None = None,
        **options: object,
    ) -> None:
        self.world, self.swizzled, self.rounding = world, swizzled, rounding or Rounding.RCEIL
        self.held: list[dict[str, object]] = []
        self.targets = []
        for rank in range(world):
            client = clients[rank % len(clients)]
            logical = cut(model(0), rank, world)
            held: dict[str, object] = {}
            if flips:  # all of one arena
                wanted = {name: (tuple(t.shape), t.dtype) for name, t in expected(logical, 0, 1, swizzled).items()}
                live = client.allocate(wanted)
            for key, tensor in logical.items():
                if flips:
                    whole = key not in CONVERTED
                    parts = () if whole else (live[f"{key}.data"], live[f"{key}.scale"])
                    held[key] = live[key] if whole else MXFP8Buffer(*parts, rounding=rounding)
                    continue
                if key not in CONVERTED:
                    held[key] = torch.zeros_like(tensor)
                    if in_arena:
                        held[key] = client.allocate({key: (tuple(tensor.shape), tensor.dtype)})[key]
                    continue
                parts = empty_parts(tuple(tensor.shape), swizzled)
                if in_arena:
                    made = client.allocate({str(i): (tuple(p.shape), torch.uint8) for i, p in enumerate(parts)})
                    parts = (made["0"], made["1"])
                held[key] = MXFP8Buffer(*parts, rounding=rounding)
            fields = {} if cast_from is None else {"cast_from": cast_from}
            self.held.append(held)
            self.targets.append(
                client.register_target(
                    named("m"),
                    held,
                    replica=name,
                    rank=rank,
                    world_size=world,
                    metadata=describe(logical, rank, world, **fields),
                    **options,
                )
            )

    def live(self, rank: int) -> Shard:
        found = {}
        for name, value in self.held[rank].items():
            if isinstance(value, MXFP8Buffer):
                found[f"{name}.data"], found[f"{name}.scale"] = value.data, value.scale
            else:
                assert isinstance(value, torch.Tensor)
                found[name] = value
        return found

    def assert_holds(self, full: Shard) -> None:
        for rank in range(self.world):
            want = expected(full, rank, self.world, self.swizzled, self.rounding)
            live = self.live(rank)
            assert live.keys() == want.keys()
            for name, tensor in want.items():
                assert torch.equal(live[name].view(torch.uint8), tensor.view(torch.uint8)), (rank, name)


class Trainer:
    """Source ranks that publish whole models."""

    def __init__(
        self, clients: tuple[refitd.Client, ...], world: int, dtype: torch.dtype = torch.bfloat16, **options: object
    ) -> None:
        self.world, self.dtype = world, dtype
        self.shards, self.sources = [], []
        for rank in range(world):
            mine = cut(model(0, dtype), rank, world)
            self.shards.append(mine)
            self.sources.append(
                clients[rank % len(clients)].register_source(
                    named("m"), mine, rank=rank, world_size=world, metadata=describe(mine, rank, world), **options
                )
            )

    def publish(self, version: int) -> Shard:
        full = model(version, self.dtype)
        for rank, (source, mine) in enumerate(zip(self.sources, self.shards, strict=True)):
            for name, tensor in cut(full, rank, self.world).items():
                mine[name].copy_(tensor)
            source.publish(version)
        return full
