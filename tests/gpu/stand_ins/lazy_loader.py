"""Stands in for lazy_loader on a machine without it: the part that `refitd` uses."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path


def attach_stub(package: str, filename: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package; the `.pyi` beside `filename` lists its names."""
    stub = ast.parse(Path(filename).with_suffix(".pyi").read_text())
    homes = {
        alias.asname or alias.name: (f"{package}.{node.module}", alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
        for alias in node.names
    }

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = homes[name]
        return getattr(importlib.import_module(module), attribute)

    return load, lambda: sorted(homes), sorted(homes)
