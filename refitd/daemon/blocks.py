"""A member's held tensors cut into blocks, in digest order, and the batches in which workers read them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import prod

import numpy as np

from refitd.addressing.places import Places
from refitd.buffers.blocks import block_steps, slice_text
from refitd.buffers.layout import row_major_strides
from refitd.daemon.finishing import arriving_names, held_of
from refitd.daemon.members import LocalMember
from refitd.dtypes import ELEMENT_SIZES
from refitd.protocol import sidecar
from refitd.protocol.reports import Difference

# A starting swap waits for at most one batch per worker: some 10 ms.
RUN_BYTES = 64 << 20
# Numbers in one batch's message, which must fit a datagram.
RUN_NUMBERS = 2048


class Blocks:
    """The blocks of one member. Columns, not objects, since tensors can be very many."""

    def __init__(self, member: LocalMember) -> None:
        self._held = held_of(member.registration)
        self._arriving = arriving_names(member.registration)
        places = member.to_commit
        elements = np.array([prod(form.shape) for form in places.forms], np.int64)[places.form]
        self._element_size = np.array([ELEMENT_SIZES[t.dtype] for t in self._held], np.int64)
        self.steps = block_steps(elements, self._element_size)  # elements in each block of a tensor
        counts = -(-elements // self.steps)
        self.tensor = np.repeat(np.arange(len(elements)), counts)
        self.first = (np.arange(len(self.tensor)) - np.repeat(np.cumsum(counts) - counts, counts)) * np.repeat(
            self.steps, counts
        )
        self.count = np.minimum(self.steps[self.tensor], elements[self.tensor] - self.first)
        self.nbytes = int((elements * self._element_size).sum())

    def __len__(self) -> int:
        return len(self.tensor)

    def span(self, places: Places, block: int) -> sidecar.Span:
        """Return the location of a block, given the places of its tensors."""
        tensor, first, count = int(self.tensor[block]), int(self.first[block]), int(self.count[block])
        place, element = places[tensor], int(self._element_size[tensor])
        shape, strides = place.shape, place.strides
        if strides == row_major_strides(shape, element):
            shape, strides = (prod(shape),), (element,)  # merge to one dimension: a shorter message
        return sidecar.Span(place.arena, place.offset, shape, strides, element, first, count)

    def of(self, names: Collection[str]) -> list[int]:
        """Return the blocks of the tensors that arrive under these names, in order."""
        chosen = np.array([name in names for name in self._arriving], bool)
        return np.flatnonzero(chosen[self.tensor]).tolist()

    def batches(self, places: Places, blocks: Sequence[int]) -> Iterator[Sequence[int]]:
        """Split these blocks, which ascend, into batches of about RUN_BYTES."""
        at = np.asarray(blocks, np.int64)
        tensor = self.tensor[at]
        sizes = np.cumsum(self.count[at] * self._element_size[tensor])
        dims = np.array([max(1, len(form.shape)) for form in places.forms], np.int64)
        numbers = np.cumsum(2 * dims[places.form[tensor]] + 5)
        begin, end = 0, len(blocks)
        while begin < end:
            done = (int(sizes[begin - 1]), int(numbers[begin - 1])) if begin else (0, 0)
            limits = ((sizes, done[0] + RUN_BYTES), (numbers, done[1] + RUN_NUMBERS))
            stop = min(int(np.searchsorted(column, limit, side="right")) for column, limit in limits)
            yield blocks[begin : max(begin + 1, stop)]
            begin = max(begin + 1, stop)

    def difference(self, block: int, found: tuple[int, int, int] | None) -> Difference:
        """Describe a differing block for the report; `found` is its (first, last, number of) differing elements."""
        tensor = self._held[int(self.tensor[block])]
        first, last, number = found if found is not None else (0, 0, 0)
        if not number:
            first = int(self.first[block])
            last = first + int(self.count[block]) - 1
        text = slice_text(tensor.shape, first, last)
        return Difference(tensor.name, tensor.shape, first, last, text, number)

    def differing(self, taken: bytes, known: bytes, blocks: Sequence[int]) -> list[int]:
        """Return the blocks whose digests differ: `taken` of these blocks, and `known` of all."""
        found, expected = (np.frombuffer(digests, "u8") for digests in (taken, known))
        at = np.asarray(blocks, np.int64)
        different: list[int] = at[found != expected[at]].tolist()
        return different
