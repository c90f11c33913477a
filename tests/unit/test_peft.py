"""Checkpoint names and merged weights equal PEFT's (merge_and_unload), bit for bit.

It runs where PEFT is installed (pip install -c constraints.txt ".[peft,test]"), and is skipped elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from refitd import RefusedError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from refitd.adapters.peft import adapter_tensors, merged  # noqa: E402  # after the skips

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "num_hidden_layers": 2}


def llama(dtype: torch.dtype = torch.float32, *, tied: bool = False) -> Any:
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, tie_word_embeddings=tied, **SMALL)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def gpt2() -> Any:
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, **ends)
    return transformers.AutoModelForCausalLM.from_config(config)


def experts() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8}
    config = transformers.Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, **sizes, **SMALL)
    return transformers.AutoModelForCausalLM.from_config(config)


def convolutions() -> Any:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv1d(4, 4, 3), torch.nn.Conv3d(2, 4, 3))


def adapted(model: Any, **options: Any) -> Any:
    """Return the model with non-zero adapters; PEFT's initial adapters have no effect."""
    found = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **options))
    for name, parameter in found.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().view(torch.uint8)


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "float32": (llama, {"target_modules": ["q_proj", "v_proj"]}),
    "bfloat16": (lambda: llama(torch.bfloat16), {"target_modules": "all-linear"}),
    "float16": (lambda: llama(torch.float16), {"target_modules": "all-linear"}),
    "rslora": (llama, {"target_modules": ["down_proj"], "use_rslora": True}),
    "dora": (lambda: llama(torch.bfloat16), {"target_modules": "all-linear", "use_dora": True}),
    "embedding": (lambda: llama(torch.bfloat16), {"target_modules": ["embed_tokens", "q_proj"]}),
    "dora embedding": (llama, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "tied embedding": (lambda: llama(tied=True), {"target_modules": ["embed_tokens"]}),
    "saved module": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "saved tied module": (
        lambda: llama(tied=True),
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "fan in fan out": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "lora_bias": True}),
    "fan in fan out dora": (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
    "pissa": (llama, {"target_modules": ["q_proj"], "init_lora_weights": "pissa"}),
    "fused experts": (
        experts,
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
    "convolutions": (convolutions, {"target_modules": ["0", "1", "2"]}),
}


def as_merged(model: Any) -> None:
    """Compare `merged` with the model after PEFT has merged it."""
    before = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    weights = merged(model)
    found = {name: bits(tensor) for name, tensor in weights}
    assert {
        m.name: (m.shape, m.dtype) for m in weights.metadata
    } == weights.shapes and found.keys() == weights.shapes.keys()
    trained = merged(model, only_trained=True)
    assert {name: bits(tensor) for name, tensor in trained}.keys() == trained.shapes.keys()
    after = model.state_dict()
    assert all(torch.equal(tensor, bits(after[name])) for name, tensor in before.items()), "the trainer's are untouched"
    base = {name: bits(p) for name, p in model.get_base_model().state_dict().items()}
    whole = {name: bits(tensor) for name, tensor in model.merge_and_unload().state_dict().items()}
    assert {name for m in weights.metadata for name in (m.name, *m.aliases)} == whole.keys()
    for m in weights.metadata:
        for name in (m.name, *m.aliases):
            assert torch.equal(found[m.name], whole[name]), name
            # tensors that the adapter omits equal the base model's
            assert m.name in trained.shapes or torch.equal(whole[name], base[name]), name


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_what_is_merged_is_what_peft_merges_and_names_are_those_of_its_checkpoints(
    case: tuple[Callable[[], Any], dict[str, Any]],
) -> None:
    torch.manual_seed(0)
    make, options = case
    model = adapted(make(), **options)
    said = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    alone = adapter_tensors(model)
    assert list(alone) == list(said) and len(alone) == len(said)
    assert all(torch.equal(alone[name], tensor) for name, tensor in said.items())
    as_merged(model)


def test_several_adapters_inactive_ones_and_what_is_merged_already() -> None:
    torch.manual_seed(0)
    model = adapted(llama(), target_modules=["q_proj"])
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    for name, parameter in model.named_parameters():
        if ".other." in name:
            torch.nn.init.normal_(parameter)
    other = adapter_tensors(model, "other")
    assert len(other) == 8 and not any("other" in name for name in other)
    one = {name: bits(tensor) for name, tensor in merged(model)}
    model.base_model.set_adapter(["default", "other"])
    both = {name: bits(tensor) for name, tensor in merged(model)}
    changed = {name for name in one if not torch.equal(one[name], both[name])}
    assert changed == {f"model.layers.{i}.self_attn.{which}_proj.weight" for i in range(2) for which in "qk"}
    model.merge_adapter()  # the adapters are merged into the base weights, as during generation
    assert all(torch.equal(both[name], bits(tensor)) for name, tensor in merged(model))
    model.unmerge_adapter()
    as_merged(model)


def test_the_tensors_are_read_again_and_follow_what_replaces_them() -> None:
    model = adapted(llama(), target_modules=["embed_tokens", "q_proj"])
    alone = adapter_tensors(model)
    name = next(name for name in alone if name.endswith("q_proj.lora_A.weight"))
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.lora_A["default"].weight = torch.nn.Parameter(torch.full_like(layer.lora_A["default"].weight, 3.0))
    assert bool((alone[name] == 3).all())


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no peft model": (llama, "LlamaForCausalLM is no PeftModel"),
    "attention of torch": (
        lambda: adapted(torch.nn.Sequential(torch.nn.MultiheadAttention(16, 2)), target_modules=["0"]),
        r"0: layers of .*MultiheadAttention are not merged; publish the adapters alone",
    ),
    "single tokens": (
        lambda: adapted(llama(), target_modules=["q_proj"], trainable_token_indices=[1, 2]),
        "model.embed_tokens: layers of .*TrainableTokensWrapper are not merged",
    ),
    "both ends of a tie": (
        lambda: adapted(llama(tied=True), target_modules=["embed_tokens", "lm_head"]),
        "model.embed_tokens.weight and lm_head.weight are one weight",
    ),
    "another method": (
        lambda: peft.get_peft_model(llama(), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
        "adapter 'default' is .*IA3; only LoRA",
    ),
    "no memory": (lambda: adapted(llama(), target_modules=["q_proj"]).to("meta"), "it has no memory"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_merged_is_refused_by_name(case: tuple[Callable[[], Any], str]) -> None:
    make, why = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make()
    with pytest.raises(RefusedError, match=why):
        merged(model)


def test_an_adapter_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match="no adapter 'other'; it has default"):
        adapter_tensors(adapted(llama(), target_modules=["q_proj"]), "other")
    with pytest.raises(RefusedError, match="no PeftModel"):
        adapter_tensors(llama())
