"""Invalid manifests: one refusal names all faults; shards manifests are also converted and written back."""

from __future__ import annotations

import copy
import json
import math
import tracemalloc
from dataclasses import replace

import pytest

from refitd.describe.metadata import ParameterMetadata, Roster, Tile
from refitd.errors import ConfigError
from refitd.files import parse
from refitd.offline.files import load, load_model, read, shards_of, to_json
from refitd.offline.layouts import ModelSpec, Shards
from refitd.offline.rosters import place, rosters_of, side_rosters
from refitd.plan.build import plan_copies
from tests.support.manifests import EXAMPLES, LAYOUTS, MODELS, SPLIT, layout, refused

BAD_TENSORS = {
    "unknown key": ({"shpae": [1]}, "shpae: unknown key"),
    "missing shape": ({"shape": None}, "shape"),
    "negative size": ({"shape": [-8, 4]}, ">= 1"),
    "zero size": ({"shape": [0, 4]}, ">= 1"),
    "fraction": ({"shape": [8.5, 4]}, "found [8.5, 4]"),
    "nan": ({"shape": [math.nan, 4]}, "found [nan, 4]"),
    "truth for a number": ({"shape": [True, 4]}, "shape"),
    "text for a number": ({"shape": ["8", 4]}, "shape"),
    "too many dimensions": ({"shape": [1] * 9}, "length <= 6"),
    "too many elements": ({"shape": [2**40, 2**40]}, "expected at most 2**48"),
    "number of many bits": ({"shape": [2**2000, 4]}, "shape"),
    "dtype": ({"dtype": "bfloat17"}, "bfloat17"),
    "dim outside": ({"split": {"dim": 2}}, "split.dim is 2, expected 0 to 1"),
    "negative dim": ({"split": {"dim": -1}}, ">= 0"),
    "sizes that do not sum": ({"split": {"dim": 0, "sizes": [2, 3]}}, "sum to 5, expected 8"),
    "stride that does not divide": ({"split": {"dim": 0, "stride": 3}}, "expected a multiple of split.stride 3"),
    "two ways at once": ({"split": {"dim": 0, "stride": 2, "sizes": [4, 4]}}, "contradict each other"),
    "units that do not divide": ({"split": {"dim": 0, "units": 3}}, "expected a divisor of 8"),
    "no stage": ({"stage": None}, "needs a stage"),
    "unknown stage": ({"stage": "middle"}, "stage"),
    "layers without {layer}": ({"layers": [0, 1]}, "no {layer}"),
    "experts of a model without": ({"name": "w{expert}"}, "the model has no experts"),
    "parts without split": ({"split": None, "parts": [{"tensor": "q", "size": 8}]}, "need a split"),
    "parts that do not sum": ({"parts": [{"tensor": "q", "size": 4}]}, "parts sum to 4, expected 8"),
    "other braces": ({"name": "w{rank}"}, "braces"),
    "fused without experts": ({"fused": "f"}, "no {expert}"),
}


@pytest.mark.parametrize(("change", "expected"), BAD_TENSORS.values(), ids=BAD_TENSORS.keys())
def test_wrong_tensor_is_refused_by_name(change, expected):
    spec = {key: value for key, value in {**SPLIT, **change}.items() if value is not None}
    message = refused({"kind": "model", "name": "m", "tensors": [spec], "layers": 4})
    assert expected in message
    assert "w" in message
    assert message.startswith("test: ")


BAD_LAYOUTS = {
    "no ranks": ({"tp": 0}, "tp"),
    "negative": ({"dp": -1}, "dp"),
    "nan": ({"tp": math.nan}, "found nan"),
    "absurd degree": ({"tp": 2**40}, "tp"),
    "absurd product": ({"tp": 2**10, "dp": 2**10, "pp": 2**4}, "expected at most 131072"),
    "unknown key": ({"cp": 2}, "cp: unknown key"),
    "ep that does not fit": ({"dp": 2, "ep": 3}, "does not divide the 2 ranks"),
    "more ep than experts": ({"dp": 8, "ep": 8}, "4 experts; lower ep"),
    "pp_layers that do not sum": ({"pp": 2, "pp_layers": [1, 2]}, "gives 3 layers to 2 stages, expected 4 and 2"),
    "pp_layers of other length": ({"pp": 2, "pp_layers": [4]}, "to 1 stages"),
    "fsdp beyond dp": ({"dp": 2, "fsdp": 4}, "fsdp 4 does not divide dp 2"),
    "tp that does not divide": ({"tp": 3}, "w: dim 0 has 8 elements, which cannot be split over tp 3"),
    "ranks above the last": ({"first_rank": 2**20 - 1, "tp": 2}, "end above"),
}


