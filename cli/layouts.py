"""Plans between manifests, without a daemon: the options of commands, the plan, and what it costs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import numpy.typing as npt

from refitd.clusters import ClusterSpeeds, cables_of
from refitd.describe.layout import elements
from refitd.describe.metadata import ParameterMetadata, Roster
from refitd.offline.files import load, load_model
from refitd.offline.layouts import Manifest, ModelSpec, Shards, world_size
from refitd.offline.rosters import place, rosters_of
from refitd.plan.between_nodes import deliveries_of
from refitd.plan.columns import Memo, offsets_of, ranges
from refitd.plan.cost import EQUAL, Traffic
from refitd.plan.shared import GlobalPlan
from refitd.plan.table import PLACE_BITS, CopyTable
from refitd_cli.output import rank_ranges, takes_escapes
from refitd_cli.printed import RankMemory, Senders

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class RankNumbers:
    """The ranks of one manifest: in the plan, and by their own numbers."""

    name: str
    first: int  # its rank 0 in the plan
    ranks: tuple[int, ...]  # in the plan

    def own(self, ranks: Iterable[int]) -> str:
        """Return its own ranks among `ranks`, by their own numbers ("0-7 of serve"); "" if none is."""
        mine = set(self.ranks).intersection(ranks)
        return f"{rank_ranges(sorted(rank - self.first for rank in mine))} of {self.name}" if mine else ""


@dataclass(frozen=True)
class ManifestPlan:
    """A plan between two manifests. `rosters` are in rank order; the first of `sides` is the source."""

    sides: tuple[RankNumbers, ...]
    source: Manifest
    targets: tuple[Manifest, ...]
    rosters: list[Roster]
    plan: GlobalPlan
    plan_s: float


def manifest_options(function: F) -> F:
    """Add --source, --target, --model and --collocated."""
    for option in (
        click.option("--collocated", is_flag=True, help="Targets that set no first_rank start at rank 0, too."),
        click.option("--model", "model_file", metavar="FILE", help="Model of the layouts, over those they name."),
        click.option("--target", "targets", multiple=True, metavar="FILE", help="The receiver; may be given again."),
        click.option("--source", metavar="FILE", help="The sender: a layout or shards manifest, TOML or JSON."),
    ):
        function = option(function)
    return function


def read_manifests(
    source: str, targets: Sequence[str], model_file: str | None
) -> tuple[Manifest, tuple[Manifest, ...]]:
    """Read both sides; raises ConfigError with the error in a file."""
    model: ModelSpec | None = load_model(Path(model_file)) if model_file is not None else None
    return load(source, model), tuple(load(target, model) for target in targets)


def planned(
    source: str,
    targets: Sequence[str],
    model_file: str | None,
    collocated: bool,
    cluster: ClusterSpeeds | None = None,
) -> ManifestPlan:
    """Plan a refit between manifests, for cables as a cluster has them; None: equally fast ones.

    Raises:
        ConfigError: a manifest cannot be used.
        PlanError: the plan is refused.
    """
    from refitd.plan.build import plan_copies

    sender, receivers = read_manifests(source, targets, model_file)
    with _spinner("describing and planning"):
        rosters = rosters_of(sender, receivers, collocated=collocated)
        started = time.perf_counter()
        cables = EQUAL if cluster is None or not cluster.nodes else cables_of(cluster, (r.node for r in rosters))
        plan = plan_copies(rosters, cables=cables)
        sides = _sides((sender, *receivers), collocated)
        return ManifestPlan(sides, sender, receivers, rosters, plan, time.perf_counter() - started)


def _sides(manifests: Sequence[Manifest], collocated: bool) -> tuple[RankNumbers, ...]:
    found = []
    for placed in place(manifests, collocated=collocated):
        manifest = placed.manifest
        own = [r.rank for r in manifest.ranks] if isinstance(manifest, Shards) else range(world_size(manifest))
        found.append(RankNumbers(manifest.name, placed.first_rank, tuple(placed.first_rank + rank for rank in own)))
    return tuple(found)


def _spinner(text: str) -> AbstractContextManager[Any]:
    if not takes_escapes(sys.stderr):
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(text)


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
