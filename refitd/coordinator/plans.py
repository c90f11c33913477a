"""The coordinator's plans: made once per membership, sent once per node, reported to operators."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import xxhash

from refitd.caches import BoundedCache
from refitd.coordinator.membership import Membership
from refitd.coordinator.plan_parts import HeldParts, Packed, PackedEpoch, PackedParts, in_parts, in_shares
from refitd.coordinator.rosters import Registered
from refitd.describe.roster import Roster
from refitd.offline.clusters import ClusterSpeeds
from refitd.plan.build import plan_copies
from refitd.plan.cables import EQUAL, Cables, loads_of
from refitd.plan.columns import Ints, distinct, in_order, offsets_of
from refitd.plan.cost import Traffic, traffic_of
from refitd.plan.fills import FillTable
from refitd.plan.parts import Parted, Uses
from refitd.plan.regions import Regions
from refitd.plan.relays import Relays
from refitd.plan.remembered import Remembered
from refitd.plan.routes import KnownRoutes, Links, RoutedTable, routes_of
from refitd.plan.shared import GlobalPlan
from refitd.plan.table import CopyTable, CrossingTable, Int32, PlanTable
from refitd.protocol.cluster import EpochPlan, LoadPlan, LoadShare
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

T = TypeVar("T", bound=PlanTable)

NO_RANKS: Int32 = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False, slots=True)
class Routed:
    """A plan's copies and fills by where they run, in parts, and each node's share of them (refitd.plan.routes).

    Attributes:
        node_of: plan-wide rank -> node.
        relays: how relaying was decided.
        links: bytes that cross between nodes in one swap.
        cables: the speeds that decided.
        inner: copies within a node, and which of their uses each node has; likewise
        crossing: between nodes,
        onward: within a node, of what has crossed,
        fills: constants.
    """

    node_of: dict[int, str]
    relays: Relays
    links: Links
    cables: Cables
    inner: Shared[CopyTable]
    crossing: Shared[CrossingTable]
    onward: Shared[CopyTable]
    fills: Shared[FillTable]


@dataclass(frozen=True, eq=False, slots=True)
class Shared(Generic[T]):
    """A table in parts, as they travel, and the uses that make up each node's rows.

    Those of node number i are uses[start[i] : start[i + 1]], ascending.
    """

    table: Parted[T]
    packed: tuple[Packed, ...]
    number: dict[str, int]  # of each node
    uses: Ints
    start: Ints

    @staticmethod
    def of(routed_table: RoutedTable[T], number: dict[str, int], parts: PackedParts) -> Shared[T]:
        """Share out a table among nodes, by number: a use is of the nodes where it begins and ends."""
        src, dst = routed_table.src, routed_table.dst
        counts = np.column_stack([np.ones(len(dst), bool), src != dst])
        node, use = np.column_stack([dst, src])[counts], np.nonzero(counts)[0]
        order = in_order(node)
        start = offsets_of(node[order], len(number))
        return Shared(routed_table.table, parts.of(routed_table.table.parts), number, use[order], start)

    def has(self, node: str) -> bool:
        """Return whether a node has any rows."""
        return len(self._of(node)) > 0

    def at(self, node: str) -> Uses:
        """Return the uses that make up a node's rows."""
        return self.table.uses.select(self._of(node))

    def rows(self, node: str) -> T:
        """Return a node's rows, put together."""
        return self.table.rows_of(self._of(node))

    def _of(self, node: str) -> Ints:
        number = self.number[node]
        return self.uses[self.start[number] : self.start[number + 1]]


class PlanMemory:
    """What a planner remembers of the plans before. Whoever plans again and again owns one.

    Attributes:
        descriptions: what was found of descriptions.
        routes: what was made of rows.
        parts: the parts that were packed.
    """

    def __init__(self) -> None:
        self.descriptions = Remembered()
        self.routes = KnownRoutes()
        self.parts = PackedParts()


def routed(
    plan: GlobalPlan,
    node_of: dict[int, str],
    memory: PlanMemory,
    *,
    may_relay: bool,
    last: Collection[str] = (),
    cables: Cables = EQUAL,
) -> Routed:
    """Return a plan's copies by where they run.

    With `may_relay`, nodes may pass on what they have received, those of `last` after all others.
    """
    routes = routes_of(plan.shared, node_of, memory.routes, may_relay=may_relay, last=last, cables=cables)
    number, parts = {name: i for i, name in enumerate(routes.nodes)}, memory.parts
    return Routed(
        node_of,
        routes.relays,
        routes.links,
        cables,
        Shared.of(routes.inner, number, parts),
        Shared.of(routes.crossing, number, parts),
        Shared.of(routes.onward, number, parts),
        Shared.of(routes.fills, number, parts),
    )


