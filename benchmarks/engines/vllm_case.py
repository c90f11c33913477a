"""Refit one vLLM engine from an FSDP2 trainer of two ranks, by refitd and by vLLM's own methods; prints JSON."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.engines import native

RANKS = 2
PROMPT = [{"prompt_token_ids": [1, 2, 3, 4, 5]}]

# hidden size, layers, vocabulary
SIZES = {"tiny": (256, 4, 1003), "246MB": (768, 10, 32003)}


def checkpoint(kind: str, size: str, folder: Path) -> int:
    """Write a model with random weights; return its bytes in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

    hidden, layers, vocabulary = SIZES[size]
    common: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 3,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
    }
    if kind == "moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2}
        config: Any = Qwen3MoeConfig(**common, **experts, head_dim=hidden // 8)
    else:
        config = LlamaConfig(**common) if kind == "llama" else Qwen2Config(**common, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters())


class Trainer:
    """The trainer's ranks. Each is driven over its pipes; all get equal commands."""

    def __init__(self, folder: Path, directory: Path) -> None:
        store = tempfile.mktemp(dir=directory)
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engines.trainer", str(rank), str(RANKS), store, folder, directory],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        answers = self._answers()
        self.next_version = max(answer["next_version"] for answer in answers)
        self.names: list[str] = answers[0]["names"]

    def __call__(self, *command: object) -> float:
        """Have every rank perform a command; return the seconds until the last rank is done."""
        started = time.perf_counter()
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(command) + "\n")
            rank.stdin.flush()
        self._answers()
        return time.perf_counter() - started

    def _answers(self) -> list[dict[str, Any]]:
        found = []
        for rank in self._ranks:
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise RuntimeError("a trainer rank has ended")
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
            rank.wait(30)


@contextlib.contextmanager
def daemon(directory: Path) -> Iterator[None]:
    """Run a standalone daemon."""
    read, write = os.pipe()
    log = (directory / "daemon.log").open("w")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "refitd_cli.daemon", "serve", "--standalone"),
            *("--runtime-dir", str(directory), "--ready-fd", str(write)),
        ],
        pass_fds=(write,),
        stderr=log,
    )
    os.close(write)
    try:
        if not os.read(read, 64):
            raise RuntimeError((directory / "daemon.log").read_text())
        yield
    finally:
        os.close(read)
        process.terminate()
        process.wait(30)
        log.close()


def run(kind: str, tp: int, size: str, rounds: int, lifecycle: str) -> dict[str, Any]:
    """Return the figures."""
    import refitd

    work = Path(tempfile.mkdtemp(prefix="rfde"))
    os.chmod(work, 0o700)
    folder, saved = work / "model", work / "saved"
    try:
        nbytes = checkpoint(kind, size, folder)
        saved.mkdir()
        for file in folder.glob("*.json"):
            shutil.copy(file, saved)
        with daemon(work), refitd.connect(work) as client:
            return {
                "engine": _engine(kind, tp, lifecycle),
                "bytes": nbytes,
                **_measured(client, work, folder, saved, tp, rounds, lifecycle, is_moe=kind == "moe"),
            }
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _engine(kind: str, tp: int, lifecycle: str) -> str:
    experts = " EP" if kind == "moe" and tp > 1 else ""
    return f"{kind} TP{tp}{experts}" + {"driven": "", "follow": ", follows", "pipeline": " PP2"}[lifecycle]


