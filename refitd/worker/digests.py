"""A worker's part in proofs: digests of spans of tensors, and comparison of two spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from refitd.buffers.arena import MappedArena
from refitd.buffers.blocks import CHUNK_BYTES, Elements, compare, digest, packed
from refitd.buffers.layout import extent
from refitd.copy_services.process_memory import RemoteChunk
from refitd.errors import TransportError
from refitd.protocol import sidecar

if TYPE_CHECKING:
    from refitd.buffers.cuda import MappedDeviceArena


Arenas = Mapping[int, "MappedArena | MappedDeviceArena"]


def taken(message: sidecar.TakeDigests, arenas: Arenas) -> sidecar.DigestsTaken:
    """Answer a digest request, with the reason if it cannot be done."""
    try:
        found = [digest(_parts(span, arenas)) for span in message.spans]
    except TransportError as exc:
        return sidecar.DigestsTaken(run=message.run, reason=str(exc))
    return sidecar.DigestsTaken(run=message.run, digests=b"".join(found))


def compared(message: sidecar.CompareSpans, arenas: Arenas) -> sidecar.SpansCompared:
    """Answer a comparison request, with the reason if it cannot be done."""
    try:
        found = tuple(_compared(live, expected, arenas) for live, expected in message.pairs)
    except TransportError as exc:
        return sidecar.SpansCompared(run=message.run, reason=str(exc))
    return sidecar.SpansCompared(run=message.run, found=found)


def _compared(live: sidecar.Span, expected: sidecar.Span, arenas: Arenas) -> tuple[int, int, int]:
    if (live.first, live.count, live.element_size) != (expected.first, expected.count, expected.element_size):
        raise TransportError(f"spans of arenas {live.arena} and {expected.arena} are not of the same elements")
    return compare(_parts(live, arenas), _parts(expected, arenas), live.first)


def _parts(span: sidecar.Span, arenas: Arenas) -> Iterator[Elements]:
    """Yield the elements of a span as contiguous parts in main memory."""
    if span.pid:
        yield from _read(span)
        return
    arena = arenas.get(span.arena)
    if arena is None:
        raise TransportError(f"arena {span.arena} is not mapped here")
    end = span.offset + extent(span.shape, span.strides, span.element_size)
    inside = end <= arena.nbytes and span.first + span.count <= prod(span.shape)
    if not inside or len(span.shape) != len(span.strides) or span.element_size not in (1, 2, 4, 8, 16):
        raise TransportError(
            f"elements {span.first}..{span.first + span.count} of {list(span.shape)} at byte {span.offset} leave "
            f"arena {span.arena} of {arena.nbytes} bytes"
        )
    if isinstance(arena, MappedArena):
        array = np.ndarray(span.shape, f"V{span.element_size}", arena.bytes, span.offset, span.strides)
        yield from packed(array, span.first, span.count)
    else:
        yield from packed(_fetched(span, arena), 0, span.count)


def _read(span: sidecar.Span) -> Iterator[Elements]:
    """Read a span of another process's memory."""
    if len(span.shape) != len(span.strides) or span.first + span.count > prod(span.shape):
        raise TransportError(f"elements {span.first}..{span.first + span.count} are not all of {list(span.shape)}")
    box = list(zip(span.shape, span.strides, strict=True))
    yield from _read_box(span.pid, span.offset, box, span.element_size, span.first, span.count)


def _read_box(
    pid: int, address: int, box: list[tuple[int, int]], element: int, first: int, count: int
) -> Iterator[Elements]:
    """Read elements [first : first + count] of a box of (size, stride), in parts of at most about CHUNK_BYTES."""
    (_, stride), *rest = box
    inner = prod(size for size, _ in rest)
    end = first + count
    while first < end:
        row, skip = divmod(first, inner)
        rows = min(CHUNK_BYTES // (inner * element), (end - first) // inner)
        part = rows * inner
        if rest and (skip or not rows):
            part = min(inner - skip, end - first)
            yield from _read_box(pid, address + row * stride, rest, element, skip, part)
        else:
            chunk = RemoteChunk(pid, address + row * stride, [(rows, stride), *rest], element)
            yield chunk.read(np.empty(chunk.nbytes, np.uint8)).view(f"V{element}")
        first += part


def _fetched(span: sidecar.Span, arena: MappedDeviceArena) -> Elements:
    """Copy a span from a GPU to main memory."""
    import torch

    from refitd.copy_services.device_pieces import DevicePiece

    element = span.element_size
    piece = DevicePiece(arena, span.offset, list(span.shape), list(span.strides), element, 0, element)
    there = torch.empty(span.count * element, dtype=torch.uint8)
    piece.pack(span.first * element, (span.first + span.count) * element, there)
    found: Elements = there.numpy().view(f"V{element}")
    return found
