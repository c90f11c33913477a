"""gpu-check of the daemon's part: arenas on a GPU that a real daemon owns, swaps between them, a killed worker."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

import refitd
from refitd.testing import Daemon, Engine, eventually
from tests.gpu.device import GPU, MIB
from tests.gpu.rank_checks import environments, need_nvshmem

ROOT = Path(__file__).resolve().parents[2]
NOTHING: Mapping[str, str] = {}


@contextlib.contextmanager
def running_daemon(
    seconds: float, node: str = "n0", joins: str = "", service: str = "gloo", environment: Mapping[str, str] = NOTHING
) -> Iterator[Daemon]:
    """Run a daemon with its own coordinator, or with that of the daemon whose endpoint is given."""
    with tempfile.TemporaryDirectory(prefix="rfg") as folder:
        given = dict(environment)
        if importlib.util.find_spec("refitd_cli") is None:
            Path(folder, "refitd_cli").symlink_to(ROOT / "cli")  # which is installed under this name
            given["PYTHONPATH"] = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
        deadlines = f"[deadlines]\nplan_s = {seconds}\nstage_s = {seconds}\ncommit_s = {seconds}\n"
        config = deadlines + f'[transport]\nservice = "{service}"\n'
        # each worker of an emulated GPU takes seconds to import torch
        options = {"name": node, "workers": 1 if GPU.is_emulated else 2, "joins": joins, "folder": Path(folder)}
        with Daemon(config, environment=given, **options) as daemon:
            yield daemon


def used() -> int:
    """Bytes of the GPU in use by any process."""
    free, total = GPU.memory()
    return total - free


def rates(what: str, nbytes: int, seconds: float) -> dict[str, object]:
    """Return a rate and its share of the device's copy bandwidth."""
    rate, limit = nbytes / seconds / 1e9, GPU.copy_rate()
    return {f"{what} GB/s": rate, f"{what}, of device copy": rate / limit}


def daemon_arenas(seconds: float, count: int = 16) -> dict[str, object]:
    """Test two shards in arenas on the GPU: swaps, a killed worker, returned memory, refusals. Return figures."""
    from refitd.errors import ArenaError, RefitFailed

    shape = (GPU.scaled(4096), 4096)  # 32 MiB of bfloat16
    wanted = {f"layers.{i}.weight": (shape, torch.bfloat16) for i in range(count)}
    nbytes = 2 * count * shape[0] * shape[1]
    figures: dict[str, object] = {"MiB": nbytes / MIB}
    before = used()
    with running_daemon(seconds) as daemon, daemon.connect() as client:
        given, live = client.allocate(wanted, device="cuda:0"), client.allocate(wanted, device="cuda:0")
        assert used() - before >= 2 * nbytes, "the arenas are not on the GPU"
        pointers = [t.data_ptr() for t in live.values()]
        source = client.register_source("policy", given)
        target = client.register_target("policy", live, replica="engine")
        (gpu,) = client.status().nodes[0].gpus
        assert gpu.arena_bytes >= 3 * nbytes, gpu

        def fill(tensors: dict[str, torch.Tensor], version: int) -> None:
            for i, tensor in enumerate(tensors.values()):
                tensor.fill_(version + i / 8)

        def serves(tensors: dict[str, torch.Tensor], version: int) -> bool:
            return all(bool((t == version + i / 8).all()) for i, t in enumerate(tensors.values()))

        def swap(version: int) -> float:
            with source.lend(version), Engine(target):
                return client.swap("policy", version, timeout=seconds).stage_s

        took = []
        for version in range(1, 5):
            fill(given, version)
            took.append(swap(version))
            assert serves(live, version), f"version {version} is not what was lent"
        figures["first stage s"] = took[0]
        figures |= rates("stage", nbytes, statistics.median(took[1:]))

        # a worker dies while it stages: the old version and the arenas survive, and a fresh worker continues
        fill(given, 5)
        workers = client.status().nodes[0].workers
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        with source.lend(5):
            import threading

            failed: list[RefitFailed] = []

            def doomed() -> None:
                try:
                    client.swap("policy", 5, timeout=seconds)
                except RefitFailed as exc:
                    failed.append(exc)

            thread = threading.Thread(target=doomed)
            thread.start()
            eventually(lambda: client.status().models[0].swap is not None, "the swap has begun", seconds)
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            thread.join(seconds)
        assert failed and "SIGKILL" in str(failed[0]), failed
        assert serves(live, 4), "an aborted swap has changed the live tensors"
        fill(given, 6)
        swap(6)
        assert serves(live, 6) and pointers == [t.data_ptr() for t in live.values()]

        # a snapshot in main memory for the same engine, and private CUDA tensors from the same trainer
        source.close()
        host = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in wanted.items()}
        fill(host, 7)
        source = client.register_source("policy", host, slots=1)
        source.publish(7)
        with Engine(target):
            report = client.swap("policy", 7, timeout=seconds)
        assert serves(live, 7)
        figures |= rates("from main memory", nbytes, report.stage_s)
        own = {
            name: GPU.own(torch.zeros(shape, dtype=dtype, device=GPU.device)) for name, (shape, dtype) in wanted.items()
        }
        private = client.register_target("policy", own, replica="private")
        with Engine(target, private):
            source.publish(8)
            client.swap("policy", 8, timeout=seconds)
        assert serves(own, 7) and private.version == 8

        checked = client.verify("policy", timeout=seconds)
        assert checked.outcome == "proven", checked
        figures |= rates("verified", 2 * nbytes, checked.seconds)
        live["layers.1.weight"][3, 5] += 1
        differing = [d for m in client.verify("policy", timeout=seconds).members for d in m.differences]
        # an engine that flips has no second copy of its version, so a block is named, not an element
        assert [d.parameter for d in differing] == ["layers.1.weight"], differing

        free = GPU.memory()[0]
        try:
            client.allocate({"w": ((free + 64 * MIB,), torch.uint8)}, device="cuda:0")
            raise AssertionError("more than there is was given")
        except ArenaError as exc:
            assert "bytes asked for on GPU 0" in str(exc), exc
        try:
            client.allocate({"w": ((8,), torch.uint8)}, device=f"cuda:{GPU.count()}")
            raise AssertionError("a GPU that is not there was given")
        except ArenaError as exc:
            assert "there is no GPU" in str(exc), exc
        del given, live, own
    GPU.empty_cache()
    eventually(lambda: used() - before < 256 * MIB, "the daemon's memory of the GPU is free again", 30.0)
    return figures


