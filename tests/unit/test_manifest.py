"""Manifests: examples load and plan, layouts become the right tiles, and everything wrong is refused together."""

from __future__ import annotations

import copy
import json
import math
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from refitd.describe.layout import elements, tiles_of
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.roster import Roster
from refitd.describe.tiles import Tile
from refitd.errors import ConfigError
from refitd.offline import (
    Layout,
    ModelSpec,
    Position,
    Shards,
    load,
    load_model,
    parse,
    place,
    position,
    read,
    rosters_of,
    shards_of,
    side_rosters,
    stage_layers,
    to_json,
    world_size,
)
from refitd.plan.build import plan_copies

LAYOUTS = Path(__file__).parents[2] / "configs" / "layouts"
EXAMPLES = sorted(LAYOUTS.glob("*.toml"))
MODELS = sorted((LAYOUTS / "models").glob("*.toml"))

SPLIT = {"name": "w", "shape": [8, 4], "split": {"dim": 0}, "stage": "every"}


def layout(*tensors: dict, layers: int = 0, experts: int = 0, **degrees) -> Layout:
    model = {"name": "m", "tensors": list(tensors), "layers": layers, "experts": experts}
    found = read({"kind": "layout", "name": "l", "model": model, **degrees}, "test")
    assert isinstance(found, Layout)
    return found


def held(found: Layout, index: int) -> dict[str, ParameterMetadata]:
    (placed,) = place([found])
    return {m.name: m for m in list(side_rosters(placed, "source"))[index].source}


def boxes(meta: ParameterMetadata) -> list[tuple]:
    """(tensor, [start:end of each dimension], first local element) of every tile, repeats written out."""
    found = []
    for tile in tiles_of(meta):
        for i in range(tile.repeat.count if tile.repeat else 1):
            offset, local = list(tile.offset), tile.local_offset
            if tile.repeat:
                offset[tile.repeat.dim] += i * tile.repeat.step
                local += i * tile.repeat.local_step
            found.append((tile.tensor, [(o, o + n) for o, n in zip(offset, tile.size, strict=True)], local))
    return found


def refused(values: dict | str, model: ModelSpec | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read(parse(values, "test", is_json=False) if isinstance(values, str) else values, "test", model)
    return str(caught.value)


# --- examples


def test_there_are_examples_of_the_three_models():
    for name in ("llama-3-70b", "qwen3-235b-a22b", "deepseek-v3"):
        assert any(name in path.name and "train" in path.name for path in EXAMPLES), name
        assert any(name in path.name and "serve" in path.name for path in EXAMPLES), name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_layout_loads(path):
    assert isinstance(load(path), Layout)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-70b-megatron", 70.55),
        ("llama-3-70b-vllm", 70.55),
        ("llama-3-70b-hf", 70.55),
        ("qwen3-235b-a22b-megatron", 235.09),
        ("qwen3-235b-a22b-vllm", 235.09),
        ("deepseek-v3-megatron", 671.03),
    ],
)
def test_example_model_has_as_many_parameters_as_published(name, billions):
    model = load_model(LAYOUTS / "models" / f"{name}.toml")
    (placed,) = place([Layout(name="all", model=model)])
    (roster,) = side_rosters(placed, "source")
    assert sum(elements(m.shape) for m in roster.source) / 1e9 == pytest.approx(billions, abs=0.01)


def test_every_example_model_is_used_or_counted():
    assert {path.stem for path in MODELS} == {
        "llama-3-70b-megatron",
        "llama-3-70b-vllm",
        "llama-3-70b-hf",
        "qwen3-235b-a22b-megatron",
        "qwen3-235b-a22b-vllm",
        "deepseek-v3-megatron",
    }


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("llama-3-70b-train-tp8-pp4", "llama-3-70b-serve-tp4"),
        ("llama-3-70b-train-tp8-pp4", "llama-3-70b-serve-tp16"),
        ("llama-3-70b-train-fsdp32", "llama-3-70b-serve-tp4"),
        ("llama-3-70b-serve-tp4", "llama-3-70b-train-fsdp32"),
        ("qwen3-235b-a22b-train-tp4-pp4-ep32", "qwen3-235b-a22b-serve-tp8-ep16"),
        ("deepseek-v3-train-tp4-pp4-ep32", "deepseek-v3-serve-tp8-ep16"),
    ],
)
def test_examples_plan_and_every_destination_byte_arrives(source, target):
    rosters = rosters_of(load(LAYOUTS / f"{source}.toml"), [load(LAYOUTS / f"{target}.toml")])
    plan = plan_copies(rosters)
    wanted = sum(elements(m.shape) * m.element_size for r in rosters for m in r.destination)
    rows = plan.shared.rows
    assert plan.unused_sources == ()
    assert plan.table.total_bytes == wanted
    assert len(rows.tensor) < len(plan.table)


# --- where ranks stand


def test_positions_are_megatrons_order():
    found = layout(SPLIT, tp=2, dp=2, pp=2)
    assert world_size(found) == 8
    assert position(found, 5) == Position(pp=1, tp=1, dp=0, ep=0, etp=0, expert_dp=1)
    assert position(found, 6) == Position(pp=1, tp=0, dp=1, ep=0, etp=0, expert_dp=2)


