"""A coordinator that starts again with its journal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from msgspec import structs

from refitd.config import Config
from refitd.coordinator.journals import LiveVersion, SwapRecord
from refitd.coordinator.live_versions import KEPT_DECISIONS, SETTLE_S, AbsentRanks, LiveVersions
from refitd.coordinator.members import Place
from refitd.coordinator.state import NODE_SILENCE_S
from refitd.protocol import cluster, local
from refitd.protocol.reports import HistoryEntry, HistoryReport, StatusReport
from refitd.states import Tick
from tests.support.coordinator_harness import NO_CATCH_UP, Harness, commit, kinds


def test_a_restarted_coordinator_finishes_what_was_decided_and_undoes_what_was_not() -> None:
    journal = {"s1": SwapRecord("s1", "m", 7, "decided", "", "", 1.0)}
    h = Harness(journal=journal).join()
    assert h.add("a", staged="s1") == [cluster.CommitStaged(swap="s1", version=7), local.Done()]
    h.say("n0", local.CommitDone(swap="s1", member="a", paused_s=0.0))
    undone = h.add("b", staged="s2")
    assert kinds(undone) == ["Abort", "Done"]
    (status,) = h.say("n0", local.GetStatus(), request=1)
    versions = {t.replica: (t.version, t.state) for t in status.models[0].targets}
    assert versions == {"a": (7, "serving"), "b": (None, "fenced")}


def test_a_decision_that_is_repeated_for_one_replica_keeps_the_others_with_their_controllers() -> None:
    journal = {"s1": SwapRecord("s1", "m", 7, "decided", "", "", 1.0)}
    h = Harness(journal=journal).join()
    for replica in ("a", "b"):
        h.add(replica, staged="s1", controlled=True)
    for number, replica in enumerate(("a", "b")):
        h.say("n0", local.RegisterController("m", replica, member=f"c{replica}", pid=11), request=3 + number)
    (told,) = [m for m in h.add("d", staged="s1") if isinstance(m, cluster.CommitStaged)]
    assert told.controlled == ("a", "b")
    said = [m for who in ("a", "b") for m in h.say("n0", local.StepReached("s1", who, 1))]
    called = [(m.member, m.what) for m in said if isinstance(m, local.Control)]
    assert called == [("ca", "commit"), ("cb", "commit")]


def test_a_controller_that_was_resumed_without_a_version_is_resumed_with_the_live_one_once_its_ranks_serve_it() -> None:
    journal = {"s1": SwapRecord("s1", "m", 7, "committed", "", "", 1.0, run="x")}
    h = Harness(NO_CATCH_UP, journal).join()
    h.say("n0", local.RegisterController("m", "a", pauses=True, member="c", pid=11, refuses=True), request=3)
    first = h.add("a0", replica="a", world_size=2, controlled=True, version=7, run="x")
    assert "Control" not in kinds(first)
    both = h.add("a1", replica="a", rank=1, world_size=2, controlled=True, version=7, run="x")
    assert [m for m in both if isinstance(m, local.Control)] == [local.Control("c", "s1", "resume", 7)]
    h.say("n0", local.Deregister("a0", "it left"))
    again = h.add("a0", replica="a", world_size=2, controlled=True, version=7, run="x")
    assert "Control" not in kinds(again)


def test_a_restarted_coordinator_catches_up_what_an_undecided_swap_had_written_in_place() -> None:
    h = Harness(journal={"s1": SwapRecord("s1", "m", 7, "committed", "", "", 1.0, run="x")}).join()
    h.add("src", versions=(7, 8), run="x")
    h.say("n0", local.RegisterController("m", "a", pauses=True, member="c", pid=11), request=3)
    undone = h.add(
        "a", version=7, run="x", staged="s2", controlled=True, in_place=True
    )  # it was at 7, and all of 8 was there
    assert kinds(undone) == ["Abort", "Done", "LoadPlan"]
    (status,) = h.say("n0", local.GetStatus(), request=1)
    assert [(t.replica, t.version) for t in status.models[0].targets] == [("a", None)]


def test_a_restarted_coordinator_knows_what_is_live_and_what_was_before() -> None:
    journal: dict[str, SwapRecord] = {}
    h = Harness(journal=journal).ready()
    commit(h, h.until_staging(), "a")
    later = Harness(journal=journal).join()
    later.add("src", versions=(1,), run="run1")
    assert str(later.state.models["m"].live) == "1 (run run1)"
    assert "LoadPlan" not in kinds(later.add("c"))  # c serves no version yet, and a has not registered again
    assert "LoadPlan" in kinds(later.add("a", version=1, run="run1"))
    (found,) = [m for m in later.say("n0", local.GetHistory("m"), request=4) if isinstance(m, HistoryReport)]
    assert [(s.version, s.state, s.report.kind if s.report else "") for s in found.swaps] == [(1, "committed", "asked")]


def test_the_history_of_a_model_that_nobody_knows_is_refused_with_the_known_ones() -> None:
    journal: dict[str, SwapRecord] = {}
    h = Harness(journal=journal).ready()
    (none,) = [m for m in h.say("n0", local.GetHistory("m"), request=4) if isinstance(m, HistoryReport)]
    assert none.swaps == ()  # it is registered, but no swap has ended yet
    commit(h, h.until_staging(), "a")
    later = Harness(journal=journal).join()  # no member of m is registered, but the journal has its history
    (unknown,) = later.say("n0", local.GetHistory("n"), request=4)
    assert isinstance(unknown, local.Failure) and "known models: m" in unknown.message
    (found,) = [m for m in later.say("n0", local.GetHistory("m"), request=4) if isinstance(m, HistoryReport)]
    assert len(found.swaps) == 1
    (everything,) = [m for m in later.say("n0", local.GetHistory(""), request=4) if isinstance(m, HistoryReport)]
    assert everything == found


def decided_and_died() -> tuple[Harness, str]:
    """Return the successor of a coordinator that died right after its decision about replicas a and b."""
    journal: dict[str, SwapRecord] = {}
    h = Harness(NO_CATCH_UP, journal).ready()
    h.add("b")
    swap = h.until_staging()
    h.say("n0", cluster.StageDone(swap=swap, copies=2, bytes=64, seconds=0.1))
    later = Harness(NO_CATCH_UP, journal).join()
    later.add("src", versions=(1,), run="run1")
    return later, swap


def last(h: Harness) -> HistoryEntry:
    (found,) = [m for m in h.say("n0", local.GetHistory("m"), request=4) if isinstance(m, HistoryReport)]
    return found.swaps[0]


def test_a_coordinator_learns_how_a_swap_ended_that_an_earlier_one_decided() -> None:
    h, swap = decided_and_died()
    before = last(h)
    assert before.state == "decided" and before.report is not None
    assert {m.replica: m.state for m in before.report.members} == {"a": "staged", "b": "staged"}
    h.add("a", version=1, run="run1")  # a committed while the coordinator was down
    assert last(h).state == "decided"
    assert h.add("b", staged=swap)[0] == cluster.CommitStaged(swap=swap, version=1, run="run1")
    h.say("n0", local.CommitDone(swap=swap, member="b", paused_s=0.25))
    entry = last(h)
    assert (entry.state, entry.reason) == ("committed", "the coordinator ended after the decision")
    assert entry.report is not None and entry.report.bytes == 64
    assert {(m.replica, m.state, m.version, m.paused_s) for m in entry.report.members} == {
        ("a", "committed", 1, 0.0),
        ("b", "committed", 1, 0.25),
    }
    (status,) = h.say("n0", local.GetStatus(), request=1)
    assert isinstance(status, StatusReport) and status.models[0].last_swap == entry.report


def test_a_report_of_another_version_in_the_journal_does_not_keep_a_coordinator_from_starting() -> None:
    journal = {"s1": SwapRecord("s1", "m", 7, "decided", "", "", 1.0, b'{"type": "SwapReport", "of": "tomorrow"}')}
    h = Harness(NO_CATCH_UP, journal).join()
    assert h.add("a", staged="s1") == [cluster.CommitStaged(swap="s1", version=7), local.Done()]
    assert (last(h).state, last(h).report) == ("decided", None)


def test_who_does_not_come_back_after_a_decision_is_named() -> None:
    h, _ = decided_and_died()
    h.add("a", version=1, run="run1")
    h.now = NODE_SILENCE_S + Config().deadlines.commit_s + 1
    h.feed(Tick())
    h.join()  # it has been silent for as long
    entry = last(h)
    assert entry.state == "incomplete" and entry.reason.endswith(
        "not known to serve it: replica 'b' rank 0 (node n0, host h, pid 5)"
    )
    assert entry.report is not None
    assert {m.replica: m.state for m in entry.report.members} == {"a": "committed", "b": "lost"}


def test_the_next_swap_ends_what_was_decided_earlier() -> None:
    h, swap = decided_and_died()
    h.add("a", version=1, run="run1")
    h.add("b", staged=swap)
    h.say("n0", local.CommitFailed(swap=swap, member="b", reason="no room"))
    entry = last(h)  # both are known now
    assert entry.state == "incomplete" and entry.report is not None
    assert {m.replica: m.reason for m in entry.report.members} == {"a": "", "b": "no room"}

    h, swap = decided_and_died()
    h.add("a", version=1, run="run1")
    h.say("n0", local.Publish(member="src", version=2))
    h.say("n0", local.StartSwap("m"), request=9)
    assert last(h).state == "decided"  # b may be on its way
    h.now += SETTLE_S
    h.tick()
    assert (last(h).swap, last(h).state) == (swap, "incomplete")


def test_a_decision_that_waits_for_a_ranks_permit_is_made_once_that_rank_is_back() -> None:
    """The daemon missed the previous coordinator's goodbye and connects after swaps have begun."""
    journal: dict[str, SwapRecord] = {}
    h = Harness(NO_CATCH_UP, journal).ready()
    commit(h, swap := h.until_staging(), "a")
    report = journal[swap].written_report()
    assert report is not None
    both = (*report.members, structs.replace(report.members[0], replica="b", node="n1"))
    journal[swap] = replace(journal[swap], report=msgspec.json.encode(structs.replace(report, members=both)))
    later = Harness(NO_CATCH_UP, journal).join()
    later.add("src", versions=(1, 2), run="run1")
    later.add("a", version=1, run="run1")
    assert kinds(later.say("n0", local.StartSwap("m", version=2), request=9)) == [], "b may be on its way"
    later.now = SETTLE_S
    (load,) = [m for m in later.tick() if isinstance(m, cluster.LoadPlan)]
    (stage,) = [m for m in later.say("n0", cluster.PlanLoaded(plan=load.plan)) if isinstance(m, cluster.Stage)]
    staged = cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1)
    assert "CommitStaged" not in kinds(later.say("n0", staged)), "b may serve version 1 until its permit ends"
    later.join("n1", pid=11)
    later.add("b", "n1", version=1, run="run1")
    decided = later.tick()
    assert "CommitStaged" in kinds(decided) and later.now < Config().deadlines.lease_s
    assert [m.member for m in decided if isinstance(m, local.Fence)] == ["b"]


