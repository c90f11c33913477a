"""Models and layouts as frozen values with bounded numbers, their checks, and the positions of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from refitd.describe.layout import MAX_CANONICAL_DIMS, MAX_ELEMENTS, elements
from refitd.describe.names import expert_range
from refitd.dtypes import ELEMENT_SIZES
from refitd.files import Name, Table, at, shown, table, tables

MAX_RANKS = 2**17
MAX_DESCRIPTIONS = 2**22  # the most different tensor descriptions that one layout may need
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_ELEMENTS)]
Extent = Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]
Shape = Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_CANONICAL_DIMS)]
LocalShape = Annotated[tuple[Extent, ...], msgspec.Meta(max_length=MAX_CANONICAL_DIMS)]
Numbers = Annotated[tuple[Extent, ...], msgspec.Meta(max_length=MAX_CANONICAL_DIMS)]
Degree = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=2**20)]
Dim = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CANONICAL_DIMS)]
Layers = Annotated[int, msgspec.Meta(ge=0, le=4096)]
Experts = Annotated[int, msgspec.Meta(ge=0, le=65536)]
Times = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Stage = Literal["first", "last", "every"]


class Split(Table, frozen=True):
    """How a tensor is split along one dimension; by default into equal parts over the tensor-parallel group."""

    dim: Dim
    group: Literal["", "tp", "etp"] = ""  # "" means etp for the tensors of experts, tp for others
    stride: Times = 1  # the number of parts, each split separately (gated fc1: 2)
    sizes: Annotated[tuple[Size, ...], msgspec.Meta(max_length=64)] | None = None  # the same with parts of these sizes
    units: Degree | None = None  # ranks get whole units (heads); fewer units than ranks are replicated
    uneven: bool = False  # as torch.chunk: the last ranks may hold fewer elements, or none


class FusedPart(Table, frozen=True):
    """One canonical tensor inside a fused local one."""

    tensor: Name
    size: Size  # along the split dimension
    units: Degree | None = None


class TensorSpec(Table, frozen=True):
    """One tensor, or one for each layer and expert: "{layer}" and "{expert}" in names are replaced by numbers."""

    name: Name
    shape: Shape
    tensor: Name | None = None  # the canonical name, if it differs
    dtype: Name = ""
    layers: tuple[Layers, Layers] | None = None  # first, end (not included)
    experts: tuple[Experts, Experts] | None = None
    split: Split | None = None
    stage: Stage | tuple[Stage, ...] | None = None  # for a tensor without {layer}
    parts: Annotated[tuple[FusedPart, ...], msgspec.Meta(min_length=1, max_length=64)] | None = None
    interleave: Times | None = None  # how many times the parts alternate (query groups)
    fused: Name | None = None  # all experts of a rank are one local tensor of this name, with a leading dimension


class ModelSpec(Table, frozen=True, tag_field="kind", tag="model"):
    """The tensors of a model, independent of ranks."""

    name: Name
    tensors: tuple[TensorSpec, ...]
    dtype: Name = "bfloat16"
    layers: Layers = 0
    experts: Experts = 0


class Layout(Table, frozen=True, tag_field="kind", tag="layout"):
    """A model distributed over ranks."""

    name: Name
    model: ModelSpec | None = None
    tp: Degree = 1
    pp: Degree = 1
    pp_layers: tuple[Layers, ...] | None = None  # layers of each stage; by default as even as possible
    ep: Degree = 1
    etp: Degree = 1
    dp: Degree = 1
    fsdp: Degree = 1  # data-parallel ranks that share one copy, each tensor split along dimension 0
    first_rank: Rank | None = None  # None: after the earlier manifests
    ranks_per_node: Degree = 8
    first_node: Rank | None = None  # None: the node of first_rank, or after the earlier manifests' nodes
    label: str = ""  # its name in messages; by default `name`


class ShardSplit(Table, frozen=True):
    """How a local tensor is split over a group."""

    dim: Dim
    group: Name
    stride: Times = 1
    sizes: tuple[Extent, ...] | None = None  # local sizes


class ShardRepeat(Table, frozen=True):
    """`refitd.describe.Repeat` in a file."""

    dim: Dim
    count: Size
    step: Extent
    local_step: Extent


class ShardTile(Table, frozen=True):
    """`refitd.describe.Tile` in a file."""

    tensor: Name
    offset: Numbers
    size: Numbers
    local_offset: Extent
    local_stride: Numbers
    repeat: ShardRepeat | None = None


class ShardTensor(Table, frozen=True):
    """One local tensor."""

    name: Name
    shape: LocalShape
    dtype: Name
    tensor: Name | None = None
    split: ShardSplit | None = None
    tiles: tuple[ShardTile, ...] | None = None
    global_shape: LocalShape | None = None
    fill: float | None = None
    aliases: tuple[Name, ...] = ()
    cast_from: Name | None = None
    cast_to: Name | None = None


class ShardRank(Table, frozen=True):
    """One rank: the shard that it holds, and its groups by name."""

    rank: Rank
    shard: Name
    node: str = ""
    label: str = ""
    groups: dict[str, tuple[Rank, ...]] = msgspec.field(default_factory=dict)


class Shards(Table, frozen=True, tag_field="kind", tag="shards"):
    """Ranks and their shards; ranks that hold the same tensors name the same shard."""

    name: Name
    shards: dict[str, tuple[ShardTensor, ...]]
    ranks: tuple[ShardRank, ...]
    first_rank: Rank | None = None  # added to every rank; None: the number of ranks before this manifest


Manifest = Layout | Shards
KINDS: dict[str, type[ModelSpec] | type[Layout] | type[Shards]] = {
    "model": ModelSpec,
    "layout": Layout,
    "shards": Shards,
}


@dataclass(frozen=True, slots=True)
class Position:
    """A rank's position in its layout; `expert_dp` numbers copies of its experts, as `dp` does for other tensors."""

    pp: int
    tp: int
    dp: int
    ep: int
    etp: int
    expert_dp: int


