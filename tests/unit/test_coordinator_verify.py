"""Verification in the coordinator: the nodes that it asks, and its answers."""

from __future__ import annotations

from refitd.config import Config, ModelConfig
from refitd.coordinator.state import NODE_SILENCE_S
from refitd.protocol import cluster, local
from refitd.protocol.reports import StatusReport, SwapReport, VerifyReport
from tests.support.coordinator_harness import Harness, commit


def test_verification_is_switched_off_by_the_models_configuration() -> None:
    for verify in (True, False):
        h = Harness(Config(models={"m": ModelConfig(verify=verify)})).ready()
        h.say("n0", local.StartSwap("m"), request=9)
        (load,) = [m for _, _, m in h.sent if isinstance(m, cluster.LoadPlan)]
        (stage,) = [m for m in h.say("n0", cluster.PlanLoaded(plan=load.plan)) if isinstance(m, cluster.Stage)]
        assert stage.verify is verify
        said = commit(h, stage.swap, "a")
        (report,) = [m for m in said if isinstance(m, SwapReport)]
        assert (report.copies, report.digests) == (1, int(verify))
        (status,) = h.say("n0", local.GetStatus(), request=5)
        assert isinstance(status, StatusReport) and status.models[0].verify is verify


def test_verify_asks_the_nodes_and_answers_when_all_have() -> None:
    h = Harness().ready().join("n1", pid=11)
    h.add("b", "n1")
    h.say("n0", local.Verify("m"), request=9)
    asked = {node: m for node, _, m in h.sent if isinstance(m, cluster.CheckMembers)}
    assert {node: m.members for node, m in asked.items()} == {"n0": ("a",), "n1": ("b",)}
    check = asked["n0"].check
    proven = {m: cluster.MemberChecked(member=m, state="proven", version=1, digest="d") for m in ("a", "b")}
    assert h.say("n0", cluster.MembersChecked(check=check, members=(proven["a"],))) == []
    # a node speaks for its own members only
    (refused,) = h.say("n0", cluster.MembersChecked(check=check, members=(proven["b"],)))
    assert isinstance(refused, local.Failure) and "node n1" in refused.message.replace("'", "")
    h.say("n1", cluster.MembersChecked(check=check, members=(proven["b"],)))
    ((node, request, report),) = h.sent
    assert (node, request) == ("n0", 9) and isinstance(report, VerifyReport) and report.outcome == "proven"


def test_verify_of_a_node_that_is_lost_says_so_and_a_model_without_targets_is_refused() -> None:
    h = Harness().ready().join("n1", pid=11)
    h.add("b", "n1")
    h.say("n0", local.Verify("m", timeout_s=60.0), request=9)
    (check,) = {m.check for _, _, m in h.sent if isinstance(m, cluster.CheckMembers)}
    h.say("n0", cluster.MembersChecked(check=check, members=(cluster.MemberChecked("a", "proven", version=1),)))
    h.now = NODE_SILENCE_S + 1
    h.state.nodes["n0"].last_heard = h.now
    (report,) = [m for m in h.tick() if isinstance(m, VerifyReport)]
    assert [m.state for m in report.members] == ["proven", "unknown"] and "no word" in report.members[1].reason
    (refused,) = h.say("n0", local.Verify("nobody"), request=9)
    assert isinstance(refused, local.Failure)
