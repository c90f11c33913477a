"""The ranks of a Megatron-Core job: tensors cut by TP, EP and PP, and how Megatron's attributes describe them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from refitd import ParameterMetadata
from refitd.describe.names import assign_resolved_name_inplace
from tests.support.hf_tensors import Arrays, down, gate_and_up, qkv

PAD = -7


@dataclass
class Job:
    """A Megatron job's ranks, tp fastest, then ep, then pp; expert tensors are split over tp, too."""

    config: dict[str, Any]
    hf: Arrays
    tp: int
    ep: int
    pp: int
    fused_norms: bool
    sequential: bool
    padding: int
    metas: dict[int, list[ParameterMetadata]] = field(default_factory=dict)
    arrays: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)

    def add(
        self, rank: int, name: str, whole: np.ndarray, dim: int | None = None, stride: int = 1, experts: int = 0
    ) -> None:
        """Give a rank its shard of a tensor along `dim`, or the whole tensor."""
        group = [rank - rank % self.tp + i for i in range(self.tp)]
        blocks = [whole] if dim is None else np.split(whole, stride, axis=dim)
        if dim is not None:
            blocks = [np.split(block, self.tp, axis=dim)[rank % self.tp] for block in blocks]
        array = blocks[0] if dim is None else np.concatenate(blocks, axis=dim)
        each, first = self.tp * self.ep, rank // (self.tp * self.ep) * self.tp * self.ep
        meta = ParameterMetadata(
            name=name,
            shape=array.shape,
            dtype="int64",
            element_size=8,
            is_tp=dim is not None,
            partition_dim=dim or 0,
            owner_rank=rank,
            tensor_parallel_group_ranks=group if dim is not None else None,
            is_ep=experts > 0,
            num_experts=experts or None,
            expert_parallel_group_ranks=[*range(first + rank % self.tp, first + each, self.tp)] if experts else None,
        )
        layers = self.config["num_hidden_layers"] // self.pp
        stage = rank // each
        here = {f"decoder.layers.{i}": f"decoder.layers.{i + stage * layers}" for i in range(layers)}
        assign_resolved_name_inplace(meta, layer_module_prefix_map=here)
        self.metas.setdefault(rank, []).append(meta)
        self.arrays[rank, name] = array

    def add_rank(self, rank: int) -> None:
        c, stage = self.config, rank // (self.tp * self.ep)
        layers = c["num_hidden_layers"] // self.pp
        padding = np.full((self.padding, c["hidden_size"]), PAD)
        embedding = np.concatenate([self.hf["model.embed_tokens.weight"], padding])
        if stage == 0:
            self.add(rank, "embedding.word_embeddings.weight", embedding, 0)
        if stage == self.pp - 1:
            self.add(rank, "decoder.final_layernorm.weight", self.hf["model.norm.weight"])
            if "lm_head.weight" in self.hf:
                self.add(rank, "output_layer.weight", np.concatenate([self.hf["lm_head.weight"], padding]), 0)
        for local in range(layers):
            self.add_layer(rank, f"decoder.layers.{local}", f"model.layers.{local + stage * layers}")

    def add_layer(self, rank: int, here: str, at: str) -> None:
        c, hf, kind = self.config, self.hf, self.config["model_type"]
        is_dense = kind in ("llama", "qwen2", "qwen3")
        before = "self_attention.linear_qkv.layer_norm_weight" if self.fused_norms else "input_layernorm.weight"
        self.add(rank, f"{here}.{before}", hf[f"{at}.input_layernorm.weight"])
        after = "mlp.linear_fc1.layer_norm_weight" if self.fused_norms and is_dense else "pre_mlp_layernorm.weight"
        self.add(rank, f"{here}.{after}", hf[f"{at}.post_attention_layernorm.weight"])
        for ending in ("weight", "bias"):
            if f"{at}.self_attn.q_proj.{ending}" in hf:
                parts = [hf[f"{at}.self_attn.{which}_proj.{ending}"] for which in "qkv"]
                whole = qkv(*parts, groups=c["num_key_value_heads"])
                self.add(rank, f"{here}.self_attention.linear_qkv.{ending}", whole, 0)
        self.add(rank, f"{here}.self_attention.linear_proj.weight", hf[f"{at}.self_attn.o_proj.weight"], 1)
        for ours, theirs, dim in (
            ("linear_proj.bias", "o_proj.bias", None),
            ("q_layernorm.weight", "q_norm.weight", None),
            ("k_layernorm.weight", "k_norm.weight", None),
            ("core_attention.softmax_offset", "sinks", 0),
        ):
            if f"{at}.self_attn.{theirs}" in hf:
                self.add(rank, f"{here}.self_attention.{ours}", hf[f"{at}.self_attn.{theirs}"], dim)
        for ours, theirs in (
            ("router.weight", "mlp.gate.weight"),
            ("router.weight", "block_sparse_moe.gate.weight"),
            ("router.weight", "mlp.router.weight"),
            ("router.bias", "mlp.router.bias"),
        ):
            if f"{at}.{theirs}" in hf:
                self.add(rank, f"{here}.mlp.{ours}", hf[f"{at}.{theirs}"])
        experts = 0 if is_dense else c.get("num_experts") or c["num_local_experts"]
        each = experts // self.ep
        first = rank // self.tp % self.ep * each
        for local in range(each) if experts else [None]:
            for ending in ("weight", "bias") if kind == "gpt_oss" else ("weight",):
                names = [self.linear(here, which, ending, local) for which in ("linear_fc1", "linear_fc2")]
                expert = None if local is None else first + local
                gated = np.concatenate(gate_and_up(hf, at, kind, expert, ending))
                self.add(rank, names[0], gated, 0, stride=2, experts=experts)
                second = down(hf, at, kind, expert, ending)
                self.add(rank, names[1], second, 1 if ending == "weight" else None, experts=experts)

    def linear(self, here: str, which: str, ending: str, expert: int | None) -> str:
        if expert is None:
            return f"{here}.mlp.{which}.{ending}"
        if self.sequential:
            return f"{here}.mlp.experts.local_experts.{expert}.{which}.{ending}"
        return f"{here}.mlp.experts.{which}.{ending}{expert}"
