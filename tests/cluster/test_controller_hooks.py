"""Controllers on another node, hooks that close things, evictions in the middle, and engines that flip under them."""

# these closures run before their loop goes on

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import refitd
from refitd.testing import Daemon, Engine, RunningSwap, eventually
from tests.support.controlled import Ranks, publish, trainer
from tests.support.flips import quietly

pytestmark = pytest.mark.slow  # random, or many: test_flip_accidents.py and test_flip_returns.py are what was found


def test_a_controller_on_a_node_that_dies_in_its_commit(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[deadlines]\nnode_silence_s = 2.0\n" if False else "")
    other = start_daemon(name="n1", joins=daemon.endpoint)
    ranks = Ranks(daemon, 2)
    far = other.connect()
    calls: list[tuple[str, int | None]] = []

    def commit(version: int) -> None:
        calls.append(("commit", version))
        other.kill()

    far.control_replica("policy", "a", commit=commit, resume=lambda v: calls.append(("resume", v)))
    with trainer(daemon) as (client, source, tensors):
        said = quietly(lambda: client.swap("policy", 1, timeout=10))
        assert isinstance(said, refitd.SwapFailed), said
        assert ranks.values() == {0.0} and calls[0] == ("commit", 1)
        eventually(lambda: ("resume", None) in calls, f"its own end is noticed: {calls}", 20)
        time.sleep(0.2)

        def take(version: int) -> None:
            for t in ranks.targets:
                t.poll()

        def again() -> bool:
            said = quietly(lambda: ranks.client.control_replica("policy", "a", commit=take))
            return isinstance(said, refitd.ReplicaController)

        eventually(again, "another controller is let in once the node is given up", 60)
        eventually(lambda: ranks.versions == [1, 1], f"{ranks.versions}", 20)
        assert ranks.values() == {1.0}
        publish(source, tensors, 2)
        eventually(
            lambda: isinstance(quietly(lambda: client.swap("policy", 2, timeout=10, queue=True)), refitd.SwapReport),
            "two",
            40,
        )
        assert ranks.values() == {2.0}


@pytest.mark.parametrize("what", ["close", "swap", "target", "evict", "client", "exit"])
@pytest.mark.parametrize("where", ["pause", "commit"])
def test_hooks_that_do_what_they_should_not(start_daemon: Callable[..., Daemon], what: str, where: str) -> None:
    daemon = start_daemon("[deadlines]\npause_s = 3.0\ncommit_s = 4.0\n")
    ranks = Ranks(daemon, 1, flips=True)
    mine = daemon.connect()
    said: list[object] = []
    calls: list[tuple[str, int | None]] = []
    mischief = [True]

    def hook(name: str) -> Callable[[int | None], None]:
        def called(version: int | None) -> None:
            calls.append((name, version))
            if name == where and mischief:
                mischief.clear()
                if what == "close":
                    said.append(quietly(controller.close))
                elif what == "swap":
                    said.append(quietly(lambda: mine.swap("policy", timeout=1)))
                elif what == "target":
                    said.append(quietly(ranks.targets[0].close))
                elif what == "evict":
                    said.append(quietly(lambda: mine.evict("policy", "a")))
                elif what == "client":
                    mine.close()
                elif what == "exit":
                    raise SystemExit(3)
            if name == "commit":
                for t in ranks.targets:
                    t.poll()

        return called

    def control(client: refitd.Client) -> refitd.ReplicaController:
        return client.control_replica("policy", "a", pause=hook("pause"), commit=hook("commit"), resume=hook("resume"))

    controller = control(mine)
    with trainer(daemon) as (client, source, tensors):
        first = quietly(lambda: client.swap("policy", 1, timeout=8))
        assert ranks.values() in ({0.0}, {1.0}), ranks.values()
        if what in ("close", "client"):
            eventually(
                lambda: isinstance(quietly(lambda: control(ranks.client)), refitd.ReplicaController), "new one", 10
            )
        if what in ("target", "evict"):
            quietly(ranks.targets[0].close)
            ranks.targets[0] = ranks.client.register_target("policy", ranks.live[0], replica="a", controlled=True)
        publish(source, tensors, 2)
        result: list[object] = []

        def done() -> bool:
            result[:] = [quietly(lambda: client.swap("policy", 2, timeout=10, queue=True))]
            return isinstance(result[0], refitd.SwapReport) or ranks.versions == [2]

        eventually(done, f"two: {first} {said} {calls}", 30)
        eventually(lambda: ranks.versions == [2] and ranks.values() == {2.0}, f"{ranks.versions} {calls} {result}", 20)
        eventually(lambda: calls[-1][0] == "resume", f"{calls}", 10)
        assert calls[-1] == ("resume", 2), (calls, first, said)
        publish(source, tensors, 3)
        client.swap("policy", 3, timeout=10)
        assert ranks.values() == {3.0}
        assert client.verify("policy").outcome == "proven"


def test_suspend_while_a_swap_of_ranks_in_lockstep_runs(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[node]\nkeep_targets_s = 60.0\n")
    engine = daemon.connect()
    live = [
        engine.allocate({"w": ((64, 32), __import__("torch").float32), "n": ((7,), __import__("torch").float32)})
        for _ in range(2)
    ]
    targets = [engine.register_target("policy", one, replica="a", rank=r, world_size=2) for r, one in enumerate(live)]

    def values() -> set[float]:
        return {float(v) for one in live for t in one.values() for v in t.unique()}

    with trainer(daemon) as (client, source, tensors):
        with Engine(targets[0]), Engine(targets[1]):
            client.swap("policy", 1, timeout=20)
        number = 1
        for _ in range(6):
            number += 1
            publish(source, tensors, number)
            swap = RunningSwap(daemon.connect(), "policy", number)
            time.sleep(0.004 * number)
            slept = [quietly(t.suspend) for t in targets]
            if all(not isinstance(s, Exception) for s in slept):
                assert all(t.version is None for t in targets)
                for one in live:
                    for t in one.values():
                        t.fill_(55)
                for t in targets:
                    t.resume(kept=False)
            else:
                with Engine(targets[0]), Engine(targets[1]):
                    eventually(lambda: all(t.pending is None for t in targets), f"{slept}", 20)
                for t, s in zip(targets, slept, strict=True):
                    if not isinstance(s, Exception):
                        t.resume()
            with Engine(targets[0]), Engine(targets[1]):
                quietly(swap.result)
                eventually(
                    lambda: all(t.version is not None for t in targets), f"{[t.fenced for t in targets]} {slept}", 30
                )
                eventually(lambda: len({t.version for t in targets}) == 1, "one version", 20)
            assert values() == {float(targets[0].version or 0)}, (values(), slept)
        with Engine(targets[0]), Engine(targets[1]):
            eventually(
                lambda: (
                    isinstance(
                        quietly(lambda: client.swap("policy", number, timeout=10, queue=True)), refitd.SwapReport
                    )
                    or {t.version for t in targets} == {number}
                ),
                "last",
                20,
            )
            quietly(lambda: client.rollback("policy", timeout=10))
            assert values() == {float(targets[0].version or 0)}
