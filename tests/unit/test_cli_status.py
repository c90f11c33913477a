"""refitctl status, models, plan and watch: tables at any width, refreshes, bars."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import dataclass, field

import pytest
from msgspec import structs
from rich.console import Console

from refitd.errors import PeerLost, RefitdError, RefusedError, TransportError
from refitd.protocol.reports import ModelStatus, StatusReport, SwapProgress, TargetStatus
from refitd.states import ServingState
from refitd_cli.commands.status import Screen
from refitd_cli.output import Grid, console, grid, takes_escapes
from refitd_cli.view import live_text
from tests.support.cli import STATUS, TARGET, FakeClient, Ran, answer, run

EMPTY = StatusReport(coordinator_pid=3, uptime_s=0.1, nodes=(), models=())
MANY = tuple(
    structs.replace(STATUS.models[0].targets[0], replica=f"r{i}", version=6 if i == 3 else 7) for i in range(100)
)
FLEET = structs.replace(STATUS, models=(structs.replace(STATUS.models[0], targets=MANY),))
ACTIVITY = ["pid 3", "up 75 s", "n0/box", "serving", "6, 7", "swapping to 8: stage, 1 GB of 2 GB", "worker lost"]


@pytest.mark.parametrize(
    ("words", "report", "expected"),
    [
        ("status", STATUS, ACTIVITY),
        ("status", EMPTY, ["no models"]),
        ("models", EMPTY, ["no models"]),
        ("models", STATUS, ["a: 7", "1/2"]),
        ("models", FLEET, ["6 in 1 of them, 7 in 99 of them"]),
        # the largest first
        ("plan policy", STATUS, ["trainer rank 1", "trainer rank 0"]),
        ("plan policy", STATUS, ["large", "small"]),
        ("plan policy", STATUS, ["3 kB in 3 copies over 2 rank pairs, 2 parameters"]),
        ("plan policy", STATUS, ["no target takes: rotary.inv_freq"]),
        ("plan policy --top 1", STATUS, ["the largest 1 of 2"]),
        (
            "plan policy --explain",
            STATUS,
            ["pinned windows", "no peers", "75%", "in-place", "2.0x", "not measured"],
        ),
        ("status", STATUS, ["paths of the last swap", "same GPU, one kernel", "100%"]),
        ("status", STATUS, ["workers took other paths: pinned windows"]),
    ],
)
def test_commands_show(words, report, expected):
    ran = run(FakeClient(status_result=report), *words.split())
    assert all(word in ran.stdout for word in expected)
    if words == "plan policy":
        assert [*map(ran.stdout.index, expected)] == sorted(map(ran.stdout.index, expected))
    assert words != "plan policy --top 1" or "trainer rank 0" not in ran.stdout


def test_json_has_everything_whatever_a_table_leaves_out():
    assert run(FakeClient(status_result=EMPTY), "models", "--json").object == {"models": []}
    assert len(run(FakeClient(), "plan", "policy", "--top", "1", "--json").object["pairs"]) == 2


def test_status_shows_the_last_events_of_swaps_and_targets_where_they_are_asked_for():
    lines = [line.strip() for line in run(FakeClient(), "status", "--events").stdout.splitlines()]
    assert lines[lines.index("swap s3 to version 8, running:") + 1] == STATUS.models[0].swap_events[0]
    told = f"replica {TARGET.replica!r} rank {TARGET.rank}: staging swap s3, serving version 7"
    assert lines[lines.index(told) + 1] == TARGET.events[0]
    assert "StageBegan" not in run(FakeClient(), "status").stdout
    (target,) = run(FakeClient(), "status", "--json").object["models"][0]["targets"]
    assert (target["step"], target["events"]) == (TARGET.step, list(TARGET.events))


def row(ran: Ran, start: str) -> list[str]:
    """The cells of the one table row that starts like this."""
    (line,) = [line for line in ran.stdout.splitlines() if line.strip().startswith(start)]
    return line.split()


def test_status_shows_where_nodes_are_reached_and_what_runs_there():
    found = row(run(FakeClient(), "status"), "n0 ")
    assert found[:5] == ["n0", "connected", "box", "10.0.0.7", "2"] and found[8:11] == ["2", "3", "6"], found
    assert "shm, gloo" in run(FakeClient(), "status").stdout
    (node,) = run(FakeClient(), "status", "--json").object["nodes"]
    assert (node["address"], node["services"]) == ("10.0.0.7", ["shm", "gloo"])


def test_status_shows_links_and_how_fast_they_were():
    ran = run(FakeClient(), "status")
    assert row(ran, "policy ") == ["policy", "n0", "->", "n1", "gloo", "2", "3", "GB", "up", "2.00", "GB/s"]
    assert row(ran, "draft ") == ["draft", "n1", "->", "n0", "gloo", "0", "1", "kB", "down", "-"]
    link = run(FakeClient(), "status", "--json").object["links"][0]
    assert (link["state"], link["lanes"], link["bytes"], link["seconds"]) == ("up", 2, 3_000_000_000, 1.5)
    alone = structs.replace(STATUS, links=())
    assert "links" not in run(FakeClient(status_result=alone), "status").stdout


# --- Tables at any width: numbers stay whole, names keep their ends, a fleet fits a small terminal. -----


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


@pytest.mark.parametrize(("columns", "most"), [("60", 60), ("100", 100), ("1", 30), ("much", 120), ("0", 120)])
def test_piped_tables_follow_columns_and_have_120_without(monkeypatch, columns, most):
    monkeypatch.setenv("COLUMNS", columns)
    long = structs.replace(TARGET, replica="vllm-rollout-worker-with-a-rather-long-name-of-its-own-in-us-east-1-pool-b")
    status = structs.replace(STATUS, models=(structs.replace(STATUS.models[0], targets=(long,)),))
    lines = run(FakeClient(status_result=status), "status").stdout.splitlines()
    tables = [line for line in lines if not line.startswith(("model", "coordinator", "workers took"))]
    assert max(map(len, tables)) <= most


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("variable", "coloured"), [("", True), ("1", False)])
def test_no_color_means_no_escape_codes(monkeypatch, variable, coloured):
    monkeypatch.setenv("NO_COLOR", variable)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stdout", found := Terminal())
    console().print(GRID)
    assert ("\x1b[" in found.getvalue()) == coloured
    assert takes_escapes(found) == coloured


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


# --- refitctl watch: refreshes, waits for a daemon, and draws running swaps. ----------------------------


@dataclass
class Restarted(FakeClient):
    """A client that returns each status of the script in turn, then repeats the last one."""

    script: list[StatusReport | RefitdError] = field(default_factory=list)

    def status(self):
        return answer(self.script.pop(0) if len(self.script) > 1 else self.script[0])

    def connects(self) -> int:
        return sum(what == "connect" for what, *_ in self.asked)


def watch(client: FakeClient, *arguments: str) -> Ran:
    return run(client, "watch", "--interval", "0.1", *arguments)


def test_watch_prints_what_status_prints_at_every_refresh():
    client = Restarted(script=[STATUS])
    ran = watch(client, "--count", "3")
    assert (ran.status, ran.stderr, client.connects(), client.closed) == (0, "", 1, True)
    once = run(FakeClient(), "status").stdout
    assert ran.stdout.count(once) == 3


def test_watch_prints_an_object_a_line():
    later = structs.replace(STATUS, uptime_s=76.0)
    ran = watch(Restarted(script=[STATUS, later]), "--count", "2", "--json")
    objects = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [found["uptime_s"] for found in objects] == [75.0, 76.0]
    assert objects[0] == run(FakeClient(), "status", "--json").object


def test_watch_of_a_model_leaves_the_others_out():
    draft = structs.replace(STATUS.models[0], model="draft")
    both = structs.replace(STATUS, models=(*STATUS.models, draft))
    (found,) = (json.loads(watch(FakeClient(status_result=both), "draft", "--count", "1", "--json").stdout),)
    assert [model["model"] for model in found["models"]] == ["draft"]
    assert [(link["model"], link["source"]) for link in found["links"]] == [("draft", "n1")]
    assert "no model 'drift'" in watch(FakeClient(status_result=both), "drift", "--count", "1").stdout


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_watch_waits_for_a_daemon_that_is_restarted(options):
    gone = PeerLost("the refitd daemon of node n0 has ended")
    client = Restarted(script=[STATUS, gone, gone, TransportError("no daemon runs"), STATUS, gone, STATUS])
    ran = watch(client, "--count", "3", *options)
    assert (ran.status, client.connects()) == (0, 5)
    assert ran.stderr == 2 * "waiting for the daemon: the refitd daemon of node n0 has ended\n"
    if options:
        assert len([json.loads(line) for line in ran.stdout.splitlines()]) == 3


def test_watch_gives_up_on_a_daemon_that_stays_away():
    started = time.monotonic()
    ran = watch(Restarted(script=[STATUS, PeerLost("it has ended")]), "--wait", "0.3", "--json")
    assert time.monotonic() - started < 10
    status, error = map(json.loads, ran.stdout.splitlines())
    assert (ran.status, status["coordinator_pid"], error["error"]["code"]) == (1, 3, "transport")
    assert error["error"]["message"] == "the daemon has not come back within 0.3 s: it has ended"


def test_watch_ends_with_any_other_error():
    ran = watch(Restarted(script=[STATUS, RefusedError("not you")]))
    assert (ran.status, ran.stderr) == (1, "refitctl: not you\n")


def test_ctrl_c_is_how_a_watch_ends():
    client = Restarted(script=[STATUS, KeyboardInterrupt()])
    assert (watch(client).status, client.closed) == (0, True)


def test_watch_on_a_terminal_draws_bars_of_running_swaps_until_they_end():
    out = io.StringIO()
    screen = Screen(Console(file=out, force_terminal=True, width=160, height=50), None, 1.0)

    def drawn() -> str:
        text = out.getvalue()
        out.seek(0)
        out.truncate()
        return text

    idle = structs.replace(STATUS, models=(structs.replace(STATUS.models[0], swap=None),))
    with screen.live:
        screen.show(STATUS)
        text = drawn()
        assert all(word in text for word in ("policy v8: stage", "1.0/2.0 GB", "serving"))
        assert "?" not in re.sub(r"\x1b\[[?\d;]*\w", "", text)
        screen.show(idle)
        text = drawn()
        assert "serving" in text
        assert "policy v8" not in text
        screen.show(STATUS)
        drawn()
        screen.wait(TransportError("it has ended [again]"))
        text = drawn()
        assert "waiting for the daemon: it has ended [again]" in text
        assert "serving" in text
        assert "policy v8" not in text
