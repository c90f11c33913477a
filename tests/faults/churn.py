"""Two runs of real processes under steady swaps. Every engine compares every version with its number.

    rolling   10 swaps a second, while nodes are drained and resumed, the configuration is reloaded, and daemons, the
              coordinator and then all processes in turn are restarted, as in an upgrade
    joiners   replicas of three nodes join together, and two relays of their path die before they have caught up

The value of element i in version v is i % 1000 + (v + i) // SHARE: a version changes one element in SHARE. A mix of
two versions, a late or a lost delta, or one version under another's number is a wrong element.

    scripts/faults churn rolling --seconds 60 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

import refitd
from refitd.testing import Cluster, Daemon

NODES = ("n0", "n1", "n2", "n3")
MODEL = "policy"
SHARE = 97
BACK_S = 90.0
EVERY_S = 0.1  # between the starts of two swaps
JOINED = 17_000_000  # elements: replicas of 64 MiB and more wait for each other, and join over one path
CONFIG = "[deadlines]\nplan_s = 15.0\nstage_s = 10.0\ncommit_s = 10.0\nlease_s = 3.0\n"

Values = Callable[[int], dict[str, torch.Tensor]]


def values_of(elements: int) -> Values:
    """Return the function that computes the tensors of a version from its number alone."""
    place = torch.arange(elements, dtype=torch.int64)

    @functools.lru_cache(maxsize=4)
    def values(version: int) -> dict[str, torch.Tensor]:
        flat = (place % 1000 + (place + version) // SHARE).to(torch.float32)  # whole numbers, exact in float32
        rows = elements // 8
        return {"wide": flat[: 7 * rows].view(7, rows), "narrow": flat[7 * rows :]}

    return values


class Failure(Exception):
    """An engine held wrong values, or the cluster did not recover in time."""


class Replica:
    """An engine of one rank on a thread: it polls, and compares what it serves after every poll."""

    def __init__(self, daemon: Daemon, name: str, values: Values, *, flips: bool) -> None:
        self.name, self.flips = name, flips
        self.wrong: list[str] = []
        self.served: Counter[int] = Counter()  # comparisons, by version
        self.version: int | None = None
        self._values = values
        self._daemon = daemon
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                with contextlib.closing(self._daemon.connect(self.name, reconnect=True)) as client:
                    self._serve(client)
            except refitd.RefitdError:  # its daemon is disconnected; start again like a new process
                self.version = None
                self._end.wait(0.2)
            except Exception as exc:
                self.wrong.append(f"{self.name}: {exc!r}")
                return

    def _serve(self, client: refitd.Client) -> None:
        empty = self._values(0)
        live = {name: torch.zeros_like(tensor) for name, tensor in empty.items()}
        if self.flips:
            live = client.allocate({name: (tensor.shape, tensor.dtype) for name, tensor in empty.items()})
        target = client.register_target(MODEL, live, replica=self.name, mode="flip" if self.flips else "copy")
        pause_s = 0.003
        while not self._end.wait(pause_s):
            with contextlib.suppress(refitd.CommitError):  # the daemon ended while its workers wrote the tensors
                target.poll()
            version, began = target.version, time.monotonic()
            self.version = version
            if version is None:
                continue
            same = all(torch.equal(live[name], tensor) for name, tensor in self._values(version).items())
            if not same and target.version == version:
                self.wrong.append(f"{self.name}: it says that it serves version {version}, and holds something else")
                return
            self.served[version] += 1
            pause_s = max(0.003, time.monotonic() - began)

    def end(self) -> None:
        """Stop polling, and leave."""
        self._end.set()
        self._thread.join(30)


class Trainer:
    """Publishes and swaps on a thread; a failed swap is followed by the next version."""

    def __init__(self, daemon: Daemon, values: Values, every_s: float) -> None:
        self.version, self.committed = 0, 0
        self.outcomes: Counter[str] = Counter()
        self.failure = ""
        self._daemon, self._values, self._every_s = daemon, values, every_s
        self._turn, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with contextlib.closing(self._daemon.connect("trainer", reconnect=True)) as client:
                held = {name: tensor.clone() for name, tensor in self._values(0).items()}
                source = client.register_source(MODEL, held)
                while not self._end.is_set():
                    began = time.monotonic()
                    with self._turn:
                        self.outcomes[self._swap(client, source, held)] += 1
                    self._end.wait(max(0.0, began + self._every_s - time.monotonic()))
        except Exception as exc:
            self.failure = f"the trainer ended: {exc!r}"

    def _swap(self, client: refitd.Client, source: Any, held: dict[str, torch.Tensor]) -> str:
        try:
            self.version += 1
            for name, tensor in self._values(self.version).items():
                held[name].copy_(tensor)
            source.publish(self.version, timeout=BACK_S)
            report = client.swap(MODEL, self.version, timeout=BACK_S)
        except refitd.RefitdError as exc:
            return type(exc).__name__
        self.committed += 1
        return str(report.outcome)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Wait for the end of the present swap; no other one begins during the block."""
        with self._turn:
            yield

    def end(self) -> None:
        """Stop after the present swap."""
        self._end.set()
        self._thread.join(BACK_S)


