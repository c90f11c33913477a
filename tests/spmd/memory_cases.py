"""Targets and sources with memory that cannot be written or read in place. Each is called on all ranks together."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import refitd
from tests.spmd.cases import TIMEOUT_S, World, linear, numbers, refused
from tests.spmd.layouts import bits

COMPLEX = torch.complex64


def read_only() -> torch.Tensor:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(4096))
        file.flush()
        return torch.frombuffer(mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ), dtype=torch.float32)


def freed() -> torch.Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


# neither kind can be read
NEITHER: dict[str, Callable[[], torch.Tensor]] = {
    "meta device": lambda: torch.zeros(4, device="meta"),
    "conjugate": lambda: torch.zeros(4, dtype=COMPLEX).conj(),
    "negative": lambda: torch.zeros(4, dtype=COMPLEX).conj().imag,
    "sparse": lambda: torch.eye(4).to_sparse(),
    "freed": freed,
}
NOT_WRITTEN: dict[str, Callable[[], torch.Tensor]] = {
    "cannot be written": read_only,
    "in one place": lambda: torch.zeros(1).expand(4),
    "elements lie in one place": lambda: torch.zeros(5).as_strided((2, 4), (1, 1)),
}


def unusable(world: World) -> dict[str, str]:
    """Swap rank 0's model into rank 1's, one of them unusable; return the error texts by the kind of fault."""
    said = {}
    for side, kinds in (("source", NEITHER), ("target", NEITHER | NOT_WRITTEN)):
        for kind, make in kinds.items():
            like = make()
            good, seen = torch.ones(like.shape, dtype=like.dtype), torch.full((4,), 7.0)
            source = linear({"w": make() if side == "source" else good, "v": torch.ones(4)})
            target = linear({"v": seen, "w": make() if side == "target" else good.clone()})
            models = (source, None) if world.rank == 0 else (None, target) if world.rank == 1 else (None, None)

            def swap(models: tuple[nn.Module | None, nn.Module | None] = models) -> object:
                return refitd.swap_model_weights(*models, "gloo", timeout=TIMEOUT_S)

            said[f"{side}: {kind}"] = refused(swap)
            assert (seen == 7).all()
    return said


def meta_models_can_be_planned(world: World) -> None:
    source = linear({"w": torch.zeros(4, device="meta")}) if world.rank == 0 else None
    target = linear({"w": torch.zeros(4, device="meta")}) if world.rank == 1 else None
    plan = refitd.build_centralized_reshard_plan(source, target, timeout=TIMEOUT_S)
    assert len(plan.recv_ops) == (world.rank == 1)


def halves(memory: torch.Tensor) -> nn.Module:
    """Two parameters in one memory; one is split over ranks 1 and 2, the other over 2 and 1."""
    module = linear({"a": memory, "b": memory}, 0, [1, 2])
    module.b.partition_stride = 2
    return module


def overlapping(world: World) -> list[str]:
    """Swap two different tensors of rank 0 into two of rank 1 that share memory."""
    said = []
    square, line = torch.zeros(4, 4), torch.zeros(8)
    for one, other in (
        (line[:6], line[2:]),
        (square, square.t()),
        (line, line[:4]),
        (square[:, :3], square[:, 2:]),
        (line[::2], line[:4]),
        (line, line),
    ):
        source = linear({"a": torch.ones(one.shape), "b": torch.full(other.shape, 2.0)}) if world.rank == 0 else None
        target = linear({"a": one, "b": other}) if world.rank == 1 else None
        said.append(refused(lambda s=source, t=target: refitd.swap_model_weights(s, t, "gloo", timeout=TIMEOUT_S)))
        assert not square.any() and not line.any()
    # tied at both ends, but different elements
    source = None
    if world.rank == 0:
        whole = numbers(8, 2)
        source = linear({"a": whole, "b": whole})
    target = halves(torch.zeros(4, 2)) if world.rank in (1, 2) else None
    said.append(refused(lambda: refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S)))
    return said


def apart_and_tied(world: World) -> None:
    """Columns of one memory have no common byte; tied weights are the same elements of it."""
    memory, whole = torch.zeros(4, 6), numbers(4, 3)
    more, embedding = numbers(4, 3, start=100), numbers(5, 2, start=200)
    tied = torch.zeros(5, 2)
    source = target = None
    if world.rank == 0:
        source = linear({"a": whole, "b": more, "c": embedding, "d": embedding})
    if world.rank == 1:
        target = linear({"a": memory[:, ::2], "b": memory[:, 1::2], "c": tied, "d": tied})
    refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S)
    if target is not None:
        assert torch.equal(memory[:, ::2], whole) and torch.equal(memory[:, 1::2], more)
        assert torch.equal(tied, embedding)


def bytes_of_bools(world: World) -> None:
    """Bools of any byte, read from and written to strided memory."""
    raw = torch.arange(48, dtype=torch.uint8).view(6, 8)
    for is_source_strided in (False, True):
        for is_target_strided in (False, True):
            held = raw.t().contiguous().t() if is_source_strided else raw
            room = torch.zeros(8, 6, dtype=torch.uint8).t() if is_target_strided else torch.zeros_like(raw)
            source = linear({"w": held.view(torch.bool)}) if world.rank == 0 else None
            target = linear({"w": room.view(torch.bool)}) if world.rank in (0, 1) else None
            refitd.swap_model_weights(source, target, "gloo", timeout=TIMEOUT_S)
            if target is not None:
                assert bits(room) == bits(raw), (is_source_strided, is_target_strided)


def arguments(world: World) -> list[tuple[str, str]]:
    """Return (text that must be in the error, error) of calls with one wrong argument on rank 1."""
    said = []
    wrong: list[tuple[str, Any]] = [("num_experts", "x"), ("num_experts", True), ("casts", 3), ("aliases", 3)]
    wrong += [("src_rank_offset", "x"), ("dst_rank_offset", None), ("dst_rank_offset", 1.5), ("transform", 3)]
    wrong += [("casts", {"w": 3}), ("casts", {3: torch.float32}), ("aliases", {"w": 3})]
    for what, value in wrong:
        given = {what: value} if world.rank == 1 else {}
        model = linear({"w": torch.zeros(2)}) if world.rank == 1 else None
        call = partial(refitd.swap_model_weights, model, model, "gloo", timeout=TIMEOUT_S, **given)
        said.append((what, refused(call)))
    for model in ("x", {"a": torch.zeros(2)}, ["x"], [{}], [None], [3], [linear({}), None], [[linear({})]], 3):
        given = (None, model if world.rank == 1 else None)
        said.append(("target model is", refused(partial(refitd.swap_model_weights, *given, "gloo", timeout=TIMEOUT_S))))
    return said


def arguments_of_this_rank(world: World) -> None:
    """Arguments are refused immediately if the call needs them before its first message."""
    for what, value in (("timeout", "x"), ("timeout", None), ("timeout", True), ("group", 3), ("group", "x")):
        for call in (
            partial(refitd.swap_model_weights, None, None, "gloo"),
            partial(refitd.build_centralized_reshard_plan, None, None),
        ):
            assert f"{what} is {value!r}" in refused(partial(call, **{what: value}), refitd.ConfigError)
    for method in (["gloo"], {}, 3, None):
        assert repr(method) in refused(
            partial(refitd.swap_model_weights, None, None, method, timeout=TIMEOUT_S), refitd.ConfigError
        )
    call = partial(refitd.reshard_model_weights, None, None, "gloo", timeout=TIMEOUT_S)
    assert "service is 'gloo'" in refused(call, refitd.ConfigError)
