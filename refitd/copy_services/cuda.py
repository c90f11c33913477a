"""Copies to and from arenas of one GPU, on a private stream.

Each row takes the path that `refitd.addressing.paths` names for its two memories. Verification reads both ends again
after the copy and compares them: on the GPU if an end is there, and otherwise in main memory. Conversions are repeated
for this.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import torch

from refitd.addressing.copies import CopyList
from refitd.addressing.paths import MAIN_MEMORY, Abilities, Path, path
from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena
from refitd.copy_services import Arriving, Capabilities, MappedCopyService, PreparedJob, RunResult
from refitd.copy_services.boxes import ROW, Row, Table, box, rows, tables
from refitd.copy_services.copy_engines import Engine, EngineJob, mismatch
from refitd.copy_services.parts import Part, PartsJob
from refitd.copy_services.waits import Deadline, DeviceStream, poll
from refitd.dtypes import CASTS
from refitd.errors import TransportError

# Bytes between two progress reports: about 0.1 ms of copying. As many are queued while one is reported.
PROGRESS_BYTES = 256 << 20
_DEFAULT_S = 600.0
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CudaCopyService(MappedCopyService):
    """Copies and casts between arenas of which at least one is a MappedDeviceArena of this GPU."""

    name = "cuda"
    capabilities = Capabilities(is_one_sided=True, crosses_nodes=False, devices=frozenset({"cuda"}))

    def __init__(self, device: int = 0) -> None:
        """Use the device with this number in this process."""
        self._device = device
        self._stream = DeviceStream(torch.device("cuda", device))
        self._engines: dict[int, Engine] = {}

    def prepare(self, copies: CopyList, arenas: Mapping[int, Any]) -> PreparedJob:
        """See MappedCopyService.prepare; arenas are MappedDeviceArenas and MappedArenas."""
        used = {number: arena for number, arena in arenas.items() if number in copies.arenas()}
        sizes = {number: arena.nbytes for number, arena in used.items()}
        found = list(rows(copies, sizes, {number for number, arena in used.items() if arena.writable}))
        groups: dict[tuple[Path, int, int], list[Row]] = {}
        ways: dict[tuple[int, int], Path] = {}  # of each pair of arenas
        for row in found:
            ends = row.source.arena, row.destination.arena
            source, destination = used[ends[0]], used[ends[1]]
            if self._device not in (source.device, destination.device):
                raise TransportError(
                    f"copy {row.row}: neither end is on GPU {self._device}, which this service copies on"
                )
            if ends not in ways:
                ways[ends] = self._path(source, destination)
            way = Path.TENSORS if row.cast else ways[ends]
            groups.setdefault((way, source.device, destination.device), []).append(row)
        parts = []
        for (way, here, there), some in groups.items():
            job: PreparedJob
            if way in (Path.KERNEL, Path.PEER):
                job = _KernelJob(way, some, used, self._stream)
            elif way is Path.TENSORS:
                job = _TensorJob(way, some, used, self._stream)
            else:
                job = EngineJob(some, used, self._engine(here), self._engine(there))
            parts.append(Part(job))
        return PartsJob(parts, len(copies) - len(found))

    def _path(self, source: Any, destination: Any) -> Path:
        """Return the path between two arenas, of which one is on this GPU."""
        here, there = (MAIN_MEMORY if end.device < 0 else str(end.device) for end in (source, destination))
        can_peer = has_kernels() and destination.device == self._device and source.device not in (-1, self._device)
        peers = frozenset({(there, here)} if can_peer and source.open_to(self._device) else ())
        return path(here, there, Abilities(has_kernels=has_kernels(), peers=peers))

    def _engine(self, gpu: int) -> Engine | None:
        """Return the copy engines of a GPU; None for main memory."""
        if gpu >= 0 and gpu not in self._engines:
            self._engines[gpu] = Engine(gpu)
        return self._engines.get(gpu)

    def close(self) -> None:
        """See CopyService.close."""
        while self._engines:
            self._engines.popitem()[1].close()


def has_kernels() -> bool:
    """Return whether the copy kernel can be compiled here; tensor operations do its work otherwise."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


