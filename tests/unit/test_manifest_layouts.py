"""Layouts of manifests, and the manifests of the examples and the documentation."""

from __future__ import annotations

import msgspec
import pytest

from refitd.clusters import load_cluster
from refitd.describe.layout import elements, tiles_of
from refitd.describe.metadata import ParameterMetadata
from refitd.errors import ConfigError
from refitd.files import parse
from refitd.offline.files import load, load_model, read, shards_of, to_json
from refitd.offline.layouts import Layout, ModelSpec, Position, Shards, position, stage_layers, world_size
from refitd.offline.rosters import place, rosters_of, side_rosters
from refitd.plan.build import plan_copies
from tests.support.manifests import EXAMPLES, LAYOUTS, MODELS, SPLIT, held, layout


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


def test_equal_ranks_share_one_description_that_names_no_rank():
    (placed,) = place([layout(SPLIT, tp=2, dp=8)])
    rosters = list(side_rosters(placed, "source"))
    assert len({id(r.source) for r in rosters}) == 2
    assert all(m.owner_rank is None and m.tensor_parallel_group_ranks is None for r in rosters for m in r.source)


FUSED_PARTS = [{"tensor": "q", "size": 8, "units": 8}, {"tensor": "k", "size": 2, "units": 2}]


@pytest.mark.parametrize(
    ("spec", "tp", "rank", "expected"),
    [
        ({}, 2, 1, [("w", [(4, 8), (0, 4)], 0)]),
        ({"split": {"dim": 0, "stride": 2}}, 2, 1, [("w", [(2, 4), (0, 4)], 0), ("w", [(6, 8), (0, 4)], 8)]),
        ({"split": {"dim": 0, "sizes": [2, 6]}}, 2, 0, [("w", [(0, 1), (0, 4)], 0), ("w", [(2, 5), (0, 4)], 4)]),
        # fewer units than ranks are replicated
        *(
            ({"split": {"dim": 0, "units": 2}}, 4, rank, [("w", [(first, first + 4), (0, 4)], 0)])
            for rank, first in enumerate((0, 0, 4, 4))
        ),
        # fused parts follow one another
        (
            {"shape": [10, 1], "parts": FUSED_PARTS},
            4,
            3,
            [("q", [(6, 8), (0, 1)], 0), ("k", [(1, 2), (0, 1)], 2)],
        ),
    ],
)
def test_a_rank_holds_these_boxes_of_a_split_tensor(spec, tp, rank, expected):
    assert boxes(held(layout({**SPLIT, **spec}, tp=tp), rank)["w"]) == expected


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (({"tp": 2, "first_rank": 3}, {"first_rank": 4}), "rank 4 is also that of"),
        (({"first_rank": 0, "first_node": 1},), "rank 0 is on node1"),
    ],
)
def test_ranks_that_are_two_targets_or_on_two_nodes_are_refused(targets, said):
    with pytest.raises(ConfigError, match=said):
        rosters_of(layout(SPLIT), [layout(SPLIT, **degrees) for degrees in targets])


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


# --- The manifests of the examples and the documentation load, plan, and are equal after writing and reading.


def test_there_are_examples_of_the_three_models():
    for name in ("llama-3-70b", "qwen3-235b-a22b", "deepseek-v3"):
        assert any(name in path.name and "train" in path.name for path in EXAMPLES), name
        assert any(name in path.name and "serve" in path.name for path in EXAMPLES), name


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-70b-megatron", 70.55),
        ("llama-3-70b-vllm", 70.55),
        ("llama-3-70b-hf", 70.55),
        ("qwen3-235b-a22b-megatron", 235.09),
        ("qwen3-235b-a22b-vllm", 235.09),
        ("deepseek-v3-megatron", 671.03),
        ("kimi-k2-megatron", 1026.41),
    ],
)
def test_example_model_has_as_many_parameters_as_published(name, billions):
    model = load_model(LAYOUTS / "models" / f"{name}.toml")
    (placed,) = place([Layout(name="all", model=model)])
    (roster,) = side_rosters(placed, "source")
    assert sum(elements(m.shape) for m in roster.source) / 1e9 == pytest.approx(billions, abs=0.01)


def test_every_example_model_is_used_or_counted():
    assert {path.stem for path in MODELS} == {
        "kimi-k2-megatron",
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


@pytest.mark.parametrize("path", [*EXAMPLES, *MODELS], ids=lambda path: path.stem)
def test_a_manifest_written_as_json_reads_back_equal(path):
    found = load_model(path) if path in MODELS else load(path)
    assert isinstance(found, ModelSpec if path in MODELS else Layout)
    assert read(parse(to_json(found), "test", is_json=True), "test") == found


def test_documentation_has_every_key_and_its_examples_load(tmp_path):
    text = (LAYOUTS.parents[1] / "docs" / "manifests.md").read_text()
    for struct in (ModelSpec, Layout, Shards):
        for field in msgspec.structs.fields(struct):
            assert f"`{field.name}`" in text, field.name
    blocks = [block.split("```")[0] for block in text.split("```toml\n")[1:]]
    assert len(blocks) >= 3
    for block in blocks:
        values = parse(block, "docs/manifests.md", is_json=False)
        if values["kind"] == "cluster":
            (path := tmp_path / "cluster.toml").write_text(block)
            load_cluster(path)
            continue
        if values["kind"] == "layout":
            values["model"] = parse(blocks[0], "docs/manifests.md", is_json=False)
        read(values, "docs/manifests.md")
