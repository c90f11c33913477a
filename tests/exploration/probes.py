"""Events that no cluster produces are refused in every state, and a refused event leaves the state as it was.

The states are all that the machines reach from their first state. `check` raises AssertionError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from refitd.commit import decision
from refitd.commit import decision as d
from refitd.commit import rank_state as r
from refitd.commit import swap_events as e
from refitd.commit import target_state as t
from refitd.commit.decision import FINAL, Limits, Phase
from refitd.errors import IllegalTransition
from refitd.protocol import local
from tests.exploration.fleet import FAR, canonical

S = TypeVar("S")


def reached(first: S, after: Callable[[S], Iterator[S]]) -> list[S]:
    """Return every state that can be reached."""
    seen, queue = {first: None}, deque([first])
    while queue:
        for state in after(queue.popleft()):
            if state not in seen:
                seen[state] = None
                queue.append(state)
    return list(seen)


def refuses(do: Callable[[], object], what: str) -> None:
    """Check that an event is refused."""
    try:
        do()
    except IllegalTransition:
        return
    raise AssertionError(f"{what} is not refused")


# --- the coordinator's machine ----------------------------------------------------------------------------

MEMBERS = {"a": "n0", "b": "n1"}
NODES = frozenset(MEMBERS.values())
READY = tuple(
    e.PlanReady(MEMBERS, NODES, 1, frozenset(asked), frozenset(halts), frozenset(halts), loaded)
    for asked, halts in (("", ""), ("a", ""), ("ab", "a"), ("ab", "ab"))
    for loaded in (frozenset[str](), NODES)
)
EARLY = tuple(replace(ready, publishing=frozenset({"src"})) for ready in READY)
OF_NODES = [kind for n in ("n0", "n1") for kind in (e.NodeLoaded(n), e.NodeStaged(n, 1, 1), e.NodeFailed(n, n, "r"))]
OF_MEMBERS = [
    kind
    for m in ("a", "b")
    for kind in (e.QuietReported(m), e.CommitReported(m, 0.0), e.MemberFailed(m, "r"), e.MemberLost(m, "r"))
]
OTHERS = [e.DecisionSubmitted(), e.Journalled(), e.NotJournalled("r"), e.AbortAsked("r"), e.MemberLost("src", "r")]
STRANGE: list[e.Event] = [
    e.NodeLoaded("n9"),
    e.NodeProgress("n9", 1),
    e.NodeStaged("n9", 1, 1),
    e.NodeFailed("n9", "n9", "r"),
    e.PlanLost("n9", "n9", "r"),
    e.QuietReported("x"),
    e.CommitReported("x", 0.0),
    e.MemberFailed("x", "r"),
    e.MemberLost("x", "r"),
    e.QuietReported("src"),
    e.CommitReported("src", 0.0),
    e.MemberFailed("src", "r"),
    e.SourceFinished("x"),
]


class Late(NamedTuple):
    """A message that may arrive late, and the phases that ignore it."""

    event: e.Event
    phases: tuple[Phase, ...]


_STAGED = (Phase.PAUSING, Phase.STAGED, Phase.DECIDING, Phase.COMMITTING)
LATE = (
    *(Late(e.NodeLoaded(node), (Phase.HALTING, Phase.STAGING, *_STAGED)) for node in ("n0", "n1")),
    Late(e.PlanLost("n0", "n0", "r"), _STAGED),
    Late(e.NodeFailed("n0", "n0", "r"), (Phase.DECIDING, Phase.COMMITTING)),
    Late(e.MemberLost("src", "r"), _STAGED),
)


def _after_swap(swap: d.Swap) -> Iterator[d.Swap]:
    for event in (*READY, *EARLY, e.SourceFinished("src"), *OF_NODES, *OF_MEMBERS, *OTHERS):
        try:
            after = d.step(swap, event, 0.0)[0]
            assert bool(after.history) == (after is not swap), f"{event} in {swap.phase} leaves {after.history}"
            yield canonical(after)
        except IllegalTransition:
            assert (type(event), swap.phase) not in d.ROWS or hasattr(event, "node") or hasattr(event, "member")
    if swap.phase not in FINAL:
        yield canonical(d.step(swap, e.TimePassed(), FAR)[0])


def check_swaps() -> None:
    """Check the coordinator's machine."""
    first = d.begin("s", "m", 1, Limits(1, 1, 1), dict.fromkeys((*MEMBERS, "src"), "x"), 0.0)
    for swap in reached(canonical(first), _after_swap):
        for event in STRANGE:
            refuses(lambda event=event, swap=swap: d.step(swap, event, 0.0), f"{event} in {swap.phase}")
        if swap.phase is Phase.STAGING:
            for node in swap.nodes - swap.waiting:
                refuses(lambda n=node, swap=swap: d.step(swap, e.NodeStaged(n, 1, 1), 0.0), "a repeated NodeStaged")
        if not swap.publishing:
            refuses(lambda swap=swap: d.step(swap, e.SourceFinished("src"), 0.0), "a repeated SourceFinished")
        assert not swap.publishing or Phase.STAGED not in swap.entered
        if swap.phase in (Phase.HALTING, Phase.PAUSING):
            for member in swap.members.keys() - swap.waiting:
                refuses(lambda m=member, swap=swap: d.step(swap, e.QuietReported(m), 0.0), "a repeated QuietReported")
        for late in LATE:
            if swap.phase in late.phases:
                assert d.step(swap, late.event, 0.0) == (swap, []), f"{late.event} has an effect in {swap.phase}"
        if swap.phase is Phase.COMMITTING:
            for member in swap.members.keys() - swap.waiting:
                assert d.step(swap, e.CommitReported(member, 0.0), 0.0) == (swap, [])
        if swap.phase is Phase.INCOMPLETE:
            assert swap.failed and set(swap.failed) <= set(swap.members)
        if swap.phase in FINAL:
            assert not swap.waiting
            for event in (*OF_NODES, *OF_MEMBERS, *OTHERS, e.TimePassed()):
                refuses(lambda event=event, swap=swap: d.step(swap, event, FAR), f"{event} in {swap.phase}")
        assert swap.poisoned == (swap.in_place if Phase.STAGING in swap.entered and not _decided(swap) else frozenset())
    timed = d.begin("s", "m", 1, Limits(100.0, 1, 1, total_s=5.0), {}, 0.0)
    assert timed.deadline == 5.0 and d.step(timed, e.TimePassed(), 5.0)[0].phase is Phase.ABORTED


