"""Drained nodes: no new swap writes or reads what lies there, until an operator resumes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from refitd.coordinator.actions import DrainWritten, Instruction, WriteDrain
from refitd.coordinator.admission import MAX_NODES
from refitd.coordinator.members import Member, Node
from refitd.coordinator.membership import Membership
from refitd.coordinator.models import Models, ModelState, Running, Waiter
from refitd.coordinator.records import Drain, Drained
from refitd.coordinator.report import swap_progress
from refitd.errors import RefusedError
from refitd.protocol.base import Message
from refitd.protocol.reports import DrainedSource, DrainReport, ReplicaName, ResumeReport

# Limit on replicas recorded for a drained node. A further one that loses its rank there counts as incomplete instead.
MAX_REPLICAS = 4096


class Drains:
    """Drains and resumes nodes. A drain is journalled before it is answered, so that it outlives the coordinator.

    Attributes:
        nodes: the drained nodes with the replicas that have, or had, a rank or their controller there. Every
            `Membership` reads it.
    """

    def __init__(
        self,
        nodes: Drained,
        connected: Mapping[str, Node],
        models: Models,
        next_swap: Callable[[ModelState, float], None],
        out: Callable[[Instruction], None],
        send: Callable[[bytes, int, Message], None],
        log: Callable[..., None],
    ) -> None:
        self.nodes = nodes
        self._connected, self._models = connected, models
        self._next_swap, self._out, self._send, self._log = next_swap, out, send, log

    def drain(self, node: str, waiter: Waiter) -> None:
        """Have a node drained, then answer the waiter.

        Raises:
            RefusedError: no such node is connected.
        """
        if node in self.nodes:
            self._send(*waiter, self._drained(node, changed=False))
            return
        if node not in self._connected:
            raise RefusedError(f"no node {node!r} is connected; connected nodes: {_listed(self._connected)}")
        if len(self.nodes) >= MAX_NODES:
            raise RefusedError(f"node {node!r}: {MAX_NODES} nodes are drained already; resume those that are gone")
        here = {
            *((name, m.added.replica) for name, s in self._models.items() for m in _on(node, s.membership)),
            *(
                (name, r)
                for name, s in self._models.items()
                for r, c in s.membership.controllers.items()
                if c.node == node
            ),
        }
        self._out(WriteDrain(Drain(node, frozenset(here)), waiter))

    def resume(self, node: str, waiter: Waiter) -> None:
        """Have a drained node take part again, then answer the waiter.

        Raises:
            RefusedError: the node is not drained, and none of this name is connected.
        """
        if node in self.nodes:
            self._out(WriteDrain(Drain(node, None), waiter))
        elif node in self._connected:
            self._send(*waiter, ResumeReport(node=node, changed=False))
        else:
            raise RefusedError(
                f"no node {node!r} is connected or drained; connected nodes: {_listed(self._connected)}; drained "
                f"nodes: {_listed(self.nodes)}"
            )

    def registered(self, model: str, replica: str, node: str) -> None:
        """Note a replica that has a rank or its controller on this node, if the node is drained."""
        known = self.nodes.get(node)
        if replica and known is not None and (model, replica) not in known and len(known) < MAX_REPLICAS:
            self._out(WriteDrain(Drain(node, known | {(model, replica)})))

    def written(self, event: DrainWritten, now: float) -> None:
        """Apply a change that the journal has recorded, after answering the request."""
        node, replicas, waiter = event.drain.node, event.drain.replicas, event.waiter
        if replicas is not None:
            self.nodes[node] = replicas
            if waiter is not None:
                report = self._drained(node, changed=True)
                sources = len(report.sources)
                self._log("drained", node=node, replicas=len(report.replicas), sources=sources)
                self._send(*waiter, report)
            return
        before = {name: state.membership.drained() for name, state in self._models.items()}
        self.nodes.pop(node, None)
        again = tuple(
            ReplicaName(name, replica)
            for name, state in sorted(self._models.items())
            for replica in sorted({*before[name]} - {*state.membership.drained()})
        )
        self._log("resumed", node=node, replicas=len(again))
        if waiter is not None:
            self._send(*waiter, ResumeReport(node=node, changed=True, replicas=again))
        for state in list(self._models.values()):
            self._next_swap(state, now)

    def _drained(self, node: str, *, changed: bool) -> DrainReport:
        states = sorted(self._models.items())
        replicas, stranded = [], []
        for name, state in states:
            left_out = state.membership.drained()
            replicas += [ReplicaName(name, r) for r in left_out if (name, r) in self.nodes[node]]
            if left_out and not state.membership.engines().targets:
                stranded.append(name)
        sources = [
            DrainedSource(name, rank, m.host, m.added.pid)
            for name, state in states
            for rank, m in sorted(state.membership.sources.items())
            if m.node == node
        ]
        found = [s.running for _, s in states if s.running is not None and _takes_part(node, s.running)]
        running = tuple(one for r in found if (one := swap_progress(r.swap)) is not None)
        return DrainReport(node, changed, tuple(replicas), tuple(stranded), tuple(sources), running)


def _on(node: str, membership: Membership) -> list[Member]:
    return [member for member in membership.targets.values() if member.node == node]


def _takes_part(node: str, running: Running) -> bool:
    members = {m.node for m in running.members.values()} | {c.node for c in running.membership.in_control()}
    return node in members or node in running.swap.nodes


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
