"""Shared memory: one copy per byte between arenas of one node, compared with its source while still in cache."""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from refitd.addressing.copies import CopyList
from refitd.addressing.places import PROCESS_MEMORY
from refitd.buffers.arena import MappedArena
from refitd.buffers.layout import extent
from refitd.copy_services.base import Capabilities, DigestMismatch, MappedCopyService, PreparedJob, RunResult
from refitd.copy_services.conversions import converted
from refitd.copy_services.process_memory import RemoteChunk
from refitd.describe.casts import DESTINATION_SIZES, SOURCE_SIZES
from refitd.errors import TransportError

# Source, destination and the bytes gathered to compare them fit well into a second-level cache of 1 MiB.
CHUNK_BYTES = 128 << 10
PROGRESS_BYTES = 32 << 20

Bytes = npt.NDArray[np.uint8]
Elements = npt.NDArray[np.generic]
_ROW = (
    *("size", "element_size", "cast", "src_arena", "src_pid", "src_offset", "src_stride"),
    *("dst_arena", "dst_offset", "dst_stride"),
)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}

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
class _Chunk(ABC):
    """A part of one copy, at most CHUNK_BYTES long. Addresses are of contiguous bytes, 0 if they are not contiguous."""

    copy: int
    nbytes: int
    destination: Elements
    destination_at: int

    @abstractmethod
    def write(self, scratch: _Scratch) -> None:
        """Copy the source to the destination."""

    @abstractmethod
    def expected_at(self, scratch: _Scratch) -> int:
        """Read the source again; return the address of the bytes that the destination should hold, packed."""

    def written_at(self, scratch: _Scratch) -> int:
        """Return the address of the destination's bytes, packed."""
        return self.destination_at or scratch.gather(self.destination)


@dataclass(frozen=True, eq=False, slots=True)
class _ArenaChunk(_Chunk):
    source: Elements
    source_at: int

    def write(self, scratch: _Scratch) -> None:
        np.copyto(self.destination, self.source)

    def expected_at(self, scratch: _Scratch) -> int:
        return self.source_at or scratch.gather(self.source)


@dataclass(frozen=True, eq=False, slots=True)
class _LentChunk(_Chunk):
    source: RemoteChunk

    def write(self, scratch: _Scratch) -> None:
        if self.destination_at:
            self.source.read_to(self.destination_at)
            return
        self.source.read_to(scratch.address)
        np.copyto(self.destination, scratch.view(self.destination.shape, self.destination.dtype))

    def expected_at(self, scratch: _Scratch) -> int:
        # another process's pages are not locked: a source that has changed meanwhile differs here
        self.source.read_to(scratch.address)
        return scratch.address


@dataclass(frozen=True, eq=False, slots=True)
class _ConvertedChunk(_Chunk):
    source: Elements | RemoteChunk
    cast: int

    def write(self, scratch: _Scratch) -> None:
        np.copyto(self.destination, self._converted(scratch))

    def expected_at(self, scratch: _Scratch) -> int:
        return scratch.gather(self._converted(scratch))

    def _converted(self, scratch: _Scratch) -> Elements:
        if not isinstance(self.source, RemoteChunk):
            return converted(self.cast, self.source)
        self.source.read_to(scratch.address)
        words = np.dtype(_UNSIGNED[SOURCE_SIZES[self.cast]])
        return converted(self.cast, scratch.view(self.destination.shape, words))


class SharedMemoryService(MappedCopyService):
    """Copies between arenas mapped into this process, on `threads` threads."""

    name = "shm"
    capabilities = Capabilities(is_one_sided=True, crosses_nodes=False)

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads

    def prepare(self, copies: CopyList, arenas: Mapping[int, MappedArena]) -> PreparedJob:
        """See CopyService.prepare."""
        chunks: list[tuple[int, _Chunk]] = []
        # whole columns at once: reading one number of an array costs as much as a small copy
        columns = (getattr(copies, name).tolist() for name in _ROW)
        for row, values in enumerate(zip(*columns, strict=True)):
            size, element, cast, src_arena, src_pid, src_at, src_stride, dst_arena, dst_at, dst_stride = values
            if not 0 <= cast < len(SOURCE_SIZES) or (cast and element != DESTINATION_SIZES[cast]):
                raise TransportError(f"copy {row}: there is no conversion {cast} to elements of {element} bytes")
            src_element = SOURCE_SIZES[cast] or element
            target = _checked(arenas, dst_arena, dst_at, size, dst_stride, element, row)
            if not target.writable:
                raise TransportError(f"copy {row}: arena {dst_arena} is mapped for reading only")
            if src_arena != PROCESS_MEMORY:
                origin = _checked(arenas, src_arena, src_at, size, src_stride, src_element, row)
            for box, src_skip, dst_skip in _boxes(size, src_stride, dst_stride, max(element, src_element)):
                as_bytes = not cast and bool(box) and box[-1][1] == box[-1][2] == element
                view = _view(target.bytes, dst_at + dst_skip, box, 2, element, as_bytes)
                order = begins = target.address + dst_at + dst_skip
                written = (row, view.nbytes, view, begins if view.flags.c_contiguous else 0)
                source: Elements | RemoteChunk
                chunk: _Chunk
                source_at = 0
                if src_arena == PROCESS_MEMORY:
                    source = RemoteChunk(src_pid, src_at + src_skip, [(n, s) for n, s, _ in box], src_element)
                else:
                    source = _view(origin.bytes, src_at + src_skip, box, 1, src_element, as_bytes)
                    if source.flags.c_contiguous:
                        source_at = origin.address + src_at + src_skip
                    else:
                        order = origin.address + src_at + src_skip
                if cast:
                    chunk = _ConvertedChunk(*written, source, cast)
                elif isinstance(source, RemoteChunk):
                    chunk = _LentChunk(*written, source)
                else:
                    chunk = _ArenaChunk(*written, source, source_at)
                chunks.append((order, chunk))
        # Processors prefetch. In a tensor cut in columns, half a row is followed by its other half, which another copy
        # reads or writes. Running such copies one after the other takes a quarter less time.
        chunks.sort(key=itemgetter(0))
        return _SharedMemoryJob([chunk for _, chunk in chunks], len(copies), self._threads)

    def close(self) -> None:
        """See CopyService.close; nothing is held between runs."""


