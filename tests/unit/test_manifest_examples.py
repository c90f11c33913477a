"""The example manifests and those of the documentation: they load, plan, and are written and read back equal."""

from __future__ import annotations

import msgspec
import pytest

from refitd.describe.layout import elements
from refitd.offline import (
    Layout,
    ModelSpec,
    Shards,
    load,
    load_model,
    parse,
    place,
    read,
    rosters_of,
    shards_of,
    side_rosters,
    to_json,
)
from refitd.plan.build import plan_copies
from tests.support.manifests import EXAMPLES, LAYOUTS, MODELS


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
