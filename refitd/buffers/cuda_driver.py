"""The CUDA driver as GPU arenas use it: functions, contexts, streams, events, pinned memory, copy engines.

The driver is called directly (libcuda; the layout of its functions and structures has not changed since CUDA 11). The
owner of arenas therefore needs neither torch nor a binding of one CUDA major version. Constants come from cuda.h.

A copy engine reads and writes only memory that cannot be moved. An arena in main memory is pinned where it is (`Pin`).
Where the driver refuses that, bytes pass through a window: memory that the driver allocates (`Window`).
"""

from __future__ import annotations

import ctypes
import mmap
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from refitd.buffers.arena import MappedArena
from refitd.buffers.mapping import reserved, show_again, unmapped_with
from refitd.errors import ArenaError

_SUCCESS = 0
POSIX_FD, FABRIC = 1, 8  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_HANDLE_TYPE_FABRIC
_PINNED, ON_DEVICE = 1, 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
READ, READ_WRITE = 1, 3  # CU_MEM_ACCESS_FLAGS_PROT_*
GRANULARITY_MINIMUM = 0
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_LEGACY_STREAM = 1  # CU_STREAM_LEGACY
_HAS_VMM = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_HAS_POSIX_FD = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
_HAS_RDMA = 110  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
_HAS_FABRIC = 128  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
_INVALID_VALUE, OUT_OF_MEMORY, _NO_DEVICE, _INVALID_DEVICE = 1, 2, 100, 101
_NOT_PERMITTED, _NOT_SUPPORTED = 800, 801
_NOT_READY = 600
_OF_CAPTURE = range(900, 909)  # CUDA_ERROR_STREAM_CAPTURE_*

ADVICE = {
    OUT_OF_MEMORY: "free memory of the GPU (nvidia-smi shows who has it) or register less",
    _NO_DEVICE: "no GPU is visible: check CUDA_VISIBLE_DEVICES, and that the container was given one",
    _INVALID_DEVICE: "there is no GPU of this number: check CUDA_VISIBLE_DEVICES",
    _NOT_PERMITTED: "the sandbox or container forbids it: allow descriptors of GPU memory there, or keep this model's "
    "arenas in main memory",
    _NOT_SUPPORTED: "this GPU or driver cannot: keep this model's arenas in main memory",
}


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationFlags(ctypes.Structure):
    """The flags in CUmemAllocationProp."""

    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", AllocationFlags),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


_size, _u64, _ptr = ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_void_p
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (_ptr,),
    "cuDeviceGet": (_ptr, ctypes.c_int),
    "cuDeviceGetAttribute": (_ptr, ctypes.c_int, ctypes.c_int),
    "cuDeviceGetUuid_v2": (_ptr, ctypes.c_int),
    "cuDeviceGetPCIBusId": (_ptr, ctypes.c_int, ctypes.c_int),
    "cuDeviceCanAccessPeer": (_ptr, ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_ptr, ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxPushCurrent_v2": (_ptr,),
    "cuCtxPopCurrent_v2": (_ptr,),
    "cuCtxSynchronize": (),
    "cuStreamIsCapturing": (_ptr, _ptr),
    "cuThreadExchangeStreamCaptureMode": (_ptr,),
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
    "cuMemHostRegister_v2": (_ptr, _size, ctypes.c_uint),
    "cuMemHostUnregister": (_ptr,),
    "cuMemHostAlloc": (_ptr, _size, ctypes.c_uint),
    "cuMemFreeHost": (_ptr,),
    "cuMemcpy2DAsync_v2": (_ptr, _ptr),
    "cuStreamCreate": (_ptr, ctypes.c_uint),
    "cuStreamDestroy_v2": (_ptr,),
    "cuStreamWaitEvent": (_ptr, _ptr, ctypes.c_uint),
    "cuEventCreate": (_ptr, ctypes.c_uint),
    "cuEventRecord": (_ptr, _ptr),
    "cuEventQuery": (_ptr,),
    "cuEventDestroy_v2": (_ptr,),
    "cuGetErrorString": (ctypes.c_int, _ptr),
}


