"""Refit an engine that caches prefixes, driven and following: no prefix is stale, tokens name their versions; JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.engines.vllm_case import checkpoint, daemon, drive

PROMPT = [{"prompt_token_ids": [1 + i % 200 for i in range(300)]}]
IN_FLIGHT = 40


def run() -> dict[str, Any]:
    """Return the engine's answers before and after a version, and after vLLM's reload."""
    import refitd

    work = Path(tempfile.mkdtemp(prefix="rfdc"))
    os.chmod(work, 0o700)
    try:
        nbytes = checkpoint("llama", "tiny", work / "model")
        with daemon(work), refitd.connect(work) as client:
            found = [_refitted(client, work, follow) for follow in (False, True)]
        return {
            "engine": "llama TP1, prefix cache, driven and following",
            "bytes": nbytes,
            "tensors": found[0]["tensors"],
            "equal": all(one["equal"] for one in found),
            "verified": found[0]["verified"],
            "spans": [one["spans"] for one in found],
            "vllm": found[0]["vllm"],
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _refitted(client: Any, work: Path, follow: bool) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file, save_file
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(
        model=str(work / "model"),
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        enable_prefix_caching=True,
        weight_transfer_config={"backend": "refitd"},
        additional_config={"refitd": {"runtime_dir": str(work), "replica": f"{follow}", "follow": follow}},
    )
    greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True, logprobs=1)
    longer = SamplingParams(temperature=0, max_tokens=IN_FLIGHT, detokenize=False, ignore_eos=True)

    def told() -> tuple[Any, Any]:
        (one,) = llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs
        return [{t: said.logprob for t, said in each.items()} for each in one.logprobs], _spans(one)

    given = load_file(work / "model" / "model.safetensors")
    first, first_spans = told()
    hit, _ = told()
    source = client.register_source("policy", given)
    version = source.next_version
    with torch.no_grad():
        for tensor in given.values():
            tensor.add_(torch.randn_like(tensor), alpha=0.02)
    if not follow:
        llm.init_weight_transfer_engine({"init_info": {}})
    source.publish(version)
    if follow:
        engine = llm.llm_engine
        engine.add_request("flight", PROMPT[0], longer)
        done: Any = None
        with ThreadPoolExecutor(1) as beside:
            for _ in range(4):
                engine.step()
            while not client.status().models or not any(m.targets for m in client.status().models):
                pass  # it registers between two steps
            swapped = beside.submit(client.swap, "policy", version, wait=60, timeout=60)
            while done is None or not done.finished:
                done = next(iter(engine.step()), done)
            swapped.result()
        flight = _spans(done.outputs[0])
    else:
        drive(client, llm, version)
        flight = []
    mine, spans = told()
    tensors = len(llm.collective_rpc("compute_weight_checksums")[0])
    verified = str(client.verify("policy").outcome)
    saved = work / f"saved-{follow}"
    shutil.copytree(work / "model", saved)
    save_file(given, saved / "model.safetensors")
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(saved)})
    llm.reset_prefix_cache()
    theirs, _ = told()
    source.close()
    equal = first == hit != mine == theirs
    equal &= first_spans == [("default", 0, 8)] and [name for name, *_ in spans] == [str(version)]
    if follow:  # some tokens of each version, without a gap
        names = [name for name, *_ in flight]
        equal &= names == ["default", str(version)] and flight[0][2] == flight[1][1] and flight[1][2] == IN_FLIGHT
    llm.collective_rpc("shutdown_weight_transfer_engine")
    return {"tensors": tensors, "equal": equal, "verified": verified, "spans": [spans, flight], "vllm": __version__}


def _spans(one: Any) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in one.weight_versions or ()]


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    print(json.dumps(run()), flush=True)
    sys.stdout.flush()
