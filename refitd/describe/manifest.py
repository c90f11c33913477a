"""Manifests: who holds what of a model, in a TOML or JSON file, read and turned into rosters and back.

    kind = "model"    tensors by name pattern: shape, dtype, how each is split
    kind = "layout"   a model over ranks: tp, pp, ep, etp, dp, fsdp           -> rosters of one side
    kind = "shards"   every rank with its tensors, for what no pattern says   <-> rosters of one side

docs/manifests.md explains every key. Nothing is built from a manifest before its numbers have been bounded, and
everything found wrong with it is reported together.

Where a rank stands, with the tensor-parallel ranks side by side as Megatron numbers them (order tp-dp-pp):

    TP2 DP2 PP2    rank 0 1 2 3 | 4 5 6 7      the same ranks, EP4 ETP1:   0 1 2 3 | 4 5 6 7
                   tp   0 1 0 1 | 0 1 0 1                             ep   0 1 2 3 | 0 1 2 3
                   dp   0 0 1 1 | 0 0 1 1
                   pp   0       | 1                                   pp   0       | 1

Ranks that hold the same share one tuple of descriptions, which name no rank: tiles, not groups.
"""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from refitd.describe.layout import (
    MAX_CANONICAL_DIMS,
    MAX_ELEMENTS,
    canonical_name,
    elements,
    is_sharded,
    layout_problems,
    row_major,
)
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.names import expert_range
from refitd.describe.roster import Roster
from refitd.describe.tiles import Repeat, Tile
from refitd.dtypes import ELEMENT_SIZES, dtype_name, element_size
from refitd.errors import ConfigError

MAX_FILE_BYTES = 64 << 20
MAX_RANKS = 2**17
MAX_DESCRIPTIONS = 2**22  # different tensor descriptions that one layout may take
MAX_SHOWN = 20

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
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
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A table of a manifest; a key that it does not know is refused."""


class Split(Table, frozen=True):
    """How a tensor is cut along one dimension; by default into equal parts over the tensor-parallel group."""

    dim: Dim
    group: Literal["", "tp", "etp"] = ""  # "" means etp for the tensors of experts, tp for others
    stride: Times = 1  # so many parts, each cut on its own (gated fc1: 2)
    sizes: Annotated[tuple[Size, ...], msgspec.Meta(max_length=64)] | None = None  # the same with parts of these sizes
    units: Degree | None = None  # whole units (heads) go to ranks; fewer units than ranks are replicated
    uneven: bool = False  # as torch.chunk: the last ranks may hold less, or nothing


class Part(Table, frozen=True):
    """One canonical tensor inside a fused local one."""

    tensor: Name
    size: Size  # along the split dimension
    units: Degree | None = None


class TensorSpec(Table, frozen=True):
    """One tensor, or one for each layer and expert: "{layer}" and "{expert}" in names stand for their numbers."""

    name: Name
    shape: Shape
    tensor: Name | None = None  # the canonical name, where it is another one
    dtype: Name = ""
    layers: tuple[Layers, Layers] | None = None  # first, end (not included)
    experts: tuple[Experts, Experts] | None = None
    split: Split | None = None
    stage: Stage | tuple[Stage, ...] | None = None  # of a tensor without {layer}
    parts: Annotated[tuple[Part, ...], msgspec.Meta(min_length=1, max_length=64)] | None = None
    interleave: Times | None = None  # the parts alternate so many times (query groups)
    fused: Name | None = None  # all experts of a rank are one local tensor of this name, with a leading dimension


class Model(Table, frozen=True, tag_field="kind", tag="model"):
    """The tensors of a model, whoever holds them."""

    name: Name
    tensors: tuple[TensorSpec, ...]
    dtype: Name = "bfloat16"
    layers: Layers = 0
    experts: Experts = 0


class Layout(Table, frozen=True, tag_field="kind", tag="layout"):
    """A model over ranks."""

    name: Name
    model: Model | None = None
    tp: Degree = 1
    pp: Degree = 1
    pp_layers: tuple[Layers, ...] | None = None  # layers of each stage; by default as even as can be
    ep: Degree = 1
    etp: Degree = 1
    dp: Degree = 1
    fsdp: Degree = 1  # data-parallel ranks that share one copy, each tensor cut along dimension 0
    first_rank: Rank | None = None  # None: behind the manifests before it
    ranks_per_node: Degree = 8
    first_node: Rank | None = None  # None: where first_rank stands, or behind the nodes before
    label: str = ""  # what messages call it; by default its name


class ShardSplit(Table, frozen=True):
    """The fields of a tensor that is split over a group."""

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


class ShardRank(Table, frozen=True):
    """One rank: which shard it holds, and its groups by name."""

    rank: Rank
    shard: Name
    node: str = ""
    label: str = ""
    groups: dict[str, tuple[Rank, ...]] = {}


class Shards(Table, frozen=True, tag_field="kind", tag="shards"):
    """Ranks and what each holds; ranks that hold the same name the same shard."""

    name: Name
    shards: dict[str, tuple[ShardTensor, ...]]
    ranks: tuple[ShardRank, ...]
    first_rank: Rank | None = None  # added to every rank; None: as many as there are ranks before this manifest


Manifest = Layout | Shards
KINDS: dict[str, type[Model] | type[Layout] | type[Shards]] = {"model": Model, "layout": Layout, "shards": Shards}


@dataclass(frozen=True, slots=True)
class Position:
    """Where a rank stands in its layout; `expert_dp` counts copies of its experts, as `dp` does of the rest."""

    pp: int
    tp: int
    dp: int
    ep: int
    etp: int
    expert_dp: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A manifest with the ranks and nodes it got."""

    manifest: Manifest
    first_rank: int
    first_node: int


