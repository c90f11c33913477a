"""Prepare a swap for staging: a plan on every node, an epoch between nodes, sources compared and equal."""

from __future__ import annotations

from collections.abc import Callable

from refitd.config import Config
from refitd.coordinator import decision
from refitd.coordinator.actions import Instruction, Planned
from refitd.coordinator.comparisons import Comparisons
from refitd.coordinator.decision import Phase
from refitd.coordinator.epochs import Epochs
from refitd.coordinator.measuring import CableTests
from refitd.coordinator.members import Node
from refitd.coordinator.models import Models, ModelState, Running
from refitd.coordinator.planning import Planning
from refitd.coordinator.plans import RELAYING_SERVICES, LoadedPlan
from refitd.coordinator.schedule import gave_way
from refitd.coordinator.seeding import no_plan, without_unread
from refitd.offline.clusters import ClusterSpeeds
from refitd.protocol import cluster
from refitd.protocol.base import Message
from refitd.states import SwapCause


class Preparation:
    """Prepares running swaps, and steps them once they are; `planning` answers operators too."""

    def __init__(
        self,
        config: Config,
        boot: str,
        nodes: dict[str, Node],
        models: Models,
        step: Callable[[ModelState, decision.Event, float], None],
        out: Callable[[Instruction], None],
        to_node: Callable[[str, Message], None],
        log: Callable[..., None],
    ) -> None:
        self._models, self._nodes = models, nodes
        self._step, self._to_node, self._log = step, to_node, log
        transport = config.transport
        may_relay = transport.relays and transport.service in RELAYING_SERVICES
        self.planning = Planning(models, out, may_relay=may_relay)
        self._comparisons = Comparisons(to_node, log)
        self._epochs = Epochs(boot, config, nodes, models, to_node)
        self.cable_tests = CableTests(self._epochs, config, nodes, models, to_node, log)

    def begin(self, state: ModelState, now: float) -> None:
        """Prepare the swap of a model that has just begun."""
        running = state.running
        assert running is not None
        self.cable_tests.give_way(state.membership.name)
        if running.flips_back:
            self._planned_without(state, running, now)
        elif state.plan is not None and running.membership is state.membership:
            self._plan_ready(state, state.plan, now)
        else:
            # only the present members: a rank that joins while the plan is made is caught up afterwards
            running.membership = running.membership.only({replica for replica, _ in running.membership.targets})
            event = self.planning.ask(running.membership, running.swap.swap)
            if event is not None:
                self.planned(event, now)

    def load(self, state: ModelState, running: Running, node: str, now: float) -> None:
        """Send a node its part of the running swap's plan, or go on if it has it."""
        plan = running.plan
        assert plan is not None
        if node in plan.loaded_on:
            self._step(state, decision.NodeLoaded(node), now)
        elif (known := self._nodes.get(node)) is not None:
            self._to_node(node, plan.message(state.membership.name, running.membership, node, known.held))

    def node_said(
        self,
        name: str,
        message: cluster.PlanLoaded
        | cluster.PlanRefused
        | cluster.PartsMissing
        | cluster.EpochLost
        | cluster.EpochPut
        | cluster.RegionsDigested,
        now: float,
    ) -> None:
        """Handle a node's message about plans, epochs and comparisons."""
        match message:
            case cluster.PlanLoaded(plan, epoch):
                for state, used in self._epochs.using(plan, epoch, name):
                    used.loaded_on.add(name)
                    running = state.running
                    is_last = running is not None and not set(running.swap.waiting) - {name}
                    # one that gives way ends once its epoch is formed, before anything is copied
                    ends = running is not None and running.gives_way and is_last
                    self._step(state, gave_way() if ends else decision.NodeLoaded(name), now)
            case cluster.PlanRefused(plan, epoch, where, reason) | cluster.EpochLost(plan, epoch, where, reason):
                self._lost(plan, epoch, name, where, reason, now)
            case cluster.PartsMissing(plan, epoch, missing):
                self._lacks_parts(name, plan, epoch, missing, now)
            case cluster.EpochPut(epoch, lane, key, value):
                self._epochs.relay(name, cluster.EpochValue(epoch=epoch, lane=lane, key=key, value=value))
            case cluster.RegionsDigested():
                self._digested(name, message, now)

    def use_speeds(self, speeds: ClusterSpeeds | None) -> None:
        """Use these cable speeds in plans from the next swap on; None: all cables are equally fast."""
        if speeds != self.planning.speeds:
            self.planning.speeds = speeds
            for state in self._models.values():
                self.members_changed(state)

    def tick(self, state: ModelState, running: Running, now: float) -> None:
        """Abort a swap whose sources have not been compared in time."""
        if late := self._comparisons.late(running, now):
            self._step(state, decision.AbortAsked(late, SwapCause.DEADLINE), now)

    def ended(self, state: ModelState, running: Running) -> None:
        """Release what was prepared for a swap that is over. An epoch does not outlive a failed one."""
        plan, is_aborted = running.plan, running.swap.phase is Phase.ABORTED
        kept = state.plan
        has_crossed = plan is not None and plan.epoch is not None
        if is_aborted and has_crossed and kept is not None and kept is not plan and kept.epoch is not None:
            # workers that still copy are replaced, and every epoch that they are in ends with them
            self._epochs.drop(kept)
        if plan is not None and (plan is not state.plan or (is_aborted and plan.epoch is not None)):
            self._epochs.drop(plan)
        if is_aborted:
            self._comparisons.ended(running)

    def planned(self, event: Planned, now: float) -> None:
        """Handle a finished plan; the swap that waits for it continues, or aborts with the reason."""
        found = self.planning.planned(event)
        if found is not None:
            state, plan = found
            if isinstance(plan, str):
                if state.running is not None:
                    no_plan(state.running.membership)
                text = f"the plan was refused: {'; '.join(plan.splitlines())}"
                self._step(state, decision.AbortAsked(text, SwapCause.PLAN), now)
            else:
                self._plan_ready(state, plan, now)

    def _plan_ready(self, state: ModelState, plan: LoadedPlan, now: float) -> None:
        assert state.running is not None
        if not self._comparisons.are_equal(state.running, plan, now):
            return
        running = state.running
        if running.membership.seeds:
            without_unread(running, plan)
        membership = running.membership
        senders = [
            member for _, member in sorted(membership.sources.items()) if plan.members[member.id] in plan.senders
        ]
        if gone := [m for m in senders if running.version not in m.versions]:
            reason = f"{gone[0].describe()}: version {running.version} was replaced by newer ones before it was read"
            self._step(state, decision.AbortAsked(reason, SwapCause.OVERTAKEN), now)
            return
        if plan.routed.links and plan.epoch is None:
            plan.epoch = self._epochs.new(plan.routed.links.nodes())
        state.running.plan = plan
        nbytes = plan.traffic.total_bytes + membership.converted_bytes()
        more = frozenset(plan.epoch.nodes if plan.epoch is not None else ())
        self._step(state, _ready(running, nbytes, more), now)

    def _planned_without(self, state: ModelState, running: Running, now: float) -> None:
        """Begin a swap that moves no bytes, so that no node has a plan to load."""
        ready = _ready(running, 0, frozenset())
        self._step(state, ready, now)
        for node in sorted(ready.nodes):
            self._step(state, decision.NodeLoaded(node), now)

    def _digested(self, node: str, message: cluster.RegionsDigested, now: float) -> None:
        """Handle a node's digests; after the last the swap continues with its plan, or aborts naming what differs."""
        state = self._models.swapping(message.swap)
        if state is None or state.running is None:
            return  # the swap has ended meanwhile
        found = self._comparisons.digested(state.running, node, message)
        if isinstance(found, str):
            self._step(state, decision.AbortAsked(found, SwapCause.SOURCES_DIFFER), now)
        elif found is not None:
            self._plan_ready(state, found, now)

    def members_changed(self, state: ModelState) -> None:
        """Drop the plan: the next swap needs a new one. A running swap keeps its own."""
        plan, state.plan = state.plan, None
        if plan is not None and (state.running is None or state.running.plan is not plan):
            self._epochs.drop(plan)

    def _lacks_parts(self, node: str, plan: str, epoch: str, missing: int, now: float) -> None:
        """Send a plan again with all of its parts: the node lost some, or never got them."""
        self._log("plan-parts-missing", plan=plan, node=node, missing=missing)
        known = self._nodes.get(node)
        if known is None or known.held is None:
            return
        known.held.forget()
        for state, used in self._epochs.using(plan, epoch, node):
            if node in used.given_whole:
                reason = f"it lacks {missing} parts of the plan, which was sent with all of them"
                self._lost(plan, epoch, node, f"node {node}", reason, now)
                return
            used.given_whole.add(node)
            if state.running is not None:
                self.load(state, state.running, node, now)

    def _lost(self, plan: str, epoch: str, node: str, where: str, reason: str, now: float) -> None:
        """Abort the swaps that use a plan or epoch which a node lost; the next swap loads it again."""
        if self.cable_tests.lost(plan, f"{where}: {reason}"):
            return
        self._log("plan-lost", plan=plan, epoch=epoch, node=node, where=where, reason=reason)
        for state, _ in self._epochs.using(plan, epoch, node):
            self._step(state, decision.PlanLost(node, where, reason), now)
        for state in self._models.values():
            kept = state.plan
            if kept is not None and kept.id == plan and kept.epoch is not None and kept.epoch.id == epoch:
                self._epochs.drop(kept)


def _ready(running: Running, nbytes: int, more: frozenset[str]) -> decision.PlanReady:
    """Return the event that begins a planned swap; `more` are participating nodes besides those of the targets."""
    targets = running.membership.targets.values()
    ranks = {m.id: m.node for m in targets}
    controllers = [
        c for c in running.membership.in_control() if c.id in running.swap.names
    ]  # others came after its begin
    return decision.PlanReady(
        members=ranks | {c.id: c.node for c in controllers},
        nodes=frozenset(ranks.values()) | more,
        bytes_total=nbytes,
        asked=frozenset({m.id for m in targets if m.added.pauses} | {c.id for c in controllers if c.added.pauses}),
        in_place=frozenset(m.id for m in targets if m.added.in_place),
    )
