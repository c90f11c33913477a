"""MXFP8 through the service: whichever side converts, the bytes equal those of converting the whole tensor once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

import refitd
from refitd import MXFP8Buffer, MXFP8Offer, ParameterMetadata, Rounding, Tile
from refitd.protocol.reports import SwapProgress
from refitd.testing import Daemon, Engine, eventually
from tests.support.mxfp8_replicas import CONVERTED, OFFER, Replica, Trainer, model, oracle


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    return start_daemon("[deadlines]\ncommit_s = 10.0\nstage_s = 20.0\n")


@pytest.mark.parametrize("convert_on_send", [False, True], ids=["receiver", "sender"])
@pytest.mark.parametrize("swizzled", [False, True], ids=["row-major", "swizzled"])
def test_any_layout_holds_what_the_whole_tensor_would_be(daemon: Daemon, convert_on_send: bool, swizzled: bool) -> None:
    """Cut along rows and columns on both sides, in private memory and in an arena, beside a bfloat16 replica."""
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        sources = Trainer((trainer,), 2, mxfp8=OFFER if convert_on_send else None)
        options = {"swizzled": swizzled, "convert_on_send": convert_on_send}
        replicas = [Replica((engine,), "fine", 4, **options), Replica((engine,), "whole", 1, in_arena=True, **options)]
        plain = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
        targets = [engine.register_target("m", plain, replica="plain")]
        targets += [target for replica in replicas for target in replica.targets]
        with Engine(*targets) as running:
            for version in range(1, 4):
                full = sources.publish(version)
                report = trainer.swap("m", version, timeout=60)
                assert report.outcome == "committed"
                for replica in replicas:
                    replica.assert_holds(full)
                assert all(torch.equal(plain[name], tensor) for name, tensor in full.items())
        assert not running.errors
        status = {t.replica: t for t in trainer.status().models[0].targets if t.rank == 0}
        resident = status["plain"].held_bytes
        assert status["whole"].held_bytes < 0.6 * resident
        landing = {False: resident, True: status["whole"].held_bytes}[convert_on_send]
        assert abs(status["whole"].bytes - landing) < 4096
        held_too = 0 if convert_on_send and not swizzled else 1  # what arrives is what is held, or lies beside it
        assert status["whole"].staging_bytes >= status["whole"].bytes + held_too
        assert (report.converted_bytes > 0) == (not convert_on_send or swizzled)
        plan = trainer.plan("m")
        assert plan.converted_bytes == report.converted_bytes and plan.bytes == report.bytes


@pytest.mark.slow
@pytest.mark.parametrize("rounding", list(Rounding))
def test_roundings_are_what_is_declared(daemon: Daemon, rounding: Rounding) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        sources = Trainer((trainer,), 1, mxfp8=MXFP8Offer(CONVERTED, rounding, instead=True))
        received = Replica((engine,), "sent", 2, rounding=rounding, convert_on_send=True)
        with Engine(*received.targets):
            full = sources.publish(1)
            trainer.swap("m", 1, timeout=60)
        received.assert_holds(full)
        other = next(r for r in Rounding if r is not rounding)
        assert not torch.equal(oracle(full["w"], rounding)[1], oracle(full["w"], other)[1])


def test_sources_cut_inside_a_block_are_put_together_by_receivers(daemon: Daemon) -> None:
    """Of four source ranks no two meet between two blocks, and the second holds a part of one only."""
    full = {"w": model(4)["v"].repeat(1, 5)[:, :320].contiguous()}
    with daemon.connect() as trainer, daemon.connect() as engine:
        edges = [0, 40, 50, 177, 320]
        for rank in range(4):
            low, high = edges[rank], edges[rank + 1]
            mine = {"w": full["w"][:, low:high].contiguous()}
            tile = Tile("w", (0, low), (192, high - low), 0, (high - low, 1))
            meta = ParameterMetadata("w", (192, high - low), torch.bfloat16, 2, tiles=(tile,), global_shape=(192, 320))
            trainer.register_source("m", mine, rank=rank, world_size=4, metadata=[meta]).publish(1)
            if rank == 1:
                with pytest.raises(refitd.RefusedError, match=r"w: its shape is \[192, 10\].*at the receivers"):
                    trainer.register_source("n", mine, metadata=[meta], mxfp8=MXFP8Offer(("w",)))
        held = MXFP8Buffer.empty((192, 320))
        with Engine(engine.register_target("m", {"w": held}, replica="r")):
            trainer.swap("m", 1, timeout=60)
        data, scale = oracle(full["w"])
        assert torch.equal(held.data, data) and torch.equal(held.scale, scale)


@pytest.mark.slow
@pytest.mark.parametrize("convert_on_send", [False, True], ids=["receiver", "sender"])
def test_float32_sources_are_rounded_to_bfloat16_first(daemon: Daemon, convert_on_send: bool) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        offer = MXFP8Offer(CONVERTED) if convert_on_send else None
        full = model(1, torch.float32)
        source = trainer.register_source("m", {name: full[name] for name in CONVERTED}, mxfp8=offer)
        held = {name: MXFP8Buffer.empty(tuple(full[name].shape)) for name in CONVERTED}
        metas = [
            ParameterMetadata(name, tuple(full[name].shape), "bfloat16", 2, cast_from="float32") for name in CONVERTED
        ]
        target = engine.register_target("m", held, replica="r", metadata=metas, convert_on_send=convert_on_send)
        source.publish(1)
        with Engine(target):
            trainer.swap("m", 1, timeout=60)
        for name in CONVERTED:
            data, scale = oracle(full[name])
            assert torch.equal(held[name].data, data) and torch.equal(held[name].scale, scale)


@pytest.mark.parametrize(
    "convert_on_send", [pytest.param(False, marks=pytest.mark.slow), True], ids=["receiver", "sender"]
)
def test_two_nodes(start_daemon: Callable[..., Daemon], convert_on_send: bool) -> None:
    """Ranks of sources and targets on both nodes: bytes cross, and are converted where they arrive."""
    n0 = start_daemon("[deadlines]\nplan_s = 30.0\n")
    n1 = start_daemon(name="n1", joins=n0.endpoint)
    with n0.connect() as c0, n1.connect() as c1:
        eventually(lambda: len(c0.status().nodes) == 2, "every node has joined")
        sources = Trainer((c0, c1), 2, mxfp8=OFFER if convert_on_send else None)
        replicas = [
            Replica((c1, c0), name, world, swizzled=swizzled, convert_on_send=convert_on_send)
            for name, world, swizzled in (("a", 2, False), ("b", 1, True))
        ]
        with Engine(*(target for replica in replicas for target in replica.targets)):
            for version in (1, 2):
                full = sources.publish(version)
                report = c0.swap("m", version, timeout=60)
                for replica in replicas:
                    replica.assert_holds(full)
        links = {(link.source, link.target): link.bytes for link in c0.status().links}
        assert set(links) == {("n0", "n1"), ("n1", "n0")} and report.bytes >= sum(links.values())


@pytest.mark.slow
def test_lending_what_is_offered_converts_it(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        full = model(1)
        source = trainer.register_source("m", full, mxfp8=OFFER)
        received = Replica((engine,), "r", 1, convert_on_send=True)
        with Engine(*received.targets), source.lend(1) as lease:
            assert lease.has_ended and source.lending == "copied"
            trainer.swap("m", 1, timeout=60)
        received.assert_holds(full)
        with pytest.raises(refitd.RefusedError, match="cannot be pulled"):
            trainer.register_source("n", full, mxfp8=OFFER, pull=True)


@contextmanager
def stopped_while_converting(client: refitd.Client, pids: tuple[int, ...], wire: int) -> Iterator[threading.Thread]:
    """A swap whose workers stand still from when they have begun to convert."""
    reached = threading.Event()
    errors: list[Exception] = []

    def progress(said: SwapProgress) -> None:
        if said.phase == "stage" and said.bytes_done > wire and not reached.is_set():
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            reached.set()

    def swap() -> None:
        try:
            client.swap("m", timeout=60, on_progress=progress)
        except refitd.RefitdError as exc:
            errors.append(exc)

    thread = threading.Thread(target=swap, daemon=True)
    thread.start()
    assert reached.wait(30), f"nothing was converted: {errors}"
    try:
        yield thread
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        thread.join(30)
        thread.errors = errors  # type: ignore[attr-defined]


def test_a_worker_killed_while_converting_aborts_and_the_next_swap_succeeds(daemon: Daemon) -> None:
    shape = (4096, 16384)  # converting takes much longer than killing
    full = {"w": torch.randn(shape[0], 512).to(torch.bfloat16).repeat(1, 32)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source("m", full, slots=1)
        held = MXFP8Buffer.empty(shape)
        target = engine.register_target("m", {"w": held}, replica="r")
        source.publish(1)
        pids = daemon.node_of("n0").workers
        with Engine(target):
            with stopped_while_converting(trainer, pids, full["w"].nbytes) as swap:
                os.kill(pids[0], signal.SIGKILL)
            (error,) = swap.errors  # type: ignore[attr-defined]
            assert isinstance(error, refitd.RefitFailed)
            assert "SIGKILL while converting what has arrived" in str(error)
            assert target.version is None and not held.data.any() and not held.scale.any()
            report = trainer.swap("m", 1, timeout=60)
        assert report.outcome == "committed" and report.bytes == report.converted_bytes == full["w"].nbytes
        data, scale = oracle(full["w"])
        assert torch.equal(held.data, data) and torch.equal(held.scale, scale)
