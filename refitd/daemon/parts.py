"""The parts of a daemon's state, wired together, and the operations that involve several of them."""

from __future__ import annotations

from refitd.daemon.actions import Instruction, RestartWorker, ToClient, WriteArena
from refitd.daemon.arenas import LocalArenas
from refitd.daemon.cable_tests import LocalCableTests
from refitd.daemon.clock import CoordinatorClock
from refitd.daemon.commits import Commits
from refitd.daemon.controllers import LocalControllers
from refitd.daemon.coordinator_link import CoordinatorLink
from refitd.daemon.digest_work import DigestQueue
from refitd.daemon.epochs import LocalEpochs
from refitd.daemon.jobs import JobTable
from refitd.daemon.members import LocalMember
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
from refitd.daemon.refused import RefusedRegistrations
from refitd.daemon.region_digests import RegionDigests
from refitd.daemon.registration import LocalRegistrations
from refitd.daemon.retained import RetainedTargets
from refitd.daemon.sessions import ClientSession
from refitd.daemon.spares import Spares
from refitd.daemon.swaps import LocalSwaps
from refitd.daemon.timeline import Timeline
from refitd.daemon.verification import Proofs
from refitd.daemon.worker_arenas import WorkerArenas
from refitd.errors import RefitdError, RefusedError
from refitd.events import Log
from refitd.protocol import cluster, local
from refitd.protocol.base import Message, clipped
from refitd.protocol.reports import NodeStatus
from refitd.text import brief


