"""Tell nodes which version is live, and fence ranks that serve another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from refitd.coordinator.live_versions import LiveVersions
from refitd.coordinator.members import Member, Node
from refitd.coordinator.models import Models
from refitd.coordinator.records import SwapRecord
from refitd.protocol import cluster
from refitd.protocol.base import Message


class Fences:
    """Knows which swaps were decided, from the journal and from daemons."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        models: Models,
        lives: LiveVersions,
        decided: Callable[[str], SwapRecord | None],
        to_node: Callable[[str, Message], None],
    ) -> None:
        self._nodes = nodes
        self._models = models
        self._lives = lives
        self._decided = decided
        self._to_node = to_node

    def identity_of(self, swap: str) -> tuple[int, str] | None:
        """Return (version, run) of a decided swap; None if it is not known to be decided."""
        record = self._decided(swap)
        return (record.version, record.run) if record is not None else self._lives.was_decided(swap)

    def fence_unless_live(self, member: Member) -> None:
        """Fence a rank that serves another version than the live one, until it has caught up."""
        live = self._models[member.added.model].live
        if member.version is not None and live is not None and not live.is_at(member.version, member.run):
            reason = f"it holds version {member.version}, and {live.version} is live"
            if member.version == live.version:
                reason = (
                    f"it holds version {live.version} of run {member.run or '?'}, and that of run {live.run} is live"
                )
            self._to_node(member.node, cluster.FenceMember(member=member.id, reason=reason))

    def tell_live(self, model: str) -> None:
        """Tell all daemons what is live, so that they remember it."""
        claim = self._lives.claim(model)
        if claim is not None:
            for name in sorted(self._nodes):
                self._to_node(name, cluster.LiveIs(live=claim))
