"""Read the tensors of a checkpoint through memory maps, each page once."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType

import torch

from refitd.checkpoints.folder import Checkpoint
from refitd.checkpoints.header import Stored
from refitd.errors import CheckpointError

STRIDE_BYTES = 16 << 20  # read between two calls of `on_progress`
AHEAD_BYTES = 64 << 20  # read ahead by the disk while tensors are copied: twice as fast on a cold file
MADV_POPULATE_READ = 22  # Linux 5.14; unlike touching the page, it returns an error if the file cannot be read

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mapped:
    """The opened files of a checkpoint, mapped read-only without private memory. Use it as a context manager.

    It closes the files.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Map every file; raises CheckpointError if one cannot be mapped."""
        self._checkpoint = checkpoint
        self._opened = checkpoint.opened
        self._maps: dict[str, mmap.mmap] = {}
        self._opened.keep(checkpoint.files)
        for name in checkpoint.files:
            file = self._opened.files[name]
            try:
                self._maps[name] = mmap.mmap(file.fd, file.size, prot=mmap.PROT_READ)
            except (OSError, ValueError) as exc:  # ValueError: the file is shorter now
                self._opened.check()
                raise CheckpointError(f"{file.path}: it cannot be mapped: {exc}") from exc
            file.close()  # the map keeps the file
        self.tensors = {name: self._view(file, stored) for file, name, stored in checkpoint.tensors()}

    def read(self, on_progress: Callable[[int], object] = lambda nbytes: None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) once the tensor's pages are in memory; release the pages after its use.

        `on_progress` is called with the number of bytes of each read.

        Raises:
            CheckpointError: the disk cannot be read, or the folder or a file was replaced or changed.
        """
        asked = dict.fromkeys(self._checkpoint.files, 0)
        for file, name, stored in self._checkpoint.tensors():
            asked[file] = self._read_ahead(file, max(asked[file], stored.offset), stored.offset + stored.nbytes)
            self._populate(file, stored, on_progress)
            yield name, self._row_major(name, stored)
            self._advise(file, stored.offset, stored.nbytes, mmap.MADV_DONTNEED)
        self._opened.check()

    def _view(self, file: str, stored: Stored) -> torch.Tensor:
        dtype = getattr(torch, stored.dtype)
        if not stored.nbytes:
            return torch.empty(stored.shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is only read
            flat = torch.frombuffer(self._maps[file], dtype=torch.uint8, count=stored.nbytes, offset=stored.offset)
        # it may lie at any byte, so that only its bytes may be copied
        return flat.view(dtype).view(stored.shape)

    def _row_major(self, name: str, stored: Stored) -> torch.Tensor:
        tensor = self.tensors[name]
        if stored.stride is None:
            return tensor
        # a copy of its own, which is aligned
        return tensor.view(-1).view(torch.uint8).clone().view(tensor.dtype).as_strided(stored.shape, stored.stride)

    def _read_ahead(self, file: str, asked: int, used: int) -> int:
        """Ask the kernel to read ahead of the bytes in use; return the end of what has been requested."""
        end = min(used + AHEAD_BYTES, self._opened.files[file].size)
        for at in range(asked, end, STRIDE_BYTES):
            self._advise(file, at, min(STRIDE_BYTES, end - at), mmap.MADV_WILLNEED)
        return max(asked, end)

    def _populate(self, file: str, stored: Stored, on_progress: Callable[[int], object]) -> None:
        for at in range(0, stored.nbytes, STRIDE_BYTES):
            size = min(STRIDE_BYTES, stored.nbytes - at)
            failed = self._advise(file, stored.offset + at, size, MADV_POPULATE_READ)
            if failed not in (0, errno.EINVAL):  # EINVAL: an older kernel, which reads pages when they are touched
                self._opened.check()
                raise CheckpointError(f"{self._checkpoint.path / file}: it cannot be read: {os.strerror(failed)}")
            on_progress(size)

    def _advise(self, file: str, offset: int, nbytes: int, advice: int) -> int:
        """Advise the kernel about these bytes; return the errno, 0 on success."""
        if not nbytes:
            return 0
        first = offset - offset % mmap.PAGESIZE
        base = torch.frombuffer(self._maps[file], dtype=torch.uint8, count=1).data_ptr()
        wrong: int = _libc.madvise(base + first, nbytes + offset - first, advice)
        return ctypes.get_errno() if wrong else 0

    def __enter__(self) -> Mapped:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tensors = {}
        self._opened.close()
        self._maps = {}  # each file is unmapped with the last tensor in it
