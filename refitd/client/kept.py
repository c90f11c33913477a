"""Choose the tensors that a registration leaves out: a target's own ones, and those a partial source does not offer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from refitd.client.given import is_called, unmatched
from refitd.describe.layout import canonical_name
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.mxfp8 import MARK
from refitd.describe.roster import Roster
from refitd.errors import RefusedError
from refitd.protocol.shards import KeptTensor
from refitd.text import shown


@dataclass(frozen=True, slots=True)
class Keeps:
    """Chooses tensors by their registered names ("*" matches anything), or by what sources offer.

    Attributes:
        patterns: the names; each must match a tensor, unless it has a "*" and others are `elsewhere`.
        offered: the canonical tensors that partial sources offer, and their aliases: all others are kept. None: only
            names count.
        all_but: keep all tensors but those named.
    """

    patterns: tuple[str, ...] = ()
    offered: frozenset[str] | None = None
    all_but: bool = False
    elsewhere: bool = False  # a pattern may be meant for tensors of other ranks
    shared: frozenset[str] = frozenset()  # names that another target's versions write

    def of(self, metadata: Sequence[ParameterMetadata]) -> list[ParameterMetadata]:
        """Return the descriptions of what is kept.

        Raises:
            RefusedError: a pattern matches nothing.
        """
        if missing := unmatched(self.patterns, metadata, elsewhere=self.elsewhere):
            what = "partial" if self.all_but else "keeps"
            raise RefusedError(f"{what}: no tensor registered here is called {missing[0]!r}")
        if missing := unmatched(sorted(self.shared), metadata, elsewhere=False):
            raise RefusedError(f"shared: no tensor registered here is called {missing[0]!r}")
        return [m for m in metadata if m.name in self.shared or self._keeps(m)]

    def _keeps(self, m: ParameterMetadata) -> bool:
        if self.offered is not None:
            return self.offered.isdisjoint(_tensors_in(m))
        return is_called(m.name, self.patterns) is not self.all_but


NONE = Keeps()


def checked_part(what: str, value: Any) -> bool | tuple[str, ...]:
    """Return the argument `keeps` or `partial` in plain types: True, False or names.

    Raises:
        RefusedError: it is neither.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value):
        return tuple(value)
    raise RefusedError(f"{what} is {shown(value)}, expected True, False, or names of tensors")


def offered_by(rosters: Sequence[Roster]) -> frozenset[str]:
    """Return the canonical tensors that source ranks offer, and their aliases."""
    return frozenset(name for roster in rosters for m in roster.source for name in _tensors_in(m))


def kept_tensor(m: ParameterMetadata) -> KeptTensor:
    """Return a kept tensor as the coordinator is told of it."""
    return KeptTensor(m.name, tuple(sorted(_tensors_in(m))), prod(m.shape) * m.element_size)


def _tensors_in(m: ParameterMetadata) -> set[str]:
    """Return the canonical tensors in a local one and its aliases; the parts of one in MXFP8 count as that tensor."""
    names = {tile.tensor for tile in m.tiles} if m.tiles else {canonical_name(m)}
    return {name.partition(MARK)[0] for name in (*names, *m.aliases)}
