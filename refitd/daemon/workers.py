"""The daemon's worker processes: spawned, spoken to without blocking, watched, replaced."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from refitd.buffers import handoff
from refitd.errors import PeerLost, RefitdError
from refitd.protocol import sidecar
from refitd.protocol.base import Message
from refitd.protocol.codec import Decoder, encode

# A worker that dies this often in a row without having worked in between is not started again.
MAX_QUICK_DEATHS = 5
_QUICK_S = 2.0


@dataclass(slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    socket: socket.socket
    started: float
    outbox: deque[tuple[bytes, tuple[int, ...]]] = field(default_factory=deque)
    lost: bool = False


class Workers:
    """A fixed number of worker processes."""

    def __init__(self, count: int, threads: int, on_change: Callable[[int, int], None]) -> None:
        """`on_change(fd, events)` is told which descriptors to poll for what (0: not any more)."""
        self._threads = threads
        self._on_change = on_change
        self._decoder: Decoder[sidecar.FromWorker] = Decoder(sidecar.FromWorker, handoff.MAX_DATAGRAM)
        self._quick_deaths = [0] * count
        self._processes: list[_Process] = [self._spawn() for _ in range(count)]

    def fds(self) -> dict[int, int]:
        """Return descriptor -> worker."""
        return {p.socket.fileno(): i for i, p in enumerate(self._processes) if not p.lost}

    def send(self, worker: int, message: Message, fd: int | None = None, block: bytes | None = None) -> None:
        """Queue a message with a duplicate of `fd`, or with `block` in a memory file.

        Raises:
            OSError: there is no descriptor, or no memory, for that; nothing was queued.
        """
        process = self._processes[worker]
        fds: tuple[int, ...] = ()
        if fd is not None:
            fds = (os.dup(fd),)
        elif block is not None:
            fds = (_memory_file(block),)
        process.outbox.append((encode(0, message), fds))
        self.flush(worker)

    def flush(self, worker: int) -> None:
        """Send what the worker has room for; ask to be called again for the rest."""
        process = self._processes[worker]
        while process.outbox and not process.lost:
            data, fds = process.outbox[0]
            try:
                process.socket.sendmsg(
                    [data],
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(f.to_bytes(4, sys.byteorder) for f in fds))]
                    if fds
                    else [],
                    socket.MSG_NOSIGNAL,
                )
            except BlockingIOError:
                break
            except OSError:
                break  # it has died; the poll of its socket tells
            handoff.close_all(fds)
            process.outbox.popleft()
        if not process.lost:
            self._on_change(process.socket.fileno(), select.POLLIN | (select.POLLOUT if process.outbox else 0))

    def receive(self, worker: int) -> list[sidecar.FromWorker] | str:
        """Return what a worker has said, or, if it has died, how; it has then been replaced."""
        process = self._processes[worker]
        said: list[sidecar.FromWorker] = []
        while True:
            try:
                data, fds = handoff.receive(process.socket)
                handoff.close_all(fds)
                said.append(self._decoder.decode(data)[1])
            except BlockingIOError:
                return said
            except RefitdError as exc:
                how = self._end(process) if isinstance(exc, PeerLost) else f"said nonsense: {exc}"
                self.restart(worker)
                return how

    def restart(self, worker: int) -> None:
        """Kill, reap and replace a worker. When this returns the old one writes nothing any more."""
        old = self._processes[worker]
        self._end(old)
        self._quick_deaths[worker] = self._quick_deaths[worker] + 1 if time.monotonic() - old.started < _QUICK_S else 0
        self._processes[worker] = self._spawn()

    def is_failing(self, worker: int) -> bool:
        """Whether a worker has died at once, several times in a row."""
        return self._quick_deaths[worker] >= MAX_QUICK_DEATHS

    def close(self) -> None:
        """End all workers."""
        for process in self._processes:
            self._end(process)

    def _spawn(self) -> _Process:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        popen = subprocess.Popen(
            [sys.executable, "-m", "refitd.worker", str(theirs.fileno()), str(self._threads)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            # Ctrl-C at a terminal goes to the whole group; the daemon decides when workers end
            start_new_session=True,
        )
        theirs.close()
        self._on_change(ours.fileno(), select.POLLIN)
        return _Process(popen, ours, time.monotonic())

    def _end(self, process: _Process) -> str:
        if process.lost:
            return ""
        process.lost = True
        self._on_change(process.socket.fileno(), 0)
        with contextlib.suppress(ProcessLookupError):
            # a worker that closed its socket is ending by itself; let its own exit status tell why
            try:
                status = process.popen.wait(0.2) if _at_end(process.socket) else None
            except subprocess.TimeoutExpired:
                status = None
            if status is None:
                process.popen.kill()
        status = process.popen.wait()
        process.socket.close()
        for _, fds in process.outbox:
            handoff.close_all(fds)
        process.outbox.clear()
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def _at_end(sock: socket.socket) -> bool:
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _memory_file(block: bytes) -> int:
    fd = os.memfd_create("refitd:job", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        view = memoryview(block)
        while view:
            view = view[os.write(fd, view) :]
    except BaseException:
        os.close(fd)
        raise
    return fd
