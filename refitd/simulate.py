"""Predict a refit on a cluster: how long its phases take, and which cables are busiest.

The flows of a phase share the cluster's resources max-min fairly, from event to event. Between two events every flow
moves at a constant rate. Rates are found by progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2): all
rates rise together until a resource is full; its flows keep their rate, and the other rates continue to rise. An event
is the end of flows.

Clusters are regular, so most flows are equal. Flows and resources are divided into classes such that all
resources of a class carry the same flows of each class (the coarsest equitable partition, found by colour refinement).
Fair rates are the same within a class, so one of each is enough: a million flows become some hundred.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from refitd.clusters import GB, ClusterSpeeds, cables_of, check_nodes
from refitd.describe.metadata import Roster
from refitd.plan.columns import Hashes, Ints, mixed, numbered, ranges
from refitd.plan.routes import routes_of
from refitd.plan.shared import GlobalPlan
from refitd.plan.table import CopyTable, Parted

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Flows with at most this share left when others end, end with them: fewer events for nearly equal flows.
TOGETHER = 0.002
# Bytes that code the position of a changed element where about 1 % have changed: the distance to the one before it.
POSITION_BYTES = 1.1
# A delta is found by reading two versions, and applied by copying the older one and writing what changed.
DELTA_PASSES = 2.0


@dataclass(frozen=True, eq=False)
class Flows:
    """Flows, each over at most K resources. A resource of -1 is none.

    A flow of b bytes takes b * weight bytes of each of its resources' capacity.
    """

    nbytes: Floats  # [flows]
    resource: Ints  # [flows, K]
    weight: Floats  # [flows, K]


@dataclass(frozen=True, eq=False)
class Usage:
    """How resources were used.

    Attributes:
        ends: [events] seconds at which each interval of constant rates ends.
        rates: [events, classes] bytes per second through each resource of a class.
        resource_class: [resources] the class of each resource.
    """

    ends: Floats
    rates: Floats
    resource_class: Ints

    @property
    def seconds(self) -> float:
        """When the last flow has ended."""
        return float(self.ends[-1]) if len(self.ends) else 0.0

    def moved(self) -> Floats:
        """Return the bytes that each resource has carried: [resources]."""
        if not len(self.ends):
            return np.zeros(len(self.resource_class))
        lengths = np.diff(self.ends, prepend=0.0)
        carried: Floats = (lengths[:, None] * self.rates).sum(axis=0)[self.resource_class]
        return carried


@dataclass(frozen=True, eq=False)
class _Classes:
    """One flow and one resource of each class. Entry e: entry_flow[e] takes entry_weight[e] of entry_resource[e]."""

    nbytes: Floats  # [flow classes]
    capacity: Floats  # [resource classes]
    entry_flow: Ints
    entry_resource: Ints
    entry_weight: Floats
    resource_class: Ints  # [resources]


def simulate(flows: Flows, capacity: Floats) -> Usage:
    """Run all flows from time 0 until they end.

    Args:
        flows: the flows. A flow without resources takes no time.
        capacity: [resources] bytes per second, above 0.
    """
    classes = _classes_of(flows, capacity)
    left = classes.nbytes.copy()
    is_bound = np.bincount(classes.entry_flow, classes.entry_weight, minlength=len(left)) > 0
    running = (left > 0) & is_bound
    now, ends, rates = 0.0, [], []
    while running.any():
        rate = _fair(classes, running)
        step = float((left[running] / rate[running]).min())
        now += step
        left = np.where(running, left - rate * step, left)
        ends.append(now)
        taken = classes.entry_weight * rate[classes.entry_flow]
        rates.append(np.bincount(classes.entry_resource, taken, minlength=len(classes.capacity)))
        running &= left > TOGETHER * classes.nbytes
    found = np.array(rates, np.float64).reshape(len(ends), len(classes.capacity))
    return Usage(np.array(ends), found, classes.resource_class)


def _fair(classes: _Classes, running: npt.NDArray[np.bool_]) -> Floats:
    """Return the max-min fair rate of each running flow, 0 for others."""
    flow, resource, weight = classes.entry_flow, classes.entry_resource, classes.entry_weight
    rate = np.zeros(len(running))
    left, rising = classes.capacity.copy(), running.copy()
    while rising.any():
        load = np.bincount(resource, weight * rising[flow], minlength=len(left))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(load > 0, np.maximum(left, 0) / load, np.inf)
        level = share.min()
        full = share <= level * (1 + 1e-6)
        kept = np.zeros(len(rate), bool)
        kept[flow[full[resource]]] = True
        kept &= rising
        rate[kept] = level
        left -= np.bincount(resource, weight * np.where(kept, level, 0.0)[flow], minlength=len(left))
        rising &= ~kept
    return rate


def _classes_of(flows: Flows, capacity: Floats) -> _Classes:
    flow, slot = np.nonzero(flows.resource >= 0)
    resource, weight = flows.resource[flow, slot], flows.weight[flow, slot]
    flow_of, resource_of = _refined(flows.nbytes, capacity, flow, resource, weight)
    flow_kinds, resource_kinds = int(flow_of.max(initial=-1)) + 1, int(resource_of.max(initial=-1)) + 1
    nbytes, one = np.zeros(flow_kinds), np.zeros(resource_kinds)
    nbytes[flow_of], one[resource_of] = flows.nbytes, capacity
    members = np.bincount(resource_of, minlength=resource_kinds)
    # the load of all flows of a class on all resources of a class, divided by the number of these resources
    key = flow_of[flow] * resource_kinds + resource_of[resource]
    pairs, which = np.unique(key, return_inverse=True)
    total = np.bincount(which, weight, minlength=len(pairs))
    kind = pairs % max(1, resource_kinds)
    return _Classes(nbytes, one, pairs // max(1, resource_kinds), kind, total / members[kind], resource_of)


def _refined(nbytes: Floats, capacity: Floats, flow: Ints, resource: Ints, weight: Floats) -> tuple[Ints, Ints]:
    """Return the class of each flow and of each resource."""
    flow_hash, resource_hash = mixed(nbytes.view(np.int64)), mixed(capacity.view(np.int64))
    weights, kinds = mixed(weight.view(np.int64)), (-1, -1)
    while True:
        flows_kinds, flow_of = np.unique(flow_hash, return_inverse=True)
        resource_kinds, resource_of = np.unique(resource_hash, return_inverse=True)
        if kinds == (len(flows_kinds), len(resource_kinds)):
            return flow_of, resource_of
        kinds = len(flows_kinds), len(resource_kinds)
        flow_hash, resource_hash = (
            _joined(flow_hash, flow, mixed(resource_hash[resource] ^ weights)),
            _joined(resource_hash, resource, mixed(flow_hash[flow] + weights)),
        )


def _joined(hashes: Hashes, at: Ints, others: Hashes) -> Hashes:
    """Return each hash with the sum of the others at it: a hash of the multiset."""
    sums = np.zeros(len(hashes), np.uint64)
    np.add.at(sums, at, others)
    return mixed(hashes ^ mixed(sums))


@dataclass(frozen=True, eq=False)
class Hops:
    """Bytes from rank to rank (by index), and how many elements they are."""

    src: Ints
    dst: Ints
    nbytes: Ints
    elements: Ints
    is_relay: Mask  # the sender has received them in this swap


@dataclass(frozen=True, eq=False)
class Staging:
    """The two phases of staging, and over how many nodes the longest relay chain goes (1: no relay)."""

    arriving: Hops
    onward: Hops  # once everything has arrived on a node
    chain: int


class Ranks:
    """The ranks of a plan: index, node, and place within the node."""

    def __init__(self, rosters: Sequence[Roster]) -> None:
        self.rosters = sorted(rosters, key=lambda roster: roster.rank)
        self.numbers: Ints = np.array([roster.rank for roster in self.rosters], np.int64)
        self.names = [roster.node or f"rank {roster.rank}" for roster in self.rosters]  # [ranks] of the nodes
        self.nodes = list(dict.fromkeys(self.names))  # in order of their first rank
        numbers = {name: number for number, name in enumerate(self.nodes)}
        self.node: Ints = np.array([numbers[name] for name in self.names], np.int64)
        self.count: Ints = np.bincount(self.node)  # [nodes] ranks
        order = np.argsort(self.node, kind="stable")
        self.place = np.empty(len(order), np.int64)  # [ranks] number within the node
        self.place[order] = np.arange(len(order)) - np.repeat(np.cumsum(self.count) - self.count, self.count)

    def __len__(self) -> int:
        return len(self.rosters)


def staging_of(plan: GlobalPlan, ranks: Ranks, cluster: ClusterSpeeds, *, relayed: bool) -> Staging:
    """Return the hops of staging, over the routes that the service would take on such a cluster."""
    node_of = dict(zip(ranks.numbers.tolist(), ranks.names, strict=True))
    routes = routes_of(plan.shared, node_of, may_relay=relayed, cables=cables_of(cluster, ranks.names))
    within, between, onward = (_hops(route.table, ranks) for route in (routes.inner, routes.crossing, routes.onward))
    arriving = Hops(*(np.concatenate([getattr(h, f) for h in (within, between)]) for f in Hops.__annotations__))
    return Staging(arriving, onward, 1 + int(routes.crossing.table.uses.hop.max(initial=0)))


def _hops(table: Parted[Any], ranks: Ranks) -> Hops:
    """Add up the rows of each pair of ranks."""
    rows: CopyTable = table.parts.rows
    uses, start = table.uses, table.parts.start
    use, row = ranges(start[uses.part], np.diff(start)[uses.part])
    first = (np.cumsum(uses.count, dtype=np.int64) - uses.count)[use]
    src, dst = (
        np.searchsorted(ranks.numbers, uses.ranks[first + slot[row]]) for slot in (rows.src_rank, rows.dst_rank)
    )
    is_relay = uses.hop[use] > 0
    one, pair = numbered((src * len(ranks) + dst) * 2 + is_relay)
    nbytes, elements = np.zeros(len(one), np.int64), np.zeros(len(one), np.int64)
    np.add.at(nbytes, pair, rows.row_bytes[row])
    np.add.at(elements, pair, (rows.row_bytes // rows.element_size)[row])
    return Hops(src[one], dst[one], nbytes, elements, is_relay[one])


def _share(hops: Hops, per_element: float | None) -> Floats:
    """Return the share of each hop's bytes that travels, at most 1: so many bytes for each element (None: all)."""
    if per_element is None:
        return np.ones(len(hops.nbytes))
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.where(hops.nbytes > 0, per_element * hops.elements / hops.nbytes, 0.0)
    return np.minimum(1.0, wanted)


