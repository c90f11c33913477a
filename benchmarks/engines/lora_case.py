"""Refit only the LoRA adapter of a vLLM engine from a PEFT trainer, beside vLLM's loading of it; prints JSON."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.vllm_case import PROMPT, checkpoint, daemon, drive

ROUNDS = 4


def run(tp: int, size: str, follow: bool) -> dict[str, Any]:
    """Return the figures."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    import refitd
    from refitd.adapters.peft import adapter_tensors

    work = Path(tempfile.mkdtemp(prefix="rfdl"))
    os.chmod(work, 0o700)
    folder, adapter = work / "model", work / "adapter"
    try:
        checkpoint("llama", size, folder)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        # alpha / r is 4: vLLM scales B by it
        model = get_peft_model(base, LoraConfig(r=8, lora_alpha=32, target_modules=modules))
        model.save_pretrained(adapter)
        with daemon(work), refitd.connect(work) as client:
            source = client.register_source("policy-lora", adapter_tensors(model), cast="bfloat16")
            llm = _engine(work, folder, adapter, tp, follow)
            if not follow:
                llm.init_weight_transfer_engine({"init_info": {}})
            return {
                "engine": f"llama TP{tp}, a LoRA adapter alone" + (", follows" if follow else ""),
                "bytes": sum(t.numel() * 2 for t in adapter_tensors(model).values()),
                "tensors": len(adapter_tensors(model)),
                **_refits(client, source, llm, model, work, follow),
                "verified": str(client.verify("policy-lora").outcome),
            }
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _engine(work: Path, folder: Path, adapter: Path, tp: int, follow: bool) -> Any:
    from vllm import LLM

    settings = {
        "runtime_dir": str(work),
        "replica": "a",
        "model": "policy-lora",
        "lora": str(adapter),
        "follow": follow,
    }
    return LLM(
        model=str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=tp,
        max_model_len=256,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=16,
        weight_transfer_config={"backend": "refitd"},
        additional_config={"refitd": settings},
    )


def _refits(client: Any, source: Any, llm: Any, model: Any, work: Path, follow: bool) -> dict[str, Any]:
    """Refit some rounds. Answers must equal those after vLLM's load; the base model's answers must not change."""
    import torch
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    greedy = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)

    def answer(request: Any) -> list[int]:
        return list(llm.generate(PROMPT, greedy, use_tqdm=False, lora_request=request)[0].outputs[0].token_ids)

    refitted = LoRARequest("policy-lora", 1, str(work / "adapter"))
    plain = answer(None)
    answers, equal = [answer(refitted)], []
    times: dict[str, list[float]] = {"refitd_s": [], "disk_s": []}
    for version in range(1, ROUNDS + 1):
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if "lora_" in name:
                    tensor.normal_(std=0.05)
        started = time.perf_counter()
        source.publish(version)
        if follow:
            client.swap("policy-lora", version, wait=60)
        else:
            drive(client, llm, version, model="policy-lora")
        times["refitd_s"].append(time.perf_counter() - started)
        told = answer(refitted)
        started = time.perf_counter()
        model.save_pretrained(work / f"v{version}")
        llm.llm_engine.add_lora(LoRARequest("disk", 2, str(work / f"v{version}"), load_inplace=True))
        times["disk_s"].append(time.perf_counter() - started)
        native = answer(LoRARequest("disk", 2, str(work / f"v{version}")))
        equal.append(told == native and answer(None) == plain)
        answers.append(told)
    return {
        "rounds": ROUNDS - 1,
        "equal": all(equal) and len({*map(tuple, answers)}) == len(answers),
        **{name: statistics.median(found[1:]) for name, found in times.items()},
    }


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(i) for i in range(int(sys.argv[1]))))
    print(json.dumps(run(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "follow")), flush=True)
