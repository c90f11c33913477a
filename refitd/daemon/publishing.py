"""The versions of this node's sources: grant slots, accept snapshots and leases, end versions."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from refitd.buffers.layout import WHOLE, Spans, Written
from refitd.daemon.effects import Announced, Effects
from refitd.daemon.links import CoordinatorLink
from refitd.daemon.members import LocalMember, Slot, SourceSide, WaitingPublish
from refitd.daemon.swaps import LocalSwaps
from refitd.errors import DeadlineExceeded, RefitdError, RefusedError, TransportError
from refitd.protocol import local
from refitd.protocol.base import Message

# Limit for each member, on open slot requests and on lent versions.
MAX_OPEN = 16


class Publishing:
    """Handles publish, lend and withdraw."""

    def __init__(self, swaps: LocalSwaps, link: CoordinatorLink) -> None:
        self._swaps = swaps
        self._link = link

    def begin(
        self, effects: Effects, member: LocalMember, session: int, request: int, version: int, deadline: float
    ) -> None:
        """Grant a slot for `version`, immediately or when a slot becomes free.

        Raises:
            RefusedError: the version is not newer, or the source has no slots.
            TransportError: there is no coordinator.
        """
        self._link.check()
        source = _source(member)
        if not source.slots:
            raise RefusedError(f"{member.name}: its tensors live in an arena and are lent, not copied; use lend()")
        _check_new(member, source, version, "requests for a snapshot slot", len(source.waiting))
        source.waiting.append(WaitingPublish(session, request, version, deadline))
        self._grant(effects, member)
        self.ask_room(effects, member)

    def publish(
        self, effects: Effects, member: LocalMember, session: int, request: int, message: local.Publish
    ) -> None:
        """Accept a finished snapshot. If the coordinator refuses it, the slot becomes free.

        Raises:
            RefusedError: the slot was not granted for this version.
            TransportError: there is no coordinator.
        """
        version, index = message.version, message.slot
        source = _source(member)
        slot = source.slots[index] if index is not None and index < len(source.slots) else None
        if slot is None or slot.writing != version:
            raise RefusedError(f"{member.name}: slot {index} was not granted for version {version}; publish again")
        try:
            self._link.check()
        except RefitdError:
            self.withdraw(effects, member, version, "there is no coordinator")
            raise
        slot.writing, slot.version = None, version
        if slot.readers:  # a swap stages the version while it is published
            self._wrote(effects, slot, ((0, WHOLE),))
        self._announce(effects, member, session, request, version, message.is_anew)

    def wrote(self, effects: Effects, member: LocalMember, message: local.Wrote) -> None:
        """Note which bytes of a version are written; with the first ones, swaps of the version may begin."""
        version = message.version
        slot = next((slot for slot in _source(member).slots if slot.writing == version), None)
        if slot is None:
            return  # its copy failed
        if slot.written is None or not slot.written.spans():
            effects.say(local.BeginPublish(member.id, version, is_writing=True))
        self._wrote(effects, slot, message.spans)

    def _wrote(self, effects: Effects, slot: Slot, spans: Spans) -> None:
        slot.written = slot.written or Written()
        for begin, end in spans:
            slot.written.add(begin, end)
        self._swaps.wrote(effects, slot.arena, spans)

    def lend(self, effects: Effects, member: LocalMember, session: int, request: int, message: local.Publish) -> None:
        """Accept live tensors as a version, without a copy.

        Raises:
            RefusedError: the version is not newer, or the tensors are outside arenas.
            TransportError: as `publish`.
        """
        version = message.version
        source = _source(member)
        _check_new(member, source, version, "versions that are lent", len(source.leases))
        self._link.check()
        if not member.registration.live:
            raise RefusedError(
                f"{member.name}: its tensors are outside arenas, and only tensors in arenas are lent; publish"
            )
        source.leases[version] = set()
        self._announce(effects, member, session, request, version, message.is_anew)

    def ask_room(self, effects: Effects, member: LocalMember) -> None:
        """Ask the coordinator which versions a waiting publish may overwrite. Called repeatedly: messages get lost."""
        source = member.source
        if source is not None and source.waiting and member.registration.request.world_size > 1:
            effects.say(local.BeginPublish(member.id, source.waiting[0].version, slots=len(source.slots)))

    def may_drop(self, effects: Effects, member: LocalMember, versions: Iterable[int], reason: str) -> None:
        """Store the versions that no other rank needs, according to the coordinator."""
        if member.source is not None:
            member.source.may_drop, member.source.lagging = frozenset(versions), reason
        self._grant(effects, member)

    def withdraw(self, effects: Effects, member: LocalMember, version: int, reason: str) -> None:
        """Drop a version; ignore an unknown one. Once this returns, no swap reads the version."""
        source = member.source
        if source is None:
            return
        source.waiting[:] = [waiting for waiting in source.waiting if waiting.version != version]
        is_lent = version in source.leases
        held = next((s for s in source.slots if version in (s.version, s.writing)), None)
        if not is_lent and held is None:
            return
        is_told = held is not None and held.written is not None and bool(held.written.spans())
        if held is None or held.writing is None or is_told:  # else the coordinator does not know it
            effects.say(local.Withdraw(member=member.id, version=version))
        self._swaps.stop_reading(effects, member, version, reason)
        if is_lent:
            del source.leases[version]
        elif held is not None:
            held.version = held.writing = None
        self._grant(effects, member)

    def withdraw_leases(self, effects: Effects, member: LocalMember) -> None:
        """Drop the versions in the memory of a client that has left, and the versions that it was writing."""
        source = member.source
        writing = [slot.writing for slot in source.slots if slot.writing is not None] if source is not None else []
        for version in [*source.leases, *writing] if source is not None else ():
            self.withdraw(effects, member, version, "its client is gone")

    def release(
        self,
        effects: Effects,
        members: Iterable[LocalMember],
        swap: str,
        unread: tuple[int, Collection[str]] = (-1, ()),
    ) -> None:
        """End a swap's reads: its slots may be overwritten, its leases end.

        `unread` is its version, and members whose lease ends too, because the swap read their replicas instead.
        """
        for member in list(members):
            source = member.source
            if source is None:
                member.seeding.discard(swap)
                continue
            for version, readers in list(source.leases.items()):
                if swap in readers or (version == unread[0] and member.id in unread[1]):
                    readers.discard(swap)
                    self._end_lease(effects, member, version)
            for slot in source.slots:
                slot.readers.discard(swap)
                slot.compared.discard(swap)
            self._grant(effects, member)

    def slots_freed(self, effects: Effects, members: Iterable[LocalMember]) -> None:
        """Grant slots whose comparison with a newer version has ended."""
        for member in list(members):
            self._grant(effects, member)

    def expire(self, effects: Effects, members: Iterable[LocalMember]) -> None:
        """Fail requests that waited too long for a slot; the error names the users of the slots."""
        for member in members:
            source = member.source
            if source is None:
                continue
            for waiting in [w for w in source.waiting if w.deadline <= effects.now]:
                source.waiting.remove(waiting)
                error = DeadlineExceeded(
                    f"{member.name}: no snapshot slot became free for version {waiting.version} in time; "
                    f"{_why_not(member, source)}; wait for them, or register with more slots"
                )
                effects.fail(waiting.session, waiting.request, error)

    def _grant(self, effects: Effects, member: LocalMember) -> None:
        """Grant waiting publishes in order, while slots are free."""
        source, is_alone = member.source, member.registration.request.world_size == 1
        while source is not None and source.waiting:
            index = source.free_slot(is_alone=is_alone)
            if index is None and source.free_slot(is_alone=is_alone, even_compared=True) is not None:
                self._swaps.end_comparing(effects, source)
                index = source.free_slot(is_alone=is_alone)
            if index is None:
                return
            waiting = source.waiting.pop(0)
            source.may_drop, source.lagging = frozenset(), ""  # other ranks may need the remaining versions
            slot = source.slots[index]
            old, slot.version, slot.writing = slot.version, None, waiting.version
            slot.since, slot.written = effects.now, None
            if old is not None:
                effects.say(local.Withdraw(member=member.id, version=old))
            effects.tell(waiting.session, waiting.request, local.SlotGranted(slot=index))

    def _announce(
        self,
        effects: Effects,
        member: LocalMember,
        session: int,
        request: int,
        version: int,
        is_anew: bool,
    ) -> None:
        source = _source(member)
        before, source.newest = source.newest, version
        published = local.Publish(member.id, version, is_anew=is_anew, mode=member.mode)
        self._link.ask(effects, session, request, published, Announced(member, version, before))

    def announced(self, effects: Effects, session: int, request: int, about: Announced, reply: Message) -> None:
        """Handle the coordinator's answer about a version; undo the publish if it is refused."""
        if isinstance(reply, local.Failure):
            if reply.code == TransportError.code:
                # the version is published: a lost coordinator may have recorded it, and the next one will receive it
                reply = local.Done()
            else:
                self._take_back(effects, about.member, about.version, about.before)
        effects.tell(session, request, reply)

    def _take_back(self, effects: Effects, member: LocalMember, version: int, before: int) -> None:
        """Undo the publish of a version that the coordinator refused. No rank serves it: its number can be reused."""
        source = _source(member)
        if source.newest == version:
            source.newest = before
        self._swaps.stop_reading(effects, member, version, "the coordinator refused it")
        source.leases.pop(version, None)
        for slot in source.slots:
            if slot.version == version:
                slot.version = slot.written = None
        self._grant(effects, member)

    def _end_lease(self, effects: Effects, member: LocalMember, version: int) -> None:
        source = _source(member)
        if source.leases[version]:
            return
        del source.leases[version]
        effects.say(local.Withdraw(member=member.id, version=version))
        if member.session is not None:
            effects.tell(member.session, 0, local.MayDrop(member=member.id, versions=(version,)))


