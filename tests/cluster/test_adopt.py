"""Modules in arenas, adopted or built there: versions flip under them, trainers lend them, both keep working."""

from __future__ import annotations

import copy
import logging
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import refitd
from refitd.testing import Daemon, Engine
from tests.support.fleet import go_live
from tests.support.names import named, policy

VOCABULARY, WIDTH = 90, 24
TOKENS = torch.arange(VOCABULARY)


class Model(nn.Module):
    """The features of a language model: tied embeddings, norms, a persistent and a non-persistent buffer."""

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
        return trainer.swap(policy(), number, timeout=30)


def test_a_trainer_lends_what_it_trains_and_versions_flip_under_an_engine(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        learned, live = Model(), Model()
        with engine.memory(policy(), nbytes=1 << 20):
            built = Model()
        optimizer = torch.optim.AdamW(learned.parameters(), lr=0.1)
        trained(learned, optimizer)
        for client, model in ((trainer, learned), (engine, live)):
            found = client.adopt(model)
            assert (found.tensors, found.left.keys()) == (4, {"inv_freq"})
        source = trainer.register_source(policy(), learned)
        targets = [
            engine.register_target(policy(), model, replica=name, mode="flip")
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
            assert trainer.verify(policy()).outcome == "proven"
        assert (addresses(live), addresses(built)) == before
        assert live.head.weight is live.embed.weight and all(target.flips for target in targets)
        again = engine.adopt(live)
        assert (again.tensors, again.nbytes) == (0, 0)
        assert again.left["embed.weight"] == "it lies in an arena already"


@pytest.mark.parametrize("keep_addresses", [False, True])
def test_tensors_with_gaps_between_their_elements_flip(daemon: Daemon, keep_addresses: bool) -> None:
    class Padded(nn.Module):
        """Rows with an engine's padding, columns of one memory, and every second element of one."""

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
        source = trainer.register_source(policy(), learned)
        target = engine.register_target(policy(), live, replica="a", mode="flip")
        published = []
        for number in (1, 2):
            for tensor in learned.parameters():
                nn.init.normal_(tensor)
            published.append(copy.deepcopy(learned.state_dict()))
            source.publish(number)
            swap(trainer, number, target)
            assert same(live, learned) and addresses(live) == before
        with Engine(target):
            assert trainer.rollback(policy(), timeout=30).bytes == 0
        assert all(torch.equal(tensor, published[0][name]) for name, tensor in live.state_dict().items())
        assert {name: tensor.stride() for name, tensor in live.state_dict().items()} == strides


def test_tensors_that_leave_the_arena_fail_the_next_commit_by_name(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        learned, live = Model(), Model()
        engine.adopt(live)
        source = trainer.register_source(policy(), learned)
        target = engine.register_target(policy(), live, replica="a", mode="flip")
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
            daemon.connect().register_target(policy(), live, replica="b", mode="flip")


def test_where_the_kernel_refuses_an_exchange_the_version_is_copied_and_the_log_says_so(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with daemon.connect() as trainer, daemon.connect() as engine:
        learned, live = Model(700_000), Model(700_000)  # 64 MiB
        engine.adopt(live)
        source = trainer.register_source(policy(), learned)
        target = engine.register_target(policy(), live, replica="a")
        assert target.flips
        source.publish(1)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        with caplog.at_level(logging.WARNING, "refitd.client"), Engine(target):
            resource.setrlimit(resource.RLIMIT_AS, (mapped + (48 << 20), hard))
            try:
                trainer.swap(policy(), 1, timeout=30)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        assert "check `ulimit -v`" in caplog.text and "the version is copied" in caplog.text
        assert same(live, learned) and trainer.verify(policy()).outcome == "proven"
        learned.norm.bias.data.fill_(3.0)
        source.publish(2)
        swap(trainer, 2, target)
        assert same(live, learned) and trainer.verify(policy()).outcome == "proven"


def test_what_fails_leaves_the_module_and_the_node_as_they_were(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[node]\nmax_arena_bytes = 1048576\n")
    with daemon.connect() as client:
        model, large = Model(), nn.Linear(1000, 1000)
        before = addresses(model), addresses(large)
        source = client.register_source(policy(), model, slots=1)
        with pytest.raises(refitd.RefusedError, match=r"norm\.weight: tensors outside this module \(1"):
            client.adopt(model)
        source.close()
        del source
        with pytest.raises(refitd.ArenaError, match="max_arena_bytes"):
            client.adopt(large)
        with pytest.raises(refitd.RefusedError, match="timeout"):
            client.adopt(model, timeout=-1)
        assert (addresses(model), addresses(large)) == before
        assert daemon.node().arenas == 0
        client.adopt(model)
        client.free(dict(model.named_parameters()))
        assert daemon.node().arenas == 0 and torch.isfinite(model(TOKENS)).all()


def test_after_its_client_is_closed_a_module_can_be_adopted_by_another(daemon: Daemon) -> None:
    live, learned = Model(), Model()
    with daemon.connect() as trainer, daemon.connect() as first, daemon.connect() as second:
        first.adopt(live)
        weight, before = live.embed.weight, live.embed.weight.detach().clone()
        target = first.register_target(policy(), live, replica="a")
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
        target = second.register_target(policy(), live, replica="a", mode="flip")
        source = trainer.register_source(policy(), learned)
        source.publish(source.next_version)
        swap(trainer, source.next_version - 1, target)
        assert same(live, learned)


MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [None, MIB])
def test_versions_flip_under_a_model_that_a_block_has_built(daemon: Daemon, nbytes: int | None) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        learned = Model()
        with engine.memory(policy(), nbytes) as placed:
            live = Model()
            live.norm = nn.LayerNorm(24)  # replaces the first norm, and is outside the arena
            live.load_state_dict(Model().state_dict())
            with pytest.raises(refitd.RefusedError, match=rf"client\.adopt\(\) inside client\.memory\('{policy()}'\)"):
                engine.adopt(learned)
            inside = pytest.raises(refitd.RefusedError, match=rf"client\.memory\('{named('draft')}'\) inside")
            with inside, engine.memory(named("draft"), MIB):
                pass
            assert placed.tensors == 0
        assert (placed.tensors, placed.left.keys()) == (4, {"inv_freq"})
        source = trainer.register_source(policy(), learned)
        target = engine.register_target(policy(), live, replica="a", mode="flip")
        for number in (1, 2, 3):
            learned.norm.weight.data.fill_(float(number))
            go_live(trainer, source, number, target)
            assert target.flips and same(live, learned)
            assert trainer.verify(policy()).outcome == "proven"
        assert live.head.weight is live.embed.weight and live.inv_freq.tolist() == learned.inv_freq.tolist()  # type: ignore[operator, union-attr]


def test_a_block_that_fails_leaves_nothing_on_the_node(daemon: Daemon) -> None:
    with daemon.connect() as client:
        with pytest.raises(ZeroDivisionError), client.memory(policy(), MIB):
            model = Model()
            _ = 1 / 0
        assert torch.isfinite(model.norm.weight).all()
        with pytest.raises(refitd.RefusedError, match=r"embed\.weight found no room in"), client.memory(policy(), 4096):
            model = Model()
        with pytest.raises(refitd.RefusedError, match="nothing has been registered"), client.memory(policy()):
            pass
        for wrong in ({"nbytes": 0}, {"nbytes": "much"}, {"timeout": -1}):
            with (
                pytest.raises(refitd.RefusedError, match=next(iter(wrong))),
                client.memory(policy(), **{"nbytes": MIB, **wrong}),
            ):  # type: ignore[arg-type]
                raise AssertionError("the block has begun")
        assert daemon.node().arenas == 0
        client.adopt(model)
