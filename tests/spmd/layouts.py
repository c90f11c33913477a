"""Small models cut as Megatron cuts them, by slicing whole tensors, and random layouts of them.

The module does not use the planner: the expected values of a rank are slices of the whole tensors.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn

from refitd.describe.module import RankGroups

LAYERS = 2
EXPERTS = 6  # EP4 does not divide them
SIZES = (1, 2, 3, 4, 6, 8)  # tensor-parallel sizes; every split dimension is a multiple of 24


@dataclass(frozen=True)
class Whole:
    """One tensor of the model: its shape, and how it is cut."""

    shape: tuple[int, ...]
    dim: int | None = None
    stride: int = 1
    blocks: tuple[int, ...] | None = None  # whole sizes of packed blocks
    dtype: torch.dtype = torch.bfloat16
    is_buffer: bool = False


LAYER = {
    "norm.weight": Whole((10,), dtype=torch.float32),
    "qkv.weight": Whole((72, 5), 0),
    "qkv.bias": Whole((72,), 0),
    "proj.weight": Whole((5, 48), 1),
    "mlp.fc1.weight": Whole((96, 3), 0, stride=2),
    "mlp.fc2.weight": Whole((3, 48), 1),
    "mixer.in_proj.weight": Whole((120, 2), 0, blocks=(24, 72, 24)),
    "router.expert_bias": Whole((EXPERTS,), dtype=torch.float32, is_buffer=True),
}
EXPERT = {"linear_fc1.weight": Whole((48, 4), 0, stride=2), "linear_fc2.weight": Whole((4, 24), 1)}
OUTER = {"embedding.weight": (0, Whole((48, 3), 0)), "head.scale": (-1, Whole((), dtype=torch.float64))}


@dataclass(frozen=True)
class Model:
    """The tensors of each layer, of each expert, and of the ends: (0 or -1 for the first or last stage, tensor)."""

    layer: Mapping[str, Whole]
    expert: Mapping[str, Whole]
    outer: Mapping[str, tuple[int, Whole]]


SMALL = Model(LAYER, EXPERT, OUTER)


@dataclass(frozen=True)
class Layout:
    """The ranks of a model. Ranks in `ranks` order: tensor parallel fastest, then data, then pipeline stages."""

    ranks: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    expert_tp: int = 1
    ep: int = 1
    stages: tuple[tuple[int, ...], ...] = (tuple(range(LAYERS)),)  # layers of each stage
    chunks: int = 1
    experts_as_modules: bool = False

    def place(self, rank: int) -> Place | None:
        """Return a rank's place, None where it has no shard of the model."""
        if rank not in self.ranks:
            return None
        per_stage = len(self.ranks) // self.pp
        stage, inner = divmod(self.ranks.index(rank), per_stage)
        first = stage * per_stage

        def group(size: int, step: int) -> tuple[list[int], int]:
            index = inner // step % size
            start = first + inner - index * step
            return [self.ranks[start + i * step] for i in range(size)], index

        tp, tp_index = group(self.tp, 1)
        expert_tp, expert_tp_index = group(self.expert_tp, 1)
        ep, ep_index = group(self.ep, self.expert_tp)
        dp, _ = group(per_stage // self.tp, self.tp)
        groups = RankGroups(tp=tp, ep=ep, expt_tp=expert_tp, dp=dp)
        return Place(groups, stage, tp_index, expert_tp_index, ep_index)


@dataclass(frozen=True)
class Place:
    groups: RankGroups
    stage: int
    tp_index: int
    expert_tp_index: int
    ep_index: int


def random_layout(rng: random.Random, ranks: Sequence[int]) -> Layout:
    """Return a layout of the model over these ranks, in some order."""
    order = list(ranks)
    rng.shuffle(order)
    count = len(order)
    pp = rng.choice([n for n in (1, 2, 3) if count % n == 0])
    per_stage = count // pp
    tp = rng.choice([n for n in SIZES if per_stage % n == 0])
    expert_tp = rng.choice([n for n in SIZES if per_stage % n == 0])
    ep = rng.choice([n for n in (1, 2, 3, 4, 6) if per_stage // expert_tp % n == 0])
    cuts = sorted(rng.choices(range(LAYERS + 1), k=pp - 1))
    edges = [0, *cuts, LAYERS]
    stages = tuple(tuple(range(a, b)) for a, b in pairwise(edges))
    return Layout(tuple(order), tp, pp, expert_tp, ep, stages, rng.choice([1, 1, 2]), rng.random() < 0.3)


def random_pair(seed: int, world: int) -> tuple[Layout, Layout, str]:
    """Return a source and a destination layout, and how their ranks relate."""
    rng = random.Random(seed)
    kind = ("collocated", "disjoint", "overlapping", "any")[seed % 4]
    everyone = list(range(world))
    rng.shuffle(everyone)
    if kind == "collocated":
        source = destination = everyone[: rng.choice([world, rng.randint(1, world)])]
    elif kind == "disjoint":
        cut = rng.randint(1, world - 1)
        source, destination = everyone[:cut], everyone[cut : rng.randint(cut + 1, world)]
    elif kind == "overlapping":
        low, high = sorted(rng.sample(range(world), 2))
        source, destination = everyone[: high + 1], everyone[low:]
    else:
        source, destination = (rng.sample(everyone, rng.randint(1, world)) for _ in range(2))
    return random_layout(rng, source), random_layout(rng, destination), kind


def names_of(layout: Layout, place: Place, model: Model = SMALL) -> Iterator[tuple[int, str, str, Whole, int | None]]:
    """Yield (chunk, local name, canonical name, whole tensor, expert) of every tensor at a place."""
    mine = layout.stages[place.stage]
    per_chunk = -(-len(mine) // layout.chunks) or 1
    for name, (at, whole) in model.outer.items():
        if at % layout.pp == place.stage:
            yield 0, name, name, whole, None
    for i, layer in enumerate(mine):
        chunk, local = divmod(i, per_chunk)
        for name, whole in model.layer.items():
            yield chunk, f"layers.{local}.{name}", f"layers.{layer}.{name}", whole, None
        for k, expert in enumerate(_experts(layout.ep, place.ep_index)):
            for name, whole in model.expert.items():
                form = f"local_experts.{k}.{name}" if layout.experts_as_modules else f"{name}{k}"
                canonical = f"layers.{layer}.experts.{name}{expert}"
                yield chunk, f"layers.{local}.experts.{form}", canonical, whole, expert


def _experts(ep: int, index: int) -> list[int]:
    """Deal experts in order; the first ranks have one more where the division is uneven."""
    held = [EXPERTS // ep + (i < EXPERTS % ep) for i in range(ep)]
    return list(range(sum(held[:index]), sum(held[: index + 1])))


def whole_tensor(canonical: str, whole: Whole, seed: int) -> torch.Tensor:
    """Return the canonical tensor: random bits, NaNs included, that depend on its name and the seed only."""
    generator = torch.Generator().manual_seed(hash_of(canonical) ^ seed)
    nbytes = torch.Size(whole.shape).numel() * whole.dtype.itemsize
    bits = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    return bits.view(whole.dtype).view(whole.shape)


def hash_of(text: str) -> int:
    value = 5381
    for letter in text:
        value = (value * 33 + ord(letter)) % 2**31
    return value


def cut(tensor: torch.Tensor, whole: Whole, index: int, count: int) -> torch.Tensor:
    """Return shard `index` of `count` of a whole tensor."""
    if whole.dim is None:
        return tensor.clone()
    sizes = whole.blocks or (whole.shape[whole.dim] // whole.stride,) * whole.stride
    parts = tensor.split(sizes, whole.dim)
    return torch.cat([part.chunk(count, whole.dim)[index] for part in parts], whole.dim).contiguous()


@dataclass
class Config:
    num_moe_experts: int = EXPERTS
    gated_linear_unit: bool | None = None


@dataclass(frozen=True)
class Built:
    """A rank's module, and the expected value of each of its tensors."""

    module: nn.Module | list[nn.Module]
    expected: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def build(layout: Layout, rank: int, seed: int, *, is_filled: bool, model: Model = SMALL) -> Built | None:
    """Return a rank's module, with the values of `seed` or with zeros, and the values of `seed`."""
    place = layout.place(rank)
    if place is None:
        return None
    chunks = [nn.Module() for _ in range(layout.chunks)]
    expected, tensors = {}, {}
    mine = layout.stages[place.stage]
    per_chunk = -(-len(mine) // layout.chunks) or 1
    # most grouped linears stamp stride 1 on a gated fc1; the config has the right stride
    is_misstamped = model is SMALL and seed % 3 > 0
    for number, chunk in enumerate(chunks):
        chunk.pg_collection = place.groups
        chunk.config = Config(gated_linear_unit=True if is_misstamped else None)
        for i, layer in enumerate(mine[number * per_chunk : (number + 1) * per_chunk]):
            _child(chunk, f"layers.{i}").layer_number = layer + 1
    for chunk_number, name, canonical, whole, expert in names_of(layout, place, model):
        index, count = (place.tp_index, layout.tp) if expert is None else (place.expert_tp_index, layout.expert_tp)
        shard = cut(whole_tensor(canonical, whole, seed), whole, index, count)
        value = shard.clone() if is_filled else torch.zeros_like(shard)
        path, _, last = name.rpartition(".")
        parent = _child(chunks[chunk_number], path)
        if whole.is_buffer:
            parent.register_buffer(last, value)
            parent.register_buffer("scratch", torch.full((3,), 7.0), persistent=False)
        else:
            param = nn.Parameter(value, requires_grad=value.is_floating_point())
            if whole.dim is not None:
                param.tensor_model_parallel = True
                param.partition_dim = whole.dim
                param.partition_stride = 1 if is_misstamped and expert is not None else whole.stride
                if whole.blocks:
                    param.partition_sizes = [size // count for size in whole.blocks]
            if expert is not None:
                param.allreduce = False
            parent.register_parameter(last, param)
        full_name = name if layout.chunks == 1 else f"chunk{chunk_number}.{name}"
        expected[full_name] = shard
        tensors[full_name] = parent.get_parameter(last) if not whole.is_buffer else parent.get_buffer(last)
    return Built(chunks[0] if layout.chunks == 1 else list(chunks), expected, tensors)


def _child(module: nn.Module, path: str) -> nn.Module:
    for name in path.split(".") if path else ():
        if name not in dict(module.named_children()):
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
