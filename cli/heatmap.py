"""Heat maps of plans: the bytes from each sender to each receiver, as text, as a page, and on the dashboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

from refitd.describe.metadata import Roster
from refitd.plan.cost import Traffic
from refitd.protocol.plan_reports import PlanReport
from refitd.protocol.reports import ModelStatus
from refitd.text import printable
from refitd_cli import html
from refitd_cli.layouts import RankNumbers
from refitd_cli.output import duration, rank_ranges, size

TEXT_GROUPS = 12
HTML_GROUPS = 96
LONGEST_LABEL = 24  # characters; a cell's title has all of it


@dataclass(frozen=True)
class Group:
    """Ranks that share a row or a column."""

    label: str
    ranks: tuple[int, ...]  # in the plan
    nodes: str  # the first and the last of their nodes


@dataclass(frozen=True, eq=False)
class Matrix:
    """Bytes from each group of senders (rows) to each group of receivers (columns)."""

    senders: tuple[Group, ...]
    receivers: tuple[Group, ...]
    bytes: npt.NDArray[np.int64]


def matrix_of(
    traffic: Traffic, rosters: Sequence[Roster], sides: Sequence[RankNumbers], limit: int = TEXT_GROUPS
) -> Matrix:
    """Return the matrix with at most `limit` rows and columns; the first of `sides` sends, the others receive."""
    nodes = {roster.rank: roster.node for roster in rosters}
    senders = _groups(sides[:1], nodes, limit)
    receivers = _groups(sides[1:], nodes, limit)
    row_of = {rank: i for i, group in enumerate(senders) for rank in group.ranks}
    column_of = {rank: i for i, group in enumerate(receivers) for rank in group.ranks}
    found = np.zeros((len(senders), len(receivers)), np.int64)
    rows = [row_of[rank] for rank in traffic.src.tolist()]
    columns = [column_of[rank] for rank in traffic.dst.tolist()]
    np.add.at(found, (rows, columns), traffic.bytes)
    return Matrix(senders, receivers, found)


def text_matrix(matrix: Matrix, sides: Sequence[RankNumbers]) -> tuple[str, list[str], list[list[str]]]:
    """Return title, column names and rows of the matrix as text, every number in one unit."""
    largest = int(matrix.bytes.max(initial=0))
    unit, factor = next(((u, f) for u, f in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if largest >= f), ("bytes", 1.0))

    def cell(nbytes: int) -> str:
        return f"{nbytes / factor:.4g}" if nbytes else "."

    receivers = ", ".join(side.name for side in sides[1:])
    title = f"{unit} sent: from ranks of {sides[0].name} (rows) to ranks of {receivers} (columns)"
    columns = ["from \\ to", *(f">{group.label}" for group in matrix.receivers), ">sum"]
    rows = [
        [group.label, *(cell(int(n)) for n in values), cell(int(values.sum()))]
        for group, values in zip(matrix.senders, matrix.bytes, strict=True)
    ]
    sums = matrix.bytes.sum(axis=0)
    rows.append(["sum", *(cell(int(n)) for n in sums), cell(int(sums.sum()))])
    return title, columns, rows


def html_page(title: str, facts: Sequence[str], matrix: Matrix, sides: Sequence[RankNumbers]) -> str:
    """Return an HTML page with the matrix as a heat map; hovering over a cell shows its numbers."""
    shades = "".join(f'<span style="opacity:{_opacity(i / 20)}"></span>' for i in range(21))
    return _PAGE.format(
        title=_shown(title),
        source=_shown(sides[0].name),
        targets=_shown(", ".join(side.name for side in sides[1:])),
        facts="".join(f"<li>{_shown(fact)}</li>" for fact in facts),
        shades=shades,
        largest=escape(size(int(matrix.bytes.max(initial=0)))),
        body=drawing(matrix, title),
    )


def drawing(matrix: Matrix, title: str) -> str:
    """Return the matrix as an SVG: senders down, receivers across, each cell as dark as it is large.

    A page's style chooses the colours: `fill` of `.map rect` and `.map text`.
    """
    rows, columns = matrix.bytes.shape
    step = max(6, min(40, 960 // max(rows, columns, 1)))
    left = _room(matrix.senders)
    top = _room(matrix.receivers)
    largest = int(matrix.bytes.max(initial=0)) or 1
    parts = []
    for row, column in np.argwhere(matrix.bytes > 0).tolist():
        nbytes = int(matrix.bytes[row, column])
        ends = f"{_told(matrix.senders[row])} to {_told(matrix.receivers[column])}"
        tip = f"{ends}: {size(nbytes)} ({nbytes:,} bytes)"
        parts.append(
            f'<rect x="{left + column * step}" y="{top + row * step}" width="{step}" height="{step}" '
            f'fill-opacity="{_opacity(nbytes / largest)}"><title>{_shown(tip)}</title></rect>'
        )
    every = max(1, -(-12 // step))
    for i, group in enumerate(matrix.senders):
        if i % every == 0:
            y = top + i * step + step // 2 + 3
            parts.append(f'<text x="{left - 6}" y="{y}" text-anchor="end">{_shown(_short(group.label))}</text>')
    for i, group in enumerate(matrix.receivers):
        if i % every == 0:
            x = left + i * step + step // 2 + 3
            place = f'x="{x}" y="{top - 6}" transform="rotate(-60 {x} {top - 6})"'
            parts.append(f"<text {place}>{_shown(_short(group.label))}</text>")
    parts.append(
        f'<rect x="{left}" y="{top}" width="{columns * step}" height="{rows * step}" fill-opacity="0" stroke="#888"/>'
    )
    width, height = left + columns * step + top * 2 // 3, top + rows * step + 20
    return (
        f'<svg class="map" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{_shown(title)}">\n' + "\n".join(parts) + "\n</svg>"
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 24px; color: #222; background: #fff }}
.map text {{ font: 10px system-ui, sans-serif; fill: #444 }} .map rect {{ fill: #08306b }}
.key span {{ display: inline-block; width: 12px; height: 12px; background: #08306b }}
</style></head><body>
<h1>{title}</h1>
<ul>{facts}</ul>
<p class="key">ranks of {source} down, ranks of {targets} across; nothing {shades} {largest}</p>
{body}
</body></html>
"""