@dataclass(frozen=True, slots=True)
class PlacedManifest:
    """A manifest with its assigned first rank and node."""

    manifest: Manifest
    first_rank: int
    first_node: int


def dtype_problems(where: str, name: str) -> list[str]:
    """Return what is wrong with the name of a dtype."""
    if name in ELEMENT_SIZES:
        return []
    return [f"{where} is {shown(name)}, expected one of {', '.join(ELEMENT_SIZES)}"]


def read_model(values: Mapping[str, Any], where: str, problems: list[str]) -> ModelSpec | None:
    """Read and check the tables of a model; None if they cannot be read."""
    specs: list[TensorSpec] = []
    entries = tables(values.get("tensors"), at(where, "tensors"), problems)
    before = len(problems)
    for number, entry in enumerate(entries):
        name = entry.get("name") if isinstance(entry, Mapping) else None
        subject = f"{at(where, 'tensors')}[{number}]" + (f" ({shown(name)})" if name is not None else "")
        if (spec := table(TensorSpec, entry, subject, problems)) is not None:
            specs.append(spec)
    read_already = {"tensors": tuple(specs)} if "tensors" in values else {}
    model = table(ModelSpec, values, where, problems, **read_already)
    if model is not None and len(problems) == before:
        problems += [f"{at(where, problem)}" if where else problem for problem in _model_problems(model)]
    return model


def _model_problems(model: ModelSpec) -> list[str]:
    problems = dtype_problems("dtype", model.dtype)
    if not model.tensors:
        problems.append("tensors: none; a model has at least one")
    spans: dict[str, list[tuple[range, range]]] = {}
    for spec in model.tensors:
        found = _spec_problems(model, spec)
        problems += [f"{spec.name}: {problem}" for problem in found]
        if not found:
            mine = (span_of(spec.layers, model.layers), span_of(spec.experts, model.experts))
            if any(all(_meet(a, b) for a, b in zip(mine, other, strict=True)) for other in spans.get(spec.name, ())):
                problems.append(f"{spec.name}: described twice for the same layers and experts; names must be unique")
            spans.setdefault(spec.name, []).append(mine)
    return problems


