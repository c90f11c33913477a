"""Measure how long decisions stop when a coordinator, or a member of its etcd, fails in the middle of swaps."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine
from tests.support import etcd, network
from tests.support.led_trial import TAKE_OVER_S, Judged, Outcome, Trial

RESULTS = Path(__file__).parent / "results" / "etcd.md"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/try-etcd", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each fault is done (3)")
    parser.add_argument("--only", default="", help="the faults whose names contain this; keeps no results")
    options = parser.parse_args(arguments)
    if etcd.MISSING:
        print(f"try-etcd: {etcd.MISSING}: apt-get install etcd-server etcd-client", file=sys.stderr)
        return 2
    if without := network.why_not():
        print(f"try-etcd: no cables to pull, everything is on loopback: {without}", file=sys.stderr)
    hosts = None if without else network.SwitchedHosts(5, 1000, "e")
    began = time.monotonic()
    try:
        trial = Trial(hosts)
        with trial.running():
            names = [name for name in trial.faults() if options.only in name]
            outcomes = []
            for number in range(options.rounds):
                for name in names:
                    outcomes.append(trial.suffer(name))
                    print(
                        f"round {number + 1}: {name}: decided after {outcomes[-1].decided_s:.1f} s",
                        file=sys.stderr,
                        flush=True,
                    )
            judged = trial.judge()
    finally:
        if hosts is not None:
            hosts.close()
    text = page(outcomes, judged, time.monotonic() - began, hosts is not None)
    print(text)
    if not options.only:
        RESULTS.write_text(text)
    late = [outcome for outcome in outcomes if outcome.decided_s >= TAKE_OVER_S]
    for wrong in [*judged.wrong, *(f"{o.fault}: decided after {o.decided_s:.1f} s" for o in late)]:
        print(f"try-etcd: {wrong}", file=sys.stderr)
    return 1 if judged.wrong or late else 0


def page(outcomes: Sequence[Outcome], judged: Judged, seconds: float, is_cabled: bool) -> str:
    """Return the results as Markdown."""
    found = machine.describe()
    version = subprocess.run(["etcd", "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[0]
    where = "five network namespaces on one switch" if is_cabled else "loopback"
    rows = []
    for name in dict.fromkeys(outcome.fault for outcome in outcomes):
        of = [outcome for outcome in outcomes if outcome.fault == name]
        decided, served = [outcome.decided_s for outcome in of], [outcome.seconds for outcome in of]
        over = sum(outcome.took_over for outcome in of)
        figures = " | ".join(
            f"{figure(times):.1f}" for times in (decided, served) for figure in (statistics.median, max)
        )
        rows.append(f"| {name} | {len(of)} | {over} | {figures} |")
    table = "\n".join(rows)
    return f"""# A coordinator with standbys, and etcd, broken in the middle of swaps

{found["cpu"]}, {found["cores"]} cores, Linux {found["kernel"]}, Python {found["python"]}, {version}.
Three hosts with a member of etcd and a coordinator each, two with a daemon; a trainer and two replicas
that swap all the time; {where}. etcd's data is in memory.
{seconds / 60:.1f} minutes; the machine's load was {os.getloadavg()[1]:.0f}. Written by `scripts/try-etcd`.

Seconds are from the fault until a swap that began after it was decided, and until a version that was published after it
(the second one, as a rule) was served by all replicas.

| fault | times | another one led | decided: median s | longest s | served: median s | longest s |
| --- | --- | --- | --- | --- | --- | --- |
{table}

| of {judged.decisions} decisions, by etcd's whole history and all logs | |
| --- | --- |
| decided twice, or out of order | {len(judged.twice)} |
| committed and not decided | {len(judged.undecided_commits)} |
| decided and aborted | {len(judged.decided_aborts)} |
| torn: a replica with parts of two versions | {len(judged.torn)} |
| fenced: a replica that served nothing, although its permit had not ended | {len(judged.fenced)} |
"""


if __name__ == "__main__":
    sys.exit(main())
