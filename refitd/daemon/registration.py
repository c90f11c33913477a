"""Registration of ranks: allocation, the coordinator's consent, return of retained targets, undo on refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from msgspec import structs

from refitd.daemon.actions import Instruction, Prepared, ToClient
from refitd.daemon.arenas import LocalArenas
from refitd.daemon.coordinator_link import CoordinatorLink
from refitd.daemon.members import LocalMember, Slot, member_id, new_member
from refitd.daemon.pending import Asked, Described, Introduced, MemberArenas, Readmitted, Returned, Slept, WantedArenas
from refitd.daemon.permits import Permits
from refitd.daemon.retained import RetainedTargets, is_restoring
from refitd.daemon.sessions import ClientSession
from refitd.daemon.target_state import ContentRefused, ContentRestored, Live, Suspended, Woken, WokenEmpty
from refitd.daemon.verification import Proofs
from refitd.errors import IllegalTransition, RefitdError, RefusedError, TransportError
from refitd.events import Log
from refitd.protocol import cluster, local
from refitd.protocol.base import Message, clipped
from refitd.states import ProofState

# Share of the client's timeout within which arenas must be made: the client hears which are late before it gives up.
PART_OF_TIMEOUT = 0.9

MAX_NAMED = 3  # differences that an error lists
MAX_SLOTS = 16  # snapshots of one source rank


class LocalRegistrations:
    """Registers ranks. Instructions go to `out`; `drop(member, reason, tell, keep)` ends a registration."""

    def __init__(
        self,
        node: str,
        sessions: Mapping[int, ClientSession],
        members: dict[str, LocalMember],
        arenas: LocalArenas,
        retained: RetainedTargets,
        permits: Permits,
        proofs: Proofs,
        link: CoordinatorLink,
        out: Callable[[Instruction], None],
        drop: Callable[[LocalMember, str, bool, bool], None],
    ) -> None:
        self._node = node
        self._sessions = sessions
        self._members = members
        self._arenas = arenas
        self._retained = retained
        self._permits = permits
        self._proofs = proofs
        self._link = link
        self._out = out
        self._drop = drop
        self._described: set[str] = set()  # digests of the shards that this coordinator has been sent
        self._refused: dict[str, str] = {}  # ranks that this coordinator has not admitted -> why, as logged

    def prepare(
        self, session: int, pid: int, message: local.RegisterSource | local.RegisterTarget
    ) -> Callable[[], Prepared]:
        """Return a function that checks a registration on another thread; it reads no state that changes."""
        arenas = {number: arena for number, arena in self._arenas.items() if arena.session == session}

        def look() -> Prepared:
            try:
                return new_member(message.model, session, pid, message, arenas)
            except RefitdError as exc:
                return exc

        return look

    # --- a new rank ---------------------------------------------------------------------------------------

    def register(
        self,
        session: ClientSession,
        request: int,
        message: local.RegisterSource | local.RegisterTarget,
        prepared: Prepared | None,
    ) -> None:
        """Register a rank: make its arenas, announce it to the coordinator, then answer the client.

        Raises:
            RefusedError, ProtocolError: the registration is impossible.
            ArenaError: its arenas exceed the node's limit.
            TransportError: there is no coordinator.
        """
        self._link.check()
        if prepared is None or not {place.arena for place in message.live} <= self._arenas.keys():
            prepared = new_member(message.model, session.id, session.pid, message, self._arenas)
        if isinstance(prepared, RefitdError):
            raise prepared
        member, nbytes = prepared
        if isinstance(message, local.RegisterSource):
            if not message.live and not 1 <= message.slots <= MAX_SLOTS:
                raise RefusedError(f"model {message.model!r}: slots must be 1..{MAX_SLOTS}, found {message.slots}")
            who, sizes = "source", {f"slot{i}": nbytes for i in range(0 if message.live else message.slots)}
        else:
            who, sizes = message.replica, {} if message.in_place else {"staging0": nbytes}
            if member.landing_bytes:
                sizes["landing0"] = member.landing_bytes
            self._permits.check_free()
        member.id = member_id(message.model, f"{who}:{message.rank}", self._node, self._link.next_number())
        given = self._given(session, message, nbytes)
        for what in list(sizes)[: len(given)]:
            del sizes[what]
        returns = isinstance(message, local.RegisterTarget) and message.returns
        retained = None if returns else self._retained.fitting(member, session.uid)
        if retained is not None and (not member.flips or self._arenas[retained.member.staging].nbytes == nbytes):
            self._retained.give(retained, member)
            self._return(session, request, member, nbytes, PART_OF_TIMEOUT * message.timeout_s)
            return
        labels = tuple((size, f"{member.id}/{what}") for what, size in sizes.items())
        wanted = WantedArenas(
            session.id,
            request,
            labels,
            MemberArenas(member, nbytes),
            message.device,
            PART_OF_TIMEOUT * message.timeout_s,
        )
        if labels:
            self._arenas.ask(wanted)
        else:
            self.arenas_made(wanted, ())

    def _given(
        self, session: ClientSession, message: local.RegisterSource | local.RegisterTarget, nbytes: int
    ) -> tuple[int, ...]:
        """Return the arenas that a rank has given back, to be its slots or its staging arena.

        Raises:
            RefusedError: they are not this client's, are in use, have another size, or too few.
        """
        who = f"model {message.model!r} rank {message.rank}"
        if isinstance(message, local.RegisterSource):
            versions = [slot.version for slot in message.given if slot.version is not None]
            newest = -1 if message.newest is None or not message.run else message.newest
            if len(set(versions)) < len(versions) or max(versions, default=-1) > newest:
                raise RefusedError(
                    f"{who}: its slots hold {versions}, and {newest} of run {message.run!r} is the newest"
                )
            given, wanted = tuple(slot.arena for slot in message.given), 0 if message.live else message.slots
        else:
            given, wanted = () if message.given is None else (message.given,), 0 if message.in_place else 1
        if not given:
            return ()
        if len(given) != wanted or len(set(given)) < len(given):
            raise RefusedError(f"{who}: {len(given)} arenas are given back, {wanted} different ones are needed")
        is_read = isinstance(message, local.RegisterTarget) and not message.flips  # the process only reads this arena
        used = {place.arena for place in message.live}.union(*(m.live.arenas() for m in self._members.values()))
        for number in given:
            arena = self._arenas.get(number)
            if arena is None or number not in session.arenas or number in used:
                raise RefusedError(f"{who}: arena {number} is not one that this client has given back, or it is in use")
            if arena.nbytes != nbytes or arena.device != message.device or not (arena.write or is_read):
                raise RefusedError(f"{who}: arena {number} has {arena.nbytes} bytes, {nbytes} are needed")
        return given

    def ask_first(self, wanted: WantedArenas, purpose: MemberArenas) -> None:
        """Ask the coordinator whether it would accept a rank before retained targets are freed for it."""
        self._tell(wanted.session, wanted.request, purpose.member, Asked(wanted, purpose), is_question=True)

    def asked(self, about: Asked, reply: Message) -> None:
        """Handle the coordinator's answer to `ask_first`."""
        wanted, purpose = about.wanted, about.purpose
        if isinstance(reply, local.Failure):
            self._reply(wanted.session, wanted.request, reply)
        elif wanted.session in self._sessions:
            admitted = MemberArenas(purpose.member, purpose.nbytes, is_admitted=True)
            try:
                self._arenas.ask(
                    WantedArenas(
                        wanted.session, wanted.request, wanted.wanted, admitted, wanted.device, wanted.within_s
                    )
                )
            except RefitdError as exc:
                self._reply(wanted.session, wanted.request, local.Failure(code=exc.code, message=str(exc)))

    def arenas_made(self, wanted: WantedArenas, arenas: tuple[int, ...]) -> None:
        """Enter a new rank whose arenas now exist, and announce it to the coordinator.

        Raises:
            RefusedError: it has become impossible meanwhile; the arenas are not taken.
        """
        purpose = wanted.purpose
        assert isinstance(purpose, MemberArenas)
        member, source = purpose.member, purpose.member.is_source
        if not source:
            self._permits.check_free()
        if freed := member.live.arenas() - self._arenas.keys():
            raise RefusedError(f"{member.id}: arenas {sorted(freed)} have been freed, which hold its tensors")
        session = self._sessions[wanted.session]
        given = self._given(session, member.registration, purpose.nbytes)
        for index, (arena, (size, label)) in enumerate(zip(arenas, wanted.wanted, strict=True), len(given)):
            self._arenas.take(
                arena,
                size,
                label,
                wanted.session,
                write=source or (member.flips and index == 0),  # only workers use a landing arena
                workers_write=not source,
                device=wanted.device,
            )
        for index, arena in enumerate(given):
            session.arenas.discard(arena)
            label = f"{member.id}/{'slot' if source else 'staging'}{index}"
            self._arenas.rename(arena, label, write=source or member.flips, workers_write=not source)
        arenas = given + arenas
        if isinstance(member.registration, local.RegisterSource):
            r = member.registration
            versions = [slot.version for slot in r.given] or [None] * len(arenas)
            member.slots = [Slot(arena, version) for arena, version in zip(arenas, versions, strict=True)]
            member.run, member.newest = r.run, -1 if r.newest is None else r.newest
        else:
            member.staging, member.landing = (*arenas, -1, -1)[:2]
            self._permits.allot(member)
        self._enter(session, member)
        self._tell(wanted.session, wanted.request, member, Introduced(member, arenas, purpose.nbytes))

    def introduced(self, session: int, request: int, about: Introduced, reply: Message) -> None:
        """Handle the coordinator's answer about a new rank."""
        member = about.member
        if not isinstance(reply, local.Done | cluster.SourceAdmitted):
            if session in self._sessions:
                self._sessions[session].members.discard(member.id)
            self._members.pop(member.id, None)
            self._permits.withdraw(member)
            self._arenas.free(set(about.arenas))
            self._reply(session, request, reply)
            return
        if member.id not in self._members:
            return  # its client has left meanwhile
        self._agreed(member)
        self._replace_detached(member)
        self._arenas.free(self._retained.replaced_by(member))
        if isinstance(reply, cluster.SourceAdmitted):
            member.run, member.first, member.newest = reply.run, reply.next_version, reply.next_version - 1
        done: Message
        if member.is_source:
            first = max(1, member.first)
            done = local.SourceRegistered(member.id, about.arenas, about.nbytes, next_version=first, run=member.run)
        else:
            done = self._registered(member, about.nbytes, member.state.version, about.not_restored)
        self._reply(session, request, done)

    def _replace_detached(self, member: LocalMember) -> None:
        r = member.registration
        for other in list(self._members.values()):
            o = other.registration
            same = (o.model, o.rank, other.replica) == (r.model, r.rank, member.replica)
            if other is not member and other.session is None and same:
                self._drop(other, "its rank has registered again", False, False)

    # --- a rank that returns ------------------------------------------------------------------------------

    def _return(self, session: ClientSession, request: int, member: LocalMember, nbytes: int, within_s: float) -> None:
        """Give an engine its predecessor's staging arena; the coordinator is told once the engine has copied it.

        An engine that flips could write what it leaves: that is first compared with the digests of its version.
        """
        for arena in member.arenas():
            self._arenas[arena].session = session.id
        self._enter(session, member)
        self._permits.allot(member)
        about = Introduced(member, tuple(member.arenas()), nbytes)
        if not (member.flips and member.verifies):
            self._give_back(session.id, request, about)
            return

        def compared(found: cluster.MemberChecked) -> None:
            if self._members.get(member.id) is not member:
                return  # its client has left meanwhile
            if found.state is ProofState.PROVEN:
                self._give_back(session.id, request, about)
            else:
                self._refuse_content(session.id, request, about, found)

        self._proofs.check_retained(member, self._link.now, within_s, compared)

    def _give_back(self, session: int, request: int, about: Introduced) -> None:
        member = about.member
        self._out(Log("returned", {"member": member.id, "version": member.state.holds}))
        self._reply(session, request, self._registered(member, about.nbytes, member.state.holds))

    def _refuse_content(self, session: int, request: int, about: Introduced, found: cluster.MemberChecked) -> None:
        """Introduce a rank as new, in its predecessor's arena: the arena does not hold the version that it should."""
        member = about.member
        where = ", ".join(f"{each.parameter}{each.slice}" for each in found.differences[:MAX_NAMED])
        what = f"version {member.state.holds}, which its predecessor left, is not restored: {found.reason}"
        reason = clipped(f"{what} ({where})" if where else what)
        self._out(Log("not-restored", {"member": member.id, "version": member.state.holds, "reason": reason}))
        member.move(ContentRefused())
        member.proof = None
        self._tell(session, request, member, replace(about, not_restored=reason))

    def restored(self, session: ClientSession, request: int, member: LocalMember) -> None:
        """Announce a returning engine to the coordinator: it has copied what its predecessor held.

        Raises:
            IllegalTransition: it had nothing to restore.
            RefusedError: it has not been given anything yet.
        """
        if is_restoring(member) and self._proofs.is_checking(member):
            raise RefusedError(f"{member.id}: what it restores is still being compared")
        member.move(ContentRestored())
        self._tell(session.id, request, member, Returned(member, session.uid))

    def returned(self, session: int, request: int, about: Returned, reply: Message) -> None:
        """Handle the coordinator's answer about a returning rank; a refused one is retained again."""
        member = about.member
        if member.id not in self._members:
            return
        if isinstance(reply, local.Done):
            self._agreed(member)
            self._proofs.restored(member)
        else:
            kept = self._retained.keep(member, about.uid, self._link.now)
            self._drop(member, "the coordinator has not taken it in", False, kept)
        self._reply(session, request, reply)

    # --- a rank that sleeps -------------------------------------------------------------------------------

    def suspend(self, session: ClientSession, request: int, member: LocalMember) -> None:
        """Ask the coordinator to leave a target's replica out of swaps."""
        about = Slept(member, Suspended())
        self._link.ask(session.id, request, cluster.MemberSuspended(member=member.id, suspended=True), about)

    def wake(self, session: ClientSession, request: int, member: LocalMember, *, is_lost: bool) -> None:
        """Tell the coordinator that a target has its tensors again."""
        message = cluster.MemberSuspended(member=member.id, suspended=False, is_lost=is_lost)
        self._link.ask(session.id, request, message, Slept(member, WokenEmpty() if is_lost else Woken()))

    def slept(self, session: int, request: int, about: Slept, reply: Message) -> None:
        """Handle the coordinator's answer about a target that suspends or wakes."""
        member = about.member
        if isinstance(reply, local.Done) and member.id in self._members:
            try:
                if member.suspended or not isinstance(about.event, Woken):  # awake already, and possibly in a swap
                    member.move(about.event)
                member.suspended = isinstance(about.event, Suspended)
                self._permits.renew(member)
            except IllegalTransition as exc:
                reply = local.Failure(code=RefusedError.code, message=str(exc))
        self._reply(session, request, reply)

    # --- what the coordinator knows -----------------------------------------------------------------------

    def readmit(self) -> None:
        """Announce every rank to a coordinator that does not know this node, or has dropped it."""
        self._described.clear()
        self._refused.clear()
        for member in self._members.values():
            member.boot = ""  # also if it is the same coordinator
            if not is_restoring(member):
                self._tell(0, 0, member, Readmitted(member))

    def readmitted(self, about: Readmitted, reply: Message) -> None:
        """Handle the coordinator's answer about a rank that was announced again."""
        member = about.member
        if member.id not in self._members:
            self._refused.pop(member.id, None)
        elif isinstance(reply, local.Failure):
            if self._refused.get(member.id) != reply.message:
                self._out(Log("not-readmitted", {"member": member.id, "reason": reply.message}))
            self._refused[member.id] = reply.message
            if reply.code != TransportError.code:  # otherwise the coordinator has not heard of it
                self._permits.refuse(member)
        else:
            self._refused.pop(member.id, None)
            self._agreed(member)

    def readmit_refused(self) -> None:
        """Announce the ranks again that the coordinator has refused or not heard of; called each second."""
        if self._link.is_up:
            for member in [self._members.get(one) for one in self._refused]:
                if member is not None and not is_restoring(member):
                    self._tell(0, 0, member, Readmitted(member))

    def tell_again(self, session: int, request: int, about: Described) -> None:
        """Announce a rank again, now with its description: the coordinator has forgotten it."""
        self._described.discard(about.shard.digest)
        member = about.about.purpose.member if isinstance(about.about, Asked) else about.about.member
        self._tell(session, request, member, about.about, is_question=about.shard.is_question)

    def _tell(
        self,
        session: int,
        request: int,
        member: LocalMember,
        about: Asked | Introduced | Returned | Readmitted,
        *,
        is_question: bool = False,
    ) -> None:
        """Announce a rank to the coordinator, with its description unless that was sent before."""
        shard = structs.replace(_shard_of(member), is_question=is_question)
        known = member.digest in self._described
        if not known and self._link.is_up:
            self._described.add(member.digest)
            self._link.say(cluster.DescribeShard(digest=member.digest, packed=member.described))
        # `Described` allows one repeat, only if the description was left out: a coordinator that forgets cannot loop us
        self._link.ask(session, request, shard, Described(about, shard) if known else about)

    def _agreed(self, member: LocalMember) -> None:
        """Mark a member as admitted by the present coordinator, and renew its permit."""
        member.boot, member.is_told = self._link.boot, False
        self._permits.renew(member)

    # --- output -------------------------------------------------------------------------------------------

    def _enter(self, session: ClientSession, member: LocalMember) -> None:
        self._members[member.id] = member
        session.members.add(member.id)

    def _registered(
        self, member: LocalMember, nbytes: int, version: int | None, not_restored: str = ""
    ) -> local.TargetRegistered:
        assert member.permit is not None
        return local.TargetRegistered(
            member=member.id,
            staging=max(0, member.staging),
            nbytes=nbytes,
            version=version,
            run="" if version is None else member.state.run,
            permit_slot=member.permit.slot,
            permit_token=member.permit.token,
            restores=is_restoring(member),
            content=member.content if is_restoring(member) else (),
            not_restored=not_restored,
        )

    def _reply(self, session: int, request: int, message: Message) -> None:
        self._out(ToClient(session, request, message))


