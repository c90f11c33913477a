"""Judge a layout that was learned from a loader by running the loader itself on other values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

import refitd
from refitd.describe.metadata import ParameterMetadata
from tests.loaders.program import Program

VERSIONS = (2, 3, 4)
PLAIN = {"int", "float", "str", "bool", "NoneType"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one loader: learned, computed (in part), refused, wrong or changed; and the reason."""

    seed: int
    is_benign: bool
    outcome: str
    detail: str = ""


def judge(program: Program) -> Verdict:
    """Learn from a loader as an engine does, and compare three versions bit for bit with the loader's own result."""
    made = program.make()
    first = program.checkpoint(1)

    def verdict(outcome: str, detail: str = "") -> Verdict:
        return Verdict(program.seed, program.is_benign, outcome, detail)

    engine = made()
    with torch.no_grad():
        try:
            engine.load_weights(first.items())
        except Exception as exc:
            return verdict("broken", f"{type(exc).__name__}: {exc}")
    held = tensors(engine)
    before = list(fingerprint(engine))
    shapes = {name: (source.shape, source.dtype) for name, source in program.sources.items()}
    try:
        trace = refitd.trace_loader(held, engine.load_weights, shapes)
        if list(fingerprint(engine)) != before:
            return verdict("changed", "the trace has changed the engine")
        refitd.check_layout(trace, held, first.items())
    except refitd.RefitdError as exc:
        if list(fingerprint(engine)) != before:
            return verdict("changed", f"the refused trace has changed the engine: {exc}")
        return verdict("refused", str(exc))
    for version in VERSIONS:
        weights = program.checkpoint(version)
        other = made()
        with torch.no_grad():
            try:
                other.load_weights(weights.items())
            except Exception as exc:
                return verdict("wrong", f"version {version}: the loader raises {type(exc).__name__}: {exc}")
        for name, truth in tensors(other).items():
            if name in trace.computed:
                continue
            meta = trace.metadata.get(name)
            found = held[name] if meta is None else applied(meta, weights)  # tensors outside the layout do not change
            if raw(found) != raw(truth):
                how = "stays" if meta is None else "by the layout"
                return verdict("wrong", f"version {version}: {name} is {truth.tolist()}, {how} {found.tolist()}")
    return verdict("computed", ", ".join(trace.computed)) if trace.computed else verdict("learned")


def tensors(engine: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the engine's parameters and buffers, as adapters give them."""
    return {**dict(engine.named_buffers()), **dict(engine.named_parameters())}


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes, row-major."""
    if tensor.device.type == "meta":
        return b"without values"
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def applied(meta: ParameterMetadata, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Apply a description to a version: fill, boxes of canonical tensors, one rounding."""
    shape = tuple(meta.shape)
    if meta.tiles is None:
        return weights[meta.resolved_name or meta.name].to(meta.dtype)
    flat = torch.full((torch.Size(shape).numel(),), 0.0 if meta.fill is None else meta.fill, dtype=meta.dtype)
    for tile in meta.tiles:
        repeat = tile.repeat
        for i in range(repeat.count if repeat else 1):
            offset, local = list(tile.offset), tile.local_offset
            if repeat:
                offset[repeat.dim] += i * repeat.step
                local += i * repeat.local_step
            box = weights[tile.tensor][tuple(slice(o, o + n) for o, n in zip(offset, tile.size, strict=True))]
            flat.as_strided(tile.size, tile.local_stride, local).copy_(box.to(meta.dtype))
    return flat.reshape(shape)


def fingerprint(value: Any, seen: set[int] | None = None) -> Iterator[object]:
    """Yield identities, memory, attributes and bytes of all that an engine holds."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield id(value), value.dtype, value.shape, value.stride(), hashlib.md5(raw(value)).hexdigest()
        yield value.data_ptr() if value.device.type != "meta" else 0
    if isinstance(value, FunctionType) or id(value) in seen:
        return
    seen.add(id(value))
    inside = vars(value) if isinstance(value, (torch.Tensor, torch.nn.Module)) else value
    if isinstance(inside, dict):
        for key, item in inside.items():
            yield key
            yield from fingerprint(item, seen)
    elif type(value).__name__ in PLAIN:
        yield value
