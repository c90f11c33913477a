"""Permits of this node's target ranks: until when each may serve. The coordinator's answers renew them."""

from __future__ import annotations

from collections.abc import Callable

from refitd.buffers.permits import SLOTS
from refitd.daemon.actions import Instruction, SetPermit
from refitd.daemon.members import LocalMember, PermitSlot
from refitd.errors import RefusedError

# Heartbeats whose answers are still awaited; older ones are dropped.
MAX_SENT = 64


class Permits:
    """Allots permits and renews them. Instructions go to `out`.

    An answer proves only that this node was alive when it sent the heartbeat. So a permit lasts from the sending, not
    from the answer.

    A rank that the present coordinator has not admitted yet keeps the permit of the previous coordinator, which is not
    prolonged. The present coordinator waits for such permits, or for their ranks to register, before it decides.
    """

    def __init__(self, members: dict[str, LocalMember], out: Callable[[Instruction], None]) -> None:
        self._members = members
        self._out = out
        self._lasts_s = 0.0  # lease granted by the coordinator
        self._until = 0.0
        self._boot = ""  # of the coordinator that granted it
        self._sent: dict[int, float] = {}  # heartbeat number -> time sent
        self._free = list(range(SLOTS - 1, -1, -1))
        self._tokens = 0
        self._written: dict[str, float] = {}  # by member: the last deadline written

    def sent(self, number: int, now: float) -> None:
        """Record that a heartbeat was sent."""
        self._sent[number] = now
        for old in list(self._sent)[:-MAX_SENT]:
            del self._sent[old]

    def answered(self, number: int) -> None:
        """Extend all permits: the coordinator has answered a heartbeat."""
        since = self._sent.pop(number, None)
        if since is not None and self._lasts_s:
            self._until = max(self._until, since + self._lasts_s)
            for member in self._members.values():
                self.renew(member)

    def granted(self, boot: str, lasts_s: float) -> None:
        """Store the lease of a coordinator that accepted this node; it prolongs permits of ranks that it admits."""
        self._boot, self._lasts_s = boot, lasts_s

    def check_free(self) -> None:
        """Check that one more target rank can get a slot.

        Raises:
            RefusedError: all slots are taken.
        """
        if not self._free:
            raise RefusedError(f"this node has {SLOTS} registered target ranks already; close some first")

    def allot(self, member: LocalMember) -> None:
        """Give a target rank a free slot (see `check_free`); it may not serve yet."""
        self._tokens += 1
        member.permit = PermitSlot(self._free.pop(), self._tokens)
        member.on_move = self.renew
        self._write(member, 0.0)

    def withdraw(self, member: LocalMember) -> None:
        """Revoke the permit of a rank that is no longer registered; its process may not serve."""
        if member.permit is not None:
            self._write(member, 0.0)
            self._free.append(member.permit.slot)
            member.permit, member.on_move = None, lambda _: None
            self._written.pop(member.id, None)

    def refuse(self, member: LocalMember) -> None:
        """Revoke the permit of a rank that the present coordinator has refused."""
        if member.permit is not None:
            self._write(member, 0.0)

    def renew(self, member: LocalMember) -> None:
        """Write a rank's present permit."""
        if member.permit is None:
            return
        written = self._written.get(member.id, 0.0)
        until = self._until if member.boot == self._boot else written
        if not member.state.may_serve:
            until = 0.0
        if until != written:
            self._write(member, until)

    def _write(self, member: LocalMember, until: float) -> None:
        assert member.permit is not None
        self._written[member.id] = until
        self._out(SetPermit(member.permit.slot, member.permit.token, until))
