"""The adapter's changes inside vLLM, with fakes for its modules; scripts/try-engines runs it with vLLM."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

import refitd
from refitd.adapters.vllm import kept_weights, seams


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **held: object) -> None:
    parts = name.split(".")
    for i in range(1, len(parts)):
        if ".".join(parts[:i]) not in sys.modules:
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
    module = ModuleType(name)
    vars(module).update(held)
    monkeypatch.setitem(sys.modules, name, module)


def test_an_older_vllm_or_one_that_lacks_a_function_is_refused_and_a_newer_one_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, "vllm", __version__="0.26.1")
    with pytest.raises(refitd.RefusedError, match=r"vLLM 0\.26\.1 is not .* tested with \(0\.27 to 0\.32\); install"):
        seams.check_version()
    stand_in(monkeypatch, "vllm", __version__="0.33.1rc1")
    seams.check_version()
    assert "vLLM 0.33.1rc1 is newer than the tested versions (0.27 to 0.32)" in caplog.text
    assert seams.seams_of((0, 34)) is seams.TABLE[0, 32]
    monkeypatch.setattr(seams, "missing", ["no module named vllm.v1"])
    with pytest.raises(
        refitd.RefusedError, match=r"0\.33\.1rc1 .* lacks what it needs: no module named vllm\.v1; inst"
    ):
        seams.check_version()


def test_dense_engines_know_that_they_are_several() -> None:
    def parallel(index: int, bound: int | None) -> SimpleNamespace:
        return SimpleNamespace(data_parallel_index=index, elastic_ep_max_dp_size=bound)

    assert [seams.is_one_of_many(parallel(*p)) for p in ((0, None), (0, 1), (0, 2), (1, 1))] == [
        False,
        False,
        True,
        True,
    ]


def test_calls_that_compute_nothing_are_no_steps() -> None:
    steps: list[int | None] = []

    @contextlib.contextmanager
    def step(batch: int | None) -> Iterator[None]:
        steps.append(batch)
        yield

    worker = SimpleNamespace(weight_transfer_engine=SimpleNamespace(refitd_step=step))
    forward = seams._before(lambda self, scheduled=None: "done")
    for scheduled, count in ((3, 1), (0, 1), (1, 2)):
        assert forward(worker, SimpleNamespace(total_num_scheduled_tokens=scheduled)) == "done"
        assert len(steps) == count
    assert forward(worker) == "done" and len(steps) == 3  # a dummy batch is computed with the others
    assert forward(SimpleNamespace(weight_transfer_engine=None)) == "done"


def test_only_engines_of_refitd_on_cpus_rest_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = SimpleNamespace(sched_yield="vLLM's")
    stand_in(monkeypatch, "vllm.distributed.device_communicators", shm_broadcast=queues)
    start = seams._resting(lambda self: "started")

    def executor(backend: str | None, device: str) -> SimpleNamespace:
        transfer = None if backend is None else SimpleNamespace(backend=backend)
        return SimpleNamespace(
            vllm_config=SimpleNamespace(
                weight_transfer_config=transfer, device_config=SimpleNamespace(device_type=device)
            )
        )

    for others in (executor(None, "cpu"), executor("nccl", "cpu"), executor("refitd", "cuda")):
        assert start(others) == "started" and queues.sched_yield == "vLLM's"
    assert start(executor("refitd", "cpu")) == "started"
    assert queues.sched_yield.func is time.sleep and queues.sched_yield.args[0] > 0  # sleeping lets other threads run


def modular(
    self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, expert_map, apply_router_weight_on_input, w
):
    """The signature of vLLM's experts since 0.30."""


def routed(
    self, hidden_states, w1, w2, router_logits, activation, expert_map, apply_router_weight_on_input, group=None
):
    """The signature of vLLM's experts in 0.28 and 0.29."""


