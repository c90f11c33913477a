"""refitctl swap, rollback, history and verify: what reaches the client, and how what became of it is said."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from refitd.errors import PlanError, RefitFailed, RefusedError
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
from tests.support.cli import ABORTED, COMMITTED, FakeClient, run


def failed(report: SwapReport) -> SwapFailed:
    return SwapFailed("version 8 did not go live", {"b/1": "worker pid 99 was killed"}, report)


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


def test_a_swap_says_how_its_sources_gave_the_version():
    def given(rank: int, way: str) -> SourceReport:
        return SourceReport(rank, "n0", "box", way, mode_reason="pulled at 5.0 GB/s, copied at 7.0 GB/s")

    several = structs.replace(COMMITTED, sources=(given(0, "pulled"), given(1, "copied"), given(2, "pulled")))
    assert "sources: 2 pulled, 1 copied\n" in run(FakeClient(swap_result=several), "swap", "policy").stdout
    one = structs.replace(COMMITTED, sources=(given(0, "pulled"),))
    shown = run(FakeClient(swap_result=one), "swap", "policy").stdout
    assert "sources: 1 pulled (pulled at 5.0 GB/s, copied at 7.0 GB/s)" in shown
    assert run(FakeClient(swap_result=one), "swap", "policy", "--json").object["sources"][0]["way"] == "pulled"


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
