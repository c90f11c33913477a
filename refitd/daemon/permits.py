"""Which of this node's target ranks may serve, and until when: permits that the coordinator's answers renew."""

from __future__ import annotations

from collections.abc import Callable

from refitd.buffers.permits import SLOTS
from refitd.daemon.actions import Instruction, SetPermit
from refitd.daemon.members import LocalMember, PermitSlot
from refitd.errors import RefusedError

# Heartbeats whose answers are waited for; older ones say nothing any more.
MAX_SENT = 64


class Permits:
    """Allots permits and renews them. Instructions go to `out`.

    A coordinator that answers a heartbeat has seen this node alive after that heartbeat was sent, so that permits last
    from the sending, not from the answer.
    """

    def __init__(self, members: dict[str, LocalMember], out: Callable[[Instruction], None]) -> None:
        self._members = members
        self._out = out
        self._lasts_s = 0.0  # what the coordinator grants
        self._until = 0.0
        self._boot = ""  # of the coordinator that grants it
        self._sent: dict[int, float] = {}  # heartbeats: number -> when
        self._free = list(range(SLOTS - 1, -1, -1))
        self._tokens = 0
        self._written: dict[str, float] = {}  # by member

    def sent(self, number: int, now: float) -> None:
        """A heartbeat is on its way to the coordinator."""
        self._sent[number] = now
        for old in list(self._sent)[:-MAX_SENT]:
            del self._sent[old]

    def answered(self, number: int) -> None:
        """The coordinator has answered a heartbeat."""
        since = self._sent.pop(number, None)
        if since is not None and self._lasts_s:
            self._until = max(self._until, since + self._lasts_s)
            for member in self._members.values():
                self.renew(member)

    def granted(self, boot: str, lasts_s: float) -> None:
        """A coordinator has taken the node in: ranks that it has not agreed to yet may not serve by its word."""
        self._boot, self._lasts_s = boot, lasts_s

    def check_free(self) -> None:
        """Refuse one more target rank where there is no slot for it.

        Raises:
            RefusedError: all slots are taken.
        """
        if not self._free:
            raise RefusedError(f"this node has {SLOTS} registered target ranks already; close some first")

    def allot(self, member: LocalMember) -> None:
        """Give a target rank a slot, of which there is one (`check_free`); it may not serve yet."""
        self._tokens += 1
        member.permit = PermitSlot(self._free.pop(), self._tokens)
        member.on_move = self.renew
        self._write(member, 0.0)

    def withdraw(self, member: LocalMember) -> None:
        """A rank is registered no more: its process may not serve, whatever it does."""
        if member.permit is not None:
            self._write(member, 0.0)
            self._free.append(member.permit.slot)
            member.permit, member.on_move = None, lambda _: None
            self._written.pop(member.id, None)

    def renew(self, member: LocalMember) -> None:
        """Let a rank serve for as long as it may by now."""
        if member.permit is not None:
            may = member.state.may_serve and member.boot == self._boot
            until = self._until if may else 0.0
            if until != self._written.get(member.id):
                self._write(member, until)

    def _write(self, member: LocalMember, until: float) -> None:
        assert member.permit is not None
        self._written[member.id] = until
        self._out(SetPermit(member.permit.slot, member.permit.token, until))