# --- reading files


def load(path: str | Path, model: Model | None = None) -> Manifest:
    """Read a layout or shards manifest.

    Args:
        path: a TOML or JSON file. A model that it names is looked for beside it.
        model: stands above the model that a layout names.

    Raises:
        ConfigError: with everything that is wrong with it.
    """
    path = Path(path)
    values = _file(path)
    inner = values.get("model")
    if values.get("kind") == "layout" and model is None and isinstance(inner, str):
        model = load_model(path.parent / inner)
    found = read(values, str(path), model)
    if isinstance(found, Model):
        raise ConfigError(f"{path}: is a model, expected a layout or shards; a layout names its model, or --model does")
    return found


def load_model(path: str | Path) -> Model:
    """Read a model manifest; raises ConfigError as `load` does."""
    values = _file(Path(path))
    if (kind := values.get("kind")) != "model":
        raise ConfigError(f"{path}: kind is {_shown(kind)}, expected a model")
    found = read(values, str(path))
    assert isinstance(found, Model)
    return found


def parse(text: str, where: str, *, is_json: bool) -> dict[str, Any]:
    """Return the tables of a file; raises ConfigError where it is no TOML or JSON, or repeats a key."""
    try:
        found = (
            json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant) if is_json else tomllib.loads(text)
        )
    except (ValueError, RecursionError) as error:
        what = "JSON" if is_json else "TOML"
        raise ConfigError(f"{where}: not {what}: {error}; is the file complete?") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: holds {_shown(found)}, expected a table with a key `kind`")
    return found


def read(values: Mapping[str, Any], where: str, model: Model | None = None) -> Model | Manifest:
    """Turn the tables of a file into a checked manifest; a layout's model must be in it, or given.

    Raises:
        ConfigError: with everything that is wrong with it.
    """
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{where}: kind is {_shown(kind)}, expected one of {', '.join(KINDS)}")
    problems: list[str] = []
    rest = {key: value for key, value in values.items() if key != "kind"}
    if kind == "layout":
        if model is not None:
            rest["model"] = model
        elif isinstance(inner := rest.get("model"), Mapping):
            inner = {key: value for key, value in inner.items() if key != "kind"}
            rest["model"] = _read_model(inner, "model", problems)
        elif "model" not in rest:
            problems.append('model: missing; name a model file (model = "FILE"), write a [model], or pass --model')
    found: Model | Manifest | None
    if kind == "model":
        found = _read_model(rest, "", problems)
    elif kind == "layout":
        found = _table(Layout, rest, "", problems)
        if found is not None and found.model is not None and not problems:
            problems += _layout_problems(found)
    else:
        found = _read_shards(rest, problems)
    if problems or found is None:
        raise _refusal(where, problems)
    return found


def _file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: has more than {MAX_FILE_BYTES} bytes, the most a manifest may have")
    return parse(text, str(path), is_json=path.suffix == ".json")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated!r} occurs twice in one table")
    return found


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number that can be used here")


