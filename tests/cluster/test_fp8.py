"""FP8 with tiles of 128 x 128 through the service: the bytes equal one conversion of the whole tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import refitd
from refitd import FP8Buffer, ParameterMetadata, Tile
from refitd.testing import Daemon, Engine, eventually

SHAPE = (448, 320)  # its last tiles are not whole
EXPERTS = (2, 192, 128)


def cut(first: int, rows: int) -> ParameterMetadata:
    tile = Tile("w", (first, 0), (rows, SHAPE[1]), 0, (SHAPE[1], 1))
    return ParameterMetadata("w", (rows, SHAPE[1]), "bfloat16", 2, tiles=(tile,), global_shape=SHAPE)


def once(values: torch.Tensor) -> FP8Buffer:
    buffer = FP8Buffer.empty(tuple(values.shape))
    buffer.quantize(values)
    return buffer


def test_senders_that_convert_halve_what_crosses(start_daemon: Callable[..., Daemon]) -> None:
    """Two source ranks hold each tensor, so digests of their tiles are compared; a third of a tensor has odd tiles."""
    shapes = {"w": (256, 384), "experts": (2, 128, 256), "odd": (192, 256)}
    full = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    n0 = start_daemon("[deadlines]\nplan_s = 30.0\n")
    n1 = start_daemon(name="n1", joins=n0.endpoint)
    with n0.connect() as trainer, n1.connect() as engine:
        eventually(lambda: len(trainer.status().nodes) == 2, "every node has joined")
        sources = [trainer.register_source("fp8", full, rank=rank, world_size=2) for rank in range(2)]
        crossed = []
        for version, on_send in enumerate((False, True), 1):
            held = {name: FP8Buffer.empty(shape) for name, shape in shapes.items()}
            target = engine.register_target("fp8", held, replica=f"{on_send}", convert_on_send=on_send)
            with Engine(target):
                for source in sources:
                    source.publish(version)
                report = trainer.swap("fp8", version, timeout=60)
                assert trainer.verify("fp8", timeout=60).outcome == "proven"
            for name, buffer in held.items():
                assert torch.equal(buffer.data.view(torch.uint8), once(full[name]).data.view(torch.uint8))
                assert torch.equal(buffer.scale, once(full[name]).scale)
            crossed.append(report.crossing.crossed_bytes)
            assert report.converted_bytes == (full["odd"].nbytes if on_send else sum(t.nbytes for t in full.values()))
            target.close()
        sent = full["w"].numel() + full["experts"].numel()
        saved = sent - 4 * (sent >> 14)  # a scale has 4 bytes
        assert abs(crossed[0] - crossed[1] - saved) < 64  # notes beside the messages


@pytest.mark.parametrize("convert_on_send", [False, True], ids=["receiver", "sender"])
def test_any_split_between_tiles_holds_what_the_whole_tensor_would_be(
    start_daemon: Callable[..., Daemon], convert_on_send: bool
) -> None:
    """Sources are cut anywhere, targets between tiles; one replica flips."""
    full = {"w": torch.randn(SHAPE).bfloat16(), "experts": torch.randn(EXPERTS).bfloat16(), "norm": torch.randn(7)}
    daemon = start_daemon()
    with daemon.connect() as trainer, daemon.connect() as engine:
        sources = []
        for rank, (first, rows) in enumerate(((0, 100), (100, 348))):
            mine = {"w": full["w"][first : first + rows].clone()}
            metas = [cut(first, rows)]
            if rank == 0:
                mine |= {name: full[name] for name in ("experts", "norm")}
                metas += [ParameterMetadata(n, tuple(full[n].shape), full[n].dtype, full[n].element_size())
                          for n in ("experts", "norm")]  # fmt: skip
            sources.append(trainer.register_source("fp8", mine, rank=rank, world_size=2, metadata=metas))
        held, targets = [], []
        for rank, (first, rows) in enumerate(((0, 256), (256, 192))):
            held.append({"w": FP8Buffer.empty((rows, SHAPE[1]))})
            ways = {"replica": "cut", "rank": rank, "world_size": 2, "metadata": [cut(first, rows)]}
            targets.append(engine.register_target("fp8", held[-1], convert_on_send=convert_on_send, **ways))
        room = engine.allocate({
            **{f"{name}.{part}": (tuple(tensor.shape), tensor.dtype)
               for name in ("w", "experts") for part, tensor in vars(FP8Buffer.empty(tuple(full[name].shape))).items()},
            "norm": ((7,), torch.float32),
        })  # fmt: skip
        whole = {name: FP8Buffer(room[f"{name}.data"], room[f"{name}.scale"]) for name in ("w", "experts")}
        flips = engine.register_target("fp8", {**whole, "norm": room["norm"]}, replica="whole", mode="flip")
        with Engine(*targets, flips):
            for source in sources:
                source.publish(1)
            report = trainer.swap("fp8", 1, timeout=60)
            assert trainer.verify("fp8", timeout=60).outcome == "proven"
        assert report.converted_bytes == 2 * full["w"].nbytes + full["experts"].nbytes
        want = {name: once(full[name]) for name in whole}
        for name, buffer in whole.items():
            assert torch.equal(buffer.data.view(torch.uint8), want[name].data.view(torch.uint8))
            assert torch.equal(buffer.scale, want[name].scale)
        for (first, rows), mine in zip(((0, 256), (256, 192)), held, strict=True):
            part = want["w"].data[first : first + rows].view(torch.uint8)
            assert torch.equal(mine["w"].data.view(torch.uint8), part)
            assert torch.equal(mine["w"].scale, want["w"].scale[first // 128 :][: -(-rows // 128)])
        assert torch.equal(room["norm"], full["norm"])


@pytest.mark.parametrize(
    ("buffer", "metadata", "says"),
    [
        (FP8Buffer(torch.zeros(128, 256, dtype=torch.uint8), torch.zeros(1, 1)), None, r"w: FP8 of uint8 \[128, 256\]"),
        (FP8Buffer.empty((192, 320)), cut(64, 192), r"w: its part of w at \[64, 0\] .* cuts tiles of 128 x 128"),
        (FP8Buffer.empty((64, 320)), cut(128, 64), r"w: its part of w at \[128, 0\] .* cuts tiles of 128 x 128"),
    ],
)
def test_a_target_that_cannot_be_is_refused_by_name(
    shared_daemon: Daemon, buffer: FP8Buffer, metadata: ParameterMetadata | None, says: str
) -> None:
    with shared_daemon.connect() as engine, pytest.raises(refitd.RefusedError, match=says):
        engine.register_target("r", {"w": buffer}, replica="r", metadata=None if metadata is None else [metadata])
