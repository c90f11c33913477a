"""Engines that a trainer drives stand still for a decided commit; so do SGLang's, whose modules are stand-ins here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import refitd
from refitd.adapters import engine_memory, sglang
from refitd.adapters.driving import Fleet, swap_and_drive
from refitd.testing import Daemon, Engine, RunningSwap, eventually

Offering = tuple[refitd.Client, refitd.Source, dict[str, torch.Tensor]]
SHAPES = {"a": (5, 3), "b": (4,)}


def values(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()}


class Model(torch.nn.Module):
    """A model with its loader, as SGLang's have."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(19))
        self.register_buffer("table", torch.ones(3), persistent=False)

    def load_weights(self, weights: Any) -> None:
        for name, w in weights:
            assert self.table[0].item()  # loaders read tables of their own
            at = 0 if name == "a" else 15
            self.fused.data[at : at + w.numel()].copy_(w.reshape(-1))

    def holds(self, version: int) -> bool:
        return bool((self.fused == version).all())


@pytest.fixture
def stood(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """SGLang's modules, and the hooks that were registered."""
    hooks: dict[str, Callable[..., Any]] = {}

    class HookRegistry:
        @staticmethod
        def register(target: str, hook: Callable[..., Any], kind: object) -> None:
            assert kind == "before"
            hooks[target.rpartition(".")[2]] = hook

    parallel = SimpleNamespace(dp_rank=None, world_group=SimpleNamespace(rank_in_group=0, world_size=1))
    names = (
        "sglang",
        *(f"sglang.srt{part}" for part in ("", ".runtime_context", ".plugins", ".plugins.hook_registry")),
    )
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules["sglang"].__version__ = "0.5.23"
    modules["sglang.srt.runtime_context"].get_parallel = lambda: parallel
    modules["sglang.srt.plugins.hook_registry"].HookRegistry = HookRegistry
    modules["sglang.srt.plugins.hook_registry"].HookType = SimpleNamespace(BEFORE="before")
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return hooks


class Sglang:
    """`sglang.Engine` as far as `drive` knows it: an update session around a custom loader."""

    def __init__(self, model: Model) -> None:
        self._model, self._is_open = model, False
        self.updates = 0

    def begin_weight_update(self) -> tuple[bool, str]:
        self._is_open = not self._is_open
        return self._is_open, "a session is open already"

    def update_weights_from_tensor(self, named: list[tuple[str, torch.Tensor]], load_format: str) -> tuple[bool, str]:
        assert self._is_open and load_format == sglang.LOADER
        self.updates += 1
        try:
            sglang.take_over(self._model, named)
        except refitd.RefitdError as exc:
            return False, str(exc)
        return True, "Success"

    def end_weight_update(self) -> tuple[bool, str]:
        self._is_open = False
        return True, "Success"


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    save_file({name: torch.zeros(shape) for name, shape in SHAPES.items()}, tmp_path / "model.safetensors")
    return str(tmp_path)


def test_an_engine_is_called_once_its_version_is_decided(daemon: Daemon) -> None:
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        source = trainer.register_source("policy", values(1))
        held = values(0)
        target = engine.register_target("policy", held, replica="a")
        source.publish(1)
        called = []

        def take_over() -> None:
            called.append((held["a"][0, 0].item(), target.wait(1, timeout=5.0)))

        report = swap_and_drive(trainer, "policy", 1, take_over)
        assert called == [(0.0, 1)] and report.outcome == "committed"
        with pytest.raises(refitd.RefusedError, match="version 2"):
            swap_and_drive(trainer, "policy", 2, take_over)
        assert len(called) == 1  # nothing was decided: nobody called
        source.publish(2)

        def fails() -> None:
            target.wait(2, timeout=5.0)
            raise OSError("the engine has gone")

        with pytest.raises(OSError, match="the engine has gone"):
            swap_and_drive(trainer, "policy", 2, fails)


def test_engines_are_called_before_the_decision_only_if_one_needs_it(daemon: Daemon) -> None:
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine, daemon.connect("other") as other:
        source = trainer.register_source("policy", values(1))
        calls: list[str] = []
        targets = {}

        def register() -> None:
            calls.append("register")
            for client, replica in ((engine, "a"), (other, "b")):
                if replica not in targets:
                    targets[replica] = client.register_target("policy", values(0), replica=replica)

        def catch_up() -> None:
            calls.append("catch up")
            targets["b"].wait(1, timeout=5.0)

        fleet = Fleet(trainer, "policy")
        fleet.prepare(register, catch_up)
        fleet.prepare(register, catch_up)
        assert calls == ["register"]
        source.publish(1)
        with pytest.raises(refitd.SwapFailed):  # nobody drives the second one
            swap_and_drive(trainer, "policy", 1, lambda: targets["a"].wait(1, timeout=5.0) and None, timeout=2.0)
        fleet.prepare(register, catch_up)
        assert calls == ["register", "catch up"] and targets["b"].version == 1
        targets.pop("a").close()  # as an engine that is started again
        fleet.prepare(register, catch_up)
        fleet.prepare(register, catch_up)
        assert calls.count("register") == 2


@pytest.fixture
def offering(daemon: Daemon) -> Iterator[Offering]:
    with daemon.connect("trainer") as client:
        weights = values(1)
        yield client, client.register_source("policy", weights), weights


def test_sglangs_custom_loader_takes_versions_over(
    daemon: Daemon, offering: Offering, stood: object, checkpoint: str
) -> None:
    client, source, _ = offering
    model = Model()
    engine = Sglang(model)
    settings = {"replica": "a", "directory": str(daemon.directory), "checkpoint": checkpoint}
    source.publish(1)
    with pytest.raises(refitd.RefusedError, match="to check the layout against"):
        sglang.drive(engine, client, 1, **{**settings, "checkpoint": ""})
    with pytest.raises(refitd.RefusedError, match="unknown settings folow; known: check"):
        sglang.drive(engine, client, 1, folow=True)
    with pytest.raises(refitd.RefusedError, match=r"takes what .*drive sends, not \['w'\]"):
        sglang.take_over(model, [("w", torch.zeros(1))])
    assert sglang.drive(engine, client, 1, **settings).outcome == "committed"
    assert model.holds(1)
    with pytest.raises(refitd.RefusedError, match="version 2"):
        sglang.drive(engine, client, 2, wait=0.0, **settings)
    assert model.holds(1)
    model.__dict__["_refitd"].let_go()


def test_sglangs_plugin_follows(
    daemon: Daemon,
    offering: Offering,
    stood: dict[str, Callable[..., Any]],
    checkpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, source, weights = offering
    sglang.register()
    assert not stood  # nobody has asked for it
    monkeypatch.setenv(sglang.SETTINGS, json.dumps({"replica": "a", "directory": str(daemon.directory)}))
    sglang.register()
    model = Model()
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    arguments = SimpleNamespace(model_path=checkpoint, disable_radix_cache=True)
    scheduler = SimpleNamespace(tp_worker=runner, server_args=arguments)
    stood["on_idle"](scheduler)  # registers
    for version in (1, 2):
        for name, tensor in values(version).items():
            weights[name].copy_(tensor)
        source.publish(version)
        running = RunningSwap(daemon.connect(), "policy", version)
        hook = (stood["on_idle"], scheduler) if version == 1 else (stood["run_batch"], scheduler, "batch")
        until = time.monotonic() + 20
        while not model.holds(version) and time.monotonic() < until:
            hook[0](*hook[1:])
            time.sleep(0.002)
        assert running.result().outcome == "committed" and model.holds(version)
    stood["on_idle"].__self__._engine.let_go()


def test_sglang_tries_again_after_a_refusal_and_after_its_daemon_has_gone(
    daemon: Daemon, offering: Offering, stood: dict[str, Callable[..., Any]], checkpoint: str, caplog: Any
) -> None:
    """Its predecessor may have the name yet; and what it holds later is no longer what its checkpoint has."""
    client, source, _ = offering
    model, given = Model(), {"replica": "a", "directory": str(daemon.directory)}
    follower = sglang.Follower(given)
    arguments = SimpleNamespace(model_path=checkpoint, disable_radix_cache=True)
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)), server_args=arguments
    )
    source.publish(1)
    with daemon.connect("predecessor") as predecessor:
        predecessor.register_target("policy", values(0), replica="a")
        for _ in range(2):
            follower._next_try = 0.0
            follower.before_idle(scheduler)
    assert follower._target is None
    assert len([r for r in caplog.records if "is not refitted" in r.getMessage()]) == 1  # said once
    eventually(lambda: not client.status().models[0].targets, "the predecessor is gone")
    follower._next_try = 0.0
    follower.before_idle(scheduler)
    running = RunningSwap(daemon.connect(), "policy", 1)

    def is_live() -> bool:
        follower.before_idle(scheduler)
        return model.holds(1)

    eventually(is_live, "version 1 is live")
    assert running.result().outcome == "committed" and follower._engine is not None
    follower._engine.let_go()  # as when its daemon has gone
    follower.before_idle(scheduler)
    follower._next_try = 0.0
    follower.before_idle(scheduler)
    assert follower._target is not None, caplog.text
    follower._engine.let_go()


