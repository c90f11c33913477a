"""Addresses captured by CUDA graphs: moved tensors fail the commit by name, and derived tensors are recomputed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import refitd
from refitd import Derived, MXFP8Buffer
from refitd.testing import Daemon, Engine, eventually
from tests.support.mxfp8_replicas import Replica, Trainer, model
from tests.support.names import named
from tests.support.passed_on import Start


@pytest.fixture
def daemon(daemons: Start) -> Daemon:
    return daemons("[deadlines]\ncommit_s = 10.0\nstage_s = 20.0\n")[0]


def swap_fails(daemon: Daemon, says: str, register: Callable[[refitd.Client], object]) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        Trainer((trainer,), 1).publish(1)
        with Engine(register(engine)) as running:
            with pytest.raises(refitd.RefitFailed, match=says):
                trainer.swap(named("m"), 1, timeout=60)
            eventually(lambda: bool(running.errors), "the engine was told")


def test_a_buffer_that_has_moved_fails_the_commit_by_name(daemon: Daemon) -> None:
    def register(engine: refitd.Client) -> object:
        held = Replica((engine,), "r", 1)
        buffer = held.held[0]["v"]
        assert isinstance(buffer, MXFP8Buffer)
        buffer.scale.set_(torch.zeros_like(buffer.scale))
        return held.targets[0]

    swap_fails(daemon, r"v\.scale: its storage has changed since registration", register)


@pytest.mark.slow
def test_a_weight_that_moves_during_the_commit_fails_it_by_name(daemon: Daemon) -> None:
    """Engines have load functions that replace parameters instead of writing them."""

    def register(engine: refitd.Client) -> object:
        mine = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}

        def refresh(tensor: torch.Tensor) -> None:
            mine["norm"].data = torch.ones(128, dtype=torch.bfloat16)

        derived = {"fused": Derived(torch.zeros(4), ("norm",), refresh)}
        return engine.register_target(named("m"), mine, replica="r", derived=derived)

    swap_fails(daemon, r"norm: its storage has changed during the commit", register)


def test_derived_tensors_are_made_anew_after_the_weights_in_order(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        sources = Trainer((trainer,), 1)
        seen: list[str] = []
        held = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
        total, double = torch.zeros(128, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.bfloat16)

        def add(tensor: torch.Tensor) -> None:
            seen.append("total")
            torch.add(held["norm"], 1, out=tensor)

        def twice(tensor: torch.Tensor) -> None:
            seen.append("double")
            torch.mul(total, 2, out=tensor)

        derived = {"total": Derived(total, ("norm",), add), "double": Derived(double, (), twice)}
        target = engine.register_target(named("m"), held, replica="r", derived=derived)
        with Engine(target) as running:
            for version in (1, 2):
                full = sources.publish(version)
                report = trainer.swap(named("m"), version, timeout=60)
                assert torch.equal(double, (full["norm"] + 1) * 2)
        assert seen == ["total", "double"] * 2 and not running.errors
        assert report.members[0].paused_s == pytest.approx(target.last_pause_s)


def moves(tensor: torch.Tensor) -> None:
    tensor.set_(torch.zeros(5))


def raises(tensor: torch.Tensor) -> None:
    raise ValueError("no workspace")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (raises, "fused: its refresh hook raised ValueError: no workspace"),
        (moves, "fused: the storage of this derived tensor has changed during the commit"),
    ],
)
def test_a_hook_that_raises_or_replaces_its_tensor_fails_the_commit_by_name(
    daemon: Daemon, hook: Callable[[torch.Tensor], object], says: str
) -> None:
    def register(engine: refitd.Client) -> object:
        mine = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
        derived = {"fused": Derived(torch.zeros(4), ("norm",), hook)}
        return engine.register_target(named("m"), mine, replica="r", derived=derived)

    swap_fails(daemon, says, register)


def test_a_derived_tensor_without_a_hook_refuses_the_swap(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        Trainer((trainer,), 1).publish(1)
        mine = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
        with pytest.raises(refitd.RefusedError, match=r"fused: .*made of \['other'\]"):
            engine.register_target(
                named("m"), mine, replica="r", derived={"fused": Derived(torch.zeros(4), ("other",))}
            )
        engine.register_target(named("m"), mine, replica="r", derived={"fused": Derived(torch.zeros(4), ("norm",))})
        with pytest.raises(refitd.RefusedError, match=r"'r' rank 0 .*fused derived from .*no hook"):
            trainer.swap(named("m"), 1, timeout=60)
