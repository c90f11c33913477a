"""A worker's conversions in main memory: makes MXFP8 from what has arrived in a staging arena, in pieces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refitd.addressing.conversions import ELEMENT_BYTES, QUANTIZE, SWIZZLE, ConversionList, check_piece
from refitd.buffers.arena import MappedArena
from refitd.copy_services.base import PreparedJob, RunResult
from refitd.errors import TransportError
from refitd.mxfp8 import BLOCK, ROUNDINGS, Rounding, swizzled_bytes
from refitd.transforms.mxfp8_format import Scratch, quantize, swizzle

PROGRESS_BYTES = 8 << 20

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class _ThreadMemory:
    """Buffers that one thread reuses between pieces, so that their pages are touched once."""

    scratch: Scratch
    rows: Bytes  # row-major scales of a piece to be swizzled

    def rows_of(self, shape: tuple[int, int]) -> Bytes:
        """Return a buffer for row-major scales of this shape."""
        if self.rows.size < shape[0] * shape[1]:
            self.rows = np.empty(shape[0] * shape[1], np.uint8)
        return self.rows[: shape[0] * shape[1]].reshape(shape)


@dataclass(frozen=True, eq=False, slots=True)
class _ConversionPiece:
    """Views of one piece: its input and its outputs."""

    nbytes: int
    rounding: Rounding
    words: npt.NDArray[np.uint16] | None  # None if only scales are swizzled
    data: Bytes | None
    rows: Bytes | None  # row-major scales: written, or read; None if they are only an intermediate step
    swizzled: Bytes | None

    def convert(self, memory: _ThreadMemory) -> None:
        """Write the piece's outputs."""
        rows = self.rows
        if self.words is not None and self.data is not None:
            if rows is None:
                rows = memory.rows_of((self.words.shape[0], self.words.shape[1] // BLOCK))
            quantize(self.words, self.data, rows, self.rounding, memory.scratch)
        if self.swizzled is not None and rows is not None:
            swizzle(rows, self.swizzled)


class ConversionJob(PreparedJob):
    """One worker's pieces, converted by `threads` threads."""

    def __init__(self, pieces: ConversionList, arenas: Mapping[int, MappedArena], threads: int) -> None:
        """Build the views, and check that every piece lies inside its arena.

        Raises:
            TransportError: a piece leaves its arena, or the arena is not writable.
        """
        self._pieces = [_piece(pieces, row, arenas) for row in range(len(pieces))]
        self._memories = [
            _ThreadMemory(Scratch.of(np.uint16), np.empty(0, np.uint8))
            for _ in range(max(1, min(threads, len(pieces))))
        ]

    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """See PreparedJob.run. Nothing is compared: the input was verified when it arrived."""
        started = time.perf_counter()
        work = _ConversionRun(self._pieces, on_progress)
        threads = [threading.Thread(target=work.take_part, args=(m,), daemon=True) for m in self._memories[1:]]
        for thread in threads:
            thread.start()
        work.take_part(self._memories[0])
        for thread in threads:
            thread.join()
        if work.failure is not None:
            raise work.failure
        return RunResult(len(self._pieces), work.done, time.perf_counter() - started)


class _ConversionRun:
    """The pieces of one run; the first failure stops all threads."""

    def __init__(self, pieces: list[_ConversionPiece], on_progress: Callable[[int], None]) -> None:
        self.failure: BaseException | None = None
        self.done = 0
        self._told = 0
        self._left = iter(pieces)
        self._on_progress = on_progress
        self._lock = threading.Lock()

    def take_part(self, memory: _ThreadMemory) -> None:
        """Convert pieces until none are left; the body of a thread."""
        try:
            for piece in self._taken():
                piece.convert(memory)
                self._note(piece.nbytes)
        except BaseException as exc:  # raised again in the caller's thread
            with self._lock:
                self.failure = self.failure or exc

    def _taken(self) -> Iterator[_ConversionPiece]:
        while True:
            with self._lock:
                piece = None if self.failure is not None else next(self._left, None)
            if piece is None:
                return
            yield piece

    def _note(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if self.done >= self._told + PROGRESS_BYTES:
                self._told = self.done
                self._on_progress(self.done)


def _piece(pieces: ConversionList, row: int, arenas: Mapping[int, MappedArena]) -> _ConversionPiece:
    kind, rows, columns, at = check_piece(pieces, row)
    here, there = int(pieces.read[row]), int(pieces.arena[row])
    for number in (here, there):
        if number not in arenas:
            raise TransportError(f"conversion {row}: arena {number} is not mapped here")
    if not arenas[there].writable:
        raise TransportError(f"conversion {row}: arena {there} is mapped for reading only")
    blocks = columns // BLOCK

    def view(offset: int, nbytes: int, number: int = there) -> Bytes:
        arena = arenas[number]
        if offset < 0 or offset + nbytes > arena.nbytes:
            raise TransportError(
                f"conversion {row}: bytes {offset}..{offset + nbytes} leave arena {number} of {arena.nbytes} bytes"
            )
        return arena.bytes[offset : offset + nbytes]

    source, scale = int(pieces.source[row]), int(pieces.scale[row])
    swizzled = None if kind == QUANTIZE else view(scale, swizzled_bytes(rows, blocks))
    if kind == SWIZZLE:
        read = view(source, rows * blocks, here).reshape(rows, blocks)
        return _ConversionPiece(read.nbytes, Rounding.RCEIL, None, None, read, swizzled)
    words = view(source, rows * columns * ELEMENT_BYTES, here).view(np.uint16).reshape(rows, columns)
    data = view(int(pieces.data[row]), rows * columns).reshape(rows, columns)
    plain = view(scale, rows * blocks).reshape(rows, blocks) if kind == QUANTIZE else None
    return _ConversionPiece(words.nbytes, ROUNDINGS[at], words, data, plain, swizzled)
