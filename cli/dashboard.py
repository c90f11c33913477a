"""The page of `refitctl dashboard`: a cluster's status, swaps, plans and traces; all foreign text is escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from refitd.metrics import Page
from refitd.protocol.reports import (
    HistoryEntry,
    LostNode,
    ModelStatus,
    NodeStatus,
    StatusReport,
    SwapReport,
    TargetStatus,
)
from refitd.states import ServingState, SwapOutcome
from refitd_cli import html
from refitd_cli.opened import PLAN, RUNNING, TRACE, Opened
from refitd_cli.output import age, counted, duration, size, version, versions
from refitd_cli.view import drained_lines, lost_lines, node_state, problem_lines

# Limit on the rows of one table; further rows are counted.
MAX_ROWS = 200

# Characters that fit on one line.
SHORT = 24

# Failed swaps that are listed before the models.
FAILURES = 5

# Swaps whose traces are offered: as many as the coordinator keeps.
TRACES = 16

REFRESH_MS = 1000

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --warn: #9a6700; --bad: #cf222e;
  --bar: #0a58a6; }
@media (prefers-color-scheme: dark) {
  :root { --good: #3fb950; --warn: #d29922; --bad: #ff7b72; --bar: #79b8ff; }
}
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 100rem; padding: 0 1rem 3rem; }
header { display: flex; justify-content: space-between; align-items: baseline; margin: 1rem 0 .2rem; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .3rem; }
h3 { font-size: .95rem; margin: 1rem 0 .2rem; } p { margin: .2rem 0; } h2, p, td { overflow-wrap: anywhere; }
table { border-collapse: collapse; min-width: 50%; }
th, td { text-align: left; padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; } th, .short { white-space: nowrap; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); font-weight: 600; }
progress { width: 100%; } .dim { opacity: .7; }
details { margin: .3rem 0; } summary { cursor: pointer; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } .map text { font: 11px system-ui, sans-serif; fill: currentColor; }
.map rect, .rows rect, .charts rect { fill: var(--bar); } .rows .open { fill: var(--warn); }
.rows .failed, .charts .failed { fill: var(--bad); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .2rem 1.5rem; }
.charts figure { margin: 0; } .charts figcaption { font-size: .85rem; }
.charts svg { width: 100%; height: 3.5rem; background: #8881; }
body:has(#failures:checked) .fine { display: none; }
.rows { display: grid; grid-template-columns: minmax(10rem, 22rem) 1fr; gap: .1rem .8rem; align-items: center;
  font-size: .85rem; } .rows div { overflow-wrap: anywhere; } .who { grid-column: 1 / -1; font-weight: 600; }
.rows svg { width: 100%; height: .7rem; background: #8882; }
@media (max-width: 45rem) {
  table { width: 100%; } thead { display: none; }
  tr { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 1rem; padding: .4rem 0;
    border-bottom: 1px solid var(--line); }
  td, .n { display: flex; gap: .6rem; border: 0; padding: .1rem 0; text-align: left; }
  .short { white-space: normal; } td:not(.short) { grid-column: 1 / -1; }
  .rows { grid-template-columns: 1fr; } .what { margin-top: .2rem; }
  td.none { display: none; }
  td::before { content: attr(data-label); flex: none; width: 5.4rem; color: #888; font-weight: 400; }
}
"""

