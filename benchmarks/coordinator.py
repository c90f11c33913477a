"""Measure what a fleet costs its coordinator: messages, bytes, CPU and the longest turn of its loop.

The coordinator's state, planner and encoding run in this process. Simulated daemons with 8 ranks each answer without
faults, and every message in both directions is encoded and decoded. Sockets and the journal's disk are not included.
Half of the nodes train one model, each rank with other tensors. On the other half every rank needs the tensors of
two trainers, which are on two nodes.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from benchmarks import machine
from refitd import ParameterMetadata
from refitd.config import Config
from refitd.coordinator import actions as act
from refitd.coordinator.fleet import Ids
from refitd.coordinator.plans import PlanMemory, make_plan
from refitd.coordinator.state import CoordinatorState
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION, Decoder, digest_of, encode, pack
from refitd.protocol.reports import LaneStatus, NodeStatus, SwapReport
from refitd.protocol.shards import shard_of
from refitd.states import Tick
from tests.support.coordinator_harness import Past

LANES = 8  # workers, and ranks, of each node
NODES = (10, 100, 500, 1000)
MODEL = "policy"


@dataclass
class Figures:
    """The cost of one step. Seconds are CPU time of the loop, without planning; bytes are of frames both ways."""

    messages: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    loop_s: float = 0.0
    longest_turn_s: float = 0.0
    plan_s: float = 0.0

    def shown(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "messages": sum(self.messages.values()),
            "bytes": sum(self.bytes.values()),
            "loop_cpu_s": round(self.loop_s, 4),
            "longest_turn_ms": round(1000 * self.longest_turn_s, 2),
            "plan_cpu_s": round(self.plan_s, 3),
            "by_type": {name: (count, self.bytes[name]) for name, count in self.messages.most_common(6)},
        }


class Fleet:
    """A coordinator, and simulated daemons."""

    def __init__(self, nodes: int) -> None:
        self._nodes, self._trainers = nodes, nodes // 2
        self._memory, self._past = PlanMemory(), Past({})
        self._requests, self._boots = itertools.count(1), itertools.count(1)
        self._from_node: Decoder[cluster.NodeMessage] = Decoder(cluster.NodeMessage)
        self.now, self.figures, self.outcome = 0.0, Figures(), ""
        self._live: int | None = None
        self.begin()

    def begin(self) -> None:
        """Start a coordinator, with the journal of the one before."""
        boot = f"boot{next(self._boots)}"
        self.state = CoordinatorState(Config(), boot, 1, self.now, Ids(boot.encode()), self._past, is_standalone=True)

    def come(self, node: int) -> None:
        """Have a daemon introduce itself and register its ranks."""
        if node % 100 == 0:
            set_aside()
        lanes = tuple(LaneStatus(gpu=f"GPU-{node:04}-{i}", numa=i // 4, card=f"mlx5_{i}") for i in range(LANES))
        status = NodeStatus(
            node=_name(node),
            host=f"host-{node:04}",
            pid=1000 + node,
            workers=tuple(range(LANES)),
            clients=LANES,
            arenas=2 * LANES,
            arena_bytes=1 << 34,
            address=f"10.0.{node // 250}.{node % 250}",
            services=("shm", "gloo", "nccl"),
            lanes=lanes,
        )
        self.say(node, cluster.NodeHello(PROTOCOL_VERSION, status))
        is_trainer, ranks = node < self._trainers, LANES * self._trainers
        for worker in range(LANES):
            rank = LANES * (node % self._trainers) + worker
            held = [rank] if is_trainer else [rank, (rank + LANES) % ranks]
            shard = shard_of([ParameterMetadata(f"w{i}", (64, 64), "bfloat16", 2, resolved_name=f"w{i}") for i in held])
            digest = digest_of(shard)
            self.say(node, cluster.DescribeShard(digest=digest, packed=pack(shard)))
            more: dict[str, Any] = {}
            if is_trainer and self._live is not None:
                more = {"versions": (self._live,), "modes": (), "newest": self._live, "run": "run1"}
            elif self._live is not None:
                more = {"version": self._live, "run": "run1"}
            role: Any = "source" if is_trainer else "target"
            added = cluster.AddShard(
                _member(node, worker),
                MODEL,
                role,
                "" if is_trainer else "engine",
                rank,
                ranks,
                100 + worker,
                digest,
                **more,
            )
            self.say(node, added, next(self._requests))

    def swap(self, version: int) -> None:
        """Publish a version on every trainer's rank and swap to it."""
        for node, worker in itertools.product(range(self._trainers), range(LANES)):
            self.say(node, local.Publish(_member(node, worker), version), next(self._requests))
        self.outcome = ""
        self.say(0, local.StartSwap(MODEL, queue=True), next(self._requests))
        if self.outcome != "committed":
            raise RuntimeError(f"the swap to version {version} has ended as {self.outcome!r}")
        self._live = version

    def lose(self, node: int) -> None:
        """Have a daemon end."""
        self.say(node, local.Goodbye())

    def say(self, node: int, message: cluster.NodeMessage, request: int = 0) -> None:
        """Feed a daemon's message, and everything that follows from it."""
        pending = deque[act.Event | tuple[int, cluster.NodeMessage, int]]([(node, message, request)])
        found = self.figures
        while pending:
            event = pending.popleft()
            began = time.process_time()
            if isinstance(event, tuple):
                frame = encode(event[2], event[1])
                began = time.process_time()
                event = act.FromNode(_name(event[0]).encode(), *self._from_node.decode(frame))
                self._count(event.message, frame)
            sent = []
            for one in self.state.handle(event, self.now):
                if isinstance(one, act.Send):
                    frame = encode(one.request, one.message)
                    self._count(one.message, frame)
                    sent.append((int(one.identity.decode()[1:]), one.message))
                elif isinstance(one, act.MakePlan):
                    planning = time.process_time()
                    plan = make_plan(one.rosters, self._memory, may_relay=one.may_relay, last=one.last)
                    found.plan_s += time.process_time() - planning
                    began += time.process_time() - planning
                    pending.append(act.Planned(one.ticket, plan))
                elif isinstance(one, act.Decide):
                    swaps = tuple(record.swap for record in one.records)
                    self._past.records |= {record.swap: record for record in one.records}
                    pending.append(act.JournalWritten(swaps, None, (1,) * len(swaps)))
            turn = time.process_time() - began
            found.loop_s += turn
            found.longest_turn_s = max(found.longest_turn_s, turn)
            for to, each in sent:
                pending += [(to, answer, 0) for answer in self._answers(to, each)]
            if self.state.unsent and not pending:
                pending.append(Tick())

    def _count(self, message: object, frame: bytes) -> None:
        self.figures.messages[type(message).__name__] += 1
        self.figures.bytes[type(message).__name__] += len(frame)

    def _answers(self, node: int, sent: object) -> list[cluster.NodeMessage]:
        match sent:
            case cluster.LoadPlan(plan, epoch=epoch):
                return [cluster.PlanLoaded(plan, epoch.id if epoch is not None else "")]
            case cluster.Stage(swap):
                return [cluster.StageDone(swap, 1, 1, 0.1)]
            case cluster.CommitStaged(swap):
                return [local.CommitDone(swap, _member(node, worker), 0.0) for worker in range(LANES)]
            case SwapReport(outcome=outcome, reason=reason):
                self.outcome = str(getattr(outcome, "value", outcome)) + reason
            case local.Failure(code, text):
                raise RuntimeError(f"{_name(node)}: {code}: {text}")
        return []


