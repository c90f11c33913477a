"""The heat map of a cluster's plan: what each rank of the trainer sends to each rank of the replicas."""

from __future__ import annotations

import numpy as np

from refitd.describe.roster import Roster
from refitd.plan.cost import Traffic
from refitd.protocol.reports import ModelStatus, PlanReport
from refitd_cli import html
from refitd_cli.heatmap import drawing, matrix_of
from refitd_cli.layouts import RankNumbers
from refitd_cli.output import duration, size

# Rows and columns of the map, and pairs in words below it.
GROUPS = 48
LARGEST = 5


def plan_map(report: PlanReport, model: ModelStatus) -> str:
    """Return the map of a plan of `model`, and its largest pairs in words."""
    pairs = sorted(report.pairs, key=lambda pair: -pair.bytes)
    said = f"{size(report.bytes)} in {report.copies} copies over {len(pairs)} pairs of ranks, planned in "
    found = [
        html.line(f"{said}{duration(report.plan_s)}: from the trainer's ranks (rows) to those of replicas (columns)")
    ]
    if not pairs:
        return "\n".join([*found, html.line("nothing would move", "dim")])
    nodes = {("", one.rank): one.node for one in model.sources}
    nodes |= {(one.replica, one.rank): one.node for one in model.targets}
    ends = [(("", _end(pair.source)[1]), _end(pair.target)) for pair in pairs]
    known = sorted({*nodes, *(end for pair in ends for end in pair)})  # the trainer, which has no name, is the first
    sides: list[RankNumbers] = []
    for name in dict.fromkeys(name for name, _ in known):
        first = sides[-1].ranks[-1] + 1 if sides else 0
        sides.append(RankNumbers(name or "trainer", first, tuple(first + rank for own, rank in known if own == name)))
    firsts = dict(zip(dict.fromkeys(name for name, _ in known), (side.first for side in sides), strict=True))
    rosters = [Roster(firsts[name] + rank, node=nodes.get((name, rank), "")) for name, rank in known]
    moved = [
        (firsts[src[0]] + src[1], firsts[dst[0]] + dst[1], pair.bytes, pair.copies)
        for (src, dst), pair in zip(ends, pairs, strict=True)
    ]
    ints = np.array(moved, np.int64).T
    none = np.zeros(0, np.int64)
    matrix = matrix_of(Traffic(ints[0], ints[1], ints[2], ints[3], (), none, none), rosters, sides, GROUPS)
    found += [f'<div class="wide">{drawing(matrix, f"plan of {report.model}")}</div>']
    found += [html.line(f"{pair.source} to {pair.target}: {size(pair.bytes)}", "dim") for pair in pairs[:LARGEST]]
    if len(pairs) > LARGEST:
        found.append(html.line(f"and {len(pairs) - LARGEST} more pairs; refitctl plan MODEL lists them", "dim"))
    return "\n".join(found)


def _end(name: str) -> tuple[str, int]:
    """Return replica and rank of a pair's end, such as "a rank 3"."""
    replica, _, rank = name.rpartition(" rank ")
    return replica, int(rank)
