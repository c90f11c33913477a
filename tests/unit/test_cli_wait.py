"""refitctl wait, and options that every command shares: goals, durations, suggestions, their place on the line."""

from __future__ import annotations

import pytest
from msgspec import structs

from refitd.errors import TransportError
from refitd.protocol.reports import StatusReport
from refitd_cli.commands.wait import Goal, missing
from refitd_cli.daemon import main as refitd
from tests.support.cli import STATUS, FakeClient, answer, run

(MODEL,) = STATUS.models
SHORT = structs.replace(MODEL, targets=(structs.replace(MODEL.targets[0], replica="b", world_size=2, version=6),))


def of(*models) -> StatusReport:
    return structs.replace(STATUS, models=models)


@pytest.mark.parametrize(
    ("report", "model", "goal", "lacks"),
    [
        (STATUS, None, Goal("ready"), ""),
        (structs.replace(STATUS, nodes=()), None, Goal("ready"), "no node is connected"),
        (STATUS, "policy", Goal("ready"), ""),
        (of(), "policy", Goal("ready"), "no trainer and no engine has registered model 'policy'"),
        (of(SHORT), "policy", Goal("ready"), "replica 'b' has 1 of 2 ranks"),
        (of(structs.replace(MODEL, targets=())), "policy", Goal("ready"), "no replica is registered"),
        (of(structs.replace(MODEL, complete_versions=())), "policy", Goal("ready"), "no version is complete"),
        (STATUS, "policy", Goal("version", 7), ""),
        (of(SHORT), "policy", Goal("version", 7), "replica 'b' serves 6"),
        (of(structs.replace(MODEL, targets=())), "policy", Goal("version", 7), "no replica is registered"),
        (STATUS, "policy", Goal("replicas", 1), ""),
        (of(SHORT), "policy", Goal("replicas", 1), "0 of 1 replicas are there, replica 'b' has 1 of 2 ranks"),
    ],
)
def test_what_a_goal_lacks(report, model, goal, lacks):
    found = missing(report, model, goal)
    assert found.startswith(lacks) and bool(found) == bool(lacks)


class Starting(FakeClient):
    """A daemon that answers at the third try."""

    tries = 0

    def status(self, *, timeout=30.0):
        self.tries += 1
        return answer(TransportError("it starts") if self.tries < 3 else STATUS)


def test_wait_ends_when_the_daemon_answers_and_fails_when_the_time_is_over():
    assert run(Starting(), "wait", "policy", "--for", "version=7").stdout.startswith("policy: every replica serves")
    assert run(Starting(), "wait", "--json").object["nodes"]
    late = run(FakeClient(), "wait", "policy", "--for", "version=8", "--timeout", "200ms")
    assert late.status == 1 and "not reached within 0.2 s: replica 'a' serves 7" in late.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("swop policy", 2, "No such command 'swop'. Did you mean `refitctl swap`?"),
        ("serve", 2, "Did you mean `refitd serve`?"),
        ("config chek", 2, "Did you mean `refitctl config check`?"),
        ("swap policy --timeout 2x", 2, "give seconds, or 500ms, 5s, 2m, 1h"),
        ("wait policy --for v7", 2, "none of ready, version=N, replicas=N"),
        ("wait --for version=7", 2, "needs a MODEL"),
        ("status --node n9", 1, "no node 'n9' is connected or lost; known nodes: n0"),
    ],
)
def test_mistakes_name_the_way_out(words, status, said):
    ran = run(FakeClient(), *words.split())
    assert ran.status == status and said in ran.stderr


def test_refitd_names_the_commands_of_refitctl():
    assert "Did you mean `refitctl status`?" in run(FakeClient(), "status", command=refitd).stderr


@pytest.mark.parametrize(("text", "seconds"), [("5", 5), ("5s", 5), ("2m", 120), ("500ms", 0.5), ("1h", 3600)])
def test_durations_have_units(text, seconds):
    client = FakeClient()
    assert run(client, "swap", "policy", "--timeout", text).status == 0
    assert ("swap", "policy", None, seconds) in client.asked


def test_shared_options_may_precede_the_command():
    client = FakeClient()
    before = run(client, "--json", "--address", "/d", "status", is_real=False)
    assert before.object == run(client, "status", "--json", "--runtime-dir=/d").object
    assert client.asked == [("connect", "/d")] * 2


def test_status_of_one_model_or_node():
    other = structs.replace(MODEL, model="other", sources=(), targets=())
    client = FakeClient(status_result=of(MODEL, other))
    assert [each["model"] for each in run(client, "status", "other", "--json").object["models"]] == ["other"]
    assert [each["model"] for each in run(client, "status", "--node", "n0", "--json").object["models"]] == ["policy"]
