"""A decoder-only transformer as Megatron would hold it: one rank's shards, with the attributes that describe them."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from refitd_cli.demo.layout import RankPosition, TransformerConfig, canonical_name, canonical_shapes, cut_of, shard
from refitd_cli.demo.parallel import Comm, enter, gather, leave

WEIGHT_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Groups:
    """The process groups of a rank, as plain lists of ranks."""

    tp: list[int]
    pp: list[int]
    dp: list[int]
    ep: list[int]
    expt_tp: list[int]


@dataclass
class KVCache:
    """Keys and values of one sequence, for this rank's heads and layers."""

    keys: torch.Tensor  # [layer, 1, head, position, head_dim]
    values: torch.Tensor
    length: int = field(default=0)


def _mark(
    tensor: torch.Tensor, dim: int, *, stride: int = 1, sizes: list[int] | None = None, split: bool = True
) -> None:
    """Set Megatron's attributes that say how the tensor is split."""
    tensor.tensor_model_parallel = split  # type: ignore[attr-defined]
    tensor.partition_dim = dim  # type: ignore[attr-defined]
    tensor.partition_stride = stride  # type: ignore[attr-defined]
    if sizes is not None:
        tensor.partition_sizes = sizes  # type: ignore[attr-defined]


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=WEIGHT_DTYPE))


class Linear(nn.Module):
    """A weight [out, in], applied in the activations' dtype."""

    def __init__(self, rows: int, columns: int, *, dim: int, stride: int = 1, sizes: list[int] | None = None) -> None:
        super().__init__()
        self.weight = _weight(rows, columns)
        _mark(self.weight, dim, stride=stride, sizes=sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm; replicated on every rank."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = _weight(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x over its root mean square, times the weight."""
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True, dtype=torch.float32) + 1e-6)
        return x * inverse.to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over this rank's heads."""

    def __init__(self, config: TransformerConfig, comm: Comm) -> None:
        super().__init__()
        self.comm, self.head_dim = comm, config.head_dim
        self.heads, self.kv_heads = config.heads // comm.size, config.kv_heads // comm.size
        # q, k and v are blocks of unequal size, and each is split over the group on its own:
        # TP2 rank 0 holds [q0 k0 v0], not the first half of [q k v].
        self.sizes = [block // comm.size for block in config.qkv_blocks]
        self.linear_qkv = Linear(sum(self.sizes), config.hidden, dim=0, sizes=self.sizes)
        self.linear_proj = Linear(config.hidden, self.sizes[0], dim=1)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, cache: KVCache | None, layer: int) -> torch.Tensor:
        """Return [batch, sequence, hidden]; with a cache, x continues the cached sequence."""
        batch, length, _ = x.shape
        parts = self.linear_qkv(enter(x, self.comm)).split(self.sizes, dim=-1)
        q, k, v = (p.view(batch, length, -1, self.head_dim).transpose(1, 2) for p in parts)
        q, k = _rotate(q, rope), _rotate(k, rope)
        start = 0
        if cache is not None:
            start = cache.length
            cache.keys[layer, :, :, start : start + length] = k
            cache.values[layer, :, :, start : start + length] = v
            k, v = (held[layer, :, :, : start + length] for held in (cache.keys, cache.values))
        out = _attend(q, k, v, start)
        return leave(self.linear_proj(out.transpose(1, 2).reshape(batch, length, -1)), self.comm)


class MLP(nn.Module):
    """Gated feed-forward; fc1 holds [gate; up], each split over the group (partition_stride 2)."""

    def __init__(self, config: TransformerConfig, comm: Comm) -> None:
        super().__init__()
        self.comm = comm
        width = config.ffn // comm.size
        self.linear_fc1 = Linear(2 * width, config.hidden, dim=0, stride=2)
        self.linear_fc2 = Linear(config.hidden, width, dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return fc2(silu(gate) * up)."""
        gate, up = self.linear_fc1(enter(x, self.comm)).chunk(2, dim=-1)
        return leave(self.linear_fc2(F.silu(gate) * up), self.comm)


class Layer(nn.Module):
    """One transformer block; `layer_number` counts from 1 over the whole model."""

    def __init__(self, config: TransformerConfig, comm: Comm, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.input_layernorm = RMSNorm(config.hidden)
        self.self_attention = Attention(config, comm)
        self.pre_mlp_layernorm = RMSNorm(config.hidden)
        self.mlp = MLP(config, comm)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, cache: KVCache | None, layer: int) -> torch.Tensor:
        """Return the next residual stream."""
        x = x + self.self_attention(self.input_layernorm(x), rope, cache, layer)
        x = x + self.mlp(self.pre_mlp_layernorm(x))
        return x


class WordEmbeddings(nn.Module):
    """Rows of the vocabulary this rank holds."""

    def __init__(self, config: TransformerConfig, comm: Comm) -> None:
        super().__init__()
        self.comm = comm
        self.weight = _weight(config.vocab // comm.size, config.hidden)
        _mark(self.weight, 0)

    def forward(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return [batch, sequence, hidden]; tokens of other ranks' rows come in with the sum."""
        rows = self.weight.shape[0]
        local = tokens - self.comm.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        x = F.embedding(local.clamp(0, rows - 1), self.weight).to(dtype)
        return leave(x.masked_fill(elsewhere.unsqueeze(-1), 0), self.comm)


class Embedding(nn.Module):
    """The first stage's part."""

    def __init__(self, config: TransformerConfig, comm: Comm) -> None:
        super().__init__()
        self.word_embeddings = WordEmbeddings(config, comm)


class OutputLayer(nn.Module):
    """Vocabulary-parallel logits over a prior counted from the data: a persistent buffer that is split as well."""

    byte_counts: torch.Tensor

    def __init__(self, config: TransformerConfig, comm: Comm) -> None:
        super().__init__()
        self.comm = comm
        rows = config.vocab // comm.size
        self.weight = _weight(rows, config.hidden)
        _mark(self.weight, 0)
        self.register_buffer("byte_counts", torch.zeros(rows, dtype=torch.int64))
        _mark(self.byte_counts, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [batch, sequence, vocab]."""
        logits = F.linear(enter(x, self.comm), self.weight.to(x.dtype)).float()
        return gather(logits + self.byte_counts.float().log1p(), self.comm)

    def count(self, tokens: torch.Tensor) -> None:
        """Add the tokens to the prior."""
        rows = self.byte_counts.shape[0]
        every = torch.bincount(tokens.flatten(), minlength=rows * self.comm.size)
        self.byte_counts += every.narrow(0, self.comm.rank * rows, rows)


class DecoderStage(nn.Module):
    """This stage's layers, numbered from 0 here whatever their place in the model."""

    def __init__(self, config: TransformerConfig, layout: RankPosition, comm: Comm) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, comm, index + 1) for index in layout.layers(config))
        if layout.is_last_stage:
            self.final_layernorm = RMSNorm(config.hidden)


