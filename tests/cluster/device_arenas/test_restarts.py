"""A restarted daemon does not get GPU arenas back: it allocates new ones, or the registration fails with the reason."""

from __future__ import annotations

import pytest
import torch

import refitd
from refitd.testing import Daemon, eventually
from tests.support.fleet import go_live
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
        go_live(trainer, source, 1, copies, flips)
        daemon.kill()
        daemon.start()
        eventually(lambda: flips.error is not None and copies.version == 1, "they are back, or say why not")
        with pytest.raises(refitd.RefitdError, match=r"flips.*could not be registered again.*anew"):
            flips.poll()
        assert flips.version is None and bool((there["w"] == 1).all()), "what lies there stays"
        eventually(lambda: bool(trainer.status().models[0].sources), "the trainer is back")
        assert trainer.status().models[0].complete_versions == () and source.next_version == 2
        again = engine.register_target("policy", there, replica="flips")
        full["w"].fill_(2)
        go_live(trainer, source, 2, copies, again)
        assert bool((live["w"] == 2).all()) and bool((there["w"] == 2).all()) and not again.flips
        there.clear()
