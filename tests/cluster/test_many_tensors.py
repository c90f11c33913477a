"""Models of very many tensors: work per tensor never blocks a loop that must answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from refitd.testing import Daemon, Engine


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hundred_thousand_tensors_are_swapped_and_nobody_is_taken_for_dead(
    start_daemon: Callable[..., Daemon],
) -> None:
    """Addressing them took the square of their number, and their node was dropped meanwhile."""
    daemon = start_daemon("[deadlines]\ncommit_s = 60.0\nstage_s = 60.0\n")
    count, size = 100_000, 16
    flat, live = torch.zeros(count * size), torch.zeros(count * size)

    def named(whole: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"layers.{i // 100}.block.{i % 100}.weight": part for i, part in enumerate(whole.split(size))}

    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        source = trainer.register_source("m", named(flat), timeout=120)
        target = engine.register_target("m", named(live), replica="r", timeout=120)
        with Engine(target) as running:
            for version in (1, 2, 3):
                flat.copy_(torch.arange(len(flat), dtype=torch.float32) + version)
                source.publish(version, timeout=60)
                report = trainer.swap("m", version, timeout=120)
                assert report.outcome == "committed" and report.copies == count
                assert torch.equal(live, flat)
            assert trainer.verify("m", timeout=60).outcome == "proven"
        assert not running.errors
