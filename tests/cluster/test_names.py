"""Tensors with Megatron's names reach an engine with Hugging Face's: registered, declared, and as a target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import refitd
from refitd.names import Part, megatron_to_hf
from refitd.testing import Daemon, Engine
from tests.support.hf_tensors import hf_shapes, numbered
from tests.support.megatron_cuts import PAD, Job
from tests.support.names import policy

QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 11,
    "hidden_size": 8,
    "head_dim": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
}
NAMES = megatron_to_hf(QWEN2)


@pytest.fixture
def job() -> Job:
    """Two ranks of TP2 with one row of padding."""
    found = Job(QWEN2, numbered(hf_shapes(QWEN2, fused_experts=False)), 2, 1, 1, True, False, 1)
    for rank in range(2):
        found.add_rank(rank)
    return found


def held(job: Job, rank: int) -> dict[str, torch.Tensor]:
    return {m.name: torch.from_numpy(job.arrays[rank, m.name].copy()) for m in job.metas[rank]}


def hf(job: Job, *, empty: bool) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.zeros_like(a) if empty else a.copy()) for name, a in job.hf.items()}


@pytest.mark.parametrize("how", ["registered", "declared"])
def test_a_trainer_under_other_names_fills_an_engine(daemon: Daemon, job: Job, how: str) -> None:
    live = hf(job, empty=True)
    with daemon.connect() as trainer, daemon.connect() as engine:
        for rank in range(2):
            tensors = held(job, rank)
            place: Any = {"rank": rank, "world_size": 2, "metadata": job.metas[rank], "names": NAMES}
            if how == "registered":
                trainer.register_source(policy(), tensors, **place).publish(1)
            else:
                shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
                trainer.declare_source(policy(), shapes, **place).publish_from(1, tensors.items())
        target = engine.register_target(policy(), live, replica="a")
        offered = {name: shape for name, (shape, _) in trainer.tensors(policy()).items()}
        assert offered == hf_shapes(QWEN2, fused_experts=False)
        with Engine(target):
            trainer.swap(policy(), 1)
    for name, array in job.hf.items():
        np.testing.assert_array_equal(live[name].numpy(), array, err_msg=name)


def test_a_target_under_other_names_is_filled_and_its_padding_is_zero(daemon: Daemon, job: Job) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        trainer.register_source(policy(), hf(job, empty=False)).publish(1)
        live = [held(job, rank) for rank in range(2)]
        for tensors in live:
            for tensor in tensors.values():
                tensor.fill_(5)
        targets = [
            engine.register_target(
                policy(), live[r], replica="a", rank=r, world_size=2, metadata=job.metas[r], names=NAMES,
            )
            for r in range(2)
        ]  # fmt: skip
        with Engine(*targets):
            trainer.swap(policy(), 1)
    for (rank, name), array in job.arrays.items():
        np.testing.assert_array_equal(live[rank][name].numpy(), np.where(array == PAD, 0, array), err_msg=name)


def test_a_tensor_without_a_name_or_of_another_size_is_refused_before_anything_is_registered(
    daemon: Daemon, job: Job
) -> None:
    tensors = held(job, 0)
    with daemon.connect() as trainer:
        place: Any = {"rank": 0, "world_size": 2, "metadata": job.metas[0]}
        with pytest.raises(refitd.PlanError, match=r"linear_qkv.bias: no rule of names matches .*; nearest: decoder"):
            trainer.register_source(policy(), tensors, names=megatron_to_hf({**QWEN2, "model_type": "llama"}), **place)
        wide = megatron_to_hf({**QWEN2, "num_attention_heads": 8})
        with pytest.raises(refitd.PlanError, match=r"linear_qkv.weight: it has 32 rows .* expected 48"):
            trainer.register_source(policy(), tensors, names=wide, **place)
        shapes = {"decoder.layers.0.typo": ((2,), torch.float32)}
        with pytest.raises(refitd.PlanError, match=r"no rule of names matches decoder\.layers\.0\.typo"):
            trainer.declare_source(policy(), shapes, names=NAMES)
        assert not trainer.status().models


def test_what_replaces_a_tensor_is_published_under_the_same_names(daemon: Daemon, job: Job) -> None:
    live = hf(job, empty=True)
    given = [held(job, rank) for rank in range(2)]
    with daemon.connect() as trainer, daemon.connect() as engine:
        sources = [
            trainer.register_source(
                policy(), given[r], rank=r, world_size=2, metadata=job.metas[r], names=NAMES
            )
            for r in range(2)
        ]  # fmt: skip
        target = engine.register_target(policy(), live, replica="a")
        for tensors, source in zip(given, sources, strict=True):
            tensors.update({name: tensor + 1 for name, tensor in tensors.items()})
            source.publish(1)
        with Engine(target):
            trainer.swap(policy(), 1)
    for name, array in job.hf.items():
        np.testing.assert_array_equal(live[name].numpy(), array + 1, err_msg=name)


def test_a_module_is_described_again_under_the_same_names(daemon: Daemon) -> None:
    module, live = torch.nn.Linear(3, 2), {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(policy(), module, names={"weight": "w", "bias": "b"})
        target = engine.register_target(policy(), live, replica="a")
        module.weight = torch.nn.Parameter(torch.ones(2, 3))
        source.publish(1)
        with Engine(target):
            trainer.swap(policy(), 1)
    assert torch.equal(live["w"], torch.ones(2, 3))


def test_halves_of_a_tensor_are_sent_to_and_taken_from_one_that_holds_both(daemon: Daemon) -> None:
    """The rows of the two sides begin at different offsets: 6 rows of gate_up are 4 of gate and 2 of up."""
    names = {"gate": Part("gate_up", 4), "up": Part("gate_up", 2, first=4)}
    halves = {"gate": torch.randn(4, 3), "up": torch.randn(2, 3)}
    whole, back = {"gate_up": torch.zeros(6, 3)}, {name: torch.zeros_like(half) for name, half in halves.items()}
    with daemon.connect() as trainer, daemon.connect() as engine:
        trainer.register_source("halves", halves, names=names).publish(1)
        with Engine(engine.register_target("halves", whole, replica="a")):
            trainer.swap("halves", 1)
        assert torch.equal(whole["gate_up"], torch.cat([halves["gate"], halves["up"]]))
        trainer.register_source("whole", whole).publish(1)
        with Engine(engine.register_target("whole", back, replica="a", names=names)):
            trainer.swap("whole", 1)
        assert all(torch.equal(back[name], half) for name, half in halves.items())
