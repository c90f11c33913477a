"""For any heads, groups and TP, PP, EP, Megatron's shards arrive in Hugging Face's tensors byte for byte."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refitd import ParameterMetadata, Roster
from refitd.describe.renames import rename
from refitd.names import megatron_to_hf
from refitd.plan.build import plan_copies
from refitd.testing import oracle
from tests.support.hf_tensors import hf_shapes, numbered
from tests.support.megatron_cuts import PAD, Job


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


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(jobs())
def test_megatron_ranks_fill_a_hugging_face_model(given: tuple[Job, bool]) -> None:
    job, fused = given
    names = megatron_to_hf(job.config, fused_experts=fused)
    sources = [Roster(rank, source=rename(metas, names, is_target=False)) for rank, metas in job.metas.items()]
    engine = len(sources)
    destination = [whole(name, array, engine) for name, array in job.hf.items()]
    plan = plan_copies([*sources, Roster(engine, destination=destination)])
    oracle.run(plan.table, job.arrays, {(engine, name): array for name, array in job.hf.items()})


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
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
