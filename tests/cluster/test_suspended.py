"""A sleeping engine: swaps skip it, its tensors are not read or written, and it is caught up when it wakes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, RunningSwap, eventually
from tests.support.controls import controlled
from tests.support.names import policy
from tests.support.passed_on import Start


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 32), value)}


def test_a_rank_whose_tensors_have_moved_does_not_wake(daemons: Start) -> None:
    daemon = daemons()[0]
    with daemon.connect() as trainer, daemon.connect() as engines:
        live = weights(0.0)
        trainer.register_source(policy(), weights(1.0)).publish(1)
        target = engines.register_target(policy(), live, replica="a")
        with Engine(target):
            trainer.swap(policy(), 1, timeout=60)
        target.suspend()
        live["w"].set_(torch.zeros(64, 32))
        with pytest.raises(refitd.CommitError, match="w: "):
            target.resume()
        assert target.version is None


def test_suspending_aborts_what_is_undecided_and_waits_for_what_is_decided(daemons: Start) -> None:
    daemon = daemons()[0]
    with daemon.connect() as trainer, daemon.connect() as engines:
        live = weights(0.0)
        trainer.register_source(policy(), weights(1.0)).publish(1)
        target = engines.register_target(policy(), live, replica="a")
        blocks = controlled(
            engines, policy(), weights(0.0), replica="b", pause=lambda v: eventually(lambda: len(seen) > 0, "seen")
        )
        seen: list[int] = []
        swap = RunningSwap(daemon.connect(), policy(), 1)
        swap.wait_phase("pause")
        target.suspend()
        seen.append(1)
        with pytest.raises(refitd.SwapFailed, match="its engine was suspended"):
            swap.result()
        target.resume()
        swap = RunningSwap(daemon.connect(), policy(), 1)
        eventually(lambda: target.pending == 1, "it is decided")
        with pytest.raises(refitd.RefusedError, match="take it over first"):
            target.suspend()
        assert target.poll() == 1 and swap.result().outcome == "committed"
        eventually(lambda: blocks.version == 1, "the other one serves it")
        target.suspend()
        assert target.version is None


def test_ranks_in_lockstep_that_are_suspended_during_a_swap_wake_with_one_version(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as one, daemon.connect() as two, daemon.connect() as other:
        given, live = weights(1.0), [weights(0.0), weights(0.0)]
        source = trainer.register_source(policy(), given)
        ranks = [
            client.register_target(policy(), live[rank], replica="a", rank=rank, world_size=2)
            for rank, client in enumerate((one, two))
        ]
        is_suspended = threading.Event()
        blocks = controlled(other, policy(), weights(0.0), replica="b", pause=lambda v: is_suspended.wait(20))
        source.publish(1)
        is_suspended.set()
        with Engine(ranks[0]), Engine(ranks[1]):
            trainer.swap(policy(), 1, timeout=20)
        # not decided: one rank is enough to abort it
        is_suspended.clear()
        given["w"].fill_(2.0)
        source.publish(2)
        swap = RunningSwap(daemon.connect(), policy(), 2)
        swap.wait_phase("pause")
        ranks[0].suspend()
        is_suspended.set()
        with pytest.raises(refitd.SwapFailed, match="its engine was suspended"):
            swap.result()
        ranks[1].suspend()
        for tensors in live:
            tensors["w"].fill_(55.0)
        assert [rank.resume(kept=False) for rank in ranks] == [None, None]
        with Engine(ranks[0]), Engine(ranks[1]):
            eventually(lambda: [rank.version for rank in ranks] == [1, 1], "both are caught up")
            assert [tensors["w"].unique().tolist() for tensors in live] == [[1.0], [1.0]]
        # decided: no rank can leave
        swap = RunningSwap(daemon.connect(), policy(), 2)
        eventually(lambda: [rank.pending for rank in ranks] == [2, 2], "it is decided")
        for rank in ranks:
            with pytest.raises(refitd.RefusedError, match="take it over first"):
                rank.suspend()
        with Engine(ranks[0]), Engine(ranks[1]):
            assert swap.result().outcome == "committed"
        assert [rank.version for rank in (*ranks, blocks)] == [2, 2, 2]
        assert [tensors["w"].unique().tolist() for tensors in live] == [[2.0], [2.0]]


@pytest.mark.slow
def test_a_restarted_coordinator_knows_who_sleeps(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(standalone=False)
    coordinator = daemon.start_coordinator()
    with daemon.connect() as trainer, daemon.connect() as engines:
        trainer.register_source(policy(), weights(1.0)).publish(1)
        target = engines.register_target(policy(), weights(0.0), replica="a")
        target.suspend()
        coordinator.kill()
        daemon.start_coordinator()

        def states() -> list[str]:
            try:
                return [str(t.state) for m in trainer.status().models for t in m.targets]
            except refitd.RefitdError:
                return []

        eventually(lambda: states() == ["suspended"], "it is told")
        with pytest.raises(refitd.RefusedError, match="suspended"):
            trainer.swap(policy(), 1, timeout=60)
