"""Clients' requests to a daemon, and the release of a client's resources when its session ends."""

from __future__ import annotations

from refitd.buffers.permits import PAGE_ARENA, PAGE_BYTES
from refitd.daemon.actions import Follow, Prepared, TimePull, TookOver
from refitd.daemon.members import Arena, LocalMember
from refitd.daemon.parts import Parts
from refitd.daemon.pending import ClientArena, PassedOn, WantedArenas
from refitd.daemon.registration import PART_OF_TIMEOUT
from refitd.daemon.retained import is_restoring
from refitd.daemon.sessions import ClientSession
from refitd.errors import ProtocolError, RefitdError, RefusedError
from refitd.protocol import cluster, control, local, sidecar
from refitd.protocol.roles import check_role
from refitd.protocol.texts import check_names

# Limits on what one measurement of a client's memory reads: it takes some milliseconds.
MAX_MEASURED_BYTES = 64 << 20
MAX_MEASURED_ROWS = 1 << 19


class ClientRequests:
    """Routes the requests of open sessions to the parts of the state. A refused request changes nothing."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def may_fetch(self, session: int, arena: int, write: bool) -> Arena:
        """Return the arena whose descriptor this session may have.

        Raises:
            RefusedError: it may not.
        """
        parts = self._parts
        if arena == PAGE_ARENA and not write and session in parts.sessions:
            members = (parts.members[name] for name in parts.sessions[session].members)
            if any(member.permit is not None for member in members):
                return Arena(PAGE_ARENA, PAGE_BYTES, "permits", session, write=False)
        return parts.arenas.may_fetch(session, arena, write)

    def check_given(self, session: int, nbytes: int) -> None:
        """Check that an arena may be taken back from a client.

        Raises:
            RefusedError: it has no session, or not the role.
            ArenaError: the node's limit leaves no room.
        """
        parts = self._parts
        found = parts.sessions.get(session)
        if found is None:
            raise RefusedError("no session is open here; say Hello first")
        user = f"the user of pid {found.pid}"
        check_role(sidecar.GiveArena(nbytes=nbytes), found.roles, user, "node.roles of this daemon")
        parts.arenas.check_room(nbytes)

    def said(
        self, session: ClientSession, request: int, message: local.ClientRequest, prepared: Prepared | None = None
    ) -> None:
        """Handle a request, or answer with the reason why it is refused."""
        parts = self._parts
        try:
            self._request(session, request, message, prepared)
        except RefitdError as exc:
            parts.log("refused", session=session.id, message=type(message).__name__, reason=str(exc))
            parts.fail(session.id, request, exc)

    def _request(
        self, session: ClientSession, request: int, message: local.ClientRequest, prepared: Prepared | None
    ) -> None:
        parts = self._parts
        check_names(message)
        check_role(message, session.roles, f"the user of pid {session.pid}", "node.roles of this daemon")
        session.check_room(message, parts.link.count(session.id) + parts.arenas.waiting(session.id))
        match message:
            case local.CreateArena():
                self._create_arena(session, request, message)
            case local.FreeArena(arena):
                self._free_arena(session, arena)
                parts.reply(session.id, request, local.Done())
            case local.RegisterSource() | local.RegisterTarget():
                parts.refused.asked(session, request, message)
                parts.registrations.register(session, request, message, prepared)
            case control.RegisterController():
                parts.controllers.register(session, request, message)
            case control.Controlled():
                parts.controllers.said(session, message)
            case local.Deregister(member) if member in parts.controllers:
                parts.controllers.remove(session, member, "its client has closed it")
                parts.reply(session.id, request, local.Done())
            case local.Deregister(member):
                parts.drop_member(self._own(session, member), "its client has closed it")
                parts.reply(session.id, request, local.Done())
            case local.BeginPublish(member, version, timeout_s):
                deadline = parts.now + timeout_s
                parts.publishing.begin(self._own(session, member), session.id, request, version, deadline)
            case local.Publish(member):
                parts.publishing.publish(self._own(session, member), session.id, request, message)
            case local.MeasurePull(member, spans):
                self._measure(session, request, self._own(session, member), spans)
            case local.Lend(member):
                parts.publishing.lend(self._own(session, member), session.id, request, message)
            case local.Withdraw(member, version):
                parts.publishing.withdraw(self._own(session, member), version, "it was withdrawn")
                parts.reply(session.id, request, local.Done())
            case local.Paused(swap, member):
                parts.commits.paused(swap, self._own(session, member))
            case local.StepReached(_, member):
                parts.commits.step_reached(self._own(session, member), message)
            case local.CommitQuiet(swap, member):
                parts.commits.quiet(swap, self._own(session, member))
            case local.CommitDone(swap, member, paused_s, exchanged):
                found = self._own(session, member)
                if parts.commits.committed(swap, found, paused_s, exchanged=exchanged):
                    parts.out.append(Follow(TookOver(found.id, exchanged)))
            case local.Restored(member):
                parts.registrations.restored(session, request, self._own(session, member))
            case local.Suspend(member):
                parts.registrations.suspend(session, request, self._own(session, member))
            case local.Wake(member, is_lost):
                parts.registrations.wake(session, request, self._own(session, member), is_lost=is_lost)
            case local.LiveDigests(member) | local.LiveCompared(member):
                parts.proofs.client_said(self._own(session, member), message)
            case local.CommitFailed(swap, member, reason, exchanged):
                parts.commits.failed(swap, self._own(session, member), reason, exchanged=exchanged)
            case _ if isinstance(message, local.ForwardedRequest):
                parts.link.check()
                if isinstance(message, local.GetStatus):
                    parts.link.say(parts.update())  # so that the status is current
                parts.link.ask(session.id, request, message, PassedOn())
            case _:
                raise ProtocolError(f"{type(message).__name__} is not expected in an open session")

    def _measure(
        self, session: ClientSession, request: int, member: LocalMember, spans: tuple[tuple[int, int, int], ...]
    ) -> None:
        nbytes, rows = sum(rows * row for _, rows, row in spans), sum(rows for _, rows, _ in spans)
        if not 0 < nbytes <= MAX_MEASURED_BYTES or rows > MAX_MEASURED_ROWS:
            raise RefusedError(
                f"{member.id}: {nbytes} bytes in {rows} rows to measure, the limits are {MAX_MEASURED_BYTES} bytes "
                f"and {MAX_MEASURED_ROWS} rows"
            )
        self._parts.out.append(TimePull(session.id, request, member.pid, spans))

    def _own(self, session: ClientSession, member_id: str) -> LocalMember:
        member = self._parts.members.get(member_id)
        if member is None or member.session != session.id:
            raise RefusedError(f"{member_id!r} is not a registration of this session; register again")
        return member

    def closed(self, session_id: int, reason: str) -> None:
        """End a session; keep what its sources have published, and its targets for engines that return."""
        parts = self._parts
        session = parts.sessions.pop(session_id, None)
        parts.refused.closed(session_id)
        if session is None:
            return
        is_lost = bool(session.members or session.controllers) and not session.leaves
        said = "its client has said goodbye" if session.leaves else reason
        lost = "yes" if is_lost else ""
        parts.log("session-closed", session=session_id, pid=session.pid, name=session.name, reason=said, lost=lost)
        for controller in sorted(session.controllers):
            parts.controllers.remove(session, controller, reason)
        for member_id in sorted(session.members):
            member = parts.members[member_id]
            parts.publishing.withdraw_leases(member)
            parts.swaps.stop_seeding(member, reason)
            if member.is_source and member.held():
                # published versions outlive the trainer: the slots belong to the daemon
                member.session = None
                member.waiting.clear()
                for slot in member.slots:
                    slot.writing = None
                    parts.arenas[slot.arena].session = None
                parts.link.say(cluster.DetachShard(member=member_id, reason=reason))
            else:
                kept = not session.leaves and (not member.flips or parts.proofs.can_judge(member))
                kept = kept and parts.retained.keep(member, session.uid, parts.now)
                if kept and member.flips and not is_restoring(member):  # its live arena goes with the session
                    parts.exchange(member.live_arena, member.staging)
                    member.content = ()
                parts.drop_member(member, reason, keep=kept, tell=not is_restoring(member))
        for arena in sorted(session.arenas):
            parts.arenas.free({arena})

    def _create_arena(self, session: ClientSession, request: int, asked: local.CreateArena) -> None:
        labels = ((asked.nbytes, asked.label or session.name or "client"),)
        within_s = PART_OF_TIMEOUT * asked.timeout_s
        self._parts.arenas.ask(WantedArenas(session.id, request, labels, ClientArena(), asked.device, within_s))

    def _free_arena(self, session: ClientSession, arena: int) -> None:
        parts = self._parts
        if arena not in session.arenas:
            raise RefusedError(f"arena {arena} is not one that this client has allocated, or it is free already")
        for member in parts.members.values():
            lent = [lease.places for lease in member.leases.values()]
            if any(arena in places.arenas() for places in (member.live, *lent)):
                raise RefusedError(f"arena {arena} holds tensors of {member.id}; close that registration first")
        session.arenas.discard(arena)
        parts.arenas.free({arena})
