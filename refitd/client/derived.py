"""Tensors that an engine computes from its weights, and recomputes inside every commit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from refitd.errors import CommitError, RefusedError
from refitd.protocol.target_forms import DerivedTensor
from refitd.text import shown

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Derived:
    """A workspace, or a fused or swizzled copy, that becomes stale when weights change.

    Attributes:
        tensor: the tensor. Its memory must not move; a CUDA graph may have captured it.
        sources: names of the weights it is computed from.
        refresh: called with `tensor` inside the commit, after the weights are written, to rewrite it in place. Without
            it, swaps are refused.
    """

    tensor: torch.Tensor
    sources: tuple[str, ...] = ()
    refresh: Callable[[torch.Tensor], object] | None = None


def check_derived(derived: Mapping[str, Derived], weights: Collection[str]) -> tuple[DerivedTensor, ...]:
    """Return the derived tensors as the coordinator is told of them.

    Raises:
        RefusedError: an entry is malformed, names an unregistered source, or has a weight's name.
    """
    for name, one in derived.items():
        if not isinstance(name, str) or not name or not isinstance(one, Derived):
            raise RefusedError(f"derived[{shown(name)}] is {type(one).__name__}, expected {{name: refitd.Derived}}")
        if not isinstance(one.sources, Sequence | Set) or isinstance(one.sources, str | bytes):
            raise RefusedError(f"{name}: sources are {shown(one.sources)}, expected a tuple of names")
        if not all(isinstance(source, str) for source in one.sources):
            raise RefusedError(f"{name}: sources are {shown(one.sources)}, expected a tuple of names")
        if one.refresh is not None and not callable(one.refresh):
            raise RefusedError(f"{name}: refresh is {shown(one.refresh)}, expected a function")
        if unknown := [source for source in one.sources if source not in weights]:
            raise RefusedError(f"{name}: it is declared to be made of {unknown}, which are not registered here")
        if name in weights:
            raise RefusedError(f"{name}: a weight is called so; give the derived tensor a name of its own")
    return tuple(
        DerivedTensor(name=name, sources=tuple(one.sources), is_refreshed=one.refresh is not None)
        for name, one in derived.items()
    )


def refresh(derived: Mapping[str, Derived]) -> None:
    """Recompute all derived tensors, in the order of their declaration.

    Raises:
        CommitError: a hook raised or is missing; the error names the tensor.
    """
    for name, one in derived.items():
        if one.refresh is None:
            raise CommitError(f"{name}: it is derived from weights and has no refresh hook; register it with one")
        try:
            one.refresh(one.tensor)
        except Exception as exc:
            raise CommitError(f"{name}: its refresh hook raised {type(exc).__name__}: {exc}") from exc
