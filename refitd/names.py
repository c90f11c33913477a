"""Map the tensor names of one framework to another, for `names=` of registrations: Megatron-Core to Hugging Face.

Each part of an architecture is one function that returns rules; an architecture is a list of its parts. A part that a
config lacks (biases, q and k norms) has no rules; a model that has the part is then refused by name.
Layer norms have two names each: fused into the linear that follows (Transformer Engine), and separate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from refitd.describe.renames import Fused, Names, Padded, Part
from refitd.errors import PlanError
from refitd.text import nearest, shown

__all__ = ["Fused", "Names", "Padded", "Part", "megatron_to_hf"]

Rules = dict[str, str | Fused | Padded]
_HERE, _THERE = "decoder.layers.{layer}", "model.layers.{layer}"
_ATTENTION, _ATTN = f"{_HERE}.self_attention", f"{_THERE}.self_attn"
_EXPERTS = f"{_HERE}.mlp.experts"


def megatron_to_hf(config: Any, *, fused_experts: bool = False) -> Rules:
    """Return the map from a Megatron-Core GPTModel's tensor names to the names of the Hugging Face model.

    Pass it as `names=` of a registration. It is a dict: `{**megatron_to_hf(config), "my.weight": "my.weight"}` adds a
    rule.

    Args:
        config: the Hugging Face config, or a mapping with its keys: `model_type` (or `architectures`) and numbers
            (config.json as read by `json.load`). Known are llama, qwen2, qwen3, qwen3_moe, mixtral, deepseek_v3 and
            gpt_oss.
        fused_experts: name experts as the modules of transformers 5 do, all of a layer in `gate_up_proj` and
            `down_proj`; otherwise as checkpoints do, each by itself. GPT-OSS has fused experts in both.

    Raises:
        PlanError: the architecture is not known, or the config lacks a number.
    """
    said = _Config(config)
    return _ARCHITECTURES[said.model_type](said, fused_experts)


class _Config:
    """A Hugging Face config; a missing number is an error."""

    def __init__(self, config: Any) -> None:
        self._given = config
        kind = self.get("model_type")
        classes = self.get("architectures") or ()
        if kind is None:
            kind = next((known for name, known in _CLASSES.items() if name in classes), None)
        if not isinstance(kind, str) or kind not in _ARCHITECTURES:
            asked = shown(kind if kind is not None else next(iter(classes), config))
            close = ", ".join(nearest(str(kind or next(iter(classes), "")), [*_ARCHITECTURES, *_CLASSES])) or "none"
            raise PlanError(
                f"model_type {asked}: its names in Megatron-Core are not known; known: {', '.join(_ARCHITECTURES)} "
                f"(nearest: {close}); write the map yourself ({{pattern: name, names.Fused or names.Padded}})"
            )
        self.model_type = kind
        self.heads = self.number("num_attention_heads")
        self.kv_heads = self.number("num_key_value_heads", "num_attention_heads")
        self.vocab = self.number("vocab_size")

    def get(self, key: str, default: Any = None) -> Any:
        """Return a key's value."""
        if isinstance(self._given, Mapping):
            return self._given.get(key, default)
        return getattr(self._given, key, default)

    def number(self, *keys: str) -> int:
        """Return the first of these keys that is set, as a whole number of 1 or more."""
        for key in keys:
            value = self.get(key)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise PlanError(f"config: {key} is {shown(value)}, expected a whole number of 1 or more")
                return value
        kind = self.get("model_type") or type(self._given).__name__
        raise PlanError(f"config of {shown(kind)}: it has no {' or '.join(keys)}; pass the model's own config")

    @property
    def head_dim(self) -> int:
        """The size of one head."""
        return self.number("head_dim") if self.get("head_dim") else self.number("hidden_size") // self.heads


@dataclass(frozen=True, slots=True)
class _Expert:
    """How the Hugging Face model names and lays out its experts."""

    fc1: tuple[str, str]  # gate, up
    fc2: str
    stack: int = 0
    is_transposed: bool = False
    alternates: bool = False  # gate and up rows take turns


def _ends(c: _Config) -> Rules:
    return {
        "embedding.word_embeddings.weight": Padded("model.embed_tokens.weight", c.vocab),
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": Padded("lm_head.weight", c.vocab),
    }


