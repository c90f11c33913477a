"""Remove the names of framework wrappers from parameter names: a wrapped weight is the same weight.

    module.layers.0.weight (DistributedDataParallel)                 -> layers.0.weight
    layers.0._orig_mod.weight (torch.compile)                        -> layers.0.weight
    layers.0._checkpoint_wrapped_module.weight (checkpoint_wrapper)  -> layers.0.weight

A parametrization is not a wrapper: a weight is computed from `parametrizations.weight.original0`, which is not a
weight itself. Such names stay unchanged, and both ends must have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

# child names that only wrappers use
WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_DATA_PARALLEL = frozenset({"DistributedDataParallel", "DataParallel"})


def transparent_names(module: nn.Module) -> Callable[[str], str]:
    """Return a function that removes wrappers from this module's parameter and module names.

    A child called `module` counts as wrapped if its parent is a data-parallel module of torch or Megatron, or holds
    nothing else.
    """
    wrapped: set[str] = set()
    for path, child in module.named_modules(remove_duplicate=False):
        for name, _ in child._modules.items():  # those of scripted modules cannot be iterated over
            if name in WRAPPED or (name == "module" and _wraps(child)):
                wrapped.add(f"{path}.{name}" if path else name)

    def clean(name: str) -> str:
        if not wrapped:
            return name
        kept, path = [], ""
        for part in name.split("."):
            path = f"{path}.{part}" if path else part
            if path not in wrapped:
                kept.append(part)
        return ".".join(kept)

    return clean


def unwrapped(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, then the module that it wraps, and so on inwards."""
    inner: nn.Module | None = module
    while inner is not None:
        outer, inner = inner, None
        yield outer
        for name, child in outer._modules.items():
            if child is not None and (name in WRAPPED or (name == "module" and _wraps(outer))):
                inner = child


def unwrapped_name(name: str) -> str:
    """Return a dict key without names that only wrappers use; "module" stays, because any module may use it."""
    parts = name.split(".")
    kept = [part for part in parts if part not in WRAPPED]
    return ".".join(kept) if kept and len(kept) < len(parts) else name


def without_module(names: Iterable[str]) -> dict[str, str]:
    """Return {name: name without "module."} if all names begin with it, else {}.

    In a dict one cannot tell whether "module." is a wrapper, so the results are used as additional names.
    """
    listed = list(names)
    if not all(name.startswith("module.") and name != "module." for name in listed):
        return {}
    return {name: name.removeprefix("module.") for name in listed}


def holds_only_module(parent: nn.Module) -> bool:
    """Return whether a module has one child, called `module`, and no tensors of its own."""
    children = [name for name, _ in parent._modules.items()]
    return children == ["module"] and not len(parent._parameters) and not len(parent._buffers)


def _wraps(parent: nn.Module) -> bool:
    if any(kind.__name__ in _DATA_PARALLEL for kind in type(parent).__mro__):
        return True
    return holds_only_module(parent)