def _decided(swap: d.Swap) -> bool:
    return Phase.COMMITTING in swap.entered


# --- the daemon's machine ---------------------------------------------------------------------------------

TARGET_EVENTS: list[t.Event] = [
    t.ContentRestored(),
    t.ContentRefused(),
    t.FellBehind("3 is live"),
    t.Suspended(),
    t.Woken(),
    t.WokenEmpty(),
    *(
        event
        for swap in ("s", "u")
        for event in (
            t.StageBegan(swap, 2, "r"),
            t.SpareStaged(swap, 1, "r"),
            t.SpareStaged(swap, 2, "r"),
            t.StageFinished(swap),
            t.Decided(swap, 1),
            t.Decided(swap, 2),
            t.Committed(swap),
            t.CommittedByCopy(swap),
            t.Failed(swap),
            t.Aborted(swap, "x"),
        )
    ),
]


def _after_target(state: t.TargetState) -> Iterator[t.TargetState]:
    for event in TARGET_EVENTS:
        if _is_away(state) and isinstance(event, t.StageBegan | t.SpareStaged):
            continue  # the coordinator leaves suspended ranks out
        try:
            yield t.step_of(state, event)
        except IllegalTransition:
            continue


def check_targets() -> None:
    """Check the daemon's machine."""
    assert t.fresh(in_place=False, run="r") == t.fresh(in_place=False)
    assert t.fresh(in_place=False, version=1, run="r").run == "r"
    for first in (
        t.fresh(in_place=False),
        t.fresh(in_place=False, version=1, run="r"),
        t.fresh(in_place=True, version=1, run="r"),
        t.fresh(in_place=False, version=1, run="r", flips=True),
        t.restoring(1, "r"),
        t.restoring(1, "r", flips=True),
    ):
        for state in reached(first, _after_target):
            _check_target(state)


