"""A sleeping engine: swaps leave it out, nothing reads or writes its tensors, and it is caught up when it wakes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, RunningSwap, eventually


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 32), value)}


def test_swaps_leave_a_sleeping_replica_out_and_it_is_caught_up(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with daemon.connect() as trainer, daemon.connect() as engines:
        given, sleeper, other = weights(1.0), weights(0.0), weights(0.0)
        source = trainer.register_source("policy", given)
        sleeps = engines.register_target("policy", sleeper, replica="sleeps")
        source.publish(1)
        with Engine(sleeps):
            trainer.swap("policy", 1, timeout=20)
        sleeps.suspend()
        assert sleeps.version is None and "suspended" in sleeps.fenced
        assert [t.state for t in trainer.status().models[0].targets] == ["suspended"]
        assert trainer.verify("policy").outcome == "unknown"
        given["w"].fill_(2.0)
        source.publish(2)
        with pytest.raises(refitd.RefusedError, match="every replica is left out \\(suspended: sleeps"):
            trainer.swap("policy", 2, timeout=20)
        awake = engines.register_target("policy", other, replica="awake")
        with Engine(awake, sleeps):
            report = trainer.swap("policy", 2, timeout=20)
        assert (report.outcome, report.suspended, len(report.members)) == ("committed", ("sleeps",), 1)
        assert other["w"].unique() == 2.0 and sleeper["w"].unique() == 1.0
        assert sleeps.resume() is None, "another version is live"
        assert sleeps.wait(2, timeout=20) == 2 and sleeper["w"].unique() == 2.0
        assert trainer.verify("policy").outcome == "proven"


def test_a_rank_that_wakes_without_its_contents_gets_them_again(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with daemon.connect() as trainer, daemon.connect() as engines:
        live = weights(0.0)
        source = trainer.register_source("policy", weights(1.0))
        target = engines.register_target("policy", live, replica="a")
        source.publish(1)
        with Engine(target):
            trainer.swap("policy", 1, timeout=20)
        target.suspend()
        assert target.resume() == 1, "it kept them"
        target.suspend()
        live["w"].zero_()
        assert target.resume(kept=False) is None
        assert target.wait(1, timeout=20) == 1 and live["w"].unique() == 1.0
        target.suspend()
        live["w"].set_(torch.zeros(64, 32))
        with pytest.raises(refitd.CommitError, match="w: "):
            target.resume()
        assert target.version is None


def test_suspending_aborts_what_is_undecided_and_waits_for_what_is_decided(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with daemon.connect() as trainer, daemon.connect() as engines:
        live = weights(0.0)
        trainer.register_source("policy", weights(1.0)).publish(1)
        target = engines.register_target("policy", live, replica="a")
        blocks = engines.register_target(
            "policy", weights(0.0), replica="b", on_pause=lambda version: eventually(lambda: len(seen) > 0, "seen")
        )
        seen: list[int] = []
        swap = RunningSwap(daemon.connect(), "policy", 1)
        swap.wait_phase("pause")
        target.suspend()
        seen.append(1)
        with pytest.raises(refitd.SwapFailed, match="its engine was suspended"):
            swap.result()
        target.resume()
        swap = RunningSwap(daemon.connect(), "policy", 1)
        eventually(lambda: target.pending == 1, "it is decided")
        with pytest.raises(refitd.RefusedError, match="take it over first"):
            target.suspend()
        assert target.poll() == 1 and swap.result().outcome == "committed" and blocks.version == 1
        target.suspend()
        assert target.version is None


@pytest.mark.slow
def test_a_restarted_coordinator_knows_who_sleeps(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(standalone=False)
    coordinator = daemon.start_coordinator()
    with daemon.connect() as trainer, daemon.connect() as engines:
        trainer.register_source("policy", weights(1.0)).publish(1)
        target = engines.register_target("policy", weights(0.0), replica="a")
        target.suspend()
        coordinator.kill()
        daemon.start_coordinator()

        def states() -> list[str]:
            try:
                return [str(t.state) for m in trainer.status().models for t in m.targets]
            except refitd.RefitdError:
                return []

        eventually(lambda: states() == ["suspended"], "it is told", 20)
        with pytest.raises(refitd.RefusedError, match="suspended"):
            trainer.swap("policy", 1, timeout=20)
