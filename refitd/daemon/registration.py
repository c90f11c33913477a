"""Register ranks: allocate, ask the coordinator, restore retained targets, undo on refusal.

The message is checked in `refitd.daemon.new_members`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from refitd.commit.target_state import ContentRefused, ContentRestored, Live, Step, Suspended, Woken, WokenEmpty
from refitd.daemon.actions import Prepared
from refitd.daemon.arenas import LocalArenas, RetainedTargets, is_restoring
from refitd.daemon.effects import (
    Asked,
    Described,
    Effects,
    Introduced,
    Leaves,
    MemberArenas,
    Readmitted,
    RetainedCompared,
    Returned,
    Slept,
    WantedArenas,
)
from refitd.daemon.links import ClientSession, CoordinatorLink, Permits
from refitd.daemon.members import Arena, LocalMember, Registration, Slot, SourceSide, TargetMemory
from refitd.daemon.new_members import checked, member_id, new_member
from refitd.daemon.verification import Proofs, ReturningRank
from refitd.errors import IllegalTransition, RefitdError, RefusedError, TransportError
from refitd.protocol import cluster, local
from refitd.protocol.base import Message, clipped
from refitd.states import ProofState

# Fraction of the client's timeout within which arenas must be made: the client must learn which are late before its
# own timeout.
PART_OF_TIMEOUT = 0.9

MAX_NAMED = 3  # differences that an error lists
MAX_SLOTS = 16  # snapshots of one source rank


@dataclass(frozen=True, slots=True)
class Registering:
    """A registration to check on another thread, as many tensors make it slow. `arenas` belong to its client."""

    session: int
    pid: int
    message: local.RegisterSource | local.RegisterTarget
    arenas: Mapping[int, Arena]

    def check(self) -> Prepared:
        """Return the checked registration, or the error for which it is refused."""
        try:
            return checked(self.session, self.pid, self.message, self.arenas)
        except RefitdError as exc:
            return exc


class LocalRegistrations:
    """Registers ranks. `drop(member, reason, tell, keep)` ends a registration."""

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
    ) -> None:
        self._node = node
        self._sessions = sessions
        self._members = members
        self._arenas = arenas
        self._retained = retained
        self._permits = permits
        self._proofs = proofs
        self._link = link
        self._described: set[str] = set()  # digests of the shards that were sent to this coordinator
        self._refused: dict[str, str] = {}  # ranks that this coordinator has not admitted -> why, as logged

    # --- a new rank ---------------------------------------------------------------------------------------

    def register(
        self,
        effects: Effects,
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
            prepared = checked(session.id, session.pid, message, self._arenas)
        if isinstance(prepared, RefitdError):
            raise prepared
        r, nbytes = prepared, prepared.nbytes
        if isinstance(message, local.RegisterSource):
            if not message.live and not 1 <= message.slots <= MAX_SLOTS:
                raise RefusedError(f"model {message.model!r}: slots must be 1..{MAX_SLOTS}, found {message.slots}")
            who, sizes = "source", {f"slot{i}": nbytes for i in range(0 if message.live else message.slots)}
        else:
            who, sizes = f"replica {message.replica!r}", {} if message.in_place else {"staging0": nbytes}
            if r.flips and (landing_bytes := r.figures.staging_bytes - nbytes):
                sizes["landing0"] = landing_bytes
            self._permits.check_free()
        name = member_id(message.model, f"{who} rank {message.rank}", self._node, self._link.next_number())
        member = new_member(name, session.id, r)
        given = self._given(session, r)
        for what in list(sizes)[: len(given)]:
            del sizes[what]
        returns = isinstance(message, local.RegisterTarget) and message.returns
        retained = None if returns else self._retained.fitting(member, session.uid)
        if retained is not None and (not r.flips or self._arenas[retained.member.memory.staging].nbytes == nbytes):
            self._retained.give(retained, member)
            self._return(effects, session, request, member, PART_OF_TIMEOUT * message.timeout_s)
            return
        labels = tuple((size, f"{member.name}, {what}") for what, size in sizes.items())
        wanted = WantedArenas(
            session.id,
            request,
            labels,
            MemberArenas(member),
            message.device,
            PART_OF_TIMEOUT * message.timeout_s,
        )
        if not labels:
            self.arenas_made(effects, wanted, ())
        elif not self._arenas.ask(effects, wanted):
            self.ask_first(effects, wanted)

    def _given(self, session: ClientSession, registration: Registration) -> tuple[int, ...]:
        """Return the arenas that a rank returned to the daemon, to become its slots or its staging arena.

        Raises:
            RefusedError: they are not this client's, are in use, have another size, or too few.
        """
        message, nbytes = registration.request, registration.nbytes
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
        used = {place.arena for place in message.live}.union(
            *(m.registration.live.arenas() for m in self._members.values())
        )
        for number in given:
            arena = self._arenas.get(number)
            if arena is None or number not in session.arenas or number in used:
                raise RefusedError(f"{who}: arena {number} is not one that this client has given back, or it is in use")
            if arena.nbytes != nbytes or arena.device != message.device or not (arena.write or is_read):
                raise RefusedError(f"{who}: arena {number} has {arena.nbytes} bytes, {nbytes} are needed")
        return given

    def ask_first(self, effects: Effects, wanted: WantedArenas) -> None:
        """Ask the coordinator whether it would accept a rank, before retained targets are freed for the rank."""
        purpose = wanted.purpose
        assert isinstance(purpose, MemberArenas)
        self._tell(effects, wanted.session, wanted.request, purpose.member, Asked(wanted, purpose), is_question=True)

    def asked(self, effects: Effects, about: Asked, reply: Message) -> None:
        """Handle the coordinator's answer to `ask_first`."""
        wanted, purpose = about.wanted, about.purpose
        if isinstance(reply, local.Failure):
            effects.tell(wanted.session, wanted.request, reply)
        elif wanted.session in self._sessions:
            admitted = MemberArenas(purpose.member, is_admitted=True)
            try:
                self._arenas.ask(
                    effects,
                    WantedArenas(
                        wanted.session, wanted.request, wanted.wanted, admitted, wanted.device, wanted.within_s
                    ),
                )
            except RefitdError as exc:
                effects.fail(wanted.session, wanted.request, exc)

    def arenas_made(self, effects: Effects, wanted: WantedArenas, arenas: tuple[int, ...]) -> None:
        """Enter a new rank whose arenas now exist, and announce it to the coordinator.

        Raises:
            RefusedError: the registration has become impossible; the arenas are not used.
        """
        purpose = wanted.purpose
        assert isinstance(purpose, MemberArenas)
        member, r, source = purpose.member, purpose.member.registration, purpose.member.registration.is_source
        if not source:
            self._permits.check_free()
        if freed := r.live.arenas() - self._arenas.keys():
            raise RefusedError(f"{member.name}: arenas {sorted(freed)} have been freed, which hold its tensors")
        session = self._sessions[wanted.session]
        given = self._given(session, r)
        for index, (arena, (size, label)) in enumerate(zip(arenas, wanted.wanted, strict=True), len(given)):
            self._arenas.take(
                effects,
                arena,
                size,
                label,
                wanted.session,
                write=source or (r.flips and index == 0),  # only workers use a landing arena
                workers_write=not source,
                device=wanted.device,
            )
        for index, arena in enumerate(given):
            session.arenas.discard(arena)
            label = f"{member.name}, {'slot' if source else 'staging'}{index}"
            self._arenas.rename(effects, arena, label, write=source or r.flips, workers_write=not source)
        arenas = given + arenas
        if isinstance(asked := r.request, local.RegisterSource):
            versions = [slot.version for slot in asked.given] or [None] * len(arenas)
            slots = [Slot(arena, version) for arena, version in zip(arenas, versions, strict=True)]
            member.source = SourceSide(slots, newest=-1 if asked.newest is None else asked.newest, run=asked.run)
        else:
            staging, landing = (*arenas, -1, -1)[:2]
            member.memory = TargetMemory(staging, landing)
            self._permits.allot(effects, member)
        self._enter(session, member)
        self._tell(effects, wanted.session, wanted.request, member, Introduced(member, arenas))

    def introduced(self, effects: Effects, session: int, request: int, about: Introduced, reply: Message) -> None:
        """Handle the coordinator's answer about a new rank."""
        member = about.member
        if not isinstance(reply, local.Done):
            if session in self._sessions:
                self._sessions[session].members.discard(member.id)
            self._members.pop(member.id, None)
            self._permits.withdraw(effects, member)
            self._arenas.free(effects, set(about.arenas))
            effects.tell(session, request, reply)
            return
        if member.id not in self._members:
            return  # its client has left
        self._agreed(effects, member)
        self._replace_detached(effects, member)
        self._arenas.free(effects, self._retained.replaced_by(member))
        done: Message
        if (source := member.source) is not None:
            if reply.next_version is not None:
                source.run, source.first, source.newest = reply.run, reply.next_version, reply.next_version - 1
            first, nbytes = max(1, source.first), member.registration.nbytes
            done = local.Registered(member.id, slots=about.arenas, nbytes=nbytes, next_version=first, run=source.run)
        else:
            done = self._registered(member, member.state.version, about.not_restored)
        effects.tell(session, request, done)

    def _replace_detached(self, effects: Effects, member: LocalMember) -> None:
        r = member.registration.request
        for other in list(self._members.values()):
            o = other.registration.request
            same = (o.model, o.rank, other.registration.replica) == (r.model, r.rank, member.registration.replica)
            if other is not member and other.session is None and same:
                effects.notes.append(Leaves(other, "its rank has registered again"))

    # --- a rank that returns ------------------------------------------------------------------------------

    def _return(
        self, effects: Effects, session: ClientSession, request: int, member: LocalMember, within_s: float
    ) -> None:
        """Hand an engine its predecessor's staging arena; the rank is announced once the engine has copied it.

        A flipping predecessor could write to this arena, so the arena is first compared with the version's digests.
        """
        for arena in member.arenas():
            self._arenas[arena].session = session.id
        self._enter(session, member)
        self._permits.allot(effects, member)
        about = Introduced(member, tuple(member.arenas()))
        if not (member.registration.flips and member.proofs.verifies):
            self._give_back(effects, session.id, request, about)
            return
        self._proofs.check_retained(effects, member, within_s, ReturningRank(session.id, request, about))

    def compared(self, effects: Effects, note: RetainedCompared) -> None:
        """Handle the comparison of a returning rank's arena with its digests."""
        if self._members.get(note.about.member.id) is not note.about.member:
            return  # its client has left
        if note.found.state is ProofState.PROVEN:
            self._give_back(effects, note.session, note.request, note.about)
        else:
            self._refuse_content(effects, note.session, note.request, note.about, note.found)

    def _give_back(self, effects: Effects, session: int, request: int, about: Introduced) -> None:
        member = about.member
        effects.log("returned", member=member.id, version=member.state.holds)
        effects.tell(session, request, self._registered(member, member.state.holds))

    def _refuse_content(
        self, effects: Effects, session: int, request: int, about: Introduced, found: cluster.MemberChecked
    ) -> None:
        """Introduce a rank as new in its predecessor's arena, because the arena's version failed the comparison."""
        member = about.member
        where = ", ".join(f"{each.parameter}{each.slice}" for each in found.differences[:MAX_NAMED])
        what = f"version {member.state.holds}, which its predecessor left, is not restored: {found.reason}"
        reason = clipped(f"{what} ({where})" if where else what)
        effects.log("not-restored", member=member.id, version=member.state.holds, reason=reason)
        effects.move(member, ContentRefused())
        member.proofs = replace(member.proofs, live=None)
        self._tell(effects, session, request, member, replace(about, not_restored=reason))

    def restored(self, effects: Effects, session: ClientSession, request: int, member: LocalMember) -> None:
        """Announce a returning engine, which has copied its predecessor's version, to the coordinator.

        Raises:
            IllegalTransition: it has no version to restore.
            RefusedError: the version has not been handed to it yet.
        """
        if is_restoring(member) and self._proofs.is_checking(member):
            raise RefusedError(f"{member.name}: what it restores is still being compared")
        effects.move(member, ContentRestored())
        self._tell(effects, session.id, request, member, Returned(member, session.uid))

    def returned(self, effects: Effects, session: int, request: int, about: Returned, reply: Message) -> None:
        """Handle the coordinator's answer about a returning rank; if refused, the rank is retained again."""
        member = about.member
        if member.id not in self._members:
            return
        if isinstance(reply, local.Done):
            self._agreed(effects, member)
            self._proofs.restored(effects, member)
        else:
            kept = self._retained.keep(member, about.uid, effects.now)
            effects.notes.append(Leaves(member, "the coordinator has not taken it in", kept))
        effects.tell(session, request, reply)

    # --- a rank that sleeps -------------------------------------------------------------------------------

    def suspend(
        self, effects: Effects, session: ClientSession, request: int, member: LocalMember, asked: local.Suspend
    ) -> None:
        """Ask the coordinator to exclude a target's replica from swaps, or to include it again."""
        event = Suspended() if asked.suspended else WokenEmpty() if asked.is_lost else Woken()
        self._link.ask(effects, session.id, request, asked, Slept(member, event))

    def slept(self, effects: Effects, session: int, request: int, about: Slept, reply: Message) -> None:
        """Handle the coordinator's answer about a target that suspends or wakes."""
        member = about.member
        if isinstance(reply, local.Done) and member.id in self._members:
            try:
                if member.state.suspended or not isinstance(about.event, Woken):  # awake already, perhaps in a swap
                    effects.move(member, about.event)
            except IllegalTransition as exc:
                reply = local.Failure(code=RefusedError.code, message=str(exc))
        effects.tell(session, request, reply)

    # --- announcements to the coordinator -----------------------------------------------------------------

    def readmit(self, effects: Effects) -> None:
        """Announce every rank to a coordinator that does not know this node, or has dropped it."""
        self._described.clear()
        self._refused.clear()
        self._permits.none_admitted()  # also if it is the same coordinator
        for member in self._members.values():
            if not is_restoring(member):
                self._tell(effects, 0, 0, member, Readmitted(member))

    def readmitted(self, effects: Effects, about: Readmitted, reply: Message) -> None:
        """Handle the coordinator's answer about a rank that was announced again."""
        member = about.member
        if member.id not in self._members:
            self._refused.pop(member.id, None)
        elif isinstance(reply, local.Failure):
            if self._refused.get(member.id) != reply.message:
                effects.log("not-readmitted", member=member.id, reason=reply.message)
            self._refused[member.id] = reply.message
            if reply.code != TransportError.code:  # else it may not know the rank
                self._permits.refuse(effects, member)
        else:
            self._refused.pop(member.id, None)
            self._agreed(effects, member)

    def readmit_refused(self, effects: Effects) -> None:
        """Announce again each rank that the coordinator refused or did not receive; called every second."""
        if self._link.is_up:
            for member in [self._members.get(one) for one in self._refused]:
                if member is not None and not is_restoring(member):
                    self._tell(effects, 0, 0, member, Readmitted(member))

    def tell_again(self, effects: Effects, session: int, request: int, about: Described) -> None:
        """Announce a rank again, with its description, because the coordinator has dropped the description."""
        self._described.discard(about.shard.digest)
        member = about.about.purpose.member if isinstance(about.about, Asked) else about.about.member
        self._tell(effects, session, request, member, about.about, is_question=about.shard.is_question)

    def _tell(
        self,
        effects: Effects,
        session: int,
        request: int,
        member: LocalMember,
        about: Asked | Introduced | Returned | Readmitted,
        *,
        is_question: bool = False,
    ) -> None:
        """Announce a rank to the coordinator; send its description too, unless sent before."""
        shard = structs.replace(_shard_of(member, self._arenas), is_question=is_question)
        r = member.registration
        known = r.digest in self._described
        if not known and self._link.is_up:
            self._described.add(r.digest)
            effects.say(cluster.DescribeShard(digest=r.digest, packed=r.described))
        # `Described` allows one retry, only if the description was not sent: so this cannot loop
        self._link.ask(effects, session, request, shard, Described(about, shard) if known else about)

    def _agreed(self, effects: Effects, member: LocalMember) -> None:
        """Mark a member as admitted by the present coordinator; a target's permit is renewed after the event."""
        self._permits.admit(member)
        if not member.registration.is_source:
            effects.moved[member.id] = member

    # --- output -------------------------------------------------------------------------------------------

    def _enter(self, session: ClientSession, member: LocalMember) -> None:
        self._members[member.id] = member
        session.members.add(member.id)

    def _registered(self, member: LocalMember, version: int | None, not_restored: str = "") -> local.Registered:
        permit = self._permits.of(member.id)
        assert permit is not None
        return local.Registered(
            member=member.id,
            staging=max(0, member.memory.staging),
            nbytes=member.registration.nbytes,
            version=version,
            run="" if version is None else member.state.run,
            permit_slot=permit.slot,
            permit_token=permit.token,
            restores=is_restoring(member),
            content=member.memory.content if is_restoring(member) else (),
            not_restored=not_restored,
        )


