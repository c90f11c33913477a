"""Metrics: the table in the docs, the counts, and a server that no client can block."""

from __future__ import annotations

import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from refitd import metrics
from refitd.config import MetricsConfig, load
from refitd.coordinator.metrics import CoordinatorMetrics
from refitd.daemon.metrics import DaemonMetrics
from refitd.errors import ConfigError, RefusedError
from refitd.metrics import Exporter, HttpServer, Labelled, Page
from refitd.testing import eventually

CONFIGS = Path(__file__).parents[2] / "configs"
DOCUMENT = CONFIGS.parent / "docs/metrics.md"


@contextmanager
def served(**routes: object) -> Iterator[HttpServer]:
    pages = {"/": lambda: Page(b"here"), **{f"/{name}": make for name, make in routes.items()}}
    server = HttpServer(("127.0.0.1", 0), ("node7",), pages, "metrics.endpoint")
    try:
        yield server
    finally:
        server.close()


def connected(server: HttpServer | Exporter[str]) -> socket.socket:
    if isinstance(server, HttpServer):
        return socket.create_connection(server.address, timeout=30)
    host, _, port = server.endpoint.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def read_all(sock: socket.socket) -> bytes:
    found = b""
    while more := sock.recv(1 << 16):
        found += more
    return found


def ask(server: HttpServer | Exporter[str], request: str) -> bytes:
    with connected(server) as sock:
        sock.sendall(request.encode("latin-1"))
        return read_all(sock)


def get(server: HttpServer | Exporter[str], path: str = "/", host: str = "localhost") -> tuple[int, bytes]:
    answer = ask(server, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


# --- the table ----------------------------------------------------------------------------------------------


def test_the_table_documents_every_metric_and_nothing_else():
    found: dict[tuple[str, ...], list[str]] = {}
    for process, make in (
        ("coordinator", CoordinatorMetrics),
        ("daemon", lambda registry: DaemonMetrics(registry, 1)),
    ):
        registry = CollectorRegistry()
        make(registry)
        for metric in registry._collector_to_names:
            name = f"{metric._name}_total" if metric._type == "counter" else metric._name
            labels = ", ".join(f"`{label}`" for label in metric._labelnames)
            found.setdefault((f"`{name}`", metric._type, labels, metric._documentation), []).append(process)
    rows = re.findall(r"^\| (`refitd\w+`) \| (\w+) \| ([^|]*?) ?\| ([\w, ]+) \| (.*) \|$", DOCUMENT.read_text(), re.M)
    listed = {(name, kind, labels, meaning): processes.split(", ") for name, kind, labels, processes, meaning in rows}
    assert listed == found


def test_beyond_the_limit_series_are_counted_together(monkeypatch):
    monkeypatch.setattr(metrics, "MAX_SERIES", 3)
    registry = CollectorRegistry()
    names = Labelled(Counter("c", "", ["a", "b"], registry=registry))
    for number in range(10):
        names.of(str(number), "x").inc()
    assert registry.get_sample_value("c_total", {"a": "1", "b": "x"}) == 1
    assert registry.get_sample_value("c_total", {"a": "other", "b": "other"}) == 7


# --- the exporter -------------------------------------------------------------------------------------------


@contextmanager
def exported() -> Iterator[tuple[Exporter[str], list[str]]]:
    shown: list[str] = []
    found = Exporter(("127.0.0.1", 0), (), CollectorRegistry(), shown.append)
    try:
        yield found, shown
    finally:
        found.close()


def test_health_follows_the_loop_and_readiness_what_it_says(monkeypatch):
    with exported() as (found, _):
        assert get(found, "/healthz")[0] == 503
        found.publish("a", "")
        assert (get(found, "/healthz"), get(found, "/readyz")) == ((200, b"ok\n"), (200, b"ok\n"))
        found.publish("a", "no coordinator answers")
        assert get(found, "/healthz")[0] == 200
        assert get(found, "/readyz") == (503, b"no coordinator answers\n")
        monkeypatch.setattr(metrics, "SILENT_S", -1.0)
        assert get(found, "/healthz") == (503, b"its loop has not turned for 0 s\n")


def test_a_page_is_made_once_for_many_scrapes():
    with exported() as (found, shown):
        found.publish("a", "")
        for _ in range(50):
            status, body = get(found, "/metrics")
            assert status == 200
            assert b"process_cpu_seconds_total" in body
        assert 1 <= len(shown) <= 10
        found.publish("b", "")
        time.sleep(metrics.FRESH_S)
        get(found, "/metrics")
        assert shown[-1] == "b"


# --- the server ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.:9464", "127.0.0.1:1", "[::1]:9464", "10.1.2.3", "node7:80"])
def test_a_host_that_is_ours_is_answered(host):
    with served() as server:
        assert get(server, host=host) == (200, b"here")


@pytest.mark.parametrize("host", ["evil.example", "node7.evil.example:80", "", "127.0.0.1.evil.example", "localhost:x"])
def test_a_foreign_host_is_refused(host):
    with served() as server:
        assert get(server, host=host)[0] == 403


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET / HTTP/1.1\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        ("GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        ("GET /?a=b HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        ("\x00\xff\xfe\r\n\r\n", 400),
        ("GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: localhost\r\nX: " + "x" * metrics.MAX_REQUEST_BYTES, 431),
        ("GET /broken HTTP/1.1\r\nHost: localhost\r\n\r\n", 500),
    ],
)
def test_each_request_has_its_status(request_, status):
    with served(broken=lambda: 1 / 0) as server:
        assert ask(server, request_).split()[1] == str(status).encode()