@pytest.mark.parametrize(("change", "expected"), BAD_LAYOUTS.values(), ids=BAD_LAYOUTS.keys())
def test_wrong_layout_is_refused(change, expected):
    model = {"name": "m", "layers": 4, "experts": 4, "tensors": [SPLIT]}
    assert expected in refused({"kind": "layout", "name": "l", "model": model, **change})


def test_interleaved_groups_that_tp_does_not_divide_are_refused():
    model = load_model(LAYOUTS / "models" / "qwen3-235b-a22b-megatron.toml")
    message = refused({"kind": "layout", "name": "l", "tp": 8}, model)
    assert "4 interleaved groups cannot be split over tp 8" in message


def test_many_problems_are_reported_together():
    bad = [{**SPLIT, "name": f"w{i}", "shape": [-i - 1]} for i in range(3)]
    message = refused({"kind": "model", "name": "m", "dtype": 3, "layres": 4, "tensors": bad})
    for expected in ("w0", "w1", "w2", "dtype", "layres"):
        assert expected in message


def test_long_lists_of_problems_are_cut_and_counted():
    bad = [{**SPLIT, "name": f"w{i}", "dtype": "no"} for i in range(30)]
    assert "and 10 more problems" in refused({"kind": "model", "name": "m", "tensors": bad})


def test_the_same_tensor_twice_is_refused_but_not_for_other_layers():
    spec = {"name": "{layer}.w", "shape": [2], "layers": [0, 2]}
    values = {"kind": "model", "name": "m", "layers": 4}
    assert "described twice" in refused({**values, "tensors": [spec, {**spec, "layers": [1, 3]}]})
    assert isinstance(read({**values, "tensors": [spec, {**spec, "layers": [2, 4]}]}, "test"), ModelSpec)


def test_absurd_numbers_are_refused_before_anything_is_built():
    spec = {"name": "{layer}.w{expert}", "shape": [2**24, 2**24]}
    values = {"kind": "layout", "name": "l", "tp": 2**10, "dp": 2**7}
    model = {"name": "m", "layers": 4096, "experts": 65536, "tensors": [spec]}
    tracemalloc.start()
    try:
        message = refused({**values, "model": model})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "descriptions in all" in message
    assert peak < 64 << 20


@pytest.mark.parametrize(
    ("text", "is_json", "expected"),
    [
        ('kind = "layout"\ntp = ', False, "not TOML"),
        ("tp = 1\ntp = 2\n", False, "not TOML"),
        ('{"kind": "layout", "tp": 8', True, "not JSON"),
        ('{"tp": 1, "tp": 2}', True, "'tp' occurs twice"),
        ('{"tp": NaN}', True, "NaN"),
        ('{"tp": -Infinity}', True, "Infinity"),
        ("[1, 2]", True, "expected a table"),
        ("[" * 100_000, True, "recursion depth"),
        ("a = " + "[" * 100_000, False, "not TOML"),
        ("", True, "not JSON"),
    ],
)
def test_truncated_or_contradictory_text_is_refused(text, is_json, expected):
    with pytest.raises(ConfigError, match=expected):
        parse(text, "test", is_json=is_json)


def test_every_truncation_of_an_example_is_refused_or_smaller(tmp_path):
    text = (LAYOUTS / "models" / "deepseek-v3-megatron.toml").read_text()
    whole = load_model(LAYOUTS / "models" / "deepseek-v3-megatron.toml")
    path = tmp_path / "cut.toml"
    for end in range(0, len(text) - 1, 97):
        path.write_text(text[:end])
        try:
            found = load_model(path)
        except ConfigError:
            continue
        assert len(found.tensors) <= len(whole.tensors)


@pytest.mark.parametrize("kind", [None, 3, "roster", ["layout"]])
def test_unknown_kind_is_refused(kind):
    assert "expected one of model, layout, shards" in refused({"kind": kind, "name": "x"})


def test_missing_file_directory_and_binary_are_refused(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "binary.toml")
    with pytest.raises(ConfigError, match="expected a regular file"):
        load("/dev/zero")


def test_a_layout_without_a_model_says_where_to_name_one(tmp_path):
    assert "--model" in refused({"kind": "layout", "name": "l"})
    path = tmp_path / "layout.toml"
    path.write_text('kind = "layout"\nname = "l"\nmodel = "none.toml"\n')
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load(path)
    path.write_text('kind = "layout"\nname = "l"\nmodel = "layout.toml"\n')
    with pytest.raises(ConfigError, match="expected a model"):
        load(path)


def test_a_model_where_a_layout_belongs_is_refused():
    with pytest.raises(ConfigError, match="is a model, expected a layout"):
        load(MODELS[0])
    with pytest.raises(ConfigError, match="kind is 'layout', expected a model"):
        load_model(EXAMPLES[0])


# --- Shards manifests: conversion to rosters, refusals, and writing them back. --------------------------


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