def _check_target(state: t.TargetState) -> None:
    assert (state.swap is None) == (state.step in (t.Step.IDLE, t.Step.RESTORING)), state
    assert (state.version is None) == (state.live in (t.Live.EMPTY, t.Live.WRITTEN, t.Live.POISONED)), state
    assert state.in_place or state.live not in (t.Live.WRITTEN, t.Live.POISONED), state
    assert bool(state.reason) == (state.live in (t.Live.BEHIND, t.Live.POISONED)), state
    assert not state.may_serve or not state.live.is_fenced or state.step is t.Step.COMMITTING, state
    assert state.spare is None or state.flips, state
    assert bool(state.spare_run) <= (state.spare is not None), state
    assert bool(state.run) <= (state.version is not None or state.holds is not None), state
    assert not (state.step is t.Step.IDLE and (state.next is not None or state.next_run)), state
    is_written = state.in_place and state.step in (t.Step.STAGING, t.Step.STAGED)
    assert not is_written or state.live is t.Live.WRITTEN, state
    for event in TARGET_EVENTS:
        named = getattr(event, "swap", None)
        if named is not None and state.swap is not None and named != state.swap:
            refuses(lambda event=event: t.step_of(state, event), f"{event} of another swap in {state}")
    if state.step in (t.Step.STAGED, t.Step.COMMITTING) and state.swap is not None:
        refuses(lambda: t.step_of(state, t.Decided(str(state.swap), 9)), "a decision about another version")
    if state.step is t.Step.IDLE:
        other = t.SpareStaged("s", 9, "r")
        refuses(lambda: t.step_of(state, other), "a version that the other arena does not hold")
        began = t.step_of(state, t.StageBegan("s", 2, "r")) if not _is_away(state) else None
        if began is not None:
            assert began.holds == (state.holds if state.flips else None) and began.spare is None
    if state.step is t.Step.RESTORING:
        restored, refused = t.step_of(state, t.ContentRestored()), t.step_of(state, t.ContentRefused())
        assert (restored.live, restored.version) == (t.Live.SERVING, state.next)
        assert (refused.live, refused.holds) == (t.Live.EMPTY, None)
    else:
        fenced = t.step_of(state, t.FellBehind("3 is live"))
        assert fenced.step is state.step and fenced.live not in (t.Live.SERVING, t.Live.SUSPENDED)
    if state.step in (t.Step.STAGING, t.Step.STAGED):
        aborted = t.step_of(state, t.Aborted(str(state.swap), "x"))
        assert aborted.live is (t.Live.POISONED if state.in_place else state.live)
    if state.step is t.Step.COMMITTING:
        swap = str(state.swap)
        assert t.step_of(state, t.Committed(swap)).live is t.Live.SERVING
        assert t.step_of(state, t.Failed(swap)).live is t.Live.EMPTY
        assert state.in_place or t.step_of(state, t.CommittedByCopy(swap)).live is t.Live.SERVING
        done = t.step_of(state, t.Committed(swap))
        assert (done.version, done.run, done.holds) == (state.next, state.next_run, state.next) or _is_poisoned(done)
        assert not state.flips or _is_poisoned(done) or done.spare == state.holds
        assert not t.step_of(state, t.Failed(swap)).holds or not state.flips
        if state.flips and not _is_poisoned(done):
            assert t.step_of(state, t.CommittedByCopy(swap)).spare == state.spare
    if state.live is t.Live.SERVING and state.step is t.Step.IDLE:
        lost = t.step_of(state, t.WokenEmpty())
        assert t.step_of(state, t.Suspended()).live is t.Live.SUSPENDED and lost.live is t.Live.EMPTY
        assert lost.holds == (None if state.flips or state.in_place else state.holds)

    if state.live in (t.Live.SUSPENDED, t.Live.BEHIND) and state.step is t.Step.IDLE:
        assert t.step_of(state, t.Woken()).live is (t.Live.SERVING if _is_away(state) else state.live)
        assert t.step_of(state, t.WokenEmpty()).live is t.Live.EMPTY


