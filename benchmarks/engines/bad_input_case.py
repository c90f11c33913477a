"""Offer bad input to real vLLM engines: each is refused by name, and the old weights serve; prints JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.engines.server import Server
from benchmarks.engines.vllm_case import PROMPT, SIZES, checkpoint, daemon

PROMPT_TOKENS = PROMPT[0]["prompt_token_ids"]
Weights = dict[str, Any]


def run() -> dict[str, Any]:
    """Return the list of the attempts."""
    work = Path(tempfile.mkdtemp(prefix="rfdb"))
    os.chmod(work, 0o700)
    try:
        nbytes = checkpoint("llama", "tiny", work / "model")
        checkpoint("qwen2", "tiny", work / "tied")
        with daemon(work):
            tried = [*_uneven_heads(work / "model"), *_quantised(work), *_offered(work), *_served(work)]
        return {
            "engine": "llama and qwen2, bad input",
            "tried": tried,
            "bytes": nbytes,
            "equal": True,
            "verified": "proven",
        }
    except BaseException:
        for log in work.glob("vllm*.log"):
            said = [line for line in log.read_text().splitlines() if "leaked" not in line]
            print(f"--- {log.name}", *said[-40:], sep="\n", file=sys.stderr)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _uneven_heads(folder: Path) -> Iterator[str]:
    """Try a TP size that does not divide the heads: vLLM refuses it before it asks a backend."""
    from vllm.engine.arg_utils import EngineArgs

    yield refused(
        "TP3 of 8 heads",
        "8.* must be divisible by .*3",
        lambda: EngineArgs(model=str(folder), tensor_parallel_size=3, skip_tokenizer_init=True).create_engine_config(),
    )


def _quantised(work: Path) -> Iterator[str]:
    """Offer an engine with int8 linear weights plain weights, then its own checkpoint's tensors."""
    import torch

    import refitd

    plain, folder = loaded(work / "model"), work / "int8"
    packed: Weights = {}
    for name, w in plain.items():
        if not name.endswith("_proj.weight"):
            packed[name] = w
            continue
        scale = w.float().abs().amax(1, keepdim=True) / 127
        packed[name] = (w.float() / scale).round().to(torch.int8)
        packed[name + "_scale"] = scale.to(w.dtype)
    saved(packed, work / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    whole = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**whole, "strategy": "channel", "dynamic": False},
        "input_activations": {**whole, "strategy": "token", "dynamic": True},
    }
    how = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    config["quantization_config"] = {**how, "ignore": ["lm_head"], "config_groups": {"group_0": group}}
    (folder / "config.json").write_text(json.dumps(config))
    llm = engine(folder, work, "q")
    answer = _asked(llm)
    before = answer()
    with refitd.connect(work) as client:
        for number, (what, tensors) in enumerate({"plain": plain, "packed": packed}.items()):
            client.register_source(f"quantised-{number}", tensors)
            info = {"init_info": {"model": f"quantised-{number}"}}
            yield refused(
                f"{what} weights for an int8 engine",
                r"this engine is quantised \(compressed-tensors\).* LoRA adapter alone",
                lambda info=info: llm.init_weight_transfer_engine(info),
            )
            assert answer() == before, what


# --- a server without a driver --------------------------------------------------------------------------


def _served(work: Path) -> Iterator[str]:
    """Try a trainer with tied embeddings, then two servers with one name."""
    import refitd

    folder = work / "model"
    settings = {"replica": "a", "follow": True}
    first = Server(folder, work, log="vllm-1.log", **settings)
    second = None
    try:
        weights = loaded(folder)
        with refitd.connect(work) as client:
            tied = {name: w for name, w in weights.items() if name != "lm_head.weight"}
            source = client.register_source("policy", tied)
            first.wait()
            first.wait_for_log("nothing that the trainer offers goes to 1 weights of the engine: lm_head.weight")
            yield "a tied trainer, an untied engine"
            before = first.tokens(PROMPT_TOKENS, 8)
            source.close()
        with refitd.connect(work) as client:  # the same engine finds the trainer that follows
            source = client.register_source("policy", weights)
            source.publish(source.next_version)
            _until(lambda: "a" in _replicas(client), 60, "the engine to register with the second trainer")
            moved(weights, 1)
            version = source.next_version
            source.publish(version)
            client.swap("policy", version, wait=60)
            live = first.tokens(PROMPT_TOKENS, 8)
            assert live != before, "the version is live, and the answer is as before"
            second = Server(folder, work, log="vllm-2.log", **settings)
            second.wait()
            second.wait_for_log("this engine is not refitted: .*'a'")
            assert first.tokens(PROMPT_TOKENS, 8) == live
            assert second.tokens(PROMPT_TOKENS, 8) == before, "an engine that is refused serves its checkpoint"
            yield "two servers with one name"
    finally:
        for server in (first, second):
            if server is not None:
                server.close()


