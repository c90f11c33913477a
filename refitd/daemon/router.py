"""Route each event, message and answer to one section of the daemon's state."""

from __future__ import annotations

from refitd.daemon.actions import (
    ArenaHandedBack,
    ArenasMade,
    ArenasRefused,
    ClientSaid,
    CloseArena,
    CoordinatorSaid,
    CoordinatorUnreachable,
    Due,
    Event,
    Follow,
    Instruction,
    NotSent,
    Prepared,
    Problems,
    SessionClosed,
    SessionLeaves,
    SessionOpened,
    TookOver,
    Unsent,
    WorkerDied,
    WorkerSaid,
    WorkerStarted,
    WriteArena,
)
from refitd.daemon.effects import (
    Announced,
    Answered,
    Asked,
    ClientArena,
    Constants,
    ControllerIntroduced,
    Described,
    Effects,
    Introduced,
    Leaves,
    MemberArenas,
    Note,
    PassedOn,
    Proven,
    Readmitted,
    Replace,
    RetainedCompared,
    Returned,
    Slept,
    SlotsFreed,
    Waiting,
    WantedArenas,
)
from refitd.daemon.links import ClientSession
from refitd.daemon.registration import PART_OF_TIMEOUT
from refitd.daemon.state import DaemonState
from refitd.errors import ProtocolError, RefitdError
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import Message
from refitd.protocol.keys import ALL_ROLES, check_names, check_role
from refitd.protocol.reports import GetTrace
from refitd.states import Busy, Tick


def handle(state: DaemonState, event: Event, now: float) -> list[Instruction]:
    """Handle an event and return instructions. A refused request leaves the state unchanged."""
    state.now = state.link.now = now
    state.started = state.started or now
    effects = Effects(now)
    _handle(state, effects, event)
    while True:
        if state.digests.work:
            state.digests.dispatch(effects, is_swapping=bool(state.swaps.staging() or state.jobs.runs))
        if not effects.notes:
            break
        while effects.notes:
            _note(state, effects, effects.notes.popleft())
    state.next_deadline = state.deadline() if state.proofs.asked or state.regions.asked else None
    state.untold |= effects.moved.keys()
    has_refused = bool(state.refused.asked) and state.refused.watch(effects, now)
    if (has_refused or effects.is_news) and state.link.is_up:
        effects.say(state.update())
    done: list[Instruction] = effects
    if effects.moved:
        permits = Effects(now)  # before messages that the moved targets act on
        for member in effects.moved.values():
            state.permits.renew(permits, member)
        done = [*permits, *effects]
    state.timeline.watch(event, done, now)
    return done


