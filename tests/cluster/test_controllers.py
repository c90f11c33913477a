"""One controller pauses, commits and resumes all ranks of a replica; failures leave nothing torn and nothing stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import refitd
from refitd.testing import Daemon, RunningSwap, eventually
from tests.support.controlled import publish, trainer, weights


class Driven:
    """An engine of two ranks that nobody polls, and what its controller was asked."""

    def __init__(self, daemon: Daemon, replica: str = "a", *, controlled: bool = True) -> None:
        self.client, self.replica = daemon.connect(), replica
        self.live = [weights(0) for _ in range(2)]
        self.targets = [
            self.client.register_target(
                "policy", live, replica=replica, rank=rank, world_size=2, controlled=controlled, timeout=30
            )
            for rank, live in enumerate(self.live)
        ]
        self.calls: list[tuple[str, int | None]] = []
        self.fail: dict[str, int] = {}  # hook -> how many calls are yet to fail

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
            "policy", self.replica, pause=self.hook("pause"), commit=self.hook("commit"), resume=self.hook("resume")
        )

    def values(self) -> set[float]:
        return {float(value) for live in self.live for tensor in live.values() for value in tensor.unique()}

    @property
    def versions(self) -> list[int | None]:
        return [target.version for target in self.targets]


def test_a_controller_pauses_commits_and_resumes_all_ranks(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    engine = Driven(daemon)
    with trainer(daemon) as (client, source, tensors):
        with pytest.raises(refitd.RefusedError, match="control_replica"):
            client.swap("policy", 1, timeout=20)
        controller = engine.control()
        with pytest.raises(refitd.RefusedError, match="controlled by pid"):
            engine.control()
        for version in (1, 2):
            if version > 1:
                publish(source, tensors, version)
            assert client.swap("policy", version, timeout=20).outcome == "committed"
            assert engine.versions == [version] * 2 and engine.values() == {float(version)}
        asked = [(what, v) for v in (1, 2) for what in ("pause", "commit", "resume")]
        eventually(lambda: engine.calls == asked, "the hooks were called in this order")
        (status,) = client.status().models
        assert [(c.replica, c.step) for c in status.controllers] == [("a", "free")]
        controller.close()
        publish(source, tensors, 3)
        with pytest.raises(refitd.RefusedError, match="control_replica"):
            client.swap("policy", 3, timeout=20)


def test_a_pause_that_fails_aborts_the_swap_and_a_commit_that_fails_is_called_again(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon()
    engine = Driven(daemon)
    with trainer(daemon) as (client, source, tensors):
        engine.control()
        engine.fail["pause"] = 1
        with pytest.raises(refitd.SwapFailed, match=r"controller of a .*the pause went wrong"):
            client.swap("policy", 1, timeout=20)
        eventually(lambda: engine.calls == [("pause", 1), ("resume", None)], "it goes on with what it had")
        assert engine.values() == {0.0}
        engine.calls.clear()
        engine.fail["commit"] = 1
        with pytest.raises(refitd.SwapFailed, match=r"controller of a .*the commit went wrong") as raised:
            client.swap("policy", 1, timeout=20)
        assert raised.value.report is not None and raised.value.report.version == 1
        eventually(lambda: engine.versions == [1, 1], "the commit is called again", 20)
        eventually(lambda: len(engine.calls) == 4, "the engine goes on")
        assert engine.calls == [("pause", 1), ("commit", 1), ("commit", 1), ("resume", 1)]
        publish(source, tensors, 2)
        assert client.swap("policy", 2, timeout=20).outcome == "committed"
        assert engine.values() == {2.0}


def test_a_new_controller_finishes_what_a_dead_one_has_left(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[deadlines]\ncommit_s = 1.0\n")
    engine = Driven(daemon)
    with trainer(daemon) as (client, source, tensors):
        first = engine.control(daemon)
        engine.fail["commit"] = 9
        with pytest.raises(refitd.SwapFailed):
            client.swap("policy", 1, timeout=20)
        first.close()
        assert engine.calls[-1] == ("resume", None)
        publish(source, tensors, 2)
        with pytest.raises(refitd.RefusedError):
            client.swap("policy", 2, timeout=20)
        engine.fail.clear()
        engine.calls.clear()
        engine.control()
        eventually(lambda: engine.calls == [("pause", 1), ("commit", 1), ("resume", 1)], "it begins at once", 20)
        assert engine.values() == {1.0}
        assert client.swap("policy", 2, timeout=20).outcome == "committed"
        assert engine.values() == {2.0}


def test_a_replica_that_joins_is_caught_up_through_its_controller(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with trainer(daemon) as (client, _, _):
        engine = Driven(daemon)
        engine.control()
        client.swap("policy", 1, timeout=20)
        late = Driven(daemon, "b")
        late.control(daemon)  # another process than its ranks'
        eventually(lambda: late.versions == [1, 1], "it is caught up", 20)
        eventually(lambda: late.calls == [("pause", 1), ("commit", 1), ("resume", 1)], "its engine goes on")
        assert late.values() == {1.0} and len(engine.calls) == 3


@pytest.mark.slow  # a new coordinator waits for every daemon before it settles anything
def test_a_coordinator_that_restarts_resumes_an_engine_that_stands_still(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(standalone=False)
    coordinator = daemon.start_coordinator()
    engine, goes_on = Driven(daemon), threading.Event()
    slow = daemon.connect().register_target(
        "policy", weights(0), replica="slow", on_pause=lambda version: goes_on.wait(30)
    )
    with trainer(daemon) as (client, _, _):
        engine.control()
        swap = RunningSwap(client, "policy", 1)
        eventually(lambda: engine.calls == [("pause", 1)], "it stands still, and nothing is decided")
        coordinator.kill()
        with pytest.raises(refitd.RefitdError):
            swap.result()
        daemon.start_coordinator()
        eventually(lambda: engine.calls == [("pause", 1), ("resume", None)], "it goes on", 40)
        goes_on.set()
        assert engine.values() == {0.0} and slow.version is None
