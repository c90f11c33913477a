"""Values computed on a GPU during a swap: padding, casts, MXFP8, and digests of live tensors."""

from __future__ import annotations

import gc

import pytest
import torch

import refitd
from refitd.testing import Daemon
from tests.support import fake_cuda, shards
from tests.support.fake_torch.device_shim import put_on_gpu
from tests.support.fleet import go_live
from tests.support.gpu_tensors import allocated, device_bytes, private


@pytest.mark.slow
def test_padding_is_filled_on_a_gpu(daemon: Daemon) -> None:
    def described(rows: int, fill: float | None) -> list[refitd.ParameterMetadata]:
        tile = refitd.Tile("w", offset=(0, 0), size=(5, 8), local_offset=0, local_stride=(8, 1))
        return [shards.meta("w", torch.zeros(rows, 8).bfloat16(), tiles=(tile,), fill=fill)]

    full = {"w": torch.randn(5, 8).bfloat16()}
    with daemon.connect() as client:
        source = client.register_source("policy", full, metadata=described(5, None))
        live = allocated(client, {"w": torch.zeros(8, 8).bfloat16()}, "cuda:0")
        target = client.register_target("policy", live, replica="r", metadata=described(8, 1.5))
        go_live(client, source, 1, target)
        assert torch.equal(live["w"][:5], full["w"])
        assert torch.equal(live["w"][5:], torch.full((3, 8), 1.5).bfloat16())
        del live


@pytest.mark.parametrize("live_on", ["arena", "flip", pytest.param("private", marks=pytest.mark.slow)])
def test_what_is_live_on_a_gpu_is_verified(daemon: Daemon, live_on: str) -> None:
    full = shards.whole(4)
    with daemon.connect() as client:
        live = private(full, 0) if live_on == "private" else allocated(client, full, "cuda:0")
        source = client.register_source("policy", full)
        target = client.register_target("policy", live, replica="r", mode="copy" if live_on == "arena" else "shadow")
        assert target.flips == (live_on == "flip")
        go_live(client, source, 1, target)
        report = client.verify("policy", timeout=60)
        assert report.outcome == "proven", report
        name = "layers.0.fc1.weight"
        live[name].view(torch.int16)[7, 5] ^= 8
        (member,) = client.verify("policy", timeout=60).members
        (found,) = member.differences
        assert (member.state, found.parameter) == ("differs", name)
        # the workers compare a staging arena on a GPU, because they map the live tensors; a client cannot read it
        assert found.slice == ("[7, 5]" if live_on == "arena" else "[0:96, :]")
        del live


