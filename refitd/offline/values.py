"""The tables of manifests as frozen values, with bounds on their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from refitd.describe.layout import MAX_CANONICAL_DIMS, MAX_ELEMENTS

MAX_FILE_BYTES = 64 << 20
MAX_RANKS = 2**17
MAX_DESCRIPTIONS = 2**22  # the most different tensor descriptions that one layout may need
MAX_SHOWN = 20

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_ELEMENTS)]
Extent = Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]
Shape = Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_CANONICAL_DIMS)]
LocalShape = Annotated[tuple[Extent, ...], msgspec.Meta(max_length=MAX_CANONICAL_DIMS)]
Numbers = Annotated[tuple[Extent, ...], msgspec.Meta(max_length=MAX_CANONICAL_DIMS)]
Degree = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=2**20)]
Dim = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CANONICAL_DIMS)]
Layers = Annotated[int, msgspec.Meta(ge=0, le=4096)]
Experts = Annotated[int, msgspec.Meta(ge=0, le=65536)]
Times = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Stage = Literal["first", "last", "every"]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A table of a manifest; unknown keys are refused."""


class Split(Table, frozen=True):
    """How a tensor is split along one dimension; by default into equal parts over the tensor-parallel group."""

    dim: Dim
    group: Literal["", "tp", "etp"] = ""  # "" means etp for the tensors of experts, tp for others
    stride: Times = 1  # the number of parts, each split separately (gated fc1: 2)
    sizes: Annotated[tuple[Size, ...], msgspec.Meta(max_length=64)] | None = None  # the same with parts of these sizes
    units: Degree | None = None  # ranks get whole units (heads); fewer units than ranks are replicated
    uneven: bool = False  # as torch.chunk: the last ranks may hold less, or nothing


class FusedPart(Table, frozen=True):
    """One canonical tensor inside a fused local one."""

    tensor: Name
    size: Size  # along the split dimension
    units: Degree | None = None


class TensorSpec(Table, frozen=True):
    """One tensor, or one for each layer and expert: "{layer}" and "{expert}" in names stand for their numbers."""

    name: Name
    shape: Shape
    tensor: Name | None = None  # the canonical name, if it differs
    dtype: Name = ""
    layers: tuple[Layers, Layers] | None = None  # first, end (not included)
    experts: tuple[Experts, Experts] | None = None
    split: Split | None = None
    stage: Stage | tuple[Stage, ...] | None = None  # for a tensor without {layer}
    parts: Annotated[tuple[FusedPart, ...], msgspec.Meta(min_length=1, max_length=64)] | None = None
    interleave: Times | None = None  # how many times the parts alternate (query groups)
    fused: Name | None = None  # all experts of a rank are one local tensor of this name, with a leading dimension


class ModelSpec(Table, frozen=True, tag_field="kind", tag="model"):
    """The tensors of a model, independent of ranks."""

    name: Name
    tensors: tuple[TensorSpec, ...]
    dtype: Name = "bfloat16"
    layers: Layers = 0
    experts: Experts = 0


class Layout(Table, frozen=True, tag_field="kind", tag="layout"):
    """A model distributed over ranks."""

    name: Name
    model: ModelSpec | None = None
    tp: Degree = 1
    pp: Degree = 1
    pp_layers: tuple[Layers, ...] | None = None  # layers of each stage; by default as even as possible
    ep: Degree = 1
    etp: Degree = 1
    dp: Degree = 1
    fsdp: Degree = 1  # data-parallel ranks that share one copy, each tensor split along dimension 0
    first_rank: Rank | None = None  # None: after the earlier manifests
    ranks_per_node: Degree = 8
    first_node: Rank | None = None  # None: the node of first_rank, or after the earlier manifests' nodes
    label: str = ""  # its name in messages; by default `name`


class ShardSplit(Table, frozen=True):
    """How a local tensor is split over a group."""

    dim: Dim
    group: Name
    stride: Times = 1
    sizes: tuple[Extent, ...] | None = None  # local sizes


class ShardRepeat(Table, frozen=True):
    """`refitd.describe.Repeat` in a file."""

    dim: Dim
    count: Size
    step: Extent
    local_step: Extent


class ShardTile(Table, frozen=True):
    """`refitd.describe.Tile` in a file."""

    tensor: Name
    offset: Numbers
    size: Numbers
    local_offset: Extent
    local_stride: Numbers
    repeat: ShardRepeat | None = None


class ShardTensor(Table, frozen=True):
    """One local tensor."""

    name: Name
    shape: LocalShape
    dtype: Name
    tensor: Name | None = None
    split: ShardSplit | None = None
    tiles: tuple[ShardTile, ...] | None = None
    global_shape: LocalShape | None = None
    fill: float | None = None
    aliases: tuple[Name, ...] = ()
    cast_from: Name | None = None
    cast_to: Name | None = None


class ShardRank(Table, frozen=True):
    """One rank: the shard that it holds, and its groups by name."""

    rank: Rank
    shard: Name
    node: str = ""
    label: str = ""
    groups: dict[str, tuple[Rank, ...]] = {}


class Shards(Table, frozen=True, tag_field="kind", tag="shards"):
    """Ranks and their shards; ranks that hold the same tensors name the same shard."""

    name: Name
    shards: dict[str, tuple[ShardTensor, ...]]
    ranks: tuple[ShardRank, ...]
    first_rank: Rank | None = None  # added to every rank; None: the number of ranks before this manifest


Manifest = Layout | Shards
KINDS: dict[str, type[ModelSpec] | type[Layout] | type[Shards]] = {
    "model": ModelSpec,
    "layout": Layout,
    "shards": Shards,
}


@dataclass(frozen=True, slots=True)
class Position:
    """A rank's position in its layout; `expert_dp` numbers copies of its experts, as `dp` does for other tensors."""

    pp: int
    tp: int
    dp: int
    ep: int
    etp: int
    expert_dp: int


@dataclass(frozen=True, slots=True)
class PlacedManifest:
    """A manifest with its assigned first rank and node."""

    manifest: Manifest
    first_rank: int
    first_node: int
