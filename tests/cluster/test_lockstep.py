"""Replicas of several ranks: when they flip, polled in lock step, returned alone, or not in lock step at all."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import refitd
from refitd.client import Client, commit_points
from refitd.client.commit_state import CommitState
from refitd.client.target import Target
from refitd.protocol.base import Message
from refitd.protocol.local import PrepareCommit
from refitd.testing import Daemon, Engine, RunningSwap, eventually
from tests.support import shards


class Replica:
    """Two ranks that poll on threads of their own, before every step, and end it together.

    `served[rank]` is the version that the rank served in each step.
    """

    def __init__(self, *daemons: Daemon, by_step: bool = False) -> None:
        self._daemons = daemons  # rank 1 is with the last one
        self._by_step = by_step
        self._stop = threading.Event()
        self._collective = threading.Barrier(2)
        self._returns = [threading.Event(), threading.Event()]
        self._clients: list[Client] = []
        self.targets: list[Target] = []
        self.served: list[list[int | None]] = [[], []]
        self.errors: list[Exception] = []
        for rank in range(2):
            client, target = self._register(rank)
            self._clients.append(client)
            self.targets.append(target)
        self._threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(2)]
        for thread in self._threads:
            thread.start()

    def _register(self, rank: int) -> tuple[Client, Target]:
        client = self._daemons[-rank].connect(f"rank {rank}", reconnect=True)
        mine = shards.zeros_like(shards.cut(shards.whole(1), rank, 2))
        described = shards.describe(mine, rank, 2)
        return client, client.register_target("policy", mine, replica="r", rank=rank, world_size=2, metadata=described)

    def _run(self, rank: int) -> None:
        try:
            while True:
                if self._stop.is_set():
                    self._collective.abort()
                self._collective.wait(20)  # nobody begins a step before all have ended the one before
                if self._returns[rank].is_set():
                    self._clients[rank].close()
                    self._clients[rank], self.targets[rank] = self._register(rank)
                    self._returns[rank].clear()
                time.sleep(0.0005 * rank)
                self.targets[rank].poll(step=len(self.served[rank]) if self._by_step else None)
                self.served[rank].append(self.targets[rank].version)
        except threading.BrokenBarrierError:
            pass
        except Exception as exc:
            self.errors.append(exc)
            self._collective.abort()

    def return_alone(self, rank: int) -> None:
        """Have one rank end its session and register anew, between two of its steps, and wait until it serves."""
        self._returns[rank].set()
        eventually(lambda: not self._returns[rank].is_set(), "it has registered again")
        eventually(lambda: self.targets[rank].version is not None, "it serves the live version")

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(20)
        for client in self._clients:
            client.close()

    def steps(self) -> list[tuple[int, int]]:
        """What the two served in each step in which both served."""
        assert not self.errors
        return [(a, b) for a, b in zip(*self.served, strict=False) if a is not None and b is not None]


@pytest.fixture
def trainer(daemon: Daemon) -> Iterator[Client]:
    with daemon.connect("trainer") as client:
        yield client


@pytest.mark.parametrize("by_step", [False, True], ids=["counted", "given the step"])
def test_ranks_in_lock_step_never_serve_two_versions_in_a_step_though_one_returns_alone(
    daemon: Daemon, trainer: Client, by_step: bool
) -> None:
    """The second rank is slower; nobody gives `agree`. Each in its turn ends and comes back between two swaps."""
    tensors = shards.whole(1)
    source = trainer.register_source("policy", tensors)
    replica = Replica(daemon, by_step=by_step)
    for version in range(1, 13):
        for tensor in tensors.values():
            tensor.fill_(version)
        source.publish(version)
        report = trainer.swap("policy", version, timeout=60)
        assert report.outcome == "committed" and [member.reason for member in report.members] == ["", ""]
        if version % 3 == 0:
            replica.return_alone(version % 2)
    replica.close()
    steps = replica.steps()
    assert [pair for pair in steps if pair[0] != pair[1]] == []
    assert {*range(1, 13)} <= {version for version, _ in steps}


@pytest.mark.parametrize("by_step", [False, True], ids=["counted", "given the step"])
def test_a_rank_that_hears_late_of_a_decision_and_has_begun_a_step_serves_what_its_replica_serves_in_it(
    start_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch, by_step: bool
) -> None:
    """Rank 1 is a poll ahead of rank 0, which holds in its own, and hears nothing of the decision for 3 s and more."""
    daemon = start_daemon("[deadlines]\ncommit_s = 30.0\n")
    deaf = threading.Event()
    hear = CommitState.hear

    def hears_late(self: CommitState, message: Message) -> None:
        if isinstance(message, PrepareCommit) and message.version == 2 and self is late._state:
            deaf.set()
            eventually(lambda: "event=silent" in daemon.log(), "the silent rank is named", 20)
            time.sleep(0.5)
        hear(self, message)

    with daemon.connect("trainer") as trainer:
        source = trainer.register_source("policy", shards.whole(1))
        replica = Replica(daemon, by_step=by_step)
        late = replica.targets[1]
        monkeypatch.setattr(CommitState, "hear", hears_late)
        for version in (1, 2, 3):
            source.publish(version)
            report = trainer.swap("policy", version, timeout=60)
            assert report.outcome == "committed" and [member.reason for member in report.members] == ["", ""]
        replica.close()
    assert deaf.is_set() and "event=apart" not in daemon.log()
    steps = replica.steps()
    assert [pair for pair in steps if pair[0] != pair[1]] == [] and {1, 2, 3} <= {version for version, _ in steps}


@pytest.mark.parametrize(
    "signal_",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.slow, id="killed"), pytest.param(signal.SIGTERM, id="stopped")],
)
def test_a_rank_whose_node_is_lost_after_the_decision_serves_the_old_version_in_no_step_of_the_new(
    nodes: Callable[..., tuple[Daemon, ...]], monkeypatch: pytest.MonkeyPatch, signal_: signal.Signals
) -> None:
    """It serves until its permit ends, and ends its steps with the other one."""
    first, second = nodes(2, "[deadlines]\nplan_s = 60.0\nstage_s = 20.0\ncommit_s = 30.0\nlease_s = 6.0\n")
    hear, begun = CommitState.hear, threading.Event()

    def hears_nothing(self: CommitState, message: Message) -> None:
        if self is deaf._state and isinstance(message, PrepareCommit) and message.version == 2:
            begun.set()
        else:
            hear(self, message)

    with first.connect("trainer") as trainer:
        source = trainer.register_source("policy", shards.whole(1))
        replica = Replica(first, second)
        deaf = replica.targets[1]
        monkeypatch.setattr(CommitState, "hear", hears_nothing)
        source.publish(1)
        assert trainer.swap("policy", 1, timeout=60).outcome == "committed"
        source.publish(2)
        running = RunningSwap(first.connect(), "policy", 2)
        assert begun.wait(20)
        os.kill(second.pid, signal_)
        eventually(lambda: replica.targets[0].version == 2, "the other rank serves the new version", 40)
        replica.close()
        with pytest.raises(refitd.RefitFailed, match="incomplete"):
            running.result()
    both = replica.steps()
    assert both and [pair for pair in both if pair[0] != pair[1]] == []


def test_a_rank_whose_replica_never_says_where_it_is_gives_up_and_serves_nothing(
    daemon: Daemon, trainer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_points, "IN_STEP_S", 1.0)
    source = trainer.register_source("policy", {"w": torch.zeros(8)})
    with daemon.connect("a") as a, daemon.connect("b") as b:
        targets = [
            client.register_target("policy", {"w": torch.zeros(8)}, replica="r", rank=rank, world_size=2)
            for rank, client in enumerate((a, b))
        ]
        source.publish(1)
        with ThreadPoolExecutor(2) as ranks:
            waiting = [ranks.submit(target.wait, 1, 20) for target in targets]
            trainer.swap("policy", 1, timeout=20)
            assert [one.result() for one in waiting] == [1, 1]
        b._connection.current._push = lambda *_: None  # type: ignore[method-assign]  its answers are lost
        source.publish(2)
        running = RunningSwap(daemon.connect(), "policy", 2)
        running.wait_phase("commit")
        with pytest.raises(refitd.CommitError, match="have not said within 1 s how far they are"):
            for _ in range(100):
                targets[0].poll()
                time.sleep(0.01)
        assert targets[0].version is None and targets[1].version != 2
        b.close()
        with pytest.raises(refitd.RefitFailed, match="incomplete"):
            running.result()


def test_ranks_that_cannot_be_brought_to_one_poll_are_named_in_the_report_and_the_log(
    daemon: Daemon, trainer: Client
) -> None:
    """One thread polls both in turn, and one of them has polled more often."""
    tensors = shards.whole(1)
    source = trainer.register_source("policy", tensors)
    with daemon.connect() as first, daemon.connect() as second:
        targets = []
        for rank, client in enumerate((first, second)):
            mine = shards.zeros_like(shards.cut(tensors, rank, 2))
            described = shards.describe(mine, rank, 2)
            targets.append(
                client.register_target("policy", mine, replica="r", rank=rank, world_size=2, metadata=described)
            )
            targets[0].poll()
        for _ in range(60):
            targets[0].poll()
        for version in (1, 2, 3):
            source.publish(version)
            with Engine(*targets):
                report = trainer.swap("policy", version, timeout=60)
            assert report.outcome == "committed"
            reason = "flipped in its own next poll, not with its replica: one thread polls several ranks"
            # before the first version no step has two
            assert all(member.reason.startswith(reason if version > 1 else "") for member in report.members)
            assert daemon.log().count("event=apart") == 2 * (version - 1)


def test_a_rank_whose_partner_dies_after_the_decision_is_not_held_for_ever(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as first:
        tensors = shards.whole(1)
        source = trainer.register_source("policy", tensors)
        second = daemon.connect()
        targets = []
        for rank, client in enumerate((first, second)):
            mine = shards.zeros_like(shards.cut(tensors, rank, 2))
            targets.append(
                client.register_target(
                    "policy", mine, replica="r", rank=rank, world_size=2, metadata=shards.describe(mine, rank, 2)
                )
            )
        source.publish(1)
        second._connection.current._push = lambda *_: None  # type: ignore[method-assign]  its answers are lost
        running = RunningSwap(daemon.connect(), "policy", 1)
        running.wait_phase("commit")
        second.close()
        with Engine(targets[0]), pytest.raises(refitd.RefitFailed, match="incomplete"):
            running.result()


def test_ranks_that_only_wait_are_not_held_for_each_other(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were: each took itself for one that others had polled more often than, once it had committed in a wait."""
    monkeypatch.setattr(commit_points, "EARLY_S", 600.0)
    with daemon.connect("trainer") as trainer, daemon.connect("a") as a, daemon.connect("b") as b:
        source = trainer.register_source("policy", {"w": torch.zeros(8)})
        targets = [
            client.register_target("policy", {"w": torch.zeros(8)}, replica="r", rank=rank, world_size=2)
            for rank, client in enumerate((a, b))
        ]
        with ThreadPoolExecutor(2) as ranks:
            for version in range(1, 6):
                waiting = [ranks.submit(target.wait, version, 20) for target in targets]
                source.publish(version)
                assert trainer.swap("policy", version, timeout=20).outcome == "committed"
                assert [one.result() for one in waiting] == [version] * 2


