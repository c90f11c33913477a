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
from refitd.client import Client, commit_state
from refitd.client.commit_state import CommitState
from refitd.client.target import Target
from refitd.protocol.base import Message
from refitd.protocol.local import PrepareCommit
from refitd.testing import Daemon, Engine, RunningSwap, eventually
from tests.support import shards
from tests.support.fleet import CutReplica, go_live
from tests.support.names import policy


class Replica:
    """Two ranks, each with a thread that polls before every step; both end a step together.

    `served[rank]` is the version that the rank served in each step.
    """

    def __init__(self, *daemons: Daemon, by_step: bool = False) -> None:
        self._daemons = daemons  # rank 1 is a client of the last one
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
        return client, client.register_target(policy(), mine, replica="r", rank=rank, world_size=2, metadata=described)

    def _run(self, rank: int) -> None:
        try:
            while True:
                if self._stop.is_set():
                    self._collective.abort()
                self._collective.wait(60)  # a step begins after all ranks have ended the step before
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
        """Have one rank close its session between two steps and register again; wait until it serves."""
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
        """Return the versions that ranks 0 and 1 served, step by step; skip a step if a rank served none."""
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
    """The second rank is slower and `agree` is not used. In turn, each rank leaves and returns between two swaps."""
    tensors = shards.whole(1)
    source = trainer.register_source(policy(), tensors)
    replica = Replica(daemon, by_step=by_step)
    for version in range(1, 13):
        for tensor in tensors.values():
            tensor.fill_(version)
        report = go_live(trainer, source, version)
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
    """Rank 1 is a poll ahead and gets the decision more than 3 s late; rank 0 waits in its poll until then."""
    daemon = start_daemon("[deadlines]\ncommit_s = 30.0\n")
    deaf = threading.Event()
    hear = CommitState.hear

    def hears_late(self: CommitState, message: Message) -> None:
        if isinstance(message, PrepareCommit) and message.version == 2 and self.rank.member == late.member:
            deaf.set()
            eventually(lambda: "event=silent" in daemon.log(), "the silent rank is named")
            time.sleep(0.5)
        hear(self, message)

    with daemon.connect("trainer") as trainer:
        source = trainer.register_source(policy(), shards.whole(1))
        replica = Replica(daemon, by_step=by_step)
        late = replica.targets[1]
        monkeypatch.setattr(CommitState, "hear", hears_late)
        for version in (1, 2, 3):
            report = go_live(trainer, source, version)
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
    """It serves until its permit ends, and ends its steps with the other rank."""
    first, second = nodes(2, "[deadlines]\nplan_s = 60.0\nstage_s = 20.0\ncommit_s = 30.0\nlease_s = 6.0\n")
    hear, begun = CommitState.hear, threading.Event()

    def hears_nothing(self: CommitState, message: Message) -> None:
        if isinstance(message, PrepareCommit) and message.version == 2 and self.rank.member == deaf.member:
            begun.set()
        else:
            hear(self, message)

    with first.connect("trainer") as trainer:
        source = trainer.register_source(policy(), shards.whole(1))
        replica = Replica(first, second)
        deaf = replica.targets[1]
        monkeypatch.setattr(CommitState, "hear", hears_nothing)
        go_live(trainer, source, 1)
        source.publish(2)
        running = RunningSwap(first.connect(), policy(), 2)
        assert begun.wait(60)
        os.kill(second.pid, signal_)
        eventually(lambda: replica.targets[0].version == 2, "the other rank serves the new version", 40)
        replica.close()
        with pytest.raises(refitd.RefitFailed, match="incomplete"):
            running.result()
    both = replica.steps()
    assert both and [pair for pair in both if pair[0] != pair[1]] == []


