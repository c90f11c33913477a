"""The pure parts of MXFP8 in the service: descriptions of parts, declared conversions, pieces of work, offers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from refitd import MXFP8Buffer, MXFP8Offer
from refitd.addressing.copies import QUANTIZE, QUANTIZE_SWIZZLED, SWIZZLE, ConversionList, Made, pieces_of
from refitd.client.source_tensors import SourceTensors
from refitd.client.target_tensors import TargetTensors
from refitd.coordinator.descriptions import wanted_parts
from refitd.coordinator.eligibility import offer_problems
from refitd.daemon import actions as act
from refitd.daemon.new_members import check_held, figures_of, held_of, held_places, made_in, wires_of
from refitd.describe.metadata import ParameterMetadata, Repeat, Tile
from refitd.errors import ProtocolError, RefusedError, TransportError
from refitd.mxfp8.format import Rounding, quantize, swizzle, swizzled_bytes
from refitd.mxfp8.parts import MXFP8Part, check_blocks, part_name, part_of, parts_of
from refitd.plan.build import plan_copies
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.shards import Conversion, DerivedTensor, HeldTensor, metadata_of, shard_of, staged
from refitd.testing.oracle import canonical_tensors, check, local_tensor
from refitd.worker.host_jobs import ConversionJob
from tests.support.arenas import arena_of
from tests.support.daemon_harness import SOURCE, Harness
from tests.support.layouts import meta, rosters, tp
from tests.support.shares import load_of

# --- descriptions -----------------------------------------------------------------------------------------

LAYOUTS = {
    "rows": tp("w", (16, 256), [0, 1]),
    "columns": tp("w", (32, 128), [0, 1], dim=1),
    "gated": tp("w", (32, 128), [0, 1], dim=1, partition_stride=2),
    "packed": tp("w", (32, 128), [0, 1], dim=1, partition_sizes=[96, 32]),
    "packed rows": tp("w", (16, 256), [0, 1], partition_sizes=[12, 4]),
    "tiles": {
        0: meta(
            "w",
            (16, 128),
            0,
            tiles=(
                Tile("w", (0, 64), (8, 64), 0, (128, 1), Repeat(0, 2, 16, 1024)),
                Tile("w", (0, 0), (8, 64), 64, (128, 1), Repeat(0, 2, 16, 1024)),
            ),
            global_shape=(32, 256),
        )
    },
    "flat": {0: meta("w", (96,), 0, tiles=(Tile("w", (3, 160), (1, 96), 0, (256, 1)),), global_shape=(32, 256))},
    "3-d": tp("e", (4, 8, 32), [0, 1, 2, 3], dim=2),
}  # fmt: skip
SHAPES = {"w": (32, 256), "e": (4, 8, 128)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_cut_as_the_tensor_is(layout: str) -> None:
    """The first element of each block represents the block's scale."""
    for rank, m in LAYOUTS[layout].items():
        data, scale = parts_of(m, "rceil")
        name = m.tiles[0].tensor if m.tiles else m.name
        whole = canonical_tensors({name: SHAPES[name]})[name]
        held = local_tensor(m, rank, {name: whole})
        parts = {part_name(name, "rceil", "data"): whole, part_name(name, "rceil", "scale"): whole[..., ::32]}
        np.testing.assert_array_equal(local_tensor(data, rank, parts), held)
        np.testing.assert_array_equal(local_tensor(scale, rank, parts), held[..., ::32])
        assert (data.dtype, scale.dtype) == ("float8_e4m3fn", "uint8")


def test_parts_of_different_layouts_are_planned_like_any_tensor() -> None:
    def parts(held: dict[int, ParameterMetadata], which: int) -> dict[int, ParameterMetadata]:
        return {rank: parts_of(m, "floor")[which] for rank, m in held.items()}

    sources = [parts(LAYOUTS["columns"], i) for i in (0, 1)]
    targets = [parts(tp("w", (8, 256), [2, 3, 4, 5]), i) for i in (0, 1)]
    found = rosters(sources, targets)
    shapes = {part_name("w", "floor", "data"): (32, 256), part_name("w", "floor", "scale"): (32, 8)}
    check(plan_copies(found).table, found, shapes)


