"""Copies by the copy engines of GPUs, without kernels: between main memory and a GPU, and from one GPU to another.

A job runs in chunks of WINDOW_BYTES, at most two at a time. The first stream of a GPU copies. With `verify` its second
stream reads the GPU's end of the chunk back, while the first one copies the next chunk. This thread then compares those
bytes with the other end, which it reads again.

    main memory -> GPU    from the pinned arena, or from a window that this thread fills
    GPU -> main memory    into the pinned arena, or into a window that this thread empties
    GPU -> other GPU      into a window, and from there to the other GPU, whose stream waits for an event

Windows are pinned memory of the driver. They are used if the driver does not pin an arena.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from refitd.addressing.paths import Path
from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena
from refitd.buffers.cuda_driver import MOST_PITCH, Gpu, Pin, Window
from refitd.copy_services import Arriving, DigestMismatch, PreparedJob, RunResult
from refitd.copy_services.boxes import Box, Row, box
from refitd.copy_services.waits import Deadline, poll
from refitd.errors import ArenaError

WINDOW_BYTES = 16 << 20
_DEFAULT_S = 600.0
_AT_ONCE = 2  # chunks in flight
_COPIES, _READS = 0, 1  # a GPU's streams
_log = logging.getLogger("refitd.worker")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

Bytes = npt.NDArray[np.uint8]


class Engine:
    """One GPU's streams, events and windows for copies. Made at first use, and closed by its owner."""

    def __init__(self, index: int) -> None:
        """Prepare a GPU; raises ArenaError if the driver refuses."""
        self.gpu = Gpu(index)
        self._windows: dict[tuple[int, int], Window] = {}
        self._pins: list[Pin] = []
        self._refused: weakref.WeakSet[MappedArena] = weakref.WeakSet()
        self.streams: list[int] = []
        self._events: list[list[int]] = []
        try:
            with self.gpu.context.current():
                for _ in (_COPIES, _READS):
                    self.streams.append(self.gpu.stream())
                    self._events.append([])
                    for _ in range(_AT_ONCE):
                        self._events[-1].append(self.gpu.event())
        except ArenaError:
            self.close()
            raise

    def window(self, stream: int, slot: int) -> Window:
        """Return the window of a stream for one of the chunks in flight."""
        if (stream, slot) not in self._windows:
            with self.gpu.context.current():
                self._windows[stream, slot] = Window(self.gpu, WINDOW_BYTES)
        return self._windows[stream, slot]

    @property
    def window_bytes(self) -> int:
        """The size of all windows."""
        return WINDOW_BYTES * len(self._windows)

    def event(self, stream: int, slot: int) -> int:
        """Return the event after a chunk's work on a stream."""
        return self._events[stream][slot]

    def queue(self, stream: int, slot: int, copies: Iterable[Box], *, to_gpu: bool, after: int | None = None) -> None:
        """Queue copies (addresses) on a stream, after another event if one is given."""
        gpu = self.gpu
        with gpu.context.current():
            if after is not None:
                gpu.wait(self.streams[stream], after)
            for copy in copies:
                for plane in copy.planes(MOST_PITCH):
                    ((height, here, there),) = plane.dims or ((1, plane.run, plane.run),)
                    ends = (plane.source, here), (plane.destination, there)
                    gpu.copy(self.streams[stream], *ends, plane.run, height, to_gpu)
            gpu.record(self._events[stream][slot], self.streams[stream])

    def await_event(self, event: int, deadline: Deadline) -> None:
        """Return once an event is over; raises DeadlineExceeded, or ArenaError if the work before it failed."""
        subject = f"copies on GPU {self.gpu.index}: its copy engine has not done a chunk of {WINDOW_BYTES} bytes"
        poll(lambda: self.gpu.driver.is_done(event), deadline, subject)

    def pin(self, arena: MappedArena) -> bool:
        """Pin an arena, unless it is; return False if the driver refuses, which the log then says once."""
        if arena.pin is not None and arena.pin.is_open:
            return True
        if arena in self._refused:
            return False
        try:
            with self.gpu.context.current():
                arena.pin = Pin(self.gpu, arena)
        except ArenaError as exc:
            self._refused.add(arena)
            _log.warning("an arena of %d bytes is copied through pinned windows: %s", arena.nbytes, exc)
            return False
        self._pins = [*(pin for pin in self._pins if pin.is_open), arena.pin]
        return True

    def settle(self, deadline: Deadline) -> None:
        """Return once all queued copies are done."""
        for stream, handle in enumerate(self.streams):
            with self.gpu.context.current():
                self.gpu.record(self._events[stream][0], handle)
            self.await_event(self._events[stream][0], deadline)

    def close(self) -> None:
        """Free everything, and undo the pins; no copy is queued."""
        for pin in self._pins:
            pin.close()
        with self.gpu.context.current():
            for window in self._windows.values():
                window.close()
        self._windows.clear()
        self.gpu.close(self.streams, (event for events in self._events for event in events))


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a row: the box as offsets in its arenas, and its first byte in the chunk's window."""

    box: Box
    at: int
    source: Any
    destination: Any