def set_aside() -> None:
    """Do what the coordinator does every second: later collections skip what survives this one."""
    gc.collect()
    gc.freeze()


def _name(node: int) -> str:
    return f"n{node:04}"


def _member(node: int, worker: int) -> str:
    return f"{MODEL}/{worker}@{_name(node)}"


def measure(nodes: int) -> dict[str, Any]:
    """Return the cost of each step for a fleet of so many nodes."""
    fleet, steps = Fleet(nodes), dict[str, Any]()

    def step(name: str, change: Any) -> None:
        set_aside()
        fleet.figures = Figures()
        change()
        steps[name] = fleet.figures.shown()

    def come_all() -> None:
        for node in range(nodes):
            fleet.come(node)

    def restart() -> None:
        fleet.begin()
        come_all()

    def lose() -> None:
        fleet.lose(nodes - 1)
        fleet.come(nodes - 1)

    step("all nodes join", come_all)
    step("first swap", lambda: fleet.swap(1))
    step("next swap", lambda: fleet.swap(2))
    step("one node is lost and returns", lose)
    step("swap after the loss", lambda: fleet.swap(3))
    step("the coordinator restarts", restart)
    return {"nodes": nodes, "ranks": nodes * LANES, "steps": steps}


def table(found: list[dict[str, Any]]) -> str:
    """Return the figures as a table."""
    lines = ["| step | nodes | messages | MB | loop, CPU s | longest turn, ms | planning, CPU s | messages per node |"]
    lines.append("|" + " --- |" * 8)
    for name in found[0]["steps"]:
        for one in found:
            row = one["steps"][name]
            lines.append(
                f"| {name} | {one['nodes']} | {row['messages']} | {row['bytes'] / 1e6:.2f} | {row['loop_cpu_s']:.3f} | "
                f"{row['longest_turn_ms']:.1f} | {row['plan_cpu_s']:.2f} | {row['messages'] / one['nodes']:.1f} |"
            )
    return "\n".join(lines)


ABOUT = """The coordinator's state, planner and encoding run in one process, with simulated daemons of 8 ranks.
Sockets and the journal's disk are not included. Half of the nodes train one model, each rank with tensors of its own;
every rank of the other half needs the tensors of two trainers, on two nodes. Messages and bytes are of both directions.

Forming the connections of a plan adds no message to `LoadPlan` and `PlanLoaded`, one each per node. Before, each worker
sent four values through the coordinator to all other nodes, 4 x lanes x nodes² messages: 131,072 for 64 nodes of 8
lanes (0.7 GB), 2.1 million for 256 (30 GB) and 32 million for 1,000.
"""


def _markdown(results: dict[str, Any]) -> str:
    head = f"# What a fleet costs its coordinator\n\nCalibration loop {results['calibration_s']:.2f} s."
    return f"{head} {ABOUT}\n{table(results['fleets'])}\n"


def run(json_output: bool, *, quick: bool = False, cases: machine.Cases = machine.EVERY) -> dict[str, Any]:
    """Measure fleets of growing sizes."""
    fleets = [measure(n) for n in ((10, 100) if quick else NODES) if f"{n} nodes" in cases]
    results = {"calibration_s": machine.calibrate(), "fleets": fleets}
    if not json_output:
        print(table(results["fleets"]))
    if not quick:
        machine.record("coordinator", results, _markdown)
    return results