# Unchanged elements are not replaced: they stay open, scrolled and selected.
_SCRIPT = f"""
const main = document.querySelector("main"), late = document.querySelector("#late");
let texts = [];
const ask = path => fetch(path, {{cache: "no-store", signal: AbortSignal.timeout(5000)}});
function show(text) {{
  const made = document.createElement("template");
  made.innerHTML = text;
  const parts = [...made.content.children], news = parts.map(part => part.outerHTML);
  const open = new Map([...main.querySelectorAll("details[open]")].map(one => [one.dataset.key, one]));
  parts.forEach((part, i) => {{
    const old = main.children[i], was = open.get(part.dataset.key);
    if (old && news[i] === texts[i]) return;
    if (part.localName === "details" && was) {{
      part.open = true;
      part.filled = was.filled;
      part.lastElementChild.replaceWith(was.lastElementChild);
    }}
    if (old) old.replaceWith(part); else main.append(part);
  }});
  while (main.children.length > parts.length) main.lastElementChild.remove();
  texts = news;
}}
async function fill(one) {{
  if (!one.open || (one.filled === one.dataset.source && !("again" in one.dataset))) return;
  const source = one.dataset.source, answer = await ask(source), text = await answer.text();
  if (one.shows !== text) one.lastElementChild.innerHTML = one.shows = text;
  if (answer.ok) one.filled = source;
}}
async function refresh() {{
  try {{
    const answer = await ask("/now");
    if (!answer.ok) throw new Error(answer.status);
    show(await answer.text());
    for (const one of main.querySelectorAll("details[open]")) await fill(one);
    late.hidden = true;
  }} catch (error) {{ late.hidden = false; }}
  setTimeout(refresh, {REFRESH_MS});
}}
main.addEventListener("toggle", event => fill(event.target).catch(() => {{}}), true);
setTimeout(refresh, {REFRESH_MS});
"""

_SHELL = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>refitd</title><style>{style}</style></head>
<body><p id="late" class="bad" hidden>refitctl dashboard does not answer; what is shown is old.</p>
<header><h1>refitd</h1><label><input type="checkbox" id="failures"> only failures</label></header>
<main>{main}</main><script>{script}</script></body>
</html>
"""


def _allowed(text: str) -> str:
    """Return the word that allows exactly this script or style in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# With this policy even unescaped text could neither run nor load anything.
POLICY = f"default-src 'none'; style-src {_allowed(_STYLE)}; script-src {_allowed(_SCRIPT)}; connect-src 'self'"
_HTML = "text/html; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Cell:
    """A table's cell; `tone` colours it."""

    text: str
    tone: str = ""  # "good", "warn", "bad"


@dataclass(frozen=True, slots=True)
class Shown:
    """The content of the page: the cluster's last answers, and why there is no newer one."""

    status: StatusReport | None
    swaps: Sequence[HistoryEntry]
    at: float  # seconds since the epoch
    problem: str = ""


class Pages(Mapping[str, Callable[[], Page]]):
    """The pages by their paths: the whole one, its inner part, asked for each second, and what is opened on it."""

    def __init__(self, latest: Callable[[], Shown], opened: Opened) -> None:
        self._opened = opened
        self._fixed: dict[str, Callable[[], Page]] = {
            "/": lambda: _page(_SHELL.format(style=_STYLE, script=_SCRIPT, main=fragment(latest()))),
            "/now": lambda: _page(fragment(latest())),
        }

    def __getitem__(self, path: str) -> Callable[[], Page]:
        """Return the function that makes the page of this path."""
        if path in self._fixed:
            return self._fixed[path]
        if (part := self._opened.part(path)) is None:
            raise KeyError(path)
        text, stays = part
        return lambda: _page(text, 200 if stays or path.startswith(f"/{RUNNING}/") else 503)

    def __iter__(self) -> Iterator[str]:
        """Yield the fixed paths."""
        return iter(self._fixed)

    def __len__(self) -> int:
        """Return the number of fixed paths."""
        return len(self._fixed)


def _page(text: str, status: int = 200) -> Page:
    return Page(text.encode(), status, _HTML, POLICY)


