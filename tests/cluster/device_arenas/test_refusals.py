"""Refusals of daemons with GPUs; each names the tensor or GPU and gives numbers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine
from tests.support import fake_cuda, shards
from tests.support.fake_torch.device_shim import put_on_gpu
from tests.support.gpu_tensors import DEADLINES, GPU_BYTES, MIB, allocated, private


def test_memory_that_a_gpu_does_not_have_is_refused_with_numbers_and_less_works(
    daemon: Daemon, gpus: fake_cuda.FakeGpus
) -> None:
    with daemon.connect() as client:
        first = client.allocate({"w": ((GPU_BYTES - 6 * MIB,), torch.uint8)}, device="cuda:0")
        before = daemon.node().arenas
        wanted = rf"{8 * MIB} bytes asked for on GPU 0, {6 * MIB} of {GPU_BYTES} are free; free memory of the GPU"
        with pytest.raises(refitd.ArenaError, match=wanted):
            client.allocate({"w": ((8 * MIB,), torch.uint8)}, device="cuda:0")
        # two slots of 4 MiB: the first fits, and must be freed again
        tensors = {"w": put_on_gpu(torch.zeros(4 * MIB, dtype=torch.uint8), 0)}
        with pytest.raises(refitd.ArenaError, match=wanted):
            client.register_source("policy", tensors)
        assert (daemon.node().arenas, gpus.used(0)) == (before, GPU_BYTES - 6 * MIB)
        source = client.register_source("policy", tensors, slots=1)
        source.publish(1)
        assert gpus.used(0) == GPU_BYTES - 2 * MIB
        source.close()
        # the remedy that the error names
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


@pytest.mark.slow
def test_an_arena_mapped_for_reading_cannot_be_written(daemon: Daemon, gpus: fake_cuda.FakeGpus) -> None:
    with daemon.connect() as client:
        tensors = private(shards.whole(0), 0)

        def mapped() -> list[str]:
            return [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if gpus.tag in line]

        before = mapped()
        client.register_target("policy", tensors, replica="r")
        assert sorted(mapped()) == sorted([*before, "r--s"]), "the staging arena; test_hostile.py asks to write one"


@pytest.mark.slow
def test_a_worker_without_torch_for_gpus_fails_the_swap_by_name_and_the_daemon_lives(
    gpus: fake_cuda.FakeGpus, start_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as outside:
        outside.setenv("PYTHONPATH", "")  # the daemon's workers run torch without the fake driver
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
            with Engine(target), pytest.raises(refitd.RefitFailed, match="this torch has no CUDA; `pip install "):
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
