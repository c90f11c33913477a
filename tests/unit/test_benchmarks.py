"""scripts/bench: names, JSON, selection of cases for a machine, and correct figures."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import machine, models, swap_report
from benchmarks import mxfp8 as mxfp8_benchmark
from benchmarks import plan as plan_benchmark
from benchmarks import swap as swap_benchmark
from benchmarks.engines.__main__ import _cases, _chosen
from benchmarks.swap_case import CHECKPOINT, SLOW, SLOW_ROUNDS, Case
from benchmarks.swap_model import Layout, Tensor, held, llama_like, traffic
from refitd.describe.layout import elements
from refitd.offline.layouts import world_size
from refitd.plan.build import plan_copies
from refitd.plan.cost import traffic_of

ROOT = Path(__file__).parents[2]
CASES = [(model, ranks) for model in models.MODELS for ranks in models.SIZES]


@pytest.fixture(scope="module")
def small():
    case = models.small_case()
    return case, plan_benchmark.registrations(case)


def test_benchmarks_start_without_torch():
    code = "import sys, benchmarks.__main__, benchmarks.plan; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.strip() == "False"


def test_no_name_runs_all_and_one_failure_does_not_hide_the_others(monkeypatch, capsys):
    def broken(json_output):
        raise RuntimeError("no such device")

    monkeypatch.setattr(bench, "BENCHMARKS", {"broken": "benchmarks.machine", "plan": "benchmarks.plan"})
    monkeypatch.setattr(machine, "run", broken, raising=False)
    monkeypatch.setattr(plan_benchmark, "run", lambda json_output: {"benchmark": "plan"})
    assert bench.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["plan"] == {"benchmark": "plan"}
    assert "no such device" in found["broken"]["error"]


def test_quick_goes_to_benchmarks_that_have_such_a_form_only(monkeypatch, capsys):
    monkeypatch.setattr(bench, "BENCHMARKS", {name: bench.BENCHMARKS[name] for name in ("plan", "swap")})
    monkeypatch.setattr(swap_benchmark, "run", lambda json_output, quick=False: {"quick": quick})
    monkeypatch.setattr(plan_benchmark, "run", lambda json_output: {"quick": None})
    monkeypatch.setattr(bench, "BENCHMARKS", {"plan": "benchmarks.plan", "swap": "benchmarks.swap"})
    assert bench.main(["--json", "--quick"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1]) == {"plan": {"quick": None}, "swap": {"quick": True}}
    assert said.err.count("has no quick form") == 1


@pytest.fixture
def kept_figures(monkeypatch, tmp_path):
    """A results folder whose swap.json was written here; no case is measured."""
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    monkeypatch.setenv(machine.RECORD, "1")
    monkeypatch.setattr(swap_benchmark, "_measure", lambda group: [{"name": case.name, "new": True} for case in group])
    monkeypatch.setattr(swap_benchmark.swap_report, "markdown", lambda results: "")
    cases = [{"name": case.name, "new": False} for group in swap_benchmark.groups_of() for case in group]
    path = tmp_path / "swap.json"
    path.write_text(json.dumps({"machine": machine.describe(), "cases": cases, "ratios": [], "small": {}}))
    return path


def test_only_with_a_pattern_that_matches_no_case_is_an_error_and_writes_nothing(kept_figures, capsys):
    before = kept_figures.read_text()
    with pytest.raises(SystemExit) as caught:
        bench.main(["swap", "--only", "TP3*", "--json"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "no case matches 'TP3*'" in said
    assert "TP2 -> PP2" in said
    assert kept_figures.read_text() == before


def test_without_record_figures_of_any_machine_are_printed_and_none_is_stored(kept_figures, monkeypatch, capsys):
    kept_figures.write_text('{"machine": {"cpu": "another"}}')
    monkeypatch.delenv(machine.RECORD)
    monkeypatch.setattr(swap_benchmark.swap_report, "show", lambda results: None)
    assert bench.main(["swap", "--only", "*, not verified", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cases"]) == 2
    assert kept_figures.read_text() == '{"machine": {"cpu": "another"}}'


def test_only_measures_the_cases_that_it_names_and_prints_their_figures(monkeypatch, capsys):
    def run(json_output, cases=machine.EVERY):
        return {"measured": [name for name in ("small", "large") if name in cases]}

    monkeypatch.setattr(bench, "BENCHMARKS", {"a": "benchmarks.machine", "soak": "benchmarks.machine"})
    monkeypatch.setattr(machine, "run", run, raising=False)
    assert bench.main(["a", "--only", "sm*"]) == 0
    assert json.loads(capsys.readouterr().out) == {"measured": ["small"]}
    for words, said in (
        (["a", "--only", "?"], "no case matches '?'; there are: small; large"),
        (["--only", "small"], "for one benchmark"),
        (["a", "--only", "small", "--record"], "without --only"),
    ):
        with pytest.raises(SystemExit):
            bench.main(words)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(bench.BENCHMARKS))
def test_every_benchmark_has_cases_to_choose_or_is_one(name):
    source = (ROOT / bench.BENCHMARKS[name].replace(".", "/")).with_suffix(".py").read_text()
    assert "cases: machine.Cases" in source or name == "checkpoint"


def test_only_replaces_the_cases_it_names_and_those_measured_with_them(kept_figures):
    assert bench.main(["swap", "--only", "*, not verified", "--json"]) == 0
    new = [case["name"] for case in json.loads(kept_figures.read_text())["cases"] if case["new"]]
    assert new == ["Verified or not, TP2 -> TP4, verified", "Verified or not, TP2 -> TP4, not verified"]


@pytest.mark.parametrize("changed", [{"cores": 4096}, {"packages": {}}, {"kernel": "2.4"}])
def test_figures_of_another_machine_are_never_mixed_with_new_ones(kept_figures, capsys, changed):
    kept = json.loads(kept_figures.read_text())
    kept["machine"] |= changed
    kept_figures.write_text(json.dumps(kept))
    with pytest.raises(SystemExit) as caught:
        bench.main(["swap", "--only", "TP2 -> TP4"])
    assert caught.value.code == 2
    assert f"another machine ({next(iter(changed))}: " in capsys.readouterr().err
    assert json.loads(kept_figures.read_text()) == kept


@pytest.mark.parametrize(("model", "ranks"), [*CASES, *itertools.product(models.HARD, models.HARD_SIZES)])
def test_cases_have_as_many_ranks_as_they_say(model, ranks):
    case = models.case(model, ranks)
    assert world_size(case.source) + case.engines * world_size(case.engine) == ranks
    assert [first for _, first in case.worlds()][-1] == ranks - world_size(case.engine)


def test_groups_hold_their_rank_and_partition_the_world():
    case = models.case("deepseek-v3", 256)
    for layout in (case.source, case.engine):
        for name in models.groups(layout, 0):
            found = {models.groups(layout, index)[name] for index in range(world_size(layout))}
            assert sorted(rank for group in found for rank in group) == list(range(world_size(layout))), name
            assert all(index in models.groups(layout, index)[name] for index in range(world_size(layout)))


def test_what_is_received_plans_everything_the_engines_hold(small):
    case, received = small
    plan = plan_copies(plan_benchmark.rosters_from(received))
    held = [m for index in range(world_size(case.engine)) for m in models.registered(case.engine, index)]
    assert traffic_of(plan).total_bytes == case.engines * sum(elements(m.shape) * m.element_size for m in held)


def test_a_case_measures_itself():
    result = plan_benchmark.measure(models.small_case())
    assert result["cpu_s"] >= result["plan_cpu_s"] > 0
    assert result["copies"] > 0
    assert result["sender_max_over_mean"] >= 1
    json.dumps(result)


def test_cases_that_would_not_fit_are_left_out_with_the_reason():
    case = {"model": "m", "ranks": 64, "wall_s": 50.0, "peak_rss_bytes": 2**30, "rss_before_bytes": 0}
    assert plan_benchmark.why_not([case], [], "m", 256, 500.0).startswith("about 200 s are expected")
    assert plan_benchmark.why_not([case], [], "m", 256, -1.0).startswith("the time for all cases")
    quick = {**case, "wall_s": 1.0}
    assert plan_benchmark.why_not([quick], [], "m", 1024, 500.0) == "about 16 GiB are expected"
    assert plan_benchmark.why_not([quick], [], "m", 128, 500.0) == ""
    left_out = [{"model": "m"}]
    assert plan_benchmark.why_not([quick], left_out, "m", 128, 500.0) == "a smaller one was left out"


def test_results_in_the_repository_are_complete():
    report = json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())
    assert report["machine"]["cpu"]
    seen = {(case["model"], case["ranks"]) for case in report["cases"]}
    seen |= {(case["model"], case["ranks"]) for case in report["left_out"]}
    assert seen == set(CASES)
    assert (ROOT / "benchmarks" / "results" / "plan.md").read_text().count("\n| ") == len(report["cases"]) + 2


CUTS = [Layout("tp", 1), Layout("tp", 2), Layout("tp", 4), Layout("pp", 2), Layout("fsdp", 3), Layout("fsdp", 7)]


@pytest.mark.parametrize("layout", CUTS)
def test_ranks_of_a_swap_case_hold_everything(layout):
    model = llama_like(3, 64, 96)
    for tensor in model:
        shards = [s for rank in range(layout.world) for s in held(model, layout, rank) if s.tensor == tensor]
        spans = [span for shard in shards for span in shard.spans]
        is_replicated = layout.kind == "tp" and tensor.dim is None
        want = list(range(tensor.shape[shards[0].dim])) * (layout.world if is_replicated else 1)
        assert sorted(row for start, stop in spans for row in range(start, stop)) == sorted(want)


def test_gate_and_up_are_cut_each_on_its_own():
    fc1 = Tensor("fc1", (8, 4), 0, 0, is_gated=True)
    assert [held([fc1], Layout("tp", 2), rank)[0].spans for rank in (0, 1)] == [((0, 2), (4, 6)), ((2, 4), (6, 8))]


@pytest.mark.parametrize("target", CUTS)
@pytest.mark.parametrize("source", CUTS)
def test_peers_move_as_much_as_the_targets_hold(source, target):
    model = tuple(llama_like(3, 64, 96))
    moved = traffic(model, source, target)
    assert 2 * sum(moved.values()) == Case("c", model, source, target, (), 1).nbytes
    assert {src for src, _ in moved} <= set(range(source.world))
    assert {dst for _, dst in moved} == set(range(target.world))


def test_swap_cases_are_the_ones_that_the_targets_are_set_for():
    groups = swap_benchmark.groups_of()
    found = {case.name: case for group in groups for case in group}
    assert len(found) == sum(map(len, groups)) == 12
    tiny = found.pop("100,000 tiny tensors, TP1 -> TP1")
    assert (len(tiny.model), tiny.nbytes) == (100_000, 6_400_000)
    large = found.pop("TP2 -> TP4, large")
    assert 3.8e9 < large.nbytes < 4.2e9 and large.needed_bytes + (2 << 30) < 18.9 * 2**30
    assert all(0.9e9 < case.nbytes < 1.1e9 for case in found.values())
    assert {name for name, case in found.items() if CHECKPOINT in case.ways} == {"TP2 -> TP4", "TP2 -> PP2"}
    assert [len(case.model) for case in groups[5]] == [2000, 20]
    assert all(case.nbytes < 1e9 for group in swap_benchmark.groups_of(quick=True) for case in group)


def test_ratios_are_taken_round_by_round_and_ways_may_be_left_out_of_rounds():
    rounds = [{"memcpy": 1.0, "swap": 2.0, "gather": 30.0}, {"memcpy": 2.0, "swap": 6.0}, {"memcpy": 4.0, "swap": 8.0}]
    found = swap_report.summary(rounds, 10**9)
    assert list(found) == ["memcpy", "swap", "gather"]
    assert found["swap"]["memcpys"] == 2 and found["swap"]["max_memcpys"] == 3 and found["swap"]["median_s"] == 6
    assert found["gather"]["rounds"] == 1 and found["gather"]["memcpys"] == 30
    assert SLOW_ROUNDS >= 3 and set(SLOW) < set(swap_report.WAYS)


def test_swap_results_are_shown_with_what_was_left_out(capsys):
    ways = swap_report.summary([{"memcpy": 1.0, "swap": 2.0}], 10**9)
    case = {"name": "A -> B", "bytes": 10**9, "tensors": 5}
    results = {
        "cases": [{**case, "ways": ways, "worker_bytes": 20 << 20, "used_bytes": 5 << 30}, {**case, "left_out": "why"}],
        "ratios": [{"name": "many against few", "ratio": 1.06}],
        "small": {
            "swaps": 500,
            "bytes": 10**6,
            **dict.fromkeys(("median_ms", "stage_median_ms", "commit_median_ms", "p99_ms", "max_ms"), 7.5),
        },
        "machine": machine.describe(),
    }
    text = swap_report.markdown(results)
    assert "| refitd swap, whole | 1 | 2 | 0.5 | 2 | 2 | 2 |" in text
    assert "worker memory 20 MiB" in text and "Left out: why." in text and "many against few: 1.06 times" in text
    swap_report.show(results)
    assert "p99 7.5 ms" in capsys.readouterr().out


def test_mxfp8_ways_take_turns_after_one_round_to_warm_up():
    ticks = iter(range(100))
    done = []
    ways = {"memcpy": lambda: done.append("a"), "slow": lambda: done.append("b")}
    rounds = mxfp8_benchmark.in_turns(ways, 2, lambda: float(next(ticks)))
    assert done == ["a", "b"] * 3 and rounds == [{"memcpy": 1.0, "slow": 1.0}] * 2


def test_mxfp8_ratios_are_taken_round_by_round():
    rounds = [
        {"memcpy": 1.0, "x": 2.0, "other": 8.0},
        {"memcpy": 2.0, "x": 6.0, "other": 6.0},
        {"memcpy": 1.0, "x": 3.0, "other": 6.0},
    ]
    memcpy, x, other = mxfp8_benchmark.summary(rounds, 6 * 10**9, "memcpy", ["other", "absent"])
    assert (x["median_s"], x["gb_per_s"], x["units"], x["times other"]) == (3.0, 2.0, 3.0, 2.0)
    assert memcpy["units"] == 1 and other["times other"] == 1 and "times absent" not in x


def test_a_part_of_the_engines_is_chosen_by_a_pattern_or_by_how_their_rows_begin():
    cases = _cases("tiny", 3)
    assert _chosen(cases, "*") == [*cases]
    assert _chosen(cases, "llama-tp2-*") == _chosen(cases, "llama TP2") == ["llama-tp2-driven", "llama-tp2-follow"]
    assert _chosen(cases, "llama TP1, follow") == ["llama-tp1-follow"] and _chosen(cases, "minilm") == ["minilm"]
    assert not _chosen(cases, "gpt")
