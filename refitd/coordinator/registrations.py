"""Ranks and controllers that register, return, fall asleep and leave."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from refitd.config import Config, ModelConfig
from refitd.coordinator import decision
from refitd.coordinator.absent import AbsentRanks
from refitd.coordinator.admission import check_replica
from refitd.coordinator.descriptions import Descriptions
from refitd.coordinator.drains import Drains
from refitd.coordinator.live_versions import LiveVersions
from refitd.coordinator.members import Member, Node
from refitd.coordinator.membership import Membership
from refitd.coordinator.models import MAX_HISTORY, Models, ModelState, Recent
from refitd.coordinator.recovery import Recovery
from refitd.coordinator.report import written_report
from refitd.coordinator.requirements import wanted_parts
from refitd.coordinator.settling import Settling
from refitd.coordinator.source_versions import SourceVersions
from refitd.coordinator.swaps import Swaps
from refitd.dtypes import ELEMENT_SIZES
from refitd.errors import RefusedError
from refitd.protocol import cluster, control, local
from refitd.protocol.base import Message

_BEING_DECIDED = (decision.Phase.STAGED, decision.Phase.DECIDING)


class Registrations:
    """Keeps `members` and the models that have any."""

    def __init__(
        self,
        config: Config,
        models: Models,
        members: dict[str, Member],
        recent: Recent,
        descriptions: Descriptions,
        sources: SourceVersions,
        drains: Drains,
        lives: LiveVersions,
        recovery: Recovery,
        absent: AbsentRanks,
        swaps: Swaps,
        settling: Settling,
        to_node: Callable[[str, Message], None],
        send: Callable[[bytes, int, Message], None],
        log: Callable[..., None],
    ) -> None:
        self._config, self._models, self._members, self._recent = config, models, members, recent
        self._descriptions, self._sources, self._drains = descriptions, sources, drains
        self._lives, self._recovery, self._absent = lives, recovery, absent
        self._swaps, self._settling = swaps, settling
        self._to_node, self._send, self._log = to_node, send, log

    def _state_of(self, model: str) -> ModelState:
        """Return a model's state; that of a new one has its history from the journal and the daemons."""
        if (known := self._models.get(model)) is not None:
            return known
        configured = self._config_of(model)
        membership = Membership(
            model, configured.auto_swap, check_replicas=configured.check_replicas, drains=self._drains.nodes
        )
        state = ModelState(membership, self._lives.of(model), self._lives.highest(model), self._lives.past.tried(model))
        past = self._recent(model, MAX_HISTORY)
        state.last = next((report for r in past if (report := written_report(r)) is not None), None)
        return state

    def add(self, node: Node, added: cluster.AddShard, now: float) -> Message:
        """Register a rank, or say whether it could be registered; return the answer.

        Raises:
            RefusedError: it cannot be; nothing has changed.
        """
        if added.rank >= added.world_size:
            raise RefusedError(f"{added.member}: rank {added.rank} is not below world_size {added.world_size}")
        check_replica(added, self._config_of(added.model))
        if added.observes and node.status.node in self._drains.nodes:
            raise RefusedError(
                f"model {added.model!r}: node {node.status.node!r} is drained, so replica {added.replica!r}, which "
                f"observes, gets no version there; use another node, or refitctl resume {node.status.node}"
            )
        state = self._state_of(added.model)
        shard = self._descriptions.of(added)
        state.membership.check_part(added, shard)
        if added.is_question:
            state.membership.replaced_by(added)
            return local.Done()
        nbytes = sum(prod(t.shape) * ELEMENT_SIZES.get(t.dtype, 0) for t in shard.tensors)
        is_source = added.role == "source"
        run, newest, base = self._sources.run_of(state, added) if is_source else (added.run, -1, None)
        member = Member(
            added,
            shard,
            node.status.node,
            node.status.host,
            nbytes,
            attached=added.attached,
            versions=set(added.versions),
            modes=dict(zip(added.versions, added.modes, strict=False)),
            mode=added.mode,
            mode_reason=added.mode_reason,
            run=run,
            newest=newest,
            version=added.version,
            staged=added.staged,
            staged_version=added.staged_version,
            poisoned=added.poisoned,
            suspended=added.suspended,
            spare=None if added.spare is None else (added.spare, added.spare_run),
            seeds=added.seeds,
            wants=wanted_parts(shard) if added.role == "target" else frozenset(),
            joined_at=now,
        )
        replaced = state.membership.replaced_by(added)
        for one in replaced:
            state.membership.remove(one)
        state.membership.add(member)
        self._models[added.model] = state
        for one in replaced:
            self._replace(one, member, now)
        self._lives.keep(added.model)
        self._members[member.id] = member
        if self._absent.registered(member) and state.running is not None:
            state.running.look_again(now)
        self._drains.registered(added.model, added.replica, member.node)
        self._swaps.preparation.members_changed(state)
        self._log("registered", model=added.model, member=member.id, who=member.describe(), bytes=nbytes)
        if is_source:
            self._sources.registered(state, member, base)
            return cluster.SourceAdmitted(run=run, next_version=newest + 1)
        if added.staged is not None:
            if added.committing and added.staged_version is not None:
                self._lives.told(added.staged, added.staged_version, added.staged_run)
            self._settling.settle(member, added.staged, now)
        elif added.version is not None:
            if self._lives.serves(added.model, member.describe(), added.version, added.run):
                self._settling.live_learned(added.model, now)  # a due swap begins after this answer
            self._swaps.fences.fence_unless_live(member)
        self._swaps.ended_late(self._recovery.registered(member))
        return local.Done()

    def _replace(self, old: Member, by: Member, now: float) -> None:
        """Forget a detached rank, and have its daemon free its memory.

        If the new rank has the same number and daemon, that daemon frees the memory by itself.
        """
        is_same = old.added.rank == by.added.rank and old.added.world_size == by.added.world_size
        if is_same and old.node == by.node:
            self._members.pop(old.id, None)
            return
        reason = f"its trainer is gone, and {by.describe()} has registered anew"
        self.remove(old.id, reason, now)  # first: a swap that reads it is aborted
        self._to_node(old.node, cluster.EvictMember(member=old.id, reason=reason))

    def remove(self, member_id: str, reason: str, now: float) -> None:
        """Forget a rank; a swap in which it takes part learns of it."""
        member = self._members.pop(member_id, None)
        if member is None:
            return
        state = self._models[member.added.model]
        self._log("left", model=state.membership.name, member=member_id, who=member.describe(), reason=reason)
        takes_part = state.takes_part(member)
        state.membership.remove(member)
        self._swaps.preparation.members_changed(state)
        if takes_part:
            self._swaps.step(state, decision.MemberLost(member_id, reason), now)
        self._swaps.controllers.ranks_changed(state.membership.name, member.added.replica, now)
        self._sources.room_changed(state)
        self._forget_if_empty(state)

    def add_controller(self, node: Node, added: control.AddController, now: float) -> None:
        """Register the controller of a replica; raises RefusedError if it has one."""
        state = self._state_of(added.model)
        self._swaps.controllers.add(node, added, state.membership, now)
        self._models[added.model] = state
        self._drains.registered(added.model, added.replica, node.status.node)

    def remove_controller(self, member: str, node: str, reason: str, now: float) -> None:
        """Forget a controller."""
        model = self._swaps.controllers.remove(member, node, reason, now)
        if model is not None:
            self._forget_if_empty(self._models[model])

    def _forget_if_empty(self, state: ModelState) -> None:
        if not state.membership.members() and not state.membership.controllers and state.running is None:
            for queued in state.queue:
                gone = f"model {state.membership.name!r}: everybody has left before the swap could begin"
                self._send(*queued.waiter, local.Failure(code=RefusedError.code, message=gone))
            self._models.pop(state.membership.name, None)

    def suspend(self, member: Member, suspended: bool, is_lost: bool, now: float) -> None:
        """Leave a replica out of swaps, or let it take part again; an undecided swap of it aborts.

        Raises:
            RefusedError: the rank has a decided version to commit first, or a decision about one is being written.
        """
        state = self._models[member.added.model]
        running = state.running
        takes_part = running is not None and state.takes_part(member)
        is_written = running is not None and member.id in running.swap.members
        being_decided = is_written and running is not None and running.swap.phase in _BEING_DECIDED
        if suspended and (member.staged is not None or being_decided):
            raise RefusedError(
                f"{member.describe()} has a version that is decided, or is being decided; take it over first (poll or "
                "wait), then suspend"
            )
        if is_lost and not suspended and not member.suspended and (takes_part or member.staged is not None):
            raise RefusedError(f"{member.describe()} is not suspended, and a swap writes or reads it; suspend it first")
        if suspended and takes_part:
            self._swaps.step(state, decision.MemberLost(member.id, "its engine was suspended"), now)
        self._log("suspended" if suspended else "woken", model=state.membership.name, member=member.id)
        member.suspended = suspended
        if is_lost and not suspended:
            member.version = None
        self._swaps.fences.fence_unless_live(member)

    def detach(self, member_id: str, reason: str) -> None:
        """Note that a source rank's trainer has gone; what it has published stays."""
        member = self._members.get(member_id)
        if member is not None:
            member.attached = False
            self._sources.room_changed(self._models[member.added.model])
            self._log("detached", model=member.added.model, member=member_id, reason=reason)

    def withdrawn(self, member_id: str, version: int, now: float) -> None:
        """Note that a source rank no longer holds a version; a swap that reads it learns of it."""
        member = self._members.get(member_id)
        if member is None:
            return
        member.versions.discard(version)
        member.modes.pop(version, None)
        state = self._models[member.added.model]
        self._sources.room_changed(state)
        running = state.running
        if running is not None and running.version == version and state.reads(member):
            lost = decision.MemberLost(
                member_id, f"it withdrew version {version}, or published over it, before it was read"
            )
            self._swaps.step(state, lost, now)

    def member(self, member_id: str) -> Member:
        """Return a registered rank; raises RefusedError if it is not registered."""
        member = self._members.get(member_id)
        if member is None:
            raise RefusedError(f"no member {member_id!r} is registered here; register again")
        return member

    def _config_of(self, model: str) -> ModelConfig:
        return self._config.models.get(model, ModelConfig())
