"""Transfers between nodes: both ends derive equal transfers, and cut rows keep every byte."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from refitd.addressing.copies import cut
from refitd.addressing.paths import TransferList, lanes_of, node_transfers, partners, transfers_of
from refitd.addressing.places import LocalTensor, Places
from refitd.buffers.layout import row_major_strides
from refitd.plan.build import plan_copies
from refitd.plan.table import CopyTable
from tests.support.layouts import crossing, meta, replicated, rosters, tp
from tests.support.places import by_rank


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def table(*rows: tuple[list[int], int, int, int]) -> CopyTable:
    """Rows of (size, bytes of an element, source rank, destination rank) between row-major tensors from offset 5."""
    n, dims = len(rows), max((len(size) for size, *_ in rows), default=1)
    sizes = [[1] * (dims - len(size)) + size for size, *_ in rows]
    strides = np.array([row_major_strides(size, 1) for size in sizes], dtype=np.int64).reshape(n, dims)
    ranks = {side: np.array([row[side] for row in rows], dtype=np.int32) for side in (2, 3)}
    return CopyTable(
        locals=("held", "wanted"),
        element_size=np.array([row[1] for row in rows], dtype=np.int32),
        size=np.array(sizes, dtype=np.int64).reshape(n, dims),
        tensors=("w",),
        tensor=np.zeros(n, np.int32),
        src_rank=ranks[2],
        dst_rank=ranks[3],
        src_local=np.zeros(n, np.int32),
        dst_local=np.ones(n, np.int32),
        task_id=np.arange(1000, 1000 + n, dtype=np.int64),
        src_offset=np.full(n, 5, np.int64),
        src_stride=strides,
        dst_offset=np.full(n, 5, np.int64),
        dst_stride=2 * strides,
        cast=np.zeros(n, np.int32),
    )


def test_a_row_is_cut_along_its_outermost_dimension_of_more_than_one_element() -> None:
    # 1000 rows of 20 bytes; 3000 bytes are 150 of them
    rows, part, origin = cut(table(([4, 10], 2, 0, 1), ([1, 1000, 10], 2, 0, 1), ([3], 2, 0, 1)), limit=3000)

    assert origin.tolist() == [0, *[1] * 7, 2]
    assert part.tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 0]
    assert rows.size.tolist() == [[1, 4, 10], *[[1, 150, 10]] * 6, [1, 100, 10], [1, 1, 3]]
    assert rows.src_offset.tolist() == [5, *[5 + 1500 * i for i in range(7)], 5]
    assert rows.dst_offset.tolist() == [5, *[5 + 3000 * i for i in range(7)], 5]
    assert rows.task_id.tolist() == [1000, *[1001] * 7, 1002]


def test_a_row_of_exactly_the_limit_stays_whole_and_a_byte_more_is_cut() -> None:
    assert len(cut(table(([100], 1, 0, 1)), limit=100)[0]) == 1
    rows, part, _ = cut(table(([101], 1, 0, 1)), limit=100)
    assert rows.size.tolist() == [[100], [1]] and part.tolist() == [0, 1]


def test_nothing_is_cut_into_nothing() -> None:
    rows, part, origin = cut(table())
    assert len(rows) == len(part) == len(origin) == 0
    assert len(lanes_of(column(), column(), column(), 3, column())) == 0


def test_each_pair_of_nodes_shares_its_bytes_evenly_over_the_lanes() -> None:
    # nodes 0 -> 1: 10, 10, 20, 40 bytes; the middles 5, 15, 30 of 80 are in the first half, 60 is in the second
    # nodes 1 -> 0: 6, 2 bytes; the middles are 3 and 7 of 8
    nbytes = column(10, 6, 10, 20, 2, 40)
    src, dst, path = column(0, 1, 0, 0, 1, 0), column(1, 0, 1, 1, 0, 1), column(0, 0, 0, 0, 0, 0)
    assert lanes_of(nbytes, src, dst, 2, path).tolist() == [0, 0, 0, 0, 1, 1]
    assert lanes_of(nbytes, src, dst, 1, path).tolist() == [0] * 6
    # more lanes than rows: some stay empty
    assert lanes_of(nbytes, src, dst, 8, path).tolist() == [0, 3, 1, 3, 7, 6]


@pytest.fixture
def columns_to_two() -> CopyTable:
    """Rank 0 holds w, [8, 6]; ranks 1 and 2 want three columns each."""
    return plan_copies(rosters([replicated("w", (8, 6), [0])], [tp("w", (8, 3), [1, 2], dim=1)])).table


def test_transfers_have_the_addresses_of_their_tensors(columns_to_two: CopyTable) -> None:
    rows = node_transfers(crossing(columns_to_two), {0: 0, 1: 1, 2: 1}, 1)
    # bfloat16; the source is transposed: row stride 2 bytes, column stride 16 bytes
    held = by_rank({(0, "w"): LocalTensor(5, 4096, (8, 6), (2, 16))})
    wanted = by_rank({(rank, "w"): LocalTensor(10 + rank, 256, (8, 3), (6, 2)) for rank in (1, 2)})

    sent = transfers_of(rows, 0, 0, held, {})
    order = np.argsort(sent.offset)
    assert sent.is_send.tolist() == [1, 1] and sent.peer.tolist() == [1, 1]
    assert sent.arena.tolist() == [5, 5] and sent.arenas() == {5}
    assert sent.offset[order].tolist() == [4096, 4096 + 3 * 16]
    assert sent.stride.tolist() == [[2, 16]] * 2 and sent.size.tolist() == [[8, 3]] * 2

    received = transfers_of(rows, 1, 0, {}, wanted)
    assert received.is_send.tolist() == [0, 0] and received.peer.tolist() == [0, 0]
    assert sorted(received.arena.tolist()) == [11, 12] and received.arenas() == {11, 12}
    assert received.offset.tolist() == [256, 256] and received.stride.tolist() == [[6, 2]] * 2
    assert received.element_size.tolist() == [2, 2]
    assert received.task_id.tolist() == sent.task_id.tolist() == columns_to_two.task_id.tolist()


def test_rows_between_two_gpus_have_a_lane_in_which_gpus_are_peers(columns_to_two: CopyTable) -> None:
    # rank 0 is on the only GPU of node 0, rank 2 on the second of node 1; rank 1 is in main memory
    rows = node_transfers(crossing(columns_to_two), {0: 0, 1: 1, 2: 1}, 4, {0: 0, 2: 2})
    held = by_rank({(0, "w"): LocalTensor(5, 0, (8, 6), (12, 2))})
    wanted = by_rank({(rank, "w"): LocalTensor(10 + rank, 0, (8, 3), (6, 2)) for rank in (1, 2)})
    sent, received = transfers_of(rows, 0, 4, held, {}, (0, 1, 2)), transfers_of(rows, 2, 4, {}, wanted, (0, 1, 2))
    assert partners(rows, 0, 4) == partners(rows, 2, 4) == (0, 2) and partners(rows, 1, 4) == ()
    assert (
        transfers_of(rows, 2, 4, {}, wanted).peer.tolist() == [0] and transfers_of(rows, 0, 4, held, {}).peer.max() == 1
    )
    assert (sent.peer.tolist(), sent.is_send.tolist(), sent.arena.tolist()) == ([2], [1], [5])
    assert (received.peer.tolist(), received.is_send.tolist(), received.arena.tolist()) == ([0], [0], [12])
    assert len(transfers_of(rows, 1, 4, {}, wanted)) == 0, "no row has an end on the first GPU of node 1"
    in_lanes = [transfers_of(rows, 1, lane, {}, wanted) for lane in range(4)]
    assert [(t.peer.tolist(), t.arena.tolist()) for t in in_lanes if len(t)] == [([0], [11])]


def test_the_sender_converts_and_both_ends_count_what_travels() -> None:
    found = rosters(
        [{0: meta("w", (4, 5), 0, dtype="float32", element_size=4)}], [{1: meta("w", (4, 5), 1, cast_from="float32")}]
    )
    rows = node_transfers(crossing(plan_copies(found).table), {0: 0, 1: 1}, 1)
    sent = transfers_of(rows, 0, 0, by_rank({(0, "w"): LocalTensor(3, 0, (4, 5), (20, 4))}), {})
    received = transfers_of(rows, 1, 0, {}, by_rank({(1, "w"): LocalTensor(4, 0, (4, 5), (10, 2))}))

    assert sent.cast.tolist() == [1] and received.cast.tolist() == [0]
    assert sent.element_size.tolist() == received.element_size.tolist() == [2]
    assert sent.size.tolist() != [] and int(np.prod(sent.size) * 4) == 80  # read as float32
    assert sent.stride[0, -1] == 4 and received.stride[0, -1] == 2


def test_a_tensor_without_a_place_is_an_error(columns_to_two: CopyTable) -> None:
    rows = node_transfers(crossing(columns_to_two), {0: 0, 1: 1, 2: 1}, 1)
    with pytest.raises(KeyError):
        transfers_of(rows, 0, 0, {}, {})


def test_transfers_survive_their_bytes(columns_to_two: CopyTable) -> None:
    rows = node_transfers(crossing(columns_to_two), {0: 0, 1: 1, 2: 1}, 1)
    transfers = transfers_of(rows, 0, 0, by_rank({(0, "w"): LocalTensor(3, 0, (8, 6), (12, 2))}), {})
    again = TransferList.from_bytes(transfers.to_bytes())
    for name in ("is_send", "peer", "task_id", "part", "size", "stride", "arena", "offset", "origin", "cast"):
        assert np.array_equal(getattr(again, name), getattr(transfers, name)), name
    block = transfers.to_bytes()
    for bad in (b"", block[:-1], block + bytes(8), np.array([1 << 40, 2], "<i8").tobytes()):
        with pytest.raises(ValueError, match="TransferList"):
            TransferList.from_bytes(bad)


NODES = 3
sizes = st.lists(st.sampled_from((1, 2, 3, 10, 999, 8192, 20_000)), min_size=1, max_size=3)
tables = st.lists(
    st.tuples(sizes, st.sampled_from((1, 2, 4, 8)), st.integers(0, 5), st.integers(0, 5)).filter(
        lambda row: row[2] % NODES != row[3] % NODES
    ),
    max_size=20,
).map(lambda rows: table(*rows))


def places(rows: CopyTable) -> dict[str, dict[int, Places]]:
    """One huge tensor of one dimension a rank: no address is read."""
    everything = {rank: LocalTensor(rank, 0, (1 << 50,), (1,)) for rank in range(6)}
    return {name: by_rank({(rank, name): place for rank, place in everything.items()}) for name in rows.locals}


@given(tables, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_what_one_end_sends_the_other_expects(rows: CopyTable, lanes: int) -> None:
    node_of = {rank: rank % NODES for rank in range(6)}

    def mine(node: int, lane: int) -> Any:
        # a node knows only the rows that start or end on it
        at_node = (rows.src_rank % NODES == node) | (rows.dst_rank % NODES == node)
        found = places(rows)
        known = node_transfers(crossing(rows.select(at_node)), node_of, lanes)
        return transfers_of(known, node, lane, found["held"], found["wanted"], tuple(range(NODES)))

    def told(transfers: TransferList, is_send: bool, node: int) -> Counter[tuple[int, ...]]:
        nbytes = np.prod(transfers.size, axis=1) * transfers.element_size
        return Counter(
            (*((node, int(transfers.peer[i])) if is_send else (int(transfers.peer[i]), node)), *map(int, fields))
            for i, *fields in zip(
                range(len(transfers)), transfers.task_id, transfers.part, nbytes, transfers.element_size, strict=True
            )
            if bool(transfers.is_send[i]) == is_send
        )

    moved = 0
    for lane in range(lanes):
        all_transfers = [mine(node, lane) for node in range(NODES)]
        sent = sum((told(transfers, True, node) for node, transfers in enumerate(all_transfers)), Counter())
        expected = sum((told(transfers, False, node) for node, transfers in enumerate(all_transfers)), Counter())
        assert sent == expected
        assert max(sent.values(), default=1) == 1, "an id is used twice"
        moved += sum(key[4] for key in sent)
    assert moved == rows.total_bytes


@given(tables, st.integers(1, 1 << 20))
@settings(max_examples=150, deadline=None)
def test_pieces_cover_each_row_exactly_once(rows: CopyTable, limit: int) -> None:
    # keeps the number of pieces per row small
    limit = max(limit, int(rows.row_bytes.max(initial=0)) // 50)
    pieces, part, origin = cut(rows, limit)
    for row in range(len(rows)):
        mine = np.flatnonzero(origin == row)
        assert part[mine].tolist() == list(range(len(mine)))
        dim = int(np.argmax(rows.size[row] > 1))
        stride = int(rows.src_stride[row, dim])
        starts = (pieces.src_offset[mine] - rows.src_offset[row]) // stride
        ends = starts + pieces.size[mine, dim]
        assert starts.tolist() == [0, *ends[:-1].tolist()] and ends[-1] == rows.size[row, dim]
        assert np.array_equal(pieces.dst_offset[mine] - rows.dst_offset[row], starts * rows.dst_stride[row, dim])
        assert (np.delete(pieces.size[mine], dim, 1) == np.delete(rows.size[row], dim)).all()
        for name in ("task_id", "element_size", "src_rank", "dst_rank", "cast", "src_stride", "dst_stride"):
            assert (getattr(pieces, name)[mine] == getattr(rows, name)[row]).all()
        inner = int(rows.row_bytes[row]) // int(rows.size[row, dim])
        assert (pieces.row_bytes[mine] <= max(limit, inner)).all()


@given(tables, st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_lanes_are_within_one_row_of_equal_bytes_and_in_order(rows: CopyTable, lanes: int) -> None:
    src, dst = (ranks.astype(np.int64) % NODES for ranks in (rows.src_rank, rows.dst_rank))
    lane = lanes_of(rows.row_bytes, src, dst, lanes, np.zeros_like(src))
    assert ((lane >= 0) & (lane < lanes)).all()
    for pair in {(int(a), int(b)) for a, b in zip(src, dst, strict=True)}:
        chosen = np.flatnonzero((src == pair[0]) & (dst == pair[1]))
        nbytes = rows.row_bytes[chosen]
        assert (np.diff(lane[chosen]) >= 0).all()
        for number in range(lanes):
            share = int(nbytes[lane[chosen] == number].sum())
            assert share <= int(nbytes.sum()) / lanes + int(nbytes.max())
