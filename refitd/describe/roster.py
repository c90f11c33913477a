"""Roster: everything one rank holds and everything it wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refitd.describe.metadata import ParameterMetadata


@dataclass(frozen=True, slots=True)
class Roster:
    """What rank `rank` can send and what it must receive; either side may be empty.

    Ranks are numbered across all pools (trainer and engines together) and are unique. `node` says which ranks
    share a machine; `label` is how error messages call the rank ("engine-a rank 1"), by default "rank N".
    """

    rank: int
    source: Sequence[ParameterMetadata] = ()
    destination: Sequence[ParameterMetadata] = ()
    node: str = ""
    label: str = ""
