"""scripts/faults: run the matrix of faults, print the result of each case, store it."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import machine
from tests.faults import clock
from tests.faults.cases import FAULTS, FLIP_PHASES, Case, chosen, matrix
from tests.faults.cluster import COMMIT_S, PAUSE_S, PLAN_S, STAGE_S, Cluster
from tests.faults.run import Problem, Result, Runner
from tests.support import network
from tests.support.network import TwoHosts

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("--only", default="", metavar="PHASE/VICTIM/FAULT", help="patterns, as staging/*/kill,paused")
    parser.add_argument("--keep", action="store_true", help="put the rows of --only into the results of all cases")
    parser.add_argument("--json", action="store_true", help="print one JSON object last, instead of the table")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # take everything down that was started
    no_network = network.why_not()
    cases = chosen(matrix(no_network, clock.why_not()), options.only)
    if not cases:
        parser.error(f"no case matches {options.only!r}; parts are phase, victim and fault, see docs/reliability.md")
    if options.only and options.keep:
        kept = json.loads((RESULTS / "faults.json").read_text())
        try:
            machine.check_same(kept["machine"], "faults.json")
        except machine.NotComparable as error:
            parser.error(str(error))
    results, left = run_all(cases, no_network)
    found = {
        "machine": machine.describe(),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "deadlines": {"plan_s": PLAN_S, "stage_s": STAGE_S, "pause_s": PAUSE_S, "commit_s": COMMIT_S},
        "network": no_network or "two hosts as network namespaces",
        "left": left,
        "cases": [_row(result) for result in results],
    }
    if options.only and options.keep:
        found = merged(kept, found)
    text = table(found)
    print(json.dumps(found) if options.json else text)
    if options.keep or not options.only:
        (RESULTS / "faults.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / "faults.md").write_text(text + "\n")
    return 1 if left or any(result.problems for result in results) else 0


def run_all(cases: list[Case], no_network: str) -> tuple[list[Result], list[str]]:
    """Run cases on one cluster; after a failed case, continue on a new cluster."""
    results: list[Result] = []
    left: list[str] = []
    with contextlib.ExitStack() as stack:
        hosts = None
        if not no_network:
            hosts = stack.enter_context(contextlib.closing(TwoHosts()))
        runner: Runner | None = None
        for number, case in enumerate(cases):
            if case.why_not:
                results.append(Result(case, outcome="skipped"))
                continue
            if runner is None:
                cluster = Cluster(hosts)
                stack.callback(cluster.remove)
                try:
                    runner = Runner(cluster)
                except Problem as exc:
                    results.append(Result(case, problems=[f"not begun, no cluster: {exc}"]))
                    _note(f"{number + 1}/{len(cases)} {case.name}: {_said(results[-1])}")
                    cluster.remove()
                    continue
            result = runner.run(case)
            results.append(result)
            _note(f"{number + 1}/{len(cases)} {case.name}: {_said(result)}, {result.seconds:.1f} s")
            if result.problems:
                folder = _keep_logs(runner, case)
                _note(f"    logs: {folder}")
                runner.cluster.remove()
                runner = None
        if runner is not None:
            left += runner.cluster.stop()
            runner.cluster.remove()
    return results, left


def merged(kept: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the stored results updated with the new rows, and the new rows."""
    rows = {_name(row): row for row in kept["cases"]} | {_name(row): row for row in found["cases"]}
    again = sorted({*kept.get("again", []), *(_name(row) for row in found["cases"])})
    return {**kept, "cases": list(rows.values()), "left": kept["left"] + found["left"], "again": again}


def _name(row: dict[str, Any]) -> str:
    return f"{row['phase']}/{row['victim']}/{row['fault']}"


def _keep_logs(runner: Runner, case: Case) -> str:
    path = RESULTS.parents[1] / "build" / "faults" / (case.name.replace("/", "-") + ".log")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(f"--- {p.stem}\n{p.read_text()}" for p in sorted(runner.cluster.folder.glob("*.log"))))
    return str(path.relative_to(RESULTS.parents[1]))


def _row(result: Result) -> dict[str, Any]:
    case = result.case
    return {
        "phase": case.phase,
        "victim": case.victim,
        "fault": case.fault,
        "outcome": result.outcome,
        "told": result.told,
        "next_swap_s": None if result.recovery_s is None else round(result.recovery_s, 2),
        "attempts": result.attempts,
        "seconds": round(result.seconds, 1),
        "problems": result.problems,
        "skipped": case.why_not,
    }


def _said(result: Result) -> str:
    if result.problems:
        return "FAILED: " + "; ".join(result.problems)
    again = "" if result.recovery_s is None else f", next swap after {result.recovery_s:.1f} s"
    return result.outcome + again + (f" ({result.attempts} attempts)" if result.attempts > 1 else "")


def table(found: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    about, cases = found["machine"], found["cases"]
    ran = [case for case in cases if not case["skipped"]]
    failed = [case for case in ran if case["problems"]]
    deadlines = ", ".join(f"{name} = {value:g}" for name, value in found["deadlines"].items())
    times = sorted(case["next_swap_s"] for case in ran if case["next_swap_s"] is not None)
    lines = [
        "# Faults at every phase of a swap",
        "",
        f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, Python {about['python']}. A coordinator,",
        "two daemons, a trainer, a replica that is asked beside it, and on the other node one that polls, one that is",
        "written in place and one that exchanges its arenas (`flips`), all on one machine; network:",
        f"{found['network']}. Deadlines: {deadlines}.",
        f"{found['minutes']} minutes. Written by `scripts/faults`.",
        "",
        f"{len(ran)} cases run, {len(failed)} failed, {len(cases) - len(ran)} skipped. A case fails if a",
        "replica serves a mix or what was never decided, somebody hangs, replicas do not come to the live version by",
        "themselves, no swap succeeds afterwards, or a process, descriptor or file is left over.",
        *(
            [f"{len(set(found['again']))} of the cases were run again by themselves later."]
            if found.get("again")
            else []
        ),
        *([f"At the end was left: {'; '.join(found['left'])}."] if found["left"] else []),
        "",
        "Seconds are from the end of the fault until the version after it was served by all replicas: median "
        f"{times[len(times) // 2]:.1f}, longest {times[-1]:.1f}."
        if times
        else "",
        "",
        "| phase | victim | fault | the swap | seconds |",
        "| --- | --- | --- | --- | --- |",
        *_rows(cases),
        "",
        *(f"- {name}: {what}." for name, what in FAULTS.items()),
        *(f"- {name}: {what}." for name, what in FLIP_PHASES.items()),
    ]
    return "\n".join(lines)


def _rows(cases: list[dict[str, Any]]) -> Iterator[str]:
    for case in cases:
        outcome = f"skipped: {case['skipped']}" if case["skipped"] else case["outcome"]
        if case["problems"]:
            outcome = "FAILED: " + "; ".join(case["problems"]).replace("|", "/")
        elif case["attempts"] > 1:
            outcome += f" (the next one at attempt {case['attempts']})"
        seconds = "" if case["next_swap_s"] is None else f"{case['next_swap_s']:.1f}"
        yield f"| {case['phase']} | {case['victim']} | {case['fault']} | {outcome} | {seconds} |"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
