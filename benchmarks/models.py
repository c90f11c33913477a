"""Real models over any number of ranks, as their trainers and engines register them.

Half of the ranks train and half serve. Descriptions carry the fields that `refitd.extract_param_metadata` finds in a
Megatron module: local names, local shapes, the attributes of tensor parallelism, and the groups of the rank. The
tensors come from configs/layouts/models. As in the reference's planner, every dimension is cut without regard to its
sections: an interleaved qkv is one tensor that is split on dimension 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from refitd.describe.metadata import ParameterMetadata
from refitd.describe.names import expert_range
from refitd.dtypes import ELEMENT_SIZES
from refitd.offline.files import load_model
from refitd.offline.layouts import (
    Layout,
    ModelSpec,
    PlacedManifest,
    Position,
    TensorSpec,
    position,
    stage_layers,
    world_size,
)
from refitd.offline.rosters import side_rosters

FILES = Path(__file__).parent.parent / "configs" / "layouts" / "models"
MODELS = {
    "llama-3-70b": "llama-3-70b-megatron.toml",
    "qwen3-235b-a22b": "qwen3-235b-a22b-megatron.toml",
    "deepseek-v3": "deepseek-v3-megatron.toml",
}
SIZES = (64, 256, 1024, 4096, 10240)
# Layouts of DeepSeek-V3 that share few rows between ranks: experts cut over 32 ranks (NeMo-RL's pull request 2808),
# 64-way expert parallel with 4 replicas, FSDP2 with experts in shards that are not equally large. They run by name.
HARD = ("deepseek-v3 etp", "deepseek-v3 ep64", "deepseek-v3 fsdp")
HARD_SIZES = (512, 10240)
MAX_STAGES = 16

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Case:
    """A model over `ranks` ranks: the first half, numbered from 0, is the source; the rest are engines.

    Each engine is a separate world: it numbers its ranks from 0, and its groups contain only its own ranks.
    """

    model: str
    ranks: int
    source: Layout
    engine: Layout
    engines: int

    def worlds(self) -> Iterator[tuple[Layout, int]]:
        """Yield (layout, first rank) of the source and of every engine."""
        yield self.source, 0
        first, size = world_size(self.source), world_size(self.engine)
        yield from ((self.engine, first + i * size) for i in range(self.engines))

    def describe(self) -> str:
        """Return the two layouts in the field's words: TP8 PP4 DP2 -> TP4 DP16."""
        return f"{_words(self.source)} -> {self.engines} x {_words(self.engine)}"


