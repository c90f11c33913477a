"""One weight that source ranks hold in several cuts at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import refitd
from tests.support.shards import meta


def in_cuts(
    whole: torch.Tensor, cuts: tuple[int | None, ...]
) -> list[tuple[dict[str, torch.Tensor], list[refitd.ParameterMetadata]]]:
    """The weight once for each cut: None is whole on one rank, a dimension is split over two ranks."""
    found: list[tuple[dict[str, torch.Tensor], list[refitd.ParameterMetadata]]] = []
    for dim in cuts:
        first = len(found)
        parts = [whole] if dim is None else whole.chunk(2, dim)
        for part in parts:
            group = None if dim is None else [first, first + 1]
            split = {"is_tp": dim is not None, "partition_dim": dim or 0, "tensor_parallel_group_ranks": group}
            found.append(({"w": part.clone()}, [meta("w", part, len(found), **split)]))
    return found


def offered_in_cuts(
    trainer: refitd.Client, model: str, held: list, mode: str, ranks: Sequence[int] = ()
) -> list[tuple[refitd.Source, torch.Tensor]]:
    found = []
    for rank in ranks or range(len(held)):
        tensors, described = held[rank]
        if mode in ("arena", "strided"):
            rows, columns = tensors["w"].shape
            shape = (columns, rows) if mode == "strided" else (rows, columns)
            lent = trainer.allocate({"w": (shape, tensors["w"].dtype)})["w"]
            lent = lent.t() if mode == "strided" else lent
            tensors = {"w": lent.copy_(tensors["w"])}
        source = trainer.register_source(
            model,
            {"w": tensors["w"]},
            rank=rank,
            world_size=len(held),
            metadata=described,
        )
        found.append((source, tensors["w"]))
    return found
