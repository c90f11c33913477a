"""MXFP8 through the service: the bytes equal one conversion of the whole tensor, or the swap is refused."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import refitd
from refitd import MXFP8Buffer, MXFP8Offer, ParameterMetadata, Rounding, Tile
from refitd.protocol.reports import SwapProgress
from refitd.testing import Daemon, Engine, eventually, stopped
from tests.support.fleet import go_live
from tests.support.flips import kill_workers
from tests.support.mxfp8_replicas import CONVERTED, OFFER, Replica, Trainer, model, oracle
from tests.support.names import named
from tests.support.passed_on import Start


@pytest.fixture
def daemon(daemons: Start) -> Daemon:
    return daemons("[deadlines]\ncommit_s = 10.0\nstage_s = 20.0\n")[0]


@pytest.mark.parametrize("convert_on_send", [False, True], ids=["receiver", "sender"])
@pytest.mark.parametrize("swizzled", [False, True], ids=["row-major", "swizzled"])
def test_any_layout_holds_what_the_whole_tensor_would_be(daemon: Daemon, convert_on_send: bool, swizzled: bool) -> None:
    """Cut along rows and columns on both sides, in private memory and in an arena, beside a bfloat16 replica."""
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        sources = Trainer((trainer,), 2, mxfp8=OFFER if convert_on_send else None)
        options = {"swizzled": swizzled, "convert_on_send": convert_on_send}
        replicas = [Replica((engine,), "fine", 4, **options), Replica((engine,), "whole", 1, in_arena=True, **options)]
        plain = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
        targets = [engine.register_target(named("m"), plain, replica="plain")]
        targets += [target for replica in replicas for target in replica.targets]
        with Engine(*targets) as running:
            for version in range(1, 4):
                full = sources.publish(version)
                report = trainer.swap(named("m"), version, timeout=60)
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
        held_too = 0 if convert_on_send and not swizzled else 1  # if the live form is not received, both are staged
        assert status["whole"].staging_bytes >= status["whole"].bytes + held_too
        assert (report.converted_bytes > 0) == (not convert_on_send or swizzled)
        plan = trainer.plan(named("m"))
        assert plan.converted_bytes == report.converted_bytes and plan.bytes == report.bytes


@pytest.mark.slow
@pytest.mark.parametrize("rounding", list(Rounding))
def test_roundings_are_what_is_declared(daemon: Daemon, rounding: Rounding) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        sources = Trainer((trainer,), 1, mxfp8=MXFP8Offer(CONVERTED, rounding, instead=True))
        received = Replica((engine,), "sent", 2, rounding=rounding, convert_on_send=True)
        with Engine(*received.targets):
            full = sources.publish(1)
            trainer.swap(named("m"), 1, timeout=60)
        received.assert_holds(full)
        other = next(r for r in Rounding if r is not rounding)
        assert not torch.equal(oracle(full["w"], rounding)[1], oracle(full["w"], other)[1])


def test_sources_cut_inside_a_block_are_put_together_by_receivers(daemon: Daemon) -> None:
    """No border between the four source ranks is a block border; the second rank has a piece of one block only."""
    full = {"w": model(4)["v"].repeat(1, 5)[:, :320].contiguous()}
    with daemon.connect() as trainer, daemon.connect() as engine:
        edges = [0, 40, 50, 177, 320]
        for rank in range(4):
            low, high = edges[rank], edges[rank + 1]
            mine = {"w": full["w"][:, low:high].contiguous()}
            tile = Tile("w", (0, low), (192, high - low), 0, (high - low, 1))
            meta = ParameterMetadata("w", (192, high - low), torch.bfloat16, 2, tiles=(tile,), global_shape=(192, 320))
            trainer.register_source(named("m"), mine, rank=rank, world_size=4, metadata=[meta]).publish(1)
            if rank == 1:
                with pytest.raises(refitd.RefusedError, match=r"w: its shape is \[192, 10\].*at the receivers"):
                    trainer.register_source("n", mine, metadata=[meta], mxfp8=MXFP8Offer(("w",)))
        held = MXFP8Buffer.empty((192, 320))
        sent = engine.register_target(named("m"), {"w": held}, replica="r", convert_on_send=True)
        with pytest.raises(refitd.RefitFailed, match=r"w: its shape is \[192, 40\].*convert_on_send=False"):
            trainer.swap(named("m"), 1, timeout=60)
        sent.close()
        with Engine(engine.register_target(named("m"), {"w": held}, replica="r")):
            trainer.swap(named("m"), 1, timeout=60)
        data, scale = oracle(full["w"])
        assert torch.equal(held.data, data) and torch.equal(held.scale, scale)


@pytest.mark.slow
@pytest.mark.parametrize("convert_on_send", [False, True], ids=["receiver", "sender"])
def test_float32_sources_are_rounded_to_bfloat16_first(daemon: Daemon, convert_on_send: bool) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        offer = MXFP8Offer(CONVERTED) if convert_on_send else None
        full = model(1, torch.float32)
        source = trainer.register_source(named("m"), {name: full[name] for name in CONVERTED}, mxfp8=offer)
        held = {name: MXFP8Buffer.empty(tuple(full[name].shape)) for name in CONVERTED}
        metas = [
            ParameterMetadata(name, tuple(full[name].shape), "bfloat16", 2, cast_from="float32") for name in CONVERTED
        ]
        target = engine.register_target(named("m"), held, replica="r", metadata=metas, convert_on_send=convert_on_send)
        go_live(trainer, source, 1, target, model=named("m"))
        for name in CONVERTED:
            data, scale = oracle(full[name])
            assert torch.equal(held[name].data, data) and torch.equal(held[name].scale, scale)


BETWEEN_NODES = {
    "receiver": pytest.param(False, None, marks=pytest.mark.slow),
    "publisher": pytest.param(True, OFFER, marks=pytest.mark.slow),
    "sender": pytest.param(True, None),
}


@pytest.mark.parametrize(("convert_on_send", "offer"), BETWEEN_NODES.values(), ids=BETWEEN_NODES)
def test_two_nodes(daemons: Start, convert_on_send: bool, offer: MXFP8Offer | None) -> None:
    """Ranks of sources and targets on both nodes: bytes cross, and either end converts them."""
    n0, n1 = daemons("[deadlines]\nplan_s = 30.0\n", (1, 1))
    with n0.connect() as c0, n1.connect() as c1:
        eventually(lambda: len(c0.status().nodes) == 2, "every node has joined")
        sources = Trainer((c0, c1), 2, mxfp8=offer)
        replicas = [
            Replica((c1, c0), name, world, swizzled=swizzled, convert_on_send=convert_on_send)
            for name, world, swizzled in (("a", 2, False), ("b", 1, True))
        ]
        with Engine(*(target for replica in replicas for target in replica.targets)):
            for version in (1, 2):
                full = sources.publish(version)
                report = c0.swap(named("m"), version, timeout=60)
                for replica in replicas:
                    replica.assert_holds(full)
        links = {(link.source, link.target): link.bytes for link in c0.status().links}
        assert set(links) == {("n0", "n1"), ("n1", "n0")} and report.bytes >= sum(links.values())


def test_senders_that_convert_halve_what_crosses(daemons: Start) -> None:
    n0, n1 = daemons("[deadlines]\nplan_s = 30.0\n", (1, 1))
    with n0.connect() as trainer, n1.connect() as engine:
        eventually(lambda: len(trainer.status().nodes) == 2, "every node has joined")
        sources = Trainer((trainer,), 2)
        crossed = []
        for version, (on_send, swizzled) in enumerate(((False, False), (True, False), (True, True)), 1):
            replica = Replica((engine,), str(version), 2, swizzled=swizzled, convert_on_send=on_send)
            with Engine(*replica.targets):
                full = sources.publish(version)
                report = trainer.swap(named("m"), version, timeout=60)
            replica.assert_holds(full)
            crossed.append(report.crossing.crossed_bytes)
            assert trainer.verify(named("m"), timeout=60).outcome == "proven"
            for target in replica.targets:
                target.close()
        elements = sum(full[name].numel() for name in CONVERTED)
        rest = crossed[0] - 2 * elements  # not converted
        expected = elements + elements // 32 + rest
        # the gaps between small pieces of a message depend on how they are cut
        assert 0 < rest < 1000 and all(abs(found - expected) < 1000 for found in crossed[1:]), crossed


@pytest.mark.slow
def test_lending_what_is_offered_converts_it(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        full = model(1)
        source = trainer.register_source(named("m"), full, mxfp8=OFFER)
        received = Replica((engine,), "r", 1, convert_on_send=True)
        with Engine(*received.targets), source.lend(1) as lease:
            assert lease.has_ended and source.lending == "copied"
            trainer.swap(named("m"), 1, timeout=60)
        received.assert_holds(full)


@contextmanager
def stopped_while_converting(client: refitd.Client, pids: tuple[int, ...], wire: int) -> Iterator[threading.Thread]:
    """Start a swap, and stop its workers when they have begun to convert.

    They run for some milliseconds at a time until then: the conversion alone may end before it is reported.
    """
    reached = threading.Event()
    errors: list[Exception] = []

    def progress(said: SwapProgress) -> None:
        if said.phase == "stage" and said.bytes_done > wire:
            reached.set()

    def swap() -> None:
        try:
            client.swap(named("m"), timeout=60, on_progress=progress)
        except refitd.RefitdError as exc:
            errors.append(exc)

    thread = threading.Thread(target=swap, daemon=True)
    thread.start()
    with stopped(pids):
        while thread.is_alive() and not reached.wait(0.1):
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.004)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        assert reached.is_set(), f"nothing was converted: {errors}"
        yield thread
    thread.join(60)
    thread.errors = errors  # type: ignore[attr-defined]


def test_a_worker_killed_while_converting_aborts_and_the_next_swap_succeeds(daemon: Daemon) -> None:
    shape = (4096, 16384)  # converting takes much longer than killing
    full = {"w": torch.randn(shape[0], 512).to(torch.bfloat16).repeat(1, 32)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(named("m"), full, slots=1)
        held = MXFP8Buffer.empty(shape)
        target = engine.register_target(named("m"), {"w": held}, replica="r")
        source.publish(1)
        pids = daemon.node_of("n0").workers
        with Engine(target):
            with stopped_while_converting(trainer, pids, full["w"].nbytes) as swap:
                os.kill(pids[0], signal.SIGKILL)
            (error,) = swap.errors  # type: ignore[attr-defined]
            assert isinstance(error, refitd.RefitFailed)
            assert "SIGKILL while converting what has arrived" in str(error)
            assert target.version is None and not held.data.any() and not held.scale.any()
            report = trainer.swap(named("m"), 1, timeout=60)
        assert report.outcome == "committed" and report.bytes == report.converted_bytes == full["w"].nbytes
        data, scale = oracle(full["w"])
        assert torch.equal(held.data, data) and torch.equal(held.scale, scale)


FORMS = [
    pytest.param(False, False, id="receiver, row-major"),
    pytest.param(False, True, id="receiver, swizzled", marks=pytest.mark.slow),
    pytest.param(True, False, id="sender, row-major", marks=pytest.mark.slow),
    pytest.param(True, True, id="sender, swizzled", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("convert_on_send", "swizzled"), FORMS)
def test_versions_flip_and_flip_back(daemons: Start, convert_on_send: bool, swizzled: bool) -> None:
    daemon = daemons("[node]\nkeep_targets_s = 60.0\n", (2,))[0]
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        sources = Trainer((trainer,), 2, mxfp8=OFFER if convert_on_send else None)
        options = {"swizzled": swizzled, "convert_on_send": convert_on_send}
        flips = Replica((engine,), "flips", 4, flips=True, mode="flip", **options)
        copies = Replica((engine,), "copies", 1, **options)
        assert all(target.flips for target in flips.targets)
        whole = trainer.status().nodes[0].arenas
        fulls = {}
        with Engine(*flips.targets, *copies.targets) as running:
            for version in range(1, 5):
                fulls[version] = sources.publish(version)
                if version == 3:  # their successors map the arenas in the exchanged state
                    kill_workers(daemon)
                assert trainer.swap(named("m"), version, timeout=30).outcome == "committed"
                for replica in (flips, copies):
                    replica.assert_holds(fulls[version])
            eventually(lambda: trainer.verify(named("m")).outcome == "proven", "proven")
        assert not running.errors
        copies.targets[0].close()
        with Engine(*flips.targets) as running:
            back = trainer.rollback(named("m"), timeout=30)
            assert (back.version, back.bytes) == (3, 0)
            flips.assert_holds(fulls[3])
            assert trainer.verify(named("m")).outcome == "proven"
        assert not running.errors
        for target in flips.targets:
            target.close()
        lands = not convert_on_send or swizzled
        gone = whole - trainer.status().nodes[0].arenas
        assert gone == 4 * (1 + lands) + 1, "staging and landing arenas"


def test_what_cannot_be_converted_into_is_copied_or_refused_by_name(daemons: Start) -> None:
    daemon = daemons()[0]
    with daemon.connect() as engine:
        live = engine.allocate({"data": ((64, 64), torch.uint8), "scale": ((64, 2), torch.uint8)})
        with pytest.raises(refitd.RefusedError, match=r"client\.allocate"):
            engine.register_target(named("m"), {"w": MXFP8Buffer.empty((64, 64))}, replica="r", mode="flip")
        beside = {"w": MXFP8Buffer(live["data"], MXFP8Buffer.empty((64, 64)).scale)}
        with pytest.raises(refitd.RefusedError, match="mode='flip' is impossible"):
            engine.register_target(named("m"), beside, replica="r", mode="flip")
        target = engine.register_target(
            named("m"), {"w": MXFP8Buffer(live["data"], live["scale"])}, replica="r", mode="flip"
        )
        assert target.flips


def data_and_scale(
    *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (torch.uint8, torch.uint8)
) -> MXFP8Buffer:
    return MXFP8Buffer(*(torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)))


def off_by(columns: int) -> ParameterMetadata:
    tile = Tile("w", (0, columns), (8, 64), 0, (64, 1))
    return ParameterMetadata("w", (8, 64), "bfloat16", 2, tiles=(tile,), global_shape=(8, 128))


def of_whole(name: str) -> ParameterMetadata:
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
            [of_whole("a"), of_whole("b")],
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
        engine.register_target(named("m"), held, replica="r", metadata=metadata)


def test_a_source_that_cannot_offer_is_refused_by_name(daemon: Daemon) -> None:
    tensors = {"narrow": torch.zeros(8, 48, dtype=torch.bfloat16), "whole": torch.zeros(8, 64, dtype=torch.int32)}
    with daemon.connect() as trainer:
        for offer, says in (
            (("narrow",), r"narrow: its shape is \[8, 48\]"),
            (("w*",), "whole: it is int32"),
            (("nothing.*",), r"'nothing\.\*' is offered"),
        ):
            with pytest.raises(refitd.RefusedError, match=says):
                trainer.register_source(named("m"), tensors, mxfp8=MXFP8Offer(offer))
        with pytest.raises(refitd.RefusedError, match="w: it is held in MXFP8"):
            trainer.register_source(named("m"), {"w": MXFP8Buffer.empty((8, 64))})


def test_who_wants_what_nobody_offers_is_refused_before_anything_moves(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        trainer.register_source(named("m"), {"w": torch.zeros(320, 128, dtype=torch.float16)}).publish(1)
        held = {"w": MXFP8Buffer.empty((320, 128))}
        engine.register_target(named("m"), held, replica="r", convert_on_send=True)
        with pytest.raises(refitd.RefusedError, match=r"'r' rank 0 .*w: it is wanted in MXFP8, and no source"):
            trainer.swap(named("m"), 1, timeout=60)
        with pytest.raises(refitd.PlanError, match="w: it is wanted in MXFP8, and no source offers it"):
            trainer.plan(named("m"))


def test_roundings_that_differ_are_refused_before_anything_moves(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        Trainer((trainer,), 1, mxfp8=MXFP8Offer(CONVERTED, Rounding.FLOOR, instead=True)).publish(1)
        Replica((engine,), "r", 1, convert_on_send=True)
        with pytest.raises(refitd.RefusedError, match=r"v: sources round its scales floor, wanted is rceil"):
            trainer.swap(named("m"), 1, timeout=60)


@pytest.mark.slow
def test_only_mxfp8_is_no_source_for_bfloat16(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        Trainer((trainer,), 1, mxfp8=MXFP8Offer(CONVERTED, instead=True)).publish(1)
        plain = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
        engine.register_target(named("m"), plain, replica="plain")
        with pytest.raises(refitd.RefitFailed, match="v: "):
            trainer.swap(named("m"), 1, timeout=60)


def test_all_ranks_of_a_pipeline_may_give_one_pattern_of_what_is_offered(daemon: Daemon) -> None:
    """The second stage has no tensor that matches the pattern, the third has no tensor."""
    stages: list[dict[str, torch.Tensor]] = [{"layers.0.fc1": torch.randn(8, 64)}, {"norm": torch.randn(5)}, {}]
    offer = MXFP8Offer(("layers.*",))
    with daemon.connect() as trainer, daemon.connect() as engine:
        for rank, tensors in enumerate(stages):
            trainer.register_source(named("m"), tensors, rank=rank, world_size=3, mxfp8=offer).publish(1)
        buffer, norm = MXFP8Buffer.empty((8, 64)), torch.zeros(5)
        target = engine.register_target(
            named("m"), {"layers.0.fc1": buffer, "norm": norm}, replica="r", convert_on_send=True
        )
        with Engine(target):
            trainer.swap(named("m"), 1, timeout=60)
        expected = MXFP8Buffer.empty((8, 64))
        expected.quantize(stages[0]["layers.0.fc1"].bfloat16())
        assert torch.equal(buffer.data, expected.data) and torch.equal(buffer.scale, expected.scale)
        assert torch.equal(norm, stages[1]["norm"])