@pytest.mark.parametrize(
    ("m", "says"),
    [
        (meta("w", (4, 48)), r"w: its shape is \[4, 48\]"),
        (meta("w", ()), r"w: its shape is \[\]"),
        (
            meta("w", (4, 64), global_shape=(4, 72), tiles=(Tile("w", (0, 0), (4, 64), 0, (64, 1)),)),
            "whole tensor is 72",
        ),
        (meta("w", (4, 64), tiles=(Tile("w", (0, 8), (4, 64), 0, (64, 1)),)), "8:72"),
        (meta("w", (4, 64), tiles=(Tile("w", (0, 0), (4, 48), 0, (64, 1)),)), "0:48"),
        (meta("w", (4, 64), tiles=(Tile("w", (0, 0), (4, 32), 16, (64, 1)),)), "parts of other than 32"),
        (meta("w", (64, 32), tiles=(Tile("w", (0, 0), (32, 64), 0, (1, 32)),)), "parts of other than 32"),
        (tp("w", (4, 64), [0, 1], dim=1, partition_stride=4)[0], "0:16"),
        (meta("w", (4, 64), dtype="float3"), "float3"),
    ],
)
def test_a_cut_through_a_block_is_refused_by_name(m: ParameterMetadata, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        check_blocks(m)
    with pytest.raises(RefusedError, match=f"{says}.*at the receivers"):
        parts_of(m, "rceil")


def test_padding_of_zeros_is_padding_of_both_parts_and_other_is_refused() -> None:
    padded = meta("w", (6, 32), 0, tiles=(Tile("w", (0, 0), (4, 32), 0, (32, 1)),), global_shape=(4, 32), fill=0.0)
    found = rosters([{1: parts_of(meta("w", (4, 32), 1), "rceil")[1]}], [{0: parts_of(padded, "rceil")[1]}])
    plan = plan_copies(found)
    assert len(plan.fills) == 1 and plan.fills.pattern.tolist() == [0]
    with pytest.raises(RefusedError, match=r"w: it is filled up with 1\.0"):
        parts_of(replace(padded, fill=1.0), "rceil")


def test_names_of_parts_are_read_back_and_no_others() -> None:
    assert part_of(part_name("a.b", "floor", "scale")) == MXFP8Part("a.b", "floor", "scale")
    for name in ("w", "w|fp8.", "w|fp8.up.data", "w|fp8.rceil.both", "w.rceil.data"):
        assert part_of(name) is None, name
    with pytest.raises(RefusedError, match="another name"):
        parts_of(meta("w|fp8.x", (4, 32)), "rceil")


# --- pieces of work ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64,), (1, 32), (5, 96), (300, 160), (3, 130, 64)])
@pytest.mark.parametrize("kind", [QUANTIZE, QUANTIZE_SWIZZLED])
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_pieces_make_what_the_whole_would_be(shape: tuple[int, ...], kind: int, rounding: str) -> None:
    """Pieces may have any size and order, and write no other bytes."""
    rng = np.random.default_rng(len(shape))
    rows, columns, blocks = int(np.prod(shape[:-1])), shape[-1], shape[-1] // 32
    words = rng.integers(0, 1 << 16, (rows, columns), np.uint16)
    data, scale = np.zeros((rows, columns), np.uint8), np.zeros((rows, blocks), np.uint8)
    quantize(words, data, scale, Rounding(rounding))
    if kind == QUANTIZE_SWIZZLED:
        flat = np.zeros(swizzled_bytes(rows, blocks), np.uint8)
        swizzle(scale, flat)
        scale = flat
    at = {"source": 256, "data": 256 + words.nbytes + 64}
    at["scale"] = at["data"] + data.nbytes + 64
    nbytes = at["scale"] + scale.nbytes + 64
    expected = np.full(-(-nbytes // 4096) * 4096, 0xAA, np.uint8)
    for name, part in (("source", words.view(np.uint8)), ("data", data), ("scale", scale)):
        expected[at[name] : at[name] + part.nbytes] = part.reshape(-1)
    arena = arena_of(len(expected))
    arena.bytes[:] = 0xAA
    arena.bytes[at["source"] : at["source"] + words.nbytes] = words.view(np.uint8).reshape(-1)
    pieces = pieces_of([Made(kind, shape, 1, 1, at["source"], at["data"], at["scale"], rounding)], piece=64)
    again = ConversionList.from_bytes(pieces.to_bytes())
    shares = again.shared_out(3)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(pieces)))
    told: list[int] = []
    for share in reversed(shares):
        job = ConversionJob(again.select(share), {1: arena})
        assert job.run(verify=True, on_progress=told.append).bytes == int(again.select(share).row_bytes.sum())
    assert int(pieces.row_bytes.sum()) == words.nbytes
    np.testing.assert_array_equal(arena.bytes, expected)


def test_scales_that_arrive_are_swizzled() -> None:
    scale = np.random.default_rng(0).integers(0, 256, (300, 6), np.uint8)
    arena = arena_of(16384)
    arena.bytes[: scale.nbytes] = scale.reshape(-1)
    ConversionJob(pieces_of([Made(SWIZZLE, (300, 192), 1, 1, 0, 0, 4096)], piece=1), {1: arena}).run(
        verify=True, on_progress=lambda done: None
    )
    flat = np.zeros(swizzled_bytes(300, 6), np.uint8)
    swizzle(scale, flat)
    np.testing.assert_array_equal(arena.bytes[4096 : 4096 + len(flat)], flat)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source": 4090}, "leave arena 1"),
        ({"data": -64}, "leave arena 1"),
        ({"scale": 4096}, "leave arena 1"),
        ({"kind": 4}, "no conversion 4"),
        ({"rounding": 2}, "rounding 2"),
        ({"size": 40}, r"\[40, 40\]"),
        ({"arena": 2}, "arena 2 is not mapped"),
    ],
)
def test_a_piece_that_leaves_its_arena_is_refused(changes: dict[str, int], says: str) -> None:
    pieces = pieces_of([Made(QUANTIZE, (2, 32), 1, 1, 0, 1024, 2048)])
    for name, value in changes.items():
        getattr(pieces, name)[:] = value
    with pytest.raises(TransportError, match=says):
        ConversionJob(pieces, {1: arena_of(4096)})


