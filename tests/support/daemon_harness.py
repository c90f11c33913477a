"""A daemon's state without sockets, driven by a fake coordinator, client and workers."""

from __future__ import annotations

from itertools import accumulate
from math import prod

import numpy as np
from msgspec import structs

from refitd.daemon import actions as act
from refitd.daemon.router import handle
from refitd.daemon.state import DaemonState
from refitd.describe.layout import row_major
from refitd.describe.metadata import Roster
from refitd.errors import ArenaError
from refitd.plan.table import RegionTable
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.shards import Place, metadata_of, shard_of
from tests.support.shards import describe, whole
from tests.support.shares import load_of

SHARD = shard_of(describe(whole(1), 0, 1))
FC1 = "layers.0.fc1.weight"  # [96, 48]
SOURCE = local.RegisterSource(model="m", rank=0, world_size=1, shard=SHARD)
TARGET = local.RegisterTarget(model="m", replica="r", rank=0, world_size=1, shard=SHARD)


class Harness:
    """Drives a daemon; the fake coordinator answers Done unless `refuse_with` is set."""

    def __init__(self, workers: int = 2, max_arena_bytes: int = 1 << 30, keep_targets_s: float = 0.0) -> None:
        self.daemon = DaemonState("n0", "h", 1, workers, max_arena_bytes, keep_targets_s=keep_targets_s)
        self.now = 0.0
        self.arenas = 0
        self.closed: list[int] = []
        self.restarted: list[int] = []
        self.to_coordinator: list[object] = []
        self.to_client: list[tuple[int, int, object]] = []
        self.to_worker: list[tuple[int, object]] = []
        self.refuse_with: local.Failure | None = None
        self.no_memory: ArenaError | None = None  # for the next arenas
        self.no_memory_times = 1
        self.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="b")))
        self.feed(act.SessionOpened(1, 100, "client"))

    def handle(self, event: act.Event) -> list[act.Instruction]:
        """Return the daemon's instructions for one event."""
        return handle(self.daemon, event, self.now)

    def feed(self, *events: act.Event) -> None:
        pending = list(events)
        while pending:
            for do in self.handle(pending.pop(0)):
                match do:
                    case act.MakeArenas(ticket) if self.no_memory is not None:
                        pending.append(act.ArenasRefused(ticket, self.no_memory))
                        self.no_memory_times -= 1
                        if not self.no_memory_times:
                            self.no_memory, self.no_memory_times = None, 1
                    case act.MakeArenas(ticket, wanted):
                        made = tuple(range(self.arenas + 1, self.arenas + 1 + len(wanted)))
                        self.arenas += len(wanted)
                        pending.append(act.ArenasMade(ticket, made))
                    case act.ToCoordinator(request, message):
                        self.to_coordinator.append(message)
                        if isinstance(message, cluster.NodeUpdate):
                            pending.append(act.CoordinatorSaid(request, cluster.HeartbeatAnswer(self.now)))
                        elif request and not isinstance(message, local.StartSwap):
                            pending.append(act.CoordinatorSaid(request, self.refuse_with or local.Done()))
                    case act.ToClient(session, request, message):
                        self.to_client.append((session, request, message))
                    case act.ToWorker(worker, message):
                        self.to_worker.append((worker, message))
                    case act.CloseArena(arena):
                        self.closed.append(arena)
                    case act.RestartWorker(worker):
                        self.restarted.append(worker)
                    case act.Follow(event):
                        pending.append(event)

    def ask(self, message: local.ClientRequest, session: int = 1) -> object:
        """Send a client's request; return the last answer to it, or None if there is none yet."""
        self.to_client.clear()
        self.feed(act.ClientSaid(session, 7, message))
        answers = [m for s, request, m in self.to_client if (s, request) == (session, 7)]
        return answers[-1] if answers else None

    def publish(self, member: str, version: int) -> object:
        granted = self.ask(local.BeginPublish(member=member, version=version, timeout_s=5.0))
        if not isinstance(granted, local.SlotGranted):
            return granted
        return self.ask(local.Publish(member=member, version=version, slot=granted.slot))

    def fleet(
        self, model: str = "m", plan_id: str = "p", live: tuple[Place, ...] = (), *, flips: bool = False
    ) -> tuple[str, str]:
        """A source that holds version 1, and a target, with their plan loaded."""
        rosters = [Roster(0, source=metadata_of(SHARD, 0)), Roster(1, destination=metadata_of(SHARD, 1))]
        members = self.pair(model, live, flips=flips)
        self.feed(act.CoordinatorSaid(0, load_of(rosters, members, plan=plan_id, model=model)))
        assert self.to_coordinator[-1] == cluster.PlanLoaded(plan=plan_id)
        return members

    def pair(self, model: str = "m", live: tuple[Place, ...] = (), *, flips: bool = False) -> tuple[str, str]:
        """A source that holds version 1, and a target."""
        source = self.ask(structs.replace(SOURCE, model=model))
        target = self.ask(structs.replace(TARGET, model=model, live=live, flips=flips))
        assert isinstance(source, local.Registered) and isinstance(target, local.Registered)
        assert self.publish(source.member, 1) == local.Done()
        return source.member, target.member

    def stage(self, swap: str = "s", version: int = 1, plan: str = "p") -> list[tuple[int, int]]:
        """Stage; return (worker, run) of everything started."""
        self.to_worker.clear()
        self.feed(act.CoordinatorSaid(0, cluster.Stage(swap=swap, plan=plan, version=version)))
        return self.runs()

    def runs(self) -> list[tuple[int, int]]:
        """(worker, run) of everything that workers have been told to run."""
        return [(worker, m.run) for worker, m in self.to_worker if isinstance(m, sidecar.RunJob)]

    def done(self, runs: list[tuple[int, int]]) -> None:
        for worker, run in runs:
            self.feed(act.WorkerSaid(worker, sidecar.RunDone(run=run, copies=1, bytes=1, seconds=0.1)))

    def commit(self, member: str, swap: str = "s", version: int = 1) -> None:
        self.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap=swap, version=version)))
        self.ask(local.CommitDone(swap=swap, member=member, paused_s=0.0))

    def said(self, kind: type) -> list[object]:
        return [m for m in self.to_coordinator if isinstance(m, kind)]


def live_in_arena(h: Harness) -> tuple[Place, ...]:
    """Allocate an arena; return places in it for the live tensors of a target."""
    h.ask(local.CreateArena(nbytes=65536))
    sizes = [2 * prod(t.shape) for t in SHARD.tensors]
    return tuple(
        Place(h.arenas, at, row_major(t.shape)) for t, at in zip(SHARD.tensors, accumulate([0, *sizes]), strict=False)
    )


def regions(tensor: str, shape: tuple[int, ...], boxes: list[tuple[int, int]]) -> RegionTable:
    """Boxes of rows [a, b) of rank 0's local tensor."""
    n, inner = len(boxes), int(np.prod(shape[1:]))
    stride = [int(np.prod(shape[d + 1 :])) for d in range(len(shape))]
    return RegionTable(
        tensors=(tensor,),
        locals=(tensor,),
        size=np.array([[b - a, *shape[1:]] for a, b in boxes], np.int64),
        element_size=np.full(n, 2, np.int32),
        group=np.arange(n, dtype=np.int32),
        tensor=np.zeros(n, np.int32),
        holder=np.zeros(n, np.int32),
        local=np.zeros(n, np.int32),
        offset=np.array([a * inner for a, _ in boxes], np.int64),
        stride=np.array([stride] * n, np.int64),
    )