def _source(member: LocalMember) -> SourceSide:
    if member.source is None:
        raise RefusedError(f"{member.name}: it is a target; only a source publishes versions")
    return member.source


def _why_not(member: LocalMember, source: SourceSide) -> str:
    """Return why no slot of a member can be overwritten."""
    found = []
    if reading := sorted({s for slot in source.slots for s in slot.readers | slot.compared}):
        found.append(f"swaps {reading} are still reading")
    if writing := sorted(slot.writing for slot in source.slots if slot.writing is not None):
        found.append(f"versions {writing} are being copied in")
    if member.registration.request.world_size > 1 and any(not slot.readers for slot in source.slots):
        found.append(source.lagging or "the coordinator has not said what the other source ranks need")
    return "; ".join(found)


def _check_new(member: LocalMember, source: SourceSide, version: int, what: str, count: int) -> None:
    """Refuse a version that is not newer than the published ones, or that would exceed the `count` open ones."""
    r = member.registration.request
    if version < source.first:
        raise RefusedError(
            f"model {r.model!r} source rank {r.rank}: version {version} was live "
            "with other contents, or may have been, before this registration; publish "
            f"{max(source.first, source.newest + 1)} or above (source.next_version)"
        )
    if version <= source.newest:
        raise RefusedError(
            f"model {r.model!r} source rank {r.rank}: version {version} is "
            f"not newer than {source.newest}, which was published before; versions only go up"
        )
    if count >= MAX_OPEN:
        raise RefusedError(f"{member.name}: has {count} {what} already, at most {MAX_OPEN}; end some first")
