"""scripts/fleets: make random fleets from a seed, run random operations on them, compare every byte after each."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import traceback
from collections import Counter

from refitd.testing import Cluster
from tests.fleets.model import Model
from tests.fleets.operations import OPERATIONS, Fleet

LOG_BYTES = 20_000


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/fleets", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first fleet; the same seed makes the same (1)")
    parser.add_argument("--fleets", type=int, default=4, help="one after the other, each with the next seed (4)")
    parser.add_argument("--seconds", type=float, default=180.0, help="for each fleet (180)")
    parser.add_argument("--operations", type=int, default=1 << 30, help="at most, for each fleet")
    options = parser.parse_args(arguments)
    failed = [
        seed
        for seed in range(options.seed, options.seed + options.fleets)
        if not run(seed, options.seconds, options.operations)
    ]
    if failed:
        print(f"failed: fleets {failed}; `scripts/fleets --fleets 1 --seed {failed[0]}` makes the first again")
    return 1 if failed else 0


def run(seed: int, seconds: float, operations: int) -> bool:
    """Run one fleet and print its operations. Return whether all checks passed."""
    choices, end, done = random.Random(seed), time.monotonic() + seconds, Counter[str]()
    took: dict[str, list[float]] = {}
    nodes = [f"n{number}" for number in range(choices.choice((1, 2, 3, 3, 4)))]
    with Cluster(nodes, workers=choices.choice((1, 2))) as cluster:
        clients = [daemon.connect(reconnect=True) for daemon in cluster.daemons.values()]
        try:
            models = [Model(f"m{number}", clients, choices) for number in range(3)]
            fleet = Fleet(cluster, models, clients[0], choices, lambda text: print(f"      {text[:200]}"))
            print(f"fleet {seed}: {len(nodes)} nodes", *(_shown(model) for model in models), sep="\n    ", flush=True)
            while time.monotonic() < end and done.total() < operations:
                operation, model = choices.choice(OPERATIONS), choices.choice(models)
                done[operation.__name__] += 1
                print(f"  {done.total()}: {operation.__name__} {model.name}", flush=True)
                started = time.monotonic()
                operation(fleet, model)
                took.setdefault(operation.__name__, []).append(time.monotonic() - started)
        except Exception:
            traceback.print_exc()
            print(cluster.logs(LOG_BYTES))
            print(f"fleet {seed}: FAILED", flush=True)
            return False
        finally:
            for client in clients:
                client.close()
    print(f"fleet {seed}: {done.total()} operations, every byte right; seconds, median and longest:")
    for name, each in sorted(took.items()):
        print(f"    {name}: {len(each)}, {statistics.median(each):.2f}, {max(each):.2f}")
    sys.stdout.flush()
    return True


def _shown(model: Model) -> str:
    replicas = {rank.replica: f"{rank.kind} {rank.layout.stages}x{rank.layout.tp} {rank.dtype}" for rank in model.ranks}
    whole = ", whole on each" if model.layout.is_whole else ""
    return (
        f"{model.name}: {model.dtype} offered as {model.offered}, "
        f"{model.layout.stages}x{model.layout.tp} sources{whole}; "
        + "; ".join(f"{replica}: {what}" for replica, what in replicas.items())
    )


if __name__ == "__main__":
    sys.exit(main())
