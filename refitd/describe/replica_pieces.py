"""Twins: pieces that several source ranks describe as the same elements, so that they must hold the same bytes.

A piece is a local tensor, or each tile of one that is described by tiles. Pieces are enumerated in the order of the
descriptions alone, so that whoever reads a description knows which piece a digest belongs to. Digests are taken in
canonical order, however the piece lies in memory; 0 stands for "not taken".
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from refitd.describe.layout import canonical_name, elements, is_sharded, layout_problems, same_places, tiles_of
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.tiles import Tile
from refitd.dtypes import dtype_name

if TYPE_CHECKING:
    import torch

# A tensor in more tiles than that (a flat slice) is not compared: its tiles are tiny, and each costs a digest.
MAX_TILES = 64

# Up to so many bytes a copy costs less than the views that avoid it.
SMALL = 1 << 14

# number of a piece, its description, and (canonical tensor, number of its place)
Piece = tuple[int, ParameterMetadata, tuple[str, int] | None]


class Tiled(Protocol):
    """A description, as it is or as it travels."""

    @property
    def tiles(self) -> Sized | None:
        """Its tiles."""


def piece_count(meta: Tiled) -> int:
    """Return how many pieces a description has."""
    if meta.tiles is None:
        return 1
    return len(meta.tiles) if len(meta.tiles) <= MAX_TILES else 0


class PlaceNumbers:
    """Numbers the places of pieces: equal ones, of equal dtype, have one number, whatever tensor they are in.

    Descriptions of one geometry are read once: models have few of them, and thousands of tensors.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._read: dict[tuple[object, ...], int | None] = {}

    def of(self, meta: ParameterMetadata) -> list[tuple[str, int] | None]:
        """Return (canonical tensor, number of its place) of each piece; None where it cannot be compared."""
        if meta.tiles is not None:
            if piece_count(meta) == 0:
                return []
            if layout_problems(meta):
                return [None] * len(meta.tiles)
            dtype = dtype_name(meta.dtype)
            return [(t.tensor, self._number(dtype, (t,))) if elements(t.size) else None for t in meta.tiles]
        group, sizes = meta.tensor_parallel_group_ranks, meta.partition_sizes
        spot: tuple[int, int] | None = None
        if meta.is_tp and group is not None and len(group) > 1:
            spot = group.index(meta.owner_rank) if meta.owner_rank in group else -1, len(group)
        cut = (meta.partition_dim, meta.partition_stride, sizes and tuple(sizes), *spot) if spot is not None else ()
        key = (tuple(meta.shape), meta.dtype, meta.global_shape, *cut)
        try:
            number = self._read[key]
        except KeyError:
            tiles = () if layout_problems(meta) else tiles_of(meta)
            number = self._read[key] = self._number(dtype_name(meta.dtype), tiles) if tiles else None
        return [None if number is None else (canonical_name(meta), number)]

    def _number(self, dtype: str, tiles: Sequence[Tile]) -> int:
        return self._numbers.setdefault((dtype, *(place_of(tile) for tile in tiles)), len(self._numbers))


def take_digests(
    metas: Sequence[ParameterMetadata], tensors: Mapping[str, torch.Tensor], world_size: int
) -> npt.NDArray[np.uint64]:
    """Return the digests of all pieces, [pieces] uint64; 0 for those that no other of `world_size` ranks can hold.

    Args:
        metas: descriptions, of which some may have no tensor.
        tensors: local tensors by local name.
        world_size: ranks that hold the model between them.
    """
    found: list[int] = []
    for meta in metas:
        tensor = tensors.get(meta.name)
        if tensor is None or not tensor.numel() or not _can_have_twins(meta, world_size):
            found += [0] * piece_count(meta)
        elif meta.tiles is None:
            found.append(digest_of(tensor))
        elif len(meta.tiles) <= MAX_TILES:
            found += [digest_of(tensor, tile) for tile in meta.tiles]
    return np.array(found, np.uint64)


def digest_of(tensor: torch.Tensor, tile: Tile | None = None) -> int:
    """Return a digest of a tensor, or of a tile of it, in row-major order; never 0, but for a tile without elements."""
    if tile is None and (nbytes := tensor.numel() * tensor.element_size()) <= SMALL and _is_plain(tensor):
        return xxhash.xxh3_64_intdigest(ctypes.string_at(tensor.data_ptr(), nbytes)) or 1
    import torch

    tensor = tensor.detach()
    if tensor.dtype is torch.bool:  # a strided copy of bools would make every byte 0 or 1
        tensor = tensor.view(torch.uint8)
    if tile is not None:
        if not elements(tile.size):
            return 0
        flat = tensor.contiguous().reshape(-1)
        start = flat.storage_offset() + tile.local_offset
        size, stride = tuple(tile.size), tuple(tile.local_stride)
        if (repeat := tile.repeat) is not None:
            size, stride = (repeat.count, *size), (repeat.local_step, *stride)
        tensor = flat.as_strided(size, stride, start)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)  # a copy only where it is not contiguous
    return xxhash.xxh3_64_intdigest((raw if raw.device.type == "cpu" else raw.cpu()).numpy().data) or 1


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def place_of(tile: Tile) -> Hashable:
    """Return which elements of its canonical tensor a tile is: equal for tiles whose digests are compared."""
    repeat = tile.repeat
    again = None if repeat is None or repeat.count == 1 else (repeat.dim, repeat.count, repeat.step)
    return tuple(tile.offset), tuple(tile.size), again


def _can_have_twins(meta: ParameterMetadata, world_size: int) -> bool:
    """Whether another of `world_size` ranks may hold the same piece.

    How large the others' are is not known here: tiles of uneven shards say nothing of it.
    """
    if world_size < 2:
        return False
    if is_sharded(meta):
        return len(meta.tensor_parallel_group_ranks or ()) < world_size
    return meta.tiles is None or not layout_problems(meta)  # the planner says what is wrong with it


def tie_problems(metas: Sequence[ParameterMetadata], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return which tensors of one rank its descriptions tie although they hold different values.

    Those that hold the same elements of the weight are compared; one memory is equal to itself.
    """
    by_name = {canonical_name(meta): meta for meta in metas}
    found = []
    for meta in metas:
        for alias in meta.aliases:
            other = by_name.get(alias)
            if other is None or other is meta or (meta.name > other.name and canonical_name(meta) in other.aliases):
                continue
            one, two = tensors.get(meta.name), tensors.get(other.name)
            if one is None or two is None or one.dtype != two.dtype or not same_places(meta, other):
                continue
            is_one = one.data_ptr() == two.data_ptr() and one.shape == two.shape and one.stride() == two.stride()
            if is_one or not one.numel():
                continue
            # where the tiles leave elements out, these may hold anything
            tiles: Sequence[tuple[Tile | None, Tile | None]] = [(None, None)]
            if meta.tiles is not None and other.tiles is not None:
                tiles = list(zip(meta.tiles, other.tiles, strict=False))[:MAX_TILES]
            if any(digest_of(one, a) != digest_of(two, b) for a, b in tiles):
                found.append(
                    f"{meta.name} and {other.name}: they are declared to be one weight (aliases) and hold different "
                    "values; make them equal, or leave the alias out"
                )
    return found


def enumerated(metas: Sequence[ParameterMetadata], places: PlaceNumbers) -> Iterator[Piece]:
    """Yield (number of the piece, its description, what it is) of every piece."""
    number = 0
    for meta in metas:
        for key in places.of(meta):
            yield number, meta, key
            number += 1
