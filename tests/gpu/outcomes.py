"""The requirements and results of checks of scripts/gpu-check."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

MIB = 1 << 20
CHECKS_FILE = str(Path(__file__).with_name("checks.py"))  # a check starts it for its other processes
DEVICE = torch.device("cuda", 0)


class Skip(Exception):
    """A check cannot run here; the text has the reason and the remedy."""


@dataclass
class Outcome:
    """The result of a check that did not raise."""

    figures: dict[str, object] = field(default_factory=dict)
    why: str = ""
    state: str = "passed"


def need(**packages: str) -> None:
    """Raise Skip unless these modules (name=package) are installed."""
    missing = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise Skip(f"missing: {', '.join(missing)}; `pip install {' '.join(missing)}`, or carry wheels (--help)")


def timed(step: Callable[[], object], repeats: int = 7) -> float:
    """Return the median seconds of a step that queues work on the device, waiting included."""
    found = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found[2:])
