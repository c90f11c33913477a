"""Traces of swaps: spans stored by nodes, aligned clocks, collection by the coordinator, and the Perfetto file."""

from __future__ import annotations

import json

import pytest

from refitd.coordinator import inquiries as collected
from refitd.daemon import actions as act
from refitd.daemon import timeline
from refitd.daemon.links import KEPT, Alignment, CoordinatorClock
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.reports import MAX_SPANS, GetTrace, NodeTrace, TraceReport, TraceSpan
from refitd.states import Tick
from refitd_cli.traces import chrome_trace
from tests.support.cli import FakeClient, run
from tests.support.coordinator_harness import Harness as Head
from tests.support.coordinator_harness import kinds
from tests.support.daemon_harness import Harness

# --- clocks -------------------------------------------------------------------------------------------------


def test_the_shortest_round_trip_says_how_far_clocks_are_apart():
    clock = CoordinatorClock()
    assert clock.alignment is None
    for number, (sent, there, now) in enumerate([(10.0, 110.3, 11.0), (20.0, 120.05, 20.1), (30.0, 130.0, 34.0)]):
        clock.sent(number, sent)
        clock.heard(number, there, now)
    assert clock.alignment is not None
    assert clock.alignment.offset_s == pytest.approx(100.0)
    assert clock.alignment.error_s == pytest.approx(0.05)
    clock.heard(99, 0.0, 35.0)  # an answer without a question
    clock.sent(3, 40.0)
    clock.forget()
    assert clock.alignment is None
    clock.heard(3, 7.0, 40.0)  # the next coordinator's welcome
    assert clock.alignment == Alignment(-33.0, 0.0)


@pytest.mark.parametrize(("there_s", "back_s"), [(0.0, 0.2), (0.2, 0.0), (0.1, 0.1), (0.05, 0.3)])
def test_the_error_covers_any_way_that_a_round_trip_is_split(there_s, back_s):
    clock, true_offset = CoordinatorClock(), -5.0
    clock.sent(1, 50.0)
    clock.heard(1, 50.0 + there_s + true_offset, 50.0 + there_s + back_s)
    found = clock.alignment
    assert found is not None
    assert abs(found.offset_s - true_offset) <= found.error_s + 1e-9


def test_unanswered_heartbeats_and_old_round_trips_are_not_kept():
    clock = CoordinatorClock()
    for number in range(10_000):
        clock.sent(number, float(number))
        if number % 2:
            clock.heard(number, 0.0, float(number))
    assert len(clock._sent) <= 64
    assert len(clock._found) == KEPT


# --- a node -------------------------------------------------------------------------------------------------


def part(h: Harness, swap: str) -> NodeTrace:
    h.to_coordinator.clear()
    h.feed(act.CoordinatorSaid(0, GetTrace("m", swap, "t")))
    (found,) = h.said(NodeTrace)
    assert isinstance(found, NodeTrace)
    return found


def spans(h: Harness, swap: str) -> list[tuple[str, str, float, float]]:
    return [(span.who, span.name, span.began, span.ended) for span in part(h, swap).spans]


def test_a_node_keeps_when_it_staged_and_committed():
    h = Harness()
    _, target = h.fleet()
    h.now = 1.0
    (first, run), (_, other) = h.stage()
    h.now = 1.5
    h.feed(act.WorkerSaid(first, sidecar.RunProgress(run=run, bytes_done=100)))
    h.now = 2.0
    h.feed(act.WorkerSaid(first, sidecar.RunDone(run=run, copies=1, bytes=150, seconds=0.8)))
    h.now = 3.0
    h.feed(act.WorkerSaid(1, sidecar.RunDone(run=other, copies=1, bytes=1, seconds=9.0)))
    h.now = 4.0
    h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap="s", version=1)))
    h.now = 5.0
    h.ask(local.CommitDone(swap="s", member=target, paused_s=0.25))
    who = "r rank 0 (pid 100)"
    assert spans(h, "s")[:7] == [
        ("daemon", "load plan", 0.0, 0.0),
        ("worker 0", "copy, compared", pytest.approx(1.2), 2.0),
        ("worker 0", "chunks", pytest.approx(1.2), 1.5),
        ("worker 1", "copy, compared", 1.0, 3.0),  # never before the request to it
        ("daemon", "stage", 1.0, 3.0),
        (who, "commit", 4.0, 5.0),
        (f"{who}: pause", "stands still", 4.75, 5.0),
    ]
    assert all(span.name == "digests" and span.is_open for span in part(h, "s").spans[7:])


