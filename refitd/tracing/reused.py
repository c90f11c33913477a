"""Memory for large tensors that a loader takes one after the other, used again when the loader holds none of it."""

from __future__ import annotations

import sys

import numpy as np
import torch

# A loader holds one tensor while it asks for the next one.
BUFFERS = 2

# Smaller tensors are cheap to allocate.
LARGE = 1 << 20


class Reused:
    """Buffers whose pages are touched once."""

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return bytes that belong to the receiver as long as it, or a view of it, is held by anyone."""
        if nbytes < LARGE:
            return torch.empty(nbytes, dtype=torch.uint8)
        free = [i for i in range(len(self._buffers)) if sys.getrefcount(self._buffers[i]) == _UNUSED]
        fitting = [i for i in free if self._buffers[i].nbytes >= nbytes]
        if fitting:
            number = min(fitting, key=lambda i: self._buffers[i].nbytes)
        elif free or len(self._buffers) < BUFFERS:
            if free:
                del self._buffers[free[0]]  # before a larger one is made
            number = len(self._buffers)
            self._buffers.append(torch.empty(nbytes, dtype=torch.uint8).numpy())
        else:
            return torch.empty(nbytes, dtype=torch.uint8)
        return torch.from_numpy(self._buffers[number][:nbytes])  # the tensor's memory keeps the array, with each view

    def nbytes(self) -> int:
        """Return the bytes of the buffers."""
        return sum(one.nbytes for one in self._buffers)


def _unused() -> int:
    """Return the references that an array in a list has by itself."""
    held = [np.empty(0, np.uint8)]
    return sys.getrefcount(held[0])


_UNUSED = _unused()
