"""Pieces: one half of a transfer, packed into messages and unpacked from them.

TensorPiece     a tensor of this process, on any device
ArenaPiece      a strided box of a mapped arena
DevicePiece     a strided box of an arena on a GPU

Both ends compute the layout of messages from the sizes alone. Pieces are in the order of their ids. Small pieces share
a message, each at a multiple of ALIGNMENT. A piece at least as large as a message is cut into several messages. They
contain only this piece, so they are sent from and received into the tensor directly:

    limit 100, pieces of 40, 30, 250, 10   ->   [40 | 30]  [250: 0-100]  [100-200]  [200-250]  [10]
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from refitd.addressing.paths import TransferList
from refitd.addressing.places import extent_of, of_items
from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena
from refitd.dtypes import DESTINATION_SIZES, SOURCE_SIZES, TILE_ITEMS
from refitd.errors import TransportError
from refitd.mxfp8.format import TILE
from refitd.mxfp8.parts import Converter

# blocks of MXFP8 are void items
_UNSIGNED: dict[int, npt.DTypeLike] = {
    **{1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128},
    **{size: f"V{size}" for size in (32, 64, 128)},
}
Words = npt.NDArray[Any]
# integers, and complex for 16 bytes: torch copies them bit for bit
_DEVICE_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Base:
    """An earlier version of a piece's elements at this end, in the same order and form."""

    piece: Piece
    version: str  # equal on both ends exactly if their bases are equal


class Piece(ABC):
    """The elements of one end, as bytes in order. A part is the bytes start:end, multiples of `itemsize`.

    A piece with a `base` may travel as a delta. The base of a received piece may be the piece itself.
    """

    base: Base | None = None
    converts = False  # `pack` converts the elements
    await_written: Callable[[], object] | None = None  # call it before a read: it returns once this piece is written

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
        """Return the part itself as uint8 if it is contiguous and needs no staging; else None."""

    @abstractmethod
    def pack(self, start: int, end: int, out: torch.Tensor) -> None:
        """Write the part to `out`, uint8 of end - start bytes."""

    @abstractmethod
    def unpack(self, start: int, end: int, found: torch.Tensor) -> None:
        """Write `found`, uint8 of end - start bytes, to the part."""


