"""The state of this node's workers: mapped arenas, loaded jobs, active runs, and epochs with other nodes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from refitd.addressing.copies import ConversionList, CopyList
from refitd.addressing.paths import TransferList
from refitd.daemon.effects import Effects, Unwritten
from refitd.protocol import cluster, local, sidecar


@dataclass(frozen=True, slots=True)
class _KnownArena:
    nbytes: int
    write: bool
    device: str


class WorkerArenas:
    """Maps arenas into workers. Every worker maps a new arena in main memory immediately.

    A GPU arena is mapped only into the worker of that GPU, because each process that uses a GPU takes some hundred MB
    of its memory. Other workers map it when a job between two GPUs needs it.
    """

    def __init__(self, workers: int, gpus: Sequence[str] = ()) -> None:
        """Give GPU i to worker i; a GPU that is not listed gets a worker by its name."""
        self._workers = workers
        self._known: dict[int, _KnownArena] = {}
        self._mapped: list[set[int]] = [set() for _ in range(workers)]
        self._homes = {gpu: worker for worker, gpu in enumerate(gpus)}

    def add(self, effects: Effects, arena: int, nbytes: int, device: str, *, write: bool) -> None:
        """Map a new arena in the workers; `device` is "" for main memory."""
        self._known[arena] = _KnownArena(nbytes, write, device)
        for worker in range(self._workers):
            if self._belongs(arena, worker):
                self._map(effects, worker, arena)

    def remove(self, effects: Effects, arena: int) -> None:
        """Unmap an arena in the workers."""
        if self._known.pop(arena, None) is None:
            return
        for worker, mapped in enumerate(self._mapped):
            mapped.discard(arena)
            effects.order(worker, local.FreeArena(arena=arena))

    def pair(self, effects: Effects, arena: int, other: int) -> None:
        """Map both of two GPU arenas in each worker that has mapped one; call this before their files are switched.

        A worker that is not the one of their GPU maps only what its jobs need.
        """
        for worker, mapped in enumerate(self._mapped):
            if self._known[arena].device and {arena, other} & mapped:
                self.need(effects, worker, {arena, other})

    def exchange(self, effects: Effects, arena: int, other: int) -> list[int]:
        """Have the workers exchange two arenas; return workers that mapped only one and must be replaced."""
        odd = []
        for worker, mapped in enumerate(self._mapped):
            if {arena, other} <= mapped:
                effects.order(worker, sidecar.ExchangeArenas(arena=arena, other=other))
            elif {arena, other} & mapped:
                odd.append(worker)
        return odd

    def renewed(self, effects: Effects, worker: int) -> None:
        """Map a worker's arenas again after its process was replaced."""
        self._mapped[worker].clear()
        for arena in sorted(self._known):
            if self._belongs(arena, worker):
                self._map(effects, worker, arena)

    def need(self, effects: Effects, worker: int, arenas: set[int]) -> None:
        """Map the arenas of a job that a worker has not mapped yet; call this before the job is loaded."""
        for arena in sorted((arenas & self._known.keys()) - self._mapped[worker]):
            self._map(effects, worker, arena)

    def doubt(self, worker: int, arena: int) -> None:
        """Treat an arena as not mapped, because sending or mapping failed; the next job maps it again."""
        self._mapped[worker].discard(arena)

    def home(self, device: str) -> int:
        """Return the worker of a GPU."""
        found = self._homes.get(device)
        return crc32(device.encode()) % self._workers if found is None else found

    def homes(self, arenas: set[int]) -> dict[int, int]:
        """Return arena -> worker of its GPU, for the given arenas; arenas in main memory are omitted."""
        return {a: self.home(k.device) for a in sorted(arenas) if (k := self._known.get(a)) and k.device}

    def _belongs(self, arena: int, worker: int) -> bool:
        device = self._known[arena].device
        return not device or self.home(device) == worker

    def _map(self, effects: Effects, worker: int, arena: int) -> None:
        known = self._known[arena]
        self._mapped[worker].add(arena)
        message = sidecar.MapArena(arena=arena, nbytes=known.nbytes, write=known.write, device=known.device)
        effects.order(worker, message, arena=arena)


# Limit on cached jobs per node: two slots for each of a few models, within the node and between nodes.
MAX_JOBS = 32


