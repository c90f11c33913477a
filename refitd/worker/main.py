"""The worker sidecar: maps arenas, performs copy jobs, obeys one daemon over one socket pair."""

from __future__ import annotations

import os
import socket
import sys

from refitd.buffers import handoff
from refitd.buffers.arena import MappedArena, die_with_parent
from refitd.copy_services.base import DigestMismatch, MappedCopyService, PreparedJob
from refitd.copy_services.shm import SharedMemoryService
from refitd.errors import PeerLost, RefitdError
from refitd.execute.copies import CopyList
from refitd.protocol import sidecar
from refitd.protocol.codec import Decoder, encode


class Worker:
    """Holds the CopyServices of one device and performs what the daemon says, one message at a time."""

    def __init__(self, daemon: socket.socket, service: MappedCopyService) -> None:
        self._daemon = daemon
        self._service = service
        self._arenas: dict[int, MappedArena] = {}
        self._jobs: dict[int, PreparedJob | str] = {}  # a job that could not be prepared keeps its reason
        self._decoder: Decoder[sidecar.ToWorker] = Decoder(sidecar.ToWorker, handoff.MAX_DATAGRAM)

    def serve(self) -> None:
        """Work until the daemon closes its end."""
        self._say(sidecar.WorkerReady(pid=os.getpid(), services=(self._service.name,)))
        while True:
            data, fds = handoff.receive(self._daemon)
            try:
                self._handle(self._decoder.decode(data)[1], fds)
            finally:
                handoff.close_all(fds)

    def _handle(self, message: sidecar.ToWorker, fds: tuple[int, ...]) -> None:
        match message:
            case sidecar.MapArena(arena, nbytes, write):
                self._arenas[arena] = MappedArena(_only(fds), nbytes, write=write)
            case sidecar.UnmapArena(arena):
                self._arenas.pop(arena, None)
            case sidecar.LoadJob(job, nbytes):
                self._jobs[job] = self._load(_only(fds), nbytes)
            case sidecar.DropJob(job):
                self._jobs.pop(job, None)
            case sidecar.RunJob(job, run, verify):
                self._run(job, run, verify)

    def _load(self, fd: int, nbytes: int) -> PreparedJob | str:
        try:
            data = os.pread(fd, nbytes, 0)
            return self._service.prepare(CopyList.from_bytes(data), self._arenas)
        except (RefitdError, ValueError) as exc:
            return str(exc)

    def _run(self, job: int, run: int, verify: bool) -> None:
        prepared = self._jobs.get(job, f"job {job} is not loaded")
        if isinstance(prepared, str):
            self._say(sidecar.RunFailed(run=run, reason=prepared))
            return

        def progress(bytes_done: int) -> None:
            self._say(sidecar.RunProgress(run=run, bytes_done=bytes_done))

        try:
            result = prepared.run(verify=verify, on_progress=progress)
        except DigestMismatch as exc:
            self._say(sidecar.RunFailed(run=run, reason=str(exc), copy=exc.copy))
        except RefitdError as exc:
            self._say(sidecar.RunFailed(run=run, reason=str(exc)))
        else:
            self._say(sidecar.RunDone(run=run, copies=result.copies, bytes=result.bytes, seconds=result.seconds))

    def _say(self, message: sidecar.FromWorker) -> None:
        handoff.send(self._daemon, encode(0, message))


def _only(fds: tuple[int, ...]) -> int:
    if len(fds) != 1:
        raise PeerLost(f"the daemon sent {len(fds)} descriptors where one belongs; worker and daemon differ")
    return fds[0]


def main() -> int:
    """Run as `python -m refitd.worker FD THREADS`; FD is this end of the daemon's socket pair."""
    die_with_parent()
    fd, threads = int(sys.argv[1]), int(sys.argv[2])
    worker = Worker(socket.socket(fileno=fd), SharedMemoryService(threads))
    try:
        worker.serve()
    except PeerLost:
        return 0  # the daemon is gone or has closed its end: that is how workers end
    return 0
