"""Measure the coordinator when one replica joins, leaves or returns at thousands of ranks: time, bytes to the nodes.

The coordinator's state, planner and encoding run in this process, and the daemons' answers are fed to them directly.
Sockets and the journal's disk are not included. `python -m benchmarks.replan MODEL RANKS`.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks import machine, models
from benchmarks.plan import RANKS_PER_NODE, Received, registrations
from refitd.config import Config
from refitd.coordinator import actions as act
from refitd.coordinator.fleet import Ids
from refitd.coordinator.plans import PlanMemory, make_plan
from refitd.coordinator.state import CoordinatorState
from refitd.offline.layouts import world_size
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION, encode
from refitd.protocol.reports import NodeStatus, SwapReport
from tests.support.coordinator_harness import Past


@dataclass
class Figures:
    """The cost of one change and of the next swap. Seconds are CPU time; bytes are of frames, by message type."""

    plan_s: float = 0.0
    loop_s: float = 0.0
    longest_turn_s: float = 0.0
    encode_s: float = 0.0
    sent_bytes: Counter[str] = field(default_factory=Counter)
    plan_bytes: list[int] = field(default_factory=list)  # of the message with the plan to each node
    outcome: str = ""

    def shown(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "outcome": self.outcome,
            "plan_cpu_s": round(self.plan_s, 3),
            "loop_cpu_s": round(self.loop_s, 3),
            "longest_turn_cpu_s": round(self.longest_turn_s, 3),
            "encode_cpu_s": round(self.encode_s, 3),
            "plan_messages": len(self.plan_bytes),
            "plan_bytes": sum(self.plan_bytes),
            "plan_bytes_per_node": {
                "least": min(self.plan_bytes, default=0),
                "median": round(statistics.median(self.plan_bytes or [0])),
                "most": max(self.plan_bytes, default=0),
            },
            "other_bytes": sum(self.sent_bytes.values()) - sum(self.plan_bytes),
        }


class Fleet:
    """A coordinator, and simulated daemons that answer without faults."""

    def __init__(self, received: Received) -> None:
        self.received = received
        self._memory = PlanMemory()
        self.now = 0.0
        self.figures = Figures()
        self._targets: dict[str, list[str]] = {}  # node -> members
        self._described: set[str] = set()
        self._worlds = Counter(pool for _, pool, _, _ in received.ranks)
        self._first: dict[str, int] = {}
        for rank, pool, _, _ in received.ranks:
            self._first[pool] = min(rank, self._first.get(pool, rank))
        self.state = CoordinatorState(Config(), "boot", 1, 0.0, Ids(b"seed"), Past({}), is_standalone=True)
        nodes = sorted({_node(rank) for rank, *_ in received.ranks})
        for number, name in enumerate(nodes):
            status = NodeStatus(
                node=name,
                host=f"host-{name}",
                pid=number + 1,
                workers=tuple(range(8)),
                clients=0,
                arenas=0,
                arena_bytes=0,
            )
            self._say(name, cluster.NodeHello(PROTOCOL_VERSION, status))

    def join(self, pool: str) -> None:
        """Register all ranks of a pool."""
        for rank, name, is_source, digest in self.received.ranks:
            if name != pool:
                continue
            node, index = _node(rank), rank - self._first[pool]
            member = f"policy/{pool}:{index}@{node}#{index}"
            if digest not in self._described:  # later ranks with this digest need no description
                self._described.add(digest)
                self._say(node, cluster.DescribeShard(digest=digest, packed=self.received.described[digest]))
            role: Any = "source" if is_source else "target"
            replica = "" if is_source else pool
            shard = cluster.AddShard(member, "policy", role, replica, index, self._worlds[pool], 100000, digest)
            self._say(node, shard, request=3)
            if not is_source:
                self._targets.setdefault(node, []).append(member)

    def leave(self, pool: str) -> None:
        """Remove all ranks of a pool."""
        for node, members in self._targets.items():
            for member in [m for m in members if m.startswith(f"policy/{pool}:")]:
                members.remove(member)
                self._say(node, local.Deregister(member, "it has ended"))

    def publish(self, version: int) -> None:
        """Publish a version on every source rank."""
        for rank, pool, is_source, _ in self.received.ranks:
            if is_source:
                node, index = _node(rank), rank - self._first[pool]
                self._say(node, local.Publish(f"policy/{pool}:{index}@{node}#{index}", version))

    def swap(self) -> None:
        """Request a swap and perform all its steps."""
        self._say("node0", local.StartSwap("policy", queue=True), request=9)

    def wait(self) -> None:
        """Advance the clock past the time that joining replicas wait for each other, with heartbeats of all nodes."""
        self.now += 5.0
        for node in self.state.nodes.values():
            node.last_heard = self.now
        self._feed(act.Tick())

    def _say(self, node: str, message: cluster.NodeMessage, request: int = 0) -> None:
        self._feed(act.FromNode(node.encode(), request, message))

    def _feed(self, first: act.Event) -> None:
        pending = [first]
        found = self.figures
        while pending:
            event = pending.pop(0)
            began = time.process_time()
            instructions = self.state.handle(event, self.now)
            turn = time.process_time() - began
            found.loop_s += turn
            found.longest_turn_s = max(found.longest_turn_s, turn)
            for one in instructions:
                match one:
                    case act.Send(identity, number, sent):
                        began = time.process_time()
                        found.sent_bytes[type(sent).__name__] += len(encode(number, sent))
                        found.encode_s += time.process_time() - began
                        pending += self._answers(identity, sent)
                    case act.MakePlan(ticket, rosters, may_relay, last):
                        began = time.process_time()
                        plan = make_plan(rosters, self._memory, may_relay=may_relay, last=last)
                        found.plan_s += time.process_time() - began
                        pending.append(act.Planned(ticket, plan))
                    case act.Decide(records):
                        swaps = tuple(record.swap for record in records)
                        pending.append(act.JournalWritten(swaps, None, (1,) * len(swaps)))

    def _answers(self, identity: bytes, sent: object) -> list[act.Event]:
        node = identity.decode()

        def said(message: cluster.NodeMessage) -> act.Event:
            return act.FromNode(identity, 0, message)

        match sent:
            case cluster.LoadPlan(plan, epoch=epoch):
                self.figures.plan_bytes.append(len(encode(0, sent)))
                return [said(cluster.PlanLoaded(plan, epoch.id if epoch is not None else ""))]
            case cluster.DigestRegions(swap, table=table):
                return [said(cluster.RegionsDigested(swap, bytes(8 * int(table["rows"]))))]  # type: ignore[call-overload]
            case cluster.Stage(swap):
                return [said(cluster.StageDone(swap, 1, 1, 0.1))]
            case cluster.CommitStaged(swap):
                joined = self.state.models["policy"].running
                members = joined.swap.members if joined is not None else {}
                return [
                    said(local.CommitDone(swap, m, 0.0, seeds=True))
                    for m in self._targets.get(node, ())
                    if m in members
                ]
            case SwapReport(outcome=outcome, reason=reason):
                self.figures.outcome = f"{outcome.value if hasattr(outcome, 'value') else outcome} {reason}".strip()
            case local.Failure(code, text):
                raise RuntimeError(f"{node}: {code}: {text}")
        return []


def _node(rank: int) -> str:
    return f"node{rank // RANKS_PER_NODE}"


def measure(model: str, ranks: int) -> dict[str, Any]:
    """Return the coordinator's cost of each change of a fleet."""
    case = models.case(model, ranks)
    received = registrations(case)
    pools = list(dict.fromkeys(pool for _, pool, _, _ in received.ranks))
    found: dict[str, Any] = {}
    fleet = Fleet(received)
    version = 1

    def step(name: str, change: Any) -> None:
        nonlocal version
        gc.collect()
        fleet.figures = Figures()
        change()
        fleet.wait()
        caught_up, fleet.figures = fleet.figures, Figures()
        fleet.publish(version)
        version += 1
        fleet.figures = Figures()
        fleet.swap()
        found[name] = fleet.figures.shown()
        if caught_up.plan_bytes:
            found[f"{name}: catching up"] = caught_up.shown()

    def begin() -> None:
        for pool in pools[:-1]:
            fleet.join(pool)

    middle = pools[len(pools) // 2]
    step("the first swap", begin)
    step("the last replica joins", lambda: fleet.join(pools[-1]))
    step("a replica in the middle leaves", lambda: fleet.leave(middle))
    step("it returns", lambda: fleet.join(middle))
    # last by name, because ranks are numbered by name: the numbers of all other ranks remain
    step("the last replica by name leaves", lambda: fleet.leave(max(pools[1:])))
    return {
        "model": model,
        "ranks": ranks,
        "layouts": case.describe(),
        "replica_ranks": world_size(case.engine),
        "calibration_s": machine.calibrate(),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "changes": found,
    }


if __name__ == "__main__":
    name, count = sys.argv[1:]
    print(json.dumps(measure(name, int(count)), indent=1))
