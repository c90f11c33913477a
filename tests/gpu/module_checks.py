"""gpu-check of models in arenas on a GPU: adopted there, or built there in a block; versions flip under a graph."""

from __future__ import annotations

import torch
from torch import nn

import refitd
from refitd.testing import Engine
from tests.gpu.device import GPU, MIB
from tests.gpu.service_checks import running_daemon

LAYERS = 8


def _made() -> nn.Sequential:
    return nn.Sequential(*(_Layer() for _ in range(LAYERS)))


class _Layer(nn.Module):
    """A linear layer whose weight is made on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        shape = (width(), width())
        self.register_parameter(
            "weight", GPU.own(nn.Parameter(torch.randn(shape, device=GPU.device, dtype=torch.bfloat16) * 0.02))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def width() -> int:
    return 128 if GPU.is_emulated else 2048


def daemon_modules(seconds: float) -> dict[str, object]:
    """Check that a graph captured over an adopted, or a built, model reads each version after its flip."""
    nbytes = sum(param.numel() * param.element_size() for param in _made().parameters())
    GPU.empty_cache()
    figures: dict[str, object] = {"MiB": nbytes / MIB}
    with running_daemon(seconds) as daemon, daemon.connect() as client:
        model = _made()
        assert client.adopt(model).nbytes >= nbytes
        GPU.empty_cache()
        assert GPU.allocated() < nbytes, "the old memory is not given back"
        figures["pause us, adopted"] = _flipped(client, "adopted", model, seconds)
        del model
        before = GPU.allocated(resets_peak=True)
        with client.memory("built", nbytes=2 * nbytes, device="cuda:0") as placed:
            model = _made()
        assert placed.nbytes >= nbytes
        beside = GPU.allocated(peak=True) - before
        assert beside < nbytes / 2, f"{beside} bytes beside the arena"
        figures["pause us, built"] = _flipped(client, "built", model, seconds)
        figures["MiB beside the arena, built"] = beside / MIB
        del model
    GPU.empty_cache()
    return figures


def _flipped(client: refitd.Client, name: str, model: nn.Sequential, seconds: float) -> float:
    """Swap and roll back under a captured graph; return the engine's pause in microseconds."""
    x = torch.randn(16, width(), device=GPU.device, dtype=torch.bfloat16)
    with torch.no_grad():
        replay, y = GPU.capture(lambda: model(x))
        learned = _made()
        source = client.register_source(name, learned)
        target = client.register_target(name, model, replica="engine", mode="flip")
        held: dict[int, torch.Tensor] = {}

        def reads(version: int) -> None:
            replay()
            GPU.synchronize()
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
        GPU.synchronize()
    return pause_s * 1e6
