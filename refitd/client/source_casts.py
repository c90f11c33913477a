"""Choose the dtype of each tensor that a source offers: `register_source(cast=)` and `declare_source(cast=)`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from refitd.client.given import is_called
from refitd.describe.casts import FLOATING, cast_problem
from refitd.describe.layout import canonical_name
from refitd.describe.metadata import ParameterMetadata
from refitd.dtypes import dtype_name
from refitd.errors import RefusedError
from refitd.text import shown

Cast = str | torch.dtype | Mapping[str, str | torch.dtype] | None

NOTHING: frozenset[str] = frozenset()


class SourceCasts:
    """Reads the argument `cast`.

    One dtype is a permission: a tensor is rounded to it unless some destination needs the tensor unrounded. A mapping
    {pattern: dtype} is an order: each tensor has the dtype of its pattern, and destinations do not change that.
    """

    def __init__(self, cast: Cast, *, elsewhere: bool = False) -> None:
        """With `elsewhere`, a pattern may match tensors of other ranks only.

        Raises:
            RefusedError: a dtype is none that tensors can be cast to, or the mapping is malformed.
        """
        self._elsewhere = elsewhere
        self._all: torch.dtype | None = None
        self._named: dict[str, torch.dtype] = {}
        if isinstance(cast, Mapping):
            for pattern, dtype in dict(cast).items():
                if not isinstance(pattern, str) or not pattern:
                    raise RefusedError(f"cast names {shown(pattern)}, expected {{name or pattern with '*': dtype}}")
                self._named[pattern] = _floating(f"cast of {pattern!r}", dtype)
            if "*" in self._named:
                self._named["*"] = self._named.pop("*")  # last: every other pattern comes before it
        elif cast is not None:
            self._all = _floating("cast", cast)

    def offered(
        self, metadata: Collection[ParameterMetadata], exact: Collection[str] = NOTHING
    ) -> list[ParameterMetadata]:
        """Return the descriptions of the offered tensors, in the same order.

        Args:
            metadata: descriptions of the tensors as they are held.
            exact: canonical names of tensors that some destination needs unrounded.

        Raises:
            RefusedError: a tensor cannot be cast so, or a pattern matches none. Names all of them.
        """
        problems: list[str] = []
        found = [self._one(m, exact, problems) for m in metadata]
        if not self._elsewhere:
            for pattern in self._named:
                if pattern != "*" and not any(is_called(m.name, (pattern,)) for m in metadata):
                    problems.append(f"{pattern!r} has a cast, and no tensor registered here is called so")
        if problems:
            raise RefusedError("; ".join(problems))
        return found

    def _one(self, m: ParameterMetadata, exact: Collection[str], problems: list[str]) -> ParameterMetadata:
        if m.cast_from is not None:  # of a destination's description; a source says it of tensors that it rounds here
            m = replace(m, cast_from=None)
        own = dtype_name(m.dtype)
        to = self._all or next((dtype for p, dtype in self._named.items() if is_called(m.name, (p,))), None)
        if to is None or own not in FLOATING or own == dtype_name(to):
            return m
        if problem := cast_problem(own, dtype_name(to)):
            problems.append(f"{m.name}: cast {problem}")
        elif self._all is None:
            return replace(m, dtype=to, element_size=to.itemsize, cast_to=None)
        elif any(name in exact for name in names_of(m)):
            return replace(m, cast_to=dtype_name(to))
        else:
            return replace(m, dtype=to, element_size=to.itemsize, cast_from=own, cast_to=None)
        return m


def names_of(m: ParameterMetadata) -> tuple[str, ...]:
    """Return the canonical tensors that a description is part of, with their aliases."""
    return (*(tile.tensor for tile in m.tiles or ()), canonical_name(m), *m.aliases)


def rounded_in(wire: Collection[ParameterMetadata], needed: Collection[str]) -> set[str]:
    """Return the canonical names of the tensors in a source's descriptions that are rounded and are `needed` exact."""
    wanted = set(needed)
    return {name for m in wire if m.cast_from is not None for name in names_of(m) if name in wanted}


def _floating(what: str, cast: object) -> torch.dtype:
    """Return a type that tensors can be cast to; raises RefusedError for any other value."""
    if not isinstance(cast, str | torch.dtype) or dtype_name(cast) not in FLOATING:
        raise RefusedError(f"{what} is {shown(cast)}, expected the type to offer: {', '.join(sorted(FLOATING))}")
    found: torch.dtype = getattr(torch, dtype_name(cast))
    return found
