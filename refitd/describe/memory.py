"""Check that a refit can use this process's tensors: dense, readable or writable, and without shared bytes.

Addresses are only compared, never dereferenced, so tensors on GPUs are handled in the same way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from refitd.dtypes import ELEMENT_SIZES, dtype_name

if TYPE_CHECKING:
    import torch


def tensor_problem(value: Any) -> str:
    """Return why a value is not a tensor that can be read, and what to do; "" if it can be.

    For a DTensor, pass its local tensor.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        return f"it is {_shown(value)}, expected a tensor; leave out what is none"
    if problem := lazy_problem(value):
        return problem
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        return f"it is a {kind} tensor, expected a dense one; register the dense tensors that it is made of"
    if value.is_quantized:
        return "it is a quantized tensor of torch's, whose scales would not travel; register its int_repr(), or values"
    if value.is_meta:
        return "it is on the meta device and holds nothing; materialize it first (to_empty)"
    if dtype_name(value.dtype) not in ELEMENT_SIZES:
        return f"its dtype is {dtype_name(value.dtype)}, expected one of {', '.join(ELEMENT_SIZES)}"
    if value.is_conj() or value.is_neg():
        return (
            "it is a lazy conjugate or negative (its memory holds other values than it shows); register "
            "tensor.resolve_conj().resolve_neg()"
        )
    return _memory_problem(value)


def lazy_problem(value: Any) -> str:
    """Return why a parameter has no shape yet, "" if it has one."""
    if hasattr(type(value), "cls_to_become"):  # torch.nn.parameter.is_lazy, without an import for each
        return f"it is an {type(value).__name__}, which has no shape yet; run its module once, then register it"
    return ""


def _memory_problem(value: Any) -> str:
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, FakeTensor):
        return "it is a fake tensor, which has no memory; register the real one"
    if value.numel() == 0:
        return ""
    try:
        last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
        needed = (value.storage_offset() + last + 1) * value.element_size()
        storage = value.untyped_storage()
        held, at, start = storage.nbytes(), storage.data_ptr(), value.data_ptr()
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as exc:
        kind, said = type(value).__name__, str(exc).partition(".")[0].splitlines()
        return f"it is a {kind} without memory of its own ({said[0] if said else exc}); register the tensors inside"
    if held < needed:
        return (
            f"its storage holds {held} bytes of the {needed} it needs: it has been freed (FSDP frees what it has "
            "unsharded); register, and publish, what this rank keeps"
        )
    if at == 0 or start == 0:
        return f"it is a {type(value).__name__} without memory of its own; register the tensors inside"
    return ""


def _shown(value: Any) -> str:
    if value is None:
        return "None"
    text = repr(value) if isinstance(value, bool | int | float | str | bytes) else ""
    return f"{type(value).__name__} {text[:60]}".strip()


HOST = -1  # the number of main memory; GPUs have numbers from 0
# Limit on numpy's search for a shared byte, and on the elements that are compared one by one.
_MAX_WORK = 1_000_000
Ranges = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]  # (sorted starts, ends) of memory ranges


class Extents(NamedTuple):
    """The memory range of each nonempty tensor, from its first byte to its last. Every array has shape [n]."""

    tensor: npt.NDArray[np.int64]  # the tensor's index
    device: npt.NDArray[np.int64]  # HOST, a GPU's number, or less than HOST for other devices
    start: npt.NDArray[np.uint64]
    end: npt.NDArray[np.uint64]


class FileMapping(NamedTuple):
    """A shared mapping of a part of a file in this process's memory."""

    start: int
    end: int
    offset: int  # the offset of `start` in the file


def gpu_of(tensor: torch.Tensor) -> int:
    """Return the number of the GPU that holds a tensor, HOST if none does."""
    return int(tensor.device.index) if tensor.device.type == "cuda" else HOST


def extents(tensors: Sequence[torch.Tensor]) -> Extents:
    """Return the memory ranges of tensors; empty tensors are skipped."""
    rows = []
    for index, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        gpu = gpu_of(tensor)
        if gpu == HOST and not tensor.is_cpu:
            gpu = HOST - 1
        start = tensor.data_ptr()
        rows.append((index, gpu, start, start + _spanned_bytes(tensor)))
    if not rows:
        none = np.zeros(0, np.int64)
        return Extents(none, none, none.astype(np.uint64), none.astype(np.uint64))
    index_, device, starts, ends = zip(*rows, strict=True)
    return Extents(
        np.array(index_, np.int64), np.array(device, np.int64), np.array(starts, np.uint64), np.array(ends, np.uint64)
    )


def mapped_memory(maps: str = "/proc/self/maps") -> tuple[Ranges, Ranges]:
    """Return the readable and the writable ranges of this process's memory."""
    found: tuple[list[list[int]], list[list[int]]] = ([], [])
    for line in Path(maps).read_text().splitlines():
        span, access = line.split(" ", 2)[:2]
        start, _, end = span.partition("-")
        for ranges, is_in in zip(found, (access[0] == "r", access[1] == "w"), strict=True):
            if not is_in:
                continue
            if ranges and ranges[-1][1] == int(start, 16):
                ranges[-1][1] = int(end, 16)
            else:
                ranges.append([int(start, 16), int(end, 16)])
    readable, writable = (np.array(ranges, dtype=np.uint64).reshape(-1, 2) for ranges in found)
    return (readable[:, 0], readable[:, 1]), (writable[:, 0], writable[:, 1])