def _refusal(where: str, problems: Sequence[str]) -> ConfigError:
    shown = [f"{where}: {problem}" for problem in problems[:MAX_SHOWN]]
    if len(problems) > MAX_SHOWN:
        shown.append(f"{where}: ... and {len(problems) - MAX_SHOWN} more problems")
    return ConfigError("\n".join(shown))


# --- tables with every problem collected


def _table(struct: type[S], values: Any, where: str, problems: list[str], **read_already: Any) -> S | None:
    """Convert one table field by field, so that one wrong key does not hide another; None where any is wrong."""
    subject = where or "the manifest"
    if not isinstance(values, Mapping):
        problems.append(f"{subject}: is {_shown(values)}, expected a table")
        return None
    before = len(problems)
    fields = {f.encode_name: f for f in msgspec.structs.fields(struct)}
    for key in values:
        if key not in fields:
            problems.append(f"{_at(where, key)}: unknown key; known: {', '.join(fields)}")
    found = dict(read_already)
    for key, info in fields.items():
        if key in found:
            continue
        if key not in values:
            if info.required:
                problems.append(f"{_at(where, key)}: missing")
            continue
        value = values[key]
        if isinstance(value, msgspec.Struct):
            found[info.name] = value
            continue
        try:
            found[info.name] = msgspec.convert(value, info.type, strict=True)
        except msgspec.ValidationError as error:
            problems.append(f"{_at(where, key)}: {error}; found {_shown(value)}")
        except RecursionError:
            problems.append(f"{_at(where, key)}: too deeply nested")
    return struct(**found) if len(problems) == before else None


