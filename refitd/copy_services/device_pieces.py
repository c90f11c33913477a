"""Pieces that are strided boxes of an arena on a GPU, packed and unpacked by torch."""

from __future__ import annotations

import torch

from refitd.addressing.messages import boxes_between
from refitd.buffers.cuda import MappedDeviceArena
from refitd.copy_services.conversions import converted
from refitd.copy_services.pieces import BoxPiece
from refitd.errors import TransportError

# integers, and complex for 16 bytes: torch copies them bit for bit
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


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
    ) -> None:
        """Make a view of a box that is known to lie inside the arena.

        Args:
            arena: the arena.
            offset: of the first element, in bytes.
            size: elements along each dimension.
            stride: bytes between elements along each dimension.
            held: bytes of an element in the arena.
            cast: conversion on sending, 0 for none.
            element: bytes of an element in transit.

        Raises:
            TransportError: offset or strides are not multiples of the element size.
        """
        dtype = _WORDS[held]
        if offset % held or any(step % held for step in stride):
            raise TransportError(f"elements of {held} bytes at byte {offset}, {stride} apart, cannot be read by a GPU")
        words = arena.tensor[: arena.nbytes // held * held].view(dtype)
        self._words = words.as_strided(size, [step // held for step in stride], offset // held)
        super().__init__(self._words.numel(), cast, element, f" on {self._words.device}")

    def direct(self, start: int, end: int) -> torch.Tensor | None:
        """See Piece.direct."""
        if self._cast or not self._words.is_contiguous():
            return None
        return self._words.reshape(-1).view(torch.uint8)[start:end]

    def pack(self, start: int, end: int, out: torch.Tensor) -> None:
        """See Piece.pack."""
        for box, place in self._parts(start, end, out):
            if self._cast:
                there = converted(self._cast, box.cpu().numpy().view(f"u{box.element_size()}"))
                place.copy_(torch.from_numpy(there.view(f"i{self._element}")))
            else:
                place.copy_(box)

    def unpack(self, start: int, end: int, found: torch.Tensor) -> None:
        """See Piece.unpack."""
        for box, place in self._parts(start, end, found):
            box.copy_(place)

    def _parts(self, start: int, end: int, buffer: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of equal shape: part of the box, and its place in the buffer."""
        item, at, found = self._element, 0, []
        for index, count in boxes_between(self._words.shape, start // item, end // item):
            box = self._words[index]
            place = buffer[at : at + count * item].view(_WORDS[item]).view(box.shape)
            found.append((box, place))
            at += count * item
        return found
