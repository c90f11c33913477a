"""python -m benchmarks.engines.zoo_case ARCHITECTURE TP DTYPE: learn and refit one tiny vLLM model; prints JSON.

The truth is vLLM's own `reload_weights` of the same checkpoint: equal checksums of all weights, and equal log
probabilities of a prompt and an answer. Each naming is tried: the tensors of the checkpoint's files, and those of
transformers' `state_dict()`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.vllm_case import daemon, drive

PROMPT = [{"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7, 8]}]

# settings of most tiny configurations
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MAMBA = {"intermediate_size": 256, "state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 8}
MAMBA2 = {
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "num_heads": 16,
    "n_groups": 1,
    "head_dim": 16,
    "intermediate_size": 256,
}

# model_type -> (family, differences from COMMON)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("dense", {}),
    "qwen2": ("tied", {"tie_word_embeddings": True}),
    "qwen3": ("dense", {}),
    "mistral": ("dense", {}),
    "phi": ("dense", {"num_key_value_heads": 4}),
    "gemma2": ("tied", {}),
    "gemma3_text": ("tied", {}),
    "olmo2": ("dense", {}),
    "glm4": ("dense", {}),
    "mixtral": ("moe", EXPERTS),
    "qwen2_moe": ("moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("moe", EXPERTS),
    "olmoe": ("moe", EXPERTS),
    "granitemoe": ("moe", EXPERTS),
    "ernie4_5_moe": ("moe", {**EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}),
    "lfm2_moe": ("moe", {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}),
    "deepseek_v2": ("mla", {**MLA, "topk_method": "greedy"}),
    "deepseek_v3": ("mla", {**MLA, "q_lora_rank": 32, "topk_method": "noaux_tc"}),
    "glm4_moe_lite": ("mla", {**MLA, "q_lora_rank": 32, "topk_method": "noaux_tc"}),
    "mamba": ("mamba", MAMBA),
    "mamba2": ("mamba", MAMBA2),
    "falcon_mamba": ("mamba", MAMBA),
    "falcon_h1": (
        "hybrid",
        {"mamba_d_ssm": 256, "mamba_n_heads": 16, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16},
    ),
    "jamba": (
        "hybrid",
        {**EXPERTS, "mamba_dt_rank": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    ),
    "granitemoehybrid": (
        "hybrid",
        {
            **EXPERTS,
            "mamba_n_heads": 16,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 64,
        },
    ),
    "qwen3_next": (
        "hybrid",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}


def checkpoints(kind: str, dtype: str, folders: list[Path]) -> dict[str, Any]:
    """Write one checkpoint a folder, with other random weights each; return the last one's `state_dict()`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = COMMON | ARCHITECTURES[kind][1]
    config = AutoConfig.for_model(kind, **given)
    state: dict[str, Any] = {}
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        model = model.to(getattr(torch, dtype))
        model.save_pretrained(folder)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return state


def run(kind: str, tp: int, dtype: str) -> dict[str, Any]:
    """Return one row: the outcome of each naming, and times."""
    import refitd

    work = Path(tempfile.mkdtemp(prefix="rfdz"))
    os.chmod(work, 0o700)
    folders = [work / "first", work / "second"]
    try:
        state = checkpoints(kind, dtype, folders)
        with daemon(work), refitd.connect(work) as client:
            return {"model": kind, "family": ARCHITECTURES[kind][0], "tp": tp, "dtype": dtype} | _compared(
                client, work, folders, state, tp, dtype
            )
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compared(
    client: Any, work: Path, folders: list[Path], state: dict[str, Any], tp: int, dtype: str
) -> dict[str, Any]:
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folders[0]),
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=tp,
        max_model_len=128,
        max_num_seqs=4,
        enable_prefix_caching=False,
        weight_transfer_config={"backend": "refitd"},
        additional_config={"refitd": {"runtime_dir": str(work), "replica": "a", "timeout_s": 30.0}},
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=8, detokenize=False, ignore_eos=True, logprobs=1, prompt_logprobs=1
    )

    def told() -> Any:
        (found,) = llm.generate(PROMPT, greedy, use_tqdm=False)
        said = [*(found.prompt_logprobs or [])[1:], *(found.outputs[0].logprobs or [])]
        return [{token: one.logprob for token, one in each.items()} for each in said]

    def holds() -> Any:
        return llm.collective_rpc("compute_weight_checksums"), told()

    def reload(folder: Path) -> Any:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        return holds()

    first = holds()
    second = reload(folders[1])
    row: dict[str, Any] = {"reload": "right" if reload(folders[0]) == first and first != second else "WRONG"}
    files = {}
    for file in sorted(folders[1].glob("*.safetensors")):
        files |= load_file(file)
    row["same_names"] = files.keys() == state.keys()
    for naming, tensors in (("on disk", files), ("in memory", state)):
        if naming == "in memory" and row["same_names"]:
            row[naming] = row["on disk"]
            continue
        reload(folders[0])
        source = client.register_source("policy", tensors)
        try:
            version = source.next_version
            started = time.perf_counter()
            llm.init_weight_transfer_engine({"init_info": {}})
            row.setdefault("bind_s", time.perf_counter() - started)
            source.publish(version)
            row["commit_s"] = drive(client, llm, version)["commit_s"]
            found = holds()
            row[naming] = "equal" if found == second else "WRONG" if found[0] != second[0] else "WRONG answers"
            row["verify"] = str(client.verify("policy").outcome)
            llm.collective_rpc("shutdown_weight_transfer_engine")
        except Exception as exc:
            row[naming] = f"refused: {type(exc).__name__}: {exc}"[:600]
        finally:
            source.close()
    return row


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    workers = int(sys.argv[2])
    if workers == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(i) for i in range(workers)))
    print(json.dumps(run(sys.argv[1], workers, sys.argv[3])), flush=True)
