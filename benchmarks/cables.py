"""Measure swaps over cables of different speed: first as if they were equal, then with the cluster file's speeds.

The nodes are as in fanout.py. One cable is slower than the others, in one or both directions. The rates are low enough
for two cores to carry all cables together.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from benchmarks import fanout, machine
from refitd.testing import eventually
from tests.support.network import why_not

MBIT, SLOW = 100, 25
SHAPES = {f"layers.{i}.weight": (2048, 1024) for i in range(8)}  # 4 MiB each
NODES, ROUNDS = 3, 3
ALIKE = f'kind = "cluster"\nname = "alike"\nnics_per_node = 1\nnic_gb_s = {MBIT / 8000}\n'
# name -> (nodes of trainer ranks, the node with the slow cable, its directions)
CASES: dict[str, tuple[int, int, dict[str, int]]] = {
    "an engine's node, both ways": (1, 2, {"send": SLOW, "receive": SLOW}),
    "an engine's node, sending": (1, 1, {"send": SLOW}),
    "one of two trainers' nodes, sending": (2, 1, {"send": SLOW}),
    "the trainer's node, sending": (1, 0, {"send": SLOW}),
}


def run(json_output: bool, quick: bool = False, cases: machine.Cases = machine.EVERY) -> dict[str, Any]:
    """Run all cases and return the figures."""
    if reason := why_not():
        print(f"left out: {reason}", file=sys.stderr)
        return {"left_out": reason}
    kept = {}
    if machine.is_recording():
        file = machine.RESULTS / "fanout.json"
        kept = json.loads(file.read_text())
        machine.check_same(kept["machine"], file.name)
    chosen = dict(list(CASES.items())[:1] if quick else CASES.items())
    results: dict[str, Any] = {"mbit": MBIT, "slow": SLOW, "cases": []}
    for name, (trainers, slow, ways) in chosen.items():
        if name not in cases:
            continue
        print(f"  {name}", file=sys.stderr, flush=True)
        results["cases"].append(_measured(name, trainers, slow, ways, 1 if quick else ROUNDS))
        results["bytes"] = results["cases"][0]["bytes"]
        if kept:  # after each case: together they take minutes
            kept["uneven"] = results
            machine.record("fanout", kept, fanout.markdown)
    if not json_output:
        print("\n".join(fanout.uneven_lines(results)))
    return results


def _measured(name: str, trainers: int, slow: int, ways: dict[str, int], rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rfb") as folder:
        file = Path(folder) / "cables.toml"
        file.write_text(ALIKE)
        more = f'cables = "{file}"\n'
        with fanout.cluster_of(trainers + NODES, True, SHAPES, MBIT, more, trainers) as cluster:
            cluster.hosts.limit(slow, **ways)
            client = cluster.clients[0]
            eventually(lambda: len(client.status().nodes) == trainers + NODES, "all nodes are there", 60)
            for node in range(trainers, trainers + NODES):
                cluster.add(node)
            cluster.swap()  # plans, connects and touches pages
            before = [cluster.swap()["stage"] for _ in range(rounds)]
            file.write_text(ALIKE + _stated(slow, ways))
            client.reload()
            cluster.swap()
            after = [cluster.swap()["stage"] for _ in range(rounds)]
            plan = client.plan("bench")
    predicted = plan.relays.seconds or plan.cables[0].seconds
    return {
        "name": name,
        "bytes": cluster.nbytes,
        "before": statistics.median(before),
        "after": statistics.median(after),
        "all": {"before": before, "after": after},
        "predicted": predicted,
        "paths": [" -> ".join((path.source, *path.nodes)) for path in plan.relays.paths],
    }


def _stated(slow: int, ways: dict[str, int]) -> str:
    """Return the lines of the cluster file about the slow node."""
    speeds = "".join(f"{way}_gb_s = {mbit / 8000}\n" for way, mbit in ways.items())
    return f'[[nodes]]\nname = "{ascii_lowercase[slow]}"\n{speeds}'
