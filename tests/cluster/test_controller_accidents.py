"""Controllers that hang, die, call the client, or come back; sleeping ranks; joint swaps that fail in one model."""

# ruff: noqa: B023  # these closures run before their loop goes on

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, RunningSwap, eventually
from tests.support.controlled import Ranks, publish, trainer
from tests.support.flips import back, kill_coordinator, quietly

pytestmark = pytest.mark.slow  # random, or many: test_flip_accidents.py and test_flip_returns.py are what was found

CONTROLLER = """
import os, sys, time, refitd
client = refitd.connect(sys.argv[1])
dies = sys.argv[2]
def hook(what):
    def called(version):
        print(what, version, flush=True)
        if dies == what:
            os.kill(os.getpid(), 9)
        if what == "commit":
            time.sleep(0.2)
    return called
client.control_replica("policy", "a", pause=hook("pause"), commit=hook("commit"), resume=hook("resume"))
print("there", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("dies", ["pause", "commit", "resume"])
@pytest.mark.parametrize("world", [1, 4])
def test_a_controller_dies_in_each_hook(start_daemon: Callable[..., Daemon], dies: str, world: int) -> None:
    daemon = start_daemon()
    ranks = Ranks(daemon, world, flips=world == 1)
    with trainer(daemon) as (client, source, tensors):
        command = [sys.executable, "-c", CONTROLLER, str(daemon.directory), dies]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == "there"
            swap = RunningSwap(daemon.connect(), "policy", 1)
            stop = threading.Event()

            def commits() -> None:
                while not stop.wait(0.02):
                    for t in ranks.targets:
                        if t.pending is not None and dies == "resume":
                            t.wait(1)

            thread = threading.Thread(target=commits)
            thread.start()
            process.wait(20)
            said = quietly(swap.result)
            stop.set()
            thread.join()
            if dies == "pause":
                assert isinstance(said, refitd.SwapFailed) and ranks.values() == {0.0}, said
            calls: list[tuple[str, int | None]] = []

            def commit(version: int) -> None:
                calls.append(("commit", version))
                for t in ranks.targets:
                    t.poll()

            controller = ranks.client.control_replica(
                "policy",
                "a",
                pause=lambda v: calls.append(("pause", v)),
                commit=commit,
                resume=lambda v: calls.append(("resume", v)),
            )
            if dies == "pause":
                client.swap("policy", 1, timeout=20)
            eventually(lambda: ranks.versions == [1] * world, f"all have it: {ranks.versions} {calls} {said}", 20)
            assert ranks.values() == {1.0}
            publish(source, tensors, 2)
            eventually(
                lambda: isinstance(
                    quietly(lambda: client.swap("policy", 2, timeout=20, queue=True)), refitd.SwapReport
                ),
                "next",
                30,
            )
            assert ranks.values() == {2.0}
            eventually(lambda: calls[-1] == ("resume", 2), "resumed")
            controller.close()
        finally:
            process.kill()
            process.wait()


def test_hooks_that_call_the_client_and_a_coordinator_that_restarts_in_each(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon("[deadlines]\npause_s = 5.0\n")
    ranks = Ranks(daemon, 2)
    calls: list[tuple[str, int | None, object]] = []
    kills: list[str] = []

    def hook(what: str) -> Callable[[int | None], None]:
        def called(version: int | None) -> None:
            said = quietly(lambda: ranks.client.status().models[0].model)
            calls.append((what, version, said))
            if kills and kills[0] == what:
                kills.pop()
                kill_coordinator(daemon, wait=False)
                back(daemon)
            if what == "commit":
                for t in ranks.targets:
                    t.wait(int(version or 0))

        return called

    ranks.client.control_replica("policy", "a", pause=hook("pause"), commit=hook("commit"), resume=hook("resume"))
    with trainer(daemon) as (client, source, tensors):
        client.swap("policy", 1, timeout=20)
        number = 1
        for where in ("pause", "commit", "resume", ""):
            number += 1
            back(daemon)
            eventually(
                lambda: (
                    not isinstance(quietly(lambda: publish(source, tensors, number)), Exception)
                    or source.next_version > number
                ),
                "published",
            )
            kills[:] = [where] if where else []
            said = quietly(lambda: client.swap("policy", number, timeout=20))

            def ok():
                return ranks.values() == {float(number)} and ranks.versions == [number] * 2

            if not isinstance(said, refitd.SwapReport):
                time.sleep(2)
                if not ok():
                    eventually(
                        lambda: (
                            isinstance(
                                quietly(lambda: client.swap("policy", number, timeout=20, queue=True)),
                                refitd.SwapReport,
                            )
                            or ok()
                        ),
                        f"next {where}",
                        40,
                    )
            eventually(ok, f"{where}: {ranks.versions} {ranks.values()} {calls}", 20)
            eventually(lambda: calls[-1][:2] == ("resume", number), f"resumed after {where}: {calls[-5:]}", 30)


def test_a_controller_that_hangs(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[deadlines]\npause_s = 1.0\ncommit_s = 2.0\n")
    ranks = Ranks(daemon, 2)
    hangs = {"pause": threading.Event(), "commit": threading.Event()}
    calls: list[tuple[str, int | None]] = []

    def pause(version: int) -> None:
        calls.append(("pause", version))
        hangs["pause"].wait(30)

    def commit(version: int) -> None:
        calls.append(("commit", version))
        hangs["commit"].wait(30)
        for t in ranks.targets:
            t.poll()

    ranks.client.control_replica(
        "policy", "a", pause=pause, commit=commit, resume=lambda v: calls.append(("resume", v))
    )
    with trainer(daemon) as (client, source, tensors):
        with pytest.raises(refitd.SwapFailed):
            client.swap("policy", 1, timeout=10)
        assert ranks.values() == {0.0}
        hangs["pause"].set()
        eventually(lambda: calls == [("pause", 1), ("resume", None)], f"{calls}", 10)
        said = quietly(lambda: client.swap("policy", 1, timeout=10))
        assert isinstance(said, refitd.SwapFailed), said
        assert ranks.values() == {0.0}
        hangs["commit"].set()
        eventually(lambda: ranks.versions == [1, 1], f"{calls}", 15)
        eventually(lambda: calls[-1] == ("resume", 1), f"{calls}", 10)
        publish(source, tensors, 2)
        eventually(
            lambda: isinstance(quietly(lambda: client.swap("policy", 2, timeout=10)), refitd.SwapReport), "two", 20
        )
        assert ranks.values() == {2.0}


def test_suspended_ranks_and_joint_swaps(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    train, engine = daemon.connect(), daemon.connect()
    names = ("policy", "draft")
    given = {name: {"w": torch.zeros(64, 8)} for name in names}
    live = {name: engine.allocate({"w": ((64, 8), torch.float32)}) for name in names}
    sources = {name: train.register_source(name, given[name], slots=3) for name in names}
    targets = {name: engine.register_target(name, live[name], replica="a") for name in names}

    def put(number: int) -> None:
        for name in names:
            given[name]["w"].fill_(number)
            sources[name].publish(number)

    def values() -> dict[str, float]:
        return {name: float(one["w"].unique()) for name, one in live.items()}

    put(1)
    with Engine(*targets.values()):
        train.swap_together(dict.fromkeys(names, 1), timeout=20)
        put(2)
        targets["draft"].suspend()
        targets["draft"].suspend()
        with pytest.raises(refitd.RefitdError):
            train.swap_together(dict.fromkeys(names, 2), timeout=5)
        assert values() == {"policy": 1.0, "draft": 1.0}
        assert targets["draft"].resume() == 1 and targets["draft"].resume() == 1
        train.swap_together(dict.fromkeys(names, 2), timeout=20)
        assert values() == {"policy": 2.0, "draft": 2.0}
        assert {n: train.rollback(n, timeout=20).bytes for n in names} == {"policy": 0, "draft": 0}
        assert values() == {"policy": 1.0, "draft": 1.0}
        targets["draft"].suspend()
        live["draft"]["w"].fill_(66)
        targets["draft"].resume(kept=False)
        quietly(targets["draft"].resume)
        again = quietly(lambda: targets["draft"].resume(kept=False))
        assert not isinstance(again, refitd.DeadlineExceeded), again
        eventually(lambda: targets["draft"].version == 1, "caught up", 20)
        assert values() == {"policy": 1.0, "draft": 1.0}
        targets["draft"].suspend()
        train.evict("draft", "a")
        with pytest.raises(refitd.RefitdError):
            targets["draft"].resume()
    targets["draft"].close()
    targets["draft"] = engine.register_target("draft", live["draft"], replica="a")
    with Engine(*targets.values()):
        put(3)
        for _ in range(2):
            said = quietly(lambda: train.swap_together(dict.fromkeys(names, 3), timeout=0.02))
            if not isinstance(said, Exception):
                break
            time.sleep(0.5)
            assert values() in ({"policy": 1.0, "draft": 1.0}, {"policy": 3.0, "draft": 3.0}), (values(), said)
        eventually(
            lambda: (
                values() == {"policy": 3.0, "draft": 3.0}
                or not isinstance(quietly(lambda: train.swap_together(dict.fromkeys(names, 3), timeout=20)), Exception)
            ),
            "three",
            20,
        )
        assert values() == {"policy": 3.0, "draft": 3.0}


def test_joint_swaps_aborted_in_a_pause(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    train, engine = daemon.connect(), daemon.connect()
    names = ("policy", "draft")
    given = {name: {"w": torch.zeros(64, 8)} for name in names}
    live = {name: engine.allocate({"w": ((64, 8), torch.float32)}) for name in names}
    sources = {name: train.register_source(name, given[name], slots=3) for name in names}
    go = threading.Event()
    resumed: list[int | None] = []
    targets = {
        "policy": engine.register_target("policy", live["policy"], replica="a"),
        "draft": engine.register_target(
            "draft", live["draft"], replica="a", on_pause=lambda v: go.wait(20), on_resume=resumed.append
        ),
    }
    for name in names:
        given[name]["w"].fill_(1)
        sources[name].publish(1)
    with Engine(targets["policy"]):
        said: list[object] = []
        thread = threading.Thread(
            target=lambda: said.append(quietly(lambda: train.swap_together(dict.fromkeys(names, 1), timeout=20)))
        )
        thread.start()
        eventually(lambda: targets["draft"]._state.asked is not None, "asked")
        with daemon.connect() as other:
            other.abort("policy", "no")
        thread.join(20)
        assert isinstance(said[0], refitd.SwapFailed), said
        go.set()
        eventually(lambda: resumed == [None], f"{resumed}")
        assert {float(o["w"].unique()) for o in live.values()} == {0.0}
        assert train.swap_together(dict.fromkeys(names, 1), timeout=20)["draft"].outcome == "committed"
        assert {float(o["w"].unique()) for o in live.values()} == {1.0}


def test_awaitables_that_are_cancelled_or_raise(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    train, engine = daemon.connect(), daemon.connect()
    given, live = {"w": torch.ones(8)}, engine.allocate({"w": ((8,), torch.float32)})
    source = train.register_source("policy", given)
    target = engine.register_target("policy", live, replica="a")

    async def main() -> None:
        with pytest.raises(refitd.RefitdError):
            await train.swap_async("policy", 9, timeout=5)
        with pytest.raises(refitd.RefusedError):
            await train.swap_together_async({})
        with pytest.raises(refitd.DeadlineExceeded):
            await target.wait_async(1, timeout=0.1)
        await source.publish_async(1)
        one = asyncio.create_task(train.swap_async("policy", 1, timeout=20))
        await asyncio.sleep(0.2)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        assert await target.wait_async(1, timeout=20) == 1
        assert live["w"].unique() == 1
        tasks = [asyncio.create_task(target.wait_async(2, timeout=20)) for _ in range(3)]
        await asyncio.sleep(0.1)
        for task in tasks[1:]:
            task.cancel()
        given["w"].fill_(2)
        await source.publish_async(2)
        await train.swap_async("policy", 2, timeout=20)
        assert await tasks[0] == 2
        assert (await train.verify_async("policy")).outcome == "proven"

    async def last() -> None:
        await train.verify_async("policy")
        waiting = asyncio.create_task(target.wait_async(99, timeout=2))
        await asyncio.sleep(0.05)
        assert not waiting.done()

    try:
        asyncio.run(main())
    finally:
        pass
    asyncio.run(last())
    loop = asyncio.new_event_loop()
    pending = loop.create_task(target.wait_async(99, timeout=1))
    loop.run_until_complete(asyncio.sleep(0.05))
    pending._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    time.sleep(1.2)
    assert target.version == 2
