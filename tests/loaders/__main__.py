"""scripts/loaders: learn the layouts of random loaders, and judge them by the loaders' own results."""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import threading
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from tests.loaders.generate import generate
from tests.loaders.judge import Verdict, judge

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "loaders"
OUTCOMES = ("learned", "computed", "refused", "wrong", "changed", "broken")
BAD = ("wrong", "changed")

ABOUT = """# Layouts learned from random loaders

`scripts/loaders --keep ROW`. Each loader is traced, then run on the values of three further versions. A
version in which a tensor is not equal to the layout's result, bit for bit, counts as accepted and wrong.
"As engines' loaders": made only of parts that vLLM's and SGLang's loaders have. "Others" also compute,
decide by values, or write around torch. Before: the package of that commit under the same judge.

"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/loaders", description=__doc__)
    parser.add_argument("--count", type=int, default=5000, help="loaders that run (5000)")
    parser.add_argument("--seed", type=int, default=1, help="the first seed; the others follow (1)")
    parser.add_argument("--only", type=int, help="print the loader of one seed, and its verdict")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--keep", metavar="ROW", help="write this run as a row of benchmarks/results/loaders.md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    threading.excepthook = lambda _: None  # the loader's own, which a refusal ends
    if options.only is not None:
        program = generate(options.only)
        print(program.text)
        print(judge(program))
        return 0
    began = time.monotonic()
    verdicts = run(options.count, options.seed)
    result = summary(verdicts, options.count, options.seed, time.monotonic() - began)
    print(json.dumps(result, indent=1) if options.json else table({options.keep or "this run": result}))
    for one in verdicts:
        if one.outcome in BAD:
            print(f"{one.outcome}: seed {one.seed}: {one.detail[:300]}", file=sys.stderr)
    if options.keep:
        keep(options.keep, result)
    return 1 if any(result["all"][bad] for bad in BAD) else 0


def run(count: int, seed: int) -> list[Verdict]:
    """Judge loaders until `count` of them have run; loaders that raise on values are not counted."""
    verdicts: list[Verdict] = []
    done = 0
    while done < count:
        try:
            found = judge(generate(seed))
        except Exception:
            print(f"seed {seed}:\n{traceback.format_exc()}", file=sys.stderr)
            raise
        verdicts.append(found)
        done += found.outcome != "broken"
        seed += 1
        if sys.stderr.isatty() and not seed % 50:
            print(f"\r{done} of {count}", end="", file=sys.stderr, flush=True)
    return verdicts


def summary(verdicts: list[Verdict], count: int, seed: int, seconds: float) -> dict[str, Any]:
    def shares(which: list[Verdict]) -> dict[str, int]:
        found = collections.Counter(one.outcome for one in which)
        return {outcome: found[outcome] for outcome in OUTCOMES}

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "machine": machine.describe(),
        "commit": commit.stdout.strip(),
        "count": count,
        "versions": 3,
        "seed": seed,
        "seconds": round(seconds, 1),
        "all": shares(verdicts),
        "engines": shares([one for one in verdicts if one.is_benign]),
        "others": shares([one for one in verdicts if not one.is_benign]),
        "wrong_seeds": [asdict(one) for one in verdicts if one.outcome in BAD][:50],
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = ["| run | loaders | count | learned | computed | refused | accepted and wrong | engine changed |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row, result in results.items():
        for kind, label in (("engines", "as engines' loaders"), ("others", "others")):
            found = result[kind]
            total = sum(found.values()) - found["broken"]
            lines.append(
                f"| {row} ({result['commit']}) | {label} | {total} | "
                + " | ".join(str(found[outcome]) for outcome in OUTCOMES[:5])
                + " |"
            )
    return "\n".join(lines)


def keep(row: str, result: dict[str, Any]) -> None:
    """Write this run's row beside the others of the file."""
    path = RECORD.with_suffix(".json")
    results = json.loads(path.read_text()) if path.exists() else {}
    results[row] = result
    path.write_text(json.dumps(results, indent=1) + "\n")
    runs = [
        f"- {name}: {one['count']} loaders from seed {one['seed']}, {one['versions']} versions each, in "
        f"{one['seconds']} s; commit {one['commit']}, {one['machine']['cpu']}, {one['machine']['cores']} cores, "
        f"Python {one['machine']['python']}, torch {one['machine']['packages']['torch']}"
        for name, one in results.items()
    ]
    RECORD.with_suffix(".md").write_text(ABOUT + "\n".join(runs) + "\n\n" + table(results) + "\n")


if __name__ == "__main__":
    sys.exit(main())
