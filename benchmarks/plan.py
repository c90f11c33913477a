"""Measure planning: from the received registrations to every rank's validated plan.

The input is the service's messages, read by the coordinator's code. Each case runs in a separate process with a time
limit, because peak memory is measured per process.
"""

from __future__ import annotations

import fnmatch
import gc
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine, models
from refitd.coordinator.descriptions import Lists, Registered, ShardReader, unpack_shard
from refitd.describe.metadata import Roster
from refitd.offline.layouts import position, world_size
from refitd.protocol.base import digest_of, encode, pack
from refitd.protocol.cluster import AddShard, DescribeShard
from refitd.protocol.local import RegisterSource
from refitd.protocol.shards import shard_of

CASE_LIMIT_S = 40.0
BUDGET_S = 600.0  # of all cases together; a case that would not fit is skipped and reported
RANKS_PER_NODE = 8

# shared/facts: one rank's build with the reference, CPU s, on this kind of machine
REFERENCE_S = {
    "llama-3-70b": {64: 0.09, 256: 0.82, 1024: 17.5},
    "deepseek-v3": {64: 0.81, 256: 3.3, 1024: 20.5},
    "qwen3-235b-a22b": {64: 0.61, 256: 2.5, 1024: 17.2},
}


@dataclass(frozen=True)
class Received:
    """The descriptions that the coordinator has received: each distinct description once, with its ranks."""

    described: dict[str, bytes]  # digest -> packed Shard
    ranks: list[tuple[int, str, bool, str]]  # rank, pool, whether it is a source, digest
    each_bytes: int  # the bytes if every rank had sent its description
    described_bytes: int
    added_bytes: int

    @property
    def wire_bytes(self) -> int:
        """Bytes of all registrations between daemons and coordinator."""
        return self.described_bytes + self.added_bytes


def registrations(case: models.Case) -> Received:
    """Return the messages that the daemons of a case send."""
    described: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    ranks: list[tuple[int, str, bool, str]] = []
    each = added = 0
    digests: dict[tuple[int, ...], str] = {}
    in_tiles = case.source.fsdp > 1
    for number, (layout, first) in enumerate(case.worlds()):
        held = models.described(layout) if in_tiles and number < 2 else iter(())
        pool = f"engine-{number}" if number else "source"
        for index in range(world_size(layout)):
            # all engines send equal descriptions, and so do source ranks at equal positions of different replicas
            at = position(layout, index)
            same = (1, index) if number else (0, index) if in_tiles else (0, at.pp, at.tp, at.ep, at.etp)
            if same not in digests:
                shard = shard_of(next(held) if in_tiles else models.registered(layout, index))
                digest = digests[same] = digest_of(shard)
                if digest not in described:
                    described[digest] = pack(shard)
                    sizes[digest] = len(encode(0, RegisterSource("m", 0, 1, shard)))
            digest = digests[same]
            ranks.append((first + index, pool, not number, digest))
            each += sizes[digest]
            added += len(encode(1, _add_shard(pool, index, world_size(layout), digest)))
    frames = [encode(0, DescribeShard(digest=digest, packed=data)) for digest, data in described.items()]
    return Received(described, ranks, each, sum(map(len, frames)), added)


def _add_shard(pool: str, index: int, world: int, digest: str) -> AddShard:
    return AddShard(
        member=f"policy/{pool}:{index}@node-000#{index}",
        model="policy",
        role="source" if pool == "source" else "target",
        replica="" if pool == "source" else pool,
        rank=index,
        world_size=world,
        pid=100000,
        digest=digest,
    )


def rosters_from(received: Received) -> list[Roster]:
    """Unpack, check and read registrations as the coordinator does."""
    reader = ShardReader()
    return reader.rosters(pools_of(received, reader))


def pools_of(received: Received, reader: ShardReader) -> list[list[Registered]]:
    """Unpack and check registrations as the coordinator does."""
    lists = Lists()
    reads = {digest: unpack_shard(data, digest, lists) for digest, data in received.described.items()}
    for digest, read in reads.items():
        reader.learn(digest, read)
    pools: dict[str, list[Registered]] = {}
    for rank, pool, is_source, digest in received.ranks:
        node = f"node{rank // RANKS_PER_NODE}"
        registered = Registered(rank, f"{pool} rank {rank}", node, is_source, digest, reads[digest].shard)
        pools.setdefault(pool, []).append(registered)
    return list(pools.values())


