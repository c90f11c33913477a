"""Track which elements of a tensor have been received; each must arrive once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from refitd.errors import RefusedError

Box = tuple[tuple[int, int], ...]  # (start, stop) of each dimension


def box_of(name: str, slices: Sequence[slice | int], shape: Sequence[int]) -> Box:
    """Return the box that slices select; raises RefusedError unless it lies in the tensor and all steps are 1."""
    if len(slices) != len(shape):
        raise RefusedError(f"{name}: {_said(slices)} has {len(slices)} dimensions, the tensor has {list(shape)}")
    box = []
    for part, extent in zip(slices, shape, strict=True):
        low, high, step = (part, part + 1, 1) if isinstance(part, int) else (part.start or 0, part.stop, part.step or 1)
        high = extent if high is None else high
        if not 0 <= low < high <= extent or step != 1:
            raise RefusedError(f"{name}: {_said(slices)} is no box inside {list(shape)}")
        box.append((low, high))
    return tuple(box)


class Coverage:
    """The received boxes of one tensor."""

    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self._name = name
        self._shape = tuple(shape)
        self._boxes: npt.NDArray[np.int64] = np.zeros((16, len(shape), 2), np.int64)
        self._count = 0
        self._elements = 0

    @property
    def missing(self) -> int:
        """The number of elements that have not been received."""
        return math.prod(self._shape) - self._elements

    def add(self, box: Box) -> None:
        """Add a received box.

        Raises:
            RefusedError: the box overlaps an earlier one; names both.
        """
        found = self._boxes[: self._count]
        new = np.array(box, np.int64)
        meets = ((found[:, :, 0] < new[:, 1]) & (new[:, 0] < found[:, :, 1])).all(axis=1)
        if meets.any():
            other = [slice(low, high) for low, high in found[int(meets.argmax())].tolist()]
            both = f"{_said([slice(*pair) for pair in box])} and {_said(other)}"
            raise RefusedError(f"{self._name}: {both} overlap, expected every element once; describe no part twice")
        if self._count == len(self._boxes):
            self._boxes = np.concatenate([self._boxes, np.zeros_like(self._boxes)])
        self._boxes[self._count] = new
        self._count += 1
        self._elements += math.prod(high - low for low, high in box)

    def check_complete(self) -> None:
        """Raise RefusedError unless all elements have been received."""
        if self.missing:
            raise RefusedError(
                f"{self._name}: {self.missing} of the {math.prod(self._shape)} elements of {list(self._shape)} are in "
                f"none of the {self._count} pieces received, expected every element once; the sources do not cover it"
            )


def _said(slices: Sequence[slice | int]) -> str:
    parts = (f"{part.start}:{part.stop}" if isinstance(part, slice) else str(part) for part in slices)
    return f"[{', '.join(parts)}]"
