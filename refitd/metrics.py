"""Serve metrics, health and readiness of a process over HTTP, for Prometheus, by a small server on a thread.

The dashboard uses the same server. prometheus_client is imported only where metrics are served.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from refitd import __version__
from refitd.errors import RefusedError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics import MetricWrapperBase

# A page is rendered at most this often, and cached between.
FRESH_S = 0.5

# A loop that has not published for this long hangs. It publishes every second.
SILENT_S = 10.0

# Limit on label combinations of a metric whose labels peers choose. Further ones are counted together.
MAX_SERIES = 4096
OTHER = "other"

# Limits on clients: connections at a time, bytes of a request, seconds from the first to the last byte.
MAX_CLIENTS = 32
MAX_REQUEST_BYTES = 16 << 10
EXCHANGE_S = 5.0
# If all connections are taken, the oldest is closed for the next one, but each has at least this long. The next ones
# wait in the kernel: behind 500 slow clients, a request waits 500 / MAX_CLIENTS * GRACE_S = 3 s.
GRACE_S = 0.2
BACKLOG = 512

_STATUS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}

S = TypeVar("S")
M = TypeVar("M", bound="MetricWrapperBase")
Monitor = TypeVar("Monitor", bound="Endpoint")


class Endpoint(Protocol):
    """Serves a process's metrics."""

    @property
    def endpoint(self) -> str:
        """The address on which it listens."""


def opened(
    address: tuple[str, int] | None, make: Callable[[tuple[str, int]], Monitor], log: Callable[..., None]
) -> Monitor | None:
    """Open a metrics endpoint by `make(address)`, which alone imports prometheus_client; None without an address."""
    if address is None:
        return None
    keep_apart()
    monitor = make(address)
    log("metrics", endpoint=monitor.endpoint)
    return monitor


def keep_apart() -> None:
    """Keep prometheus_client, which reads this when it is imported, from sharing values through files.

    vLLM sets the variable for its processes, and a process that starts a daemon may have it too.
    """
    for variable in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        os.environ.pop(variable, None)


def add_build_info(registry: CollectorRegistry) -> None:
    """Add the metric that both processes have."""
    from prometheus_client import Gauge

    info = Gauge("refitd_build_info", "1, with the version of refitd.", ["version"], registry=registry)
    info.labels(__version__).set(1)


class Exporter(Generic[S]):
    """`/metrics`, `/healthz` and `/readyz` of one process.

    Counters and histograms of `registry` are increased by the process's loop. Gauges are set on the server's thread,
    by `show`, from the snapshot that the loop published last.
    """

    def __init__(
        self, address: tuple[str, int], names: Collection[str], registry: CollectorRegistry, show: Callable[[S], None]
    ) -> None:
        """Listen; see HttpServer.

        Raises:
            RefusedError: the address cannot be listened on.
        """
        from prometheus_client import ProcessCollector, disable_created_metrics

        self._registry, self._show = registry, show
        disable_created_metrics()  # a second series for each counter, without users
        self._published: tuple[S, str, float] | None = None
        self._page, self._made_at = Page(b""), -FRESH_S
        ProcessCollector(registry=registry)
        routes = {"/metrics": self._metrics, "/healthz": self._health, "/readyz": self._readiness}
        self._server = HttpServer(address, names, routes, "metrics.endpoint")
        host, port = self._server.address
        self.endpoint = f"{f'[{host}]' if ':' in host else host}:{port}"

    def publish(self, snapshot: S, lacks: str) -> None:
        """Replace the snapshot, which must not change later; `lacks` is why the process is not ready, "" if it is.

        Called by the loop.
        """
        self._published = snapshot, lacks, time.monotonic()

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def _metrics(self) -> Page:
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        if time.monotonic() - self._made_at >= FRESH_S:
            if self._published is not None:
                self._show(self._published[0])
            self._page = Page(generate_latest(self._registry), content_type=CONTENT_TYPE_LATEST)
            self._made_at = time.monotonic()
        return self._page

    def _hangs(self) -> str:
        if self._published is None:
            return "it is starting"
        silent_s = time.monotonic() - self._published[2]
        return f"its loop has not turned for {silent_s:.0f} s" if silent_s > SILENT_S else ""

    def _health(self) -> Page:
        return _judged(self._hangs())

    def _readiness(self) -> Page:
        return _judged(self._hangs() or (self._published[1] if self._published is not None else ""))


def _judged(problem: str) -> Page:
    return Page(f"{problem or 'ok'}\n".encode(errors="replace"), 503 if problem else 200)


class Labelled(Generic[M]):
    """At most MAX_SERIES series of one metric with labels."""

    def __init__(self, metric: M) -> None:
        self._metric = metric
        self._series: dict[tuple[str, ...], M] = {}

    def of(self, *values: str) -> M:
        """Return the series with these label values; beyond the limit, the series whose values are all OTHER."""
        found = self._series.get(values)
        if found is None:
            known = values if len(self._series) < MAX_SERIES else (OTHER,) * len(values)
            found = self._series.setdefault(known, self._metric.labels(*known))
        return found


# --- the HTTP server --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"
    policy: str = "default-src 'none'"  # Content-Security-Policy


Routes = Mapping[str, Callable[[], Page]]