def fragment(shown: Shown) -> str:
    """Return the inner part of the page."""
    parts: list[str] = []
    when = datetime.fromtimestamp(shown.at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    if shown.problem:
        known = "since" if shown.status is not None else "yet; tried at"
        parts.append(html.line(f"No answer {known} {when}: {shown.problem}", "bad"))
    if (status := shown.status) is None:
        return "\n".join([*parts, html.line("The page shows the cluster as soon as it answers.", "dim")])
    parts.append(
        html.line(
            f"{when}: coordinator pid {status.coordinator_pid}, up {age(status.uptime_s)}; "
            f"{counted(len(status.nodes), 'node')}, {counted(len(status.models), 'model')}",
            "dim",
        )
    )
    parts += [html.line(line, "bad") for line in (*lost_lines(status), *problem_lines(status))]
    parts += [html.line(line, "warn") for line in drained_lines(status)]
    nodes = [*map(_lost, status.lost), *map(_node, sorted(status.nodes, key=_is_fine))]
    parts += ["<h2>Nodes</h2>", _table(_NODE_COLUMNS, nodes, "none")]
    if failed := [one for one in shown.swaps if one.state in _FAILED][:FAILURES]:
        parts += ["<h2>Failed swaps</h2>", _table(_SWAP_COLUMNS, map(_swap, failed), "none")]
    for model in status.models:
        lost = {one.replica: node.node for node in status.lost for one in node.replicas if one.model == model.model}
        parts += _model(model, [one for one in shown.swaps if one.model == model.model], lost)
    if not status.models:
        parts.append(html.line("No models: no trainer and no engine has registered yet."))
    parts += ["<h2>Last swaps</h2>", _table(_SWAP_COLUMNS, map(_swap, shown.swaps), "none")]
    traced = [one for one in shown.swaps if one.report is not None][:TRACES]
    parts += [html.closed(_title(one), html.path(TRACE, one.model, one.swap), f"{TRACE} {one.swap}") for one in traced]
    return "\n".join(parts)


# --- models -------------------------------------------------------------------------------------------------

_REPLICA_COLUMNS = ("replica", ">serves", ">behind", ">ranks", "state", "nodes", ">last pause")
_SOURCE_COLUMNS = (">rank", "node/host", ">pid", "versions held", ">bytes", "trainer")


@dataclass(frozen=True, slots=True)
class _ReplicaRow:
    """A replica, rolled up over its ranks."""

    name: str
    ranks: tuple[TargetStatus, ...]
    live: int | None

    @property
    def served(self) -> int | None:
        """The lowest version of its ranks; None if one has none."""
        found = [rank.version for rank in self.ranks]
        return None if None in found else min((v for v in found if v is not None), default=None)

    @property
    def lag(self) -> int:
        """How many versions it is behind (after a rollback: ahead, below zero)."""
        return 0 if self.live is None or self.served is None else self.live - self.served

    @property
    def worry(self) -> tuple[int, int, str]:
        """The sort key of replicas: first the ones without a version, then the ones that lag most."""
        lacking = sum(rank.state not in (ServingState.SERVING, ServingState.SUSPENDED) for rank in self.ranks)
        lacking += self.ranks[0].world_size - len(self.ranks)
        return -lacking if self.served is None else 0, -abs(self.lag) or -lacking, self.name


def _model(model: ModelStatus, swaps: Sequence[HistoryEntry], lost: Mapping[str, str]) -> Iterable[str]:
    """Yield a model's part of the page; `lost` has the replicas that are lost with a node, and that node."""
    yield f"<h2>{html.text(model.model)}</h2>"
    waits = f"; {model.queued} swaps wait" if model.queued else ""
    decided = "nothing is decided yet" if model.live is None else f"version {model.live} is decided"
    yield html.line(f"{decided}; complete versions: {versions(model.complete_versions)}{waits}")
    if (swap := model.swap) is not None:
        done = swap.bytes_done / swap.bytes_total if swap.bytes_total else 0.0
        ranks = f", {swap.members_done} of {swap.members_total} ranks" if swap.phase == "commit" else ""
        yield html.line(
            f"swap {swap.swap} to version {swap.version} runs: {swap.phase}, {size(swap.bytes_done)} of "
            f"{size(swap.bytes_total)}{ranks}",
            "warn",
        )
        yield f'<progress max="1" value="{min(1.0, done):.3f}"></progress>'
        running = html.path(RUNNING, model.model, swap.swap)
        yield html.closed("what every process has done in it", running, running, changes=True)
    by_replica: dict[str, list[TargetStatus]] = {}
    for target in model.targets:
        by_replica.setdefault(target.replica, []).append(target)
    replicas = sorted(
        (_ReplicaRow(name, tuple(ranks), model.live) for name, ranks in by_replica.items()), key=lambda one: one.worry
    )
    yield from charts(swaps)
    pauses = _pauses(model.last_swap)
    yield "<h3>Replicas</h3>"
    gone = [
        (Cell(name), Cell("-"), Cell("-"), Cell("-"), Cell(f"lost with node {node}", "bad"), Cell(node), Cell("-"))
        for name, node in sorted(lost.items())
        if name not in by_replica
    ]
    rows = [*gone, *(_replica(one, pauses) for one in replicas)]
    yield _table(_REPLICA_COLUMNS, rows, "no engine has registered")
    yield f"<h3>Trainer: {len(model.sources)} of {model.source_world_size} ranks</h3>"
    trainer = (
        (
            Cell(str(source.rank)),
            Cell(f"{source.node}/{source.host}"),
            Cell(str(source.pid)),
            Cell(versions(source.versions)),
            Cell(size(source.bytes)),
            Cell("there" if source.attached else "gone", "" if source.attached else "warn"),
        )
        for source in model.sources
    )
    yield _table(_SOURCE_COLUMNS, trainer, "no trainer has registered")

    if model.sources and model.targets:
        source = html.path(PLAN, model.model, _view(model))
        yield html.closed("Plan: who sends how much to whom", source, f"{PLAN} {model.model}")


def _view(model: ModelStatus) -> str:
    """Return a text that changes whenever ranks register or leave."""
    sources = ((one.rank, one.node, one.pid, one.tensors, one.bytes) for one in model.sources)
    targets = ((one.replica, one.rank, one.node, one.pid, one.tensors, one.bytes) for one in model.targets)
    return hashlib.sha256(repr((*sources, *targets)).encode()).hexdigest()[:16]


def _title(entry: HistoryEntry) -> str:
    took = f" in {duration(entry.report.total_s)}" if entry.report else ""
    return f"Trace of swap {entry.swap}: {entry.model} to version {version(entry.version)}, {entry.state}{took}"


def _pauses(last: SwapReport | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for member in last.members if last is not None else ():
        found[member.replica] = max(found.get(member.replica, 0.0), member.paused_s)
    return found


def _replica(one: _ReplicaRow, pauses: dict[str, float]) -> Sequence[Cell]:
    states: dict[str, int] = {}
    for rank in one.ranks:
        states[str(rank.state)] = states.get(str(rank.state), 0) + 1
    missing = one.ranks[0].world_size - len(one.ranks)
    text = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    tone = "bad" if missing or not states.keys() <= {"serving", "suspended", "behind", "empty"} else ""
    tone = tone or ("warn" if "behind" in states or "empty" in states else "good")
    if one.ranks[0].is_drained:
        text, tone = f"{text}, drained", "warn"
    behind = "-" if one.served is None or one.live is None else str(one.lag)
    nodes = sorted({rank.node for rank in one.ranks})
    return (
        Cell(one.name),
        Cell(version(one.served), "" if one.served is not None else "warn"),
        Cell(behind, "warn" if one.lag else ""),
        Cell(f"{len(one.ranks)}/{one.ranks[0].world_size}", "bad" if missing else ""),
        Cell(text, tone),
        Cell(", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")),
        Cell(duration(pauses[one.name]) if pauses.get(one.name) else "-"),
    )


# --- swaps and nodes ----------------------------------------------------------------------------------------

_SWAP_COLUMNS = ("when (UTC)", "swap", "model", ">version", "kind", "ended", ">bytes", ">took", ">paused", "reason")
_NODE_COLUMNS = ("node", "state", "host", ">pid", ">workers", ">clients", ">arenas", ">arena bytes")
_FAILED = ("aborted", "incomplete")
_TONES = {"committed": "good", "aborted": "warn", "decided": "warn", "incomplete": "bad"}


def _swap(entry: HistoryEntry) -> Sequence[Cell]:
    report = entry.report
    paused = max((member.paused_s for member in report.members), default=0.0) if report else 0.0
    return (
        Cell(datetime.fromtimestamp(entry.at, UTC).strftime("%m-%d %H:%M:%S")),
        Cell(entry.swap),
        Cell(entry.model),
        Cell(version(entry.version)),
        Cell(report.kind if report else "-"),
        Cell(str(entry.state), _TONES.get(entry.state, "")),
        Cell(size(report.bytes) if report else "-"),
        Cell(duration(report.total_s) if report else "-"),
        Cell(duration(paused) if paused else "-"),
        Cell(entry.reason),
    )


def _lost(node: LostNode) -> Sequence[Cell]:
    return (
        Cell(node.node),
        Cell(f"lost {age(node.silent_s)} ago", "bad"),
        Cell(node.host),
        Cell(str(node.pid)),
        *(Cell("-") for _ in _NODE_COLUMNS[4:]),
    )


def _is_fine(node: NodeStatus) -> bool:
    return not node.is_late and all(node.workers)


def _node(node: NodeStatus) -> Sequence[Cell]:
    running = sum(map(bool, node.workers))
    return (
        Cell(node.node),
        Cell(*node_state(node)),
        Cell(node.host),
        Cell(str(node.pid)),
        Cell(f"{running}/{len(node.workers)}", "" if running == len(node.workers) else "bad"),
        Cell(str(node.clients)),
        Cell(str(node.arenas)),
        Cell(size(node.arena_bytes)),
    )


# --- HTML ---------------------------------------------------------------------------------------------------


def _width(cell: Cell) -> str:
    """Return a class: short cells do not wrap, empty cells are hidden on narrow screens."""
    if cell.text in ("", "-"):
        return "none"
    return "short" if len(cell.text) <= SHORT else ""


def _row_class(row: Sequence[Cell]) -> str:
    """Return "fine" for a row with a good cell and no other colour: the filter hides it."""
    return "fine" if {cell.tone for cell in row} - {""} == {"good"} else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], nothing: str) -> str:
    """Return a table; a column named ">..." holds numbers."""
    found = list(rows)
    if not found:
        return html.line(nothing, "dim")
    names = [column.removeprefix(">") for column in columns]
    numbers = ["n" if column.startswith(">") else "" for column in columns]
    head = "".join(f'<th class="{number}">{name}</th>' for number, name in zip(numbers, names, strict=True))
    body = [
        f'<tr class="{_row_class(row)}">'
        + "".join(
            f'<td class="{number} {cell.tone} {_width(cell)}" data-label="{name}">{html.text(cell.text)}</td>'
            for number, name, cell in zip(numbers, names, row, strict=True)
        )
        + "</tr>"
        for row in found[:MAX_ROWS]
    ]
    more = html.line(f"and {len(found) - MAX_ROWS} more", "dim") if len(found) > MAX_ROWS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>{more}"


