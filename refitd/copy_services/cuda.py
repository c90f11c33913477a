"""Copies to and from arenas of one GPU, on a private stream.

Verification depends on the ends. Within the GPU, digests computed there are compared. If one end is in main memory,
both ends are read again and compared there; conversions are repeated for this. A copy to another GPU goes through main
memory, and each GPU computes the digest of its end.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from refitd.addressing.copies import CopyList
from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena
from refitd.buffers.layout import extent
from refitd.copy_services import Capabilities, DigestMismatch, MappedCopyService, PreparedJob, RunResult
from refitd.copy_services.digests import DeviceDigests
from refitd.copy_services.waits import Deadline, DeviceStream, poll
from refitd.describe.casts import CASTS, DESTINATION_SIZES, SOURCE_SIZES
from refitd.errors import TransportError

# Bytes between two progress reports: about 0.1 ms of copying. As many are queued while one is reported.
PROGRESS_BYTES = 256 << 20
_DEFAULT_S = 600.0
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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

    @property
    def is_cast(self) -> bool:
        """Whether elements are converted."""
        return self.source.dtype != self.destination.dtype

    def is_equal(self) -> bool:
        """Read both ends again and compare them in main memory; any NaN equals any other after a conversion."""
        found, expected = self.destination.cpu(), self.source.cpu()
        if not self.is_cast:
            return torch.equal(found, expected)
        expected = expected.to(found.dtype)
        word = _WORDS[found.element_size()]
        same = found.contiguous().view(word) == expected.contiguous().view(word)
        return bool((same | (found.isnan() & expected.isnan())).all())


class CudaCopyService(MappedCopyService):
    """Copies and casts between arenas of which at least one is a MappedDeviceArena of this GPU."""

    name = "cuda"
    capabilities = Capabilities(is_one_sided=True, crosses_nodes=False, devices=frozenset({"cuda"}))

    def __init__(self, device: int = 0) -> None:
        """Use the device with this number in this process."""
        self._device = device
        self._stream = DeviceStream(torch.device("cuda", device))
        self._digests = _Digests({device: self._stream.device})

    def prepare(self, copies: CopyList, arenas: Mapping[int, Any]) -> PreparedJob:
        """See MappedCopyService.prepare; arenas are MappedDeviceArenas and MappedArenas."""
        used = {number: arena for number, arena in arenas.items() if number in copies.arenas()}
        for row in range(len(copies)):
            ends = [used.get(int(end[row])) for end in (copies.src_arena, copies.dst_arena)]
            if None not in ends and all(arena.device != self._device for arena in ends if arena is not None):
                raise TransportError(f"copy {row}: neither end is on GPU {self._device}, which this service copies on")
        written = {number for number, arena in used.items() if arena.writable}
        tensors = {number: _bytes_of(arena) for number, arena in used.items()}
        work = []
        for pair in pairs(copies, tensors, written):
            gpus = (used[int(arena[pair.row])].device for arena in (copies.src_arena, copies.dst_arena))
            work.append(_Step(pair, *gpus))
        return _CudaJob(work, len(copies), self._stream, self._digests)

    def close(self) -> None:
        """See CopyService.close. The service has no state between runs."""


@dataclass(frozen=True, eq=False, slots=True)
class _Step:
    """A copy, with the GPU number of each end; -1 for main memory."""

    pair: Pair
    source: int
    destination: int

    @property
    def is_between_gpus(self) -> bool:
        """Whether it goes from one GPU to another, through main memory."""
        return self.source != self.destination and min(self.source, self.destination) >= 0

    @property
    def is_compared(self) -> bool:
        """Whether both ends are compared in main memory: one end is there, or a cast makes the digests differ."""
        return min(self.source, self.destination) < 0 or self.pair.is_cast


class _Digests:
    """Computes digests on the service's GPU and, if needed, on others."""

    def __init__(self, devices: dict[int, torch.device]) -> None:
        self._devices = devices
        self._by_gpu = {gpu: DeviceDigests(device) for gpu, device in devices.items()}

    def sums(self, view: torch.Tensor, gpu: int) -> torch.Tensor:
        """Return the digest's sums of a view on a GPU."""
        if gpu not in self._by_gpu:
            self._by_gpu[gpu] = DeviceDigests(view.device)
        digest = self._by_gpu[gpu].new()
        digest.update(view.contiguous().reshape(-1).view(torch.uint8))
        return digest.sums()


def _bytes_of(arena: MappedArena | MappedDeviceArena) -> torch.Tensor:
    if isinstance(arena, MappedDeviceArena):
        return arena.tensor
    with warnings.catch_warnings():
        # the arena may be mapped for reading only
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(arena.bytes)


