"""Removals by operators: hung engines, leftovers of dead processes, nodes whose keys are no longer admitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from refitd.coordinator.members import Node
from refitd.coordinator.models import Models
from refitd.errors import RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.base import Message
from refitd.protocol.reports import EvictReport, ForgetReport, ReloadReport
from refitd.protocol.roles import Allowed


class Removals:
    """Removes members and nodes on request.

    `remove(member, reason, now)` and `forget_node(name, reason, now)` take them out of the coordinator's state.
    """

    def __init__(
        self,
        nodes: Mapping[str, Node],
        models: Models,
        remove: Callable[[str, str, float], None],
        forget_node: Callable[[str, str, float], None],
        to_node: Callable[[str, Message], None],
        log: Callable[..., None],
    ) -> None:
        self._nodes, self._models = nodes, models
        self._remove, self._forget_node, self._to_node, self._log = remove, forget_node, to_node, log

    def evict(self, asked: local.Evict, now: float) -> EvictReport:
        """Evict a replica, or one of its ranks; a running swap treats it like the death of the process.

        Raises:
            RefusedError: no such rank is registered; lists the registered ones.
        """
        membership = self._models.named(asked.model).membership
        found = [m for m in membership.replica(asked.replica) if asked.rank in (None, m.added.rank)]
        if not found:
            there = ", ".join(f"{replica} rank {rank}" for replica, rank in sorted(membership.targets)) or "none"
            rank = "" if asked.rank is None else f" rank {asked.rank}"
            raise RefusedError(f"model {asked.model!r} has no replica {asked.replica!r}{rank}; registered: {there}")
        reason = f"it was evicted on request: {asked.reason or 'no reason given'}"
        members = tuple(member.describe() for member in found)
        for member in found:
            self._remove(member.id, reason, now)  # first: the abort stops workers that write its arena
            self._to_node(member.node, cluster.EvictMember(member=member.id, reason=reason))
        return EvictReport(model=asked.model, replica=asked.replica, members=members)

    def forget(self, model: str, now: float) -> ForgetReport:
        """Free what dead processes left of a model: versions of ended trainers, arenas that nodes keep of engines.

        Raises:
            RefusedError: a swap is running, which may read these versions.
        """
        state = self._models.get(model)
        if state is not None and state.running is not None:
            raise RefusedError(
                f"model {model!r}: swap {state.running.swap.swap} is running; wait for its end, or abort it "
                f"(refitctl abort {model})"
            )
        sources = [] if state is None else [m for _, m in sorted(state.membership.sources.items()) if not m.attached]
        names = tuple(member.describe() for member in sources)
        for member in sources:
            reason = "its trainer is gone, and it was forgotten on request"
            self._remove(member.id, reason, now)
            self._to_node(member.node, cluster.EvictMember(member=member.id, reason=reason))
        for node in sorted(self._nodes):
            self._to_node(node, cluster.ForgetRetained(model=model))
        self._log("forgotten", model=model, sources=len(names))
        return ForgetReport(model=model, sources=names, nodes=tuple(sorted(self._nodes)))

    def keys_read(
        self, allowed: Mapping[str, Allowed] | None, tell: Callable[[ReloadReport], None], now: float
    ) -> None:
        """Apply a list of admitted keys (None: no keys are used), and tell what it does, before it does it.

        Nodes whose key is not on it, or may not have their name, are removed; others get the roles that it gives.
        """
        if allowed is None:
            tell(ReloadReport(uses_keys=False))
            return
        removed: dict[str, str] = {}
        for name, node in sorted(self._nodes.items()):
            found = allowed.get(node.key)
            if found is None:
                removed[name] = "was taken off security.allowed"
            elif found.node not in ("", name):
                removed[name] = f"may be node {found.node!r} only"
            else:
                node.allowed = found
        admitted = tuple(one.name for one in allowed.values())
        self._log("keys-read", admitted=len(admitted), removed=", ".join(removed) or "none")
        tell(ReloadReport(uses_keys=True, admitted=admitted, removed=tuple(removed)))  # the asking node may go
        for name, why in removed.items():
            said = f"the key of {self._nodes[name].allowed.name!r} {why}"
            self._to_node(name, local.Failure(code="unknown-node", message=said))
            self._forget_node(name, f"its key {why}", now)
