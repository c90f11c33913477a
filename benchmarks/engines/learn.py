"""scripts/demo --vllm: an FSDP2 trainer learns a rule, and a vLLM server that keeps answering gets better at it."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.engines.server import Server
from benchmarks.engines.vllm_case import daemon

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS, VERSIONS = 2, 16
ASKED, PROMPT = 6, 4


def model(folder: Path) -> None:
    """Write a small Llama with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=256,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)


class Asker:
    """Asks the server continuously, and counts the tokens of its answers that follow the rule."""

    def __init__(self, server: Server) -> None:
        sys.path.insert(0, str(EXAMPLES))
        from vllm_trainer import following

        self._server, self._following = server, following
        self._right: list[bool] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.asked = self.failed = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        chosen = random.Random(0)
        while not self._over.is_set():
            expected = self._following(chosen.randrange(1, 60), PROMPT + ASKED)
            self.asked += 1
            try:
                told = self._server.tokens(expected[:PROMPT], ASKED)
            except OSError:
                self.failed += 1
                continue
            with self._lock:
                self._right += [a == b for a, b in zip(told, expected[PROMPT:], strict=True)]

    def share(self, answers: int = 4) -> float:
        """Return the share of right tokens in the next answers."""
        with self._lock:
            self._right.clear()
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with self._lock:
                if len(self._right) >= answers * ASKED:
                    return sum(self._right) / len(self._right)
            time.sleep(0.02)
        raise RuntimeError("the server does not answer")

    def close(self) -> None:
        """Stop asking."""
        self._over.set()
        self._thread.join(60)


def main() -> int:
    """Run the demo; print one line per version. Returns 0 if the answers got good and none failed."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else torchrun sets it and prints a warning
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    began = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="rfdl"))
    os.chmod(work, 0o700)
    folder = work / "model"
    trainer: subprocess.Popen[str] | None = None
    try:
        model(folder)
        with daemon(work):
            print(f"A server of vLLM answers with a small Llama while {RANKS} FSDP2 ranks teach the Llama a rule: each")
            print("token is five times the one before and three, modulo 61. Each version is swapped in between two of")
            print("the server's steps. Nothing is restarted, and nobody drives the server.")
            print("\nstarting vLLM (half a minute, or a minute)", flush=True)
            server = Server(folder, work, follow=True, replica="vllm")
            try:
                server.wait()
                asker = Asker(server)
                print(f"vLLM answers after {time.monotonic() - began:.0f} s; starting the trainer\n")
                print(f"{'version':>8} {'loss':>7}   tokens of the server's answers that follow the rule")
                first = last = asker.share()
                print(f"{'-':>8} {'':>7}   {first:4.0%} {'#' * round(40 * first)}", flush=True)
                run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
                trainer = subprocess.Popen(
                    [sys.executable, *run, EXAMPLES / "vllm_trainer.py", str(folder), "--versions", str(VERSIONS)],
                    env={**os.environ, "REFITD_RUNTIME_DIR": str(work)},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                assert trainer.stdout is not None
                for line in trainer.stdout:
                    version, loss = line.split()
                    last = asker.share()
                    print(f"{version:>8} {loss:>7}   {last:4.0%} {'#' * round(40 * last)}", flush=True)
                asker.close()
                code = trainer.wait(60)
            finally:
                server.close()
        good = not code and first < 0.3 and last > 0.9 and not asker.failed
        print(f"\n{asker.asked} requests were sent meanwhile, {asker.failed} failed")
        print(f"{'done' if good else f'NOT as expected (trainer: {code})'} in {time.monotonic() - began:.0f} s")
        return 0 if good else 1
    finally:
        if trainer is not None:
            trainer.terminate()  # its ranks end with it
            trainer.wait()
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
