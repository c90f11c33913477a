"""Models that a block builds in an arena: versions flip under them; a block that fails leaves nothing on the node."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import refitd
from refitd.testing import Daemon, Engine

MIB = 1 << 20


class Model(nn.Module):
    """Tied embeddings, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(90, 24)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 90, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("inv_freq", torch.arange(1.0, 25.0), persistent=False)


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("nbytes", [None, MIB])
def test_versions_flip_under_a_model_that_a_block_has_built(daemon: Daemon, nbytes: int | None) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        learned = Model()
        with engine.memory("policy", nbytes) as placed:
            live = Model()
            live.norm = nn.LayerNorm(24)  # the first is gone, and no part of what flips
            live.load_state_dict(Model().state_dict())
            with pytest.raises(refitd.RefusedError, match=r"client\.adopt\(\) inside client\.memory\('policy'\)"):
                engine.adopt(learned)
            with pytest.raises(refitd.RefusedError, match=r"client\.memory\('draft'\) inside"), engine.memory("draft"):
                pass
            assert placed.tensors == 0
        assert (placed.tensors, placed.left.keys()) == (4, {"inv_freq"})
        source = trainer.register_source("policy", learned)
        target = engine.register_target("policy", live, replica="a", mode="flip")
        for number in (1, 2, 3):
            learned.norm.weight.data.fill_(float(number))
            source.publish(number)
            with Engine(target):
                trainer.swap("policy", number, timeout=30)
            assert target.flips and same(live, learned)
            assert trainer.verify("policy").outcome == "proven"
        assert live.head.weight is live.embed.weight and live.inv_freq.tolist() == learned.inv_freq.tolist()  # type: ignore[operator, union-attr]


def test_a_block_that_fails_leaves_nothing_on_the_node(daemon: Daemon) -> None:
    with daemon.connect() as client:
        with pytest.raises(ZeroDivisionError), client.memory("policy", MIB):
            model = Model()
            _ = 1 / 0
        assert torch.isfinite(model.norm.weight).all()
        with pytest.raises(refitd.RefusedError, match=r"embed\.weight found no room in"), client.memory("policy", 4096):
            model = Model()
        with pytest.raises(refitd.RefusedError, match="nothing has been registered"), client.memory("policy"):
            pass
        for wrong in ({"nbytes": 0}, {"nbytes": "much"}, {"timeout": -1}):
            with pytest.raises(refitd.RefusedError, match=next(iter(wrong))), client.memory("policy", **wrong):  # type: ignore[arg-type]
                raise AssertionError("the block has begun")
        assert daemon.node().arenas == 0
        client.adopt(model)
