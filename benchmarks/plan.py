"""How fast planning is: from the registrations as received to every rank's validated plan.

Each case runs in a process of its own, with a time limit, so that its peak memory is its own. Two ways of receiving:

    by shard   each different `Shard` (tensors and groups) comes once and is unpacked for every rank, as in the service
    by layout  each different list of tensors, and each different group, comes once; ranks refer to both by digest.
               That is done here, with the types of refitd.protocol.shards: no message of the service says it so far.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from benchmarks import machine, models
from refitd.describe.layout import global_shape_of, tiles_of
from refitd.describe.manifest import Layout, world_size
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.roster import Roster
from refitd.describe.tiles import Tile
from refitd.dtypes import ELEMENT_SIZES
from refitd.protocol.shards import Shard, WireTensor, metadata_of, shard_of

RESULTS = Path(__file__).parent / "results"
CASE_LIMIT_S = 40.0
BUDGET_S = 600.0  # of all cases together; what would not fit is left out, and said so
WAYS = ("by layout", "by shard")
RANKS_PER_NODE = 8
DIGEST_BYTES = 16

# shared/facts: one rank's build with the reference, CPU s, on this kind of machine
REFERENCE_S = {
    "llama-3-70b": {64: 0.09, 256: 0.82, 1024: 17.5},
    "deepseek-v3": {64: 0.81, 256: 3.3, 1024: 20.5},
    "qwen3-235b-a22b": {64: 0.61, 256: 2.5, 1024: 17.2},
}


@dataclass(frozen=True)
class Registration:
    """What one rank sends: its tensors (bytes that equal ranks share) and its groups, both as MessagePack."""

    rank: int
    first: int  # of its world: its groups count from there
    is_source: bool
    tensors: bytes
    groups: bytes


@dataclass(frozen=True)
class Wire:
    """Bytes of all registrations."""

    each: int  # everything from every rank
    by_shard: int  # each different description once, groups and all
    by_layout: int  # each different list of tensors once, each different group once, references from every rank
    by_layout_deflated: int  # the same, with the lists of tensors compressed (zlib, level 1)
    tensor_lists: int
    groups: int
    longest: int


def registrations(case: models.Case) -> list[Registration]:
    """Return what all ranks of a case send."""
    found: list[Registration] = []
    for number, (layout, first) in enumerate(case.worlds()):
        if number > 1:  # engines say what the first one says
            engine = found[world_size(case.source) :][: world_size(layout)]
            found += [replace(r, rank=first + r.rank - r.first, first=first) for r in engine]
            continue
        tensors: dict[tuple[int, ...], bytes] = {}
        order: dict[tuple[int, ...], list[str]] = {}
        for index in range(world_size(layout)):
            kind = models.kind(layout, index)
            mine = models.groups(layout, index)
            if kind not in tensors:
                shard = shard_of(models.registered(layout, index))
                tensors[kind] = packed(shard.tensors)
                order[kind] = _group_names(layout, index)
                if [mine[name] for name in order[kind]] != list(shard.groups):
                    raise AssertionError("groups are not in the order in which tensors name them")
            groups = packed(tuple(mine[name] for name in order[kind]))
            found.append(Registration(first + index, first, number == 0, tensors[kind], groups))
    return found


def _group_names(layout: Layout, index: int) -> list[str]:
    """Return the names of a rank's groups in the order in which `shard_of` meets them."""
    mine, names = models.groups(layout, index), []
    met: set[tuple[int, ...]] = set()
    for meta in models.registered(layout, index):
        prefix = "expt_" if meta.is_ep else ""
        fields = [(f"{prefix}tp", meta.tensor_parallel_group_ranks), ("ep", meta.expert_parallel_group_ranks)]
        fields += [(f"{prefix}dp", meta.data_parallel_group_ranks), ("pp", meta.pipeline_parallel_group_ranks)]
        for name, ranks in fields:
            if ranks is not None and mine[name] not in met:
                met.add(mine[name])
                names.append(name)
    return names


def wire_bytes(received: list[Registration]) -> Wire:
    """Count bytes, with and without content addressing."""
    tensors = {r.tensors for r in received}
    shards = {(r.tensors, r.groups) for r in received}
    groups: set[bytes] = set()
    references = 0
    for r in received:
        ranks = [packed(group) for group in unpacked(r.groups)]
        groups.update(ranks)
        references += DIGEST_BYTES * (1 + len(ranks))
    shared = sum(map(len, groups)) + references
    return Wire(
        each=sum(len(r.tensors) + len(r.groups) for r in received),
        by_shard=sum(len(t) + len(g) for t, g in shards) + DIGEST_BYTES * len(received),
        by_layout=sum(map(len, tensors)) + shared,
        by_layout_deflated=sum(len(zlib.compress(t, 1)) for t in tensors) + shared,
        tensor_lists=len(tensors),
        groups=len(groups),
        longest=max(len(r.tensors) + len(r.groups) for r in received),
    )


def packed(value: Any) -> bytes:
    """Encode as the service's codec does."""
    data: bytes = msgpack.packb(msgspec.to_builtins(value))
    return data


