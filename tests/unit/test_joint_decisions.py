"""A joint swap is one decision: the journal, the report and the ranks of all its models have one outcome."""

from __future__ import annotations

import pytest

from refitd.commit.decision import Phase
from refitd.config import Config, Deadlines, ModelConfig
from refitd.coordinator import actions as act
from refitd.coordinator.journals import SwapRecord
from refitd.coordinator.state import NODE_SILENCE_S
from refitd.errors import CommitError
from refitd.protocol import cluster, local
from refitd.protocol.reports import SwapReports
from tests.support.coordinator_harness import Harness, kinds

MODELS = ("m", "d")
CONFIG = Config(
    models={model: ModelConfig(catch_up=False) for model in MODELS}, deadlines=Deadlines(lease_s=60.0, commit_s=5.0)
)
LEASE_S, COMMIT_S = CONFIG.deadlines.lease_s, CONFIG.deadlines.commit_s
PAIRS = tuple(local.ModelVersion(model, 2) for model in MODELS)


def serving(lost: str = "", order: tuple[str, ...] = MODELS) -> Harness:
    """Return two models at version 1, with version 2 published. A rank of the model `lost` is lost with its node."""
    h = Harness(
        CONFIG, {f"s-{m}": SwapRecord(f"s-{m}", m, 1, "committed", "", "", 1.0, run="x") for m in MODELS}
    ).join()
    h.now = 0.0 if lost else LEASE_S  # permits that an earlier coordinator gave have ended then
    for model in order:
        h.add(f"src-{model}", model=model, versions=(1,), run="x")
        h.add(f"a-{model}", model=model, replica="a", version=1, run="x")
    if lost:
        h.join("n1", pid=11)
        h.add("b", "n1", model=lost, version=1, run="x")
        h.now = NODE_SILENCE_S + 1
        h.state.nodes["n0"].last_heard = h.now
        h.tick()
        assert set(h.state.nodes) == {"n0"}
    for model in order:
        h.say("n0", local.Publish(member=f"src-{model}", version=2))
    return h


def staged(h: Harness, first: str = "m") -> dict[str, str]:
    """Ask for the joint swap and stage it everywhere, model `first` first; return its swaps by model."""
    begun = h.say("n0", local.StartSwaps(PAIRS), request=7)
    loads = {m.plan: m for m in begun if isinstance(m, cluster.LoadPlan)}
    swaps = {}
    for plan in loads:
        for stage in h.say("n0", cluster.PlanLoaded(plan=plan)):
            if isinstance(stage, cluster.Stage):
                swaps[next(n for n, s in h.state.models.items() if s.running and s.running.swap.swap == stage.swap)] = (
                    stage.swap
                )
    assert set(swaps) == set(MODELS)
    for model in sorted(swaps, key=lambda model: model != first):
        h.say("n0", cluster.StageDone(swap=swaps[model], copies=1, bytes=32, seconds=0.1))
    return swaps


def outcomes(sent: list[object]) -> set[str]:
    (found,) = [m for m in sent if isinstance(m, SwapReports)]
    return {report.outcome for report in found.reports}


def delayed_journal(h: Harness) -> list[act.Decide]:
    """Hold back the journal's answers from now on; return the list of decisions that wait for one."""
    awaited: list[act.Decide] = []
    handle = h.state.handle

    def held_back(event: act.Event, now: float, wall: float = 0.0) -> list[act.Instruction]:
        instructions = handle(event, now)
        awaited.extend(i for i in instructions if isinstance(i, act.Decide))
        return [i for i in instructions if not isinstance(i, act.Decide)]

    h.state.handle = held_back
    return awaited


