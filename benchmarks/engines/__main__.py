"""python -m benchmarks.engines [--quick] [--only PATTERN] [--json]: refit every real engine, print and keep a table."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.engines.shapes import MODELS
from benchmarks.machine import describe

RESULTS = Path(__file__).parents[1] / "results"
CASE_S = 900

# (model, tensor-parallel size, lifecycle); a mixture of experts on several ranks uses expert parallelism
CASES = (("llama", 1, "driven"), ("llama", 2, "driven"), ("qwen2", 1, "driven"), ("qwen2", 2, "driven"))
EXPERTS = (("moe", 1, "driven"), ("moe", 2, "driven"), ("moe", 2, "follow"))
FOLLOWING = (("llama", 1, "follow"), ("llama", 2, "follow"))
PIPELINE = (("llama", 1, "pipeline"),)
OVER_HTTP = (("llama", 1, "trl"), ("llama", 1, "native"))

# name -> module and its arguments, without the size
OTHERS = {
    "llama-dp2-driven": ("parallel_case", "llama", "{size}", "driven"),
    "llama-dp2-follow": ("parallel_case", "llama", "{size}", "follow"),
    "moe-dp2-driven": ("parallel_case", "moe", "{size}", "driven"),
    "moe-dp2-follow": ("parallel_case", "moe", "{size}", "follow"),
    "minilm": ("trained_case",),
    "lora-tp1-driven": ("lora_case", "1", "{size}", "driven"),
    "lora-tp2-follow": ("lora_case", "2", "{size}", "follow"),
    "async-grpo": ("trl_case",),
    "prefix-cache": ("cache_case",),
    "bad-input": ("bad_input_case",),
    "fixed-tp2": ("fixed_case",),
    "server-killed-tp1": ("killed_case", "1"),
    "server-killed-tp2": ("killed_case", "2"),
    "restart-tp1": ("restart_case", "1"),
    "restart-tp2": ("restart_case", "2"),
}

COLUMNS = (
    ("engine", "engine"),
    ("MB", "bytes"),
    ("tensors", "tensors"),
    ("equal to its own reload", "equal"),
    ("verify", "verified"),
    ("bind s", "bind_s"),
    ("refitd s", "refitd_s"),
    ("publish s", "publish_s"),
    ("wake s", "wake_s"),
    ("blocked s", "refitd_blocked_s"),
    ("empty call s", "empty_call_s"),
    ("commit s", "commit_s"),
    ("gloo s", "gloo_s"),
    ("disk s", "disk_s"),
    ("blocked s", "disk_blocked_s"),
    ("pickled call s", "pickled_s"),
    ("refitd, of the fastest native way", "of_native"),
    ("back s", "back_s"),
    ("load", "load"),
    ("cpu", "cpu"),
    ("code", "code"),
)
NATIVE = ("gloo_s", "disk_s", "pickled_s")


def main() -> int:
    """Run the cases in sequence, each in separate processes."""
    parser = argparse.ArgumentParser(prog="scripts/try-engines", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny models, few rounds, no results are kept")
    parser.add_argument("--only", default="*", help="cases whose names match ('llama-tp2*'), or begin so ('llama TP2')")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    found, failed = [], []
    size, rounds = ("tiny", 3) if options.quick else ("246MB", 5)
    cases = _cases(size, rounds)
    chosen = _chosen(cases, options.only)
    if not chosen:
        parser.error(f"--only {options.only}: no case matches; cases: {', '.join(cases)}")
    for name in chosen:
        print(f"==> vllm {name} {size}", file=sys.stderr, flush=True)
        ran = subprocess.run(cases[name], capture_output=True, text=True, timeout=CASE_S, check=False)
        lines = [line for line in ran.stdout.splitlines() if line.startswith('{"engine"')]
        if ran.returncode or not lines:
            failed.append(name)
            print("\n".join((ran.stdout + ran.stderr).splitlines()[-40:]), file=sys.stderr)
            continue
        found.append({**json.loads(lines[-1]), "load": f"{os.getloadavg()[1]:.0f}", "code": _code()})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    learned = _shapes(failed) if options.only == "*" and not options.quick else []
    wrong = [row["engine"] for row in found if not row["equal"] or row["verified"] != "proven"]
    table = _table(found)
    if options.json:
        print(json.dumps({"machine": describe(), "engines": found, "learned": learned, "failed": failed}))
    else:
        print(table)
    if found and not options.quick:
        _keep(found, learned, is_whole=options.only == "*")
    if failed or wrong:
        print(f"failed: {failed}; weights differ: {wrong}", file=sys.stderr)
    return 1 if failed or wrong else 0


def _chosen(cases: Iterable[str], asked: str) -> list[str]:
    """Return the cases whose names match a pattern, or else begin with it; a table's row begins with its case."""
    pattern = asked.lower().replace(",", "").replace(" ", "-")
    return fnmatch.filter(cases, pattern) or fnmatch.filter(cases, f"{pattern}*")


def _code() -> str:
    """Return the commit that is run; "" outside a checkout."""
    ran = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return ran.stdout.strip()


def _keep(found: list[dict[str, Any]], learned: list[dict[str, Any]], *, is_whole: bool) -> None:
    """Write the results; if only some cases ran, keep the earlier results of the rest."""
    file = RESULTS / "engines.json"
    is_first = is_whole or not file.exists()
    about = describe()
    before = {"machine": about, "engines": [], "learned": []} if is_first else json.loads(file.read_text())
    earlier = {"cpu": before["machine"]["cpu"]}  # for rows without this field
    rows = {row["engine"]: earlier | row for row in before["engines"]}
    rows |= {row["engine"]: {**row, "cpu": about["cpu"]} for row in found}
    shapes = {row["model"]: row for row in [*before["learned"], *learned]}
    kept = {"machine": about, "engines": [*rows.values()], "learned": [*shapes.values()]}
    file.write_text(json.dumps(kept, indent=1) + "\n")
    (RESULTS / "engines.md").write_text(_page(_table(kept["engines"]), kept["engines"], kept["learned"]))