def test_experts_have_their_own_order_within_a_stage():
    found = layout(SPLIT, experts=4, layers=2, tp=2, dp=4, pp=2, ep=2, etp=2)
    at = [position(found, index) for index in range(8, 16)]
    assert [p.etp for p in at] == [0, 1] * 4
    assert [p.ep for p in at] == [0, 0, 1, 1] * 2
    assert [p.expert_dp for p in at] == [0] * 4 + [1] * 4


def test_stages_are_as_even_as_can_be_unless_said():
    assert [len(stage_layers(layout(SPLIT, layers=7, pp=3), i)) for i in range(3)] == [3, 2, 2]
    assert stage_layers(layout(SPLIT, layers=7, pp=3, pp_layers=[1, 5, 1]), 1) == range(1, 6)


def test_a_target_comes_behind_the_source_on_nodes_of_its_own():
    rosters = rosters_of(layout(SPLIT, tp=2), [layout(SPLIT, tp=4, ranks_per_node=2), layout(SPLIT)])
    assert [(r.rank, r.node, bool(r.source)) for r in rosters] == [
        (0, "node0", True),
        (1, "node0", True),
        (2, "node1", False),
        (3, "node1", False),
        (4, "node2", False),
        (5, "node2", False),
        (6, "node3", False),
    ]


def test_collocated_sides_share_ranks_and_nodes():
    rosters = rosters_of(layout(SPLIT, tp=4), [layout(SPLIT, tp=2)], collocated=True)
    assert [(r.rank, r.node, bool(r.source), bool(r.destination)) for r in rosters] == [
        (0, "node0", True, True),
        (1, "node0", True, True),
        (2, "node0", True, False),
        (3, "node0", True, False),
    ]
    assert plan_copies(rosters).table.total_bytes == 64


def test_two_targets_on_one_rank_are_refused():
    with pytest.raises(ConfigError, match="rank 4 is also that of"):
        rosters_of(layout(SPLIT), [layout(SPLIT, tp=2, first_rank=3), layout(SPLIT, first_rank=4)])


def test_a_rank_on_two_nodes_is_refused():
    with pytest.raises(ConfigError, match="rank 0 is on node1"):
        rosters_of(layout(SPLIT), [layout(SPLIT, first_rank=0, first_node=1)])


def test_equal_ranks_share_one_description_that_names_no_rank():
    (placed,) = place([layout(SPLIT, tp=2, dp=8)])
    rosters = list(side_rosters(placed, "source"))
    assert len({id(r.source) for r in rosters}) == 2
    assert all(m.owner_rank is None and m.tensor_parallel_group_ranks is None for r in rosters for m in r.source)


# --- how tensors are cut


def test_plain_split():
    found = layout(SPLIT, tp=2)
    assert held(found, 1)["w"].shape == (4, 4)
    assert boxes(held(found, 1)["w"]) == [("w", [(4, 8), (0, 4)], 0)]


def test_stride_cuts_each_part_on_its_own():
    found = layout({**SPLIT, "split": {"dim": 0, "stride": 2}}, tp=2)
    assert boxes(held(found, 1)["w"]) == [("w", [(2, 4), (0, 4)], 0), ("w", [(6, 8), (0, 4)], 8)]


def test_blocks_of_different_sizes():
    found = layout({**SPLIT, "split": {"dim": 0, "sizes": [2, 6]}}, tp=2)
    assert boxes(held(found, 0)["w"]) == [("w", [(0, 1), (0, 4)], 0), ("w", [(2, 5), (0, 4)], 4)]


def test_fewer_units_than_ranks_are_replicated():
    found = layout({**SPLIT, "split": {"dim": 0, "units": 2}}, tp=4)
    assert [boxes(held(found, i)["w"])[0][1][0] for i in range(4)] == [(0, 4), (0, 4), (4, 8), (4, 8)]


def test_uneven_split_is_that_of_chunk():
    found = layout({"name": "w", "shape": [10], "split": {"dim": 0, "uneven": True}, "stage": "every"}, tp=4)
    assert [held(found, i)["w"].shape for i in range(4)] == [(3,), (3,), (3,), (1,)]
    empty = layout({"name": "w", "shape": [4], "split": {"dim": 0, "uneven": True}, "stage": "every"}, tp=3)
    assert [held(empty, i)["w"].shape for i in range(3)] == [(2,), (2,), (0,)]
    assert boxes(held(empty, 2)["w"]) == []


def test_interleaved_parts_are_one_tile_with_a_repeat_each():
    parts = [{"tensor": "q", "size": 8}, {"tensor": "k", "size": 4}]
    found = layout({**SPLIT, "shape": [12, 1], "interleave": 4, "parts": parts}, tp=2)
    meta = held(found, 1)["w"]
    assert len(meta.tiles) == 2
    assert sorted(boxes(meta), key=lambda box: box[2]) == [
        ("q", [(4, 6), (0, 1)], 0),
        ("k", [(2, 3), (0, 1)], 2),
        ("q", [(6, 8), (0, 1)], 3),
        ("k", [(3, 4), (0, 1)], 5),
    ]


