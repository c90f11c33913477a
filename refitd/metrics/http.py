"""A small HTTP server on a separate thread: few connections, short requests, GET only, known Host headers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import resource
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from refitd.errors import RefusedError

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