def _opacity(share: float) -> str:
    """Return the opacity of a cell; small values stay visible."""
    return f"{0.08 + 0.92 * share**0.6:.3f}"


def _shown(text: str) -> str:
    return escape(printable(text))


def _short(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 3]}..."


def _room(groups: Sequence[Group]) -> int:
    """Return the pixels for the labels of rows or of columns."""
    return 20 + 6 * max(len(_short(group.label)) for group in groups)


def _told(group: Group) -> str:
    return f"{group.label}{f' on {group.nodes}' if group.nodes else ''}"


def _groups(sides: Sequence[RankNumbers], nodes: Mapping[int, str], limit: int) -> tuple[Group, ...]:
    """Divide the ranks of these sides into at most `limit` groups, along nodes where they are known.

    Ranks of two sides share a group only if there are more sides than groups.
    """
    parts = [(side, _units(side, nodes, limit)) for side in sides]
    most = max(len(units) for _, units in parts)
    each = next((n for n in range(1, most) if sum(-(-len(units) // n) for _, units in parts) <= limit), most)
    found: list[Group] = []
    for side, units in parts:
        for i in range(0, len(units), each):
            ranks = tuple(rank for unit in units[i : i + each] for rank in unit)
            own = rank_ranges([rank - side.first for rank in ranks])
            label = own if len(sides) == 1 else f"{side.name} {own}"
            found.append(Group(label, ranks, _between([nodes.get(rank, "") for rank in ranks])))
    each = -(-len(found) // limit)
    return tuple(_merged(found[i : i + each]) for i in range(0, len(found), each))


def _units(side: RankNumbers, nodes: Mapping[int, str], limit: int) -> list[tuple[int, ...]]:
    """Return a side's ranks one by one if they are few, else by node, if these are known."""
    by_node: dict[str, list[int]] = {}
    for rank in side.ranks:
        by_node.setdefault(nodes.get(rank, ""), []).append(rank)
    if len(side.ranks) <= limit or len(by_node) == 1 or "" in by_node:
        return [(rank,) for rank in side.ranks]
    return [tuple(ranks) for ranks in by_node.values()]


def _merged(groups: Sequence[Group]) -> Group:
    if len(groups) == 1:
        return groups[0]
    ranks = tuple(rank for group in groups for rank in group.ranks)
    return Group(f"{groups[0].label}..{groups[-1].label}", ranks, _between([groups[0].nodes, groups[-1].nodes]))


def _between(nodes: Sequence[str]) -> str:
    known = [node for node in nodes if node]
    if not known:
        return ""
    return known[0] if known[0] == known[-1] else f"{known[0]}..{known[-1]}"


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
        return "\n".join([*found, html.line("no data would move", "dim")])
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