def test_a_block_of_another_length_is_refused() -> None:
    data = pieces_of([Made(QUANTIZE, (2, 32), 1, 1, 0, 1024, 2048)]).to_bytes()
    for bad in (b"", data[:-8], data + data, data[:7]):
        with pytest.raises(ValueError, match="do not hold"):
            ConversionList.from_bytes(bad)


# --- what a target declares -------------------------------------------------------------------------------

SHARD = shard_of([meta("norm", (8,), 0), meta("w", (256, 64), 0)])
HELD = (
    HeldTensor("norm", (8,), "bfloat16", 0),
    HeldTensor("w.data", (256, 64), "float8_e4m3fn"),
    HeldTensor("w.scale", (1024,), "uint8"),
)
CONVERSIONS = (Conversion("quantize", 1, (1, 2), "floor", swizzled=True),)
TARGET = local.RegisterTarget(
    model="m", replica="r", rank=0, world_size=1, shard=SHARD, held=HELD, conversions=CONVERSIONS
)


def test_what_arrives_and_what_is_made_lie_apart() -> None:
    lies = staged(SHARD, HELD)
    assert lies.wire == (0, 256) and lies.held == (0, 256 + 2 * 256 * 64, 256 + 3 * 256 * 64)
    assert held_places(TARGET).offset.tolist() == list(lies.held)
    made = Made(QUANTIZE_SWIZZLED, (256, 64), 5, 5, 256, lies.held[1], lies.held[2], "floor")
    assert made_in(TARGET, 5, -1) == [made]
    figures = figures_of(TARGET)
    assert figures.held_bytes == 16 + 256 * 64 + 1024 and figures.converted_bytes == 2 * 256 * 64
    assert figures.staging_bytes == lies.nbytes


def test_without_declarations_what_arrives_is_held() -> None:
    plain = local.RegisterTarget(model="m", replica="r", rank=0, world_size=1, shard=SHARD)
    check_held(plain)
    assert (
        held_of(plain) is SHARD.tensors
        and list(wires_of(plain)) == [0, 1]
        and staged(SHARD, ()).held == staged(SHARD, ()).wire
    )
    assert figures_of(plain).converted_bytes == 0 and figures_of(SOURCE).held_bytes == 0