@pytest.mark.parametrize("vllm", ["0.27", "0.29", "0.32"])
@pytest.mark.parametrize("weighted", [False, True])
def test_unpacked_experts_are_the_weighted_sum_over_those_that_are_here(
    monkeypatch: pytest.MonkeyPatch, weighted: bool, vllm: str
) -> None:
    def silu_and_mul(activation: str, output: torch.Tensor, given: torch.Tensor) -> None:
        gate, up = given.chunk(2, dim=-1)
        output.copy_(torch.nn.functional.silu(gate) * up)

    stand_in(monkeypatch, "vllm.model_executor.layers.fused_moe.activation", apply_moe_activation=silu_and_mul)
    torch.manual_seed(0)
    tokens, hidden, inner, here = 5, 8, 4, 3
    w1, w2 = torch.randn(here, 2 * inner, hidden), torch.randn(here, hidden, inner)
    x, shares = torch.randn(tokens, hidden), torch.rand(tokens, 2)
    ids = torch.tensor([[0, 5], [1, 4], [3, 5], [0, 1], [4, 2]], dtype=torch.int32)
    if weighted:  # only with one expert for each token
        ids, shares = ids[:, 1:], shares[:, 1:]
    ready = x * shares if weighted else x
    places = torch.tensor([-1, 0, -1, 1, 2, -1])  # experts 1, 3 and 4 of 6
    output = torch.full((tokens, hidden), 7.0)
    chosen = SimpleNamespace(w1_bias=None, w2_bias=None, refitd_unpacked=True)
    chosen._select_experts = lambda x, logits, *groups: (shares, ids)
    if vllm == "0.27":
        layer = SimpleNamespace(w13_weight=w1, w2_weight=w2, expert_map=places)
        output = kept_weights._layer_experts(chosen, layer, x, shares, ids, "silu", 6, weighted)
    elif vllm == "0.29":
        output = kept_weights._computed(routed)(chosen, x, w1, w2, torch.zeros(5, 6), "silu", places, weighted)
    else:
        kept_weights._computed(modular)(chosen, output, ready, w1, w2, shares, ids, "silu", places, weighted, None)
    expected = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for k in range(ids.shape[1]):
            place = int(places[ids[token, k]])
            if place >= 0:
                gate, up = (w1[place] @ ready[token]).chunk(2)
                down = w2[place] @ (torch.nn.functional.silu(gate) * up)
                expected[token] += down * (1.0 if weighted else shares[token, k])
    torch.testing.assert_close(output, expected)


def test_mla_layers_of_refitted_engines_keep_the_weight_that_they_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(backend: str) -> SimpleNamespace:
        return SimpleNamespace(weight_transfer_config=SimpleNamespace(backend=backend))

    def packed(self: SimpleNamespace, dtype: torch.dtype) -> None:
        self.kv_b_proj.weight = torch.empty(0)

    for backend, keeps in (("refitd", True), ("nccl", False)):
        stand_in(monkeypatch, "vllm.config", get_current_vllm_config=lambda backend=backend: config(backend))
        layer = SimpleNamespace(kv_b_proj=SimpleNamespace(weight=torch.ones(2)))
        kept_weights._kept(packed)(layer, torch.bfloat16)
        assert layer.kv_b_proj.weight.numel() == 2 * keeps
    quantised = SimpleNamespace(kv_b_proj=SimpleNamespace(qweight=torch.ones(2)))
    kept_weights._kept(lambda self, dtype: None)(quantised, torch.bfloat16)
    assert not hasattr(quantised.kv_b_proj, "weight")


def test_a_convolution_that_is_packed_again_keeps_the_memory_of_its_views(monkeypatch: pytest.MonkeyPatch) -> None:
    def pack(layer: torch.nn.Module, remove_weight: bool = True) -> None:
        layer.weight.data = layer.weight.data.flip(0)

    config = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="refitd"))
    stand_in(monkeypatch, "vllm.config", get_current_vllm_config=lambda: config)
    layer = torch.nn.Conv1d(6, 6, 4, groups=6, bias=False)
    layer.quant_method = SimpleNamespace(process_weights_after_loading=pack)
    seen = layer.weight.data.fill_(1.0).view(6, 4)  # vLLM's Mamba2 computes with such a view
    for value in (1.0, 2.0, 3.0):  # loaded, then as vLLM's reloads and refitd's commits do: from other memory
        kept_weights._unpacked(pack)(layer, True)
        (packed,) = kept_weights.packed_modules(layer)
        assert packed.before["weight"].data_ptr() == seen.data_ptr() and seen.eq(value).all()
        layer.weight = torch.nn.Parameter(torch.full((6, 1, 4), value + 1), requires_grad=False)
