"""Reads another process's private memory, for sources that lend tensors outside arenas."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from refitd.errors import PeerLost, TransportError

Bytes = npt.NDArray[np.uint8]
_IOV_MAX = 1024
_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_IOVEC = ctypes.c_uint64 * 2  # struct iovec { void *base; size_t len; }


class RemoteChunk:
    """A strided box at an address in another process."""

    def __init__(self, pid: int, address: int, dims: Sequence[tuple[int, int]], element: int) -> None:
        """`dims` are (count, stride in bytes), outermost first."""
        run = element
        outer = list(dims)
        while outer and outer[-1][1] == run:
            run *= outer.pop()[0]
        starts = np.array([address], dtype=np.uint64)
        for count, stride in outer:
            steps = np.arange(count, dtype=np.uint64) * np.uint64(stride)
            starts = (starts[:, None] + steps[None, :]).reshape(-1)
        self.pid = pid
        self.nbytes = run * len(starts)
        self._remote = np.empty((len(starts), 2), dtype=np.uint64)  # struct iovec each
        self._remote[:, 0] = starts
        self._remote[:, 1] = run
        self._remote_at: int = self._remote.ctypes.data
        self._run = run

    def read(self, scratch: Bytes) -> Bytes:
        """Read the box's bytes, packed, into (a part of) `scratch` and return that; raises like `read_to`."""
        out = scratch[: self.nbytes]
        self.read_to(out.ctypes.data)
        return out

    def read_to(self, address: int) -> None:
        """Write the box's bytes, packed, to an address in this process with room for `nbytes`.

        Raises:
            PeerLost: the process has ended.
            TransportError: the kernel forbids this process to read there, or the memory is unmapped.
        """
        for first in range(0, len(self._remote), _IOV_MAX):
            count = min(_IOV_MAX, len(self._remote) - first)
            want = count * self._run
            local = _IOVEC(address + first * self._run, want)
            got = _libc.process_vm_readv(self.pid, local, 1, self._remote_at + first * 16, count, 0)
            if got != want:
                self._fail(got)

    def _fail(self, got: int) -> None:
        reason = os.strerror(ctypes.get_errno()) if got < 0 else f"only {got} bytes came"
        if got < 0 and not os.path.exists(f"/proc/{self.pid}"):
            raise PeerLost(f"process {self.pid}, whose tensors are lent, is gone")
        raise TransportError(
            f"the memory of process {self.pid} cannot be read: {reason}; publish with a snapshot instead of lending, "
            "or put the tensors into an arena (client.allocate)"
        )
