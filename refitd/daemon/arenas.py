"""The arenas of one node: allocated within its limit, mapped by workers, handed to their owners, closed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from refitd.daemon.actions import ArenasMade, ArenasRefused, CloseArena, Instruction, MakeArenas, SwitchArenas
from refitd.daemon.jobs import JobTable
from refitd.daemon.members import Arena
from refitd.daemon.pending import MemberArenas, WantedArenas
from refitd.daemon.retained import RetainedTargets
from refitd.daemon.worker_arenas import WorkerArenas
from refitd.errors import ArenaError, RefitdError, RefusedError
from refitd.events import Log
from refitd.protocol.reports import GpuStatus


class LocalArenas(dict[int, Arena]):
    """The arenas by id. Instructions go to `out`.

    `given(wanted, arenas)` takes over allocated arenas, or raises RefitdError and takes none.
    `fail(wanted, error)` tells the requester that its arenas cannot be made.
    `ask_first(wanted, purpose)` asks the coordinator about a rank whose arenas need the memory of retained targets.
    """

    def __init__(
        self,
        node: str,
        max_bytes: int,
        sessions: Container[int],
        retained: RetainedTargets,
        jobs: JobTable,
        maps: WorkerArenas,
        out: Callable[[Instruction], None],
        given: Callable[[WantedArenas, tuple[int, ...]], None],
        fail: Callable[[WantedArenas, RefitdError], None],
        ask_first: Callable[[WantedArenas, MemberArenas], None],
    ) -> None:
        super().__init__()
        self._node = node
        self._max_bytes = max_bytes
        self._sessions = sessions
        self._retained = retained
        self._jobs = jobs
        self._maps = maps
        self._out = out
        self._given = given
        self._fail = fail
        self._ask_first = ask_first
        self._asked: dict[int, WantedArenas] = {}  # by ticket
        self._tickets = 0
        self._frees: set[int] = set()  # tickets for which retained targets are freed once the arenas are made

    # --- made ---------------------------------------------------------------------------------------------

    def ask(self, wanted: WantedArenas) -> None:
        """Request arenas; they are refused if they are not made within `wanted.within_s` seconds.

        Raises:
            ArenaError: the node's limit leaves no room, even after freeing all retained targets.
        """
        asked = [(nbytes, waiting.device) for waiting in self._asked.values() for nbytes, _ in waiting.wanted]
        used = self._used()
        more = sum(nbytes for nbytes, _ in wanted.wanted)
        kept = sum(self[arena].nbytes for arena in self._retained.arenas())
        frees = more > 0 and self._max_bytes < used + more <= self._max_bytes + kept
        if frees and self._is_question(wanted):
            return
        self.check_room(more, kept if frees else 0)
        self._tickets += 1
        self._asked[self._tickets] = wanted
        if frees:
            self._frees.add(self._tickets)
        held = tuple(0 if arena.device else arena.nbytes for arena in self.values())
        held += tuple(0 if gpu else nbytes for nbytes, gpu in asked)
        self._out(MakeArenas(self._tickets, wanted.wanted, held, wanted.device, wanted.within_s))

    def check_room(self, more: int, freed: int = 0) -> None:
        """Check that `more` bytes of arenas are within the node's limit, once `freed` bytes have been freed.

        Raises:
            ArenaError: they are not.
        """
        used = self._used() - freed
        if more <= 0 or used + more > self._max_bytes:
            raise ArenaError(
                f"{more} bytes of arenas asked for, {max(0, self._max_bytes - used)} are available on node "
                f"{self._node}: {used} are in use and the limit is {self._max_bytes} (node.max_arena_bytes); "
                "raise it, register a smaller shard here, lower `slots`, or close registrations"
            )

    def _used(self) -> int:
        asked = sum(nbytes for waiting in self._asked.values() for nbytes, _ in waiting.wanted)
        return asked + sum(arena.nbytes for arena in self.values())

    def _is_question(self, wanted: WantedArenas) -> bool:
        """Ask the coordinator before freeing retained targets for a rank it may refuse; return whether it was asked."""
        purpose = wanted.purpose
        if not isinstance(purpose, MemberArenas) or purpose.is_admitted:
            return False
        self._ask_first(wanted, purpose)
        return True

    def made(self, event: ArenasMade) -> None:
        """Give the arenas to their requester."""
        wanted = self._asked.pop(event.ticket)
        if event.ticket in self._frees:
            self._frees.discard(event.ticket)
            self._free_retained()  # only now: a refused request frees nothing
        if wanted.session and wanted.session not in self._sessions:
            for arena in event.arenas:  # the client died while they were being made
                self._out(CloseArena(arena))
            return
        try:
            self._given(wanted, event.arenas)
        except RefitdError as exc:
            for arena in event.arenas:
                self._out(CloseArena(arena))
            self._fail(wanted, exc)

    def refused(self, event: ArenasRefused) -> None:
        """Retry after freeing the retained targets if they make up for the missing bytes; else fail the request."""
        wanted = self._asked.pop(event.ticket)
        self._frees.discard(event.ticket)
        short = event.error.short if isinstance(event.error, ArenaError) else 0
        kept = (self[arena] for arena in self._retained.arenas())
        if not 0 < short <= sum(arena.nbytes for arena in kept if arena.device == wanted.device):
            self._fail(wanted, event.error)
            return
        if self._is_question(wanted):
            return
        self._free_retained()
        try:
            self.ask(wanted)
        except RefitdError as exc:
            self._fail(wanted, exc)

    @property
    def asked(self) -> int:
        """How many requests wait for arenas."""
        return len(self._asked)

    def waiting(self, session: int) -> int:
        """Return how many requests of a session are waiting for arenas."""
        return sum(asked.session == session for asked in self._asked.values())

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
        """Record a new arena and map it in the workers; `write` says whether its client may write."""
        self[arena] = Arena(arena, nbytes, label, session, write, device)
        self._maps.add(arena, nbytes, device, write=workers_write)

    def rename(self, arena: int, label: str, *, write: bool, workers_write: bool) -> None:
        """Record the new purpose of an arena that a client has given back; arguments as for `take`."""
        known = self[arena]
        self._maps.remove(arena)
        self.take(arena, known.nbytes, label, known.session, write=write, workers_write=workers_write)

    def may_fetch(self, session: int, arena: int, write: bool) -> Arena:
        """Return the arena whose descriptor this session may have.

        Raises:
            RefusedError: it belongs to another session, or is read-only.
        """
        found = self.get(arena)
        if found is None or found.session != session:
            raise RefusedError(f"arena {arena} is not one of this session's")
        if write and not found.write:
            raise RefusedError(f"arena {arena} ({found.label}) is handed out for reading only")
        return found

    def exchange(self, arena: int, other: int) -> list[int]:
        """Exchange what two arenas of one size hold, here and in the workers; ids, owners and labels stay.

        Return the workers that must be replaced: they know only one of the two.
        """
        self._out(SwitchArenas(arena, other))
        return self._maps.exchange(arena, other)

    def gpus(self) -> Iterator[GpuStatus]:
        """Yield the arena count and bytes of each GPU."""
        for device in sorted({arena.device for arena in self.values()} - {""}):
            sizes = [arena.nbytes for arena in self.values() if arena.device == device]
            yield GpuStatus(device=device, arenas=len(sizes), arena_bytes=sum(sizes))

    # --- given back ---------------------------------------------------------------------------------------

    def free(self, arenas: set[int]) -> None:
        """Close the given arenas; ignore unknown ids."""
        arenas = arenas & self.keys()
        self._jobs.drop_arenas(arenas)
        for arena in sorted(arenas):
            self._maps.remove(arena)
            del self[arena]
            self._out(CloseArena(arena))

    def retain(self, arena: int) -> None:
        """Keep a dead engine's arena; no session owns it until that engine returns."""
        self[arena].session = None
        self._out(Log("kept", {"arena": arena, "label": self[arena].label, "bytes": self[arena].nbytes}))

    def expire(self, now: float) -> None:
        """Close the retained arenas whose time has expired."""
        self.free(set(self._retained.expire(now)))

    def _free_retained(self) -> None:
        """Close all retained arenas."""
        self.free(set(self._retained.clear()))