@pytest.mark.parametrize(
    ("held", "conversions", "says"),
    [
        (HELD, (), "w: it arrives and is used 0 times"),
        (HELD, CONVERSIONS * 2, "w: it arrives and is used 2 times"),
        ((), CONVERSIONS, "but no tensors they make"),
        (HELD[:2], CONVERSIONS, "names tensors that there are not"),
        (HELD, (Conversion("quantize", 7, (1, 2)),), "names tensors that there are not"),
        (HELD, (Conversion("quantize", 1, (1,)),), "w: quantize makes 2 tensors, found 1"),
        (HELD, (Conversion("quantize", 1, (1, 2)),), r"w\.scale: \[1024\] uint8, expected \[256, 2\]"),
        (HELD, (Conversion("swizzle", 1, (2,)),), "w: bfloat16 .* are no scales"),
        ((HeldTensor("norm", (8,), "bfloat16", 9), *HELD[1:]), CONVERSIONS, "tensor 9"),
        ((HeldTensor("norm", (9,), "bfloat16", 0), *HELD[1:]), CONVERSIONS, r"norm: held as \[9\]"),
        ((HeldTensor("norm", (8,), "float1", 0), *HELD[1:]), CONVERSIONS, "float1"),
        ((*HELD, HeldTensor("x", (8,), "uint8")), CONVERSIONS, "x: 0 conversions write it, expected 1"),
    ],
)  # fmt: skip
def test_declarations_that_contradict_themselves_are_refused(
    held: tuple[HeldTensor, ...], conversions: tuple[Conversion, ...], says: str
) -> None:
    bad = local.RegisterTarget(
        model="m", replica="r", rank=0, world_size=1, shard=SHARD, held=held, conversions=conversions
    )
    with pytest.raises((RefusedError, ProtocolError), match=says):
        check_held(bad)


# --- the daemon -------------------------------------------------------------------------------------------


class Converting(Harness):
    """Return a source and a target that stores its weights converted."""

    def fleet(self) -> tuple[str, str]:
        shard = TARGET.shard
        source = self.ask(local.RegisterSource(model="m", rank=0, world_size=1, shard=shard))
        target = self.ask(TARGET)
        assert isinstance(source, local.Registered) and isinstance(target, local.Registered)
        assert target.nbytes == staged(SHARD, HELD).nbytes
        assert self.publish(source.member, 1) == local.Done()
        held, wanted = metadata_of(shard, 0), metadata_of(shard, 1)
        members = (source.member, target.member)
        plan = load_of(rosters([{0: m} for m in held], [{1: m} for m in wanted]), members)
        self.feed(act.CoordinatorSaid(0, plan))
        return members

    def conversions(self) -> list[tuple[int, int]]:
        jobs = {m.job for _, m in self.to_worker if isinstance(m, sidecar.LoadJob) and m.converts}
        return [(worker, m.run) for worker, m in self.to_worker if isinstance(m, sidecar.RunJob) and m.job in jobs]


def test_what_is_staged_has_been_converted() -> None:
    h = Converting()
    h.fleet()
    runs = h.stage()
    assert runs and not h.conversions()
    h.done(runs)
    converting = h.conversions()
    assert converting and not h.said(cluster.StageDone)
    h.done(converting)
    (done,) = h.said(cluster.StageDone)
    assert done.converted_bytes == 2 * 256 * 64 and done.bytes == 16 + 2 * 256 * 64


def test_a_worker_that_dies_while_converting_fails_the_staging_and_is_given_its_work_anew() -> None:
    h = Converting()
    _, target = h.fleet()
    h.done(h.stage())
    (worker, _), *_ = h.conversions()
    h.feed(act.WorkerDied(worker, "was killed by SIGKILL"))
    (failed,) = h.said(cluster.StageDone)
    assert failed.reason == "was killed by SIGKILL while converting what has arrived"
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="s", reason="x")))
    assert h.daemon.members[target].state.staged is None
    h.done(h.stage("s2"))
    h.done([(w, m.run) for w, m in h.to_worker if isinstance(m, sidecar.RunJob)])
    assert [m.swap for m in h.said(cluster.StageDone) if not m.reason] == ["s2"]


def test_an_abort_while_converting_replaces_the_workers_that_convert() -> None:
    h = Converting()
    h.fleet()
    h.done(h.stage())
    busy = sorted({worker for worker, _ in h.conversions()})
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="s", reason="x")))
    assert h.restarted == busy


def test_derived_tensors_without_a_hook_are_told() -> None:
    h = Harness()
    derived = (DerivedTensor("fused", ("norm",), True), DerivedTensor("packed", ("norm",), False))
    h.ask(local.RegisterTarget(model="m", replica="r", rank=0, world_size=1, shard=SHARD, derived=derived))
    (added,) = h.said(cluster.AddShard)
    assert added.stale == ("packed",)


# --- the coordinator --------------------------------------------------------------------------------------


