"""The demo's model computes equal results in every layout, and its descriptions match its shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

from refitd_cli.demo import data
from refitd_cli.demo.layout import (
    BlockSplit,
    RankPosition,
    TransformerConfig,
    canonical_name,
    canonical_shapes,
    cut_of,
    gather,
    indices,
    shard,
)
from refitd_cli.demo.model import DemoModel, initialise, tensors_of
from refitd_cli.demo.parallel import Comm, Solo

T = TypeVar("T")
CONFIG = TransformerConfig(vocab=64, hidden=48, layers=4, heads=12, kv_heads=4, head_dim=8, ffn=64)
TOKENS = torch.arange(26).remainder(17).view(2, 13) * 3
DTYPE = torch.float32


class Threads:
    """A tensor-parallel group whose ranks are threads of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[torch.Tensor]) -> None:
        self.rank, self.size, self._barrier, self._slots = rank, size, barrier, slots

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.rank] = tensor
        self._barrier.wait()
        parts = [part.clone() for part in self._slots]
        self._barrier.wait()
        return parts

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.all_gather(tensor)).sum(0)


def on_every_rank(size: int, job: Callable[[int, Comm], T]) -> list[T]:
    if size == 1:
        return [job(0, Solo())]
    barrier = threading.Barrier(size, timeout=20)
    slots = [torch.empty(0)] * size
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            results[rank] = job(rank, Threads(rank, size, barrier, slots))
        except Exception as exc:
            barrier.abort()
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def build(layout: RankPosition, comm: Comm) -> DemoModel:
    model = DemoModel(CONFIG, layout, comm)
    initialise(model, seed=5)
    if layout.is_last_stage:
        model.output_layer.count(TOKENS)
    return model


def run_stages(tp: int, pp: int) -> torch.Tensor:
    def job(rank: int, comm: Comm) -> torch.Tensor:
        x = TOKENS
        with torch.no_grad():
            for stage in range(pp):
                x = build(RankPosition(rank, tp, stage, pp), comm)(x, dtype=DTYPE)
        return x

    outputs = on_every_rank(tp, job)
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])
    return outputs[0]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_every_layout_computes_the_whole_models_logits(tp: int, pp: int) -> None:
    torch.testing.assert_close(run_stages(tp, pp), run_stages(1, 1), atol=1e-5, rtol=1e-5)


def test_gradients_of_shards_are_the_whole_models_gradients() -> None:
    def job(tp: int) -> Callable[[int, Comm], dict[str, np.ndarray]]:
        def backward(rank: int, comm: Comm) -> dict[str, np.ndarray]:
            model = build(RankPosition(rank, tp), comm).float()
            logits = model(TOKENS[:, :-1], dtype=DTYPE)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
            grads = {name: weight.grad for name, weight in model.named_parameters()}
            return {name: grad.numpy() for name, grad in grads.items() if grad is not None}

        return backward

    (whole,) = on_every_rank(1, job(1))
    for rank, grads in enumerate(on_every_rank(2, job(2))):
        assert grads.keys() == whole.keys() == dict(build(RankPosition(), Solo()).named_parameters()).keys()
        for name, grad in grads.items():
            expected = shard(whole[name], cut_of(name, CONFIG), RankPosition(rank, 2))
            np.testing.assert_allclose(grad, expected, atol=2e-6, rtol=1e-4, err_msg=name)


def test_a_cached_sequence_continues_as_if_it_were_computed_at_once() -> None:
    model = build(RankPosition(), Solo())
    text = TOKENS[:1]
    with torch.no_grad():
        whole = model(text, dtype=DTYPE)
        cache = model.new_cache(text.shape[1], DTYPE)
        parts = [model(text[:, :6], dtype=DTYPE, cache=cache)]
        parts += [model(text[:, at : at + 1], dtype=DTYPE, cache=cache) for at in range(6, text.shape[1])]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_a_fused_qkv_shard_holds_its_part_of_each_block() -> None:
    # q [0:8], k [8:12], v [12:16] over two ranks
    assert indices(BlockSplit(0, (8, 4, 4)), 0, 2) == [0, 1, 2, 3, 8, 9, 12, 13]
    assert indices(BlockSplit(0, (8, 4, 4)), 1, 2) == [4, 5, 6, 7, 10, 11, 14, 15]


