"""Modules whose tensors lie in an arena: versions flip under them, trainers lend them, and both go on as before."""

from __future__ import annotations

import copy
import logging
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import refitd
from refitd.testing import Daemon, Engine

VOCABULARY, WIDTH = 90, 24
TOKENS = torch.arange(VOCABULARY)


class Model(nn.Module):
    """As language models are: tied embeddings, norms, a buffer that is saved and one that is not."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("inv_freq", torch.arange(1.0, 1 + WIDTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.embed(tokens)) / self.inv_freq) * self.scale
        return found


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


def addresses(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(TOKENS).square().mean().backward()
    optimizer.step()


def swap(trainer: refitd.Client, number: int, *targets: refitd.Target) -> refitd.SwapReport:
    with Engine(*targets):
        return trainer.swap("policy", number, timeout=30)


def test_a_trainer_lends_what_it_trains_and_versions_flip_under_an_engine(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        learned, live, built = Model(), Model(), engine.build(Model)
        optimizer = torch.optim.AdamW(learned.parameters(), lr=0.1)
        trained(learned, optimizer)
        for client, model in ((trainer, learned), (engine, live)):
            found = client.adopt(model)
            assert (found.tensors, found.left.keys()) == (4, {"inv_freq"})
        source = trainer.register_source("policy", learned)
        targets = [
            engine.register_target("policy", model, replica=name, mode="flip")
            for name, model in (("adopted", live), ("built", built))
        ]
        before = addresses(live), addresses(built)
        for number in (1, 2, 3):
            trained(learned, optimizer)
            with source.lend(number):
                (given,) = swap(trainer, number, *targets).sources
            assert given.mode == "arena"
            assert same(live, learned) and same(built, learned)
            assert torch.equal(live(TOKENS), learned(TOKENS))
            assert trainer.verify("policy").outcome == "proven"
        assert (addresses(live), addresses(built)) == before
        assert live.head.weight is live.embed.weight and all(target.flips for target in targets)
        again = engine.adopt(live)
        assert (again.tensors, again.nbytes) == (0, 0)
        assert again.left["embed.weight"] == "it lies in an arena already"


@pytest.mark.parametrize("keep_addresses", [False, True])
def test_tensors_with_gaps_between_their_elements_flip(daemon: Daemon, keep_addresses: bool) -> None:
    class Padded(nn.Module):
        """Rows that are padded, as engines do it, columns of one memory, and every second element of one."""

        def __init__(self) -> None:
            super().__init__()
            self.padded = nn.Parameter(torch.zeros(300, 400)[:, :272])
            fused, flat = torch.zeros(50, 60), torch.zeros(101)
            self.left, self.right = nn.Parameter(fused[:, :20]), nn.Parameter(fused[:, 20:])
            self.even, self.odd = nn.Parameter(flat[::2]), nn.Parameter(flat[1::2])

    with daemon.connect() as trainer, daemon.connect() as engine:
        learned, live = Padded(), Padded()
        strides = {name: tensor.stride() for name, tensor in live.state_dict().items()}
        engine.adopt(live, keep_addresses=keep_addresses)
        before = addresses(live)
        source = trainer.register_source("policy", learned)
        target = engine.register_target("policy", live, replica="a", mode="flip")
        published = []
        for number in (1, 2):
            for tensor in learned.parameters():
                nn.init.normal_(tensor)
            published.append(copy.deepcopy(learned.state_dict()))
            source.publish(number)
            swap(trainer, number, target)
            assert same(live, learned) and addresses(live) == before
        with Engine(target):
            assert trainer.rollback("policy", timeout=30).bytes == 0
        assert all(torch.equal(tensor, published[0][name]) for name, tensor in live.state_dict().items())
        assert {name: tensor.stride() for name, tensor in live.state_dict().items()} == strides


def test_tensors_that_leave_the_arena_fail_the_next_commit_by_name(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        learned, live = Model(), Model()
        engine.adopt(live)
        source = trainer.register_source("policy", learned)
        target = engine.register_target("policy", live, replica="a", mode="flip")
        source.publish(1)
        swap(trainer, 1, target)
        live.load_state_dict(learned.state_dict())
        source.publish(2)
        swap(trainer, 2, target)
        with pytest.raises(RuntimeError, match="not resizable"):
            live.norm.weight.untyped_storage().resize_(0)
        live.norm.weight.data = live.norm.weight.data.clone()
        source.publish(3)
        with pytest.raises(refitd.SwapFailed, match=r"norm\.weight: its storage has changed since registration"):
            swap(trainer, 3, target)
        live.load_state_dict(Model().state_dict(), assign=True)
        with pytest.raises(refitd.RefusedError, match="do not lie in memory"):
            daemon.connect().register_target("policy", live, replica="b", mode="flip")


def test_where_the_kernel_refuses_an_exchange_the_version_is_copied_and_the_log_says_so(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with daemon.connect() as trainer, daemon.connect() as engine:
        learned, live = Model(700_000), Model(700_000)  # 64 MiB
        engine.adopt(live)
        source = trainer.register_source("policy", learned)
        target = engine.register_target("policy", live, replica="a")
        assert target.flips
        source.publish(1)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        with caplog.at_level(logging.WARNING, "refitd.client"), Engine(target):
            resource.setrlimit(resource.RLIMIT_AS, (mapped + (48 << 20), hard))
            try:
                trainer.swap("policy", 1, timeout=30)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        assert "check `ulimit -v`" in caplog.text and "the version is copied" in caplog.text
        assert same(live, learned) and trainer.verify("policy").outcome == "proven"
        learned.norm.bias.data.fill_(3.0)
        source.publish(2)
        swap(trainer, 2, target)
        assert same(live, learned) and trainer.verify("policy").outcome == "proven"


def test_what_fails_leaves_the_module_and_the_node_as_they_were(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[node]\nmax_arena_bytes = 1048576\n")
    with daemon.connect() as client:
        model, large = Model(), nn.Linear(1000, 1000)
        before = addresses(model), addresses(large)
        source = client.register_source("policy", model, slots=1)
        with pytest.raises(refitd.RefusedError, match=r"norm\.weight: tensors outside this module \(1"):
            client.adopt(model)
        source.close()
        del source
        with pytest.raises(refitd.ArenaError, match="max_arena_bytes"):
            client.adopt(large)
        with pytest.raises(refitd.ArenaError, match="max_arena_bytes"):
            client.build(lambda: nn.Linear(1000, 1000))
        with pytest.raises(ZeroDivisionError):
            calls = iter((1, 0))
            client.build(lambda: nn.Linear(3, 3 // next(calls)))
        with pytest.raises(refitd.RefusedError, match="timeout"):
            client.adopt(model, timeout=-1)
        with pytest.raises(refitd.RefusedError, match="expected a function"):
            client.build(model.state_dict())  # type: ignore[arg-type]
        assert (addresses(model), addresses(large)) == before
        assert daemon.node().arenas == 0
        client.adopt(model)
        client.free(dict(model.named_parameters()))
        assert daemon.node().arenas == 0 and torch.isfinite(model(TOKENS)).all()


ENGINE = """
import sys, time, refitd, torch
from tests.cluster.test_adopt import Model
torch.manual_seed(int(sys.argv[3]))
client = refitd.connect(sys.argv[1])
if sys.argv[2] == "adopt":
    model = Model()
    client.adopt(model)