class _SharedMemoryJob(PreparedJob):
    def __init__(self, chunks: list[_Chunk], copies: int, threads: int) -> None:
        self._chunks = chunks
        self._copies = copies
        self._threads = max(1, min(threads, len(chunks)))
        self._bytes = sum(chunk.nbytes for chunk in chunks)
        self._scratch = [(_Scratch(), _Scratch()) for _ in range(self._threads)]

    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """See PreparedJob.run."""
        started = time.perf_counter()
        # nothing here waits for another process, so `timeout` does not apply
        if self._threads == 1:
            _work(iter(self._chunks), *self._scratch[0], verify, on_progress)
        else:
            self._run_threads(verify, on_progress)
        return RunResult(self._copies, self._bytes, time.perf_counter() - started)

    def _run_threads(self, verify: bool, on_progress: Callable[[int], None]) -> None:
        work = _Shared(self._chunks, on_progress)
        threads = [
            threading.Thread(target=work.take_part, args=(*scratch, verify), daemon=True) for scratch in self._scratch
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # an interrupt: nothing may be written after it is passed on
            work.stop()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
        if work.failure is not None:
            raise work.failure


class _Shared:
    """The chunks of one run, shared by several threads; a failure of one stops all."""

    def __init__(self, chunks: list[_Chunk], on_progress: Callable[[int], None]) -> None:
        self.failure: BaseException | None = None
        self._left = iter(chunks)
        self._on_progress = on_progress
        self._bytes_done = 0
        self._is_stopped = False
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Give out no more chunks."""
        self._is_stopped = True

    def take_part(self, near: _Scratch, far: _Scratch, verify: bool) -> None:
        """Work on chunks until none are left; the body of a thread."""
        mine = 0

        def progress(bytes_done: int) -> None:
            nonlocal mine
            with self._lock:
                self._bytes_done, mine = self._bytes_done + bytes_done - mine, bytes_done
                if not self._is_stopped:
                    try:
                        self._on_progress(self._bytes_done)
                    except BaseException:
                        self._is_stopped = True  # before the lock is free: no other thread may call it again
                        raise

        try:
            _work(self._taken(), near, far, verify, progress)
        except BaseException as exc:  # raised again in the caller's thread
            with self._lock:
                self.failure = self.failure or exc
            self.stop()

    def _taken(self) -> Iterator[_Chunk]:
        while not self._is_stopped:
            with self._lock:
                chunk = next(self._left, None)
            if chunk is None:
                return
            yield chunk


def _work(
    chunks: Iterator[_Chunk], near: _Scratch, far: _Scratch, verify: bool, on_progress: Callable[[int], None]
) -> None:
    done, next_report = 0, PROGRESS_BYTES
    for chunk in chunks:
        chunk.write(near)
        if verify and _memcmp(chunk.expected_at(near), chunk.written_at(far), chunk.nbytes):
            raise DigestMismatch(
                f"copy {chunk.copy}: {chunk.nbytes} bytes differ after writing; the source changed while it was "
                "read, or something else writes to the destination",
                chunk.copy,
            )
        done += chunk.nbytes
        if done >= next_report:
            next_report = done + PROGRESS_BYTES
            on_progress(done)
    on_progress(done)


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
    end = offset + extent(size, stride, element)
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


def _view(buffer: Bytes, offset: int, box: list[_Dim], side: int, element: int, as_bytes: bool) -> Elements:
    """Return the box as an array over `buffer`; as bytes if the last dimension is contiguous at both ends."""
    shape = [d[0] for d in box]
    strides = [d[side] for d in box]
    if as_bytes:
        shape[-1] *= element
        strides[-1] = 1
        if len(box) == 1:
            return buffer[offset : offset + shape[0]]
    dtype: type[np.generic] = np.uint8 if as_bytes else _UNSIGNED[element]
    return np.ndarray(tuple(shape), dtype, buffer, offset, tuple(strides))