class Churn:
    """A cluster of four nodes under swaps, and the operations on it."""

    def __init__(self, seed: int, *, elements: int, every_s: float) -> None:
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.values = values_of(elements)
        self.cluster = Cluster(NODES, CONFIG)
        self.cluster.start()
        self.replicas: list[Replica] = []
        self.gone: list[Replica] = []
        self.trainer = Trainer(self.cluster.daemons["n0"], self.values, every_s)

    def add(self, node: str, name: str, *, flips: bool) -> Replica:
        """Start a replica on a node."""
        found = Replica(self.cluster.daemons[node], name, self.values, flips=flips)
        self.replicas.append(found)
        return found

    def check(self) -> None:
        """Raise Failure if an engine or the trainer has reported one."""
        wrong = [text for replica in (*self.replicas, *self.gone) for text in replica.wrong]
        if wrong or self.trainer.failure:
            raise Failure("; ".join([*wrong, self.trainer.failure][:5]))

    def until(self, claim: Callable[[], bool], what: str, timeout: float = BACK_S) -> None:
        """Wait; raise Failure at the deadline, or as soon as one is reported."""
        until = time.monotonic() + timeout
        while not claim():
            self.check()
            if time.monotonic() > until:
                where = {replica.name: replica.version for replica in self.replicas}
                raise Failure(
                    f"not within {timeout:.0f} s: {what}; the trainer is at {self.trainer.version}, engines at {where}"
                )
            time.sleep(0.02)

    def goes_on(self, what: str) -> None:
        """Wait for three more commits, and until every replica has served a version newer than the present one."""
        commits, version = self.trainer.committed, self.trainer.version
        self.until(lambda: self.trainer.committed >= commits + 3, f"three more commits after {what}")
        self.until(
            lambda: all((replica.version or -1) > version for replica in self.replicas),
            f"all replicas serve newer versions after {what}",
        )
        self.done[what] += 1
        print(f"{what}: at version {self.trainer.version}, {dict(self.trainer.outcomes)}", file=sys.stderr, flush=True)

    def restart(self, node: str, how: signal.Signals) -> None:
        """End a daemon and start it again."""
        daemon = self.cluster.daemons[node]
        if how == signal.SIGKILL:
            daemon.kill()
        else:
            os.kill(daemon.pid, how)
            self.until(lambda: not daemon.is_running, f"the daemon of {node} has ended")
        daemon.start()

    def finish(self) -> dict[str, object]:
        """Compare the last version everywhere, with digests too; return the counts."""
        self.goes_on("the end")
        self.trainer.end()
        self.check()
        with contextlib.closing(self.cluster.daemons["n0"].connect("check")) as client:
            last = client.status().models[0].live
            self.until(lambda: all(replica.version == last for replica in self.replicas), f"all serve {last}")
            outcome = client.verify(MODEL, timeout=60.0).outcome
        if outcome != "proven":
            raise Failure(f"verify says {outcome} of version {last}")
        everyone = (*self.replicas, *self.gone)
        return {
            "versions": self.trainer.version,
            "swaps": dict(self.trainer.outcomes),
            "done": dict(self.done),
            "comparisons": sum(replica.served.total() for replica in everyone),
            "versions compared": len(set().union(*(replica.served for replica in everyone))),
        }

    def close(self) -> None:
        """End everything."""
        self.trainer.end()
        for replica in self.replicas:
            replica.end()
        self.cluster.remove()


