"""The models of the swap benchmark, and their layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod

import refitd
from refitd.describe.metadata import Roster
from refitd.plan.build import plan_copies

ELEMENT_BYTES = 2  # everything is bf16


@dataclass(frozen=True)
class Tensor:
    """One canonical tensor: its full shape and the dimension that tensor parallelism splits."""

    name: str
    shape: tuple[int, ...]
    dim: int | None
    layer: int
    is_gated: bool = False  # two halves, gate and up, which tensor parallelism splits separately

    def as_json(self) -> dict[str, object]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, object]) -> Tensor:
        """Return a tensor from the values of `as_json` after a round trip through JSON."""
        shape = values["shape"]
        assert isinstance(shape, list)
        return cls(**{**values, "shape": tuple(shape)})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Layout:
    """How a model is cut over `world` ranks.

    `kind` is "tp" (tensors), "pp" (layers) or "fsdp": every tensor along dimension 0, as torch.chunk cuts it. If the
    ranks do not divide the dimension, the shards differ in size.
    """

    kind: str
    world: int


@dataclass(frozen=True)
class Shard:
    """One rank's shard of a tensor: the spans (start, stop) along `dim`, in order."""

    tensor: Tensor
    dim: int
    spans: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape."""
        shape = list(self.tensor.shape)
        shape[self.dim] = sum(stop - start for start, stop in self.spans)
        return tuple(shape)


def llama_like(layers: int, hidden: int, ffn: int) -> list[Tensor]:
    """Return `layers` transformer layers: fused qkv, projection, gated fc1, fc2 and a norm each."""
    found = []
    for layer in range(layers):
        at = f"layers.{layer}."
        found += [
            Tensor(at + "qkv.weight", (hidden * 3 // 2, hidden), 0, layer),
            Tensor(at + "proj.weight", (hidden, hidden), 1, layer),
            Tensor(at + "fc1.weight", (2 * ffn, hidden), 0, layer, is_gated=True),
            Tensor(at + "fc2.weight", (hidden, ffn), 1, layer),
            Tensor(at + "norm.weight", (hidden,), None, layer),
        ]
    return found


def experts(count: int, rows: int, columns: int, stacked: int = 1) -> list[Tensor]:
    """Return fc1 and fc2 of `count` experts; each tensor stacks `stacked` experts."""
    shape = (rows * stacked, columns)
    return [
        Tensor(f"experts.{expert}.fc{1 + dim}.weight", shape, dim, expert)
        for expert in range(count // stacked)
        for dim in (0, 1)
    ]


def held(tensors: Sequence[Tensor], layout: Layout, rank: int) -> list[Shard]:
    """Return the shards of a rank, in the order of the model."""
    layers = 1 + max(tensor.layer for tensor in tensors)
    stage = range(rank * layers // layout.world, (rank + 1) * layers // layout.world)
    found = []
    for tensor in tensors:
        if layout.kind == "tp" and tensor.dim is not None:
            found.append(Shard(tensor, tensor.dim, tuple(_tensor_parallel(tensor, tensor.dim, layout.world, rank))))
        elif layout.kind == "fsdp":
            step = -(-tensor.shape[0] // layout.world)
            edges = [min(edge * step, tensor.shape[0]) for edge in (rank, rank + 1)]
            found.append(Shard(tensor, 0, ((edges[0], edges[1]),)))
        elif layout.kind == "tp" or tensor.layer in stage:
            found.append(Shard(tensor, 0, ((0, tensor.shape[0]),)))
    return found


def _tensor_parallel(tensor: Tensor, dim: int, world: int, rank: int) -> Iterator[tuple[int, int]]:
    blocks = 2 if tensor.is_gated else 1
    block = tensor.shape[dim] // blocks
    share = block // world
    for first in range(0, tensor.shape[dim], block):
        yield first + rank * share, first + (rank + 1) * share


def describe(tensors: Sequence[Tensor], layout: Layout, rank: int, first: int = 0) -> list[refitd.ParameterMetadata]:
    """Return the metadata of a rank's shards; `first` is the number of the layout's rank 0."""
    ranks = list(range(first, first + layout.world))
    return [_metadata(shard, layout, ranks, first + rank) for shard in held(tensors, layout, rank)]


def _metadata(shard: Shard, layout: Layout, ranks: list[int], owner: int) -> refitd.ParameterMetadata:
    tensor, shape = shard.tensor, shard.shape
    found = refitd.ParameterMetadata(
        name=tensor.name,
        shape=shape,
        dtype="bfloat16",
        element_size=ELEMENT_BYTES,
        owner_rank=owner,
        resolved_name=tensor.name,
    )
    if layout.kind == "tp" and tensor.dim is not None and layout.world > 1:
        found.is_tp, found.partition_dim = True, tensor.dim
        found.partition_stride = 2 if tensor.is_gated else 1
        found.tensor_parallel_group_ranks = ranks
    elif layout.kind == "fsdp":
        found.global_shape = tensor.shape
        start = shard.spans[0][0]
        offset = (start, *(0 for _ in shape[1:]))
        stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        found.tiles = (refitd.Tile(tensor.name, offset, shape, 0, stride),) if shape[0] else ()
    return found


def traffic(tensors: Sequence[Tensor], source: Layout, target: Layout) -> dict[tuple[int, int], int]:
    """Return the elements that each source rank sends each target rank, as refitd plans them."""
    rosters = [Roster(rank, describe(tensors, source, rank)) for rank in range(source.world)]
    rosters += [
        Roster(source.world + rank, (), describe(tensors, target, rank, source.world)) for rank in range(target.world)
    ]
    table = plan_copies(rosters).table
    totals: dict[tuple[int, int], int] = {}
    rows = zip(table.src_rank.tolist(), table.dst_rank.tolist(), table.row_bytes.tolist(), strict=True)
    for src, dst, nbytes in rows:
        pair = (src, dst - source.world)
        totals[pair] = totals.get(pair, 0) + nbytes // ELEMENT_BYTES
    return dict(sorted(totals.items()))
