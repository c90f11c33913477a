"""The demo model's sizes and how each tensor is split: index arithmetic, independent of refitd.

The launcher checks the result of every swap with these functions, so they must stay independent of the planner:
they enumerate the indices a rank holds, one by one, instead of computing overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """Sizes of the decoder-only transformer; the defaults make 50 million parameters."""

    vocab: int = 256  # bytes
    hidden: int = 768
    layers: int = 8
    heads: int = 12
    kv_heads: int = 4
    head_dim: int = 64
    ffn: int = 2048

    @property
    def qkv_blocks(self) -> tuple[int, int, int]:
        """Rows of q, k and v in the fused projection of the whole model."""
        kv = self.kv_heads * self.head_dim
        return (self.heads * self.head_dim, kv, kv)


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The position of one process: rank = pp_stage * tp_size + tp_rank, as its replica (or trainer) counts."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_stage: int = 0
    pp_size: int = 1

    @classmethod
    def of_rank(cls, rank: int, tp_size: int, pp_size: int) -> RankPosition:
        """Return the place of `rank` among tp_size * pp_size processes."""
        return cls(rank % tp_size, tp_size, rank // tp_size, pp_size)

    @property
    def rank(self) -> int:
        """This process among its replica's."""
        return self.pp_stage * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """Processes of the replica."""
        return self.tp_size * self.pp_size

    @property
    def tp_ranks(self) -> list[int]:
        """The ranks this one shares its tensors with."""
        return [self.pp_stage * self.tp_size + rank for rank in range(self.tp_size)]

    @property
    def pp_ranks(self) -> list[int]:
        """The ranks this one shares its micro-batch with, in stage order."""
        return [stage * self.tp_size + self.tp_rank for stage in range(self.pp_size)]

    @property
    def leader(self) -> int:
        """The rank that samples tokens: the first of the last stage."""
        return (self.pp_size - 1) * self.tp_size

    @property
    def is_first_stage(self) -> bool:
        """Whether this process embeds tokens."""
        return self.pp_stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this process computes logits."""
        return self.pp_stage == self.pp_size - 1

    def layers(self, config: TransformerConfig) -> range:
        """Return the global indices of this stage's layers."""
        if config.layers % self.pp_size:
            raise ValueError(f"{config.layers} layers do not divide into {self.pp_size} stages")
        per_stage = config.layers // self.pp_size
        return range(self.pp_stage * per_stage, (self.pp_stage + 1) * per_stage)

    def __str__(self) -> str:
        return f"TP{self.tp_size}" + (f" PP{self.pp_size}" if self.pp_size > 1 else "")


@dataclass(frozen=True, slots=True)
class BlockSplit:
    """How a tensor is split over the TP group: each block of `blocks` rows along `dim` is split separately."""

    dim: int
    blocks: tuple[int, ...]


def canonical_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every parameter and persistent buffer of the whole model."""
    hidden = config.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "tokens_seen": (),
        "embedding.word_embeddings.weight": (config.vocab, hidden),
    }
    for layer in range(config.layers):
        prefix = f"decoder.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.self_attention.linear_qkv.weight"] = (sum(config.qkv_blocks), hidden)
        shapes[f"{prefix}.self_attention.linear_proj.weight"] = (hidden, config.qkv_blocks[0])
        shapes[f"{prefix}.pre_mlp_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.mlp.linear_fc1.weight"] = (2 * config.ffn, hidden)
        shapes[f"{prefix}.mlp.linear_fc2.weight"] = (hidden, config.ffn)
    shapes["decoder.final_layernorm.weight"] = (hidden,)
    shapes["output_layer.weight"] = (config.vocab, hidden)
    shapes["output_layer.byte_counts"] = (config.vocab,)
    return shapes


def cut_of(name: str, config: TransformerConfig) -> BlockSplit | None:
    """Return how the tensor is split over the TP group; None where every rank holds all of it."""
    match name.split(".")[-2:]:
        case ["linear_qkv", _]:
            return BlockSplit(0, config.qkv_blocks)
        case ["linear_fc1", _]:
            return BlockSplit(0, (config.ffn, config.ffn))
        case ["linear_proj", _]:
            return BlockSplit(1, (config.qkv_blocks[0],))
        case ["linear_fc2", _]:
            return BlockSplit(1, (config.ffn,))
        case ["word_embeddings" | "output_layer", _]:
            return BlockSplit(0, (config.vocab,))
        case _:
            return None


def indices(cut: BlockSplit, tp_rank: int, tp_size: int) -> list[int]:
    """Return the indices along cut.dim that a rank holds, in the order it holds them."""
    found: list[int] = []
    start = 0
    for block in cut.blocks:
        if block % tp_size:
            raise ValueError(f"a block of {block} does not divide over {tp_size} ranks")
        size = block // tp_size
        found.extend(range(start + tp_rank * size, start + (tp_rank + 1) * size))
        start += block
    return found


def canonical_name(local: str, layout: RankPosition, config: TransformerConfig) -> str:
    """Return the whole model's name of a stage's tensor: its layer 0 is global layer 4, for instance."""
    parts = local.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(layout.layers(config)[int(parts[2])])
    return ".".join(parts)


def shard(full: Array, cut: BlockSplit | None, layout: RankPosition) -> Array:
    """Return what one rank holds of a whole tensor."""
    if cut is None:
        return full
    return full.take(indices(cut, layout.tp_rank, layout.tp_size), axis=cut.dim)


def gather(
    shards: Sequence[Mapping[str, Array]], layouts: Sequence[RankPosition], config: TransformerConfig
) -> dict[str, Array]:
    """Assemble the whole model from every rank's tensors.

    Raises:
        ValueError: a replicated tensor differs between ranks, or an element is held by no rank or by two.
    """
    full: dict[str, Array] = {}
    held: dict[str, Array] = {}
    shapes = canonical_shapes(config)
    for tensors, layout in zip(shards, layouts, strict=True):
        for local, values in tensors.items():
            name = canonical_name(local, layout, config)
            cut = cut_of(name, config)
            if cut is None:
                if name in full and full[name].tobytes() != values.tobytes():
                    raise ValueError(f"{name} is replicated, but differs on rank {layout.rank}")
                full[name] = values
                continue
            where = (slice(None),) * cut.dim + (indices(cut, layout.tp_rank, layout.tp_size),)
            whole = full.setdefault(name, np.empty(shapes[name], values.dtype))
            count = held.setdefault(name, np.zeros(shapes[name][cut.dim], np.int64))
            whole[where] = values
            count[where[-1]] += 1
    bad = [name for name, count in held.items() if (count != 1).any()] + sorted(shapes.keys() - full.keys())
    if bad:
        raise ValueError(f"not held exactly once: {', '.join(bad)}")
    return full
