"""scripts/bench: names, JSON, cases that fit the facts, and figures that are counted right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks import machine, models
from benchmarks import plan as plan_benchmark
from refitd.describe.layout import elements
from refitd.manifest import world_size
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


def test_one_name_prints_its_object_last(monkeypatch, capsys):
    monkeypatch.setattr(plan_benchmark, "run", lambda json_output: {"benchmark": "plan", "as_json": json_output})
    assert bench.main(["plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"benchmark": "plan", "as_json": True}


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


def test_unknown_name_is_refused():
    with pytest.raises(SystemExit) as caught:
        bench.main(["fly"])
    assert caught.value.code == 2


def test_machine_is_described():
    found = machine.describe()
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 1 << 28
    assert found["packages"]["numpy"]
    assert 0 < machine.calibrate() < 60


@pytest.mark.parametrize(("model", "ranks"), CASES)
def test_cases_have_as_many_ranks_as_they_say(model, ranks):
    case = models.case(model, ranks)
    assert world_size(case.source) + case.engines * world_size(case.engine) == ranks
    assert [first for _, first in case.worlds()][-1] == ranks - world_size(case.engine)


def test_cases_are_in_the_layouts_of_the_facts():
    assert models.case("llama-3-70b", 1024).describe() == "TP8 PP4 DP16 -> 128 x TP4"
    assert models.case("deepseek-v3", 1024).describe() == "TP4 PP16 EP32 DP8 -> 32 x TP8 EP16 DP2"
    assert models.case("qwen3-235b-a22b", 64).describe() == "TP4 EP32 DP8 -> 2 x TP8 EP16 DP2"


def test_groups_hold_their_rank_and_partition_the_world():
    case = models.case("deepseek-v3", 256)
    for layout in (case.source, case.engine):
        for name in models.groups(layout, 0):
            found = {models.groups(layout, index)[name] for index in range(world_size(layout))}
            assert sorted(rank for group in found for rank in group) == list(range(world_size(layout))), name
            assert all(index in models.groups(layout, index)[name] for index in range(world_size(layout)))


def test_every_expert_is_its_own_tensor_and_registered_with_its_groups():
    case = models.case("deepseek-v3", 64)
    found = models.registered(case.source, 5)
    experts = [m for m in found if m.is_ep]
    assert len(experts) == 58 * 8 * 2
    assert experts[0].name == "decoder.layers.3.mlp.experts.linear_fc1.weight0"
    assert experts[0].resolved_name == "decoder.layers.3.mlp.experts.linear_fc1.weight40"
    assert experts[0].expert_parallel_group_ranks == list(range(32))


def test_what_is_received_plans_everything_the_engines_hold(small):
    case, received = small
    plan = plan_copies(plan_benchmark.rosters_from(received))
    held = [m for index in range(world_size(case.engine)) for m in models.registered(case.engine, index)]
    assert traffic_of(plan).total_bytes == case.engines * sum(elements(m.shape) * m.element_size for m in held)


def test_equal_descriptions_travel_once(small):
    case, received = small
    assert len(received.ranks) == case.ranks
    assert len(received.described) < case.ranks
    assert received.wire_bytes < received.each_bytes / 10


def test_a_case_measures_itself():
    result = plan_benchmark.measure(models.small_case())
    assert result["cpu_s"] >= result["plan_cpu_s"] > 0
    assert result["copies"] > 0
    assert result["sender_max_over_mean"] >= 1
    json.dumps(result)


def test_cases_that_would_not_fit_are_left_out_with_the_reason():
    case = {"model": "m", "ranks": 64, "wall_s": 50.0, "peak_rss_bytes": 2**30, "rss_before_bytes": 0}
    assert plan_benchmark._why_not([case], [], "m", 256, 500.0).startswith("about 200 s are expected")
    assert plan_benchmark._why_not([case], [], "m", 256, -1.0).startswith("the time for all cases")
    quick = {**case, "wall_s": 1.0}
    assert plan_benchmark._why_not([quick], [], "m", 1024, 500.0) == "about 16 GiB are expected"
    assert plan_benchmark._why_not([quick], [], "m", 128, 500.0) == ""
    left_out = [{"model": "m"}]
    assert plan_benchmark._why_not([quick], left_out, "m", 128, 500.0) == "a smaller one was left out"


def test_results_in_the_repository_are_complete():
    report = json.loads((ROOT / "benchmarks" / "results" / "plan.json").read_text())
    assert report["machine"]["cpu"]
    seen = {(case["model"], case["ranks"]) for case in report["cases"]}
    seen |= {(case["model"], case["ranks"]) for case in report["left_out"]}
    assert seen == set(CASES)
    assert (ROOT / "benchmarks" / "results" / "plan.md").read_text().count("\n| ") == len(report["cases"]) + 2
