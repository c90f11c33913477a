"""One controller pauses, commits and resumes all ranks of a replica; its faults tear no version and hang no call."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import refitd
from refitd.testing import Daemon, RunningSwap, eventually
from tests.support.controlled import Ranks, publish, trainer, weights
from tests.support.controls import controlled
from tests.support.flips import quietly
from tests.support.names import policy
from tests.support.passed_on import Start
from tests.support.programs import Program, python


class Driven:
    """An engine of two ranks that do not poll, and the calls that its controller got."""

    def __init__(self, daemon: Daemon, replica: str = "a", *, controlled: bool = True) -> None:
        self.client, self.replica = daemon.connect(), replica
        self.live = [weights(0) for _ in range(2)]
        self.targets = [
            self.client.register_target(
                policy(), live, replica=replica, rank=rank, world_size=2, controlled=controlled, timeout=30
            )
            for rank, live in enumerate(self.live)
        ]
        self.calls: list[tuple[str, int | None]] = []
        self.fail: dict[str, int] = {}  # hook -> number of calls that still fail

    def hook(self, what: str) -> Callable[[int | None], None]:
        def called(version: int | None) -> None:
            self.calls.append((what, version))
            if self.fail.get(what, 0) > 0:
                self.fail[what] -= 1
                raise RuntimeError(f"the {what} went wrong")
            if what == "commit":
                for target in self.targets:
                    assert target.poll() == version

        return called

    def control(self, daemon: Daemon | None = None) -> refitd.ReplicaController:
        client = self.client if daemon is None else daemon.connect()
        return client.control_replica(
            policy(), self.replica, pause=self.hook("pause"), commit=self.hook("commit"), resume=self.hook("resume")
        )

    def values(self) -> set[float]:
        return {float(value) for live in self.live for tensor in live.values() for value in tensor.unique()}

    @property
    def versions(self) -> list[int | None]:
        return [target.version for target in self.targets]


def test_a_controller_pauses_commits_and_resumes_all_ranks(daemons: Start) -> None:
    daemon = daemons()[0]
    engine = Driven(daemon)
    with trainer(daemon) as (client, source, tensors):
        with pytest.raises(refitd.RefusedError, match="control_replica"):
            client.swap(policy(), 1, timeout=60)
        controller = engine.control()
        with pytest.raises(refitd.RefusedError, match="controlled by pid"):
            engine.control()
        for version in (1, 2):
            if version > 1:
                publish(source, tensors, version)
            assert client.swap(policy(), version, timeout=60).outcome == "committed"
            eventually(lambda v=version: engine.versions == [v] * 2, "both ranks serve it")  # a rank reports it first
            assert engine.values() == {float(version)}
        asked = [(what, v) for v in (1, 2) for what in ("pause", "commit", "resume")]
        eventually(lambda: engine.calls == asked, "the hooks were called in this order")
        (status,) = client.status().models
        assert [(c.replica, c.step) for c in status.controllers] == [("a", "free")]
        controller.close()
        publish(source, tensors, 3)
        with pytest.raises(refitd.RefusedError, match="control_replica"):
            client.swap(policy(), 3, timeout=60)


def test_a_pause_that_fails_aborts_the_swap_and_a_commit_that_fails_is_called_again(
    daemons: Start,
) -> None:
    daemon = daemons()[0]
    engine = Driven(daemon)
    with trainer(daemon) as (client, source, tensors):
        engine.control()
        engine.fail["pause"] = 1
        with pytest.raises(refitd.SwapFailed, match=r"controller of a .*the pause went wrong"):
            client.swap(policy(), 1, timeout=60)
        eventually(lambda: engine.calls == [("pause", 1), ("resume", None)], "it goes on with what it had")
        assert engine.values() == {0.0}
        engine.calls.clear()
        engine.fail["commit"] = 1
        with pytest.raises(refitd.SwapFailed, match=r"controller of a .*the commit went wrong") as raised:
            client.swap(policy(), 1, timeout=60)
        assert raised.value.report is not None and raised.value.report.version == 1
        eventually(lambda: engine.versions == [1, 1], "the commit is called again")
        eventually(lambda: len(engine.calls) == 4, "the engine goes on")
        assert engine.calls == [("pause", 1), ("commit", 1), ("commit", 1), ("resume", 1)]
        publish(source, tensors, 2)
        assert client.swap(policy(), 2, timeout=60).outcome == "committed"
        assert engine.values() == {2.0}


def test_a_new_controller_finishes_what_a_dead_one_has_left(daemons: Start) -> None:
    daemon = daemons("[deadlines]\ncommit_s = 4.0\n")[0]
    engine = Driven(daemon)
    with trainer(daemon) as (client, source, tensors):
        first = engine.control(daemon)
        engine.fail["commit"] = 1_000_000
        with pytest.raises(refitd.SwapFailed):
            client.swap(policy(), 1, timeout=60)
        first.close()
        assert engine.calls[-1] == ("resume", None)
        publish(source, tensors, 2)
        with pytest.raises(refitd.RefusedError):
            client.swap(policy(), 2, timeout=60)
        engine.fail.clear()
        engine.calls.clear()
        engine.control()
        eventually(lambda: engine.calls == [("pause", 1), ("commit", 1), ("resume", 1)], "it begins at once")
        assert engine.values() == {1.0}
        assert client.swap(policy(), 2, timeout=60).outcome == "committed"
        assert engine.values() == {2.0}


@pytest.mark.slow  # a new coordinator waits for every daemon before it settles an interrupted swap
def test_a_coordinator_that_restarts_resumes_an_engine_that_stands_still(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(standalone=False)
    coordinator = daemon.start_coordinator()
    engine, goes_on = Driven(daemon), threading.Event()
    slow = controlled(daemon.connect(), policy(), weights(0), replica="slow", pause=lambda version: goes_on.wait(30))
    with trainer(daemon) as (client, _, _):
        engine.control()
        swap = RunningSwap(client, policy(), 1)
        eventually(lambda: engine.calls == [("pause", 1)], "it stands still, and nothing is decided")
        coordinator.kill()
        with pytest.raises(refitd.RefitdError):
            swap.result()
        daemon.start_coordinator()
        eventually(lambda: engine.calls == [("pause", 1), ("resume", None)], "it goes on", 40)
        goes_on.set()
        assert engine.values() == {0.0} and slow.version is None


CONTROLLER = """
from tests.support.names import policy
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
client.control_replica(policy(), "a", pause=hook("pause"), commit=hook("commit"), resume=hook("resume"))
print("there", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["pause", "commit", "resume"])
@pytest.mark.parametrize("world", [1, 4])
def test_a_controller_dies_in_each_hook(daemons: Start, dies: str, world: int) -> None:
    daemon = daemons()[0]
    ranks = Ranks(daemon, world, flips=world == 1)
    with trainer(daemon) as (client, source, tensors), Program(python(daemon, CONTROLLER, dies)) as process:
        assert process.line() == "there"
        swap = RunningSwap(daemon.connect(), policy(), 1)
        stop = threading.Event()

        def commits() -> None:
            while not stop.wait(0.02):
                for t in ranks.targets:
                    if t.pending is not None and dies == "resume":
                        t.wait(1)

        thread = threading.Thread(target=commits)
        thread.start()
        process.process.wait()
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
            policy(),
            "a",
            pause=lambda v: calls.append(("pause", v)),
            commit=commit,
            resume=lambda v: calls.append(("resume", v)),
        )
        if dies == "pause":
            client.swap(policy(), 1, timeout=60)
        eventually(lambda: ranks.versions == [1] * world, f"all have it: {ranks.versions} {calls} {said}")
        assert ranks.values() == {1.0}
        publish(source, tensors, 2)
        eventually(
            lambda: isinstance(quietly(lambda: client.swap(policy(), 2, timeout=20, queue=True)), refitd.SwapReport),
            "next",
        )
        assert ranks.values() == {2.0}
        eventually(lambda: calls[-1] == ("resume", 2), "resumed")
        controller.close()


