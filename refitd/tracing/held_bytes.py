"""The bytes of tensors, copied before something may write them; where memory is short, to a file, or as digests."""

from __future__ import annotations

import bisect
import itertools
import os
import tempfile
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

import torch
import xxhash

from refitd.buffers.capacity import memory_limits
from refitd.errors import ArenaError
from refitd.tracing.comparison import are_equal

# Bytes that are copied without a look at the memory that is left, and the share of it that copies may take.
ALWAYS = 64 << 20
SHARE = 0.5

CHUNK = 64 << 20


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has strides and a storage, as no sparse, wrapped or uninitialized one has."""
    try:
        return tensor.layout == torch.strided and bool(storage_key(tensor)) and tensor.detach() is not None
    except (RuntimeError, NotImplementedError, ValueError):
        return False


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that names a tensor's storage while it lives; 0 without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, ValueError):
        return 0


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the memory and the view that a tensor is."""
    offset, strides = int(tensor.storage_offset()), tuple(tensor.stride())
    return storage_key(tensor), tensor.dtype, tuple(tensor.shape), offset, strides


@dataclass(slots=True)
class _Range:
    """Adjacent bytes of a storage, and the tensors in them by their own ranges."""

    start: int
    end: int
    names: list[tuple[int, int, str]]
    copy: torch.Tensor | None = None
    digest: bytes = b""


@dataclass(slots=True)
class _Storage:
    """One storage. `flat` is all of it as bytes, and keeps it alive."""

    flat: torch.Tensor
    address: int
    ranges: list[_Range] = field(default_factory=list)

    def restore_size(self) -> bool:
        """Give a storage that was resized or moved its size again; return whether it was."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() == self.flat.numel() and storage.data_ptr() == self.address:
            return False
        if storage.nbytes() != self.flat.numel():
            storage.resize_(self.flat.numel())
        return True


class HeldBytes:
    """Bytes of tensors as they were when `take` was called."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self.copied = 0
        self.filed = 0
        self.digested = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Hold a tensor's bytes, too; tensors without memory have none."""
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
        """Copy the bytes, the smallest tensors first, as far as memory allows; the others to a file, if it has room."""
        for storage in self._storages.values():
            storage.ranges = list(_joined(storage.ranges))
        todo = [(one.end - one.start, storage, one) for storage in self._storages.values() for one in storage.ranges]
        todo.sort(key=lambda each: each[0])
        left, sizes = ALWAYS, [nbytes for nbytes, _, _ in todo]
        if sum(sizes) > ALWAYS:
            left = max(ALWAYS, int(SHARE * _available()))
        spill, at = _temporary(sum(sizes[bisect.bisect(list(itertools.accumulate(sizes)), left) :])), 0
        for nbytes, storage, one in todo:
            live = storage.flat[one.start : one.end]
            if nbytes <= left:
                one.copy = live.to("cpu", copy=True)
                self.copied += nbytes
                left -= nbytes
            elif spill is not None:
                one.copy = spill[at : at + nbytes].copy_(live)
                self.copied += nbytes
                self.filed += nbytes
                at += nbytes
            else:
                one.digest = _digest(live)
                self.digested += nbytes

    def put_back(
        self, followed: Container[int] = (), overwritten: Container[str] = (), *, is_last: bool = True
    ) -> tuple[list[str], list[str], list[str]]:
        """Put back bytes that have changed; say so for all storages but `followed`.

        Args:
            followed: storages that are known to be written.
            overwritten: tensors of them that were written whole: they are put back without a comparison.
            is_last: if false, only storages of `followed` are put back, without the tensors of `overwritten`, which
                are written whole again.

        Returns:
            The tensors whose memory was moved or resized, those whose bytes have changed, and, of these, the tensors
            that could not be put back.
        """
        moved, written, lost = [], [], []
        for key, storage in self._storages.items():
            if storage.restore_size():
                moved += [name for one in storage.ranges for _, _, name in one.names]
            for one in storage.ranges if is_last or key in followed else ():
                live = storage.flat[one.start : one.end]
                if one.copy is not None and any(
                    name in overwritten and (start, end) == (one.start, one.end) for start, end, name in one.names
                ):
                    if is_last:
                        live.copy_(one.copy)
                elif one.copy is None:
                    if _digest(live) != one.digest:
                        written += [name for _, _, name in one.names if key not in followed]
                        lost += [name for _, _, name in one.names]
                elif not _equal(live, one.copy):
                    for start, end, name in one.names:
                        inside = slice(start - one.start, end - one.start)
                        if key not in followed and not _equal(live[inside], one.copy[inside]):
                            written.append(name)
                    live.copy_(one.copy)
        return moved, written, lost


def _joined(ranges: list[_Range]) -> Iterator[_Range]:
    """Yield the ranges that no other range contains."""
    last: _Range | None = None
    for one in sorted(ranges, key=lambda one: (one.start, -one.end)):
        if last is not None and one.end <= last.end:
            last.names += one.names
            continue
        last = one
        yield one


def _temporary(size: int) -> torch.Tensor | None:
    """Return the bytes of an unlinked file; None if there is no room for it."""
    folder = tempfile.gettempdir()
    free = os.statvfs(folder)
    if not 0 < size < SHARE * free.f_bavail * free.f_frsize:
        return None
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


def _digest(flat: torch.Tensor) -> bytes:
    state = xxhash.xxh3_128()
    for chunk in _chunks(flat):
        state.update(chunk.cpu().numpy().data)
    return state.digest()


def _equal(live: torch.Tensor, copy: torch.Tensor) -> bool:
    pairs = zip(_chunks(live), _chunks(copy), strict=True)
    return all(are_equal(mine.cpu(), kept) for mine, kept in pairs)
