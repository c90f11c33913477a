"""Check the adapter with SGLang's hook registry, parallel context and weight updater; its server needs a GPU.

It runs where SGLang 0.5 is installed (docs/sglang.md), and is skipped elsewhere. Some packages that SGLang imports are
not needed here; they are stand-ins where they are not installed.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import json
import runpy
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import save_file

import refitd
from refitd.adapters import sglang
from refitd.testing import Daemon, RunningSwap

pytestmark = [
    pytest.mark.own_daemon,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "sglang_trainer.py"
UNUSED = ("torchvision", "gguf", "sgl_kernel", "IPython", "traitlets", "orjson", "pybase64")


class Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each package of `UNUSED` that is not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in UNUSED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(name=spec.name, __spec__=spec, __path__=[], __file__=spec.name, __version__="9.9.9")

    def exec_module(self, module: ModuleType) -> None:
        """Do not execute: a stand-in is complete when created."""


class Model(torch.nn.Module):
    """A model with its loader, as SGLang's have."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(19))

    def load_weights(self, weights: Any) -> None:
        for name, w in weights:
            at = 0 if name == "a" else 15
            self.fused.data[at : at + w.numel()].copy_(w.reshape(-1))


def values(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((5, 3), float(version)), "b": torch.full((4,), float(version))}


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[str]:
    """SGLang's parallel context of a single process; yields the folder of a checkpoint."""
    finder = Unused()
    sys.meta_path.append(finder)
    from sglang.srt.runtime_context import get_parallel

    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    get_parallel().override_permanently(world_group=alone, dp_rank=None, tp_rank=0)
    save_file(values(0), tmp_path / "model.safetensors")
    yield str(tmp_path)
    sys.meta_path.remove(finder)


def test_sglangs_weight_updater_calls_the_custom_loader(
    daemon: Daemon, one_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.model_executor.model_runner_components import weight_updater

    # a server publishes its configuration when it starts
    monkeypatch.setattr(weight_updater, "get_model", lambda: SimpleNamespace(weight_cache_mode="off"))
    model = Model()
    updater = weight_updater.WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders=[sglang.LOADER],
        get_model=lambda: model,
        update_model_fields=MagicMock(),
        recapture_cuda_graph=MagicMock(),
        get_model_runner=MagicMock(),
    )

    class Engine:  # `sglang.Engine`; its methods forward to the scheduler's processes
        def begin_weight_update(self) -> tuple[bool, str]:
            return True, "Success"

        end_weight_update = begin_weight_update

        def update_weights_from_tensor(self, named: Any, load_format: str) -> tuple[bool, str]:
            answer: tuple[bool, str] = updater.update_weights_from_tensor(named, load_format=load_format)
            return answer

    with daemon.connect("trainer") as trainer:
        weights = values(1)
        source = trainer.register_source("policy", weights)
        for version in (1, 2):
            for name, tensor in values(version).items():
                weights[name].copy_(tensor)
            source.publish(version)
            settings = {"replica": "a", "runtime_dir": str(daemon.directory), "checkpoint": one_rank}
            assert sglang.drive(Engine(), trainer, version, **settings).outcome == "committed"
            assert (model.fused == version).all()
        source.close()
        monkeypatch.setenv("REFITD_RUNTIME_DIR", str(daemon.directory))
        trained = torch.nn.ParameterDict({"a": torch.ones(5, 3), "b": torch.ones(4)})
        runpy.run_path(str(EXAMPLE))["train"](Engine(), trainer, trained, one_rank, 2)
        assert torch.equal(model.fused, torch.cat([trained["a"].reshape(-1), trained["b"]]).data)
    model.__dict__["_refitd"].let_go()


def test_sglangs_registry_gives_a_commit_point_before_each_batch(
    daemon: Daemon, one_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    class Scheduler:
        batches = 0

        def run_batch(self, batch: object, pp_proxy_tensors: object = None) -> str:
            self.batches += 1
            return "ran"

        def on_idle(self) -> None:
            """Do not do idle work."""

    stand_in = ModuleType("sglang.srt.managers.scheduler")
    vars(stand_in)["Scheduler"] = Scheduler
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", ModuleType("sglang.srt.managers"))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", stand_in)
    monkeypatch.setenv(sglang.SETTINGS, json.dumps({"replica": "a", "runtime_dir": str(daemon.directory)}))
    sglang.register()
    HookRegistry.apply_hooks()
    scheduler: Any = Scheduler()
    model = Model()
    scheduler.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    scheduler.server_args = SimpleNamespace(model_path=one_rank, disable_radix_cache=True)
    with daemon.connect("trainer") as trainer:
        trainer.register_source("policy", values(1)).publish(1)
        scheduler.on_idle()  # registers
        running = RunningSwap(daemon.connect(), "policy", 1)
        until = time.monotonic() + 20
        while not (model.fused == 1).all() and time.monotonic() < until:
            assert scheduler.run_batch("batch") == "ran"
            time.sleep(0.002)
        assert running.result().outcome == "committed" and scheduler.batches


def test_what_the_adapter_calls_is_there() -> None:
    """The source is read, not imported: these modules need a GPU's packages."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    srt = Path(spec.origin).parent / "srt"

    def arguments(file: str, owner: str, method: str) -> list[str]:
        tree = ast.parse((srt / file).read_text())
        (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner]
        (made,) = [n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == method]
        return [argument.arg for argument in made.args.args]

    assert arguments("managers/scheduler.py", "Scheduler", "run_batch")[:2] == ["self", "batch"]
    assert arguments("managers/scheduler.py", "Scheduler", "on_idle") == ["self"]
    engine = "entrypoints/engine.py", "Engine"
    assert arguments(*engine, "begin_weight_update")[0] == arguments(*engine, "end_weight_update")[0] == "self"
    assert arguments(*engine, "update_weights_from_tensor")[:3] == ["self", "named_tensors", "load_format"]
    assert refitd.adapters.sglang.WRITTEN_AGAINST == "0.5."
