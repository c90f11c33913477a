"""Describe the machine of a measurement, and its current speed."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RECORD = "REFITD_BENCH_RECORD"  # set by --record, for this process and its children

PACKAGES = ("numpy", "msgspec", "msgpack", "torch", "pyzmq", "xxhash")


def describe() -> dict[str, Any]:
    """Return processor, cores, memory and versions."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
    }


def is_recording() -> bool:
    """Return whether figures go to RESULTS."""
    return RECORD in os.environ


def record(name: str, figures: dict[str, Any], page: Callable[[dict[str, Any]], str]) -> None:
    """Store figures in NAME.json and their page in NAME.md, if --record was given; an empty page is not stored."""
    if not is_recording():
        return
    (RESULTS / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    if text := page(figures):
        (RESULTS / f"{name}.md").write_text(text)


class Cases:
    """The cases of one run; a benchmark asks about each of them by name.

    Attributes:
        only: the pattern of --only.
        names: those that were asked about, in this order.
    """

    def __init__(self, only: str = "*") -> None:
        self.only = only
        self.names: list[str] = []

    def __contains__(self, name: str) -> bool:
        """Return whether this case is to be measured."""
        self.names.append(name)
        return fnmatch.fnmatch(name, self.only)

    def check(self) -> None:
        """Raise NotComparable if cases were asked about, and the pattern matches none."""
        if self.names and not fnmatch.filter(self.names, self.only):
            raise NotComparable(f"no case matches {self.only!r}; there are: {'; '.join(self.names)}")


EVERY = Cases()


class NotComparable(ValueError):
    """The request does not fit the figures in a results file; no measurement was made."""


def check_same(kept: Mapping[str, Any], name: str) -> None:
    """Refuse to add figures of this machine to a results file of another machine.

    Args:
        kept: the result of `describe` when the file `name` was written.
        name: the results file.

    Raises:
        NotComparable: processor, cores, memory, kernel or a version differs.
    """
    here = describe()
    if differences := [f"{key}: {kept.get(key)} there, {here[key]} here" for key in here if kept.get(key) != here[key]]:
        raise NotComparable(
            f"{name} holds figures of another machine ({'; '.join(differences)}); "
            "run without --only to replace them all, or without --record to see figures of this one"
        )


def calibrate() -> float:
    """Return the CPU seconds of a fixed loop of Python and numpy work, the smallest of three.

    Its work resembles planning: dictionaries and tuples, then sorting of columns. Divide figures by it to compare
    machines, or busy and quiet moments of one machine.
    """
    return min(_loop() for _ in range(3))


def _loop() -> float:
    import numpy as np

    started = time.process_time()
    numbers: dict[tuple[str, int], int] = {}
    for i in range(100_000):
        numbers.setdefault((f"layers.{i % 997}.weight", i % 61), len(numbers))
    column = (np.arange(1_000_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20)
    np.lexsort((column, column % np.uint64(64)))
    return time.process_time() - started


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def load() -> str:
    """Return a sentence on the machine's current load, to print beside timings."""
    return f"Load average at the end: {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores."