def replaced_by(journal: dict[str, SwapRecord], held: float, back: str = "a") -> None:
    """Check that the next coordinator decides no version before `held` if only these ranks return, at version 1."""
    h = Harness(NO_CATCH_UP, journal).join()
    h.add("src", versions=(1, 2), run="run1")
    for member in back:
        h.add(member, version=1, run="run1")
    h.say("n0", local.StartSwap("m", version=2), request=9)
    h.now = SETTLE_S
    begun = [m for m in [*(m for _, _, m in h.sent), *h.tick()] if isinstance(m, cluster.LoadPlan)]
    (stage,) = [m for m in h.say("n0", cluster.PlanLoaded(plan=begun[0].plan)) if isinstance(m, cluster.Stage)]
    h.say("n0", cluster.StageDone(swap=stage.swap, copies=1, bytes=32, seconds=0.1))
    h.now = held - 0.1
    h.state.nodes["n0"].last_heard = h.now
    assert "CommitStaged" not in kinds(h.tick()), "a rank that nobody has heard may serve version 1"
    h.now = held + 0.1
    assert "CommitStaged" in kinds(h.tick())


def test_a_later_catch_up_hides_no_rank_whose_state_is_unknown() -> None:
    """The last decision names only the rank that was caught up; the others may serve on a node that is cut off."""
    journal: dict[str, SwapRecord] = {}
    h = Harness(journal=journal).ready()
    commit(h, swap := h.until_staging(), "a")
    report = journal[swap].written_report()
    assert report is not None
    both = (*report.members, structs.replace(report.members[0], replica="b", node="n1"))
    journal[swap] = replace(journal[swap], report=msgspec.json.encode(structs.replace(report, members=both)))
    (load,) = [m for m in h.add("c") if isinstance(m, cluster.LoadPlan)]
    (stage,) = [m for m in h.say("n0", cluster.PlanLoaded(plan=load.plan)) if isinstance(m, cluster.Stage)]
    commit(h, stage.swap, "c")
    last_report = journal[stage.swap].written_report()
    assert last_report is not None and [m.replica for m in last_report.members] == ["c"]
    replaced_by(journal, held=Config().deadlines.lease_s, back="ac")