HEIGHT, BAR, GAP = 48, 10, 2  # units of the drawing, which is stretched to its place
FEWEST, MOST = 20, 50  # bars that there is room for


def charts(swaps: Sequence[HistoryEntry]) -> Iterator[str]:
    """Yield three charts of a model's swaps, given the newest first and drawn the oldest first."""
    ended = [one for one in reversed(swaps) if one.report is not None][-MOST:]
    if len(ended) < 2:
        return
    width = (BAR + GAP) * max(FEWEST, len(ended))
    yield '<div class="charts">'
    for title, value, unit in (
        ("time", _time, duration),
        ("bytes", _bytes, lambda found: size(int(found))),
        ("longest pause", _pause, duration),
    ):
        values = [value(one.report) for one in ended if one.report is not None]
        top = max(values) or 1.0
        bars = "".join(
            _bar(number, found / top, one, unit(found))
            for number, (one, found) in enumerate(zip(ended, values, strict=True))
        )
        yield (
            f"<figure><figcaption>{title}: last {html.text(unit(values[-1]))}, up to {html.text(unit(max(values)))}"
            f'</figcaption><svg viewBox="0 0 {width} {HEIGHT}" preserveAspectRatio="none" role="img">{bars}</svg>'
            "</figure>"
        )
    yield "</div>"


def _bar(number: int, share: float, entry: HistoryEntry, value: str) -> str:
    height = max(1.0, share * HEIGHT)
    tone = "" if entry.state == SwapOutcome.COMMITTED else "failed"
    about = f"version {version(entry.version)}, {entry.state}: {value}"
    return (
        f'<rect class="{tone}" x="{number * (BAR + GAP)}" y="{HEIGHT - height:.1f}" width="{BAR}" '
        f'height="{height:.1f}"><title>{html.text(about)}</title></rect>'
    )


def _time(report: SwapReport) -> float:
    return report.total_s


def _bytes(report: SwapReport) -> float:
    return report.bytes


def _pause(report: SwapReport) -> float:
    return max((member.paused_s for member in report.members), default=0.0)
