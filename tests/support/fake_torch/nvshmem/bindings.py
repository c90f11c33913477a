"""Stands in for nvshmem.bindings: symmetric memory, puts and signals, with NVSHMEM's rules.

Every PE allocates the same bytes, in the same order. Only symmetric memory is put or written to. A put reads its source
when its stream reaches it, and writes nothing useful before its signal: the slot has rubbish until both arrive. Puts
and signals arrive in another order than they were issued in. A dead PE is not noticed: puts to it succeed, and what
it would have sent never comes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace

import device_shim
from nvshmem import core

Signal_op = SimpleNamespace(SIGNAL_SET=9)
_LATE_S = 0.0005  # as many calls as come within this time change their order
_regions: dict[int, list[mmap.mmap]] = {}  # address here -> the memory of each PE
_due: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()


def malloc(nbytes: int) -> int:
    gpu = device_shim.current["gpu"]
    made = os.memfd_create(f"fake-cuda:{os.environ['FAKE_CUDA_TAG']}:{gpu}:{nbytes}:256", os.MFD_CLOEXEC)
    os.ftruncate(made, nbytes)
    found = core.meet("malloc", [nbytes, os.getpid(), made])
    if len({size for size, *_ in found}) > 1:
        raise RuntimeError(f"NVSHMEM: PEs allocate different sizes: {found}")
    memory = [_mapped(f"/proc/{pid}/fd/{fd}", nbytes) for _, pid, fd in found]
    address = _address(memory[core._world["rank"]])
    ctypes.memset(address, 0xEE, nbytes)
    core.meet("malloc is over", None)
    os.close(made)
    _regions[address] = memory
    if len(_regions) == 1:
        threading.Thread(target=_deliver, daemon=True).start()
    return address


def free(address: int) -> None:
    core.meet("free", None)
    del _regions[address]


def putmem_signal_on_stream(
    target: int, source: int, nbytes: int, word: int, value: int, how: int, pe: int, stream: int
) -> None:
    there, _, word_there = _at(target, nbytes, pe), _at(source, nbytes, pe), _at(word, 8, pe)

    def leave() -> None:
        data = ctypes.string_at(source, nbytes)
        ctypes.memset(there, 0xEE, nbytes)
        _due.put(lambda: (ctypes.memmove(there, data, nbytes), _set(word_there, value))[1])

    assert how == Signal_op.SIGNAL_SET
    device_shim.queue_on(stream, leave)


def signal_op_on_stream(word: int, value: int, how: int, pe: int, stream: int) -> None:
    word_there = _at(word, 8, pe)
    assert how == Signal_op.SIGNAL_SET
    device_shim.queue_on(stream, lambda: _due.put(lambda: _set(word_there, value)))


def _deliver() -> None:
    while True:
        found = [_due.get()]
        threading.Event().wait(_LATE_S)
        while not _due.empty():
            found.append(_due.get())
        for call in reversed(found):
            call()


def _set(word: int, value: int) -> None:
    ctypes.c_int64.from_address(word).value = value


def _at(address: int, nbytes: int, pe: int) -> int:
    """Return the address here of another PE's symmetric memory."""
    for start, memory in _regions.items():
        if start <= address and address + nbytes <= start + len(memory[pe]):
            return _address(memory[pe]) + address - start
    raise RuntimeError(f"NVSHMEM: {nbytes} bytes at {address:#x} are not in the symmetric heap")


def _mapped(path: str, nbytes: int) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), nbytes)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
