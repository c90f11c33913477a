"""Compare an engine's tensors bit for bit with the values that a learned layout gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from refitd.describe.layout import row_major
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.tiles import Tile


def differing(
    metadata: Mapping[str, ParameterMetadata],
    params: Mapping[str, torch.Tensor],
    weights: Iterable[tuple[str, torch.Tensor]],
) -> tuple[dict[str, str], list[str]]:
    """Return the tensors that differ from the layout, each with the canonical tensor, and the canonical names lacking.

    Args:
        metadata: the layout, by the engine's names.
        params: the engine's tensors, with values, on any device.
        weights: canonical tensors, one after the other; those that no tensor is made of are passed over.

    Returns:
        ({the engine's name: the canonical name; "" for the constant}, canonical names that `weights` did not yield).
    """
    wanted: dict[str, list[tuple[str, Tile]]] = {}
    for name, meta in metadata.items():
        for tile in tiles_of(meta):
            wanted.setdefault(tile.tensor, []).append((name, tile))
    found: dict[str, str] = {}
    for name, weight in weights:
        for local, tile in wanted.pop(name, ()):
            if local not in found and not _holds(params[local], tile, weight):
                found[local] = name
    for local, meta in metadata.items():
        if meta.fill is not None and local not in found and not _is_filled(params[local], meta, meta.fill):
            found[local] = ""
    return found, [*wanted]


def tiles_of(meta: ParameterMetadata) -> tuple[Tile, ...]:
    """Return the tiles of a tensor; one, if it is a whole canonical tensor."""
    if meta.tiles is not None:
        return tuple(meta.tiles)
    shape = tuple(meta.shape)
    return (Tile(meta.resolved_name or meta.name, (0,) * len(shape), shape, 0, row_major(shape)),)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, row-major."""
    dense = tensor.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor's elements as integers, which are compared several times as fast as bytes."""
    size = tensor.element_size()
    return bytes_of(tensor).view({2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size, torch.uint8))


def _holds(tensor: torch.Tensor, tile: Tile, weight: torch.Tensor) -> bool:
    """Whether a tensor holds a tile of a canonical tensor, bit for bit after conversion to its dtype."""
    flat = tensor.detach().reshape(-1)
    r = tile.repeat
    for i in range(r.count if r else 1):
        offset, local = list(tile.offset), tile.local_offset
        if r:
            offset[r.dim] += i * r.step
            local += i * r.local_step
        box = weight[tuple(slice(o, o + n) for o, n in zip(offset, tile.size, strict=True))]
        mine = flat.as_strided(tile.size, tile.local_stride, flat.storage_offset() + local)
        converted = box.to(mine.device).to(mine.dtype)
        if not torch.equal(_words_of(mine), _words_of(converted)):
            return False
    return True


def _is_filled(tensor: torch.Tensor, meta: ParameterMetadata, fill: float) -> bool:
    """Whether a tensor holds its fill wherever no tile lies."""
    rest = torch.ones(tensor.numel(), dtype=torch.bool)
    for tile in meta.tiles or ():
        r = tile.repeat
        for i in range(r.count if r else 1):
            at = tile.local_offset + (i * r.local_step if r else 0)
            rest.as_strided(tile.size, tile.local_stride, at).fill_(False)
    left = tensor.detach().reshape(-1)[rest.to(tensor.device)]
    return torch.equal(bytes_of(left), bytes_of(torch.full_like(left, fill)))
