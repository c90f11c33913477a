"""Lent tensors: read in place if they are in an arena, else copied once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import refitd
from refitd.testing import Cluster, Daemon, Engine, eventually
from tests.support.names import policy


def test_tensors_outside_arenas_are_copied_and_free_at_once(daemon: Daemon) -> None:
    full = {"w": torch.randn(64, 32).t()}
    first, live = {"w": full["w"].clone()}, {"w": torch.zeros(32, 64)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(policy(), full)
        target = engine.register_target(policy(), live, replica="r")
        assert source.lending == "copied"
        source.publish(1, timeout=10)  # no swap is needed before this returns
        full["w"].zero_()
        with Engine(target):
            (given,) = trainer.swap(policy(), 1, timeout=60).sources
        assert given.mode == "copied" and torch.equal(live["w"], first["w"])
        row = trainer.status().models[0].sources[0]
        assert row.mode == "copied"


def test_a_lease_that_was_copied_stays_a_version_unless_its_block_fails(daemon: Daemon) -> None:
    with daemon.connect() as trainer:
        source = trainer.register_source(policy(), {"w": torch.ones(64)})
        with source.lend(1) as lease:
            assert lease.has_ended
            lease.wait(0.0)
        with pytest.raises(ZeroDivisionError), source.lend(2):
            raise ZeroDivisionError
        assert trainer.status().models[0].complete_versions == (1,)
        lease.withdraw()
        assert trainer.status().models[0].complete_versions == ()


@pytest.mark.slow
def test_a_lend_waits_for_a_coordinator_that_is_restarted() -> None:
    with Cluster(("n0",), workers=1) as cluster, cluster.daemons["n0"].connect() as client:
        given, live = {"w": torch.ones(8)}, {"w": torch.zeros(8)}
        source = client.register_source(policy(), given)
        target = client.register_target(policy(), live, replica="r")
        cluster.coordinator.kill()
        eventually(lambda: "coordinator-silent" in cluster.daemons["n0"].log(), "it is missed")
        with pytest.raises(refitd.TransportError, match="no coordinator"):
            source.lend(1, timeout=2.0)
        with ThreadPoolExecutor(1) as other:
            lending = other.submit(source.lend, 1, timeout=60)
            cluster.coordinator.start()
            with lending.result(), Engine(target):
                assert client.swap(policy(), 1, timeout=60).outcome == "committed"
        assert torch.equal(live["w"], given["w"])