def test_tensors_carry_the_attributes_that_describe_their_cut() -> None:
    layout = RankPosition(1, 4, 1, 2)
    model = DemoModel(CONFIG, layout, Threads(1, 4, threading.Barrier(4), []))
    tensors = tensors_of(model)
    for local, tensor in tensors.items():
        cut = cut_of(canonical_name(local, layout, CONFIG), CONFIG)
        assert getattr(tensor, "tensor_model_parallel", False) == (cut is not None), local
        if cut is not None:
            assert tensor.partition_dim == cut.dim, local
            assert tensor.shape[cut.dim] * 4 == sum(cut.blocks), local
    layer = "decoder.layers.0"
    assert tensors[f"{layer}.self_attention.linear_qkv.weight"].partition_sizes == [24, 8, 8]
    assert tensors[f"{layer}.mlp.linear_fc1.weight"].partition_stride == 2
    assert [module.layer_number for module in model.decoder.layers] == [3, 4]
    groups = model.pg_collection
    assert (groups.tp, groups.pp, groups.dp, groups.expt_tp) == ([4, 5, 6, 7], [1, 5], [5], [4, 5, 6, 7])
    assert "embedding.word_embeddings.weight" not in tensors
    assert {"output_layer.weight", "output_layer.byte_counts", "tokens_seen"} <= tensors.keys()


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_gathering_every_shard_gives_the_whole_model(tp: int, pp: int) -> None:
    rng = np.random.default_rng(3)
    whole = {name: rng.integers(0, 1000, shape) for name, shape in canonical_shapes(CONFIG).items()}
    layouts = [RankPosition.of_rank(rank, tp, pp) for rank in range(tp * pp)]
    shards = []
    for layout in layouts:
        names = tensors_of(DemoModel(CONFIG, layout, Threads(layout.tp_rank, tp, threading.Barrier(tp), [])))
        canonical = {local: canonical_name(local, layout, CONFIG) for local in names}
        shards.append({loc: shard(whole[name], cut_of(name, CONFIG), layout) for loc, name in canonical.items()})
        assert {local: part.shape for local, part in shards[-1].items()} == {
            local: tuple(tensor.shape) for local, tensor in names.items()
        }
    gathered = gather(shards, layouts, CONFIG)
    assert gathered.keys() == whole.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(gathered[name], tensor)


def test_gathering_refuses_replicas_that_differ_and_shards_that_are_missing() -> None:
    layouts = [RankPosition(0, 2), RankPosition(1, 2)]
    zeros = {name: np.zeros(shape, np.int64) for name, shape in canonical_shapes(CONFIG).items()}
    shards = [{n: shard(v, cut_of(n, CONFIG), layout) for n, v in zeros.items()} for layout in layouts]
    with pytest.raises(ValueError, match="tokens_seen is replicated, but differs on rank 1"):
        gather([shards[0], shards[1] | {"tokens_seen": np.ones((), np.int64)}], layouts, CONFIG)
    with pytest.raises(ValueError, match=r"not held exactly once: .*output_layer\.weight"):
        gather([shards[0], {n: v for n, v in shards[1].items() if n != "output_layer.weight"}], layouts, CONFIG)


def test_the_text_is_split_by_file_and_the_same_every_time(tmp_path: Path) -> None:
    for index in range(2 * data.HELD_OUT_EVERY):
        (tmp_path / f"m{index:02}.py").write_bytes(b"%02d " % index * 1000)
    one, two = data.load(tmp_path), data.load(tmp_path)
    assert np.array_equal(one.train, two.train)
    assert np.array_equal(one.held_out, two.held_out)
    held_out = set(one.held_out.tobytes().split())
    assert held_out == {b"15", b"31"}
    assert not held_out & set(one.train.tobytes().split())
    assert np.array_equal(one.batch(7, 3, 20), two.batch(7, 3, 20))
    assert not np.array_equal(one.batch(7, 3, 20), one.batch(8, 3, 20))
    assert one.held_out_batch(4, 20).shape == (4, 21)


def test_an_installation_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no Python sources"):
        data.load(tmp_path)
