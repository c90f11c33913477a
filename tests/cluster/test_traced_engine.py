"""An engine whose layout was learned from its loader gets exactly the values that the loader would have loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine
from refitd.tracing.loader import check_layout
from tests.support.fleet import go_live
from tests.support.names import policy

HEADS, HEAD, HIDDEN, VOCABULARY, EXPERTS = 4, 8, 16, 13, 3
SHAPES = {
    "embed": (VOCABULARY, HIDDEN),
    "q": (HEADS * HEAD, HIDDEN),
    "k": (HEAD, HIDDEN),
    "v": (HEAD, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD),
    **{f"experts.{i}.{part}": (12, HIDDEN) for i in range(EXPERTS) for part in ("gate", "up")},
}
Weights = Iterable[tuple[str, torch.Tensor]]


def fused(rank: int, world: int) -> tuple[dict[str, torch.Tensor], Callable[[Weights], None]]:
    """One rank of an engine with fused and padded weights in bfloat16, and its loader."""
    q, rows, padded = HEADS // world * HEAD, 12 // world, 16 // world
    held = {
        "qkv": torch.zeros(q + 2 * HEAD, HIDDEN, dtype=torch.bfloat16),
        "o": torch.zeros(HIDDEN, q, dtype=torch.bfloat16),
        "w13": torch.zeros(EXPERTS, 2 * rows, HIDDEN, dtype=torch.bfloat16),
        "embed": torch.zeros(padded, HIDDEN, dtype=torch.bfloat16),
    }

    def load(weights: Weights) -> None:
        for name, w in weights:
            if name in "qkv":
                start, part = {"q": (0, w.chunk(world)[rank]), "k": (q, w), "v": (q + HEAD, w)}[name]
                held["qkv"].narrow(0, start, part.shape[0]).copy_(part)
            elif name == "o":
                held["o"].copy_(w.chunk(world, dim=1)[rank])
            elif name == "embed":
                part = w[rank * padded : (rank + 1) * padded]
                held["embed"][: part.shape[0]].copy_(part)
                held["embed"][part.shape[0] :].fill_(0)
            else:
                _, expert, part_name = name.split(".")
                at = rows * (part_name == "up")
                held["w13"][int(expert), at : at + rows].copy_(w.chunk(world)[rank])

    return held, load


@pytest.mark.parametrize("world", [1, 2])
def test_every_rank_gets_what_its_loader_gives(daemon: Daemon, world: int) -> None:
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        full = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        source = trainer.register_source(policy(), full)
        offered = engine.tensors(policy())
        assert offered == {name: (shape, torch.float32) for name, shape in SHAPES.items()}
        ranks, targets = [], []
        for rank in range(world):
            held, load = fused(rank, world)
            load(full.items())
            trace = refitd.trace_loader(held, load, offered)
            assert not trace.problems() and trace.metadata.keys() == held.keys()
            check_layout(trace, held, full.items())
            metadata = [*trace.metadata.values()]
            targets.append(
                engine.register_target(policy(), held, replica="a", rank=rank, world_size=world, metadata=metadata)
            )
            ranks.append(held)
        with Engine(*targets):
            for version in range(1, 3):
                for tensor in full.values():
                    tensor.copy_(torch.randn(tensor.shape))
                go_live(trainer, source, version)
                for rank, held in enumerate(ranks):
                    native, load = fused(rank, world)
                    load(full.items())
                    for name, tensor in held.items():
                        assert torch.equal(tensor, native[name]), (version, rank, name)
        assert trainer.verify(policy()).outcome == "proven"


def test_a_swap_waits_for_ranks_that_have_yet_to_register_and_publish(daemon: Daemon) -> None:
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        with pytest.raises(refitd.DeadlineExceeded, match=r"no tensors are offered after 2\.0 s"):
            engine.tensors(policy(), timeout=2.0)
        mine = {"w": torch.zeros(4, 4)}
        done: list[refitd.SwapReport] = []
        swap = threading.Thread(target=lambda: done.append(trainer.swap(policy(), 1, wait=60, timeout=60)))
        swap.start()
        source = trainer.register_source(policy(), {"w": torch.ones(4, 4)})
        target = engine.register_target(policy(), mine, replica="a")
        source.publish(1)
        assert target.wait(1) == 1
        swap.join()
        assert done[0].outcome == "committed" and torch.equal(mine["w"], torch.ones(4, 4))
        with pytest.raises(refitd.RefusedError, match="version 9 is not held"):
            trainer.swap(policy(), 9, wait=0.5)
