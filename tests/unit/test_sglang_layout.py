"""SGLang's adapter learns and verifies a layout once if the trainer offers the checkpoint's tensors."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import refitd
from refitd.adapters import sglang
from tests.support.engine_stand_ins import sglang_modules


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
    for name, module in sglang_modules(None)[0].items():
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
        tensors=lambda *_, **__: {"w": ((4, 3), offered)},
        register_target=lambda *_, **given: types.SimpleNamespace(error=None, metadata=given["metadata"]),
    )
    monkeypatch.setattr(refitd, "connect", lambda *_, **__: client)
    target: Any = sglang.SchedulerRank(model, sglang.Settings(checkpoint=str(tmp_path))).bind()
    assert [meta.name for meta in target.metadata] == ["w"] and len(learned) == runs
    assert all(trace.proof is not None for trace in learned)
