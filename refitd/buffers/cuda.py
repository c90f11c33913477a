"""GPU arenas: CUDA allocations behind file descriptors. They outlive the processes that use them.

    create      cuMemCreate, cuMemExportToShareableHandle        the daemon: a descriptor, without a mapping
    map         cuMemImportFromShareableHandle, cuMemMap, ...    workers and clients, from a descriptor they were sent

The daemon needs no torch for this (see `refitd.buffers.cuda_driver`). Only the tensor over a mapped arena needs it.
Every process that maps or creates an arena retains the device's primary context, as torch does.

The driver unmaps memory only after queued work that may use it, and waiting for that work breaks a graph that any
stream of the device captures. So a finalizer never calls the driver: it puts the mapping on a list, and the next
explicit call releases it (see `release_dropped`).

Processes number GPUs by their CUDA_VISIBLE_DEVICES. In messages they use a GPU's name (`name_of`).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from refitd.buffers.cuda_driver import (
    ADVICE,
    GRANULARITY_MINIMUM,
    ON_DEVICE,
    OUT_OF_MEMORY,
    POSIX_FD,
    READ,
    READ_WRITE,
    Access,
    Context,
    Driver,
    DriverError,
    Location,
)
from refitd.errors import ArenaError, RefitdError, RefusedError

if TYPE_CHECKING:
    import torch


def name_of(index: int) -> str:
    """Return the name of the GPU with this number in this process.

    Raises:
        ArenaError: there is no driver, or no GPU with this number.
    """
    driver = Driver()
    if not 0 <= index < driver.count():
        raise ArenaError(
            f"there is no GPU {index}: this process sees {driver.count()}, numbered from 0; check CUDA_VISIBLE_DEVICES"
        )
    return driver.name(index)


def index_of(name: str) -> int:
    """Return the number of a GPU in this process.

    Raises:
        ArenaError: there is no driver, or this process does not see the GPU.
    """
    driver = Driver()
    seen = [driver.name(index) for index in range(driver.count())]
    if name not in seen:
        raise ArenaError(
            f"process {os.getpid()} does not see {name}, only {', '.join(seen) or 'no GPU'}; check its "
            "CUDA_VISIBLE_DEVICES: daemon, trainers and engines of a node must see the GPUs they share"
        )
    return seen.index(name)


def _whole(driver: Driver, context: Context, nbytes: int) -> int:
    """Return the bytes that an arena of `nbytes` takes on a device, in whole pages of its most capable kind.

    The processes that create and that map an arena compute the same size, whichever kind the driver granted.
    """
    page, kind = ctypes.c_size_t(), context.kinds()[0]
    driver.call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(kind), GRANULARITY_MINIMUM)
    return -(-nbytes // page.value) * page.value


def create(nbytes: int, label: str, device: int = 0) -> int:
    """Return the descriptor of new GPU memory, which lives as long as any descriptor or mapping of it.

    Raises:
        ArenaError: the GPU has too little memory left, or cannot share it; all allocations were freed.
    """
    return create_all(((nbytes, label),), device)[0]


def create_all(wanted: Sequence[tuple[int, str]], device: int) -> list[int]:
    """Return the descriptors of several arenas, (bytes, label) each, on one GPU: all or none.

    Raises:
        ArenaError: as in `create`; names the requested and the free bytes.
    """
    for nbytes, label in wanted:
        if nbytes < 1:
            raise ArenaError(f"arena {label!r}: {nbytes} bytes asked for, expected 1 or more")
    release_dropped()
    driver = Driver()
    context = Context(driver, device)
    context.check()
    fds: list[int] = []
    with context.current():
        sizes = [_whole(driver, context, nbytes) for nbytes, _ in wanted]
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        what = f"arena {wanted[0][1]!r}" + (f" and {len(wanted) - 1} more" if len(wanted) > 1 else "")
        numbers = f"{sum(sizes)} bytes asked for on GPU {device}, {free.value} of {total.value} are free"
        if sum(sizes) > free.value:
            raise ArenaError(
                f"{what}: {numbers}; {ADVICE[OUT_OF_MEMORY]}, lower `slots`, or keep refitd's arenas of this model "
                "in main memory (device='cpu')",
                short=sum(sizes) - free.value,
            )
        try:
            for size in sizes:
                fds.append(_exported(driver, context, size))
        except ArenaError as exc:
            for fd in fds:
                os.close(fd)
            raise ArenaError(f"{what}: {numbers}: {exc}") from exc
    return fds


def _exported(driver: Driver, context: Context, size: int) -> int:
    handle, fd = ctypes.c_ulonglong(), ctypes.c_int(-1)
    kinds = context.kinds()
    for kind in kinds:
        try:
            driver.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(kind), 0)
            break
        except DriverError as exc:
            if not exc.is_refusal or kind is kinds[-1]:
                raise
    try:
        driver.call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, POSIX_FD, 0)
    finally:
        driver.call("cuMemRelease", handle)  # the descriptor keeps the memory allocated
    return fd.value


class _Mapping:
    """Memory of a GPU mapped at a reserved address. A step is noted only once the driver has performed it.

    So every method may be called again after a failure, and continues where it stopped. The caller makes the context
    current.

    Attributes:
        address: of the reservation; 0: none.
        handle: the memory that belongs here, in this process's numbers; 0: none.
    """

    def __init__(self, driver: Driver, context: Context, size: int, access: Access) -> None:
        self.context = context
        self.size = size
        self.address = 0
        self.handle = 0
        self._driver = driver
        self._access = [access]  # first the access of the GPU that holds it
        self._mapped = 0  # the handle of the memory mapped at `address`
        self._is_accessible = False
        self._is_kept = False

    def open(self, fd: int) -> None:
        """Import the memory behind a descriptor and map it at a new address."""
        handle, address = ctypes.c_ulonglong(), ctypes.c_ulonglong()
        self._driver.call("cuMemImportFromShareableHandle", ctypes.byref(handle), fd, POSIX_FD)
        self.handle = handle.value
        self._driver.call("cuMemAddressReserve", ctypes.byref(address), self.size, 0, 0, 0)
        self.address = address.value
        self.context.keep()
        self._is_kept = True
        self.map(self.handle)

    def map(self, handle: int) -> None:
        """Map this memory at the address, and no other."""
        if self._mapped != handle:
            self.unmap()
            self._driver.call("cuMemMap", self.address, self.size, 0, handle, 0)
            self._mapped = handle
        if not self._is_accessible:
            self._set_access(self._access)
            self._is_accessible = True

    def open_to(self, gpu: int) -> None:
        """Let another GPU use the memory mapped here, now and after later exchanges."""
        if gpu not in [access.location.id for access in self._access]:
            other = Access(Location(ON_DEVICE, gpu), self._access[0].flags)
            self._set_access([*self._access, other])
            self._access.append(other)

    def _set_access(self, wanted: Sequence[Access]) -> None:
        self._driver.call("cuMemSetAccess", self.address, self.size, (Access * len(wanted))(*wanted), len(wanted))

    def unmap(self) -> None:
        """Unmap the address; work that uses it has ended."""
        if self._mapped:
            self._driver.call("cuMemUnmap", self.address, self.size)
            self._mapped, self._is_accessible = 0, False

    def release(self) -> None:
        """Unmap the address and free all that `open` took; work that uses it has ended."""
        self.unmap()
        if self.address:
            self._driver.call("cuMemAddressFree", self.address, self.size)
            self.address = 0
        if self.handle:
            self._driver.call("cuMemRelease", self.handle)
            self.handle = 0
        if self._is_kept:
            self.context.let_go()
            self._is_kept = False


def _bring(wanted: Sequence[tuple[_Mapping, int]]) -> None:
    """Map each memory where it is wanted, instead of what is mapped there."""
    for mapping, handle in wanted:
        mapping.map(handle)


# Mappings that finalizers dropped, that a capture kept, or that the driver failed to release.
_dropped: deque[_Mapping] = deque()


def release_dropped() -> int:
    """Unmap the arenas that were garbage-collected, or closed during a capture; return how many are left.

    Clients call it before they ask for memory and when they commit, workers when an arena is removed. An arena is left
    while a stream of its GPU captures a graph, and when the driver fails; the next call tries again.
    """
    left: list[_Mapping] = []
    with suppress(IndexError):  # raised when no mapping is left; a finalizer may append one at any time
        while True:
            mapping = _dropped.popleft()
            try:
                _release(mapping)
            except RefitdError:
                left.append(mapping)
    _dropped.extend(left)
    return len(left)


def _release(mapping: _Mapping) -> None:
    """Release a mapping after the GPU's queued work; raises RefusedError during a capture, ArenaError on failures."""
    with mapping.context.current():
        _settle(mapping.context)
        mapping.release()


