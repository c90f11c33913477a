"""What driven engines share, and what SGLang's adapter refuses; test_adapters.py has what all adapters do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import refitd
from refitd.adapters import engines, sglang
from refitd.adapters.driving import Fleet, swap_and_drive
from refitd.testing import Daemon, Engine
from tests.support.adapter_ranks import Model
from tests.support.adapter_ranks import values as trained
from tests.support.engine_stand_ins import sglang_modules, write_checkpoint
from tests.support.names import policy

Offering = tuple[refitd.Client, refitd.Source, dict[str, torch.Tensor]]
SHAPES = {"a": (5, 3), "b": (4,)}


def values(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()}


@pytest.fixture
def stood(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """SGLang's modules, and the hooks that were registered."""
    modules, hooks = sglang_modules(None)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return hooks


def test_an_engine_is_called_once_its_version_is_decided(daemon: Daemon) -> None:
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        source = trainer.register_source(policy(), values(1))
        held = values(0)
        target = engine.register_target(policy(), held, replica="a")
        source.publish(1)
        called = []

        def take_over() -> None:
            called.append((held["a"][0, 0].item(), target.wait(1, timeout=5.0)))

        report = swap_and_drive(trainer, policy(), 1, take_over)
        assert called == [(0.0, 1)] and report.outcome == "committed"
        with pytest.raises(refitd.RefusedError, match="version 2"):
            swap_and_drive(trainer, policy(), 2, take_over)
        assert len(called) == 1  # no decision, so the callback was not called
        source.publish(2)

        def fails() -> None:
            target.wait(2, timeout=5.0)
            raise OSError("the engine has gone")

        with pytest.raises(OSError, match="the engine has gone"):
            swap_and_drive(trainer, policy(), 2, fails)


def test_engines_are_called_before_the_decision_only_if_one_needs_it(daemon: Daemon) -> None:
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine, daemon.connect("other") as other:
        source = trainer.register_source(policy(), values(1))
        calls: list[str] = []
        targets = {}

        def register() -> None:
            calls.append("register")
            for client, replica in ((engine, "a"), (other, "b")):
                if replica not in targets:
                    targets[replica] = client.register_target(policy(), values(0), replica=replica)

        def catch_up() -> None:
            calls.append("catch up")
            targets["b"].wait(1, timeout=5.0)

        fleet = Fleet(trainer, policy())
        fleet.prepare(register, catch_up)
        fleet.prepare(register, catch_up)
        assert calls == ["register"]
        source.publish(1)
        with pytest.raises(refitd.SwapFailed):  # the second target is not driven
            swap_and_drive(trainer, policy(), 1, lambda: targets["a"].wait(1, timeout=5.0) and None, timeout=2.0)
        fleet.prepare(register, catch_up)
        assert calls == ["register", "catch up"] and targets["b"].version == 1
        targets.pop("a").close()  # like a restarted engine
        fleet.prepare(register, catch_up)
        fleet.prepare(register, catch_up)
        assert calls.count("register") == 2


@pytest.fixture
def offering(daemon: Daemon) -> Iterator[Offering]:
    with daemon.connect("trainer") as client:
        weights = values(1)
        yield client, client.register_source(policy(), weights), weights


def test_sglang_refuses_unknown_settings_and_another_sender(stood: dict[str, Callable[..., Any]]) -> None:
    sglang.register()
    assert not stood  # not configured
    with pytest.raises(refitd.RefusedError, match="unknown settings folow; known: check"):
        sglang.drive(None, None, 1, folow=True)  # type: ignore[arg-type]
    with pytest.raises(refitd.RefusedError, match=r"takes what .*drive sends, not \['w'\]"):
        sglang.take_over(Model(), [("w", torch.zeros(1))])


def test_sglang_refuses_another_revision_and_an_engine_without_its_checkpoint(
    daemon: Daemon, stood: object, tmp_path: Path
) -> None:
    with daemon.connect("trainer") as trainer:
        trainer.register_source(policy(), {**trained(1), "norm": torch.zeros(65)})
        checkpoint = write_checkpoint(tmp_path, trained(0))
        settings = sglang.Settings(
            model=policy(), replica="a", runtime_dir=str(daemon.directory), checkpoint=checkpoint
        )
        with pytest.raises(refitd.RefusedError, match=r"norm: the trainer offers \[65\], .* has \[64\]"):
            sglang.SchedulerRank(Model(), settings).bind()
        with pytest.raises(refitd.RefusedError, match="to check the layout against"):
            sglang.SchedulerRank(Model(), replace(settings, checkpoint="")).bind()


def test_another_sglang_is_refused(stood: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.6.1")
    with pytest.raises(refitd.RefusedError, match=r"SGLang 0\.6\.1 is not the version .*0\.5\.x"):
        sglang.SchedulerRank(Model(), sglang.Settings())


class Loaded(torch.nn.Parameter):
    """A parameter with a weight loader, as in engines."""

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

        def adopted(weights: dict[str, torch.Tensor]) -> str:
            learned = engines.Learned(torch.nn.Module(), refitd.LoaderTrace({}, {}, (), ()), weights, [], [])
            return engines.adopt(engine, learned, 5.0)

        view = a[1:]
        assert "layers.0.a: tensors outside this module (1: a view" in adopted(weights)
        del view
        elsewhere = {**weights, "c": torch.zeros(3, device="meta")}  # as on a GPU
        assert "not all of them lie in main memory" in adopted(elsewhere)
        assert not adopted(weights)
        assert not adopted(weights)  # a second time, when the first registration was refused
        assert weights["layers.0.a"] is a and type(a) is Loaded
        target = engine.register_target(
            policy(), {name[-1]: tensor.data for name, tensor in weights.items()}, replica="a"
        )
        assert target.flips
        source.publish(1)
        with Engine(target):
            engine.swap(policy(), 1, timeout=30)
        assert (a == 1).all() and (weights["layers.0.b"] == 1).all()
