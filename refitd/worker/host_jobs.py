"""A worker's jobs in main memory besides copies: digests of spans for a proof, and conversions of received tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from refitd.addressing.copies import (
    ELEMENT_BYTES,
    QUANTIZE,
    QUANTIZE_SWIZZLED,
    QUANTIZE_TILES,
    SCALE_BYTES,
    SWIZZLE,
    ConversionList,
    check_piece,
)
from refitd.buffers.arena import MappedArena
from refitd.buffers.layout import Elements, compare, digest, extent, packed
from refitd.copy_services import PreparedJob, RunResult
from refitd.errors import TransportError
from refitd.mxfp8.format import (
    BLOCK,
    ROUNDINGS,
    Rounding,
    Scratch,
    quantize,
    quantize_tiles,
    swizzle,
    swizzled_bytes,
    tiles_shape,
)
from refitd.protocol import sidecar

if TYPE_CHECKING:
    from refitd.buffers.cuda import MappedDeviceArena

# of elements, of blocks, and of the rows of tiles
_SIZES = (1, 2, 4, 8, 16, 64, 128, 256, 512)
Arenas = Mapping[int, "MappedArena | MappedDeviceArena"]


def read(message: sidecar.ReadSpans, arenas: Arenas) -> sidecar.SpansRead:
    """Compare the spans if the message has `others`, else take digests; return the reason if that fails."""
    return compared(message, arenas) if message.others else taken(message, arenas)


def taken(message: sidecar.ReadSpans, arenas: Arenas) -> sidecar.SpansRead:
    """Take the digest of each span; return the reason if that fails."""
    try:
        found = [digest(_parts(span, arenas)) for span in message.spans]
    except TransportError as exc:
        return sidecar.SpansRead(run=message.run, reason=str(exc))
    return sidecar.SpansRead(run=message.run, digests=b"".join(found))


def compared(message: sidecar.ReadSpans, arenas: Arenas) -> sidecar.SpansRead:
    """Compare each span with another one; return the reason if that fails."""
    try:
        found = tuple(
            _compared(live, expected, arenas) for live, expected in zip(message.spans, message.others, strict=True)
        )
    except TransportError as exc:
        return sidecar.SpansRead(run=message.run, reason=str(exc))
    return sidecar.SpansRead(run=message.run, found=found)


def _compared(live: sidecar.Span, expected: sidecar.Span, arenas: Arenas) -> tuple[int, int, int]:
    if (live.first, live.count, live.element_size) != (expected.first, expected.count, expected.element_size):
        raise TransportError(f"spans of arenas {live.arena} and {expected.arena} are not of the same elements")
    return compare(_parts(live, arenas), _parts(expected, arenas), live.first)


def _parts(span: sidecar.Span, arenas: Arenas) -> Iterator[Elements]:
    """Yield the elements of a span as contiguous pieces in main memory."""
    arena = arenas.get(span.arena)
    if arena is None:
        raise TransportError(f"arena {span.arena} is not mapped here")
    end = span.offset + extent(span.shape, span.strides, span.element_size)
    inside = end <= arena.nbytes and span.first + span.count <= prod(span.shape)
    if not inside or len(span.shape) != len(span.strides) or span.element_size not in _SIZES:
        raise TransportError(
            f"elements {span.first}..{span.first + span.count} of {list(span.shape)} at byte {span.offset} leave "
            f"arena {span.arena} of {arena.nbytes} bytes"
        )
    if isinstance(arena, MappedArena):
        array = np.ndarray(span.shape, f"V{span.element_size}", arena.bytes, span.offset, span.strides)
        yield from packed(array, span.first, span.count)
    else:
        yield from packed(_fetched(span, arena), 0, span.count)


def _fetched(span: sidecar.Span, arena: MappedDeviceArena) -> Elements:
    """Copy a span from a GPU to main memory."""
    import torch

    from refitd.copy_services.pieces import DevicePiece

    element = span.element_size
    piece = DevicePiece(arena, span.offset, list(span.shape), list(span.strides), element, 0, element)
    there = torch.empty(span.count * element, dtype=torch.uint8)
    piece.pack(span.first * element, (span.first + span.count) * element, there)
    found: Elements = there.numpy().view(f"V{element}")
    return found


# --- conversions ------------------------------------------------------------------------------------------

PROGRESS_BYTES = 8 << 20

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Buffers:
    """Buffers that are reused between pieces, because the first touch of a page is slow."""

    scratch: Scratch
    rows: Bytes  # row-major scales of a piece before they are swizzled

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
    rows: Bytes | None  # row-major scales, an output or an input; None if they are only an intermediate result
    swizzled: Bytes | None
    tiles: npt.NDArray[np.float32] | None = None  # the scales of FP8

    def convert(self, memory: _Buffers) -> None:
        """Write the piece's outputs."""
        rows = self.rows
        if self.tiles is not None and self.words is not None and self.data is not None:
            quantize_tiles(self.words, self.data, self.tiles)
            return
        if self.words is not None and self.data is not None:
            if rows is None:
                rows = memory.rows_of((self.words.shape[0], self.words.shape[1] // BLOCK))
            quantize(self.words, self.data, rows, self.rounding, memory.scratch)
        if self.swizzled is not None and rows is not None:
            swizzle(rows, self.swizzled)


class ConversionJob(PreparedJob):
    """One worker's pieces."""

    def __init__(self, pieces: ConversionList, arenas: Mapping[int, MappedArena]) -> None:
        """Build the views, and check that every piece is inside its arena.

        Raises:
            TransportError: a piece leaves its arena, or the arena is not writable.
        """
        self._pieces = [_piece(pieces, row, arenas) for row in range(len(pieces))]
        self._memory = _Buffers(Scratch.of(np.uint16), np.empty(0, np.uint8))

    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """See PreparedJob.run. `verify` is ignored, because the input was verified when it arrived."""
        started, done, next_report = time.perf_counter(), 0, PROGRESS_BYTES
        for piece in self._pieces:
            piece.convert(self._memory)
            done += piece.nbytes
            if done >= next_report:
                next_report = done + PROGRESS_BYTES
                on_progress(done)
        return RunResult(len(self._pieces), done, time.perf_counter() - started)


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
    swizzled = view(scale, swizzled_bytes(rows, blocks)) if kind in (QUANTIZE_SWIZZLED, SWIZZLE) else None
    if kind == SWIZZLE:
        read = view(source, rows * blocks, here).reshape(rows, blocks)
        return _ConversionPiece(read.nbytes, Rounding.RCEIL, None, None, read, swizzled)
    words = view(source, rows * columns * ELEMENT_BYTES, here).view(np.uint16).reshape(rows, columns)
    data = view(int(pieces.data[row]), rows * columns).reshape(rows, columns)
    if kind == QUANTIZE_TILES:
        shape = tiles_shape((rows, columns))
        tiles = view(scale, SCALE_BYTES * prod(shape)).view(np.float32).reshape(shape)
        return _ConversionPiece(words.nbytes, Rounding.RCEIL, words, data, None, None, tiles)
    plain = view(scale, rows * blocks).reshape(rows, blocks) if kind == QUANTIZE else None
    return _ConversionPiece(words.nbytes, ROUNDINGS[at], words, data, plain, swizzled)
