"""An adapter that vLLM loads from memory, with fakes for vLLM; scripts/try-engines runs it with vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import refitd
from refitd.adapters.vllm import lora, seams

NAMES = ("layers.0.q_proj.lora_A.weight", "layers.0.q_proj.lora_B.weight")
OFFERED = {NAMES[0]: ((2, 8), torch.float32), NAMES[1]: ((8, 2), torch.float32)}


class Loaded:
    """As vLLM's LoRAModel."""

    def __init__(self, tensors: dict[str, torch.Tensor], where: str) -> None:
        self.tensors, self.where = tensors, where

    @classmethod
    def from_local_checkpoint(cls, lora_dir: str, expected: set[str], peft_helper: Any, **given: Any) -> Loaded:
        return cls({}, f"disk {given['lora_model_id']}")

    @classmethod
    def from_lora_tensors(cls, tensors: dict[str, torch.Tensor], peft_helper: Any, **given: Any) -> Loaded:
        return cls(tensors, f"memory {given['lora_model_id']}")


class Manager:
    """As vLLM's WorkerLoRAManager."""

    def __init__(self) -> None:
        self.lora_config = SimpleNamespace(lora_dtype=torch.bfloat16)
        self._lora_model_cls: type[Loaded] = Loaded
        self.removed: list[int] = []
        self.problem = ""

    def create_lora_manager(self, model: torch.nn.Module, vllm_config: object) -> torch.nn.Module:
        return model

    def _load_adapter(self, request: Any) -> None:
        if self.problem:
            raise ValueError(self.problem)

    def load(self, folder: Path, number: int) -> Loaded:
        return self._lora_model_cls.from_local_checkpoint(
            str(folder), set(), None, lora_model_id=number, moe_ep_spec=None
        )

    def remove_adapter(self, number: int) -> None:
        self.removed.append(number)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    request = ModuleType("vllm.lora.request")
    vars(request)["LoRARequest"] = lambda name, number, folder: folder
    for name in ("vllm", "vllm.lora"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    return Manager()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "adapter"
    made.mkdir()
    save_file({name: torch.ones(shape) for name, (shape, _) in OFFERED.items()}, made / "adapter_model.safetensors")
    return made


def test_a_version_goes_live_when_vllm_loads_the_adapter_again(manager: Manager, folder: Path, tmp_path: Path) -> None:
    model = seams._found_again(Manager.create_lora_manager)(manager, torch.nn.Module(), None)
    held = lora.HeldAdapter(model, str(folder))
    held.check_offered(OFFERED)
    assert {tensor.dtype for tensor in held.tensors.values()} == {torch.bfloat16}
    (tmp_path / "link").symlink_to(folder)
    first = manager.load(tmp_path / "link", 7)
    assert first.where == "memory 7" and manager.load(tmp_path, 8).where == "disk 8"
    first.tensors[NAMES[1]].mul_(4)  # vLLM merges the scaling in place
    assert (held.tensors[NAMES[1]] == 1).all()
    held.serve(None)
    assert manager.removed == []  # the loaded adapter is up to date
    held.tensors[NAMES[0]].fill_(2)
    held.serve(1)
    held.serve(1)
    assert manager.removed == [7]
    assert (manager.load(folder, 7).tensors[NAMES[0]] == 2).all()


def test_what_an_engine_cannot_serve_is_refused_by_name(manager: Manager, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(refitd.RefusedError, match="takes no adapters: start it with --enable-lora"):
        lora.HeldAdapter(torch.nn.Module(), str(folder))
    model = seams._found_again(Manager.create_lora_manager)(manager, torch.nn.Module(), None)
    manager.problem = "LoRA rank 64 is greater than max_lora_rank 16"
    with pytest.raises(refitd.RefusedError, match=r"adapter in .* cannot be served: LoRA rank 64 is greater"):
        lora.HeldAdapter(model, str(folder))
    manager.problem = ""
    with pytest.raises(refitd.RefusedError, match=r"adapter_model\.safetensors does not exist"):
        lora.HeldAdapter(model, str(tmp_path))
    held = lora.HeldAdapter(model, str(folder))
    with pytest.raises(refitd.RefusedError, match=r"the trainer offers no layers\.0\.q_proj\.lora_B"):
        held.check_offered({NAMES[0]: OFFERED[NAMES[0]]})
    with pytest.raises(refitd.RefusedError, match=r"the adapter in .* has no layers\.1 \(1 tensors"):
        held.check_offered({**OFFERED, "layers.1": ((3,), torch.float32)})
    with pytest.raises(refitd.RefusedError, match=r"offers \[4, 8\], .* has \[2, 8\]; an adapter of another rank"):
        held.check_offered({**OFFERED, NAMES[0]: ((4, 8), torch.float32)})
