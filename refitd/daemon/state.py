"""The daemon without sockets: sessions, registrations and arenas; who is told what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from refitd.buffers.permits import PAGE_ARENA, PAGE_BYTES
from refitd.daemon.actions import (
    ArenasMade,
    ArenasRefused,
    Busy,
    ClientSaid,
    CoordinatorSaid,
    CoordinatorUnreachable,
    Due,
    Event,
    Instruction,
    Log,
    MeasurePull,
    NotSent,
    Prepared,
    Problems,
    RestartWorker,
    SessionClosed,
    SessionLeaves,
    SessionOpened,
    Tick,
    ToClient,
    ToCoordinator,
    Unsent,
    WorkerDied,
    WorkerSaid,
    WorkerStarted,
)
from refitd.daemon.arenas import LocalArenas
from refitd.daemon.commits import Commits
from refitd.daemon.epochs import LocalEpochs
from refitd.daemon.jobs import JobTable
from refitd.daemon.members import Arena, Member, Slot, new_member
from refitd.daemon.permits import Permits
from refitd.daemon.plans import LocalPlans
from refitd.daemon.publishing import Publishing
from refitd.daemon.retained import RetainedTargets, is_restoring
from refitd.daemon.swaps import LocalSwaps
from refitd.daemon.target_state import Live, Restored, Step
from refitd.daemon.verification import Proofs
from refitd.daemon.worker_arenas import WorkerArenas
from refitd.errors import ProtocolError, RefitdError, RefusedError, TransportError
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import PROTOCOL_VERSION, Message, clipped
from refitd.protocol.reports import NodeStatus, SwapProgress
from refitd.protocol.roles import ALL_ROLES, check_role
from refitd.protocol.texts import check_names
from refitd.text import brief

# The coordinator answers every update (one a second); this long without a word and it counts as gone.
COORDINATOR_SILENCE_S = 5.0

# A client has this much read to learn how fast that goes: some milliseconds' worth.
MAX_MEASURED_BYTES = 64 << 20
MAX_MEASURED_ROWS = 1 << 19

# What one client may have waiting for the coordinator and for arenas, and how many ranks it may register.
MAX_WAITING = 128
MAX_SESSION_MEMBERS = 4096

# Of the time that a client waits for arenas: it hears which ones are late before it gives up.
_PART_OF_IT = 0.9

# Whoever waits for much may still give things back.
_ENDINGS = (
    local.Deregister
    | local.FreeArena
    | local.Withdraw
    | local.StepReached
    | local.CommitQuiet
    | local.CommitDone
    | local.CommitFailed
    | local.Paused
    | local.LiveDigests
    | local.LiveCompared
)


@dataclass(slots=True)
class Session:
    """One connected client."""

    id: int
    pid: int
    name: str
    roles: frozenset[str] = ALL_ROLES
    uid: int = -1
    leaves: bool = False  # it has said goodbye
    members: set[str] = field(default_factory=set)
    arenas: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Forwarded:
    """A request that waits for the coordinator. `then` is called with its reply."""

    session: int
    request: int
    then: Callable[[Message], None]


class Daemon:
    """All of one node's knowledge. `handle` takes an event and returns what is to be done."""

    def __init__(
        self,
        node: str,
        host: str,
        pid: int,
        workers: int,
        max_arena_bytes: int,
        address: str = "127.0.0.1",
        services: tuple[str, ...] = ("shm",),
        keep_targets_s: float = 0.0,
    ) -> None:
        self._node, self._host, self._pid = node, host, pid
        self._worker_pids: dict[int, int] = {}
        self._workers = workers
        self._sessions: dict[int, Session] = {}
        self.members: dict[str, Member] = {}
        self._forwarded: dict[int, _Forwarded] = {}
        self._numbers = 0
        self._described: set[str] = set()  # digests of the shards that this coordinator has been told
        self._boot = ""  # of the coordinator; "" while none has welcomed us
        self._live: dict[str, cluster.LiveClaim] = {}  # by model: what coordinators have decided, as far as told
        self._coordinator_heard = -1e9
        self._unreachable = ""  # why, as far as is known
        self._problems: tuple[str, ...] = ()
        self._now = 0.0
        self._out: list[Instruction] = []
        self._address, self._services = address, services
        self._retained = RetainedTargets(keep_targets_s)
        self._maps = WorkerArenas(workers, self._out.append)
        out = self._out.append
        self._jobs = JobTable(out, self._maps.need)
        self._epochs = LocalEpochs(node, address, out)
        self.arenas = LocalArenas(
            node, max_arena_bytes, self._sessions, self._retained, self._jobs, self._maps, out, self._fail
        )
        self._plans = LocalPlans(node, workers, self._jobs, self._epochs, self.arenas.make_constants, out)
        self._permits = Permits(self.members, out)
        self._commits = Commits(
            workers,
            self.members,
            self._jobs,
            self._maps,
            out,
            self._replace_worker,
        )
        self._swaps = LocalSwaps(
            node,
            workers,
            self.members,
            self._plans,
            self._commits,
            self._jobs,
            self._epochs,
            self._maps,
            out,
            self._restart,
        )
        self._proofs = Proofs(node, workers, self.members, out, self._maps.need, self._maps.homes, self._is_swapping)
        self._publishing = Publishing(self._swaps, self._say, self._reply, self._forward, self._check_coordinated)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take an event, return what is to be done. A refused request changes nothing but its reply."""
        self._now = now
        match event:
            case ClientSaid(session, request, message, prepared):
                if session in self._sessions:
                    self._client(self._sessions[session], request, message, prepared)
            case Busy(seconds):
                self._coordinator_heard += seconds
            case CoordinatorSaid(request, message):
                self._coordinator(request, message)
            case Unsent(request):
                if (unsent := self._forwarded.pop(request, None)) is not None:
                    text = f"node {self._node}: too much waits to be sent to the coordinator; try again"
                    unsent.then(local.Failure(code=RefusedError.code, message=text))
            case CoordinatorUnreachable(reason):
                self._unreachable = reason
            case WorkerSaid(worker, message):
                if isinstance(message, sidecar.WorkerReady):
                    self._worker_pids[worker] = message.pid
                elif isinstance(message, sidecar.DigestsTaken | sidecar.SpansCompared):
                    self._proofs.worker_said(message)
                else:
                    self._swaps.worker_said(worker, message)
            case WorkerDied(worker, how):
                self._worker_died(worker, how)
            case WorkerStarted(worker):
                self._log("worker-started", worker=worker)
                self._maps.renewed(worker)
                self._proofs.worker_gone(worker)
            case Problems(texts):
                self._problems = texts
            case NotSent(worker, message, reason):
                self._swaps.not_sent(worker, message, reason)
            case SessionOpened(session, pid, name, roles, uid):
                self._sessions[session] = Session(session, pid, name, roles, uid)
                self._log("session", session=session, pid=pid, name=name)
            case SessionLeaves(session):
                if session in self._sessions:
                    self._sessions[session].leaves = True
            case SessionClosed(session, reason):
                self._session_closed(session, reason)
            case ArenasMade():
                self.arenas.made(event)
            case ArenasRefused():
                self.arenas.refused(event)
            case Due():
                self._proofs.expire(now)
            case Tick():
                self._tick()
        self._proofs.dispatch()
        done = self._out[:]
        self._out.clear()
        return done

    @property
    def next_deadline(self) -> float | None:
        """When a `Due` is needed next, None where the next `Tick` is early enough."""
        return self._proofs.next_deadline

    @property
    def is_coordinated(self) -> bool:
        """Whether a coordinator has been heard lately."""
        return bool(self._boot) and self._now - self._coordinator_heard < COORDINATOR_SILENCE_S

    @property
    def unheard_s(self) -> float:
        """How long no coordinator has been heard; 0 while one answers."""
        return 0.0 if self.is_coordinated else self._now - self._coordinator_heard

    def may_fetch(self, session: int, arena: int, write: bool) -> Arena:
        """Return the arena whose descriptor this session may have; raises RefusedError if it may not."""
        if arena == PAGE_ARENA and not write and session in self._sessions:
            members = (self.members[name] for name in self._sessions[session].members)
            if any(member.permit is not None for member in members):
                return Arena(PAGE_ARENA, PAGE_BYTES, "permits", session, write=False)
        return self.arenas.may_fetch(session, arena, write)

    def status(self) -> NodeStatus:
        """Return this node's figures."""
        return NodeStatus(
            node=self._node,
            host=self._host,
            pid=self._pid,
            workers=tuple(self._worker_pids.get(i, 0) for i in range(self._workers)),
            clients=len(self._sessions),
            arenas=len(self.arenas),
            arena_bytes=sum(a.nbytes for a in self.arenas.values()),
            address=self._address,
            services=self._services,
            gpus=tuple(self.arenas.gpus()),
            problems=tuple(clipped(text) for text in self._problems),
        )

    # --- clients ------------------------------------------------------------------------------------------

    def prepare(self, session: int, message: local.RegisterSource | local.RegisterTarget) -> Callable[[], Prepared]:
        """Return what looks at a registration, beside the loop, as far as nothing that changes is concerned."""
        pid = self._sessions[session].pid if session in self._sessions else 0
        arenas = {number: arena for number, arena in self.arenas.items() if arena.session == session}

        def look() -> Prepared:
            try:
                return new_member(message.model, session, pid, message, arenas)
            except RefitdError as exc:
                return exc

        return look

    def _client(
        self, session: Session, request: int, message: local.ClientRequest, prepared: Prepared | None = None
    ) -> None:
        try:
            self._client_request(session, request, message, prepared)
        except RefitdError as exc:
            self._log("refused", session=session.id, message=type(message).__name__, reason=str(exc))
            self._fail(session.id, request, exc)

    def _client_request(
        self, session: Session, request: int, message: local.ClientRequest, prepared: Prepared | None
    ) -> None:
        check_names(message)
        check_role(message, session.roles, f"the user of pid {session.pid}", "node.roles of this daemon")
        self._check_room(session, message)
        match message:
            case local.CreateArena():
                self._create_arena(session, request, message)
            case local.FreeArena(arena):
                self._free_arena(session, arena)
                self._reply(session.id, request, local.Done())
            case local.RegisterSource() | local.RegisterTarget():
                self._register(session, request, message, prepared)
            case local.Deregister(member):
                self._drop_member(self._own(session, member), "its client has closed it")
                self._reply(session.id, request, local.Done())
            case local.BeginPublish(member, version, timeout_s):
                deadline = self._now + timeout_s
                self._publishing.begin(self._own(session, member), session.id, request, version, deadline)
            case local.Publish(member):
                self._publishing.publish(self._own(session, member), session.id, request, message)
            case local.MeasurePull(member, spans):
                self._measure(session, request, self._own(session, member), spans)
            case local.Lend(member):
                self._publishing.lend(self._own(session, member), session.id, request, message)
            case local.Withdraw(member, version):
                self._publishing.withdraw(self._own(session, member), version, "it was withdrawn")
                self._reply(session.id, request, local.Done())
            case local.Paused(swap, member):
                self._commits.paused(swap, self._own(session, member))
            case local.StepReached(_, member):
                self._commits.step_reached(self._own(session, member), message)
            case local.CommitQuiet(swap, member):
                self._commits.quiet(swap, self._own(session, member))
            case local.CommitDone(swap, member, paused_s):
                found = self._own(session, member)
                if self._commits.committed(swap, found, paused_s):
                    self._proofs.committed(found)
            case local.Restored(member):
                self._restored(session, request, self._own(session, member))
            case local.LiveDigests(member) | local.LiveCompared(member):
                self._proofs.client_said(self._own(session, member), message)
            case local.CommitFailed(swap, member, reason):
                self._commits.failed(swap, self._own(session, member), reason)
            case (
                local.StartSwap()
                | local.AbortSwap()
                | local.Evict()
                | local.Verify()
                | local.GetStatus()
                | local.GetPlan()
                | local.GetHistory()
                | local.GetDescription()
            ):
                self._check_coordinated()

                def answer(reply: Message) -> None:
                    self._reply(session.id, request, reply)

                if isinstance(message, local.GetStatus):
                    self._say(0, self._update())  # the figures of now
                self._forward(session.id, request, message, answer)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not expected in an open session")

    def _check_room(self, session: Session, message: local.ClientRequest) -> None:
        """Refuse more of a client that has much under way: what waits for others is kept here."""
        if isinstance(message, _ENDINGS):
            return
        waiting = sum(f.session == session.id for f in self._forwarded.values())
        waiting += self.arenas.waiting(session.id)
        if waiting >= MAX_WAITING:
            raise RefusedError(f"this client waits for {waiting} answers already, at most {MAX_WAITING}; wait for them")
        registers = isinstance(message, local.RegisterSource | local.RegisterTarget)
        if registers and len(session.members) >= MAX_SESSION_MEMBERS:
            raise RefusedError(f"this client has {len(session.members)} registrations already; close some first")

    def _measure(self, session: Session, request: int, member: Member, spans: tuple[tuple[int, int, int], ...]) -> None:
        nbytes, rows = sum(rows * row for _, rows, row in spans), sum(rows for _, rows, _ in spans)
        if not 0 < nbytes <= MAX_MEASURED_BYTES or rows > MAX_MEASURED_ROWS:
            raise RefusedError(
                f"{member.id}: {nbytes} bytes in {rows} rows to measure, the limits are {MAX_MEASURED_BYTES} bytes "
                f"and {MAX_MEASURED_ROWS} rows"
            )
        self._out.append(MeasurePull(session.id, request, member.pid, spans))

    def _own(self, session: Session, member_id: str) -> Member:
        member = self.members.get(member_id)
        if member is None or member.session != session.id:
            raise RefusedError(f"{member_id!r} is not a registration of this session; register again")
        return member

    def _session_closed(self, session_id: int, reason: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        self._log("session-closed", session=session_id, pid=session.pid, name=session.name, reason=reason)
        for member_id in sorted(session.members):
            member = self.members[member_id]
            self._publishing.withdraw_leases(member)
            if member.is_source and member.held():
                # what was published outlives the trainer: the snapshot arenas are the daemon's
                member.session = None
                member.waiting.clear()
                for slot in member.slots:
                    slot.writing = None
                    self.arenas[slot.arena].session = None
                self._say(0, cluster.DetachShard(member=member_id, reason=reason))
            else:
                kept = not session.leaves and self._retained.keep(member, session.uid, self._now)
                self._drop_member(member, reason, keep=kept, tell=not is_restoring(member))
        for arena in sorted(session.arenas):
            self.arenas.free({arena})

    def _create_arena(self, session: Session, request: int, asked: local.CreateArena) -> None:
        nbytes, device = asked.nbytes, asked.device
        label = asked.label or session.name or "client"

        def made(arenas: tuple[int, ...]) -> None:
            self.arenas.take(arenas[0], nbytes, label, session.id, write=True, workers_write=True, device=device)
            session.arenas.add(arenas[0])
            self._reply(session.id, request, local.ArenaCreated(arena=arenas[0], nbytes=nbytes))

        self.arenas.ask(session.id, request, ((nbytes, label),), made, device, _PART_OF_IT * asked.timeout_s)

    def _free_arena(self, session: Session, arena: int) -> None:
        if arena not in session.arenas:
            raise RefusedError(f"arena {arena} is not one that this client has allocated, or it is free already")
        for member in self.members.values():
            lent = [lease.places for lease in member.leases.values()]
            if any(arena in places.arenas() for places in (member.live, *lent)):
                raise RefusedError(f"arena {arena} holds tensors of {member.id}; close that registration first")
        session.arenas.discard(arena)
        self.arenas.free({arena})

    # --- registration -------------------------------------------------------------------------------------

    def _register(
        self,
        session: Session,
        request: int,
        message: local.RegisterSource | local.RegisterTarget,
        prepared: Prepared | None,
    ) -> None:
        self._check_coordinated()
        source = isinstance(message, local.RegisterSource)
        if prepared is None or not {place.arena for place in message.live} <= self.arenas.keys():
            prepared = new_member(message.model, session.id, session.pid, message, self.arenas)
        if isinstance(prepared, RefitdError):
            raise prepared
        member, nbytes = prepared
        if isinstance(message, local.RegisterSource):
            if not message.live and not 1 <= message.slots <= 16:
                raise RefusedError(f"model {message.model!r}: slots must be 1..16, found {message.slots}")
            count = 0 if message.live else message.slots
        else:
            count = 0 if message.in_place else 1
            self._permits.check_free()
        who = "source" if isinstance(message, local.RegisterSource) else message.replica
        member_id = member.id = f"{message.model}/{who}:{message.rank}@{self._node}#{self._next()}"
        labels = tuple((nbytes, f"{member_id}/{'slot' if source else 'staging'}{i}") for i in range(count))

        def made(arenas: tuple[int, ...]) -> None:
            self._check_still_possible(member)
            for arena, (size, label) in zip(arenas, labels, strict=True):
                self.arenas.take(
                    arena, size, label, session.id, write=source, workers_write=not source, device=message.device
                )
            self._introduce(session, request, member, arenas, nbytes)

        retained = self._retained.fitting(member, session.uid)
        if retained is not None:
            self._return(session, request, member, self._retained.give(retained, member), nbytes)
        elif labels:
            self.arenas.ask(session.id, request, labels, made, message.device, _PART_OF_IT * message.timeout_s)
        else:
            made(())

    def _check_still_possible(self, member: Member) -> None:
        """Refuse a registration that others have made impossible while its arenas were made."""
        if not member.is_source:
            self._permits.check_free()
        if freed := member.live.arenas() - self.arenas.keys():
            raise RefusedError(f"{member.id}: arenas {sorted(freed)} have been freed, which hold its tensors")

    def _return(self, session: Session, request: int, member: Member, arena: int, nbytes: int) -> None:
        """Give an engine the staging arena of its predecessor; the coordinator hears of it once that is copied."""
        self.arenas[arena].session = session.id
        self.members[member.id] = member
        session.members.add(member.id)
        self._permits.allot(member)
        self._log("returned", member=member.id, version=member.state.holds)
        self._reply(session.id, request, self._registered(member, nbytes, member.state.holds))

    def _restored(self, session: Session, request: int, member: Member) -> None:
        """The engine holds what its predecessor held: from now on it can take part in swaps."""
        member.move(Restored())

        def answer(reply: Message) -> None:
            if member.id not in self.members:
                return
            if not isinstance(reply, local.Done):
                kept = self._retained.keep(member, session.uid, self._now)
                self._drop_member(member, "the coordinator has not taken it in", tell=False, keep=kept)
            else:
                self._agreed(member)
                self._proofs.restored(member)
            self._reply(session.id, request, reply)

        self._add(session.id, request, member, answer)

    def _agreed(self, member: Member) -> None:
        """The present coordinator knows this member: it may serve by its word."""
        member.boot, member.is_told = self._boot, False
        self._permits.renew(member)

    def _registered(self, member: Member, nbytes: int, version: int | None) -> local.TargetRegistered:
        assert member.permit is not None
        return local.TargetRegistered(
            member=member.id,
            staging=max(0, member.staging),
            nbytes=nbytes,
            version=version,
            permit_slot=member.permit.slot,
            permit_token=member.permit.token,
            restores=is_restoring(member),
        )

    def _introduce(self, session: Session, request: int, member: Member, arenas: tuple[int, ...], nbytes: int) -> None:
        """Tell the coordinator of a new member; it exists once the coordinator has agreed."""
        if member.is_source:
            member.slots = [Slot(arena) for arena in arenas]
        else:
            member.staging = arenas[0] if arenas else -1
            self._permits.allot(member)
        self.members[member.id] = member
        session.members.add(member.id)

        def answer(reply: Message) -> None:
            if not isinstance(reply, local.Done | cluster.SourceAdmitted):
                session.members.discard(member.id)
                self.members.pop(member.id, None)
                self._permits.withdraw(member)
                self.arenas.free(set(arenas))
                self._reply(session.id, request, reply)
                return
            if member.id not in self.members:
                return  # its client has left in the meantime
            self._agreed(member)
            self._replace_detached(member)
            self.arenas.free(self._retained.replaced_by(member))
            if isinstance(reply, cluster.SourceAdmitted):
                member.run, member.first, member.newest = reply.run, reply.next_version, reply.next_version - 1
            done: Message
            if member.is_source:
                first = max(1, member.first)
                done = local.SourceRegistered(member.id, arenas, nbytes, next_version=first, run=member.run)
            else:
                done = self._registered(member, nbytes, member.state.version)
            self._reply(session.id, request, done)

        self._add(session.id, request, member, answer)

    def _add(self, session: int, request: int, member: Member, then: Callable[[Message], None]) -> None:
        """Tell the coordinator of a member, and of what it holds if that is new to this coordinator."""

        def answer(reply: Message) -> None:
            if isinstance(reply, local.Failure) and reply.code == "unknown-shard":
                self._described.discard(member.digest)
                self._add(session, request, member, then)
            else:
                then(reply)

        known = member.digest in self._described
        if not known and self.is_coordinated:
            self._described.add(member.digest)
            self._say(0, cluster.DescribeShard(digest=member.digest, packed=member.described))
        # asked for once more only when it was left out: a coordinator that keeps forgetting cannot loop us
        self._forward(session, request, self._add_shard(member), answer if known else then)

    def _replace_detached(self, member: Member) -> None:
        r = member.registration
        for other in list(self.members.values()):
            o = other.registration
            same = (o.model, o.rank, other.replica) == (r.model, r.rank, member.replica)
            if other is not member and other.session is None and same:
                self._drop_member(other, "its rank has registered again", tell=False)

    def _add_shard(self, member: Member) -> cluster.AddShard:
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
            ways=tuple(member.way_of(version) for version in member.held()),
            way=member.way,
            why=member.why,
            version=member.state.version,
            staged=member.state.staged,
            pauses=isinstance(r, local.RegisterTarget) and r.pauses,
            in_place=member.in_place,
            lockstep=isinstance(r, local.RegisterTarget) and r.lockstep,
            poisoned=member.state.reason if member.state.live is Live.POISONED else "",
            held_bytes=figures.held_bytes,
            staging_bytes=figures.staging_bytes,
            converted_bytes=figures.converted_bytes,
            stale=figures.stale,
            run=member.run if member.is_source else member.state.run,
            newest=member.newest if member.newest >= 0 else None,
            staged_version=member.state.next if member.state.step.is_staged else None,
            staged_run=member.state.next_run if member.state.step.is_staged else "",
            committing=member.state.step.is_decided,
            replicas=member.replicas,
            replicas_of=member.replicas_of,
        )

    def _drop_member(self, member: Member, reason: str, *, tell: bool = True, keep: bool = False) -> None:
        self.members.pop(member.id, None)
        if member.session in self._sessions:
            self._sessions[member.session].members.discard(member.id)
        for waiting in member.waiting:
            self._fail(waiting.session, waiting.request, RefusedError(f"{member.id}: {reason}"))
        self._permits.withdraw(member)
        self._commits.member_left(member)
        self._proofs.left(member, reason)
        if tell:
            self._say(0, cluster.RemoveShard(member=member.id, reason=reason))
        if keep:
            self.arenas.retain(member.staging)
        else:
            self.arenas.free(set(member.arenas()))

    # --- coordinator --------------------------------------------------------------------------------------

    def _coordinator(self, request: int, message: cluster.CoordinatorMessage) -> None:
        self._coordinator_heard = self._now
        self._unreachable = ""
        if isinstance(message, local.Done):
            self._permits.answered(request)
        match message:
            case cluster.NodeWelcome(_, boot, lease_s):
                self._permits.granted(boot, lease_s)
                self._welcomed(boot)
                self._permits.answered(request)
            case local.Failure(code, text) if code == "unknown-node":
                self._boot = ""
                self._fail_forwarded(f"the coordinator has restarted: {text}")
                self._hello()
            case _ if request in self._forwarded:
                waiting = self._forwarded[request]
                if not isinstance(message, SwapProgress):
                    del self._forwarded[request]
                waiting.then(message)
            case local.Failure(_, text):
                self._log("coordinator-refused", reason=text)
            case cluster.LoadPlan():
                self._plans.load(message)
            case cluster.DropPlan(plan):
                self.arenas.free(self._plans.drop(plan))
            case cluster.EpochValue():
                self._epochs.value(message)
            case cluster.LiveIs(live):
                self._live[live.model] = live
            case cluster.MayDrop(member, versions, why):
                if member in self.members:
                    self._publishing.may_drop(self.members[member], versions, why)
            case cluster.FenceMember(member, reason):
                if member in self.members:
                    self._commits.fence_behind(self.members[member], reason)
            case cluster.Pause(swap, version, members):
                self._commits.pause(swap, version, members)
            case cluster.Stage(swap, plan, version, timeout_s, verify, run):
                self._swaps.stage(swap, plan, version, timeout_s, verify, run)
            case cluster.CheckMembers():
                self._proofs.check(message, self._now)
            case cluster.Commit(swap, version):
                self._commits.begin(swap, version)
            case cluster.FlipMember(swap, member, step, origin):
                self._commits.in_step(member, local.FlipAt(swap, member, step, origin))
            case cluster.PassMember(swap, member):
                self._commits.in_step(member, local.PassPoll(swap, member))
            case cluster.Abort(swap, reason):
                self._abort(swap, reason)
            case cluster.EvictMember(member, reason):
                self._evict(member, reason)
            case cluster.EndSwap(swap):
                self._publishing.release(self.members.values(), swap)
            case _:
                pass  # the reply to a request whose client has gone

    def _evict(self, member_id: str, reason: str) -> None:
        """Forget a target that somebody wanted removed, or what a trainer that is gone has left.

        A client hears of it, and may say no more of it.
        """
        member = self.members.get(member_id)
        if member is None or (member.is_source and member.session is not None):
            return
        self._log("evicted", member=member_id, reason=reason)
        if member.session is not None:
            self._reply(member.session, 0, local.Evicted(member=member_id, reason=reason))
        self._drop_member(member, reason, tell=False)

    def _welcomed(self, boot: str) -> None:
        known, self._boot = self._boot, boot
        if known == boot:
            return
        self._log("coordinator", boot=boot)
        # whoever welcomes us anew has aborted what was not decided; its words about that may not have reached us
        states = [member.state for member in self.members.values()]
        halted = {state.swap for state in states if state.step in (Step.HALTING, Step.HALTED)}
        for swap in sorted(self._swaps.staging() | {swap for swap in halted if swap is not None}):
            self._abort(swap, "the coordinator was out of reach")
        # what is staged may have been decided and is settled below; it reads nothing any more
        for swap in sorted({swap for member in self.members.values() for swap in member.read_by()}):
            self._publishing.release(self.members.values(), swap)
        self.arenas.free(self._plans.drop_all())
        self._described.clear()
        for member in self.members.values():
            member.boot = ""  # also where it is the same coordinator: it had given this node up
            if not is_restoring(member):
                self._add(0, 0, member, self._readmitted(member))

    def _readmitted(self, member: Member) -> Callable[[Message], None]:
        def answer(reply: Message) -> None:
            if isinstance(reply, local.Failure):
                self._log("not-readmitted", member=member.id, reason=reply.message)
            elif member.id in self.members:
                self._agreed(member)

        return answer

    def _abort(self, swap: str, reason: str) -> None:
        self._swaps.abort(swap, reason)
        self._publishing.release(self.members.values(), swap)

    def _hello(self) -> None:
        live = tuple(self._live.values())
        self._beat(cluster.NodeHello(protocol=PROTOCOL_VERSION, status=self.status(), live=live))

    def _update(self) -> cluster.NodeUpdate:
        """Return this node's figures, and its targets that have moved since the coordinator was told."""
        moved = [m for m in self.members.values() if not (m.is_source or m.is_told) and m.boot == self._boot]
        for member in moved:
            member.is_told = True
        states = tuple(cluster.TargetMoved(m.id, brief(str(m.state)), tuple(m.history)) for m in moved)
        return cluster.NodeUpdate(status=self.status(), moved=states)

    def _beat(self, message: cluster.NodeHello | cluster.NodeUpdate) -> None:
        """Say something whose answer renews this node's permits."""
        number = self._next()
        self._permits.sent(number, self._now)
        self._say(number, message)

    def _fail_forwarded(self, reason: str) -> None:
        waiting, self._forwarded = self._forwarded, {}
        failure = local.Failure(code=TransportError.code, message=reason)
        for forwarded in waiting.values():
            forwarded.then(failure)

    def _forward(
        self,
        session: int,
        request: int,
        message: Message,
        then: Callable[[Message], None],
    ) -> None:
        if not self.is_coordinated:
            then(local.Failure(code=TransportError.code, message=self._no_coordinator()))
            return
        number = self._next()
        self._forwarded[number] = _Forwarded(session, request, then)
        self._say(number, message)

    def _check_coordinated(self) -> None:
        if not self.is_coordinated:
            raise TransportError(self._no_coordinator())

    def _no_coordinator(self) -> str:
        why = self._unreachable or "check that it runs, then try again"
        return f"node {self._node} has no coordinator at present; {why}"

    # --- workers and time ---------------------------------------------------------------------------------

    def _worker_died(self, worker: int, how: str) -> None:
        pid = self._worker_pids.pop(worker, 0)
        self._log("worker-died", worker=worker, pid=pid, how=how)
        self._maps.renewed(worker)
        self._proofs.worker_gone(worker)
        self._swaps.worker_died(worker, f"worker {worker} (pid {pid}) on node {self._node} (host {self._host})", how)

    def _restart(self, worker: int) -> None:
        """Replace a worker that is in the middle of something nobody wants any more."""
        self._out.append(RestartWorker(worker))
        self._maps.renewed(worker)
        self._proofs.worker_gone(worker)

    def _replace_worker(self, worker: int, reason: str) -> None:
        self._swaps.replace_worker(worker, reason)

    def _is_swapping(self) -> bool:
        return bool(self._swaps.staging()) or self._jobs.is_busy

    def _tick(self) -> None:
        if self._boot:
            self._beat(self._update())
        else:
            self._hello()
        if self._boot and not self.is_coordinated:
            self._log("coordinator-silent", seconds=self._now - self._coordinator_heard)
            self._boot = ""
            self._commits.fence("the coordinator is out of reach, and may have decided")
            self._fail_forwarded(f"the coordinator has said nothing for {COORDINATOR_SILENCE_S:.0f} s")
        self._swaps.tick()
        self.arenas.free(self._plans.unneeded())
        self._proofs.expire(self._now)
        self._proofs.tick()
        self.arenas.expire(self._now)
        self._publishing.expire(self.members.values(), self._now)
        for member in self.members.values():
            self._publishing.ask_room(member)

    # --- output -------------------------------------------------------------------------------------------

    def _say(self, request: int, message: Message) -> None:
        self._out.append(ToCoordinator(request, message))

    def _reply(self, session: int, request: int, message: Message) -> None:
        self._out.append(ToClient(session, request, message))

    def _fail(self, session: int, request: int, error: RefitdError) -> None:
        self._reply(session, request, local.Failure(code=error.code, message=str(error)))

    def _log(self, event: str, **fields: object) -> None:
        self._out.append(Log(event, fields))

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers
