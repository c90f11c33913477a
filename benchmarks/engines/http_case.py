"""Refit a vLLM server over HTTP through TRL's or vLLM's own trainer protocol while it answers; prints JSON."""

from __future__ import annotations

import json
import operator
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.engines.server import Server
from benchmarks.engines.vllm_case import checkpoint, daemon

PROMPTS = [[7 * i + j + 1 for j in range(5)] for i in range(12)]
# share of equal first tokens; where two tokens are close, another bfloat16 implementation may choose the other
AGREE = 0.75
ROUNDS = 4


class NativeTransfer:
    """vLLM's trainer side, with the methods of TRL's protocol."""

    def __init__(self, url: str, model: Any, work: Path) -> None:
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        import refitd.adapters.vllm
        from refitd.adapters.vllm.trainer import RefitdTrainerInitInfo

        refitd.adapters.vllm.register()
        tensors = {name: p.detach() for name, p in model.named_parameters()}
        register = {"cast": "bfloat16"}
        info = RefitdTrainerInitInfo(
            rank=0, tensors=tensors, runtime_dir=str(work), register=register, engine={"replica": "a"}
        )
        self._trainer = WeightTransferTrainerFactory.trainer_init(info, client=HTTPVLLMWeightSyncClient(url))

    def send_weights(self, _: object) -> None:
        """Send the model's weights."""
        self._trainer.send_weights()

    def pause(self) -> None:
        """VLLM's trainers pause by themselves or not at all."""

    def resume(self) -> None:
        """As `pause`."""

    def destroy(self) -> None:
        """End the transfer."""
        self._trainer.shutdown()


def run(tp: int, size: str, protocol: str) -> dict[str, Any]:
    """Return the figures."""
    import torch
    from transformers import AutoModelForCausalLM

    import refitd
    from refitd.adapters.trl import RefitdWeightTransfer

    # as in the other trainers: while a server computes here, torch's threads wait for each other in every cast
    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp(prefix="rfdt"))
    os.chmod(work, 0o700)
    folder = work / "model"
    try:
        nbytes = checkpoint("llama", size, folder)
        with daemon(work):
            server = Server(folder, work, tp)
            try:
                server.wait()
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
                transfer: Any
                if protocol == "trl":
                    transfer = RefitdWeightTransfer(server.url, runtime_dir=str(work), cast=torch.bfloat16)
                    transfer.init_weight_transfer()
                else:
                    transfer = NativeTransfer(server.url, model, work)
                agreed, seconds, published = [], [], []

                def weights() -> Iterator[tuple[str, torch.Tensor]]:
                    yield from ((name, p.detach()) for name, p in model.named_parameters())
                    published.append(time.perf_counter() - started)

                for seed in range(ROUNDS):
                    generator = torch.Generator().manual_seed(seed)
                    with torch.no_grad():
                        for p in model.parameters():
                            p.add_(torch.randn(p.shape, generator=generator), alpha=0.02)
                    with ThreadPoolExecutor() as busy:
                        under_way = busy.submit(server.tokens, PROMPTS[0], 100)  # while the weights change
                        time.sleep(0.2)
                        started = time.perf_counter()
                        transfer.pause()
                        transfer.send_weights(weights())
                        transfer.resume()
                        seconds.append(time.perf_counter() - started)
                        assert len(under_way.result()) == 100
                    told = [server.tokens(prompt, 1)[0] for prompt in PROMPTS]
                    expected = _expected(model, folder)
                    agreed.append(sum(map(operator.eq, told, expected)) / len(told))
                with refitd.connect(work) as client:
                    proven = client.verify("policy").outcome
                transfer.destroy()
            finally:
                server.close()
            return {
                "engine": f"llama TP{tp}, served over HTTP, {'TRL' if protocol == 'trl' else 'vLLM'}'s protocol",
                "bytes": nbytes,
                "equal": min(agreed) >= AGREE,
                "agreed": min(agreed),
                "verified": str(proven),
                "refitd_s": statistics.median(seconds[1:]),
                **({"publish_s": statistics.median(published[1:])} if published else {}),
            }
    except BaseException:
        log = work / "vllm.log"
        print("\n".join(log.read_text().splitlines()[-30:]) if log.exists() else "", file=sys.stderr)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _expected(model: Any, folder: Path) -> list[int]:
    """Return the greedy next token of each prompt, by transformers with the same weights in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    rounded.load_state_dict({name: p.to(torch.bfloat16) for name, p in model.state_dict().items()})
    with torch.no_grad():
        logits = rounded(torch.tensor(PROMPTS)).logits[:, -1]
    return list(logits.argmax(dim=-1).tolist())


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(i) for i in range(int(sys.argv[1]))))
    print(json.dumps(run(int(sys.argv[1]), sys.argv[2], sys.argv[3])), flush=True)
