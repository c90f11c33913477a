"""Chooses a model's next swap: a requested one, then a newer version, then a catch-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from refitd.coordinator.decision import AbortAsked, Phase
from refitd.coordinator.eligibility import spare_run, version_to_swap
from refitd.coordinator.live_versions import Past
from refitd.coordinator.members import poison
from refitd.coordinator.membership import Membership
from refitd.coordinator.models import ModelState, Running, Waiter
from refitd.coordinator.records import LiveVersion
from refitd.coordinator.seeding import seeded, seeds_failed
from refitd.errors import RefusedError
from refitd.protocol import local
from refitd.states import SwapCause

# Limit on queued swaps of one model.
MAX_QUEUED = 64

# Retries of an aborted catch-up per registration, and the pause that each adds.
CATCH_UP_AGAIN = 3
CATCH_UP_PAUSE_S = 3.0

# A catch-up of large replicas waits this long after the last, or after the first, of them has joined. Engines that are
# started together do not join at the same moment, and a second catch-up would use the cables' time again.
GATHER_S = 1.0
GATHER_AT_MOST_S = 4.0
GATHER_BYTES = 64 << 20  # smaller replicas are caught up faster than this wait

# The shortest timeout of a queued swap whose turn comes; 0 would mean no timeout.
SHORTEST_S = 0.001


@dataclass(frozen=True, slots=True)
class DueSwap:
    """A swap that can begin."""

    kind: str  # "asked", "rollback", "auto", "catch-up"
    version: int
    run: str
    membership: Membership
    timeout_s: float = 0.0  # 0: only the phases have deadlines
    waiters: tuple[Waiter, ...] = ()
    is_watched: bool = False  # the waiters are sent its progress
    flips_back: bool = False  # every target holds the version in its other arena; nothing moves


def asked_for(state: ModelState, asked: local.StartSwap, waiter: Waiter, past: Past, waited_s: float = 0.0) -> DueSwap:
    """Return the requested swap; `waited_s` seconds of its timeout have passed.

    Raises:
        RefusedError: it cannot be swapped now; the text says what is missing and where.
    """
    version, kind = asked.version, "asked"
    if asked.rollback:
        version, kind = _version_before(state, past) if version is None else version, "rollback"
    membership = state.membership.engines()
    if not membership.targets and (left_out := state.membership.left_out()):
        raise RefusedError(f"model {state.membership.name!r}: {left_out}")
    timeout_s = max(SHORTEST_S, asked.timeout_s - waited_s) if asked.timeout_s else 0.0
    if asked.rollback and version is not None and (run := spare_run(membership, version)) is not None:
        return DueSwap(kind, version, run, membership, timeout_s, (waiter,), asked.progress, flips_back=True)
    version = version_to_swap(membership, version, may_be_older=asked.rollback)
    run = state.membership.run() or ""
    if text := used_up(state, version, run):
        raise RefusedError(f"model {state.membership.name!r}: {text}")
    return DueSwap(kind, version, run, membership, timeout_s, (waiter,), asked.progress)


def _version_before(state: ModelState, past: Past) -> int:
    name, live = state.membership.name, state.live
    if live is None:
        raise RefusedError(f"model {name!r}: no version has been live yet, so that there is none to go back to")
    older = past.before(name, live.version)
    if older is None:
        raise RefusedError(
            f"model {name!r}: the journal has no version before {live.version}, which is live; name one with --version "
            f"(held by every source rank: {state.membership.complete_versions() or 'none'})"
        )
    return older.version


def used_up(state: ModelState, version: int, run: str) -> str:
    """Return why a run cannot use a version number (it was live with other contents), "" if it can."""
    live = state.live
    if live is None or live.run == run or version > state.highest:
        return ""
    return (
        f"version {version} was live with other contents, or may have been: {live} is live, and versions up to "
        f"{state.highest} were; publish {state.highest + 1} or above"
    )


def must_wait(state: ModelState, asked: local.StartSwap) -> bool:
    """Return whether a requested swap must wait for a running one.

    Raises:
        RefusedError: it must wait and did not ask to be queued, or the queue is full.
    """
    running = state.running
    if len(state.queue) >= MAX_QUEUED:
        name = state.membership.name
        raise RefusedError(f"model {name!r}: {MAX_QUEUED} swaps are waiting already; wait for some of them")
    if running is None:
        return False
    r = running.swap
    # a catch-up was not requested: it never causes a refusal
    if not asked.queue and running.kind != "catch-up":
        raise RefusedError(
            f"model {r.model!r}: swap {r.swap} to version {r.version} is running (phase {r.phase.value}); "
            "wait for it, queue behind it (--queue), or abort it with `refitctl abort`"
        )
    return True


# What nodes or ranks have to do in each phase, for messages.
_AWAITED = {
    Phase.PLANNED: "load its plan",
    Phase.HALTING: "stand still",
    Phase.STAGING: "stage it",
    Phase.PAUSING: "stand still",
    Phase.COMMITTING: "take it over (poll() or wait(), or its controller's call)",
}


def no_turn(state: ModelState, waited_s: float) -> str:
    """Return why a queued swap has not begun: the swap before it, whom that one waits for, and what will end it."""
    name, running = state.membership.name, state.running
    late = f"model {name!r}: its turn did not come within {waited_s:.1f} s"
    if running is None:
        return f"{late}: the coordinator has just started and waits for daemons; try again in some seconds"
    r = running.swap
    late += f": swap {r.swap} to version {r.version} ({running.kind}, phase {r.phase.value}) runs"
    if not r.waiting or r.phase not in _AWAITED:
        return f"{late}; see `refitctl status`"
    who = ", ".join(r.names.get(one, f"node {one}") for one in sorted(r.waiting))
    late += f" and waits for {who} to {_AWAITED[r.phase]}"
    stuck = [running.members[one].added for one in sorted(r.waiting) if one in running.members]
    if not stuck:
        return f"{late}; look at that node, or stop the swap: `refitctl abort {name}`"
    if r.phase is not Phase.COMMITTING:
        return f"{late}; stop the swap: `refitctl abort {name}`"
    return f"{late}; if it hangs: `refitctl evict {name} --replica {stuck[0].replica} --rank {stuck[0].rank}`"


_CERTAIN = (Phase.STAGED, Phase.DECIDING, Phase.COMMITTING)


def gives_way(running: Running) -> bool:
    """Return whether a running swap yields to a requested one: an undecided catch-up does."""
    return running.kind == "catch-up" and running.swap.phase not in _CERTAIN


def gave_way() -> AbortAsked:
    """Return the event that ends a catch-up in favour of a requested swap."""
    return AbortAsked("it gives way to a swap of all replicas that was asked for", SwapCause.OVERTAKEN)


def is_forming(running: Running) -> bool:
    """Return whether nodes form an epoch for a swap: a worker that is joining its peers cannot be called back."""
    return running.swap.phase is Phase.PLANNED and running.plan is not None and running.plan.epoch is not None


def newer(state: ModelState) -> DueSwap | None:
    """Return the swap to a complete version newer than every decided one and any that this run tried.

    Raises:
        RefusedError: such a version exists and cannot be swapped now.
    """
    membership = state.membership.engines()
    complete = membership.complete_versions()
    if not complete or complete[-1] <= state.highest or not membership.targets or membership.drained_sources():
        return None
    run, (tried, tried_run) = state.membership.run() or "", state.tried
    if run == tried_run and complete[-1] <= tried:
        return None
    return DueSwap("auto", version_to_swap(membership, None), run, membership)


def lagging(state: ModelState, *, only_observers: bool = False) -> DueSwap | None:
    """Return the catch-up of replicas that joined, returned or failed, if others or sources hold the live version.

    One that was aborted is tried again from the sources, if they hold it.

    Raises:
        RefusedError: such replicas exist and cannot be swapped now, or nobody can give them the live version.
    """
    live = state.live
    replicas = state.membership.behind(live, only_observers=only_observers) if live is not None else []
    if live is None or not replicas:
        return None
    is_held = state.membership.sources_give(live)
    membership = state.membership.only(replicas)
    if not (is_held and any(member.tries for member in membership.targets.values())):
        given = seeded(state.membership, live, replicas)
        if given is not None:
            return DueSwap("catch-up", live.version, live.run, given)
    if not is_held:
        raise RefusedError(_nobody_gives(state.membership, live, replicas))
    whole = len(membership.targets) == len(state.membership.targets)
    version = version_to_swap(membership, live.version, may_be_older=True)
    return DueSwap("catch-up", version, live.run, state.membership if whole else membership)


def _nobody_gives(membership: Membership, live: LiveVersion, replicas: Sequence[str]) -> str:
    name, version = membership.name, live.version
    held = membership.complete_versions() if membership.run() == live.run else []
    sources = f"its source ranks hold {held or 'nothing of its run'}" if membership.sources else "it has no sources"
    if version in held:
        sources = f"its sources are on drained nodes ({', '.join(sorted(membership.drains))})"
    serving = sorted(
        replica
        for replica, ranks in membership.replicas().items()
        if replica not in replicas and all(live.is_at(m.version, m.run) for m in ranks)
    )
    seeds = "no other replica serves it"
    if serving:
        seeds = (
            f"{', '.join(map(repr, serving))} can give it to none of them (another type, cast or MXFP8, tensors that "
            "they lack, memory that has changed or is not known to hold it, or left out)"
        )
    return (
        f"model {name!r}: nobody gives version {version}, which is live, to {', '.join(map(repr, replicas))}: "
        f"{sources}, and {seeds}; publish and swap a newer version"
    )


def gathers_until(due: DueSwap) -> float:
    """Return until when a catch-up waits for others that may join, too."""
    whole_at: dict[str, float] = {}
    nbytes: dict[str, int] = {}
    for (replica, _), member in due.membership.targets.items():
        whole_at[replica] = max(member.joined_at, whole_at.get(replica, 0.0))
        nbytes[replica] = nbytes.get(replica, 0) + member.bytes
    if max(nbytes.values(), default=0) < GATHER_BYTES:
        return 0.0
    return min(max(whole_at.values()) + GATHER_S, min(whole_at.values()) + GATHER_AT_MOST_S)


def left_behind(state: ModelState, running: Running, now: float) -> None:
    """Note which ranks a failed swap left behind, and when to retry them."""
    s = running.swap
    if s.phase is Phase.COMMITTED:
        return
    present = {member.id: member for member in state.membership.members()}
    for member_id in s.members:
        member = present.get(member_id)
        if member is None:
            continue
        if s.phase is Phase.ABORTED and member_id in s.poisoned:
            poison(member, s.swap, s.reason)
        member.left_behind |= member_id in s.failed  # it would most likely fail again
    if running.kind == "catch-up" and not running.gives_way and not seeds_failed(running):
        for member in running.membership.targets.values():
            member.left_behind |= (member.version, member.run) != (s.version, running.run)
            if s.phase is Phase.ABORTED and member.left_behind and member.tries < CATCH_UP_AGAIN:
                member.tries += 1
                member.again_at = now + CATCH_UP_PAUSE_S * member.tries


def try_again(state: ModelState, now: float) -> bool:
    """Mark ranks as due whose retry pause is over; return whether there are any."""
    due = [m for m in state.membership.targets.values() if m.again_at is not None and now >= m.again_at]
    for member in due:
        member.again_at, member.left_behind = None, False
    return bool(due)
