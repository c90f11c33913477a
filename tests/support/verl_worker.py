"""A worker of verl as far as its checkpoint engine sees it, in a process of its own; a test drives it line by line.

    python -m tests.support.verl_worker DIRECTORY-OF-A-DAEMON master|walker|rollout

Each line on stdin is a JSON list: an order and its arguments. The answer is a line of JSON: {"ok": value}, or {"error":
class, "text": what it says}. verl is what is installed, or the stand-in for it; `real_verl` says which.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

SHAPES = {
    "embed.weight": ((32, 8), torch.bfloat16),
    "layers.0.weight": ((16, 24), torch.float32),
    "layers.0.none": ((0, 8), torch.float32),
    "norm.scale": ((), torch.float32),
}
MORE = {**SHAPES, "norm.scale": ((3,), torch.float32)}


def real_verl() -> str:
    """Return the version of verl; "" is the stand-in, which this makes importable."""
    try:
        return importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        stand_in = str(Path(__file__).parent / "verl_stand_in")
        if stand_in not in sys.path:
            sys.path.insert(0, stand_in)
        return ""


def values(seed: int, shapes: dict[str, Any] = SHAPES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, dtype) in shapes.items()}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        whole.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


class Exported:
    """What a trainer exports: temporaries, overwritten when the next one is asked for."""

    def __init__(self, seed: int, how: str) -> None:
        self.walked = 0
        self._seed, self._how = seed, how

    def __iter__(self) -> Iterator[Any]:
        tensors = values(self._seed, MORE if self._how == "other" else SHAPES)
        for name, made in tensors.items():
            tensor = made
            self.walked += 1
            if name == "layers.0.weight":
                if self._how == "raises":
                    raise RuntimeError("the gather failed")
                if self._how == "missing":
                    continue
                if self._how == "shape":
                    tensor = tensor.t()
                if self._how == "twice":
                    yield name, tensor
                if self._how == "dies":
                    os._exit(3)
                if self._how == "slow":
                    time.sleep(1.5)
                if self._how == "no pair":
                    yield tensor
            yield name, tensor
            tensor.fill_(-1)


class Worker:
    """The orders."""

    def __init__(self, directory: str, role: str, settings: dict[str, Any]) -> None:
        from verl.checkpoint_engine.base import CheckpointEngineRegistry

        import refitd.adapters.verl  # noqa: F401  registers the backend

        given = {} if role == "rollout" else {"is_master": role == "master"}
        self.engine = CheckpointEngineRegistry.new(
            "refitd", bucket_size=1 << 20, directory=directory, **given, **settings
        )

    def prepare(self) -> Any:
        return self.engine.prepare()

    def init(self, given: dict[str, Any]) -> None:
        self.engine.init_process_group(**given)

    def send(self, step: int | None, seed: int, how: str) -> Any:
        exported = Exported(seed, how)
        try:
            metrics = asyncio.run(self.engine.send_weights(iter(exported), global_steps=step))
        except Exception as exc:
            exc.add_note(f"walked {exported.walked}")
            raise
        return {"walked": exported.walked, **metrics}

    def receive(self, step: int | None) -> str:
        async def received() -> str:
            found: dict[str, torch.Tensor] = {}
            async for name, tensor in self.engine.receive_weights(global_steps=step):
                assert name not in found
                found[name] = tensor.clone()
            return digest(found)

        return asyncio.run(received())

    def finalize(self) -> None:
        self.engine.finalize()


def main(directory: str, role: str, settings: str) -> None:
    said = sys.stdout
    sys.stdout = sys.stderr
    logging.basicConfig(level=logging.WARNING)
    version = real_verl()
    worker = Worker(directory, role, json.loads(settings))
    print(json.dumps({"ok": version}), file=said, flush=True)
    for line in sys.stdin:
        order, *given = json.loads(line)
        try:
            act: Callable[..., Any] = getattr(worker, order)
            answer = {"ok": act(*given)}
        except Exception as exc:
            notes = " ".join(getattr(exc, "__notes__", ()))
            answer = {"error": type(exc).__name__, "text": f"{exc} {notes}"}
        print(json.dumps(answer), file=said, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
