"""Run TRL's AsyncGRPOTrainer against a vLLM server, with refitd as its weight transfer; prints JSON.

It runs examples/trl_trainer.py with the real rollout worker, trainer and vLLM server. Two functions of TRL need a GPU
and are replaced: the attention kernel, by a plain function with equal arguments, and the look-up of the GPU's speed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.engines.server import Server
from benchmarks.engines.vllm_case import daemon
from refitd.adapters.trl import RefitdWeightTransfer

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 3
WORDS = ["<pad>", "<|im_end|>", "<|im_start|>", "user", "assistant", *(f"w{i}" for i in range(59))]


def attend(
    query: Any, key: Any, value: Any, starts: Any, key_starts: Any, *_: Any, softmax_scale: float, **__: Any
) -> Any:
    """Replace `flash_attn_varlen_func` for TRL: causal attention, segment by segment, aligned at the end.

    Shapes: query [tokens, heads, width]; key, value [keys, fewer heads, width]; starts, key_starts [segments + 1].
    """
    found = []
    repeated = query.shape[1] // key.shape[1]
    for i in range(len(starts) - 1):
        q = query[starts[i] : starts[i + 1]].transpose(0, 1)
        k, v = (
            t[key_starts[i] : key_starts[i + 1]].transpose(0, 1).repeat_interleave(repeated, 0) for t in (key, value)
        )
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        done = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)
        found.append(done.transpose(0, 1))
    return torch.cat(found)


class Checked(RefitdWeightTransfer):
    """Compares the server's weights after each transfer with the weights after its reload of a file."""

    def __init__(self, server: Server, saved: Path, work: Path) -> None:
        super().__init__(server.url, runtime_dir=str(work), cast=torch.bfloat16)
        self._server, self._saved = server, saved
        self.equal: list[bool] = []
        self.seconds: list[float] = []

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send, then compare."""
        from safetensors.torch import save_file

        sent: dict[str, torch.Tensor] = {}

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in iterator:
                sent[name] = tensor.detach().to(torch.bfloat16).clone()
                yield name, tensor

        started = time.perf_counter()
        super().send_weights(noted())
        self.seconds.append(time.perf_counter() - started)
        mine = self._server.checksums()
        save_file(sent, self._saved / "model.safetensors")
        self._server.post("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self._saved)}})
        self.equal.append(mine == self._server.checksums())
        print(f"transfer {len(self.equal)}: equal {self.equal[-1]}", file=sys.stderr, flush=True)


def checkpoint(folder: Path) -> int:
    """Write a small Llama with random weights, and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
    from trl.chat_template_utils import qwen3_chat_template

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = qwen3_chat_template  # the worker accepts only templates that TRL knows
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(WORDS),
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def run() -> dict[str, Any]:
    """Return the results."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    import refitd

    sys.path.insert(0, str(EXAMPLES))
    from trl_trainer import build

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attend)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1e12  # the original asks for the GPU's name
    work = Path(tempfile.mkdtemp(prefix="rfdg"))
    os.chmod(work, 0o700)
    folder, saved = work / "model", work / "saved"
    try:
        nbytes = checkpoint(folder)
        saved.mkdir()
        for file in folder.glob("*.json"):
            shutil.copy(file, saved)
        with daemon(work):
            server = Server(
                folder, work, options=["--no-skip-tokenizer-init", "--served-model-name", "policy", str(folder)]
            )
            try:
                server.wait()
                transfer = Checked(server, saved, work)
                trainer = build(
                    str(folder),
                    server.url,
                    transfer,
                    output_dir=str(work / "out"),
                    max_steps=STEPS,
                    use_cpu=True,
                    bf16=False,
                    gradient_checkpointing=False,
                    gradient_accumulation_steps=1,
                    learning_rate=1e-2,
                    dtype="float32",
                    save_strategy="no",
                    logging_steps=1,
                )
                trainer.train()
                with refitd.connect(work) as client:
                    proven = client.verify("policy").outcome
                    (model,) = client.status().models
                versions = [target.version for target in model.targets]
            finally:
                server.close()
        return {
            "engine": "llama TP1, served over HTTP, TRL's AsyncGRPOTrainer",
            "bytes": nbytes,
            # one transfer before the first step, one after each
            "equal": len(transfer.equal) == STEPS + 1 and all(transfer.equal) and versions == [model.live],
            "steps": trainer.state.global_step,
            "verified": str(proven),
            "refitd_s": sorted(transfer.seconds[1:])[len(transfer.seconds[1:]) // 2],
        }
    except BaseException:
        log = work / "vllm.log"
        print("\n".join(log.read_text().splitlines()[-60:]) if log.exists() else "", file=sys.stderr)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    print(json.dumps(run()), flush=True)