class EngineJob(PreparedJob):
    """Copies between one pair of memories, of which at least one is on a GPU; no conversions."""

    def __init__(
        self, found: Iterable[Row], arenas: Mapping[int, Any], source: Engine | None, destination: Engine | None
    ) -> None:
        """Cut the rows, which have been checked, into chunks. An end without an engine is in main memory."""
        self._source, self._destination = source, destination
        self._copies = 0
        self._chunks: list[list[_Piece]] = []
        self._reads: dict[int, tuple[int, int, int]] = {}  # of each row, see Row.reads
        self._arriving: Arriving | None = None
        room = 0
        for row in found:
            self._copies += 1
            self._reads[row.row] = row.reads
            for part in box(row).cut(WINDOW_BYTES):
                if part.nbytes > room:
                    self._chunks.append([])
                    room = WINDOW_BYTES
                ends = arenas[row.source.arena], arenas[row.destination.arena]
                self._chunks[-1].append(_Piece(part, WINDOW_BYTES - room, *ends))
                room -= part.nbytes

    @property
    def _engines(self) -> list[Engine]:
        return [engine for engine in (self._source, self._destination) if engine is not None]

    def follow(self, arriving: Arriving | None) -> bool:
        """See PreparedJob.follow."""
        self._arriving = arriving
        return True

    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """See PreparedJob.run. After `timeout` the GPU may still write, so the worker must end."""
        started, deadline, done = time.perf_counter(), Deadline.after(timeout or _DEFAULT_S), 0
        is_pinned = self._pin()

        def finish(number: int) -> None:
            nonlocal done
            self._finish(number, deadline, verify=verify, is_pinned=is_pinned)
            done += sum(piece.box.nbytes for piece in self._chunks[number])
            on_progress(done)

        try:
            for number, chunk in enumerate(self._chunks):
                if self._arriving is not None:
                    self._arriving.await_all(self._reads[row] for row in dict.fromkeys(p.box.row for p in chunk))
                self._queue(number, verify=verify, is_pinned=is_pinned)
                if number:
                    finish(number - 1)
            if self._chunks:
                finish(len(self._chunks) - 1)
        except BaseException:
            for engine in self._engines:
                engine.settle(deadline)  # queued writes must end before the error is passed on
            raise
        staging = sum(engine.window_bytes for engine in self._engines)
        way = Path.PINNED if is_pinned else Path.WINDOWS
        return RunResult(self._copies, done, time.perf_counter() - started, staging, paths=(way,))

    def _pin(self) -> bool:
        """Pin the arenas in main memory; return False if windows must be used."""
        if len(self._engines) == 2:
            return False
        (engine,) = self._engines
        side = "destination" if self._destination is None else "source"
        hosts = {id(arena): arena for chunk in self._chunks for arena in (getattr(piece, side) for piece in chunk)}
        return all([engine.pin(arena) for arena in hosts.values()])

    def _queue(self, number: int, *, verify: bool, is_pinned: bool) -> None:
        slot, chunk = number % _AT_ONCE, self._chunks[number]
        last = self._destination or self._source
        assert last is not None
        through = 0 if is_pinned else last.window(_COPIES, slot).address
        after: int | None = None
        if self._source is not None:
            out = [_from(p).packed(destination=through + p.at) if through else _to(_from(p), p) for p in chunk]
            self._source.queue(_COPIES, slot, out, to_gpu=False)
            after = self._source.event(_COPIES, slot)
        if self._destination is not None:
            if through and self._source is None:
                for piece in chunk:
                    np.copyto(_window(last.window(_COPIES, slot), piece), _host(piece, 1))
            into = [_to(p.box.packed(source=through + p.at) if through else _from(p), p) for p in chunk]
            self._destination.queue(_COPIES, slot, into, to_gpu=True, after=after)
            after = self._destination.event(_COPIES, slot)
        for engine in self._engines if verify else ():
            read, at = engine.window(_READS, slot), _from if engine is self._source else _written
            back = [at(p).packed(destination=read.address + p.at) for p in chunk]
            engine.queue(_READS, slot, back, to_gpu=False, after=after)

    def _finish(self, number: int, deadline: Deadline, *, verify: bool, is_pinned: bool) -> None:
        slot, chunk = number % _AT_ONCE, self._chunks[number]
        last = self._destination or self._source
        assert last is not None
        last.await_event(last.event(_COPIES, slot), deadline)
        if self._destination is None and not is_pinned:
            for piece in chunk:
                np.copyto(_host(piece, 2), _window(last.window(_COPIES, slot), piece))
        if not verify:
            return
        for engine in self._engines:
            engine.await_event(engine.event(_READS, slot), deadline)
        for piece in chunk:
            found = [_window(engine.window(_READS, slot), piece) for engine in self._engines]
            other = found[1] if len(found) == 2 else _host(piece, 1 if self._source is None else 2)
            if not _are_equal(found[0], other):
                raise mismatch(piece.box.row)