class DemoModel(nn.Module):
    """One rank's part of the model. Uninitialised: call `initialise` or let a swap fill it."""

    tokens_seen: torch.Tensor

    def __init__(self, config: TransformerConfig, layout: RankPosition, comm: Comm) -> None:
        super().__init__()
        self.config, self.layout = config, layout
        self.pg_collection = Groups(layout.tp_ranks, layout.pp_ranks, [layout.rank], [layout.rank], layout.tp_ranks)
        if layout.is_first_stage:
            self.embedding = Embedding(config, comm)
        self.decoder = DecoderStage(config, layout, comm)
        if layout.is_last_stage:
            self.output_layer = OutputLayer(config, comm)
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, *, dtype: torch.dtype, cache: KVCache | None = None) -> torch.Tensor:
        """Run this stage: tokens into the first, hidden states into the others; logits out of the last.

        Args:
            x: [batch, sequence] tokens, or [batch, sequence, hidden] from the stage before.
            dtype: the activations' dtype; weights are converted to it.
            cache: the sequence so far, which x continues; its length is advanced.
        """
        if self.layout.is_first_stage:
            x = self.embedding.word_embeddings(x, dtype)
        start = 0 if cache is None else cache.length
        rope = _rope(start, x.shape[1], self.config.head_dim, x.dtype)
        for index, layer in enumerate(self.decoder.layers):
            x = layer(x, rope, cache, index)
        if cache is not None:
            cache.length += x.shape[1]
        if self.layout.is_last_stage:
            x = self.output_layer(self.decoder.final_layernorm(x))
        return x

    def new_cache(self, positions: int, dtype: torch.dtype) -> KVCache:
        """Return an empty cache for one sequence."""
        heads = self.config.kv_heads // self.layout.tp_size
        shape = (len(self.decoder.layers), 1, heads, positions, self.config.head_dim)
        return KVCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer by name."""
    return dict(module.state_dict(keep_vars=True))


@torch.no_grad()
def initialise(model: DemoModel, seed: int) -> None:
    """Fill in this rank's part of a random model that is the same for every layout."""
    config = model.config
    shapes = canonical_shapes(config)
    for local, tensor in tensors_of(model).items():
        name = canonical_name(local, model.layout, config)
        if not tensor.is_floating_point():
            tensor.zero_()
        elif "layernorm" in name:
            tensor.fill_(1.0)
        else:
            rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
            full = rng.standard_normal(shapes[name], dtype=np.float32)
            held = torch.from_numpy(shard(full, cut_of(name, config), model.layout))
            tensor.copy_(held.mul_(_initial_std(name, config)))


def _initial_std(name: str, config: TransformerConfig) -> float:
    """Return the spread of a weight's first values; near-zero logits let the byte counts speak at first."""
    match name.split(".")[-2]:
        case "word_embeddings":
            return 1.0
        case "output_layer":
            return 0.002
        case "linear_proj" | "linear_fc2":  # two of them per layer add to the residual stream
            return 0.02 / math.sqrt(2 * config.layers)
        case _:
            return 0.02


def compute_dtype() -> torch.dtype:
    """Return bf16 where this processor multiplies it, else fp32 (bf16 would be emulated, slowly)."""
    native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """Return causal attention; q holds positions from `start` on, and several q heads share a kv head.

    Written out, since torch's fused kernel takes more than twice as long for sequences this short on a CPU.
    """
    length, kv_heads = q.shape[2], k.shape[1]
    # [batch, kv head, its q heads * positions, head_dim]
    grouped = q.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    scores = (grouped @ k.transpose(-1, -2)).float() * k.shape[-1] ** -0.5
    scores = scores.unflatten(2, (-1, length))
    if length > 1:
        future = torch.ones(length, k.shape[2], dtype=torch.bool).triu(start + 1)
        scores = scores.masked_fill(future, float("-inf"))
    weights = scores.softmax(-1).to(v.dtype).flatten(2, 3)
    return torch.matmul(weights, v).reshape(q.shape)


def _rope(start: int, length: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [2, length, head_dim / 2]: cosines and sines of the positions."""
    rates = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(start, start + length, dtype=torch.float32)[:, None] * rates
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def _rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    cos, sin = rope.unbind(0)
    even, odd = x.chunk(2, dim=-1)
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
