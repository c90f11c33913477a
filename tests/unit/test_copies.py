"""Addressed copies: correct addresses, no access outside an arena."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from refitd import ParameterMetadata, Roster, Tile
from refitd.addressing.copies import (
    CopyList,
    address,
    constant_bytes,
    cut,
    fill_copies,
)
from refitd.addressing.places import LocalTensor
from refitd.buffers import arena as memory
from refitd.buffers.arena import MappedArena
from refitd.buffers.layout import extent, packed_offsets, row_major_strides
from refitd.copy_services import DigestMismatch
from refitd.copy_services.shm import CHUNK_BYTES, SharedMemoryService
from refitd.dtypes import CASTS, ELEMENT_SIZES, converted
from refitd.errors import ArenaError, TransportError
from refitd.plan.build import plan_copies
from tests.support.arenas import arena_of
from tests.support.places import by_rank, copies_of


@pytest.fixture
def arenas():
    found = {number: arena_of(8 << 20) for number in (1, 2)}
    found[1].bytes[:] = np.random.default_rng(0).integers(0, 256, 8 << 20, dtype=np.uint8)
    return found


def contiguous(arena: int, offset: int, shape: tuple[int, ...], es: int = 2) -> LocalTensor:
    return LocalTensor(arena, offset, shape, row_major_strides(shape, es))


def view(arena: MappedArena, tensor: LocalTensor, es: int) -> np.ndarray:
    dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}[es]
    return np.ndarray(tensor.shape, dtype, arena.bytes.data, tensor.offset, tensor.strides)


@pytest.mark.parametrize("es", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("shape", "src_strides", "dst_strides"),
    [
        ((0,), (1,), (1,)),
        ((), (), ()),
        ((7,), (1,), (3,)),
        ((5, 8), (8, 1), (20, 1)),
        ((5, 8), (1, 5), (8, 1)),
        ((3, 5, 4), (40, 8, 1), (20, 4, 1)),
        ((3, CHUNK_BYTES // 4 + 5), (CHUNK_BYTES // 4 + 9, 1), (CHUNK_BYTES // 4 + 5, 1)),
        ((700, 300), (1, 700), (300, 1)),
    ],
)
def test_every_stride_arrives_and_nothing_else_changes(arenas, es, shape, src_strides, dst_strides) -> None:
    src = LocalTensor(1, 64, shape, tuple(s * es for s in src_strides))
    dst = LocalTensor(2, 192, shape, tuple(s * es for s in dst_strides))
    expected = arenas[2].bytes.copy()
    np.ndarray(shape, f"V{es}", expected.data, 192, dst.strides)[...] = np.ndarray(
        shape, f"V{es}", arenas[1].bytes.data, 64, src.strides
    )
    job = SharedMemoryService().prepare(copies_of([(src, dst, es)]), arenas)
    result = job.run(verify=True, on_progress=lambda done: None)
    assert result.bytes == int(np.prod(shape)) * es
    assert np.array_equal(arenas[2].bytes, expected)


@pytest.mark.parametrize("pair", CASTS.values())
@pytest.mark.parametrize(
    ("shape", "src_order", "dst_order"),
    [
        ((), (), ()),
        ((7,), (0,), (0,)),
        ((130, 1021), (0, 1), (0, 1)),
        ((70, 300), (1, 0), (0, 1)),
        ((3, 5, 4), (2, 0, 1), (1, 2, 0)),
    ],
)
def test_elements_are_converted_as_torch_does(arenas, pair, shape, src_order, dst_order) -> None:
    torch = pytest.importorskip("torch")
    held, wanted = (getattr(torch, name) for name in pair)
    count = int(np.prod(shape))

    def strides(order: tuple[int, ...], es: int) -> tuple[int, ...]:
        steps = row_major_strides([shape[d] for d in order], es)
        return tuple(steps[order.index(d)] for d in range(len(shape)))

    noise = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    numbers = (noise * torch.exp2(torch.arange(count) % 60 - 30)).to(held)
    special = torch.tensor([np.inf, -np.inf, np.nan, 0.0, -0.0, 65519.0, 65520.0, 1e-45, 3.3895e38]).to(held)
    numbers[: min(count, 9)] = special[: min(count, 9)]
    source = LocalTensor(1, 68, shape, strides(src_order, held.itemsize))
    target = LocalTensor(2, 134, shape, strides(dst_order, wanted.itemsize))
    memory_there = np.frombuffer(numbers.view(torch.uint8).numpy().tobytes(), np.uint8).copy()
    arenas[1].bytes[68 : 68 + len(memory_there)] = memory_there
    ends = [
        ParameterMetadata("w", shape, dtype, ELEMENT_SIZES[dtype], cast_from=cast)
        for dtype, cast in zip(pair, (None, pair[0]), strict=True)
    ]
    plan = plan_copies([Roster(0, [ends[0]]), Roster(1, (), [ends[1]])])
    copies = CopyList.from_bytes(
        address(plan.table, by_rank({(0, "w"): source}), by_rank({(1, "w"): target})).to_bytes()
    )
    result = SharedMemoryService().prepare(copies, arenas).run(verify=True, on_progress=lambda done: None)
    assert result.bytes == count * wanted.itemsize

    def permuted(flat: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        return flat.reshape([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])

    got = torch.frombuffer(bytearray(arenas[2].bytes[134 : 134 + count * wanted.itemsize]), dtype=wanted)
    got, want = permuted(got, dst_order), permuted(numbers, src_order).to(wanted)
    words = {2: torch.int16, 4: torch.int32}[wanted.itemsize]
    number = ~want.isnan()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.contiguous().view(words)[number], want.contiguous().view(words)[number])


def test_constants_are_there_once_and_in_order() -> None:
    names = ("a", "b", "c")
    padded = [
        ParameterMetadata(n, (3,), "int16", 2, tiles=(Tile(n, (0,), (2,), 0, (1,)),), fill=fill)
        for n, fill in zip(names, (7, 5, 7), strict=True)
    ]
    held = [ParameterMetadata(n, (2,), "int16", 2) for n in names]
    fills = plan_copies([Roster(0, held), Roster(1, (), padded)]).fills
    assert np.frombuffer(constant_bytes(fills), "<i8").tolist() == [5, 0, 7, 0]
    places = {(1, name): contiguous(2, 64 * i, (3,)) for i, name in enumerate(names)}
    copies = fill_copies(fills, by_rank(places), constants=9, first_origin=10)
    assert copies.src_offset.tolist() == [16, 0, 16] and copies.dst_offset.tolist() == [4, 68, 132]
    assert copies.src_arena.tolist() == [9, 9, 9] and copies.origin.tolist() == [10, 11, 12]


def test_a_fill_that_does_not_arrive_is_found(arenas, monkeypatch) -> None:
    padded = ParameterMetadata("w", (9,), "int32", 4, tiles=(Tile("w", (0,), (1,), 0, (1,)),), fill=3)
    fills = plan_copies([Roster(0, [ParameterMetadata("w", (1,), "int32", 4)]), Roster(1, (), [padded])]).fills
    job = SharedMemoryService().prepare(fill_copies(fills, by_rank({(1, "w"): contiguous(2, 0, (9,), 4)}), 1), arenas)
    monkeypatch.setattr(np, "copyto", lambda dst, src: None)
    with pytest.raises(DigestMismatch, match="copy 0: 32 bytes differ"):
        job.run(verify=True, on_progress=lambda done: None)


@pytest.mark.parametrize("number", CASTS)
def test_every_exponent_and_tie_is_converted_as_torch_does(number: int) -> None:
    torch = pytest.importorskip("torch")
    held, wanted = (getattr(torch, name) for name in CASTS[number])
    if held is torch.float32:
        words = np.random.default_rng(2).integers(0, 2**32, 1 << 20, dtype=np.uint32)
        words[::2] = (words[::2] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)  # ties of bfloat16
        words[1::4] = (words[1::4] & np.uint32(0xFFFFE000)) | np.uint32(0x1000)  # ties of float16
    else:
        words = np.arange(1 << 16, dtype=np.uint16)
    bits = {2: torch.int16, 4: torch.int32}[wanted.itemsize]
    want = torch.from_numpy(words.copy()).view(held).to(wanted)
    got = torch.from_numpy(converted(number, words).copy()).view(bits)
    assert torch.equal(got.view(wanted).isnan(), want.isnan())
    assert torch.equal(got[~want.isnan()], want.view(bits)[~want.isnan()])


def test_a_conversion_that_does_not_arrive_is_found(arenas, monkeypatch) -> None:
    copies = replace(copies_of([(contiguous(1, 0, (9,), 4), contiguous(2, 0, (9,), 2), 2)]), cast=np.array([1]))
    job = SharedMemoryService().prepare(copies, arenas)
    monkeypatch.setattr(np, "copyto", lambda dst, src: None)
    with pytest.raises(DigestMismatch, match="copy 0: 18 bytes differ"):
        job.run(verify=True, on_progress=lambda done: None)


@pytest.mark.parametrize(("cast", "es"), [(5, 2), (-1, 2), (1, 4), (2, 2)])
def test_a_conversion_that_there_is_not_is_refused(arenas, cast, es) -> None:
    copies = copies_of([(contiguous(1, 0, (9,), es), contiguous(2, 0, (9,), es), es)])
    with pytest.raises(TransportError, match=f"copy 0: conversion {cast} to elements of {es} bytes does not exist"):
        SharedMemoryService().prepare(replace(copies, cast=np.array([cast])), arenas)


def test_a_converted_source_that_would_leave_its_arena_is_refused(arenas) -> None:
    # 10 float32 do not fit where 10 bfloat16 would
    pair = (contiguous(1, (8 << 20) - 30, (10,), 4), contiguous(2, 0, (10,), 2), 2)
    with pytest.raises(TransportError, match="leave arena 1"):
        SharedMemoryService().prepare(replace(copies_of([pair]), cast=np.array([1])), arenas)


def test_large_copies_are_cut_without_losing_a_row() -> None:
    copies = copies_of([(contiguous(1, 0, (1, 1000, 10)), contiguous(2, 40, (1, 1000, 10)), 2)])
    found = cut(copies, limit=3000)[0]
    assert len(found) == 7
    assert found.row_bytes.sum() == 20000 and found.row_bytes.max() <= 3000
    assert found.src_offset.tolist() == [i * 150 * 20 for i in range(7)]
    assert (found.dst_offset - found.src_offset).tolist() == [40] * 7
    assert found.origin.tolist() == [0] * 7


def test_copies_are_shared_out_by_bytes_and_each_once() -> None:
    sizes = [100, 1, 1, 1, 50, 50, 100, 1]
    pairs = [(contiguous(1, 0, (n,)), contiguous(2, 1000 * i, (n,)), 2) for i, n in enumerate(sizes)]
    copies = copies_of(pairs)
    shares = copies.shared_out(3)
    assert sorted(np.concatenate(shares).tolist()) == list(range(8))
    loads = [int(copies.row_bytes[share].sum()) for share in shares]
    assert max(loads) <= 2 * 110
    assert len(copies_of([]).shared_out(2)) == 2


def test_a_copy_list_survives_its_bytes() -> None:
    copies = copies_of([(contiguous(1, 0, (3, 4)), contiguous(2, 8, (3, 4)), 2)] * 3)
    again = CopyList.from_bytes(copies.to_bytes())
    for name in ("size", "src_offset", "dst_stride", "origin", "element_size"):
        assert np.array_equal(getattr(again, name), getattr(copies, name))
    for bad in (b"", copies.to_bytes()[:-1], np.array([1 << 40, 2], "<i8").tobytes()):
        with pytest.raises(ValueError, match="CopyList"):
            CopyList.from_bytes(bad)


def test_layouts_are_aligned_and_do_not_overlap() -> None:
    offsets, total = packed_offsets([100, 0, 300, 1])
    assert offsets == [0, 256, 256, 768]
    assert total == 4096
    assert row_major_strides((2, 3), 4) == (12, 4)
    assert extent((2, 3), (12, 4), 4) == 24
    assert extent((0, 3), (12, 4), 4) == 0


def test_an_arena_cannot_be_resized_by_anybody_who_has_it() -> None:
    fd = memory.create(8192, "sealed")
    assert memory.is_sealed(fd)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    for size in (0, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


def test_a_descriptor_that_is_no_sealed_arena_is_not_mapped() -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(ArenaError, match="no sealed arena"):
        MappedArena(fd, 4096, write=True)
    os.close(fd)


def test_very_many_tensors_are_each_addressed_as_one_alone_is() -> None:
    """The time grows linearly with the number of tensors: of 60,000 tensors, every 7th is stored transposed."""
    count, shape = 60_000, (2, 3)
    names = [f"t{i}" for i in range(count)]
    metas = [ParameterMetadata(name, shape, "bfloat16", 2, resolved_name=name) for name in names]
    table = plan_copies([Roster(0, metas), Roster(1, (), metas)]).table

    def places(rank: int) -> dict[tuple[int, str], LocalTensor]:
        strides = [(2, 4) if i % 7 == rank else (6, 2) for i in range(count)]
        return {(rank, name): LocalTensor(rank, 64 * i, shape, strides[i]) for i, name in enumerate(names)}

    sources, destinations = by_rank(places(0)), by_rank(places(1))
    # rows that walk each dimension on its own, as they must where a tensor is not contiguous
    row_major = np.tile(np.array([3, 1], np.int64), (count, 1))
    sizes = np.tile(np.array(shape, np.int64), (count, 1))
    table = replace(table, size=sizes, src_stride=row_major, dst_stride=row_major)

    found = address(table, sources, destinations)

    assert len(found) == len(table) == count
    for row in (*range(15), *range(count // 2, count // 2 + 15), *range(count - 15, count)):
        alone = address(table.select(np.array([row])), sources, destinations)
        for name in ("src_offset", "dst_offset", "src_stride", "dst_stride", "src_arena", "dst_arena"):
            assert (getattr(found, name)[row] == getattr(alone, name)[0]).all(), (row, name)
