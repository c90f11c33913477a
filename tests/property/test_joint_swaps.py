"""The swaps of a joint request are decided together or not at all, in any order of events."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
from hypothesis import given, settings

from refitd.errors import CommitError
from refitd.protocol import cluster, local
from tests.support.coordinator_harness import Harness
from tests.unit.test_joint_decisions import COMMIT_S, LEASE_S, MODELS, PAIRS, serving

models = st.sampled_from(MODELS)
# with these weights most histories reach a decision, in several orders
onward = st.one_of(
    st.tuples(st.just("ask"), models),
    st.tuples(st.just("load"), models),
    st.tuples(st.just("stage"), models),
    st.tuples(st.just("stage"), models),
    st.tuples(st.just("commit"), models),
)
turns = st.tuples(st.just("turn"), st.sampled_from([0.1, 3.0, COMMIT_S + 1, LEASE_S, LEASE_S + COMMIT_S + 1, 400.0]))
mishaps = st.one_of(
    st.tuples(st.sampled_from(["abort", "fail", "refuse", "leave", "return", "withdraw"]), models),
    st.tuples(st.just("full"), st.booleans()),
)
histories = st.lists(onward | onward | turns | mishaps, max_size=30)


class Joint:
    """Joint swaps of two models. One model may have lost a rank."""

    def __init__(self, lost: str, order: tuple[str, ...]) -> None:
        self.h: Harness = serving(lost, order)
        self.parties: list[set[str]] = []
        self.plans: dict[str, str] = {}  # by model
        self.swaps: dict[str, str] = {}  # by model
        self.told = 0

    def does(self, what: str, about: object) -> None:
        h, model = self.h, str(about)
        swap = self.swaps.get(model, "")
        match what:
            case "ask":
                h.say("n0", local.StartSwaps(PAIRS), request=7)
                running = {n: s.running for n, s in h.state.models.items() if s.running is not None}
                if running and all(one.together is not None for one in running.values()):
                    self.swaps = {name: one.swap.swap for name, one in running.items()}
                    self.parties.append(set(self.swaps.values()))
            case "load":
                for plan in [plan for plan, of in self.plans.items() if of == model]:
                    h.say("n0", cluster.PlanLoaded(plan=plan))
            case "stage":
                h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=32, seconds=0.1))
            case "commit":
                h.say("n0", local.CommitDone(swap=swap, member=f"a-{model}", paused_s=0.0))
            case "turn":
                assert isinstance(about, float)
                h.now += about
                h.state.nodes["n0"].last_heard = h.now
                h.tick()
            case "abort":
                h.say("n0", local.AbortSwap(model, "enough"), request=8)
            case "fail":
                h.say("n0", cluster.StageDone(swap=swap, where="w", reason="r"))
            case "refuse":
                h.say("n0", local.CommitFailed(swap=swap, member=f"a-{model}", reason="no"))
            case "leave":
                h.say("n0", local.Deregister(member=f"a-{model}", reason="left"))
            case "return":
                h.add(f"a-{model}", model=model, replica="a", version=1, run="x")
            case "withdraw":
                h.say("n0", local.Withdraw(member=f"src-{model}", version=2))
            case "full":
                h.journal_error = CommitError("disk full") if about else None
        self.listen()

    def listen(self) -> None:
        """Note plans, and check that a decided swap is committed and any other is not."""
        for _, _, message in self.h.sent:
            match message:
                case cluster.LoadPlan(plan, of):
                    self.plans[plan] = of
                case cluster.CommitStaged(swap):
                    assert swap in self.h.decided, f"{swap} is committed and not in the journal"
                    self.told += 1
                case cluster.Abort(swap):
                    assert swap not in self.h.decided, f"{swap} is decided and is aborted"
        for party in self.parties:
            assert party & self.h.decided in (set(), party), f"of {party} only {party & self.h.decided} is decided"


@given(histories, st.sampled_from(["", *MODELS]), st.sampled_from([MODELS, MODELS[::-1]]))
@settings(max_examples=100, deadline=None)
def test_joint_swaps_have_one_outcome_in_any_order_of_events(
    history: list[tuple[str, object]], lost: str, order: tuple[str, ...]
) -> None:
    joint = Joint(lost, order)
    for model in MODELS:  # most histories should reach a decision
        joint.does("ask", model)
        joint.does("load", model)
    for what, about in history:
        with contextlib.suppress(KeyError):
            joint.does(what, about)
    for _ in range(4):  # the rest ends by timeouts
        joint.does("turn", 400.0)
    assert not any(state.running for state in joint.h.state.models.values())
