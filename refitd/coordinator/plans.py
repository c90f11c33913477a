"""The coordinator's plans: made once per membership, sent once per node, reported to operators."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import xxhash

from refitd.caches import BoundedCache
from refitd.coordinator.membership import Model
from refitd.coordinator.rosters import Registered
from refitd.describe.roster import Roster
from refitd.plan.build import plan_copies
from refitd.plan.fills import FillTable
from refitd.plan.onward import split
from refitd.plan.regions import Regions
from refitd.plan.relays import Relays, relayed
from refitd.plan.table import CopyTable, CrossingTable
from refitd.protocol.cluster import EpochPlan, LoadPlan
from refitd.protocol.reports import (
    KeptTraffic,
    LinkTraffic,
    PairTraffic,
    ParameterTraffic,
    PlanReport,
    Relaying,
    RelayPath,
)

# services whose ranks may pass on what they receive (copy_services/windows.py)
RELAYING_SERVICES = frozenset({"gloo"})


@dataclass(frozen=True, slots=True)
class _Crossing:
    """The rows that cross between nodes (refitd.plan.relays), and those that copy onward (refitd.plan.onward)."""

    rows: CrossingTable
    relays: Relays
    onward: CopyTable


@dataclass
class LoadedPlan:
    """A validated plan, the ranks it is for, and the nodes that have it."""

    id: str  # digest of the rosters and of the model's name
    table: CopyTable
    fills: FillTable
    unused_sources: tuple[str, ...]
    plan_s: float
    regions: Regions  # what several source ranks hold, to be compared
    members: dict[str, int] = field(default_factory=dict)  # member id -> plan-wide rank
    loaded_on: set[str] = field(default_factory=set)
    epoch: EpochPlan | None = None  # of its cross-node transfers; None until formed
    crossing_s: dict[str, float] = field(default_factory=dict)  # node -> time of its slowest worker in the last swap
    pairs: tuple[tuple[int, int, int, int], ...] = ()  # (source rank, target rank, bytes, copies) of each pair
    may_relay: bool = True  # nodes may pass on to others what they have received
    _split: tuple[dict[int, str], _Crossing] | None = None  # `_crossing`, and for which nodes

    @functools.cached_property
    def senders(self) -> frozenset[int]:
        """The plan-wide ranks that are read."""
        return frozenset(np.unique(self.table.src_rank).tolist())

    def belongs_to(self, model: str) -> None:
        """Make the id specific to this model: models of equal layout have equal plans but other members."""
        self.id = f"{self.digest}.{xxhash.xxh3_64_hexdigest(model.encode())}"

    @property
    def digest(self) -> str:
        """The digest of the rosters that the plan was made from."""
        return self.id.partition(".")[0]

    def message(self, model: str, fleet: Model, node: str) -> LoadPlan:
        """Return the part of the plan that `node` executes: what its targets receive and its sources send."""
        node_of = self._node_of(fleet)
        here = [rank for rank, where in node_of.items() if where == node]
        sent, received = np.isin(self.table.src_rank, here), np.isin(self.table.dst_rank, here)
        table = self.table.select(sent & received)
        moved = self._crossing(node_of)
        is_here = np.isin(moved.rows.src_rank, here) | np.isin(moved.rows.dst_rank, here)
        crossing, onward = moved.rows.select(is_here), moved.onward.select(np.isin(moved.onward.dst_rank, here))
        fills = self.fills.select(np.isin(self.fills.rank, here))
        ranks = {rank: member for member, rank in self.members.items()}
        epoch = self.epoch if self.epoch is not None and node in self.epoch.nodes else None
        position = {name: i for i, name in enumerate(epoch.nodes)} if epoch is not None else {}
        return LoadPlan(
            plan=self.id,
            model=model,
            ranks=tuple(ranks),
            members=tuple(ranks.values()),
            table=table.with_own_names().to_wire(),
            fills=fills.with_own_names().to_wire() if len(fills) else {},
            crossing=crossing.with_own_names().to_wire() if epoch is not None else {},
            onward=onward.with_own_names().to_wire() if epoch is not None and len(onward) else {},
            crossing_nodes=tuple(position.get(node_of[rank], -1) for rank in ranks) if epoch is not None else (),
            epoch=epoch,
            seeds=tuple(sorted(self.members[m.id] for m in fleet.seeds.values() if m.id in self.members)),
        )

    def links(self, fleet: Model) -> dict[tuple[str, str], int]:
        """Return the bytes that cross between nodes in one swap, by (source node, target node)."""
        node_of = self._node_of(fleet)
        found: dict[tuple[str, str], int] = {}
        for src, dst, moved, _ in _pairs(self._crossing(node_of).rows):
            link = node_of[src], node_of[dst]
            found[link] = found.get(link, 0) + moved
        return found

    def relays(self, fleet: Model) -> Relays:
        """Return the paths over which nodes pass on what they have received, and why."""
        return self._crossing(self._node_of(fleet)).relays

    def _crossing(self, node_of: Mapping[int, str]) -> _Crossing:
        if self._split is None or self._split[0] != node_of:
            nodes = {name: number for number, name in enumerate(sorted(set(node_of.values())))}
            at = np.full(1 + max(self.members.values(), default=0), -1, np.int64)  # -1: a rank that has left
            for rank, name in node_of.items():
                at[rank] = nodes[name]
            rows = self.table.select(at[self.table.src_rank] != at[self.table.dst_rank])
            crossing, onward = split(rows, node_of)
            if self.may_relay:
                self._split = dict(node_of), _Crossing(*relayed(crossing, node_of), onward)
            else:
                self._split = dict(node_of), _Crossing(CrossingTable.of(crossing), Relays(), onward)
        return self._split[1]

    def _node_of(self, fleet: Model) -> dict[int, str]:
        return {self.members[m.id]: m.node for m in fleet.members() if m.id in self.members}


class PlanCache:
    """Recent plans, keyed by every rank, its node and its description.

    A changed layout changes a description, so it never finds an old plan. Owned by the coordinator.
    """

    def __init__(self, capacity: int = 16) -> None:
        self._plans: BoundedCache[str, LoadedPlan] = BoundedCache(capacity)

    def get(self, pools: Sequence[Sequence[Registered]]) -> LoadedPlan | None:
        """Return a kept plan of these pools, not yet loaded on any node; None if none is kept."""
        plan = self._plans.get(self._key(pools))
        if plan is None:
            return None
        return replace(plan, members={}, loaded_on=set(), plan_s=0.0, epoch=None, crossing_s={})

    def put(self, pools: Sequence[Sequence[Registered]], plan: LoadedPlan) -> None:
        """Keep a plan; evict the least recently used one."""
        self._plans.put(self._key(pools), plan)

    @staticmethod
    def _key(pools: Sequence[Sequence[Registered]]) -> str:
        content = [(r.rank, r.node, r.is_source, r.as_held, r.digest) for pool in pools for r in pool]
        return xxhash.xxh3_128_hexdigest(repr(sorted(content)).encode())


def make_plan(rosters: Sequence[Roster]) -> LoadedPlan:
    """Plan these rosters.

    Raises:
        PlanError: names every problem found.
    """
    started = time.perf_counter()
    plan = plan_copies(rosters)
    took_s = time.perf_counter() - started
    return LoadedPlan(
        plan.digest,
        plan.table,
        plan.fills,
        plan.unused_sources,
        took_s,
        plan.regions,
        pairs=_pairs(plan.table),
    )


def _pairs(table: CopyTable) -> tuple[tuple[int, int, int, int], ...]:
    ranks = int(table.dst_rank.max(initial=0)) + 1
    keys, which = np.unique(table.src_rank.astype(np.int64) * ranks + table.dst_rank, return_inverse=True)
    nbytes = np.bincount(which, weights=table.row_bytes, minlength=len(keys)).astype(np.int64)
    copies = np.bincount(which, minlength=len(keys))
    rows = zip((keys // ranks).tolist(), (keys % ranks).tolist(), nbytes.tolist(), copies.tolist(), strict=True)
    return tuple(rows)


def plan_report(fleet: Model, plan: LoadedPlan) -> Callable[[], PlanReport]:
    """Return a function that makes the plan report: bytes per pair of ranks and per parameter, largest first.

    Call it on another thread: there may be very many parameters. It reads nothing that changes.
    """
    names = {
        plan.members[m.id]: (
            f"source rank {m.added.rank}" if m.added.role == "source" else f"{m.added.replica} rank {m.added.rank}"
        )
        for m in fleet.members()
    }
    report = PlanReport(
        model=fleet.name,
        digest=plan.digest,
        bytes=plan.table.total_bytes,
        converted_bytes=fleet.converted_bytes(),
        staging_bytes=sum(m.added.staging_bytes for m in fleet.targets.values()),
        held_bytes=sum(m.added.held_bytes for m in fleet.targets.values()),
        copies=len(plan.table),
        plan_s=plan.plan_s,
        pairs=tuple(
            PairTraffic(source=names[src], target=names[dst], bytes=nbytes, copies=copies)
            for src, dst, nbytes, copies in plan.pairs
        ),
        parameters=(),
        unused_sources=plan.unused_sources,
        kept=_kept(fleet),
        links=_links(fleet, plan),
        relays=_relaying(plan.relays(fleet)),
    )
    return lambda: msgspec.structs.replace(report, parameters=_parameters(plan.table))


def _links(fleet: Model, plan: LoadedPlan) -> tuple[LinkTraffic, ...]:
    node_of = {plan.members[m.id]: m.node for m in fleet.members() if m.id in plan.members}
    needed: dict[tuple[str, str], int] = {}
    for src, dst, nbytes, _ in plan.pairs:
        link = node_of[src], node_of[dst]
        needed[link] = needed.get(link, 0) + nbytes
    moved = plan.links(fleet)
    between = sorted(link for link in moved.keys() | needed.keys() if link[0] != link[1])
    return tuple(LinkTraffic(*link, moved.get(link, 0), needed.get(link, 0)) for link in between)


def _relaying(relays: Relays) -> Relaying:
    paths = tuple(RelayPath(path.source, path.nodes, path.nbytes) for path in relays.paths)
    return Relaying(paths, relays.bytes, relays.direct_bytes)


def _kept(fleet: Model) -> tuple[KeptTraffic, ...]:
    nbytes: dict[str, int] = {}
    for one in (one for m in fleet.targets.values() for one in m.shard.kept):
        nbytes[one.name] = nbytes.get(one.name, 0) + one.nbytes
    return tuple(KeptTraffic(name=name, bytes=size) for name, size in sorted(nbytes.items(), key=lambda at: -at[1]))


def _parameters(table: CopyTable) -> tuple[ParameterTraffic, ...]:
    nbytes = np.bincount(table.tensor, weights=table.row_bytes, minlength=len(table.tensors)).astype(np.int64)
    copies = np.bincount(table.tensor, minlength=len(table.tensors))
    order = np.argsort(-nbytes, kind="stable")
    rows = zip(order.tolist(), nbytes[order].tolist(), copies[order].tolist(), strict=True)
    return tuple(ParameterTraffic(name=table.tensors[i], bytes=moved, copies=count) for i, moved, count in rows)