def deafen(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    """Have a rank ignore its messages; it sends no answer."""
    hear = CommitState.hear

    def hears(self: CommitState, message: Message) -> None:
        if self.rank.member != target.member:
            hear(self, message)

    monkeypatch.setattr(CommitState, "hear", hears)


def test_a_rank_whose_replica_never_says_where_it_is_gives_up_and_serves_nothing(
    daemon: Daemon, trainer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_state, "IN_STEP_S", 1.0)
    source = trainer.register_source(policy(), shards.whole(1))
    with daemon.connect("a") as a, daemon.connect("b") as b:
        targets = CutReplica([a, b], "r", 2).targets
        source.publish(1)
        with ThreadPoolExecutor(2) as ranks:
            waiting = [ranks.submit(target.wait, 1, 20) for target in targets]
            trainer.swap(policy(), 1, timeout=60)
            assert [one.result() for one in waiting] == [1, 1]
        deafen(monkeypatch, targets[1])
        source.publish(2)
        running = RunningSwap(daemon.connect(), policy(), 2)
        running.wait_phase("commit")
        with pytest.raises(refitd.CommitError, match="have not said within 1 s how far they are"):
            eventually(lambda: targets[0].poll() is not None, "its poll gives up")
        assert targets[0].version is None and targets[1].version != 2
        b.close()
        with pytest.raises(refitd.RefitFailed, match="incomplete"):
            running.result()


def test_ranks_that_cannot_be_brought_to_one_poll_are_named_in_the_report_and_the_log(
    daemon: Daemon, trainer: Client
) -> None:
    """One thread polls both in turn, and one of them has polled more often."""
    tensors = shards.whole(1)
    source = trainer.register_source(policy(), tensors)
    with daemon.connect() as first, daemon.connect() as second:
        targets = []
        for rank, client in enumerate((first, second)):
            mine = shards.zeros_like(shards.cut(tensors, rank, 2))
            described = shards.describe(mine, rank, 2)
            targets.append(
                client.register_target(policy(), mine, replica="r", rank=rank, world_size=2, metadata=described)
            )
            targets[0].poll()
        for _ in range(60):
            targets[0].poll()
        for version in (1, 2, 3):
            report = go_live(trainer, source, version, *targets)
            assert report.outcome == "committed"
            reason = "flipped in its own next poll, not with its replica: one thread polls several ranks"
            # before the first version no step has two served versions
            assert all(member.reason.startswith(reason if version > 1 else "") for member in report.members)
            lines = 2 * (version - 1)
            eventually(lambda lines=lines: daemon.log().count("event=apart") == lines, "the log names them")


def test_a_rank_whose_partner_dies_after_the_decision_is_not_held_for_ever(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon.connect() as trainer, daemon.connect() as first:
        source = trainer.register_source(policy(), shards.whole(1))
        second = daemon.connect()
        targets = CutReplica([first, second], "r", 2).targets
        source.publish(1)
        deafen(monkeypatch, targets[1])
        running = RunningSwap(daemon.connect(), policy(), 1)
        running.wait_phase("commit")
        second.close()
        with Engine(targets[0]), pytest.raises(refitd.RefitFailed, match="incomplete"):
            running.result()


def test_ranks_that_only_wait_are_not_held_for_each_other(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an old bug, a rank that committed in a wait took itself for polled less often than the others, and waited."""
    monkeypatch.setattr(commit_state, "EARLY_S", 600.0)
    with daemon.connect("trainer") as trainer, daemon.connect("a") as a, daemon.connect("b") as b:
        source = trainer.register_source(policy(), shards.whole(1))
        targets = CutReplica([a, b], "r", 2).targets
        with ThreadPoolExecutor(2) as ranks:
            for version in range(1, 6):
                waiting = [ranks.submit(target.wait, version, 20) for target in targets]
                go_live(trainer, source, version)
                assert [one.result() for one in waiting] == [version] * 2


def test_ranks_that_are_idle_flip_before_the_step_that_comes_next(daemon: Daemon) -> None:
    """Idle ranks poll before the same step repeatedly, also without a pending swap, and run steps in between."""
    with daemon.connect("trainer") as trainer, daemon.connect("a") as a, daemon.connect("b") as b:
        weights = {"w": torch.zeros(8)}
        source = trainer.register_source(policy(), weights)
        held = [torch.zeros(8), torch.zeros(8)]
        targets = [
            client.register_target(policy(), {"w": tensor}, replica="r", rank=rank, world_size=2)
            for rank, (client, tensor) in enumerate(zip((a, b), held, strict=True))
        ]
        done, over, began = [0, 0], threading.Event(), threading.Barrier(3)
        locks = [threading.Lock(), threading.Lock()]
        seen: list[tuple[int, int, float]] = []  # (step, rank, value that the step computed with)

        def idle(rank: int) -> None:
            while not over.wait(0.002):
                with locks[rank]:
                    targets[rank].poll(step=done[rank] + 1, begin=False)

        def compute(rank: int) -> None:
            for _ in range(20):
                began.wait(60)  # ranks begin together, like a forward pass, which would hang without one of them
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
            swapping = threading.Thread(target=trainer.swap, args=(policy(), version), kwargs={"timeout": 60})
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
