"""GPU arenas: CUDA allocations behind file descriptors. They outlive the processes that use them.

    create      cuMemCreate, cuMemExportToShareableHandle        the daemon: a descriptor, without a mapping
    map         cuMemImportFromShareableHandle, cuMemMap, ...    workers and clients, from a descriptor they were sent

The driver is called directly (libcuda; the layout of its functions and structures has not changed since CUDA 11). The
owner of arenas therefore needs neither torch nor a binding of one CUDA major version. Only the tensor over a mapped
arena needs torch. Every process that maps or creates an arena retains the device's primary context, as torch does.

Processes number GPUs by their CUDA_VISIBLE_DEVICES. In messages they use a GPU's name (`name_of`).
"""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from refitd.errors import ArenaError

if TYPE_CHECKING:
    import torch

# cuda.h
_SUCCESS = 0
_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_PINNED, _ON_DEVICE = 1, 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
_READ, _READ_WRITE = 1, 3  # CU_MEM_ACCESS_FLAGS_PROT_*
_GRANULARITY_MINIMUM = 0
_HAS_VMM = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_HAS_POSIX_FD = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
_OUT_OF_MEMORY, _NO_DEVICE, _INVALID_DEVICE = 2, 100, 101
_NOT_PERMITTED, _NOT_SUPPORTED = 800, 801

_ADVICE = {
    _OUT_OF_MEMORY: "free memory of the GPU (nvidia-smi shows who has it) or register less",
    _NO_DEVICE: "no GPU is visible: check CUDA_VISIBLE_DEVICES, and that the container was given one",
    _INVALID_DEVICE: "there is no GPU of this number: check CUDA_VISIBLE_DEVICES",
    _NOT_PERMITTED: "the sandbox or container forbids it: allow descriptors of GPU memory there, or keep this model's "
    "arenas in main memory",
    _NOT_SUPPORTED: "this GPU or driver cannot: keep this model's arenas in main memory",
}


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _AllocationFlags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_size, _u64, _ptr = ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_void_p
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (_ptr,),
    "cuDeviceGet": (_ptr, ctypes.c_int),
    "cuDeviceGetAttribute": (_ptr, ctypes.c_int, ctypes.c_int),
    "cuDeviceGetUuid_v2": (_ptr, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_ptr, ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxPushCurrent_v2": (_ptr,),
    "cuCtxPopCurrent_v2": (_ptr,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_ptr, _ptr),
    "cuMemGetAllocationGranularity": (_ptr, _ptr, ctypes.c_int),
    "cuMemCreate": (_ptr, _size, _ptr, _u64),
    "cuMemExportToShareableHandle": (_ptr, _u64, ctypes.c_int, _u64),
    "cuMemImportFromShareableHandle": (_ptr, _ptr, ctypes.c_int),
    "cuMemAddressReserve": (_ptr, _size, _size, _u64, _u64),
    "cuMemMap": (_u64, _size, _size, _u64, _u64),
    "cuMemSetAccess": (_u64, _size, _ptr, _size),
    "cuMemUnmap": (_u64, _size),
    "cuMemAddressFree": (_u64, _size),
    "cuMemRelease": (_u64,),
    "cuGetErrorString": (ctypes.c_int, _ptr),
}


class Driver:
    """This machine's CUDA driver, initialised."""

    def __init__(self) -> None:
        """Load and initialise the driver.

        Raises:
            ArenaError: there is no driver, or the driver finds no GPU.
        """
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            for name, arguments in _PROTOTYPES.items():
                getattr(self._library, name).argtypes = arguments
        except (OSError, AttributeError) as exc:
            raise ArenaError(
                f"there is no CUDA driver here that can share memory ({exc}); install NVIDIA's driver 470 or newer, or "
                "keep arenas in main memory"
            ) from exc
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Call a driver function.

        Raises:
            ArenaError: it failed; has the driver's text and advice.
        """
        status: int = getattr(self._library, name)(*arguments)
        if status == _SUCCESS:
            return
        text = ctypes.c_char_p()
        known = self._library.cuGetErrorString(status, ctypes.byref(text)) == _SUCCESS and text.value
        said = text.value.decode() if known and text.value else "an unknown error"
        raise ArenaError(f"{name}: {said} ({status}); {_ADVICE.get(status, 'see the driver log (dmesg)')}")

    def count(self) -> int:
        """Return the number of GPUs that this process sees."""
        found = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def name(self, index: int) -> str:
        """Return a GPU's name, the same in every process: its UUID, as `nvidia-smi -L` shows it."""
        device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        self.call("cuDeviceGetUuid_v2", ctypes.byref(found), device.value)
        return f"GPU-{uuid.UUID(bytes=bytes(found))}"


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


