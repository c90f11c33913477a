"""The arenas that each worker has mapped, and the worker of each GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from refitd.daemon.actions import Instruction, ToWorker
from refitd.protocol import sidecar


@dataclass(frozen=True, slots=True)
class _KnownArena:
    nbytes: int
    write: bool
    device: str


class WorkerArenas:
    """Maps arenas into workers. An arena in main memory is mapped into every worker at once.

    A GPU arena is mapped only into the worker of that GPU, because each process that uses a GPU takes some hundred MB
    of its memory. Other workers map it when a job between two GPUs needs it. Instructions go to `out`.
    """

    def __init__(self, workers: int, out: Callable[[Instruction], None]) -> None:
        self._workers = workers
        self._out = out
        self._known: dict[int, _KnownArena] = {}
        self._mapped: list[set[int]] = [set() for _ in range(workers)]
        self._homes: dict[str, int] = {}  # GPUs in the order of their first arenas

    def add(self, arena: int, nbytes: int, device: str, *, write: bool) -> None:
        """Map a new arena in the workers; `device` is "" for main memory."""
        self._known[arena] = _KnownArena(nbytes, write, device)
        if device and device not in self._homes:
            self._homes[device] = len(self._homes) % self._workers
        for worker in range(self._workers):
            if self._belongs(arena, worker):
                self._map(worker, arena)

    def remove(self, arena: int) -> None:
        """Unmap an arena in the workers."""
        if self._known.pop(arena, None) is None:
            return
        for worker, mapped in enumerate(self._mapped):
            mapped.discard(arena)
            self._out(ToWorker(worker, sidecar.UnmapArena(arena=arena)))

    def exchange(self, arena: int, other: int) -> list[int]:
        """Have the workers exchange two arenas; return those that have mapped only one, whose jobs would be wrong."""
        odd = []
        for worker, mapped in enumerate(self._mapped):
            if {arena, other} <= mapped:
                self._out(ToWorker(worker, sidecar.ExchangeArenas(arena=arena, other=other)))
            elif {arena, other} & mapped:
                odd.append(worker)
        return odd

    def renewed(self, worker: int) -> None:
        """Map a worker's arenas again, because its process is new."""
        self._mapped[worker].clear()
        for arena in sorted(self._known):
            if self._belongs(arena, worker):
                self._map(worker, arena)

    def need(self, worker: int, arenas: set[int]) -> None:
        """Map the arenas of a job in a worker, where they are not mapped yet, before the job is loaded."""
        for arena in sorted((arenas & self._known.keys()) - self._mapped[worker]):
            self._map(worker, arena)

    def doubt(self, worker: int, arena: int) -> None:
        """Treat an arena as not mapped: the worker was not told, or could not map it; the next job maps it again."""
        self._mapped[worker].discard(arena)

    def homes(self, arenas: set[int]) -> dict[int, int]:
        """Return arena -> worker of its GPU, for the given arenas; arenas in main memory are left out."""
        return {a: self._homes[k.device] for a in sorted(arenas) if (k := self._known.get(a)) and k.device}

    def _belongs(self, arena: int, worker: int) -> bool:
        device = self._known[arena].device
        return not device or self._homes[device] == worker

    def _map(self, worker: int, arena: int) -> None:
        known = self._known[arena]
        self._mapped[worker].add(arena)
        message = sidecar.MapArena(arena=arena, nbytes=known.nbytes, write=known.write, device=known.device)
        self._out(ToWorker(worker, message, arena=arena))