class Network:
    """Numbers the resources of a cluster: `capacity` [resources] in bytes per second, and their names."""

    def __init__(self, cluster: ClusterSpeeds, ranks: Ranks) -> None:
        self._cluster, self._ranks = cluster, ranks
        nodes, count = len(ranks.nodes), len(ranks)
        cards = ranks.count if cluster.nics_per_node is None else np.full(nodes, cluster.nics_per_node, np.int64)
        first = np.cumsum(cards) - cards
        # a node's ranks share its cards evenly, neighbours the same one
        self._card = first[ranks.node] + ranks.place * cards[ranks.node] // ranks.count[ranks.node]
        total = int(cards.sum())
        self._card_node = np.repeat(np.arange(nodes), cards)
        self._card_number = np.arange(total) - first[self._card_node]
        self._leaf = np.arange(nodes) // (cluster.leaf_nodes or nodes or 1)
        uplink = np.zeros(int(self._leaf.max(initial=-1)) + 1)
        np.add.at(uplink, self._leaf, cards * cluster.nic_gb_s * GB / cluster.oversubscription)
        within, copies, digests = (
            np.full(count, (speed or np.inf) * GB)
            for speed in (cluster.rank_gb_s, cluster.memory_gb_s, cluster.digest_gb_s)
        )
        speeds = {
            "sends": self._speeds("send_gb_s"),
            "receives": self._speeds("receive_gb_s"),
            "gives": within,
            "takes": within,
            "copies": copies,
            "up": uplink,
            "down": uplink,
            "packs": digests,
            "unpacks": digests,
        }
        self._at = dict(zip(speeds, np.cumsum([0, *map(len, speeds.values())]).tolist(), strict=False))
        self.capacity: Floats = np.concatenate(list(speeds.values()))

    def _speeds(self, which: str) -> Floats:
        """Return the speed of each card in bytes per second."""
        own = {node.name: getattr(node, which) for node in self._cluster.nodes}
        speed = np.array([own.get(name) or self._cluster.nic_gb_s for name in self._ranks.nodes])
        each: Floats = GB * speed[self._card_node]
        return each

    def flows(self, hops: Hops, per_element: float | None = None) -> tuple[Flows, Floats]:
        """Return the flows of hops, and the capacities of all resources; resources of single flows come last.

        With `per_element`, they are deltas: so many bytes travel for each element, after DELTA_PASSES over memory at
        each end (not where a relay sends).
        """
        src, dst, ranks = hops.src, hops.dst, self._ranks
        own, near = src == dst, ranks.node[src] == ranks.node[dst]
        far = ~near
        leaves = far & (self._leaf[ranks.node[src]] != self._leaf[ranks.node[dst]])
        share = _share(hops, per_element)
        whole, none = np.ones(len(src)), np.full(len(src), -1, np.int64)
        limited = self._cluster.flow_gb_s is not None
        is_delta, passes = per_element is not None, np.full(len(src), DELTA_PASSES)
        columns = [
            (np.where(far, self._at["sends"] + self._card[src], none), share),
            (np.where(far, self._at["receives"] + self._card[dst], none), share),
            (np.where(near & ~own, self._at["gives"] + src, none), whole),
            (np.where(near & ~own, self._at["takes"] + dst, none), whole),
            (np.where(own, self._at["copies"] + dst, none), whole),
            (np.where(leaves, self._at["up"] + self._leaf[ranks.node[src]], none), share),
            (np.where(leaves, self._at["down"] + self._leaf[ranks.node[dst]], none), share),
            (np.where(far, self._at["packs"] + src, none), whole),
            (np.where(far, self._at["unpacks"] + dst, none), whole),
            (np.where(far & ~hops.is_relay & is_delta, self._at["copies"] + src, none), passes),
            (np.where(far & is_delta, self._at["copies"] + dst, none), passes),
            (np.where(far & limited, len(self.capacity) + np.arange(len(src)), none), share),
        ]
        capacity = self.capacity
        if self._cluster.flow_gb_s is not None:
            capacity = np.concatenate([capacity, np.full(len(src), self._cluster.flow_gb_s * GB)])
        resource, weight = (np.stack(each, axis=1) for each in zip(*columns, strict=True))
        resource = np.where(np.isinf(capacity)[resource] & (resource >= 0), -1, resource)
        return Flows(hops.nbytes.astype(np.float64), resource, weight), capacity

    def name(self, resource: int) -> str:
        """Return a resource's name."""
        kind = max((k for k in self._at if self._at[k] <= resource), key=lambda k: self._at[k])
        number = resource - self._at[kind]
        if kind in ("sends", "receives"):
            node = int(self._card_node[number])
            cards = int((self._card_node == node).sum())
            card = f" card {int(self._card_number[number])}" if cards > 1 else ""
            return f"{self._ranks.nodes[node]}{card} {kind}"
        if kind in ("up", "down"):
            return f"leaf switch {number} {kind}"
        roster = self._ranks.rosters[number]
        return f"{roster.label or f'rank {roster.rank}'} {_DOES[kind]}"