def test_a_repeated_swap_to_the_live_version_hides_no_rank_that_it_left_out() -> None:
    """The last decision names all ranks but those of an engine that slept then, and serves the live version again."""
    journal: dict[str, SwapRecord] = {}
    h = Harness(NO_CATCH_UP, journal).ready()
    h.add("b")
    commit(h, h.until_staging(), "a", "b")
    h.say("n0", local.Suspend(member="b", suspended=True), request=5)
    commit(h, again := h.until_staging(), "a")
    h.say("n0", local.Suspend(member="b", suspended=False), request=6)
    assert {m.version for m in h.state.models["m"].membership.targets.values()} == {1}
    report = journal[again].written_report()
    assert report is not None and [m.replica for m in report.members] == ["a"]
    replaced_by(journal, held=Config().deadlines.lease_s)


def test_a_coordinator_whose_journal_no_longer_names_all_ranks_waits_for_the_permits_of_any() -> None:
    journal: dict[str, SwapRecord] = {}
    h = Harness(NO_CATCH_UP, journal).ready()
    commit(h, swap := h.until_staging(), "a")
    journal[swap] = replace(journal[swap], report=b"{}")  # by another refitd, or only what is live is known still
    replaced_by(journal, held=Config().deadlines.lease_s)


def test_a_rank_that_was_lost_twice_is_waited_for_in_both_places() -> None:
    """A process on an isolated node still serves; another process took its name and has registered again."""
    absent, ranks = AbsentRanks(), Harness(NO_CATCH_UP).ready()
    ranks.join("n1", pid=11)
    old = ranks.state.members["a"]
    new = replace(old, place=Place("n1", "h"))
    absent.lost(old, 10.0)
    assert not absent.registered(new)
    absent.lost(new, 12.0)
    assert absent.registered(new)
    assert absent.until("m", 9.0) == 10.0 and "n0" in absent.describe("m")


# --- The coordinator's record of live versions, and the number of swaps that it remembers. --------------


class Nothing:
    """An empty journal."""

    id, is_new = "j", False

    def live(self, model: str) -> None:
        return None

    def highest(self, model: str) -> int:
        return -1


def test_what_is_kept_of_swaps_that_were_decided_is_bounded_and_the_last_ones_are_known() -> None:
    past: Any = Nothing()
    lives = LiveVersions(past, 0.0, True)
    lives.keep("policy")
    last = 2 * KEPT_DECISIONS
    for number in range(last + 1):
        lives.decided("policy", LiveVersion(number, "run", number, f"swap {number}"))
    assert len(lives._decided) == KEPT_DECISIONS
    assert lives.was_decided(f"swap {last}") == (last, "run") and lives.was_decided("swap 0") is None