def _spec_problems(model: ModelSpec, spec: TensorSpec) -> list[str]:
    """Return every problem of a tensor that is independent of the layout."""
    problems = dtype_problems("dtype", spec.dtype) if spec.dtype else []
    if elements(spec.shape) > MAX_ELEMENTS:
        problems.append(f"shape {spec.shape} has {elements(spec.shape)} elements, expected at most 2**48")
    per_layer, per_expert = ("{layer}" in spec.name, "{expert}" in spec.name)
    for what, is_per, span, count in (
        ("layer", per_layer, spec.layers, model.layers),
        ("expert", per_expert, spec.experts, model.experts),
    ):
        if span is not None and not is_per:
            problems.append(f"{what}s is given, and the name has no {{{what}}}")
        elif is_per and not count:
            problems.append(f"the name has {{{what}}}, and the model has no {what}s; set {what}s")
        elif span is not None and not span[0] < span[1] <= count:
            problems.append(f"{what}s is {list(span)}, expected first < end <= {count}, the model's {what}s")
    if per_layer and spec.stage is not None:
        problems.append("stage is given for a tensor of a layer; layers go to stages by pp_layers")
    if not per_layer and spec.stage is None:
        problems.append('a tensor without {layer} needs a stage: "first", "last", "every", or a list of these')
    problems += _name_problems(spec)
    if spec.fused is not None and not per_expert:
        problems.append("fused joins experts, and the name has no {expert}")
    if spec.split is not None:
        problems += _split_problems(spec, spec.split)
    elif spec.parts is not None or spec.interleave is not None:
        problems.append("parts and interleave need a split, which says along which dimension they lie")
    return problems


def _name_problems(spec: TensorSpec) -> list[str]:
    """Return names with other {layer} and {expert} placeholders than `name`, and other wrong names."""
    problems = []
    if spec.tensor is not None and spec.parts is not None:
        problems.append("tensor and parts are both given; parts say the canonical names")
    canonical = [("tensor", spec.tensor)] if spec.tensor is not None else []
    canonical += [("parts", part.tensor) for part in spec.parts or ()]
    for key, name in canonical:
        for mark in ("{layer}", "{expert}"):
            if (mark in name) != (mark in spec.name):
                problems.append(f"{key} {name!r} and the name must both have {mark}, or neither")
    if spec.fused is not None and (("{layer}" in spec.fused) != ("{layer}" in spec.name) or "{expert}" in spec.fused):
        problems.append(f"fused {spec.fused!r} must have {{layer}} where the name has it, and no {{expert}}")
    for key, name in [("name", spec.name), ("fused", spec.fused or ""), *canonical]:
        if set(name.replace("{layer}", "").replace("{expert}", "")) & set("{}"):
            problems.append(f"{key} {name!r} has braces other than {{layer}} and {{expert}}")
    parts = [part.tensor for part in spec.parts or ()]
    if len(set(parts)) != len(parts):
        problems.append("parts name a tensor twice")
    return problems


