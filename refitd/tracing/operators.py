"""The torch operators that the tracer can follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

aten = torch.ops.aten

# the same elements, in new memory
SAME = frozenset(
    {
        aten.clone,
        aten._to_copy,
        aten.contiguous,
        aten.lift_fresh_copy,
        aten._reshape_copy,
        aten.view_copy,
        aten.alias_copy,
        aten.detach_copy,
    }
)
HARMLESS = frozenset({aten.requires_grad_, aten.detach_})
# new memory in the form of a tensor, and the value that fills it: None if nothing does, or an argument
FACTORIES: dict[Any, float | None] = {
    aten.empty_like: None,
    aten.new_empty: None,
    aten.zeros_like: 0.0,
    aten.new_zeros: 0.0,
    aten.ones_like: 1.0,
    aten.new_ones: 1.0,
    aten.full_like: None,
    aten.new_full: None,
}
LAZY = frozenset({aten._conj, aten._neg_view, aten.view_as_real, aten.view_as_complex})


def without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the meta device, without values."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "meta":
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, list | tuple):
            return type(value)(moved(v) for v in value)
        return value

    kwargs = {k: moved(v) for k, v in kwargs.items()}
    if "device" in kwargs:
        kwargs["device"] = torch.device("meta")
    return func(*moved(args), **kwargs)


def is_lossless(held: torch.dtype, made: torch.dtype) -> bool:
    """Whether a dtype can represent every value of another."""
    if held == made:
        return True
    if held.is_floating_point != made.is_floating_point or held.is_complex != made.is_complex:
        return False
    try:
        if held.is_floating_point:  # no promotion is defined for the types of eight bits
            a, b = torch.finfo(held), torch.finfo(made)
            smallest = a.smallest_normal * a.eps >= b.smallest_normal * b.eps
            return a.eps >= b.eps and a.max <= b.max and a.min >= b.min and smallest
        return made.itemsize > held.itemsize and torch.promote_types(held, made) == made
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments or results of an operator."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes, in the order of its schema: in place, in lists, and to `out=`."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    return found