def mismatch(row: int) -> DigestMismatch:
    """Return the error of a row whose ends differ."""
    return DigestMismatch(
        f"copy {row}: its bytes differ after writing; the source changed while it was read, or another process writes "
        "to the destination",
        row,
    )


def _address(arena: MappedArena | MappedDeviceArena) -> int:
    """Return the address of an arena for copy engines, which reach main memory only where it is pinned."""
    if isinstance(arena, MappedDeviceArena):
        return arena.address
    assert arena.pin is not None
    return arena.pin.address


def _from(piece: _Piece) -> Box:
    """Return a piece with the address of its source."""
    return piece.box.moved(_address(piece.source), 0)


def _to(whole: Box, piece: _Piece) -> Box:
    """Return a box with the address of the piece's destination."""
    return whole.moved(0, _address(piece.destination))


def _written(piece: _Piece) -> Box:
    """Return a box that reads what the piece writes."""
    dims = tuple((count, there, there) for count, _, there in piece.box.dims)
    at = piece.box.destination + _address(piece.destination)
    return Box(piece.box.row, at, at, dims, piece.box.run)


def _window(window: Window, piece: _Piece) -> npt.NDArray[Any]:
    return _view(window.bytes, piece.box.packed(source=piece.at, destination=piece.at), 1)


def _host(piece: _Piece, side: int) -> npt.NDArray[Any]:
    """Return an end of a piece that is in main memory; side 1 is the source, 2 the destination."""
    return _view((piece.source, piece.destination)[side - 1].bytes, piece.box, side)


def _view(memory: Bytes, found: Box, side: int) -> npt.NDArray[Any]:
    """Return one end of a box, whose offset is in `memory`, in the largest words that fit both ends."""
    word = gcd(8, found.run)
    shape = (*(dim[0] for dim in found.dims), found.run // word)
    strides = (*(dim[side] for dim in found.dims), word)
    offset = found.source if side == 1 else found.destination
    return np.ndarray(shape, _UNSIGNED[word], memory, offset, strides)


def _are_equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    if one.flags.c_contiguous and other.flags.c_contiguous:
        return not _memcmp(one.ctypes.data, other.ctypes.data, one.nbytes)
    return bool(np.array_equal(one, other))