class _StreamJob(PreparedJob):
    """Copies on a stream of torch, checked once all are queued."""

    def __init__(self, way: Path, found: list[Row], arenas: Mapping[int, Any], stream: DeviceStream) -> None:
        self._way, self._rows = way, found
        self._arenas = arenas
        self._stream = stream
        self._arriving: Arriving | None = None
        self._reads: dict[int, tuple[int, int, int]] = {}  # of each row, during a publication

    def follow(self, arriving: Arriving | None) -> bool:
        """See PreparedJob.follow."""
        self._arriving = arriving
        self._reads = {row.row: row.reads for row in self._rows} if arriving is not None else {}
        return True

    def _await(self, some: Iterable[int]) -> None:
        """Return once the sources of these rows are written."""
        if self._arriving is not None:
            self._arriving.await_all(self._reads[row] for row in some)

    @abstractmethod
    def _copy(self) -> Iterator[int]:
        """Queue the copies; after each step yield the bytes that it copies."""

    @abstractmethod
    def _check(self) -> Callable[[], list[int]]:
        """Queue the comparisons; return a function that returns the rows that differ, and may wait for the GPU."""

    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """See PreparedJob.run. After `timeout` the GPU may still write, so the worker must end."""
        started, deadline = time.perf_counter(), Deadline.after(timeout or _DEFAULT_S)
        subject = f"copies on {self._stream.device}"
        with self._stream.work(deadline, subject):
            try:
                total = self._queue(on_progress, deadline, subject)
                found = self._check() if verify else list
            except BaseException:
                self._stream.settle(deadline, subject)  # queued writes must end before the error is passed on
                raise
            self._stream.settle(deadline, subject)
            if wrong := found():
                raise mismatch(wrong[0])
        return RunResult(len(self._rows), total, time.perf_counter() - started, paths=(self._way,))

    def _queue(self, on_progress: Callable[[int], None], deadline: Deadline, subject: str) -> int:
        """Queue all copies, at most two reports ahead of the GPU; return their bytes."""
        flying: deque[tuple[torch.cuda.Event, int]] = deque()
        done, next_report = 0, PROGRESS_BYTES

        def report() -> None:
            event, so_far = flying.popleft()
            poll(event.query, deadline, f"{subject}: the GPU has not done {so_far} bytes")
            on_progress(so_far)

        for nbytes in self._copy():
            done += nbytes
            if done >= next_report:
                next_report = done + PROGRESS_BYTES
                flying.append((self._stream.mark(), done))
                if len(flying) > 2:
                    report()
        flying.append((self._stream.mark(), done))
        while flying:
            report()
        return done


class _KernelJob(_StreamJob):
    """Copies by the kernel: a launch for each kind of boxes and PROGRESS_BYTES, and as many to compare."""

    def __init__(self, way: Path, found: list[Row], arenas: Mapping[int, Any], stream: DeviceStream) -> None:
        super().__init__(way, found, arenas, stream)
        at = {number: arena.address for number, arena in arenas.items()}
        boxes = (box(row).moved(at[row.source.arena], at[row.destination.arena]) for row in found)
        self._tables = [_DeviceTable.load(table, stream.device) for table in tables(boxes)]

    def _copy(self) -> Iterator[int]:
        for table in self._tables:
            yield from table.launch(None, self._await)

    def _check(self) -> Callable[[], list[int]]:
        most = 1 + max((row.row for row in self._rows), default=0)
        differing = torch.zeros(most, dtype=torch.int32, device=self._stream.device)
        for table in self._tables:
            deque(table.launch(differing), maxlen=0)
        return lambda: differing.nonzero().view(-1).tolist()


@dataclass(frozen=True, eq=False, slots=True)
class _DeviceTable:
    """A table on the GPU, with the tiles of each launch: (first, count, bytes)."""

    table: Table
    entries: torch.Tensor
    tiles: torch.Tensor
    launches: list[tuple[int, int, int]]

    @classmethod
    def load(cls, table: Table, device: torch.device) -> _DeviceTable:
        ends = np.cumsum(table.tile_bytes)
        marks = range(PROGRESS_BYTES, int(ends[-1]), PROGRESS_BYTES)
        cuts = [0, *np.unique(np.searchsorted(ends, marks)).tolist(), len(ends)]
        launches = [
            (first, last - first, int(table.tile_bytes[first:last].sum()))
            for first, last in pairwise(cuts)
            if last > first
        ]
        entries, tiles = (torch.from_numpy(part).to(device) for part in (table.entries, table.tiles))
        return cls(table, entries, tiles, launches)

    def launch(self, differing: torch.Tensor | None, ready: Callable[[Iterable[int]], object] = tuple) -> Iterator[int]:
        """Copy, or count the differing words of each row; yield the bytes of each launch.

        `ready` gets the rows of each launch and returns once it may begin.
        """
        from refitd.copy_services import copy_kernel

        for first, count, nbytes in self.launches:
            ready(np.unique(self.table.entries[self.table.tiles[first : first + count], ROW]).tolist())
            copy_kernel.launch(self.table.kind, self.entries, self.tiles, first, count, differing)
            yield nbytes


