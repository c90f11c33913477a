"""Pieces that are strided boxes in mapped arenas, or in another process's memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from refitd.addressing.between_nodes import TransferList
from refitd.addressing.messages import boxes_between
from refitd.addressing.places import PROCESS_MEMORY
from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena
from refitd.buffers.layout import extent
from refitd.copy_services.conversions import converted
from refitd.copy_services.device_pieces import DevicePiece
from refitd.copy_services.pieces import BoxPiece, Piece
from refitd.copy_services.process_memory import RemoteChunk
from refitd.describe.casts import DESTINATION_SIZES, SOURCE_SIZES
from refitd.errors import TransportError

_UNSIGNED: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
    16: np.complex128,
}
Words = npt.NDArray[Any]


class ArenaPiece(BoxPiece):
    """A strided box of an arena."""

    def __init__(self, words: Words, cast: int, element: int) -> None:
        """`words` are the elements in the arena; `element` is their size in transit."""
        super().__init__(words.size, cast, element)
        self._words = words
        self._flat: torch.Tensor | None = None
        if not cast and words.flags.c_contiguous:
            with warnings.catch_warnings():
                # the arena may be mapped read-only, and is only read
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
        place, at = out.numpy().view(_UNSIGNED[self._element]), 0
        for index, count in boxes_between(self._words.shape, start // self._element, end // self._element):
            words = self._words[index]
            if self._cast:
                words = converted(self._cast, words)
            np.copyto(place[at : at + count].reshape(words.shape), words)
            at += count

    def unpack(self, start: int, end: int, found: torch.Tensor) -> None:
        """See Piece.unpack."""
        place, at = found.cpu().numpy().view(_UNSIGNED[self._element]), 0
        for index, count in boxes_between(self._words.shape, start // self._element, end // self._element):
            words = self._words[index]
            np.copyto(words, place[at : at + count].reshape(words.shape))
            at += count


class ProcessPiece(BoxPiece):
    """A strided box at an address in another process; it can only be sent."""

    def __init__(
        self, pid: int, address: int, size: list[int], stride: list[int], held: int, cast: int, element: int
    ) -> None:
        """`held` is the size of an element in that process, `element` in transit, in bytes."""
        super().__init__(int(np.prod(size)), cast, element, f" in process {pid}")
        self._pid, self._address = pid, address
        self._size, self._stride = size, stride
        self._held = held

    def direct(self, start: int, end: int) -> torch.Tensor | None:
        """See Piece.direct: never."""
        return None

    def pack(self, start: int, end: int, out: torch.Tensor) -> None:
        """See Piece.pack."""
        if out.device.type != "cpu":
            self.pack(start, end, there := torch.empty(end - start, dtype=torch.uint8))
            out.copy_(there)
            return
        place, at = out.numpy().view(_UNSIGNED[self._element]), 0
        for index, count in boxes_between(self._size, start // self._element, end // self._element):
            skip = sum(part.start * step for part, step in zip(index, self._stride, strict=True))
            dims = [
                (part.stop - part.start, step)
                for part, step in zip(index, self._stride, strict=True)
                if part.stop - part.start != 1
            ]
            scratch = np.empty(count * self._held, dtype=np.uint8)
            words = RemoteChunk(self._pid, self._address + skip, dims, self._held).read(scratch)
            elements = words.view(_UNSIGNED[self._held])
            place[at : at + count] = converted(self._cast, elements) if self._cast else elements
            at += count

    def unpack(self, start: int, end: int, found: torch.Tensor) -> None:
        """Refuse: another process's memory is never written."""
        raise TransportError(f"process {self._pid}: its private memory is read, never written")


def piece_of(transfers: TransferList, row: int, arenas: Mapping[int, MappedArena | MappedDeviceArena]) -> Piece:
    """Return this end of a transfer.

    Raises:
        TransportError: it leaves its arena, or the arena is not mapped here, or is read-only but must be written.
    """
    size, stride = transfers.size[row].tolist(), transfers.stride[row].tolist()
    element, cast, offset = int(transfers.element_size[row]), int(transfers.cast[row]), int(transfers.offset[row])
    if not 0 <= cast < len(SOURCE_SIZES) or (cast and element != DESTINATION_SIZES[cast]) or element not in _UNSIGNED:
        raise TransportError(f"transfer {row}: there is no conversion {cast} to elements of {element} bytes")
    held = SOURCE_SIZES[cast] or element
    if int(transfers.arena[row]) == PROCESS_MEMORY:
        return ProcessPiece(int(transfers.pid[row]), offset, size, stride, held, cast, element)
    arena = arenas.get(int(transfers.arena[row]))
    if arena is None:
        raise TransportError(f"transfer {row}: arena {int(transfers.arena[row])} is not mapped here")
    end = offset + extent(size, stride, held)
    if offset < 0 or min(stride) < 0 or min(size) < 1 or end > arena.nbytes:
        raise TransportError(f"transfer {row}: bytes {offset}..{end} leave an arena of {arena.nbytes} bytes")
    if not transfers.is_send[row] and not arena.writable:
        raise TransportError(f"transfer {row}: arena {int(transfers.arena[row])} is mapped for reading only")
    if not isinstance(arena, MappedArena):
        return DevicePiece(arena, offset, size, stride, held, cast, element)
    # numpy ignores the strides of dimensions with one element when it checks for contiguity
    words = np.ndarray(tuple(size), _UNSIGNED[held], arena.bytes.data, offset, tuple(stride))
    return ArenaPiece(words, cast, element)
