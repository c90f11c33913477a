"""Arenas and live tensors in main memory and on GPUs: versions travel between them, in a node and between nodes."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import refitd
from refitd.client import slot_source
from refitd.testing import Daemon, Engine, eventually
from tests.support import fake_cuda, shards
from tests.support.fake_torch.device_shim import gpu_of, put_on_gpu
from tests.support.fleet import go_live
from tests.support.gpu_tensors import DEADLINES, MIB, Tensors, allocated, copy_into, device_bytes, private


@pytest.mark.parametrize(
    ("source_on", "target_on"),
    [
        ("cpu", "arena"),
        ("private", "private"),
        *(
            pytest.param(source, target, marks=pytest.mark.slow)
            for source in ("cpu", "arena", "private")
            for target in ("cpu", "arena", "private")
            if (source, target) not in (("cpu", "arena"), ("private", "private"))
        ),
    ],
)
def test_versions_travel_between_main_memory_and_a_gpu(
    daemon: Daemon, gpus: fake_cuda.FakeGpus, source_on: str, target_on: str
) -> None:
    full = shards.whole(0)
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        made: dict[str, Callable[[refitd.Client], Tensors]] = {
            "cpu": lambda client: shards.zeros_like(full),
            "arena": lambda client: allocated(client, full, "cuda:0"),
            "private": lambda client: private(full, 0),
        }
        given, live = made[source_on](trainer), made[target_on](engine)
        source = trainer.register_source("policy", given)
        target = engine.register_target("policy", live, replica="r")
        # two slots, or the tensors themselves; staging, and the live tensors
        wanted = {"cpu": 0, "arena": 1, "private": 2}[source_on] + {"cpu": 0, "arena": 2, "private": 1}[target_on]
        assert device_bytes(daemon).get(gpus.name(0), 0) == wanted
        pointers = [t.data_ptr() for t in live.values()]
        for version in (1, 2, 3):
            new = shards.whole(version)
            copy_into(given, new)
            with Engine(target):
                if source_on == "arena":
                    with source.lend(version):
                        report = trainer.swap("policy", version, timeout=60)
                else:
                    source.publish(version)
                    for tensor in given.values():
                        tensor.zero_()  # publish has returned: the trainer may overwrite its tensors
                    report = trainer.swap("policy", version, timeout=60)
            assert report.outcome == "committed" and report.digests == report.copies > 0
            assert shards.equal(live, new)
        assert pointers == [t.data_ptr() for t in live.values()]
        assert report.sources[0].mode == ("arena" if source_on == "arena" else "copied")
        assert gpu_of(next(iter(live.values()))) == (-1 if target_on == "cpu" else 0)
        del given, live


def test_a_version_on_a_gpu_may_be_swapped_while_it_is_published(
    daemon: Daemon, gpus: fake_cuda.FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_source, "TOLD_BYTES", 1)
    full, staging = shards.whole(1), threading.Event()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(full.items()):
            assert number != 1 or staging.wait(30)
            yield item

    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine, ThreadPoolExecutor() as pool:
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in full.items()}
        source, live = trainer.declare_source("policy", shapes, device="cuda:0"), allocated(engine, full, "cuda:0")
        with Engine(engine.register_target("policy", live, replica="r")):
            publishing = pool.submit(source.publish_from, 1, weights())
            report = engine.swap(
                "policy", 1, timeout=60, wait=30, on_progress=lambda told: told.phase == "stage" and staging.set()
            )
            publishing.result()
        assert report.outcome == "committed" and staging.is_set() and shards.equal(live, full)
        del live


def test_sharded_replicas_on_two_gpus_and_in_main_memory_get_every_byte(
    daemon: Daemon, gpus: fake_cuda.FakeGpus
) -> None:
    """One source rank on each GPU: one plan moves rows within a GPU, between two GPUs, and to main memory."""
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        sources = []
        for rank in range(2):
            mine = allocated(trainer, shards.cut(shards.whole(0), rank, 2), f"cuda:{rank}")
            described = shards.describe(mine, rank, 2)
            sources.append((trainer.register_source("policy", mine, rank=rank, world_size=2, metadata=described), mine))
        targets = []
        for replica, world, device in (("fine", 4, None), ("gpu", 1, 1), ("host", 1, None)):
            for rank in range(world):
                mine = shards.zeros_like(shards.cut(shards.whole(0), rank, world))
                if replica == "fine":
                    mine = allocated(engine, mine, f"cuda:{rank % 2}")
                elif device is not None:
                    mine = private(mine, device)
                described = shards.describe(mine, rank, world)
                target = engine.register_target(
                    "policy", mine, replica=replica, rank=rank, world_size=world, metadata=described
                )
                targets.append((target, mine, rank, world))
        with Engine(*(target for target, *_ in targets)) as running:
            for version in (1, 2):
                full = shards.whole(version)
                leases = []
                for rank, (source, mine) in enumerate(sources):
                    copy_into(mine, shards.cut(full, rank, 2))
                    leases.append(source.lend(version))
                report = trainer.swap("policy", version, timeout=60)
                assert report.outcome == "committed"
                ways = {(way.source, way.target): way for way in report.paths}
                assert ways.keys() == {("GPU", "same GPU"), ("GPU", "other GPU"), ("GPU", "main memory")}
                assert sum(way.bytes for way in ways.values()) == report.bytes
                assert {*report.gpu_paths} == {way.path for way in ways.values()}, "workers take the plan's paths"
                assert "cannot address each other" in ways["GPU", "other GPU"].reason
                for lease in leases:
                    lease.wait(20)
                for _, mine, rank, world in targets:
                    assert shards.equal(mine, shards.cut(full, rank, world) if world > 1 else full)
        assert not running.errors
        assert set(device_bytes(daemon)) == {gpus.name(0), gpus.name(1)}
        del sources, targets, mine, source, target, running


@pytest.mark.slow
@pytest.mark.real_starts
def test_only_the_worker_of_a_gpu_maps_its_memory(
    gpus: fake_cuda.FakeGpus, start_daemon: Callable[..., Daemon]
) -> None:
    daemon = start_daemon(DEADLINES, workers=2)
    workers = daemon.node_of("n0").workers
    assert len(workers) == 2
    with daemon.connect() as client:
        tensors = client.allocate({"w": ((MIB,), torch.uint8)}, device="cuda:0")

        def mappers() -> list[int]:
            return [pid for pid in workers if "memfd:fake-cuda" in Path(f"/proc/{pid}/maps").read_text()]

        eventually(lambda: len(mappers()) == 1, "one worker has mapped the arena")
        (other,) = set(workers) - set(mappers())
        assert "libtorch" not in Path(f"/proc/{other}/maps").read_text()
        assert "libtorch" not in Path(f"/proc/{daemon.pid}/maps").read_text()
        del tensors


@pytest.mark.slow
def test_processes_that_number_their_gpus_otherwise_mean_the_same_one(
    daemon: Daemon, gpus: fake_cuda.FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_VISIBLE", "1")  # as CUDA_VISIBLE_DEVICES=1 for this client alone
    with daemon.connect() as client:
        live = allocated(client, shards.whole(0), "cuda:0")
        assert device_bytes(daemon) == {gpus.name(1): 1}
        assert gpus.used(0) == 0 and gpus.used(1) == fake_cuda.PAGE
        full = shards.whole(1)
        source = client.register_source("policy", full)
        target = client.register_target("policy", live, replica="r")
        go_live(client, source, 1, target)
        assert shards.equal(live, full)
        del live


@pytest.mark.parametrize(
    ("given_on", "live_on"),
    [
        pytest.param("gpu", "cpu", marks=pytest.mark.slow),
        pytest.param("cpu", "gpu", marks=pytest.mark.slow),
        pytest.param("gpu", "arena", marks=pytest.mark.slow),
        ("gpu", "gpu"),
    ],
)
def test_what_crosses_nodes_is_read_from_and_written_to_gpus(
    gpus: fake_cuda.FakeGpus, start_daemon: Callable[..., Daemon], given_on: str, live_on: str
) -> None:
    n0 = start_daemon(DEADLINES)
    n1 = start_daemon(DEADLINES, name="n1", joins=n0.endpoint)
    eventually(lambda: n0.node_of("n1").pid > 0, "the other node has joined")
    full = shards.whole(3)
    # "wide" is converted on its way; "turned" has no two adjacent elements in memory
    full |= {"wide": torch.randn(33, 65), "turned": torch.randn(48, 40).bfloat16()}
    wanted = {**full, "wide": full["wide"].bfloat16()}
    casts = {"wide": {"cast_from": "float32"}}
    metadata = [shards.meta(name, tensor, **casts.get(name, {})) for name, tensor in wanted.items()]

    def held(client: refitd.Client, like: Tensors, on: str) -> Tensors:
        if on == "arena":
            return allocated(client, like, "cuda:0")
        found = {name: torch.zeros_like(t) for name, t in like.items()}
        found["turned"] = torch.zeros(40, 48, dtype=torch.bfloat16).T
        return {name: put_on_gpu(t, 0) for name, t in found.items()} if on == "gpu" else found

    with n0.connect() as trainer, n1.connect() as engine:
        given, live = held(trainer, full, given_on), held(engine, wanted, live_on)
        source = trainer.register_source("policy", given)
        target = engine.register_target("policy", live, replica="far", metadata=metadata)
        for node, on in (("n0", given_on), ("n1", live_on)):  # the other daemon reports its figures once a second
            if on != "cpu":
                eventually(lambda node=node: gpus.name(0) in device_bytes(n0, node), f"{node} has arenas on its GPU")
        for version in (1, 2):
            copy_into(given, full)
            go_live(trainer, source, version, target)
            assert all(torch.equal(live[name], wanted[name]) for name in wanted)
            for tensor in full.values():
                tensor.mul_(2)
            wanted = {**full, "wide": full["wide"].bfloat16()}
    gc.collect()
