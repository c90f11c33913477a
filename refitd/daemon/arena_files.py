"""The descriptors of this node's arenas. Making an arena may hang: a thread does it, with a deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from refitd.buffers import arena as memory
from refitd.buffers import capacity
from refitd.buffers.permits import PAGE_ARENA, PAGE_BYTES
from refitd.config import Config
from refitd.daemon.actions import ArenaHandedBack, ArenasMade, ArenasRefused, Event, MakeArenas
from refitd.daemon.state import DaemonState
from refitd.errors import ArenaError, DeadlineExceeded, RefitdError, RefusedError

# Free descriptors needed to admit a client: it takes three, and each transfer of an arena needs one more.
CLIENT_RESERVE = 16

# Pieces run one after another: each must see how much memory the earlier pieces have left. If a piece makes no
# progress for this long, the next one starts: an allocation that hangs must not block the others.
PATIENCE_S = 2.0

# Limit on abandoned pieces whose threads the kernel has not released.
MAX_STUCK = 16


class Abandoned(RefitdError):
    """The deadline of this piece of work has passed."""


Moved = Callable[[], None]  # the work calls it between two steps to show progress; raises Abandoned


@dataclass(slots=True)
class _Task:
    key: Hashable
    what: str
    run: Callable[[Moved], object]
    give_back: Callable[[object], None]
    deadline: float
    in_turn: bool
    moved: float = 0.0
    thread: threading.Thread | None = None
    is_abandoned: bool = False
    result: object = None
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_done: bool = False


class SlowWork:
    """Owned by one loop, which calls `submit`, and calls `collect` when woken and periodically."""

    def __init__(self, clock: Callable[[], float], tell: Callable[[], None]) -> None:
        """Create without work; `tell` is called on another thread when a result is ready to collect."""
        self._clock = clock
        self._tell = tell
        self._pieces: list[_Task] = []
        self._stuck: list[_Task] = []

    def submit(
        self,
        key: Hashable,
        what: str,
        within_s: float,
        run: Callable[[Moved], object],
        give_back: Callable[[object], None] = lambda _: None,
        *,
        in_turn: bool,
    ) -> None:
        """Run `run` on a new thread.

        Args:
            key: returned by `collect`.
            what: the name of the work in the error if it is late.
            within_s: seconds until it is late. Its thread then continues, but its result is discarded.
            run: the work; it calls its argument between two steps.
            give_back: called with the result of late work, to free it.
            in_turn: whether it waits until earlier pieces have ended or make no progress.
        """
        now = self._clock()
        self._pieces.append(_Task(key, what, run, give_back, now + within_s, in_turn))
        self._start(now)

    def waiting(self) -> list[Hashable]:
        """Return the keys of the work not yet collected."""
        return [piece.key for piece in self._pieces]

    def collect(self) -> Iterator[tuple[Hashable, object]]:
        """Yield (key, result or exception) of each piece that has ended or is late."""
        now = self._clock()
        self._stuck = [piece for piece in self._stuck if piece.thread is not None and piece.thread.is_alive()]
        for piece in list(self._pieces):
            with piece.lock:
                if not piece.is_done and now < piece.deadline:
                    continue
                piece.is_abandoned = not piece.is_done
            self._pieces.remove(piece)
            if not piece.is_abandoned:
                yield piece.key, piece.error if piece.error is not None else piece.result
                continue
            if piece.thread is None:
                how = "others before it took too long"
            else:
                self._stuck.append(piece)
                how = f"nothing has moved for {now - piece.moved:.0f} s"
            yield piece.key, DeadlineExceeded(f"{piece.what}: not done in time, {how}")
        self._start(now)

    def _start(self, now: float) -> None:
        for piece in self._pieces:
            if piece.thread is not None:
                continue
            ahead = (p for p in self._pieces if p.in_turn and p.thread is not None and not p.is_done)
            if piece.in_turn and any(now - p.moved < PATIENCE_S for p in ahead):
                continue
            if len(self._stuck) >= MAX_STUCK:
                text = f"{piece.what}: {len(self._stuck)} pieces of work before it hang in the kernel; see dmesg"
                piece.error, piece.is_done = ArenaError(text), True
                self._tell()
                continue
            piece.moved = now
            # a daemon thread, because a hanging thread must not keep the process from ending
            piece.thread = threading.Thread(target=self._work, args=(piece,), name="refitd-maker", daemon=True)
            piece.thread.start()

    def _work(self, piece: _Task) -> None:
        def moved() -> None:
            piece.moved = self._clock()
            if piece.is_abandoned:
                raise Abandoned(piece.what)

        result, error = None, None
        try:
            result = piece.run(moved)
        except BaseException as exc:
            error = exc
        with piece.lock:
            piece.result, piece.error, piece.is_done = result, error, True
            late = piece.is_abandoned
        if late and error is None:
            piece.give_back(result)
        self._tell()


def make_arenas(
    wanted: tuple[tuple[int, str], ...], held: tuple[int, ...], workers: int, device: str, moved: Moved
) -> list[int]:
    """Create all arenas or none, and return their descriptors; `device` is a GPU's UUID, "" for main memory."""
    capacity.check_descriptors(wanted, len(held), workers)
    if device:
        from refitd.buffers import cuda

        return cuda.create_all(wanted, cuda.index_of(device))
    capacity.check_bytes(wanted, sum(held))
    fds: list[int] = []
    try:
        for nbytes, label in wanted:
            fds.append(memory.create(nbytes, label, moved))
    except BaseException:
        close_all(fds)
        raise
    return fds


