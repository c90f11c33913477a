"""Check swaps and plans with numpy, independently of the planner: slice whole tensors, gather, compare."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from refitd.describe.metadata import ParameterMetadata, Roster, Tile
from refitd.plan.table import CopyTable, FillTable

Array = np.ndarray
EMPTY = -1


def canonical_tensors(shapes: Mapping[str, Sequence[int]]) -> dict[str, Array]:
    """Return a tensor of each shape; all elements differ, within and between tensors."""
    found = {}
    for name, shape in shapes.items():
        first = zlib.crc32(name.encode()) * 2**24
        found[name] = first + np.arange(int(np.prod(shape)), dtype=np.int64).reshape(tuple(shape))
    return found


def local_tensor(meta: ParameterMetadata, rank: int, whole: Mapping[str, Array]) -> Array:
    """Return `rank`'s local tensor, sliced from the whole tensors; elements in no tile are EMPTY."""
    if meta.tiles is not None:
        local = np.full(meta.shape, EMPTY, np.int64)
        for tile in meta.tiles:
            for box, view in _occurrences(tile, local):
                view[...] = whole[tile.tensor][box]
        return local
    tensor = whole[meta.resolved_name or meta.name]
    group = meta.tensor_parallel_group_ranks
    if not meta.is_tp or group is None or len(group) == 1:
        return tensor.copy()
    dim, me = meta.partition_dim, group.index(rank)
    if meta.partition_sizes is not None:
        edges = np.cumsum(np.array(meta.partition_sizes) * len(group))[:-1]
        blocks = np.split(tensor, edges, axis=dim)
    else:
        blocks = np.split(tensor, meta.partition_stride, axis=dim)
    return np.concatenate([np.split(block, len(group), axis=dim)[me] for block in blocks], axis=dim)


Shards = Iterable[tuple[int, ParameterMetadata, Array]]


def gather(shapes: Mapping[str, Sequence[int]], shards: Shards) -> dict[str, Array]:
    """Return the whole tensors made up of shards, (rank, description, that rank's elements).

    Pass dtypes that numpy lacks as bits: `tensor.view(torch.int16).numpy()`.

    Raises:
        AssertionError: an element is in no shard, or differs between two of them.
    """
    whole: dict[str, Array] = {}
    known = {name: np.zeros(int(np.prod(shape)), bool) for name, shape in shapes.items()}
    for rank, name, meta, places, given in _pieces(shapes, shards):
        flat = whole.setdefault(name, np.zeros(len(known[name]), given.dtype))
        again = known[name][places]
        _same(flat[places][again], given[again], f"{name}: rank {rank} and another one, {meta.name}")
        flat[places] = given
        known[name][places] = True
    missing = {name: int((~held).sum()) for name, held in known.items() if not held.all()}
    assert not missing, f"elements that no rank holds: {missing}"
    return {name: flat.reshape(tuple(shapes[name])) for name, flat in whole.items()}


def compare(whole: Mapping[str, Array], shards: Shards) -> None:
    """Check, bit for bit, that every rank holds its slices of the whole tensors.

    Raises:
        AssertionError: a rank holds other values.
    """
    for rank, name, meta, places, given in _pieces({name: array.shape for name, array in whole.items()}, shards):
        _same(given, whole[name].reshape(-1)[places], f"{name}: rank {rank}, {meta.name}")


def _pieces(
    shapes: Mapping[str, Sequence[int]], shards: Shards
) -> Iterator[tuple[int, str, ParameterMetadata, Array, Array]]:
    """Yield (rank, tensor, description, places in the flat tensor, elements) for each part that a rank holds."""
    firsts, first = {}, 0
    for name, shape in shapes.items():
        firsts[name], first = first, first + int(np.prod(shape))
    numbers = {name: firsts[name] + np.arange(int(np.prod(shape))).reshape(shape) for name, shape in shapes.items()}
    for rank, meta, array in shards:
        at = local_tensor(meta, rank, numbers).reshape(-1)
        for name, number in numbers.items():
            if (inside := (at >= firsts[name]) & (at < firsts[name] + number.size)).any():
                yield rank, name, meta, at[inside] - firsts[name], array.reshape(-1)[inside]


