"""Megatron-Core's GPTModel over TP, PP, VPP and EP, swapped into one Hugging Face model: both compute the same logits.

scripts/try-megatron runs these: they need megatron-core and transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from refitd.testing import Daemon, Engine
from tests.support.programs import ROOT, ended

pytest.importorskip("megatron.core")
transformers: Any = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.own_daemon]

LLAMA = {
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_hidden_layers": 2}
QWEN3_MOE = {**QWEN3, **MOE, "model_type": "qwen3_moe", "num_experts": 4, "norm_topk_prob": True}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 2}
DEEPSEEK = {
    **LLAMA,
    **MOE,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
GPT_OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "sliding_window": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

JOBS: dict[str, dict[str, Any]] = {
    "llama whole": {"hf": LLAMA, "world_size": 1},
    "llama TP2": {"hf": LLAMA, "world_size": 2, "tp": 2},
    "llama TP4, 2 query groups": {"hf": {**LLAMA, "num_key_value_heads": 2}, "world_size": 4, "tp": 4},
    "llama PP2": {"hf": LLAMA, "world_size": 2, "pp": 2},
    "llama PP2, VPP2": {"hf": LLAMA, "world_size": 2, "pp": 2, "vpp": 2},
    "llama TP2, PP2": {"hf": LLAMA, "world_size": 4, "tp": 2, "pp": 2},
    "qwen2 TP2, tied": {"hf": QWEN2, "world_size": 2, "tp": 2},
    "qwen2 PP2, tied": {"hf": QWEN2, "world_size": 2, "pp": 2},
    "qwen3 TP2": {"hf": QWEN3, "world_size": 2, "tp": 2},
    "qwen3_moe EP2": {"hf": QWEN3_MOE, "world_size": 2, "ep": 2},
    "qwen3_moe EP2, grouped": {"hf": QWEN3_MOE, "world_size": 2, "ep": 2, "grouped": True},
    "qwen3_moe TP2 (ETP2), grouped": {"hf": QWEN3_MOE, "world_size": 2, "tp": 2, "grouped": True},
    "qwen3_moe TP2 (ETP2)": {"hf": QWEN3_MOE, "world_size": 2, "tp": 2},
    "qwen3_moe PP2, EP2": {"hf": QWEN3_MOE, "world_size": 4, "pp": 2, "ep": 2},
    "mixtral EP2": {"hf": MIXTRAL, "world_size": 2, "ep": 2},
    "deepseek_v3 TP2": {"hf": DEEPSEEK, "world_size": 2, "tp": 2},
    "deepseek_v3 EP2": {"hf": DEEPSEEK, "world_size": 2, "ep": 2},
    "gpt_oss TP2, ETP1": {"hf": GPT_OSS, "world_size": 2, "tp": 2, "etp": 1},
    "gpt_oss EP2": {"hf": GPT_OSS, "world_size": 2, "ep": 2},
}


class Job:
    """The ranks of a Megatron job."""

    def __init__(self, ranks: list[subprocess.Popen[str]], folder: Path) -> None:
        self.ranks, self.folder = ranks, folder

    def wait(self, word: str) -> None:
        for rank, process in enumerate(self.ranks):
            assert process.stdout is not None
            said = process.stdout.readline().strip()
            log = (self.folder / f"rank{rank}.log").read_text()
            assert said == word, f"rank {rank} says {said!r}, expected {word!r}:\n{log[-4000:]}"

    def end(self) -> None:
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        self.wait("done")


@contextmanager
def started(daemon: Daemon, folder: Path, job: dict[str, Any]) -> Iterator[Job]:
    said = {"padded_vocab": 128, **job, "address": str(daemon.directory)}
    with ExitStack() as stack:
        found = []
        for rank in range(job["world_size"]):
            log = stack.enter_context((folder / f"rank{rank}.log").open("w"))
            command = [sys.executable, "-W", "ignore", "-m", "tests.support.megatron_rank"]
            process = subprocess.Popen(
                [*command, json.dumps(said), str(rank), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
            )
            found.append(stack.enter_context(ended(process)))
        yield Job(found, folder)


def hf_model(config: dict[str, Any]) -> torch.nn.Module:
    """A Hugging Face model of random numbers."""
    torch.manual_seed(7)
    found = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(found, attn_implementation="eager")
    return model.eval().float()


@pytest.fixture
def tokens(tmp_path: Path) -> torch.Tensor:
    found = torch.randint(0, LLAMA["vocab_size"], (1, 12), generator=torch.Generator().manual_seed(1))
    torch.save(found, tmp_path / "tokens.pt")
    return found


def check(model: torch.nn.Module, tokens: torch.Tensor, folder: Path, record: Callable[[str, object], None]) -> None:
    with torch.no_grad():
        ours = model(tokens).logits
    theirs = torch.load(folder / "logits.pt")[..., : ours.shape[-1]]
    record("largest logit", f"{float(theirs.abs().max()):.2f}")
    record("largest difference", f"{float((ours - theirs).abs().max()):.1e}")
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
def test_a_hugging_face_model_computes_what_the_megatron_trainer_computes(
    daemon, tmp_path, tokens, job, record_property
):
    model = hf_model(job["hf"])
    with started(daemon, tmp_path, {**job, "fused_experts": True}) as ranks, daemon.connect() as client:
        ranks.wait("ready")
        target = client.register_target("policy", model, replica="hf")
        with Engine(target):
            client.swap("policy", 1, wait=60)
        check(model, tokens, tmp_path, record_property)
        target.close()
        ranks.end()


@pytest.mark.parametrize("which", ["llama TP2, PP2", "qwen2 PP2, tied", "qwen3_moe EP2, grouped", "gpt_oss TP2, ETP1"])
def test_a_megatron_target_computes_what_the_hugging_face_trainer_computes(
    daemon, tmp_path, tokens, which, record_property
):
    job = {**JOBS[which], "fused_experts": True, "is_target": True}
    model = hf_model(job["hf"])
    with started(daemon, tmp_path, job) as ranks, daemon.connect() as client:
        source = client.register_source("policy", model)
        source.publish(1)
        ranks.wait("ready")
        client.swap("policy", 1, wait=60)
        ranks.end()
        source.close()
    check(model, tokens, tmp_path, record_property)


def test_the_example_runs_as_it_says(daemon, tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("REFITD_")}
    env |= {"REFITD_RUNTIME_DIR": str(daemon.directory)}
    example = str(ROOT / "examples" / "megatron_trainer.py")
    spawn = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    said = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with ended(subprocess.Popen([sys.executable, example, "--engine"], **said)) as engine:
        with ended(subprocess.Popen([sys.executable, *spawn, example, "--tp", "2", "--pp", "2"], **said)) as trainer:
            gave, _ = trainer.communicate(timeout=200)
        took, _ = engine.communicate(timeout=60)
    assert [line.split(" answers ")[0] for line in took.splitlines()] == [f"engine: version {n}" for n in (1, 2, 3)]
    assert gave.splitlines() == [f"trainer: version {n}" for n in (1, 2, 3)]
