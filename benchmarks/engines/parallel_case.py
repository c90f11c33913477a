"""Refit a vLLM server of several data-parallel engines that follows or is driven while it answers; prints JSON."""

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

from benchmarks.engines.http_case import PROMPTS
from benchmarks.engines.server import Server
from benchmarks.engines.vllm_case import Trainer, checkpoint, daemon

ROUNDS = 4
ENGINES = 2


def run(kind: str, size: str, follow: bool) -> dict[str, Any]:
    """Return the figures."""
    import refitd

    work = Path(tempfile.mkdtemp(prefix="rfdd"))
    os.chmod(work, 0o700)
    folder, saved = work / "model", work / "saved"
    try:
        nbytes = checkpoint(kind, size, folder)
        saved.mkdir()
        for file in folder.glob("*.json"):
            shutil.copy(file, saved)
        with daemon(work), refitd.connect(work) as client:
            trainer = Trainer(folder, work)
            options = ["--data-parallel-size", str(ENGINES)]
            if kind == "moe":
                options.append("--enable-expert-parallel")
            server = Server(folder, work, options=options, replica="a", follow=follow)
            try:
                server.wait()
                # vLLM's data-parallel experts die at the first generation on CPUs: all_gatherv is not implemented
                found = _refits(client, server, trainer, saved, follow, generates=kind != "moe")
                found["verified"] = str(client.verify("policy").outcome)
            finally:
                server.close()
                trainer.close()
        how = "one model, expert parallel" if kind == "moe" else "two replicas"
        return {
            "engine": f"{kind} DP{ENGINES}, {how}" + (", follows" if follow else ""),
            "bytes": nbytes,
            **found,
        }
    except BaseException:
        log = work / "vllm.log"
        print("\n".join(log.read_text().splitlines()[-400:]) if log.exists() else "", file=sys.stderr)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _refits(
    client: Any, server: Server, trainer: Trainer, saved: Path, follow: bool, generates: bool
) -> dict[str, Any]:
    """Refit some rounds; every engine's weights must equal those after its own reload, and it serves the version."""
    if not follow:
        server.post("init_weight_transfer_engine", {"init_info": {}})
    figures: dict[str, list[float]] = {}
    equal, answers = [], {_answers(server, generates)}
    first = trainer.next_version
    for version in range(first, first + ROUNDS):
        trainer("step", version)
        times = _refit(client, server, trainer, version, follow)
        (model,) = client.status().models
        serves = [target.version == version for target in model.targets]
        mine, told = server.checksums(), _answers(server, generates)
        answers.add(told)
        times |= _disk(server, trainer, saved)
        native = server.checksums(), _answers(server, generates)
        equal.append(serves == [True] * ENGINES and (mine, told) == native)
        if version > first:  # the first round plans, connects, and faults memory in
            for name, seconds in times.items():
                figures.setdefault(name, []).append(seconds)
    return {
        "replicas": sorted({target.replica for target in model.targets}),
        "rounds": ROUNDS - 1,
        "equal": all(equal) and len(answers) == (ROUNDS + 1 if generates else 1),
        "generates": generates,
        "tensors": len(mine[0]),
        **{name: statistics.median(found) for name, found in figures.items()},
    }


def _refit(client: Any, server: Server, trainer: Trainer, version: int, follow: bool) -> dict[str, float]:
    """Refit all engines; return the seconds of the refit, of each call to the server, and of the commit."""
    from refitd.adapters.driving import swap_and_drive

    called: dict[str, float] = {}

    def call(name: str, path: str, body: dict[str, Any]) -> None:
        begun = time.perf_counter()
        server.post(path, body)
        called[name] = time.perf_counter() - begun

    def take_over() -> None:
        call("wake_s", "start_weight_update", {})
        call("refitd_blocked_s", "update_weights", {"update_info": {"version": version}})
        call("empty_call_s", "finish_weight_update", {})

    started = time.perf_counter()
    published = trainer("publish", version)
    if follow:
        report = client.swap("policy", version, wait=120)
    else:
        report = swap_and_drive(client, "policy", version, take_over, wait=120)
    whole = time.perf_counter() - started
    commit = max(member.paused_s for member in report.members)
    return {"refitd_s": whole, "publish_s": published, "refitd_blocked_s": commit, "commit_s": commit, **called}


def _disk(server: Server, trainer: Trainer, saved: Path) -> dict[str, float]:
    """Have every engine load a file that the trainer writes."""
    started = time.perf_counter()
    trainer("save", str(saved))
    begun = time.perf_counter()
    server.post("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(saved)}})
    ended = time.perf_counter()
    return {"disk_s": ended - started, "disk_blocked_s": ended - begun}


def _answers(server: Server, generates: bool) -> tuple[tuple[int, ...], ...]:
    """Return the answers to several prompts, because the engines take turns."""
    return tuple(tuple(server.tokens(prompt, 4)) for prompt in PROMPTS[:6]) if generates else ()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(i) for i in range(ENGINES)))
    print(json.dumps(run(sys.argv[1], sys.argv[2], sys.argv[3] == "follow")), flush=True)