def test_sglang_refuses_another_revision(daemon: Daemon, stood: object, checkpoint: str) -> None:
    with daemon.connect("trainer") as trainer:
        trainer.register_source("policy", {**values(1), "a": torch.zeros(8, 3)})
        settings = sglang.Settings(replica="a", directory=str(daemon.directory), checkpoint=checkpoint)
        with pytest.raises(refitd.RefusedError, match=r"a: the trainer offers \[8, 3\], .* has \[5, 3\]"):
            sglang.SchedulerRank(Model(), settings).bind()


def test_another_sglang_is_refused(stood: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.6.1")
    with pytest.raises(refitd.RefusedError, match=r"SGLang 0\.6\.1 is not the version .*0\.5\.x"):
        sglang.SchedulerRank(Model(), sglang.Settings())


class Loaded(torch.nn.Parameter):
    """A parameter with a loader of its own, as engines have."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_weights_that_an_engine_registers_move_into_an_arena_or_stay_with_the_reason(
    daemon: Daemon, offering: Offering
) -> None:
    _, source, _ = offering
    a = Loaded(torch.zeros(5, 3), requires_grad=False)
    weights: dict[str, torch.Tensor] = {"layers.0.a": a, "layers.0.b": torch.zeros(4)}
    with daemon.connect("engine") as engine:
        view = a[1:]
        assert "layers.0.a: tensors outside this module (1: a view" in engine_memory.adopt(engine, weights, 5.0)
        del view
        elsewhere = {**weights, "c": torch.zeros(3, device="meta")}  # as on a GPU
        assert "not all of them lie in main memory" in engine_memory.adopt(engine, elsewhere, 5.0)
        assert not engine_memory.adopt(engine, weights, 5.0)
        assert not engine_memory.adopt(engine, weights, 5.0)  # a second time, when the first registration was refused
        assert weights["layers.0.a"] is a and type(a) is Loaded
        target = engine.register_target(
            "policy", {name[-1]: tensor.data for name, tensor in weights.items()}, replica="a"
        )
        assert target.flips
        source.publish(1)
        with Engine(target):
            engine.swap("policy", 1, timeout=30)
        assert (a == 1).all() and (weights["layers.0.b"] == 1).all()
