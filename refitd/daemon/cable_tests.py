"""This node's part in cable tests: its workers join the test's epoch and send or receive for some seconds."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from refitd.daemon.actions import Instruction, ToWorker
from refitd.daemon.epochs import LocalEpochs
from refitd.protocol import cluster, sidecar
from refitd.protocol.base import clipped


@dataclass(slots=True)
class _LocalTest:
    asked: cluster.MeasureCable
    run: int
    found: dict[int, sidecar.CableTimed] = field(default_factory=dict)  # by worker


class LocalCableTests:
    """The tests under way. Instructions go to `out`, answers to `say`."""

    def __init__(
        self,
        node: str,
        workers: int,
        epochs: LocalEpochs,
        out: Callable[[Instruction], None],
        say: Callable[[cluster.NodeMessage], None],
    ) -> None:
        self._node, self._workers, self._epochs = node, workers, epochs
        self._out, self._say = out, say
        self._tests: dict[str, _LocalTest] = {}
        self._runs = 0

    def begin(self, asked: cluster.MeasureCable) -> None:
        """Have the workers join the test's epoch."""
        nodes, lanes = asked.epoch.nodes, asked.epoch.lanes
        if not {self._node, asked.peer} <= set(nodes) or not 0 < lanes <= self._workers:
            reason = f"an epoch of nodes {nodes} with {lanes} lanes does not fit this node"
            self._say(cluster.CableMeasured(test=asked.test, reason=clipped(reason)))
            return
        self._runs += 1
        self._tests[asked.test] = _LocalTest(asked, self._runs)
        self._epochs.join(asked.test, asked.epoch)

    def epoch_formed(self, test: str) -> bool:
        """Start measuring if this is the epoch of a test; return whether it is."""
        found = self._tests.get(test)
        if found is None:
            return False
        asked = found.asked
        peer = asked.epoch.nodes.index(asked.peer)
        for lane in range(asked.epoch.lanes):
            order = sidecar.TimeCable(found.run, asked.epoch.id, peer, asked.sends, asked.seconds)
            self._out(ToWorker(lane, order))
        return True

    def worker_said(self, worker: int, message: sidecar.CableTimed) -> None:
        """Handle a worker's answer; after the last one, send the coordinator their sum."""
        test = next((test for test in self._tests.values() if test.run == message.run), None)
        if test is None:
            return
        test.found[worker] = message
        if len(test.found) == test.asked.epoch.lanes:
            self._say(_sum(test.asked.test, test.found.values()))

    def drop(self, test: str) -> None:
        """End a test, and its epoch."""
        found = self._tests.pop(test, None)
        if found is not None:
            self._epochs.leave(found.asked.epoch.id)

    def drop_all(self) -> None:
        """End all tests: the coordinator that asked for them is gone."""
        for test in list(self._tests):
            self.drop(test)


def _sum(test: str, found: Collection[sidecar.CableTimed]) -> cluster.CableMeasured:
    """Return the bytes that all workers received, and their rate from the first start to the last end."""
    timed = [one for one in found if one.bytes and one.ended_s > one.began_s]
    if not timed:
        return cluster.CableMeasured(test, reason=next((one.reason for one in found if one.reason), ""))
    nbytes = sum(one.bytes for one in timed)
    seconds = max(one.ended_s for one in timed) - min(one.began_s for one in timed)
    return cluster.CableMeasured(test, nbytes, round(nbytes / seconds))