class Parts:
    """The parts share one list of instructions, `out`. `now` is the time of the event that is being handled."""

    def __init__(
        self,
        node: str,
        host: str,
        pid: int,
        workers: int,
        max_arena_bytes: int,
        address: str,
        services: tuple[str, ...],
        keep_targets_s: float,
        warms: str,
    ) -> None:
        self.node, self.host, self.pid = node, host, pid
        self.worker_pids: dict[int, int] = {}
        self.workers = workers
        self.sessions: dict[int, ClientSession] = {}
        self.members: dict[str, LocalMember] = {}
        self.problems: tuple[str, ...] = ()
        self.refused = RefusedRegistrations(node, self.sessions)
        self.now = 0.0
        self.out: list[Instruction] = []
        self.address, self.services = address, services
        self.retained = RetainedTargets(keep_targets_s)
        self.maps = WorkerArenas(workers, self.out.append)
        out = self.out.append
        self.link = CoordinatorLink(node, out, self.answered)
        self.jobs = JobTable(out, self.maps.need)
        self.clock = CoordinatorClock()
        self.timeline = Timeline(self.jobs, self.members, lambda worker: self.worker_pids.get(worker, 0), self.clock)
        self.arenas = LocalArenas(
            node,
            max_arena_bytes,
            self.sessions,
            self.retained,
            self.jobs,
            self.maps,
            out,
            self._given,
            lambda wanted, error: self.fail(wanted.session, wanted.request, error),
            self._ask_first,
        )
        self.epochs = LocalEpochs(node, address, out, self._epoch_formed, workers=workers, warms=warms)
        self.plans = LocalPlans(node, workers, self.jobs, self.epochs, self.arenas.ask, out)
        self.cable_tests = LocalCableTests(node, workers, self.epochs, out, self.link.say)
        self.permits = Permits(self.members, out)
        self.commits = Commits(workers, self.members, self.jobs, self.maps, out, self.replace_worker, self.exchange)
        self.digests = DigestQueue(node, workers, out, self.maps.need, self.maps.homes, self.is_swapping)
        self.proofs = Proofs(self.members, self.digests, out)
        tell = lambda: self.link.say(self.update())  # noqa: E731
        self.spares = Spares(self.members, self.digests, out, self.commits.fence_behind, tell)
        self.regions = RegionDigests(self.members, self.digests, out, self.replace_worker)
        self.swaps = LocalSwaps(
            node,
            workers,
            self.members,
            self.plans,
            self.commits,
            self.jobs,
            self.epochs,
            self.maps,
            out,
            self.restart,
            self.proofs.seeds.prove,
            lambda: self.publishing.slots_freed(self.members.values()),
        )
        self.controllers = LocalControllers(node, self.link, out)
        self.publishing = Publishing(self.swaps, self.link, self.reply)
        self.registrations = LocalRegistrations(
            node,
            self.sessions,
            self.members,
            self.arenas,
            self.retained,
            self.permits,
            self.proofs,
            self.link,
            out,
            self.drop_member,
        )

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
            problems=tuple(clipped(text) for text in self.problems),
            refused=self.refused.report(self.now),
        )

    def update(self) -> cluster.NodeUpdate:
        """Return this node's status and the targets whose state the coordinator has not seen yet."""
        moved = [m for m in self.members.values() if not (m.is_source or m.is_told) and m.boot == self.link.boot]
        for member in moved:
            member.is_told = True
        states = tuple(
            cluster.TargetMoved(m.id, brief(str(m.state)), tuple(m.history), bool(m.spare_found)) for m in moved
        )
        return cluster.NodeUpdate(status=self.status(), moved=states)

    def drop_member(self, member: LocalMember, reason: str, tell: bool = True, keep: bool = False) -> None:
        """Remove a member from every part; with `keep` its arenas stay, with `tell` the coordinator hears of it."""
        self.swaps.stop_seeding(member, reason)
        self.members.pop(member.id, None)
        if member.session in self.sessions:
            self.sessions[member.session].members.discard(member.id)
        for waiting in member.waiting:
            self.fail(waiting.session, waiting.request, RefusedError(f"{member.id}: {reason}"))
        self.permits.withdraw(member)
        self.commits.member_left(member)
        self.proofs.left(member, reason)
        self.spares.left(member)
        self.digests.left(member)
        if tell:
            self.link.say(cluster.RemoveShard(member=member.id, reason=reason))
        if keep:
            for arena in member.arenas():
                self.arenas.retain(arena)
        else:
            self.arenas.free(set(member.arenas()))

    def answered(self, waiting: Waiting, reply: Message) -> None:
        """Route an answer to the part that made the request."""
        session, request, about = waiting.session, waiting.request, waiting.about
        if isinstance(about, Described):
            if isinstance(reply, local.Failure) and reply.code == "unknown-shard":
                self.registrations.tell_again(session, request, about)
                return
            about = about.about
        match about:
            case PassedOn():
                self.reply(session, request, reply)
            case Asked():
                self.registrations.asked(about, reply)
            case Introduced():
                self.registrations.introduced(session, request, about, reply)
            case Returned():
                self.registrations.returned(session, request, about, reply)
            case Readmitted():
                self.registrations.readmitted(about, reply)
            case Slept():
                self.registrations.slept(session, request, about, reply)
            case ControllerIntroduced():
                self.controllers.introduced(self.sessions.get(session), request, about, reply)
            case Announced():
                self.publishing.announced(session, request, about, reply)

    def restart(self, worker: int) -> None:
        """Replace a worker whose current work is no longer wanted."""
        self.out.append(RestartWorker(worker))
        self.maps.renewed(worker)
        self.digests.worker_gone(worker, died=False)

    def exchange(self, arena: int, other: int) -> None:
        """Note that two arenas have exchanged their contents; replace workers that have mapped only one."""
        for worker in self.arenas.exchange(arena, other):
            self.replace_worker(worker, f"arenas {arena} and {other} were exchanged, and it has mapped only one")

    def replace_worker(self, worker: int, reason: str) -> None:
        """Replace a worker, and account for all of its runs."""
        self.swaps.replace_worker(worker, reason)

    def is_swapping(self) -> bool:
        """Whether workers are needed for something more urgent than background digests."""
        return bool(self.swaps.staging()) or self.jobs.active > 0

    def reply(self, session: int, request: int, message: Message) -> None:
        """Answer a client's request; request 0 is a notification."""
        self.out.append(ToClient(session, request, message))

    def fail(self, session: int, request: int, error: RefitdError) -> None:
        """Answer a client's request with an error."""
        self.reply(session, request, local.Failure(code=error.code, message=str(error)))

    def log(self, event: str, **fields: object) -> None:
        """Log a line."""
        self.out.append(Log(event, fields))

    def _given(self, wanted: WantedArenas, arenas: tuple[int, ...]) -> None:
        """Pass finished arenas on to their purpose."""
        match wanted.purpose:
            case ClientArena():
                ((nbytes, label),) = wanted.wanted
                self.arenas.take(
                    arenas[0], nbytes, label, wanted.session, write=True, workers_write=True, device=wanted.device
                )
                self.sessions[wanted.session].arenas.add(arenas[0])
                self.reply(wanted.session, wanted.request, local.ArenaCreated(arena=arenas[0], nbytes=nbytes))
            case MemberArenas():
                self.registrations.arenas_made(wanted, arenas)
            case Constants(_, _, data) as constants:
                ((nbytes, label),) = wanted.wanted
                self.arenas.take(arenas[0], nbytes, label, None, write=False, workers_write=False)
                self.out.append(WriteArena(arenas[0], data))
                self.plans.constants_made(constants, arenas[0])

    def _ask_first(self, wanted: WantedArenas, purpose: MemberArenas) -> None:
        self.registrations.ask_first(wanted, purpose)

    def _epoch_formed(self, plan: str, epoch: str) -> None:
        if not self.cable_tests.epoch_formed(plan):
            self.plans.epoch_formed(plan, epoch)
