"""Read the tensors of a checkpoint from its open files, straight into the memory where they are published."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType

import torch

from refitd.checkpoints.folder import Checkpoint
from refitd.checkpoints.header import Stored
from refitd.checkpoints.opened import AGAIN, OpenedFile
from refitd.client.arena_copies import copy_bytes
from refitd.client.streamed import Unread
from refitd.errors import CheckpointError

STRIDE_BYTES = 16 << 20  # read between two calls of `on_progress`
AHEAD_BYTES = 64 << 20  # read ahead by the disk while tensors are copied: twice as fast on a cold file


class FileTensor(Unread):
    """A tensor in an open file.

    It is read by system calls and not through a memory map: if another process truncates the file, a read returns
    fewer bytes, and touching a page of a map kills this process (SIGBUS).
    """

    def __init__(self, stored: Stored, read: Callable[[memoryview], None]) -> None:
        """`read` fills memory of `stored.nbytes` bytes with the tensor's."""
        self.shape = tuple(stored.shape)
        self.dtype: torch.dtype = getattr(torch, stored.dtype)
        self._stride = stored.stride
        self._nbytes = stored.nbytes
        self._read = read

    def load(self) -> torch.Tensor:
        """Return it as a tensor in memory of its own; raises CheckpointError as `Reader.read`."""
        flat = torch.empty(self._nbytes, dtype=torch.uint8)
        self._fill(flat)
        found = flat.view(self.dtype)
        return found.view(self.shape) if self._stride is None else found.as_strided(self.shape, self._stride)

    def read_into(self, to: torch.Tensor) -> None:
        """Read it into a contiguous tensor in main memory; raises CheckpointError as `Reader.read`."""
        if self._stride is None:
            self._fill(to.view(-1).view(torch.uint8))
        else:
            copy_bytes(to, self.load())

    def _fill(self, flat: torch.Tensor) -> None:
        if self._nbytes:
            self._read(flat.numpy().data)


class Reader:
    """Reads the opened files of a checkpoint. Use it as a context manager; it closes the files.

    Attributes:
        tensors: the tensors by name.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Close unused files."""
        self._checkpoint = checkpoint
        self._opened = checkpoint.opened
        self._opened.keep(checkpoint.files)
        self._asked = dict.fromkeys(checkpoint.files, 0)
        self._on_progress: Callable[[int], object] = lambda nbytes: None
        self.tensors = {name: self._tensor(file, stored) for file, name, stored in checkpoint.tensors()}

    def read(self, on_progress: Callable[[int], object] = lambda nbytes: None) -> Iterator[tuple[str, FileTensor]]:
        """Yield each tensor's name and the tensor, which is to be read before the iterator is advanced.

        Each file is closed after its last tensor.

        `on_progress` is called with the number of bytes of each read.

        Raises:
            CheckpointError: the disk cannot be read, or the folder or a file was replaced or changed. Also raised where
                the tensor is read.
        """
        self._on_progress = on_progress
        for file, held in self._checkpoint.files.items():
            for name in held:
                yield name, self.tensors[name]
            self._opened.files[file].close()
        self.check()

    def check(self) -> None:
        """Raise CheckpointError if the folder or a file was replaced or changed."""
        self._opened.check()

    def _tensor(self, file: str, stored: Stored) -> FileTensor:
        return FileTensor(stored, lambda memory: self._read(self._opened.files[file], stored.offset, memory))

    def _read(self, file: OpenedFile, offset: int, memory: memoryview) -> None:
        """Fill memory with the bytes from `offset` on."""
        self._read_ahead(file, offset, offset + len(memory))
        for at in range(0, len(memory), STRIDE_BYTES):
            wanted = memory[at : at + STRIDE_BYTES]
            found = file.read_into(offset + at, wanted)
            if found < len(wanted):
                raise CheckpointError(
                    f"{file.path}: it was changed while it was read: it ends at byte {offset + at + found}, expected "
                    f"{file.size} bytes; {AGAIN}"
                )
            self._on_progress(found)

    def _read_ahead(self, file: OpenedFile, start: int, used: int) -> None:
        """Ask the kernel to read ahead of the bytes in use."""
        end = min(used + AHEAD_BYTES, file.size)
        name = file.path.name
        asked = max(self._asked[name], start)
        file.will_need(asked, end - asked)
        self._asked[name] = max(self._asked[name], end)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tensors = {}
        self._opened.close()
