"""scripts/fuzz: send malformed input to every reader and both live sockets; report refusals and failures."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import machine
from refitd.testing import Daemon
from tests.fuzz.live import CONFIG, Live
from tests.fuzz.readers import Reader, readers
from tests.support.hostile import figures

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
HANG_S = 20
LIVE_SHARE = 0.4  # of the inputs
MOST_FINDINGS = 20


class Hang(Exception):
    """One input took too long."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=120_000, help="all together (120000)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same inputs (1)")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/fuzz.json and fuzz.md")
    options = parser.parse_args(arguments)
    started, found = time.monotonic(), []
    rows = run_readers(int(options.inputs * (1 - LIVE_SHARE)), options.seed, found)
    live = run_live(int(options.inputs * LIVE_SHARE / 3), options.seed, found)
    result = {
        "machine": machine.describe(),
        "seed": options.seed,
        "inputs": sum(row["inputs"] for row in rows + live["surfaces"]),
        "seconds": round(time.monotonic() - started, 1),
        "surfaces": rows + live.pop("surfaces"),
        "live": live,
        "findings": found,
    }
    text = table(result)
    print(text)
    if options.keep:
        (RESULTS / "fuzz.json").write_text(json.dumps(result, indent=1) + "\n")
        (RESULTS / "fuzz.md").write_text(text + "\n")
    return 1 if found else 0


def run_readers(inputs: int, seed: int, found: list[str]) -> list[dict[str, Any]]:
    """Feed every reader its share; a crash, an unexpected exception or a hang is a finding."""
    rows = []

    def too_long(number: int, frame: FrameType | None) -> None:
        raise Hang(f"no end within {HANG_S} s")

    signal.signal(signal.SIGALRM, too_long)
    with tempfile.TemporaryDirectory() as directory:
        everyone = readers(Path(directory))
        shares = sum(reader.share for reader in everyone)
        for reader in everyone:
            rng = random.Random(f"{seed} {reader.name}")
            count, slowest = max(1, round(inputs * reader.share / shares)), 0.0
            for number in range(count):
                began = time.perf_counter()
                signal.alarm(HANG_S)
                feed(reader, rng, number, found)
                signal.alarm(0)
                slowest = max(slowest, time.perf_counter() - began)
            rows.append(
                {
                    "surface": reader.name,
                    "inputs": count,
                    "accepted": reader.counts[True],
                    "refused": reader.counts[False],
                    "slowest_s": round(slowest, 3),
                }
            )
            print(f"==> {reader.name}: {count} inputs", file=sys.stderr, flush=True)
    return rows


def feed(reader: Reader, rng: random.Random, number: int, found: list[str]) -> None:
    """Give a reader one input, and count the result."""
    try:
        reader.counts[reader.feed(rng)] += 1
    except Exception as exc:
        at = traceback.extract_tb(exc.__traceback__)[-1]
        if len(found) < MOST_FINDINGS:
            found.append(f"{reader.name}, input {number}: {exc!r} at {Path(at.filename).name}:{at.lineno}")


def run_live(inputs: int, seed: int, found: list[str]) -> dict[str, Any]:
    """Send `inputs` to each of the live sockets, with normal requests and swaps in between."""
    daemon = Daemon(CONFIG).start()
    try:
        live = Live(daemon, random.Random(f"{seed} live"))
        try:
            live.run(inputs)
            live.close()
        except Exception as exc:
            found.append(f"live: {exc!r}; log: {daemon.log()[-2000:]}")
        if not daemon.is_running or "internal-error" in daemon.log():
            found.append(f"live: the daemon or coordinator made a mistake: {daemon.log()[-4000:]}")
        for name, peak in live.peaks.items():
            if peak.private_bytes - peak.before.private_bytes > 256 << 20:
                found.append(f"live: {name} grew from {peak.before.private_bytes} to {peak.private_bytes} bytes")
        left = daemon.stop()
        if left:
            found.append(f"live: left behind: {left}")
        return {
            "surfaces": [
                {"surface": s.name, "inputs": s.inputs, "accepted": s.accepted, "refused": s.refused,
                 "unanswered": s.unanswered}
                for s in live.surfaces.values()
            ],
            "normal_requests": live.requests,
            "swaps": live.swaps,
            "processes": {
                name: {
                    "private_mib_before": peak.before.private_bytes >> 20,
                    "private_mib_peak": peak.private_bytes >> 20,
                    "resident_mib_peak": peak.resident_bytes >> 20,
                    "descriptors_before": peak.before.descriptors,
                    "descriptors_peak": peak.descriptors,
                    "descriptors_after": peak.after.descriptors,
                }
                for name, peak in live.peaks.items()
            },
            "fuzzer_mib": figures(os.getpid()).private_bytes >> 20,
        }  # fmt: skip
    finally:
        daemon.remove()


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    about = result["machine"]
    live = result["live"]
    lines = [
        "# Fuzzing",
        "",
        f"`scripts/fuzz --inputs N --seed {result['seed']} --keep`: {result['inputs']} inputs in {result['seconds']} s "
        f"on {about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, Python {about['python']}.",
        "",
        f"Findings: {len(result['findings'])}. Unanswered are messages that have no answer, or are damaged beyond one.",
        "",
        "| surface | inputs | accepted | refused | unanswered | slowest s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["surfaces"]:
        lines.append(
            f"| {row['surface']} | {row['inputs']} | {row['accepted']} | {row['refused']} | "
            f"{row.get('unanswered', '')} | {row.get('slowest_s', '')} |"
        )
    lines += [
        "",
        f"Beside the live sockets: {live['normal_requests']} normal requests and {live['swaps']} swaps, all in time.",
        "",
        "| process | private MiB before | peak | resident MiB, peak | descriptors before | peak | after |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, p in live["processes"].items():
        lines.append(
            f"| {name} | {p['private_mib_before']} | {p['private_mib_peak']} | {p['resident_mib_peak']} | "
            f"{p['descriptors_before']} | {p['descriptors_peak']} | {p['descriptors_after']} |"
        )
    for finding in result["findings"]:
        lines += ["", f"- {finding}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
