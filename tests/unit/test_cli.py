"""Exit statuses, JSON output and errors of refitctl and refitd; swap, rollback, history and verify."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import click
import pytest
from click.testing import CliRunner
from msgspec import structs

from refitd.errors import PlanError, RefitFailed, RefusedError, TransportError
from refitd.protocol.reports import (
    Crossing,
    Difference,
    HistoryEntry,
    HistoryReport,
    MemberProof,
    SourceReport,
    SwapFailed,
    SwapReport,
    VerifyReport,
)
from refitd.states import SwapOutcome
from refitd_cli import output
from refitd_cli.control import COMMANDS
from refitd_cli.control import main as refitctl
from refitd_cli.daemon import main as refitd
from tests.support.cli import ABORTED, COMMITTED, FakeClient, run


def leaves(group: click.Group, *before: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command, without the command groups."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from leaves(command, *before, name)
        else:
            yield (*before, name)


COMMANDS_OF_THE_DAEMON: dict[str, tuple[str, ...]] = {
    "swap": ("swap", "policy"),
    "status": ("status",),
    "watch": ("watch", "--count", "1"),
    "models": ("models",),
    "plan": ("plan", "policy"),
    "abort": ("abort", "policy"),
    "verify": ("verify", "policy"),
}
ALL = pytest.mark.parametrize("arguments", COMMANDS_OF_THE_DAEMON.values(), ids=COMMANDS_OF_THE_DAEMON.keys())


@ALL
def test_success_exits_0_prints_one_object_and_leaves_the_daemon(arguments):
    client = FakeClient()
    ran = run(client, *arguments, "--address", "/run/elsewhere")
    assert (ran.status, ran.stderr, client.closed) == (0, "", True) and ran.stdout
    assert ("connect", "/run/elsewhere") in client.asked
    found = run(FakeClient(), *arguments, "--json")
    assert found.status == 0 and found.object and "error" not in found.object


@ALL
def test_daemon_that_does_not_run_is_one_message_or_an_error_object_and_exit_1(arguments):
    ran = run(TransportError("no daemon runs in /run/refitd; start one"), *arguments)
    expected = "refitctl: no daemon runs in /run/refitd; start one\n"
    assert (ran.status, ran.stdout, ran.stderr) == (1, "", expected)
    ran = run(TransportError("no daemon runs"), *arguments, "--json")
    error = {"code": "transport", "message": "no daemon runs", "causes": {}}
    assert (ran.status, ran.object, ran.stderr) == (1, {"error": error}, "")


@pytest.mark.parametrize("arguments", [("status",), ("status", "--json")])
def test_a_package_of_an_extra_that_is_missing_is_named_with_the_extra(arguments):
    lacks = ModuleNotFoundError("No module named 'torch'", name="torch")
    ran = run(lacks, *arguments)
    assert ran.status == 1 and "`pip install 'refitd[torch]'` brings it" in ran.stdout + ran.stderr
    with pytest.raises(ModuleNotFoundError):
        run(ModuleNotFoundError("No module named 'refitd.nosuch'", name="refitd.nosuch"), *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("swap",),
        ("swap", "policy", "--version", "-1"),
        ("swap", "policy", "--timeout", "0"),
        ("fly",),
        ("plan", "p", "-z"),
        ("watch", "--interval", "0"),
    ],
)
def test_wrong_command_lines_exit_2_in_words_and_in_json(arguments):
    ran = run(FakeClient(), *arguments)
    assert (ran.status, ran.stdout) == (2, "")
    assert "Usage" in ran.stderr
    ran = run(FakeClient(), *arguments, "--json")
    assert (ran.status, ran.object["error"]["code"]) == (2, "usage")


def test_wrong_values_are_told_in_plain_words():
    for words, said in (
        (("swap", "p", "--version", "x"), "'x' is no whole number"),
        (("dashboard", "--port", "99999"), "99999 is not in 0..65535"),
        (("swap", "p", "--timeout", "-3"), "-3.0 is not more than 0"),
        (("swap",), "MODEL is missing"),
        (("simulate", "x"), "--cluster is missing"),
        (("status", "a", "b"), "b is one argument too many"),
    ):
        assert said in run(FakeClient(), *words).stderr


def test_every_command_has_help_and_json():
    runner = CliRunner()
    for words in leaves(refitctl):
        result = runner.invoke(refitctl, [*words, "--help"])
        assert result.exit_code == 0, words
        assert "--json" in result.stdout, words
    listed = runner.invoke(refitctl, ["--help"]).stdout
    assert "..." not in listed.partition("Commands:")[2]
    assert all(f"\n  {name}" in listed for name in COMMANDS)


@pytest.mark.parametrize("command", ["serve", "coordinator"])
@pytest.mark.parametrize(("text", "named"), [("[node]\nwrokers = 1\n", "wrokers"), (None, "cannot be read")])
def test_refitd_with_a_bad_configuration_exits_2_and_names_it(tmp_path, command, text, named):
    path = tmp_path / "refitd.toml"
    if text is not None:
        path.write_text(text)
    result = CliRunner().invoke(refitd, [command, "--config", str(path)], prog_name="refitd")
    assert (result.exit_code, result.stdout) == (2, "")
    assert named in result.stderr
    assert str(path) in result.stderr


def test_no_option_takes_nan_for_a_number():
    options = [
        option
        for words in leaves(refitctl)
        for option in command_of(refitctl, words).params
        if isinstance(option.type, click.types.FloatParamType)
    ]
    assert len(options) >= 9
    for option in options:
        with pytest.raises(click.BadParameter, match="not a number"):
            option.type.convert("nan", option, None)


def command_of(group: click.Group, words: tuple[str, ...]) -> click.Command:
    command: click.Command = group
    for word in words:
        found = command.get_command(click.Context(command), word)
        assert found is not None
        command = found
    return command


def test_refitd_flags_stand_above_the_file(tmp_path):
    path = tmp_path / "refitd.toml"
    path.write_text("[node]\nworkers = 2\n")
    result = CliRunner().invoke(refitd, ["serve", "--config", str(path), "--workers", "65"])
    assert result.exit_code == 2
    assert "workers" in result.stderr


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (output.size, 0, "0 B"),
        (output.size, 999, "999 B"),
        (output.size, 1_073_741_824, "1.07 GB"),
        (output.size, 999_900_000, "1 GB"),
        (output.size, 5 * 10**12, "5.00 TB"),
        (output.duration, 0.00085, "850 us"),
        (output.duration, 0.0123, "12.3 ms"),
        (output.duration, 1.234, "1.23 s"),
        (output.duration, 75.2, "75 s"),
        (lambda nbytes: output.rate(nbytes, 0.0), 10, "-"),
    ],
)
def test_units_are_readable(function: Callable[[float], str], value, text):
    assert function(value) == text


# --- refitctl swap, rollback, history and verify: the calls that reach the client, and the printed outcomes.


def failed(report: SwapReport) -> SwapFailed:
    return SwapFailed("version 8 did not go live", {"b/1": "worker pid 99 was killed"}, report)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("swap policy --version 7 --timeout 2.5", ("swap", "policy", 7, 2.5)),
        ("swap policy", ("swap", "policy", None, None)),  # the coordinator chooses
        ("swap policy --queue", ("queue", "policy", None, None)),
        ("rollback policy", ("rollback", "policy", None, None)),
        ("rollback policy --version 3 --timeout 2", ("rollback", "policy", 3, 2)),
        ("abort policy --reason boredom", ("abort", "policy", "boredom")),
    ],
)
def test_arguments_reach_the_client(words, asked):
    client = FakeClient()
    assert run(client, *words.split()).status == 0
    assert [found for found in client.asked if found[0] != "connect"] == [asked]


PLANLESS = SwapReport("s", "policy", 8, "aborted", phase="plan", reason="no source holds 'lm_head.weight'")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (failed(PLANLESS), r".*plan: no source holds 'lm_head\.weight'.*"),
        (RefitFailed("the coordinator is gone"), r"refitctl: the coordinator is gone\n"),
        (failed(COMMITTED), ".*"),  # it was raised, so it failed
    ],
)
def test_a_swap_that_raises_exits_1_and_says_why(result, said):
    ran = run(FakeClient(swap_result=result), "swap", "policy")
    assert ran.status == 1 and re.fullmatch(said, ran.stderr, re.DOTALL)


@pytest.mark.parametrize(
    ("command", "result", "code", "causes"),
    [
        ("swap", RefusedError("no model 'policy'; known: p"), "refused", []),
        (
            "swap",
            RefitFailed("two", {"3": "peer lost", "5": "deadline"}),
            "refit-failed",
            ["3: peer lost", "5: deadline"],
        ),
        ("plan", PlanError(["a: missing", "b: twice"]), "plan", ["0: a: missing", "1: b: twice"]),
    ],
)
def test_an_error_in_json_has_its_code_and_all_causes(command, result, code, causes):
    ran = run(FakeClient(**{f"{command}_result": result}), command, "policy", "--json")
    error = ran.object["error"]
    assert (ran.status, error["code"]) == (1, code)
    assert [f"{who}: {cause}" for who, cause in error["causes"].items()] == causes


def test_history_shows_how_swaps_ended_and_which_are_open():
    client = FakeClient()
    found = run(client, "history", "policy", "--limit", "5")
    assert ("history", "policy", 5) in client.asked
    lines = found.stdout.splitlines()
    assert any("s2" in line and "decided" in line and "1970-01-02" in line for line in lines)
    assert any("s1" in line and "committed" in line for line in lines)
    assert json.loads(run(client, "history", "--json").stdout)["swaps"][1]["report"]["outcome"] == "committed"


def test_what_crossed_and_what_had_changed_is_shown():
    crossing = Crossing(2_000_000_000, 31_000_000, 1_600_000_000, 16_320_000)
    report = structs.replace(COMMITTED, crossing=crossing)
    ran = run(FakeClient(swap_result=report), "swap", "policy")
    assert "between nodes: 31 MB for 2 GB; 1.02% of 1.6 GB had changed since the version before" in ran.stdout
    entry = HistoryEntry("s1", "policy", 7, SwapOutcome.COMMITTED, 0.0, report=report)
    client = FakeClient(history_result=HistoryReport(swaps=(entry,)))
    shown = run(client, "history", "policy").stdout
    assert "31 MB" in shown and "1.02%" in shown
    first = structs.replace(COMMITTED, crossing=Crossing(2_000_000_000, 2_000_000_100))
    assert "between nodes: 2 GB for 2 GB, sent whole" in run(FakeClient(swap_result=first), "swap", "policy").stdout
    assert "between nodes" not in run(FakeClient(), "swap", "policy").stdout


def test_committed_swap_shows_members_and_the_summary():
    ran = run(FakeClient(), "swap", "policy")
    for expected in (
        "version 7 is live on 2 ranks",
        "2 GB in 300 copies",
        "250 digests verified",
        "8.00 GB/s",
        "stage 250.0 ms",
        "commit 100.0 ms",
        "total 360.0 ms",
        "50.0 ms",
    ):
        assert expected in ran.stdout


@pytest.mark.parametrize("result", [failed(ABORTED), ABORTED], ids=["raised", "returned"])
def test_failed_swap_exits_1_and_names_rank_host_phase_and_reason(result):
    ran = run(FakeClient(swap_result=result), "swap", "policy")
    assert ran.status == 1
    (culprit,) = [line for line in ran.stderr.splitlines() if "rank" in line]
    for expected in ("rank 1 of replica b", "node n0", "host box", "phase stage", "killed by signal 9 [SIGKILL]"):
        assert expected in culprit
    assert "aborted" in ran.stdout


@pytest.mark.parametrize("result", [failed(ABORTED), ABORTED], ids=["raised", "returned"])
def test_failed_swap_in_json_has_the_report_and_the_error(result):
    ran = run(FakeClient(swap_result=result), "swap", "policy", "--json")
    assert ran.status == 1
    assert ran.object["outcome"] == "aborted"
    assert ran.object["members"][1]["state"] == "lost"
    assert ran.object["error"]["code"] == "refit-failed"


def test_a_swap_says_how_its_sources_gave_the_version():
    def given(rank: int, way: str) -> SourceReport:
        return SourceReport(rank, "n0", "box", way)

    several = structs.replace(COMMITTED, sources=(given(0, "arena"), given(1, "copied"), given(2, "arena")))
    assert "sources: 2 arena, 1 copied\n" in run(FakeClient(swap_result=several), "swap", "policy").stdout
    one = structs.replace(COMMITTED, sources=(given(0, "arena"),))
    shown = run(FakeClient(swap_result=one), "swap", "policy").stdout
    assert "sources: 1 arena" in shown
    assert run(FakeClient(swap_result=one), "swap", "policy", "--json").object["sources"][0]["way"] == "arena"


def test_verify_exits_0_only_for_what_is_proven_and_names_the_rest():
    ran = run(FakeClient(), "verify", "policy", "--timeout", "5")
    assert ran.status == 0 and "policy: proven: 1 of 1 ranks" in ran.stdout and "0123456789abcdef" in ran.stdout
    difference = Difference("layers.0.w", (96, 48), 341, 343, "[7, 5:8]", 2)
    block = Difference("layers.1.w", (96, 48), 0, 4607, "[0:96, :]")
    members = (
        MemberProof("a", 1, "n0", "box", 40, "differs", 7, "3 blocks", 10, "", 3, (difference, block)),
        MemberProof("b", 0, "n1", "rack", 41, "unknown", 7, reason="its process (pid 41) has not read its tensors"),
    )
    report = VerifyReport("policy", "differs", members, mixed=("version 7 was given to them with different bytes",))
    ran = run(FakeClient(verify_result=report), "verify", "policy")
    assert ran.status == 1
    assert "layers.0.w[7, 5:8] (of 96x48) on rank 1 of replica a on node n0 (host box, pid 40): 2 el" in ran.stderr
    assert "layers.1.w[0:96, :]" in ran.stderr and "somewhere in elements 0 to 4607" in ran.stderr
    assert "and 1 more blocks of rank 1 of replica a" in ran.stderr and "different bytes" in ran.stderr
    assert "policy: differs: 0 of 2 ranks" in ran.stderr and "pid 41" in ran.stdout
    ran = run(FakeClient(verify_result=report), "verify", "policy", "--json")
    assert ran.status == 1 and ran.object["members"][0]["differences"][0]["slice"] == "[7, 5:8]"
