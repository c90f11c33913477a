"""Versions of this node's sources: granted slots, snapshots, leases, and when they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from refitd.daemon.members import Lease, Member, WaitingPublish, lease_places
from refitd.daemon.swaps import LocalSwaps
from refitd.errors import DeadlineExceeded, RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.base import Message

# Of each member: slots asked for, versions lent.
MAX_OPEN = 16


class Forward(Protocol):
    """Sends a client's request on to the coordinator and calls `then` with the reply."""

    def __call__(self, session: int, request: int, message: Message, then: Callable[[Message], None]) -> None:
        """Forward."""


class Publishing:
    """What clients publish, lend and take back.

    `say(0, message)` tells the coordinator, `reply(session, request, message)` a client.
    """

    def __init__(
        self,
        swaps: LocalSwaps,
        say: Callable[[int, Message], None],
        reply: Callable[[int, int, Message], None],
        forward: Forward,
    ) -> None:
        self._swaps = swaps
        self._say = say
        self._reply = reply
        self._forward = forward

    def begin(self, member: Member, session: int, request: int, version: int, deadline: float) -> None:
        """Grant a slot for `version`, at once or when a swap has finished reading one.

        Raises:
            RefusedError: the version is not newer, or the source has no slots.
        """
        _check_newer(member, version)
        if not member.slots:
            raise RefusedError(f"{member.id}: its tensors live in an arena and are lent, not copied; use lend()")
        _check_room(member, "requests for a snapshot slot", len(member.waiting))
        member.waiting.append(WaitingPublish(session, request, version, deadline))
        self._grant(member)

    def publish(self, member: Member, session: int, request: int, message: local.Publish) -> None:
        """Take a finished snapshot over.

        Raises:
            RefusedError: the slot was not granted for this version.
        """
        version, index = message.version, message.slot
        slot = member.slots[index] if index < len(member.slots) else None
        if slot is None or slot.writing != version:
            raise RefusedError(f"{member.id}: slot {index} was not granted for version {version}; publish again")
        slot.writing = None
        slot.version = version
        self._announce(member, session, request, version, message.why)

    def lend(self, member: Member, session: int, request: int, message: local.Lend) -> None:
        """Take live tensors as a version.

        Raises:
            RefusedError: the version is not newer, or the addresses do not fit the tensors.
        """
        version = message.version
        _check_newer(member, version)
        _check_room(member, "versions that are lent", len(member.leases))
        member.leases[version] = Lease(version, lease_places(member, message.addresses))
        self._announce(member, session, request, version, message.why)

    def withdraw(self, member: Member, version: int, reason: str) -> None:
        """Drop a version. When this returns nothing reads it any more; one that is gone already is no error."""
        lease = member.leases.get(version)
        held = next((s for s in member.slots if s.version == version), None)
        if lease is None and held is None:
            return
        self._say(0, cluster.ShardWithdrawn(member=member.id, version=version))
        self._swaps.stop_reading(member, version, reason)
        if lease is not None:
            del member.leases[version]
        elif held is not None:
            held.version = None
        self._grant(member)

    def withdraw_leases(self, member: Member) -> None:
        """Drop everything that lives in the memory of a client that has gone."""
        for version in list(member.leases):
            self.withdraw(member, version, "its client is gone")

    def release(self, members: Iterable[Member], swap: str) -> None:
        """The swap reads nothing any more: slots may be overwritten, leases end."""
        for member in list(members):
            for version, lease in list(member.leases.items()):
                if swap in lease.readers:
                    lease.readers.discard(swap)
                    self._end_lease(member, version)
            for slot in member.slots:
                slot.readers.discard(swap)
            self._grant(member)

    def expire(self, members: Iterable[Member], now: float) -> None:
        """Tell those who have waited too long for a slot who is reading."""
        for member in members:
            for waiting in [w for w in member.waiting if w.deadline <= now]:
                member.waiting.remove(waiting)
                reading = sorted({s for slot in member.slots for s in slot.readers})
                error = DeadlineExceeded(
                    f"{member.id}: no snapshot slot became free for version {waiting.version} in time; swaps "
                    f"{reading} are still reading; wait for them, or register with more slots"
                )
                failure = local.Failure(code=error.code, message=str(error))
                self._reply(waiting.session, waiting.request, failure)

    def _grant(self, member: Member) -> None:
        """Give the first waiting publish a slot, if one is free."""
        while member.waiting:
            index = member.free_slot()
            if index is None:
                return
            waiting = member.waiting.pop(0)
            slot = member.slots[index]
            old, slot.version, slot.writing = slot.version, None, waiting.version
            if old is not None:
                self._say(0, cluster.ShardWithdrawn(member=member.id, version=old))
            self._reply(waiting.session, waiting.request, local.SlotGranted(slot=index))

    def _announce(self, member: Member, session: int, request: int, version: int, why: str) -> None:
        member.newest = version
        member.way, member.why = member.way_of(version), why

        def answer(reply: Message) -> None:
            self._reply(session, request, reply)

        published = cluster.ShardPublished(member=member.id, version=version, way=member.way, why=why)
        self._forward(session, request, published, answer)

    def _end_lease(self, member: Member, version: int) -> None:
        if member.leases[version].readers:
            return
        del member.leases[version]
        self._say(0, cluster.ShardWithdrawn(member=member.id, version=version))
        if member.session is not None:
            self._reply(member.session, 0, local.LeaseEnded(member=member.id, version=version))


def _check_room(member: Member, what: str, count: int) -> None:
    if count >= MAX_OPEN:
        raise RefusedError(f"{member.id}: has {count} {what} already, at most {MAX_OPEN}; end some first")


def _check_newer(member: Member, version: int) -> None:
    if version <= member.newest:
        raise RefusedError(
            f"model {member.registration.model!r} source rank {member.registration.rank}: version {version} is "
            f"not newer than {member.newest}, which was published before; versions only go up"
        )
