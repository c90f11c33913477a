"""The places of one rank's tensors. They are stored in columns: models have very many tensors of few shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from refitd.mxfp8.parts import MARK

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """Location of a local tensor: `offset` bytes into `arena`."""

    arena: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes


@dataclass(frozen=True, slots=True)
class ShapeAndStrides:
    """The shape and the strides (in bytes) that several tensors share."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Places:
    """The places of a rank's tensors, one per row. `rows` maps a tensor's name in plans to its row."""

    rows: Mapping[str, int]
    forms: tuple[ShapeAndStrides, ...]
    form: Int64  # index into `forms`
    arena: Int64  # [n] arena id
    offset: Int64  # [n]

    def __len__(self) -> int:
        return len(self.form)

    def __getitem__(self, row: int) -> LocalTensor:
        form = self.forms[int(self.form[row])]
        return LocalTensor(int(self.arena[row]), int(self.offset[row]), form.shape, form.strides)

    def in_arena(self, arena: int) -> Places:
        """Return the same places in another arena."""
        return replace(self, arena=np.full(len(self), arena, np.int64))

    def in_arenas(self, *arenas: int) -> Places:
        """Return the same places in other arenas: each number is an index into `arenas`."""
        return replace(self, arena=np.array(arenas, np.int64)[self.arena])

    def at_offsets(self, offsets: Sequence[int]) -> Places:
        """Return the same places at other offsets of their arenas."""
        return replace(self, offset=np.array(offsets, np.int64))

    def arenas(self) -> set[int]:
        """Return the ids of the arenas."""
        return set(np.unique(self.arena).tolist())


def places_of(tensors: Iterable[LocalTensor], rows: Mapping[str, int] | None = None) -> Places:
    """Put places into columns. This takes a microsecond for each place: do it once per registration, not per swap."""
    found = list(tensors)
    numbers: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    form = [numbers.setdefault((t.shape, t.strides), len(numbers)) for t in found]
    return Places(
        rows=rows or {},
        forms=tuple(ShapeAndStrides(shape, strides) for shape, strides in numbers),
        form=np.array(form, np.int64),
        arena=np.array([t.arena for t in found], np.int64),
        offset=np.array([t.offset for t in found], np.int64),
    )


@dataclass(frozen=True, eq=False, slots=True)
class Chosen:
    """Places of tensors of several ranks, one per row."""

    forms: tuple[ShapeAndStrides, ...]
    form: Int64
    arena: Int64
    offset: Int64


def choose(places: Mapping[int, Places], ranks: Int64, names: Sequence[str]) -> Chosen:
    """Return the place of each tensor by rank and name; `ranks` must be ascending.

    Raises:
        KeyError: a tensor has no place; the key is (rank, name).
    """
    columns: dict[str, list[Int64]] = {name: [] for name in ("form", "arena", "offset")}
    forms: list[ShapeAndStrides] = []
    found, first = np.unique(ranks, return_index=True)
    for rank, begin, end in zip(found.tolist(), first.tolist(), np.append(first, len(ranks))[1:].tolist(), strict=True):
        held = places.get(rank)
        rows = list(map(held.rows.get, names[begin:end])) if held is not None else [None]
        if held is not None and None in rows:  # parts that senders convert are in their tensor
            rows = [
                held.rows.get(name.partition(MARK)[0]) if row is None else row
                for row, name in zip(rows, names[begin:end], strict=True)
            ]
        if held is None or None in rows:
            raise KeyError((rank, names[begin + rows.index(None)]))
        at = np.array(cast("list[int]", rows), np.int64)
        columns["form"].append(held.form[at] + len(forms))
        forms += held.forms
        for name in ("arena", "offset"):
            columns[name].append(getattr(held, name)[at])
    joined = {name: np.concatenate([np.empty(0, np.int64), *parts]) for name, parts in columns.items()}
    return Chosen(tuple(forms), **joined)