def test_head_has_the_length_and_no_body():
    with served() as server:
        answer = ask(server, "HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"Content-Length: 4\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


def test_clients_that_are_slow_end_at_the_limit_and_hold_up_nobody(monkeypatch):
    large = Page(b"x" * (16 << 20))
    with served(large=lambda: large) as server:
        for limit_s in (1000.0, 0.2):
            monkeypatch.setattr(metrics, "EXCHANGE_S", limit_s)
            silent, dripping, never_reads = slow = [connected(server) for _ in range(3)]
            dripping.sendall(b"GET / HT")
            never_reads.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert get(server) == (200, b"here"), "it waits for none of them"
            if limit_s > 1:
                silent.settimeout(0)
                with pytest.raises(BlockingIOError):
                    silent.recv(100)
            else:
                until_closed(server)
                assert silent.recv(100) == dripping.recv(100) == b""
                got = 0
                with suppress(ConnectionResetError):
                    got = len(read_all(never_reads))
                assert got < len(large.body), "it was waited for"
            for sock in slow:
                sock.close()
            until_closed(server)


def until_closed(server: HttpServer) -> None:
    eventually(lambda: not server._open, "all connections are closed")


class SlowClients(threading.Thread):
    """Connections that send a part of a request, never read, and are opened again when the server closes them."""

    def __init__(self, server: HttpServer, count: int, sent: bytes) -> None:
        super().__init__(daemon=True)
        self._server, self._sent = server, sent
        self._ended = threading.Event()
        self.reopened = 0
        self._poll = select.poll()
        self._sockets: dict[int, socket.socket] = {}
        for _ in range(count):
            self._open()
        self.start()

    def _open(self) -> None:
        sock = connected(self._server)
        with suppress(OSError):  # closed already
            sock.sendall(self._sent)
        self._sockets[sock.fileno()] = sock
        self._poll.register(sock, select.POLLRDHUP)

    def run(self) -> None:
        while not self._ended.is_set():
            for fd, _ in self._poll.poll(50):
                self._poll.unregister(fd)
                self._sockets.pop(fd).close()
                self._open()
                self.reopened += 1

    def close(self) -> None:
        self._ended.set()
        self.join()
        for sock in self._sockets.values():
            sock.close()


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    ids=["silent", "half a request", "never reads"],
)
def test_a_scrape_beside_hundreds_of_slow_connections_is_answered_and_never_reset(sent):
    large = Page(b"x" * (16 << 20))
    with served(large=lambda: large) as server:
        slow = SlowClients(server, 300, sent)
        try:
            for _ in range(3):
                with socket.create_connection(server.address, timeout=30) as sock:
                    sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    assert read_all(sock).endswith(b"\r\n\r\nhere")
            # a client that never reads does not see that its connection was closed
            assert slow.reopened or sent.endswith(b"\r\n\r\n")
            assert len(server._open) <= metrics.MAX_CLIENTS
        finally:
            slow.close()
        assert get(server) == (200, b"here")
        until_closed(server)


