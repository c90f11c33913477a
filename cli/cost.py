"""What a plan between manifests costs: what crosses between nodes, the balance of senders, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from refitd.describe.layout import elements
from refitd.describe.metadata import ParameterMetadata, Roster
from refitd.plan.between_nodes import deliveries_of
from refitd.plan.columns import Memo, offsets_of, ranges
from refitd.plan.cost import Traffic
from refitd.plan.shared import GlobalPlan
from refitd.plan.table import PLACE_BITS, CopyTable
from refitd_cli.printed import RankMemory, Senders


def in_a_swap(plan: GlobalPlan, rosters: Sequence[Roster], traffic: Traffic) -> Traffic:
    """Return what the service moves for a plan's traffic, without relays.

    Elements of one source that several ranks of a node need cross to one of them, which copies them to the others.
    """
    shared = plan.shared
    node = _nodes(rosters)
    at = np.zeros(1 + max(node, default=0), np.int64)
    at[list(node)] = list(node.values())
    found = deliveries_of(shared, np.flatnonzero(at[shared.job_src] != at[shared.job_dst]), at, Memo())
    lines, most = found.patterns, 2 + int(found.patterns.member.max(initial=0))
    sender = np.where(lines.crosses, 0, 1 + lines.member[lines.giver])  # 0: the source
    pairs, which = np.unique((lines.of_line * most + sender) * most + lines.member, return_inverse=True)
    moved, copies = np.zeros(len(pairs), np.int64), np.bincount(which, minlength=len(pairs)).astype(np.int64)
    np.add.at(moved, which, (np.prod(shared.rows.size, axis=1) * shared.rows.element_size)[lines.row])
    begin = offsets_of(pairs // most**2, len(lines.start) - 1)
    delivery, pair = ranges(begin[found.pattern], np.diff(begin)[found.pattern])
    sender, receiver, first = pairs[pair] // most % most, pairs[pair] % most, found.start[delivery]
    src = np.where(sender > 0, found.dst[first + np.maximum(sender - 1, 0)], found.src[delivery])
    near = at[traffic.src] == at[traffic.dst]
    return replace(
        traffic,
        src=np.concatenate([traffic.src[near], src]),
        dst=np.concatenate([traffic.dst[near], found.dst[first + receiver]]),
        bytes=np.concatenate([traffic.bytes[near], moved[pair]]),
        copies=np.concatenate([traffic.copies[near], copies[pair]]),
    )


def copies_of(plan: GlobalPlan, tensor: str) -> CopyTable:
    """Return the copies of one canonical tensor; empty if the plan does not move it."""
    shared = plan.shared
    if tensor not in shared.tensors:
        return plan.table.select(np.zeros(0, np.int64))
    is_wanted = shared.rows.tensor == shared.tensors.index(tensor)
    count = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_wanted)])
    low, high = count[shared.row_start[shared.job_rows]], count[shared.row_start[shared.job_rows + 1]]
    job, nth = ranges(low, high - low)
    row, dst = np.flatnonzero(is_wanted)[nth], shared.job_dst[job]
    columns = shared.columns(row, shared.job_src[job], dst)
    return CopyTable(task_id=(dst << PLACE_BITS) | shared.places[row], **columns)


def balance_of(traffic: Traffic, rosters: Sequence[Roster]) -> Senders:
    """Return how evenly the ranks that have a source are loaded."""
    senders = sorted(roster.rank for roster in rosters if roster.source)
    is_sent = traffic.src != traffic.dst
    sent = _per_rank(traffic.src[is_sent], traffic.bytes[is_sent])
    if not senders:
        return Senders(0, 0.0, 0, -1, 1.0)
    loads = [sent.get(rank, 0) for rank in senders]
    largest, mean = max(loads), sum(loads) / len(senders)
    return Senders(len(senders), mean, largest, senders[loads.index(largest)], largest / mean if mean else 1.0)


def memory_of(rosters: Sequence[Roster]) -> list[RankMemory]:
    """Return the memory of each rank's tensors, ordered by rank."""
    known: dict[int, tuple[object, int]] = {}

    def taken(held: Sequence[ParameterMetadata]) -> int:
        # ranks may share one sequence; keeping it prevents the reuse of its id
        if id(held) not in known:
            known[id(held)] = (held, sum(elements(m.shape) * m.element_size for m in held))
        return known[id(held)][1]

    return [RankMemory(r.rank, taken(r.source), taken(r.destination)) for r in sorted(rosters, key=lambda r: r.rank)]


def _nodes(rosters: Sequence[Roster]) -> dict[int, int]:
    """Return the number of each rank's node; a rank without a node counts as its own node."""
    names = {roster.rank: roster.node or f"\0{roster.rank}" for roster in rosters}
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names.values()))}
    return {rank: numbers[name] for rank, name in names.items()}


def _per_rank(ranks: npt.NDArray[np.int64], amounts: npt.NDArray[np.int64]) -> dict[int, int]:
    found, which = np.unique(ranks, return_inverse=True)
    total = np.zeros(len(found), np.int64)
    np.add.at(total, which, amounts)
    return dict(zip(found.tolist(), total.tolist(), strict=True))
