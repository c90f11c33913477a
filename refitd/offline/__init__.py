"""Manifests: TOML or JSON files that say what ranks hold, converted to rosters and back.

    kind = "model"    tensors by name pattern: shape, dtype, how each is split
    kind = "layout"   a model over ranks: tp, pp, ep, etp, dp, fsdp                    -> rosters of one side
    kind = "shards"   every rank with its tensors, where patterns do not suffice       <-> rosters of one side

docs/manifests.md explains every key. All numbers are checked against bounds before anything is built from them, and
all problems of a manifest are reported together.
"""

from refitd.offline.files import load, load_model, parse, read, to_json
from refitd.offline.layouts import position, stage_layers, world_size
from refitd.offline.rosters import place, rosters_of, side_rosters
from refitd.offline.shards import shards_of
from refitd.offline.values import (
    FusedPart,
    Layout,
    Manifest,
    ModelSpec,
    PlacedManifest,
    Position,
    ShardRank,
    ShardRepeat,
    Shards,
    ShardSplit,
    ShardTensor,
    ShardTile,
    Split,
    TensorSpec,
)

__all__ = [
    "FusedPart",
    "Layout",
    "Manifest",
    "ModelSpec",
    "PlacedManifest",
    "Position",
    "ShardRank",
    "ShardRepeat",
    "ShardSplit",
    "ShardTensor",
    "ShardTile",
    "Shards",
    "Split",
    "TensorSpec",
    "load",
    "load_model",
    "parse",
    "place",
    "position",
    "read",
    "rosters_of",
    "shards_of",
    "side_rosters",
    "stage_layers",
    "to_json",
    "world_size",
]