def test_slow_clients_within_the_limit_are_not_closed_before_their_time(monkeypatch):
    monkeypatch.setattr(metrics, "EXCHANGE_S", 1000.0)
    with served() as server:
        slow = [connected(server) for _ in range(metrics.MAX_CLIENTS - 1)]
        assert get(server) == (200, b"here")
        time.sleep(2 * metrics.GRACE_S)
        for sock in slow:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert read_all(sock).endswith(b"here")
            sock.close()


def test_a_server_that_ends_while_a_client_is_connected_reports_no_error(caplog):
    with served() as server:
        slow = connected(server)
        eventually(lambda: bool(server._open), "it is connected")
    slow.close()
    assert not caplog.records


def test_a_port_that_is_taken_is_named():
    with (
        served() as server,
        pytest.raises(RefusedError, match=rf"metrics.endpoint 127.0.0.1:{server.address[1]}: .*ss"),
    ):
        HttpServer(server.address, (), {}, "metrics.endpoint")


def test_an_address_of_another_host_is_named():
    with pytest.raises(RefusedError, match=r"endpoint 192.0.2.1:9464: cannot be listened on.*address of this host"):
        HttpServer(("192.0.2.1", 9464), (), {}, "metrics.endpoint")


@pytest.mark.parametrize("host", ["a..b", ".", "a" * 70])
def test_a_host_that_is_no_name_is_refused(host):
    with pytest.raises(RefusedError, match=f"endpoint {host}:9464: cannot be listened on: .*no host's name"):
        HttpServer((host, 9464), (), {}, "metrics.endpoint")


# --- the configuration --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "address", "of_coordinator"),
    [
        ("", None, None),
        ("9464", ("127.0.0.1", 9464), ("127.0.0.1", 9465)),
        (9464, ("127.0.0.1", 9464), ("127.0.0.1", 9465)),
        ("0.0.0.0:1", ("0.0.0.0", 1), ("0.0.0.0", 2)),
        ("[::1]:9464", ("::1", 9464), ("::1", 9465)),
        ("0", ("127.0.0.1", 0), ("127.0.0.1", 0)),
    ],
)
def test_an_endpoint_is_an_address_and_a_standalone_coordinator_takes_the_next_port(endpoint, address, of_coordinator):
    config = MetricsConfig(endpoint)
    assert config.address == address
    assert config.of_coordinator.address == of_coordinator
    flags = {} if endpoint == "" else {"metrics.endpoint": endpoint}
    assert load(None, environ={}, **flags).metrics.address == address


@pytest.mark.parametrize(
    "endpoint", ["localhost", "host:port", "::1:9464", "1.2.3.4:65535", ":9464", 70000, -1, "a b:1"]
)
def test_an_endpoint_that_is_none_is_refused(endpoint):
    with pytest.raises(ConfigError, match=r"metrics\.endpoint"):
        load(None, environ={}, **{"metrics.endpoint": endpoint})


def test_an_environment_variable_may_hold_a_port():
    assert load(None, environ={"REFITD_METRICS__ENDPOINT": "9464"}).metrics.address == ("127.0.0.1", 9464)


# --- what is shipped beside it ------------------------------------------------------------------------------


def test_alerts_and_dashboard_name_metrics_that_exist_and_each_alert_has_its_advice():
    known = set(re.findall(r"^\| `(refitd_\w+)`", DOCUMENT.read_text(), re.MULTILINE))
    for path in ("grafana/refitd.json", "prometheus/refitd.rules.yml", "prometheus/refitd.rules.test.yml"):
        text = (CONFIGS / path).read_text()
        used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\brefitd_\w+", text)}
        assert used <= known, path
        if path.startswith("grafana"):
            assert used == known, "each is shown"
    alerts = re.findall(r"- alert: (\w+)", (CONFIGS / "prometheus/refitd.rules.yml").read_text())
    runbook = (CONFIGS.parent / "docs/runbook.md").read_text()
    assert re.findall(r"^\| `(Refitd\w+)`", runbook, re.MULTILINE) == alerts, "each has an action"
