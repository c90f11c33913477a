"""Plans on the wire: make a node's message, and read what a message has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from refitd.coordinator.plans import HeldParts, Shared, make_plan
from refitd.describe.metadata import Roster
from refitd.protocol.base import unpack
from refitd.protocol.cluster import EpochPart, EpochParts, EpochPlan, LoadPlan, NodeShare, ShareRanks


def load_of(
    rosters: Sequence[Roster],
    members: Sequence[str],
    *,
    plan: str = "p",
    model: str = "m",
    node: str = "",
    epoch: EpochPlan | None = None,
) -> LoadPlan:
    """Return the message that a coordinator sends a node without parts. `members[i]` has rank i."""
    made = make_plan(rosters)
    made.belongs_to(model, {member: rank for rank, member in enumerate(members)})
    made.epoch = epoch
    return structs.replace(made.message(model, (), node, HeldParts()), plan=plan)


def rows_at(shared: Shared[Any], node: str) -> Any:
    """Return a node's rows of a plan's table."""
    number = shared.number[node]
    return shared.table.rows_of(np.asarray(shared.uses[shared.start[number] : shared.start[number + 1]]))


class Opened(NamedTuple):
    """The content of a message."""

    members: tuple[str, ...]
    ranks: tuple[int, ...]
    seeds: tuple[int, ...]  # ranks
    nodes: tuple[str, ...]  # of the epoch


class Shares(dict[str, bytes]):
    """The packed values that messages have given, by digest: later messages only name them."""

    def open(self, load: LoadPlan) -> Opened:
        """Return what a message says."""
        self |= load.given
        share = unpack(self[load.share], NodeShare, load.share)
        ranks = unpack(self[load.ranks], ShareRanks, load.ranks).ranks
        listed = unpack(self[load.epoch_parts], EpochParts, load.epoch_parts).parts if load.epoch_parts else ()
        nodes = [unpack(self[part], EpochPart, part).nodes for part in listed]
        found = tuple(sorted(name for names in nodes for name in names))
        return Opened(share.members, ranks, tuple(ranks[at] for at in share.seeds), found)
