"""The versions that source ranks begin to publish, publish and drop."""

from __future__ import annotations

from refitd.commit import swap_events
from refitd.coordinator import preparation
from refitd.coordinator.fleet import ModelState, Turn
from refitd.coordinator.members import Member
from refitd.coordinator.schedule import used_up
from refitd.errors import RefusedError
from refitd.protocol import local
from refitd.states import SwapCause, TransferMode

MAX_VERSIONS = 1024  # of one source rank


def begun(turn: Turn, member: Member, version: int) -> None:
    """Note that a source rank writes a version into a slot: a swap may stage it while it is written."""
    state, source = turn.fleet.models[member.added.model], member.source
    if version <= source.newest:
        return
    source.begun, source.modes[version] = version, TransferMode.COPIED
    if state.membership.is_begun(version):
        turn.due[state.membership.name] = None
    turn.log("publishing", model=state.membership.name, member=member.id, version=version)


def published(turn: Turn, member: Member, message: local.Publish) -> None:
    """Record a version that a source rank has published.

    Raises:
        RefusedError: its number was used up by other contents, or the rank holds too many versions.
    """
    state, source, version = turn.fleet.models[member.added.model], member.source, message.version
    if version not in source.versions and len(source.versions) >= MAX_VERSIONS:
        raise RefusedError(f"{member.describe()}: holds {MAX_VERSIONS} versions already; withdraw some")
    text = used_up(state, version, member.run)
    if not text and version <= state.bases.get(member.run, -1):
        first = state.bases[member.run] + 1
        text = f"version {version} may have been live with other contents; publish {first} or above"
    if text:
        raise RefusedError(f"model {state.membership.name!r} {member.describe()}: {text} (source.next_version)")
    source.contents += message.is_anew
    source.versions.add(version)
    source.begun = None if source.begun == version else source.begun
    source.newest = max(source.newest, version)
    state.published.setdefault(member.run, {})[member.added.rank] = source.newest
    source.modes[version] = source.mode = message.mode
    if state.wants_room:
        room_changed(turn, state)
    if state.membership.is_begun(version):
        turn.due[state.membership.name] = None
    _finished(turn, state, member, message)
    turn.log("published", model=state.membership.name, member=member.id, version=version, mode=message.mode)


def _finished(turn: Turn, state: ModelState, member: Member, message: local.Publish) -> None:
    """Continue the swap that stages a version while it is published."""
    running = state.running
    if running is None or running.version != message.version or running.run != member.run:
        return
    if message.is_anew and running.compared_before:
        text = f"{member.describe()} published other tensors than before, which must be compared first; swap again"
        turn.post(running.swap.swap, swap_events.AbortAsked(text, SwapCause.OVERTAKEN))
    elif member.id in running.swap.publishing:
        turn.post(running.swap.swap, swap_events.SourceFinished(member.id))
    elif not running.membership.writing(running.version):
        preparation.go_on(turn, running)


def withdrawn(turn: Turn, member: Member | None, version: int) -> None:
    """Note that a source rank (None: it has left) no longer has a version; a swap that reads it aborts."""
    if member is None:
        return
    member.source.versions.discard(version)
    member.source.begun = None if member.source.begun == version else member.source.begun
    member.source.modes.pop(version, None)
    state = turn.fleet.models[member.added.model]
    if state.wants_room:
        room_changed(turn, state)
    running = state.running
    is_needed = running is not None and (state.reads(member) or member.id in running.swap.publishing)
    if running is not None and running.version == version and is_needed:
        reason = f"it withdrew version {version}, or published over it, before it was read"
        turn.post(running.swap.swap, swap_events.MemberLost(member.id, reason))


def wants_room(turn: Turn, member: Member, slots: int) -> None:
    """Answer a source rank without a free slot: which versions it may overwrite, now and after each change."""
    state = turn.fleet.models[member.added.model]
    if member.added.role == "source":
        state.wants_room[member.id] = slots
        _tell_room(turn, state, member, *state.membership.droppable(), asks=True)


def room_changed(turn: Turn, state: ModelState) -> None:
    """Tell waiting source ranks which slots they may now overwrite."""
    found = state.membership.droppable()
    for member_id in list(state.wants_room):
        member = turn.fleet.members.get(member_id)
        if member is None:
            del state.wants_room[member_id]
        else:
            _tell_room(turn, state, member, *found)


def _tell_room(
    turn: Turn, state: ModelState, member: Member, droppable: set[int], complete: int, *, asks: bool = False
) -> None:
    if state.wants_room[member.id] == 1:
        droppable = droppable | {complete}  # its one slot cannot hold both that version and a new one
    there = member.source.versions
    versions, reason = tuple(sorted(droppable & there)), ""
    if versions:
        del state.wants_room[member.id]
    elif asks:
        held = ", ".join(f"{v} (complete)" if v == complete else str(v) for v in sorted(there))
        reason = f"it holds {held}; {state.membership.lagging_sources(member)}" if held else ""
    if versions or asks:
        turn.to_node(member.node, local.MayDrop(member=member.id, versions=versions, reason=reason))
