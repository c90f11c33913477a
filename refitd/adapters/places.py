"""The tensors of an engine's modules: which ones share memory, and how each gets its memory again."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch

from refitd import RefusedError

Tensors = Mapping[str, torch.Tensor]


class Place(NamedTuple):
    """A tensor of a module: `holder[key]` is `tensor`; `alias` keeps its memory and view."""

    name: str
    holder: dict[str, Any]
    key: str
    tensor: torch.Tensor
    alias: torch.Tensor


class Memory:
    """Finds tensors by their memory. They may be equal in memory, but do not overlap otherwise."""

    def __init__(self, tensors: Tensors) -> None:
        self.span_ofs = sorted((*span_of(tensor), name) for name, tensor in tensors.items() if has_memory(tensor))
        self._starts = [start for start, _, _ in self.span_ofs]

    def owners(self, tensor: torch.Tensor) -> list[str]:
        """Return the names of the tensors with bytes in this one's memory."""
        if not has_memory(tensor):
            return []
        start, end = span_of(tensor)
        found = []
        for _, last, name in reversed(self.span_ofs[: bisect.bisect_left(self._starts, end)]):
            if last <= start:
                break
            found.append(name)
        return found


def places_of(name: str, module: torch.nn.Module) -> Iterator[Place]:
    """Yield the tensors of a module without its submodules, and of the plain objects that it holds."""
    found: list[tuple[str, dict[str, Any]]] = [(name, vars(module))]
    found += [(name, cast(dict[str, Any], held)) for held in (module._parameters, module._buffers)]
    for key, value in vars(module).items():
        inside = getattr(value, "__dict__", None)
        if not isinstance(value, torch.nn.Module | torch.Tensor | type) and type(inside) is dict:
            found.append((f"{name}.{key}" if name else key, inside))
    for prefix, holder in found:
        for key, tensor in list(holder.items()):
            if isinstance(tensor, torch.Tensor) and has_memory(tensor):
                yield Place(f"{prefix}.{key}" if prefix else key, holder, key, tensor, tensor.detach())


def views_of(model: torch.nn.Module, weights: Tensors) -> dict[str, torch.Tensor]:
    """Return the model's tensors in the memory of `weights` that are not among these, by name."""
    memory, known = Memory(weights), {id(tensor) for tensor in weights.values()}
    found = {}
    for name, module in model.named_modules():
        for place in places_of(name, module):
            if id(place.tensor) not in known and memory.owners(place.tensor):
                known.add(id(place.tensor))
                found[place.name] = place.tensor
    return found


def without_views(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors without parts, or other strides, of another tensor's memory."""
    largest: dict[str, torch.Tensor] = {}
    ends, order = 0, sorted((n for n, t in tensors.items() if has_memory(t)), key=lambda n: _extent(tensors[n]))
    for name in order:
        _, end = span_of(tensors[name])
        if end > ends:
            holder, ends = tensors[name], end
        largest[name] = holder
    return {name: tensor for name, tensor in tensors.items() if not is_view(tensor, largest.get(name, tensor))}


def _extent(tensor: torch.Tensor) -> tuple[int, int, bool]:
    start, end = span_of(tensor)
    return start, -end, not tensor.is_contiguous()


def is_view(tensor: torch.Tensor, holder: torch.Tensor) -> bool:
    """Whether a tensor is a part of a contiguous one, or all of it with other strides."""
    return holder.is_contiguous() and (tensor.numel() < holder.numel() or not tensor.is_contiguous())


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory."""
    try:
        return tensor.layout == torch.strided and bool(tensor.numel()) and bool(tensor.data_ptr())
    except (RuntimeError, NotImplementedError, ValueError):
        return False


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and after its last one."""
    length = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()


def place_in_memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a tensor's memory and view."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def put_back(places: Iterable[Place]) -> None:
    """Give every tensor its memory again, with the values that it has now.

    Raises:
        RefusedError: a tensor is missing now, or has another shape or dtype.
    """
    for name, holder, key, tensor, alias in places:
        now = holder.get(key)
        if not isinstance(now, torch.Tensor):
            raise RefusedError(f"{name}: the engine's code after loading has removed this tensor")
        if now is tensor and place_in_memory(now) == place_in_memory(alias):
            continue
        if now.shape != alias.shape or now.dtype != alias.dtype:
            raise RefusedError(
                f"{name}: the engine's code after loading gives {list(now.shape)} of {now.dtype}, it was "
                f"{list(alias.shape)} of {alias.dtype}"
            )
        if place_in_memory(now) != place_in_memory(alias):
            alias.copy_(now.detach())
        if now is tensor:
            tensor.data = alias
        holder[key] = tensor


def restore(places: Iterable[Place], values: Tensors) -> None:
    """Give every tensor its memory again, with the given values."""
    for name, holder, key, tensor, alias in places:
        tensor.data = alias
        holder[key] = tensor
        alias.copy_(values[name])