def _shard_of(member: LocalMember, arenas: Mapping[int, Arena]) -> cluster.AddShard:
    registration, source = member.registration, member.source
    r, figures = registration.request, registration.figures
    return cluster.AddShard(
        member=member.id,
        model=r.model,
        role="source" if registration.is_source else "target",
        replica=registration.replica,
        rank=r.rank,
        world_size=r.world_size,
        pid=registration.pid,
        digest=registration.digest,
        attached=member.session is not None,
        versions=tuple(member.held()),
        modes=(member.mode,) * len(member.held()),
        mode=member.mode,
        version=member.state.version,
        staged=member.state.staged,
        in_place=registration.in_place,
        observes=isinstance(r, local.RegisterTarget) and r.observes,
        shares=r.shares if isinstance(r, local.RegisterTarget) else (),
        flips=registration.flips,
        spare=None if member.proofs.spare_found else member.state.spare,
        spare_run=member.state.spare_run,
        seeds=member.seeds,
        suspended=member.state.suspended,
        controlled=isinstance(r, local.RegisterTarget) and r.controlled,
        poisoned=member.state.reason if member.state.live is Live.POISONED else "",
        held_bytes=figures.held_bytes,
        staging_bytes=0 if registration.in_place else figures.staging_bytes,
        converted_bytes=figures.converted_bytes,
        stale=figures.stale,
        run=member.state.run if source is None else source.run,
        newest=source.newest if source is not None and source.newest >= 0 else None,
        origin=r.origin if isinstance(r, local.RegisterSource) else "",
        device=_gpu_of(member, arenas),
        staged_version=member.state.next if member.state.step.is_staged else None,
        staged_run=member.state.next_run if member.state.step.is_staged else "",
        committing=member.state.step is Step.COMMITTING,
    )


def _gpu_of(member: LocalMember, arenas: Mapping[int, Arena]) -> str:
    """Return the GPU that holds all arenas of a rank; "" if one is in main memory, or they are on several GPUs."""
    mine = {*member.arenas(), *member.registration.live.arenas()}
    (found, *others) = {arenas[arena].device for arena in mine if arena in arenas} or {""}
    return "" if others else found
