"""The versions of this node's sources: slots granted, snapshots and leases taken, versions ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from refitd.daemon.coordinator_link import CoordinatorLink
from refitd.daemon.members import LentVersion, LocalMember, WaitingPublish, lease_places
from refitd.daemon.pending import Announced, Before
from refitd.daemon.swaps import LocalSwaps
from refitd.errors import DeadlineExceeded, RefitdError, RefusedError, TransportError
from refitd.protocol import cluster, local
from refitd.protocol.base import Message

# Limit for each member, on open slot requests and on lent versions.
MAX_OPEN = 16


class Publishing:
    """Handles publish, lend and withdraw. `reply(session, request, message)` answers a client."""

    def __init__(self, swaps: LocalSwaps, link: CoordinatorLink, reply: Callable[[int, int, Message], None]) -> None:
        self._swaps = swaps
        self._link = link
        self._reply = reply

    def begin(self, member: LocalMember, session: int, request: int, version: int, deadline: float) -> None:
        """Grant a slot for `version`, at once or when one becomes free.

        Raises:
            RefusedError: the version is not newer, or the source has no slots.
            TransportError: there is no coordinator.
        """
        self._link.check()
        _check_newer(member, version)
        if not member.slots:
            raise RefusedError(f"{member.id}: its tensors live in an arena and are lent, not copied; use lend()")
        _check_room(member, "requests for a snapshot slot", len(member.waiting))
        member.waiting.append(WaitingPublish(session, request, version, deadline))
        self._grant(member)
        self.ask_room(member)

    def publish(self, member: LocalMember, session: int, request: int, message: local.Publish) -> None:
        """Accept a finished snapshot. If the coordinator refuses it, the slot is free again.

        Raises:
            RefusedError: the slot was not granted for this version.
            TransportError: there is no coordinator.
        """
        version, index = message.version, message.slot
        slot = member.slots[index] if index < len(member.slots) else None
        if slot is None or slot.writing != version:
            raise RefusedError(f"{member.id}: slot {index} was not granted for version {version}; publish again")
        slot.writing = None
        try:
            self._link.check()
        except RefitdError:
            self._grant(member)
            raise
        slot.version = version
        self._announce(member, session, request, version, message.reason, message.is_anew)

    def lend(self, member: LocalMember, session: int, request: int, message: local.Lend) -> None:
        """Accept live tensors as a version, without a copy.

        Raises:
            RefusedError: the version is not newer, or the addresses do not match the tensors.
            TransportError: as `publish`.
        """
        version = message.version
        _check_newer(member, version)
        _check_room(member, "versions that are lent", len(member.leases))
        self._link.check()
        member.leases[version] = LentVersion(version, lease_places(member, message.addresses))
        self._announce(member, session, request, version, message.reason, message.is_anew)

    def ask_room(self, member: LocalMember) -> None:
        """Ask the coordinator which versions a waiting publish may overwrite. Repeated: messages get lost."""
        if member.waiting and member.registration.world_size > 1:
            self._link.say(cluster.WantsRoom(member.id, member.waiting[0].version, len(member.slots)))

    def may_drop(self, member: LocalMember, versions: Iterable[int], reason: str) -> None:
        """Store the versions that, says the coordinator, no other rank needs."""
        member.may_drop, member.lagging = frozenset(versions), reason
        self._grant(member)

    def withdraw(self, member: LocalMember, version: int, reason: str) -> None:
        """Drop a version, if it is held; nothing reads it once this returns."""
        member.waiting[:] = [waiting for waiting in member.waiting if waiting.version != version]
        for slot in member.slots:
            if slot.writing == version:  # the client's copy failed
                slot.writing = None
                self._grant(member)
        lease = member.leases.get(version)
        held = next((s for s in member.slots if s.version == version), None)
        if lease is None and held is None:
            return
        self._link.say(cluster.ShardWithdrawn(member=member.id, version=version))
        self._swaps.stop_reading(member, version, reason)
        if lease is not None:
            del member.leases[version]
        elif held is not None:
            held.version = None
        self._grant(member)

    def withdraw_leases(self, member: LocalMember) -> None:
        """Drop the versions in the memory of a client that has gone."""
        for version in list(member.leases):
            self.withdraw(member, version, "its client is gone")

    def release(self, members: Iterable[LocalMember], swap: str) -> None:
        """End a swap's reads: its slots may be overwritten, its leases end."""
        for member in list(members):
            for version, lease in list(member.leases.items()):
                if swap in lease.readers:
                    lease.readers.discard(swap)
                    self._end_lease(member, version)
            for slot in member.slots:
                slot.readers.discard(swap)
                slot.compared.discard(swap)
            member.seeding.discard(swap)
            self._grant(member)

    def slots_freed(self, members: Iterable[LocalMember]) -> None:
        """Grant slots that nothing is compared with any more."""
        for member in list(members):
            self._grant(member)

    def end_unread(self, members: Iterable[LocalMember], version: int) -> None:
        """End leases of `version` that its swap did not read because it read their replicas instead."""
        for member in members:
            if version in member.leases:
                self._end_lease(member, version)

    def expire(self, members: Iterable[LocalMember], now: float) -> None:
        """Fail requests that waited too long for a slot, naming what holds the slots."""
        for member in members:
            for waiting in [w for w in member.waiting if w.deadline <= now]:
                member.waiting.remove(waiting)
                error = DeadlineExceeded(
                    f"{member.id}: no snapshot slot became free for version {waiting.version} in time; "
                    f"{_why_not(member)}; wait for them, or register with more slots"
                )
                failure = local.Failure(code=error.code, message=str(error))
                self._reply(waiting.session, waiting.request, failure)

    def _grant(self, member: LocalMember) -> None:
        """Grant waiting publishes in order, while slots are free."""
        while member.waiting:
            index = member.free_slot()
            if index is None and member.free_slot(even_compared=True) is not None:
                self._swaps.end_comparing(member)
                index = member.free_slot()
            if index is None:
                return
            waiting = member.waiting.pop(0)
            member.may_drop, member.lagging = frozenset(), ""  # others may need the remaining versions
            slot = member.slots[index]
            old, slot.version, slot.writing = slot.version, None, waiting.version
            if old is not None:
                self._link.say(cluster.ShardWithdrawn(member=member.id, version=old))
            self._reply(waiting.session, waiting.request, local.SlotGranted(slot=index))

    def _announce(
        self, member: LocalMember, session: int, request: int, version: int, reason: str, is_anew: bool
    ) -> None:
        before = Before(member.newest, member.mode, member.mode_reason)
        member.newest = version
        member.mode, member.mode_reason = member.mode_of(version), reason
        published = cluster.ShardPublished(member.id, version, member.mode, reason, is_anew)
        self._link.ask(session, request, published, Announced(member, version, before))

    def announced(self, session: int, request: int, about: Announced, reply: Message) -> None:
        """Handle the coordinator's answer about a version; take a refused one back."""
        if isinstance(reply, local.Failure):
            if reply.code == TransportError.code:
                # a lost coordinator may have recorded the version, and the next one will be told of it: it is published
                reply = local.Done()
            else:
                self._take_back(about.member, about.version, about.before)
        self._reply(session, request, reply)

    def _take_back(self, member: LocalMember, version: int, before: Before) -> None:
        """Take back a version that the coordinator refused. Nobody else knows it, so its number can be used again."""
        if member.newest == version:
            member.newest, member.mode, member.mode_reason = before.newest, before.mode, before.mode_reason
        member.leases.pop(version, None)
        for slot in member.slots:
            slot.version = None if slot.version == version else slot.version
        self._grant(member)

    def _end_lease(self, member: LocalMember, version: int) -> None:
        if member.leases[version].readers:
            return
        del member.leases[version]
        self._link.say(cluster.ShardWithdrawn(member=member.id, version=version))
        if member.session is not None:
            self._reply(member.session, 0, local.LeaseEnded(member=member.id, version=version))


