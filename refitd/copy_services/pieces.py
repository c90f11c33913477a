"""Pieces: one half of a transfer, on any device; packed into messages and unpacked from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from refitd.addressing.messages import boxes_between

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Base:
    """An earlier version of a piece's elements at this end, in the same order and form."""

    piece: Piece
    version: str  # equal on both ends exactly if they hold the same one


class Piece(ABC):
    """The elements of one end, as bytes in order. A part is the bytes start:end, multiples of `itemsize`.

    A piece with a `base` may travel as a delta. The base of a received piece may be the piece itself.
    """

    base: Base | None = None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes in transit."""

    @property
    @abstractmethod
    def itemsize(self) -> int:
        """Bytes of one element in transit."""

    @abstractmethod
    def describe(self) -> str:
        """Return the number and kind of elements, for errors."""

    @abstractmethod
    def direct(self, start: int, end: int) -> torch.Tensor | None:
        """Return the part itself as uint8 if it is contiguous, so that it needs no staging; else None."""

    @abstractmethod
    def pack(self, start: int, end: int, out: torch.Tensor) -> None:
        """Write the part to `out`, uint8 of end - start bytes."""

    @abstractmethod
    def unpack(self, start: int, end: int, found: torch.Tensor) -> None:
        """Write `found`, uint8 of end - start bytes, to the part."""


class BoxPiece(Piece):
    """Common part of pieces in arenas and other processes: a strided box whose elements may be converted."""

    def __init__(self, count: int, cast: int, element: int, where: str = "") -> None:
        """Store the number of elements, their conversion (0 for none), and their size in transit in bytes."""
        self._count, self._cast, self._element, self._where = count, cast, element, where

    @property
    def nbytes(self) -> int:
        """See Piece.nbytes."""
        return self._count * self._element

    @property
    def itemsize(self) -> int:
        """See Piece.itemsize."""
        return self._element

    def describe(self) -> str:
        """See Piece.describe."""
        return f"{self._count} elements of {self._element} bytes{self._where}"


@dataclass(frozen=True, slots=True)
class TensorPiece(Piece):
    """A tensor of this process, on any device; its elements have `dtype` in transit."""

    tensor: torch.Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """See Piece.nbytes."""
        return self.tensor.numel() * self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        """See Piece.itemsize."""
        return self.dtype.itemsize

    def describe(self) -> str:
        """See Piece.describe."""
        return f"{self.tensor.numel()} elements of {self.dtype}"

    def direct(self, start: int, end: int) -> torch.Tensor | None:
        """See Piece.direct."""
        tensor = self.tensor
        if self.dtype != tensor.dtype or not tensor.is_contiguous():
            return None
        # dimensions of size 1 may have any stride
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)[start:end]

    def pack(self, start: int, end: int, out: torch.Tensor) -> None:
        """See Piece.pack."""
        for there, here in self._parts(start, end, out):
            here.copy_(there)

    def unpack(self, start: int, end: int, found: torch.Tensor) -> None:
        """See Piece.unpack."""
        for there, here in self._parts(start, end, found):
            there.copy_(here)

    def _parts(self, start: int, end: int, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of equal shape: part of the tensor, and its place in the buffer."""
        item = self.dtype.itemsize
        parts, at = [], 0
        is_raw = self.dtype == self.tensor.dtype
        for index, count in boxes_between(self.tensor.shape, start // item, end // item):
            box = self.tensor[index]
            place = buffer[at : at + count * item].view(self.dtype).view(box.shape)
            parts.append((raw(box), raw(place)) if is_raw else (box, place))
            at += count * item
        return parts

    def copy_from(self, source: TensorPiece, *, verify: bool) -> bool:
        """Copy another piece with as many elements here; with `verify`, return whether both then hold the same."""
        value, target = source.tensor, self.tensor
        if value.shape != target.shape:
            value = value.reshape(target.shape)
        if value.dtype == target.dtype:
            value, target = raw(value), raw(target)
        if value.data_ptr() == target.data_ptr() and value.stride() == target.stride() and value.dtype == target.dtype:
            return True  # it is the same memory
        target.copy_(value)
        return not verify or value.dtype != target.dtype or torch.equal(value.to(target.device), target)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers, which every copy supports and keeps bit for bit."""
    size = tensor.element_size()
    if size == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_SAME_SIZE[size])
