"""Places of a few tensors, as tests write them down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from refitd.addressing.copies import CopyList, cut
from refitd.addressing.places import Int64, LocalTensor, Places, places_of
from refitd.copy_services import Arriving


class LateWriter(Arriving):
    """A publication into one arena that writes bytes once a job waits for them.

    `waits` has the result of `write(begin, end)` by (begin, end), in their order.
    """

    def __init__(self, arena: int, write: Callable[[int, int], object]) -> None:
        self.arenas, self._write = frozenset({arena}), write
        self.waits: dict[tuple[int, int], object] = {}

    def holds(self, arena: int, begin: int, end: int) -> bool:
        return (begin, end) in self.waits

    def wait(self, arena: int, begin: int, end: int) -> None:
        if not self.holds(arena, begin, end):
            self.waits[begin, end] = self._write(begin, end)


def by_rank(tensors: Mapping[tuple[int, str], LocalTensor]) -> dict[int, Places]:
    """Return places by (rank, name), in the form that addressing needs."""
    found = {}
    for rank in {rank for rank, _ in tensors}:
        mine = {name: tensor for (of, name), tensor in tensors.items() if of == rank}
        found[rank] = places_of(mine.values(), {name: row for row, name in enumerate(mine)})
    return found


def copies_of(pairs: Sequence[tuple[LocalTensor, LocalTensor, int]]) -> CopyList:
    """Copies of whole tensors: (from, to, element size) each."""
    sources, destinations = (places_of(pair[end] for pair in pairs) for end in (0, 1))
    return whole_tensors(sources, destinations, np.array([size for _, _, size in pairs], np.int64))


def whole_tensors(sources: Places, destinations: Places, element_size: Int64) -> CopyList:
    """Return copies of whole tensors, row i to row i; shapes are equal, elements have `element_size` [n] bytes."""
    n, longest = len(sources), [len(form.shape) for form in sources.forms]
    dims = max(longest, default=1) or 1

    def padded(of: Places, name: str, lead: int) -> Int64:
        boxes = [(lead,) * (dims - len(form.shape)) + getattr(form, name) for form in of.forms]
        return np.array(boxes, np.int64).reshape(-1, dims)[of.form]

    copies = CopyList(
        size=padded(sources, "shape", 1),
        element_size=element_size,
        cast=np.zeros(n, dtype=np.int64),
        src_arena=sources.arena,
        src_offset=sources.offset,
        src_stride=padded(sources, "strides", 0),
        dst_arena=destinations.arena,
        dst_offset=destinations.offset,
        dst_stride=padded(destinations, "strides", 0),
        origin=np.arange(n, dtype=np.int64),
    )
    return cut(copies.select(np.flatnonzero(np.prod(copies.size, axis=1) > 0)))[0]
