"""Measure how long learning a large model's layout from vLLM's loader takes, on the meta device; prints JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

# name -> (configuration of transformers, its arguments)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3-70B": (
        "LlamaConfig",
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "Qwen3-235B-A22B": (
        "Qwen3MoeConfig",
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": 4096,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
        },
    ),
    "DeepSeek-V3": ("DeepseekV3Config", {"architectures": ["DeepseekV3ForCausalLM"]}),
}


def canonical(config: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the checkpoint's tensors: transformers' names, with one tensor for each expert."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found: dict[str, tuple[tuple[int, ...], Any]] = {}
    for name, parameter in model.named_parameters():
        shape, dtype = tuple(parameter.shape), torch.bfloat16
        layer, _, last = name.rpartition(".")
        if not layer.endswith("experts"):
            found[name] = shape, dtype
            continue
        for expert in range(shape[0]):
            parts = (("gate_proj", shape[1] // 2), ("up_proj", shape[1] // 2))
            for part, rows in parts if last == "gate_up_proj" else (("down_proj", shape[1]),):
                found[f"{layer}.{expert}.{part}.weight"] = (rows, shape[2]), dtype
    return found


def run(name: str) -> dict[str, Any]:
    """Build one model without memory and trace its loader."""
    import torch
    import transformers
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    import refitd

    kind, arguments = MODELS[name]
    config = getattr(transformers, kind)(**arguments)
    shapes = canonical(config)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        asked = EngineArgs(model=folder, skip_tokenizer_init=True, enforce_eager=True, load_format="dummy")
        asked.dtype, asked.max_model_len = "bfloat16", 1024
        vllm_config = asked.create_engine_config()
        with set_current_vllm_config(vllm_config):
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            initialize_model_parallel(1)
            torch.set_default_dtype(torch.bfloat16)
            with torch.device("meta"):
                model = initialize_model(vllm_config)
            params = dict(model.named_parameters())
            began = time.process_time()
            trace = refitd.trace_loader(params, model.load_weights, shapes)
            took = time.process_time() - began
    return {
        "model": name,
        "canonical": len(shapes),
        "params": len(params),
        "gigabytes": round(sum(p.numel() * p.element_size() for p in params.values()) / 1e9),
        "tiles": sum(len(m.tiles or (1,)) for m in trace.metadata.values()),
        "whole": not (trace.computed or trace.untouched or trace.unused),
        "trace_cpu_s": took,
    }


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    print(json.dumps(run(sys.argv[1])), flush=True)
