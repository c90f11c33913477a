"""A collector of OpenTelemetry spans on this machine, which decodes the requests it receives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector(HTTPServer):
    """Stores decoded requests; answers with `status`."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.got: list[tuple[str, ExportTraceServiceRequest]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((self.path, request))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector."""
    found = Collector()
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        found.shutdown()
        thread.join(10)
        found.server_close()


def spans(request: ExportTraceServiceRequest) -> list[tuple[str, str, int, int, bytes, bytes, dict[str, object]]]:
    """Process, name, begin, end, id, parent and attributes of each span."""
    found = []
    for part in request.resource_spans:
        where = {pair.key: pair.value.string_value for pair in part.resource.attributes}
        assert where["service.name"] == "refitd"
        for span in part.scope_spans[0].spans:
            given = {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}
            times = (span.start_time_unix_nano, span.end_time_unix_nano)
            found.append((where["service.instance.id"], span.name, *times, span.span_id, span.parent_span_id, given))
    return found
