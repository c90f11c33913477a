"""The worker process: maps arenas and runs copy jobs for one daemon, over one socket pair."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import traceback
from collections import deque
from functools import partial

from refitd.addressing.copies import ConversionList, CopyList
from refitd.buffers import handoff
from refitd.buffers.arena import MappedArena, die_with_parent
from refitd.buffers.layout import WHOLE, Written
from refitd.copy_services import Arriving, DigestMismatch, MappedCopyService, PreparedJob
from refitd.copy_services.registry import Registry, installed
from refitd.copy_services.wires import Wires
from refitd.errors import ArenaError, DeadlineExceeded, PeerLost, RefitdError
from refitd.protocol import local, sidecar
from refitd.protocol.base import Decoder, encode
from refitd.text import called
from refitd.worker.devices import Devices
from refitd.worker.exchanges import ExchangeJob, Exchanges
from refitd.worker.host_jobs import read

# The least time between two progress reports of a run; shorter runs report only their end.
PROGRESS_S = 0.01


class DaemonLink:
    """The worker's end of the socket pair. Other messages that arrive during a wait are queued in order."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder: Decoder[sidecar.ToWorker] = Decoder(sidecar.ToWorker, handoff.MAX_DATAGRAM)
        self._kept: deque[tuple[sidecar.ToWorker, tuple[int, ...]]] = deque()
        self._written: dict[int, tuple[int, Written]] = {}  # arena -> version, and its bytes that are written

    def next(self) -> tuple[sidecar.ToWorker, tuple[int, ...]]:
        """Return the next message and its descriptors, which the caller closes."""
        return self._kept.popleft() if self._kept else self._receive()

    def _receive(self) -> tuple[sidecar.ToWorker, tuple[int, ...]]:
        data, fds = handoff.receive(self._connection)
        try:
            return self._decoder.decode(data)[1], fds
        except BaseException:
            handoff.close_all(fds)
            raise

    def is_given_up(self, epoch: str) -> bool:
        """Return whether the daemon has abandoned an epoch; all messages are queued for `next`."""
        self._take_in()
        return any(isinstance(kept, sidecar.LeaveEpoch) and kept.epoch == epoch for kept, _ in self._kept)

    def take(self, wanted: sidecar.ToWorker) -> bool:
        """Return whether this message has arrived, and remove it; other messages are queued for `next`."""
        self._take_in()
        found = next((at for at, (kept, _) in enumerate(self._kept) if kept == wanted), None)
        if found is None:
            return False
        del self._kept[found]
        return True

    def _take_in(self, wait: float = 0.0) -> None:
        """Note which bytes are written, and queue all other messages; wait up to `wait` seconds for the first one."""
        self._connection.settimeout(wait)
        try:
            while True:
                message, fds = self._receive()
                self._connection.settimeout(0.0)
                if isinstance(message, local.Wrote):
                    self.wrote(message)
                else:
                    self._kept.append((message, fds))
        except (TimeoutError, BlockingIOError):
            return
        finally:
            self._connection.settimeout(None)

    def wrote(self, message: local.Wrote) -> None:
        """Note which bytes of a version are written."""
        written = self.written(message.arena, message.version)
        for begin, end in message.spans:
            written.add(begin, end)

    def written(self, arena: int, version: int) -> Written:
        """Return which bytes of a version are known to be written in an arena."""
        known = self._written.get(arena)
        if known is None or known[0] != version:
            known = self._written[arena] = version, Written()
        return known[1]

    def await_message(self, timeout: float) -> None:
        """Return once a message has arrived or `timeout` seconds have passed; keep it for `next`."""
        self._take_in(timeout)

    def say(self, message: sidecar.FromWorker) -> None:
        """Send a message."""
        handoff.send(self._connection, encode(0, message))


