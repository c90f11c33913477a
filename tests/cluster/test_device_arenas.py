"""Arenas on GPUs through real daemons and workers; the GPUs are memory files behind a driver made for tests."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import refitd
from refitd.buffers.cuda import MappedDeviceArena
from refitd.testing import Daemon, Engine, RunningSwap, eventually, stopped
from tests.support import fake_cuda, shards
from tests.support.fake_torch.device_shim import gpu_of, put_on_gpu

MIB = 1 << 20
GPU_BYTES = 256 * MIB
# workers import torch with their first arena on a GPU
DEADLINES = "[deadlines]\nplan_s = 60.0\nstage_s = 60.0\ncommit_s = 20.0\n"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> fake_cuda.FakeGpus:
    return fake_cuda.install(monkeypatch, GPU_BYTES)


@pytest.fixture
def daemon(gpus: fake_cuda.FakeGpus, start_daemon: Callable[..., Daemon]) -> Iterator[Daemon]:
    daemon = start_daemon(DEADLINES)
    yield daemon
    # what detached sources hold goes with the daemon; this process may have kept nothing of its own
    assert daemon.stop() == []
    gc.collect()
    assert gpus.used() == 0


def allocated(client: refitd.Client, like: Tensors, device: str) -> Tensors:
    found = client.allocate({name: (tuple(t.shape), t.dtype) for name, t in like.items()}, device=device)
    for tensor in found.values():
        tensor.zero_()
    return found


def described(name: str, tensor: torch.Tensor) -> refitd.ParameterMetadata:
    """A whole tensor."""
    return refitd.ParameterMetadata(
        name=name,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        element_size=tensor.element_size(),
        owner_rank=0,
    )


def copy_into(tensors: Tensors, values: Tensors) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def private(like: Tensors, gpu: int) -> Tensors:
    return {name: put_on_gpu(torch.zeros_like(t), gpu) for name, t in like.items()}


def device_bytes(daemon: Daemon, node: str = "") -> dict[str, int]:
    found = daemon.node_of(node) if node else daemon.node()
    return {gpu.device: gpu.arenas for gpu in found.gpus}


# --- where arenas go ----------------------------------------------------------------------------------------


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
                        tensor.zero_()  # the promise of publish
                    report = trainer.swap("policy", version, timeout=60)
            assert report.outcome == "committed" and report.digests == report.copies > 0
            assert shards.equal(live, new)
        assert pointers == [t.data_ptr() for t in live.values()]
        assert report.sources[0].way == ("arena" if source_on == "arena" else "copied")
        assert gpu_of(next(iter(live.values()))) == (-1 if target_on == "cpu" else 0)
        del given, live


def test_sharded_replicas_on_two_gpus_and_in_main_memory_get_every_byte(
    daemon: Daemon, gpus: fake_cuda.FakeGpus
) -> None:
    """One source rank on each GPU, so that rows go within a GPU, between two, and to main memory, in one plan."""
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
                assert trainer.swap("policy", version, timeout=60).outcome == "committed"
                for lease in leases:
                    lease.wait(20)
                for _, mine, rank, world in targets:
                    assert shards.equal(mine, shards.cut(full, rank, world) if world > 1 else full)
        assert not running.errors
        assert set(device_bytes(daemon)) == {gpus.name(0), gpus.name(1)}
        del sources, targets, mine, source, target, running


@pytest.mark.slow
def test_padding_is_filled_on_a_gpu(daemon: Daemon) -> None:
    def described(rows: int, fill: float | None) -> list[refitd.ParameterMetadata]:
        tile = refitd.Tile("w", offset=(0, 0), size=(5, 8), local_offset=0, local_stride=(8, 1))
        fields = {"dtype": torch.bfloat16, "element_size": 2, "owner_rank": 0, "tiles": (tile,), "fill": fill}
        return [refitd.ParameterMetadata(name="w", shape=(rows, 8), **fields)]

    full = {"w": torch.randn(5, 8).bfloat16()}
    with daemon.connect() as client:
        source = client.register_source("policy", full, metadata=described(5, None))
        live = allocated(client, {"w": torch.zeros(8, 8).bfloat16()}, "cuda:0")
        target = client.register_target("policy", live, replica="r", metadata=described(8, 1.5))
        source.publish(1)
        with Engine(target):
            client.swap("policy", 1, timeout=60)
        assert torch.equal(live["w"][:5], full["w"])
        assert torch.equal(live["w"][5:], torch.full((3, 8), 1.5).bfloat16())
        del live


@pytest.mark.slow
def test_only_the_worker_of_a_gpu_maps_its_memory(daemon: Daemon, gpus: fake_cuda.FakeGpus) -> None:
    workers = daemon.node_of("n0").workers
    assert len(workers) == 2
    with daemon.connect() as client:
        tensors = client.allocate({"w": ((MIB,), torch.uint8)}, device="cuda:0")

        def mappers() -> list[int]:
            return [pid for pid in workers if "fake-cuda" in Path(f"/proc/{pid}/maps").read_text()]

        eventually(lambda: len(mappers()) == 1, "one worker has mapped the arena", timeout=30)
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
        source.publish(1)
        with Engine(target):
            client.swap("policy", 1, timeout=60)
        assert shards.equal(live, full)
        del live


# --- what is refused ----------------------------------------------------------------------------------------


def test_memory_that_a_gpu_does_not_have_is_refused_with_numbers_and_less_works(
    daemon: Daemon, gpus: fake_cuda.FakeGpus
) -> None:
    with daemon.connect() as client:
        first = client.allocate({"w": ((GPU_BYTES - 6 * MIB,), torch.uint8)}, device="cuda:0")
        before = daemon.node().arenas
        wanted = rf"{8 * MIB} bytes asked for on GPU 0, {6 * MIB} of {GPU_BYTES} are free; free memory of the GPU"
        with pytest.raises(refitd.ArenaError, match=wanted):
            client.allocate({"w": ((8 * MIB,), torch.uint8)}, device="cuda:0")
        # two slots of 4 MiB: the first would fit, and is not kept
        tensors = {"w": put_on_gpu(torch.zeros(4 * MIB, dtype=torch.uint8), 0)}
        with pytest.raises(refitd.ArenaError, match=wanted):
            client.register_source("policy", tensors)
        assert (daemon.node().arenas, gpus.used(0)) == (before, GPU_BYTES - 6 * MIB)
        source = client.register_source("policy", tensors, slots=1)
        source.publish(1)
        assert gpus.used(0) == GPU_BYTES - 2 * MIB
        source.close()
        # what the error offers
        assert client.register_source("policy", tensors, device="cpu").member
        assert gpus.used(0) == GPU_BYTES - 6 * MIB
        client.allocate({"w": ((8 * MIB,), torch.uint8)}, device="cuda:1")
        del first


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_refused_by_whoever_does_not_see_it(
    gpus: fake_cuda.FakeGpus, start_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_VISIBLE", "0")
    daemon = start_daemon(DEADLINES)
    monkeypatch.setenv("FAKE_CUDA_VISIBLE", "0,1")
    wanted = {"w": ((8,), torch.uint8)}
    with daemon.connect() as client:
        with pytest.raises(refitd.ArenaError, match="there is no GPU 7: this process sees 2"):
            client.allocate(wanted, device="cuda:7")
        with pytest.raises(refitd.ArenaError, match=rf"process {daemon.pid} does not see {gpus.name(1)}"):
            client.allocate(wanted, device="cuda:1")
        for nonsense in ("tpu:0", "mps"):
            with pytest.raises(refitd.RefusedError, match=nonsense):
                client.allocate(wanted, device=nonsense)
        monkeypatch.setenv("FAKE_CUDA_VISIBLE", "")
        with pytest.raises(refitd.ArenaError, match="no GPU is visible: check CUDA_VISIBLE_DEVICES"):
            client.allocate(wanted, device="cuda:0")
        assert daemon.node().arenas == 0


@pytest.mark.slow
def test_tensors_in_several_places_are_refused_by_name_unless_main_memory_is_asked_for(daemon: Daemon) -> None:
    full = shards.whole(1)
    mixed = {name: put_on_gpu(t.clone(), 0) if "fc1" in name else t.clone() for name, t in full.items()}
    with daemon.connect() as client:
        for register in (
            lambda **more: client.register_source("policy", mixed, **more),
            lambda **more: client.register_target("policy", mixed, replica="r", **more),
        ):
            with pytest.raises(
                refitd.RefusedError, match=r"embedding\.weight in main memory, layers\.0\.fc1\.weight on"
            ):
                register()
        assert daemon.node().arenas == 0
        client.register_source("policy", mixed, device="cpu").publish(1)
        live = shards.zeros_like(full)
        with Engine(client.register_target("policy", live, replica="r")):
            client.swap("policy", 1, timeout=60)
        assert shards.equal(live, full)


def cast_to(dtype: torch.dtype, cast_from: str) -> list[refitd.ParameterMetadata]:
    fields = {"dtype": dtype, "element_size": dtype.itemsize, "owner_rank": 0, "cast_from": cast_from}
    return [refitd.ParameterMetadata(name="w", shape=(40, 8), resolved_name="w", **fields)]


@pytest.mark.parametrize("live_on", ["arena", pytest.param("private", marks=pytest.mark.slow)])
def test_what_is_live_on_a_gpu_is_verified(daemon: Daemon, live_on: str) -> None:
    full = shards.whole(4)
    with daemon.connect() as client:
        live = allocated(client, full, "cuda:0") if live_on == "arena" else private(full, 0)
        source = client.register_source("policy", full)
        target = client.register_target("policy", live, replica="r")
        source.publish(1)
        with Engine(target):
            client.swap("policy", 1, timeout=60)
        report = client.verify("policy", timeout=60)
        assert report.outcome == "proven", report
        name = "layers.0.fc1.weight"
        live[name].view(torch.int16)[7, 5] ^= 8
        (member,) = client.verify("policy", timeout=60).members
        (found,) = member.differences
        assert (member.state, found.parameter) == ("differs", name)
        # a staging arena on a GPU is compared by the workers, whose live tensors these are; a client cannot read it
        assert found.slice == ("[7, 5]" if live_on == "arena" else "[0:96, :]")
        del live


@pytest.mark.slow
@pytest.mark.parametrize(("given_on", "live_on"), [("cpu", "gpu"), ("gpu", "cpu"), ("gpu", "gpu")])
def test_declared_casts_are_made_at_a_gpu(daemon: Daemon, given_on: str, live_on: str) -> None:
    full = {"w": torch.randn(40, 8)}
    given, live = {"w": full["w"].clone()}, {"w": torch.zeros(40, 8).bfloat16()}
    for tensors, on in ((given, given_on), (live, live_on)):
        if on == "gpu":
            put_on_gpu(tensors["w"], 0)
    with daemon.connect() as client:
        source = client.register_source("policy", given)
        target = client.register_target("policy", live, replica="r", metadata=cast_to(torch.bfloat16, "float32"))
        source.publish(1)
        with Engine(target):
            assert client.swap("policy", 1, timeout=60).digests > 0
        assert torch.equal(live["w"], full["w"].bfloat16())


@pytest.mark.slow
def test_private_memory_is_pulled_into_a_gpu(daemon: Daemon) -> None:
    full = shards.whole(2)
    full |= {"wide": torch.randn(40, 8)}
    wanted = {**full, "wide": full["wide"].bfloat16()}
    cast = dataclasses.replace(described("wide", wanted["wide"]), cast_from="float32")
    metadata = [cast if name == "wide" else described(name, tensor) for name, tensor in wanted.items()]
    with daemon.connect() as client:
        source = client.register_source("policy", full, pull=True)
        live = allocated(client, wanted, "cuda:0")
        target = client.register_target("policy", live, replica="r", metadata=metadata)
        with Engine(target), source.lend(1):
            report = client.swap("policy", 1, timeout=60)
        assert [s.way for s in report.sources] == ["pulled"]
        assert all(torch.equal(live[name], wanted[name]) for name in wanted)
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
    eventually(lambda: n0.node_of("n1").pid > 0, "the other node has joined", timeout=30)
    full = shards.whole(3)
    # "wide" is converted on its way, "turned" has no two elements beside each other
    full |= {"wide": torch.randn(33, 65), "turned": torch.randn(48, 40).bfloat16()}
    wanted = {**full, "wide": full["wide"].bfloat16()}
    cast = dataclasses.replace(described("wide", wanted["wide"]), cast_from="float32")
    metadata = [cast if name == "wide" else described(name, tensor) for name, tensor in wanted.items()]

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
        for node, on in (("n0", given_on), ("n1", live_on)):  # the other daemon's figures come once a second
            if on != "cpu":
                eventually(lambda node=node: gpus.name(0) in device_bytes(n0, node), f"{node} has arenas on its GPU")
        for version in (1, 2):
            copy_into(given, full)
            source.publish(version)
            with Engine(target):
                assert trainer.swap("policy", version, timeout=60).outcome == "committed"
            assert all(torch.equal(live[name], wanted[name]) for name in wanted)
            for tensor in full.values():
                tensor.mul_(2)
            wanted = {**full, "wide": full["wide"].bfloat16()}
    gc.collect()


@pytest.mark.slow
def test_an_arena_mapped_for_reading_cannot_be_written(daemon: Daemon, gpus: fake_cuda.FakeGpus) -> None:
    with daemon.connect() as client:
        tensors = private(shards.whole(0), 0)
        target = client.register_target("policy", tensors, replica="r")
        staging = target._staging
        assert isinstance(staging, MappedDeviceArena) and not staging.writable
        line = next(s for s in Path("/proc/self/maps").read_text().splitlines() if f"{staging.address:x}-" in s)
        assert line.split()[1] == "r--s" and gpus.tag in line
        with pytest.raises(refitd.RefusedError, match="for reading only"):
            client._connection.map_arena(1, write=True)
        del staging


# --- deaths -------------------------------------------------------------------------------------------------


class Fleet:
    """A trainer in main memory, an engine with live tensors on a GPU, serving version 1."""

    def __init__(self, daemon: Daemon, elements: int = 8 * MIB) -> None:
        self.daemon = daemon
        self.trainer, self.engine = daemon.connect("trainer"), daemon.connect("engine")
        self.full = {"w": torch.zeros(elements, dtype=torch.bfloat16)}
        self.live = allocated(self.engine, self.full, "cuda:0")
        self.source = self.trainer.register_source("policy", self.full)
        self.target = self.engine.register_target("policy", self.live, replica="r")
        self.swap(1)

    def publish(self, version: int) -> None:
        self.full["w"].fill_(version)
        self.source.publish(version)

    def swap(self, version: int) -> None:
        self.publish(version)
        with Engine(self.target):
            assert self.trainer.swap("policy", version, timeout=60).outcome == "committed"
        assert self.serves(version)

    def serves(self, version: int) -> bool:
        return bool((self.live["w"] == version).all())

    def gpu_worker(self) -> int:
        pids = self.daemon.node_of("n0").workers
        (found,) = (pid for pid in pids if "fake-cuda" in Path(f"/proc/{pid}/maps").read_text())
        return found

    def close(self) -> None:
        self.live.clear()
        self.trainer.close()
        self.engine.close()


def test_a_worker_that_dies_while_it_stages_loses_nothing_and_its_successor_takes_over(daemon: Daemon) -> None:
    fleet = Fleet(daemon)
    at = fleet.live["w"].data_ptr()
    fleet.publish(2)
    victim = fleet.gpu_worker()
    with stopped((victim,)):
        swap = RunningSwap(daemon.connect(), "policy", 2, timeout=60)
        swap.wait_phase("stage")
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(refitd.RefitFailed, match="was killed by SIGKILL while staging") as failed:
            swap.result()
    assert failed.value.report is not None and failed.value.report.outcome == "aborted"
    assert fleet.serves(1) and fleet.target.version == 1
    fleet.swap(3)
    assert fleet.gpu_worker() != victim and fleet.live["w"].data_ptr() == at
    fleet.close()


@pytest.mark.slow
def test_an_abort_ends_the_worker_and_the_next_swap_has_a_fresh_one(daemon: Daemon) -> None:
    fleet = Fleet(daemon)
    fleet.publish(2)
    victim = fleet.gpu_worker()
    with stopped((victim,)):
        swap = RunningSwap(daemon.connect(), "policy", 2, timeout=60)
        swap.wait_phase("stage")
        with daemon.connect() as operator:
            operator.abort("policy", "a test")
        with pytest.raises(refitd.RefitFailed, match="a test"):
            swap.result()
    assert fleet.serves(1)
    fleet.swap(3)
    assert fleet.gpu_worker() != victim
    fleet.close()


@pytest.mark.slow
def test_a_worker_that_dies_while_it_commits_is_replaced_and_the_commit_is_done(daemon: Daemon) -> None:
    fleet = Fleet(daemon)
    fleet.publish(2)
    swap = RunningSwap(daemon.connect(), "policy", 2, timeout=60)
    eventually(lambda: fleet.target.pending == 2, "the version is decided", timeout=60)
    victim = fleet.gpu_worker()
    with stopped((victim,)), Engine(fleet.target):
        eventually(lambda: fleet.target.pending == 2, "the engine stands still")
        os.kill(victim, signal.SIGKILL)
        assert swap.result(60).outcome == "committed"
    assert fleet.serves(2)
    fleet.close()


def test_a_client_that_is_killed_gives_its_memory_of_the_gpu_back(daemon: Daemon, gpus: fake_cuda.FakeGpus) -> None:
    def descriptors() -> list[str]:
        """What the daemon has open, apart from connections of clients that come and go."""
        links = []
        for fd in Path(f"/proc/{daemon.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(fd))
        return sorted(link for link in links if "memfd" in link and "permits" not in link)

    assert descriptors() == []
    program = f"""
        import sys, time, torch, refitd
        client = refitd.connect({str(daemon.directory)!r})
        live = client.allocate({{"w": (({20 * MIB},), torch.uint8)}}, device="cuda:1")
        client.register_target("policy", live, replica="r")
        print("ready", flush=True)
        time.sleep(600)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        assert gpus.used(1) == 40 * MIB and gpus.used(0) == 0
        assert daemon.node().gpus[0].arena_bytes == 40 * MIB
        assert len(descriptors()) == 2
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    eventually(lambda: gpus.used() == 0, "the memory is free")
    eventually(lambda: descriptors() == [], "no descriptor is left")
    assert daemon.node().gpus == ()


