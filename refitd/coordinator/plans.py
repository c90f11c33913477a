"""The coordinator's plans: made once per membership, sent once per node, reported to operators."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import xxhash

from refitd.caches import BoundedCache
from refitd.coordinator.membership import Model
from refitd.coordinator.rosters import Registered
from refitd.describe.roster import Roster
from refitd.offline.clusters import ClusterSpeeds
from refitd.plan.build import plan_copies
from refitd.plan.cables import EQUAL, Cables, loads_of
from refitd.plan.columns import Ints, distinct
from refitd.plan.fills import FillTable
from refitd.plan.onward import source_boxes, split
from refitd.plan.regions import Regions
from refitd.plan.relays import Relays, relayed
from refitd.plan.remembered import Remembered
from refitd.plan.shared import GlobalPlan
from refitd.plan.table import CopyTable, CrossingTable
from refitd.protocol.cluster import EpochPlan, LoadPlan
from refitd.protocol.reports import (
    CableTraffic,
    KeptTraffic,
    LinkTraffic,
    PairTraffic,
    ParameterTraffic,
    PlanReport,
    Relaying,
    RelayPath,
)

# services whose ranks may pass on what they receive (copy_services/windows.py)
RELAYING_SERVICES = frozenset({"gloo", "nixl"})


@dataclass(frozen=True, eq=False, slots=True)
class Routed:
    """A plan's copies by where they run, and each node's part of them.

    Attributes:
        node_of: plan-wide rank -> node.
        inner: rows within a node.
        crossing: rows between nodes (refitd.plan.relays).
        onward: rows that copy, within a node, what has crossed (refitd.plan.onward).
        relays: how relaying was decided.
        links: bytes that cross between nodes in one swap, by (source node, target node).
        cables: the speeds that decided.
    """

    node_of: dict[int, str]
    inner: CopyTable
    crossing: CrossingTable
    onward: CopyTable
    relays: Relays
    links: dict[tuple[str, str], int]
    cables: Cables
    _rows: dict[str, tuple[Ints, Ints, Ints]]  # node -> its rows of each table

    def at(self, node: str) -> tuple[CopyTable, CrossingTable, CopyTable]:
        """Return the rows that a node performs: within it, what it sends or receives, and onward."""
        inner, crossing, onward = self._rows[node]
        return self.inner.select(inner), self.crossing.select(crossing), self.onward.select(onward)


def routed(
    plan: GlobalPlan,
    node_of: dict[int, str],
    *,
    may_relay: bool,
    last: Collection[str] = (),
    cables: Cables = EQUAL,
) -> Routed:
    """Return a plan's copies by where they run.

    With `may_relay`, nodes may pass on what they have received, those of `last` after all others.
    """
    table, names = plan.table, sorted(set(node_of.values()))
    number = {name: i for i, name in enumerate(names)}
    at = np.zeros(1 + max(node_of, default=0), np.int64)
    at[list(node_of)] = [number[name] for name in node_of.values()]
    crosses = at[table.src_rank] != at[table.dst_rank]
    box = plan.shared.expanded(source_boxes(plan.shared.rows))
    inner = table.select(~crosses)
    direct, first, onward = split(table.select(crosses), box[crosses], node_of)
    crossing, relays = CrossingTable.of(direct), Relays()
    if may_relay:
        crossing, relays = relayed(direct, box[crosses][first], node_of, last=last, cables=cables)
    rows = [_by_node(len(names), at[each.src_rank], at[each.dst_rank]) for each in (inner, crossing, onward)]
    links: dict[tuple[str, str], int] = {}
    for src, dst, moved, _ in _pairs(crossing):
        link = node_of[src], node_of[dst]
        links[link] = links.get(link, 0) + moved
    parts = {name: (rows[0][i], rows[1][i], rows[2][i]) for i, name in enumerate(names)}
    return Routed(node_of, inner, crossing, onward, relays, links, cables, parts)


def _by_node(nodes: int, src: Ints, dst: Ints) -> list[Ints]:
    """Return, for each node, the rows that begin or end there, ascending."""
    others = np.flatnonzero(src != dst)
    node = np.concatenate([dst, src[others]])
    row = np.concatenate([np.arange(len(dst)), others])
    order = np.lexsort((row, node))
    return np.split(row[order], np.searchsorted(node[order], np.arange(1, nodes)))


@dataclass
class LoadedPlan:
    """A validated plan, the ranks it is for, and the nodes that have it."""

    id: str  # digest of the rosters and of the model's name
    table: CopyTable
    fills: FillTable
    unused_sources: tuple[str, ...]
    plan_s: float
    regions: Regions  # what several source ranks hold, to be compared
    routed: Routed
    senders: frozenset[int]  # the plan-wide ranks that are read
    members: dict[str, int] = field(default_factory=dict)  # member id -> plan-wide rank
    loaded_on: set[str] = field(default_factory=set)
    epoch: EpochPlan | None = None  # of its cross-node transfers; None until formed
    crossing_s: dict[str, float] = field(default_factory=dict)  # node -> time of its slowest worker in the last swap
    pairs: tuple[tuple[int, int, int, int], ...] = ()  # (source rank, target rank, bytes, copies) of each pair

    def belongs_to(self, model: str) -> None:
        """Make the id specific to this model: models of equal layout have equal plans but other members."""
        self.id = f"{self.digest}.{xxhash.xxh3_64_hexdigest(model.encode())}"

    @property
    def digest(self) -> str:
        """The digest of the rosters that the plan was made from."""
        return self.id.partition(".")[0]

    def epoch_of(self, node: str) -> str:
        """Return the epoch that a node forms for its part of the plan; "" if it only copies between its own ranks."""
        return self.epoch.id if self.epoch is not None and node in self.epoch.nodes else ""

    def message(self, model: str, fleet: Model, node: str) -> LoadPlan:
        """Return the part of the plan that `node` executes: what its targets receive and its sources send."""
        node_of = self.routed.node_of
        here = [rank for rank in self.members.values() if node_of[rank] == node]
        table, crossing, onward = self.routed.at(node)
        fills = self.fills.select(np.isin(self.fills.rank, here))
        involved = {*here, *distinct(crossing.src_rank).tolist(), *distinct(crossing.dst_rank).tolist()}
        ranks = {rank: member for member, rank in self.members.items() if rank in involved}
        epoch = self.epoch if self.epoch_of(node) else None
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
            seeds=tuple(sorted(self.members[m.id] for m in fleet.seeds.values() if self.members.get(m.id) in involved)),
        )


class PlanCache:
    """Recent plans, keyed by every rank, its node and its description, and by the speeds of cables.

    A changed layout changes a description, so it never finds an old plan. Owned by the coordinator.
    """

    def __init__(self, capacity: int = 16) -> None:
        self._plans: BoundedCache[str, LoadedPlan] = BoundedCache(capacity)

    def get(self, pools: Sequence[Sequence[Registered]], speeds: ClusterSpeeds | None) -> LoadedPlan | None:
        """Return a kept plan of these pools, not yet loaded on any node; None if none is kept."""
        plan = self._plans.get(self._key(pools, speeds))
        if plan is None:
            return None
        return replace(plan, members={}, loaded_on=set(), plan_s=0.0, epoch=None, crossing_s={})

    def put(self, pools: Sequence[Sequence[Registered]], speeds: ClusterSpeeds | None, plan: LoadedPlan) -> None:
        """Keep a plan; evict the least recently used one."""
        self._plans.put(self._key(pools, speeds), plan)

    @staticmethod
    def _key(pools: Sequence[Sequence[Registered]], speeds: ClusterSpeeds | None) -> str:
        content = [(r.rank, r.node, r.is_source, r.as_held, r.digest) for pool in pools for r in pool]
        return xxhash.xxh3_128_hexdigest(repr((sorted(content), speeds)).encode())


def make_plan(
    rosters: Sequence[Roster],
    remembered: Remembered | None = None,
    *,
    may_relay: bool = True,
    last: Collection[str] = (),
    cables: Cables = EQUAL,
) -> LoadedPlan:
    """Plan these rosters. With `may_relay`, nodes may pass on what they have received, those of `last` after others.

    Raises:
        PlanError: names every problem found.
    """
    started = time.perf_counter()
    plan = plan_copies(rosters, remembered, cables)
    node_of = {roster.rank: roster.node for roster in rosters}
    found = routed(plan, node_of, may_relay=may_relay, last=last, cables=cables)
    return LoadedPlan(
        plan.digest,
        plan.table,
        plan.fills,
        plan.unused_sources,
        time.perf_counter() - started,
        plan.regions,
        found,
        frozenset(distinct(plan.table.src_rank).tolist()),
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
        links=_links(plan),
        relays=_relaying(plan.routed.relays, plan.routed.cables),
        cables=_cable_loads(plan.routed),
        speeds=plan.routed.cables.name,
    )
    return lambda: msgspec.structs.replace(report, parameters=_parameters(plan.table))


def _links(plan: LoadedPlan) -> tuple[LinkTraffic, ...]:
    node_of = plan.routed.node_of
    needed: dict[tuple[str, str], int] = {}
    for src, dst, nbytes, _ in plan.pairs:
        link = node_of[src], node_of[dst]
        needed[link] = needed.get(link, 0) + nbytes
    moved = plan.routed.links
    between = sorted(link for link in moved.keys() | needed.keys() if link[0] != link[1])
    return tuple(LinkTraffic(*link, moved.get(link, 0), needed.get(link, 0)) for link in between)


def _relaying(relays: Relays, cables: Cables) -> Relaying:
    paths = tuple(RelayPath(path.source, path.nodes, path.nbytes) for path in relays.paths)
    if not cables.are_known:
        return Relaying(paths, relays.bytes, relays.direct_bytes)
    return Relaying(paths, relays.bytes, relays.direct_bytes, _sent(relays.seconds), _sent(relays.direct_seconds))


def _sent(seconds: float) -> float:
    """Return seconds as far as messages take them (protocol.base.Seconds)."""
    return min(seconds, 1e9)


def _cable_loads(routed: Routed) -> tuple[CableTraffic, ...]:
    """Return what each cable carries, the one that takes longest first."""
    if not routed.cables.are_known:
        return ()
    links = ((*link, nbytes) for link, nbytes in routed.links.items() if link[0] != link[1])
    return tuple(
        CableTraffic(load.node, load.is_send, load.nbytes, round(load.speed), _sent(load.seconds))
        for load in loads_of(links, routed.cables)
    )


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