class Publications(Arriving):
    """The versions that clients write while a run copies them, as far as the daemon tells."""

    def __init__(self, run: sidecar.RunJob, daemon: DaemonLink) -> None:
        self._daemon, self._timeout_s = daemon, run.timeout_s
        self._until = time.monotonic() + run.timeout_s
        self._of = {one.arena: one for one in run.unwritten}
        self.arenas = frozenset(self._of)

    def holds(self, arena: int, begin: int, end: int) -> bool:
        """See Arriving.holds."""
        return self._daemon.written(arena, self._of[arena].version).holds(begin, end)

    def wait(self, arena: int, begin: int, end: int) -> None:
        """See Arriving.wait."""
        while not self.holds(arena, begin, end):
            left = self._until - time.monotonic()
            if left <= 0:
                one = self._of[arena]
                raise DeadlineExceeded(
                    f"{called(one.member)} has not written bytes {begin} to {end} of version {one.version} after "
                    f"{self._timeout_s:.1f} s; look at its trainer, raise deadlines.stage_s, or swap once it has "
                    "published"
                )
            self._daemon.await_message(left)

    def wait_for_all(self) -> None:
        """Return once the versions are complete."""
        for arena in sorted(self.arenas):
            self.wait(arena, 0, WHOLE)


class Worker:
    """Owns one worker's copy services and handles the daemon's messages, one at a time."""

    def __init__(self, connection: socket.socket, registry: Registry, door: socket.socket | None = None) -> None:
        """Workers of other nodes connect to `door`."""
        self._daemon = DaemonLink(connection)
        self._registry = registry
        make = registry.find("shm").mapped
        assert make is not None
        self._service: MappedCopyService = make()
        self._arenas: dict[int, MappedArena] = {}
        self._devices = Devices(registry, self._arenas)
        wires = Wires(door, self._daemon.is_given_up)
        self._exchanges = Exchanges(registry, self._arenas, wires, self._devices)
        self._jobs: dict[int, PreparedJob | str] = {}  # a str: why the job could not be prepared

    def serve(self) -> None:
        """Run until the daemon closes its end."""
        self._daemon.say(sidecar.WorkerReady(pid=os.getpid(), services=(self._service.name,)))
        while True:
            message, fds = self._daemon.next()
            try:
                self._handle(message, fds)
            finally:
                if fds:
                    handoff.close_all(fds)

    def _handle(self, message: sidecar.ToWorker, fds: tuple[int, ...]) -> None:
        match message:
            case sidecar.MapArena(arena, nbytes, write, ""):
                self._arenas[arena] = MappedArena(_only(fds), nbytes, write=write)
            case sidecar.MapArena(arena, nbytes, write, device):
                self._devices.map(arena, _only(fds), nbytes, device, write=write)
            case local.FreeArena(arena):
                self._exchanges.let_go(arena)
                if (mine := self._arenas.pop(arena, None)) is not None:
                    mine.unpin()
                self._devices.unmap(arena)
            case sidecar.ExchangeArenas(arena, other):
                # addresses do not change, so prepared jobs stay valid; after a failure this worker ends, and the next
                # worker maps the arenas again
                self._exchanges.let_go(arena, other)
                if arena in self._arenas:
                    self._arenas[arena].exchange(self._arenas[other])
                else:
                    self._devices.exchange(arena, other)
            case sidecar.JoinEpoch():
                self._join(message)
            case sidecar.LeaveEpoch(epoch):
                self._exchanges.leave(epoch)
            case sidecar.WarmUp(service):
                self._exchanges.warm_up(service)
            case sidecar.LoadJob(job, nbytes, epoch, converts):
                self._jobs[job] = self._load(_only(fds), nbytes, epoch, converts)
            case sidecar.DropBases(run):
                self._daemon.say(sidecar.DropBases(run=run))  # the run has ended, so the bases are unused
            case sidecar.DropJob(job):
                self._jobs.pop(job, None)
            case sidecar.RunJob():
                self._run(message)
            case local.Wrote():
                self._daemon.wrote(message)
            case sidecar.ReadSpans():
                self._daemon.say(read(message, {**self._arenas, **self._devices.arenas}))

    def _join(self, message: sidecar.JoinEpoch) -> None:
        try:
            self._exchanges.join(message)
        except RefitdError as exc:
            reason = str(exc)
        else:
            self._daemon.say(sidecar.EpochJoined(epoch=message.epoch))
            return
        # a failed store, its error and their frames form a reference cycle that keeps sockets open
        gc.collect()
        self._daemon.say(sidecar.EpochJoined(epoch=message.epoch, reason=reason))

    def _load(self, fd: int, nbytes: int, epoch: str | None, converts: bool) -> PreparedJob | str:
        try:
            data = os.pread(fd, nbytes, 0)
            if converts:
                return self._devices.prepare_conversions(ConversionList.from_bytes(data))
            if epoch is not None:
                return self._exchanges.prepare(epoch, data)
            return self._devices.prepare(CopyList.from_bytes(data), self._service)
        except (RefitdError, ValueError) as exc:
            return str(exc)

    def _run(self, message: sidecar.RunJob) -> None:
        run, prepared = message.run, self._jobs.get(message.job, f"job {message.job} is not loaded")
        if isinstance(prepared, str):
            self._daemon.say(sidecar.RunDone(run=run, reason=prepared))
            return

        told = time.monotonic()

        def progress(bytes_done: int) -> None:
            nonlocal told
            if (now := time.monotonic()) >= told + PROGRESS_S:
                told = now
                self._daemon.say(sidecar.RunProgress(run=run, bytes_done=bytes_done))

        try:
            if isinstance(prepared, ExchangeJob):
                prepared.use(
                    message.bases,
                    ends_comparing=partial(self._ends_comparing, run),
                    on_wrong_base=partial(self._daemon.say, sidecar.BaseWrong(run=run)),
                )
            arriving = Publications(message, self._daemon) if message.unwritten else None
            if not prepared.follow(arriving) and arriving is not None:
                arriving.wait_for_all()
            result = prepared.run(verify=message.verify, on_progress=progress, timeout=message.timeout_s or None)
        except DigestMismatch as exc:
            copy = exc.copy if exc.copy >= 0 else None
            self._daemon.say(sidecar.RunDone(run, reason=str(exc), copy=copy, differs=True))
        except RefitdError as exc:
            self._daemon.say(sidecar.RunDone(run=run, reason=str(exc)))
        else:
            self._daemon.say(
                sidecar.RunDone(
                    run=run,
                    copies=result.copies,
                    bytes=result.bytes,
                    seconds=result.seconds,
                    staging_bytes=result.staging_bytes,
                    crossed_bytes=result.crossed_bytes,
                    delta_bytes=result.delta_bytes,
                    changed_bytes=result.changed_bytes,
                    steps=tuple(
                        sidecar.StepTimes(each.kind, each.began_s, each.ended_s, each.busy_s) for each in result.steps
                    ),
                    paths=result.paths,
                )
            )

    def _ends_comparing(self, run: int) -> bool:
        """Return whether the daemon asks for the memory of this run's bases; if so, confirm that it is unused."""
        is_asked = self._daemon.take(sidecar.DropBases(run=run))
        if is_asked:
            self._daemon.say(sidecar.DropBases(run=run))
        return is_asked


def _only(fds: tuple[int, ...]) -> int:
    if len(fds) != 1:
        raise PeerLost(f"the daemon sent {len(fds)} descriptors where one belongs; worker and daemon differ")
    return fds[0]


def main() -> int:
    """Run as `python -m refitd.worker FD DOOR`: this end of the daemon's socket pair, and a listening socket."""
    die_with_parent()
    connection, *door = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
    worker = Worker(connection, installed(), *door)
    try:
        worker.serve()
    except PeerLost:
        return 0  # the daemon has ended or closed its end: the normal end of a worker
    except (MemoryError, ArenaError):
        traceback.print_exc()
        return sidecar.NO_MEMORY_STATUS  # this worker's memory is freed before the next one starts
    return 0