@pytest.mark.slow
def test_a_trainer_that_leaves_keeps_its_version_on_the_gpu(daemon: Daemon, gpus: fake_cuda.FakeGpus) -> None:
    full = shards.whole(5)
    trainer = daemon.connect("trainer")
    given = private(full, 0)
    copy_into(given, full)
    trainer.register_source("policy", given).publish(1)
    trainer.close()
    with daemon.connect("engine") as engine:
        live = shards.zeros_like(full)
        with Engine(engine.register_target("policy", live, replica="r")):
            engine.swap("policy", 1, timeout=60)
        assert shards.equal(live, full)
        # its slots go when its rank registers again
        assert gpus.used(0) == 2 * fake_cuda.PAGE
        engine.register_source("policy", shards.whole(6)).publish(2)
        eventually(lambda: gpus.used(0) == 0, "the old slots are gone")


@pytest.mark.slow
def test_a_worker_without_torch_for_gpus_fails_the_swap_by_name_and_the_daemon_lives(
    gpus: fake_cuda.FakeGpus, start_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as outside:
        outside.setenv("PYTHONPATH", "")  # the daemon's workers have this machine's torch as it is
        daemon = start_daemon(DEADLINES)
    if torch.version.cuda is not None:
        pytest.skip("this machine's torch is built with CUDA")
    full = shards.whole(1)
    with daemon.connect() as client:
        live = allocated(client, full, "cuda:0")
        source = client.register_source("policy", full)
        target = client.register_target("policy", live, replica="r")
        source.publish(1)
        for _ in range(2):
            with Engine(target), pytest.raises(refitd.RefitFailed, match=r"this torch has no CUDA; `pip install torch"):
                client.swap("policy", 1, timeout=60)
        assert not any(t.any() for t in live.values())
        assert daemon.is_running
        del live


@pytest.mark.slow
def test_a_daemon_without_a_driver_says_so_and_goes_on(
    gpus: fake_cuda.FakeGpus, start_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as outside:
        outside.delenv("LD_LIBRARY_PATH")
        daemon = start_daemon()
    if "libcuda.so" in subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout:
        pytest.skip("this machine has a driver of its own")
    with daemon.connect() as client:
        with pytest.raises(refitd.ArenaError, match="there is no CUDA driver here"):
            client.allocate({"w": ((8,), torch.uint8)}, device="cuda:0")
        assert client.allocate({"w": ((8,), torch.uint8)})["w"].numel() == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("live_on", "is_swizzled", "on_send"),
    [("private", False, False), ("private", True, True), ("arena", True, False), ("arena", True, True)],
)
def test_mxfp8_is_made_where_the_tensors_are(
    daemon: Daemon, gpus: fake_cuda.FakeGpus, live_on: str, is_swizzled: bool, on_send: bool
) -> None:
    shape = (192, 320)
    full = {"w": torch.randn(shape).bfloat16(), "norm": torch.randn(7).bfloat16()}
    if on_send:  # its slots, with data and scales in them, are there then, too
        full = {name: put_on_gpu(tensor, 0) for name, tensor in full.items()}
    with daemon.connect() as client:
        source = client.register_source("policy", full, mxfp8=refitd.MXFP8Offer(("w",)) if on_send else None)
        targets, held = [], []
        for device in (None, "cpu"):
            made = refitd.MXFP8Buffer.empty(shape, is_swizzled=is_swizzled)
            data, scale, norm = made.data, made.scale, torch.zeros(7).bfloat16()
            if live_on == "arena":
                room = allocated(client, {"d": data, "s": scale, "norm": norm}, "cuda:0")
                data, scale, norm = room["d"], room["s"], room["norm"]
            else:
                data, scale, norm = (put_on_gpu(t, 0) for t in (data, scale, norm))
            live = {"w": refitd.MXFP8Buffer(data, scale), "norm": norm}
            held.append((data, scale, norm))
            ways = {"device": device, "convert_on_send": on_send}
            targets.append(client.register_target("policy", live, replica=f"r{device}", **ways))
        # the staging arena of the first one, and what was allocated
        assert device_bytes(daemon) == {gpus.name(0): 1 + 2 * (live_on == "arena") + 2 * on_send}
        for version in (1, 2):
            full["w"].mul_(3)
            source.publish(version)
            with Engine(*targets):
                report = client.swap("policy", version, timeout=60)
            assert report.converted_bytes == 2 * 192 * (10 if on_send else 2 * 320)
            once = refitd.MXFP8Buffer.empty(shape, is_swizzled=is_swizzled)
            once.quantize(full["w"])
            for data, scale, norm in held:
                assert torch.equal(data, once.data) and torch.equal(scale, once.scale)
                assert torch.equal(norm, full["norm"])
        assert client.verify("policy", timeout=60).outcome == "proven"
    gc.collect()
