"""The state of the daemon, without sockets: routes events to the parts of the state, returns instructions."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from refitd.buffers.permits import PAGE_ARENA, PAGE_BYTES
from refitd.daemon.actions import (
    ArenaGiven,
    ArenasMade,
    ArenasRefused,
    ClientSaid,
    CoordinatorSaid,
    CoordinatorUnreachable,
    Due,
    Event,
    Instruction,
    NotSent,
    Prepared,
    Problems,
    RestartWorker,
    SessionClosed,
    SessionLeaves,
    SessionOpened,
    TimePull,
    ToClient,
    Unsent,
    WorkerDied,
    WorkerSaid,
    WorkerStarted,
    WriteArena,
)
from refitd.daemon.arenas import LocalArenas
from refitd.daemon.clock import CoordinatorClock
from refitd.daemon.commits import Commits
from refitd.daemon.controllers import LocalControllers
from refitd.daemon.coordinator_link import COORDINATOR_SILENCE_S, CoordinatorLink
from refitd.daemon.epochs import LocalEpochs
from refitd.daemon.jobs import JobTable
from refitd.daemon.members import Arena, LocalMember
from refitd.daemon.pending import (
    Announced,
    Asked,
    ClientArena,
    Constants,
    ControllerIntroduced,
    Described,
    Introduced,
    MemberArenas,
    PassedOn,
    Readmitted,
    Returned,
    Slept,
    Waiting,
    WantedArenas,
)
from refitd.daemon.permits import Permits
from refitd.daemon.plans import LocalPlans
from refitd.daemon.publishing import Publishing
from refitd.daemon.region_digests import RegionDigests
from refitd.daemon.registration import PART_OF_TIMEOUT, Registrations
from refitd.daemon.retained import RetainedTargets, is_restoring
from refitd.daemon.sessions import Session
from refitd.daemon.spares import Spares
from refitd.daemon.swaps import LocalSwaps
from refitd.daemon.target_state import Step
from refitd.daemon.timeline import Timeline
from refitd.daemon.verification import Proofs
from refitd.daemon.worker_arenas import WorkerArenas
from refitd.errors import ProtocolError, RefitdError, RefusedError
from refitd.events import Busy, Log, Tick
from refitd.protocol import cluster, control, local, sidecar
from refitd.protocol.base import PROTOCOL_VERSION, Message, clipped
from refitd.protocol.reports import NodeStatus
from refitd.protocol.roles import check_role
from refitd.protocol.texts import check_names
from refitd.protocol.traces import CollectTrace, GetTrace
from refitd.text import brief

# Limits on what is read to measure how fast a client's memory can be read: some milliseconds' worth.
MAX_MEASURED_BYTES = 64 << 20
MAX_MEASURED_ROWS = 1 << 19


class Daemon:
    """The whole state of one node's daemon. `handle` takes an event and returns instructions."""

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
        self.members: dict[str, LocalMember] = {}
        self._live: dict[str, cluster.LiveClaim] = {}  # by model: the coordinator's latest claims
        self._problems: tuple[str, ...] = ()
        self._now = 0.0
        self._out: list[Instruction] = []
        self._address, self._services = address, services
        self._refusal = ""  # why the coordinator does not take this node, as last logged
        self._retained = RetainedTargets(keep_targets_s)
        self._maps = WorkerArenas(workers, self._out.append)
        out = self._out.append
        self._link = CoordinatorLink(node, out, self._answered)
        self._jobs = JobTable(out, self._maps.need)
        self._clock = CoordinatorClock()
        self._timeline = Timeline(
            self._jobs, self.members, lambda worker: self._worker_pids.get(worker, 0), self._clock
        )
        self.arenas = LocalArenas(
            node,
            max_arena_bytes,
            self._sessions,
            self._retained,
            self._jobs,
            self._maps,
            out,
            self._given,
            self._not_given,
            self._ask_first,
        )
        self._epochs = LocalEpochs(node, address, out, self._epoch_formed)
        self._plans = LocalPlans(node, workers, self._jobs, self._epochs, self.arenas.ask, out)
        self._permits = Permits(self.members, out)
        self._commits = Commits(
            workers,
            self.members,
            self._jobs,
            self._maps,
            out,
            self._replace_worker,
            self._exchange,
        )
        numbers = itertools.count(1).__next__  # of digest runs
        self._proofs = Proofs(
            node, workers, self.members, out, self._maps.need, self._maps.homes, self._is_swapping, numbers
        )
        self._spares = Spares(
            node,
            workers,
            self.members,
            out,
            self._maps.need,
            self._maps.homes,
            self._is_swapping,
            numbers,
            self._commits.fence_behind,
            lambda: self._link.say(self._update()),
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
            self._proofs.prove,
            lambda: self._publishing.slots_freed(self.members.values()),
        )
        self._controllers = LocalControllers(node, self._link, out)
        self._publishing = Publishing(self._swaps, self._link, self._reply)
        self._regions = RegionDigests(
            node, workers, self.members, out, self._maps.need, self._maps.homes, numbers, self._replace_worker
        )
        self._registrations = Registrations(
            node,
            self._sessions,
            self.members,
            self.arenas,
            self._retained,
            self._permits,
            self._proofs,
            self._link,
            out,
            self._drop_member,
        )

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Handle an event and return instructions. A refused request changes nothing."""
        self._now = self._link.now = now
        match event:
            case ClientSaid(session, request, message, prepared):
                if session in self._sessions:
                    self._client(self._sessions[session], request, message, prepared)
            case Busy(seconds):
                self._link.was_busy(seconds)
            case CoordinatorSaid(request, message):
                self._coordinator(request, message)
            case Unsent(request, lost):
                self._link.unsent(request, lost)
            case CoordinatorUnreachable(reason):
                self._link.unreachable(reason)
            case WorkerSaid(worker, message):
                if isinstance(message, sidecar.WorkerReady):
                    self._worker_pids[worker] = message.pid
                elif isinstance(message, sidecar.DigestsTaken | sidecar.SpansCompared):
                    is_mine = isinstance(message, sidecar.DigestsTaken) and self._regions.worker_said(message)
                    if not is_mine:
                        self._proofs.worker_said(message)
                        self._spares.worker_said(message)
                else:
                    self._swaps.worker_said(worker, message)
            case WorkerDied(worker, how):
                self._worker_died(worker, how)
            case WorkerStarted(worker):
                self._log("worker-started", worker=worker)
                self._maps.renewed(worker)
                self._stops_digesting(worker, died=False)
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
            case ArenaGiven(session, arena, nbytes, writable):
                label = f"given back by {self._sessions[session].name or 'client'}"
                self.arenas.take(arena, nbytes, label, session, write=writable, workers_write=True)
                self._sessions[session].arenas.add(arena)
            case Due():
                self._proofs.expire(now)
                self._regions.expire(now)
            case Tick():
                self._tick()
        self._regions.dispatch()
        self._proofs.dispatch()
        self._spares.dispatch()
        done = self._out[:]
        self._out.clear()
        self._timeline.watch(event, done, now)
        return done

    @property
    def next_deadline(self) -> float | None:
        """When a `Due` is next needed; None if the next `Tick` is early enough."""
        deadlines = (self._proofs.next_deadline, self._regions.next_deadline)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def is_coordinated(self) -> bool:
        """Whether a coordinator has been heard recently."""
        return self._link.is_up

    @property
    def unheard_s(self) -> float:
        """Seconds since a coordinator was last heard; 0 while one answers."""
        return self._link.unheard_s

    def may_fetch(self, session: int, arena: int, write: bool) -> Arena:
        """Return the arena whose descriptor this session may have.

        Raises:
            RefusedError: it may not.
        """
        if arena == PAGE_ARENA and not write and session in self._sessions:
            members = (self.members[name] for name in self._sessions[session].members)
            if any(member.permit is not None for member in members):
                return Arena(PAGE_ARENA, PAGE_BYTES, "permits", session, write=False)
        return self.arenas.may_fetch(session, arena, write)

    def check_given(self, session: int, nbytes: int) -> None:
        """Check that an arena may be taken back from a client.

        Raises:
            RefusedError: it has no session, or not the role.
            ArenaError: the node's limit leaves no room.
        """
        found = self._sessions.get(session)
        if found is None:
            raise RefusedError("no session is open here; say Hello first")
        user = f"the user of pid {found.pid}"
        check_role(sidecar.GiveArena(nbytes=nbytes), found.roles, user, "node.roles of this daemon")
        self.arenas.check_room(nbytes)

    def status(self) -> NodeStatus:
        """Return this node's status."""
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

    def queues(self) -> dict[str, int]:
        """Return how much waits for something: answers of the coordinator, arenas, runs of workers."""
        return {"coordinator": len(self._link), "arenas": self.arenas.asked, "runs": self._jobs.active}

    # --- clients ------------------------------------------------------------------------------------------

    def prepare(self, session: int, message: local.RegisterSource | local.RegisterTarget) -> Callable[[], Prepared]:
        """Return a function that checks a registration on another thread; it reads no state that changes."""
        pid = self._sessions[session].pid if session in self._sessions else 0
        return self._registrations.prepare(session, pid, message)

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
        session.check_room(message, self._link.count(session.id) + self.arenas.waiting(session.id))
        match message:
            case local.CreateArena():
                self._create_arena(session, request, message)
            case local.FreeArena(arena):
                self._free_arena(session, arena)
                self._reply(session.id, request, local.Done())
            case local.RegisterSource() | local.RegisterTarget():
                self._registrations.register(session, request, message, prepared)
            case control.RegisterController():
                self._controllers.register(session, request, message)
            case control.Controlled():
                self._controllers.said(session, message)
            case local.Deregister(member) if member in self._controllers:
                self._controllers.remove(session, member, "its client has closed it")
                self._reply(session.id, request, local.Done())
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
            case local.CommitDone(swap, member, paused_s, exchanged):
                found = self._own(session, member)
                if self._commits.committed(swap, found, paused_s, exchanged=exchanged):
                    self._proofs.committed(found)
                    if exchanged and found.flips:
                        self._spares.exchanged(found)
            case local.Restored(member):
                self._registrations.restored(session, request, self._own(session, member))
            case local.Suspend(member):
                self._registrations.suspend(session, request, self._own(session, member))
            case local.Wake(member, is_lost):
                self._registrations.wake(session, request, self._own(session, member), is_lost=is_lost)
            case local.LiveDigests(member) | local.LiveCompared(member):
                self._proofs.client_said(self._own(session, member), message)
            case local.CommitFailed(swap, member, reason, exchanged):
                self._commits.failed(swap, self._own(session, member), reason, exchanged=exchanged)
            case (
                local.StartSwap()
                | local.StartSwaps()
                | local.AbortSwap()
                | local.Evict()
                | local.Forget()
                | local.Reload()
                | local.DrainNode()
                | local.ResumeNode()
                | local.Verify()
                | local.GetStatus()
                | local.GetPlan()
                | local.GetHistory()
                | local.GetDescription()
                | GetTrace()
            ):
                self._link.check()
                if isinstance(message, local.GetStatus):
                    self._link.say(self._update())  # so that the status is current
                self._link.ask(session.id, request, message, PassedOn())
            case _:
                raise ProtocolError(f"{type(message).__name__} is not expected in an open session")

    def _measure(
        self, session: Session, request: int, member: LocalMember, spans: tuple[tuple[int, int, int], ...]
    ) -> None:
        nbytes, rows = sum(rows * row for _, rows, row in spans), sum(rows for _, rows, _ in spans)
        if not 0 < nbytes <= MAX_MEASURED_BYTES or rows > MAX_MEASURED_ROWS:
            raise RefusedError(
                f"{member.id}: {nbytes} bytes in {rows} rows to measure, the limits are {MAX_MEASURED_BYTES} bytes "
                f"and {MAX_MEASURED_ROWS} rows"
            )
        self._out.append(TimePull(session.id, request, member.pid, spans))

    def _own(self, session: Session, member_id: str) -> LocalMember:
        member = self.members.get(member_id)
        if member is None or member.session != session.id:
            raise RefusedError(f"{member_id!r} is not a registration of this session; register again")
        return member

    def _session_closed(self, session_id: int, reason: str) -> None:
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        is_lost = bool(session.members or session.controllers) and not session.leaves
        said = "its client has said goodbye" if session.leaves else reason
        lost = "yes" if is_lost else ""
        self._log("session-closed", session=session_id, pid=session.pid, name=session.name, reason=said, lost=lost)
        for controller in sorted(session.controllers):
            self._controllers.remove(session, controller, reason)
        for member_id in sorted(session.members):
            member = self.members[member_id]
            self._publishing.withdraw_leases(member)
            self._swaps.stop_seeding(member, reason)
            if member.is_source and member.held():
                # published versions outlive the trainer: the slots belong to the daemon
                member.session = None
                member.waiting.clear()
                for slot in member.slots:
                    slot.writing = None
                    self.arenas[slot.arena].session = None
                self._link.say(cluster.DetachShard(member=member_id, reason=reason))
            else:
                kept = not session.leaves and (not member.flips or self._proofs.can_judge(member))
                kept = kept and self._retained.keep(member, session.uid, self._now)
                if kept and member.flips and not is_restoring(member):  # its live arena goes with the session
                    self._exchange(member.live_arena, member.staging)
                    member.content = ()
                self._drop_member(member, reason, keep=kept, tell=not is_restoring(member))
        for arena in sorted(session.arenas):
            self.arenas.free({arena})

    def _create_arena(self, session: Session, request: int, asked: local.CreateArena) -> None:
        labels = ((asked.nbytes, asked.label or session.name or "client"),)
        within_s = PART_OF_TIMEOUT * asked.timeout_s
        self.arenas.ask(WantedArenas(session.id, request, labels, ClientArena(), asked.device, within_s))

    def _given(self, wanted: WantedArenas, arenas: tuple[int, ...]) -> None:
        """Pass finished arenas on to their purpose."""
        match wanted.purpose:
            case ClientArena():
                ((nbytes, label),) = wanted.wanted
                self.arenas.take(
                    arenas[0], nbytes, label, wanted.session, write=True, workers_write=True, device=wanted.device
                )
                self._sessions[wanted.session].arenas.add(arenas[0])
                self._reply(wanted.session, wanted.request, local.ArenaCreated(arena=arenas[0], nbytes=nbytes))
            case MemberArenas():
                self._registrations.arenas_made(wanted, arenas)
            case Constants(_, _, data) as constants:
                ((nbytes, label),) = wanted.wanted
                self.arenas.take(arenas[0], nbytes, label, None, write=False, workers_write=False)
                self._out.append(WriteArena(arenas[0], data))
                self._plans.constants_made(constants, arenas[0])

    def _not_given(self, wanted: WantedArenas, error: RefitdError) -> None:
        self._fail(wanted.session, wanted.request, error)

    def _ask_first(self, wanted: WantedArenas, purpose: MemberArenas) -> None:
        self._registrations.ask_first(wanted, purpose)

    def _epoch_formed(self, plan: str, epoch: str) -> None:
        self._plans.epoch_formed(plan, epoch)

    def _free_arena(self, session: Session, arena: int) -> None:
        if arena not in session.arenas:
            raise RefusedError(f"arena {arena} is not one that this client has allocated, or it is free already")
        for member in self.members.values():
            lent = [lease.places for lease in member.leases.values()]
            if any(arena in places.arenas() for places in (member.live, *lent)):
                raise RefusedError(f"arena {arena} holds tensors of {member.id}; close that registration first")
        session.arenas.discard(arena)
        self.arenas.free({arena})

    def _drop_member(self, member: LocalMember, reason: str, tell: bool = True, keep: bool = False) -> None:
        self._swaps.stop_seeding(member, reason)
        self.members.pop(member.id, None)
        if member.session in self._sessions:
            self._sessions[member.session].members.discard(member.id)
        for waiting in member.waiting:
            self._fail(waiting.session, waiting.request, RefusedError(f"{member.id}: {reason}"))
        self._permits.withdraw(member)
        self._commits.member_left(member)
        self._proofs.left(member, reason)
        self._spares.left(member)
        if tell:
            self._link.say(cluster.RemoveShard(member=member.id, reason=reason))
        if keep:
            for arena in member.arenas():
                self.arenas.retain(arena)
        else:
            self.arenas.free(set(member.arenas()))

    # --- coordinator --------------------------------------------------------------------------------------

    def _coordinator(self, request: int, message: cluster.CoordinatorMessage) -> None:
        self._link.heard()
        match message:
            case cluster.HeartbeatAnswer(clock_s):
                self._clock.heard(request, clock_s, self._now)
                self._permits.answered(request)
            case cluster.NodeWelcome(_, boot, lease_s, clock_s):
                self._refusal = ""
                self._permits.granted(boot, lease_s)
                self._welcomed(boot)
                self._clock.heard(request, clock_s, self._now)
                self._permits.answered(request)
            case local.Failure(code, text) if code == "unknown-node":
                self._link.boot = ""
                self._link.fail_all(f"the coordinator has restarted: {text}")
                self._hello()
            case _ if self._link.waits_for(request):
                self._link.reply(request, message)
            case local.Failure(_, text):
                self._link.unreachable(text)
                if text != self._refusal:  # it is asked every second
                    self._refusal = text
                    self._log("coordinator-refused", reason=text)
            case cluster.LoadPlan():
                self._plans.load(message)
            case cluster.DropPlan(plan):
                self.arenas.free(self._plans.drop(plan))
            case cluster.EpochValue():
                self._epochs.value(message)
            case cluster.LiveIs(live):
                self._live[live.model] = live
            case cluster.MayDrop(member, versions, reason):
                if member in self.members:
                    self._publishing.may_drop(self.members[member], versions, reason)
            case cluster.FenceMember(member, reason):
                if member in self.members:
                    self._commits.fence_behind(self.members[member], reason)
            case cluster.Pause(swap, version, members):
                self._commits.pause(swap, version, members)
            case cluster.Stage():
                self._swaps.stage(message)
            case cluster.StageSpare():
                self._spares.stage(message)
            case CollectTrace():
                self._link.say(self._timeline.part(message, self._node, self._host, self._now))
            case cluster.CheckMembers():
                self._proofs.check(message, self._now)
            case cluster.DigestRegions():
                self._regions.begin(message, self._now)
            case cluster.CommitStaged(swap, version, _, controlled):
                self._commits.begin(swap, version, controlled)
            case control.Control():
                self._controllers.told(message)
            case cluster.FlipMember(swap, member, step, origin):
                self._commits.in_step(member, local.FlipAt(swap, member, step, origin))
            case cluster.PassMember(swap, member):
                self._commits.in_step(member, local.PassPoll(swap, member))
            case cluster.Abort(swap, reason):
                self._abort(swap, reason)
            case cluster.EvictMember(member, reason):
                self._evict(member, reason)
            case cluster.ForgetRetained(model):
                self.arenas.free(self._retained.forget(model))
            case cluster.EndSwap(swap, version, members):
                self._publishing.release(self.members.values(), swap)
                self._publishing.end_unread((self.members[m] for m in members if m in self.members), version)
            case _:
                pass  # the reply to a request whose client has gone

    def _evict(self, member_id: str, reason: str) -> None:
        """Remove an evicted target, or a detached source, and tell its client.

        Ignored for a source whose client is connected.
        """
        member = self.members.get(member_id)
        if member is None or (member.is_source and member.session is not None):
            return
        self._log("evicted", member=member_id, reason=reason)
        if member.session is not None:
            told = local.Evicted(member=member_id, reason=reason, exchanged=member.exchanged)
            self._reply(member.session, 0, told)
        self._drop_member(member, reason, tell=False)

    def _welcomed(self, boot: str) -> None:
        known, self._link.boot = self._link.boot, boot
        if known == boot:
            return
        self._log("coordinator", boot=boot)
        self._clock.forget()
        # this coordinator has aborted every undecided swap, but its messages about that may have been lost
        states = [member.state for member in self.members.values()]
        halted = {state.swap for state in states if state.step in (Step.HALTING, Step.HALTED)}
        begun = self._swaps.staging() | self._spares.staging()
        for swap in sorted(begun | {swap for swap in halted if swap is not None}):
            self._abort(swap, "the coordinator was out of reach")
        self._regions.stop()
        # staged swaps may have been decided and stay staged, but they read their sources no more
        for swap in sorted({swap for member in self.members.values() for swap in member.read_by()}):
            self._publishing.release(self.members.values(), swap)
        self.arenas.free(self._plans.drop_all())
        self._registrations.readmit()
        self._controllers.readmit()

    def _answered(self, waiting: Waiting, reply: Message) -> None:
        """Route an answer to the part that made the request."""
        session, request, about = waiting.session, waiting.request, waiting.about
        if isinstance(about, Described):
            if isinstance(reply, local.Failure) and reply.code == "unknown-shard":
                self._registrations.tell_again(session, request, about)
                return
            about = about.about
        match about:
            case PassedOn():
                self._reply(session, request, reply)
            case Asked():
                self._registrations.asked(about, reply)
            case Introduced():
                self._registrations.introduced(session, request, about, reply)
            case Returned():
                self._registrations.returned(session, request, about, reply)
            case Readmitted():
                self._registrations.readmitted(about, reply)
            case Slept():
                self._registrations.slept(session, request, about, reply)
            case ControllerIntroduced():
                self._controllers.introduced(self._sessions.get(session), request, about, reply)
            case Announced():
                self._publishing.announced(session, request, about, reply)

    def _abort(self, swap: str, reason: str) -> None:
        self._spares.abort(swap)
        self._swaps.abort(swap, reason)
        self._regions.forget(swap)
        self._publishing.release(self.members.values(), swap)

    def _hello(self) -> None:
        live = tuple(self._live.values())
        self._beat(cluster.NodeHello(protocol=PROTOCOL_VERSION, status=self.status(), live=live))

    def _update(self) -> cluster.NodeUpdate:
        """Return this node's status and the targets whose state the coordinator has not seen yet."""
        moved = [m for m in self.members.values() if not (m.is_source or m.is_told) and m.boot == self._link.boot]
        for member in moved:
            member.is_told = True
        states = tuple(
            cluster.TargetMoved(m.id, brief(str(m.state)), tuple(m.history), bool(m.spare_found)) for m in moved
        )
        return cluster.NodeUpdate(status=self.status(), moved=states)

    def _beat(self, message: cluster.NodeHello | cluster.NodeUpdate) -> None:
        """Send a heartbeat; its answer renews this node's permits."""
        number = self._link.next_number()
        self._permits.sent(number, self._now)
        self._clock.sent(number, self._now)
        self._link.say(message, number)

    # --- workers and time ---------------------------------------------------------------------------------

    def _worker_died(self, worker: int, how: str) -> None:
        pid = self._worker_pids.pop(worker, 0)
        self._log("worker-died", worker=worker, pid=pid, how=how)
        self._maps.renewed(worker)
        self._stops_digesting(worker, died=True)
        who = f"worker {worker} (pid {pid})" if pid else f"worker {worker}"  # no pid if it died early
        self._swaps.worker_died(worker, f"{who} on node {self._node} (host {self._host})", how)

    def _restart(self, worker: int) -> None:
        """Replace a worker whose current work is no longer wanted."""
        self._out.append(RestartWorker(worker))
        self._maps.renewed(worker)
        self._stops_digesting(worker, died=False)

    def _stops_digesting(self, worker: int, *, died: bool) -> None:
        self._proofs.worker_gone(worker, died=died)
        self._spares.worker_gone(worker, died=died)
        self._regions.worker_gone(worker, died=died)

    def _exchange(self, arena: int, other: int) -> None:
        for worker in self.arenas.exchange(arena, other):
            self._replace_worker(worker, f"arenas {arena} and {other} were exchanged, and it has mapped only one")

    def _replace_worker(self, worker: int, reason: str) -> None:
        self._swaps.replace_worker(worker, reason)

    def _is_swapping(self) -> bool:
        return bool(self._swaps.staging()) or self._jobs.active > 0

    def _tick(self) -> None:
        if self._link.boot:
            self._beat(self._update())
        else:
            self._hello()
        if self._link.boot and not self._link.is_up:
            self._log("coordinator-silent", seconds=self._link.unheard_s)
            self._link.boot = ""
            self._commits.fence("the coordinator is out of reach, and may have decided")
            self._link.fail_all(f"the coordinator has said nothing for {COORDINATOR_SILENCE_S:.0f} s")
        self._swaps.tick()
        self.arenas.free(self._plans.unneeded())
        self._proofs.expire(self._now)
        self._proofs.tick()
        self._spares.tick()
        self._regions.expire(self._now)
        self.arenas.expire(self._now)
        self._publishing.expire(self.members.values(), self._now)
        for member in self.members.values():
            self._publishing.ask_room(member)

    # --- output -------------------------------------------------------------------------------------------

    def _reply(self, session: int, request: int, message: Message) -> None:
        self._out.append(ToClient(session, request, message))

    def _fail(self, session: int, request: int, error: RefitdError) -> None:
        self._reply(session, request, local.Failure(code=error.code, message=str(error)))

    def _log(self, event: str, **fields: object) -> None:
        self._out.append(Log(event, fields))
