"""Whatever the heads, groups and TP, PP, EP: what Megatron cuts arrives in Hugging Face's tensors, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refitd import ParameterMetadata, Roster
from refitd.describe.names import assign_resolved_name_inplace
from refitd.describe.renames import rename
from refitd.names import megatron_to_hf
from refitd.plan.build import plan_copies
from refitd.testing import oracle
from tests.support.hf_tensors import Arrays, down, gate_and_up, hf_shapes, numbered, qkv

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
        """Give a rank its share of a tensor: along `dim`, or all of it."""
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


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Job, bool]:
    kind = draw(st.sampled_from(["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"]))
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    groups = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if n % tp == 0 or tp % n == 0]))
    per_group = draw(st.sampled_from([n for n in (1, 2, 4) if groups * n % tp == 0] or [tp]))
    head_dim = draw(st.sampled_from([4, 8]))
    config = {
        "model_type": kind,
        "hidden_size": 4 * draw(st.sampled_from([1, 2])),
        "num_attention_heads": groups * per_group,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "intermediate_size": tp * draw(st.integers(1, 3)),
        "num_hidden_layers": pp * draw(st.integers(1, 2)),
        "vocab_size": draw(st.integers(3, 17)),
        "tie_word_embeddings": kind == "qwen2",
    }
    ep = 1
    if kind in ("qwen3_moe", "mixtral", "gpt_oss"):
        ep = draw(st.sampled_from([1, 2]))
        config["num_experts" if kind == "qwen3_moe" else "num_local_experts"] = ep * draw(st.integers(1, 2))
    if kind == "qwen3_moe":
        config["moe_intermediate_size"] = tp * draw(st.integers(1, 3))
    fused = draw(st.booleans())
    padding = -config["vocab_size"] % (tp * draw(st.sampled_from([1, 4])))
    hf = numbered(hf_shapes(config, fused_experts=fused))
    job = Job(config, hf, tp, ep, pp, draw(st.booleans()), draw(st.booleans()), padding)
    for rank in range(tp * ep * pp):
        job.add_rank(rank)
    return job, fused


def whole(name: str, array: np.ndarray, rank: int) -> ParameterMetadata:
    return ParameterMetadata(name, array.shape, "int64", 8, owner_rank=rank, resolved_name=name)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(jobs())
def test_megatron_ranks_fill_a_hugging_face_model(given: tuple[Job, bool]) -> None:
    job, fused = given
    names = megatron_to_hf(job.config, fused_experts=fused)
    sources = [Roster(rank, source=rename(metas, names, is_target=False)) for rank, metas in job.metas.items()]
    engine = len(sources)
    destination = [whole(name, array, engine) for name, array in job.hf.items()]
    plan = plan_copies([*sources, Roster(engine, destination=destination)])
    oracle.run(plan.table, job.arrays, {(engine, name): array for name, array in job.hf.items()})


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(jobs())
def test_a_hugging_face_model_fills_megatron_ranks(given: tuple[Job, bool]) -> None:
    job, fused = given
    names = megatron_to_hf(job.config, fused_experts=fused)
    trainer = len(job.metas)
    source = Roster(trainer, source=[whole(name, array, trainer) for name, array in job.hf.items()])
    targets = [Roster(rank, destination=rename(metas, names, is_target=True)) for rank, metas in job.metas.items()]
    plan = plan_copies([*targets, source])
    wanted = {key: np.where(array == PAD, oracle.EMPTY, array) for key, array in job.arrays.items()}
    oracle.run(plan.table, {(trainer, name): array for name, array in job.hf.items()}, wanted)
    padded = {key for key, array in job.arrays.items() if (array == PAD).any()}
    assert {(int(plan.fills.rank[i]), plan.fills.locals[plan.fills.local[i]]) for i in range(len(plan.fills))} == padded
