"""A client's line to its daemon: when that has ended, connect to the next one and register everything again."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec import structs

from refitd.client.arena_files import ArenaFiles
from refitd.client.connection import Connection
from refitd.client.reentrant_lock import check_process
from refitd.errors import ArenaError, Orphaned, PeerLost, RefitdError, RefusedError, TransportError
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.protocol.reports import HistoryReport, SwapProgress
from refitd.protocol.shards import Place

R = TypeVar("R", bound=Message)
T = TypeVar("T")

_log = logging.getLogger("refitd.client")

# Between two attempts to reach a daemon that is away.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0

# How long a call that has more time, or no timeout, waits for a daemon that is away.
LONGEST_WAIT_S = 60.0

# How long a daemon that is back may take for an answer, and for one registration.
ANSWER_S, REGISTER_S = 10.0, 60.0

LOOK_S = 0.01  # between two looks whether the daemon is back
RETRY_S = 0.2  # between two tries while the daemon has no coordinator

# Gives an arena back that this process shows at (address, bytes); None: a new one must be made.
Give = Callable[[int, int], int | None]


def _return(line: weakref.ref[Line]) -> None:
    """Wait for the next daemon: the body of a thread. A client that nobody refers to any more waits for nothing."""
    pause = FIRST_PAUSE_S
    while (found := line()) is not None and not found.tries():
        del found
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def renumbered(places: tuple[Place, ...], numbers: Mapping[int, int]) -> tuple[Place, ...]:
    """Return places with the new numbers of their arenas; 0, which no arena has, for those that have none."""
    return tuple(structs.replace(place, arena=numbers.get(place.arena, 0)) for place in places)


class Line:
    """A client's connection; with `reconnect`, one after the other.

    Members that are registered over it know the connection that they are registered over, and take part in
    `again(connection, give)`, which registers all of them over a new one. It is called again, over another connection,
    after a TransportError.
    """

    def __init__(self, dial: Callable[[float], Connection], timeout: float, *, reconnect: bool) -> None:
        """Connect within `timeout` seconds; raises as Connection does."""
        self._dial = dial
        self._reconnects = reconnect
        self.files = ArenaFiles()
        self.current = self._dialled(timeout)
        self._closed = False
        self._away_since: float | None = None
        self._reason = ""  # why the daemon cannot be reached now
        self._orphaned: Orphaned | None = None  # why this client can do no more
        self._again: Callable[[Connection, Give], None] = lambda connection, give: None

    def start(self, again: Callable[[Connection, Give], None]) -> None:
        """Watch the connection, and call `again` over each new one."""
        self._again = again
        self._watch()

    # --- calls --------------------------------------------------------------------------------------------

    def steady(self, timeout: float) -> Connection:
        """Return the present connection; wait at most `timeout` seconds for a daemon that is away.

        Raises:
            PeerLost: it is not back by then; says since when, and what is the matter.
            Orphaned: a process that this one serves for has ended.
        """
        deadline = time.monotonic() + min(timeout, LONGEST_WAIT_S)
        check_process(self.current.pid)
        while self._is_away():
            if time.monotonic() >= deadline:
                ago = time.monotonic() - (self._away_since or time.monotonic())
                raise PeerLost(
                    f"the refitd daemon in {self.current.directory} ended {ago:.1f} s ago and is not back: "
                    f"{self._reason or 'it has just ended'}; start it if it does not run, this client goes on trying"
                )
            time.sleep(LOOK_S)  # no lock: a signal handler may have interrupted whoever would end this
        self._check_orphaned()
        return self.current

    def request(
        self,
        message: Message,
        reply: type[R],
        timeout: float,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> R:
        """Do as `Connection.request`; a daemon that is away is waited for. A request that it dies over is not repeated.

        Raises:
            PeerLost: it is not back in time, or has ended before it answered.
            RefitdError: as `Connection.request`.
        """
        deadline = time.monotonic() + timeout
        connection = self.steady(timeout)
        try:
            return connection.request(message, reply, max(0.0, deadline - time.monotonic()), on_progress)
        except PeerLost:
            self._check_orphaned()
            raise

    def lasting(self, timeout: float, do: Callable[[Connection, float], T]) -> T:
        """Return what `do(connection, seconds left)` returns; repeat it if the daemon ends meanwhile and is back.

        It is repeated, too, while the daemon has no coordinator, which says so and does nothing.

        Raises:
            PeerLost: the daemon is not back in time.
            TransportError: no coordinator is back in time.
        """
        deadline = time.monotonic() + timeout
        while True:
            connection = self.steady(max(0.0, deadline - time.monotonic()))
            try:
                return do(connection, max(0.0, deadline - time.monotonic()))
            except PeerLost:
                self._check_orphaned()
                if not connection.is_awaited or time.monotonic() >= deadline:
                    raise
            except TransportError as exc:
                if exc.code != TransportError.code or time.monotonic() + RETRY_S >= deadline:
                    raise
                time.sleep(RETRY_S)

    def deregister(self, connection: Connection, member: str) -> None:
        """End a registration; nothing is left to be ended if the daemon that knew it has ended and is awaited."""
        try:
            connection.request(local.Deregister(member=member), local.Done, ANSWER_S)
        except PeerLost:
            if not connection.is_awaited:
                raise

    def check(self, connection: Connection) -> None:
        """Check, once something that was made over this connection is the client's, that it is there still.

        Raises:
            PeerLost: the daemon has ended meanwhile, and with it what was made.
        """
        if connection.is_lost or connection is not self.current:
            raise PeerLost(f"the refitd daemon in {connection.directory} ended meanwhile; do it again")

    def orphan(self, error: Orphaned) -> None:
        """Have every later call raise the error, and wait for no other daemon."""
        self._orphaned = error
        self._closed = True
        self.current.is_awaited = False

    def _check_orphaned(self) -> None:
        if self._orphaned is not None:
            raise Orphaned(str(self._orphaned))

    # --- the end, and the next daemon ---------------------------------------------------------------------

    def close(self, *, goodbye: bool = True) -> None:
        """End the session and everything registered in it; no other daemon is waited for any more."""
        self._closed = True
        self.current.is_awaited = False
        self.current.close(goodbye=goodbye)
        if not self.current.is_foreign:
            self.files.close()

    def _dialled(self, timeout: float) -> Connection:
        connection = self._dial(timeout)
        connection.is_awaited = self._reconnects
        connection.files = self.files if self._reconnects else None
        return connection

    def _watch(self) -> None:
        if self._reconnects:
            self.current.listen("", self._lost)

    def _is_away(self) -> bool:
        if self._closed:
            return False
        return self._away_since is not None or (self.current.is_lost and self.current.is_awaited)

    def _lost(self, message: Message) -> None:
        if self._closed or not self.current.is_awaited:
            return  # the connection was refused or has failed, which another one would not mend
        self._away_since = time.monotonic()
        self._reason = ""
        _log.warning("the refitd daemon in %s has ended; waiting for the next one", self.current.directory)
        threading.Thread(target=_return, args=(weakref.ref(self),), name="refitd-reconnect", daemon=True).start()

    def tries(self) -> bool:
        """Try to come back; return whether there is nothing more to do. One thread calls it, again and again."""
        if self._closed:
            return True
        try:
            self.current.close(goodbye=False)  # its listeners have heard of its end when this returns
            self._come_back()
        except RefitdError as exc:
            if str(exc) != self._reason:
                _log.info("not connected to the refitd daemon in %s: %s", self.current.directory, exc)
            self._reason = str(exc)
            return False
        except Exception as exc:
            _log.exception("the client could not register again")
            self._reason = repr(exc)
            return False
        assert self._away_since is not None
        away_s, self._away_since = time.monotonic() - self._away_since, None
        if self._closed:
            self.close()
            return True
        _log.warning("connected to the refitd daemon of node %s again after %.1f s", self.current.welcome.node, away_s)
        self._watch()
        return True

    def _come_back(self) -> None:
        connection = self._dialled(ANSWER_S)
        try:
            self._await_coordinator(connection)
            self._again(connection, lambda address, nbytes: self._give(connection, address, nbytes))
            self.current = connection
        except BaseException:
            connection.close()
            raise

    def _await_coordinator(self, connection: Connection) -> None:
        """Return when a coordinator answers: nothing can be registered before."""
        pause = FIRST_PAUSE_S
        while not self._closed:
            try:
                connection.request(local.GetHistory(limit=0), HistoryReport, ANSWER_S)
                return
            except PeerLost:
                raise
            except TransportError as exc:
                self._reason = str(exc)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        raise PeerLost("this client is closed")

    def _give(self, connection: Connection, address: int, nbytes: int) -> int | None:
        fd = self.files.shown_at(address)
        if fd is None:
            return None
        try:
            return connection.give_arena(fd, nbytes)
        except (ArenaError, RefusedError) as exc:
            _log.warning("%s", exc)
            return None