def _check_room(member: LocalMember, what: str, count: int) -> None:
    if count >= MAX_OPEN:
        raise RefusedError(f"{member.id}: has {count} {what} already, at most {MAX_OPEN}; end some first")


def _why_not(member: LocalMember) -> str:
    """Return why no slot of a member can be overwritten."""
    found = []
    if reading := sorted({s for slot in member.slots for s in slot.readers | slot.compared}):
        found.append(f"swaps {reading} are still reading")
    if writing := sorted(slot.writing for slot in member.slots if slot.writing is not None):
        found.append(f"versions {writing} are being copied in")
    if member.registration.world_size > 1 and any(not slot.readers for slot in member.slots):
        found.append(member.lagging or "the coordinator has not said what the other source ranks need")
    return "; ".join(found)


def _check_newer(member: LocalMember, version: int) -> None:
    if version < member.first:
        raise RefusedError(
            f"model {member.registration.model!r} source rank {member.registration.rank}: version {version} was live "
            "with other contents, or may have been, before this registration; publish "
            f"{max(member.first, member.newest + 1)} or above (source.next_version)"
        )
    if version <= member.newest:
        raise RefusedError(
            f"model {member.registration.model!r} source rank {member.registration.rank}: version {version} is "
            f"not newer than {member.newest}, which was published before; versions only go up"
        )
