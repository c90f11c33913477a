"""refitctl status, models and plan, as tables."""

from __future__ import annotations

from msgspec import structs

from refitd.protocol.reports import StatusReport
from tests.support.cli import STATUS, TARGET, FakeClient, Ran, run


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


def test_models_shows_what_each_replica_serves():
    ran = run(FakeClient(), "models")
    assert "a: 7" in ran.stdout
    assert "1/2" in ran.stdout
    (model,) = STATUS.models[:1]
    many = tuple(structs.replace(model.targets[0], replica=f"r{i}", version=6 if i == 3 else 7) for i in range(100))
    ran = run(
        FakeClient(status_result=structs.replace(STATUS, models=(structs.replace(model, targets=many),))), "models"
    )
    assert "6 in 1 of them, 7 in 99 of them" in ran.stdout


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