def _norms() -> Rules:
    before, after = f"{_THERE}.input_layernorm.weight", f"{_THERE}.post_attention_layernorm.weight"
    return {
        f"{_ATTENTION}.linear_qkv.layer_norm_weight": before,
        f"{_HERE}.input_layernorm.weight": before,
        f"{_HERE}.mlp.linear_fc1.layer_norm_weight": after,
        f"{_HERE}.pre_mlp_layernorm.weight": after,
    }


def _attention(c: _Config, *, qkv_bias: bool, proj_bias: bool = False, qk_norm: bool = False) -> Rules:
    """Query groups of q heads, one k head and one v head."""
    found: Rules = {f"{_ATTENTION}.linear_proj.weight": f"{_ATTN}.o_proj.weight"}
    for kind in ("weight", "bias") if qkv_bias else ("weight",):
        rows = (c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim)
        parts = tuple(Part(f"{_ATTN}.{which}_proj.{kind}", n) for which, n in zip("qkv", rows, strict=True))
        found[f"{_ATTENTION}.linear_qkv.{kind}"] = Fused(parts, groups=c.kv_heads)
    if proj_bias:
        found[f"{_ATTENTION}.linear_proj.bias"] = f"{_ATTN}.o_proj.bias"
    if qk_norm:
        found[f"{_ATTENTION}.q_layernorm.weight"] = f"{_ATTN}.q_norm.weight"
        found[f"{_ATTENTION}.k_layernorm.weight"] = f"{_ATTN}.k_norm.weight"
    return found


def _latent_attention(c: _Config) -> Rules:
    """Multi-head latent attention; without q_lora_rank, queries have one projection."""
    found: Rules = {
        f"{_ATTENTION}.linear_proj.weight": f"{_ATTN}.o_proj.weight",
        f"{_ATTENTION}.linear_kv_down_proj.weight": f"{_ATTN}.kv_a_proj_with_mqa.weight",
        f"{_ATTENTION}.linear_kv_up_proj.layer_norm_weight": f"{_ATTN}.kv_a_layernorm.weight",
        f"{_ATTENTION}.kv_layernorm.weight": f"{_ATTN}.kv_a_layernorm.weight",
        f"{_ATTENTION}.linear_kv_up_proj.weight": f"{_ATTN}.kv_b_proj.weight",
    }
    if c.get("q_lora_rank") is None:
        return {**found, f"{_ATTENTION}.linear_q_proj.weight": f"{_ATTN}.q_proj.weight"}
    return {
        **found,
        f"{_ATTENTION}.linear_q_down_proj.weight": f"{_ATTN}.q_a_proj.weight",
        f"{_ATTENTION}.linear_q_up_proj.layer_norm_weight": f"{_ATTN}.q_a_layernorm.weight",
        f"{_ATTENTION}.q_layernorm.weight": f"{_ATTN}.q_a_layernorm.weight",
        f"{_ATTENTION}.linear_q_up_proj.weight": f"{_ATTN}.q_b_proj.weight",
    }


def _mlp(here: str, there: str, rows: int, *, bias: bool = False) -> Rules:
    found: Rules = {}
    for kind in ("weight", "bias") if bias else ("weight",):
        gate, up = (Part(f"{there}.{which}_proj.{kind}", rows) for which in ("gate", "up"))
        found[f"{here}.linear_fc1.{kind}"] = Fused((gate, up))
        found[f"{here}.linear_fc2.{kind}"] = f"{there}.down_proj.{kind}"
    return found


def _experts(c: _Config, rows: int, named: _Expert, *, kinds: tuple[str, ...] = ("weight",)) -> Rules:
    """Experts of this many gate rows each; Megatron's grouped and sequential ones have one canonical name."""
    hidden, found = c.number("hidden_size"), Rules()
    for kind in kinds:
        ending = "" if kind == "weight" or not named.stack else "_bias"
        is_transposed = named.is_transposed and kind == "weight"
        gate, up = (f"{name}{ending}" for name in named.fc1)
        together = gate == up
        step = 2 if named.alternates else 1
        second = 1 if named.alternates else rows if together else 0
        found[f"{_EXPERTS}.linear_fc1.{kind}{{expert}}"] = Fused((
            Part(gate, rows, 0, step, named.stack, is_transposed),
            Part(up, rows, second, step, named.stack, is_transposed),
        ))  # fmt: skip
        down = f"{named.fc2}{ending}"
        whole = Fused((Part(down, hidden, 0, 1, named.stack, is_transposed),))
        found[f"{_EXPERTS}.linear_fc2.{kind}{{expert}}"] = whole if named.stack else down
    return found


