"""Digest tensors and their tiles in canonical (row-major) order, whatever their memory layout."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import xxhash

from refitd.describe.layout import canonical_name, elements, same_places
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.tiles import Tile

if TYPE_CHECKING:
    import torch

# Up to this many bytes, a copy costs less than the views that avoid it.
SMALL = 1 << 14


def digest_of(tensor: torch.Tensor, tile: Tile | None = None) -> int:
    """Return the xxh3-64 digest of a tensor, or of one tile, in row-major order; 0 only for a tile without elements."""
    if tile is None and (nbytes := tensor.numel() * tensor.element_size()) <= SMALL and _is_plain(tensor):
        return xxhash.xxh3_64_intdigest(ctypes.string_at(tensor.data_ptr(), nbytes)) or 1
    import torch

    tensor = tensor.detach()
    if tensor.dtype is torch.bool:  # a strided copy of bools would normalise every byte to 0 or 1
        tensor = tensor.view(torch.uint8)
    if tile is not None:
        if not elements(tile.size):
            return 0
        flat = tensor.contiguous().reshape(-1)
        start = flat.storage_offset() + tile.local_offset
        size, stride = tuple(tile.size), tuple(tile.local_stride)
        if (repeat := tile.repeat) is not None:
            size, stride = (repeat.count, *size), (repeat.local_step, *stride)
        box = [pair for pair in zip(size, stride, strict=True) if pair[0] > 1] or [(1, 1)]
        tensor = flat.as_strided([n for n, _ in box], [step for _, step in box], start)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)  # copies only non-contiguous tensors
    return xxhash.xxh3_64_intdigest((raw if raw.device.type == "cpu" else raw.cpu()).numpy().data) or 1


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def tie_problems(metas: Sequence[ParameterMetadata], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return an error text for each pair of one rank's tensors that are declared tied but hold different values.

    Only tensors that hold the same elements of the weight are compared.
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
            # compare tile by tile, because elements outside the tiles may hold anything
            tiles: Sequence[tuple[Tile | None, Tile | None]] = [(None, None)]
            if meta.tiles is not None and other.tiles is not None:
                tiles = list(zip(meta.tiles, other.tiles, strict=False))
            if any(digest_of(one, a) != digest_of(two, b) for a, b in tiles):
                found.append(
                    f"{meta.name} and {other.name}: they are declared to be one weight (aliases) and hold different "
                    "values; make them equal, or leave the alias out"
                )
    return found
