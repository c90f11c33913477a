"""Shards manifests: conversion to rosters, refusals, and writing them back."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest

from refitd.describe.metadata import ParameterMetadata
from refitd.describe.roster import Roster
from refitd.describe.tiles import Tile
from refitd.offline import Shards, place, read, rosters_of, shards_of, side_rosters, to_json
from refitd.plan.build import plan_copies
from tests.support.manifests import SPLIT, layout, refused


def shards(**changes) -> dict:
    values = {
        "kind": "shards",
        "name": "s",
        "shards": {"a": [{"name": "w", "shape": [4, 4], "dtype": "float32", "split": {"dim": 0, "group": "tp"}}]},
        "ranks": [{"rank": rank, "shard": "a", "groups": {"tp": [0, 1]}} for rank in range(2)],
    }
    return copy.deepcopy({**values, **changes})


def test_shards_become_rosters():
    found = read(shards(), "test")
    rosters = rosters_of(found, [layout({**SPLIT, "dtype": "float32"}, tp=4)])
    assert [r.rank for r in rosters] == [0, 1, 2, 3, 4, 5]
    assert plan_copies(rosters).table.total_bytes == 128


def test_shards_behind_others_move_their_ranks_and_groups():
    found = read(shards(), "test")
    rosters = rosters_of(layout({**SPLIT, "dtype": "float32"}, tp=4), [found])
    assert rosters[5].destination[0].tensor_parallel_group_ranks == [4, 5]
    assert plan_copies(rosters).table.total_bytes == 128


RANK = {"rank": 0, "shard": "a", "groups": {"tp": [0, 1]}}
TENSOR = {"name": "w", "shape": [4, 4], "dtype": "float32"}
BAD_SHARDS = {
    "duplicate rank": ({"ranks": [RANK, RANK]}, "rank 0 is also that of ranks[0]"),
    "rank missing from its group": (
        {"ranks": [{**RANK, "groups": {"tp": [1, 2]}}, {**RANK, "rank": 1}, {**RANK, "rank": 2, "groups": {}}]},
        "it is not in its group 'tp' [1, 2]",
    ),
    "group that names a stranger": ({"ranks": [RANK]}, "names ranks that the manifest lacks: [1]"),
    "group that names a rank twice": ({"ranks": [{**RANK, "groups": {"tp": [0, 0]}}]}, "names a rank twice"),
    "group that is not given": ({"ranks": [{"rank": 0, "shard": "a"}]}, "over group 'tp', which it lacks"),
    "unknown shard": ({"ranks": [{"rank": 0, "shard": "b"}]}, "shard 'b' is not among the shards"),
    "no ranks": ({"ranks": []}, "ranks: none"),
    "negative rank": ({"ranks": [{**RANK, "rank": -1}]}, "ranks[0].rank"),
    "rank that is nan": ({"ranks": [{**RANK, "rank": math.nan}]}, "found nan"),
    "absurd rank": ({"ranks": [{**RANK, "rank": 2**40}]}, "ranks[0].rank"),
    "tensor twice": ({"shards": {"a": [TENSOR, TENSOR]}}, "w: described twice"),
    "dtype": ({"shards": {"a": [{**TENSOR, "dtype": "float31"}]}}, "float31"),
    "negative size": ({"shards": {"a": [{**TENSOR, "shape": [-4, 4]}]}}, ">= 0"),
    "split and tiles": (
        {"shards": {"a": [{**TENSOR, "tiles": [], "split": {"dim": 0, "group": "tp"}}]}},
        "split and tiles are both given",
    ),
    "tile outside": (
        {
            "shards": {
                "a": [
                    {
                        **TENSOR,
                        "tiles": [
                            {"tensor": "w", "offset": [0, 0], "size": [8, 4], "local_offset": 0, "local_stride": [4, 1]}
                        ],
                    }
                ]
            }
        },
        "outside the local tensor",
    ),
    "unknown key": ({"ranks": [{**RANK, "nod": "a"}]}, "ranks[0].nod: unknown key"),
    "not a table": ({"ranks": 3}, "expected a list of tables"),
    "shards not a table": ({"shards": [1]}, "expected tables"),
}


@pytest.mark.parametrize(("change", "expected"), BAD_SHARDS.values(), ids=BAD_SHARDS.keys())
def test_wrong_shards_are_refused(change, expected):
    assert expected in refused(shards(**change))


def test_fields_survive_writing():
    meta = ParameterMetadata(
        name="local.w",
        shape=(6, 2),
        dtype="bfloat16",
        element_size=2,
        is_tp=True,
        partition_dim=0,
        partition_sizes=[2, 4],
        owner_rank=1,
        tensor_parallel_group_ranks=[0, 1],
        resolved_name="w",
    )
    other = Roster(0, source=[replace(meta, owner_rank=0)])
    found = shards_of("s", [Roster(1, source=[meta], node="n"), other], "source")
    assert list(found.shards) == ["shard0"]
    again = read(json.loads(to_json(found)), "test")
    assert isinstance(again, Shards)
    (placed,) = place([again])
    assert list(side_rosters(placed, "source"))[1].source[0] == meta


def test_fills_aliases_and_casts_survive_a_manifest():
    held = ParameterMetadata(
        "w", (4, 2), "bfloat16", 2, owner_rank=0, resolved_name="w", tiles=(Tile("w", (0, 0), (3, 2), 0, (2, 1)),),
        global_shape=(3, 2), fill=-1.0, aliases=("tied",), cast_from="float32",
    )  # fmt: skip
    written = shards_of("m", [Roster(0, destination=[held])], "destination")
    again = read(json.loads(to_json(written)), "m.json")
    source = read(json.loads(to_json(shards_of("s", [Roster(0, source=[held])], "source"))), "s.json")
    (roster,) = [r for r in rosters_of(source, [again]) if r.destination]
    (found,) = roster.destination
    assert (found.fill, found.aliases, found.cast_from) == (-1.0, ("tied",), "float32")
