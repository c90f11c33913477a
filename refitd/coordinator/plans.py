"""A plan, the nodes that have it, and its parts on the wire: packed once for all nodes, and sent to each node once."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np
import xxhash

from refitd.caches import BoundedCache
from refitd.clusters import ClusterSpeeds
from refitd.coordinator.descriptions import Registered
from refitd.describe.metadata import Roster
from refitd.plan.build import Remembered, plan_copies
from refitd.plan.columns import Ints, distinct, in_order, offsets_of
from refitd.plan.cost import EQUAL, Cables, Traffic, traffic_of
from refitd.plan.relays import Relays
from refitd.plan.routes import KnownRoutes, Links, RoutedTable, routes_of
from refitd.plan.shared import GlobalPlan, Regions
from refitd.plan.table import CopyTable, CrossingTable, FillTable, Int32, Parted, PartRows, PlanTable, Uses
from refitd.protocol.base import digest_of, pack
from refitd.protocol.cluster import (
    EpochPlan,
    LoadPlan,
    NodeShare,
    PeerTable,
    PlanPart,
    ShareRanks,
)

if TYPE_CHECKING:
    from refitd.coordinator.paths import Wiring
    from refitd.protocol.plan_reports import PathTraffic

# --- parts on the wire -----------------------------------------------------------------------------------

# Parts that a node is assumed to hold. A node that lacks one says so in PlanLoaded.
MAX_HELD = 1 << 14

# Shares, ranks and lists of epochs' parts that a node is assumed to hold. A change of the fleet makes new ones; few
# return.
MAX_SHARES = 64


@dataclass(frozen=True, slots=True)
class Packed:
    """A part as it travels, and the digest that names it."""

    digest: str
    data: bytes


class HeldParts:
    """The parts that a node has been sent."""

    def __init__(self) -> None:
        self._digests: dict[str, None] = {}  # the oldest first
        self._shares: BoundedCache[str, bool] = BoundedCache(MAX_SHARES)

    def lacking(self, parts: Iterable[Packed]) -> dict[str, bytes]:
        """Return the parts that it has not been sent, and note them as sent."""
        found = {part.digest: part.data for part in parts if part.digest not in self._digests}
        self._digests.update(dict.fromkeys(found))
        while len(self._digests) > MAX_HELD:
            del self._digests[next(iter(self._digests))]
        return found

    def lacks_share(self, digest: str) -> bool:
        """Return whether a share or a companion of one was not sent before, and note it as sent."""
        is_new = self._shares.get(digest) is None
        self._shares.put(digest, True)
        return is_new

    def forget(self) -> None:
        """Note that it may hold none of them."""
        self._digests.clear()
        self._shares.clear()


class PackedParts:
    """Packs the parts of tables, and reuses recent results."""

    def __init__(self) -> None:
        self._packed: BoundedCache[bytes, Packed] = BoundedCache(MAX_HELD)

    def of(self, parts: PartRows[Any]) -> tuple[Packed, ...]:
        """Return the parts of a table as they travel."""
        found = []
        for number, content in enumerate(parts.contents):
            packed = self._packed.get(content)
            if packed is None:
                packed = _packed(PlanPart(parts.part(number).to_wire()))
                self._packed.put(content, packed)
            found.append(packed)
        return tuple(found)


# services whose GPUs form a group: all that exchange, directly or through others. The lanes move the other rows
GPU_ONLY = frozenset({"nccl", "nvshmem"})


@dataclass(frozen=True, eq=False, slots=True)
class PackedEpoch:
    """An epoch, and the table of peers that each of its nodes is sent.

    Attributes:
        epoch: the epoch.
        position: of each node.
        bare: the epoch without nodes.
        group: the nodes in a node's group of GPUs, if its service needs one.
    """

    epoch: EpochPlan
    position: dict[str, int]
    bare: EpochPlan
    group: dict[str, list[str]]

    @staticmethod
    def of(epoch: EpochPlan, met: Mapping[str, Collection[str]]) -> PackedEpoch:
        """Prepare an epoch; `met` are the nodes that each node exchanges with."""
        on_gpus = [name for name, gpus in zip(epoch.nodes, epoch.gpus, strict=False) if gpus]
        groups = groups_of(met, on_gpus) if epoch.gpu_service in GPU_ONLY else ()
        return PackedEpoch(
            epoch,
            {name: i for i, name in enumerate(epoch.nodes)},
            msgspec.structs.replace(epoch, nodes=(), hosts=(), gpus=(), doors=(), gpu_doors=()),
            {name: group for group in groups for name in group},
        )

    def peers_of(self, node: str, nodes: Iterable[str]) -> Packed:
        """Return the table of a node, which has rows with `nodes`."""
        found = sorted({node, *nodes, *self.group.get(node, ())} & self.position.keys())
        at = [self.position[name] for name in found]
        epoch = self.epoch

        def of(column: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
            return tuple(column[i] for i in at) if column else ()

        hosts = tuple(epoch.hosts[i] for i in at)
        return _packed(PeerTable(tuple(found), hosts, of(epoch.gpus), of(epoch.doors), of(epoch.gpu_doors)))


def groups_of(met: Mapping[str, Collection[str]], among: Collection[str]) -> list[list[str]]:
    """Return the nodes `among` in groups: two are in one group if they exchange, directly or through others."""
    left, groups = set(among), []
    for first in sorted(among):
        if first not in left:
            continue
        left.discard(first)
        group = [first]
        for name in group:
            near = left & set(met.get(name, ()))
            left -= near
            group += near
        groups.append(sorted(group))
    return groups


def _without_ranks(uses: Uses, ranks: Int32) -> Uses:
    """Return uses with positions in `ranks` instead of ranks; `ranks` is ascending and complete."""
    return replace(uses, ranks=np.searchsorted(ranks, uses.ranks).astype(np.int32))


def _packed(part: PlanPart | PeerTable) -> Packed:
    return Packed(digest_of(part), pack(part))


# --- plans -----------------------------------------------------------------------------------------------

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

    Node number i has uses[start[i] : start[i + 1]], ascending.
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

    def _of(self, node: str) -> Ints:
        number = self.number[node]
        return self.uses[self.start[number] : self.start[number + 1]]


class PlanMemory:
    """Results that a planner reuses from earlier plans.

    Attributes:
        descriptions: computed from descriptions.
        routes: computed from rows.
        parts: packed parts.
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

    With `may_relay`, nodes may relay data to other nodes; the nodes in `last` come last in each path.
    """
    routes = routes_of(plan.few, node_of, memory.routes, may_relay=may_relay, last=last, cables=cables)
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
    regions: Regions  # of several source ranks, to be compared
    routed: Routed
    senders: frozenset[int]  # the plan-wide ranks that are read
    members: dict[str, int] = field(default_factory=dict)  # member id -> plan-wide rank; see `belongs_to`
    loaded_on: set[str] = field(default_factory=set)
    epoch: EpochPlan | None = None  # of its cross-node transfers; None until formed
    gpu_of: dict[int, str] = field(default_factory=dict)  # plan-wide rank -> its GPU, if the epoch has that
    crossing_s: dict[str, float] = field(default_factory=dict)  # node -> time of its slowest worker in the last swap
    paths: tuple[Wiring | None, tuple[PathTraffic, ...]] = (None, ())  # of its bytes in the last swap
    given_whole: set[str] = field(default_factory=set)  # nodes that lacked parts, and were sent all
    nbytes: int = field(init=False)  # that it moves
    moves_between: bool = field(init=False)  # between nodes
    has_regions: bool = field(init=False)
    _named: dict[int, str] = field(default_factory=dict)  # plan-wide rank -> member id
    _here: dict[str, Int32] = field(default_factory=dict)  # node -> the ranks of members there
    _node_at: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # plan-wide rank -> number of its node
    _epoch: PackedEpoch | None = None  # `epoch`, as it travels

    def __post_init__(self) -> None:
        # every swap asks for these
        self.nbytes, self.moves_between = self.traffic.total_bytes, bool(self.routed.links)
        self.has_regions = bool(len(self.regions))

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

    def unloaded(self) -> LoadedPlan:
        """Return a copy that is loaded on no node and has no members."""
        return replace(self, members={}, loaded_on=set(), given_whole=set(), epoch=None, gpu_of={}, crossing_s={})

    @property
    def digest(self) -> str:
        """The digest of the rosters that the plan was made from."""
        return self.id.partition(".")[0]

    def epoch_of(self, node: str) -> str:
        """Return the epoch that a node forms for its part of the plan; "" if it only copies between its own ranks."""
        return self.epoch.id if self.epoch is not None and node in self.epoch.nodes else ""

    def message(self, model: str, seeds: Iterable[str], node: str, held: HeldParts) -> LoadPlan:
        """Return a node's share of the plan: the rows that its targets receive and its sources send.

        `seeds` are ids of members; `held` are the parts that the node caches. A node that was sent a share was sent all
        of its parts, and reports lost ones.
        """
        routed, epoch = self.routed, self._epoch_with(node)
        tables: dict[str, Shared[Any]] = {"table": routed.inner, "fills": routed.fills}
        if epoch is not None:
            tables |= {"crossing": routed.crossing, "onward": routed.onward}
        found = {name: shared.at(node) for name, shared in tables.items() if shared.has(node)}
        # a row between nodes has an end here
        ranks = distinct(np.concatenate([self._here.get(node, NO_RANKS), *(uses.ranks for uses in found.values())]))
        numbers = ranks.tolist()
        seeding = {self.members.get(member, -1) for member in seeds} & set(numbers)
        uses, parts = _used(tables, found)
        nodes, at = self._nodes_of(ranks) if epoch is not None else ((), ())
        on = [self.gpu_of.get(rank, "") for rank in numbers] if self.gpu_of and epoch is not None else []
        gpus = {gpu: number for number, gpu in enumerate(sorted(set(on)))}
        share = NodeShare(
            members=tuple(map(self._named.__getitem__, numbers)),
            nodes=nodes,
            at=at,
            seeds=tuple(np.searchsorted(ranks, sorted(seeding)).tolist()),
            uses={name: _without_ranks(some, ranks).to_wire() for name, some in uses.items()},
            parts=tuple(part.digest for part in parts),
            gpus=tuple(gpus),
            on=tuple(gpus[gpu] for gpu in on),
        )
        of_ranks, given = ShareRanks(tuple(numbers)), dict[str, bytes]()
        if held.lacks_share(digest := digest_of(share)):
            given = {digest: pack(share)} | held.lacking(parts)
        if held.lacks_share(ranks_digest := digest_of(of_ranks)):
            given[ranks_digest] = pack(of_ranks)
        peers = epoch.peers_of(node, nodes) if epoch is not None else None
        if peers is not None and held.lacks_share(peers.digest):
            given = given | {peers.digest: peers.data}
        return LoadPlan(
            plan=self.id,
            model=model,
            share=digest,
            ranks=ranks_digest,
            peers=peers.digest if peers is not None else "",
            epoch=epoch.bare if epoch is not None else None,
            given=given,
        )

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
            self._epoch = PackedEpoch.of(self.epoch, self.routed.links.neighbours())
        return self._epoch if node in self._epoch.position else None


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
        """Return a cached plan of these pools, not loaded on any node; None if none is cached."""
        plan = self._plans.get(self._key(pools, speeds))
        return None if plan is None else replace(plan.unloaded(), plan_s=0.0)

    def put(self, pools: Sequence[Sequence[Registered]], speeds: ClusterSpeeds | None, plan: LoadedPlan) -> None:
        """Cache a plan; evict the least recently used one."""
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
    """Plan these rosters. With `may_relay`, nodes relay data; those in `last` come last.

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
        frozenset(distinct(plan.few.job_src).tolist()),
    )
