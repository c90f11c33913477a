"""Which bytes of a slot its client has written so far."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

WHOLE = 1 << 62  # behind every byte of a slot

Spans = tuple[tuple[int, int], ...]  # (first byte, byte behind the last) of each


class Written:
    """Disjoint ranges of bytes, ascending."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> None:
        """Add a range; it may touch or overlap others."""
        first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]

    def holds(self, begin: int, end: int) -> bool:
        """Return whether every byte of a range is written."""
        at = bisect_right(self._begins, begin) - 1
        return begin >= end or (at >= 0 and end <= self._ends[at])

    def spans(self) -> Spans:
        """Return the ranges."""
        return tuple(zip(self._begins, self._ends, strict=True))
