"""Connect a client to its daemon; when the daemon ends, connect to its successor and register everything again."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from refitd.buffers.capacity import descriptors_left
from refitd.client.calls import check_process
from refitd.client.connection import Connection
from refitd.errors import ArenaError, Orphaned, PeerLost, RefitdError, RefusedError, TransportError
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.protocol.reports import HistoryReport, SwapProgress
from refitd.protocol.shards import Place

R = TypeVar("R", bound=Message)
T = TypeVar("T")

_log = logging.getLogger("refitd.client")

# Pauses between attempts to reach a disconnected daemon.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0

# The longest wait of a call for a disconnected daemon, even if its timeout is longer.
LONGEST_WAIT_S = 60.0

# Timeouts for an answer of the new daemon, and for one registration with it.
ANSWER_S, REGISTER_S = 10.0, 60.0

LOOK_S = 0.01  # between checks whether the daemon is back
RETRY_S = 0.2  # between two tries while the daemon has no coordinator

# Hands the arena that this process maps at (address, bytes) over to the new daemon, and returns its number there; None:
# the source or target needs a new arena.
Give = Callable[[int, int], int | None]

# Leave this many descriptors free for the application.
_RESERVE = 256

_MAPS = Path("/proc/self/maps")
_ARENA = "/memfd:refitd:"


def _return(line: weakref.ref[Line]) -> None:
    """Wait for the next daemon: the body of a thread. It ends when the client has been garbage-collected."""
    pause = FIRST_PAUSE_S
    while (found := line()) is not None and not found.tries():
        del found
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def renumbered(places: tuple[Place, ...], numbers: Mapping[int, int]) -> tuple[Place, ...]:
    """Return places with the new numbers of their arenas; an arena without a new number gets 0, which is unused."""
    return tuple(structs.replace(place, arena=numbers.get(place.arena, 0)) for place in places)


class Line:
    """A client's connection; with `reconnect`, a series of connections.

    Each member stores the connection that it is registered over. `again(connection, give)` registers all members over a
    new connection. If it raises TransportError, it is called again with another connection.
    """

    def __init__(self, dial: Callable[[float], Connection], timeout: float, *, reconnect: bool) -> None:
        """Connect within `timeout` seconds; raises as Connection does."""
        self._dial = dial
        self._reconnects = reconnect
        self.files = ArenaFiles()
        self.current = self._dialled(timeout)
        self._closed = False
        self._away_since: float | None = None
        self._reason = ""  # why the last attempt to reconnect failed
        self._orphaned: Orphaned | None = None  # the error of all later calls
        self._again: Callable[[Connection, Give], None] = lambda connection, give: None

    def start(self, again: Callable[[Connection, Give], None]) -> None:
        """Watch the connection, and call `again` over each new one."""
        self._again = again
        self._watch()

    # --- calls --------------------------------------------------------------------------------------------

    def steady(self, timeout: float) -> Connection:
        """Return the current connection; if the daemon is disconnected, wait for it for at most `timeout` seconds.

        Raises:
            PeerLost: the daemon is not back in time; the error gives the duration and the reason.
            Orphaned: a process that this one serves for has ended.
        """
        deadline = time.monotonic() + min(timeout, LONGEST_WAIT_S)
        check_process(self.current.pid)
        while not self._closed and (self._away_since is not None or (self.current.is_lost and self.current.is_awaited)):
            if time.monotonic() >= deadline:
                ago = time.monotonic() - (self._away_since or time.monotonic())
                raise PeerLost(
                    f"the refitd daemon in {self.current.directory} ended {ago:.1f} s ago and is not back: "
                    f"{self._reason or 'it has just ended'}; start it if it does not run, this client goes on trying"
                )
            time.sleep(LOOK_S)  # no lock: a signal handler that waits here may have interrupted its holder
        if self._closed:
            self._check_orphaned()
        return self.current

    def request(
        self,
        message: Message,
        reply: type[R],
        timeout: float,
        on_progress: Callable[[SwapProgress], None] | None = None,
    ) -> R:
        """Wait for a disconnected daemon, then do as `Connection.request`.

        If the daemon ends during the request, the request is not repeated.

        Raises:
            PeerLost: the daemon is not back in time, or has ended before it answered.
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
        """Return the result of `do(connection, seconds left)`; if the daemon ends, repeat it with the next daemon.

        Also repeat it while the daemon has no coordinator; such a daemon refuses the request without any effect.

        Raises:
            PeerLost: the daemon is not back in time.
            TransportError: the daemon has no coordinator in time.
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
        """End a registration; if its daemon has ended and is awaited, the registration has ended with it."""
        try:
            connection.request(local.Deregister(member=member), local.Done, ANSWER_S)
        except PeerLost:
            if not connection.is_awaited:
                raise

    def check(self, connection: Connection) -> None:
        """Check that an arena or a registration made over this connection still exists; call this after recording it.

        Raises:
            PeerLost: the daemon has ended, and the arena or registration with it.
        """
        if connection.is_lost or connection is not self.current:
            raise PeerLost(f"the refitd daemon in {connection.directory} ended meanwhile; do it again")

    def orphan(self, error: Orphaned) -> None:
        """Make every later call raise the error, and wait for no other daemon."""
        self._orphaned = error
        self._closed = True
        self.current.is_awaited = False

    def _check_orphaned(self) -> None:
        if self._orphaned is not None:
            raise Orphaned(str(self._orphaned))

    # --- the end, and the next daemon ---------------------------------------------------------------------

    def close(self, *, goodbye: bool = True) -> None:
        """End the session and everything registered in it, and wait for no other daemon."""
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

    def _lost(self, message: Message) -> None:
        if self._closed or not self.current.is_awaited:
            return  # refused or failed for a reason that a new connection would not remove
        self._away_since = time.monotonic()
        self._reason = ""
        _log.warning("the refitd daemon in %s has ended; waiting for the next one", self.current.directory)
        threading.Thread(target=_return, args=(weakref.ref(self),), name="refitd-reconnect", daemon=True).start()

    def tries(self) -> bool:
        """Try to reconnect; return True if that succeeded or the client is closed. One thread calls it repeatedly."""
        if self._closed:
            return True
        try:
            self.current.close(goodbye=False)  # on return its listeners have handled its end
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
        """Wait until a coordinator answers; until then registrations would fail."""
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


class ArenaFiles:
    """Descriptors of arenas by inode of the memory file.

    Commits move files between addresses, so each lookup reads the kernel's map of this process. An open descriptor
    keeps the file's memory allocated: `drop_unmapped` closes descriptors of files without a mapping.
    """

    def __init__(self) -> None:
        self._kept: dict[int, int] = {}  # inode -> descriptor
        weakref.finalize(self, _close, self._kept).atexit = False

    def keep(self, fd: int) -> None:
        """Keep a copy of an arena's descriptor, to return the arena later; skip it if few descriptors are free."""
        if descriptors_left() < _RESERVE:
            return
        with contextlib.suppress(OSError):
            copy = os.dup(fd)
            if self._kept.setdefault(os.fstat(copy).st_ino, copy) != copy:
                os.close(copy)

    def shown_at(self, address: int) -> int | None:
        """Return the descriptor of the arena that is mapped at `address` in this process; None if none is kept."""
        for start, end, inode in _mapped():
            if start <= address < end:
                return self._kept.get(inode)
        return None

    def drop(self, address: int) -> None:
        """Close the descriptor of the arena at `address`, which the daemon has freed."""
        for start, end, inode in _mapped():
            if start <= address < end and (fd := self._kept.pop(inode, None)) is not None:
                os.close(fd)

    def drop_unmapped(self) -> None:
        """Close the descriptors of files that are no longer mapped."""
        mapped = {inode for _, _, inode in _mapped()}
        for inode in self._kept.keys() - mapped:
            os.close(self._kept.pop(inode))

    def close(self) -> None:
        """Close every descriptor."""
        _close(self._kept)


def _close(kept: dict[int, int]) -> None:
    while kept:
        os.close(kept.popitem()[1])


def _mapped() -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, inode) of every mapping of an arena in this process."""
    with contextlib.suppress(OSError):
        for line in _MAPS.read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(_ARENA):
                start, _, end = fields[0].partition("-")
                yield int(start, 16), int(end, 16), int(fields[4])
