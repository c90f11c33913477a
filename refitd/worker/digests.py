"""A worker's part in proofs: digests of spans of tensors in arenas, and where two of them differ."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from refitd.buffers.arena import MappedArena
from refitd.buffers.blocks import Elements, compare, digest, packed
from refitd.buffers.layout import extent
from refitd.errors import TransportError
from refitd.protocol import sidecar


def taken(message: sidecar.TakeDigests, arenas: Mapping[int, MappedArena]) -> sidecar.DigestsTaken:
    """Answer a request for digests; one that cannot be met says why."""
    try:
        found = [digest(packed(_view(span, arenas), span.first, span.count)) for span in message.spans]
    except TransportError as exc:
        return sidecar.DigestsTaken(run=message.run, reason=str(exc))
    return sidecar.DigestsTaken(run=message.run, digests=b"".join(found))


def compared(message: sidecar.CompareSpans, arenas: Mapping[int, MappedArena]) -> sidecar.SpansCompared:
    """Answer a request for differences likewise."""
    try:
        found = tuple(_compared(live, expected, arenas) for live, expected in message.pairs)
    except TransportError as exc:
        return sidecar.SpansCompared(run=message.run, reason=str(exc))
    return sidecar.SpansCompared(run=message.run, found=found)


def _compared(live: sidecar.Span, expected: sidecar.Span, arenas: Mapping[int, MappedArena]) -> tuple[int, int, int]:
    if (live.first, live.count, live.element_size) != (expected.first, expected.count, expected.element_size):
        raise TransportError(f"spans of arenas {live.arena} and {expected.arena} are not of the same elements")
    parts = [packed(_view(span, arenas), span.first, span.count) for span in (live, expected)]
    return compare(parts[0], parts[1], live.first)


def _view(span: sidecar.Span, arenas: Mapping[int, MappedArena]) -> Elements:
    arena = arenas.get(span.arena)
    if arena is None:
        raise TransportError(f"arena {span.arena} is not mapped here in main memory")
    end = span.offset + extent(span.shape, span.strides, span.element_size)
    inside = end <= arena.nbytes and span.first + span.count <= prod(span.shape)
    if not inside or len(span.shape) != len(span.strides) or span.element_size not in (1, 2, 4, 8, 16):
        raise TransportError(
            f"elements {span.first}..{span.first + span.count} of {list(span.shape)} at byte {span.offset} leave "
            f"arena {span.arena} of {arena.nbytes} bytes"
        )
    return np.ndarray(span.shape, f"V{span.element_size}", arena.bytes, span.offset, span.strides)
