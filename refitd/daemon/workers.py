"""The daemon's worker processes: start them, send to them without blocking, replace dead ones."""

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from refitd.buffers import handoff
from refitd.daemon.coordinator import pause_s
from refitd.errors import PeerLost, RefitdError
from refitd.protocol import sidecar
from refitd.protocol.base import Message
from refitd.protocol.codec import Decoder, encode

# If a worker dies this often in a row, each time this soon after its start, it is restarted after a pause.
MAX_QUICK_DEATHS = 5
_QUICK_S = 2.0


@dataclass(slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    socket: socket.socket
    started: float
    outbox: deque[tuple[bytes, tuple[int, ...]]] = field(default_factory=deque)
    awaits_room: bool = False  # polling reports when its socket has room for the outbox
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Kit:
    """What a worker starts with: variables for its libraries, and the CPUs that it may use, if not all."""

    variables: Mapping[str, str] = field(default_factory=dict)
    cpus: Collection[int] = ()


@contextlib.contextmanager
def _on(cpus: Collection[int]) -> Iterator[None]:
    """Have processes that this thread starts use only these CPUs, from their first instruction; () changes nothing."""
    before = os.sched_getaffinity(0)
    try:
        if cpus:
            with contextlib.suppress(OSError):  # the kernel or a control group does not allow it
                os.sched_setaffinity(0, cpus)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


class Workers:
    """A fixed number of worker processes, each replaced when it dies.

    Attributes:
        fds: descriptor -> worker.
        down: workers that are down -> time of their next start.
    """

    def __init__(self, kits: Sequence[Kit], on_change: Callable[[int, int], None]) -> None:
        """Start a worker for each kit; `on_change(fd, events)` requests polling of a descriptor (0: stop polling)."""
        self._on_change, self._kits = on_change, kits
        count = len(kits)
        self._decoder: Decoder[sidecar.FromWorker] = Decoder(sidecar.FromWorker, handoff.MAX_DATAGRAM)
        self._quick_deaths = [0] * count
        self._how = [""] * count  # how the last process of each worker ended
        self.down: dict[int, float] = {}
        self.fds: dict[int, int] = {}
        self._has_worked = False
        self._processes: list[_Process] = [self._spawn(worker) for worker in range(count)]

    def send(self, worker: int, message: Message, fd: int | None = None, block: bytes | None = None) -> None:
        """Queue a message with a duplicate of `fd`, or with `block` in a memory file.

        Raises:
            OSError: no descriptor or no memory is left; the message was not queued.
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
        """Send queued messages until the socket is full; the rest is sent when polling reports room."""
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
                break  # the worker has died; polling its socket reports that
            if fds:
                handoff.close_all(fds)
            process.outbox.popleft()
        if not process.lost and bool(process.outbox) != process.awaits_room:
            process.awaits_room = bool(process.outbox)
            self._on_change(process.socket.fileno(), select.POLLIN | (select.POLLOUT if process.outbox else 0))

    def why_down(self, worker: int) -> str:
        """Return the reason why a worker in `down` is down."""
        left = max(0.0, self.down[worker] - time.monotonic())
        return (
            f"it {self._how[worker]}, for the {self._quick_deaths[worker]}th time as soon as it had started; the next "
            f"one is started in {left:.0f} s, see the daemon's log"
        )

    def problems(self) -> tuple[str, ...]:
        """Return one line of status text for each worker that is down."""
        return tuple(
            f"worker {worker} cannot be kept alive: it {self._how[worker]}, {self._quick_deaths[worker]} times as soon "
            "as it had started; swaps that need it are refused until the next one, which is started after a pause"
            for worker in sorted(self.down)
        )

    def start_due(self, now: float) -> list[int]:
        """Start the workers whose pause is over; return the ones that started."""
        due = [worker for worker, at in self.down.items() if now >= at]
        return [worker for worker in due if self._replace(worker)]

    def receive(self, worker: int) -> list[sidecar.FromWorker] | str:
        """Return a worker's messages; if it died, replace it and return a text on how it died."""
        process = self._processes[worker]
        said: list[sidecar.FromWorker] = []
        while not process.lost:
            try:
                data, fds = handoff.receive(process.socket)
                if fds:
                    handoff.close_all(fds)
                said.append(self._decoder.decode(data)[1])
                self._has_worked = True
            except BlockingIOError:
                return said
            except RefitdError as exc:
                if said and isinstance(exc, PeerLost):
                    return said  # the socket stays readable: its end is reported next time
                how = self._end(process) if isinstance(exc, PeerLost) else f"said nonsense: {exc}"
                self._end(process)
                self._died(worker, how, time.monotonic() - process.started < _QUICK_S)
                return how
        return said

    def restart(self, worker: int) -> None:
        """Kill, reap and replace a worker. Once this returns, the old process no longer writes."""
        # not counted as a quick death, because the daemon killed it
        if worker not in self.down:
            self._end(self._processes[worker])
            self._replace(worker)

    def _died(self, worker: int, how: str, quick: bool) -> None:
        self._how[worker] = how
        self._quick_deaths[worker] = self._quick_deaths[worker] + 1 if quick else 0
        wait_s = pause_s(self._quick_deaths[worker] - MAX_QUICK_DEATHS + 1)
        if wait_s:
            self.down[worker] = time.monotonic() + wait_s
        else:
            self._replace(worker)

    def _replace(self, worker: int) -> bool:
        """Start a worker; if no process can be started, retry later."""
        try:
            self._processes[worker] = self._spawn(worker)
        except OSError as exc:
            self._how[worker] = f"could not be started: {exc.strerror}"
            self._quick_deaths[worker] += 1
            self.down[worker] = time.monotonic() + max(1.0, pause_s(self._quick_deaths[worker]))
            return False
        self.down.pop(worker, None)
        return True

    def is_failing(self, worker: int) -> bool:
        """Whether no worker can run here: none has ever sent a message, and this one died early several times."""
        return not self._has_worked and self._quick_deaths[worker] >= MAX_QUICK_DEATHS

    def close(self) -> None:
        """End all workers."""
        for process in self._processes:
            self._end(process)

    def _spawn(self, worker: int) -> _Process:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with _on(self._kits[worker].cpus):
                popen = subprocess.Popen(
                    [sys.executable, "-m", "refitd.worker", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **self._kits[worker].variables},
                    # Ctrl-C reaches the whole process group, but the daemon decides when workers end
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.fds[ours.fileno()] = worker
        self._on_change(ours.fileno(), select.POLLIN)
        return _Process(popen, ours, time.monotonic())

    def _end(self, process: _Process) -> str:
        if process.lost:
            return ""
        process.lost = True
        del self.fds[process.socket.fileno()]
        self._on_change(process.socket.fileno(), 0)
        with contextlib.suppress(ProcessLookupError):
            # a worker that closed its socket is already ending: wait for its own exit status
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
        if status == sidecar.NO_MEMORY_STATUS:
            return "got no memory (the machine, a cgroup, RLIMIT_AS or vm.max_map_count; see the daemon's log)"
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
