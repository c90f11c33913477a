"""refitctl and refitd: exit statuses, JSON, errors a person can act on; against a client made of memory."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from click.testing import CliRunner
from msgspec import structs
from rich.console import Console

from refitd.buffers import capacity
from refitd.copy_services import measure, registry
from refitd.copy_services.base import Capabilities
from refitd.copy_services.registry import Backend, Offer
from refitd.errors import ConfigError, PeerLost, PlanError, RefitdError, RefitFailed, RefusedError, TransportError
from refitd.protocol.reports import (
    Difference,
    HistoryEntry,
    HistoryReport,
    LinkStatus,
    MemberProof,
    MemberReport,
    ModelStatus,
    NodeStatus,
    PairTraffic,
    ParameterTraffic,
    PlanReport,
    SourceReport,
    SourceStatus,
    StatusReport,
    SwapFailed,
    SwapProgress,
    SwapReport,
    TargetStatus,
    VerifyReport,
)
from refitd_cli import checks, output
from refitd_cli.commands.watch import Screen
from refitd_cli.control import COMMANDS
from refitd_cli.control import main as refitctl
from refitd_cli.daemon import main as refitd
from refitd_cli.session import Session


def member(replica: str, rank: int, state: str, **changed) -> MemberReport:
    return MemberReport(replica=replica, rank=rank, node="n0", host="box", pid=40 + rank, state=state, **changed)


COMMITTED = SwapReport(
    swap="s1",
    model="policy",
    version=7,
    outcome="committed",
    bytes=2_000_000_000,
    copies=300,
    digests=250,
    plan_s=0.002,
    stage_s=0.25,
    commit_s=0.1,
    total_s=0.36,
    members=(
        member("a", 0, "committed", version=7, paused_s=0.05),
        member("b", 1, "committed", version=7),
    ),
)
ABORTED = SwapReport(
    swap="s2",
    model="policy",
    version=8,
    outcome="aborted",
    phase="stage",
    reason="worker lost",
    members=(
        member("a", 0, "aborted", version=7),
        member("b", 1, "lost", version=7, reason="worker pid 99 was killed by signal 9 [SIGKILL]"),
    ),
)
SOURCE = SourceStatus(
    rank=0, node="n0", host="box", pid=10, attached=True, tensors=12, bytes=500_000_000, versions=(6, 7)
)
TARGET = TargetStatus(
    replica="a",
    rank=0,
    world_size=1,
    node="n0",
    host="box",
    pid=40,
    tensors=12,
    bytes=1_000_000_000,
    state="serving",
    version=7,
    step="staging swap s3, serving version 7",
    events=("StageBegan(swap='s3', version=8, run='') -> staging swap s3, serving version 7",),
)
STATUS = StatusReport(
    coordinator_pid=3,
    uptime_s=75.0,
    nodes=(
        NodeStatus(
            "n0",
            "box",
            2,
            workers=(4, 5),
            clients=3,
            arenas=6,
            arena_bytes=3_000_000_000,
            address="10.0.0.7",
            services=("shm", "gloo"),
        ),
    ),
    models=(
        ModelStatus(
            model="policy",
            source_world_size=2,
            complete_versions=(6, 7),
            auto_swap=False,
            sources=(SOURCE,),
            targets=(TARGET,),
            swap=SwapProgress("s3", "policy", 8, "stage", bytes_done=10**9, bytes_total=2 * 10**9),
            swap_events=("0.100 s: NodeLoaded(node='n0') -> stage",),
            last_swap=ABORTED,
        ),
    ),
    links=(
        LinkStatus("policy", "n0", "n1", "gloo", lanes=2, bytes=3_000_000_000, state="up", seconds=1.5),
        LinkStatus("draft", "n1", "n0", "gloo", lanes=0, bytes=1000, state="down"),
    ),
)
PLAN = PlanReport(
    model="policy",
    digest="d1ce",
    bytes=3000,
    copies=3,
    plan_s=0.004,
    pairs=(
        PairTraffic("trainer rank 0", "a rank 0", 1000, 1),
        PairTraffic("trainer rank 1", "a rank 0", 2000, 2),
    ),
    parameters=(ParameterTraffic("small", 500, 1), ParameterTraffic("large", 2500, 2)),
    unused_sources=("rotary.inv_freq",),
)


PROVEN = VerifyReport(
    model="policy",
    outcome="proven",
    members=(
        MemberProof("a", 0, "n0", "box", 40, "proven", version=7, bytes=10**9, digest="0123456789abcdef" * 2),
        MemberProof("b", 0, "n0", "box", 41, "unknown", reason="it serves nothing"),
    ),
    seconds=0.2,
)


@dataclass
class FakeClient:
    """Answers from memory and remembers what it was asked."""

    swap_result: SwapReport | RefitdError = COMMITTED
    status_result: StatusReport | RefitdError = STATUS
    plan_result: PlanReport | RefitdError = PLAN
    abort_result: RefitdError | None = None
    verify_result: VerifyReport | RefitdError = PROVEN
    asked: list[tuple] = field(default_factory=list)
    closed: bool = False

    def swap(self, model, version=None, *, timeout=None, queue=False, on_progress=None):
        self.asked.append(("swap", model, version, timeout) if not queue else ("queue", model, version, timeout))
        return _answer(self.swap_result)

    def rollback(self, model, version=None, *, timeout=None, on_progress=None):
        self.asked.append(("rollback", model, version, timeout))
        return _answer(self.swap_result)

    def history(self, model="", limit=20):
        self.asked.append(("history", model, limit))
        return HistoryReport(
            swaps=(
                HistoryEntry(swap="s2", model="policy", version=8, state="decided", at=86400.0),
                HistoryEntry(swap="s1", model="policy", version=7, state="committed", at=0.0, report=COMMITTED),
            )
        )

    def status(self):
        return _answer(self.status_result)

    def plan(self, model):
        self.asked.append(("plan", model))
        return _answer(self.plan_result)

    def verify(self, model, *, timeout=None):
        self.asked.append(("verify", model, timeout))
        return _answer(self.verify_result)

    def abort(self, model, reason=""):
        self.asked.append(("abort", model, reason))
        return _answer(self.abort_result)

    def close(self):
        self.closed = True


def _answer(value):
    if isinstance(value, BaseException):
        raise value
    return value


@dataclass
class Ran:
    status: int
    stdout: str
    stderr: str

    @property
    def object(self) -> dict:
        """The one JSON object on stdout."""
        (line,) = self.stdout.splitlines()
        return json.loads(line)


def run(client: FakeClient | RefitdError, *arguments: str) -> Ran:
    def factory(address: str | None) -> FakeClient:
        if isinstance(client, FakeClient):
            client.asked.append(("connect", address))
        return _answer(client)

    result = CliRunner().invoke(refitctl, arguments, obj=Session(factory), prog_name="refitctl")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


def failed(report: SwapReport) -> SwapFailed:
    return SwapFailed("version 8 did not go live", {"b/1": "worker pid 99 was killed"}, report)


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
def test_success_exits_0_and_leaves_the_daemon(arguments):
    client = FakeClient()
    ran = run(client, *arguments)
    assert (ran.status, ran.stderr, client.closed) == (0, "", True)
    assert ran.stdout


@ALL
def test_json_is_one_object(arguments):
    ran = run(FakeClient(), *arguments, "--json")
    assert ran.status == 0
    assert ran.object
    assert "error" not in ran.object


@ALL
def test_address_reaches_the_client(arguments):
    client = FakeClient()
    run(client, *arguments, "--address", "/run/elsewhere")
    assert ("connect", "/run/elsewhere") in client.asked


@ALL
def test_daemon_that_does_not_run_is_one_message_and_exit_1(arguments):
    ran = run(TransportError("no daemon runs in /run/refitd; start one"), *arguments)
    expected = "refitctl: no daemon runs in /run/refitd; start one\n"
    assert (ran.status, ran.stdout, ran.stderr) == (1, "", expected)


@ALL
def test_daemon_that_does_not_run_is_an_error_object_in_json(arguments):
    ran = run(TransportError("no daemon runs"), *arguments, "--json")
    error = {"code": "transport", "message": "no daemon runs", "causes": {}}
    assert (ran.status, ran.object, ran.stderr) == (1, {"error": error}, "")


def test_swap_passes_version_and_timeout():
    client = FakeClient()
    run(client, "swap", "policy", "--version", "7", "--timeout", "2.5")
    assert ("swap", "policy", 7, 2.5) in client.asked


def test_queueing_and_going_back_reach_the_client():
    client = FakeClient()
    run(client, "swap", "policy", "--queue")
    assert run(client, "rollback", "policy").status == 0
    run(client, "rollback", "policy", "--version", "3", "--timeout", "2")
    assert [asked for asked in client.asked if asked[0] != "connect"] == [
        ("queue", "policy", None, None),
        ("rollback", "policy", None, None),
        ("rollback", "policy", 3, 2),
    ]


def test_history_shows_how_swaps_ended_and_which_are_open():
    client = FakeClient()
    found = run(client, "history", "policy", "--limit", "5")
    assert ("history", "policy", 5) in client.asked
    lines = found.stdout.splitlines()
    assert any("s2" in line and "decided" in line and "1970-01-02" in line for line in lines)
    assert any("s1" in line and "committed" in line for line in lines)
    assert json.loads(run(client, "history", "--json").stdout)["swaps"][1]["report"]["outcome"] == "committed"


def test_swap_without_options_leaves_the_choice_to_the_coordinator():
    client = FakeClient()
    run(client, "swap", "policy")
    assert ("swap", "policy", None, None) in client.asked


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
    for expected in (
        "rank 1 of replica b",
        "node n0",
        "host box",
        "phase stage",
        "killed by signal 9 [SIGKILL]",
    ):
        assert expected in culprit
    assert "aborted" in ran.stdout


@pytest.mark.parametrize("result", [failed(ABORTED), ABORTED], ids=["raised", "returned"])
def test_failed_swap_in_json_has_the_report_and_the_error(result):
    ran = run(FakeClient(swap_result=result), "swap", "policy", "--json")
    assert ran.status == 1
    assert ran.object["outcome"] == "aborted"
    assert ran.object["members"][1]["state"] == "lost"
    assert ran.object["error"]["code"] == "refit-failed"


def test_failure_without_a_culprit_shows_the_reports_reason():
    report = SwapReport("s", "policy", 8, "aborted", phase="plan", reason="no source holds 'lm_head.weight'")
    ran = run(FakeClient(swap_result=failed(report)), "swap", "policy")
    assert ran.status == 1
    assert "plan: no source holds 'lm_head.weight'" in ran.stderr


def test_failure_without_a_report_is_its_message():
    ran = run(FakeClient(swap_result=RefitFailed("the coordinator is gone")), "swap", "policy")
    assert (ran.status, ran.stderr) == (1, "refitctl: the coordinator is gone\n")


def test_a_swap_that_raised_never_exits_0_whatever_its_report_says():
    assert run(FakeClient(swap_result=failed(COMMITTED)), "swap", "policy").status == 1


def test_refused_swap_carries_its_code():
    ran = run(FakeClient(swap_result=RefusedError("no model 'p'; known: policy")), "swap", "p", "--json")
    assert (ran.status, ran.object["error"]["code"]) == (1, "refused")


def test_many_rank_failures_keep_who():
    error = RefitFailed("two ranks failed", {"3": "peer lost", "5": "deadline"})
    ran = run(FakeClient(swap_result=error), "swap", "policy", "--json")
    assert ran.object["error"]["causes"] == {"3": "peer lost", "5": "deadline"}


def test_every_violation_of_a_plan_is_a_cause():
    ran = run(FakeClient(plan_result=PlanError(["a: missing", "b: twice"])), "plan", "policy", "--json")
    assert list(ran.object["error"]["causes"].values()) == ["a: missing", "b: twice"]


def test_configuration_errors_exit_2():
    assert run(ConfigError("node.workers: 0"), "status").status == 2


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


def test_status_shows_nodes_members_and_activity():
    ran = run(FakeClient(), "status")
    for expected in (
        "pid 3",
        "up 75 s",
        "n0/box",
        "serving",
        "6, 7",
        "swapping to 8: stage, 1 GB of 2 GB",
        "worker lost",
    ):
        assert expected in ran.stdout


def test_status_shows_the_last_events_of_swaps_and_targets_where_they_are_asked_for():
    lines = [line.strip() for line in run(FakeClient(), "status", "--events").stdout.splitlines()]
    assert lines[lines.index("swap s3 to version 8, running:") + 1] == STATUS.models[0].swap_events[0]
    told = f"{TARGET.replica} rank {TARGET.rank}: staging swap s3, serving version 7"
    assert lines[lines.index(told) + 1] == TARGET.events[0]
    assert "StageBegan" not in run(FakeClient(), "status").stdout
    (target,) = run(FakeClient(), "status", "--json").object["models"][0]["targets"]
    assert (target["step"], target["events"]) == (TARGET.step, list(TARGET.events))


def test_status_of_an_empty_cluster_says_so():
    empty = StatusReport(coordinator_pid=3, uptime_s=0.1, nodes=(), models=())
    assert "no models" in run(FakeClient(status_result=empty), "status").stdout
    assert "no models" in run(FakeClient(status_result=empty), "models").stdout
    assert run(FakeClient(status_result=empty), "models", "--json").object == {"models": []}


def row(ran: Ran, start: str) -> list[str]:
    """The cells of the one table row that starts like this."""
    (line,) = [line for line in ran.stdout.splitlines() if line.strip().startswith(start)]
    return line.split()


def test_status_shows_where_nodes_are_reached_and_what_runs_there():
    assert row(run(FakeClient(), "status"), "n0 ")[:8] == ["n0", "box", "10.0.0.7", "2", "2", "3", "6", "3"]
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


@dataclass
class Restarted(FakeClient):
    """Its status is what the script says next, and after its end the last of it."""

    script: list[StatusReport | RefitdError] = field(default_factory=list)

    def status(self):
        return _answer(self.script.pop(0) if len(self.script) > 1 else self.script[0])

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
        assert all(word in text for word in ("policy v8: stage", "1.0/2.0 GB", "10.0.0.7"))
        screen.show(idle)
        text = drawn()
        assert "10.0.0.7" in text
        assert "policy v8" not in text
        screen.show(STATUS)
        drawn()
        screen.wait(TransportError("it has ended [again]"))
        text = drawn()
        assert "waiting for the daemon: it has ended [again]" in text
        assert "10.0.0.7" in text
        assert "policy v8" not in text


def test_models_shows_what_each_replica_serves():
    ran = run(FakeClient(), "models")
    assert "a: 7" in ran.stdout
    assert "1/2" in ran.stdout


def test_plan_shows_largest_first_and_totals():
    ran = run(FakeClient(), "plan", "policy")
    assert ran.stdout.index("trainer rank 1") < ran.stdout.index("trainer rank 0")
    assert ran.stdout.index("large") < ran.stdout.index("small")
    assert "3 kB in 3 copies over 2 rank pairs, 2 parameters" in ran.stdout
    assert "no target takes: rotary.inv_freq" in ran.stdout


def test_plan_top_cuts_the_tables_but_not_the_json():
    ran = run(FakeClient(), "plan", "policy", "--top", "1")
    assert "trainer rank 0" not in ran.stdout
    assert "the largest 1 of 2" in ran.stdout
    assert len(run(FakeClient(), "plan", "policy", "--top", "1", "--json").object["pairs"]) == 2


def test_abort_passes_the_reason():
    client = FakeClient()
    run(client, "abort", "policy", "--reason", "bad reward")
    assert ("abort", "policy", "bad reward") in client.asked


def test_doctor_without_a_daemon_fails_and_says_what_to_do():
    ran = run(TransportError("no daemon runs; start one"), "doctor", "--json")
    (daemon,) = [check for check in ran.object["checks"] if check["name"] == "daemon"]
    assert (ran.status, ran.object["healthy"], daemon["state"]) == (1, False, "fail")
    assert "start one" in daemon["found"]


def test_doctor_reaches_the_daemon(tmp_path):
    tmp_path.chmod(0o700)
    ran = run(FakeClient(), "doctor", "--json", "--address", str(tmp_path))
    (daemon,) = [check for check in ran.object["checks"] if check["name"] == "daemon"]
    assert daemon["state"] == "ok"
    assert "n0 (pid 2, 2 workers)" in daemon["found"]
    assert run(FakeClient(), "doctor", "--address", str(tmp_path)).status == ran.status


def test_runtime_directory_open_to_others_is_a_failure(tmp_path):
    tmp_path.chmod(0o755)
    assert checks.runtime_dir(tmp_path).state == "fail"
    tmp_path.chmod(0o700)
    assert checks.runtime_dir(tmp_path).state == "ok"
    assert checks.runtime_dir(tmp_path / "none").state == "warn"


@pytest.mark.parametrize(
    ("shmem", "pool", "state"),
    [
        ("always within_size advise [never] deny force", 0, "warn"),
        ("always [advise] never", 0, "ok"),
        ("", 8, "ok"),
        ("", 0, "warn"),
    ],
)
def test_huge_pages_come_from_a_pool_or_from_shmem(shmem, pool, state):
    assert checks.huge_pages(shmem, f"HugePages_Total:  {pool}\n").state == state


def test_little_memory_is_a_warning():
    assert checks.memory("MemTotal: 8000000 kB\nMemAvailable: 900000 kB\n").state == "warn"


def test_the_tightest_limit_counts_as_memory():
    limits = [
        capacity.Limit("memory.max of control group /job", 700_000_000, ""),
        capacity.Limit("RLIMIT_AS", 1 << 40, ""),
    ]
    found = checks.memory("MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\n", limits)
    assert found.state == "warn"
    assert "700 MB left under memory.max of control group /job" in found.found


@pytest.mark.parametrize(("scope", "state"), [("", "ok"), ("0", "ok"), ("1", "ok"), ("2", "warn"), ("3", "warn")])
def test_ptrace_scopes_that_keep_workers_out_are_warnings(monkeypatch, scope, state):
    monkeypatch.setattr(checks.os, "geteuid", lambda: 1000)
    assert checks.ptrace(scope).state == state


def test_doctor_measures_how_private_tensors_are_lent():
    choice = measure.Choice("pulled", "pulled at 5.0 GB/s, copied at 7.0 GB/s")
    found = checks.private_tensors(lambda: choice)
    assert (found.state, found.found) == ("ok", f"{choice.reason}, in rows of 16.4 kB: lent ones are pulled")

    def forbidden() -> measure.Choice:
        raise TransportError("the memory of process 7 cannot be read: Operation not permitted; publish a snapshot")

    found = checks.private_tensors(forbidden)
    assert (found.state, "ptrace_scope" in found.advice) == ("warn", True)
    assert found.found == "lent ones are copied: the memory of process 7 cannot be read: Operation not permitted"


def offer(name: str, missing: Callable[[], str] = lambda: "", package: str = "refitd", **capabilities) -> Offer:
    backend = Backend(name, Capabilities(**{"is_one_sided": False, "crosses_nodes": True} | capabilities), missing)
    return Offer(name, package, lambda: backend)


def test_doctor_says_what_each_backend_does_and_what_it_lacks():
    def found() -> Iterator[Offer]:
        yield offer("shm", is_one_sided=True, crosses_nodes=False)
        yield offer("gloo", lambda: "torch is not installed; `pip install torch` brings it", devices={"cuda", "cpu"})
        yield offer("quic", package="refitd-quic")

    assert [(f.name, f.state, f.found, f.advice) for f in checks.backends(found)] == [
        ("backend shm", "ok", "one-sided, within a node, cpu", ""),
        (
            "backend gloo",
            "warn",
            "two-sided, between nodes, cpu and cuda",
            "torch is not installed; `pip install torch` brings it",
        ),
        ("backend quic", "ok", "two-sided, between nodes, cpu, from package refitd-quic", ""),
    ]


def test_doctor_names_the_package_of_a_backend_that_cannot_be_used():
    def broken() -> Backend:
        raise ConfigError("copy service 'quic' of package refitd-quic cannot be loaded: no libquic.so")

    def confused() -> str:
        raise ValueError("oops")

    def found() -> Iterator[Offer]:
        yield offer("shm")
        yield Offer("quic", "refitd-quic", broken)
        yield offer("rdma", confused, package="refitd-rdma")
        yield offer("shm", package="refitd-shm")

    own, *others = checks.backends(found)
    assert own.state == "ok"
    for finding, package in zip(others, ("refitd-quic", "refitd-rdma", "refitd-shm"), strict=True):
        assert finding.state == "fail"
        assert package in finding.found
        assert f"uninstall {package}" in finding.advice


def test_doctor_lists_exactly_what_the_daemon_would_load():
    assert [f.name for f in checks.backends()] == [f"backend {backend.name}" for backend in registry.installed()]


def test_doctor_loads_backends_of_other_packages(tmp_path, monkeypatch):
    info = tmp_path / "refitd_quic-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: refitd-quic\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[refitd.copy_services]\nquic = refitd_quic_is_not_there:BACKEND\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = [finding for finding in checks.backends() if finding.name == "backend quic"]
    assert finding.state == "fail"
    assert "package refitd-quic cannot be loaded: No module named 'refitd_quic_is_not_there'" in finding.found
    with pytest.raises(ConfigError, match="refitd-quic"):
        list(registry.installed())


def test_a_swap_says_how_its_sources_gave_the_version():
    def given(rank: int, way: str) -> SourceReport:
        return SourceReport(rank, "n0", "box", way, why="pulled at 5.0 GB/s, copied at 7.0 GB/s")

    several = structs.replace(COMMITTED, sources=(given(0, "pulled"), given(1, "copied"), given(2, "pulled")))
    assert "sources: 2 pulled, 1 copied\n" in run(FakeClient(swap_result=several), "swap", "policy").stdout
    one = structs.replace(COMMITTED, sources=(given(0, "pulled"),))
    shown = run(FakeClient(swap_result=one), "swap", "policy").stdout
    assert "sources: 1 pulled (pulled at 5.0 GB/s, copied at 7.0 GB/s)" in shown
    assert run(FakeClient(swap_result=one), "swap", "policy", "--json").object["sources"][0]["way"] == "pulled"


def test_every_command_has_help_and_json():
    runner = CliRunner()
    for name in COMMANDS:
        result = runner.invoke(refitctl, [name, "--help"])
        assert result.exit_code == 0, name
        assert "--json" in result.stdout, name
    listed = runner.invoke(refitctl, ["--help"]).stdout
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
    ],
)
def test_units_are_readable(function: Callable[[float], str], value, text):
    assert function(value) == text


def test_no_time_has_no_rate():
    assert output.rate(10, 0.0) == "-"


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


def test_a_swap_without_verification_is_said_to_be_that():
    assert "digests verified" in run(FakeClient(), "swap", "policy").stdout
    bare = structs.replace(COMMITTED, digests=0)
    assert "not verified" in run(FakeClient(swap_result=bare), "swap", "policy").stdout
