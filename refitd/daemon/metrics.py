"""A daemon's Prometheus metrics: counters of its events and instructions, gauges of its state."""

from __future__ import annotations

import socket
from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from refitd.config import Config
from refitd.daemon.actions import Event, Instruction, RestartWorker, ToCoordinator, WorkerDied, WorkerSaid
from refitd.daemon.state import DaemonState
from refitd.metrics import Exporter, Labelled, add_build_info
from refitd.protocol.local import CommitDone
from refitd.protocol.reports import NodeStatus
from refitd.protocol.sidecar import RunDone
from refitd.states import Busy, Log

# Seconds. A flip takes microseconds, a copy of a large shard seconds.
_PAUSE_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

# The label of arenas in main memory; the label of a GPU's arenas is its UUID.
MAIN_MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class DaemonFigures:
    """A snapshot of a daemon's state, for its metrics."""

    status: NodeStatus
    is_coordinated: bool
    targets: Mapping[str, int]  # state of the live tensors -> ranks
    queues: Mapping[str, int]


def figures(state: DaemonState, queues: Mapping[str, int]) -> DaemonFigures:
    """Take a snapshot; `queues` are the lengths of the shell's queues by name."""
    targets = Tally(member.state.live.value for member in state.members.values() if not member.registration.is_source)
    return DaemonFigures(state.status(), state.link.is_up, targets, {**queues, **state.queues()})


class DaemonMonitor:
    """Serves a daemon's metrics; its loop calls `watch` and `publish`."""

    def __init__(self, config: Config, address: tuple[str, int]) -> None:
        """Listen on `address`.

        Raises:
            RefusedError: the address cannot be listened on.
        """
        registry = CollectorRegistry()
        metrics = DaemonMetrics(registry, config.node.max_arena_bytes)
        self.watch = metrics.watch
        names = (*config.metrics.hosts, socket.gethostname())
        self._exporter = Exporter(address, names, registry, metrics.show)
        self.endpoint, self.close = self._exporter.endpoint, self._exporter.close

    def publish(self, state: DaemonState, queues: Mapping[str, int]) -> None:
        """Publish a snapshot; `queues` are the lengths of the shell's queues by name."""
        found = figures(state, queues)
        lacks = "" if found.is_coordinated else "no coordinator answers"
        down = [str(worker) for worker, pid in enumerate(found.status.workers) if not pid]
        self._exporter.publish(found, lacks or (f"workers {', '.join(down)} do not run" if down else ""))


class DaemonMetrics:
    """The metrics of one daemon; docs/metrics.md lists them."""

    def __init__(self, registry: CollectorRegistry, max_arena_bytes: int) -> None:
        r = registry
        add_build_info(registry)
        self._refused = Labelled(Counter("refitd_refusals", "Refused requests.", ["request"], registry=r))
        self._stalled = Counter("refitd_loop_stalled_seconds", "Time when the loop was blocked.", registry=r)
        restarts = Counter("refitd_worker_restarts", "Restarted workers.", ["cause"], registry=r)
        self._died, self._replaced = restarts.labels("died"), restarts.labels("replaced")
        differing = Counter(
            "refitd_mismatches",
            "Copies or live weights that differed from their source.",
            ["found_in"],
            registry=r,
        )
        self._staged_differs, self._live_differs = differing.labels("staged"), differing.labels("live")
        self._copied = Counter("refitd_worker_copied_bytes", "Bytes that workers copied.", registry=r)
        self._pause_s = Labelled(
            Histogram(
                "refitd_engine_pause_seconds",
                "Pauses of engine ranks for commits.",
                ["model", "replica"],
                registry=r,
                buckets=_PAUSE_BUCKETS,
            )
        )
        self._coordinated = Gauge("refitd_coordinator_up", "Whether the coordinator answers.", registry=r)
        self._clients = Gauge("refitd_clients", "Connected clients.", registry=r)
        self._workers = Gauge("refitd_workers", "Worker processes.", ["state"], registry=r)
        self._arenas = Gauge("refitd_arenas", "Arenas in main memory or on a GPU.", ["device"], registry=r)
        self._arena_bytes = Gauge("refitd_arena_bytes", "Bytes of all arenas.", ["device"], registry=r)
        Gauge("refitd_arena_limit_bytes", "The limit of all arenas together (`node.max_arena_bytes`).", registry=r).set(
            max_arena_bytes
        )
        self._targets = Gauge(
            "refitd_node_targets",
            "Target ranks of this node by the state of their live tensors.",
            ["state"],
            registry=r,
        )
        self._problems = Gauge("refitd_problems", "Problems that `refitctl status` shows.", registry=r)
        self._queues = Gauge("refitd_queue_length", "Length of a queue of the process.", ["queue"], registry=r)

    def watch(self, event: Event, instructions: Iterable[Instruction], state: DaemonState) -> None:
        """Count an event that the state has handled, and the instructions that it returned."""
        match event:
            case WorkerSaid(message=RunDone(differs=True)):
                self._staged_differs.inc()
            case WorkerSaid(message=RunDone() as done):
                self._copied.inc(done.bytes)
            case WorkerDied():
                self._died.inc()
            case Busy(seconds):
                self._stalled.inc(seconds)
        for instruction in instructions:
            match instruction:
                case ToCoordinator(message=CommitDone() as committed):
                    if (member := state.members.get(committed.member)) is not None:
                        model, replica = member.registration.request.model, member.registration.replica
                        self._pause_s.of(model, replica).observe(committed.paused_s)
                case RestartWorker():
                    self._replaced.inc()
                case Log("refused", fields):
                    self._refused.of(str(fields.get("message"))).inc()
                case Log("differs"):
                    self._live_differs.inc()

    def show(self, found: DaemonFigures) -> None:
        """Set the gauges from a snapshot."""
        status = found.status
        for gauge in (self._arenas, self._arena_bytes, self._targets):
            gauge.clear()
        on_gpus, gpu_bytes = (sum(g.arenas for g in status.gpus), sum(g.arena_bytes for g in status.gpus))
        devices = [(MAIN_MEMORY, status.arenas - on_gpus, status.arena_bytes - gpu_bytes)]
        devices += [(gpu.device, gpu.arenas, gpu.arena_bytes) for gpu in status.gpus]
        for device, arenas, nbytes in devices:
            self._arenas.labels(device).set(arenas)
            self._arena_bytes.labels(device).set(nbytes)
        running = sum(map(bool, status.workers))
        self._workers.labels("running").set(running)
        self._workers.labels("down").set(len(status.workers) - running)
        for state, ranks in found.targets.items():
            self._targets.labels(state).set(ranks)
        for queue, length in found.queues.items():
            self._queues.labels(queue).set(length)
        self._coordinated.set(found.is_coordinated)
        self._clients.set(status.clients)
        self._problems.set(len(status.problems))
