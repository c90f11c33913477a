"""Versions of source ranks: which numbers they may publish, and which slots they may overwrite."""

from __future__ import annotations

from collections.abc import Callable

from refitd.coordinator.members import Member
from refitd.coordinator.models import ModelState
from refitd.coordinator.schedule import used_up
from refitd.errors import RefusedError
from refitd.protocol import cluster
from refitd.protocol.base import Message


class SourceVersions:
    """Updates the source ranks' part of each model's state. `members` are all ranks by id."""

    def __init__(
        self,
        members: dict[str, Member],
        new_run: Callable[[], str],
        to_node: Callable[[str, Message], None],
        log: Callable[..., None],
    ) -> None:
        self._members = members
        self._new_run = new_run
        self._to_node = to_node
        self._log = log

    def run_of(self, state: ModelState, added: cluster.AddShard) -> tuple[str, int, int | None]:
        """Return (run that a source rank joins, highest number it may no longer publish, base).

        `base` is the highest number that earlier runs used up, if this rank begins the run, else None.
        """
        if added.run:  # it registered before
            used = max(added.versions, default=-1) if added.newest is None else added.newest
            return added.run, max(used, state.published.get((added.run, added.rank), -1)), None
        joined = sorted(m.run for m in state.membership.sources.values() if m.attached)
        if not joined:
            running = state.running
            base = max(state.highest, -1 if running is None else running.version)
            return self._new_run(), base, base
        run = joined[0]
        used = -1
        if (run, added.rank) in state.published:
            # it returns alone, with weights that differ from every version published before
            used = max(version for (of, _), version in state.published.items() if of == run)
        return run, max(state.bases.get(run, state.highest), used), None

    def registered(self, state: ModelState, member: Member, base: int | None) -> None:
        """Record a registered source rank and the base from `run_of`; forget runs that have no rank left."""
        if base is not None:
            state.bases[member.run] = base
        state.published[member.run, member.added.rank] = member.newest
        for old in {old for old, _ in state.published} - {m.run for m in state.membership.sources.values()}:
            state.bases.pop(old, None)
            for rank in [rank for at, rank in state.published if at == old]:
                del state.published[old, rank]
        self.room_changed(state)

    def published(self, state: ModelState, member: Member, published: cluster.ShardPublished) -> None:
        """Record a version that a rank now holds.

        Raises:
            RefusedError: its number was used up by other contents.
        """
        version = published.version
        text = used_up(state, version, member.run)
        if not text and version <= state.bases.get(member.run, -1):
            first = state.bases[member.run] + 1
            text = f"version {version} may have been live with other contents; publish {first} or above"
        if text:
            raise RefusedError(f"model {state.membership.name!r} {member.describe()}: {text} (source.next_version)")
        member.contents += published.is_anew
        member.versions.add(version)
        member.newest = max(member.newest, version)
        state.published[member.run, member.added.rank] = member.newest
        member.modes[version] = member.mode = published.mode
        member.mode_reason = published.mode_reason
        self.room_changed(state)
        self._log("published", model=state.membership.name, member=member.id, version=version, mode=published.mode)

    def wants_room(self, state: ModelState, member: Member, slots: int) -> None:
        """Answer a source rank without a free slot: which versions it may overwrite, now and after each change."""
        if member.added.role == "source":
            state.wants_room[member.id] = slots
            self._tell_room(state, member, *state.membership.droppable(), asks=True)

    def room_changed(self, state: ModelState) -> None:
        """Tell waiting source ranks which slots they may now overwrite."""
        if not state.wants_room:
            return
        found = state.membership.droppable()
        for member_id in list(state.wants_room):
            member = self._members.get(member_id)
            if member is None:
                del state.wants_room[member_id]
            else:
                self._tell_room(state, member, *found)

    def _tell_room(
        self, state: ModelState, member: Member, droppable: set[int], complete: int, *, asks: bool = False
    ) -> None:
        if state.wants_room[member.id] == 1:
            droppable = droppable | {complete}  # its one slot cannot hold both that version and a new one
        versions, reason = tuple(sorted(droppable & member.versions)), ""
        if versions:
            del state.wants_room[member.id]
        elif asks:
            held = ", ".join(f"{v} (complete)" if v == complete else str(v) for v in sorted(member.versions))
            reason = f"it holds {held}; {state.membership.lagging_sources(member)}" if held else ""
        if versions or asks:
            self._to_node(member.node, cluster.MayDrop(member=member.id, versions=versions, reason=reason))