def _cases(size: str, rounds: int) -> dict[str, list[str]]:
    """Return each case's command by its name."""
    found = {}
    for kind, tp, lifecycle in CASES + EXPERTS + PIPELINE + FOLLOWING:
        found[f"{kind}-tp{tp}-{lifecycle}"] = ("vllm_case", kind, str(tp), size, str(rounds), lifecycle)
    for kind, tp, lifecycle in OVER_HTTP:
        found[f"{kind}-tp{tp}-{lifecycle}"] = ("http_case", str(tp), size, lifecycle)
    for name, case in OTHERS.items():
        found[name] = tuple(part.format(size=size) for part in case)
    return {name: [sys.executable, "-m", f"benchmarks.engines.{case[0]}", *case[1:]] for name, case in found.items()}


def _shapes(failed: list[str]) -> list[dict[str, Any]]:
    """Learn the layouts of large models, without memory."""
    found = []
    for name in MODELS:
        print(f"==> the layout of {name}", file=sys.stderr, flush=True)
        case = [sys.executable, "-m", "benchmarks.engines.shapes", name]
        ran = subprocess.run(case, capture_output=True, text=True, timeout=CASE_S, check=False)
        lines = [line for line in ran.stdout.splitlines() if line.startswith('{"model"')]
        if ran.returncode or not lines:
            failed.append(name)
            print("\n".join((ran.stdout + ran.stderr).splitlines()[-40:]), file=sys.stderr)
            continue
        found.append(json.loads(lines[-1]))
        print(lines[-1], file=sys.stderr, flush=True)
    return found


def _table(found: list[dict[str, Any]]) -> str:
    rows = [[_shown(_filled(row).get(key)) for _, key in COLUMNS] for row in found]
    head = [title for title, _ in COLUMNS]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    native = [row[way] for way in NATIVE if way in row]
    ratio = {"of_native": f"{row['refitd_s'] / min(native):.2f}"} if native else {}
    return {**row, **ratio, "bytes": f"{row['bytes'] / 1e6:.3g}"}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3f}" if value >= 0.01 else f"{value:.4f}"
    return "" if value is None else str(value)


def _page(table: str, found: list[dict[str, Any]], learned: list[dict[str, Any]]) -> str:
    machine, first = describe(), found[0]
    rounds = min(row["rounds"] for row in found if "rounds" in row)
    rows = "\n".join(
        f"| {m['model']} | {m['gigabytes']} | {m['canonical']} | {m['params']} | {m['tiles']} | {_shown(m['whole'])} "
        f"| {m['trace_cpu_s']:.1f} |"
        for m in learned
    )
    return f"""# Real engines

`scripts/try-engines`, last on {machine["cpu"]}, {machine["cores"]} cores, kernel {machine["kernel"]};
vLLM {first["vllm"]} on the CPU, torch {machine["packages"].get("torch")}. The trainer is FSDP2 on two
ranks in float32, the engine holds bfloat16. Medians of {rounds} rounds or more; the ways take turns in every round,
with the same new weights.

- refitd: from the first `publish` until the version is live, the cast included; `publish` is its first part. `wake`:
  the first call (`start_weight_update`), which wakes an idle engine, and before and after which it goes on. `blocked`:
  the call that waits for the version, in which the engine answers nothing. `empty call`: the one after it, which does
  nothing: what vLLM takes for any call. `commit`: the time in which the weights change. That is all that an engine that
  follows stands still for; the other engines are called, and stand still for a call of vLLM's, too.
- gloo: the trainer gathers each tensor in bfloat16, its first rank sends it to the workers, and vLLM's loader takes it
  as it comes (zeros before, equal afterwards). The engine answers nothing meanwhile.
- disk: the trainer gathers, rank 0 writes safetensors, vLLM's `reload_weights` reads it.
- pickled call: vLLM's loader on whole tensors that are sent with a call; gathering them is not counted.
- Where a row lacks one of these, it was not tried there; the ratio is to the fastest one that was.
- equal: vLLM's `compute_weight_checksums` and a greedy answer after refitd are those after vLLM's own reload; over
  HTTP, first tokens are those of transformers with the same weights (three in four at least: both round to bfloat16).
  PP2 and data-parallel experts die in vLLM at their first generation on CPUs: only checksums are compared. MiniLM's
  embeddings are compared before a refit and after one to other weights and one back. Bad input: refused by name, and
  the engine answers as before.
- back: from the kill of a server's rank in the middle of a swap until the server that its supervisor starts serves what
  the fleet serves, the longer one of two kills, before and after the decision. Most of it is vLLM's start.
- Cases are run one after the other, maybe beside other work on the machine: compare within a row. `load`: the machine's
  load of the last five minutes. `code`: the commit that was run. Rows without it are older: among them are some of an
  adapter that called engines before a version was staged, and of trainers that published float32.
- Workers of vLLM spin for a second after each call (`shm_broadcast`, `busy_loop_s`), which takes processors from
  refitd's.

{table}

## Layouts learned from vLLM's loaders, on the meta device

| model | GB | canonical tensors | parameters | tiles | nothing left out | CPU s |
| --- | --- | --- | --- | --- | --- | --- |
{rows}
"""


if __name__ == "__main__":
    sys.exit(main())