@pytest.mark.parametrize("order", [MODELS, MODELS[::-1]], ids=repr)
@pytest.mark.parametrize("first", MODELS)
@pytest.mark.parametrize("lost", MODELS)
@pytest.mark.parametrize("late_s", [0.0, COMMIT_S - 1, COMMIT_S + 1, 20 * COMMIT_S])
def test_a_late_turn_after_a_held_decision_gives_one_outcome(
    lost: str, first: str, order: tuple[str, ...], late_s: float
) -> None:
    h = serving(lost, order)
    swaps = staged(h, first)
    assert not h.decided, "a lost rank may serve version 1 until its permit ends"
    h.now = LEASE_S + late_s
    h.state.nodes["n0"].last_heard = h.now
    sent = h.tick()
    if any(isinstance(m, SwapReports) for m in sent):
        assert late_s > COMMIT_S and outcomes(sent) == {"aborted"} and not h.decided
        return
    told = {m.swap for m in sent if isinstance(m, cluster.CommitStaged)}
    assert told == set(swaps.values()) and "Abort" not in kinds(sent)
    for model, swap in swaps.items():
        sent = h.say("n0", local.CommitDone(swap=swap, member=f"a-{model}", paused_s=0.0))
    assert outcomes(sent) == {"committed"}
    assert h.decided == set(swaps.values()) and {record.state for record in h.journal.values()} == {"committed"}


def test_a_joint_decision_that_is_not_written_aborts_all_its_models() -> None:
    h = serving()
    h.journal_error = CommitError("disk full")
    staged(h)
    assert {m.swap for _, _, m in h.sent if isinstance(m, cluster.Abort)} == {"swap1", "swap2"}
    found = [m for _, _, m in h.sent if isinstance(m, SwapReports)]
    assert outcomes(list(found)) == {"aborted"} and "disk full" in found[0].reports[0].reason
    assert not any(state.running for state in h.state.models.values())


def test_no_turn_request_or_loss_ends_a_joint_swap_before_the_journal_answers() -> None:
    """Here the journal's answer is delayed, and other events arrive first."""
    h = serving()
    awaited = delayed_journal(h)
    swaps = staged(h)
    (decide,) = awaited
    assert {record.swap for record in decide.records} == set(swaps.values())
    (refused,) = h.say("n0", local.AbortSwap("m", "enough"), request=8)
    assert isinstance(refused, local.Failure) and "cannot be aborted" in refused.message
    h.say("n0", cluster.StageDone(swap=swaps["d"], where="w", reason="r"))
    h.say("n0", local.Deregister(member="a-d", reason="left"))
    h.now += 20 * COMMIT_S
    h.state.nodes["n0"].last_heard = h.now
    assert "Abort" not in kinds(h.tick())
    assert {s.running.swap.phase for s in h.state.models.values() if s.running} == {Phase.DECIDING}
    h.sent.clear()
    h.feed(h.written(decide.records))
    h.say("n0", local.CommitDone(swap=swaps["m"], member="a-m", paused_s=0.0))
    found = [m for _, _, m in h.sent if isinstance(m, SwapReports)]
    assert outcomes(list(found)) == {"committed", "incomplete"}


@pytest.mark.parametrize("error", [None, CommitError("disk full")], ids=repr)
def test_a_rank_that_returns_while_the_journal_writes_learns_the_outcome_afterwards(error: CommitError | None) -> None:
    h = serving()
    awaited = delayed_journal(h)
    swap = staged(h)["d"]
    h.say("n0", local.Deregister(member="a-d", reason="its daemon has introduced itself again"))
    fields = {"version": 1, "run": "x", "staged": swap, "staged_version": 2, "staged_run": "x"}
    said = h.add("a-d", model="d", replica="a", **fields)
    assert "Abort" not in kinds(said) and "CommitStaged" not in kinds(said), "the decision may be on disk"
    h.sent.clear()
    h.journal_error = error
    h.feed(h.written(awaited[0].records))
    told = [m for _, _, m in h.sent if isinstance(m, cluster.CommitStaged | cluster.Abort) and m.swap == swap]
    assert told and {type(m) for m in told} == {cluster.Abort if error else cluster.CommitStaged}
    assert h.state.members["a-d"].staged == (None if error else swap)
