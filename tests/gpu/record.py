"""The record of scripts/gpu-check: a page in Markdown and the results in JSON, written again after each check."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Result:
    """How one check ended.

    Attributes:
        state: "passed", "failed" or "not run".
        why: the reason, or a remark.
        figures: what it measured, by name.
        seconds: how long it took.
        machine: the device, driver and libraries that it used.
    """

    check: str
    state: str
    why: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)
    seconds: float = 0.0
    machine: Mapping[str, object] = field(default_factory=dict)

    def told(self) -> str:
        """Return the reason and the figures in one line."""
        figures = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in self.figures.items()]
        return ", ".join([*([self.why] if self.why else []), *figures])


class Record:
    """The results so far of a run, and the files that show them."""

    def __init__(self, path: Path, whats: Mapping[str, str], emulated: bool = False) -> None:
        """Keep a record in `path` (.md) and beside it (.json), of checks by name, in their order."""
        self.path = path
        self.whats = whats
        self.emulated = emulated
        self.results: list[Result] = []
        self._commit = _commit()

    def add(self, result: Result) -> None:
        """Add a result; write the record."""
        self.results.append(result)
        self.write()

    def machine(self) -> dict[str, object]:
        """Return what the checks have told about the machine."""
        told: dict[str, object] = {"python": platform.python_version(), "kernel": platform.release()}
        for each in self.results:
            told.update(each.machine)
        return told

    def values(self) -> dict[str, object]:
        """Return the record as plain values."""
        return {
            "emulated": self.emulated,
            "commit": self._commit,
            "machine": self.machine(),
            "is_complete": len(self.results) == len(self.whats),
            "checks": [
                {
                    "check": each.check,
                    "state": each.state,
                    "why": each.why,
                    "figures": dict(each.figures),
                    "seconds": round(each.seconds, 1),
                }
                for each in self.results
            ],
        }

    def table(self) -> str:
        """Return a table for a terminal."""
        rows = [("check", "result", "s", "why, figures")]
        rows += [(each.check, each.state, f"{each.seconds:.0f}", each.told()) for each in self.results]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
            for row in rows
        )

    def page(self) -> str:
        """Return the record in Markdown."""
        device = "emulated, no GPU" if self.emulated else str(self.machine().get("device", "no device"))
        machine = ", ".join(f"{key} {value}" for key, value in self.machine().items() if key != "device")
        lines = [f"# gpu-check: {device}", "", f"Commit {self._commit}. {machine}."]
        if self.emulated:
            lines += [
                "**Emulated**: a driver over memory files and CPU tensors. Sizes are small; figures mean nothing."
            ]
        lines += [
            'Written by `scripts/gpu-check`. "of device copy": the share of the rate at which the device copies its',
            "own memory, measured by the same check. GB/s count each byte once.",
            "",
            "| check | shows | result | s | remarks and figures |",
            "| --- | --- | --- | --- | --- |",
        ]
        done = {each.check: each for each in self.results}
        for name, what in self.whats.items():
            each = done.get(name, Result(name, "not run", "the script has not reached it"))
            cells = (name, what, each.state, f"{each.seconds:.1f}", each.told())
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
        return "\n".join(lines) + "\n"

    def write(self) -> None:
        """Replace both files."""
        for path, text in (
            (self.path, self.page()),
            (self.path.with_suffix(".json"), json.dumps(self.values(), indent=1) + "\n"),
        ):
            part = path.with_name(f".{path.name}.part")
            part.write_text(text)
            os.replace(part, path)


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return ran.stdout.strip() or "unknown"