@dataclass(frozen=True, eq=False, slots=True)
class WorkerShare:
    """One worker's share of a job: copies within the node, transfers of an epoch, or conversions."""

    worker: int
    rows: CopyList | TransferList | ConversionList
    epoch: str | None = None


def shares_of(
    rows: CopyList | ConversionList, workers: int, homes: Mapping[int, int] | None = None
) -> list[WorkerShare]:
    """Return the workers' shares (see WorkList.shared_out); workers without work have no share."""
    numbers = rows.shared_out(workers, homes)
    return [WorkerShare(worker, rows.select(mine)) for worker, mine in enumerate(numbers) if len(mine)]


@dataclass(slots=True)
class Job:
    """A job and its share for each worker."""

    number: int
    shares: dict[int, WorkerShare]  # by worker
    loaded: set[int] = field(default_factory=set)  # workers that have loaded it
    running: set[int] = field(default_factory=set)  # numbers of active runs


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of a worker's share of a job."""

    number: int
    job: Job
    worker: int
    purpose: Hashable
    verify: bool
    crosses: bool  # it exchanges data with workers of other nodes
    converts: bool  # it converts arrived tensors
    unwritten: tuple[Unwritten, ...] = ()  # arenas that it reads while they are written
    timeout_s: float = 0.0


class JobTable:
    """Tracks which jobs are loaded where. Only this class changes `known`, the jobs, and `runs`, by number."""

    def __init__(self, maps: WorkerArenas) -> None:
        self._maps = maps
        self.known: dict[Hashable, Job] = {}  # in order of last use
        self.runs: dict[int, Run] = {}
        self._numbers = 0

    def start(
        self,
        effects: Effects,
        key: Hashable,
        shares: Sequence[WorkerShare],
        purpose: Hashable,
        *,
        verify: bool,
        timeout_s: float = 0.0,
        bases: Sequence[sidecar.HeldBase] = (),
        unwritten: Sequence[Unwritten] = (),
    ) -> list[Run]:
        """Run the job `key`, loading it first if needed; return its runs.

        `shares` are unused if the job is `known`. `timeout_s` limits exchanges with workers of other nodes,
        and waits for `unwritten` arenas. These exchanges may use `bases`.
        """
        job = self.known.pop(key, None)
        if job is None:
            self._numbers += 1
            job = Job(self._numbers, {share.worker: share for share in shares})
        self.known[key] = job
        if len(self.known) > MAX_JOBS:
            self._evict(effects)
        return [
            self._begin(effects, job, worker, purpose, verify, timeout_s, bases, unwritten) for worker in job.shares
        ]

    def repeat(self, effects: Effects, run: Run) -> Run:
        """Run a share within the node again, on the successor of its worker."""
        return self._begin(effects, run.job, run.worker, run.purpose, run.verify, run.timeout_s, (), run.unwritten)

    def _begin(
        self,
        effects: Effects,
        job: Job,
        worker: int,
        purpose: Hashable,
        verify: bool,
        timeout_s: float,
        bases: Sequence[sidecar.HeldBase],
        unwritten: Sequence[Unwritten],
    ) -> Run:
        share = job.shares[worker]
        converts = isinstance(share.rows, ConversionList)
        if worker not in job.loaded:
            self._maps.need(effects, worker, share.rows.arenas())
            block = share.rows.to_bytes()
            load = sidecar.LoadJob(job=job.number, nbytes=len(block), epoch=share.epoch, converts=converts)
            effects.order(worker, load, block=block)
            job.loaded.add(worker)
        self._numbers += 1
        mine = share.rows.arenas() if bases or unwritten else ()
        reads = tuple(one for one in unwritten if one.arena in mine)
        crosses = share.epoch is not None
        limit_s = timeout_s if crosses or reads else 0.0
        run = Run(self._numbers, job, worker, purpose, verify, crosses, converts, reads, limit_s)
        self.runs[run.number] = run
        job.running.add(run.number)
        told = tuple(base for base in bases if base.arena in mine)
        awaited = tuple(one.named for one in reads)
        effects.order(worker, sidecar.RunJob(job.number, run.number, verify, limit_s, told, awaited))
        for one in reads:
            one.tell(effects, worker, one.written.spans())
        return run

    def end(self, number: int) -> Run | None:
        """Remove a run from the table and return it."""
        run = self.runs.pop(number, None)
        if run is not None:
            run.job.running.discard(number)
        return run

    def runs_of(self, job: int, worker: int) -> list[Run]:
        """Return a worker's runs of the job with this number."""
        return [run for run in self.runs.values() if run.worker == worker and run.job.number == job]

    def unload(self, effects: Effects, run: Run) -> None:
        """Unload the job of a failed run. The next run loads it again, because the failure may be temporary."""
        if run.worker in run.job.loaded:
            run.job.loaded.discard(run.worker)
            effects.order(run.worker, sidecar.DropJob(job=run.job.number))

    def ended_by(self, worker: int) -> list[Run]:
        """Remove and return all runs of a lost worker; its successor must load the jobs again."""
        for job in self.known.values():
            job.loaded.discard(worker)
        return [run for number, run in list(self.runs.items()) if run.worker == worker and self.end(number)]

    def busy_with(self, purpose: Hashable) -> set[int]:
        """Return the workers that have runs for this purpose."""
        return {run.worker for run in self.runs.values() if run.purpose == purpose}

    def runs_for(self, purpose: Hashable) -> list[Run]:
        """Return the active runs for this purpose."""
        return [run for run in self.runs.values() if run.purpose == purpose]

    def drop_arenas(self, effects: Effects, arenas: set[int]) -> None:
        """Drop every job that uses one of these arenas."""
        for key, job in list(self.known.items()):
            if any(share.rows.arenas() & arenas for share in job.shares.values()):
                self._drop(effects, key)

    def drop_keys(self, effects: Effects, *start: Hashable) -> None:
        """Drop the jobs whose keys start with these items."""
        for key in [k for k in self.known if isinstance(k, tuple) and k[: len(start)] == start]:
            self._drop(effects, key)

    def copy_origin(self, run: Run, copy: int | None) -> int | None:
        """Return the plan row of a run's copy, None if unknown."""
        rows = run.job.shares[run.worker].rows
        if copy is None or isinstance(rows, ConversionList) or not 0 <= copy < len(rows):
            return None
        return int(rows.origin[copy])

    def _evict(self, effects: Effects) -> None:
        for key in list(self.known)[:-1]:
            if len(self.known) <= MAX_JOBS:
                return
            if not self.known[key].running:
                self._drop(effects, key)

    def _drop(self, effects: Effects, key: Hashable) -> None:
        job = self.known.pop(key)
        for worker in sorted(job.loaded):
            effects.order(worker, sidecar.DropJob(job=job.number))