def unpacked(data: bytes) -> Any:
    """Decode as the service's codec does, but for its bounds."""
    return msgpack.unpackb(data, use_list=True)


def rosters_from(received: list[Registration], way: str) -> list[Roster]:
    """Decode and check registrations, and return the rosters."""
    decode = _by_shard if way == "by shard" else _by_layout
    return [
        Roster(
            r.rank,
            source=held if r.is_source else (),
            destination=() if r.is_source else held,
            node=f"node{r.rank // RANKS_PER_NODE}",
        )
        for r, held in decode(received)
    ]


def _by_shard(received: list[Registration]) -> Iterator[tuple[Registration, list[ParameterMetadata]]]:
    shards: dict[tuple[bytes, bytes], Shard] = {}
    for r in received:
        key = (r.tensors, r.groups)
        if key not in shards:
            tensors = msgspec.convert(unpacked(r.tensors), tuple[WireTensor, ...])
            shards[key] = Shard(tensors, msgspec.convert(unpacked(r.groups), tuple[tuple[int, ...], ...]))
        yield r, metadata_of(shards[key], r.rank, r.first)


def _by_layout(received: list[Registration]) -> Iterator[tuple[Registration, tuple[ParameterMetadata, ...]]]:
    """Describe once what ranks share that have the same tensors and stand at the same places of their groups."""
    tensors: dict[bytes, tuple[WireTensor, ...]] = {}
    splitting: dict[bytes, list[int]] = {}
    known: dict[tuple[Any, ...], tuple[ParameterMetadata, ...]] = {}
    describer = _Describer()
    for r in received:
        if r.tensors not in tensors:
            tensors[r.tensors] = msgspec.convert(unpacked(r.tensors), tuple[WireTensor, ...])
            splitting[r.tensors] = sorted({t.tp_group for t in tensors[r.tensors] if t.tp_group is not None})
        groups: list[list[int]] = unpacked(r.groups)
        places = {i: (groups[i].index(r.rank - r.first), len(groups[i])) for i in splitting[r.tensors]}
        key = (r.tensors, *places.values())
        if key not in known:
            known[key] = tuple(describer.describe(t, places.get(t.tp_group or 0)) for t in tensors[r.tensors])
        yield r, known[key]


class _Describer:
    """Says with tiles what a tensor's fields say with groups, so that it holds for every rank at the same places."""

    def __init__(self) -> None:
        self._cuts: dict[tuple[Any, ...], tuple[tuple[Tile, ...], tuple[int, ...] | None]] = {}

    def describe(self, t: WireTensor, place: tuple[int, int] | None) -> ParameterMetadata:
        name, size = t.resolved_name or t.name, ELEMENT_SIZES[t.dtype]
        if not t.is_tp or t.tp_group is None or place is None or place[1] == 1:
            return ParameterMetadata(t.name, t.shape, t.dtype, size, resolved_name=name)
        key = (t.shape, t.dtype, t.partition_dim, t.partition_stride, t.partition_sizes, place)
        if key not in self._cuts:
            meta = ParameterMetadata(
                name="",
                shape=t.shape,
                dtype=t.dtype,
                element_size=size,
                is_tp=True,
                partition_dim=t.partition_dim,
                partition_stride=t.partition_stride,
                partition_sizes=None if t.partition_sizes is None else list(t.partition_sizes),
                owner_rank=place[0],
                tensor_parallel_group_ranks=list(range(place[1])),
            )
            self._cuts[key] = tiles_of(meta), global_shape_of(meta)
        cut, whole = self._cuts[key]
        tiles = tuple(Tile(name, c.offset, c.size, c.local_offset, c.local_stride, c.repeat) for c in cut)
        return ParameterMetadata(t.name, t.shape, t.dtype, size, resolved_name=name, tiles=tiles, global_shape=whole)


def measure(case: models.Case, way: str) -> dict[str, Any]:
    """Run one case in this process."""
    from refitd.plan.build import plan_copies
    from refitd.plan.cost import balance_of, traffic_of

    received = registrations(case)
    wire = wire_bytes(received)
    gc.collect()
    before_bytes = _peak_bytes()
    started = time.perf_counter(), time.process_time()
    rosters = rosters_from(received, way)
    read = time.process_time()
    plan = plan_copies(rosters)
    ended = time.perf_counter(), time.process_time()
    peak_bytes = _peak_bytes()
    calibration_s = machine.calibrate()
    traffic = traffic_of(plan)
    balance = balance_of(traffic, rosters)
    return {
        "model": case.model,
        "ranks": case.ranks,
        "layouts": case.describe(),
        "way": way,
        "cpu_s": ended[1] - started[1],
        "wall_s": ended[0] - started[0],
        "receive_cpu_s": read - started[1],
        "plan_cpu_s": ended[1] - read,
        "calibration_s": calibration_s,
        "peak_rss_bytes": peak_bytes,
        "rss_before_bytes": before_bytes,
        "bytes": traffic.total_bytes,
        "copies": traffic.total_copies,
        "rows": len(plan.shared.rows.tensor),
        "pairs": len(traffic.src),
        "sender_max_over_mean": balance.ratio,
        "wire": asdict(wire),
        "digest": plan.digest,
    }


