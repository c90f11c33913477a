"""What has changed since the version that engines hold is all that crosses between nodes, and it is proven whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine
from tests.support import shards

Nodes = tuple[Daemon, ...]
Tensors = dict[str, torch.Tensor]
COUNTED = {"wide": (700, 901), "tall": (901, 700), "norm": (901,)}


def made(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in COUNTED.items()}


def changed(tensors: Tensors, share: float, seed: int) -> int:
    """Change so many of the elements, in place, at random; return how many."""
    random, count = np.random.default_rng(seed), 0
    for tensor in tensors.values():
        words = tensor.view(torch.uint8).numpy().reshape(-1).view(f"u{tensor.element_size()}")
        which = random.random(len(words)) < share
        words[which] ^= np.array(
            1 << (8 * tensor.element_size() - 9), words.dtype
        )  # of a float32 what bfloat16 has, too
        count += int(which.sum())
    return count


class Pair:
    """A trainer on one node, engines of several kinds on another."""

    def __init__(self, nodes: Callable[..., Nodes], dtype: torch.dtype = torch.bfloat16) -> None:
        self.n0, self.n1 = nodes(2)
        self.trainer, self.engine = self.n0.connect(), self.n1.connect()
        self.held = made(0, dtype)
        self.cast = {} if dtype is torch.bfloat16 else {"cast": str(dtype).removeprefix("torch.")}
        self.source = self.trainer.register_source("policy", self.held)
        self.targets: list[refitd.Target] = []
        self.live: list[Tensors] = []

    def add(self, live: Tensors, replica: str, **options: object) -> refitd.Target:
        self.live.append(live)
        self.targets.append(self.engine.register_target("policy", live, replica=replica, **self.cast, **options))  # type: ignore[arg-type]
        return self.targets[-1]

    def empty(self, *, flips: bool = False) -> Tensors:
        shapes = {name: (shape, torch.bfloat16) for name, shape in COUNTED.items()}
        if flips:
            return self.engine.allocate(shapes)
        return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}

    def swap(self, version: int, *, publish: bool = True) -> refitd.SwapReport:
        if publish:
            self.source.publish(version)
        with Engine(*self.targets):
            return self.trainer.swap("policy", version, timeout=60)

    def check(self) -> None:
        want = {name: tensor.to(torch.bfloat16) for name, tensor in self.held.items()}
        assert all(shards.equal(live, want) for live in self.live)

    def close(self) -> None:
        self.trainer.close()
        self.engine.close()


@pytest.mark.parametrize("mode", ["copy", "flip"])
def test_what_changed_crosses_and_the_whole_version_is_proven(nodes: Callable[..., Nodes], mode: str) -> None:
    """A trainer in float32, an engine in bfloat16."""
    pair = Pair(nodes, torch.float32)
    pair.add(pair.empty(flips=mode == "flip"), "a", mode=mode)
    first = pair.swap(1).crossing
    whole = sum(2 * tensor.numel() for tensor in pair.held.values())
    assert (first.bytes, first.delta_bytes, first.changed) == (whole, 0, None)
    assert first.crossed_bytes >= whole
    for version in (2, 3, 4):
        count = changed(pair.held, 0.01, version)
        crossing = pair.swap(version).crossing
        pair.check()
        assert crossing.bytes == crossing.delta_bytes == whole
        assert crossing.changed_bytes == 2 * count
        assert crossing.crossed_bytes <= 0.02 * whole
    same = pair.swap(5).crossing
    assert (same.changed, same.crossed_bytes < 300) == (0.0, True), "nothing has changed"
    changed(pair.held, 0.6, 6)
    most = pair.swap(6).crossing
    assert most.delta_bytes < 0.1 * whole and most.crossed_bytes > 0.9 * whole, "nearly everything has changed"
    pair.check()
    assert pair.trainer.verify("policy").outcome == "proven"
    (entry, *_) = pair.trainer.history("policy").swaps
    assert entry.report is not None and entry.report.crossing == most
    pair.close()