def _handle(state: DaemonState, effects: Effects, event: Event) -> None:
    match event:
        case ClientSaid(session, request, message, prepared):
            if (client := state.sessions.get(session)) is None:
                return
            try:
                check_names(message)
                if client.roles != ALL_ROLES:
                    check_role(message, client.roles, f"the user of pid {client.pid}", "node.roles of this daemon")
                sessions = [waiting.session for waiting in state.link.waiting.values()]
                sessions += [wanted.session for wanted in state.arenas.requests.values()]
                client.check_room(message, sessions.count(session))
                _client_said(state, effects, client, request, message, prepared)
            except RefitdError as exc:
                effects.log("refused", session=session, message=type(message).__name__, reason=str(exc))
                effects.fail(session, request, exc)
        case CoordinatorSaid(request, message):
            _coordinator_said(state, effects, request, message)
        case WorkerSaid(worker, sidecar.WorkerReady(pid)):
            state.worker_pids[worker] = pid
        case WorkerSaid(_, sidecar.SpansRead() as message):
            state.digests.worker_said(effects, message)
        case WorkerSaid(worker, sidecar.EpochJoined() as message):
            formed = state.epochs.worker_said(effects, worker, message)
            if formed is not None:
                state.plans.epoch_formed(effects, *formed)
        case WorkerSaid(worker, message):
            state.swaps.worker_said(effects, worker, message)
        case Busy(seconds):
            state.link.was_busy(seconds)
        case Unsent(request, lost):
            state.link.unsent(effects, request, lost)
        case CoordinatorUnreachable(reason):
            state.link.unreachable(reason)
        case WorkerDied(worker, how):
            _worker_died(state, effects, worker, how)
        case WorkerStarted(worker):
            effects.log("worker-started", worker=worker)
            state.maps.renewed(effects, worker)
            state.digests.worker_gone(effects, worker, died=False)
        case Problems(texts):
            state.problems = texts
        case TookOver(member, exchanged):
            # a separate event, because listing tensors to digest is slow and must not delay the end of the swap
            if (found := state.members.get(member)) is not None:
                state.proofs.committed(effects, found)
                if exchanged and found.registration.flips:
                    state.spares.exchanged(effects, found)
        case NotSent(worker, message, reason):
            state.swaps.not_sent(effects, worker, message, reason)
        case SessionOpened(session, pid, name, roles, uid):
            state.sessions[session] = ClientSession(session, pid, name, roles, uid)
            effects.log("session", session=session, pid=pid, name=name)
        case SessionLeaves(session):
            if session in state.sessions:
                state.sessions[session].leaves = True
        case SessionClosed(session, reason):
            state.refused.closed(session)
            if (ended := state.sessions.pop(session, None)) is not None:
                state.closed(effects, ended, reason)
        case ArenasMade():
            _arenas_made(state, effects, event)
        case ArenasRefused():
            if (unsure := state.arenas.refused(effects, event)) is not None:
                state.registrations.ask_first(effects, unsure)
        case ArenaHandedBack(session, arena, nbytes, writable):
            label = f"given back by {state.sessions[session].name or 'client'}"
            state.arenas.take(effects, arena, nbytes, label, session, write=writable, workers_write=True)
            state.sessions[session].arenas.add(arena)
        case Due():
            state.proofs.expire(effects)
            state.regions.expire(effects)
        case Tick():
            _tick(state, effects)


def _note(state: DaemonState, effects: Effects, note: Note) -> None:
    match note:
        case Answered(waiting, reply):
            _answered(state, effects, waiting, reply)
        case Proven():
            state.swaps.proven(effects, note)
        case RetainedCompared():
            state.registrations.compared(effects, note)
        case SlotsFreed():
            state.publishing.slots_freed(effects, state.members.values())
        case Leaves(member, reason, keep):
            state.drop(effects, member, reason, tell=False, keep=keep)
        case Replace(worker, reason):
            state.swaps.replace_worker(effects, worker, reason)


def _tick(state: DaemonState, effects: Effects) -> None:
    state.beat(effects)
    for worker, reason in state.epochs.tick(effects):
        state.swaps.replace_worker(effects, worker, reason)
    state.commits.tick(effects)
    state.arenas.free(effects, state.plans.unneeded())
    state.proofs.expire(effects)
    state.proofs.tick(effects)
    state.spares.tick(effects)
    state.digests.tick()
    state.regions.expire(effects)
    state.arenas.expire(effects)
    state.refused.expire(state.now)
    state.publishing.expire(effects, state.members.values())
    for member in state.members.values():
        state.publishing.ask_room(effects, member)


# --- the coordinator ----------------------------------------------------------------------------------