def _same(one: Array, other: Array, what: str) -> None:
    bits = f"V{one.itemsize}"
    differing = int((one.view(bits) != other.view(bits)).sum())
    assert not differing, f"{differing} of {len(one)} elements differ: {what}"


def run(table: CopyTable, sources: Mapping[tuple[int, str], Array], wanted: Mapping[tuple[int, str], Array]) -> None:
    """Perform every row into arrays like `wanted`; check each element's value, and that it is written once."""
    written = {key: np.full(array.shape, EMPTY, np.int64) for key, array in wanted.items()}
    times = {key: np.zeros(array.shape, np.int64) for key, array in wanted.items()}
    for i in range(len(table)):
        source = sources[int(table.src_rank[i]), table.locals[table.src_local[i]]]
        key = (int(table.dst_rank[i]), table.locals[table.dst_local[i]])
        size = table.size[i]
        read = _strided(source, int(table.src_offset[i]), size, table.src_stride[i])
        _strided(written[key], int(table.dst_offset[i]), size, table.dst_stride[i])[...] = read
        _strided(times[key], int(table.dst_offset[i]), size, table.dst_stride[i])[...] += 1
    for key, array in wanted.items():
        np.testing.assert_array_equal(written[key], array, err_msg=f"{key}")
        np.testing.assert_array_equal(times[key], (array != EMPTY).astype(np.int64), err_msg=f"{key}: times written")


def check(
    table: CopyTable,
    rosters: Sequence[Roster],
    shapes: Mapping[str, Sequence[int]],
    fills: FillTable | None = None,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Check that a plan gives every destination exactly its slices of the whole tensors.

    With `fills`, also check that these write all other elements once, with the declared value. `tied` maps names that
    are not in `shapes` to the tensors that they alias.
    """
    whole = canonical_tensors(shapes)
    whole.update({name: whole[other] for name, other in (tied or {}).items()})
    sources = {(r.rank, m.name): local_tensor(m, r.rank, whole) for r in rosters for m in r.source}
    wanted = {(r.rank, m.name): local_tensor(m, r.rank, whole) for r in rosters for m in r.destination}
    run(table, sources, wanted)
    if fills is not None:
        declared = {(r.rank, m.name): m for r in rosters for m in r.destination}
        run_fills(fills, wanted, declared)


def run_fills(
    fills: FillTable, wanted: Mapping[tuple[int, str], Array], declared: Mapping[tuple[int, str], ParameterMetadata]
) -> None:
    """Perform every fill; check that the fills write each EMPTY element once, no others, and the declared bits."""
    times = {key: np.zeros(array.shape, np.int64) for key, array in wanted.items()}
    for i in range(len(fills)):
        key = (int(fills.rank[i]), fills.locals[fills.local[i]])
        _strided(times[key], int(fills.offset[i]), fills.size[i], fills.stride[i])[...] += 1
        fill, bits = declared[key].fill, 8 * declared[key].element_size
        assert fill is not None and fills.element_size[i] == declared[key].element_size
        wide = int(np.float32(fill).view(np.uint32))  # a bfloat16 is the upper half of a float32
        assert int(fills.pattern[i]) == wide >> (32 - bits), key
    for key, array in wanted.items():
        np.testing.assert_array_equal(times[key], (array == EMPTY).astype(np.int64), err_msg=f"{key}: times filled")


def _strided(array: Array, offset: int, size: Array, stride: Array) -> Array:
    flat = array.reshape(-1)
    last = offset + int(((size - 1) * stride).sum())
    assert 0 <= offset <= last < len(flat), f"{offset}..{last} of {len(flat)}"
    return as_strided(flat[offset:], tuple(size), tuple(stride * flat.itemsize))


def _occurrences(tile: Tile, local: Array) -> list[tuple[tuple[slice, ...], Array]]:
    found = []
    for i in range(tile.repeat.count if tile.repeat else 1):
        offset, place = list(tile.offset), tile.local_offset
        if tile.repeat:
            offset[tile.repeat.dim] += i * tile.repeat.step
            place += i * tile.repeat.local_step
        if 0 in tile.size:
            continue
        box = tuple(slice(o, o + n) for o, n in zip(offset, tile.size, strict=True))
        found.append((box, _strided(local, place, np.array(tile.size, int), np.array(tile.local_stride, int))))
    return found