# Ticks (of a second) within which a worker must leave an abandoned epoch. Transport calls cannot be interrupted from
# outside, and a worker that is stuck in one would delay every later epoch.
PATIENCE_TICKS = 2
# Ticks allowed in a worker's first epoch, because it loads torch. Replacing the worker would take even longer.
COLD_PATIENCE_TICKS = 20
# Ticks after its start at which a worker loads the libraries for its first epoch. Engines take longer to load their
# weights, and after a worker's death the interrupted commit must not wait for this load.
WARM_UP_TICKS = 5
# How long status shows why an epoch was not formed, unless its nodes form one.
_SHOWN_S = 600.0


def gpu_seats(epoch: cluster.EpochPlan) -> dict[tuple[int, str], int]:
    """Return (position of a node, GPU) -> position in the epoch's group of GPUs."""
    seats = [(node, gpu) for node, gpus in enumerate(epoch.gpus) for gpu in gpus]
    return {seat: position for position, seat in enumerate(seats)}


# services whose GPUs form a group, in which every GPU knows all others; others know only their partners
GROUPED = frozenset({"nccl", "nvshmem"})
Seat = tuple[int, int]  # lane, and position in it; the lane after the last one belongs to the GPUs


@dataclass(slots=True)
class _Group:
    """Workers of this node that have joined an epoch, or are joining: all of its lanes, or its GPUs."""

    plan: str
    epoch: cluster.EpochPlan
    name: str  # the epoch's id, or its gpu_group
    service: str
    joins: dict[int, sidecar.JoinEpoch]  # by worker
    waiting: set[int] = field(init=False)
    members: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting, self.members = set(self.joins), set(self.joins)


