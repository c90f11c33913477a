"""python -m benchmarks.engines.zoo [--only PATTERN] [--tp N] [--dtype NAME]: refit tiny models of vLLM."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.engines.architectures import ARCHITECTURES
from benchmarks.engines.vllm_case import daemon
from benchmarks.engines.zoo_case import forked, run
from benchmarks.machine import describe

RESULTS = Path(__file__).parents[1] / "results"
CASE_S = 600
MODULES = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
)
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
COLUMNS = ("model", "family", "tp", "dtype", "reload", "on disk", "in memory", "verify", "bind_s", "commit_s")


def main() -> int:
    """Run one architecture after the other; return 1 if a refit is not equal where vLLM's reload is right."""
    parser = argparse.ArgumentParser(prog="scripts/try-zoo", description=__doc__)
    parser.add_argument("--only", default="*", help="architectures whose names match, for example 'mamba*,jamba'")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument(
        "--dtype", default="bfloat16", help="of checkpoints and engines; bfloat16+fp8_per_tensor: vLLM quantises"
    )
    parser.add_argument("--print", action="store_true", dest="prints", help="print rows, and keep none")
    options = parser.parse_args()
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    for module in MODULES:
        importlib.import_module(module)  # once: each case is a fork
    registry = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda inspect: inspect()  # which imports vLLM again

    directory = Path(tempfile.mkdtemp(prefix="rfdz"))
    print(f"logs: {directory}", file=sys.stderr)
    found = []
    with daemon(directory):
        for kind in [kind for only in options.only.split(",") for kind in fnmatch.filter(ARCHITECTURES, only)]:
            row = _ran(kind, options.tp, options.dtype, directory)
            print(json.dumps(row), file=sys.stdout if options.prints else sys.stderr, flush=True)
            found.append(row)
            if not options.prints:
                _keep(row)
    return int(
        any(row["reload"] == "right" and not row.get("on disk") == row.get("in memory") == "equal" for row in found)
    )


def _ran(kind: str, tp: int, dtype: str, directory: Path) -> dict[str, Any]:
    row = {"model": kind, "family": ARCHITECTURES[kind][0], "tp": tp, "dtype": dtype}
    try:
        return row | forked(run, kind, tp, dtype, directory, timeout=CASE_S, log=directory / f"{kind}-{tp}.log")
    except RuntimeError as exc:
        return row | {"reload": "not tried: " + re.sub(r" \(/\S+\)", "", str(exc))}  # without this machine's paths


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

- on disk, in memory: a refit with the names of checkpoint files, and of transformers' `state_dict()`. Equal: digests
  of all weights and log probabilities are those of an engine that was started with these tensors.
- reload: whether vLLM's own `reload_weights` gives the same, in an engine that refitd has refitted before. WRONG at
  gpt-oss is vLLM's fault: without refitd, too, a reload leaves its experts and sinks as they were.
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