else:
    model = client.build(Model)
target = client.register_target("policy", model, replica="crashes", mode="flip")
print("restored", target.version, float(model.norm.bias[0]), flush=True)
while True:
    if (version := target.poll()) is not None:
        print("committed", version, float(model.norm.bias[0]), flush=True)
    time.sleep(0.002)
"""


@pytest.mark.slow
def test_an_engine_that_crashes_and_adopts_its_model_again_has_its_weights_at_once(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon("[node]\nkeep_targets_s = 60.0\n")

    def started(*about: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ENGINE, str(daemon.directory), *about]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def said(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    with daemon.connect() as trainer:
        learned = Model()
        source = trainer.register_source("policy", learned)
        engine = started("adopt", "1")
        try:
            assert said(engine).startswith("restored None")
            for number in (1, 2):
                learned.norm.bias.data.fill_(float(number))
                source.publish(number)
                trainer.swap("policy", number, timeout=30)
                assert said(engine) == f"committed {number} {float(number)}"
            engine.kill()
            engine.wait()
            engine = started("build", "2")
            assert said(engine) == "restored 2 2.0"
            assert trainer.verify("policy").outcome == "proven"
        finally:
            engine.kill()
            engine.wait()


def test_after_its_client_is_closed_a_module_can_be_adopted_by_another(daemon: Daemon) -> None:
    live, learned = Model(), Model()
    with daemon.connect() as trainer, daemon.connect() as first, daemon.connect() as second:
        first.adopt(live)
        weight, before = live.embed.weight, live.embed.weight.detach().clone()
        target = first.register_target("policy", live, replica="a")
        with pytest.raises(refitd.RefusedError, match="an arena of another client that is open"):
            second.adopt(live)
        first.close()
        with pytest.raises(refitd.RefusedError, match=r"tensors outside this module .1: .*a registration"):
            second.adopt(live)
        del target
        view = weight[1:]
        with pytest.raises(refitd.RefusedError, match=r"embed\.weight: tensors outside this module"):
            second.adopt(live)
        del view
        assert second.adopt(live).tensors == 4
        assert live.embed.weight is weight is live.head.weight and torch.equal(weight, before)
        target = second.register_target("policy", live, replica="a", mode="flip")
        source = trainer.register_source("policy", learned)
        source.publish(source.next_version)
        swap(trainer, source.next_version - 1, target)
        assert same(live, learned)
