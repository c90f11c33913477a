"""Tables at any width: numbers stay whole, names keep their ends, a fleet fits a small terminal."""

from __future__ import annotations

import io
import re

import pytest
from msgspec import structs
from rich.console import Console

from refitd.protocol.reports import ModelStatus, SwapProgress, TargetStatus
from refitd.states import ServingState
from refitd_cli.commands.watch import Screen
from refitd_cli.rollup import live_text
from refitd_cli.tables import Grid, grid
from tests.support.cli import STATUS, TARGET, FakeClient, run

NUMBERS = ("1,234,567", "33.6 MB", "0.98 GB/s")
GRID = grid(
    "rows", ("name", ">count", ">bytes", ">rate", "reason"), [("vllm-worker-00", *NUMBERS, "it was late, twice")]
)


def printed(part: Grid, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, emoji=False, highlight=False).print(part)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [30, 60, 61, 70, 80, 200])
def test_numbers_are_never_split(width):
    text = "\n".join(printed(GRID, width))
    assert all(number in text for number in NUMBERS)
    assert max(map(len, text.splitlines())) <= width


def test_a_table_that_does_not_fit_becomes_records():
    assert printed(GRID, 40)[:3] == ["rows", "- name    vllm-worker-00", "  count   1,234,567"]
    assert printed(GRID, 80)[1].split() == ["name", "count", "bytes", "rate", "reason"]


@pytest.mark.parametrize(("columns", "most"), [("60", 60), ("100", 100), ("1", 30), ("much", None), ("0", None)])
def test_piped_tables_follow_columns_and_are_as_wide_as_their_text_without(monkeypatch, columns, most):
    monkeypatch.setenv("COLUMNS", columns)
    long = structs.replace(TARGET, replica="vllm-rollout-worker-with-a-rather-long-name-of-its-own-in-us-east-1-pool-b")
    status = structs.replace(STATUS, models=(structs.replace(STATUS.models[0], targets=(long,)),))
    lines = run(FakeClient(status_result=status), "status").stdout.splitlines()
    tables = [line for line in lines if not line.startswith(("model", "coordinator"))]
    if most is None:
        assert any(long.replica in line and "serving" in line for line in tables)
    else:
        assert max(map(len, tables)) <= most


def fleet(replicas: int, ranks: int, name: str = "vllm-rollout-worker-us-east-1-pool-b-") -> list[TargetStatus]:
    return [
        structs.replace(TARGET, replica=f"{name}{i:03d}", rank=rank, world_size=ranks, version=37)
        for i in range(replicas)
        for rank in range(ranks)
    ]


def model(name: str, targets: list[TargetStatus]) -> ModelStatus:
    swap = SwapProgress("s", name, 37, "commit", 81 * 10**10, 81 * 10**10, 480, 511)
    return structs.replace(STATUS.models[0], model=name, live=37, live_run="", targets=tuple(targets), swap=swap)


def screen(*models: ModelStatus, width: int = 80, height: int = 24) -> list[str]:
    out = io.StringIO()
    shown = Screen(Console(file=out, force_terminal=True, width=width, height=height, color_system=None), None, 1.0)
    with shown.live:
        shown.show(structs.replace(STATUS, models=models))
        text = out.getvalue()
    return [line.rstrip() for line in re.sub(r"\x1b\[[?\d;]*\w", "", text).splitlines()]


def test_watch_of_a_fleet_with_long_names_fits_a_small_terminal_and_shows_laggards_first():
    targets = fleet(64, 8)
    targets[40 * 8 + 3] = structs.replace(targets[40 * 8 + 3], version=36, state=ServingState.WAITING)
    targets[50 * 8 : 51 * 8] = [structs.replace(t, version=35, state=ServingState.BEHIND) for t in targets[400:408]]
    del targets[10 * 8 + 7]
    lines = screen(model("llama-3.1-405b-instruct-policy-grpo-run-0042", targets))
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    (head,) = [i for i, line in enumerate(lines) if line.startswith("replica")]
    assert [line.split()[0][-3:] for line in lines[head + 2 : head + 6]] == ["010", "050", "040", "000"]
    assert "not registered: rank 7" in lines[head + 2]
    assert lines[head + 3].split()[1:] == ["8/8", "35", "behind"]
    assert lines[head + 4].endswith("waiting: rank 3")
    assert re.fullmatch(r"and \d+ more: serving", lines[-1])
    assert any("decided: 37, live on 502 of 511 ranks (8 behind, 1 waiting)" in line for line in lines)


@pytest.mark.parametrize("width", [30, 60, 80, 200])
@pytest.mark.parametrize("replicas", [0, 1, 5, 200])
def test_watch_of_several_models_shows_each_of_them(width, replicas):
    names = ("policy", "reward", "draft")
    lines = screen(*(model(name, fleet(replicas, 2)) for name in names), width=width, height=30)
    assert len(lines) <= 30 and max(map(len, lines)) <= width
    assert all(f"model {name}" in lines for name in names)


def test_status_tells_decided_from_live_and_waiting_from_behind():
    targets = fleet(1, 2)
    waiting = [structs.replace(t, version=36, state=ServingState.WAITING, staged=37) for t in targets]
    assert live_text(model("m", targets)) == "live: 37 on all 2 ranks"
    assert live_text(model("m", waiting)) == "decided: 37, live on 0 of 2 ranks (2 waiting)"
    assert live_text(model("m", [])) == "decided: 37, no engine is registered"
    assert live_text(structs.replace(model("m", targets), live=None)) == ""
    shown = run(FakeClient(status_result=structs.replace(STATUS, models=(model("m", waiting),))), "status").stdout
    assert "decided: 37, live on 0 of 2 ranks (2 waiting)" in shown