class DriverError(ArenaError):
    """A call of the driver failed; `status` is its CUresult."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_refusal(self) -> bool:
        """Whether the device cannot do what was asked, or may not; no memory is lacking."""
        return self.status in (_INVALID_VALUE, _NOT_PERMITTED, _NOT_SUPPORTED)

    @property
    def is_of_capture(self) -> bool:
        """Whether a graph capture forbids the call."""
        return self.status in _OF_CAPTURE


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
            DriverError: it failed; has the driver's text and advice.
        """
        status: int = getattr(self._library, name)(*arguments)
        if status != _SUCCESS:
            raise self._error(name, status)

    def is_done(self, event: int) -> bool:
        """Return whether all work before an event has ended; raises DriverError if some of it failed."""
        status: int = self._library.cuEventQuery(event)
        if status not in (_SUCCESS, _NOT_READY):
            raise self._error("cuEventQuery", status)
        return status == _SUCCESS

    def _error(self, name: str, status: int) -> DriverError:
        text = ctypes.c_char_p()
        known = self._library.cuGetErrorString(status, ctypes.byref(text)) == _SUCCESS and text.value
        said = text.value.decode() if known and text.value else "an unknown error"
        return DriverError(f"{name}: {said} ({status}); {ADVICE.get(status, 'see the driver log (dmesg)')}", status)

    def count(self) -> int:
        """Return the number of GPUs that this process sees."""
        found = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def name(self, index: int) -> str:
        """Return a GPU's name, the same in every process: its UUID, as `nvidia-smi -L` shows it."""
        found = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", ctypes.byref(found), self._device(index))
        return f"GPU-{uuid.UUID(bytes=bytes(found))}"

    def bus_id(self, index: int) -> str:
        """Return a GPU's PCI address: 0000:17:00.0."""
        found = ctypes.create_string_buffer(32)
        self.call("cuDeviceGetPCIBusId", found, len(found), self._device(index))
        return found.value.decode().lower()

    def reaches(self, index: int, peer: int) -> bool:
        """Return whether a GPU can address the memory of another one; False for itself."""
        found = ctypes.c_int()
        self.call("cuDeviceCanAccessPeer", ctypes.byref(found), self._device(index), self._device(peer))
        return bool(found.value)

    def _device(self, index: int) -> int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        return device.value


class Context:
    """A device's primary context. It is retained only in blocks of `current`, and after `keep`.

    In these blocks the thread's capture mode is relaxed: calls that allocate or map memory do not invalidate a graph
    that another thread captures. `synchronize` does in any mode, so look at `is_capturing` first.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        """Find a device; raises ArenaError if there is none of this number."""
        self._driver = driver
        self.index = device
        found = ctypes.c_int()
        driver.call("cuDeviceGet", ctypes.byref(found), device)
        self._device = found.value

    def check(self) -> None:
        """Raise ArenaError if the device cannot have arenas."""
        for attribute, what in (
            (_HAS_VMM, "virtual memory management"),
            (_HAS_POSIX_FD, "memory as file descriptors"),
        ):
            if not self._has(attribute):
                raise ArenaError(
                    f"GPU {self.index} has no {what}, which arenas on it need; keep this model's arenas in main memory "
                    "(WSL, vGPUs and some containers lack it)"
                )

    def _has(self, attribute: int) -> bool:
        value = ctypes.c_int()
        self._driver.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
        return bool(value.value)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current on this thread."""
        context, mode = ctypes.c_void_p(), ctypes.c_int(_RELAXED)
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        try:
            self._driver.call("cuCtxPushCurrent_v2", context)
            try:
                self._driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
                try:
                    yield
                finally:
                    self._driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
            finally:
                self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            with suppress(ArenaError):  # the work in the block is done, and must not seem to have failed
                self.let_go()

    def keep(self) -> None:
        """Retain the context until `let_go`, because its mappings end with it."""
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(ctypes.c_void_p()), self._device)

    def let_go(self) -> None:
        """Undo `keep`."""
        self._driver.call("cuDevicePrimaryCtxRelease_v2", self._device)

    def is_capturing(self, streams: Iterable[int]) -> bool:
        """Return whether one of these streams, or any blocking stream of the context, captures a graph. Breaks none."""
        for stream in (_LEGACY_STREAM, *streams):
            status = ctypes.c_int()
            try:
                self._driver.call("cuStreamIsCapturing", stream, ctypes.byref(status))
            except DriverError as exc:
                if exc.is_of_capture:  # the legacy stream answers so while a blocking stream captures
                    return True
                raise
            if status.value:
                return True
        return False

    def synchronize(self) -> None:
        """Wait for all work of the context in this process; raises DriverError also if a stream captures."""
        self._driver.call("cuCtxSynchronize")

    def kinds(self) -> list[Properties]:
        """Return the kinds of memory to try for an arena, the most capable one first.

        Network cards reach memory only if it was created for them (gpuDirectRDMACapable). Other nodes of an NVLink
        domain reach memory only by a fabric handle. Neither can be added to existing memory. A device may state a
        capability, and its driver may still refuse the creation, for instance without an IMEX channel.
        """
        rdma, fabric = self._can(_HAS_RDMA), self._can(_HAS_FABRIC)
        kinds = [(POSIX_FD | FABRIC, rdma)] if fabric else []
        kinds += [(POSIX_FD, rdma)] + ([(POSIX_FD, False)] if rdma else [])
        return [properties(self.index, types, rdma=with_rdma) for types, with_rdma in kinds]

    def _can(self, attribute: int) -> bool:
        try:
            return self._has(attribute)
        except DriverError:  # the driver is older than the attribute
            return False


def properties(device: int, handle_types: int = POSIX_FD, *, rdma: bool = False) -> Properties:
    """Return the properties of memory that is pinned on a device."""
    flags = AllocationFlags(gpu_direct_rdma=rdma)
    return Properties(type=_PINNED, handle_types=handle_types, location=Location(ON_DEVICE, device), flags=flags)