@pytest.mark.slow
def test_a_controller_that_hangs(daemons: Start) -> None:
    daemon = daemons("[deadlines]\npause_s = 3.0\ncommit_s = 4.0\n")[0]
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
        policy(), "a", pause=pause, commit=commit, resume=lambda v: calls.append(("resume", v))
    )
    with trainer(daemon) as (client, source, tensors):
        with pytest.raises(refitd.SwapFailed):
            client.swap(policy(), 1, timeout=10)
        assert ranks.values() == {0.0}
        hangs["pause"].set()
        eventually(lambda: calls == [("pause", 1), ("resume", None)], f"{calls}")
        eventually(
            lambda: (
                isinstance(quietly(lambda: client.swap(policy(), 1, timeout=10)), refitd.SwapFailed)
                and ("commit", 1) in calls
            ),  # else the pause was not answered in its second
            "the commit hangs",
        )
        assert ranks.values() == {0.0}
        hangs["commit"].set()
        eventually(lambda: ranks.versions == [1, 1], f"{calls}")
        eventually(lambda: calls[-1] == ("resume", 1), f"{calls}")
        publish(source, tensors, 2)
        eventually(
            lambda: isinstance(quietly(lambda: client.swap(policy(), 2, timeout=10)), refitd.SwapReport), "two", 20
        )
        assert ranks.values() == {2.0}


