"""The state of the daemon, without sockets: routes events to the parts of the state, returns instructions."""

from __future__ import annotations

from collections.abc import Callable

from refitd.daemon.actions import (
    ArenaHandedBack,
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
    SessionClosed,
    SessionLeaves,
    SessionOpened,
    TookOver,
    Unsent,
    WorkerDied,
    WorkerSaid,
    WorkerStarted,
)
from refitd.daemon.client_requests import ClientRequests
from refitd.daemon.coordinator_orders import CoordinatorOrders
from refitd.daemon.parts import Parts
from refitd.daemon.sessions import ClientSession
from refitd.events import Busy, Tick
from refitd.protocol import local, sidecar


class DaemonState(Parts):
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
        warms: str = "",
    ) -> None:
        super().__init__(node, host, pid, workers, max_arena_bytes, address, services, keep_targets_s, warms)
        self.clients = ClientRequests(self)
        self._coordinator = CoordinatorOrders(self)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Handle an event and return instructions. A refused request changes nothing."""
        self.now = self.link.now = now
        match event:
            case ClientSaid(session, request, message, prepared):
                if session in self.sessions:
                    self.clients.said(self.sessions[session], request, message, prepared)
            case Busy(seconds):
                self.link.was_busy(seconds)
            case CoordinatorSaid(request, message):
                self._coordinator.said(request, message)
            case Unsent(request, lost):
                self.link.unsent(request, lost)
            case CoordinatorUnreachable(reason):
                self.link.unreachable(reason)
            case WorkerSaid(worker, message):
                if isinstance(message, sidecar.WorkerReady):
                    self.worker_pids[worker] = message.pid
                elif isinstance(message, sidecar.DigestsTaken | sidecar.SpansCompared):
                    self.digests.worker_said(message)
                elif isinstance(message, sidecar.CableTimed):
                    self.cable_tests.worker_said(worker, message)
                else:
                    self.swaps.worker_said(worker, message)
            case WorkerDied(worker, how):
                self._worker_died(worker, how)
            case WorkerStarted(worker):
                self.log("worker-started", worker=worker)
                self.maps.renewed(worker)
                self.digests.worker_gone(worker, died=False)
            case Problems(texts):
                self.problems = texts
            case TookOver(member, exchanged):
                # an event of its own: what is to be digested takes long to list, and the swap's end waits for nobody
                if (found := self.members.get(member)) is not None:
                    self.proofs.committed(found)
                    if exchanged and found.flips:
                        self.spares.exchanged(found)
            case NotSent(worker, message, reason):
                self.swaps.not_sent(worker, message, reason)
            case SessionOpened(session, pid, name, roles, uid):
                self.sessions[session] = ClientSession(session, pid, name, roles, uid)
                self.log("session", session=session, pid=pid, name=name)
            case SessionLeaves(session):
                if session in self.sessions:
                    self.sessions[session].leaves = True
            case SessionClosed(session, reason):
                self.clients.closed(session, reason)
            case ArenasMade():
                self.arenas.made(event)
            case ArenasRefused():
                self.arenas.refused(event)
            case ArenaHandedBack(session, arena, nbytes, writable):
                label = f"given back by {self.sessions[session].name or 'client'}"
                self.arenas.take(arena, nbytes, label, session, write=writable, workers_write=True)
                self.sessions[session].arenas.add(arena)
            case Due():
                self.proofs.expire(now)
                self.regions.expire(now)
            case Tick():
                self._tick()
        self.digests.dispatch()
        if self.refused.watch(self.out, now) and self.link.is_up:
            self.link.say(self.update())  # the coordinator names it in the next swap's report
        done = self.out[:]
        self.out.clear()
        self.timeline.watch(event, done, now)
        return done

    @property
    def next_deadline(self) -> float | None:
        """When a `Due` is next needed; None if the next `Tick` is early enough."""
        deadlines = (self.proofs.next_deadline, self.regions.next_deadline)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def is_coordinated(self) -> bool:
        """Whether a coordinator has been heard recently."""
        return self.link.is_up

    @property
    def unheard_s(self) -> float:
        """Seconds since a coordinator was last heard; 0 while one answers."""
        return self.link.unheard_s

    def queues(self) -> dict[str, int]:
        """Return how much waits for something: answers of the coordinator, arenas, runs of workers."""
        return {"coordinator": len(self.link), "arenas": self.arenas.asked, "runs": self.jobs.active}

    # --- clients ------------------------------------------------------------------------------------------

    def prepare(self, session: int, message: local.RegisterSource | local.RegisterTarget) -> Callable[[], Prepared]:
        """Return a function that checks a registration on another thread; it reads no state that changes."""
        pid = self.sessions[session].pid if session in self.sessions else 0
        return self.registrations.prepare(session, pid, message)

    def _worker_died(self, worker: int, how: str) -> None:
        pid = self.worker_pids.pop(worker, 0)
        self.log("worker-died", worker=worker, pid=pid, how=how)
        self.maps.renewed(worker)
        self.digests.worker_gone(worker, died=True)
        who = f"worker {worker} (pid {pid})" if pid else f"worker {worker}"  # no pid if it died early
        self.swaps.worker_died(worker, f"{who} on node {self.node} (host {self.host})", how)

    def _tick(self) -> None:
        self._coordinator.tick()
        self.swaps.tick()
        self.commits.tick()
        self.arenas.free(self.plans.unneeded())
        self.proofs.expire(self.now)
        self.proofs.tick()
        self.spares.tick()
        self.digests.tick()
        self.regions.expire(self.now)
        self.arenas.expire(self.now)
        self.refused.expire(self.now)
        self.publishing.expire(self.members.values(), self.now)
        for member in self.members.values():
            self.publishing.ask_room(member)
