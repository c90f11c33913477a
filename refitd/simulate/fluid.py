"""Flows that share resources max-min fairly, simulated from event to event; alike flows are simulated once.

Between two events every flow moves at a constant rate. The rates are those of progressive filling (Bertsekas and
Gallager, Data Networks, 6.5.2): all rise together, until a resource is full; its flows keep their rate, the others rise
on. An event is the end of flows.

Clusters are regular, so most flows have the same fate. Flows and resources are divided into classes such that all
resources of a class carry the same flows of each class (the coarsest equitable partition, found by colour refinement).
Fair rates are the same within a class, so one of each is enough: a million flows become some hundred.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refitd.plan.columns import Hashes, Ints, mixed

Floats = npt.NDArray[np.float64]

# Flows that have no more than this share left when others end, end with them: fewer events for nearly equal flows.
TOGETHER = 0.002


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
        flows: what moves. Flows that take nothing of any resource take no time.
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
    # what all flows of a class take of all resources of a class, divided by the number of these resources
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
