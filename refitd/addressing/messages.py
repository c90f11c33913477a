"""Layout of one rank pair's transfers in messages. Both ends derive it from the sizes alone.

Pieces are in the order of their ids. Small ones share a message, each at a multiple of ALIGNMENT. One that is as large
as a message is cut over messages of its own, which can be sent from, and received into, the tensor itself:

    limit 100, pieces of 40, 30, 250, 10   ->   [40 | 30]  [250: 0-100]  [100-200]  [200-250]  [10]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

# a multiple of every element size, so that any part of a message can be viewed with its dtype
ALIGNMENT = 16


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
    """Return the messages for pieces of these sizes; empty pieces are in none.

    `limit` is the maximum size of a message in bytes, a multiple of ALIGNMENT.
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