class BoxPiece(Piece):
    """Common part of pieces in arenas and other processes: a strided box whose elements may be converted."""

    def __init__(self, count: int, cast: int, element: int, convert: Converter | None = None, where: str = "") -> None:
        """Store the number of elements, their conversion (0 for none), and their size in transit in bytes.

        Pieces of one thread may share `convert`.
        """
        self._count, self._cast, self._element, self._where = count, cast, element, where
        self._convert = convert or Converter()
        self.converts = bool(cast)

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
        """Copy another piece with as many elements here; with `verify`, return whether both are then equal."""
        value, target = source.tensor, self.tensor
        if value.shape != target.shape:
            value = value.reshape(target.shape)
        if value.dtype == target.dtype:
            value, target = raw(value), raw(target)
        if value.data_ptr() == target.data_ptr() and value.stride() == target.stride() and value.dtype == target.dtype:
            return True  # both are one memory
        target.copy_(value)
        return not verify or value.dtype != target.dtype or torch.equal(value.to(target.device), target)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return this memory as integers, which every copy supports and preserves bit for bit."""
    size = tensor.element_size()
    if size == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_SAME_SIZE[size])


class ArenaPiece(BoxPiece):
    """A strided box of an arena."""

    def __init__(self, words: Words, cast: int, element: int, convert: Converter | None = None, inner: int = 0) -> None:
        """`words` are the elements in the arena, each of `inner` dimensions; `element` is their size in transit."""
        self._shape = words.shape[: words.ndim - inner]
        super().__init__(prod(self._shape), cast, element, convert)
        self._words = words
        self._flat: torch.Tensor | None = None
        if not cast and words.flags.c_contiguous:
            with warnings.catch_warnings():
                # the arena may be mapped for reading only
                warnings.filterwarnings("ignore", message=".*not writable.*")
                self._flat = torch.from_numpy(words.reshape(-1).view(np.uint8))

    def direct(self, start: int, end: int) -> torch.Tensor | None:
        """See Piece.direct."""
        return None if self._flat is None else self._flat[start:end]

    def pack(self, start: int, end: int, out: torch.Tensor) -> None:
        """See Piece.pack."""
        if out.device.type != "cpu":
            self.pack(start, end, there := torch.empty(end - start, dtype=torch.uint8))
            out.copy_(there)
            return
        place, at, item = out.numpy(), 0, self._element
        for index, count in boxes_between(self._shape, start // item, end // item):
            words = self._words[index]
            if self._cast:
                words = self._convert(self._cast, words)
            np.copyto(place[at : at + count * item].view(words.dtype).reshape(words.shape), words)
            at += count * item

    def unpack(self, start: int, end: int, found: torch.Tensor) -> None:
        """See Piece.unpack."""
        place, at, item = found.cpu().numpy(), 0, self._element
        for index, count in boxes_between(self._shape, start // item, end // item):
            words = self._words[index]
            np.copyto(words, place[at : at + count * item].view(words.dtype).reshape(words.shape))
            at += count * item


class DevicePiece(BoxPiece):
    """A strided box of an arena on a GPU. Conversions happen in main memory, on sending.

    Work is queued on the GPU's current stream; the caller that runs the transfer waits for it.
    """

    def __init__(
        self,
        arena: MappedDeviceArena,
        offset: int,
        size: list[int],
        stride: list[int],
        held: int,
        cast: int,
        element: int,
        convert: Converter | None = None,
    ) -> None:
        """Make a view of a box inside the arena; the caller has checked its range.

        Args:
            arena: the arena.
            offset: of the first element, in bytes.
            size: elements along each dimension.
            stride: bytes between elements along each dimension.
            held: bytes of an element in the arena.
            cast: conversion on sending, 0 for none.
            element: bytes of an element in transit.
            convert: see BoxPiece.

        Raises:
            TransportError: offset or strides are not multiples of the element size.
        """
        word = min(held, 16)
        (size, stride), (rows, pitches), item = of_items(size, stride, held)
        steps = [*stride, *pitches[:1]]
        if offset % word or any(step % word for step in steps):
            raise TransportError(f"elements of {held} bytes at byte {offset}, {stride} apart, cannot be read by a GPU")
        words = arena.tensor[: arena.nbytes // word * word].view(_DEVICE_WORDS[word])
        self._size, self._held = tuple(size), held
        # blocks have one more dimension, of their words; tiles have two
        wide = (item * rows[1] if rows else held) // word
        last = ([wide], [1]) if held > word else ([], [])
        shape = [*size, *rows[:1], *last[0]]
        self._words = words.as_strided(shape, [*(step // word for step in steps), *last[1]], offset // word)
        super().__init__(prod(size), cast, element, convert, f" on {self._words.device}")

    def direct(self, start: int, end: int) -> torch.Tensor | None:
        """See Piece.direct."""
        if self._cast or not self._words.is_contiguous():
            return None
        return self._words.reshape(-1).view(torch.uint8)[start:end]

    def pack(self, start: int, end: int, out: torch.Tensor) -> None:
        """See Piece.pack."""
        for box, place in self._parts(start, end, out):
            if self._cast:
                there = box.cpu().contiguous().view(torch.uint8).numpy().reshape(-1)
                item = TILE_ITEMS.get(self._held)
                there = there.view(_UNSIGNED[item or self._held]).reshape((-1, TILE, TILE) if item else -1)
                place.copy_(torch.from_numpy(self._convert(self._cast, there).reshape(-1).view(np.uint8)))
            else:
                place.view(box.dtype).view(box.shape).copy_(box)

    def unpack(self, start: int, end: int, found: torch.Tensor) -> None:
        """See Piece.unpack."""
        for box, place in self._parts(start, end, found):
            box.copy_(place.view(box.dtype).view(box.shape))

    def _parts(self, start: int, end: int, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return parts of the box, each with its place in the buffer, as bytes."""
        item, at, found = self._element, 0, []
        for index, count in boxes_between(self._size, start // item, end // item):
            found.append((self._words[index], buffer[at : at + count * item]))
            at += count * item
        return found


def piece_of(
    transfers: TransferList,
    row: int,
    arenas: Mapping[int, MappedArena | MappedDeviceArena],
    convert: Converter | None = None,
) -> Piece:
    """Return this end of a transfer. `convert` may be shared by the pieces of one thread.

    Raises:
        TransportError: it leaves its arena, or the arena is not mapped here, or is read-only but must be written.
    """
    arena = arenas.get(int(transfers.arena[row]))
    if arena is None:
        raise TransportError(f"transfer {row}: arena {int(transfers.arena[row])} is not mapped here")
    if not transfers.is_send[row] and not arena.writable:
        raise TransportError(f"transfer {row}: arena {int(transfers.arena[row])} is mapped for reading only")
    box = int(transfers.offset[row]), transfers.size[row].tolist(), transfers.stride[row].tolist()
    return box_of(arena, *box, int(transfers.cast[row]), int(transfers.element_size[row]), f"transfer {row}", convert)


def box_of(
    arena: MappedArena | MappedDeviceArena,
    offset: int,
    size: list[int],
    stride: list[int],
    cast: int,
    element: int,
    what: str,
    convert: Converter | None = None,
) -> Piece:
    """Return a box of an arena; arguments as those of DevicePiece. `what` names it in errors.

    Raises:
        TransportError: it leaves the arena, or there is no such conversion.
    """
    is_known = element in _UNSIGNED or element in TILE_ITEMS
    if not 0 <= cast < len(SOURCE_SIZES) or (cast and element != DESTINATION_SIZES[cast]) or not is_known:
        raise TransportError(f"{what}: conversion {cast} to elements of {element} bytes does not exist")
    held = SOURCE_SIZES[cast] or element
    end = offset + extent_of(size, stride, held)
    if offset < 0 or min(stride) < 0 or min(size) < 1 or end > arena.nbytes:
        raise TransportError(f"{what}: bytes {offset}..{end} leave an arena of {arena.nbytes} bytes")
    if not isinstance(arena, MappedArena):
        return DevicePiece(arena, offset, size, stride, held, cast, element, convert)
    # numpy ignores the strides of dimensions with one element when it checks for contiguity
    (size, stride), inner, item = of_items(size, stride, held)
    shape, strides = (*size, *inner[0]), (*stride, *inner[1])
    words = np.ndarray(shape, _UNSIGNED[item], arena.bytes.data, offset, strides)
    return ArenaPiece(words, cast, element, convert, len(inner[0]))


# a multiple of every element size but blocks: each piece in a message can be viewed with its dtype
ALIGNMENT = 16
_BLOCK_BYTES, _TILE_BYTES = 32, max(TILE_ITEMS)


def aligned(nbytes: int) -> int:
    """Return the largest size of a message, at most `nbytes`, that cuts no tile or block that fits."""
    unit = next((unit for unit in (_TILE_BYTES, _BLOCK_BYTES) if nbytes >= unit), ALIGNMENT)
    return nbytes - nbytes % unit


@dataclass(frozen=True, slots=True)
class PieceSpan:
    """Bytes start:end of piece `piece` are at offset `at` of a message."""

    piece: int
    start: int
    end: int
    at: int


@dataclass(frozen=True, slots=True)
class PackedMessage:
    """One send and its receive."""

    nbytes: int
    spans: tuple[PieceSpan, ...]

    @property
    def payload(self) -> int:
        """Bytes of the pieces in this message, without padding."""
        return sum(span.end - span.start for span in self.spans)


def lay_out(sizes: Sequence[int], limit: int) -> list[PackedMessage]:
    """Return the messages for pieces of these sizes; skip empty pieces.

    `limit` is the maximum size of a message in bytes, which is `aligned`.
    """
    messages: list[PackedMessage] = []
    spans: list[PieceSpan] = []
    used = 0

    def flush() -> None:
        nonlocal spans, used
        if spans:
            messages.append(PackedMessage(spans[-1].at + spans[-1].end - spans[-1].start, tuple(spans)))
        spans, used = [], 0

    for piece, size in enumerate(sizes):
        if size >= limit:
            flush()
            for start in range(0, size, limit):
                end = min(size, start + limit)
                messages.append(PackedMessage(end - start, (PieceSpan(piece, start, end, 0),)))
        elif size:
            if used + size > limit:
                flush()
            spans.append(PieceSpan(piece, 0, size, used))
            used += -(-size // ALIGNMENT) * ALIGNMENT
    flush()
    return messages


def boxes_between(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[slice, ...], int]]:
    """Yield (index, elements) of boxes that together cover elements start:end of a tensor in row-major order.

    shape (4, 10), 5:27  ->  [0:1, 5:10], [1:2, 0:10], [2:3, 0:7]     (full rows in the middle are one box)
    """
    if start >= end:
        return
    if end - start == prod(shape):
        yield tuple(slice(0, n) for n in shape), end - start
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), end // inner
    if first > last:  # within one row
        for index, count in boxes_between(shape[1:], start - last * inner, end - last * inner):
            yield (slice(last, last + 1), *index), count
        return
    for index, count in boxes_between(shape[1:], start - (first - 1) * inner, inner) if start % inner else ():
        yield (slice(first - 1, first), *index), count
    if first < last:
        yield (slice(first, last), *(slice(0, n) for n in shape[1:])), (last - first) * inner
    for index, count in boxes_between(shape[1:], 0, end - last * inner) if end % inner else ():
        yield (slice(last, last + 1), *index), count
