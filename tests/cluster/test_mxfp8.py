"""MXFP8 through the service: whoever converts, wherever, the bytes are those of converting the whole tensor once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import pytest
import torch

import refitd
from refitd import Derived, MXFP8Buffer, MXFP8Offer, ParameterMetadata, Rounding, Tile
from refitd.protocol.reports import SwapProgress
from refitd.testing import Daemon, Engine, eventually

# name -> shape, the dimension that is split, or None; `w` and `v` are converted
SHAPES: Mapping[str, tuple[tuple[int, ...], int | None]] = {
    "v": ((192, 256), 1),
    "w": ((320, 128), 0),
    "norm": ((128,), None),
}
CONVERTED = ("v", "w")
OFFER = MXFP8Offer(CONVERTED)

Shard = dict[str, torch.Tensor]


def model(seed: int, dtype: torch.dtype = torch.bfloat16) -> Shard:
    generator = torch.Generator().manual_seed(seed)
    full = {name: torch.randn(shape, generator=generator).to(dtype) for name, (shape, _) in SHAPES.items()}
    full["v"][3, 32:64] = 0.0  # a block of zeros
    full["v"][5, 70] = 1e30
    return full


def cut(full: Mapping[str, torch.Tensor], rank: int, world: int) -> Shard:
    return {
        name: tensor.clone() if (dim := SHAPES[name][1]) is None else tensor.chunk(world, dim)[rank].contiguous()
        for name, tensor in full.items()
    }


def describe(shard: Mapping[str, torch.Tensor], rank: int, world: int, **fields: object) -> list[ParameterMetadata]:
    return [
        ParameterMetadata(
            name=name,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            element_size=tensor.element_size(),
            is_tp=SHAPES[name][1] is not None and world > 1,
            partition_dim=SHAPES[name][1] or 0,
            owner_rank=rank,
            tensor_parallel_group_ranks=list(range(world)),
            resolved_name=name,
            **(fields if name in CONVERTED else {}),
        )
        for name, tensor in shard.items()
    ]


def oracle(full: torch.Tensor, rounding: Rounding = Rounding.RCEIL) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole tensor, converted once: data and row-major scales."""
    buffer = MXFP8Buffer(*(t.clone() for t in empty_parts(tuple(full.shape), False)), rounding=rounding)
    buffer.quantize(full.to(torch.bfloat16))
    return buffer.data, buffer.scale