@pytest.mark.slow
def test_a_controller_on_a_node_that_dies_in_its_commit(daemons: Start) -> None:
    daemon, other = daemons("", (1, 1))
    ranks = Ranks(daemon, 2)
    far = other.connect()
    calls: list[tuple[str, int | None]] = []

    def commit(version: int) -> None:
        calls.append(("commit", version))
        other.kill()

    far.control_replica(policy(), "a", commit=commit, resume=lambda v: calls.append(("resume", v)))
    with trainer(daemon) as (client, source, tensors):
        said = quietly(lambda: client.swap(policy(), 1, timeout=10))
        assert isinstance(said, refitd.SwapFailed), said
        assert ranks.values() == {0.0} and calls[0] == ("commit", 1)
        eventually(lambda: ("resume", None) in calls, f"its own end is noticed: {calls}")

        def take(version: int) -> None:
            for t in ranks.targets:
                t.poll()

        def again() -> bool:
            said = quietly(lambda: ranks.client.control_replica(policy(), "a", commit=take))
            return isinstance(said, refitd.ReplicaController)

        eventually(again, "another controller is let in once the node is given up", 60)
        eventually(lambda: ranks.versions == [1, 1], f"{ranks.versions}")
        assert ranks.values() == {1.0}
        publish(source, tensors, 2)
        eventually(
            lambda: isinstance(quietly(lambda: client.swap(policy(), 2, timeout=10, queue=True)), refitd.SwapReport),
            "two",
            40,
        )
        assert ranks.values() == {2.0}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["close", "swap", "target", "evict", "client", "exit"])
@pytest.mark.parametrize("where", ["pause", "commit"])
def test_hooks_that_do_what_they_should_not(daemons: Start, what: str, where: str) -> None:
    daemon = daemons("[deadlines]\npause_s = 3.0\ncommit_s = 4.0\n")[0]
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
                    said.append(quietly(lambda: mine.swap(policy(), timeout=1)))
                elif what == "target":
                    said.append(quietly(ranks.targets[0].close))
                elif what == "evict":
                    said.append(quietly(lambda: mine.evict(policy(), "a")))
                elif what == "client":
                    mine.close()
                elif what == "exit":
                    raise SystemExit(3)
            if name == "commit":
                for t in ranks.targets:
                    t.poll()

        return called

    def control(client: refitd.Client) -> refitd.ReplicaController:
        return client.control_replica(policy(), "a", pause=hook("pause"), commit=hook("commit"), resume=hook("resume"))

    controller = control(mine)
    with trainer(daemon) as (client, source, tensors):
        first = quietly(lambda: client.swap(policy(), 1, timeout=8))
        assert ranks.values() in ({0.0}, {1.0}), ranks.values()
        if what in ("close", "client"):
            eventually(
                lambda: isinstance(quietly(lambda: control(ranks.client)), refitd.ReplicaController), "new one", 10
            )
        if what in ("target", "evict"):
            quietly(ranks.targets[0].close)
            ranks.targets[0] = ranks.client.register_target(policy(), ranks.live[0], replica="a", controlled=True)
        publish(source, tensors, 2)
        result: list[object] = []

        def done() -> bool:
            result[:] = [quietly(lambda: client.swap(policy(), 2, timeout=10, queue=True))]
            return isinstance(result[0], refitd.SwapReport) or ranks.versions == [2]

        eventually(done, f"two: {first} {said} {calls}")
        eventually(lambda: ranks.versions == [2] and ranks.values() == {2.0}, f"{ranks.versions} {calls} {result}")
        eventually(lambda: calls[-1][0] == "resume", f"{calls}")
        assert calls[-1] == ("resume", 2), (calls, first, said)
        publish(source, tensors, 3)
        client.swap(policy(), 3, timeout=30, queue=True)
        assert ranks.values() == {3.0}
        assert client.verify(policy()).outcome == "proven"