@dataclass
class LoadedPlan:
    """A validated plan, the ranks it is for, and the nodes that have it."""

    id: str  # digest of the rosters and of the model's name
    traffic: Traffic
    unused_sources: tuple[str, ...]
    plan_s: float
    regions: Regions  # what several source ranks hold, to be compared
    routed: Routed
    senders: frozenset[int]  # the plan-wide ranks that are read
    members: dict[str, int] = field(default_factory=dict)  # member id -> plan-wide rank; see `belongs_to`
    loaded_on: set[str] = field(default_factory=set)
    epoch: EpochPlan | None = None  # of its cross-node transfers; None until formed
    crossing_s: dict[str, float] = field(default_factory=dict)  # node -> time of its slowest worker in the last swap
    given_whole: set[str] = field(default_factory=set)  # nodes that lacked parts, and were sent all
    _named: dict[int, str] = field(default_factory=dict)  # plan-wide rank -> member id
    _here: dict[str, Int32] = field(default_factory=dict)  # node -> the ranks of members there
    _node_at: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # plan-wide rank -> number of its node
    _epoch: PackedEpoch | None = None  # `epoch`, as it travels

    def belongs_to(self, model: str, members: dict[str, int]) -> None:
        """Make it the plan of these members (id -> plan-wide rank). Its id becomes specific to the model.

        Models of equal layout have equal plans but other members.
        """
        self.id = f"{self.digest}.{xxhash.xxh3_64_hexdigest(model.encode())}"
        self.members = members
        self._named = {rank: member for member, rank in members.items()}
        number, node_of = {name: i for i, name in enumerate(self.routed.links.names)}, self.routed.node_of
        self._node_at = np.zeros(1 + max(node_of, default=-1), np.int64)
        self._node_at[list(node_of)] = [number[node] for node in node_of.values()]
        ranks = np.sort(np.array(list(members.values()), np.int32))
        node, order = self._node_at[ranks], in_order(self._node_at[ranks])
        begins = offsets_of(node[order], len(number)).tolist()
        self._here = {
            name: ranks[order[begin:end]] for name, (begin, end) in zip(number, pairwise(begins), strict=True)
        }

    @property
    def digest(self) -> str:
        """The digest of the rosters that the plan was made from."""
        return self.id.partition(".")[0]

    def epoch_of(self, node: str) -> str:
        """Return the epoch that a node forms for its part of the plan; "" if it only copies between its own ranks."""
        return self.epoch.id if self.epoch is not None and node in self.epoch.nodes else ""

    def message(self, model: str, membership: Membership, node: str, held: HeldParts | None) -> LoadPlan | LoadShare:
        """Return the part of the plan that `node` executes: what its targets receive and its sources send.

        `held` are the parts that the node keeps; one that keeps none is sent its rows.
        """
        routed, packed = self.routed, self._epoch_with(node)
        tables: dict[str, Shared[Any]] = {"table": routed.inner, "fills": routed.fills}
        if packed is not None:
            tables |= {"crossing": routed.crossing, "onward": routed.onward}
        found = {name: shared.at(node) for name, shared in tables.items() if shared.has(node)}
        # a row between nodes has an end here
        ranks = distinct(np.concatenate([self._here.get(node, NO_RANKS), *(uses.ranks for uses in found.values())]))
        numbers = ranks.tolist()
        seeds = (self.members.get(member.id, -1) for member in membership.seeds.values())
        load = LoadPlan(
            plan=self.id,
            model=model,
            ranks=tuple(numbers),
            members=tuple(map(self._named.__getitem__, numbers)),
            table={},
            seeds=tuple(sorted(set(seeds) & set(numbers))),
        )
        if held is not None and held.takes_shares:
            return in_shares(load, *_used(tables, found), self._nodes_of(ranks) if packed else ((), ()), packed, held)
        if packed is not None:
            nodes = tuple(packed.position.get(routed.node_of[rank], -1) for rank in numbers)
            load = msgspec.structs.replace(load, epoch=packed.epoch, crossing_nodes=nodes)
        if held is None:
            return _whole(load, tables, node)
        return in_parts(load, *_used(tables, found), packed, held)

    def _nodes_of(self, ranks: Int32) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return (nodes, position of each rank's node among these)."""
        at = self._node_at[ranks]
        nodes = distinct(at)
        names = self.routed.links.names
        return tuple(names[node] for node in nodes.tolist()), tuple(np.searchsorted(nodes, at).tolist())

    def _epoch_with(self, node: str) -> PackedEpoch | None:
        """Return the epoch if this node takes part."""
        if self.epoch is None:
            return None
        if self._epoch is None or self._epoch.epoch is not self.epoch:
            self._epoch = PackedEpoch.of(self.epoch)
        return self._epoch if node in self._epoch.position else None


def _whole(load: LoadPlan, tables: Mapping[str, Shared[Any]], node: str) -> LoadPlan:
    """Return the message with all rows, for a node that keeps no parts."""
    found = {name: shared.rows(node) for name, shared in tables.items()}
    needed = {name: rows.to_wire() for name, rows in found.items() if len(rows) or name in ("table", "crossing")}
    return msgspec.structs.replace(load, **needed)


def _used(tables: Mapping[str, Shared[Any]], found: Mapping[str, Uses]) -> tuple[dict[str, Uses], list[Packed]]:
    """Return a node's uses with numbers of the parts that it uses, and these parts."""
    parts: list[Packed] = []
    uses: dict[str, Uses] = {}
    for name, some in found.items():
        used, packed = distinct(some.part), tables[name].packed
        uses[name] = some.with_parts(np.searchsorted(used, some.part) + len(parts))
        parts += [packed[part] for part in used.tolist()]
    return uses, parts


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
        return replace(plan, members={}, loaded_on=set(), given_whole=set(), plan_s=0.0, epoch=None, crossing_s={})

    def put(self, pools: Sequence[Sequence[Registered]], speeds: ClusterSpeeds | None, plan: LoadedPlan) -> None:
        """Keep a plan; evict the least recently used one."""
        self._plans.put(self._key(pools, speeds), plan)

    @staticmethod
    def _key(pools: Sequence[Sequence[Registered]], speeds: ClusterSpeeds | None) -> str:
        content = [(r.rank, r.node, r.is_source, r.as_held, r.digest) for pool in pools for r in pool]
        return xxhash.xxh3_128_hexdigest(repr((sorted(content), speeds)).encode())


def make_plan(
    rosters: Sequence[Roster],
    memory: PlanMemory | None = None,
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
    memory = memory or PlanMemory()
    plan = plan_copies(rosters, memory.descriptions, cables)
    node_of = {roster.rank: roster.node for roster in rosters}
    found = routed(plan, node_of, memory, may_relay=may_relay, last=last, cables=cables)
    return LoadedPlan(
        plan.digest,
        traffic_of(plan),
        plan.unused_sources,
        time.perf_counter() - started,
        plan.regions,
        found,
        frozenset(distinct(plan.shared.job_src).tolist()),
    )


def plan_report(membership: Membership, plan: LoadedPlan) -> Callable[[], PlanReport]:
    """Return a function that makes the plan report: bytes per pair of ranks and per parameter, largest first.

    Call it on another thread: there may be very many parameters. It reads nothing that changes.
    """
    names = {
        plan.members[m.id]: (
            f"source rank {m.added.rank}" if m.added.role == "source" else f"{m.added.replica} rank {m.added.rank}"
        )
        for m in membership.members()
    }
    report = PlanReport(
        model=membership.name,
        digest=plan.digest,
        bytes=plan.traffic.total_bytes,
        converted_bytes=membership.converted_bytes(),
        staging_bytes=sum(m.added.staging_bytes for m in membership.targets.values()),
        held_bytes=sum(m.added.held_bytes for m in membership.targets.values()),
        copies=plan.traffic.total_copies,
        plan_s=plan.plan_s,
        pairs=tuple(
            PairTraffic(source=names[src], target=names[dst], bytes=nbytes, copies=copies)
            for src, dst, nbytes, copies in _pairs(plan.traffic)
        ),
        parameters=(),
        unused_sources=plan.unused_sources,
        kept=_kept(membership),
        links=_links(plan),
        relays=_relaying(plan.routed.relays, plan.routed.cables),
        cables=_cable_loads(plan.routed),
        speeds=plan.routed.cables.name,
    )
    return lambda: msgspec.structs.replace(report, parameters=_parameters(plan.traffic))


def _links(plan: LoadedPlan) -> tuple[LinkTraffic, ...]:
    node_of = plan.routed.node_of
    needed: dict[tuple[str, str], int] = {}
    for src, dst, nbytes, _ in _pairs(plan.traffic):
        link = node_of[src], node_of[dst]
        needed[link] = needed.get(link, 0) + nbytes
    moved = plan.routed.links.by_nodes()
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
    links = ((*link, nbytes) for link, nbytes in routed.links.by_nodes().items() if link[0] != link[1])
    return tuple(
        CableTraffic(load.node, load.is_send, load.nbytes, round(load.speed), _sent(load.seconds))
        for load in loads_of(links, routed.cables)
    )


def _kept(membership: Membership) -> tuple[KeptTraffic, ...]:
    nbytes: dict[str, int] = {}
    for one in (one for m in membership.targets.values() for one in m.shard.kept):
        nbytes[one.name] = nbytes.get(one.name, 0) + one.nbytes
    return tuple(KeptTraffic(name=name, bytes=size) for name, size in sorted(nbytes.items(), key=lambda at: -at[1]))


def _pairs(traffic: Traffic) -> Iterator[tuple[int, int, int, int]]:
    """Yield (source rank, target rank, bytes, copies) of each pair, in order."""
    order = np.lexsort((traffic.dst, traffic.src))
    columns = (traffic.src, traffic.dst, traffic.bytes, traffic.copies)
    return zip(*(column[order].tolist() for column in columns), strict=True)


def _parameters(traffic: Traffic) -> tuple[ParameterTraffic, ...]:
    order = np.argsort(-traffic.tensor_bytes, kind="stable")
    rows = zip(order.tolist(), traffic.tensor_bytes[order].tolist(), traffic.tensor_copies[order].tolist(), strict=True)
    return tuple(ParameterTraffic(name=traffic.tensors[i], bytes=moved, copies=count) for i, moved, count in rows)
