"""Whole Hugging Face tensors as numpy arrays, and their layouts in Megatron-Core, written independently of refitd."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]


def numbered(shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """A tensor of each shape; all elements differ, within and between tensors."""
    return {
        name: zlib.crc32(name.encode()) * 2**24 + np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
        for name, shape in shapes.items()
    }


def hf_shapes(c: dict[str, Any], *, fused_experts: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of transformers' modules (5.9): with experts of a layer in one tensor, or as its checkpoints have."""
    h, kind = c["hidden_size"], c["model_type"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], h), "model.norm.weight": (h,)}
    if not c.get("tie_word_embeddings"):
        found["lm_head.weight"] = (c["vocab_size"], h)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        found |= {f"{at}.input_layernorm.weight": (h,), f"{at}.post_attention_layernorm.weight": (h,)}
        for which, rows in (("q", q), ("k", kv), ("v", kv)):
            found[f"{at}.self_attn.{which}_proj.weight"] = (rows, h)
            if kind in ("qwen2", "gpt_oss"):
                found[f"{at}.self_attn.{which}_proj.bias"] = (rows,)
        found[f"{at}.self_attn.o_proj.weight"] = (h, q)
        if kind == "gpt_oss":
            found |= {f"{at}.self_attn.o_proj.bias": (h,), f"{at}.self_attn.sinks": (c["num_attention_heads"],)}
        if kind.startswith("qwen3"):
            found |= {f"{at}.self_attn.{which}_norm.weight": (c["head_dim"],) for which in "qk"}
        found |= _mlp_shapes(c, at, fused_experts)
    return found


def _mlp_shapes(c: dict[str, Any], at: str, fused: bool) -> dict[str, tuple[int, ...]]:
    h, kind, f = c["hidden_size"], c["model_type"], c["intermediate_size"]
    if kind in ("llama", "qwen2", "qwen3"):
        return {
            f"{at}.mlp.gate_proj.weight": (f, h),
            f"{at}.mlp.up_proj.weight": (f, h),
            f"{at}.mlp.down_proj.weight": (h, f),
        }
    e = c.get("num_experts") or c["num_local_experts"]
    if kind == "gpt_oss":
        return {
            f"{at}.mlp.router.weight": (e, h),
            f"{at}.mlp.router.bias": (e,),
            f"{at}.mlp.experts.gate_up_proj": (e, h, 2 * f),
            f"{at}.mlp.experts.gate_up_proj_bias": (e, 2 * f),
            f"{at}.mlp.experts.down_proj": (e, f, h),
            f"{at}.mlp.experts.down_proj_bias": (e, h),
        }
    f = c.get("moe_intermediate_size") or f
    moe = f"{at}.block_sparse_moe" if kind == "mixtral" and not fused else f"{at}.mlp"
    gate, up, down = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    found: dict[str, tuple[int, ...]] = {f"{moe}.gate.weight": (e, h)}
    if fused:
        return {**found, f"{moe}.experts.gate_up_proj": (e, 2 * f, h), f"{moe}.experts.down_proj": (e, h, f)}
    for i in range(e):
        found |= {f"{moe}.experts.{i}.{name}.weight": (f, h) for name in (gate, up)}
        found[f"{moe}.experts.{i}.{down}.weight"] = (h, f)
    return found


def qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray, groups: int) -> np.ndarray:
    """Megatron's linear_qkv: per query group its q heads, its k head and its v head (weights or biases)."""
    parts = [x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v)]
    return np.concatenate(parts, axis=1).reshape(-1, *q.shape[1:])


def gate_and_up(hf: Arrays, at: str, kind: str, expert: int | None, ending: str) -> tuple[np.ndarray, np.ndarray]:
    """Gate and up rows of a layer's MLP or of one of its experts."""
    if expert is None:
        return hf[f"{at}.mlp.gate_proj.{ending}"], hf[f"{at}.mlp.up_proj.{ending}"]
    if kind == "gpt_oss":
        both = hf[f"{at}.mlp.experts.gate_up_proj{'' if ending == 'weight' else '_bias'}"][expert].T
        return both[::2], both[1::2]
    if f"{at}.mlp.experts.gate_up_proj" in hf:
        gate, up = np.split(hf[f"{at}.mlp.experts.gate_up_proj"][expert], 2)
        return gate, up
    for moe, gate, up in (("mlp", "gate_proj", "up_proj"), ("block_sparse_moe", "w1", "w3")):
        if (name := f"{at}.{moe}.experts.{expert}.{gate}.weight") in hf:
            return hf[name], hf[f"{at}.{moe}.experts.{expert}.{up}.weight"]
    raise KeyError(at)


def down(hf: Arrays, at: str, kind: str, expert: int | None, ending: str) -> np.ndarray:
    """The second linear of a layer's MLP or of one of its experts."""
    if expert is None:
        return hf[f"{at}.mlp.down_proj.{ending}"]
    if kind == "gpt_oss":
        return hf[f"{at}.mlp.experts.down_proj{'' if ending == 'weight' else '_bias'}"][expert].T
    if f"{at}.mlp.experts.down_proj" in hf:
        return hf[f"{at}.mlp.experts.down_proj"][expert]
    for name in (f"{at}.mlp.experts.{expert}.down_proj.weight", f"{at}.block_sparse_moe.experts.{expert}.w2.weight"):
        if name in hf:
            return hf[name]
    raise KeyError(at)
