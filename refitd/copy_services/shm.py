"""Shared memory: one copy per byte between arenas of one node, compared with its source while still in cache."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from refitd.addressing.copies import CopyList
from refitd.addressing.places import extent_of, of_items
from refitd.buffers.arena import MappedArena
from refitd.copy_services import Arriving, Capabilities, DigestMismatch, MappedCopyService, PreparedJob, RunResult
from refitd.dtypes import DESTINATION_SIZES, SOURCE_SIZES, TILE_ITEMS
from refitd.errors import TransportError
from refitd.mxfp8.parts import Converter

# Source, destination and the bytes gathered to compare them fit well into a second-level cache of 1 MiB.
CHUNK_BYTES = 128 << 10
PROGRESS_BYTES = 32 << 20

Bytes = npt.NDArray[np.uint8]
Elements = npt.NDArray[np.generic]
_ROW = (
    *("size", "element_size", "cast", "src_arena", "src_offset", "src_stride"),
    *("dst_arena", "dst_offset", "dst_stride"),
)
# blocks of MXFP8 are void items
_UNSIGNED: dict[int, npt.DTypeLike] = {
    **{1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128},
    **{size: f"V{size}" for size in (32, 64, 128)},
}

# 40-50 GB/s in cache: twice as fast as two digests, and exact
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class _Scratch:
    """A thread's buffer for one chunk."""

    def __init__(self) -> None:
        self._bytes = np.empty(CHUNK_BYTES, dtype=np.uint8)
        self.address: int = self._bytes.ctypes.data
        # chunks have few shapes, and making a view costs as much as a small copy
        self._views: dict[tuple[tuple[int, ...], np.dtype[np.generic]], Elements] = {}

    def view(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Elements:
        """Return the buffer as an array."""
        found = self._views.get((shape, dtype))
        if found is None:
            found = np.ndarray(shape, dtype, self._bytes.data)
            self._views[shape, dtype] = found
        return found

    def gather(self, elements: Elements) -> int:
        """Copy the elements here contiguously; return the buffer's address."""
        self.view(elements.shape, elements.dtype)[...] = elements
        return self.address


@dataclass(frozen=True, eq=False, slots=True)
class _Chunk:
    """A part of one copy, at most CHUNK_BYTES long. Addresses are of contiguous bytes, 0 if they are not contiguous.

    With a `cast` its elements are converted.
    """

    copy: int
    nbytes: int
    destination: Elements
    destination_at: int
    source: Elements
    source_at: int
    cast: int = 0


class SharedMemoryService(MappedCopyService):
    """Copies between arenas mapped into this process."""

    name = "shm"
    capabilities = Capabilities(is_one_sided=True, crosses_nodes=False)

    def prepare(self, copies: CopyList, arenas: Mapping[int, MappedArena]) -> PreparedJob:
        """See CopyService.prepare."""
        chunks: list[tuple[int, _Chunk]] = []
        reads: list[tuple[int, int, int]] = []
        # whole columns at once: reading one number of an array costs as much as a small copy
        columns = (getattr(copies, name).tolist() for name in _ROW)
        for row, values in enumerate(zip(*columns, strict=True)):
            size, element, cast, src_arena, src_at, src_stride, dst_arena, dst_at, dst_stride = values
            if not 0 <= cast < len(SOURCE_SIZES) or (cast and element != DESTINATION_SIZES[cast]):
                raise TransportError(f"copy {row}: conversion {cast} to elements of {element} bytes does not exist")
            src_element = SOURCE_SIZES[cast] or element
            target = _checked(arenas, dst_arena, dst_at, size, dst_stride, element, row)
            if not target.writable:
                raise TransportError(f"copy {row}: arena {dst_arena} is mapped for reading only")
            origin = _checked(arenas, src_arena, src_at, size, src_stride, src_element, row)
            reads.append((src_arena, src_at, src_at + extent_of(size, src_stride, src_element)))
            for box, src_skip, dst_skip in _boxes(size, src_stride, dst_stride, max(element, src_element)):
                as_bytes = not cast and bool(box) and box[-1][1] == box[-1][2] == element and element not in TILE_ITEMS
                view = _view(target.bytes, dst_at + dst_skip, box, 2, element, as_bytes, dst_stride[-1])
                order = begins = target.address + dst_at + dst_skip
                begins = begins if view.flags.c_contiguous else 0
                source = _view(origin.bytes, src_at + src_skip, box, 1, src_element, as_bytes, src_stride[-1])
                source_at = origin.address + src_at + src_skip
                if not source.flags.c_contiguous:
                    order, source_at = source_at, 0
                chunk = _Chunk(row, view.nbytes, view, begins, source, 0 if cast else source_at, cast)
                chunks.append((order, chunk))
        # Processors prefetch. In a tensor cut in columns, half a row is followed by its other half, which another copy
        # reads or writes. Running such copies one after the other takes a quarter less time.
        chunks.sort(key=itemgetter(0))
        return _SharedMemoryJob([chunk for _, chunk in chunks], reads)

    def close(self) -> None:
        """See CopyService.close. The service has no state between runs."""


class _SharedMemoryJob(PreparedJob):
    """`reads` are the (arena, first byte, byte behind the last) that each copy reads."""

    def __init__(self, chunks: list[_Chunk], reads: list[tuple[int, int, int]]) -> None:
        self._chunks, self._reads = chunks, reads
        self._arriving: Arriving | None = None
        self._bytes = sum(chunk.nbytes for chunk in chunks)
        self._near, self._far, self._convert = _Scratch(), _Scratch(), Converter()

    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """See PreparedJob.run. `timeout` does not apply: only `Arriving` waits for another process."""
        started, near, far, convert = time.perf_counter(), self._near, self._far, self._convert
        done, next_report = 0, PROGRESS_BYTES
        for chunk in self._chunks if self._arriving is None else self._as_written(self._arriving):
            source, target = chunk.source, chunk.destination
            np.copyto(target, convert(chunk.cast, source) if chunk.cast else source)
            if not verify:
                differs = False
            elif chunk.source_at and chunk.destination_at:
                differs = bool(_memcmp(chunk.source_at, chunk.destination_at, chunk.nbytes))
            else:  # read the source again; pack what is not contiguous
                expected = chunk.source_at or near.gather(convert(chunk.cast, source) if chunk.cast else source)
                differs = bool(_memcmp(expected, chunk.destination_at or far.gather(target), chunk.nbytes))
            if differs:
                raise DigestMismatch(
                    f"copy {chunk.copy}: {chunk.nbytes} bytes differ after writing; the source changed while it was "
                    "read, or another process writes to the destination",
                    chunk.copy,
                )
            done += chunk.nbytes
            if done >= next_report:
                next_report = done + PROGRESS_BYTES
                on_progress(done)
        on_progress(done)
        return RunResult(len(self._reads), self._bytes, time.perf_counter() - started)

    def follow(self, arriving: Arriving | None) -> bool:
        """See PreparedJob.follow."""
        self._arriving = arriving
        return True

    def _as_written(self, arriving: Arriving) -> Iterator[_Chunk]:
        """Yield the chunks in the order of the writes to their sources."""
        left = self._chunks
        while left:
            copies = {chunk.copy for chunk in left}
            ready = {copy for copy in copies if self._is_written(copy, arriving)}
            yield from (chunk for chunk in left if chunk.copy in ready)
            left = [chunk for chunk in left if chunk.copy not in ready]
            if left:
                arriving.wait(*self._reads[left[0].copy])

    def _is_written(self, copy: int, arriving: Arriving) -> bool:
        arena, begin, end = self._reads[copy]
        return arena not in arriving.arenas or arriving.holds(arena, begin, end)


def _checked(
    arenas: Mapping[int, MappedArena],
    arena: int,
    offset: int,
    size: list[int],
    stride: list[int],
    element: int,
    row: int,
) -> MappedArena:
    mapped = arenas.get(arena)
    if mapped is None:
        raise TransportError(f"copy {row}: arena {arena} is not mapped here")
    end = offset + extent_of(size, stride, element)
    if offset < 0 or min(stride) < 0 or end > mapped.nbytes:
        raise TransportError(f"copy {row}: bytes {offset}..{end} leave arena {arena} of {mapped.nbytes} bytes")
    return mapped


_Dim = tuple[int, int, int]  # count, source stride, destination stride


def _boxes(
    size: list[int], src_stride: list[int], dst_stride: list[int], element: int
) -> Iterator[tuple[list[_Dim], int, int]]:
    """Cut a copy into boxes of at most CHUNK_BYTES: (dimensions, source offset, destination offset) each."""
    dims = [d for d in zip(size, src_stride, dst_stride, strict=True) if d[0] != 1]
    merged: list[_Dim] = []
    for count, src, dst in dims:
        # merge two dimensions if both ends step from row to row without a gap
        if merged and merged[-1][1] == count * src and merged[-1][2] == count * dst:
            merged[-1] = (merged[-1][0] * count, src, dst)
        else:
            merged.append((count, src, dst))
    yield from _cut(merged, element)


def _cut(dims: list[_Dim], element: int) -> Iterator[tuple[list[_Dim], int, int]]:
    total = element
    for count, _, _ in dims:
        total *= count
    if total <= CHUNK_BYTES:
        yield dims, 0, 0
        return
    count, src, dst = dims[0]
    inner = total // count
    if inner > CHUNK_BYTES:
        rows: list[tuple[int, int]] = [(i, 1) for i in range(count)]
    else:
        step = CHUNK_BYTES // inner
        edges = [*range(0, count, step), count]
        rows = [(a, b - a) for a, b in pairwise(edges)]
    for start, n in rows:
        head = [(n, src, dst)] if n > 1 or len(dims) == 1 else []
        for box, a, b in _cut([*head, *dims[1:]], element):
            yield box, start * src + a, start * dst + b


def _view(buffer: Bytes, offset: int, box: list[_Dim], side: int, element: int, as_bytes: bool, pitch: int) -> Elements:
    """Return the box as an array over `buffer`; as bytes if the last dimension is contiguous at both ends.

    `pitch` is that of tiles, which add two dimensions.
    """
    shape = [d[0] for d in box]
    strides = [d[side] for d in box]
    if element in TILE_ITEMS:
        _, inner, element = of_items([1], [pitch], element)
        shape, strides = shape + inner[0], strides + inner[1]
    if as_bytes:
        shape[-1] *= element
        strides[-1] = 1
        if len(box) == 1:
            return buffer[offset : offset + shape[0]]
    return np.ndarray(tuple(shape), np.uint8 if as_bytes else _UNSIGNED[element], buffer, offset, tuple(strides))
