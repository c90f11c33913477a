"""Impossible MXFP8 conversions are refused by name, at registration or before anything moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import refitd
from refitd import MXFP8Buffer, MXFP8Offer, ParameterMetadata, Rounding, Tile
from refitd.testing import Daemon, Engine
from tests.support.mxfp8_replicas import CONVERTED, Replica, Trainer, model


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    return start_daemon("[deadlines]\ncommit_s = 10.0\nstage_s = 20.0\n")


def data_and_scale(
    *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (torch.uint8, torch.uint8)
) -> MXFP8Buffer:
    return MXFP8Buffer(*(torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)))


def off_by(columns: int) -> ParameterMetadata:
    tile = Tile("w", (0, columns), (8, 64), 0, (64, 1))
    return ParameterMetadata("w", (8, 64), "bfloat16", 2, tiles=(tile,), global_shape=(8, 128))


def named(name: str) -> ParameterMetadata:
    return ParameterMetadata(name, (8, 64), "bfloat16", 2, resolved_name="whole")


SHARED = MXFP8Buffer.empty((8, 64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("held", "metadata", "says"),
    [
        ({"w": data_and_scale((8, 48), (8, 1))}, None, r"w: its shape is \[8, 48\].*multiple of 32"),
        ({"w": data_and_scale((8, 64), (8, 3))}, None, r"w: the scale of \[8, 64\] has shape \[8, 3\]"),
        ({"w": data_and_scale((8, 64), (8, 2), dtypes=(torch.int16, torch.uint8))}, None, r"w: .*int16.*expected"),
        ({"w": object()}, None, r"w: it is object, expected a tensor"),
        (
            {"a": MXFP8Buffer.empty((8, 64)), "b": MXFP8Buffer.empty((8, 64), is_swizzled=True)},
            None,
            r"b has swizzled scales and a has not",
        ),
        ({"w": MXFP8Buffer.empty((8, 64))}, [off_by(16)], r"w: it holds 16:80.*multiples of 32"),
        (
            {"a": MXFP8Buffer.empty((8, 64)), "b": MXFP8Buffer.empty((8, 64))},
            [named("a"), named("b")],
            r"b and a both hold whole in MXFP8",
        ),
        ({"a": SHARED, "b": SHARED}, None, r"b and a are the same memory"),
        (
            {"w": MXFP8Buffer.empty((8, 64))},
            [ParameterMetadata("w", (8, 64), "float32", 4)],
            r"w: described as \(8, 64\) float32, the tensor is \(8, 64\) bfloat16",
        ),
    ],
)
def test_a_target_that_cannot_be_is_refused_by_name(
    daemon: Daemon, held: dict[str, object], metadata: list[ParameterMetadata] | None, says: str
) -> None:
    with daemon.connect() as engine, pytest.raises(refitd.RefusedError, match=says):
        engine.register_target("m", held, replica="r", metadata=metadata)


def test_a_source_that_cannot_offer_is_refused_by_name(daemon: Daemon) -> None:
    tensors = {"narrow": torch.zeros(8, 48, dtype=torch.bfloat16), "whole": torch.zeros(8, 64, dtype=torch.int32)}
    with daemon.connect() as trainer:
        for offer, says in (
            (("narrow",), r"narrow: its shape is \[8, 48\]"),
            (("w*",), "whole: it is int32"),
            (("nothing.*",), r"'nothing\.\*' is offered"),
        ):
            with pytest.raises(refitd.RefusedError, match=says):
                trainer.register_source("m", tensors, mxfp8=MXFP8Offer(offer))
        with pytest.raises(refitd.RefusedError, match="w: it is held in MXFP8"):
            trainer.register_source("m", {"w": MXFP8Buffer.empty((8, 64))})


def test_who_wants_what_nobody_offers_is_refused_before_anything_moves(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        Trainer((trainer,), 1).publish(1)
        received = Replica((engine,), "r", 1, convert_on_send=True)
        with pytest.raises(refitd.RefusedError, match=r"r rank 0 .*v: it is wanted in MXFP8 and no source offers it"):
            trainer.swap("m", 1, timeout=60)
        with pytest.raises(refitd.PlanError, match="w: it is wanted in MXFP8 and no source offers it"):
            trainer.plan("m")
        received.targets[0].close()


def test_roundings_that_differ_are_refused_before_anything_moves(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        Trainer((trainer,), 1, mxfp8=MXFP8Offer(CONVERTED, Rounding.FLOOR)).publish(1)
        Replica((engine,), "r", 1, convert_on_send=True)
        with pytest.raises(refitd.RefusedError, match=r"v: sources round its scales floor, wanted is rceil"):
            trainer.swap("m", 1, timeout=60)


@pytest.mark.slow
def test_only_mxfp8_is_no_source_for_bfloat16(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        Trainer((trainer,), 1, mxfp8=MXFP8Offer(CONVERTED, instead=True)).publish(1)
        plain = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
        engine.register_target("m", plain, replica="plain")
        with pytest.raises(refitd.RefitFailed, match="v: "):
            trainer.swap("m", 1, timeout=60)


def test_all_ranks_of_a_pipeline_may_give_one_pattern_of_what_is_offered(daemon: Daemon) -> None:
    """The second stage holds no tensor that the pattern matches, the third none at all."""
    stages: list[dict[str, torch.Tensor]] = [{"layers.0.fc1": torch.randn(8, 64)}, {"norm": torch.randn(5)}, {}]
    offer = MXFP8Offer(("layers.*",))
    with daemon.connect() as trainer, daemon.connect() as engine:
        for rank, tensors in enumerate(stages):
            trainer.register_source("m", tensors, rank=rank, world_size=3, mxfp8=offer).publish(1)
        buffer, norm = MXFP8Buffer.empty((8, 64)), torch.zeros(5)
        target = engine.register_target("m", {"layers.0.fc1": buffer, "norm": norm}, replica="r", convert_on_send=True)
        with Engine(target):
            trainer.swap("m", 1, timeout=60)
        expected = MXFP8Buffer.empty((8, 64))
        expected.quantize(stages[0]["layers.0.fc1"].bfloat16())
        assert torch.equal(buffer.data, expected.data) and torch.equal(buffer.scale, expected.scale)
        assert torch.equal(norm, stages[1]["norm"])
