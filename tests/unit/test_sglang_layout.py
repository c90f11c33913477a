"""SGLang's adapter learns and proves a layout once where the trainer offers what the checkpoint holds."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import refitd
from refitd.adapters import sglang


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(12.0).view(4, 3))

    def load_weights(self, weights: Any) -> None:
        for _, weight in weights:
            self.w.data.copy_(weight)


@pytest.mark.parametrize(("offered", "runs"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_a_layout_is_proven_once_if_the_trainer_offers_the_checkpoints_tensors(
    offered: torch.dtype, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = types.SimpleNamespace(rank_in_group=0, world_size=1)
    context: Any = types.ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: types.SimpleNamespace(world_group=group, dp_rank=None)
    given: Any = types.ModuleType("sglang")
    given.__version__ = "0.5.23"
    for name, module in (
        ("sglang", given),
        ("sglang.srt", types.ModuleType("sglang.srt")),
        (context.__name__, context),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    learned: list[refitd.LoaderTrace] = []
    trace_loader = refitd.trace_loader

    def counted(*args: Any, **kwargs: Any) -> refitd.LoaderTrace:
        learned.append(trace_loader(*args, **kwargs))
        return learned[-1]

    monkeypatch.setattr(refitd, "trace_loader", counted)
    model = Model()
    save_file({"w": model.w.detach().clone()}, tmp_path / "model.safetensors")
    client = types.SimpleNamespace(
        tensors=lambda *_, **__: {"w": ((4, 3), offered)}, register_target=lambda *_, **given: given["metadata"]
    )
    rank = sglang.SchedulerRank(model, sglang.Settings(checkpoint=str(tmp_path)))
    described = cast(Any, rank._register(cast(Any, client)))
    assert [meta.name for meta in described] == ["w"] and len(learned) == runs
    assert all(trace.proof is not None for trace in learned)
