"""Compare an engine's tensors bit for bit with the values that a learned layout gives them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Protocol

import torch

from refitd.describe.layout import row_major
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.tiles import Tile

# Elements of a canonical tensor that are converted and compared in one step. On few cores they stay in a core's cache,
# and torch does not share them between threads, which would wait for each other at each step.
FEW_CORES, STEP, LONG_STEP = 4, 1 << 15, 1 << 22


class Boxed(Protocol):
    """A canonical tensor that makes each box on demand.

    Attributes:
        shape: of the canonical tensor.
    """

    @property
    def shape(self) -> Sequence[int]:
        """Its shape."""

    def box(self, offset: Sequence[int], size: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return a box that spans at most `step_on(device)` elements of the row-major tensor; it is only read."""


def differing(
    metadata: Mapping[str, ParameterMetadata],
    params: Mapping[str, torch.Tensor],
    weights: Iterable[tuple[str, torch.Tensor | Boxed]],
) -> tuple[dict[str, str], list[str]]:
    """Return the tensors that differ from the layout, each with the canonical tensor, and the canonical names lacking.

    Args:
        metadata: the layout, by the engine's names.
        params: the engine's tensors, with values, on any device.
        weights: canonical tensors, one after the other; unused ones are skipped.

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


def step_on(device: torch.device) -> int:
    """Return the elements that are compared in one step."""
    return STEP if device.type == "cpu" and torch.get_num_threads() <= FEW_CORES else LONG_STEP


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


def are_equal(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two runs of bytes are equal; long integers are compared several times as fast as bytes."""
    for word in (torch.int64, torch.int32, torch.int16):
        size = word.itemsize
        if not (mine.numel() % size or mine.storage_offset() % size or other.storage_offset() % size):
            return torch.equal(mine.view(word), other.view(word))
    return torch.equal(mine, other)


def _boxes(size: Sequence[int], shape: Sequence[int], step: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, size) of the parts of a box, each of which spans at most `step` elements of a canonical tensor."""
    strides = row_major(tuple(shape))
    if 1 + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True)) <= step:
        yield (0,) * len(size), tuple(size)
        return
    dim = next(d for d, n in enumerate(size) if n > 1)
    most = max(1, step // strides[dim])
    for at in range(0, size[dim], most):
        part = (*size[:dim], min(most, size[dim] - at), *size[dim + 1 :])
        for offset, inside in _boxes(part, shape, step):
            yield (*offset[:dim], offset[dim] + at, *offset[dim + 1 :]), inside


def _holds(tensor: torch.Tensor, tile: Tile, weight: torch.Tensor | Boxed) -> bool:
    """Whether a tensor holds a tile of a canonical tensor, bit for bit after conversion to its dtype."""
    if not prod(tile.size):
        return True
    flat = tensor.detach().reshape(-1)
    r = tile.repeat
    for i in range(r.count if r else 1):
        offset, local = list(tile.offset), flat.storage_offset() + tile.local_offset
        if r:
            offset[r.dim] += i * r.step
            local += i * r.local_step
        for start, size in _boxes(tile.size, weight.shape, step_on(flat.device)):
            at = tuple(o + a for o, a in zip(offset, start, strict=True))
            if isinstance(weight, torch.Tensor):
                box = weight[tuple(slice(o, o + n) for o, n in zip(at, size, strict=True))]
            else:
                box = weight.box(at, size, flat.device)
            first = local + sum(a * stride for a, stride in zip(start, tile.local_stride, strict=True))
            mine = flat.as_strided(size, tile.local_stride, first)
            if not are_equal(bytes_of(mine), bytes_of(box.to(flat.device, flat.dtype, copy=True))):
                return False
    return True


def _is_filled(tensor: torch.Tensor, meta: ParameterMetadata, fill: float) -> bool:
    """Whether a tensor holds its fill outside all tiles."""
    rest = torch.ones(tensor.numel(), dtype=torch.bool)
    for tile in meta.tiles or ():
        r = tile.repeat
        for i in range(r.count if r else 1):
            at = tile.local_offset + (i * r.local_step if r else 0)
            rest.as_strided(tile.size, tile.local_stride, at).fill_(False)
    left = tensor.detach().reshape(-1)[rest.to(tensor.device)]
    return torch.equal(bytes_of(left), bytes_of(torch.full_like(left, fill)))
