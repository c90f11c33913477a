"""Export a swap's trace: as Chrome's trace JSON, which ui.perfetto.dev shows, or as spans over OTLP.

All times are on the coordinator's clock.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from refitd.errors import ConfigError, TransportError
from refitd.protocol.reports import TraceReport, TraceSpan
from refitd.states import SwapOutcome

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


@dataclass(frozen=True, slots=True)
class TracedProcess:
    """The coordinator, or a node with all that ran on it.

    Attributes:
        name: "coordinator", or "node" and its name.
        host: where it ran.
        spans: its timed steps, in its own clock.
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

    Times are microseconds since the first step. `otherData` has the swap, the wall time of that step and, for each
    node, by how many seconds its times may be wrong against the coordinator's.
    """
    events: list[dict[str, Any]] = []
    parts = processes(report)
    aligned = [part for part in parts if part.error_s is not None]
    # a version may have been published in part before
    first = min([report.began, *(span.began + part.offset_s for part in aligned for span in part.spans)])
    for pid, part in enumerate(parts, 1):
        events += _process(pid, f"{part.name} (host {part.host})", part.spans, part.offset_s - first)
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
            "began_unix_s": report.at - (report.began - first),
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


PATH = "/v1/traces"
BATCH = 1000  # spans of one request
MAX_NS = (1 << 63) - 1
TIMEOUT_S = 10.0  # of one request, with its repetitions


def endpoint_of(url: str) -> str:
    """Return where spans are sent for a collector's URL: OTLP's path is added if the URL has none.

    Raises:
        ConfigError: it is no http or https URL.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(char.isspace() for char in url):
        raise ConfigError(f"--otlp {url!r} is no collector's URL; give one such as http://127.0.0.1:4318")
    return url if parts.path.strip("/") else f"{url.rstrip('/')}{PATH}"


def send(report: TraceReport, url: str) -> int:
    """Send all spans; return their number. Spans that are sent twice have equal ids.

    Raises:
        ConfigError: `url` is no http or https URL.
        TransportError: the collector cannot be reached, or refuses them.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    endpoint, spans = endpoint_of(url), list(spans_of(report))
    exporter, log = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S), _LastComplaint()
    logger = logging.getLogger("opentelemetry")
    logger.addHandler(log)
    propagated, logger.propagate = logger.propagate, False
    try:
        for at in range(0, len(spans), BATCH):
            try:
                taken, why = _exported(exporter, spans[at : at + BATCH]) is SpanExportResult.SUCCESS, ""
            except OSError as exc:  # no answer; older exporters let the error of a refused connection out
                taken, why = False, str(exc)
            if not taken:
                why = why or log.last or "the collector gives no reason"
                raise TransportError(f"--otlp {url}: {len(spans) - at} of {len(spans)} spans were not taken: {why}")
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]
        logger.propagate = propagated
        logger.removeHandler(log)
    return len(spans)


def _exported(exporter: SpanExporter, spans: Sequence[ReadableSpan]) -> SpanExportResult:
    """Export spans; raises TimeoutError for a collector that trickles its answer, which the exporter would wait for."""
    found: Future[SpanExportResult] = Future()

    def export() -> None:
        try:
            found.set_result(exporter.export(spans))
        except BaseException as exc:
            found.set_exception(exc)

    threading.Thread(target=export, name="otlp", daemon=True).start()
    try:
        return found.result(2 * TIMEOUT_S)
    except TimeoutError as exc:
        raise TimeoutError(str(exc) or f"no whole answer in {2 * TIMEOUT_S:g} s") from exc


def spans_of(report: TraceReport) -> Iterator[ReadableSpan]:
    """Yield the swap as the root span, and every process's spans below it, at the coordinator's wall times."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    import refitd

    trace = f"{report.model}\0{report.swap}\0{report.at:.6f}"
    scope = InstrumentationScope("refitd", refitd.__version__)

    def context(number: int) -> SpanContext:
        own = _number(f"{trace}\0{number}", 8)
        return SpanContext(_number(trace, 16), own, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def wall_ns(moment: float) -> int:
        # a node may claim any offset; OTLP's times are unsigned
        return min(max(0, round((report.at + moment - report.began) * 1e9)), MAX_NS)

    parts = processes(report)
    aligned = [part for part in parts if part.error_s is not None]
    ends = [span.ended + part.offset_s for part in aligned for span in part.spans]
    failed = report.outcome not in (None, SwapOutcome.COMMITTED)
    root, number = context(0), 0
    for part in parts:
        given = {"service.name": "refitd", "service.instance.id": part.name, "host.name": part.host}
        resource = Resource(_present(given))
        if part is parts[0]:
            yield ReadableSpan(
                "swap",
                root,
                resource=resource,
                attributes=_present(
                    {
                        "refitd.swap": report.swap,
                        "refitd.model": report.model,
                        "refitd.version": report.version,
                        "refitd.kind": report.kind,
                        "refitd.outcome": report.outcome or "running",
                        "refitd.missing": report.missing,
                    }
                ),
                status=Status(StatusCode.ERROR, report.reason) if failed else Status(),
                start_time=wall_ns(report.began),
                end_time=wall_ns(max([report.began, *ends])),
                instrumentation_scope=scope,
            )
        for span in part.spans:
            number += 1
            yield ReadableSpan(
                span.name,
                context(number),
                parent=root,
                resource=resource,
                attributes=_present(
                    {
                        "refitd.process": span.who,
                        "refitd.bytes": span.bytes,
                        "refitd.note": span.note,
                        "refitd.unfinished": span.is_open,
                        "refitd.clock_error_s": part.error_s or 0.0,
                        "refitd.clock_unaligned": part.error_s is None,
                    }
                ),
                start_time=wall_ns(span.began + part.offset_s),
                end_time=wall_ns(max(span.began, span.ended) + part.offset_s),
                instrumentation_scope=scope,
            )


class _LastComplaint(logging.Handler):
    """Keeps the exporter's last complaint instead of printing it."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


def _number(text: str, size: int) -> int:
    """Return a number other than 0 of `size` bytes, the same for the same text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size]) or 1


def _present(
    given: Mapping[str, str | int | float | Sequence[str]],
) -> dict[str, str | int | float | Sequence[str]]:
    return {key: value for key, value in given.items() if value}