def close_all(fds: object) -> None:
    """Close the arenas that `make_arenas` returned."""
    assert isinstance(fds, list)
    for fd in fds:
        os.close(fd)


class ArenaFiles:
    """Makes and adopts the arenas of this node, and stores their descriptors.

    Attributes:
        fds: the descriptors by arena number, also of the page of permits; `daemon.main` exchanges and closes them.
    """

    def __init__(
        self, config: Config, state: DaemonState, feed: Callable[[Event], None], wake: Callable[[], None]
    ) -> None:
        """`wake` is called on another thread when `collect` is due; `feed` gives the state an event."""
        self._config = config
        self._state = state
        self._feed = feed
        self._numbers = 0
        self._work = SlowWork(time.monotonic, wake)
        self.fds: dict[int, int] = {PAGE_ARENA: memory.create(PAGE_BYTES, memory.PERMITS)}

    def make(self, asked: MakeArenas) -> None:
        """Make arenas on a thread; `collect` feeds the result."""
        wanted, held, device, workers = asked.wanted, asked.held, asked.device, self._state.workers
        self._work.submit(
            asked.ticket,
            f"{capacity.named(wanted)}: {sum(nbytes for nbytes, _ in wanted)} bytes",
            asked.within_s or self._config.deadlines.request_s,
            lambda moved: make_arenas(wanted, held, workers, device, moved),
            close_all,
            in_turn=True,
        )

    def collect(self) -> None:
        """Feed the arenas that have been made, and the refusals."""
        for key, found in self._work.collect():
            assert isinstance(key, int)
            match found:
                case list():
                    self._feed(ArenasMade(key, tuple(map(self._add, found))))
                case DeadlineExceeded():
                    limits = ", ".join(map(str, capacity.memory_limits()))
                    text = f"{found}; memory does not come fast enough, there are: {limits}; see dmesg and swap space"
                    self._feed(ArenasRefused(key, DeadlineExceeded(text)))
                case RefitdError():
                    self._feed(ArenasRefused(key, found))
                case _:
                    self._feed(ArenasRefused(key, ArenaError(f"arena: {found}")))

    def fetch(self, session: int, arena: int, write: bool) -> tuple[int, int, str]:
        """Return descriptor, bytes and GPU of an arena for a session; raises RefusedError if it may not have it."""
        found = self._state.may_fetch(session, arena, write)
        return self.fds[arena], found.nbytes, found.device

    def given_back(self, session: int, fd: int, nbytes: int) -> int:
        """Adopt an arena that a client kept during a restart of its daemon; return its number.

        Raises:
            RefitdError: it is not an arena, another client's, or exceeds a limit of this node.
        """
        self._state.check_given(session, nbytes)
        if capacity.descriptors_left() < CLIENT_RESERVE:
            raise RefusedError("this daemon has too few free files (RLIMIT_NOFILE) to adopt arenas; raise LimitNOFILE")
        taken, writable = memory.taken_back(fd, nbytes)
        try:
            if any(os.path.sameopenfile(taken, other) for other in self.fds.values()):
                raise RefusedError(f"an arena of {nbytes} bytes is not taken back: this daemon has it already")
        except BaseException:
            os.close(taken)
            raise
        number = self._add(taken)
        self._feed(ArenaHandedBack(session, number, nbytes, writable))
        return number

    def _add(self, fd: int) -> int:
        self._numbers += 1
        self.fds[self._numbers] = fd
        return self._numbers

    def close(self) -> None:
        """Free the memory of all arenas that no other process maps."""
        for fd in self.fds.values():
            os.close(fd)
