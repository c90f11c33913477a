"""A declared source publishes exactly the tensors that an iterator yields, or no version."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import refitd
from refitd.adapters.trl import RefitdWeightTransfer
from refitd.testing import Daemon, Engine
from tests.support import shards
from tests.support.names import policy

SHAPES = {"a": ((5, 3), torch.float32), "b": ((4,), torch.bfloat16), "none": ((0, 2), torch.float32)}


def values(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version), dtype=dtype) for name, (shape, dtype) in SHAPES.items()}


def temporaries(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in reversed(values(version).items()):
        yield name, tensor
        tensor.fill_(-1.0)  # the producer continues and overwrites the yielded tensor


def test_what_an_iterator_yields_is_what_engines_get(daemon: Daemon) -> None:
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        source = trainer.declare_source(policy(), SHAPES)
        mine = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}
        with Engine(engine.register_target(policy(), mine, replica="a")):
            for version in range(source.next_version, source.next_version + 3):
                source.publish_from(version, temporaries(version))
                assert trainer.swap(policy(), version, timeout=60).outcome == "committed"
                for name, tensor in values(version).items():
                    assert torch.equal(mine[name], tensor), name
        source.close()
        source.close()
        with pytest.raises(refitd.RefusedError, match="is closed"):
            source.publish_from(9, temporaries(9))


def test_ranks_stream_their_shards(daemon: Daemon) -> None:
    full = shards.whole(1)
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        sources = []
        for rank in range(2):
            mine = shards.cut(full, rank, 2)
            shapes = {name: (tuple(t.shape), t.dtype) for name, t in mine.items()}
            described = shards.describe(mine, rank, 2)
            source = trainer.declare_source(policy(), shapes, rank=rank, world_size=2, metadata=described)
            sources.append((source, mine))
        held = shards.zeros_like(full)
        target = engine.register_target(policy(), held, replica="a", metadata=shards.describe(held, 0, 1))
        for source, mine in sources:
            source.publish_from(1, mine.items())
        with Engine(target):
            trainer.swap(policy(), 1, timeout=60)
        for name, tensor in full.items():
            assert torch.equal(held[name], tensor)


def raises(_: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.zeros(5, 3)
    raise RuntimeError("the gather failed")


BAD: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (lambda v: [("a", v["a"])], r"ended without 2 of 3 tensors: \['b', 'none'\]"),
    "twice": (lambda v: [("a", v["a"]), ("a", v["a"])], "a: the iterator yields it twice"),
    "unknown": (lambda v: [("bb", v["b"])], r"'bb' .*no tensor is declared so; nearest: b"),
    "shape": (lambda v: [("a", v["a"].t())], r"a: it is \[3, 5\] float32, declared were \[5, 3\]"),
    "dtype": (lambda v: [("a", v["a"].double())], "a: it is .* float64, declared were"),
    "meta": (lambda v: [("a", v["a"].to("meta"))], "a: it is on the meta device"),
    "negative": (lambda v: [("a", torch.complex(v["a"], v["a"]).conj().imag)], "a: it is a lazy conjugate or negative"),
    "none": (lambda v: [("a", None)], "a: it is None, expected a tensor"),
    "no pair": (lambda v: [v["b"]], r"expected \(name, tensor\)"),
    "raises": (raises, "the gather failed"),
}


def test_a_stream_that_is_wrong_publishes_nothing(daemon: Daemon) -> None:
    with daemon.connect("trainer") as trainer:
        source = trainer.declare_source(policy(), SHAPES, slots=1)
        for bad, says in BAD.values():
            with pytest.raises((refitd.RefusedError, RuntimeError), match=says):
                source.publish_from(1, bad(values(1)))
            (model,) = trainer.status().models
            assert not model.complete_versions
        source.publish_from(1, values(1).items())
        (model,) = trainer.status().models
        assert model.complete_versions == (1,)
        with pytest.raises(refitd.RefusedError, match="expected \\(shape, dtype\\)"):
            trainer.declare_source("other", {"a": 3})
        with pytest.raises(refitd.RefusedError, match=r"expected a torch\.dtype"):
            trainer.declare_source("other", {"a": ((3,), "float32")})


def test_trls_protocol_makes_what_it_streams_live(daemon: Daemon) -> None:
    """Without servers to drive, and with engines that commit by themselves; scripts/try-engines has servers."""
    transfer = RefitdWeightTransfer(model=policy(), runtime_dir=str(daemon.directory), timeout=60.0)
    with pytest.raises(refitd.RefusedError, match="has not been called"):
        transfer.send_weights(iter([]))
    transfer.init_weight_transfer()
    mine = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}
    with daemon.connect("engine") as engine, Engine(engine.register_target(policy(), mine, replica="a")):
        for version in (1, 2):
            transfer.pause()
            transfer.send_weights(iter([*values(version).items()]))
            transfer.resume()
            assert all(torch.equal(mine[name], tensor) for name, tensor in values(version).items())
        with pytest.raises(refitd.RefusedError, match="ended without"):
            transfer.send_weights(iter([("a", values(3)["a"])]))
        assert torch.equal(mine["a"], values(2)["a"])
    transfer.destroy()