class _Context:
    """A device's primary context, current inside the block. It is retained between blocks only after `keep`."""

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver = driver
        found = ctypes.c_int()
        driver.call("cuDeviceGet", ctypes.byref(found), device)
        self._device = found.value
        for attribute, what in (
            (_HAS_VMM, "virtual memory management"),
            (_HAS_POSIX_FD, "memory as file descriptors"),
        ):
            value = ctypes.c_int()
            driver.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
            if not value.value:
                raise ArenaError(
                    f"GPU {device} has no {what}, which arenas on it need; keep this model's arenas in main memory "
                    "(WSL, vGPUs and some containers lack it)"
                )

    def __enter__(self) -> _Context:
        context = ctypes.c_void_p()
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._driver.call("cuCtxPushCurrent_v2", context)
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self._driver.call("cuDevicePrimaryCtxRelease_v2", self._device)

    def keep(self) -> None:
        """Retain the context until `let_go`, because its mappings end with it."""
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(ctypes.c_void_p()), self._device)

    def let_go(self) -> None:
        """Undo `keep`."""
        self._driver.call("cuDevicePrimaryCtxRelease_v2", self._device)


def _properties(device: int) -> _Properties:
    return _Properties(type=_PINNED, handle_types=_POSIX_FD, location=_Location(_ON_DEVICE, device))


def _whole(driver: Driver, device: int, nbytes: int) -> int:
    """Return the bytes that an arena of `nbytes` takes on a device, in whole pages."""
    page = ctypes.c_size_t()
    driver.call(
        "cuMemGetAllocationGranularity",
        ctypes.byref(page),
        ctypes.byref(_properties(device)),
        _GRANULARITY_MINIMUM,
    )
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
    driver = Driver()
    fds: list[int] = []
    with _Context(driver, device):
        sizes = [_whole(driver, device, nbytes) for nbytes, _ in wanted]
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        what = f"arena {wanted[0][1]!r}" + (f" and {len(wanted) - 1} more" if len(wanted) > 1 else "")
        numbers = f"{sum(sizes)} bytes asked for on GPU {device}, {free.value} of {total.value} are free"
        if sum(sizes) > free.value:
            raise ArenaError(
                f"{what}: {numbers}; {_ADVICE[_OUT_OF_MEMORY]}, lower `slots`, or keep refitd's arenas of this model "
                "in main memory (device='cpu')",
                short=sum(sizes) - free.value,
            )
        try:
            for size in sizes:
                fds.append(_exported(driver, device, size))
        except ArenaError as exc:
            for fd in fds:
                os.close(fd)
            raise ArenaError(f"{what}: {numbers}: {exc}") from exc
    return fds


def _exported(driver: Driver, device: int, size: int) -> int:
    handle, fd = ctypes.c_ulonglong(), ctypes.c_int(-1)
    driver.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(_properties(device)), 0)
    try:
        driver.call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _POSIX_FD, 0)
    finally:
        driver.call("cuMemRelease", handle)  # the descriptor keeps the memory allocated
    return fd.value


