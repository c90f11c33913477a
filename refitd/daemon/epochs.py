"""This node's part in epochs: its workers join and leave process groups with workers of other nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from refitd.daemon.actions import Instruction, ToCoordinator, ToWorker
from refitd.events import Log
from refitd.protocol import cluster, sidecar

# Ticks (of a second) that a worker has to leave an abandoned epoch. Transport calls cannot be interrupted from outside,
# and a worker stuck in one would delay every later epoch.
PATIENCE_TICKS = 2
# The same for a worker's first epoch, in which it loads torch. Replacing the worker would only take longer.
COLD_PATIENCE_TICKS = 20
# Ticks after its start at which a worker of a fleet loads what its first epoch needs: engines take longer to load their
# weights, and a commit that a worker's death has interrupted must not wait for it.
WARM_UP_TICKS = 5


@dataclass(slots=True)
class _Joined:
    """An epoch that the first `lanes` workers of this node have joined or are joining."""

    plan: str
    epoch: cluster.EpochPlan
    waiting: set[int]
    members: set[int] = field(default_factory=set)
    left: dict[int, list[sidecar.LaneValue]] = field(default_factory=dict)  # for workers that have not joined yet


class LocalEpochs:
    """Tracks the epochs of this node's workers. Instructions go to `out`.

    `formed(plan, epoch)` is called once the workers of every lane have joined their peers.
    """

    def __init__(
        self,
        node: str,
        address: str,
        out: Callable[[Instruction], None],
        formed: Callable[[str, str], None],
        *,
        workers: int = 0,
        warms: str = "",
    ) -> None:
        """`warms` is the service that the node's `workers` load soon after their start; "": when they first need it."""
        self._node, self._address = node, address
        self._warms = warms
        self._warm_in = dict.fromkeys(range(workers if warms else 0), WARM_UP_TICKS)  # ticks, by worker
        self._out = out
        self._formed = formed
        self._epochs: dict[str, _Joined] = {}
        self._warm: set[int] = set()  # workers that have joined an epoch, or tried to
        self._late: dict[tuple[int, str], int] = {}  # (worker, abandoned epoch that it was joining) -> ticks

    def join(self, plan: str, epoch: cluster.EpochPlan) -> None:
        """Have the workers of every lane join their peers."""
        lanes = set(range(epoch.lanes))
        self._epochs[epoch.id] = _Joined(plan, epoch, set(lanes), lanes)
        for lane in sorted(lanes):
            self._send_in(lane, epoch)

    def _send_in(self, lane: int, epoch: cluster.EpochPlan) -> None:
        labels = tuple(
            f"worker {lane} on node {node} (host {host})" for node, host in zip(epoch.nodes, epoch.hosts, strict=True)
        )
        message = sidecar.JoinEpoch(
            epoch=epoch.id,
            service=epoch.service,
            index=epoch.nodes.index(self._node),
            labels=labels,
            address=self._address,
            staging_bytes=epoch.staging_bytes,
            timeout_s=epoch.timeout_s,
            key=epoch.key,
        )
        self._out(ToWorker(lane, message))

    def leave(self, epoch: str) -> None:
        """Have the workers leave an epoch and close its connections."""
        joined = self._epochs.pop(epoch, None)
        if joined is not None:
            for lane in sorted(joined.members):
                self._out(ToWorker(lane, sidecar.LeaveEpoch(epoch=epoch)))
                if lane in joined.waiting:
                    self._late[lane, epoch] = 0

    def tick(self) -> list[tuple[int, str]]:
        """Return the workers that did not leave an abandoned epoch in time, with the reason; warm up others, once."""
        self._warm_in = {worker: ticks - 1 for worker, ticks in self._warm_in.items() if worker not in self._warm}
        for worker in sorted(worker for worker, ticks in self._warm_in.items() if not ticks):
            del self._warm_in[worker]
            self._out(ToWorker(worker, sidecar.WarmUp(service=self._warms)))
        stuck: dict[int, str] = {}
        for (worker, epoch), ticks in self._late.items():
            self._late[worker, epoch] = ticks + 1
            if ticks >= (PATIENCE_TICKS if worker in self._warm else COLD_PATIENCE_TICKS):
                stuck[worker] = f"it did not come out of epoch {epoch}, which was given up"
        return sorted(stuck.items())

    def worker_said(self, worker: int, message: sidecar.LanePut | sidecar.EpochJoined | sidecar.EpochFailed) -> None:
        """Handle a worker's message about an epoch."""
        if worker not in self._warm:
            self._warm.add(worker)
            self._late |= dict.fromkeys([key for key in self._late if key[0] == worker], 0)
        if not isinstance(message, sidecar.LanePut):
            self._late.pop((worker, message.epoch), None)
        joined = self._epochs.get(message.epoch)
        if joined is None:
            return
        match message:
            case sidecar.LanePut(epoch, key, value):
                self._say(cluster.EpochPut(epoch=epoch, lane=worker, key=key, value=value))
            case sidecar.EpochJoined():
                joined.waiting.discard(worker)
                joined.left.pop(worker, None)
                if not joined.waiting:
                    self._out(
                        Log("epoch", {"epoch": joined.epoch.id, "plan": joined.plan, "lanes": joined.epoch.lanes})
                    )
                    self._formed(joined.plan, joined.epoch.id)
            case sidecar.EpochFailed(epoch, reason):
                joined.waiting.discard(worker)
                where = f"worker {worker} on node {self._node}"
                self._out(Log("epoch-failed", {"epoch": epoch, "where": where, "reason": reason}))
                self._say(cluster.PlanRefused(plan=joined.plan, epoch=epoch, where=where, reason=reason))

    def value(self, message: cluster.EpochValue) -> None:
        """Pass a value from a peer on to the worker of its lane."""
        joined = self._epochs.get(message.epoch)
        if joined is not None and message.lane in joined.members:
            value = sidecar.LaneValue(epoch=message.epoch, key=message.key, value=message.value)
            if message.lane in joined.waiting:
                joined.left.setdefault(message.lane, []).append(value)
            self._out(ToWorker(message.lane, value))

    def worker_gone(self, worker: int, who: str, how: str) -> None:
        """A worker died or was replaced: its epochs end, on every node.

        Exception: if it was stuck in an abandoned epoch, the epochs that it had not reached go on. Peers still wait
        there, and its successor joins them.
        """
        services: set[str] = set()
        was_stuck = any(late == worker for late, _ in self._late)
        self._warm.discard(worker)
        self._late = {key: ticks for key, ticks in self._late.items() if key[0] != worker}
        for id_, joined in list(self._epochs.items()):
            if was_stuck and worker in joined.waiting:
                self._send_in(worker, joined.epoch)
                for value in joined.left.get(worker, ()):
                    self._out(ToWorker(worker, value))
            elif worker in joined.members:
                services.add(joined.epoch.service)
                joined.members.discard(worker)
                self.leave(id_)
                self._say(cluster.EpochLost(plan=joined.plan, epoch=id_, where=who, reason=how))
        if self._warms and not services:  # not at once: what its predecessor has not finished comes first
            self._warm_in[worker] = WARM_UP_TICKS
        for service in sorted(services):  # the successor will be needed for the next epoch
            self._warm_in.pop(worker, None)
            self._out(ToWorker(worker, sidecar.WarmUp(service=service)))

    def _say(self, message: cluster.NodeMessage) -> None:
        self._out(ToCoordinator(0, message))