def test_the_steps_of_an_exchange_are_lines_of_their_own_that_overlap():
    h = Harness()
    h.fleet()
    h.now = 1.0
    (worker, run), _ = h.stage()
    h.now = 2.0
    steps = (sidecar.StepTimes("receive", 0.9, 0.1, 0.75), sidecar.StepTimes("place", 5.0, 0.0, 0.5))
    h.feed(act.WorkerSaid(worker, sidecar.RunDone(run=run, copies=1, bytes=150, seconds=0.9, steps=steps)))
    found = {span.who: span for span in part(h, "s").spans if span.who.startswith("worker 0:")}
    assert {who: (span.name, span.began, span.ended, span.note) for who, span in found.items()} == {
        "worker 0: receive": ("receive", pytest.approx(1.1), pytest.approx(1.9), "busy for 0.750000 s"),
        "worker 0: place": ("place", pytest.approx(1.1), 2.0, "busy for 0.500000 s"),  # not before its run
    }


def test_what_has_not_ended_is_marked_and_an_abort_ends_it():
    h = Harness()
    h.fleet()
    runs = h.stage()
    h.now = 7.0
    assert {(span.name, span.is_open, span.ended) for span in part(h, "s").spans} == {
        ("load plan", False, 0.0),
        ("stage", True, 7.0),
        ("copy, compared", True, 7.0),
    }
    h.feed(act.CoordinatorSaid(0, cluster.Abort(swap="s", reason="x")))
    h.done(runs)  # too late
    found = part(h, "s").spans
    assert not any(span.is_open for span in found)
    assert {span.note for span in found if span.name != "load plan"} == {"aborted"}


def test_a_worker_that_dies_ends_its_runs():
    h = Harness()
    h.fleet()
    (worker, _), _ = h.stage()
    h.feed(act.WorkerDied(worker, "was killed"))
    (died,) = [span for span in part(h, "s").spans if span.who == "worker 0"]
    assert (died.is_open, died.note) == (False, "its worker ended")


def test_a_controller_s_hooks_are_shown():
    h = Harness()
    found = h.ask(local.RegisterController(model="m", replica="r", pauses=True))
    assert isinstance(found, local.Registered)
    for what in ("pause", "commit"):
        h.feed(act.CoordinatorSaid(0, local.Control(found.member, "s", what, 1)))
        h.now += 1.0
        h.ask(local.Controlled(found.member, "s", what, reason="no" if what == "commit" else ""))
    assert [(span.name, span.ended - span.began, span.note) for span in part(h, "s").spans] == [
        ("pause", 1.0, ""),
        ("commit", 1.0, "no"),
    ]


def test_the_last_swaps_are_kept_and_each_in_bounds():
    h = Harness()
    _, target = h.fleet()
    for swap in (f"s{n}" for n in range(timeline.MAX_SWAPS + 3)):
        runs = h.stage(swap)
        for worker, number in runs:
            for chunk in range(100):
                h.now += 0.001
                h.feed(act.WorkerSaid(worker, sidecar.RunProgress(run=number, bytes_done=chunk)))
        h.done(runs)
        h.commit(target, swap)
        h.feed(act.CoordinatorSaid(0, cluster.EndSwap(swap=swap)))
    found = h.daemon.timeline
    assert len(found._swaps) == timeline.MAX_SWAPS
    assert {swap for swap, _ in found._runs.values()} <= found._swaps.keys()
    assert not part(h, "s0").spans
    chunks = [span for span in part(h, "s9").spans if span.name == "chunks"]
    assert len(chunks) <= 2 * timeline.MAX_CHUNKS
    for _ in range(2 * MAX_SPANS):
        found._swaps["s9"].add(TraceSpan("daemon", "x", 0.0, 1.0))
    full = part(h, "s9")
    assert len(full.spans) == MAX_SPANS
    assert full.dropped > MAX_SPANS


def test_a_swap_keeps_the_alignment_of_its_own_time():
    h = Harness()
    h.fleet()
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="b", lease_s=10.0)))
    assert part(h, "s").error_s is None
    h.now = 1.0
    h.feed(Tick())
    h.done(h.stage())
    assert (part(h, "s").offset_s, part(h, "s").error_s) == (0.0, 0.0)
    h.daemon.clock.forget()
    assert part(h, "s").error_s == 0.0
    assert part(h, "other").error_s is None


# --- the coordinator ----------------------------------------------------------------------------------------


def committed(h: Head) -> str:
    swap = h.until_staging()
    h.now += 1.0
    h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
    h.now += 0.5
    h.say("n0", local.CommitDone(swap=swap, member="a", paused_s=0.0))
    return swap


SPAN = TraceSpan("daemon", "stage", 5.0, 6.0)


def test_a_trace_is_the_phases_and_each_node_s_part():
    h = Head().ready()
    h.join("n1", pid=11)
    swap = committed(h)
    asked = h.say("n0", GetTrace("m"), request=7)
    assert kinds(asked) == ["GetTrace", "GetTrace"]
    (collect, _) = asked
    assert isinstance(collect, GetTrace) and collect.swap == swap
    assert h.say("n1", NodeTrace(collect.asked, "n1", "h", ())) == []
    (report,) = h.say("n0", NodeTrace(collect.asked, "another", "h", (SPAN,), 0, 100.0, 0.001))
    assert isinstance(report, TraceReport)
    assert [(span.name, span.ended - span.began) for span in report.phases] == [
        ("plan", 0.0),
        ("send plan", 0.0),
        ("stage", 1.0),
        ("decide", 0.0),
        ("journal", 0.0),
        ("commit", 0.5),
    ]
    assert (report.swap, report.outcome, report.missing) == (swap, "committed", ())
    assert [(node.node, node.spans) for node in report.nodes] == [("n0", (SPAN,))]


