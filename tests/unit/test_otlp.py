"""`refitctl trace --otlp`: a collector gets the events of the Perfetto file."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from refitd.errors import ConfigError
from refitd.protocol.reports import NodeTrace, TraceReport, TraceSpan
from refitd_cli import traces as otlp
from tests.support.cli import TRACE, FakeClient, run
from tests.support.otlp import Collector, collecting, spans


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def test_a_collector_gets_the_spans_of_the_file_at_their_wall_times(collector, tmp_path):
    file = tmp_path / "swap.json"
    ran = run(FakeClient(), "trace", "policy", "-o", str(file), "--otlp", collector.url)
    assert (ran.status, f"in {file} and sent to {collector.url}; clocks agree" in ran.stdout) == (0, True)
    ((path, request),) = collector.got
    assert path == "/v1/traces"
    root, *others = spans(request)
    assert (root[1], root[5], root[6]["refitd.swap"], root[6]["refitd.model"]) == ("swap", b"", "s1", "policy")
    assert {span[5] for span in others} == {root[4]}
    aligned = [span for span in others if "refitd.clock_unaligned" not in span[6]]
    assert len(aligned) == 2 and {span[6].get("refitd.clock_unaligned") for span in others[2:]} == {True}
    assert min(span[2] for span in aligned) >= root[2] and max(span[3] for span in aligned) == root[3]
    made = json.loads(file.read_text())
    names = {e["pid"]: e["args"]["name"].partition(" (")[0] for e in made["traceEvents"] if e["name"] == "process_name"}
    began = made["otherData"]["began_unix_s"]
    expected = [
        (names[e["pid"]], e["name"], pytest.approx(began * 1e9 + e["ts"] * 1e3, abs=1e3), e["args"].get("bytes"))
        for e in made["traceEvents"]
        if e["ph"] == "X"
    ]
    assert [(span[0], span[1], span[2], span[6].get("refitd.bytes")) for span in others] == expected
    run(FakeClient(), "trace", "policy", "--otlp", f"{collector.url}/v1/traces")
    assert spans(collector.got[1][1]) == spans(request), "sent twice, it is the same trace"


def test_nodes_clocks_are_the_coordinator_s_and_an_abort_is_an_error(collector):
    span = TraceSpan("worker 0", "copy\x1b[31m", 1001.5, 1002.0, 64, note="n")
    node = NodeTrace("t", "n0", "host", (span,) * (otlp.BATCH + 5), 0, -950.0, None)
    phase = TraceSpan("coordinator", "stage", 51.0, 53.0, is_open=True)
    report = TraceReport("s", "m", 3, "asked", (phase,), 50.0, 1e9, "h", (node,), "aborted", "b lost", ("n1 is lost",))
    assert otlp.send(report, collector.url) == otlp.BATCH + 7
    first, second = (spans(request) for _, request in collector.got)
    assert (len(first), len(second)) == (otlp.BATCH, 7)
    assert len({span[4] for span in first + second}) == otlp.BATCH + 7
    root, stage, copied = first[:3]
    assert root[2:4] == (10**18, 10**18 + 3 * 10**9)
    status = collector.got[0][1].resource_spans[0].scope_spans[0].spans[0].status
    assert (status.code, status.message) == (Status.STATUS_CODE_ERROR, "b lost")
    assert stage[6] == {"refitd.process": "coordinator", "refitd.unfinished": True}
    assert copied[2:4] == (10**18 + 1_500_000_000, 10**18 + 2 * 10**9)
    assert copied[6]["refitd.clock_unaligned"] and copied[6]["refitd.process"] == "worker 0"


@pytest.mark.parametrize("offset_s", [1e12, -1e12])
def test_a_node_with_an_absurd_clock_does_not_keep_the_others_from_being_sent(collector, offset_s):
    node = NodeTrace("t", "n0", "host", (TraceSpan("daemon", "stage", 1.0, 2.0),), 0, offset_s, 0.0)
    report = TraceReport("s", "m", 3, "asked", (), 0.0, 1e9, "h", (node,))
    assert otlp.send(report, collector.url) == 2


def test_a_collector_that_refuses_or_is_away_is_one_error(collector, monkeypatch, caplog):
    collector.status = 400
    ran = run(FakeClient(), "trace", "policy", "--otlp", collector.url)
    total = 1 + len(TRACE.phases) + sum(len(node.spans) for node in TRACE.nodes)
    assert ran.status == 1 and f"{total} of {total} spans were not taken" in ran.stderr and "400" in ran.stderr
    monkeypatch.setattr(otlp, "TIMEOUT_S", 0.3)
    ran = run(FakeClient(), "trace", "policy", "--otlp", "http://127.0.0.1:1", "--json")
    assert ran.status == 1 and "127.0.0.1" in ran.object["error"]["message"]
    assert not caplog.records


def test_a_collector_that_trickles_its_answer_is_not_waited_for(monkeypatch):
    def trickle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not done.wait(0.02):
                connection.sendall(b"x")

    monkeypatch.setattr(otlp, "TIMEOUT_S", 0.15)
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=trickle, args=(listener,))
        answering.start()
        ran = run(FakeClient(), "trace", "policy", "--otlp", f"http://127.0.0.1:{listener.getsockname()[1]}")
        done.set()
        answering.join()
    assert ran.status == 1 and "no whole answer in 0.3 s" in ran.stderr


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:4318", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://h h"]
)
def test_what_is_no_collector_s_url_is_refused_before_anything_is_asked(url):
    client = FakeClient()
    assert run(client, "trace", "policy", "--otlp", url).status == 2
    assert not client.asked
    with pytest.raises(ConfigError, match="4318"):
        otlp.endpoint_of(url)


def test_a_collector_s_path_is_kept():
    assert otlp.endpoint_of("https://h:1/") == "https://h:1/v1/traces"
    assert otlp.endpoint_of("https://h/otlp/v1/traces") == "https://h/otlp/v1/traces"
