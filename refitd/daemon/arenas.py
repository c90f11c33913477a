"""The arenas of one node: made where there is room, mapped by workers, handed to whom they belong, closed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

from refitd.daemon.actions import ArenasMade, ArenasRefused, CloseArena, Instruction, Log, MakeArenas, WriteArena
from refitd.daemon.jobs import JobTable
from refitd.daemon.members import Arena
from refitd.daemon.retained import RetainedTargets
from refitd.daemon.worker_arenas import WorkerArenas
from refitd.errors import ArenaError, RefitdError, RefusedError
from refitd.protocol.reports import GpuStatus


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that waits for arenas."""

    session: int
    request: int
    then: Callable[[tuple[int, ...]], None]
    wanted: tuple[tuple[int, str], ...]
    device: str
    within_s: float


class LocalArenas(dict[int, Arena]):
    """The arenas by id. Instructions go to `out`; `fail` tells a client that its request cannot be met."""

    def __init__(
        self,
        node: str,
        max_bytes: int,
        sessions: Container[int],
        retained: RetainedTargets,
        jobs: JobTable,
        maps: WorkerArenas,
        out: Callable[[Instruction], None],
        fail: Callable[[int, int, RefitdError], None],
    ) -> None:
        super().__init__()
        self._node = node
        self._max_bytes = max_bytes
        self._sessions = sessions
        self._retained = retained
        self._jobs = jobs
        self._maps = maps
        self._out = out
        self._fail = fail
        self._asked: dict[int, _Asked] = {}  # by ticket
        self._tickets = 0

    # --- made ---------------------------------------------------------------------------------------------

    def ask(
        self,
        session: int,
        request: int,
        wanted: tuple[tuple[int, str], ...],
        then: Callable[[tuple[int, ...]], None],
        device: str = "",
        within_s: float = 0.0,
    ) -> None:
        """Have arenas made of these (bytes, label), on a GPU if `device` names one; `then` gets their ids.

        They are refused unless they are there in `within_s` seconds (0: the configured time).

        Raises:
            ArenaError: the node's limit leaves no room, even without what is kept for engines that have died.
        """
        asked = [(nbytes, waiting.device) for waiting in self._asked.values() for nbytes, _ in waiting.wanted]
        used = sum(arena.nbytes for arena in self.values()) + sum(nbytes for nbytes, _ in asked)
        more = sum(nbytes for nbytes, _ in wanted)
        kept = sum(self[arena].nbytes for arena in self._retained.arenas())
        if more > 0 and self._max_bytes < used + more <= self._max_bytes + kept:
            self._free_retained()
            used -= kept
        if more <= 0 or used + more > self._max_bytes:
            raise ArenaError(
                f"{more} bytes of arenas asked for, {max(0, self._max_bytes - used)} are available on node "
                f"{self._node}: {used} are in use and the limit is {self._max_bytes} (node.max_arena_bytes); "
                "raise it, register a smaller shard here, lower `slots`, or close registrations"
            )
        self._tickets += 1
        self._asked[self._tickets] = _Asked(session, request, then, wanted, device, within_s)
        held = tuple(0 if arena.device else arena.nbytes for arena in self.values())
        held += tuple(0 if gpu else nbytes for nbytes, gpu in asked)
        self._out(MakeArenas(self._tickets, wanted, held, device, within_s))

    def made(self, event: ArenasMade) -> None:
        """Give arenas to whoever asked for them."""
        waiting = self._asked.pop(event.ticket)
        if waiting.session and waiting.session not in self._sessions:
            for arena in event.arenas:  # the client died while they were being made
                self._out(CloseArena(arena))
            return
        try:
            waiting.then(event.arenas)
        except RefitdError as exc:  # it has taken none of them
            for arena in event.arenas:
                self._out(CloseArena(arena))
            self._fail(waiting.session, waiting.request, exc)

    def refused(self, event: ArenasRefused) -> None:
        """They cannot be made, unless what is kept for engines that have died is as much as is lacking."""
        waiting = self._asked.pop(event.ticket)
        short = event.error.short if isinstance(event.error, ArenaError) else 0
        kept = (self[arena] for arena in self._retained.arenas())
        if not 0 < short <= sum(arena.nbytes for arena in kept if arena.device == waiting.device):
            self._fail(waiting.session, waiting.request, event.error)
            return
        self._free_retained()
        try:
            w = waiting
            self.ask(w.session, w.request, w.wanted, w.then, w.device, w.within_s)
        except RefitdError as exc:
            self._fail(waiting.session, waiting.request, exc)

    def waiting(self, session: int) -> int:
        """Return how many requests of a session wait for arenas."""
        return sum(asked.session == session for asked in self._asked.values())

    def make_constants(self, data: bytes, label: str, then: Callable[[int], None]) -> None:
        """Put what plans fill paddings with into an arena of the daemon's own, for the workers to read."""

        def made(arenas: tuple[int, ...]) -> None:
            self.take(arenas[0], len(data), label, None, write=False, workers_write=False)
            self._out(WriteArena(arenas[0], data))
            then(arenas[0])

        self.ask(0, 0, ((len(data), label),), made)

    # --- held ---------------------------------------------------------------------------------------------

    def take(
        self,
        arena: int,
        nbytes: int,
        label: str,
        session: int | None,
        *,
        write: bool,
        workers_write: bool,
        device: str = "",
    ) -> None:
        """Keep an arena that has been made, and have the workers map it; `write` is its client's."""
        self[arena] = Arena(arena, nbytes, label, session, write, device)
        self._maps.add(arena, nbytes, device, write=workers_write)

    def may_fetch(self, session: int, arena: int, write: bool) -> Arena:
        """Return the arena whose descriptor this session may have.

        Raises:
            RefusedError: it is not the session's, or only for reading.
        """
        found = self.get(arena)
        if found is None or found.session != session:
            raise RefusedError(f"arena {arena} is not one of this session's")
        if write and not found.write:
            raise RefusedError(f"arena {arena} ({found.label}) is handed out for reading only")
        return found

    def gpus(self) -> Iterator[GpuStatus]:
        """Yield what lies on each GPU."""
        for device in sorted({arena.device for arena in self.values()} - {""}):
            sizes = [arena.nbytes for arena in self.values() if arena.device == device]
            yield GpuStatus(device=device, arenas=len(sizes), arena_bytes=sum(sizes))

    # --- given back ---------------------------------------------------------------------------------------

    def free(self, arenas: set[int]) -> None:
        """Close those of these that there are."""
        arenas = arenas & self.keys()
        self._jobs.drop_arenas(arenas)
        for arena in sorted(arenas):
            self._maps.remove(arena)
            del self[arena]
            self._out(CloseArena(arena))

    def retain(self, arena: int) -> None:
        """Keep the arena of an engine that has died: it is nobody's until that comes back."""
        self[arena].session = None
        self._out(Log("kept", {"arena": arena, "label": self[arena].label, "bytes": self[arena].nbytes}))

    def expire(self, now: float) -> None:
        """Close what has been kept for long enough."""
        self.free(set(self._retained.expire(now)))

    def _free_retained(self) -> None:
        """Give up what is kept for engines that have died."""
        self.free(set(self._retained.clear()))
