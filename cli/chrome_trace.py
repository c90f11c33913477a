"""A swap's trace with all clocks the coordinator's, and as Chrome's trace JSON, which ui.perfetto.dev shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from refitd.protocol.traces import TraceReport, TraceSpan


@dataclass(frozen=True, slots=True)
class TracedProcess:
    """The coordinator, or a node with all that ran on it.

    Attributes:
        name: "coordinator", or "node" and its name.
        host: where it ran.
        spans: what took time, in its own clock.
        offset_s: added to its times, gives the coordinator's, within `error_s` (None: not measured).
    """

    name: str
    host: str
    spans: tuple[TraceSpan, ...]
    offset_s: float = 0.0
    error_s: float | None = 0.0


def processes(report: TraceReport) -> list[TracedProcess]:
    """Return the coordinator, then the nodes."""
    return [
        TracedProcess("coordinator", report.host, report.phases),
        *(
            TracedProcess(f"node {node.node}", node.host, node.spans, node.offset_s, node.error_s)
            for node in report.nodes
        ),
    ]


def chrome_trace(report: TraceReport) -> dict[str, Any]:
    """Return the trace: one process a node and one for the coordinator, one thread for each process on it.

    Times are microseconds since the swap began. `otherData` has the swap, its wall time and, for each node, by how many
    seconds its times may be wrong against the coordinator's.
    """
    events: list[dict[str, Any]] = []
    for pid, part in enumerate(processes(report), 1):
        events += _process(pid, f"{part.name} (host {part.host})", part.spans, part.offset_s - report.began)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "swap": report.swap,
            "model": report.model,
            "version": report.version,
            "kind": report.kind,
            "outcome": report.outcome or "running",
            "reason": report.reason,
            "began_unix_s": report.at,
            "clock_error_s": {node.node: node.error_s for node in report.nodes},
            "dropped_spans": {node.node: node.dropped for node in report.nodes if node.dropped},
            "missing": list(report.missing),
        },
    }


def _process(pid: int, name: str, spans: Iterable[TraceSpan], offset_s: float) -> list[dict[str, Any]]:
    events = [_named(pid, 0, "process_name", name), _named(pid, 0, "process_sort_index", pid)]
    threads: dict[str, int] = {}
    for span in spans:
        if span.who not in threads:
            threads[span.who] = len(threads) + 1
            events.append(_named(pid, threads[span.who], "thread_name", span.who))
        given = {"bytes": span.bytes, "note": span.note, "unfinished": span.is_open}
        events.append(
            {
                "ph": "X",
                "pid": pid,
                "tid": threads[span.who],
                "name": span.name,
                "cat": "refitd",
                "ts": round((span.began + offset_s) * 1e6, 1),
                "dur": round(max(0.0, span.ended - span.began) * 1e6, 1),
                "args": {key: value for key, value in given.items() if value},
            }
        )
    return events


def _named(pid: int, tid: int, what: str, value: str | int) -> dict[str, Any]:
    return {
        "ph": "M",
        "pid": pid,
        "tid": tid,
        "name": what,
        "args": {"sort_index" if isinstance(value, int) else "name": value},
    }
