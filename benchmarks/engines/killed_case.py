"""Kill the API server of a vLLM engine that follows, and restart it; prints JSON.

Its EngineCore and workers must end by themselves. The next server gets the replica's name, and the next swaps reach it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.restart_case import BACK_S, Versions
from benchmarks.engines.server import Server
from benchmarks.engines.vllm_case import checkpoint, daemon

ENDS_S = 60.0


def run(tp: int) -> dict[str, Any]:
    """Return the results."""
    import refitd

    work = Path(tempfile.mkdtemp(prefix="rfdk"))
    os.chmod(work, 0o700)
    try:
        nbytes = checkpoint("llama", "tiny", work / "model")
        with daemon(work), refitd.connect(work, name="trainer") as trainer, refitd.connect(work) as client:
            found = _killed(client, trainer, work, tp)
        return {"engine": f"llama TP{tp}, follows, its API server killed", "bytes": nbytes, **found}
    except BaseException:
        for log in sorted(work.glob("vllm*.log")):
            print(f"--- {log.name}", *log.read_text().splitlines()[-40:], sep="\n", file=sys.stderr)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _killed(client: Any, trainer: Any, work: Path, tp: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    folder = work / "model"
    weights = {name: w.clone() for name, w in load_file(folder / "model.safetensors").items()}
    source = trainer.register_source("policy", weights)
    versions = Versions(client, source, weights, folder, work)

    def start(number: int) -> Server:
        server = Server(folder, work, tp, log=f"vllm-{number}.log", follow=True, replica="a")
        server.wait(BACK_S)
        versions.registered(tp)
        return server

    server = start(1)
    versions.swap()
    told = [versions.is_served(server, tp)]
    ranks = versions.ranks()
    processes = [os.pidfd_open(pid) for pid in {*ranks, *map(_parent, ranks)} - {server.pid, os.getpid()}]
    killed = time.monotonic()
    server.kill()
    for pidfd in processes:
        left_s = max(0.0, killed + ENDS_S - time.monotonic())
        assert select.select([pidfd], [], [], left_s)[0], "a process of the engine outlives its API server"
        os.close(pidfd)
    server = start(2)
    back_s = time.monotonic() - killed
    try:
        assert not set(versions.ranks()) & set(ranks), "the old ranks are still registered"
        for _ in range(2):
            versions.swap()
            told.append(versions.is_served(server, tp))
        verified = str(client.verify("policy").outcome)
    finally:
        server.close()
    return {"equal": all(told), "verified": verified, "tensors": len(weights), "back_s": back_s}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(i) for i in range(int(sys.argv[1]))))
    print(json.dumps(run(int(sys.argv[1]))), flush=True)
