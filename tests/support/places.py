"""Places of a few tensors, as tests write them down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from refitd.addressing.copies import CopyList, whole_tensors
from refitd.addressing.places import LocalTensor, Places, places_of


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
