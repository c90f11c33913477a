"""Bytes between senders and receivers as a matrix: for a terminal, and as a self-contained HTML file.

Ranks become groups where there are too many: those of a node first, then those of several nodes.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refitd.describe.roster import Roster
from refitd.plan.cost import Traffic
from refitd_cli.layouts import rank_ranges
from refitd_cli.output import size

TEXT_GROUPS = 12
HTML_GROUPS = 96


@dataclass(frozen=True)
class Group:
    """Ranks that share a row or a column."""

    label: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Matrix:
    """Bytes from each group of senders (rows) to each group of receivers (columns)."""

    senders: tuple[Group, ...]
    receivers: tuple[Group, ...]
    bytes: npt.NDArray[np.int64]


def matrix_of(traffic: Traffic, rosters: Sequence[Roster], limit: int = TEXT_GROUPS) -> Matrix:
    """Return the matrix with at most `limit` rows and columns."""
    senders = _groups([r for r in rosters if r.source], limit)
    receivers = _groups([r for r in rosters if r.destination], limit)
    row_of = {rank: i for i, group in enumerate(senders) for rank in group.ranks}
    column_of = {rank: i for i, group in enumerate(receivers) for rank in group.ranks}
    found = np.zeros((len(senders), len(receivers)), np.int64)
    rows = [row_of[rank] for rank in traffic.src.tolist()]
    columns = [column_of[rank] for rank in traffic.dst.tolist()]
    np.add.at(found, (rows, columns), traffic.bytes)
    return Matrix(senders, receivers, found)


def text_matrix(matrix: Matrix) -> tuple[str, list[str], list[list[str]]]:
    """Return title, column names and rows of the matrix as text, every number in one unit."""
    largest = int(matrix.bytes.max(initial=0))
    unit, factor = next(((u, f) for u, f in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if largest >= f), ("bytes", 1.0))

    def cell(nbytes: int) -> str:
        return f"{nbytes / factor:.4g}" if nbytes else "."

    title = f"{unit} sent: from each row to each column"
    columns = ["from \\ to", *(f">{group.label}" for group in matrix.receivers), ">sum"]
    rows = [
        [group.label, *(cell(int(n)) for n in values), cell(int(values.sum()))]
        for group, values in zip(matrix.senders, matrix.bytes, strict=True)
    ]
    sums = matrix.bytes.sum(axis=0)
    rows.append(["sum", *(cell(int(n)) for n in sums), cell(int(sums.sum()))])
    return title, columns, rows


def html_page(title: str, facts: Sequence[str], matrix: Matrix) -> str:
    """Return an HTML page with the matrix as a heat map; hovering over a cell shows its numbers."""
    rows, columns = matrix.bytes.shape
    step = max(6, min(40, 960 // max(rows, columns, 1)))
    left, top = 150, 150
    largest = int(matrix.bytes.max(initial=0)) or 1
    parts = []
    for row, column in np.argwhere(matrix.bytes > 0).tolist():
        nbytes = int(matrix.bytes[row, column])
        tip = f"{matrix.senders[row].label} to {matrix.receivers[column].label}: {size(nbytes)} ({nbytes:,} bytes)"
        parts.append(
            f'<rect x="{left + column * step}" y="{top + row * step}" width="{step}" height="{step}" '
            f'fill="{_colour(nbytes / largest)}"><title>{html.escape(tip)}</title></rect>'
        )
    every = max(1, -(-12 // step))
    for i, group in enumerate(matrix.senders):
        if i % every == 0:
            y = top + i * step + step // 2 + 3
            parts.append(f'<text x="{left - 6}" y="{y}" text-anchor="end">{html.escape(group.label)}</text>')
    for i, group in enumerate(matrix.receivers):
        if i % every == 0:
            x = left + i * step + step // 2 + 3
            place = f'x="{x}" y="{top - 6}" transform="rotate(-60 {x} {top - 6})"'
            parts.append(f"<text {place}>{html.escape(group.label)}</text>")
    parts.append(
        f'<rect x="{left}" y="{top}" width="{columns * step}" height="{rows * step}" fill="none" stroke="#888"/>'
    )
    width, height = left + columns * step + 120, top + rows * step + 20
    shades = "".join(f'<span style="background:{_colour(i / 20)}"></span>' for i in range(21))
    return _PAGE.format(
        title=html.escape(title),
        facts="".join(f"<li>{html.escape(fact)}</li>" for fact in facts),
        shades=shades,
        largest=html.escape(size(largest)),
        width=width,
        height=height,
        body="\n".join(parts),
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 24px; color: #222; background: #fff }}
svg text {{ font: 10px system-ui, sans-serif; fill: #444 }}
.key span {{ display: inline-block; width: 12px; height: 12px }}
</style></head><body>
<h1>{title}</h1>
<ul>{facts}</ul>
<p class="key">senders down, receivers across; nothing {shades} {largest}</p>
<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">
{body}
</svg>
</body></html>
"""


def _colour(share: float) -> str:
    """Return a colour from near white to dark blue; dark is much, also in print."""
    low, high = (236, 243, 252), (8, 48, 107)
    return "#" + "".join(f"{round(a + (b - a) * share**0.6):02x}" for a, b in zip(low, high, strict=True))


def _groups(rosters: Sequence[Roster], limit: int) -> tuple[Group, ...]:
    """Divide ranks into at most `limit` groups, along nodes where they are known."""
    ordered = sorted(rosters, key=lambda roster: roster.rank)
    if len(ordered) <= limit:
        return tuple(Group(f"rank {r.rank}", (r.rank,)) for r in ordered)
    by_node: dict[str, list[int]] = {}
    for roster in ordered:
        by_node.setdefault(roster.node, []).append(roster.rank)
    if len(by_node) > 1 and "" not in by_node:
        each = -(-len(by_node) // limit)
        nodes = list(by_node.items())
        groups = []
        for i in range(0, len(nodes), each):
            some = nodes[i : i + each]
            label = some[0][0] if len(some) == 1 else f"{some[0][0]}..{some[-1][0]}"
            groups.append(Group(label, tuple(rank for _, ranks in some for rank in ranks)))
        return tuple(groups)
    ranks = [roster.rank for roster in ordered]
    each = -(-len(ranks) // limit)
    chunks = [tuple(ranks[i : i + each]) for i in range(0, len(ranks), each)]
    return tuple(Group(f"ranks {rank_ranges(chunk, 1)}", chunk) for chunk in chunks)