def empty_parts(shape: tuple[int, ...], swizzled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    made = MXFP8Buffer.empty(shape, is_swizzled=swizzled)
    return made.data, made.scale


def swizzled_by_index(rows: torch.Tensor) -> torch.Tensor:
    """Scales in tiles of 128 x 4, one by one."""
    high, wide = -(-rows.shape[0] // 128), -(-rows.shape[1] // 4)
    out = torch.zeros(high * wide * 512, dtype=torch.uint8)
    for r in range(rows.shape[0]):
        for c in range(rows.shape[1]):
            tile = (r // 128) * wide + c // 4
            out[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = rows[r, c]
    return out


def expected(full: Shard, rank: int, world: int, swizzled: bool, rounding: Rounding = Rounding.RCEIL) -> Shard:
    """What one rank has to hold, by `name.data`, `name.scale`, or name."""
    found = {}
    for name, tensor in full.items():
        if name not in CONVERTED:
            found[name] = tensor.to(torch.bfloat16)
            continue
        dim = SHAPES[name][1] or 0
        data, scale = (part.chunk(world, dim)[rank].contiguous() for part in oracle(tensor, rounding))
        found[f"{name}.data"], found[f"{name}.scale"] = data, swizzled_by_index(scale) if swizzled else scale
    return found


class Replica:
    """Ranks of one replica, in MXFP8."""

    def __init__(
        self,
        clients: tuple[refitd.Client, ...],
        name: str,
        world: int,
        *,
        swizzled: bool = False,
        in_arena: bool = False,
        rounding: Rounding | None = None,
        cast_from: str | None = None,
        **options: object,
    ) -> None:
        self.world, self.swizzled, self.rounding = world, swizzled, rounding or Rounding.RCEIL
        self.held: list[dict[str, object]] = []
        self.targets = []
        for rank in range(world):
            client = clients[rank % len(clients)]
            logical = cut(model(0), rank, world)
            held: dict[str, object] = {}
            for key, tensor in logical.items():
                if key not in CONVERTED:
                    held[key] = torch.zeros_like(tensor)
                    if in_arena:
                        held[key] = client.allocate({key: (tuple(tensor.shape), tensor.dtype)})[key]
                    continue
                parts = empty_parts(tuple(tensor.shape), swizzled)
                if in_arena:
                    made = client.allocate({str(i): (tuple(p.shape), torch.uint8) for i, p in enumerate(parts)})
                    parts = (made["0"], made["1"])
                held[key] = MXFP8Buffer(*parts, rounding=rounding)
            fields = {} if cast_from is None else {"cast_from": cast_from}
            self.held.append(held)
            self.targets.append(
                client.register_target(
                    "m",
                    held,
                    replica=name,
                    rank=rank,
                    world_size=world,
                    metadata=describe(logical, rank, world, **fields),
                    **options,
                )
            )

    def live(self, rank: int) -> Shard:
        found = {}
        for name, value in self.held[rank].items():
            if isinstance(value, MXFP8Buffer):
                found[f"{name}.data"], found[f"{name}.scale"] = value.data, value.scale
            else:
                assert isinstance(value, torch.Tensor)
                found[name] = value
        return found

    def assert_holds(self, full: Shard) -> None:
        for rank in range(self.world):
            want = expected(full, rank, self.world, self.swizzled, self.rounding)
            live = self.live(rank)
            assert live.keys() == want.keys()
            for name, tensor in want.items():
                assert torch.equal(live[name].view(torch.uint8), tensor.view(torch.uint8)), (rank, name)


class Trainer:
    """Source ranks that publish whole models."""

    def __init__(
        self, clients: tuple[refitd.Client, ...], world: int, dtype: torch.dtype = torch.bfloat16, **options: object
    ) -> None:
        self.world, self.dtype = world, dtype
        self.shards, self.sources = [], []
        for rank in range(world):
            mine = cut(model(0, dtype), rank, world)
            self.shards.append(mine)
            self.sources.append(
                clients[rank % len(clients)].register_source(
                    "m", mine, rank=rank, world_size=world, metadata=describe(mine, rank, world), **options
                )
            )

    def publish(self, version: int) -> Shard:
        full = model(version, self.dtype)
        for rank, (source, mine) in enumerate(zip(self.sources, self.shards, strict=True)):
            for name, tensor in cut(full, rank, self.world).items():
                mine[name].copy_(tensor)
            source.publish(version)
        return full


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
        replicas = [
            Replica((engine,), "fine", 4, **options),
            Replica((engine,), "whole", 1, in_arena=True, **options),
        ]
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


# --- refusals ---------------------------------------------------------------------------------------------


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
        (
            {"w": data_and_scale((8, 64), (8, 2), dtypes=(torch.int16, torch.uint8))},
            None,
            r"w: .*int16.*expected",
        ),
        ({"w": object()}, None, r"w: object is no MXFP8 tensor"),
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


# --- faults -----------------------------------------------------------------------------------------------


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


# --- CUDA graphs ------------------------------------------------------------------------------------------


def swap_fails(daemon: Daemon, says: str, register: Callable[[refitd.Client], object]) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        Trainer((trainer,), 1).publish(1)
        with Engine(register(engine)) as running:
            with pytest.raises(refitd.RefitFailed, match=says):
                trainer.swap("m", 1, timeout=60)
            eventually(lambda: bool(running.errors), "the engine was told")


def test_a_buffer_that_has_moved_fails_the_commit_by_name(daemon: Daemon) -> None:
    def register(engine: refitd.Client) -> object:
        held = Replica((engine,), "r", 1)
        buffer = held.held[0]["v"]
        assert isinstance(buffer, MXFP8Buffer)
        buffer.scale.set_(torch.zeros_like(buffer.scale))
        return held.targets[0]

    swap_fails(daemon, r"v\.scale: its storage has changed since registration", register)


@pytest.mark.slow
def test_a_weight_that_moves_during_the_commit_fails_it_by_name(daemon: Daemon) -> None:
    """What a load function of an engine does that replaces parameters instead of writing them."""

    def register(engine: refitd.Client) -> object:
        mine = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}

        def refresh(tensor: torch.Tensor) -> None:
            mine["norm"].data = torch.ones(128, dtype=torch.bfloat16)

        derived = {"fused": Derived(torch.zeros(4), ("norm",), refresh)}
        return engine.register_target("m", mine, replica="r", derived=derived)

    swap_fails(daemon, r"norm: its storage has changed during the commit", register)


def test_derived_tensors_are_made_anew_after_the_weights_in_order(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        sources = Trainer((trainer,), 1)
        seen: list[str] = []
        held = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
        total, double = torch.zeros(128, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.bfloat16)

        def add(tensor: torch.Tensor) -> None:
            seen.append("total")
            torch.add(held["norm"], 1, out=tensor)

        def twice(tensor: torch.Tensor) -> None:
            seen.append("double")
            torch.mul(total, 2, out=tensor)

        derived = {"total": Derived(total, ("norm",), add), "double": Derived(double, (), twice)}
        target = engine.register_target("m", held, replica="r", derived=derived)
        with Engine(target) as running:
            for version in (1, 2):
                full = sources.publish(version)
                report = trainer.swap("m", version, timeout=60)
                assert torch.equal(double, (full["norm"] + 1) * 2)
        assert seen == ["total", "double"] * 2 and not running.errors
        assert report.members[0].paused_s == pytest.approx(target.last_pause_s)


def moves(tensor: torch.Tensor) -> None:
    tensor.set_(torch.zeros(5))


def raises(tensor: torch.Tensor) -> None:
    raise ValueError("no workspace")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (raises, "fused: its refresh hook raised ValueError: no workspace"),
        (moves, "fused: the storage of this derived tensor has changed during the commit"),
    ],
)
def test_a_hook_that_raises_or_replaces_its_tensor_fails_the_commit_by_name(
    daemon: Daemon, hook: Callable[[torch.Tensor], object], says: str
) -> None:
    def register(engine: refitd.Client) -> object:
        mine = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
        derived = {"fused": Derived(torch.zeros(4), ("norm",), hook)}
        return engine.register_target("m", mine, replica="r", derived=derived)

    swap_fails(daemon, says, register)


def test_a_derived_tensor_without_a_hook_refuses_the_swap(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        Trainer((trainer,), 1).publish(1)
        mine = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
        with pytest.raises(refitd.RefusedError, match=r"fused: .*made of \['other'\]"):
            engine.register_target("m", mine, replica="r", derived={"fused": Derived(torch.zeros(4), ("other",))})
        engine.register_target("m", mine, replica="r", derived={"fused": Derived(torch.zeros(4), ("norm",))})
        with pytest.raises(refitd.RefusedError, match=r"r rank 0 .*fused derived from .*no hook"):
            trainer.swap("m", 1, timeout=60)
