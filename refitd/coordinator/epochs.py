"""Epochs: process groups of the nodes between which a plan moves bytes, with one lane per worker."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from refitd.config import Config
from refitd.coordinator.members import Node
from refitd.coordinator.models import Models, ModelState
from refitd.coordinator.plans import LoadedPlan
from refitd.protocol import cluster
from refitd.protocol.base import Message, Secret


class Epochs:
    """Forms epochs for plans, relays the values that workers exchange, and drops plans with their epochs."""

    def __init__(
        self,
        boot: str,
        config: Config,
        nodes: Mapping[str, Node],
        models: Models,
        to_node: Callable[[str, Message], None],
    ) -> None:
        self._boot = boot
        self._config = config
        self._nodes = nodes
        self._models = models
        self._to_node = to_node
        self._numbers = 0
        self.measuring: cluster.EpochPlan | None = None  # an epoch for no plan (measuring.py)

    def new(self, names: set[str]) -> cluster.EpochPlan:
        """Return a new epoch of these nodes; it is formed while the plan is loaded."""
        nodes = tuple(sorted(names & self._nodes.keys()))
        status = [self._nodes[name].status for name in nodes]
        transport = self._config.transport
        self._numbers += 1
        lanes = min((len(s.workers) for s in status), default=1)
        return cluster.EpochPlan(
            id=f"{self._boot}.{self._numbers}",
            service=transport.service,
            nodes=nodes,
            hosts=tuple(s.host for s in status),
            lanes=min(transport.lanes, lanes) if transport.lanes else lanes,
            staging_bytes=transport.staging_bytes,
            # shorter than the phase, so that the workers' own errors, which name who is missing, arrive first
            timeout_s=0.9 * self._config.deadlines.plan_s,
            key=Secret(secrets.token_bytes(32)),
        )

    def using(self, plan: str, epoch: str, node: str) -> list[tuple[ModelState, LoadedPlan]]:
        """Return the models whose running swap uses this plan, in the epoch that this node says it has it for."""
        return [
            (state, used)
            for state in self._models.values()
            if (running := state.running) is not None
            and (used := running.plan) is not None
            and used.id == plan
            and used.epoch_of(node) == epoch
        ]

    def relay(self, origin: str, message: cluster.EpochValue) -> None:
        """Pass a worker's value on to its peers."""
        states = self._models.values()
        plans = [s.plan for s in states] + [s.running.plan for s in states if s.running]
        known = [p.epoch for p in plans if p is not None and p.epoch] + [self.measuring]
        epoch = next((epoch for epoch in known if epoch is not None and epoch.id == message.epoch), None)
        if epoch is not None and origin in epoch.nodes and message.lane < epoch.lanes:
            for node in epoch.nodes:
                if node != origin:
                    self._to_node(node, message)

    def drop(self, plan: LoadedPlan) -> None:
        """Tell every node to drop a plan. If it is used again, it is loaded again with a new epoch."""
        nodes = plan.loaded_on | set(plan.epoch.nodes if plan.epoch is not None else ())
        plan.loaded_on, plan.given_whole, plan.epoch = set(), set(), None
        for name in sorted(nodes & self._nodes.keys()):
            self._to_node(name, cluster.DropPlan(plan=plan.id))