def measure(case: models.Case) -> dict[str, Any]:
    """Run one case in this process."""
    from refitd.plan.build import plan_copies
    from refitd.plan.cost import traffic_of
    from refitd_cli.layouts import balance_of

    received = registrations(case)
    gc.collect()
    before_bytes = _peak_bytes()
    started = time.perf_counter(), time.process_time()
    rosters = rosters_from(received)
    read = time.process_time()
    plan = plan_copies(rosters)
    ended = time.perf_counter(), time.process_time()
    peak_bytes = _peak_bytes()
    calibration_s = machine.calibrate()
    again_s = _planned_again(case, received)
    traffic = traffic_of(plan)
    balance = balance_of(traffic, rosters)
    return {
        "model": case.model,
        "ranks": case.ranks,
        "layouts": case.describe(),
        "cpu_s": ended[1] - started[1],
        "wall_s": ended[0] - started[0],
        "receive_cpu_s": read - started[1],
        "plan_cpu_s": ended[1] - read,
        "calibration_s": calibration_s,
        "peak_rss_bytes": peak_bytes,
        "rss_before_bytes": before_bytes,
        "bytes": traffic.total_bytes,
        "copies": traffic.total_copies,
        "rows": len(plan.few.rows),
        "pairs": len(traffic.src),
        "sender_max_over_mean": balance.max_over_mean,
        "wire_bytes": received.wire_bytes,
        "wire_bytes_described": received.described_bytes,
        "wire_bytes_each": received.each_bytes,
        "descriptions": len(received.described),
        "digest": plan.digest,
        "again_cpu_s": again_s,
    }


def _planned_again(case: models.Case, received: Received) -> float:
    """Return the CPU seconds of planning again after the last engine has joined the known engines."""
    from refitd.plan.build import Remembered, plan_copies

    reader, remembered = ShardReader(), Remembered()
    last = world_size(case.engine)
    pools = pools_of(received, reader)
    known = {rank for rank, *_ in received.ranks[:-last]}
    plan_copies(reader.rosters([[r for r in pool if r.rank in known] for pool in pools]), remembered)
    gc.collect()
    started = time.process_time()
    plan_copies(reader.rosters(pools), remembered)
    return time.process_time() - started


def run(json_output: bool, cases: machine.Cases = machine.EVERY) -> dict[str, Any]:
    """Run every case, largest last, and return the figures; --record stores them.

    Args:
        json_output: print no table.
        cases: if --only was given, run the cases that match it, hard ones included, and store nothing.

    Raises:
        NotComparable: no case matches.
    """
    if cases.only != "*":
        return _run_only(cases.only)
    found: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    started = time.perf_counter()
    for name in models.MODELS:
        for ranks in models.SIZES:
            text = f"{name}, {ranks} ranks"
            reason = why_not(found, left_out, name, ranks, BUDGET_S - (time.perf_counter() - started))
            result = reason or _in_a_process(name, ranks)
            if isinstance(result, str):
                left_out.append({"model": name, "ranks": ranks, "reason": result})
                _say(f"  {text}: left out: {result}")
            else:
                found.append(result)
                _say(f"  {text}: {result['cpu_s']:.2f} s CPU, {result['peak_rss_bytes'] / 2**20:.0f} MiB")
    report = {
        "benchmark": "plan",
        "machine": machine.describe(),
        "cases": found,
        "left_out": left_out,
        "reference_cpu_s": {model: {str(n): s for n, s in row.items()} for model, row in REFERENCE_S.items()},
        "total_s": time.perf_counter() - started,
    }
    machine.record("plan", report, _markdown)
    if not json_output:
        _show(report)
    return report


def _run_only(only: str) -> dict[str, Any]:
    names = {
        f"{model}, {ranks} ranks": (model, ranks)
        for models_of, sizes in ((models.MODELS, models.SIZES), (models.HARD, models.HARD_SIZES))
        for model in models_of
        for ranks in sizes
    }
    chosen = fnmatch.filter(names, only)
    if not chosen:
        raise machine.NotComparable(f"no case matches {only!r}; there are: {'; '.join(names)}")
    found = {name: _in_a_process(*names[name], BUDGET_S) for name in chosen}
    for name, result in found.items():
        if isinstance(result, str):
            _say(f"  {name}: {result}")
            continue
        said = ", ".join(f"{column} {value}" for column, value in zip(COLUMNS, _row(result), strict=True) if value)
        _say(f"  {name}: {said}")
    return {"benchmark": "plan", "machine": machine.describe(), "cases": found}