def _coordinator_said(state: DaemonState, effects: Effects, request: int, message: cluster.CoordinatorMessage) -> None:
    state.link.heard()
    match message:
        case cluster.HeartbeatAnswer(clock_s):
            state.clock.heard(request, clock_s, state.now)
            state.permits.answered(effects, request)
        case cluster.NodeWelcome(_, boot, lease_s, clock_s):
            state.refusal = ""
            state.permits.granted(lease_s)
            state.welcomed(effects, boot)
            state.clock.heard(request, clock_s, state.now)
            state.permits.answered(effects, request)
        case local.Failure(code, _) if code == "unknown-node":
            state.link.boot = ""
            state.link.fail_all(
                effects,
                "the coordinator has restarted, and does not know of this request; `refitctl history` says what "
                "became of a swap; try again",
            )
            state.hello(effects)
        case local.Failure(code, text) if code == cluster.LEAVES:
            effects.log("coordinator-left", reason=text)
            state.link.left(effects, text)
        case _ if (waiting := state.link.answered(request, message)) is not None:
            _answered(state, effects, waiting, message)
        case local.Failure(_, text):
            state.link.unreachable(text)
            if text != state.refusal:  # log each reason once: the node asks every second
                state.refusal = text
                effects.log("coordinator-refused", reason=text)
        case cluster.LoadPlan():
            state.plans.load(effects, message)
        case cluster.DropPlan(plan):
            state.arenas.free(effects, state.plans.drop(effects, plan))
        case cluster.LiveIs(live):
            state.live[live.model] = live
        case local.MayDrop(member, versions, reason):
            if member in state.members:
                state.publishing.may_drop(effects, state.members[member], versions, reason)
        case local.Fence(member, reason):
            if member in state.members:
                state.commits.fence_behind(effects, state.members[member], reason)
        case cluster.Stage() if message.members:
            state.spares.stage(effects, message)
        case cluster.Stage():
            state.swaps.stage(effects, message)
        case GetTrace():
            effects.say(state.timeline.part(message, state.node, state.host, state.now))
        case cluster.CheckMembers():
            state.proofs.check(effects, message)
        case cluster.DigestRegions():
            state.regions.begin(effects, message)
        case cluster.CommitStaged():
            state.commits.begin(effects, message)
        case local.Control():
            state.controllers.told(effects, message)
        case local.FlipAt():
            state.commits.in_step(effects, message)
        case cluster.Abort(swap, reason):
            state.abort(effects, swap, reason)
        case local.Evicted(member, reason):
            state.evict(effects, member, reason)
        case local.Forget(model):
            state.arenas.free(effects, state.retained.forget(model))
        case cluster.EndSwap(swap, version, members):
            state.publishing.release(effects, state.members.values(), swap, (version, members))
        case _:
            pass  # the reply to a request whose client has left


def _answered(state: DaemonState, effects: Effects, waiting: Waiting, reply: Message) -> None:
    """Pass the coordinator's answer to the section of the state that asked."""
    session, request, about = waiting.session, waiting.request, waiting.about
    if isinstance(about, Described):
        if isinstance(reply, local.Failure) and reply.code == "unknown-shard":
            state.registrations.tell_again(effects, session, request, about)
            return
        about = about.about
    match about:
        case PassedOn():
            effects.tell(session, request, reply)
        case Asked():
            state.registrations.asked(effects, about, reply)
        case Introduced():
            state.registrations.introduced(effects, session, request, about, reply)
        case Returned():
            state.registrations.returned(effects, session, request, about, reply)
        case Readmitted():
            state.registrations.readmitted(effects, about, reply)
        case Slept():
            state.registrations.slept(effects, session, request, about, reply)
        case ControllerIntroduced():
            state.controllers.introduced(effects, state.sessions.get(session), request, about, reply)
        case Announced():
            state.publishing.announced(effects, session, request, about, reply)


# --- workers ------------------------------------------------------------------------------------------


def _worker_died(state: DaemonState, effects: Effects, worker: int, how: str) -> None:
    pid = state.worker_pids.pop(worker, 0)
    effects.log("worker-died", worker=worker, pid=pid, how=how)
    state.maps.renewed(effects, worker)
    state.digests.worker_gone(effects, worker, died=True)
    who = f"worker {worker} (pid {pid})" if pid else f"worker {worker}"  # no pid if it died early
    state.swaps.worker_died(effects, worker, f"{who} on node {state.node} (host {state.host})", how)


# --- clients ------------------------------------------------------------------------------------------


