"""Roster: everything that one rank sends and receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refitd.describe.metadata import ParameterMetadata


@dataclass(frozen=True, slots=True)
class Roster:
    """The tensors that rank `rank` can send and those that it must receive; either may be empty.

    Ranks are unique across all pools (trainer and engines together). Ranks with the same `node` share a machine.
    `label` names the rank in error messages ("engine-a rank 1"); the default is "rank N".
    """

    rank: int
    source: Sequence[ParameterMetadata] = ()
    destination: Sequence[ParameterMetadata] = ()
    node: str = ""
    label: str = ""
