"""Modules adopted at their addresses: versions flip, checks read the engine's memory, all memory is freed."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import refitd
from refitd.testing import Daemon, Engine
from tests.support.fleet import go_live
from tests.support.mapped import is_arena
from tests.support.names import policy

WIDTH = 300


class Model(nn.Module):
    """Large weights (one malloc mapping each), small ones (on the heap), a tie, a view."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(700, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 700, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(value)

    def values(self) -> set[float]:
        return {float(value) for tensor in self.state_dict().values() for value in tensor.unique()}


def addresses(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}


def is_shown(tensor: torch.Tensor) -> bool:
    return is_arena(tensor.data_ptr() + tensor.nbytes // 2)


class Fleet:
    """A trainer, and an engine whose module keeps its addresses."""

    def __init__(self, daemon: Daemon, **options: object) -> None:
        self.trainer, self.engine = daemon.connect(), daemon.connect()
        self.learned, self.live = Model(), Model()
        self.before = addresses(self.live)
        self.source = self.trainer.register_source(policy(), self.learned)
        self.adopted = self.engine.adopt(self.live, keep_addresses=True)
        self.target = self.engine.register_target(policy(), self.live, replica="a", **options)  # type: ignore[arg-type]

    def swap(self, number: int) -> refitd.SwapReport:
        self.learned.fill(float(number))
        return go_live(self.trainer, self.source, number, self.target)

    def holds(self, number: int) -> bool:
        return self.live.values() == {float(number)} and addresses(self.live) == self.before

    def close(self) -> None:
        self.trainer.close()
        self.engine.close()


def test_versions_flip_and_proofs_are_of_what_the_engine_reads(daemon: Daemon) -> None:
    fleet = Fleet(daemon, mode="flip")
    found, live, target = fleet.adopted, fleet.live, fleet.target
    assert (found.tensors, found.left.keys()) == (7, {"inv_freq", *(f"layers.{i}.bias" for i in range(3))})
    assert 3 * WIDTH * 4 < found.copied_bytes < 3 * WIDTH * 4 + 4 * 2 * 4096 and target.flips
    for number in (1, 2, 3):
        fleet.swap(number)
        assert fleet.holds(number) and fleet.trainer.verify(policy()).outcome == "proven"
    weight, bias = live.layers[1].weight.detach().view(-1), live.layers[2].bias.detach()
    for place in (weight[:1], weight[WIDTH * 40 :][:1], weight[-1:], bias[3:4]):
        place.add_(1)
        assert fleet.trainer.verify(policy()).outcome == "differs", "beginning, pages, end, small tensor"
        place.sub_(1)
        assert fleet.trainer.verify(policy()).outcome == "proven"
    with Engine(target):
        assert fleet.trainer.rollback(policy(), timeout=30).bytes == 0
    assert fleet.holds(2) and fleet.trainer.verify(policy()).outcome == "proven"
    with Engine(target):
        fleet.trainer.rollback(policy(), 3, timeout=30)
    assert fleet.holds(3)
    target.close()
    assert is_shown(live.embed.weight) and fleet.holds(3)
    with pytest.raises(refitd.RefusedError, match="tensors must be in arenas"):
        fleet.engine.register_target(policy(), live, replica="a", mode="in-place")
    for mode in ("copy", "flip"):
        fleet.target = fleet.engine.register_target(policy(), live, replica="a", mode=mode)
        assert fleet.target.flips is (mode == "flip")
        number = 4 + (mode == "flip")
        fleet.swap(number)
        assert fleet.holds(number) and fleet.trainer.verify(policy()).outcome == "proven"
        fleet.target.close()
    fleet.engine.free(live.embed.weight)
    assert not is_shown(live.embed.weight) and fleet.holds(5)
    fleet.close()


def test_memory_is_private_again_before_anybody_frees_it(daemon: Daemon) -> None:
    fleet = Fleet(daemon)
    fleet.swap(1)
    live, weight = fleet.live, fleet.live.layers[0].weight.detach()
    at, gone = weight.data_ptr() + weight.nbytes // 2, weakref.ref(live)
    assert is_arena(at)
    with pytest.raises(refitd.RefusedError, match="holds tensors of model"):
        fleet.engine.free(live.embed.weight)
    fleet.engine.close()
    assert not is_arena(at) and fleet.holds(1)
    with daemon.connect() as other:
        again = other.adopt(live, keep_addresses=True)
        assert again.copied_bytes == fleet.adopted.copied_bytes and is_arena(at)
        fleet.target = other.register_target(policy(), live, replica="b")
        fleet.swap(2)
        assert fleet.holds(2)
        fleet.target.close()
        del fleet.live, live, fleet.target, weight
        gc.collect()
        assert gone() is None and is_arena(at), "the arena holds the memory of what is freed"
    fleet.trainer.close()
    kept, client = Model(), daemon.connect()
    client.adopt(kept, keep_addresses=True)
    at = kept.embed.weight.data_ptr() + (64 << 10)
    client.close()
    assert not is_arena(at) and len(kept.state_dict()) == 8


def test_a_trainer_that_keeps_addresses_publishes_and_lends_all_of_its_values(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        learned, live = Model(), Model()
        trainer.adopt(learned, keep_addresses=True)
        engine.adopt(live)
        source = trainer.register_source(policy(), learned)
        target = engine.register_target(policy(), live, replica="a", mode="flip")
        for number in (1, 2, 3):
            for param in learned.parameters():
                param.data.add_(torch.rand_like(param))  # in place, as optimizers do
            with Engine(target):
                if number == 1:
                    go_live(trainer, source, number)
                else:
                    with source.lend(number):
                        trainer.swap(policy(), number, timeout=30)
            theirs = learned.state_dict()
            assert all(torch.equal(value, theirs[name]) for name, value in live.state_dict().items())


@pytest.mark.parametrize("keep_addresses", [False, True])
def test_a_part_of_a_module_is_adopted_and_flips_while_the_rest_is_kept(daemon: Daemon, keep_addresses: bool) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        learned, live = Model(), Model()
        live.fill(9.0)
        frozen = live.embed.weight.data_ptr()
        source = trainer.register_source(policy(), learned, partial=["layers.*"])
        assert engine.adopt(live.layers, keep_addresses=keep_addresses).tensors == 6
        with pytest.raises(refitd.RefusedError, match="do not lie in memory"):
            engine.register_target(policy(), live, replica="a", mode="flip")
        target = engine.register_target(policy(), live, replica="a", keeps=["embed.*"], mode="flip")
        for number in (1, 2):
            learned.fill(float(number))
            go_live(trainer, source, number, target)
            assert live.layers.state_dict().keys() and float(live.layers[2].bias.detach()[7]) == number
            assert {float(v) for p in live.layers.parameters() for v in p.detach().unique()} == {float(number)}
            assert live.embed.weight.data_ptr() == frozen and set(live.embed.weight.unique().tolist()) == {9.0}
            assert trainer.verify(policy()).outcome == "proven"


def test_a_tensor_that_is_replaced_fails_the_next_commit_by_name(daemon: Daemon) -> None:
    fleet = Fleet(daemon)
    fleet.swap(1)
    fleet.live.layers[1].share_memory()  # torch moves it
    with pytest.raises(refitd.SwapFailed, match=r"layers\.1\.(weight|bias): its storage has changed"):
        fleet.swap(2)
    fleet.close()
    assert fleet.live.values() <= {1.0, 2.0}


FORKS = """
from tests.support.names import policy
import gc, os, sys
from pathlib import Path
from refitd.testing import Daemon
from tests.cluster.test_adopt_windows import Fleet
with Daemon() as daemon:
    fleet = Fleet(daemon)
    fleet.swap(1)
    if os.fork() == 0:
        fleet.engine.close()
        del fleet.live, fleet.target, fleet.engine
        gc.collect()
        spoilt = [bytearray(b"x") * 400000 for _ in range(50)]
        os._exit(0)
    assert os.wait()[1] == 0
    assert fleet.holds(1) and fleet.trainer.verify(policy()).outcome == "proven"
    fleet.swap(2)
    assert fleet.holds(2) and fleet.trainer.verify(policy()).outcome == "proven"
    fleet.target.close()
    fleet.close()
"""


@pytest.mark.slow
def test_a_fork_that_frees_the_module_changes_nothing_here() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
