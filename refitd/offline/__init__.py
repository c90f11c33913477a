"""Manifests: TOML or JSON files that say what ranks hold, converted to rosters and back.

    kind = "model"    tensors by name pattern: shape, dtype, how each is split
    kind = "layout"   a model over ranks: tp, pp, ep, etp, dp, fsdp                    -> rosters of one side
    kind = "shards"   every rank with its tensors, where patterns do not suffice       <-> rosters of one side

docs/manifests.md explains every key. All numbers are checked against bounds before anything is built from them, and
all problems of a manifest are reported together.
"""