def _measured(
    client: Any, work: Path, folder: Path, saved: Path, tp: int, rounds: int, lifecycle: str, is_moe: bool
) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm import __version__ as vllm_version

    follow, stages = lifecycle == "follow", 2 if lifecycle == "pipeline" else 1
    trainer = Trainer(folder, work)
    llm = LLM(
        model=str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=tp,
        pipeline_parallel_size=stages,
        enable_expert_parallel=is_moe and tp > 1,
        max_model_len=256,
        enable_prefix_caching=False,
        weight_transfer_config={"backend": "refitd"},
        additional_config={"refitd": {"runtime_dir": str(work), "replica": "a", "follow": follow}},
    )
    greedy = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)

    def answer() -> list[int]:
        if stages > 1:
            return []  # on CPUs vLLM's pipelines die at the first generation
        return list(llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs[0].token_ids)

    started = time.perf_counter()
    if not follow:
        llm.init_weight_transfer_engine({"init_info": {}})
    bound = time.perf_counter() - started
    store, size = str(work / "gloo"), 1 + tp * stages
    with ThreadPoolExecutor(1) as beside:
        joined = beside.submit(trainer, "join", store, size)
        llm.apply_model(functools.partial(native.join, store, size))
        joined.result()
    figures: dict[str, list[float]] = {}
    equal, answers = [], [answer()]
    first = trainer.next_version
    for version in range(first, first + rounds):
        trainer("step", version)
        times = _refit(client, llm, trainer, version, follow)
        mine, told = llm.collective_rpc("compute_weight_checksums"), answer()
        times |= _disk(llm, trainer, saved)
        theirs, reloaded = llm.collective_rpc("compute_weight_checksums"), answer()
        equal.append(mine == theirs and told == reloaded)
        times |= _pickled(llm, saved)
        times |= _gloo(llm, trainer, saved)
        equal.append(llm.collective_rpc("compute_weight_checksums") == mine)
        answers.append(told)
        if version > first:  # the first round plans, connects, and faults memory in
            for name, seconds in times.items():
                figures.setdefault(name, []).append(seconds)
    tensors = len(mine[0])
    differ = stages > 1 or len({*map(tuple, answers)}) == len(answers)
    proven = client.verify("policy").outcome
    trainer.close()
    return {
        "vllm": vllm_version,
        "tensors": tensors,
        "rounds": rounds - 1,
        "equal": all(equal) and differ,
        "generates": stages == 1,
        "verified": str(proven),
        **({} if follow else {"bind_s": bound}),
        **{name: statistics.median(found) for name, found in figures.items()},
    }


def _refit(client: Any, llm: Any, trainer: Trainer, version: int, follow: bool) -> dict[str, float]:
    started = time.perf_counter()
    published = trainer("publish", version)
    if follow:
        report = client.swap("policy", version, wait=60)
        commit = max(member.paused_s for member in report.members)
        found = {"refitd_blocked_s": commit, "commit_s": commit}
    else:
        found = drive(client, llm, version)
    return {"refitd_s": time.perf_counter() - started, "publish_s": published, **found}


def drive(client: Any, llm: Any, version: int, model: str = "policy") -> dict[str, float]:
    """Have the engine commit the version as refitd's trainers do; return the seconds of calls and commit."""
    from refitd.adapters.driving import swap_and_drive

    at = [0.0] * 4

    def take_over() -> None:
        at[0] = time.perf_counter()
        llm.start_weight_update()  # wakes idle workers; the engine still runs until the next call
        at[1] = time.perf_counter()
        llm.update_weights({"update_info": {"version": version}})
        at[2] = time.perf_counter()
        llm.finish_weight_update()  # no effect here
        at[3] = time.perf_counter()

    report = swap_and_drive(client, model, version, take_over, wait=60)
    return {
        "wake_s": at[1] - at[0],
        "refitd_blocked_s": at[2] - at[1],
        "empty_call_s": at[3] - at[2],
        "commit_s": max(member.paused_s for member in report.members),
    }


def _disk(llm: Any, trainer: Trainer, saved: Path) -> dict[str, float]:
    started = time.perf_counter()
    trainer("save", str(saved))
    begun = time.perf_counter()
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(saved)})
    ended = time.perf_counter()
    return {"disk_s": ended - started, "disk_blocked_s": ended - begun}


def _pickled(llm: Any, saved: Path) -> dict[str, float]:
    """Send full tensors with the call; the time to gather them is not counted."""
    from safetensors.torch import load_file

    tensors = list(load_file(saved / "model.safetensors").items())
    started = time.perf_counter()
    llm.apply_model(functools.partial(native.load, tensors))
    return {"pickled_s": time.perf_counter() - started}


def _gloo(llm: Any, trainer: Trainer, saved: Path) -> dict[str, float]:
    """Gather each tensor, send it over gloo from the trainer's first rank, and have vLLM's loader load it."""
    from safetensors import safe_open

    with safe_open(saved / "model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    described = [(name, shapes[name]) for name in trainer.names]
    llm.collective_rpc("reset_weights")  # zeros: later contents came over gloo
    started = time.perf_counter()
    with ThreadPoolExecutor(1) as beside:
        sent = beside.submit(trainer, "broadcast")
        llm.apply_model(functools.partial(native.receive, described))
        sent.result()
    return {"gloo_s": time.perf_counter() - started}


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    workers = 2 if sys.argv[5] == "pipeline" else int(sys.argv[2])
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(i) for i in range(workers)))
    print(
        json.dumps(run(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])),
        flush=True,
    )
