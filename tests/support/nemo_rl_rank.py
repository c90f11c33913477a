"""One rank of a job (tests/support/nemo_rl.py): a checkpoint engine that does what the driver says, line by line.

python -m tests.support.nemo_rl_rank
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import torch

from refitd.adapters.nemo_rl import RefitdTransport

SHAPES = {
    "model.embed_tokens.weight": ((300, 64), torch.bfloat16),
    "model.layers.0.q_proj.weight": ((64, 64), torch.bfloat16),
    "model.layers.0.k_scale": ((), torch.float32),
    "model.layers.0.mlp.weight": ((128, 64), torch.float32),
    "model.norm.weight": ((64,), torch.bfloat16),
    "model.nothing": ((0, 4), torch.float32),
    "lm_head.weight": ((300, 64), torch.bfloat16),
}
BUCKET = 40_000  # bytes


def values(step: int, tensors: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a step; what was yielded is gone when the next one is asked for."""
    for seed, (name, (shape, dtype)) in enumerate([*SHAPES.items()][: tensors or None]):
        generator = torch.Generator().manual_seed(1000 * step + seed)
        tensor = torch.randn(shape, generator=generator).to(dtype)
        yield name, tensor
        tensor.fill_(-1.0)


def digest(name: str, tensor: torch.Tensor) -> str:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + data).hexdigest()


def expected(step: int, tensors: int = 0) -> dict[str, str]:
    return {name: digest(name, tensor) for name, tensor in values(step, tensors)}


def spoilt(step: int, tensors: int, wrong: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a step's tensors with something wrong in the middle."""
    for position, (name, tensor) in enumerate(values(step, tensors)):
        if wrong == "none":
            return
        if wrong == "other":
            yield f"{name}.other", tensor
        match wrong if position == 3 else "":
            case "raises":
                raise RuntimeError("the gather failed")
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "missing":
                continue
            case "shape":
                yield name, tensor.t()
                continue
            case "twice":
                yield name, tensor
            case "unknown":
                yield f"{name}.other", tensor
        yield name, tensor


class Rank:
    """One engine, and the addresses that its buffers had when it loaded last."""

    def __init__(self) -> None:
        self.engine: RefitdTransport | None = None
        self.addresses: dict[str, int] = {}

    def init(self, settings: dict[str, Any]) -> None:
        if self.engine is None:
            self.engine = RefitdTransport(bucket_size=BUCKET, **settings)

    def do(self, do: str, **given: Any) -> Any:
        if do == "init":
            return self.init(**given)
        if do == "finalize" and self.engine is None:
            return None
        assert self.engine is not None
        match do:
            case "prepare":
                return self.engine.prepare()
            case "join_policy":
                return self.engine.init_policy_process_group(**given)
            case "join_rollout":
                return self.engine.init_rollout_process_group(**given)
            case "finalize":
                return self.engine.finalize()
            case "send":
                return asyncio.run(self.engine.send_weights(spoilt(**given)))
            case "receive":
                return asyncio.run(self.receive(given["wrong"]))
        raise AssertionError(do)

    async def receive(self, wrong: str) -> dict[str, Any]:
        assert self.engine is not None
        loaded, largest, addresses = {}, 0, {}
        async for batch in self.engine.receive_weight_batches():
            if wrong == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if wrong == "raises":
                raise RuntimeError("the loader failed")
            largest = max(largest, sum(tensor.nbytes for _, tensor in batch))
            for name, tensor in batch:
                assert name not in loaded
                loaded[name], addresses[name] = digest(name, tensor), tensor.data_ptr()
        stayed, self.addresses = addresses == self.addresses, addresses
        return {"loaded": loaded, "largest": largest, "stayed": stayed}


def main() -> None:
    rank = Rank()
    for line in sys.stdin:
        try:
            answer = {"result": rank.do(**json.loads(line))}
        except Exception as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