def run(json_output: bool) -> dict[str, Any]:
    """Run every case, largest last; write benchmarks/results/plan-*; return what was found."""
    found: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    started = time.perf_counter()
    for way in WAYS:
        for name in models.MODELS:
            for ranks in models.SIZES:
                text = f"{name}, {ranks} ranks, {way}"
                reason = _why_not(found, left_out, name, ranks, way, BUDGET_S - (time.perf_counter() - started))
                result = reason or _in_a_process(name, ranks, way)
                if isinstance(result, str):
                    left_out.append({"model": name, "ranks": ranks, "way": way, "reason": result})
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
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "plan.json").write_text(json.dumps(report, indent=1) + "\n")
    (RESULTS / "plan.md").write_text(_markdown(report))
    if not json_output:
        _show(report)
    return report


def _why_not(
    found: list[dict[str, Any]], left_out: list[dict[str, Any]], model: str, ranks: int, way: str, left_s: float
) -> str:
    """Return why a case is not worth starting, or ""."""
    if any((case["model"], case["way"]) == (model, way) for case in left_out):
        return "a smaller one was left out"
    if left_s <= 0:
        return f"the time for all cases, {BUDGET_S:.0f} s, is used up"
    smaller = [case for case in found if (case["model"], case["way"]) == (model, way)]
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


def _in_a_process(model: str, ranks: int, way: str) -> dict[str, Any] | str:
    command = [sys.executable, "-m", "benchmarks.plan", model, str(ranks), way]
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=CASE_LIMIT_S * 3,
            check=False,
            cwd=Path(__file__).parent.parent,
        )
    except subprocess.TimeoutExpired:
        return f"took more than {CASE_LIMIT_S * 3:.0f} s"
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
    "model", "ranks", "layouts", "received", "CPU s", "of it receiving", "loops", "peak MiB", "TB moved", "copies",
    "rows", "max/mean", "wire MiB: every rank", "by shard", "by layout", "deflated", "reference, one rank",
)  # fmt: skip


def _row(case: dict[str, Any]) -> tuple[str, ...]:
    wire, reference = case["wire"], REFERENCE_S.get(case["model"], {}).get(case["ranks"])
    return (
        case["model"],
        str(case["ranks"]),
        case["layouts"],
        case["way"],
        f"{case['cpu_s']:.2f}",
        f"{case['receive_cpu_s']:.2f}",
        f"{case['cpu_s'] / case['calibration_s']:.1f}",
        f"{case['peak_rss_bytes'] / 2**20:.0f}",
        f"{case['bytes'] / 1e12:.2f}",
        f"{case['copies']:,}",
        f"{case['rows']:,}",
        f"{case['sender_max_over_mean']:.3f}",
        *(f"{wire[key] / 2**20:.2f}" for key in ("each", "by_shard", "by_layout", "by_layout_deflated")),
        "" if reference is None else f"{reference} s",
    )


def _show(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title="planning, all ranks", box=box.SIMPLE_HEAD, show_edge=False, title_justify="left")
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if i in (0, 2, 3) else "right", overflow="fold")
    for case in report["cases"]:
        table.add_row(*_row(case))
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(table)
    for case in report["left_out"]:
        console.print(f"left out: {case['model']}, {case['ranks']} ranks, {case['way']}: {case['reason']}")
    console.print(f"written to {RESULTS / 'plan.json'}")


def _markdown(report: dict[str, Any]) -> str:
    about = report["machine"]
    lines = [
        "# Planning: from the registrations as received to every rank's validated plan",
        "",
        f"{about['cpu']}, {about['cores']} cores, {about['memory_bytes'] / 2**30:.0f} GiB, Linux {about['kernel']}, "
        f"Python {about['python']}, numpy {about['packages'].get('numpy')}. CPU seconds; the machine is shared, so",
        "`loops` gives them in units of a calibration loop that ran beside them (benchmarks/machine.py).",
        "",
        "`by shard`: each different `Shard`, groups and all, is received once and unpacked for every rank, as in the",
        "service. `by layout`: each different list of tensors and each different group is received once, and ranks",
        "refer to them; the benchmark does this, no message of the service says it so far. CPU s is from bytes to a",
        "plan for all ranks that has been validated; copies are what all ranks do together, rows what the plan stores",
        "of them. Peak memory is the process's, with Python, numpy and the registrations. Every engine is a world of",
        "its own, with groups of its own. The reference's figure is one rank's build of the plan, after its gather;",
        "every rank does it. Written by `scripts/bench plan`.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * len(COLUMNS),
        *("| " + " | ".join(_row(case)) + " |" for case in report["cases"]),
        "",
        *(
            f"- left out: {case['model']}, {case['ranks']} ranks, {case['way']}: {case['reason']}"
            for case in report["left_out"]
        ),
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    chosen, count, how = sys.argv[1:4]
    print(json.dumps(measure(models.case(chosen, int(count)), how)))
