"""Shared memory: one copy per byte between arenas of one node, digests taken while the bytes are in cache."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from refitd.buffers.arena import MappedArena
from refitd.buffers.layout import extent
from refitd.copy_services.base import Capabilities, DigestMismatch, MappedCopyService, PreparedJob, RunResult
from refitd.copy_services.conversions import converted
from refitd.copy_services.process_memory import RemoteChunk
from refitd.describe.casts import DESTINATION_SIZES, SOURCE_SIZES
from refitd.errors import TransportError
from refitd.execute.copies import PROCESS_MEMORY, CopyList

# Fits, read and written, into the second-level cache of every server core of the last ten years.
CHUNK_BYTES = 256 << 10
PROGRESS_BYTES = 32 << 20

Bytes = npt.NDArray[np.uint8]
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass(frozen=True, eq=False, slots=True)
class _Chunk:
    """A part of one copy, at most CHUNK_BYTES long."""

    copy: int
    nbytes: int
    source: npt.NDArray[np.generic] | RemoteChunk
    destination: npt.NDArray[np.generic]
    cast: int

    def read(self, scratch: Bytes) -> npt.NDArray[np.generic]:
        """Return the elements as they are to be written, in the destination's shape; read anew at each call."""
        if isinstance(self.source, RemoteChunk):
            raw = self.source.read(scratch)
            words = raw.view(_UNSIGNED[SOURCE_SIZES[self.cast]] if self.cast else self.destination.dtype)
            words = words.reshape(self.destination.shape)
        else:
            words = self.source
        return converted(self.cast, words) if self.cast else words


class SharedMemoryService(MappedCopyService):
    """Copies between arenas mapped into this process, on `threads` threads."""

    name = "shm"
    capabilities = Capabilities(is_one_sided=True, crosses_nodes=False)

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads

    def prepare(self, copies: CopyList, arenas: Mapping[int, MappedArena]) -> PreparedJob:
        """See CopyService.prepare."""
        chunks: list[_Chunk] = []
        for row in range(len(copies)):
            size, element = copies.size[row].tolist(), int(copies.element_size[row])
            cast = int(copies.cast[row])
            if not 0 <= cast < len(SOURCE_SIZES) or (cast and element != DESTINATION_SIZES[cast]):
                raise TransportError(f"copy {row}: there is no conversion {cast} to elements of {element} bytes")
            src_element = SOURCE_SIZES[cast] or element
            src_stride, dst_stride = copies.src_stride[row].tolist(), copies.dst_stride[row].tolist()
            src_arena = int(copies.src_arena[row])
            src_at, dst_at = int(copies.src_offset[row]), int(copies.dst_offset[row])
            target = _checked(arenas, int(copies.dst_arena[row]), dst_at, size, dst_stride, element, row)
            if not target.writable:
                raise TransportError(f"copy {row}: arena {int(copies.dst_arena[row])} is mapped for reading only")
            if src_arena != PROCESS_MEMORY:
                origin = _checked(arenas, src_arena, src_at, size, src_stride, src_element, row)
            for box, src_skip, dst_skip in _boxes(size, src_stride, dst_stride, max(element, src_element)):
                as_bytes = not cast and bool(box) and box[-1][1] == box[-1][2] == element
                view = _view(target.bytes, dst_at + dst_skip, box, 2, element, as_bytes)
                source: npt.NDArray[np.generic] | RemoteChunk
                if src_arena == PROCESS_MEMORY:
                    source = RemoteChunk(
                        int(copies.src_pid[row]), src_at + src_skip, [(n, s) for n, s, _ in box], src_element
                    )
                else:
                    source = _view(origin.bytes, src_at + src_skip, box, 1, src_element, as_bytes)
                nbytes = element
                for n, _, _ in box:
                    nbytes *= n
                chunks.append(_Chunk(row, nbytes, source, view, cast))
        return _SharedMemoryJob(chunks, len(copies), self._threads)

    def close(self) -> None:
        """See CopyService.close; nothing is held between runs."""


class _SharedMemoryJob(PreparedJob):
    def __init__(self, chunks: list[_Chunk], copies: int, threads: int) -> None:
        self._chunks = chunks
        self._copies = copies
        self._threads = max(1, min(threads, len(chunks)))
        self._bytes = sum(chunk.nbytes for chunk in chunks)
        self._scratch = [np.empty(CHUNK_BYTES, dtype=np.uint8) for _ in range(2 * self._threads)]

    def run(self, *, verify: bool, on_progress: Callable[[int], None]) -> RunResult:
        """See PreparedJob.run."""
        started = time.perf_counter()
        if self._threads == 1:
            self._work(iter(self._chunks), self._scratch[:2], verify, on_progress)
        else:
            self._run_threads(verify, on_progress)
        return RunResult(self._copies, self._bytes, time.perf_counter() - started)

    def _run_threads(self, verify: bool, on_progress: Callable[[int], None]) -> None:
        work: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        for chunk in self._chunks:
            work.put(chunk)
        for _ in range(self._threads):
            work.put(None)
        failures: list[BaseException] = []
        lock, done = threading.Lock(), [0]

        def report(index: int) -> Callable[[int], None]:
            seen = [0]

            def progress(bytes_done: int) -> None:
                with lock:
                    done[0] += bytes_done - seen[0]
                    seen[0] = bytes_done
                    on_progress(done[0])

            return progress

        def body(index: int) -> None:
            try:
                mine = iter(work.get, None)
                self._work(mine, self._scratch[2 * index : 2 * index + 2], verify, report(index))
            except BaseException as exc:  # carried to the caller's thread
                failures.append(exc)

        threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(self._threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _work(
        self, chunks: Iterator[_Chunk], scratch: list[Bytes], verify: bool, on_progress: Callable[[int], None]
    ) -> None:
        done, next_report = 0, PROGRESS_BYTES
        copyto = np.copyto
        # numpy's arrays are buffers; its stubs do not say so
        digest: Callable[[Any], int] = xxhash.xxh3_64_intdigest
        for chunk in chunks:
            destination = chunk.destination
            copyto(destination, chunk.read(scratch[0]))
            # read again, so that a source that changes meanwhile is seen: nothing locks its pages
            read = digest(_packed(chunk.read(scratch[0]), scratch[0])) if verify else 0
            if verify and read != digest(_packed(destination, scratch[1])):
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


def _packed(view: npt.NDArray[np.generic], scratch: Bytes) -> npt.NDArray[np.generic]:
    """Return the view's bytes contiguously, gathered into scratch where they are not."""
    if view.flags.c_contiguous:
        return view
    out = scratch[: view.nbytes].view(view.dtype).reshape(view.shape)
    np.copyto(out, view)
    return out


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
        # outer and inner dimension are one where both ends step seamlessly from row to row
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


def _view(
    buffer: Bytes, offset: int, box: list[_Dim], side: int, element: int, as_bytes: bool
) -> npt.NDArray[np.generic]:
    """Return the box as an array over `buffer`; one whose last dimension is contiguous at both ends, as bytes."""
    shape = [d[0] for d in box]
    strides = [d[side] for d in box]
    if as_bytes:
        shape[-1] *= element
        strides[-1] = 1
        if len(box) == 1:
            return buffer[offset : offset + shape[0]]
    dtype: type[np.generic] = np.uint8 if as_bytes else _UNSIGNED[element]
    return np.ndarray(tuple(shape), dtype, buffer.data, offset, tuple(strides))