def test_a_running_swap_has_a_trace_as_far_as_it_is():
    h = Head().ready()
    swap = h.until_staging()
    h.now = 2.0
    (collect,) = h.say("n0", GetTrace("m"), request=7)
    (report,) = h.say("n0", NodeTrace(collect.asked, "n0", "h", (SPAN,)))
    assert (report.swap, report.outcome) == (swap, None)
    assert [(span.name, span.is_open) for span in report.phases] == [
        ("plan", False),
        ("send plan", False),
        ("stage", True),
    ]


def test_nodes_that_do_not_answer_are_named():
    h = Head().ready()
    h.join("n1", pid=11)
    committed(h)
    h.say("n0", GetTrace("m"), request=7)
    h.now += collected.COLLECT_S / 2
    assert h.say("n0", NodeTrace("of nobody", "n0", "h", (SPAN,))) == []
    assert h.state.next_deadline() is not None
    h.now += collected.COLLECT_S
    (report,) = [m for m in h.tick() if isinstance(m, TraceReport)]
    assert report.missing == tuple(f"node {node} has not answered within 5 s" for node in ("n0", "n1"))
    collect = h.say("n0", GetTrace("m"), request=7)[0]
    (report,) = [
        m
        for node in ("n0", "n1")
        for m in h.say(node, NodeTrace(collect.asked, node, "h", ()))
        if isinstance(m, TraceReport)
    ]
    assert report.missing == ("node n0 has kept nothing of it",)


def test_a_swap_that_is_not_kept_is_refused_with_those_that_are():
    h = Head().ready()
    (refused,) = h.say("n0", GetTrace("m"), request=7)
    assert isinstance(refused, local.Failure) and "no trace of a swap" in refused.message
    swap = committed(h)
    (refused,) = h.say("n0", GetTrace("m", "nosuch"), request=7)
    assert "no trace of swap 'nosuch'" in refused.message and swap in refused.message
    (refused,) = h.say("n0", GetTrace("other"), request=7)
    assert "model 'other'" in refused.message
    for _ in range(collected.MAX_COLLECTIONS):
        assert kinds(h.say("n0", GetTrace("m"), request=7)) == ["GetTrace"]
    (refused,) = h.say("n0", GetTrace("m"), request=7)
    assert "16 traces are being collected" in refused.message


# --- the command and its file -------------------------------------------------------------------------------


def test_the_command_writes_a_file_and_says_how_well_clocks_agree(tmp_path):
    client, file = FakeClient(), tmp_path / "swap.json"
    ran = run(client, "trace", "policy", "--swap", "s1", "-o", str(file))
    assert ("trace", "policy", "s1") in client.asked
    assert ran.stdout == (
        f"swap s1 (policy version 7, committed): 3 spans of the coordinator and 2 nodes in {file}; clocks agree within "
        "500 us\n"
    )
    assert ran.stderr.splitlines() == [
        "node n0: 2 spans were too many and are not shown",
        "node n1: its clock is not aligned: it has no answered heartbeat yet",
        "node n2 is lost",
    ]
    assert len(json.loads(file.read_text())["traceEvents"]) == 12
    ran = run(client, "trace", "policy", "-o", str(file), "--json")
    assert ran.object["clock_error_s"] == {"n0": 0.0005, "n1": None}
    ran = run(client, "trace", "policy", "-o", str(tmp_path / "nothing" / "x"))
    assert ran.status == 2 and "cannot be written: " in ran.stderr


def test_the_file_aligns_clocks_and_names_processes_and_threads():
    span = TraceSpan("worker 0", "copy\x1b[31m", 1001.5, 1002.0, 64, note="n")
    report = TraceReport(
        "s",
        "m",
        3,
        "asked",
        (TraceSpan("coordinator", "stage", 51.0, 53.0, is_open=True),),
        50.0,
        1e9,
        "head",
        (NodeTrace("t", "n0", "host", (span,), 2, -950.0, 0.002),),
    )
    made = json.loads(json.dumps(chrome_trace(report)))
    shown = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in made["traceEvents"] if e["ph"] == "X"]
    assert shown == [(1, 1, "stage", 1e6, 2e6), (2, 1, "copy\x1b[31m", 1.5e6, 0.5e6)]
    named = [e["args"]["name"] for e in made["traceEvents"] if e["ph"] == "M" and "name" in e["args"]]
    assert named == ["coordinator (host head)", "coordinator", "node n0 (host host)", "worker 0"]
    assert made["otherData"]["clock_error_s"] == {"n0": 0.002}
    assert made["otherData"]["dropped_spans"] == {"n0": 2}
    assert made["otherData"]["outcome"] == "running"