def case(model: str, ranks: int) -> Case:
    """Return a model over `ranks` ranks in the layouts the reference was measured in.

    Llama: TP8 PP4 DPn -> TP4, m times. Experts: TP4 PPn EP32 -> TP8 EP16 (on 16 ranks), n up to 16.
    """
    found = load_model(FILES / MODELS[model.partition(" ")[0]])
    half = ranks // 2
    if model == "deepseek-v3 etp":
        source = Layout(name="train", model=found, pp=16, ep=16, dp=half // 16)
        engine = Layout(name="serve", model=found, tp=32, etp=32, dp=8)
    elif model == "deepseek-v3 ep64":
        source = Layout(name="train", model=found, pp=half // 256, ep=64, dp=256)
        engine = Layout(name="serve", model=found, tp=8, ep=16, dp=2)
    elif model == "deepseek-v3 fsdp":
        source = Layout(name="train", model=found, fsdp=96, ep=32, dp=ranks * 3 // 8)
        engine = Layout(name="serve", model=found, tp=8, ep=16, dp=2)
        half = ranks - world_size(source)
    elif found.experts:
        stages = max(1, min(MAX_STAGES, half // 32))
        source = Layout(name="train", model=found, tp=4, pp=stages, ep=32, dp=half // stages // 4)
        engine = Layout(name="serve", model=found, tp=8, ep=16, dp=2)
    else:
        source = Layout(name="train", model=found, tp=8, pp=4, dp=half // 32)
        engine = Layout(name="serve", model=found, tp=4)
    engines = half // world_size(engine)
    if world_size(source) + engines * world_size(engine) != ranks:
        raise ValueError(f"{model} does not fit {ranks} ranks")
    return Case(model, ranks, source, engine, engines)


def described(layout: Layout) -> Iterator[list[ParameterMetadata]]:
    """Yield the tensors of each rank of a layout as tiles, in its own numbering; equal ranks share one list."""
    held: dict[int, tuple[Sequence[ParameterMetadata], list[ParameterMetadata]]] = {}
    for roster in side_rosters(PlacedManifest(layout, 0, 0), "source"):
        if id(roster.source) not in held:
            held[id(roster.source)] = roster.source, [replace(m, owner_rank=None) for m in roster.source]
        yield held[id(roster.source)][1]


def small_case(layers: int = 2) -> Case:
    """Return a case that takes milliseconds, for tests: two layers of DeepSeek-V3, 64 ranks."""
    found = case("deepseek-v3", 64)
    assert found.source.model is not None
    tensors = tuple(
        msgspec.structs.replace(spec, layers=(0, layers) if spec.layers is None or spec.layers[0] == 0 else (1, layers))
        if "{layer}" in spec.name
        else spec
        for spec in found.source.model.tensors
    )
    model = msgspec.structs.replace(found.source.model, layers=layers, tensors=tensors)
    source, engine = (msgspec.structs.replace(layout, model=model) for layout in (found.source, found.engine))
    return Case("small", 64, source, engine, found.engines)


def kind(layout: Layout, index: int) -> tuple[int, ...]:
    """Return a key that is equal for ranks which register equal tensors; the ranks of their groups may differ."""
    where = position(layout, index)
    has_experts = layout.model is not None and layout.model.experts > 0
    return (where.pp, where.ep) if has_experts else (where.pp,)


def groups(layout: Layout, index: int) -> dict[str, tuple[int, ...]]:
    """Return the groups of rank `index`, in the layout's own numbering."""
    at = position(layout, index)
    stage, expert_ranks = layout.tp * layout.dp, layout.ep * layout.etp
    begin = at.pp * stage
    expert_base = begin + at.expert_dp * expert_ranks
    return {
        "tp": tuple(begin + at.dp * layout.tp + i for i in range(layout.tp)),
        "dp": tuple(begin + i * layout.tp + at.tp for i in range(layout.dp)),
        "pp": tuple(i * stage + index % stage for i in range(layout.pp)),
        "ep": tuple(expert_base + i * layout.etp + at.etp for i in range(layout.ep)),
        "expt_tp": tuple(expert_base + at.ep * layout.etp + i for i in range(layout.etp)),
        "expt_dp": tuple(begin + i * expert_ranks + at.ep * layout.etp + at.etp for i in range(stage // expert_ranks)),
    }


def registered(layout: Layout, index: int) -> list[ParameterMetadata]:
    """Return the metadata of rank `index`, in the layout's own numbering."""
    assert layout.model is not None
    at, mine = position(layout, index), {name: list(ranks) for name, ranks in groups(layout, index).items()}
    return [
        _metadata(layout, spec, at, mine, index, layer, expert)
        for spec in layout.model.tensors
        for layer, expert in _held(layout.model, layout, spec, at)
    ]


def _held(model: ModelSpec, layout: Layout, spec: TensorSpec, at: Position) -> Iterator[tuple[int, int]]:
    """Yield (layer, expert) of every tensor of a pattern on a rank."""
    if "{layer}" in spec.name:
        span = spec.layers or (0, model.layers)
        layers = [layer for layer in stage_layers(layout, at.pp) if span[0] <= layer < span[1]]
    else:
        is_here = (spec.stage == "first" and at.pp == 0) or (spec.stage == "last" and at.pp == layout.pp - 1)
        layers = [0] if is_here else []
    experts = expert_range(model.experts, layout.ep, at.ep) if "{expert}" in spec.name else range(1)
    yield from ((layer, expert) for layer in layers for expert in experts)


def _metadata(
    layout: Layout, spec: TensorSpec, at: Position, mine: dict[str, list[int]], index: int, layer: int, expert: int
) -> ParameterMetadata:
    assert layout.model is not None
    is_expert, shape = "{expert}" in spec.name, list(spec.shape)
    group = mine["expt_tp" if is_expert else "tp"]
    if spec.split is not None:
        shape[spec.split.dim] //= len(group)
    first_layer = stage_layers(layout, at.pp).start
    first_expert = expert_range(layout.model.experts, layout.ep, at.ep).start if is_expert else 0
    dtype = spec.dtype or layout.model.dtype
    stride = spec.split.stride if spec.split is not None else 1
    if spec.split is not None and spec.parts is not None and spec.interleave is None:
        stride = len(spec.parts)  # gate and up, which are split separately
    return ParameterMetadata(
        name=_filled(spec.name, layer - first_layer, expert - first_expert),
        shape=tuple(shape),
        dtype=dtype,
        element_size=ELEMENT_SIZES[dtype],
        is_tp=spec.split is not None,
        partition_dim=spec.split.dim if spec.split is not None else 0,
        partition_stride=stride,
        is_ep=is_expert,
        num_experts=layout.model.experts if is_expert else None,
        owner_rank=index,
        tensor_parallel_group_ranks=group if spec.split is not None else None,
        expert_parallel_group_ranks=mine["ep"] if is_expert else None,
        data_parallel_group_ranks=mine["expt_dp" if is_expert else "dp"],
        pipeline_parallel_group_ranks=mine["pp"],
        resolved_name=_filled(spec.name, layer, expert),
        global_expert_index=expert if is_expert else None,
    )


def _filled(pattern: str, layer: int, expert: int) -> str:
    return pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def _words(layout: Layout) -> str:
    degrees = (("TP", layout.tp), ("PP", layout.pp), ("EP", layout.ep), ("DP", layout.dp))
    return " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1)
