"""Send a swap's trace to an OpenTelemetry collector over OTLP/HTTP: the spans that the file for Perfetto has."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from refitd.errors import ConfigError, TransportError
from refitd.protocol.traces import TraceReport
from refitd.states import SwapOutcome
from refitd_cli.chrome_trace import processes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

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
    """Send all spans; return their number. Whatever is sent twice has the same ids.

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
