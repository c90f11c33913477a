"""Digests of pieces: equal exactly where the same elements are the same bytes, however they lie in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from refitd import ParameterMetadata, Repeat, Roster, Tile
from refitd.coordinator.replica_digests import Compared, HeldReplica, ReplicaDigests, read_digests
from refitd.describe.replica_pieces import PlaceNumbers, digest_of, enumerated, piece_count, take_digests
from refitd.errors import ProtocolError
from refitd.plan.replica_digests import differences, twins_of
from refitd.protocol.shards import shard_of
from tests.support.layouts import meta, tp


@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (200, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_digest_is_of_elements_in_order_whatever_the_strides(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = (torch.arange(torch.Size(shape).numel()) % 251).view(shape).to(dtype)
    wide = torch.zeros((*shape, 2), dtype=dtype)[..., 1]
    wide.copy_(value)
    assert digest_of(value) == digest_of(wide) == digest_of(value.clone()) != 0
    if value.numel() > 1:
        assert digest_of(value) == digest_of(value.t().contiguous().t() if value.dim() == 2 else value)
        other = value.clone()
        other.view(-1)[-1] = 0 if dtype is torch.bool else 250
        assert torch.equal(other, value) or digest_of(other) != digest_of(value)


def test_a_tile_has_the_digest_of_its_elements_in_canonical_order() -> None:
    # gate and up of one rank, transposed in memory: two boxes of 2 x 3
    whole = torch.arange(24.0).view(8, 3)
    mine = torch.cat([whole[2:4], whole[6:8]])
    plain = Tile("w", (2, 0), (2, 3), 0, (3, 1), Repeat(0, 2, 4, 6))
    turned = Tile("w", (2, 0), (2, 3), 0, (1, 4), Repeat(0, 2, 4, 2))
    assert digest_of(mine, plain) == digest_of(mine.t().contiguous(), turned) == digest_of(mine)


def described(rank: int, **fields: object) -> ParameterMetadata:
    return meta("w", (4, 2), rank, **fields)


def compare(metas: list[ParameterMetadata], tensors: list[torch.Tensor], wanted: ParameterMetadata) -> list[str]:
    rosters = [Roster(r, [m]) for r, m in enumerate(metas)] + [Roster(9, (), [wanted])]
    twins = twins_of(rosters)
    held = []
    for rank, (m, tensor) in enumerate(zip(metas, tensors, strict=True)):
        digests = take_digests([m], {m.name: tensor}, len(metas))
        held.append((f"rank {rank}", twins.get(rank, []), digests[[t.number for t in twins.get(rank, [])]]))
    return differences(held)


def test_only_equal_boxes_are_compared() -> None:
    one, two = torch.zeros(4, 2), torch.ones(4, 2)
    wanted = meta("w", (4, 2), 9)
    (said,) = compare([described(0), described(1)], [one, two], wanted)
    assert said.startswith("w: rank 0 and rank 1 describe the same elements")
    assert not compare([described(0), described(1)], [one, one.clone()], wanted)
    split = tp("w", (4, 2), [0, 1])
    assert not compare([split[0], split[1]], [one, two], meta("w", (8, 2), 9))
    assert not compare([described(0), described(1)], [one, two], meta("v", (4, 2), 9))
    tiles = [Tile("w", (rank, 0), (3, 2), 0, (2, 1)) for rank in range(2)]  # they overlap, and are not equal
    parts = [meta("w", (3, 2), rank, tiles=(tile,), global_shape=(4, 2)) for rank, tile in enumerate(tiles)]
    assert not compare(parts, [one[:3], two[:3]], wanted)


def test_replicated_heads_inside_of_packed_tensors_are_compared() -> None:
    tiles = [(Tile("q", (2 * r,), (2,), 0, (1,)), Tile("k", (0,), (1,), 2, (1,))) for r in range(2)]
    metas = [meta("qk", (3,), r, tiles=tiles[r]) for r in range(2)]
    wanted = meta("k", (1,), 9)
    assert not compare(metas, [torch.tensor([1, 2, 9]), torch.tensor([3, 4, 9])], wanted)
    (said,) = compare(metas, [torch.tensor([1, 2, 9]), torch.tensor([3, 4, 8])], wanted)
    assert said.startswith("k: rank 0 and rank 1")


def test_what_nobody_else_can_hold_takes_no_digest() -> None:
    split = tp("w", (4, 2), [0, 1])[0]
    tensors = {"w": torch.ones(4, 2)}
    assert take_digests([split], tensors, 2).tolist() == [0]
    assert take_digests([split], tensors, 4).tolist() != [0]
    assert take_digests([described(0)], tensors, 1).tolist() == [0]


def test_pieces_are_numbered_by_descriptions_alone() -> None:
    many = tuple(Tile("m", (i,), (1,), i, (1,)) for i in range(100))
    metas = [meta("m", (100,), 0, tiles=many), meta("w", (2,), 0), meta("t", (2,), 0, tiles=many[:2])]
    assert [piece_count(m) for m in metas] == [0, 1, 2]
    assert [(number, m.name) for number, m, _ in enumerated(metas, PlaceNumbers())] == [(0, "w"), (1, "t"), (2, "t")]


def replica(rank: int, version: int, value: int) -> HeldReplica:
    shard = shard_of([meta("w", (2,), rank)])
    return HeldReplica(rank, f"rank {rank}", "d", shard, ReplicaDigests(version, np.array([value], np.uint64)))


def test_the_coordinator_compares_equal_versions_and_reads_what_fits() -> None:
    wanted = {"t": shard_of([meta("w", (2,), 0)])}
    assert not Compared().problems([replica(0, 1, 5), replica(1, 2, 6)], wanted)
    assert not Compared().problems([replica(0, 1, 5), replica(1, 1, 5)], wanted)
    assert not Compared().problems([replica(0, 1, 5), replica(1, 1, 0)], wanted)
    (said,) = Compared().problems([replica(0, 1, 5), replica(1, 1, 5), replica(2, 1, 6)], wanted)
    assert "rank 0 and rank 2" in said
    with pytest.raises(ProtocolError, match="8 for each of 1 pieces"):
        read_digests("rank 0", shard_of([meta("w", (2,), 0)]), 1, b"123")


def test_bools_of_any_byte_have_one_digest_whatever_the_strides() -> None:
    raw = torch.arange(48, dtype=torch.uint8).view(6, 8)
    strided = raw.t().contiguous().t()

    assert digest_of(strided.view(torch.bool)) == digest_of(raw.view(torch.bool)) == digest_of(raw)
    assert digest_of((raw != 0).t().contiguous().t()) != digest_of(strided.view(torch.bool))


def test_uneven_replicas_are_compared_however_small_the_shard() -> None:
    metas = [
        meta("w", (rows, 2), r, tiles=(Tile("w", (first, 0), (rows, 2), 0, (2, 1)),), global_shape=(5, 2))
        for r, (first, rows) in enumerate([(0, 4), (4, 1)] * 2)
    ]
    tensors = [torch.zeros(4, 2), torch.ones(1, 2), torch.zeros(4, 2), torch.full((1, 2), 3.0)]
    (said,) = compare(metas, tensors, meta("w", (5, 2), 9))
    assert said.startswith("w: rank 1 and rank 3")