def _settle(context: Context) -> None:
    """Wait for the queued work of a context.

    Raises:
        RefusedError: a stream captures a graph.
        ArenaError: the work failed, or the driver.
    """
    gpu = context.index
    refused = f"a CUDA graph is being captured on GPU {gpu}, and nothing was changed; call again after the capture"
    if context.is_capturing(torch_streams(gpu)):
        raise RefusedError(refused)
    try:
        context.synchronize()
    except DriverError as exc:
        if exc.is_of_capture:  # on a stream that torch did not make
            raise RefusedError(f"{refused}, and repeat the capture: this call may have invalidated it") from exc
        raise


def is_capturing(gpu: int) -> bool:
    """Return whether a stream of a GPU captures a CUDA graph, in any thread of this process.

    Streams are seen if torch made them or if they are blocking. The check does not disturb the capture.
    """
    if visible_devices() <= gpu:
        return False
    context = Context(Driver(), gpu)
    with context.current():
        return context.is_capturing(torch_streams(gpu))


STREAMS_PER_POOL = 32  # kStreamsPerPool of torch: its streams come from one pool for each priority


def torch_streams(gpu: int) -> list[int]:
    """Return the handles of the streams that torch has on a GPU; empty if this process does not use torch's CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    streams = [torch.cuda.Stream(gpu, priority=priority) for priority in (0, -1) for _ in range(STREAMS_PER_POOL)]
    return [int(stream.cuda_stream) for stream in (torch.cuda.current_stream(gpu), *streams)]


class MappedDeviceArena:
    """A GPU arena mapped into this process, until it is closed or it and all its tensors are garbage collected.

    Do not use its tensors after `close`. A descriptor of GPU memory cannot be made read-only: a mapping for reading
    prevents mistakes, not attacks. The memory of a garbage-collected arena is free after `release_dropped`.

    Attributes:
        exchanges: how often the arena was exchanged.
        lost: why the arena has no memory mapped; "" while it has.
    """

    address = 0
    exchanges = 0
    lost = ""
    _mapping: _Mapping | None = None

    def __init__(self, fd: int, nbytes: int, device: int = 0, *, write: bool) -> None:
        """Map the memory behind `fd`; the caller still closes `fd`.

        Raises:
            ArenaError: `fd` is not memory of this GPU, has another size, or cannot be mapped.
        """
        release_dropped()
        driver = Driver()
        context = Context(driver, device)
        context.check()
        self.device = device
        self.nbytes = nbytes
        self.writable = write
        access = Access(Location(ON_DEVICE, device), READ_WRITE if write else READ)
        with context.current():
            mapping = _Mapping(driver, context, _whole(driver, context, nbytes), access)
            try:
                mapping.open(fd)
            except ArenaError as exc:
                _abandon(mapping)
                raise ArenaError(f"descriptor {fd} as an arena of {nbytes} bytes on GPU {device}: {exc}") from exc
        self._mapping = mapping
        self.address = mapping.address

    def exchange(self, other: MappedDeviceArena) -> None:
        """Exchange the memory of two arenas of one size in this process, after the GPU's queued work.

        Addresses do not change, so captured CUDA graphs keep working. If the driver fails half way, the arenas get
        their old memory back.

        Raises:
            RefusedError: a stream of the GPU captures a graph; both arenas are unchanged.
            ArenaError: the sizes or devices differ, or the driver failed, and both arenas are unchanged; or the driver
                also failed to restore them. Then `lost` says so, and the process must be restarted.
        """
        mine, theirs = self._open(), other._open()
        if (mine.size, self.device) != (theirs.size, other.device):
            raise ArenaError(f"arenas of {mine.size} and {theirs.size} bytes on GPUs {self.device} and {other.device}")
        before = ((mine, mine.handle), (theirs, theirs.handle))
        after = ((mine, theirs.handle), (theirs, mine.handle))
        with mine.context.current():
            _settle(mine.context)
            failure: ArenaError | None = None
            for wanted in (after, before, after, before):
                try:
                    _bring(wanted)
                    break
                except ArenaError as exc:
                    failure = failure or exc
            else:
                assert failure is not None
                self.lost = other.lost = (
                    f"two arenas on GPU {self.device} could not be exchanged, and their memory could not be mapped "
                    f"again ({failure}); restart this process, it can serve no version"
                )
                raise ArenaError(self.lost) from failure
            if wanted is before:
                assert failure is not None
                raise ArenaError(f"both arenas have their old contents: {failure}") from failure
            mine.handle, theirs.handle = theirs.handle, mine.handle
            self.exchanges += 1

    def open_to(self, gpu: int) -> bool:
        """Let another GPU use the arena at the same address; return False if it cannot reach this arena's GPU."""
        mapping, driver = self._open(), Driver()
        try:
            if not driver.reaches(gpu, self.device):
                return False
            with mapping.context.current():
                mapping.open_to(gpu)
        except DriverError:  # a device may state that it reaches another one, and its driver may refuse
            return False
        return True

    def _open(self) -> _Mapping:
        if self.lost or self._mapping is None:
            raise ArenaError(self.lost or f"an arena of {self.nbytes} bytes on GPU {self.device} has been closed")
        return self._mapping

    @property
    def tensor(self) -> torch.Tensor:
        """A uint8 view of the arena's bytes. If the arena is mapped for reading, a write ends the process."""
        return self.tensor_at(0, self.nbytes)

    def tensor_at(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a uint8 view of some bytes; its storage is only these bytes.

        Raises:
            ArenaError: the arena is lost or closed.
        """
        import torch

        return tensor_at(self._open().address + offset, nbytes, torch.device("cuda", self.device), self)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return the offset in the arena of `nbytes` at this process's `address`, None if they are outside."""
        offset = address - self.address
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else None

    def close(self) -> None:
        """Unmap the arena after the GPU's queued work. May be called again.

        During a capture the memory stays allocated until a later `release_dropped`, as it does after a failure.

        Raises:
            ArenaError: the driver failed.
        """
        mapping, self._mapping, self.address = self._mapping, None, 0
        if mapping is None:
            return
        try:
            _release(mapping)
        except RefusedError:
            _dropped.append(mapping)
        except ArenaError:
            _dropped.append(mapping)
            raise

    def __del__(self) -> None:
        # it may run on any thread, at any point; only this append is safe everywhere
        if self._mapping is not None:
            _dropped.append(self._mapping)

    def __enter__(self) -> MappedDeviceArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _abandon(mapping: _Mapping) -> None:
    """Release a mapping that no work has used; what the driver fails to release is kept for `release_dropped`."""
    try:
        mapping.release()
    except ArenaError:
        _dropped.append(mapping)


def tensor_at(address: int, nbytes: int, device: torch.device, owner: object = None) -> torch.Tensor:
    """Return device memory of this process as a uint8 tensor, which keeps `owner` alive."""
    import torch

    tensor: torch.Tensor = torch.as_tensor(_DeviceMemory(address, nbytes, owner), device=device)
    return tensor


@dataclass(frozen=True, slots=True)
class _DeviceMemory:
    """Device memory in a form that torch and other libraries accept; they reference this object while they use it."""

    address: int
    nbytes: int
    owner: object

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        # torch refuses memory that is marked read-only
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 2}


def survey() -> list[tuple[str, str]]:
    """Return (name, reason) for each GPU that this process sees: why it cannot have arenas, "" if it can."""
    found: list[tuple[str, str]] = []
    for index in range(visible_devices()):
        try:
            Context(Driver(), index).check()
            found.append((name_of(index), ""))
        except ArenaError as exc:
            found.append((f"GPU {index}", str(exc)))
    return found


def visible_devices() -> int:
    """Return the number of GPUs that this process sees, 0 without a driver. Loads only the driver."""
    with suppress(ArenaError):
        return Driver().count()
    return 0