def _is_away(state: t.TargetState) -> bool:
    return state.live is t.Live.SUSPENDED


def _is_poisoned(state: t.TargetState) -> bool:
    return state.live is t.Live.POISONED


# --- the rank's machine -----------------------------------------------------------------------------------

FAILURE = local.Failure("peer-lost", "gone")
RANK_EVENTS: list[Any] = [
    *(
        local.PrepareCommit(swap, "m", version, flips=True, run="r", controlled=controlled)
        for swap, version in (("s", 2), ("u", 3))
        for controlled in (False, True)
    ),
    local.Fence("m", "3 is live"),
    local.Fence("m", ""),
    local.Poisoned("s", "m", "x"),
    local.Evicted("m", "x", "s"),
    r.Begun(),
    r.WriteBegan(),
    r.Exchanged(),
    r.Written(0.5, True),
    r.WriteFailed("x"),
    r.Interrupted(),
    r.Reported(),
    r.GaveUp("x"),
    r.DaemonEnded(FAILURE),
    r.DaemonEnded(FAILURE, is_written=True),
    r.DaemonLost(FAILURE, must_stop=True),
    r.DaemonLost(FAILURE),
    r.Orphaned(FAILURE),
    r.Rejoined("m2"),
    r.Closed("closed"),
    r.Suspended(),
    r.Woken(),
    r.Woken(is_lost=True),
]


# A daemon's messages and the ends of a registration come at any time.
UNREFUSED = (
    *(local.PrepareCommit, local.Fence, local.Poisoned, local.Evicted),
    *(r.DaemonEnded, r.DaemonLost, r.Orphaned, r.Closed, r.Woken),
)
BONDS = {
    r.DaemonEnded: {r.Bond.JOINED: r.Bond.AWAY},
    r.Rejoined: {r.Bond.AWAY: r.Bond.JOINED},
    local.Evicted: {r.Bond.JOINED: r.Bond.EVICTED},
    r.DaemonLost: dict.fromkeys((r.Bond.JOINED, r.Bond.AWAY), r.Bond.LOST),
    r.Orphaned: dict.fromkeys(set(r.Bond) - {r.Bond.CLOSED}, r.Bond.ORPHANED),
    r.Closed: dict.fromkeys(r.Bond, r.Bond.CLOSED),
}


def _after_rank(state: r.RankState) -> Iterator[r.RankState]:
    for event in RANK_EVENTS:
        try:
            yield _plain(r.step(state, event)[0])
        except IllegalTransition:
            continue


def _plain(state: r.RankState) -> r.RankState:
    return replace(state, member="m")


def check_ranks() -> None:
    """Check the rank's machine, state by state and event by event."""
    for state in reached(r.joined("m", 1, "r"), _after_rank):
        assert (state.taking is None) == (state.step is r.RankStep.IDLE), state
        assert (state.failure is None) or state.bond is not r.Bond.JOINED, state
        assert state.pending is None or state.bond in (r.Bond.JOINED, r.Bond.LOST), state
        if state.pending is None:
            refuses(lambda state=state: r.step(state, r.Begun()), "a commit of nothing")
            refuses(lambda state=state: r.step(state, r.GaveUp("x")), "withdrawing nothing")
        for event in RANK_EVENTS:
            try:
                after, report = r.step(state, event)
            except IllegalTransition:
                assert not isinstance(event, UNREFUSED), f"{event} is refused in {state}"
                continue
            _check_move(state, event, after, report)


