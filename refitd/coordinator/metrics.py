"""A coordinator's Prometheus metrics: counters of its events and instructions, gauges of its state."""

from __future__ import annotations

import socket
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from refitd.config import Config
from refitd.coordinator.actions import Event, FromNode, Instruction, Remember
from refitd.coordinator.fleet import Fleet, ModelState
from refitd.coordinator.journals import SwapRecord
from refitd.coordinator.members import serving_state
from refitd.metrics import Exporter, Labelled, add_build_info
from refitd.protocol.cluster import StageDone
from refitd.states import Busy, Log, SwapOutcome

# Seconds. Swaps take milliseconds to minutes, a journal write 0.1 ms to seconds on a bad disk.
_SWAP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_JOURNAL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)

# The transport of bytes that stay within a node, through shared memory or a GPU's.
WITHIN = "local"


@dataclass(frozen=True, slots=True)
class _ModelFigures:
    published: int | None
    decided: int | None
    queued: int
    is_swapping: bool
    members: Mapping[tuple[str, str], int]  # (role, state) -> ranks
    # replicas that swaps write -> the lowest version of their ranks; None if a rank serves none
    replicas: Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class CoordinatorFigures:
    """A snapshot of a coordinator's state."""

    nodes: int
    drained: int  # nodes, connected or not
    models: Mapping[str, _ModelFigures]
    queues: Mapping[str, int]
    refused: Mapping[tuple[str, str], int]  # (model, replica) -> ranks whose registration is refused
    leads: bool = True  # False for a standby


def figures(fleet: Fleet, queues: Mapping[str, int]) -> CoordinatorFigures:
    """Take a snapshot; `queues` are the shell's, with their lengths."""
    models = {name: _model(found) for name, found in fleet.models.items()}
    refused = Tally((one.model, one.replica) for node in fleet.nodes.values() for one in node.status.refused)
    return CoordinatorFigures(len(fleet.nodes), len(fleet.drained), models, queues, refused)


def _model(state: ModelState) -> _ModelFigures:
    membership = state.membership
    members = Tally(("source", "attached" if m.source.attached else "detached") for m in membership.sources.values())
    drained = {*membership.drained()}
    members.update(
        ("target", "drained" if replica in drained else serving_state(m, state.live).value)
        for (replica, _), m in membership.targets.items()
    )
    replicas: dict[str, int | None] = {}
    for (replica, _), m in membership.engines().targets.items():
        held = replicas.get(replica, m.version)
        replicas[replica] = None if held is None or m.version is None else min(held, m.version)
    complete = membership.offered().complete
    return _ModelFigures(
        complete[-1] if complete else None,
        None if state.live is None else state.live.version,
        len(state.queue),
        state.running is not None,
        members,
        replicas,
    )


class CoordinatorMonitor:
    """Serves a coordinator's metrics; its loop calls `watch`, `journalling` and `publish`."""

    def __init__(self, config: Config, address: tuple[str, int]) -> None:
        """Listen on `address`.

        Raises:
            RefusedError: the address cannot be listened on.
        """
        registry = CollectorRegistry()
        metrics = CoordinatorMetrics(registry)
        self.watch, self.journalling = metrics.watch, metrics.journalling
        names = (*config.metrics.hosts, socket.gethostname())
        self._exporter = Exporter(address, names, registry, metrics.show)
        self.endpoint, self.close = self._exporter.endpoint, self._exporter.close

    def stands_by(self, lacks: str) -> None:
        """Publish that this process runs but does not lead, and why."""
        self._exporter.publish(CoordinatorFigures(0, 0, {}, {}, {}, leads=False), lacks)

    def publish(self, fleet: Fleet, queues: Mapping[str, int]) -> None:
        """Publish a snapshot; `queues` are the shell's, with their lengths."""
        lacks = "" if fleet.may_swap else "it waits for daemons to say which versions are live"
        self._exporter.publish(figures(fleet, queues), lacks)