def why_not(found: list[dict[str, Any]], left_out: list[dict[str, Any]], model: str, ranks: int, left_s: float) -> str:
    """Return the reason to skip a case, "" to run it."""
    if any(case["model"] == model for case in left_out):
        return "a smaller one was left out"
    if left_s <= 0:
        return f"the time for all cases, {BUDGET_S:.0f} s, is used up"
    smaller = [case for case in found if case["model"] == model]
    if not smaller:
        return ""
    last = smaller[-1]
    growth = ranks / last["ranks"]
    seconds = last["wall_s"] * growth
    memory = (last["peak_rss_bytes"] - last["rss_before_bytes"]) * growth
    if seconds > min(CASE_LIMIT_S, left_s):
        return f"about {seconds:.0f} s are expected, {min(CASE_LIMIT_S, left_s):.0f} s are left for it"
    if memory > 4 * 2**30:
        return f"about {memory / 2**30:.0f} GiB are expected"
    return ""


def _in_a_process(model: str, ranks: int, limit_s: float = CASE_LIMIT_S * 3) -> dict[str, Any] | str:
    command = [sys.executable, "-m", "benchmarks.plan", model, str(ranks)]
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            cwd=Path(__file__).parent.parent,
        )
    except subprocess.TimeoutExpired:
        return f"took more than {limit_s:.0f} s"
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-1:] or [f"exit status {ended.returncode}"]
        return f"failed: {last[0]}"
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


COLUMNS = (
    "model", "ranks", "layouts", "CPU s", "of it receiving", "loops", "peak MiB", "TB moved", "copies",
    "rows", "max/mean", "wire MiB", "from each rank", "planned again", "reference, one rank",
)  # fmt: skip


def _row(case: dict[str, Any]) -> tuple[str, ...]:
    reference = REFERENCE_S.get(case["model"], {}).get(case["ranks"])
    return (
        case["model"],
        str(case["ranks"]),
        case["layouts"],
        f"{case['cpu_s']:.2f}",
        f"{case['receive_cpu_s']:.2f}",
        f"{case['cpu_s'] / case['calibration_s']:.1f}",
        f"{case['peak_rss_bytes'] / 2**20:.0f}",
        f"{case['bytes'] / 1e12:.2f}",
        f"{case['copies']:,}",
        f"{case['rows']:,}",
        f"{case['sender_max_over_mean']:.3f}",
        f"{case['wire_bytes'] / 2**20:.2f}",
        f"{case['wire_bytes_each'] / 2**20:.1f}",
        f"{case['again_cpu_s']:.2f}",
        "" if reference is None else f"{reference} s",
    )


def _show(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title="planning, all ranks", box=box.SIMPLE_HEAD, show_edge=False, title_justify="left")
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if i in (0, 2) else "right", overflow="fold")
    for case in report["cases"]:
        table.add_row(*_row(case))
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(table)
    for case in report["left_out"]:
        console.print(f"left out: {case['model']}, {case['ranks']} ranks: {case['reason']}")


def _markdown(report: dict[str, Any]) -> str:
    about = report["machine"]
    lines = [
        "# Planning: from the registrations as received to every rank's validated plan",
        "",
        f"{about['cpu']}, {about['cores']} cores, {about['memory_bytes'] / 2**30:.0f} GiB, Linux {about['kernel']}, "
        f"Python {about['python']}, numpy {about['packages'].get('numpy')}. CPU seconds; the machine is shared, so",
        "`loops` gives them in units of a calibration loop that ran beside them (benchmarks/machine.py).",
        "",
        "CPU s is from the messages that daemons send (each different description once, packed, and one AddShard a",
        "rank) to a plan for all ranks that has been validated; `wire MiB` is the size of these messages, `from each",
        "rank` what it would be if every rank sent its own description. Copies are what all ranks do together, rows",
        "what the plan stores of them. Peak memory is the process's, with Python, numpy and the registrations. Every",
        "engine is a world of its own. `planned again` is a plan of all ranks once one more engine has joined, in CPU",
        "seconds, by a coordinator that knows the others. The reference's figure is one rank's build of the plan, when",
        "it has gathered; every rank does it. Written by `scripts/bench plan`.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * len(COLUMNS),
        *("| " + " | ".join(_row(case)) + " |" for case in report["cases"]),
        "",
        *(f"- left out: {case['model']}, {case['ranks']} ranks: {case['reason']}" for case in report["left_out"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    chosen, count = sys.argv[1:3]
    print(json.dumps(measure(models.case(chosen, int(count)))))