class LocalEpochs:
    """Tracks the epochs of this node's workers."""

    def __init__(
        self,
        node: str,
        address: str,
        maps: WorkerArenas,
        *,
        workers: int = 0,
        warms: str = "",
    ) -> None:
        """`warms` is the service that the `workers` load soon after their start; "": they load it on first use."""
        self._node, self._address, self._maps = node, address, maps
        self._warms = warms
        self._warm_in = dict.fromkeys(range(workers if warms else 0), WARM_UP_TICKS)  # ticks, by worker
        self._groups: dict[str, _Group] = {}  # by name
        self._warm: set[int] = set()  # workers that have joined an epoch, or tried to
        self._late: dict[tuple[int, str], int] = {}  # (worker, abandoned group that it was joining) -> ticks
        self._failed: dict[frozenset[str], tuple[float, str]] = {}  # nodes of an epoch -> when and why not formed

    def problems(self, now: float) -> tuple[str, ...]:
        """Return why the last epochs between some nodes were not formed; a failed pair is named with its address."""
        return tuple(f"{now - at:.0f} s ago: {why}" for at, why in self._failed.values() if now - at <= _SHOWN_S)

    def gpu_workers(self, epoch: cluster.EpochPlan) -> dict[int, tuple[int, str]]:
        """Return, for each worker of this node whose GPU takes part, (position of the GPU in the epoch, GPU).

        Raises:
            ValueError: two GPUs have one worker.
        """
        me, found = epoch.nodes.index(self._node), dict[int, tuple[int, str]]()
        for (node, gpu), position in gpu_seats(epoch).items():
            if node == me and (worker := self._maps.home(gpu)) in found:
                raise ValueError(
                    f"{found[worker][1]} and {gpu} share worker {worker} of node {self._node}, and {epoch.gpu_service} "
                    f"needs one for each GPU; set node.workers to the number of GPUs"
                )
            if node == me:
                found[worker] = position, gpu
        return found

    def join(self, effects: Effects, plan: str, epoch: cluster.EpochPlan, met: Mapping[Seat, tuple[int, ...]]) -> bool:
        """Have the workers of this node join their partners `met`, in the lanes first; return whether none has any."""
        nodes, worker_of = list(zip(epoch.nodes, epoch.hosts, strict=True)), dict[int, int]()
        for worker, (seat, _) in self.gpu_workers(epoch).items():
            worker_of[seat] = worker
        seats = list(gpu_seats(epoch))
        lanes, gpus = dict[int, sidecar.JoinEpoch](), dict[int, sidecar.JoinEpoch]()
        for (lane, at), partners in met.items():
            if lane < epoch.lanes:
                labels = [f"worker {lane} on node {nodes[p][0]} (host {nodes[p][1]})" for p in partners]
                doors = [epoch.doors[p][lane] if epoch.doors else "" for p in partners]
                lanes[lane] = self._join(epoch, partners.index(at), labels, doors, lane)
            else:
                there = [seats[p] for p in partners]
                labels = [f"{gpu} on node {nodes[node][0]} (host {nodes[node][1]})" for node, gpu in there]
                flat = [door for doors in epoch.gpu_doors for door in doors] or [""] * len(seats)
                doors = [flat[p] for p in partners]
                gpus[worker_of[at]] = self._join(epoch, partners.index(at), labels, doors, lane, seats[at][1])
        groups = [
            _Group(plan, epoch, epoch.id, epoch.service, lanes),
            _Group(plan, epoch, epoch.gpu_group, epoch.gpu_service, gpus),
        ]
        for group in groups:
            if group.joins:
                self._groups[group.name] = group
            for worker in sorted(group.joins):
                effects.order(worker, group.joins[worker])
        return not met

    def _join(
        self,
        epoch: cluster.EpochPlan,
        index: int,
        labels: Sequence[str],
        doors: Sequence[str],
        lane: int,
        gpu: str = "",
    ) -> sidecar.JoinEpoch:
        return sidecar.JoinEpoch(
            epoch=epoch.gpu_group if gpu else epoch.id,
            service=epoch.gpu_service if gpu else epoch.service,
            index=index,
            labels=tuple(labels),
            address=self._address,
            staging_bytes=epoch.staging_bytes,
            timeout_s=epoch.timeout_s,
            key=epoch.key,
            device=gpu,
            doors=tuple(doors),
            lane=lane,
            hops=epoch.hops,
            peers=epoch.gpu_peers if gpu else epoch.peers,
        )

    def leave(self, effects: Effects, epoch: str) -> None:
        """Have the workers leave an epoch and close its connections."""
        for group in [group for group in self._groups.values() if group.epoch.id == epoch]:
            del self._groups[group.name]
            for worker in sorted(group.members):
                effects.order(worker, sidecar.LeaveEpoch(epoch=group.name))
                if worker in group.waiting:
                    self._late[worker, group.name] = 0

    def tick(self, effects: Effects) -> list[tuple[int, str]]:
        """Return the workers that did not leave an abandoned epoch in time, with the reason; start due warm-ups."""
        self._warm_in = {worker: ticks - 1 for worker, ticks in self._warm_in.items() if worker not in self._warm}
        for worker in sorted(worker for worker, ticks in self._warm_in.items() if not ticks):
            del self._warm_in[worker]
            effects.order(worker, sidecar.WarmUp(service=self._warms))
        stuck: dict[int, str] = {}
        for (worker, epoch), ticks in self._late.items():
            self._late[worker, epoch] = ticks + 1
            if ticks >= (PATIENCE_TICKS if worker in self._warm else COLD_PATIENCE_TICKS):
                stuck[worker] = f"it did not come out of epoch {epoch}, which was given up"
        return sorted(stuck.items())

    def worker_said(self, effects: Effects, worker: int, message: sidecar.EpochJoined) -> tuple[str, str] | None:
        """Handle a worker's answer; return (plan, epoch) once all workers of this node have joined."""
        if worker not in self._warm:
            self._warm.add(worker)
            self._late |= dict.fromkeys([key for key in self._late if key[0] == worker], 0)
        self._late.pop((worker, message.epoch), None)
        group = self._groups.get(message.epoch)
        if group is None:
            return None
        group.waiting.discard(worker)
        plan, formed = group.plan, group.epoch
        if message.reason:
            where = f"worker {worker} on node {self._node}"
            effects.log("epoch-failed", epoch=message.epoch, where=where, reason=message.reason)
            lately = {key: found for key, found in self._failed.items() if effects.now - found[0] <= _SHOWN_S}
            self._failed = lately | {frozenset(formed.nodes): (effects.now, message.reason)}
            effects.is_news = True
            effects.say(cluster.PlanLoaded(plan=plan, epoch=formed.id, where=where, reason=message.reason))
        elif not any(other.waiting for other in self._groups.values() if other.epoch.id == formed.id):
            effects.log("epoch", epoch=formed.id, plan=plan, lanes=formed.lanes, gpus=len(gpu_seats(formed)))
            self._failed = {key: found for key, found in self._failed.items() if not key <= set(formed.nodes)}
            return plan, formed.id
        return None

    def worker_gone(self, effects: Effects, worker: int, who: str, how: str) -> None:
        """End the epochs of a worker that died or was replaced, on every node.

        Exception: if the worker was stuck in an abandoned epoch, the epochs that it had not joined yet continue. Peers
        still wait in them, and its successor joins them.
        """
        services: set[str] = set()
        was_stuck = any(late == worker for late, _ in self._late)
        self._warm.discard(worker)
        self._late = {key: ticks for key, ticks in self._late.items() if key[0] != worker}
        mine = [group for group in self._groups.values() if worker in group.members]
        ended = {group.epoch.id: group.plan for group in mine if not (was_stuck and worker in group.waiting)}
        for group in mine:
            if group.epoch.id not in ended:
                effects.order(worker, group.joins[worker])
            else:
                services.add(group.service)
                group.members.discard(worker)
        for epoch, plan in ended.items():
            self.leave(effects, epoch)
            effects.say(cluster.PlanLoaded(plan=plan, epoch=epoch, where=who, reason=how))
        if self._warms and not services:  # after a delay: its predecessor's unfinished jobs come first
            self._warm_in[worker] = WARM_UP_TICKS
        for service in sorted(services):  # the next epoch will need the successor
            self._warm_in.pop(worker, None)
            effects.order(worker, sidecar.WarmUp(service=service))