def _shard_of(member: LocalMember) -> cluster.AddShard:
    r = member.registration
    figures = member.figures
    return cluster.AddShard(
        member=member.id,
        model=r.model,
        role="source" if member.is_source else "target",
        replica=member.replica,
        rank=r.rank,
        world_size=r.world_size,
        pid=member.pid,
        digest=member.digest,
        attached=member.session is not None,
        versions=tuple(member.held()),
        modes=tuple(member.mode_of(version) for version in member.held()),
        mode=member.mode,
        mode_reason=member.mode_reason,
        version=member.state.version,
        staged=member.state.staged,
        pauses=isinstance(r, local.RegisterTarget) and r.pauses,
        in_place=member.in_place,
        lockstep=isinstance(r, local.RegisterTarget) and r.lockstep,
        observes=isinstance(r, local.RegisterTarget) and r.observes,
        shares=r.shares if isinstance(r, local.RegisterTarget) else (),
        flips=member.flips,
        spare=None if member.spare_found else member.state.spare,
        spare_run=member.state.spare_run,
        seeds=member.seeds,
        suspended=member.suspended,
        controlled=isinstance(r, local.RegisterTarget) and r.controlled,
        poisoned=member.state.reason if member.state.live is Live.POISONED else "",
        held_bytes=figures.held_bytes,
        staging_bytes=figures.staging_bytes,
        converted_bytes=figures.converted_bytes,
        stale=figures.stale,
        run=member.run if member.is_source else member.state.run,
        newest=member.newest if member.newest >= 0 else None,
        origin=r.origin if isinstance(r, local.RegisterSource) else "",
        staged_version=member.state.next if member.state.step.is_staged else None,
        staged_run=member.state.next_run if member.state.step.is_staged else "",
        committing=member.state.step.is_decided,
    )
