"""Source ranks that describe the same elements. Every function is called on all ranks together."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import nn

import refitd
from refitd.describe.module import RankGroups
from tests.spmd.cases import TIMEOUT_S, World, linear, numbers, refused
from tests.spmd.layouts import build, random_layout


def any_replica_that_differs_is_named(world: World, seeds: Sequence[int]) -> list[str]:
    """Flip one bit of one tensor of one rank: refused exactly where another rank holds the same elements."""
    said = []
    for seed in seeds:
        rng = random.Random(seed)
        source, target = random_layout(rng, range(4)), random_layout(rng, range(4, 8))
        built = build(source, world.rank, seed, is_filled=True)
        wanted = build(target, world.rank, seed, is_filled=False)
        victim = rng.randrange(4)
        mine = [] if built is None else sorted(n for n, t in built.tensors.items() if t.numel())
        name = rng.choice(sorted(mine)) if world.rank == victim and mine else ""
        told = [{n: t.detach().clone() for n, t in built.tensors.items()} if built else {}, name]
        everyone: list[list] = [[] for _ in range(world.size)]
        torch.distributed.all_gather_object(everyone, told)
        name = everyone[victim][1]
        if not name:
            continue
        if world.rank == victim:
            built.tensors[name].data.reshape(-1).view(torch.uint8)[0] ^= 1
        value = everyone[victim][0][name]
        same = [
            rank
            for rank in range(4)
            if rank != victim
            for other in everyone[rank][0].values()
            if other.dtype == value.dtype and other.shape == value.shape and same_bits(other, value)
        ]

        def swap(built=built, wanted=wanted) -> object:
            modules = (None if each is None else each.module for each in (built, wanted))
            return refitd.swap_model_weights(*modules, "gloo", timeout=TIMEOUT_S)

        # whole tensors are random, so equal bits mean the same elements
        if same:
            words = refused(swap)
            assert f"rank {victim}" in words and any(f"rank {rank} " in words for rank in same), words
            said.append(words)
            if wanted is not None:
                assert not any(
                    t.detach().reshape(-1).view(torch.uint8).any() for t in wanted.tensors.values() if t.numel()
                )
        else:
            swap()
    return said


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))))


class Experts(nn.Module):
    """Experts over ETP2 as a grouped linear creates them: without attributes on parameters or in the config."""

    def __init__(self, first: int, value: torch.Tensor) -> None:
        super().__init__()
        self.pg_collection = RankGroups(tp=[0], expt_tp=[first, first + 1], ep=[first])
        self.experts = nn.Module()
        self.experts.linear_fc1 = nn.Module()
        self.experts.linear_fc1.weight0 = nn.Parameter(value)


def experts_without_attributes(world: World) -> str:
    whole = numbers(8, 3)
    source = Experts(0, whole.chunk(2)[world.rank].clone()) if world.rank < 2 else None
    target = Experts(2, torch.zeros(4, 3)) if world.rank in (2, 3) else None
    said = refused(lambda: refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S))
    assert target is None or not target.experts.linear_fc1.weight0.any()
    # a plan alone does not check values, and does not count as the first exchange
    refitd.build_centralized_reshard_plan(source, target, timeout=TIMEOUT_S)
    assert said == refused(lambda: refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S))
    for each in (*(source.parameters() if source else ()), *(target.parameters() if target else ())):
        each.tensor_model_parallel, each.partition_dim, each.partition_stride = True, 0, 1
    refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S)
    assert target is None or torch.equal(target.experts.linear_fc1.weight0, whole.chunk(2)[world.rank - 2])
    return said


def later_exchanges_compare_nothing(world: World) -> None:
    refitd.clear_plan_cache()
    source = linear({"w": numbers(4, 4)}) if world.rank < 2 else None
    target = linear({"w": torch.zeros(4, 4)}) if world.rank > 5 else None

    def swap(**options: bool) -> object:
        return refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S, **options)

    if world.rank == 1:
        source.w.data += 1
    said = refused(swap)
    assert "w: rank 0 and rank 1" in said
    swap(check_replicas=world.rank != 3)  # one rank turns the check off, so it is off for all
    if world.rank == 1:
        source.w.data -= 1
    swap()
    if world.rank == 1:
        source.w.data += 1
    swap()
    if world.rank == 5:
        refitd.clear_plan_cache()
    assert said == refused(swap)


def tied_copies_differ(world: World) -> str:
    ties = {"embed": "output"}
    source = linear({("embed", "output")[world.rank]: numbers(4, 4, start=world.rank)}) if world.rank < 2 else None
    target = linear({"embed": torch.zeros(4, 4)}) if world.rank == 4 else None
    return refused(lambda: refitd.swap_model_weights(source, target, "gloo", aliases=ties, timeout=TIMEOUT_S))


def any_cut_that_differs_is_named(world: World, seeds: Sequence[int]) -> int:
    """Cut one weight in several ways together; change one element of one rank: refused where other ranks have it."""
    refusals = 0
    for seed in seeds:
        refitd.clear_plan_cache()  # layouts occur twice, and are compared once
        rng = random.Random(seed)
        shape = rng.choice([(8, 12), (12, 4, 8), (24,)])
        whole, cuts = numbers(*shape), []
        while len(cuts) < 6:
            size, dim = rng.choice([1, 1, 2, 2, 4]), rng.randrange(len(shape))
            if len(cuts) + size <= 6 and shape[dim] % size == 0:
                cuts += [(dim, size, len(cuts))] * size
        victim, is_transposed = rng.randrange(6), rng.random() < 0.5
        is_shared = len({first for *_, first in cuts}) > 1
        source = target = None
        if world.rank < 6:
            dim, size, first = cuts[world.rank]
            weight = whole.chunk(size, dim)[world.rank - first].clone()
            if is_transposed:
                weight = weight.transpose(0, -1).contiguous().transpose(0, -1)
            source = linear({"w": weight})
            source.pg_collection = RankGroups(tp=list(range(first, first + size)))
            if size > 1:
                source.w.tensor_model_parallel, source.w.partition_dim, source.w.partition_stride = True, dim, 1
            if world.rank == victim and is_shared:
                source.w.data[(-1,) * len(shape)] += 1
        else:
            target = linear({"w": torch.zeros(shape)})

        def swap(source=source, target=target) -> object:
            return refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S)

        if is_shared:
            words = refused(swap)
            assert "w: rank" in words and f"rank {victim} " in words, words
            assert target is None or not target.w.any()
            refusals += 1
            if world.rank == victim:
                source.w.data[(-1,) * len(shape)] -= 1
        swap()
        assert target is None or torch.equal(target.w, whole)
    return refusals


def tied_copies_in_different_cuts_differ(world: World) -> str:
    """An embedding over TP2 on ranks 0 and 1, its tied output over TP4 on ranks 2 to 5."""
    source = target = None
    size, first = (2, 0) if world.rank < 2 else (4, 2)
    if world.rank < 6:
        name = "embed" if size == 2 else "output"
        source = linear({name: numbers(8, 4).chunk(size)[world.rank - first].clone()})
        source.pg_collection = RankGroups(tp=list(range(first, first + size)))
        weight = getattr(source, name)
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
        if world.rank == 4:
            weight.data[0, 0] += 1
    else:
        target = linear({"embed": torch.zeros(8, 4)})

    def swap() -> object:
        return refitd.swap_model_weights(source, target, "gloo", aliases={"embed": "output"}, timeout=TIMEOUT_S)

    said = refused(swap)
    if world.rank == 4:
        weight.data[0, 0] -= 1
    swap()
    assert target is None or torch.equal(target.embed, numbers(8, 4))
    return said
