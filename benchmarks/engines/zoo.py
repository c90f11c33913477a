"""python -m benchmarks.engines.zoo [--only PATTERN] [--tp N] [--dtype NAME]: refit tiny models of vLLM."""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.engines.zoo_case import ARCHITECTURES
from benchmarks.machine import describe

RESULTS = Path(__file__).parents[1] / "results"
CASE_S = 900
COLUMNS = ("model", "family", "tp", "dtype", "reload", "on disk", "in memory", "verify", "bind_s", "commit_s")


def main() -> int:
    """Run one architecture after the other; return 1 if a refit is not equal where vLLM's reload is right."""
    parser = argparse.ArgumentParser(prog="scripts/try-zoo", description=__doc__)
    parser.add_argument("--only", default="*", help="architectures whose names match, for example 'mamba*'")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--dtype", default="bfloat16", help="of checkpoints and engines")
    options = parser.parse_args()
    found = []
    for kind in fnmatch.filter(ARCHITECTURES, options.only):
        row = _ran(kind, options.tp, options.dtype)
        print(json.dumps(row), file=sys.stderr, flush=True)
        found.append(row)
        _keep(row)
    return int(
        any(row["reload"] == "right" and not row.get("on disk") == row.get("in memory") == "equal" for row in found)
    )


def _ran(kind: str, tp: int, dtype: str) -> dict[str, Any]:
    case = [sys.executable, "-m", "benchmarks.engines.zoo_case", kind, str(tp), dtype]
    row = {"model": kind, "family": ARCHITECTURES[kind][0], "tp": tp, "dtype": dtype}
    try:
        ran = subprocess.run(case, capture_output=True, text=True, timeout=CASE_S, check=False)
    except subprocess.TimeoutExpired:
        return row | {"reload": f"not tried: no end after {CASE_S} s"}
    if lines := [line for line in ran.stdout.splitlines() if line.startswith('{"model"')]:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    last = ran.stderr.strip().splitlines() or ["no output"]
    return row | {"reload": f"not tried: vLLM: {last[-1]}"}


def _keep(row: dict[str, Any]) -> None:
    """Write the results; rows of other runs stay."""
    file = RESULTS / "zoo.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    key = [row[name] for name in COLUMNS[:4]]
    rows = sorted(
        [*(one for one in rows if [one[name] for name in COLUMNS[:4]] != key), row], key=lambda one: one["model"]
    )
    file.write_text(json.dumps(rows, indent=1) + "\n")
    lines = [[*COLUMNS], ["---"] * len(COLUMNS), *([_shown(one.get(name)) for name in COLUMNS] for one in rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    about = describe()
    (RESULTS / "zoo.md").write_text(
        f"""# A zoo of tiny models

`scripts/try-zoo`, last on {about["cpu"]}, {about["cores"]} cores: random
checkpoints, vLLM on the CPU, one driven engine.

- reload: whether vLLM's own `reload_weights` gives the first checksums and answers again after another checkpoint.
- on disk, in memory: a refit with the names of checkpoint files, and of transformers' `state_dict()`. Equal: checksums
  and log probabilities are those of vLLM's reload of the same tensors.
- commit_s: the pause, with the recomputation of derived tensors.

{table}
"""
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")[:160]


if __name__ == "__main__":
    sys.exit(main())