def daemon_crossing(seconds: float, service: str, count: int = 8) -> dict[str, object]:
    """Test two daemons on one GPU, with arenas at both ends, over a service; one tensor is converted on its way."""
    if service == "nvshmem":
        need_nvshmem()
    shape = (GPU.scaled(4096), 4096)
    given_types = {f"layers.{i}.weight": (shape, torch.bfloat16) for i in range(count)} | {
        "wide": (shape, torch.float32)
    }
    live_types = {name: (shape, torch.bfloat16) for name in given_types}
    metadata = [
        refitd.ParameterMetadata(
            name=name,
            shape=shape,
            dtype=torch.bfloat16,
            element_size=2,
            owner_rank=0,
            cast_from="float32" if name == "wide" else None,
        )
        for name in live_types
    ]
    nbytes = 2 * len(live_types) * shape[0] * shape[1]
    figures: dict[str, object] = {"MiB": nbytes / MIB}
    here, there = environments(service)
    with (
        running_daemon(seconds, "n0", "", service, here) as first,
        running_daemon(seconds, "n1", first.endpoint, service, there) as second,
        first.connect() as trainer,
        second.connect() as engine,
    ):
        given = trainer.allocate(given_types, device="cuda:0")
        live = engine.allocate(live_types, device="cuda:0")
        source = trainer.register_source("policy", given)
        target = engine.register_target("policy", live, replica="engine", metadata=metadata)
        took = []
        for version in range(1, 5):
            for tensor in given.values():
                tensor.normal_(generator=torch.Generator(GPU.device).manual_seed(version))
            with source.lend(version), Engine(target):
                report = trainer.swap("policy", version, timeout=seconds)
            took.append(report.stage_s)
            assert all(torch.equal(live[name], tensor.bfloat16()) for name, tensor in given.items()), version
        (link,) = trainer.status().links
        assert (link.service, link.state) == (service, "up"), link
        figures |= rates("stage", nbytes, statistics.median(took[1:]))
        del given, live
    GPU.empty_cache()
    return figures


def empty_mxfp8(shape: tuple[int, ...], is_swizzled: bool) -> refitd.MXFP8Buffer:
    made = refitd.MXFP8Buffer.empty(shape, is_swizzled=is_swizzled, device=GPU.device)
    GPU.own(made.data)
    GPU.own(made.scale)
    return made


def daemon_mxfp8(seconds: float, count: int = 8) -> dict[str, object]:
    """Test engines with MXFP8 tensors, row-major and swizzled, which the GPU converts from bfloat16 while staging."""
    shape = (GPU.scaled(4096), 4096)
    nbytes = 2 * count * shape[0] * shape[1]
    figures: dict[str, object] = {"MiB": nbytes / MIB}
    with running_daemon(seconds) as daemon, daemon.connect() as client:
        given = client.allocate({f"layers.{i}.weight": (shape, torch.bfloat16) for i in range(count)}, device="cuda:0")
        source = client.register_source("policy", given)
        held = {
            replica: {name: empty_mxfp8(shape, is_swizzled=replica == "swizzled") for name in given}
            for replica in ("rows", "swizzled")
        }
        targets = [client.register_target("policy", live, replica=replica) for replica, live in held.items()]
        took = []
        for version in range(1, 4):
            for i, tensor in enumerate(given.values()):
                tensor.normal_(generator=torch.Generator(GPU.device).manual_seed(100 * version + i))
            with source.lend(version), Engine(*targets):
                took.append(client.swap("policy", version, timeout=seconds).stage_s)
            for replica, live in held.items():
                for name, tensor in given.items():
                    once = empty_mxfp8(shape, is_swizzled=replica == "swizzled")
                    once.quantize(tensor)
                    same = torch.equal(once.data, live[name].data) and torch.equal(once.scale, live[name].scale)
                    assert same, f"{replica} {name}"
        figures |= rates("stage and convert", 2 * nbytes, statistics.median(took[1:]))
        checked = client.verify("policy", timeout=seconds)
        assert checked.outcome == "proven", checked
        del given, held, live, once, tensor
    GPU.empty_cache()
    return figures


CHECKS: dict[str, Callable[[float], dict[str, object]]] = {
    "daemon-arenas": daemon_arenas,
    "daemon-mxfp8": daemon_mxfp8,
    "daemon-crossing": partial(daemon_crossing, service="gloo"),
    "daemon-nccl": partial(daemon_crossing, service="nccl"),
    "daemon-nvshmem": partial(daemon_crossing, service="nvshmem"),
}
