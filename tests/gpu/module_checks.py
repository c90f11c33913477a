"""gpu-check of models in arenas on a GPU: adopted there, or built there in a block; versions flip under a graph."""

from __future__ import annotations

import torch
from torch import nn

import refitd
from refitd.testing import Engine
from tests.gpu.service_checks import MIB, running_daemon

WIDTH, LAYERS = 2048, 8


def _made() -> nn.Sequential:
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, **kind) for _ in range(LAYERS)))  # type: ignore[arg-type]


def daemon_modules(seconds: float) -> dict[str, object]:
    """Check that a graph captured over an adopted, or a built, model reads each version after its flip."""
    torch.cuda.init()
    nbytes = sum(param.numel() * param.element_size() for param in _made().parameters())
    torch.cuda.empty_cache()
    figures: dict[str, object] = {"MiB": nbytes / MIB}
    with running_daemon(seconds) as daemon, daemon.connect() as client:
        model = _made()
        assert client.adopt(model).nbytes >= nbytes
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() < nbytes, "the old memory is not given back"
        figures["pause us, adopted"] = _flipped(client, "adopted", model, seconds)
        del model
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with client.memory("built", nbytes=2 * nbytes, device="cuda:0") as placed:
            model = _made()
        assert placed.nbytes >= nbytes
        beside = torch.cuda.max_memory_allocated() - before
        assert beside < nbytes / 2, f"{beside} bytes beside the arena"
        figures["pause us, built"] = _flipped(client, "built", model, seconds)
        figures["MiB beside the arena, built"] = beside / MIB
        del model
    torch.cuda.empty_cache()
    return figures


def _flipped(client: refitd.Client, name: str, model: nn.Sequential, seconds: float) -> float:
    """Swap and roll back under a captured graph; return the engine's pause in microseconds."""
    x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            y = model(x)
        learned = _made()
        source = client.register_source(name, learned)
        target = client.register_target(name, model, replica="engine", mode="flip")
        held: dict[int, torch.Tensor] = {}

        def reads(version: int) -> None:
            captured.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, held[version]), f"version {version}: the replay reads other weights"

        with Engine(target):
            for version in (1, 2, 3):
                for param in learned.parameters():
                    param.normal_(0, 0.02)
                held[version] = learned(x).clone()
                source.publish(version)
                client.swap(name, version, timeout=seconds)
                reads(version)
            assert client.rollback(name, timeout=seconds).bytes == 0
            reads(2)
        checked = client.verify(name, timeout=seconds)
        assert checked.outcome == "proven", checked
        pause_s = target.last_pause_s
        target.close()
        source.close()
        torch.cuda.synchronize()
    return pause_s * 1e6
