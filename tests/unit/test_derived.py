"""Tensors that an engine's own code derives from weights: found, proven, and recomputed in their memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import refitd
from refitd.adapters.derived import LANDING, Hook, Packed, declared, derived_after_loading, seconds_of
from refitd.adapters.engines import Learned, Learner, OnDisk, adopt
from refitd.adapters.places import views_of, without_views
from refitd.testing import Daemon


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*shape), requires_grad=False)


class Attention(torch.nn.Module):
    """Derives, as vLLM's layers do: a new tensor, one in place, one of a plain object, a constant, and a view."""

    def __init__(self, faulty: str = "") -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 6, bias=False)
        self.proj.weight = parameter(6, 4)
        self.register_buffer("scale", torch.zeros(1), persistent=False)
        self.constant = torch.zeros(2)
        self.impl = SimpleNamespace(packed=None)
        self._faulty, self._runs, self._first = faulty, 0, torch.empty(0)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        weight = self.proj.weight
        self._runs += 1
        if self._faulty == "stale":
            self._first = weight = self._first if self._first.numel() else weight.clone()
        self.impl.packed = weight.t().contiguous() * 2
        if self._faulty == "repeated" and self._runs > 2:
            self.impl.packed += self._runs
        if self._faulty == "shape" and self._runs > 1:
            self.impl.packed = self.impl.packed[:2]
        self.scale.copy_(weight.abs().max().reshape(1) + 0 * self.proj.weight.sum())
        self.constant.fill_(1.0)
        self.seen = torch.nn.Parameter(weight.view(2, 3, 4).transpose(0, 1), requires_grad=False)


class Model(torch.nn.Module):
    """`a` is computed by the loader, as in Mamba; the attention layer derives more."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.attention = parameter(5), Attention()

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            if name == "a_log":
                self.a.data.copy_(-torch.exp(weight.float()))
            else:
                self.attention.proj.weight.data.copy_(weight)


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a_log": torch.rand(5, generator=generator), "proj": torch.rand(6, 4, generator=generator)}


def loaded(model: Model, seed: int = 0) -> Model:
    model.load_weights(checkpoint(seed).items())
    model.attention.process_weights_after_loading(torch.float32)
    return model


def learned(model: Model, seed: int | None = 0) -> Learned:
    layer = model.attention
    hook = Hook("attention", layer, lambda: layer.process_weights_after_loading(torch.float32))
    own = None if seed is None else lambda: iter(checkpoint(seed).items())
    offered = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in checkpoint(0).items()}
    return Learner(model, model.load_weights, own, lambda: [hook]).learn(offered, 0)


def everything(model: Model) -> dict[str, torch.Tensor]:
    layer = model.attention
    return {
        "a": model.a,
        "proj": layer.proj.weight,
        "packed": layer.impl.packed,
        "scale": layer.scale,
        "seen": layer.seen,
        "constant": layer.constant,
    }


def test_what_the_engines_code_derives_is_recomputed_in_its_memory_in_the_commit() -> None:
    model = loaded(Model())
    found = learned(model)
    assert sorted(found.weights) == ["attention.proj.weight", f"{LANDING}a_log"]
    assert [sorted(group.tensors) for group in found.recomputed] == [
        ["a"],
        ["attention.constant", "attention.impl.packed", "attention.scale"],
    ]
    before = {name: tensor.clone() for name, tensor in everything(model).items()}
    assert seconds_of(found.recomputed) > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(model).items())
    with Daemon() as daemon, daemon.connect() as trainer, daemon.connect() as engine:
        given = checkpoint(7)
        source = trainer.register_source("policy", given)
        assert adopt(engine, found, 30.0) == ""
        addresses = {name: tensor.data_ptr() for name, tensor in everything(model).items()}
        target = engine.register_target("policy", **found.registration(), replica="a")
        assert target.flips
        for version in (1, 2):
            with torch.no_grad():
                for tensor in given.values():
                    tensor.add_(version)
            source.publish(version)
            with refitd.testing.Engine(target):
                trainer.swap("policy", version)
            fresh = Model()
            fresh.load_weights(given.items())
            fresh.attention.process_weights_after_loading(torch.float32)
            mine = everything(model)
            assert all(torch.equal(mine[name], tensor) for name, tensor in everything(fresh).items())
            assert {name: tensor.data_ptr() for name, tensor in mine.items()} == addresses


@pytest.fixture
def failing() -> Iterator[tuple[refitd.Target, Model]]:
    model = loaded(Model())
    found = learned(model)
    with Daemon() as daemon, daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source("policy", checkpoint(7))
        target = engine.register_target("policy", **found.registration(), replica="a")
        source.publish(1)
        model.attention._faulty, model.attention._runs = "shape", 9
        with pytest.raises(refitd.RefitdError), refitd.testing.Engine(target):
            trainer.swap("policy", 1)
        yield target, model


def test_code_that_fails_in_a_commit_leaves_an_engine_that_serves_no_version(
    failing: tuple[refitd.Target, Model],
) -> None:
    target, _ = failing
    assert target.version is None


@pytest.mark.parametrize(
    ("faulty", "says"),
    [
        ("stale", r"attention\.seen: .* does not follow changed weights"),
        ("repeated", r"attention\.impl\.packed: .* gives other values when it runs again"),
        ("shape", r"attention\.impl\.packed: .* gives \[2, 6\] of torch\.float32, it was \[4, 6\]"),
    ],
)
def test_code_that_cannot_be_trusted_is_refused_and_leaves_the_engine_as_it_was(faulty: str, says: str) -> None:
    model = Model()
    model.attention._faulty = faulty
    loaded(model)
    before = {name: tensor.clone() for name, tensor in everything(model).items()}
    with pytest.raises(refitd.RefusedError, match=says):
        learned(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(model).items() if name != "seen")


def test_a_computed_weight_that_the_engine_holds_otherwise_is_refused() -> None:
    model = loaded(Model())
    model.a.add_(1)
    with pytest.raises(refitd.RefusedError, match=r"a: the loader computes it from a_log, and gives other values"):
        learned(model)
    assert learned(model, None).recomputed  # without a checkpoint, only two runs of the loader are compared


def test_views_of_weights_move_with_them_and_need_no_code() -> None:
    layer = loaded(Model()).attention
    weights = {"proj": layer.proj.weight}
    assert sorted(views_of(layer, weights)) == ["seen"]
    assert sorted(without_views(dict(layer.named_parameters()))) == ["proj.weight"]
    other = torch.nn.Module()
    other.w, other.tied = weights["proj"], weights["proj"]
    assert derived_after_loading(Hook("", other, other.w.sum), weights) is None
    other.scale = torch.full((1,), 3.0)  # as the engine has computed it from requests
    assert derived_after_loading(Hook("", other, lambda: other.scale.fill_(1.0)), weights) is None
    assert other.scale == 3.0
    assert declared([]) == {}


class Convolution(torch.nn.Module):
    """Its weight is packed after loading, as vLLM's convolutions on CPUs; a view of the loaded one stays."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(6, 4)
        self.seen = self.weight.detach().view(24)
        self.before: dict[str, torch.nn.Parameter] = {}

    def load_weights(self, weights: Any) -> None:
        for _, weight in weights:
            self.weight.data.copy_(weight)

    def pack(self) -> None:
        self.copy = self.weight.detach().clone()
        self.weight.data = self.weight.detach().view(3, 2, 4).transpose(1, 2).contiguous()


