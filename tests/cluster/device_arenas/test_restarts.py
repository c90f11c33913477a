"""A restarted daemon does not get GPU arenas back: it allocates new ones, or the registration fails with the reason."""

from __future__ import annotations

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, eventually
from tests.support.gpu_tensors import MIB, allocated


@pytest.mark.slow
def test_slots_and_staging_on_a_gpu_are_made_anew_and_live_tensors_there_must_be_registered_again(
    daemon: Daemon,
) -> None:
    full = {"w": torch.zeros(MIB, dtype=torch.bfloat16)}
    live = {"w": torch.zeros(MIB, dtype=torch.bfloat16)}
    with daemon.connect("trainer", reconnect=True) as trainer, daemon.connect("engine", reconnect=True) as engine:
        source = trainer.register_source("policy", full, device="cuda:0")
        copies = engine.register_target("policy", live, replica="copies", device="cuda:0")
        there = allocated(engine, full, "cuda:0")
        flips = engine.register_target("policy", there, replica="flips")
        assert flips.flips
        full["w"].fill_(1)
        source.publish(1)
        with Engine(copies, flips):
            assert trainer.swap("policy", 1, timeout=60).outcome == "committed"
        daemon.kill()
        daemon.start()
        eventually(lambda: flips.error is not None and copies.version == 1, "they are back, or say why not", 30)
        with pytest.raises(refitd.RefitdError, match=r"flips.*could not be registered again.*anew"):
            flips.poll()
        assert flips.version is None and bool((there["w"] == 1).all()), "what lies there stays"
        eventually(lambda: bool(trainer.status().models[0].sources), "the trainer is back", 30)
        assert trainer.status().models[0].complete_versions == () and source.next_version == 2
        again = engine.register_target("policy", there, replica="flips")
        full["w"].fill_(2)
        source.publish(2)
        with Engine(copies, again):
            assert trainer.swap("policy", 2, timeout=60).outcome == "committed"
        assert bool((live["w"] == 2).all()) and bool((there["w"] == 2).all()) and not again.flips
        there.clear()