def rolling(seconds: float, seed: int) -> dict[str, object]:
    """Operate a cluster that swaps ten times a second; raise Failure, with the logs as a note."""

    def drained(churn: Churn) -> None:
        node = churn.random.choice(NODES[1:])
        with contextlib.closing(churn.cluster.daemons["n0"].connect("operator", reconnect=True)) as client:
            client.drain(node, timeout=BACK_S)
            commits = churn.trainer.committed
            churn.until(lambda: churn.trainer.committed >= commits + 3, f"swaps go on without {node}, which is drained")
            client.resume(node)

    def reloaded(churn: Churn) -> None:
        os.kill(churn.cluster.coordinator.pid, signal.SIGHUP)

    def restarted(churn: Churn) -> None:
        how = churn.random.choice((signal.SIGTERM, signal.SIGKILL))
        churn.restart(churn.random.choice(NODES), how)

    def coordinator(churn: Churn) -> None:
        part = churn.cluster.coordinator
        if churn.random.random() < 0.5:
            part.kill()
        else:
            os.kill(part.pid, signal.SIGTERM)
            churn.until(lambda: not part.is_running, "the coordinator has ended")
        part.start()

    def upgraded(churn: Churn) -> None:
        """As docs/operate.md says: the coordinator, then each node, with the next one as soon as the last is ready."""
        coordinator(churn)
        for node in NODES:
            churn.restart(node, signal.SIGTERM)

    steps = {
        "drain": drained,
        "reload": reloaded,
        "restart of a daemon": restarted,
        "restart of the coordinator": coordinator,
        "upgrade": upgraded,
    }
    churn = Churn(seed, elements=100_000, every_s=EVERY_S)
    with _running(churn):
        for number, node in enumerate(NODES):
            churn.add(node, f"r{number}", flips=number % 2 == 1)
        churn.goes_on("the start")
        until = time.monotonic() + seconds
        while time.monotonic() < until or not all(churn.done[name] for name in steps):
            for name in churn.random.sample(sorted(steps), len(steps)):
                steps[name](churn)
                churn.goes_on(name)
                time.sleep(churn.random.uniform(0.0, 1.0))  # a moment of undisturbed swaps
        return churn.finish()


def joiners(seconds: float, seed: int) -> dict[str, object]:
    """Let replicas of three nodes join together while relays die twice; raise Failure, with the logs as a note."""
    churn = Churn(seed, elements=JOINED, every_s=0.5)
    with _running(churn):
        churn.add("n0", "home", flips=False)
        churn.goes_on("the start")
        until = time.monotonic() + seconds
        number = 0
        while number == 0 or time.monotonic() < until:
            _join(churn, number)
            number += 1
        return churn.finish()


def _join(churn: Churn, number: int) -> None:
    """Let a replica of each further node join; kill two relays before all have caught up; then let them leave."""
    with churn.trainer.resting():  # else a swap would reach the joiners first
        joined = [churn.add(node, f"j{number}{node}", flips=churn.random.random() < 0.5) for node in NODES[1:]]
        for _ in range(2):
            _relay_dies(churn, joined, churn.cluster.coordinator.log().count("phase=stage\n"))
        churn.until(lambda: all(replica.version is not None for replica in joined), "the joiners have caught up")
    churn.goes_on("joined while relays died twice")
    for replica in joined:
        replica.end()
        churn.replicas.remove(replica)
        churn.gone.append(replica)


def _relay_dies(churn: Churn, joined: list[Replica], staged: int) -> None:
    """Wait until more than `staged` transfers have begun; kill the worker or the daemon of one of the three nodes."""
    log = churn.cluster.coordinator.log
    churn.until(
        lambda: log().count("phase=stage\n") > staged or all(replica.version is not None for replica in joined),
        "a catch-up is staged, or all have caught up",
    )
    if all(replica.version is not None for replica in joined):
        churn.done["(caught up before)"] += 1
        return
    node = churn.random.choice(NODES[1:])
    daemon = churn.cluster.daemons[node]
    time.sleep(churn.random.uniform(0.0, 0.2))
    if churn.random.random() < 0.5:
        for pid in daemon.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        churn.done["worker of a relay killed"] += 1
    else:
        churn.restart(node, signal.SIGKILL)
        churn.done["daemon of a relay killed"] += 1


@contextlib.contextmanager
def _running(churn: Churn) -> Iterator[None]:
    try:
        yield
    except BaseException as exc:
        exc.add_note(churn.cluster.logs())
        raise
    finally:
        churn.close()


RUNS = {"rolling": rolling, "joiners": joiners}


def main(arguments: list[str] | None = None) -> int:
    """Run one of RUNS, and print its counts as JSON."""
    parser = argparse.ArgumentParser(prog="scripts/faults churn", description=__doc__)
    parser.add_argument("run", choices=sorted(RUNS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # take everything down that was started
    try:
        print(json.dumps(RUNS[options.run](options.seconds, options.seed)))
    except Failure as exc:
        print(f"{exc}\n{''.join(getattr(exc, '__notes__', []))[-20000:]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
