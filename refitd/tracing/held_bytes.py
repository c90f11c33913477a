"""Compare an engine's tensors bit for bit: with a learned layout, and with copies from before a possible write.

If memory is short, the copies are in a file.
"""

from __future__ import annotations

import bisect
import itertools
import os
import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch

from refitd.buffers.capacity import memory_limits
from refitd.describe.layout import row_major
from refitd.describe.metadata import ParameterMetadata, Tile
from refitd.errors import ArenaError, RefusedError

# Elements of a canonical tensor that are converted and compared in one step. On few cores a step fits a core's cache,
# and is too small for torch to divide among threads, which would wait for each other at each step.
FEW_CORES, STEP, LONG_STEP = 4, 1 << 15, 1 << 22


class Boxed(Protocol):
    """A canonical tensor that makes each box on demand.

    Attributes:
        shape: of the canonical tensor.
    """

    @property
    def shape(self) -> Sequence[int]:
        """Its shape."""

    def box(self, offset: Sequence[int], size: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return a box that spans at most `step_on(device)` elements of the row-major tensor; read-only."""


def differing(
    metadata: Mapping[str, ParameterMetadata],
    params: Mapping[str, torch.Tensor],
    weights: Iterable[tuple[str, torch.Tensor | Boxed]],
) -> tuple[dict[str, str], list[str]]:
    """Return the tensors that differ from the layout, each with its canonical tensor, and the missing canonical names.

    Args:
        metadata: the layout, by the engine's names.
        params: the engine's tensors, with values, on any device.
        weights: canonical tensors, one after the other; unused ones are skipped.

    Returns:
        ({the engine's name: the canonical name; "" for the constant}, canonical names that `weights` did not yield).
    """
    wanted: dict[str, list[tuple[str, Tile]]] = {}
    for name, meta in metadata.items():
        for tile in tiles_of(meta):
            wanted.setdefault(tile.tensor, []).append((name, tile))
    found: dict[str, str] = {}
    for name, weight in weights:
        for local, tile in wanted.pop(name, ()):
            if local not in found and not _holds(params[local], tile, weight):
                found[local] = name
    for local, meta in metadata.items():
        if meta.fill is not None and local not in found and not _is_filled(params[local], meta, meta.fill):
            found[local] = ""
    return found, [*wanted]


def step_on(device: torch.device) -> int:
    """Return the elements that are compared in one step."""
    return STEP if device.type == "cpu" and torch.get_num_threads() <= FEW_CORES else LONG_STEP


def tiles_of(meta: ParameterMetadata) -> tuple[Tile, ...]:
    """Return the tiles of a tensor; one, if it is a whole canonical tensor."""
    if meta.tiles is not None:
        return tuple(meta.tiles)
    shape = tuple(meta.shape)
    return (Tile(meta.resolved_name or meta.name, (0,) * len(shape), shape, 0, row_major(shape)),)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, row-major."""
    dense = tensor.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def are_equal(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two byte tensors are equal; long integers are compared several times as fast as bytes."""
    for word in (torch.int64, torch.int32, torch.int16):
        size = word.itemsize
        if not (mine.numel() % size or mine.storage_offset() % size or other.storage_offset() % size):
            return torch.equal(mine.view(word), other.view(word))
    return torch.equal(mine, other)


def _boxes(size: Sequence[int], shape: Sequence[int], step: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a box into parts that span at most `step` elements of a canonical tensor; yield (offset, size) of each."""
    strides = row_major(tuple(shape))
    if 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True)) <= step:
        yield (0,) * len(size), tuple(size)
        return
    dim = next(d for d, n in enumerate(size) if n > 1)
    most = max(1, step // strides[dim])
    for at in range(0, size[dim], most):
        part = (*size[:dim], min(most, size[dim] - at), *size[dim + 1 :])
        for offset, inside in _boxes(part, shape, step):
            yield (*offset[:dim], offset[dim] + at, *offset[dim + 1 :]), inside


def _holds(tensor: torch.Tensor, tile: Tile, weight: torch.Tensor | Boxed) -> bool:
    """Whether a tensor is equal to a tile of a canonical tensor, bit for bit after conversion to its dtype."""
    if not prod(tile.size):
        return True
    flat = tensor.detach().reshape(-1)
    r = tile.repeat
    for i in range(r.count if r else 1):
        offset, local = list(tile.offset), flat.storage_offset() + tile.local_offset
        if r:
            offset[r.dim] += i * r.step
            local += i * r.local_step
        for start, size in _boxes(tile.size, weight.shape, step_on(flat.device)):
            at = tuple(o + a for o, a in zip(offset, start, strict=True))
            if isinstance(weight, torch.Tensor):
                box = weight[tuple(slice(o, o + n) for o, n in zip(at, size, strict=True))]
            else:
                box = weight.box(at, size, flat.device)
            first = local + sum(a * stride for a, stride in zip(start, tile.local_stride, strict=True))
            mine = flat.as_strided(size, tile.local_stride, first)
            if not are_equal(bytes_of(mine), bytes_of(box.to(flat.device, flat.dtype, copy=True))):
                return False
    return True


def _is_filled(tensor: torch.Tensor, meta: ParameterMetadata, fill: float) -> bool:
    """Whether a tensor is equal to its fill outside all tiles."""
    rest = torch.ones(tensor.numel(), dtype=torch.bool)
    for tile in meta.tiles or ():
        r = tile.repeat
        for i in range(r.count if r else 1):
            at = tile.local_offset + (i * r.local_step if r else 0)
            rest.as_strided(tile.size, tile.local_stride, at).fill_(False)
    left = tensor.detach().reshape(-1)[rest.to(tensor.device)]
    return torch.equal(bytes_of(left), bytes_of(torch.full_like(left, fill)))


# Bytes that are copied without a check of the free memory, and the share of free memory that copies may take.
ALWAYS = 64 << 20
SHARE = 0.5

CHUNK = 64 << 20


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has strides and a storage. Sparse, wrapped and uninitialized ones do not."""
    try:
        return tensor.layout == torch.strided and bool(storage_key(tensor)) and tensor.detach() is not None
    except (RuntimeError, NotImplementedError, ValueError):
        return False


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage while that exists; 0 without a storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, ValueError):
        return 0


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the storage and the view of a tensor."""
    offset, strides = int(tensor.storage_offset()), tuple(tensor.stride())
    return storage_key(tensor), tensor.dtype, tuple(tensor.shape), offset, strides


@dataclass(slots=True)
class _Range:
    """Adjacent bytes of a storage, and the tensors in them by their own ranges."""

    start: int
    end: int
    names: list[tuple[int, int, str]]
    copy: torch.Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(slots=True)
class _Storage:
    """One storage. `flat` is all of it as bytes, and keeps it alive."""

    flat: torch.Tensor
    address: int
    ranges: list[_Range] = field(default_factory=list)

    def restore_size(self) -> bool:
        """Restore the size of a storage; return whether it was resized or moved."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() == self.flat.numel() and storage.data_ptr() == self.address:
            return False
        if storage.nbytes() != self.flat.numel():
            storage.resize_(self.flat.numel())
        return True


class HeldBytes:
    """The bytes of tensors when `take` was called."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self.copied = 0
        self.filed = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor whose bytes are to be copied; tensors without memory are skipped."""
        key = storage_key(tensor)
        nbytes = tensor.untyped_storage().nbytes()
        if tensor.device.type == "meta" or not tensor.numel() or not nbytes:
            return
        if key not in self._storages:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self._storages[key] = _Storage(flat, tensor.untyped_storage().data_ptr())
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        end = start + (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * size
        self._storages[key].ranges.append(_Range(start, end, [(start, end, name)]))

    def take(self) -> None:
        """Copy the bytes, the smallest tensors first, as long as memory allows; then to a file.

        Raises:
            RefusedError: neither main memory nor the disk has room.
        """
        for storage in self._storages.values():
            storage.ranges = list(_joined(storage.ranges))
        todo = [(one.end - one.start, storage, one) for storage in self._storages.values() for one in storage.ranges]
        todo.sort(key=lambda each: each[0])
        left, sizes = ALWAYS, [nbytes for nbytes, _, _ in todo]
        if sum(sizes) > ALWAYS:
            left = max(ALWAYS, int(SHARE * _available()))
        in_memory = bisect.bisect(list(itertools.accumulate(sizes)), left)
        spill, at = _temporary(sum(sizes[in_memory:])), 0
        for number, (nbytes, storage, one) in enumerate(todo):
            live = storage.flat[one.start : one.end]
            self.copied += nbytes
            if number < in_memory:
                one.copy = live.to("cpu", copy=True)
            else:
                one.copy = spill[at : at + nbytes].copy_(live)
                self.filed += nbytes
                at += nbytes

    def put_back(
        self, followed: Container[int] = (), overwritten: Container[str] = (), *, is_last: bool = True
    ) -> tuple[list[str], list[str]]:
        """Restore changed bytes; report changes in all storages except `followed`.

        Args:
            followed: storages that were written as expected.
            overwritten: tensors in these storages that were written whole: they are restored without a comparison.
            is_last: if false, only storages of `followed` are restored, without the tensors of `overwritten`, which
                the next run writes whole.

        Returns:
            The tensors whose memory was moved or resized, and the tensors whose bytes have changed.
        """
        moved, written = [], []
        for key, storage in self._storages.items():
            if storage.restore_size():
                moved += [name for one in storage.ranges for _, _, name in one.names]
            for one in storage.ranges if is_last or key in followed else ():
                live = storage.flat[one.start : one.end]
                if any(name in overwritten and (start, end) == (one.start, one.end) for start, end, name in one.names):
                    if is_last:
                        live.copy_(one.copy)
                elif not _equal(live, one.copy):
                    for start, end, name in one.names:
                        inside = slice(start - one.start, end - one.start)
                        if key not in followed and not _equal(live[inside], one.copy[inside]):
                            written.append(name)
                    live.copy_(one.copy)
        return moved, written


def _joined(ranges: list[_Range]) -> Iterator[_Range]:
    """Yield the ranges that no other range contains."""
    last: _Range | None = None
    for one in sorted(ranges, key=lambda one: (one.start, -one.end)):
        if last is not None and one.end <= last.end:
            last.names += one.names
            continue
        last = one
        yield one


def _temporary(size: int) -> torch.Tensor:
    """Return the bytes of an unlinked file; raises RefusedError if the disk has no room for it."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    folder = tempfile.gettempdir()
    free = os.statvfs(folder)
    if size >= SHARE * free.f_bavail * free.f_frsize:
        raise RefusedError(
            f"{size} bytes of the engine's tensors cannot be copied while its layout is learned: main memory and "
            f"{folder} are short; make room, or set TMPDIR to a larger file system"
        )
    with tempfile.NamedTemporaryFile(dir=folder, prefix="refitd-") as file:
        os.truncate(file.name, size)
        return torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)


def _available() -> int:
    try:
        return memory_limits()[0].left
    except (ArenaError, OSError):
        return 0


def _chunks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, flat.numel(), CHUNK):
        yield flat[start : start + CHUNK]


def _equal(live: torch.Tensor, copy: torch.Tensor) -> bool:
    pairs = zip(_chunks(live), _chunks(copy), strict=True)
    return all(are_equal(mine.cpu(), kept) for mine, kept in pairs)
