"""Read model manifests, and check their tensors independently of any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refitd.describe.layout import MAX_ELEMENTS, elements
from refitd.offline.tables import at, dtype_problems, shown, table, tables
from refitd.offline.values import ModelSpec, Split, TensorSpec


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
    """Return names whose {layer} and {expert} placeholders differ from those of `name`, and other wrong names."""
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
