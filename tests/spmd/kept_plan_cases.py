"""Plans that are built once and executed later. Every function is called on all ranks together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import refitd
from refitd.inprocess import execute as execution
from tests.spmd.cases import TIMEOUT_S, Negated, World, bits, linear, numbers, refused
from tests.spmd.layouts import build, random_pair
from tests.spmd.tied_cases import Head, Plain


def execute(plan: Any, source: nn.Module | None, target: nn.Module | None, **options: Any) -> Any:
    service = refitd.get_or_create_service("gloo")
    return refitd.execute_reshard_plan(plan, source, target, service, timeout=TIMEOUT_S, **options)


def build_plan(source: nn.Module | None, target: nn.Module | None, **options: Any) -> Any:
    return refitd.build_centralized_reshard_plan(source, target, timeout=TIMEOUT_S, **options)


# --- the same plan for many steps -----------------------------------------------------------------------------


def random_layouts_over_steps(world: World, seeds: Sequence[int]) -> None:
    """Change the values each step; slice the expected values of each target from whole tensors."""
    for seed in seeds:
        layouts = random_pair(seed, world.size)[:2]
        source, target = (build(layout, world.rank, seed, is_filled=False) for layout in layouts)
        modules = source and source.module, target and target.module
        plan = build_plan(*modules)
        for step in range(3):
            value = build(layouts[0], world.rank, 1000 * seed + step, is_filled=True)
            if source is not None:
                for name, tensor in source.tensors.items():
                    tensor.data.copy_(value.tensors[name])
            execute(plan, *modules)
            if target is not None:
                expected = build(layouts[1], world.rank, 1000 * seed + step, is_filled=False).expected
                for name, tensor in target.tensors.items():
                    assert bits(tensor) == bits(expected[name]), f"seed {seed} step {step}: {name}"


def gathered_and_sliced(world: World) -> list[int]:
    """TP3 rows to TP4 columns: gather the shards, slice again in numpy, compare bytes; executed twice."""
    rng = np.random.default_rng(world.rank)
    source = target = None
    if world.rank < 3:
        source = linear({"w": torch.zeros(4, 8)}, 0, range(3))
    else:
        target = linear({"w": torch.zeros(12, 2)}, 1, range(3, 7)) if world.rank < 7 else None
    plan = build_plan(source, target)
    for _ in range(2):
        if source is not None:
            source.w.data.copy_(torch.from_numpy(rng.standard_normal((4, 8), np.float32)))
        result = execute(plan, source, target)
        shards: list[Any] = [None] * world.size
        dist.all_gather_object(shards, None if source is None else source.w.detach().numpy())
        if target is not None:
            column = 2 * (world.rank - 3)
            assert target.w.detach().numpy().tobytes() == np.concatenate(shards[:3])[:, column : column + 2].tobytes()
    return [result.sent_bytes, result.received_bytes]


def other_modules_of_the_layout(world: World) -> None:
    """The plan keeps no tensor: it may be built on the meta device."""

    def modules(value: torch.Tensor) -> tuple[nn.Module | None, nn.Module | None]:
        return (
            linear({"w": value.clone()}) if world.rank == 0 else None,
            linear({"w": torch.zeros_like(value.chunk(2)[0])}, 0, [1, 2]) if world.rank in (1, 2) else None,
        )

    plan = build_plan(*modules(torch.empty(8, 3, device="meta")))
    for start in (1, 100):
        source, target = modules(numbers(8, 3, start=start))
        execute(plan, source, target)
        if target is not None:
            assert torch.equal(target.w, numbers(8, 3, start=start).chunk(2)[world.rank - 1])


# --- what the plan was asked for with ------------------------------------------------------------------------


def casts_are_remembered(world: World) -> None:
    whole = numbers(64, 3) / 7
    source = linear({"w": whole.chunk(2)[world.rank].clone()}, 0, [0, 1]) if world.rank < 2 else None
    target = linear({"w": torch.zeros(64, 3, dtype=torch.bfloat16)})
    plan = build_plan(source, target, casts={"w": torch.bfloat16})
    for _ in range(2):
        target.w.zero_()
        execute(plan, source, target)
        assert torch.equal(target.w, whole.to(torch.bfloat16))


def transforms(world: World) -> None:
    """Build one plan without a transform; execute it with two transforms, and with none."""
    whole = numbers(16, 3)
    held = torch.cat([half.chunk(2)[world.rank % 2] for half in whole.chunk(2)])
    source = linear({"w": whole, "v": whole}) if world.rank in (0, 4) else None
    target = linear({"w": torch.zeros(8, 3), "v": torch.zeros(8, 3)}, 0, [world.rank & 6, world.rank | 1])
    target.w.partition_stride = target.v.partition_stride = 2
    plan = build_plan(source, target)
    for parts in (1, 2):
        buffers = {"w": torch.zeros(8, 3)}
        target.v.data.zero_()
        execute(plan, source, target, transform=Negated(buffers, parts))
        assert torch.equal(buffers["w"], -held) and torch.equal(target.v, held)
        assert not target.w.any()
    execute(plan, source, target)
    assert torch.equal(target.w, held)


def a_transform_that_changes_the_dtype(world: World) -> str:
    """The transform belongs to the plan and is the default; an execution may pass another one with other buffers."""
    whole = numbers(8, 4) / 3
    source = linear({"w": whole}) if world.rank == 0 else None
    target = linear({"w": torch.zeros(4, 4, dtype=torch.bfloat16)}, 0, [2, 3]) if world.rank in (2, 3) else None

    def transform() -> tuple[dict[str, torch.Tensor], refitd.CastTransform]:
        buffers = {} if target is None else {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
        return buffers, refitd.CastTransform({"w"}, buffers)

    (first, built), (second, other) = transform(), transform()
    said = refused(lambda: build_plan(source, target))
    plan = build_plan(source, target, transform=built)
    assert plan.transform is built
    execute(plan, source, target)
    execute(plan, source, target, transform=other)
    if target is not None:
        for buffers in (first, second):
            assert torch.equal(buffers["w"], whole.to(torch.bfloat16).chunk(2)[world.rank - 2])
        assert not target.w.any()
    return said


def ties_and_aliases(world: World) -> list[str]:
    """Tied parameters are found; declared ones are remembered, accepted again, and must be the same ties."""
    value = numbers(6, 3, start=1)
    source = Plain("parameter") if world.rank == 0 else None
    target = Plain("two") if world.rank in (1, 2) else None
    plan = build_plan(source, target)
    for step in range(2):
        if source is not None:
            source.embed.weight.data.copy_(value + step)
        execute(plan, source, target)
        assert target is None or all(torch.equal(param, value + step) for param in target.parameters())
    # the tie is cut: the head has separate values, which the plan would not send
    cut = Plain("two") if world.rank == 0 else None
    said = [refused(lambda: execute(plan, cut, target))]
    embedding = nn.Embedding(6, 3) if world.rank == 0 else None
    head = Head() if world.rank == 5 else None
    declared = build_plan(embedding, head, aliases={"weight": "head.weight"})
    for options in ({}, {"aliases": {"head.weight": ["weight"]}}):
        if embedding is not None:
            embedding.weight.data.copy_(value * 3)
        execute(declared, embedding, head, **options)
        assert head is None or torch.equal(head.head.weight, value * 3)
    said.append(refused(lambda: execute(declared, embedding, head, aliases={"weight": "another"})))
    return said


# --- refusals -------------------------------------------------------------------------------------------------


def wrong_modules(world: World) -> list[str]:
    """Each is wrong on one rank only; every rank refuses it, and no target was written."""
    whole = numbers(8, 3)
    source = linear({"w": whole}) if world.rank == 0 else None
    target = linear({"w": torch.zeros(4, 3)}, 0, [world.rank & 6, world.rank | 1])
    plan = build_plan(source, target)
    said = []

    def wrong(rank: int, make: Callable[[], nn.Module | None]) -> None:
        sends = make() if rank == world.rank == 0 else source
        receives = make() if rank == world.rank and rank else target
        said.append(refused(lambda: execute(plan, sends, receives)))
        assert not target.w.any()

    wrong(3, lambda: linear({"w": torch.zeros(8, 3)}, 0, [2, 3]))
    wrong(3, lambda: linear({"w": torch.zeros(4, 3, dtype=torch.float64)}, 0, [2, 3]))
    wrong(5, lambda: linear({"w": torch.zeros(4, 3)}, 0, [5, 4]))  # the same shape, the other half
    wrong(6, lambda: linear({"w": torch.zeros(4, 3), "more": torch.zeros(1)}, 0, [6, 7]))
    wrong(7, lambda: None)
    wrong(0, lambda: linear({"v": whole}))
    wrong(2, lambda: linear({"w": torch.zeros(4, 1).expand(4, 3)}, 0, [2, 3]))
    execute(plan, source, target)
    assert torch.equal(target.w, whole.chunk(2)[world.rank % 2])
    return said


def wrong_plans(world: World) -> list[str]:
    whole = numbers(8, 3)
    source = linear({"w": whole}) if world.rank == 0 else None
    halves = linear({"w": torch.zeros(4, 3)}, 0, [world.rank & 6, world.rank | 1])
    plan = build_plan(source, halves)
    turned = [7, 6] if world.rank > 5 else [world.rank & 6, world.rank | 1]
    other = build_plan(source, linear({"w": torch.zeros(4, 3)}, 0, turned))
    pure = refitd.ReshardPlan(plan.send_ops, plan.recv_ops)
    said = [refused(lambda: execute(pure if world.rank == 6 else plan, source, halves))]
    # rank 0's modules fit both plans
    said.append(refused(lambda: execute(other if world.rank == 0 else plan, source, halves)))
    plans: list[Any] = [None] * world.size
    dist.all_gather_object(plans, plan)
    said.append(refused(lambda: execute(plans[4 if world.rank == 2 else world.rank], source, halves)))
    assert not halves.w.any()
    execute(plan, source, halves)
    assert torch.equal(halves.w, whole.chunk(2)[world.rank % 2])
    return said


def replicas_are_compared_once(world: World) -> str:
    """As `swap_model_weights` does: before the first execution of a plan, or not at all."""
    refitd.clear_plan_cache()
    source = linear({"w": numbers(4, 4, start=world.rank)}) if world.rank < 2 else None
    target = linear({"w": torch.zeros(4, 4)}) if world.rank > 5 else None
    plan = build_plan(source, target)
    said = refused(lambda: execute(plan, source, target))
    assert target is None or not target.w.any()
    execute(plan, source, target, check_replicas=world.rank != 3)
    assert said == refused(lambda: execute(plan, source, target))
    if world.rank == 1:
        source.w.data -= 1
    execute(plan, source, target)
    if world.rank == 1:
        source.w.data += 1
    execute(plan, source, target)
    return said


# --- deaths -----------------------------------------------------------------------------------------------------


def one_dies(world: World, victim: int, where: str, timeout: float) -> str:
    """The victim ends in the second execution: before it takes part, or when its rows are about to move."""
    whole = numbers(9, 4)
    source = linear({"w": whole}) if world.rank == 0 else None
    target = linear({"w": torch.zeros(3, 4)}, 0, range(1, world.size)) if world.rank else None
    service = refitd.get_or_create_service("gloo")
    plan = build_plan(source, target)
    refitd.execute_reshard_plan(plan, source, target, service, timeout=TIMEOUT_S)
    assert target is None or torch.equal(target.w, whole.chunk(3)[world.rank - 1])
    if world.rank == victim:
        if where == "coming":
            os._exit(1)
        execution._prepare = lambda *_: os._exit(1)
    return refused(
        lambda: refitd.execute_reshard_plan(plan, source, target, service, timeout=timeout), refitd.TransportError
    )
