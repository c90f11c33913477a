"""Parts opened on the dashboard's page: plans, and traces as rows of bars. Requested only then, and cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from refitd.errors import DeadlineExceeded, RefitdError, TransportError
from refitd.protocol.reports import StatusReport, TraceReport, TraceSpan
from refitd_cli import html
from refitd_cli.output import duration, size
from refitd_cli.traces import TracedProcess, processes

if TYPE_CHECKING:
    from refitd.client import Client

# Rows of one trace, and bars of one row; the rest is counted.
MAX_ROWS = 150
MAX_BARS = 64

_WIDTH, _HEIGHT = 1000, 10  # of a row's drawing, which is stretched
_LEAST = 3  # of a bar


def timeline(report: TraceReport) -> str:
    """Return the rows, below them what is missing."""
    parts = processes(report)
    aligned = [part for part in parts if part.error_s is not None]
    ends = [span.ended + part.offset_s for part in aligned for span in part.spans]
    total = max([report.began, *ends]) - report.began
    rows = [row for part in parts for row in _rows(part, report.began, total)]
    errors = [part.error_s for part in aligned[1:] if part.error_s is not None]
    agree = f"; clocks agree within {duration(max(errors))}" if errors else ""
    found = [
        html.line(f"{duration(total)} from left to right{agree}", "dim"),
        '<div class="rows">',
        *rows[:MAX_ROWS],
        "</div>",
    ]
    if len(rows) > MAX_ROWS:
        found.append(html.line(f"and {len(rows) - MAX_ROWS} more rows", "dim"))
    for node in report.nodes:
        if node.error_s is None:
            found.append(html.line(f"node {node.node}: its clock is not aligned, so its bars are not shown", "warn"))
        if node.dropped:
            found.append(html.line(f"node {node.node}: {node.dropped} spans were too many and are not shown", "warn"))
    found += [html.line(reason, "warn") for reason in report.missing]
    command = f"refitctl trace MODEL --swap {report.swap} -o swap.json"
    found.append(html.line(f"{command} writes every span, for ui.perfetto.dev", "dim"))
    return "\n".join(found)


def _rows(part: TracedProcess, began: float, total: float) -> Iterator[str]:
    by_who: dict[str, dict[str, list[TraceSpan]]] = {}
    for span in part.spans:
        by_who.setdefault(span.who, {}).setdefault(span.name, []).append(span)
    for who, names in by_who.items():
        where = "" if who == part.name else f", {part.name}"
        yield f'<div class="who">{html.text(who)}{html.text(where)}</div>'
        for name, spans in names.items():
            bars = "".join(_bar(span, part.offset_s - began, total) for span in spans[:MAX_BARS])
            drawing = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">{bars}</svg>'
            yield f'<div class="what">{html.text(_said(name, spans))}</div>' + (
                drawing if part.error_s is not None else "<div></div>"
            )


def _said(name: str, spans: Sequence[TraceSpan]) -> str:
    took = sum(span.ended - span.began for span in spans)
    nbytes = sum(span.bytes for span in spans)
    notes = sorted({span.note for span in spans if span.note})
    said = f"{name}{f' x{len(spans)}' if len(spans) > 1 else ''}: {duration(max(0.0, took))}"
    said += f", {size(nbytes)}" if nbytes else ""
    said += ", not ended" if any(span.is_open for span in spans) else ""
    return said + (f" ({'; '.join(notes)})" if notes else "")


def _bar(span: TraceSpan, offset_s: float, total: float) -> str:
    scale = _WIDTH / total if total > 0 else 0.0
    left = min(max((span.began + offset_s) * scale, 0.0), _WIDTH - _LEAST)
    width = min(max((span.ended - span.began) * scale, _LEAST), _WIDTH - left)
    tone = "failed" if span.note else "open" if span.is_open else ""
    return f'<rect class="{tone}" x="{left:.1f}" width="{width:.1f}" height="{_HEIGHT}"></rect>'


# Limit on cached parts, and on requests to the cluster between two of its status.
MAX_KEPT = 32
MAX_ASKED = 4

PLAN, TRACE, RUNNING = "plan", "trace", "running"
NOT_YET = html.line("asking the cluster ...", "dim")


class Opened:
    """Parts of the page by their paths: /plan/=MODEL/=VIEW, /trace/=MODEL/=SWAP, /running/=MODEL/=SWAP.

    The page's thread calls `part`, the one that talks to the cluster `ask`: the page never waits for the cluster.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, None] = {}
        self._found: OrderedDict[str, tuple[str, bool]] = OrderedDict()

    def part(self, path: str) -> tuple[str, bool] | None:
        """Return a part as HTML and whether it stays like that; None if there is no such path."""
        words = html.words_of(path)
        if len(words) != 3 or words[0] not in (PLAN, TRACE, RUNNING):
            return None
        found = self._found.get(path, (NOT_YET, False))
        if not found[1] and len(self._wanted) < MAX_KEPT:
            self._wanted[path] = None
        return found

    def ask(self, client: Client, status: StatusReport) -> None:
        """Request the parts that were opened since the last call.

        Raises:
            TransportError: the daemon is away.
        """
        for path in list(self._wanted)[:MAX_ASKED]:
            del self._wanted[path]
            try:
                found = _made(path, client, status), not path.startswith(f"/{RUNNING}/")
            except RefitdError as exc:
                if isinstance(exc, TransportError) and not isinstance(exc, DeadlineExceeded):
                    raise
                found = html.line(str(exc), "warn"), False
            self._found[path] = found
            self._found.move_to_end(path)
            while len(self._found) > MAX_KEPT:
                self._found.popitem(last=False)


def _made(path: str, client: Client, status: StatusReport) -> str:
    kind, name, what = html.words_of(path)
    if kind != PLAN:
        return timeline(client.trace(name, what))
    from refitd_cli.heatmap import plan_map  # it needs numpy, which takes half of the time of `refitctl --help`

    model = next((one for one in status.models if one.model == name), None)
    return (
        html.line("this model is no longer registered", "warn") if model is None else plan_map(client.plan(name), model)
    )
