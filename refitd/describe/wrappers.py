"""Names without the wrappers that frameworks put around modules: with and without them it is the same weight.

    module.layers.0.weight (DistributedDataParallel)                 -> layers.0.weight
    layers.0._orig_mod.weight (torch.compile)                        -> layers.0.weight
    layers.0._checkpoint_wrapped_module.weight (checkpoint_wrapper)  -> layers.0.weight

A parametrization is no wrapper: `parametrizations.weight.original0` is what a weight is computed from, and no weight.
Such names stay as they are, and both ends must have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

# what only wrappers call the module inside
WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_DATA_PARALLEL = frozenset({"DistributedDataParallel", "DataParallel"})


def transparent_names(module: nn.Module) -> Callable[[str], str]:
    """Return a function that takes the wrappers out of this module's own names (of parameters and of modules).

    A child `module` is wrapped by its parent if that is torch's or Megatron's data-parallel module, or holds nothing
    else.
    """
    wrapped: set[str] = set()
    for path, child in module.named_modules(remove_duplicate=False):
        for name in child._modules:
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
    """Yield a module, then the one that it wraps, if it is a wrapper, and so on inwards."""
    inner: nn.Module | None = module
    while inner is not None:
        outer, inner = inner, None
        yield outer
        for name, child in outer._modules.items():
            if child is not None and (name in WRAPPED or (name == "module" and _wraps(outer))):
                inner = child


def unwrapped_name(name: str) -> str:
    """Return a name of a dict without what is certainly a wrapper's: "module" may be anybody's."""
    parts = name.split(".")
    kept = [part for part in parts if part not in WRAPPED]
    return ".".join(kept) if kept and len(kept) < len(parts) else name


def without_module(names: Iterable[str]) -> dict[str, str]:
    """Return, where all names begin with "module.", each without it; else nothing.

    A dict does not say whether that is a wrapper: these are further names, not the names.
    """
    listed = list(names)
    if not all(name.startswith("module.") and name != "module." for name in listed):
        return {}
    return {name: name.removeprefix("module.") for name in listed}


def _wraps(parent: nn.Module) -> bool:
    if any(kind.__name__ in _DATA_PARALLEL for kind in type(parent).__mro__):
        return True
    return list(parent._modules) == ["module"] and not parent._parameters and not parent._buffers
