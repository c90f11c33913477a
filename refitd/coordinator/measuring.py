"""Measures the nodes' cables over the copy service that moves weights, in an epoch of its own, one test at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from refitd.config import Config
from refitd.coordinator.epochs import Epochs
from refitd.coordinator.members import Node
from refitd.coordinator.models import Models, Waiter
from refitd.errors import RefusedError, TransportError
from refitd.protocol import cluster, local
from refitd.protocol.base import Message, clipped
from refitd.protocol.cable_reports import CableRate, CablesMeasured

# Messages are short, so that a slow cable carries several per second. Each worker has four in flight with each peer.
MESSAGE_BYTES = 256 << 10
# Seconds for workers to join the epoch, and for their answers beyond those of the test.
JOIN_S, MARGIN_S = 40.0, 5.0


@dataclass(slots=True)
class _RunningTest:
    id: str
    waiter: Waiter
    epoch: cluster.EpochPlan
    pairs: tuple[local.CablePair, ...]
    deadline: float
    found: dict[str, cluster.CableMeasured] = field(default_factory=dict)  # by node


class CableTests:
    """The test under way, if any. `answer(waiter, message)` is set by its owner."""

    def __init__(
        self,
        epochs: Epochs,
        config: Config,
        nodes: Mapping[str, Node],
        models: Models,
        to_node: Callable[[str, Message], None],
        log: Callable[..., None],
    ) -> None:
        self._epochs, self._config, self._nodes, self._models = epochs, config, nodes, models
        self._to_node, self._log = to_node, log
        self._running: _RunningTest | None = None
        self.answer: Callable[[Waiter, Message], None] = lambda waiter, message: None

    def begin(self, asked: local.MeasureCables, waiter: Waiter, now: float) -> None:
        """Begin a test.

        Raises:
            RefusedError: a node is not here or in several pairs, or workers have something else to do.
        """
        ends = Counter(end for pair in asked.pairs for end in (pair.source, pair.target))
        if absent := sorted(ends.keys() - self._nodes.keys()):
            raise RefusedError(f"node {absent[0]!r} is not connected; connected: {', '.join(sorted(self._nodes))}")
        if twice := sorted(node for node, count in ends.items() if count > 1):
            raise RefusedError(f"node {twice[0]!r} is in several pairs: they would share its cable")
        busy = sorted(name for name, state in self._models.items() if state.running is not None)
        if busy:
            raise RefusedError(f"a swap of model {busy[0]!r} is running; measure when it has ended")
        if self._running is not None:
            raise RefusedError("cables are being measured already; try again when that has ended")
        epoch = self._epochs.new(set(ends))
        epoch = replace(
            epoch,
            staging_bytes=4 * MESSAGE_BYTES * (len(epoch.nodes) - 1),
            timeout_s=min(JOIN_S, 0.9 * self._config.deadlines.plan_s),
        )
        test = f"cables.{epoch.id}"  # no plan's id: those begin with a digest
        deadline = now + epoch.timeout_s + asked.seconds + MARGIN_S
        self._running = _RunningTest(test, waiter, epoch, asked.pairs, deadline)
        self._epochs.measuring = epoch
        self._log("cables", test=test, nodes=len(epoch.nodes), seconds=asked.seconds)
        for pair in asked.pairs:
            for node, peer, sends in ((pair.source, pair.target, True), (pair.target, pair.source, False)):
                self._to_node(node, cluster.MeasureCable(test, epoch, peer, sends, asked.seconds))

    def measured(self, node: str, message: cluster.CableMeasured) -> None:
        """Handle a node's answer; after the last the test ends."""
        test = self._running
        if test is None or message.test != test.id or node not in test.epoch.nodes:
            return
        test.found[node] = message
        if len(test.found) == len(test.epoch.nodes):
            rates = (self._rate(pair, test.found[pair.target]) for pair in test.pairs)
            self._end(test, CablesMeasured(test.epoch.service, test.epoch.lanes, tuple(rates)))

    @staticmethod
    def _rate(pair: local.CablePair, found: cluster.CableMeasured) -> CableRate:
        return CableRate(pair.source, pair.target, found.bytes, found.speed, found.reason)

    def lost(self, test: str, reason: str) -> bool:
        """Fail the running test, if this is it: a node could not begin it or has lost it. Return whether this is it."""
        if self._running is None or self._running.id != test:
            return False
        self._fail(self._running, reason)
        return True

    def give_way(self, model: str) -> None:
        """End the test, because a swap begins. Its workers are free once the test's seconds have passed."""
        if self._running is not None:
            self._fail(self._running, f"a swap of model {model!r} has begun; measure again when it has ended")

    def node_lost(self, node: str, reason: str) -> None:
        """Fail the test in which a lost node takes part."""
        if self._running is not None and node in self._running.epoch.nodes:
            self._fail(self._running, f"node {node}: {reason}")

    def tick(self, now: float) -> None:
        """Fail a test whose deadline has passed, naming the nodes that have not answered."""
        test = self._running
        if test is not None and now >= test.deadline:
            late = ", ".join(node for node in test.epoch.nodes if node not in test.found)
            self._fail(test, f"no answer in time from {late}")

    def _fail(self, test: _RunningTest, reason: str) -> None:
        text = f"cables could not be measured: {reason}"
        self._end(test, local.Failure(code=TransportError.code, message=clipped(text)))

    def _end(self, test: _RunningTest, message: Message) -> None:
        self._running = self._epochs.measuring = None
        for node in test.epoch.nodes:
            self._to_node(node, cluster.DropPlan(plan=test.id))
        self.answer(test.waiter, message)
