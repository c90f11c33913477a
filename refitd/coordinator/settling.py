"""Settle swaps that earlier coordinators left, once the live versions are certain; no swap begins before that."""

from __future__ import annotations

from collections.abc import Callable

from refitd.coordinator import decision
from refitd.coordinator.live_versions import LiveVersions
from refitd.coordinator.members import Member, poison
from refitd.coordinator.models import Models
from refitd.coordinator.swaps import Swaps
from refitd.protocol import cluster
from refitd.protocol.base import Message
from refitd.states import SwapCause


class Settling:
    """Applies new knowledge of live versions.

    Attributes:
        has_begun: whether swaps may begin, and waiting callers were told so.
    """

    def __init__(
        self,
        models: Models,
        members: dict[str, Member],
        lives: LiveVersions,
        swaps: Swaps,
        to_node: Callable[[str, Message], None],
    ) -> None:
        self.has_begun = False
        self._models, self._members = models, members
        self._lives, self._swaps, self._to_node = lives, swaps, to_node
        self._undone: dict[str, Member] = {}  # ranks with a staged version, while it is unknown whether it was decided

    def live_learned(self, model: str, now: float) -> None:
        """Apply a changed live version: fence ranks that hold another one, and catch them up."""
        self._swaps.fences.tell_live(model)
        state = self._models.get(model)
        if state is None:
            return
        state.live, state.highest = self._lives.of(model), self._lives.highest(model)
        running = state.running
        if running is not None and running.swap.phase is not decision.Phase.COMMITTING:
            text = f"it was learned that version {state.live} is live"
            self._swaps.step(state, decision.AbortAsked(text, SwapCause.OVERTAKEN), now)
        for member in state.membership.targets.values():
            if member.staged is None:
                self._swaps.fences.fence_unless_live(member)

    def begin(self, now: float) -> None:
        """Once the live version is certain, settle staged swaps and begin the waiting ones."""
        if self.has_begun or not self._lives.is_settled(now):
            return
        self.has_begun = True
        for member in list(self._undone.values()):
            if self._members.get(member.id) is member and member.staged is not None:
                self.settle(member, member.staged, now)
        self._undone.clear()
        self._swaps.queue.settled(now)
        for state in list(self._models.values()):
            self._swaps.queue.next(state, now)

    def settle(self, member: Member, swap: str, now: float) -> None:
        """Commit or abort a staged swap that an earlier coordinator left."""
        found = self._swaps.fences.identity_of(swap)
        live = self._models[member.added.model].live
        staged = member.added.staged_version, member.added.staged_run
        if found is None and self._lives.is_in_doubt and live is not None and live.is_at(*staged):
            found = live.version, live.run  # the journal with this swap is lost, but its version was decided
        if found is not None:
            self._to_node(member.node, cluster.CommitStaged(swap=swap, version=found[0], run=found[1]))
            return
        if not self._lives.is_settled(now):
            self._undone[member.id] = member  # another daemon may know it as decided
            return
        member.staged, reason = None, "the coordinator restarted before deciding"
        if member.added.in_place:
            poison(member, swap, reason)
        self._to_node(member.node, cluster.Abort(swap=swap, reason=reason))
        self._swaps.fences.fence_unless_live(member)
        self._swaps.controllers.ranks_changed(member.added.model, member.added.replica, now)
