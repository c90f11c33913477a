"""Work that may take long or hang: each piece runs on its own thread, with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from refitd.errors import ArenaError, DeadlineExceeded, RefitdError

# Pieces run in turn, so that each sees how much memory earlier ones have left. A piece without progress for this long
# is overtaken: an allocation that hangs must not block others.
PATIENCE_S = 2.0

# Limit on abandoned pieces whose threads the kernel has not released.
MAX_STUCK = 16


class Abandoned(RefitdError):
    """Nobody waits for this piece of work any more."""


Moved = Callable[[], None]  # to be called between two steps; raises Abandoned


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
    """Owned by one loop, which calls `submit`, and `collect` when woken or when time has passed."""

    def __init__(self, clock: Callable[[], float], tell: Callable[[], None]) -> None:
        """`tell` is called on other threads when there is something to collect."""
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
        """Run `run` on a thread of its own.

        Args:
            key: returned by `collect`.
            what: names the work in the error if it is late.
            within_s: seconds until it is late. Its thread then goes on, but nobody waits for it.
            run: the work; it calls its argument between two steps.
            give_back: called with the result of late work.
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
            # a daemon thread: one that hangs must not keep the process from ending
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