def _at(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _shown(value: Any) -> str:
    """Return a value for a message, cut where it is long."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tables(value: Any, where: str, problems: list[str]) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    if value is not None:
        problems.append(f"{where}: is {_shown(value)}, expected a list of tables")
    return []


# --- models


def _read_model(values: Mapping[str, Any], where: str, problems: list[str]) -> Model | None:
    specs: list[TensorSpec] = []
    entries = _tables(values.get("tensors"), _at(where, "tensors"), problems)
    before = len(problems)
    for number, entry in enumerate(entries):
        name = entry.get("name") if isinstance(entry, Mapping) else None
        subject = f"{_at(where, 'tensors')}[{number}]" + (f" ({_shown(name)})" if name is not None else "")
        if (spec := _table(TensorSpec, entry, subject, problems)) is not None:
            specs.append(spec)
    read_already = {"tensors": tuple(specs)} if "tensors" in values else {}
    model = _table(Model, values, where, problems, **read_already)
    if model is not None and len(problems) == before:
        problems += [f"{_at(where, problem)}" if where else problem for problem in _model_problems(model)]
    return model


def _model_problems(model: Model) -> list[str]:
    problems = _dtype_problems("dtype", model.dtype)
    if not model.tensors:
        problems.append("tensors: none; a model has at least one")
    spans: dict[str, list[tuple[range, range]]] = {}
    for spec in model.tensors:
        found = _spec_problems(model, spec)
        problems += [f"{spec.name}: {problem}" for problem in found]
        if not found:
            mine = (_span(spec.layers, model.layers), _span(spec.experts, model.experts))
            if any(all(_meet(a, b) for a, b in zip(mine, other, strict=True)) for other in spans.get(spec.name, ())):
                problems.append(f"{spec.name}: described twice for the same layers and experts; names must be unique")
            spans.setdefault(spec.name, []).append(mine)
    return problems


def _spec_problems(model: Model, spec: TensorSpec) -> list[str]:
    """Return what is wrong with a tensor in any layout."""
    problems = _dtype_problems("dtype", spec.dtype) if spec.dtype else []
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
    """Every name must tell layers and experts apart exactly where `name` does."""
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


def _dtype_problems(where: str, name: str) -> list[str]:
    if name in ELEMENT_SIZES:
        return []
    return [f"{where} is {_shown(name)}, expected one of {', '.join(ELEMENT_SIZES)}"]


def _span(given: tuple[int, int] | None, count: int) -> range:
    return range(*given) if given is not None else range(max(count, 1))


def _meet(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


# --- layouts


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
    """Return where rank `index` of a layout, counted from its first rank, stands."""
    stage, inner = divmod(index, layout.tp * layout.dp)
    outer, etp = divmod(inner, layout.etp)
    expert_dp, ep = divmod(outer, layout.ep)
    return Position(pp=stage, tp=inner % layout.tp, dp=inner // layout.tp, ep=ep, etp=etp, expert_dp=expert_dp)


def _layout_problems(layout: Layout) -> list[str]:
    """Return what keeps a layout from being built; nothing large is computed before the bounds have been checked."""
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
            f"pp_layers {_shown(list(counts))} gives {sum(counts)} layers to {len(counts)} stages, expected "
            f"{model.layers} and {layout.pp}"
        )
    if problems:
        return problems
    classes = len(set(_classes(layout)))
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
    """Return how many descriptions a pattern takes (at most) on one rank of every stage."""
    assert layout.model is not None
    layers = len(_span(spec.layers, layout.model.layers)) if "{layer}" in spec.name else layout.pp
    experts = len(_span(spec.experts, layout.model.experts)) if "{expert}" in spec.name else 1
    return layers * -(-experts // layout.ep)


def _cut_problems(spec: TensorSpec, split: Split, layout: Layout) -> list[str]:
    """Return what keeps a split tensor from being cut over the layout's group."""
    which, ways = _group(spec, layout)
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


def _group(spec: TensorSpec, layout: Layout) -> tuple[str, int]:
    """Return the name and the size of the group that a tensor is split over."""
    which = (spec.split.group if spec.split else "") or ("etp" if "{expert}" in spec.name else "tp")
    return which, layout.etp if which == "etp" else layout.tp


Kind = tuple[int, int, int, int, int, int]  # pp, tp, ep, etp, place among fsdp ranks, the same for experts


def _classes(layout: Layout) -> Iterator[Kind]:
    """Yield, rank by rank, what tells apart what ranks hold."""
    expert_fsdp = _expert_fsdp(layout)
    has_experts = layout.model is not None and layout.model.experts > 0
    for index in range(world_size(layout)):
        p = position(layout, index)
        experts = (p.ep, p.etp, p.expert_dp % expert_fsdp) if has_experts else (0, 0, 0)
        yield p.pp, p.tp, experts[0], experts[1], p.dp % layout.fsdp, experts[2]


def _expert_fsdp(layout: Layout) -> int:
    """Copies of the experts may be fewer than of the rest; as many ranks as can share one do."""
    return math.gcd(layout.fsdp, layout.tp * layout.dp // (layout.ep * layout.etp))


# --- rosters


def rosters_of(source: Manifest, targets: Sequence[Manifest], *, collocated: bool = False) -> list[Roster]:
    """Return one roster per rank: the source's ranks, then each target's behind them.

    Args:
        source: who sends.
        targets: who receives.
        collocated: targets that do not say their first rank start at rank 0, beside the source, instead.

    Raises:
        ConfigError: two targets claim one rank, or a rank is said to stand on two nodes.
    """
    placed = place([source, *targets], collocated=collocated)
    found: dict[int, Roster] = {}
    problems: list[str] = []
    for number, each in enumerate(placed):
        for roster in side_rosters(each, "destination" if number else "source"):
            other = found.get(roster.rank)
            if other is None:
                found[roster.rank] = roster
                continue
            if number and other.destination:
                problems.append(
                    f"{each.manifest.name}: rank {roster.rank} is also that of {other.label}; set first_rank"
                )
            if other.node and roster.node and other.node != roster.node:
                problems.append(
                    f"{each.manifest.name}: rank {roster.rank} is on {roster.node}, and {other.label} is on "
                    f"{other.node}; check ranks_per_node and first_node"
                )
            label = other.label if other.label == roster.label else f"{other.label} ({roster.label})"
            found[roster.rank] = replace(
                other, destination=roster.destination, node=other.node or roster.node, label=label
            )
    if problems:
        raise _refusal("ranks", problems)
    return [found[rank] for rank in sorted(found)]


def place(manifests: Sequence[Manifest], *, collocated: bool = False) -> list[Placed]:
    """Give each manifest its first rank and node: what it says, else (or 0 if collocated) behind those before it."""
    placed: list[Placed] = []
    rank = node = 0
    for manifest in manifests:
        first = 0 if collocated and manifest.first_rank is None else manifest.first_rank
        if isinstance(manifest, Shards):
            first = rank if first is None else first
            placed.append(Placed(manifest, first, 0))
            rank = max([rank, *(first + each.rank + 1 for each in manifest.ranks)])
            numbers = [each.node.removeprefix("node") for each in manifest.ranks if each.node.startswith("node")]
            node = max([node, *(int(n) + 1 for n in numbers if n.isdecimal() and len(n) < 8)])
            continue
        first_node = manifest.first_node
        if first_node is None:
            first_node = node if first is None else first // manifest.ranks_per_node
        first = rank if first is None else first
        placed.append(Placed(manifest, first, first_node))
        ranks = world_size(manifest)
        rank, node = max(rank, first + ranks), max(node, first_node + -(-ranks // manifest.ranks_per_node))
    return placed


def side_rosters(placed: Placed, side: Literal["source", "destination"]) -> Iterator[Roster]:
    """Yield the rosters of one manifest, in the order of its ranks; equal ranks share one tuple of descriptions."""
    manifest = placed.manifest
    if isinstance(manifest, Shards):
        for rank in manifest.ranks:
            tensors = manifest.shards[rank.shard]
            held = tuple(_metadata(t, rank, placed.first_rank) for t in tensors)
            label = rank.label or f"{manifest.name} rank {rank.rank}"
            yield _roster(placed.first_rank + rank.rank, side, held, rank.node, label)
        return
    holdings: dict[Kind, tuple[ParameterMetadata, ...]] = {}
    describe = _Describer(manifest)
    for index, kind in enumerate(_classes(manifest)):
        if kind not in holdings:
            holdings[kind] = tuple(describe.tensors(kind))
        node = f"node{placed.first_node + index // manifest.ranks_per_node}"
        label = f"{manifest.label or manifest.name} rank {index}"
        yield _roster(placed.first_rank + index, side, holdings[kind], node, label)


def _roster(rank: int, side: str, held: tuple[ParameterMetadata, ...], node: str, label: str) -> Roster:
    if side == "source":
        return Roster(rank, source=held, node=node, label=label)
    return Roster(rank, destination=held, node=node, label=label)


Run = tuple[int, int, int]  # number of the canonical tensor, first element in it, number of elements
Box = tuple[int, int, int, int, Repeat | None]  # number of the tensor, first element, elements, local place, repeat


@dataclass(frozen=True, slots=True)
class _Cut:
    """What one kind of rank holds of a tensor, whatever its name: the local shape and tiles by canonical tensor."""

    shape: tuple[int, ...]
    tiles: tuple[tuple[int, tuple[int, ...], tuple[int, ...], int, Repeat | None], ...]
    strides: tuple[int, ...]


class _Describer:
    """Writes the descriptions of each kind of rank of one layout."""

    def __init__(self, layout: Layout) -> None:
        assert layout.model is not None
        self.layout = layout
        self.model = layout.model
        self.cuts: dict[tuple[int, int, int], _Cut] = {}

    def tensors(self, kind: Kind) -> Iterator[ParameterMetadata]:
        """Yield the descriptions of all tensors of a kind of rank."""
        stage, tp, ep, etp, shard, expert_shard = kind
        layout, model = self.layout, self.model
        held_layers = stage_layers(layout, stage)
        held_experts = expert_range(model.experts, layout.ep, ep) if model.experts else range(0)
        for number, spec in enumerate(model.tensors):
            is_expert = "{expert}" in spec.name
            index = etp if _group(spec, layout)[0] == "etp" else tp
            place = expert_shard if is_expert else shard
            key = (number, index, place)
            if key not in self.cuts:
                self.cuts[key] = _cut(spec, layout, index, place, _expert_fsdp(layout) if is_expert else layout.fsdp)
            cut = self.cuts[key]
            experts = _common(held_experts, _span(spec.experts, model.experts)) if is_expert else range(1)
            for layer in self._layers(spec, stage, held_layers):
                if spec.fused is not None and len(experts):
                    yield self._fused(spec, cut, layer, experts)
                    continue
                for expert in experts:
                    yield self._one(spec, cut, layer, expert)

    def _layers(self, spec: TensorSpec, stage: int, held: range) -> range:
        if "{layer}" in spec.name:
            return _common(held, _span(spec.layers, self.model.layers))
        stages = (spec.stage,) if isinstance(spec.stage, str) else spec.stage or ()
        is_here = (
            "every" in stages
            or ("first" in stages and stage == 0)
            or ("last" in stages and stage == self.layout.pp - 1)
        )
        return range(1) if is_here else range(0)

    def _one(self, spec: TensorSpec, cut: _Cut, layer: int, expert: int) -> ParameterMetadata:
        name, names = _filled(spec.name, layer, expert), _canonical(spec, layer, expert)
        dtype = spec.dtype or self.model.dtype
        # a whole tensor says everything with its shape
        is_whole = spec.parts is None and cut.shape == tuple(spec.shape)
        return ParameterMetadata(
            name=name,
            shape=cut.shape,
            dtype=dtype,
            element_size=ELEMENT_SIZES[dtype],
            resolved_name=names[0] if spec.parts is None else name,
            tiles=None
            if is_whole
            else tuple(
                Tile(names[n], offset, size, local, cut.strides, repeat) for n, offset, size, local, repeat in cut.tiles
            ),
            global_shape=None if is_whole or spec.parts is not None else tuple(spec.shape),
        )

    def _fused(self, spec: TensorSpec, cut: _Cut, layer: int, experts: range) -> ParameterMetadata:
        """All experts of a rank in one tensor, one behind the other."""
        assert spec.fused is not None
        dtype, each = spec.dtype or self.model.dtype, elements(cut.shape)
        name = _filled(spec.fused, layer, 0)
        tiles = tuple(
            Tile(names[n], offset, size, nth * each + local, cut.strides, repeat)
            for nth, names in enumerate(_canonical(spec, layer, expert) for expert in experts)
            for n, offset, size, local, repeat in cut.tiles
        )
        return ParameterMetadata(
            name=name,
            shape=(len(experts), *cut.shape),
            dtype=dtype,
            element_size=ELEMENT_SIZES[dtype],
            resolved_name=name,
            tiles=tiles,
        )


def _filled(pattern: str, layer: int, expert: int) -> str:
    return pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def _canonical(spec: TensorSpec, layer: int, expert: int) -> list[str]:
    patterns = [part.tensor for part in spec.parts] if spec.parts is not None else [spec.tensor or spec.name]
    return [_filled(pattern, layer, expert) for pattern in patterns]


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _cut(spec: TensorSpec, layout: Layout, index: int, place: int, fsdp: int) -> _Cut:
    """Cut a tensor for position `index` of its group and `place` among the ranks that share a copy."""
    dim = spec.split.dim if spec.split is not None else 0
    runs: list[Run] = [(0, 0, spec.shape[dim])] if spec.shape else []
    if spec.split is not None:
        runs = _runs(spec, spec.split, _group(spec, layout)[1], index)
    lead: Run = (0, 0, spec.shape[0]) if spec.shape else (0, 0, 1)
    if spec.shape and dim == 0:
        runs = _chunk(runs, fsdp, place)
    elif spec.shape:
        (lead,) = _chunk([lead], fsdp, place) or [(0, 0, 0)]
    shape = list(spec.shape)
    if shape:
        shape[0] = lead[2]
        shape[dim] = sum(size for _, _, size in runs)
    strides = row_major(shape)
    if 0 in shape:
        return _Cut(tuple(shape), (), strides)
    tiles = []
    for number, start, size, local, repeat in _boxes(runs, dim, strides[dim]) if shape else [(0, 0, 1, 0, None)]:
        offset, sizes = [0] * len(shape), list(shape)
        if shape:
            offset[0], sizes[0] = lead[1], lead[2]
            offset[dim], sizes[dim] = start, size
        tiles.append((number, tuple(offset), tuple(sizes), local, repeat))
    return _Cut(tuple(shape), tuple(tiles), strides)


def _runs(spec: TensorSpec, split: Split, ways: int, index: int) -> list[Run]:
    """Return what position `index` of `ways` holds along the split dimension, in local order."""
    size = spec.shape[split.dim]
    if split.uneven:
        return _chunk([(0, 0, size)], ways, index)
    if spec.interleave is not None:
        here = spec.interleave // ways
        return [
            (number, group * (part.size // spec.interleave), part.size // spec.interleave)
            for group in range(index * here, (index + 1) * here)
            for number, part in enumerate(spec.parts or ())
        ]
    if spec.parts is not None:
        return [(number, *_share(part.size, part.units, ways, index)) for number, part in enumerate(spec.parts)]
    blocks = split.sizes or (size // split.stride,) * split.stride
    starts = itertools.accumulate(blocks, initial=0)
    shares = [(start, *_share(block, split.units, ways, index)) for start, block in zip(starts, blocks, strict=False)]
    return [(0, start + offset, held) for start, offset, held in shares]


def _share(size: int, units: int | None, ways: int, index: int) -> tuple[int, int]:
    """Return (first element, elements) of an equal share; fewer units than ranks are held by several ranks each."""
    if units is not None and units < ways:
        index, ways = index // (ways // units), units
    return index * (size // ways), size // ways


def _chunk(runs: list[Run], ways: int, index: int) -> list[Run]:
    """Return the part of the runs that torch.chunk leaves to `index` of `ways`."""
    if ways == 1:
        return runs
    each = -(-sum(size for _, _, size in runs) // ways)
    found, position, begin, end = [], 0, index * each, (index + 1) * each
    for number, start, size in runs:
        low, high = max(begin, position), min(end, position + size)
        if low < high:
            found.append((number, start + low - position, high - low))
        position += size
    return found


def _boxes(runs: list[Run], dim: int, step: int) -> list[Box]:
    """Place runs one behind the other; equally spaced ones of one tensor become one with a repeat."""
    places = itertools.accumulate((size for _, _, size in runs), initial=0)
    by_tensor: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (number, start, size), local in zip(runs, places, strict=False):
        by_tensor.setdefault((number, size), []).append((start, local * step))
    found: list[Box] = []
    for (number, size), spots in by_tensor.items():
        steps = {(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(spots)}
        if len(steps) == 1 and next(iter(steps))[0] >= size:
            ((far, local_far),) = steps
            found.append((number, *_spot(spots[0], size), Repeat(dim, len(spots), far, local_far)))
        else:
            found += [(number, *_spot(spot, size), None) for spot in spots]
    return found


def _spot(spot: tuple[int, int], size: int) -> tuple[int, int, int]:
    return spot[0], size, spot[1]


# --- shards


def _read_shards(values: Mapping[str, Any], problems: list[str]) -> Shards | None:
    shards: dict[str, tuple[ShardTensor, ...]] = {}
    given = values.get("shards")
    if given is not None and not isinstance(given, Mapping):
        problems.append(f"shards: is {_shown(given)}, expected tables of lists of tensors")
    for key, entries in given.items() if isinstance(given, Mapping) else ():
        where = f"shards.{key}"
        read = _each(ShardTensor, _tables(entries, where, problems), where, problems)
        shards[key] = tuple(tensor for tensor in read if tensor is not None)
    ranks = _each(ShardRank, _tables(values.get("ranks"), "ranks", problems), "ranks", problems)
    read_already: dict[str, Any] = {}
    if "shards" in values:
        read_already["shards"] = shards
    if "ranks" in values:
        read_already["ranks"] = tuple(rank for rank in ranks if rank is not None)
    found = _table(Shards, values, "", problems, **read_already)
    if found is not None and not problems:
        problems += _shards_problems(found)
    return found


def _each(struct: type[S], entries: Iterable[Any], where: str, problems: list[str]) -> list[S | None]:
    return [_table(struct, entry, f"{where}[{number}]", problems) for number, entry in enumerate(entries)]


def _shards_problems(manifest: Shards) -> list[str]:
    problems: list[str] = []
    for key, tensors in manifest.shards.items():
        names: set[str] = set()
        for tensor in tensors:
            where = f"shards.{key}: {tensor.name}"
            if tensor.name in names:
                problems.append(f"{where}: described twice in one shard; local names must be unique")
            names.add(tensor.name)
            problems += _dtype_problems(f"{where}: dtype", tensor.dtype)
            if tensor.split is not None and tensor.tiles is not None:
                problems.append(f"{where}: split and tiles are both given; give one of them")
    known: dict[int, int] = {}
    for number, rank in enumerate(manifest.ranks):
        if rank.rank in known:
            problems.append(f"ranks[{number}]: rank {rank.rank} is also that of ranks[{known[rank.rank]}]")
        known.setdefault(rank.rank, number)
    if not manifest.ranks:
        problems.append("ranks: none; a manifest has at least one")
    if problems:
        return problems
    for number, rank in enumerate(manifest.ranks):
        found = _rank_problems(manifest, rank, known)
        problems += [f"ranks[{number}] (rank {rank.rank}): {problem}" for problem in found]
    return problems


def _rank_problems(manifest: Shards, rank: ShardRank, known: Mapping[int, int]) -> list[str]:
    problems = []
    if rank.shard not in manifest.shards:
        known_shards = ", ".join(list(manifest.shards)[:8]) or "none"
        return [f"shard {rank.shard!r} is not among the shards; known: {known_shards}"]
    for name, group in rank.groups.items():
        if rank.rank not in group:
            problems.append(f"it is not in its group {name!r} {_shown(list(group))}")
        if len(set(group)) != len(group):
            problems.append(f"its group {name!r} {_shown(list(group))} names a rank twice")
        if strangers := [other for other in group if other not in known]:
            problems.append(f"its group {name!r} names ranks that the manifest lacks: {_shown(strangers)}")
    tensors = manifest.shards[rank.shard]
    missing = sorted({t.split.group for t in tensors if t.split is not None} - rank.groups.keys())
    problems += [f"shard {rank.shard!r} splits tensors over group {name!r}, which it lacks" for name in missing]
    return problems or list(dict.fromkeys(problem for t in tensors for problem in layout_problems(_metadata(t, rank))))


def _metadata(tensor: ShardTensor, rank: ShardRank, offset: int = 0) -> ParameterMetadata:
    split = tensor.split
    tiles = None if tensor.tiles is None else tuple(
        Tile(
            t.tensor, t.offset, t.size, t.local_offset, t.local_stride,
            None if t.repeat is None else Repeat(t.repeat.dim, t.repeat.count, t.repeat.step, t.repeat.local_step),
        )
        for t in tensor.tiles
    )  # fmt: skip
    return ParameterMetadata(
        name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        element_size=element_size(tensor.dtype),
        is_tp=split is not None,
        partition_dim=split.dim if split else 0,
        partition_stride=split.stride if split else 1,
        partition_sizes=list(split.sizes) if split and split.sizes is not None else None,
        owner_rank=rank.rank + offset,
        tensor_parallel_group_ranks=[offset + other for other in rank.groups[split.group]] if split else None,
        resolved_name=tensor.tensor or tensor.name,
        tiles=tiles,
        global_shape=tensor.global_shape,
    )


def shards_of(name: str, rosters: Iterable[Roster], side: Literal["source", "destination"]) -> Shards:
    """Return the manifest of one side of rosters; ranks that say the same, but for their groups, share a shard.

    Its ranks are those of the rosters, wherever it is used.
    """
    numbers: dict[tuple[ShardTensor, ...], str] = {}
    known: dict[int, tuple[object, str, dict[str, tuple[int, ...]]]] = {}
    ranks = []
    for roster in sorted(rosters, key=lambda roster: roster.rank):
        held = getattr(roster, side)
        if not held:
            continue
        if id(held) in known:
            _, shard, groups = known[id(held)]
        else:
            tensors, groups = _shard(held)
            shard = numbers.setdefault(tensors, f"shard{len(numbers)}")
            known[id(held)] = (held, shard, groups)  # kept, so that the id stays its own
        ranks.append(ShardRank(rank=roster.rank, shard=shard, node=roster.node, label=roster.label, groups=groups))
    shards = {shard: tensors for tensors, shard in numbers.items()}
    return Shards(name=name, shards=shards, ranks=tuple(ranks), first_rank=0)


def _shard(held: Iterable[ParameterMetadata]) -> tuple[tuple[ShardTensor, ...], dict[str, tuple[int, ...]]]:
    """Return a rank's tensors with groups by name, and the groups in the order in which they are met."""
    groups: dict[tuple[int, ...], str] = {}
    tensors = []
    for meta in held:
        split = None
        if is_sharded(meta):
            group = tuple(meta.tensor_parallel_group_ranks or ())
            sizes = None if meta.partition_sizes is None else tuple(meta.partition_sizes)
            split = ShardSplit(
                dim=meta.partition_dim,
                group=groups.setdefault(group, f"group{len(groups)}"),
                stride=meta.partition_stride,
                sizes=sizes,
            )
        canonical = canonical_name(meta)
        tensors.append(
            ShardTensor(
                name=meta.name,
                shape=tuple(meta.shape),
                dtype=dtype_name(meta.dtype),
                tensor=None if canonical == meta.name else canonical,
                split=split,
                tiles=None if meta.tiles is None else tuple(map(_shard_tile, meta.tiles)),
                global_shape=None if meta.global_shape is None else tuple(meta.global_shape),
            )
        )
    return tuple(tensors), {name: group for group, name in groups.items()}


def _shard_tile(tile: Tile) -> ShardTile:
    r = tile.repeat
    repeat = None if r is None else ShardRepeat(r.dim, r.count, r.step, r.local_step)
    return ShardTile(tile.tensor, tile.offset, tile.size, tile.local_offset, tile.local_stride, repeat)


def to_json(manifest: Model | Manifest) -> str:
    """Return a manifest as a JSON file that `read` reads back."""
    packed = msgspec.to_builtins(manifest)
    return msgspec.json.format(msgspec.json.encode(packed), indent=1).decode() + "\n"