def test_what_is_not_offered_is_named_with_the_way_out() -> None:
    both = meta("w", (256, 64), 0), meta("v", (256, 64), 0)
    wanted = wanted_parts(shard_of([part for m in both for part in parts_of(m, "rceil")]))
    assert wanted == {("w", "rceil"), ("v", "rceil")} and not wanted_parts(SHARD)
    plain, up, down = (
        shard_of([m for meta_ in both for m in made(meta_)])
        for made in (lambda m: [m], lambda m: parts_of(m, "rceil"), lambda m: parts_of(m, "floor"))
    )
    assert offer_problems([up], wanted) == [] and offer_problems([plain], frozenset()) == []
    assert offer_problems([plain], wanted) == []  # senders convert bfloat16
    assert [p.split(":")[0] for p in offer_problems([plain], wanted, may_convert=False)] == ["v", "w"]
    other = shard_of([replace(m, dtype="int16") for m in both])
    assert "register_source(mxfp8=...)" in offer_problems([other], wanted)[0]
    assert "sources round its scales floor, wanted is rceil" in offer_problems([down], wanted)[1]


# --- the client -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(96,), (3, 64), (5, 3, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_version_is_written_with_its_parts_behind_it(
    shape: tuple[int, ...], dtype: torch.dtype, is_transposed: bool
) -> None:
    """Any strides and any type work, converted through bfloat16."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    held = value.mT.contiguous().mT if is_transposed and len(shape) > 1 else value
    for instead in (False, True):
        source = SourceTensors(
            {"w": held, "b": torch.ones(3)}, 0, None, None, None, MXFP8Offer(("w",), instead=instead)
        )
        assert [m.name for m in source.wire] == [
            *(() if instead else ("w",)),
            "b",
            part_name("w", "rceil", "data"),
            part_name("w", "rceil", "scale"),
        ]
        lies = staged(shard_of(source.wire), ())
        arena = arena_of(lies.nbytes)
        source.write_to(arena)
        buffer = MXFP8Buffer.empty(shape)
        buffer.quantize(value.to(torch.bfloat16))
        for offset, part in zip(lies.wire[-2:], (buffer.data, buffer.scale), strict=True):
            found = arena.bytes[offset : offset + part.numel()]
            np.testing.assert_array_equal(found, part.reshape(-1).numpy())
        if not instead:
            whole = value.contiguous().view(torch.uint8).reshape(-1).numpy()
            np.testing.assert_array_equal(arena.bytes[: whole.size], whole)


def test_patterns_say_which_tensors_are_offered() -> None:
    offer = MXFP8Offer(("layers.*.fc1", "head", "x[0].*"))
    assert [offer.matches(n) for n in ("layers.7.fc1", "layers.7.fc2", "head", "heads", "x[0].w", "x0.w")] == [
        *(True, False, True, False, True, False)
    ]


def test_a_pattern_may_be_for_tensors_of_other_ranks() -> None:
    """A stage of a pipeline without such a layer, and a rank without tensors."""
    offer = MXFP8Offer(("layers.*.fc1",))
    for tensors in ({"norm": torch.zeros(3)}, {}):
        source = SourceTensors(tensors, 1, None, None, None, offer, elsewhere=True)
        assert [m.name for m in source.wire] == [*tensors] and not source.is_converted
        with pytest.raises(RefusedError, match=r"'layers\.\*\.fc1' is offered in MXFP8, and no tensor"):
            SourceTensors(tensors, 0, None, None, None, offer)
        with pytest.raises(RefusedError, match="'head' is offered in MXFP8, and no tensor registered here"):
            SourceTensors(tensors, 1, None, None, None, MXFP8Offer(("head",)), elsewhere=True)


@pytest.mark.parametrize("swizzled", [False, True])
def test_a_target_says_what_arrives_and_what_it_holds(swizzled: bool) -> None:
    tensors = {"b": torch.zeros(3), "w": MXFP8Buffer.empty((4, 64), is_swizzled=swizzled)}
    received = TargetTensors(tensors, 0, None, None, None)
    assert [m.name for m in received.wire] == ["b", "w"] and received.names == ["b", "w.data", "w.scale"]
    assert received.conversions == (Conversion("quantize", 1, (1, 2), swizzled=swizzled),)
    sent = TargetTensors(tensors, 0, None, None, None, convert_on_send=True)
    assert [h.wire for h in sent.held] == [0, 1, None if swizzled else 2]
    assert sent.conversions == ((Conversion("swizzle", 2, (2,)),) if swizzled else ())
    for made in (received, sent):
        check_held(
            local.RegisterTarget(
                model="m",
                replica="r",
                rank=0,
                world_size=1,
                shard=shard_of(made.wire),
                held=made.held,
                conversions=made.conversions,
            )
        )
        assert made.offsets == list(staged(shard_of(made.wire), made.held).held)