def _split_problems(spec: TensorSpec, split: Split) -> list[str]:
    if split.dim >= len(spec.shape):
        return [f"split.dim is {split.dim}, expected 0 to {len(spec.shape) - 1} for shape {spec.shape}"]
    size, parts = spec.shape[split.dim], spec.parts
    given = [
        what
        for what, is_given in (
            ("split.stride", split.stride > 1),
            ("split.sizes", split.sizes is not None),
            ("split.units", split.units is not None),
            ("split.uneven", split.uneven),
            ("parts", parts is not None),
        )
        if is_given
    ]
    problems = [f"{' and '.join(given)} contradict each other; give one of them"] if len(given) > 1 else []
    if split.group == "etp" and "{expert}" not in spec.name:
        problems.append("split.group is etp, and the name has no {expert}; use tp")
    if size % split.stride:
        problems.append(f"dim {split.dim} has {size} elements, expected a multiple of split.stride {split.stride}")
    for key, units, whole in [
        ("split.units", split.units, size),
        *((f"part {part.tensor!r}: units", part.units, part.size) for part in parts or ()),
    ]:
        if units is not None and whole % units:
            problems.append(f"{key} is {units}, expected a divisor of {whole}")
    sizes = [part.size for part in parts] if parts is not None else split.sizes
    if sizes is not None and sum(sizes) != size:
        what = "parts" if parts is not None else "split.sizes"
        problems.append(f"{what} sum to {sum(sizes)}, expected {size}, the size of dim {split.dim}")
    if spec.interleave is not None:
        if parts is None:
            problems.append("interleave is given without parts")
        for part in parts or ():
            if part.size % spec.interleave or part.units is not None:
                problems.append(
                    f"part {part.tensor!r} of {part.size}: interleave {spec.interleave} must divide it, and it can "
                    "have no units of its own"
                )
    return problems


def span_of(given: tuple[int, int] | None, count: int) -> range:
    """Return the layers or experts that a pattern covers: by default all `count`."""
    return range(*given) if given is not None else range(max(count, 1))