def _check_move(state: r.RankState, event: Any, after: r.RankState, report: r.Report | None) -> None:
    if after.version is not None and after.version != state.version:
        assert isinstance(event, r.Written), event
    is_joined = state.bond is r.Bond.JOINED
    assert after.bond is BONDS.get(type(event), {}).get(state.bond, state.bond), event
    match event:
        case local.PrepareCommit(swap):
            is_told = state.last is not None and state.last.swap == swap
            is_taken = state.taking is not None and state.taking.swap == swap
            assert (report is not None) == (is_joined and is_told and state.step is r.RankStep.IDLE)
            if not is_joined or is_told or is_taken:
                assert after.pending == state.pending
            else:
                repeats = state.pending is not None and state.pending.swap == swap and not event.controlled
                assert after.pending == (state.pending if repeats else event)
        case local.Fence(_, reason):
            assert after.fenced == (reason if is_joined else state.fenced)
        case local.Evicted(_, _, exchanged):
            assert not is_joined or (after.pending is None and after.fenced and after.failure is not None)
            assert after.is_estranged == (state.is_estranged or (is_joined and state.flipped != exchanged))
        case local.Poisoned() | r.WriteBegan() | r.WriteFailed() | r.GaveUp():
            assert after.version is None
            assert isinstance(event, r.GaveUp) == (report is not None)
            if isinstance(event, r.WriteFailed):
                assert state.taking is not None and isinstance(after.last, local.CommitFailed)
                assert after.last.exchanged == (state.flipped == state.taking.swap)
        case r.Exchanged():
            assert after.is_estranged == (state.is_estranged or state.bond is r.Bond.EVICTED)
        case r.Written():
            assert state.taking is not None and isinstance(after.last, local.CommitDone)
            assert (after.version, after.run, after.last.swap) == (
                state.taking.version,
                state.taking.run,
                state.taking.swap,
            )
            assert after.fenced == ("" if is_joined else state.fenced)
        case r.Reported():
            assert state.taking is not None
            is_same = state.pending is not None and state.pending.swap == state.taking.swap
            assert after.pending == (None if is_same else state.pending)
            assert after.version == state.version
        case r.Woken(is_lost):
            assert not after.suspended and after.version == (None if is_lost else state.version)
        case r.Suspended():
            assert after.suspended and not after.may_serve and after.version == state.version
        case r.DaemonEnded(_, is_written) if is_joined:
            assert after.pending is None and after.version == (None if is_written else state.version)
        case r.DaemonLost(_, must_stop) if state.bond in (r.Bond.JOINED, r.Bond.AWAY):
            assert after.version == (None if must_stop else state.version)
        case r.Orphaned() if state.bond is not r.Bond.CLOSED:
            assert not after.may_serve and after.pending is None
        case r.Rejoined():
            assert state.bond is not r.Bond.AWAY or (not after.fenced and after.failure is None)
        case r.Closed():
            assert after.pending is None and after.bond is r.Bond.CLOSED
            assert after.fenced == (state.fenced or ("closed" if state.bond is not r.Bond.CLOSED else ""))
            kept = None if state.bond is r.Bond.AWAY else state.failure
            assert after.failure == (kept or local.Failure("refused", "closed"))


def check_fences() -> None:
    """Check which ranks may serve, and that runs are named exactly if only they differ."""
    for version, run, live in product((None, 1, 2), ("one", "two"), (None, 1)):
        reason = decision.fence_reason(version, run, live, "two")
        may_serve = version is None or live is None or (version, run) == (live, "two")
        assert bool(reason) != may_serve, (version, run, live)
        assert ("two" in reason) == (version == live == 1 and run == "one"), reason


def check() -> None:
    """Check all machines."""
    check_fences()
    check_swaps()
    check_targets()
    check_ranks()