class HttpServer:
    """Answers GET requests for the paths of `routes`. It closes each connection after one answer.

    A foreign web page cannot read it through a DNS name that points here (DNS rebinding): a Host header must be an
    address, localhost, or one of `names`.

    Attributes:
        address: the host and port that it listens on.
    """

    def __init__(self, address: tuple[str, int], names: Collection[str], routes: Routes, setting: str) -> None:
        """Listen, and answer on a thread until `close`.

        Args:
            address: host and port; port 0 takes any free one.
            names: of this host in Host headers, besides localhost and addresses.
            routes: the page for each path, made on the server's thread.
            setting: name of the setting with the address, for the error.

        Raises:
            RefusedError: the address cannot be listened on.
        """
        self._names = {name.lower().rstrip(".") for name in (*names, address[0], "localhost")}
        self._routes = routes
        self._open: dict[asyncio.Task[None], float] = {}  # since when each connection is open, the oldest first
        self._heard: set[asyncio.Task[None]] = set()  # that have sent a whole request
        host, port = address
        self._socket = listening(address, f"{setting} {f'[{host}]' if ':' in host else host}:{port}")
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="refitd-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and drop open connections."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(EXCHANGE_S)
        self._socket.close()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        await self._stop.wait()
        others = [accepting, *self._open]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._make_room()
            try:
                accepted, _ = await loop.sock_accept(self._socket)
                reader, writer = await asyncio.open_connection(sock=accepted, limit=MAX_REQUEST_BYTES)
            except OSError:  # the client has left, or no descriptor is free
                await asyncio.sleep(GRACE_S)
                continue
            task = asyncio.create_task(self._answer(reader, writer))
            self._open[task] = loop.time()
            task.add_done_callback(partial(self._ended, writer))

    async def _make_room(self) -> None:
        """Return once there is room for another connection: one has ended, or was closed after its GRACE_S."""
        now = asyncio.get_running_loop().time
        # at most an eighth of the descriptors that this process may have; its work needs the rest
        most = min(MAX_CLIENTS, max(2, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8))
        while len(self._open) >= most:
            left = next(iter(self._open.values())) + GRACE_S - now()
            if left <= 0:
                had_time = [task for task, since in self._open.items() if since + GRACE_S <= now()]
                min(had_time, key=lambda task: (task in self._heard, self._open[task])).cancel()
            await asyncio.wait(self._open, timeout=max(left, 0.01), return_when=asyncio.FIRST_COMPLETED)

    def _ended(self, writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
        del self._open[task]
        self._heard.discard(task)
        writer.transport.abort()  # no effect after an orderly close

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        with contextlib.suppress(TimeoutError, OSError, asyncio.CancelledError):
            async with asyncio.timeout(EXCHANGE_S):
                page, is_head = await self._page_for(reader)
                self._heard.add(task)
                writer.write(_response(page, is_head=is_head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()

    async def _page_for(self, reader: asyncio.StreamReader) -> tuple[Page, bool]:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.LimitOverrunError:
            return Page(b"the request is too long\n", 431), False
        except asyncio.IncompleteReadError:
            return Page(b"the request has no end\n", 400), False
        request, *lines = head.rstrip("\r\n").split("\r\n")
        words = request.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return Page(b"expected METHOD PATH HTTP/1.1\n", 400), False
        method, target, _ = words
        hosts = [value.strip() for name, _, value in (line.partition(":") for line in lines) if name.lower() == "host"]
        is_head = method == "HEAD"
        if len(hosts) != 1:
            return Page(b"expected one Host header\n", 400), is_head
        if not self._is_ours(hosts[0]):
            return Page(b"this host is not known by that name; call it by its address\n", 403), is_head
        if method not in ("GET", "HEAD"):
            return Page(b"nothing can be changed here; use GET\n", 405), is_head
        make = self._routes.get(target.partition("?")[0])
        if make is None:
            return Page(f"no such page; there are {', '.join(self._routes)}\n".encode(), 404), is_head
        try:
            return make(), is_head
        except Exception as exc:  # a page that cannot be made must not end the server
            return Page(f"this page could not be made: {exc!r}\n".encode(errors="replace"), 500), is_head

    def _is_ours(self, host: str) -> bool:
        name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        if not port.isdigit():
            name = host
        if name.lower().rstrip(".") in self._names:
            return True
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name.strip("[]"))
            return True
        return False


def _advice(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "choose an address of this host (`ip address` lists them)"
    if error.errno == errno.EACCES:
        return "ports below 1024 need privileges: choose a higher one"
    return "another process has this port (`ss -ltnp` says which): end it, or choose another port"


def listening(address: tuple[str, int], named: str) -> socket.socket:
    """Return a socket that listens at host and port, 0 for any.

    Raises:
        RefusedError: it cannot be listened on; the error calls it what it is `named`.
    """
    try:
        return _bound(address)
    except OSError as exc:
        raise RefusedError(f"{named}: cannot be listened on: {exc.strerror or exc}; {_advice(exc)}") from exc
    except UnicodeError as exc:  # a name with an empty or a long part
        raise RefusedError(f"{named}: cannot be listened on: this is no host's name") from exc


def _bound(address: tuple[str, int]) -> socket.socket:
    """Return a listening socket; SO_REUSEADDR for a restart, but no other process can take the port."""
    (family, kind, _, _, where), *_ = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found = socket.socket(family, kind)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(where)
        found.listen(BACKLOG)
        found.setblocking(False)
    except BaseException:
        found.close()
        raise
    return found


def _response(page: Page, *, is_head: bool) -> bytes:
    head = (
        f"HTTP/1.1 {page.status} {_STATUS[page.status]}\r\nContent-Type: {page.content_type}\r\n"
        f"Content-Length: {len(page.body)}\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
        f"Content-Security-Policy: {page.policy}; frame-ancestors 'none'\r\nReferrer-Policy: no-referrer\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if is_head else page.body)
