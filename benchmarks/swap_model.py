"""The model that the swap benchmark moves, and its layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import refitd


@dataclass(frozen=True)
class Tensor:
    """One canonical tensor: its whole shape and the dimension that tensor parallelism splits."""

    name: str
    shape: tuple[int, ...]
    dim: int | None
    layer: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def llama_like(layers: int, hidden: int, ffn: int) -> list[Tensor]:
    """Return `layers` transformer layers: fused qkv, projection, gated fc1, fc2 and a norm each."""
    found = []
    for layer in range(layers):
        at = f"layers.{layer}."
        found += [
            Tensor(at + "qkv.weight", (hidden * 3 // 2, hidden), 0, layer),
            Tensor(at + "proj.weight", (hidden, hidden), 1, layer),
            Tensor(at + "fc1.weight", (2 * ffn, hidden), 0, layer),
            Tensor(at + "fc2.weight", (hidden, ffn), 1, layer),
            Tensor(at + "norm.weight", (hidden,), None, layer),
        ]
    return found


def _here(tensors: Sequence[Tensor], kind: str, rank: int, world: int) -> list[Tensor]:
    if kind == "tp":
        return list(tensors)
    layers = 1 + max(t.layer for t in tensors)
    return [t for t in tensors if rank * layers // world <= t.layer < (rank + 1) * layers // world]


def shapes(tensors: Sequence[Tensor], kind: str, rank: int, world: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, local shape) of what a rank holds under "tp" or "pp"."""
    for tensor in _here(tensors, kind, rank, world):
        shape = list(tensor.shape)
        if kind == "tp" and tensor.dim is not None:
            shape[tensor.dim] //= world
        yield tensor.name, tuple(shape)


def describe(tensors: Sequence[Tensor], kind: str, rank: int, world: int) -> list[refitd.ParameterMetadata]:
    """Return the metadata of what a rank holds."""
    by_name = {t.name: t for t in tensors}
    return [
        refitd.ParameterMetadata(
            name=name,
            shape=shape,
            dtype="bfloat16",
            element_size=2,
            is_tp=kind == "tp" and by_name[name].dim is not None and world > 1,
            partition_dim=by_name[name].dim or 0,
            # the gate and up halves of fc1 are split each on its own
            partition_stride=2 if kind == "tp" and "fc1" in name else 1,
            owner_rank=rank,
            tensor_parallel_group_ranks=list(range(world)) if kind == "tp" else [rank],
            resolved_name=name,
        )
        for name, shape in shapes(tensors, kind, rank, world)
    ]


def pieces(
    tensors: Sequence[Tensor], layouts: dict[str, str], sources: int, targets: int | None
) -> list[tuple[int, int, int]]:
    """Return (source rank, target rank, elements) of every pair, for buffers of the right size."""
    kind = layouts["target"]
    world = targets if targets is not None else int(layouts["targets"])
    totals: dict[tuple[int, int], int] = {}
    for dst in range(world):
        for tensor in _here(tensors, kind, dst, world):
            elements = 1
            for n in tensor.shape:
                elements *= n
            if kind == "tp" and tensor.dim is not None:
                src = dst * sources // world
                totals[src, dst] = totals.get((src, dst), 0) + elements // world
            elif tensor.dim is None:
                totals[dst % sources, dst] = totals.get((dst % sources, dst), 0) + elements
            else:
                for src in range(sources):
                    totals[src, dst] = totals.get((src, dst), 0) + elements // sources
    return [(src, dst, n) for (src, dst), n in sorted(totals.items())]
