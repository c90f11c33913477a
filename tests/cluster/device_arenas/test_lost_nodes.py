"""A node is killed, daemon and workers, while its GPUs receive a version: the others abort, serve, and go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

import refitd
from refitd.testing import Daemon, Engine, RunningSwap, eventually, stopped
from tests.support import fake_cuda, shards
from tests.support.gpu_tensors import DEADLINES, Tensors, allocated, copy_into, private


class Fleet:
    """Two source ranks and a replica on the GPUs of n0. `far` is another replica, on a GPU of n1."""

    def __init__(self, n0: Daemon) -> None:
        self.client = n0.connect("trainer")
        self.full = [private(shards.cut(shards.whole(0), rank, 2), rank) for rank in range(2)]
        self.sources = [
            self.client.register_source(
                "policy", mine, rank=rank, world_size=2, metadata=shards.describe(mine, rank, 2)
            )
            for rank, mine in enumerate(self.full)
        ]
        self.live: dict[str, Tensors] = {}
        self.targets: dict[str, refitd.Target] = {}
        self.add(self.client, "near")

    def add(self, client: refitd.Client, replica: str) -> None:
        self.live[replica] = allocated(client, shards.whole(0), "cuda:1")
        self.targets[replica] = client.register_target("policy", self.live[replica], replica=replica)

    def publish(self, version: int) -> None:
        for rank, (source, mine) in enumerate(zip(self.sources, self.full, strict=True)):
            copy_into(mine, shards.cut(shards.whole(version), rank, 2))
            source.publish(version)

    def swap(self, version: int) -> None:
        self.publish(version)
        with Engine(*self.targets.values()):
            self.client.swap("policy", version, timeout=120)
        assert all(shards.equal(live, shards.whole(version)) for live in self.live.values())

    def drop(self, *replicas: str) -> None:
        for replica in replicas:
            del self.live[replica], self.targets[replica]


@pytest.mark.parametrize(
    "service", [pytest.param("nccl", marks=pytest.mark.slow), "nvshmem", pytest.param("nixl", marks=pytest.mark.slow)]
)
def test_a_killed_node_is_named_the_others_serve_and_its_successor_takes_part(
    service: str, gpus: fake_cuda.FakeGpus, start_daemon: Callable[..., Daemon]
) -> None:
    config = DEADLINES + f'[transport]\nservice = "{service}"\n'
    n0 = start_daemon(config)
    n1 = start_daemon(config, name="n1", joins=n0.endpoint)
    fleet, engine = Fleet(n0), n1.connect("engine")
    fleet.add(engine, "far")
    fleet.swap(1)

    fleet.publish(2)
    victims = n1.node_of("n1").workers
    with stopped(victims):  # the workers of n0 wait for them, without an end
        swap = RunningSwap(n0.connect(), "policy", 2, timeout=120)
        swap.wait_phase("stage")
        n1.kill()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(refitd.RefitFailed, match="n1") as failed:
            swap.result()
    assert failed.value.report is not None and failed.value.report.outcome == "aborted"
    near = fleet.targets["near"]
    assert near.poll() is None and near.version == 1 and shards.equal(fleet.live["near"], shards.whole(1))

    fleet.drop("far")
    engine.close()
    n1 = start_daemon(config, name="n1", joins=n0.endpoint)
    eventually(lambda: any(node.pid == n1.pid for node in n0.status().nodes), "the node is back")
    engine = n1.connect("engine")
    fleet.add(engine, "far")
    fleet.swap(3)
    with n0.connect() as operator:
        assert {link.service for link in operator.status().links} == {service}
        assert operator.verify("policy", timeout=60).outcome == "proven"
    del near
    fleet.drop("near", "far")
    engine.close()
    fleet.client.close()