class CoordinatorMetrics:
    """The metrics of one coordinator; docs/metrics.md lists them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        r = registry
        add_build_info(registry)
        self._swaps = Labelled(
            Counter(
                "refitd_swaps",
                "Ended swaps by outcome and cause.",
                ["model", "kind", "outcome", "cause"],
                registry=r,
            )
        )
        self._swap_s = Labelled(
            Histogram(
                "refitd_swap_seconds",
                "From a swap's start to its end.",
                ["model", "outcome"],
                registry=r,
                buckets=_SWAP_BUCKETS,
            )
        )
        self._phase_s = Labelled(
            Histogram(
                "refitd_swap_phase_seconds",
                "Time that swaps spent in a phase.",
                ["model", "phase"],
                registry=r,
                buckets=_SWAP_BUCKETS,
            )
        )
        self._moved = Labelled(
            Counter(
                "refitd_moved_bytes",
                "Bytes that arrived in staging arenas, by sending and receiving node.",
                ["model", "source_node", "target_node", "transport"],
                registry=r,
            )
        )
        self._digests = Labelled(
            Counter("refitd_digests", "Copies compared with their sources.", ["model"], registry=r)
        )
        self._verified = Labelled(
            Counter(
                "refitd_verifications",
                "Verifications of live weights (`refitctl verify`).",
                ["model", "outcome"],
                registry=r,
            )
        )
        self._refused = Labelled(Counter("refitd_refusals", "Refused requests.", ["request"], registry=r))
        self._lost = Counter("refitd_nodes_lost", "Daemons that went silent or were replaced.", registry=r)
        self._stalled = Counter("refitd_loop_stalled_seconds", "Time when the loop was blocked.", registry=r)
        self._journal_s = Histogram(
            "refitd_journal_write_seconds",
            "Time of a journal write, with its fsync.",
            registry=r,
            buckets=_JOURNAL_BUCKETS,
        )
        self._journal_failures = Counter("refitd_journal_failures", "Failed journal writes.", registry=r)
        self._leads = Gauge("refitd_leads", "1 for the leading coordinator, 0 for a standby.", registry=r)
        self._nodes = Gauge("refitd_nodes", "Daemons known to the coordinator.", registry=r)
        self._drained = Gauge("refitd_nodes_drained", "Drained nodes.", registry=r)
        self._kept_out = Gauge(
            "refitd_registrations_refused",
            "Ranks whose registration is refused.",
            ["model", "replica"],
            registry=r,
        )
        self._queues = Gauge("refitd_queue_length", "Length of a queue of the process.", ["queue"], registry=r)
        per_model = ["model"]
        self._published = Gauge(
            "refitd_published_version", "Newest version that every source rank holds.", per_model, registry=r
        )
        self._decided = Gauge("refitd_decided_version", "Last decided version.", per_model, registry=r)
        self._queued = Gauge("refitd_swaps_queued", "Swaps that wait for the running one.", per_model, registry=r)
        self._running = Gauge("refitd_swaps_running", "Running swaps.", per_model, registry=r)
        self._members = Gauge(
            "refitd_members",
            "Registered ranks by state; sources by whether their trainer is attached.",
            ["model", "role", "state"],
            registry=r,
        )
        per_replica = ["model", "replica"]
        self._replica = Gauge(
            "refitd_replica_version",
            "Lowest version of the replica's ranks; absent if a rank serves none.",
            per_replica,
            registry=r,
        )
        self._lag = Gauge(
            "refitd_replica_lag_versions",
            "Decided version minus the replica's version.",
            per_replica,
            registry=r,
        )

    def watch(self, event: Event, instructions: Iterable[Instruction], fleet: Fleet) -> None:
        """Count an event and the effects of handling it."""
        match event:
            case FromNode(message=StageDone() as done):
                self._staged(event, done, fleet)
            case Busy(seconds):
                self._stalled.inc(seconds)
        for instruction in instructions:
            match instruction:
                case Remember(SwapRecord() as record) if record.state != SwapOutcome.DECIDED:
                    self._ended(record)
                case Log("refused", fields):
                    self._refused.of(str(fields.get("message"))).inc()
                case Log("verified", fields):
                    self._verified.of(str(fields["model"]), str(fields["outcome"])).inc()
                case Log("node-lost"):
                    self._lost.inc()

    @contextmanager
    def journalling(self) -> Iterator[None]:
        """Time a durable write, and count it if it fails."""
        began = perf_counter()
        try:
            yield
        except BaseException:
            self._journal_failures.inc()
            raise
        finally:
            self._journal_s.observe(perf_counter() - began)

    def _staged(self, event: FromNode, done: StageDone, fleet: Fleet) -> None:
        found = fleet.swapping.get(done.swap)
        running = found.running if found is not None else None
        node = next((name for name, node in fleet.nodes.items() if node.identity == event.identity), None)
        if running is None or node is None or node not in running.swap.nodes:
            return
        plan, within, model = running.plan, done.bytes, running.swap.model
        if plan is not None and plan.epoch is not None:
            for source, nbytes in plan.routed.links.into(node).items():
                self._moved.of(model, source, node, plan.epoch.service).inc(nbytes)
                within -= nbytes
        if within > 0:
            self._moved.of(model, node, node, WITHIN).inc(within)

    def _ended(self, record: SwapRecord) -> None:
        report = record.written_report()
        if report is None:
            return
        model, outcome = report.model, report.outcome.value
        self._swaps.of(model, report.kind, outcome, report.cause.value or "none").inc()
        self._swap_s.of(model, outcome).observe(report.total_s)
        self._digests.of(model).inc(report.digests)
        phases = (
            ("plan", report.plan_s),
            ("stage", report.stage_s),
            ("pause", report.pause_s),
            ("commit", report.commit_s),
        )
        for phase, seconds in phases:
            if seconds:
                self._phase_s.of(model, phase).observe(seconds)

    def show(self, found: CoordinatorFigures) -> None:
        """Set the gauges from a snapshot."""
        self._leads.set(found.leads)
        self._nodes.set(found.nodes)
        self._drained.set(found.drained)
        for gauge in (self._published, self._decided, self._queued, self._running, self._members, self._replica):
            gauge.clear()
        self._lag.clear()
        self._kept_out.clear()
        for labels, ranks in found.refused.items():
            self._kept_out.labels(*labels).set(ranks)
        for queue, length in found.queues.items():
            self._queues.labels(queue).set(length)
        for name, model in found.models.items():
            if model.published is not None:
                self._published.labels(name).set(model.published)
            if model.decided is not None:
                self._decided.labels(name).set(model.decided)
            self._queued.labels(name).set(model.queued)
            self._running.labels(name).set(model.is_swapping)
            for (role, state), ranks in model.members.items():
                self._members.labels(name, role, state).set(ranks)
            for replica, version in model.replicas.items():
                if version is not None:
                    self._replica.labels(name, replica).set(version)
                if version is not None and model.decided is not None:
                    self._lag.labels(name, replica).set(model.decided - version)