# --- streams, pinned memory, copies -----------------------------------------------------------------------

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_UNTIMED = 2  # CU_EVENT_DISABLE_TIMING
_FOR_ALL_GPUS, _READ_ONLY = 1, 8  # CU_MEMHOSTREGISTER_PORTABLE and CU_MEMHOSTALLOC_PORTABLE, ..._READ_ONLY
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_*
MOST_PITCH = (1 << 31) - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH of all GPUs


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_int),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_ulonglong),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_int),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_ulonglong),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Gpu:
    """A GPU's context, retained until `close`, in which streams, events and pinned memory exist.

    Its methods need the context to be current, except `close`.
    """

    def __init__(self, index: int) -> None:
        """Retain the context; raises ArenaError if there is no such GPU."""
        self.index = index
        self.driver = Driver()
        self.context = Context(self.driver, index)
        self.context.keep()

    def stream(self) -> int:
        """Return a new stream, which waits for no other one."""
        made = ctypes.c_void_p()
        self.driver.call("cuStreamCreate", ctypes.byref(made), _NON_BLOCKING)
        return made.value or 0

    def event(self) -> int:
        """Return a new event."""
        made = ctypes.c_void_p()
        self.driver.call("cuEventCreate", ctypes.byref(made), _UNTIMED)
        return made.value or 0

    def record(self, event: int, stream: int) -> None:
        """Have an event mark the end of the stream's work so far."""
        self.driver.call("cuEventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Have the stream's later work wait for an event, also of another GPU."""
        self.driver.call("cuStreamWaitEvent", stream, event, 0)

    def copy(
        self, stream: int, source: tuple[int, int], destination: tuple[int, int], width: int, height: int, to_gpu: bool
    ) -> None:
        """Queue a copy of `height` ranges of `width` bytes between pinned memory and this GPU.

        Each end is an address and the bytes from one range to the next, at least `width` and at most MOST_PITCH.
        """
        host, device = (source, destination) if to_gpu else (destination, source)
        copy = Copy2D(width=width, height=height, src_pitch=source[1], dst_pitch=destination[1])
        if to_gpu:
            copy.src_type, copy.src_host, copy.dst_type, copy.dst_device = _HOST, host[0], _DEVICE, device[0]
        else:
            copy.src_type, copy.src_device, copy.dst_type, copy.dst_host = _DEVICE, device[0], _HOST, host[0]
        self.driver.call("cuMemcpy2DAsync_v2", ctypes.byref(copy), stream)

    def close(self, streams: Iterable[int] = (), events: Iterable[int] = ()) -> None:
        """Destroy streams and events after their work has ended, and release the context."""
        with self.context.current():
            for stream in streams:
                self.driver.call("cuStreamDestroy_v2", stream)
            for event in events:
                self.driver.call("cuEventDestroy_v2", event)
        self.context.let_go()


class Pin:
    """An arena's memory, mapped a second time and pinned for all GPUs of this process.

    An exchange of arenas moves their first mappings: pins of these would then hold the wrong memory. The second mapping
    stays, and an exchange also exchanges the pins.
    """

    def __init__(self, gpu: Gpu, arena: MappedArena) -> None:
        """Pin an arena in a context that is current; the pin keeps the context.

        Raises:
            ArenaError: the driver or the kernel refuses.
        """
        self.is_open = False
        self._gpu = gpu
        try:
            self.address = reserved(arena.nbytes, mmap.PAGESIZE)
            unmapped_with(self, self.address, arena.nbytes)
            show_again(arena.address, arena.nbytes, self.address)
        except OSError as exc:
            raise ArenaError(f"an arena of {arena.nbytes} bytes cannot be mapped again: {exc.strerror}") from exc
        flags = _FOR_ALL_GPUS if arena.writable else _FOR_ALL_GPUS | _READ_ONLY
        gpu.driver.call("cuMemHostRegister_v2", self.address, arena.nbytes, flags)
        gpu.context.keep()
        self.is_open = True

    def close(self) -> None:
        """Undo the pin; copies that use it have ended. May be called again."""
        if self.is_open:
            with self._gpu.context.current():
                self._gpu.driver.call("cuMemHostUnregister", self.address)
            self._gpu.context.let_go()
            self.is_open = False


class Window:
    """Pinned main memory that all GPUs of this process can copy to and from."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        """Allocate it in a context that is current; raises ArenaError if the driver refuses."""
        found = ctypes.c_void_p()
        gpu.driver.call("cuMemHostAlloc", ctypes.byref(found), nbytes, _FOR_ALL_GPUS)
        self._gpu = gpu
        self.address = found.value or 0
        memory = (ctypes.c_uint8 * nbytes).from_address(self.address)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(memoryview(memory).cast("B"), dtype=np.uint8)

    def close(self) -> None:
        """Free it; copies that use it have ended. The context is current."""
        self._gpu.driver.call("cuMemFreeHost", self.address)
