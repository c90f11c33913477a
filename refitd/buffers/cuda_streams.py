"""The driver's streams and events, main memory that is pinned for GPUs, and copies by a GPU's copy engines.

A copy engine reads and writes only memory that cannot be moved. An arena in main memory is pinned where it is (`Pin`).
Where the driver refuses that, bytes pass through a window: memory that the driver allocates (`Window`).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda_driver import Context, Driver
from refitd.buffers.mapping import reserved, show_again, unmapped_with
from refitd.errors import ArenaError

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
        """Destroy streams and events, whose work has ended, and release the context."""
        with self.context.current():
            for stream in streams:
                self.driver.call("cuStreamDestroy_v2", stream)
            for event in events:
                self.driver.call("cuEventDestroy_v2", event)
        self.context.let_go()


class Pin:
    """An arena's memory, mapped a second time and pinned for all GPUs of this process.

    An exchange of arenas moves their first mappings, whose pins would then be of the wrong memory. The second mapping
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
