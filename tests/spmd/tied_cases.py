"""Models whose embedding and output layer are one weight. Every function is called on all ranks together."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

import refitd
from refitd.describe.module import RankGroups
from tests.spmd.cases import TIMEOUT_S, World, refused

VOCABULARY, WIDTH = 24, 5
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class Ends(nn.Module):
    """A stage of a language model as Megatron builds it: its layers, and the ends that it has.

    Tied, the last of several stages has a copy of the embedding as its output layer's weight; a single stage has no
    weight of an output layer.
    """

    def __init__(self, pp: int, stage: int, tp: Sequence[int], index: int, *, is_tied: bool) -> None:
        super().__init__()
        self.share_embeddings_and_output_weights = is_tied
        self.pg_collection = RankGroups(tp=list(tp))
        self.norm = nn.Module()
        self.norm.register_parameter(f"of_stage_{stage}_of_{pp}", nn.Parameter(torch.ones(2)))
        if stage == 0:
            self.embedding = nn.Module()
            self.embedding.word_embeddings = nn.Module()
            self.embedding.word_embeddings.weight = self._weight(len(tp))
        if stage == pp - 1:
            self.output_layer = nn.Module()
            if not is_tied or pp > 1:
                self.output_layer.weight = self._weight(len(tp))
            else:
                self.output_layer.register_parameter("weight", None)
        if is_tied and pp > 1:
            for name, param in self.named_parameters():
                if name in (EMBEDDING, OUTPUT):
                    param.shared_embedding = True

    @staticmethod
    def _weight(tp: int) -> nn.Parameter:
        param = nn.Parameter(torch.zeros(VOCABULARY // tp, WIDTH))
        param.tensor_model_parallel, param.partition_dim = True, 0
        return param


def stages(world: World, ranks: Sequence[int], pp: int, *, is_tied: bool) -> tuple[Ends, int, int] | None:
    """Return this rank's stage, its place in the tensor-parallel group and that group's size."""
    if world.rank not in ranks:
        return None
    tp = len(ranks) // pp
    stage, index = divmod(list(ranks).index(world.rank), tp)
    return Ends(pp, stage, ranks[stage * tp : (stage + 1) * tp], index, is_tied=is_tied), index, tp


def whole(name: str, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, len(name)]).standard_normal((VOCABULARY, WIDTH), np.float32)


def swap(
    world: World,
    kinds: tuple[bool, bool],
    sizes: tuple[int, int],
    ranks: tuple[Sequence[int], Sequence[int]],
    seed: int,
) -> None:
    """Swap between two of these models, and compare with rows of the whole weights; delete the norms first."""
    built = [stages(world, ranks[i], sizes[i], is_tied=kinds[i]) for i in range(2)]
    for entry in built:
        if entry is not None:
            del entry[0].norm
    value = {EMBEDDING: whole(EMBEDDING, seed), OUTPUT: whole(EMBEDDING if kinds[0] else OUTPUT, seed)}

    def rows(name: str, index: int, tp: int) -> torch.Tensor:
        return torch.from_numpy(np.split(value[name], tp)[index].copy())

    source = built[0] and built[0][0]
    if built[0] is not None:
        for name, param in built[0][0].named_parameters():
            param.data.copy_(rows(name, *built[0][1:]))
    target = built[1] and built[1][0]
    refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S)
    if built[1] is not None:
        for name, param in built[1][0].named_parameters():
            assert torch.equal(param, rows(name, *built[1][1:])), f"{name}: {kinds} {sizes} {ranks}"


def between_pipelines(world: World, seeds: Sequence[int]) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        sizes = rng.choice([1, 2, 3]), rng.choice([1, 2, 3])
        everyone = list(range(world.size))
        rng.shuffle(everyone)
        ranks = []
        for pp in sizes:
            count = pp * rng.choice([n for n in (1, 2, 4) if n * pp <= world.size])
            ranks.append(rng.sample(everyone, count))
        # a tied source fits a tied and an untied model; an untied one fits only an untied model
        kinds = rng.choice([(True, True), (True, True), (True, False), (False, False)])
        swap(world, kinds, sizes, (ranks[0], ranks[1]), seed)


def one_to_two_stages_and_back(world: World) -> None:
    swap(world, (True, True), (1, 2), ([0, 1], [2, 3, 4, 5]), 1)
    swap(world, (True, True), (2, 1), ([2, 3, 4, 5], [0, 1]), 2)
    swap(world, (True, True), (1, 3), ([3], [3, 4, 5]), 3)


def untied_into_tied(world: World) -> list[str]:
    said = []
    for pp in (1, 2):
        said.append(refused(lambda pp=pp: swap(world, (False, True), (2, pp), ([0, 1], [4, 5]), 4)))
    return said


class Plain(nn.Module):
    """A plain module: an embedding and a head, of one Parameter, of two that share memory, or of two."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 3)
        self.head = nn.Linear(3, 6, bias=False)
        if kind == "parameter":
            self.head.weight = self.embed.weight
        elif kind == "memory":
            self.head.weight = nn.Parameter(self.embed.weight.data)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 6, bias=False)


def plain_modules(world: World) -> str:
    value = torch.arange(18.0).view(6, 3) + 1
    for kind in ("parameter", "memory"):
        for make in (lambda: Plain("parameter"), lambda: Plain("memory"), lambda: Plain("two"), Head):
            source = Plain(kind) if world.rank == 0 else None
            target = make() if world.rank in (1, 2) else None
            if source is not None:
                source.embed.weight.data.copy_(value)
            refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S)
            if target is not None:
                assert all(torch.equal(param, value) for _, param in target.named_parameters(remove_duplicate=False))
    source = Plain("two") if world.rank == 0 else None
    target = Plain("memory" if world.rank == 1 else "parameter") if world.rank in (1, 2) else None
    return refused(lambda: refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S))


def declared(world: World) -> str:
    """The source's module has no visible tie; the call declares it."""
    source = nn.Embedding(6, 3) if world.rank == 0 else None
    target = Head() if world.rank == 1 else None
    said = refused(lambda: refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S))
    ties, other = {"weight": "head.weight"}, {"head.weight": ["weight"]}
    plan = refitd.build_centralized_reshard_plan(source, target, aliases=ties, timeout=TIMEOUT_S)
    assert len(plan.send_ops) == (world.rank == 0) and len(plan.recv_ops) == (world.rank == 1)
    service = refitd.get_or_create_service("gloo")
    for call in (
        lambda: refitd.swap_model_weights(source, target, "gloo", aliases=other, timeout=TIMEOUT_S),
        lambda: refitd.reshard_model_weights(source, target, service, aliases=ties, timeout=TIMEOUT_S),
    ):
        if source is not None:
            source.weight.data += 1
        call()
        whole = [source.weight.data.clone() if source is not None else torch.zeros(6, 3)]
        torch.distributed.broadcast_object_list(whole, 0)
        assert target is None or torch.equal(target.head.weight, whole[0])
    wrong = refused(
        lambda: refitd.swap_model_weights(source, target, "gloo", aliases={"weight": ()}, timeout=TIMEOUT_S)
    )
    return said + "\n" + wrong
