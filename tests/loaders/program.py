"""A loader as source text, with the tensors that it reads and writes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)

HEADER = """
import _thread, concurrent.futures, copy, queue, threading
import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

POOL = concurrent.futures.ThreadPoolExecutor(2)


class Engine(nn.Module):
"""


@dataclass(frozen=True, slots=True)
class Source:
    """A canonical tensor. `kind` says which values it takes: any, perm, flag, count, scale."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = "any"


@dataclass(slots=True)
class Program:
    """A loader of random parts.

    Attributes:
        seed: makes the same program again.
        is_benign: made only of parts that today's engines use, and that only move elements or round them once.
    """

    seed: int
    is_benign: bool
    sources: dict[str, Source] = field(default_factory=dict)
    init: list[str] = field(default_factory=list)
    units: list[list[str]] = field(default_factory=list)
    load: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The source text: a module class `Engine` with `load_weights`."""
        lines = ["    def __init__(self):", "        super().__init__()", *indented(self.init, 2)]
        for number, unit in enumerate(self.units):
            lines += ["", f"    def unit{number}(self, w):", *indented(unit, 2)]
        lines += ["", "    def load_weights(self, weights):", *indented(self.load, 2)]
        given = [f"# {name}: {list(s.shape)} of {s.dtype}, {s.kind}" for name, s in self.sources.items()]
        return "\n".join([f"# seed {self.seed}: {', '.join(self.parts)}", *given]) + HEADER + "\n".join(lines) + "\n"

    def make(self) -> type[torch.nn.Module]:
        """Return the engine's class."""
        space: dict[str, Any] = {}
        exec(compile(self.text, f"<loader {self.seed}>", "exec"), space)
        made = space["Engine"]
        assert isinstance(made, type)
        return made

    def checkpoint(self, version: int) -> dict[str, torch.Tensor]:
        """Return a version of the canonical tensors; the floats of the first fit into bfloat16."""
        rng = random.Random(f"{self.seed} {version}")
        return {name: values(source, rng, version) for name, source in self.sources.items()}


def indented(lines: list[str], levels: int) -> Iterator[str]:
    for line in lines:
        yield "    " * levels + line


def values(source: Source, rng: random.Random, version: int) -> torch.Tensor:
    """Return random values for a canonical tensor."""
    n = torch.Size(source.shape).numel()
    if source.kind == "perm":
        return torch.tensor(rng.sample(range(n), n), dtype=source.dtype)
    if source.kind == "flag":
        return torch.full(source.shape, version % 3 if rng.random() < 0.7 else rng.randrange(3)).to(source.dtype)
    if source.kind == "count":
        return torch.full(source.shape, rng.randrange(1, 4)).to(source.dtype)
    if source.kind == "scale":
        found = [rng.choice([0.5, 1.25, 3.1, -2.3, -0.7, 1e-3, 700.3]) * rng.uniform(0.9, 1.1) for _ in range(n)]
        return torch.tensor(found, dtype=torch.float64).reshape(source.shape).to(source.dtype)
    if source.dtype == torch.bool:
        return torch.tensor([rng.random() < 0.5 for _ in range(n)], dtype=torch.bool).reshape(source.shape)
    if not source.dtype.is_floating_point:
        info = torch.iinfo(source.dtype)
        low, high = (info.min, info.max) if rng.random() < 0.3 else (max(info.min, -9), 9)
        return torch.tensor([rng.randint(low, high) for _ in range(n)], dtype=source.dtype).reshape(source.shape)
    special = [0.0, -0.0, 1.0, 300.7, -300.7, 1e-4]
    found = [rng.choice(special) if rng.random() < 0.15 else rng.gauss(0, 3) for _ in range(n)]
    made = torch.tensor(found, dtype=torch.float64).reshape(source.shape)
    if version == 1 and source.dtype.itemsize >= 4:
        made = made.to(torch.bfloat16)
    return made.to(source.dtype)