def out_of_reach(lie: Extents, *, write: bool) -> list[int]:
    """Return the indices of tensors in main memory that cannot be read (or, with `write`, written)."""
    here = lie.device == HOST
    if not here.any():
        return []
    starts, ends = mapped_memory()[1 if write else 0]
    if not len(ends):
        return [int(index) for index in lie.tensor[here]]
    at = np.searchsorted(starts, lie.start[here], side="right").astype(np.int64) - 1
    outside = (at < 0) | (ends[np.maximum(at, 0)] < lie.end[here])
    return [int(index) for index in lie.tensor[here][outside]]


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements of a tensor may share memory, as in an expanded tensor or sliding windows."""
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    if tensor.numel() == 0:
        return False
    if 0 in (s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1) or tensor.numel() > _MAX_WORK:
        return True
    places = np.zeros((), np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = np.add.outer(places, np.arange(size, dtype=np.int64) * stride)
    return len(np.unique(places)) < tensor.numel()


def overlapping(tensors: Sequence[torch.Tensor], lie: Extents) -> Iterator[tuple[int, int]]:
    """Yield the indices of each two tensors that share a byte, the smaller one first.
    Interleaved views (column slices of a fused weight) share no bytes; if that takes too long to find out, they count
    as sharing. `lie` is `extents(tensors)`.
    """
    order = np.lexsort((lie.start, lie.device))
    device, start, end = lie.device[order], lie.start[order], lie.end[order]
    reach = end.copy()
    for number in np.unique(device):
        reach[device == number] = np.maximum.accumulate(end[device == number])
    if not ((device[1:] == device[:-1]) & (start[1:] < reach[:-1])).any():
        return
    open_: list[int] = []  # positions in `order` of earlier tensors that reach into the current one
    for at in range(len(order)):
        open_ = [other for other in open_ if device[other] == device[at] and end[other] > start[at]]
        for other in open_:
            one, two = sorted((int(lie.tensor[order[other]]), int(lie.tensor[order[at]])))
            if _share(tensors[one], tensors[two]):
                yield one, two
        open_.append(at)


def files_mapped_twice(maps: str = "/proc/self/maps") -> list[list[FileMapping]]:
    """Return the shared mappings of each file that this process maps more than once."""
    found: dict[tuple[str, str], list[FileMapping]] = {}
    for line in Path(maps).read_text().splitlines():
        span, access, begins, device, inode = line.split(None, 5)[:5]
        if access[3] == "s" and inode != "0":
            low, _, high = span.partition("-")
            found.setdefault((device, inode), []).append(FileMapping(int(low, 16), int(high, 16), int(begins, 16)))
    return [mappings for mappings in found.values() if len(mappings) > 1]


def lie_in(files: Sequence[Sequence[FileMapping]], lie: Extents) -> bool:
    """Return whether any tensor is in a mapping of these files."""
    return any(_within(mapping, lie).any() for mappings in files for mapping in mappings)


def mapped_twice(lie: Extents, files: Sequence[Sequence[FileMapping]]) -> tuple[int, int] | None:
    """Return two tensors that share a place in a file through two mappings of it, None if none do.

    Their addresses differ, but writing one changes the other. `files` is `files_mapped_twice()`.
    """
    for mappings in files:
        found: list[tuple[int, int, int, int]] = []  # per tensor: (start in the file, end, address, index)
        for mapping in mappings:
            for row in np.flatnonzero(_within(mapping, lie)).tolist():
                first, last = max(int(lie.start[row]), mapping.start), min(int(lie.end[row]), mapping.end)
                at = first - mapping.start + mapping.offset
                found.append((at, at + last - first, first, int(lie.tensor[row])))
        found.sort()
        open_: list[tuple[int, int, int, int]] = []
        for at, until, first, tensor in found:
            open_ = [other for other in open_ if other[1] > at]
            for other_at, _, other_first, other in open_:
                if first - at != other_first - other_at and other != tensor:
                    return min(tensor, other), max(tensor, other)
            open_.append((at, until, first, tensor))
    return None


def _within(mapping: FileMapping, lie: Extents) -> npt.NDArray[np.bool_]:
    """Return a mask of the tensors that have bytes in a mapping."""
    here = lie.device == HOST
    found: npt.NDArray[np.bool_] = here & (lie.start < np.uint64(mapping.end)) & (lie.end > np.uint64(mapping.start))
    return found


def met(one: Extents, other: Extents) -> bool:
    """Return whether any memory ranges of two sets overlap: a quick check, seldom true."""
    for number in np.intersect1d(one.device, other.device):
        a, b = one.device == number, other.device == number
        order = np.argsort(one.start[a])
        starts, reach = one.start[a][order], np.maximum.accumulate(one.end[a][order])
        at = np.searchsorted(starts, other.end[b], side="left").astype(np.int64) - 1
        if ((at >= 0) & (reach[np.maximum(at, 0)] > other.start[b])).any():
            return True
    return False


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same elements at the same addresses."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
    )


def _spanned_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the start of the first element to the end of the last, of a nonempty tensor."""
    count = tensor.numel()
    if not tensor.is_contiguous():
        count = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return count * int(tensor.element_size())


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    if same_memory(one, other):
        return True
    try:
        return bool(np.shares_memory(_as_array(one), _as_array(other), max_work=_MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _as_array(tensor: torch.Tensor) -> npt.NDArray[np.void]:
    """Return an array at the tensor's addresses; it must not be dereferenced."""
    element = tensor.element_size()
    strides = tuple(stride * element for stride in tensor.stride())
    memory = (ctypes.c_uint8 * _spanned_bytes(tensor)).from_address(tensor.data_ptr())
    return np.ndarray(tuple(tensor.shape), f"V{element}", memoryview(memory), 0, strides)