def test_a_weight_that_the_engine_packs_lands_unpacked_and_is_packed_in_the_commit() -> None:
    model = Convolution()
    model.load_weights([("w", checkpoint(0)["proj"])])
    packed = Packed("", model, {"weight": torch.nn.Parameter(model.weight.data, requires_grad=False)}, model.pack)
    model.pack()
    live, before = model.weight, model.weight.clone()
    own = {"w": checkpoint(0)["proj"]}
    learner = Learner(model, model.load_weights, lambda: iter(own.items()), packed=lambda: [packed])
    found = learner.learn({"w": ((6, 4), torch.float32)}, 0)
    assert model.weight is live and torch.equal(live, before)
    (group,) = found.recomputed
    assert sorted(group.tensors) == ["copy (packed)", "weight (packed)"] and sorted(found.weights) == ["weight"]
    address = live.data_ptr()
    found.weights["weight"].data.copy_(checkpoint(3)["proj"])
    for _, derived in found.registration()["derived"].items():
        derived.refresh(derived.tensor)
    fresh = Convolution()
    fresh.load_weights([("w", checkpoint(3)["proj"])])
    fresh.pack()
    assert model.weight is live and live.data_ptr() == address and torch.equal(live, fresh.weight)
    assert torch.equal(model.seen, checkpoint(3)["proj"].view(24)) and torch.equal(model.copy, fresh.copy)


class Experts(torch.nn.Module):
    """Loads its experts one by one, as checkpoints have them; `norm` has one name everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = parameter(3, 2, 4), parameter(4)

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            if name == "norm":
                self.norm.data.copy_(weight)
            else:
                self.up.data[int(name.split(".")[1])].copy_(weight)


def revert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split fused experts, and join the halves of the norm."""
    found = {name: tensor for name, tensor in tensors.items() if name == "other"}
    if "experts.up" in tensors:
        found |= {f"experts.{i}.up": one.contiguous() for i, one in enumerate(tensors["experts.up"].unbind())}
    if halves := [tensors[name] for name in ("norm.0", "norm.1") if name in tensors]:
        found["norm"] = torch.cat(halves)
    return found


def test_a_trainer_may_offer_tensors_by_their_names_in_memory() -> None:
    offered = {
        "experts.up": ((3, 2, 4), torch.float32),
        "norm.0": ((2,), torch.float32),
        "norm.1": ((2,), torch.float32),
    }
    model = Experts()
    given = {"experts.up": torch.rand(3, 2, 4), "norm.1": torch.rand(2), "norm.0": torch.rand(2)}
    own = revert(given)
    model.load_weights(own.items())
    convert = functools.partial(OnDisk, revert)
    learner = Learner(model, model.load_weights, lambda: iter(own.items()), names=convert)
    found = learner.learn(offered, 0)
    assert found.trace.unused == () and sorted(found.trace.metadata) == ["norm", "up"]
    refitd.check_layout(found.trace, {"up": model.up, "norm": model.norm}, given.items())
    larger = {**offered, "experts.up": ((3, 2, 5), torch.float32)}
    with pytest.raises(refitd.RefusedError, match=r"experts\.0\.up: the trainer offers \[2, 5\], .* has \[2, 4\]"):
        learner.learn(larger, 0)