def _stacked(experts: int) -> _Expert:
    both, down = f"{_THERE}.mlp.experts.gate_up_proj", f"{_THERE}.mlp.experts.down_proj"
    return _Expert((both, both), down, stack=experts)


def _each(moe: str = f"{_THERE}.mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> _Expert:
    gate, up, down = (f"{moe}.experts.{{expert}}.{name}.weight" for name in names)
    return _Expert((gate, up), down)


def _dense(c: _Config, attention: Rules, *, mlp_bias: bool = False) -> Rules:
    mlp = _mlp(f"{_HERE}.mlp", f"{_THERE}.mlp", c.number("intermediate_size"), bias=mlp_bias)
    return {**_ends(c), **_norms(), **attention, **mlp}


def _llama(c: _Config, fused_experts: bool) -> Rules:
    bias = bool(c.get("attention_bias"))
    return _dense(c, _attention(c, qkv_bias=bias, proj_bias=bias), mlp_bias=bool(c.get("mlp_bias")))


def _qwen2(c: _Config, fused_experts: bool) -> Rules:
    return _dense(c, _attention(c, qkv_bias=True))


def _qwen3(c: _Config, fused_experts: bool) -> Rules:
    bias = bool(c.get("attention_bias"))
    return _dense(c, _attention(c, qkv_bias=bias, proj_bias=bias, qk_norm=True))


def _qwen3_moe(c: _Config, fused_experts: bool) -> Rules:
    experts = _stacked(c.number("num_experts", "num_local_experts")) if fused_experts else _each()
    return {
        **_qwen3(c, fused_experts),
        f"{_HERE}.mlp.router.weight": f"{_THERE}.mlp.gate.weight",
        **_experts(c, c.number("moe_intermediate_size"), experts),
    }


def _mixtral(c: _Config, fused_experts: bool) -> Rules:
    moe = f"{_THERE}.mlp" if fused_experts else f"{_THERE}.block_sparse_moe"
    experts = _stacked(c.number("num_local_experts")) if fused_experts else _each(moe, ("w1", "w3", "w2"))
    return {
        **_ends(c),
        **_norms(),
        **_attention(c, qkv_bias=False),
        f"{_HERE}.mlp.router.weight": f"{moe}.gate.weight",
        **_experts(c, c.number("intermediate_size"), experts),
    }


def _deepseek_v3(c: _Config, fused_experts: bool) -> Rules:
    experts = _stacked(c.number("n_routed_experts")) if fused_experts else _each()
    rows = c.number("moe_intermediate_size")
    shared = c.get("n_shared_experts")
    return {
        **_dense(c, _latent_attention(c)),
        f"{_HERE}.mlp.router.weight": f"{_THERE}.mlp.gate.weight",
        f"{_HERE}.mlp.router.expert_bias": f"{_THERE}.mlp.gate.e_score_correction_bias",
        **_experts(c, rows, experts),
        **(_mlp(f"{_HERE}.mlp.shared_experts", f"{_THERE}.mlp.shared_experts", rows * shared) if shared else {}),
    }


def _gpt_oss(c: _Config, fused_experts: bool) -> Rules:
    both, down = f"{_THERE}.mlp.experts.gate_up_proj", f"{_THERE}.mlp.experts.down_proj"
    experts = _Expert((both, both), down, c.number("num_local_experts"), is_transposed=True, alternates=True)
    return {
        **_ends(c),
        **_norms(),
        **_attention(c, qkv_bias=True, proj_bias=True),
        f"{_ATTENTION}.core_attention.softmax_offset": f"{_ATTN}.sinks",
        f"{_HERE}.mlp.router.weight": f"{_THERE}.mlp.router.weight",
        f"{_HERE}.mlp.router.bias": f"{_THERE}.mlp.router.bias",
        **_experts(c, c.number("intermediate_size"), experts, kinds=("weight", "bias")),
    }


_ARCHITECTURES: dict[str, Callable[[_Config, bool], Rules]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}
_CLASSES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
}
