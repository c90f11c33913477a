"""The Python blocks of the documentation: found, and executed with the names that their page assumes."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import refitd

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def all_blocks() -> list[tuple[str, str]]:
    """Return (page, block) of README and docs; without api.md, which has signatures."""
    pages = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    return [(page, block) for page in pages if page != "docs/api.md" for block in blocks(page)]


class Page:
    """One page's blocks and the names that they see; later blocks see the imports and assignments of earlier ones."""

    def __init__(self, page: str, **names: Any) -> None:
        self.page = page
        self.names = {"torch": torch, "refitd": refitd, "rank": 0, "world_size": 1, "version": 1, **names}

    def run(self, holds: str, **changes: str) -> SimpleNamespace:
        """Execute the one block with this text in it; `changes` replace literals that are too large for a test."""
        (block,) = [block for block in blocks(self.page) if holds in block]
        for old, new in changes.items():
            assert old in block
            block = block.replace(old, new)
        ast.parse(block)
        exec(compile(block, f"{self.page}: {holds}", "exec"), self.names)
        return SimpleNamespace(**self.names)


class While:
    """The condition of an engine's loop: true until it serves the version."""

    def __init__(self, names: dict[str, Any], version: int, stop: Any) -> None:
        self._names, self._version, self._stop = names, version, stop

    def __bool__(self) -> bool:
        return self._names["target"].version != self._version and not self._stop.is_set()
