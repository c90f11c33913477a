"""The state of the daemon, without sockets: the router passes each event to one section of the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from refitd import __version__
from refitd.daemon.arenas import LocalArenas, RetainedTargets, is_restoring
from refitd.daemon.commits import Commits, LocalControllers
from refitd.daemon.comparisons import RegionDigests, Spares
from refitd.daemon.digest_work import DigestQueue
from refitd.daemon.effects import Effects
from refitd.daemon.jobs import JobTable, LocalEpochs, WorkerArenas
from refitd.daemon.links import (
    COORDINATOR_SILENCE_S,
    ClientSession,
    CoordinatorClock,
    CoordinatorLink,
    Permits,
    RefusedRegistrations,
)
from refitd.daemon.members import Arena, LocalMember
from refitd.daemon.plans import LocalPlans
from refitd.daemon.publishing import Publishing
from refitd.daemon.registration import LocalRegistrations, Registering
from refitd.daemon.swaps import LocalSwaps
from refitd.daemon.timeline import Timeline
from refitd.daemon.verification import Proofs
from refitd.errors import RefusedError
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import PROTOCOL_VERSION, clipped
from refitd.protocol.keys import check_role
from refitd.protocol.reports import LaneStatus, NodeStatus
from refitd.text import brief


class DaemonState:
    """One node's daemon as a value: `copy.deepcopy` makes an independent copy."""

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
        warms: str = "",
        lanes: Sequence[LaneStatus] = (),
        *,
        has_kernels: bool = False,
    ) -> None:
        self.node, self.host, self.pid = node, host, pid
        self.address, self.services, self.workers, self.lanes = address, services, workers, tuple(lanes)
        self.has_kernels = has_kernels
        self.worker_pids: dict[int, int] = {}
        self.problems: tuple[str, ...] = ()
        self.now = self.started = 0.0  # both are set by the first event
        self.sessions: dict[int, ClientSession] = {}
        self.members: dict[str, LocalMember] = {}
        self.refused = RefusedRegistrations(node, self.sessions)
        self.link = CoordinatorLink(node)
        self.clock = CoordinatorClock()
        self.permits = Permits(self.members)
        self.maps = WorkerArenas(workers, [lane.gpu for lane in lanes if lane.gpu])
        self.jobs = JobTable(self.maps)
        self.timeline = Timeline(self.jobs, self.members, self.worker_pids, self.clock)
        self.retained = RetainedTargets(keep_targets_s)
        self.arenas = LocalArenas(node, max_arena_bytes, self.sessions, self.retained, self.jobs, self.maps)
        self.epochs = LocalEpochs(node, address, self.maps, workers=workers, warms=warms)
        self.plans = LocalPlans(node, workers, self.jobs, self.epochs, self.arenas)
        self.commits = Commits(self.members, self.arenas)
        self.digests = DigestQueue(node, workers, self.maps)
        self.proofs = Proofs(self.members, self.digests)
        self.spares = Spares(self.members, self.digests, self.commits)
        self.regions = RegionDigests(self.members, self.digests)
        self.swaps = LocalSwaps(
            node,
            workers,
            self.members,
            self.plans,
            self.commits,
            self.jobs,
            self.epochs,
            self.maps,
            self.digests,
            self.proofs.seeds,
        )
        self.controllers = LocalControllers(node, self.link)
        self.publishing = Publishing(self.swaps, self.link)
        self.registrations = LocalRegistrations(
            node,
            self.sessions,
            self.members,
            self.arenas,
            self.retained,
            self.permits,
            self.proofs,
            self.link,
        )
        self.untold: set[str] = set()  # targets whose state the coordinator has not received
        self.live: dict[str, cluster.LiveClaim] = {}  # by model: the coordinator's latest claims
        self.boot = ""  # of the coordinator that last accepted this node
        self.next_deadline: float | None = None  # when the shell must feed `Due`, if before the next `Tick`
        self.refusal = ""  # the reason for which a coordinator refuses this node, as last logged

    # --- reads by the shell -------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """Return when a `Due` is next needed; None if the next `Tick` is early enough."""
        deadlines = (self.proofs.next_deadline, self.regions.next_deadline)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def queues(self) -> dict[str, int]:
        """Return the lengths of the queues: requests to the coordinator, requested arenas, runs of workers."""
        return {"coordinator": len(self.link), "arenas": self.arenas.asked, "runs": len(self.jobs.runs)}

    def status(self) -> NodeStatus:
        """Return this node's status."""
        return NodeStatus(
            node=self.node,
            host=self.host,
            pid=self.pid,
            workers=tuple(self.worker_pids.get(i, 0) for i in range(self.workers)),
            clients=len(self.sessions),
            arenas=len(self.arenas),
            arena_bytes=sum(a.nbytes for a in self.arenas.values()),
            address=self.address,
            services=self.services,
            gpus=tuple(self.arenas.gpus()),
            lanes=self.lanes,
            has_kernels=self.has_kernels,
            problems=tuple(clipped(text) for text in (*self.problems, *self.epochs.problems(self.now))),
            refused=self.refused.report(self.now),
            refitd=__version__,
            uptime_s=max(0.0, self.now - self.started),
        )

    def update(self) -> cluster.NodeUpdate:
        """Return this node's status and the targets whose state has not been sent; mark their states as sent."""
        untold = [member for member in self.members.values() if member.id in self.untold]
        moved = [member for member in untold if self.permits.has_admitted(member.id)]
        self.untold = {member.id for member in untold if not self.permits.has_admitted(member.id)}
        states = tuple(
            cluster.TargetMoved(m.id, brief(str(m.state)), m.events(), bool(m.proofs.spare_found), m.lacks_base)
            for m in moved
        )
        return cluster.NodeUpdate(status=self.status(), moved=states)

    def registering(self, session: int, message: local.RegisterSource | local.RegisterTarget) -> Registering:
        """Return a value that checks a registration on another thread; it reads no state that may change."""
        pid = self.sessions[session].pid if session in self.sessions else 0
        arenas = {number: arena for number, arena in self.arenas.items() if arena.session == session}
        return Registering(session, pid, message, arenas)

    def may_fetch(self, session: int, arena: int, write: bool) -> Arena:
        """Return the arena whose descriptor this session may fetch; raises RefusedError."""
        members = self.sessions[session].members if session in self.sessions else ()
        has_permits = any(self.permits.of(name) is not None for name in members)
        return self.arenas.may_fetch(session, arena, write, has_permits=has_permits)

    def check_given(self, session: int, nbytes: int) -> None:
        """Check that a client may return an arena to the daemon.

        Raises:
            RefusedError: the client has no session, or not the role.
            ArenaError: the node's limit leaves no room.
        """
        found = self.sessions.get(session)
        if found is None:
            raise RefusedError("no session is open here; say Hello first")
        user = f"the user of pid {found.pid}"
        check_role(sidecar.GiveArena(nbytes=nbytes), found.roles, user, "node.roles of this daemon")
        self.arenas.check_room(nbytes)

    # --- changes in several sections -----------------------------------------------------------------------

    def drop(
        self, effects: Effects, member: LocalMember, reason: str, *, tell: bool = True, keep: bool = False
    ) -> None:
        """Remove a member from every section; `keep` retains its arenas, `tell` reports it to the coordinator."""
        self.swaps.stop_seeding(effects, member, reason)
        self.members.pop(member.id, None)
        effects.moved.pop(member.id, None)
        self.untold.discard(member.id)
        if member.session in self.sessions:
            self.sessions[member.session].members.discard(member.id)
        for waiting in member.source.waiting if member.source is not None else ():
            effects.fail(waiting.session, waiting.request, RefusedError(f"{member.name}: {reason}"))
        self.permits.withdraw(effects, member)
        self.commits.member_left(member)
        self.proofs.left(effects, member, reason)
        self.spares.left(member)
        self.digests.left(member)
        if tell:
            effects.say(local.Deregister(member=member.id, reason=reason))
        if keep:
            for arena in member.arenas():
                self.arenas.retain(effects, arena)
        else:
            self.arenas.free(effects, set(member.arenas()))

    def evict(self, effects: Effects, member_id: str, reason: str) -> None:
        """Remove an evicted target, or a detached source, and tell its client.

        Ignored for a source whose client is connected.
        """
        member = self.members.get(member_id)
        if member is None or (member.registration.is_source and member.session is not None):
            return
        effects.log("evicted", member=member_id, reason=reason)
        if member.session is not None:
            told = local.Evicted(member=member_id, reason=reason, exchanged=self.commits.exchanged_in(member))
            effects.tell(member.session, 0, told)
        self.drop(effects, member, reason, tell=False)

    def closed(self, effects: Effects, session: ClientSession, reason: str) -> None:
        """End a session; keep its sources' published versions, and retain its targets for engines that return."""
        is_lost = bool(session.members or session.controllers) and not session.leaves
        said = "its client has said goodbye" if session.leaves else reason
        lost = "yes" if is_lost else ""
        effects.log("session-closed", session=session.id, pid=session.pid, name=session.name, reason=said, lost=lost)
        for controller in sorted(session.controllers):
            self.controllers.remove(effects, session, controller, reason)
        for member_id in sorted(session.members):
            member = self.members[member_id]
            self.publishing.withdraw_leases(effects, member)
            self.swaps.stop_seeding(effects, member, reason)
            if (source := member.source) is not None and source.held():
                # published versions outlive the trainer: the slots belong to the daemon
                member.session = None
                source.waiting.clear()
                for slot in source.slots:
                    slot.writing = None
                    self.arenas[slot.arena].session = None
                effects.say(local.Deregister(member=member_id, reason=reason, detached=True))
            else:
                kept = not session.leaves and (not member.registration.flips or self.proofs.can_judge(member))
                kept = kept and self.retained.keep(member, session.uid, effects.now)
                if (
                    kept and member.registration.flips and not is_restoring(member)
                ):  # its live arena is freed with the session
                    self.commits.exchange(effects, member)
                    member.memory = replace(member.memory, content=())
                self.drop(effects, member, reason, keep=kept, tell=not is_restoring(member))
        for arena in sorted(session.arenas):
            self.arenas.free(effects, {arena})

    # --- the coordinator ---------------------------------------------------------------------------------

    def welcomed(self, effects: Effects, boot: str) -> None:
        """Handle a coordinator's acceptance of this node; if its `boot` is new, announce all ranks to it."""
        known, self.link.boot = self.link.boot, boot
        if known == boot:
            return
        effects.log("coordinator" if self.boot in ("", boot) else "coordinator-changed", boot=boot)
        self.boot = boot
        self.clock.forget()
        # this coordinator has aborted every undecided swap, but its messages about that may have been lost
        for swap in sorted(self.swaps.staging() | self.spares.staging()):
            self.abort(effects, swap, "the coordinator was out of reach")
        self.regions.stop()
        # staged swaps may have been decided and stay staged, but they no longer read their sources
        for swap in sorted({swap for member in self.members.values() for swap in member.read_by()}):
            self.publishing.release(effects, self.members.values(), swap)
        self.arenas.free(effects, self.plans.drop_all(effects))
        self.registrations.readmit(effects)
        self.controllers.readmit(effects)

    def abort(self, effects: Effects, swap: str, reason: str) -> None:
        """Abort a swap in every section; once this returns, no worker writes for it."""
        self.spares.abort(swap)
        self.swaps.abort(effects, swap, reason)
        self.regions.forget(swap)
        self.publishing.release(effects, self.members.values(), swap)

    def beat(self, effects: Effects) -> None:
        """Send a heartbeat or a hello. If the coordinator is silent, fail the requests that wait for it."""
        if not self.link.boot:
            self.hello(effects)
            return
        self._send_beat(effects, self.update())
        self.registrations.readmit_refused(effects)
        if self.link.unheard_s >= COORDINATOR_SILENCE_S:
            effects.log("coordinator-silent", seconds=self.link.unheard_s)
            self.link.boot = ""
            self.link.fail_all(effects, f"the coordinator has said nothing for {COORDINATOR_SILENCE_S:.0f} s")

    def hello(self, effects: Effects) -> None:
        """Ask the coordinator to accept this node."""
        live = tuple(self.live.values())
        hello = cluster.NodeHello(protocol=PROTOCOL_VERSION, status=self.status(), live=live)
        self._send_beat(effects, hello)

    def _send_beat(self, effects: Effects, message: cluster.NodeHello | cluster.NodeUpdate) -> None:
        """Send a message whose answer renews this node's permits."""
        number = self.link.next_number()
        self.permits.sent(number, self.now)
        self.clock.sent(number, self.now)
        effects.say(message, number)
