"""Plans on the wire: make a node's message, and read what a message has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from refitd.coordinator.plans import HeldParts, Shared, make_plan
from refitd.daemon.jobs import gpu_seats
from refitd.describe.metadata import Roster
from refitd.protocol.base import unpack
from refitd.protocol.cluster import EpochPlan, LoadPlan, NodeShare, PeerTable, ShareRanks


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


def everyone(epoch: EpochPlan, node: str = "n0") -> dict[tuple[int, int], tuple[int, ...]]:
    """Return the partners of a node's workers (LocalEpochs.join) if all workers of a lane exchange with each other."""
    at, seats = epoch.nodes.index(node), list(gpu_seats(epoch))
    met = {(lane, at): tuple(range(len(epoch.nodes))) for lane in range(epoch.lanes)}
    mine = [seat for seat, (home, _) in enumerate(seats) if home == at]
    return met | {(epoch.lanes, seat): tuple(range(len(seats))) for seat in mine}


class Opened(NamedTuple):
    """The content of a message."""

    members: tuple[str, ...]
    ranks: tuple[int, ...]
    seeds: tuple[int, ...]  # ranks
    nodes: tuple[str, ...]  # the node's peers in the epoch, and itself


class Shares(dict[str, bytes]):
    """The packed values that messages have given, by digest: later messages only name them."""

    def open(self, load: LoadPlan) -> Opened:
        """Return what a message says."""
        self |= load.given
        share = unpack(self[load.share], NodeShare, load.share)
        ranks = unpack(self[load.ranks], ShareRanks, load.ranks).ranks
        nodes = unpack(self[load.peers], PeerTable, load.peers).nodes if load.peers else ()
        return Opened(share.members, ranks, tuple(ranks[at] for at in share.seeds), nodes)
