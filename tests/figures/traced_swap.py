"""Run one steady swap of one source rank and one target rank in real processes, and list the functions it passes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HOOK = Path(__file__).parent / "hook"

# How long processes get to write their counts.
WRITE_S = 10.0

# The compiler's names for functions without a name.
_UNNAMED = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>", "<module>")


def run() -> list[dict[str, Any]]:
    """Return a row for each function that the swap calls: process, file, function, line, calls, first call."""
    if os.environ.get("FIGURES_FOLDER"):
        return _counted(Path(os.environ["FIGURES_FOLDER"]))
    with tempfile.TemporaryDirectory() as folder:
        flag = Path(folder, "flag")
        flag.write_bytes(b"0")
        environment = {
            **os.environ,
            "FIGURES_FOLDER": folder,
            "PYTHONPATH": f"{HOOK}:{os.environ.get('PYTHONPATH', '')}",
        }
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _counted(folder: Path) -> list[dict[str, Any]]:
    import torch

    from refitd import testing

    flag = folder / "flag"
    with testing.Daemon() as daemon, daemon.connect() as client:
        source = client.register_source("policy", {"w": torch.ones(1 << 18)})
        target = client.register_target("policy", {"w": torch.zeros(1 << 18)}, replica="a")
        for version in (1, 2, 3):
            if version == 3:
                time.sleep(1.5)  # background work of the swaps before has ended
                _set(flag, b"1")
            source.publish(version)
            with testing.Engine(target):
                client.swap("policy", version)
        _set(flag, b"2")
        started = time.monotonic()
        while len(list(folder.glob("*.json"))) < 3 and time.monotonic() < started + WRITE_S:
            time.sleep(0.05)
    found = []
    for path in sorted(folder.glob("*.json")):
        said = json.loads(path.read_text())
        process = _process(said["argv"])
        for file, function, line, calls, at in said["rows"]:
            if file.startswith("testing/") or function.rsplit(".", 1)[-1] in _UNNAMED:
                continue
            found.append(
                {"process": process, "file": file, "function": function, "line": line, "calls": calls, "at": at}
            )
    return sorted(found, key=lambda row: row["at"])


def _set(flag: Path, value: bytes) -> None:
    with flag.open("r+b") as file:
        file.write(value)


def _process(argv: list[str]) -> str:
    words = " ".join(argv)
    for name in ("worker", "coordinator", "serve"):
        if name in words:
            return {"serve": "daemon"}.get(name, name)
    return "client"