class _TensorJob(_StreamJob):
    """Copies and conversions by torch, one after another."""

    def __init__(self, way: Path, found: list[Row], arenas: Mapping[int, Any], stream: DeviceStream) -> None:
        super().__init__(way, found, arenas, stream)
        tensors = {number: _bytes_of(arena) for number, arena in arenas.items()}
        self._pairs = [pair(row, tensors) for row in found]

    def _copy(self) -> Iterator[int]:
        for one in self._pairs:
            self._await((one.row,))
            one.destination.copy_(one.readable())
            yield one.nbytes

    def _check(self) -> Callable[[], list[int]]:
        found = [(one.row, one.differs()) for one in self._pairs]
        return lambda: [row for row, differs in found if bool(differs)]


def _bytes_of(arena: MappedArena | MappedDeviceArena) -> torch.Tensor:
    if isinstance(arena, MappedDeviceArena):
        return arena.tensor
    with warnings.catch_warnings():
        # the arena may be mapped for reading only
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(arena.bytes)


@dataclass(frozen=True, eq=False, slots=True)
class Pair:
    """One copy: views of both ends, of equal shape, and of equal words unless elements are converted."""

    row: int
    source: torch.Tensor
    destination: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        return self.destination.numel() * self.destination.element_size()

    def readable(self) -> torch.Tensor:
        """Return the source in memory that the destination's device reads."""
        if self.source.is_cuda and self.destination.is_cuda and self.source.device != self.destination.device:
            return self.source.cpu()  # torch would use peer access, for which arenas are not mapped
        return self.source

    def differs(self) -> torch.Tensor:
        """Read both ends again and return, as one bool where the destination is, whether they differ.

        Conversions are repeated. Any NaN then equals any other.
        """
        found = self.destination
        expected = self.readable().to(found.device).to(found.dtype)
        if self.source.dtype == found.dtype:
            return torch.ne(found, expected).any()
        word = _WORDS[found.element_size()]
        same = found.contiguous().view(word) == expected.contiguous().view(word)
        return torch.logical_not(same | (found.isnan() & expected.isnan())).any()


def pair(row: Row, arenas: Mapping[int, torch.Tensor]) -> Pair:
    """Return a row as a pair of tensor views; `arenas` has each arena as a uint8 tensor.

    Raises:
        TransportError: the conversion is not possible on a GPU.
    """
    if row.cast:
        ends = (
            _elements(row.row, arenas[end.arena], end.offset, row.size, end.stride, _DTYPES[dtype])
            for end, dtype in zip((row.source, row.destination), CASTS[row.cast], strict=True)
        )
        return Pair(row.row, *ends)
    whole = box(row)
    word = gcd(8, whole.run, whole.source, whole.destination, *whole.strides)
    views = (
        _view(arenas[number], offset, [(dim[0], dim[side]) for dim in whole.dims], whole.run, word)
        for side, (number, offset) in enumerate(
            ((row.source.arena, whole.source), (row.destination.arena, whole.destination)), 1
        )
    )
    return Pair(row.row, *views)


def _elements(
    row: int, arena: torch.Tensor, offset: int, size: list[int], stride: list[int], dtype: torch.dtype
) -> torch.Tensor:
    word = dtype.itemsize
    if offset % word or any(step % word for step in stride):
        raise TransportError(f"copy {row}: {dtype} at byte {offset}, {stride} apart, cannot be converted on a GPU")
    values = arena[: arena.numel() // word * word].view(dtype)
    return values.as_strided(size, [step // word for step in stride], values.storage_offset() + offset // word)


def _view(arena: torch.Tensor, offset: int, dims: list[tuple[int, int]], run: int, word: int) -> torch.Tensor:
    words = arena[: arena.numel() // word * word].view(_WORDS[word])
    shape = [*(count for count, _ in dims), run // word]
    strides = [*(step // word for _, step in dims), 1]
    return words.as_strided(shape, strides, words.storage_offset() + offset // word)