@pytest.mark.slow
@pytest.mark.parametrize(("given_on", "live_on"), [("cpu", "gpu"), ("gpu", "cpu"), ("gpu", "gpu")])
def test_declared_casts_are_made_at_a_gpu(daemon: Daemon, given_on: str, live_on: str) -> None:
    full = {"w": torch.randn(40, 8)}
    given, live = {"w": full["w"].clone()}, {"w": torch.zeros(40, 8).bfloat16()}
    for tensors, on in ((given, given_on), (live, live_on)):
        if on == "gpu":
            put_on_gpu(tensors["w"], 0)
    described = [shards.meta("w", live["w"], resolved_name="w", cast_from="float32")]
    with daemon.connect() as client:
        source = client.register_source("policy", given)
        target = client.register_target("policy", live, replica="r", metadata=described)
        assert go_live(client, source, 1, target).digests > 0
        assert torch.equal(live["w"], full["w"].bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("live_on", "is_swizzled", "made_by"),
    [
        *(("private", False, "receiver"), ("private", True, "publisher"), ("private", True, "sender")),
        *(("arena", True, "receiver"), ("arena", True, "publisher"), ("arena", False, "sender")),
        *(("flip", False, "receiver"), ("flip", True, "publisher"), ("flip", True, "sender")),
    ],
)
def test_mxfp8_is_made_where_the_tensors_are(
    daemon: Daemon, gpus: fake_cuda.FakeGpus, live_on: str, is_swizzled: bool, made_by: str
) -> None:
    on_send, offers = made_by != "receiver", made_by == "publisher"
    shape = (192, 320)
    full = {"w": torch.randn(shape).bfloat16(), "norm": torch.randn(7).bfloat16()}
    if on_send:  # its slots then exist too, with data and scales
        full = {name: put_on_gpu(tensor, 0) for name, tensor in full.items()}
    with daemon.connect() as client:
        source = client.register_source("policy", full, mxfp8=refitd.MXFP8Offer(("w",)) if offers else None)
        targets, held = [], []
        for device in (None, "cpu"):
            made = refitd.MXFP8Buffer.empty(shape, is_swizzled=is_swizzled)
            data, scale, norm = made.data, made.scale, torch.zeros(7).bfloat16()
            if live_on != "private":
                room = allocated(client, {"d": data, "s": scale, "norm": norm}, "cuda:0")
                data, scale, norm = room["d"], room["s"], room["norm"]
            else:
                data, scale, norm = (put_on_gpu(t, 0) for t in (data, scale, norm))
            live = {"w": refitd.MXFP8Buffer(data, scale), "norm": norm}
            held.append((data, scale, norm))
            ways = {"device": device, "convert_on_send": on_send, "mode": "copy" if live_on == "arena" else "shadow"}
            targets.append(client.register_target("policy", live, replica=f"r{device}", **ways))
        assert [target.flips for target in targets] == [live_on == "flip", False]
        # the first target's staging arena, and its landing arena if it flips; allocated arenas; slots
        wanted = 1 + (live_on == "flip") + 2 * (live_on != "private") + 2 * on_send
        assert device_bytes(daemon) == {gpus.name(0): wanted}
        for version in (1, 2):
            full["w"].mul_(3)
            report = go_live(client, source, version, *targets)
            assert report.converted_bytes == 2 * 192 * (10 * is_swizzled if on_send else 2 * 320)
            once = refitd.MXFP8Buffer.empty(shape, is_swizzled=is_swizzled)
            once.quantize(full["w"])
            for data, scale, norm in held:
                assert torch.equal(data, once.data) and torch.equal(scale, once.scale)
                assert torch.equal(norm, full["norm"])
        assert client.verify("policy", timeout=60).outcome == "proven"
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("convert_on_send", [False, True], ids=["receiver", "sender"])
@pytest.mark.parametrize("source_on", ["main", "gpu"])
def test_fp8_is_made_where_the_tensors_are(daemon: Daemon, source_on: str, convert_on_send: bool) -> None:
    full = {"w": torch.randn(256, 384).bfloat16()}
    once = refitd.FP8Buffer.empty((256, 384))
    once.quantize(full["w"])
    if source_on == "gpu":
        full = {"w": put_on_gpu(full["w"], 0)}
    with daemon.connect() as client:
        source = client.register_source("policy", full)
        data, scale = put_on_gpu(torch.zeros(256, 384, dtype=torch.uint8), 0), put_on_gpu(torch.zeros(2, 3), 0)
        live = {"w": refitd.FP8Buffer(data, scale)}
        target = client.register_target("policy", live, replica="r", convert_on_send=convert_on_send)
        report = go_live(client, source, 1, target)
        assert (report.converted_bytes > 0) != convert_on_send
        assert torch.equal(data, once.data.view(torch.uint8)) and torch.equal(scale, once.scale)
        assert client.verify("policy", timeout=60).outcome == "proven"
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("seed_on", ["arena", "flip"])
def test_what_lies_on_a_gpu_is_given_to_replicas_that_join(daemon: Daemon, seed_on: str) -> None:
    full = shards.whole(5)
    with daemon.connect() as client:
        live = allocated(client, full, "cuda:0")
        source = client.register_source("policy", full)
        mode = "copy" if seed_on == "arena" else "shadow"
        seed = client.register_target("policy", live, replica="seed", mode=mode)
        go_live(client, source, 1, seed)
        source.close()
        joins = {"main": shards.zeros_like(full), "gpu": allocated(client, full, "cuda:1")}
        for name, mine in joins.items():
            target = client.register_target("policy", mine, replica=name)
            assert target.wait(1, timeout=60) == 1 and shards.equal(mine, full)
        assert all(swap.report and swap.report.seeds for swap in client.history("policy", 2).swaps)
        assert client.verify("policy", timeout=60).outcome == "proven"
        del live, joins, mine
