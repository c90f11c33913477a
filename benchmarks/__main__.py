"""python -m benchmarks [NAME] [--json] [--quick | --record]: run a benchmark, or all of them."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks import machine
from benchmarks.machine import NotComparable

# name -> module, which is imported when it runs: some need torch, a GPU, or packages of an extra
BENCHMARKS = {
    "mxfp8": "benchmarks.mxfp8",
    "plan": "benchmarks.plan",
    "swap": "benchmarks.swap",
    "mxfp8-swap": "benchmarks.mxfp8_swap",
    "checkpoint": "benchmarks.checkpoint",
    "flip": "benchmarks.flip",
    "simulate": "benchmarks.simulate",
    "delta": "benchmarks.delta",
    "fanout": "benchmarks.fanout",
    "overlap": "benchmarks.overlap",
    "cables": "benchmarks.cables",
    "coordinator": "benchmarks.coordinator",
    "observing": "benchmarks.observing",
    "kernels": "benchmarks.kernels",
    "docs": "benchmarks.docs",
}


# these are slow, and run only by name
LONG = {"soak": "benchmarks.soak", "workers": "benchmarks.workers"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("name", nargs="?", choices=sorted(BENCHMARKS | LONG), help="by default all but soak")
    parser.add_argument("--json", action="store_true", help="print one JSON object last; progress goes to stderr")
    parser.add_argument("--quick", action="store_true", help="small and soon over, where a benchmark has such a form")
    parser.add_argument("--record", action="store_true", help="store the figures in benchmarks/results")
    parser.add_argument("--only", metavar="CASES", help="measure the cases that this pattern matches; '?' lists them")
    parser.add_argument("--gib", type=int, nargs="+", help="models of flip of these sizes only; prints what they need")
    parser.add_argument("--minutes", type=float, help="how long the soak takes")
    parser.add_argument("--seed", type=int, help="of the soak's faults")
    options = parser.parse_args(arguments)
    extra = {name: value for name in ("minutes", "seed") if (value := getattr(options, name)) is not None}
    if extra and options.name not in LONG:
        parser.error(f"--{next(iter(extra))} is for {', '.join(LONG)}")
    cases = machine.Cases() if options.only is None else machine.Cases(options.only)
    if options.only is not None:
        if options.name is None:
            parser.error("--only is for one benchmark: scripts/bench NAME --only CASES")
        if options.record and options.name != "swap":
            parser.error("--record is for complete figures: without --only (swap keeps those of its other cases)")
    if options.gib is not None:
        extra["gib"] = options.gib
        if options.name != "flip":
            parser.error("--gib is for flip")
    if options.record and (options.quick or options.gib):
        parser.error("--record is for complete figures: without --quick and --gib")
    if options.record:
        os.environ[machine.RECORD] = "1"
    names = [options.name] if options.name else list(BENCHMARKS)
    results: dict[str, Any] = {}
    failed = False
    for name in names:
        print(f"==> {name}", file=sys.stderr, flush=True)
        try:
            module = importlib.import_module((BENCHMARKS | LONG)[name])
            given = dict(extra)
            if "cases" in inspect.signature(module.run).parameters:
                given["cases"] = cases
            elif options.only is not None:
                parser.error(f"{name} has one case: run it without --only")
            results[name] = _run(partial(module.run, **given), options.json or options.only is not None, options.quick)
            cases.check()
        except NotComparable as error:
            parser.error(str(error))
        except Exception as error:  # a failure must not hide the results of the others
            if options.name:
                raise
            failed = True
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
    if options.json:
        print(json.dumps(results[options.name] if options.name else results))
    elif options.only is not None:  # the pages need all cases
        print(json.dumps(results[options.name], indent=1))
    return 1 if failed else 0


def _run(run: Callable[..., dict[str, Any]], json_output: bool, quick: bool) -> dict[str, Any]:
    if not quick:
        return run(json_output)
    if "quick" in inspect.signature(run).parameters:
        return run(json_output, quick=True)
    print("has no quick form", file=sys.stderr)
    return run(json_output)


if __name__ == "__main__":
    sys.exit(main())