class MappedDeviceArena:
    """A GPU arena mapped into this process, until it is closed or it and all its tensors are garbage collected.

    Do not use its tensors after `close`. A descriptor of GPU memory cannot be made read-only: a mapping for reading
    prevents mistakes, not attacks.

    Attributes:
        exchanges: how often the arena was exchanged.
    """

    address = 0
    exchanges = 0

    def __init__(self, fd: int, nbytes: int, device: int = 0, *, write: bool) -> None:
        """Map the memory behind `fd`; the caller still closes `fd`.

        Raises:
            ArenaError: `fd` is not memory of this GPU, has another size, or cannot be mapped.
        """
        self._driver = Driver()
        self._context = _Context(self._driver, device)
        self.device = device
        self.nbytes = nbytes
        self.writable = write
        with self._context:
            self._size = _whole(self._driver, device, nbytes)
            self._handle = ctypes.c_ulonglong()  # used by `exchange`
            try:
                self._driver.call("cuMemImportFromShareableHandle", ctypes.byref(self._handle), fd, _POSIX_FD)
                try:
                    self.address = self._reserved_and_mapped()
                except ArenaError:
                    self._driver.call("cuMemRelease", self._handle)
                    raise
            except ArenaError as exc:
                raise ArenaError(f"descriptor {fd} as an arena of {nbytes} bytes on GPU {device}: {exc}") from exc
            self._context.keep()

    def _reserved_and_mapped(self) -> int:
        address = ctypes.c_ulonglong()
        self._driver.call("cuMemAddressReserve", ctypes.byref(address), self._size, 0, 0, 0)
        try:
            self._map(address.value)
        except ArenaError:
            self._driver.call("cuMemAddressFree", address, self._size)
            raise
        return address.value

    def _map(self, address: int) -> None:
        """Map the arena's memory at a free address; raises ArenaError without leaving a mapping."""
        self._driver.call("cuMemMap", address, self._size, 0, self._handle, 0)
        try:
            access = _Access(_Location(_ON_DEVICE, self.device), _READ_WRITE if self.writable else _READ)
            self._driver.call("cuMemSetAccess", address, self._size, ctypes.byref(access), 1)
        except ArenaError:
            self._driver.call("cuMemUnmap", address, self._size)
            raise

    def exchange(self, other: MappedDeviceArena) -> None:
        """Exchange the memory of two arenas of one size in this process, after the GPU's queued work.

        Addresses do not change, so captured CUDA graphs keep working.

        Raises:
            ArenaError: the sizes or devices differ, and both arenas are unchanged; or the driver fails half way, and
                both arenas are unusable.
        """
        if (self._size, self.device) != (other._size, other.device):
            raise ArenaError(f"arenas of {self._size} and {other._size} bytes on GPUs {self.device} and {other.device}")
        with self._context:
            self._driver.call("cuCtxSynchronize")
            for one in (self, other):
                self._driver.call("cuMemUnmap", one.address, one._size)
            self._handle, other._handle = other._handle, self._handle
            for one in (self, other):
                one._map(one.address)
        self.exchanges += 1

    @property
    def tensor(self) -> torch.Tensor:
        """A uint8 view of the arena's bytes. If the arena is mapped for reading, a write ends the process."""
        return self.tensor_at(0, self.nbytes)

    def tensor_at(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a uint8 view of some bytes; its storage is only these bytes."""
        import torch

        return tensor_at(self.address + offset, nbytes, torch.device("cuda", self.device), self)

    def offset_of(self, address: int, nbytes: int) -> int | None:
        """Return the offset in the arena of `nbytes` at this process's `address`, None if they are outside."""
        offset = address - self.address
        return offset if offset >= 0 and offset + nbytes <= self.nbytes else None

    def close(self) -> None:
        """Unmap the arena after the GPU's queued work. May be called again."""
        if not self.address:
            return
        address, self.address = self.address, 0
        with self._context:
            self._driver.call("cuCtxSynchronize")
            self._driver.call("cuMemUnmap", address, self._size)
            self._driver.call("cuMemAddressFree", address, self._size)
            self._driver.call("cuMemRelease", self._handle)
        self._context.let_go()

    def __del__(self) -> None:
        with suppress(Exception):  # at exit or in a fork this fails; the mapping ends with the process
            self.close()

    def __enter__(self) -> MappedDeviceArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
            _Context(Driver(), index)
            found.append((name_of(index), ""))
        except ArenaError as exc:
            found.append((f"GPU {index}", str(exc)))
    return found


def visible_devices() -> int:
    """Return the number of GPUs that this process sees, 0 without a driver. Loads only the driver."""
    with suppress(ArenaError):
        return Driver().count()
    return 0