class _CudaJob(PreparedJob):
    def __init__(self, work: list[_Step], copies: int, stream: DeviceStream, digests: _Digests) -> None:
        self._work = work
        self._copies = copies
        self._stream = stream
        self._digests = digests

    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """See PreparedJob.run. After `timeout` the GPU may still write, so the worker must end."""
        started, deadline = time.perf_counter(), Deadline.after(timeout or _DEFAULT_S)
        subject = f"copies on {self._stream.device}"
        with self._stream.work(deadline, subject):
            try:
                total, read, found = self._queue(verify, on_progress, deadline, subject)
            except BaseException:
                self._stream.settle(deadline, subject)  # queued writes must end before the error is passed on
                raise
            if wrong := self._differing(read, found):
                raise _mismatch(wrong[0])
        return RunResult(self._copies, total, time.perf_counter() - started)

    def _queue(
        self, verify: bool, on_progress: Callable[[int], None], deadline: Deadline, subject: str
    ) -> tuple[int, list[torch.Tensor], list[torch.Tensor]]:
        """Queue all copies, at most two reports ahead of the GPU; return (bytes, digests read, digests found)."""
        flying: deque[tuple[torch.cuda.Event, int]] = deque()
        read: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        done, next_report = 0, PROGRESS_BYTES

        def report() -> None:
            event, so_far = flying.popleft()
            poll(event.query, deadline, f"{subject}: the GPU has not done {so_far} bytes")
            on_progress(so_far)

        for step in self._work:
            pair = step.pair
            # via main memory: torch would use peer access, for which arenas are not mapped
            pair.destination.copy_(pair.source.cpu() if step.is_between_gpus else pair.source)
            if verify and step.is_compared:
                # reads both ends again in main memory, which waits for the GPU
                if not pair.is_equal():
                    raise _mismatch(pair.row)
            elif verify:
                read.append(self._digests.sums(pair.source, step.source).to(pair.destination.device))
                found.append(self._digests.sums(pair.destination, step.destination))
            done += pair.nbytes
            if done >= next_report:
                next_report = done + PROGRESS_BYTES
                flying.append((self._stream.mark(), done))
                if len(flying) > 2:
                    report()
        flying.append((self._stream.mark(), done))
        while flying:
            report()
        return done, read, found

    def _differing(self, read: list[torch.Tensor], found: list[torch.Tensor]) -> list[int]:
        """Return the rows whose digests differ."""
        if not read:
            return []
        differs = (torch.cat(read) != torch.cat(found)).any(1).tolist()
        digested = [step.pair.row for step in self._work if not step.is_compared]
        rows = [row for row, sums in zip(digested, read, strict=True) for _ in range(len(sums))]
        return sorted({row for row, differ in zip(rows, differs, strict=True) if differ})


def _mismatch(row: int) -> DigestMismatch:
    return DigestMismatch(
        f"copy {row}: its bytes differ after writing; the source changed while it was read, or another process writes "
        "to the destination",
        row,
    )


def pairs(copies: CopyList, arenas: Mapping[int, torch.Tensor], written: set[int]) -> list[Pair]:
    """Return a list of copies as pairs of tensor views.

    Args:
        copies: rows between arenas.
        arenas: each arena as a uint8 tensor.
        written: ids of the writable arenas.

    Raises:
        TransportError: a copy leaves its arena, writes to a read-only one, or is not possible on a GPU.
    """
    found = []
    for row in range(len(copies)):
        size, element = copies.size[row].tolist(), int(copies.element_size[row])
        cast = int(copies.cast[row])
        if cast and (cast not in CASTS or element != DESTINATION_SIZES[cast]):
            raise TransportError(f"copy {row}: conversion {cast} to elements of {element} bytes does not exist")
        ends = (
            (int(copies.src_arena[row]), int(copies.src_offset[row]), copies.src_stride[row].tolist()),
            (int(copies.dst_arena[row]), int(copies.dst_offset[row]), copies.dst_stride[row].tolist()),
        )
        for (number, offset, stride), held in zip(ends, (SOURCE_SIZES[cast] or element, element), strict=True):
            arena = arenas.get(number)
            if arena is None:
                raise TransportError(f"copy {row}: arena {number} is not mapped here")
            end = offset + extent(size, stride, held)
            if offset < 0 or min(stride) < 0 or end > arena.numel():
                raise TransportError(f"copy {row}: bytes {offset}..{end} leave arena {number} of {arena.numel()} bytes")
        if ends[1][0] not in written:
            raise TransportError(f"copy {row}: arena {ends[1][0]} is mapped for reading only")
        if 0 in size:
            continue
        if cast:
            views = (
                _elements(row, arenas[number], offset, size, stride, _DTYPES[dtype])
                for (number, offset, stride), dtype in zip(ends, CASTS[cast], strict=True)
            )
            found.append(Pair(row, *views))
            continue
        dims, run = _merged(size, ends[0][2], ends[1][2], element)
        word = gcd(8, run, *(offset for _, offset, _ in ends), *(step for _, *steps in dims for step in steps))
        source, destination = (
            _view(arenas[number], offset, [(dim[0], dim[1 + side]) for dim in dims], run, word)
            for side, (number, offset, _) in enumerate(ends)
        )
        found.append(Pair(row, source, destination))
    return found


_Dim = tuple[int, int, int]  # count, source stride, destination stride


def _merged(size: list[int], src: list[int], dst: list[int], element: int) -> tuple[list[_Dim], int]:
    """Merge dimensions where possible; return them and the bytes that are contiguous at both ends."""
    run = element
    dims: list[_Dim] = []
    for count, a, b in zip(reversed(size), reversed(src), reversed(dst), strict=True):
        if count == 1:
            continue
        if not dims and a == run == b:
            run *= count
        elif dims and a == dims[0][0] * dims[0][1] and b == dims[0][0] * dims[0][2]:
            dims[0] = (dims[0][0] * count, dims[0][1], dims[0][2])
        else:
            dims.insert(0, (count, a, b))
    return dims, run


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
