"""Predict a refit: how long its phases take, and which cables are busiest."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refitd.describe.roster import Roster
from refitd.offline.clusters import GB, ClusterSpeeds, check_nodes
from refitd.plan.shared import GlobalPlan
from refitd.simulate.fluid import Flows, Usage, simulate
from refitd.simulate.hops import Hops, Ranks, Staging, staging_of
from refitd.simulate.network import Coding, Network

# Bytes that code the position of a changed element where about 1 % have changed: the distance to the one before it.
POSITION_BYTES = 1.1
# A delta is found by reading two versions, and applied by copying the older one and writing what changed.
DELTA_PASSES = 2.0


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
    """A resource: what went through it, and the share of the staging time in which that alone would have gone."""

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
        sent_bytes: those that nodes with sources send.
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
    """A plan on a cluster. Each route is simulated when it is asked for.

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
        staging = self._staging.get(route.is_relayed)
        if staging is None:
            order = self._network.slow_last()
            staging = staging_of(self._plan.shared, self._ranks, relayed=route.is_relayed, order=order)
            self._staging[route.is_relayed] = staging
        coding = Coding()
        if route.is_delta:
            coding = Coding(
                per_element=changed * (_element_bytes(staging.arriving) + POSITION_BYTES), passes=DELTA_PASSES
            )
        flows, capacity = self._network.flows(staging.arriving, coding)
        arriving = simulate(flows, capacity)
        onward = simulate(*self._network.flows(staging.onward, Coding()))
        far = self._ranks.node[staging.arriving.src] != self._ranks.node[staging.arriving.dst]
        wire = flows.nbytes * coding.share(staging.arriving) * far
        with_source = {roster.node or f"rank {roster.rank}" for roster in self._ranks.rosters if roster.source}
        sending = np.array([node in with_source for node in self._ranks.nodes])[self._ranks.node[staging.arriving.src]]
        cables, rates = self._busiest(arriving, flows, capacity, top)
        phases = [PredictedPhase("control", self._cluster.control_s), PredictedPhase("arriving", arriving.seconds)]
        if staging.chain > 1:
            phases.append(PredictedPhase("relay hops", self._hops_s(staging)))
        if onward.seconds:
            phases.append(PredictedPhase("copied onward", onward.seconds))
        phases.append(PredictedPhase("commit", self._cluster.commit_s))
        return Prediction(route, tuple(phases), int(wire.sum()), int(wire[sending].sum()), staging.chain, cables, rates)

    def _hops_s(self, staging: Staging) -> float:
        """Return the time by which the last node of a chain is behind the first: one chunk and one latency a hop."""
        slowest = min([self._cluster.nic_gb_s, *([self._cluster.flow_gb_s] if self._cluster.flow_gb_s else [])])
        return (staging.chain - 1) * (self._cluster.chunk_bytes / (slowest * GB) + self._cluster.hop_s)

    def _busiest(
        self, usage: Usage, flows: Flows, capacity: np.ndarray[tuple[int], np.dtype[np.float64]], top: int
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
            cables.append(
                Cable(
                    self._network.name(resource),
                    int(moved[resource]),
                    float(capacity[resource] / GB),
                    float(min(1.0, busy[resource])),
                )
            )
            rates.append(_intervals(usage, resource))
        return tuple(cables), tuple(rates)


def _element_bytes(hops: Hops) -> float:
    elements = int(hops.elements.sum())
    return int(hops.nbytes.sum()) / elements if elements else 0.0


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