def _client_said(
    state: DaemonState,
    effects: Effects,
    session: ClientSession,
    request: int,
    message: local.ClientRequest,
    prepared: Prepared | None,
) -> None:
    match message:
        case local.CreateArena():
            label = message.label or session.name or "client"
            within_s = PART_OF_TIMEOUT * message.timeout_s
            wanted = ((message.nbytes, label),)
            asked = WantedArenas(session.id, request, wanted, ClientArena(), message.device, within_s)
            state.arenas.ask(effects, asked)
        case local.FreeArena(arena):
            state.arenas.free_own(effects, session, arena, state.members.values())
            effects.tell(session.id, request, local.Done())
        case local.RegisterSource() | local.RegisterTarget():
            state.refused.await_answer(session, request, message)
            state.registrations.register(effects, session, request, message, prepared)
        case local.RegisterController():
            state.controllers.register(effects, session, request, message)
        case local.Controlled():
            state.controllers.said(effects, session, message)
        case local.Deregister(member) if member in state.controllers:
            state.controllers.remove(effects, session, member, "its client has closed it")
            effects.tell(session.id, request, local.Done())
        case local.Deregister(member):
            state.drop(effects, session.own(state.members, member), "its client has closed it")
            effects.tell(session.id, request, local.Done())
        case local.BeginPublish(member, version, timeout_s):
            deadline = state.now + timeout_s
            state.publishing.begin(effects, session.own(state.members, member), session.id, request, version, deadline)
        case local.Wrote(member):
            state.publishing.wrote(effects, session.own(state.members, member), message)
        case local.Publish(member, _, None):
            state.publishing.lend(effects, session.own(state.members, member), session.id, request, message)
        case local.Publish(member):
            state.publishing.publish(effects, session.own(state.members, member), session.id, request, message)
        case local.Withdraw(member, version):
            state.publishing.withdraw(effects, session.own(state.members, member), version, "it was withdrawn")
            effects.tell(session.id, request, local.Done())
        case local.StepReached(_, member):
            state.commits.step_reached(effects, session.own(state.members, member), message)
        case local.CommitDone(swap, member, paused_s, exchanged):
            found = session.own(state.members, member)
            if state.commits.committed(effects, swap, found, paused_s, exchanged=exchanged):
                effects.append(Follow(TookOver(found.id, exchanged)))
        case local.Restored(member):
            state.registrations.restored(effects, session, request, session.own(state.members, member))
        case local.Suspend(member):
            state.registrations.suspend(effects, session, request, session.own(state.members, member), message)
        case local.LiveChecked(member):
            state.proofs.client_said(effects, session.own(state.members, member), message)
        case local.CommitFailed(swap, member, reason, exchanged):
            state.commits.failed(effects, swap, session.own(state.members, member), reason, exchanged=exchanged)
        case _ if isinstance(message, local.ForwardedRequest):
            state.link.check()
            if isinstance(message, local.GetStatus):
                effects.say(state.update())  # the coordinator must have the current status before it answers
            state.link.ask(effects, session.id, request, message, PassedOn())
        case _:
            raise ProtocolError(f"{type(message).__name__} is not expected in an open session")


# --- arenas -------------------------------------------------------------------------------------------


def _arenas_made(state: DaemonState, effects: Effects, event: ArenasMade) -> None:
    wanted = state.arenas.made(effects, event)
    if wanted is None:
        return
    try:
        _give_arenas(state, effects, wanted, event.arenas)
    except RefitdError as exc:
        for arena in event.arenas:
            effects.append(CloseArena(arena))
        effects.fail(wanted.session, wanted.request, exc)


def _give_arenas(state: DaemonState, effects: Effects, wanted: WantedArenas, arenas: tuple[int, ...]) -> None:
    """Hand new arenas to the request that asked for them; if it is refused, no arena is used."""
    match wanted.purpose:
        case ClientArena():
            ((nbytes, label),) = wanted.wanted
            state.arenas.take(
                effects,
                arenas[0],
                nbytes,
                label,
                wanted.session,
                write=True,
                workers_write=True,
                device=wanted.device,
            )
            state.sessions[wanted.session].arenas.add(arenas[0])
            effects.tell(wanted.session, wanted.request, local.ArenaDescriptor(arena=arenas[0], nbytes=nbytes))
        case MemberArenas():
            state.registrations.arenas_made(effects, wanted, arenas)
        case Constants(_, _, data) as constants:
            ((nbytes, label),) = wanted.wanted
            state.arenas.take(effects, arenas[0], nbytes, label, None, write=False, workers_write=False)
            effects.append(WriteArena(arenas[0], data))
            state.plans.constants_made(effects, constants, arenas[0])
