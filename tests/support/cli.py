"""Run commands against a fake client, which answers with made-up reports."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import NamedTuple

import click
from click.testing import CliRunner

from refitd.errors import RefitdError
from refitd.protocol.plan_reports import LiveMemory, PairTraffic, ParameterTraffic, PathTraffic, PlanReport
from refitd.protocol.reports import (
    HistoryEntry,
    HistoryReport,
    LinkStatus,
    MemberProof,
    MemberReport,
    ModelStatus,
    NodeStatus,
    NodeTrace,
    SourceStatus,
    StatusReport,
    SwapProgress,
    SwapReport,
    TargetStatus,
    TraceReport,
    TraceSpan,
    VerifyReport,
)
from refitd_cli.control import main as refitctl
from refitd_cli.session import Session
from tests.support.json_schema import check_printed


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
    paths=(PathTraffic("GPU", "same GPU", "same GPU, one kernel", 3, 3000),),
    gpu_paths=("pinned windows", "same GPU, one kernel"),
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
    paths=(
        PathTraffic("GPU", "other GPU", "pinned windows", 2, 2250, "no peers"),
        PathTraffic("main memory", "GPU", "pinned", 1, 750),
    ),
    memory=(
        LiveMemory("a", 0, "in-place", "GPU-a", 3000, 0, 1.5),
        LiveMemory("b", 0, "flip", "", 3000, 3000),
    ),
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
TRACE = TraceReport(
    swap="s1",
    model="policy",
    version=7,
    kind="asked",
    phases=(TraceSpan("coordinator", "stage", 50.0, 50.25),),
    began=50.0,
    at=86400.0,
    host="head",
    nodes=(
        NodeTrace("t", "n0", "box", (TraceSpan("worker 0", "copy", 0.0, 0.2, 64, note="n"),), 2, 50.01, 0.0005),
        NodeTrace("t", "n1", "box", (TraceSpan("daemon", "stage", 0.0, 0.2, is_open=True),)),
    ),
    outcome="committed",
    missing=("node n2 is lost",),
)


HISTORY = HistoryReport(
    swaps=(
        HistoryEntry(swap="s2", model="policy", version=8, state="decided", at=86400.0),
        HistoryEntry(swap="s1", model="policy", version=7, state="committed", at=0.0, report=COMMITTED),
    )
)


@dataclass
class FakeClient:
    """A fake client: returns made-up reports and records the requests."""

    swap_result: SwapReport | RefitdError = COMMITTED
    status_result: StatusReport | RefitdError = STATUS
    plan_result: PlanReport | RefitdError = PLAN
    abort_result: RefitdError | None = None
    verify_result: VerifyReport | RefitdError = PROVEN
    history_result: HistoryReport = HISTORY
    asked: list[tuple] = field(default_factory=list)
    closed: bool = False

    def swap(self, model, version=None, *, timeout=None, queue=False, wait=0.0, on_progress=None):
        self.asked.append(("swap", model, version, timeout) if not queue else ("queue", model, version, timeout))
        return answer(self.swap_result)

    def rollback(self, model, version=None, *, timeout=None, on_progress=None):
        self.asked.append(("rollback", model, version, timeout))
        return answer(self.swap_result)

    def history(self, model="", limit=20):
        self.asked.append(("history", model, limit))
        return self.history_result

    def trace(self, model, swap=""):
        self.asked.append(("trace", model, swap))
        return TRACE

    def status(self, *, timeout=30.0):
        return answer(self.status_result)

    def plan(self, model):
        self.asked.append(("plan", model))
        return answer(self.plan_result)

    def verify(self, model, *, timeout=None):
        self.asked.append(("verify", model, timeout))
        return answer(self.verify_result)

    def abort(self, model, reason=""):
        self.asked.append(("abort", model, reason))
        return answer(self.abort_result)

    def close(self):
        self.closed = True


def answer(value):
    if isinstance(value, BaseException):
        raise value
    return value


class Ran(NamedTuple):
    status: int
    stdout: str
    stderr: str

    @property
    def object(self) -> dict:
        """The one JSON object on stdout."""
        (line,) = self.stdout.splitlines()
        return json.loads(line)


def run(client: object, *arguments: str, command: click.Group = refitctl, is_real: bool = True) -> Ran:
    """Run a command that finds this client, or this error. `is_real`: check printed JSON by the command's schema."""

    def factory(address: str | None) -> object:
        if isinstance(client, FakeClient):
            client.asked.append(("connect", address))
        return answer(client)

    result = CliRunner().invoke(command, arguments, obj=Session(factory), prog_name="refitctl")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if "--json" in arguments and is_real:
        check_printed(arguments, result.stdout)
    return Ran(result.exit_code, result.stdout, result.stderr)