# --- a driven engine, and wrong offers by trainers ---------------------------------------------------------


def _offered(work: Path) -> Iterator[str]:
    """Run an engine with tied embeddings; several trainers in turn offer it other tensors."""
    import torch

    import refitd

    folder = work / "tied"
    llm = engine(folder, work, "b")
    answer = _asked(llm)
    before, weights = answer(), loaded(folder)
    hidden, layers, vocabulary = SIZES["tiny"]
    embed, q, last = (
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        f"model.layers.{layers - 1}.",
    )
    offers: dict[str, tuple[Weights, str]] = {
        "untied": ({**weights, "lm_head.weight": weights[embed].clone()}, "lm_head.weight, and this engine's .* tied"),
        "a larger vocabulary": (
            {**weights, embed: torch.zeros(vocabulary + 64, hidden, dtype=torch.bfloat16)},
            rf"{embed}: the trainer offers \[{vocabulary + 64}, .* has \[{vocabulary}, ",
        ),
        "a layer fewer": (
            {name: w for name, w in weights.items() if not name.startswith(last)},
            rf"nothing that the trainer offers goes to .* {last}",
        ),
        "a layer more": (
            {**weights, q.replace("layers.0", f"layers.{layers}"): weights[q].clone()},
            f"layers.{layers}",
        ),
        "no biases (another architecture)": (
            {name: w for name, w in weights.items() if not name.endswith("bias")},
            "goes to .*bias",
        ),
        "more heads": (
            {**weights, q: torch.zeros(2 * hidden, hidden, dtype=torch.bfloat16)},
            rf"{q}: the trainer offers \[{2 * hidden}, .* has \[{hidden}, ",
        ),
    }
    with refitd.connect(work) as client:
        for number, (what, (tensors, text)) in enumerate(offers.items()):
            client.register_source(f"offer-{number}", tensors)
            info = {"init_info": {"model": f"offer-{number}"}}
            yield refused(what, text, lambda info=info: llm.init_weight_transfer_engine(info))
            assert answer() == before, what
        with refitd.connect(work, name="trainer") as trainer:
            source = trainer.register_source("tied", weights)
            llm.init_weight_transfer_engine({"init_info": {"model": "tied"}})
            source.publish(1)
        # a checkpoint of another revision is offered to the engine that has registered
        saved(offers["a larger vocabulary"][0], folder, work / "revision")
        found = refitd.publish_checkpoint(client, "tied", work / "revision")
        yield refused("a checkpoint of another revision", embed, lambda: client.swap("tied", found.version, wait=10))
        assert answer() == before


# --- helpers ----------------------------------------------------------------------------------------------


def engine(folder: Path, work: Path, replica: str, **settings: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=str(folder),
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        enable_prefix_caching=False,
        weight_transfer_config={"backend": "refitd"},
        additional_config={"refitd": {"runtime_dir": str(work), "replica": replica, "timeout_s": 20}},
        **settings,
    )


def _asked(llm: Any) -> Callable[[], list[int]]:
    """Return a function that asks the engine for a greedy answer."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    return lambda: list(llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs[0].token_ids)


def refused(what: str, text: str, ask: Callable[[], Any]) -> str:
    """Check that a call is refused with an error that matches `text`, a regular expression."""
    import re

    try:
        ask()
    except Exception as exc:
        assert re.search(text, str(exc), re.DOTALL), f"{what}: {exc}"
        print(f"{what}: {str(exc)[-300:]}", file=sys.stderr)
        return what
    raise AssertionError(f"{what}: taken")


def loaded(folder: Path) -> Weights:
    from safetensors.torch import load_file

    return {name: w.clone() for name, w in load_file(folder / "model.safetensors").items()}


def saved(weights: Weights, model: Path, folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    for file in model.glob("*.json"):
        shutil.copy(file, folder)
    save_file(weights, folder / "model.safetensors")


def moved(weights: Weights, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    for w in weights.values():
        w.add_(torch.randn(w.shape, generator=generator).to(w.dtype), alpha=0.05)


def _replicas(client: Any) -> set[str]:
    return {target.replica for model in client.status().models for target in model.targets}


def _until(holds: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.3)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    print(json.dumps(run()), flush=True)
