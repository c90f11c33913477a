"""Drive an engine of two ranks whose trainer is refused, and then fixed; prints JSON.

The next `init_weight_transfer_engine` must succeed on both ranks, and their later answers must be those of its calls.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.engines.bad_input_case import engine, loaded, moved, refused, saved
from benchmarks.engines.vllm_case import PROMPT, checkpoint, daemon, drive


def run() -> dict[str, Any]:
    """Return the results."""
    import refitd

    work = Path(tempfile.mkdtemp(prefix="rfdx"))
    os.chmod(work, 0o700)
    try:
        nbytes = checkpoint("llama", "tiny", work / "model")
        with daemon(work), refitd.connect(work) as client:
            found = _fixed(client, work)
        return {"engine": "llama TP2, driven, its trainer refused and fixed", "bytes": nbytes, **found}
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fixed(client: Any, work: Path) -> dict[str, Any]:
    import torch

    weights = loaded(work / "model")
    moved(weights, 1)
    saved(weights, work / "model", work / "moved")
    llm = engine(work / "model", work, "a", tensor_parallel_size=2)

    def holds() -> Any:
        return llm.collective_rpc("compute_weight_checksums"), llm.generate(PROMPT, use_tqdm=False)[0].outputs[0].text

    before = holds()
    name = "model.layers.0.self_attn.q_proj.weight"
    rows, columns = weights[name].shape
    wrong = {**weights, name: torch.zeros(rows, 2 * columns, dtype=torch.bfloat16)}
    for _ in range(2):
        source = client.register_source("policy", wrong)
        refused(
            "a wider matrix",
            rf"init_weight_transfer_engine failed on 2 of 2 workers: .*{name}: the trainer offers",
            lambda: llm.init_weight_transfer_engine({"init_info": {}}),
        )
        assert holds() == before
        source.close()
    source = client.register_source("policy", weights)
    version = source.next_version
    llm.init_weight_transfer_engine({"init_info": {}})
    source.publish(version)
    drive(client, llm, version)
    mine, proven = holds(), str(client.verify("policy").outcome)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(work / "moved")})
    return {"equal": mine == holds() != before, "verified": proven}


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    print(json.dumps(run()), flush=True)