def test_ranks_that_are_idle_flip_before_the_step_that_comes_next(daemon: Daemon) -> None:
    """They stand before one step again and again, also while nothing is pending, and steps come in between."""
    with daemon.connect("trainer") as trainer, daemon.connect("a") as a, daemon.connect("b") as b:
        weights = {"w": torch.zeros(8)}
        source = trainer.register_source("policy", weights)
        held = [torch.zeros(8), torch.zeros(8)]
        targets = [
            client.register_target("policy", {"w": tensor}, replica="r", rank=rank, world_size=2)
            for rank, (client, tensor) in enumerate(zip((a, b), held, strict=True))
        ]
        done, over, began = [0, 0], threading.Event(), threading.Barrier(3)
        locks = [threading.Lock(), threading.Lock()]
        seen: list[tuple[int, int, float]] = []  # (step, rank, what was computed with)

        def idle(rank: int) -> None:
            while not over.wait(0.002):
                with locks[rank]:
                    targets[rank].poll(step=done[rank] + 1, begin=False)

        def compute(rank: int) -> None:
            for _ in range(20):
                began.wait(60)  # ranks begin together, as a forward pass that one of them is missing from would
                with locks[rank]:
                    done[rank] += 1
                    targets[rank].poll(step=done[rank])
                    seen.append((done[rank], rank, held[rank][0].item()))

        threads = [threading.Thread(target=idle, args=(rank,)) for rank in range(2)]
        threads += [threading.Thread(target=compute, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for version in range(1, 11):
            weights["w"].fill_(version)
            source.publish(version)
            swapping = threading.Thread(target=trainer.swap, args=("policy", version), kwargs={"timeout": 60})
            swapping.start()
            if version % 2:
                swapping.join()  # without any step: every second version goes live in an idle engine
            for _ in range(2):
                began.wait(60)
            swapping.join()
            assert [tensor[0].item() for tensor in held] == [version] * 2
        over.set()
        for thread in threads:
            thread.join(60)
        values = {step: {value for at, _, value in seen if at == step} for step, _, _ in seen}
        assert len(values) == 20 and all(len(found) == 1 for found in values.values())
        with pytest.raises(refitd.RefusedError, match="no step is given"):
            targets[0].poll(begin=False)
