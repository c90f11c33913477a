"""refitctl plan, explain and manifest on manifests: no daemon, no torch, readable output, honest exit statuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from refitd.errors import TransportError
from refitd.offline.files import read
from refitd.offline.rosters import rosters_of
from refitd.plan.build import plan_copies
from refitd.plan.cost import traffic_of
from refitd.protocol.plan_reports import DescribedMember, ModelDescription
from refitd.protocol.shards import Shard, WireTensor
from refitd_cli.commands.explain import bars
from refitd_cli.group import Commands
from refitd_cli.heatmap import matrix_of, text_matrix
from refitd_cli.layouts import RankNumbers
from refitd_cli.output import rank_ranges
from tests.support import cli
from tests.support.manifests import LAYOUTS

TRAIN, SERVE = LAYOUTS / "llama-3-70b-train-tp8-pp4.toml", LAYOUTS / "llama-3-70b-serve-tp4.toml"
BOTH = ("--source", str(TRAIN), "--target", str(SERVE))
COMMANDS = {name: f"refitd_cli.commands.{name}:{name}" for name in ("plan", "explain", "manifest")}

MODEL = """
kind = "model"
name = "tiny"
dtype = "float32"
layers = 2
[[tensors]]
name = "embedding"
shape = [16, 4]
split = { dim = 0 }
stage = "first"
[[tensors]]
name = "layers.{layer}.qkv"
shape = [16, 4]
interleave = 4
split = { dim = 0 }
parts = [{ tensor = "layers.{layer}.q", size = 8 }, { tensor = "layers.{layer}.kv", size = 8 }]
[[tensors]]
name = "layers.{layer}.norm"
shape = [4]
"""
SEPARATE = """
kind = "model"
name = "tiny, in separate tensors"
dtype = "float32"
layers = 2
[[tensors]]
name = "layers.{layer}.q"
shape = [8, 4]
split = { dim = 0 }
[[tensors]]
name = "layers.{layer}.kv"
shape = [8, 4]
split = { dim = 0 }
[[tensors]]
name = "layers.{layer}.norm"
shape = [4]
"""


def run(*arguments: str, client: object = None) -> cli.Ran:
    group = Commands(name="refitctl", lazy=COMMANDS)
    return cli.run(client or TransportError("no daemon runs"), *arguments, command=group)


@pytest.fixture
def sides(tmp_path):
    """Arguments for a tiny source of TP2 PP2 and a target of TP4."""
    (tmp_path / "fused.toml").write_text(MODEL)
    (tmp_path / "separate.toml").write_text(SEPARATE)
    (tmp_path / "a.toml").write_text('kind = "layout"\nname = "train"\nmodel = "fused.toml"\ntp = 2\npp = 2\n')
    (tmp_path / "b.toml").write_text('kind = "layout"\nname = "serve"\nmodel = "separate.toml"\ntp = 4\n')
    return ("--source", str(tmp_path / "a.toml"), "--target", str(tmp_path / "b.toml"))


# --- plan


def test_plan_shows_matrix_parameters_memory_balance_and_time():
    ran = run("plan", *BOTH, "--top", "5")
    assert (ran.status, ran.stderr) == (0, "")
    for expected in (
        "GB sent: from ranks of llama-train (rows) to ranks of llama-serve (columns)",
        "24-31",
        "the largest 5 of 723",
        "lm_head.weight",
        "16.8 GB",
        "0-31 of llama-serve",
        "35.3 GB",
        "1.13 TB in 41120 copies",
        "564 GB cross nodes for 1.13 TB that ranks there need",
        "times the mean of 64",
    ):
        assert expected in ran.stdout, expected


def test_plan_in_json_is_one_object_with_everything(sides):
    found = run("plan", *sides, "--json").object
    assert "no target takes: embedding" in run("plan", *sides).stdout
    assert found["source"] == "train"
    assert found["targets"] == ["serve"]
    assert found["ranks"] == 8
    assert found["bytes"] == 2 * (8 + 8) * 4 * 4 + 2 * 4 * 4 * 4
    assert sum(pair["bytes"] for pair in found["pairs"]) == found["bytes"]
    assert found["crossing_bytes"] == 2 * (8 + 8) * 4 * 4 + 2 * 4 * 4, "all four ranks need both layers' norms"
    assert sum(parameter["bytes"] for parameter in found["parameters"]) == found["bytes"]
    assert found["unused_sources"] == ["embedding"]
    assert [m["staging_bytes"] for m in found["memory"]] == [0, 0, 0, 0, 160, 160, 160, 160]
    # all four ranks of the node need these bytes, so one of the two replicas sends them across once
    assert found["senders"]["max_over_mean"] == 1.2


def test_refused_plan_exits_1_and_says_why(sides, tmp_path):
    swapped = ("--source", sides[3], "--target", sides[1])
    ran = run("plan", *swapped)
    assert (ran.status, ran.stdout) == (1, "")
    assert "embedding: " in ran.stderr
    assert "no source has it" in ran.stderr
    error = run("plan", *swapped, "--json").object["error"]
    assert error["code"] == "plan"
    assert any("embedding" in text for text in error["causes"].values())


def test_wrong_manifest_exits_2_and_names_every_problem(sides, tmp_path):
    (tmp_path / "a.toml").write_text('kind = "layout"\nname = "x"\nmodel = "fused.toml"\ntp = 0\npp = -1\ncp = 2\n')
    ran = run("plan", *sides)
    assert (ran.status, ran.stdout) == (2, "")
    for expected in ("a.toml", "tp: ", "pp: ", "cp: unknown key"):
        assert expected in ran.stderr
    assert run("plan", *sides, "--json").object["error"]["code"] == "config"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--collocated", {"ranks": 4, "unused_sources": ["embedding"]}),
        ("--target {folder}/b.toml", {"ranks": 12, "targets": ["serve", "serve"]}),  # two separate pools
        ("--model {folder}/separate.toml", {"unused_sources": []}),  # overrides the layouts' models
    ],
)
def test_options_of_plan(sides, tmp_path, more, expected):
    found = run("plan", *sides, *more.format(folder=tmp_path).split(), "--json").object
    assert {name: found[name] for name in expected} == expected
    assert (found["local_bytes"] > 0) == (more == "--collocated")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan", "Usage"),
        ("plan --source a.toml", "Usage"),
        ("plan --target a.toml", "Usage"),
        ("plan policy --source a.toml", "Usage"),
        ("plan policy --html x.html", "Usage"),
        ("plan policy --collocated", "Usage"),
        ("plan {sides} --html {folder}/none/map.html", "cannot be written"),
        ("explain w --source a.toml", ""),
        ("explain layers.0.nrom {sides}", "did you mean layers.0.norm"),
        ("manifest", ""),
        ("manifest policy --layout a.toml", ""),
        ("manifest --layout a.toml --replica a", ""),
    ],
)
def test_a_wrong_command_line_is_refused(sides, tmp_path, words, said):
    ran = run(*words.format(sides=" ".join(sides), folder=tmp_path).split())
    assert ran.status == 2
    assert all(word in ran.stderr for word in said.split())


def test_heat_map_is_one_well_formed_file_without_outside_references(sides, tmp_path):
    page = tmp_path / "map.html"
    ran = run("plan", *sides, "--html", str(page))
    assert ran.status == 0
    assert str(page) in ran.stdout
    text = page.read_text()
    assert not re.search(r"(src|href)=|url\(|http", text)
    svg = ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    titles = [title.text for title in svg.iter("title")]
    assert len(titles) == len(run("plan", *sides, "--json").object["pairs"])
    assert any(title.startswith("0 on node0 to 0 on node1: ") for title in titles)


def test_names_in_the_heat_map_are_escaped(sides, tmp_path):
    (tmp_path / "a.toml").write_text(
        'kind = "layout"\nname = "<script>&\\u202e"\nmodel = "fused.toml"\ntp = 2\npp = 2\n'
    )
    page = tmp_path / "map.html"
    assert run("plan", *sides, "--html", str(page)).status == 0
    assert "<script>" not in page.read_text() and "\u202e" not in page.read_text()
    assert "&lt;script&gt;&amp;" in page.read_text()


def test_large_matrices_are_grouped_by_node_and_sum_up():
    model = {"name": "m", "tensors": [{"name": "w", "shape": [4096], "stage": "every", "split": {"dim": 0}}]}
    source, target = (
        read({"kind": "layout", "name": "l", "model": model, **degrees}, "test")
        for degrees in ({"tp": 64}, {"tp": 1024, "ranks_per_node": 8})
    )
    rosters = rosters_of(source, [target])
    plan = plan_copies(rosters)
    sides = (RankNumbers("from", 0, tuple(range(64))), RankNumbers("to", 64, tuple(range(64, 1088))))
    matrix = matrix_of(traffic_of(plan), rosters, sides)
    assert [len(group.ranks) for group in matrix.senders] == [8] * 8
    assert len(matrix.receivers) == 12
    assert (matrix.senders[1].label, matrix.senders[1].nodes) == ("8-15", "node1")
    assert (matrix.receivers[0].label, matrix.receivers[0].nodes) == ("0-87", "node8..node18")
    assert int(matrix.bytes.sum()) == plan.table.total_bytes
    _, columns, rows = text_matrix(matrix, sides)
    assert len(columns) == len(rows[0]) == 14


def test_offline_commands_load_neither_torch_nor_sockets():
    code = (
        "import sys\nfrom refitd_cli.control import main\n"
        "try: main(sys.argv[1:], prog_name='refitctl')\nexcept SystemExit as e: assert not e.code, e.code\n"
        "print({'torch', 'zmq'} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "plan", *BOTH, "--top", "1"], check=True, capture_output=True, text=True
    )
    assert ran.stdout.splitlines()[-1] == "set()"


# --- explain


def test_explain_draws_each_ranks_part_and_what_travels(sides):
    ran = run("explain", "layers.1.q", *sides, "--top", "0")
    assert (ran.status, ran.stderr) == (0, "")
    assert "layers.1.q  [8, 4] float32, 128 B" in ran.stdout
    lines = ran.stdout.splitlines()
    assert "  rank 2  |####....|  [0:2, 0:4] [2:4, 0:4]  in layers.1.qkv" in lines
    assert "  rank 5  |..##....|  [2:4, 0:4]" in lines
    at = lines.index("into rank 7:")
    assert lines[at + 1] == "  from rank 3  |......##|  [6:8, 0:4]  32 B"


def test_explain_of_a_fused_local_name_shows_what_lies_in_it(sides):
    ran = run("explain", "layers.0.qkv", *sides, "--json")
    assert [tensor["name"] for tensor in ran.object["tensors"]] == ["layers.0.kv", "layers.0.q"]


def test_explain_says_what_planned_a_tensor(sides, tmp_path):
    assert "planned by: lcm (each side holds it whole or" in run("explain", "layers.1.q", *sides).stdout
    (tmp_path / "uneven.toml").write_text(SEPARATE.replace("dim = 0", "dim = 0, uneven = true"))
    (tmp_path / "c.toml").write_text('kind = "layout"\nname = "serve"\nmodel = "uneven.toml"\ntp = 3\n')
    sides = (*sides[:3], str(tmp_path / "c.toml"))
    assert "planned by: intersect (" in run("explain", "layers.1.q", *sides).stdout
    for name, planner in (("layers.1.q", "intersect"), ("layers.1.norm", "lcm"), ("embedding", None)):
        (tensor,) = run("explain", name, *sides, "--json").object["tensors"]
        assert tensor["planned_by"] == planner
    assert "planned by" not in run("explain", "embedding", *sides).stdout


def test_explained_pieces_cover_every_destination_exactly(sides):
    for name in ("layers.0.q", "layers.1.kv", "layers.0.norm"):
        (tensor,) = run("explain", name, *sides, "--json").object["tensors"]
        wanted = {(h["rank"], str(box)): box for h in tensor["destination"] for box in h["boxes"]}
        moved: dict[int, set[tuple[int, ...]]] = {}
        for piece in tensor["transfers"]:
            cells = moved.setdefault(piece["target"], set())
            new = _cells(piece["box"])
            assert not cells & new, name
            cells |= new
        for (rank, _), box in wanted.items():
            assert moved[rank] == _cells(box)


def _cells(box: list[list[int]]) -> set[tuple[int, ...]]:
    cells: set[tuple[int, ...]] = {()}
    for low, high in box:
        cells = {(*cell, i) for cell in cells for i in range(low, high)}
    return cells


def test_explain_of_interleaved_heads_against_the_real_examples():
    ran = run("explain", "model.layers.21.self_attn.k_proj.weight", *BOTH, "--rank", "64")
    assert ran.status == 0
    assert "into rank 64:" in ran.stdout
    assert "into rank 65:" not in ran.stdout
    assert re.search(r"from rank 16 .*\[0:128, 0:8192\]  2\.1 MB", ran.stdout)
    assert re.search(r"from rank 17 .*\[128:256, 0:8192\]  2\.1 MB", ran.stdout)


def test_explain_shows_a_refused_parameter_and_exits_1(sides):
    swapped = ("--source", sides[3], "--target", sides[1])
    ran = run("explain", "embedding", *swapped)
    assert ran.status == 1
    assert "source: nobody" in ran.stdout
    assert "the plan is refused" in ran.stderr
    assert "no source has it" in ran.stderr
    assert run("explain", "embedding", *swapped, "--json").object["error"]["code"] == "plan"


# --- manifest


def test_manifest_of_a_layout_plans_the_same(sides, tmp_path):
    path = tmp_path / "written.json"
    ran = run("manifest", "--layout", sides[1], "--output", str(path))
    assert ran.status == 0
    assert "4 ranks, 4 different shards" in ran.stdout
    before, after = (run("plan", *s, "--json").object for s in (sides, ("--source", str(path), *sides[2:])))
    assert after["digest"] == before["digest"]
    assert run("manifest", "--layout", sides[1], "--json").object == json.loads(path.read_text())


class Describing:
    """A client that reports registrations."""

    def __init__(self) -> None:
        whole = Shard((WireTensor("w", (8, 4), "float32"),))
        cut = WireTensor("w", (4, 4), "float32", is_tp=True, tp_group=0)
        halves = (Shard((cut,), ((0, 1),)), Shard((cut,), ((-1, 0),)))
        self._shards = (whole, *halves)
        self._members = (
            DescribedMember("source", "", 0, 1, "n0", "h", 0),
            *(DescribedMember("target", "a", rank, 2, "n1", "h", 1 + rank) for rank in range(2)),
        )

    def describe(self, model: str) -> ModelDescription:
        assert model == "policy"
        return ModelDescription(model, self._shards, self._members)

    def close(self) -> None:
        pass


def test_manifests_of_a_registered_model_plan_offline(tmp_path):
    for name, options in (("source", ()), ("a", ("--replica", "a"))):
        path = str(tmp_path / f"{name}.json")
        assert run("manifest", "policy", *options, "--output", path, client=Describing()).status == 0
    files = ("--source", str(tmp_path / "source.json"), "--target", str(tmp_path / "a.json"))
    found = run("plan", *files, "--json").object
    assert [(pair["source"], pair["target"], pair["bytes"]) for pair in found["pairs"]] == [(0, 1, 64), (0, 2, 64)]


def test_unknown_replica_is_refused_with_the_known_ones():
    ran = run("manifest", "policy", "--replica", "b", client=Describing())
    assert (ran.status, ran.stdout) == (1, "")
    assert "replicas: a" in ran.stderr


# --- pieces


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([0, 2, 4, 6, 8, 9], "0, 2, 4, 6 and 2 more")]
)
def test_ranks_are_shown_as_ranges(ranks, text):
    assert rank_ranges(ranks) == text


def test_bars_tell_all_from_part_from_nothing():
    assert bars((8,), [0], [((0, 2),), ((2, 4),)]) == "|####....|"
    assert bars((96,), [0], [((0, 3),)]) == "|#+" + "." * 46 + "|"
    assert bars((2, 2), [0, 1], [((0, 1), (0, 2))]) == "|#.| |##|"