def test_fused_parts_lie_one_behind_the_other():
    parts = [{"tensor": "q", "size": 8, "units": 8}, {"tensor": "k", "size": 2, "units": 2}]
    found = layout({**SPLIT, "shape": [10, 1], "parts": parts}, tp=4)
    assert boxes(held(found, 3)["w"]) == [("q", [(6, 8), (0, 1)], 0), ("k", [(1, 2), (0, 1)], 2)]


def test_experts_are_dealt_and_cut_by_their_own_group():
    spec = {"name": "e{layer}.w{expert}", "shape": [4, 2], "split": {"dim": 0}}
    found = layout(spec, layers=1, experts=3, tp=2, dp=2, ep=2, etp=2)
    assert list(held(found, 0)) == ["e0.w0", "e0.w1"]
    assert list(held(found, 3)) == ["e0.w2"]
    assert boxes(held(found, 3)["e0.w2"]) == [("e0.w2", [(2, 4), (0, 2)], 0)]


def test_fused_experts_are_tiles_of_one_tensor():
    spec = {"name": "w{expert}", "shape": [2, 3], "fused": "w13", "tensor": "expert.{expert}", "stage": "every"}
    found = layout(spec, experts=4, dp=2, ep=2)
    meta = held(found, 1)["w13"]
    assert meta.shape == (2, 2, 3)
    assert boxes(meta) == [("expert.2", [(0, 2), (0, 3)], 0), ("expert.3", [(0, 2), (0, 3)], 6)]


def test_fsdp_cuts_dimension_0_of_what_tensor_parallelism_leaves():
    spec = {"name": "w", "shape": [10, 4], "split": {"dim": 1}, "stage": "every"}
    found = layout(spec, {**spec, "name": "norm", "shape": [3], "split": None}, tp=2, dp=4, fsdp=4)
    assert boxes(held(found, 3)["w"]) == [("w", [(3, 6), (2, 4)], 0)]
    assert held(found, 6)["norm"].shape == (0,)
    replicas = layout(spec, tp=2, dp=4, fsdp=2)
    assert boxes(held(replicas, 0)["w"]) == boxes(held(replicas, 4)["w"])


def test_tensors_of_first_last_and_both_stages():
    specs = [
        {"name": name, "shape": [2], "stage": stage}
        for name, stage in (("first", "first"), ("last", "last"), ("tied", ["first", "last"]), ("every", "every"))
    ]
    found = layout(*specs, pp=3)
    assert [list(held(found, i)) for i in range(3)] == [
        ["first", "tied", "every"],
        ["every"],
        ["last", "tied", "every"],
    ]


# --- bad input: models and layouts


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
    with pytest.raises(ConfigError, match="more than"):
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


# --- shards


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


def test_rosters_written_and_read_back_plan_the_same(tmp_path):
    source = load(LAYOUTS / "llama-3-70b-train-tp8-pp4.toml")
    target = load(LAYOUTS / "llama-3-70b-serve-tp4.toml")
    rosters = rosters_of(source, [target])
    written = []
    for side in ("source", "destination"):
        path = tmp_path / f"{side}.json"
        path.write_text(to_json(shards_of(side, rosters, side)))
        written.append(load(path))
    again = rosters_of(written[0], [written[1]])
    assert len(written[0].shards) == 32
    assert plan_copies(again).digest == plan_copies(rosters).digest


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
    other = Roster(0, source=[_owned(meta, 0)])
    found = shards_of("s", [Roster(1, source=[meta], node="n"), other], "source")
    assert list(found.shards) == ["shard0"]
    again = read(json.loads(to_json(found)), "test")
    assert isinstance(again, Shards)
    (placed,) = place([again])
    assert list(side_rosters(placed, "source"))[1].source[0] == meta


def _owned(meta: ParameterMetadata, rank: int) -> ParameterMetadata:
    found = copy.copy(meta)
    found.owner_rank = rank
    return found


@pytest.mark.parametrize("path", [*EXAMPLES, *MODELS], ids=lambda path: path.stem)
def test_a_manifest_written_as_json_reads_back_equal(path):
    found = load_model(path) if path in MODELS else load(path)
    assert read(parse(to_json(found), "test", is_json=True), "test") == found


def test_documentation_has_every_key_and_its_examples_load():
    text = (LAYOUTS.parents[1] / "docs" / "manifests.md").read_text()
    for struct in (ModelSpec, Layout, Shards):
        for field in msgspec.structs.fields(struct):
            assert f"`{field.name}`" in text, field.name
    blocks = [block.split("```")[0] for block in text.split("```toml\n")[1:]]
    assert len(blocks) >= 3
    for block in blocks:
        values = parse(block, "docs/manifests.md", is_json=False)
        if values["kind"] == "layout":
            values["model"] = parse(blocks[0], "docs/manifests.md", is_json=False)
        read(values, "docs/manifests.md")


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