_DOES = {
    "gives": "sends within its node",
    "takes": "receives within its node",
    "copies": "copies in its memory",
    "packs": "packs and digests",
    "unpacks": "digests and unpacks",
}


class FanOut(enum.Enum):
    """How the bytes get to all replicas."""

    DIRECT = "direct"
    RELAYED = "relayed"
    DELTA = "delta"
    RELAYED_DELTA = "relayed delta"

    @property
    def is_relayed(self) -> bool:
        """Whether replicas pass on what they get."""
        return self in (FanOut.RELAYED, FanOut.RELAYED_DELTA)

    @property
    def is_delta(self) -> bool:
        """Whether only changed elements travel."""
        return self in (FanOut.DELTA, FanOut.RELAYED_DELTA)


@dataclass(frozen=True)
class PredictedPhase:
    """A part of the swap, one after the other."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Cable:
    """A resource: the bytes through it, and the share of the staging time that they need at full speed."""

    name: str
    nbytes: int
    gb_s: float
    busy: float


@dataclass(frozen=True)
class Interval:
    """A constant rate of a cable."""

    begin_s: float
    end_s: float
    gb_s: float


@dataclass(frozen=True)
class Prediction:
    """A predicted swap.

    Attributes:
        crossing_bytes: bytes through all cables between nodes.
        sent_bytes: the part of them that nodes with sources send.
        cables: the busiest ones, first.
        rates: of each of these, how it was used over time.
    """

    route: FanOut
    phases: tuple[PredictedPhase, ...]
    crossing_bytes: int
    sent_bytes: int
    chain: int
    cables: tuple[Cable, ...]
    rates: tuple[tuple[Interval, ...], ...]

    @property
    def seconds(self) -> float:
        """The whole swap."""
        return sum(phase.seconds for phase in self.phases)


class Simulation:
    """A plan on a cluster. Each way to fan out is simulated when it is asked for.

    Raises:
        ConfigError: the cluster speaks of nodes that no rank is on.
    """

    def __init__(self, plan: GlobalPlan, rosters: Sequence[Roster], cluster: ClusterSpeeds) -> None:
        self._plan, self._cluster, self._ranks = plan, cluster, Ranks(rosters)
        check_nodes(cluster, self._ranks.nodes)
        self._network = Network(cluster, self._ranks)
        self._staging: dict[bool, Staging] = {}

    def run(self, route: FanOut, *, changed: float = 0.01, top: int = 10) -> Prediction:
        """Predict a swap.

        Args:
            route: how the bytes get to the replicas.
            changed: the share of elements that changed, in 0..1; for deltas.
            top: how many cables to report.
        """
        if (staging := self._staging.get(route.is_relayed)) is None:
            staging = staging_of(self._plan, self._ranks, self._cluster, relayed=route.is_relayed)
            self._staging[route.is_relayed] = staging
        per_element = None
        if route.is_delta:
            elements = max(1, int(staging.arriving.elements.sum()))
            per_element = changed * (int(staging.arriving.nbytes.sum()) / elements + POSITION_BYTES)
        flows, capacity = self._network.flows(staging.arriving, per_element)
        arriving = simulate(flows, capacity)
        onward = simulate(*self._network.flows(staging.onward))
        far = self._ranks.node[staging.arriving.src] != self._ranks.node[staging.arriving.dst]
        wire = flows.nbytes * _share(staging.arriving, per_element) * far
        has_source = np.array([bool(roster.source) for roster in self._ranks.rosters])
        sending = np.isin(self._ranks.node, self._ranks.node[has_source])[staging.arriving.src]
        cables, rates = self._busiest(arriving, capacity, top)
        phases = [PredictedPhase("control", self._cluster.control_s), PredictedPhase("arriving", arriving.seconds)]
        if staging.chain > 1:
            # the last node of a chain is behind the first by one chunk and one latency a hop
            slowest = min(self._cluster.nic_gb_s, self._cluster.flow_gb_s or np.inf) * GB
            hop_s = self._cluster.chunk_bytes / slowest + self._cluster.hop_s
            phases.append(PredictedPhase("relay hops", (staging.chain - 1) * hop_s))
        if onward.seconds:
            phases.append(PredictedPhase("copied onward", onward.seconds))
        phases.append(PredictedPhase("commit", self._cluster.commit_s))
        return Prediction(route, tuple(phases), int(wire.sum()), int(wire[sending].sum()), staging.chain, cables, rates)

    def _busiest(
        self, usage: Usage, capacity: Floats, top: int
    ) -> tuple[tuple[Cable, ...], tuple[tuple[Interval, ...], ...]]:
        shared = len(self._network.capacity)
        moved = usage.moved()[:shared]
        if not usage.seconds:
            return (), ()
        busy = moved / (capacity[:shared] * usage.seconds)
        order = np.lexsort((np.arange(shared), -np.round(busy, 9)))[:top]
        cables, rates = [], []
        for resource in order.tolist():
            if not moved[resource]:
                break
            name, speed = self._network.name(resource), float(capacity[resource] / GB)
            cables.append(Cable(name, int(moved[resource]), speed, float(min(1.0, busy[resource]))))
            rates.append(_intervals(usage, resource))
        return tuple(cables), tuple(rates)


def _intervals(usage: Usage, resource: int) -> tuple[Interval, ...]:
    """Return a resource's rates; neighbouring equal ones are one."""
    found: list[Interval] = []
    column, begin = usage.rates[:, usage.resource_class[resource]], 0.0
    for end, rate in zip(usage.ends.tolist(), (column / GB).tolist(), strict=True):
        if found and abs(found[-1].gb_s - rate) <= 1e-9 * max(1.0, rate):
            found[-1] = Interval(found[-1].begin_s, end, rate)
        else:
            found.append(Interval(begin, end, rate))
        begin = end
    return tuple(found)