def _meet(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


Kind = tuple[int, int, int, int, int, int]  # positions: pp, tp, ep, etp, fsdp, fsdp of the experts


def world_size(layout: Layout) -> int:
    """Return the number of ranks of a layout."""
    return layout.tp * layout.dp * layout.pp


def stage_layers(layout: Layout, stage: int) -> range:
    """Return the layers of a pipeline stage."""
    counts = layout.pp_layers
    if counts is None:
        assert layout.model is not None
        return expert_range(layout.model.layers, layout.pp, stage)
    return range(sum(counts[:stage]), sum(counts[: stage + 1]))


def position(layout: Layout, index: int) -> Position:
    """Return the position of rank `index` of a layout, counted from its first rank.

    Tensor-parallel ranks are adjacent, as Megatron numbers them (order tp-dp-pp):

        TP2 DP2 PP2    rank 0 1 2 3 | 4 5 6 7      the same ranks, EP4 ETP1:   0 1 2 3 | 4 5 6 7
                       tp   0 1 0 1 | 0 1 0 1                             ep   0 1 2 3 | 0 1 2 3
                       dp   0 0 1 1 | 0 0 1 1
                       pp   0       | 1                                   pp   0       | 1
    """
    stage, inner = divmod(index, layout.tp * layout.dp)
    outer, etp = divmod(inner, layout.etp)
    expert_dp, ep = divmod(outer, layout.ep)
    return Position(pp=stage, tp=inner % layout.tp, dp=inner // layout.tp, ep=ep, etp=etp, expert_dp=expert_dp)


def problems_of(layout: Layout) -> list[str]:
    """Return every problem of a layout; bounds are checked before anything large is computed."""
    model = layout.model
    assert model is not None
    ranks = world_size(layout)
    if ranks > MAX_RANKS:
        return [f"tp * dp * pp is {ranks} ranks, expected at most {MAX_RANKS}"]
    problems = []
    if layout.first_rank is not None and layout.first_rank + ranks > 2**20:
        problems.append(f"first_rank {layout.first_rank} and {ranks} ranks end above 2**20")
    per_stage, expert_ranks = layout.tp * layout.dp, layout.ep * layout.etp
    if per_stage % expert_ranks:
        problems.append(
            f"ep {layout.ep} * etp {layout.etp} = {expert_ranks} does not divide the {per_stage} ranks of a stage "
            f"(tp {layout.tp} * dp {layout.dp}); change dp"
        )
    if layout.dp % layout.fsdp:
        problems.append(f"fsdp {layout.fsdp} does not divide dp {layout.dp}")
    if layout.ep > max(model.experts, 1):
        problems.append(f"ep is {layout.ep}, and the model {model.name!r} has {model.experts} experts; lower ep")
    counts = layout.pp_layers
    if counts is not None and (len(counts) != layout.pp or sum(counts) != model.layers):
        problems.append(
            f"pp_layers {shown(list(counts))} gives {sum(counts)} layers to {len(counts)} stages, expected "
            f"{model.layers} and {layout.pp}"
        )
    if problems:
        return problems
    classes = len(set(classes_of(layout)))
    per_stage_kinds = classes // layout.pp
    total = per_stage_kinds * sum(_copies(spec, layout) for spec in model.tensors)
    if total > MAX_DESCRIPTIONS:
        problems.append(
            f"{classes} different kinds of ranks with {total // classes} tensors each; expected at most "
            f"{MAX_DESCRIPTIONS} descriptions in all"
        )
    for spec in model.tensors:
        if spec.split is not None:
            problems += _cut_problems(spec, spec.split, layout)
    return problems


def _copies(spec: TensorSpec, layout: Layout) -> int:
    """Return the most descriptions that a pattern needs, summed over one rank of every stage."""
    assert layout.model is not None
    layers = len(span_of(spec.layers, layout.model.layers)) if "{layer}" in spec.name else layout.pp
    experts = len(span_of(spec.experts, layout.model.experts)) if "{expert}" in spec.name else 1
    return layers * -(-experts // layout.ep)


def _cut_problems(spec: TensorSpec, split: Split, layout: Layout) -> list[str]:
    """Return why a tensor cannot be split over the layout's group."""
    which, ways = group_of(spec, layout)
    size, over = spec.shape[split.dim], f"over {which} {ways}"
    advice = f"; change {which}, or the padding of the tensor, or say uneven = true"
    if spec.interleave is not None:
        if spec.interleave % ways:
            return [f"{spec.name}: {spec.interleave} interleaved groups cannot be split {over}; lower {which}"]
        return []
    pieces = [(f"part {part.tensor!r}", part.size, part.units) for part in spec.parts or ()]
    pieces += [(f"block of {block}", block, None) for block in split.sizes or ()]
    if not pieces and not split.uneven:
        each = size // split.stride
        pieces = [(f"dim {split.dim}" if split.stride == 1 else f"part of dim {split.dim}", each, split.units)]
    found = []
    for what, whole, units in pieces:
        if units is not None and units % ways and ways % units:
            found.append(f"{spec.name}: {what} has {units} units, which cannot be dealt {over}; change {which}")
        elif units is None and whole % ways:
            found.append(f"{spec.name}: {what} has {whole} elements, which cannot be split {over}{advice}")
    return found


def group_of(spec: TensorSpec, layout: Layout) -> tuple[str, int]:
    """Return the name and the size of the group that a tensor is split over."""
    which = (spec.split.group if spec.split else "") or ("etp" if "{expert}" in spec.name else "tp")
    return which, layout.etp if which == "etp" else layout.tp


def classes_of(layout: Layout) -> Iterator[Kind]:
    """Yield each rank's kind; ranks of equal kind hold equal tensors."""
    expert_fsdp = expert_fsdp_of(layout)
    has_experts = layout.model is not None and layout.model.experts > 0
    for index in range(world_size(layout)):
        p = position(layout, index)
        experts = (p.ep, p.etp, p.expert_dp % expert_fsdp) if has_experts else (0, 0, 0)
        yield p.pp, p.tp, experts[0], experts[1], p.dp % layout.fsdp, experts[2]


def expert_fsdp_of(layout: Layout) -> int:
    """Return how many ranks share a copy of the experts; it may be fewer ranks than for other tensors."""
    return math.gcd(layout.fsdp, layout.tp * layout.dp // (layout.ep * layout.etp))
