"""A worker's share of a proof: take digests of spans of tensors, and compare two spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from refitd.buffers.arena import MappedArena
from refitd.buffers.blocks import Elements, compare, digest, packed
from refitd.buffers.layout import extent
from refitd.errors import TransportError
from refitd.protocol import sidecar

if TYPE_CHECKING:
    from refitd.buffers.cuda import MappedDeviceArena


# of elements, of blocks, and of the rows of tiles
_SIZES = (1, 2, 4, 8, 16, 64, 128, 256, 512)
Arenas = Mapping[int, "MappedArena | MappedDeviceArena"]


def read(message: sidecar.ReadSpans, arenas: Arenas) -> sidecar.SpansRead:
    """Compare the spans if the message has `others`, else take digests; return the reason if that fails."""
    return compared(message, arenas) if message.others else taken(message, arenas)


def taken(message: sidecar.ReadSpans, arenas: Arenas) -> sidecar.SpansRead:
    """Take the digest of each span; return the reason if that fails."""
    try:
        found = [digest(_parts(span, arenas)) for span in message.spans]
    except TransportError as exc:
        return sidecar.SpansRead(run=message.run, reason=str(exc))
    return sidecar.SpansRead(run=message.run, digests=b"".join(found))


def compared(message: sidecar.ReadSpans, arenas: Arenas) -> sidecar.SpansRead:
    """Compare each span with another one; return the reason if that fails."""
    try:
        found = tuple(
            _compared(live, expected, arenas) for live, expected in zip(message.spans, message.others, strict=True)
        )
    except TransportError as exc:
        return sidecar.SpansRead(run=message.run, reason=str(exc))
    return sidecar.SpansRead(run=message.run, found=found)


def _compared(live: sidecar.Span, expected: sidecar.Span, arenas: Arenas) -> tuple[int, int, int]:
    if (live.first, live.count, live.element_size) != (expected.first, expected.count, expected.element_size):
        raise TransportError(f"spans of arenas {live.arena} and {expected.arena} are not of the same elements")
    return compare(_parts(live, arenas), _parts(expected, arenas), live.first)


def _parts(span: sidecar.Span, arenas: Arenas) -> Iterator[Elements]:
    """Yield the elements of a span as contiguous pieces in main memory."""
    arena = arenas.get(span.arena)
    if arena is None:
        raise TransportError(f"arena {span.arena} is not mapped here")
    end = span.offset + extent(span.shape, span.strides, span.element_size)
    inside = end <= arena.nbytes and span.first + span.count <= prod(span.shape)
    if not inside or len(span.shape) != len(span.strides) or span.element_size not in _SIZES:
        raise TransportError(
            f"elements {span.first}..{span.first + span.count} of {list(span.shape)} at byte {span.offset} leave "
            f"arena {span.arena} of {arena.nbytes} bytes"
        )
    if isinstance(arena, MappedArena):
        array = np.ndarray(span.shape, f"V{span.element_size}", arena.bytes, span.offset, span.strides)
        yield from packed(array, span.first, span.count)
    else:
        yield from packed(_fetched(span, arena), 0, span.count)


def _fetched(span: sidecar.Span, arena: MappedDeviceArena) -> Elements:
    """Copy a span from a GPU to main memory."""
    import torch

    from refitd.copy_services.pieces import DevicePiece

    element = span.element_size
    piece = DevicePiece(arena, span.offset, list(span.shape), list(span.strides), element, 0, element)
    there = torch.empty(span.count * element, dtype=torch.uint8)
    piece.pack(span.first * element, (span.first + span.count) * element, there)
    found: Elements = there.numpy().view(f"V{element}")
    return found
