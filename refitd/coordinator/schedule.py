"""Which swap a model needs next: what was asked for, then a newer version, then replicas that lag behind."""

from __future__ import annotations

from dataclasses import dataclass

from refitd.commit.machine import Phase
from refitd.coordinator.fleet import Model
from refitd.coordinator.models import MAX_HISTORY, ModelState, Recent, Running, Waiter
from refitd.errors import RefusedError
from refitd.protocol import local

# Swaps of one model that may wait for the running one.
MAX_QUEUED = 64

# An aborted catch-up is tried again so many times for a registration, each time after so much longer a pause.
CATCH_UP_AGAIN = 3
CATCH_UP_PAUSE_S = 3.0


@dataclass(frozen=True, slots=True)
class Due:
    """A swap that can begin."""

    kind: str  # "asked", "rollback", "auto", "catch-up"
    version: int
    fleet: Model
    timeout_s: float = 0.0  # 0: only the phases have deadlines
    waiters: tuple[Waiter, ...] = ()


def asked_for(state: ModelState, asked: local.StartSwap, waiter: Waiter, recent: Recent) -> Due:
    """Return the swap that somebody asked for.

    Raises:
        RefusedError: it cannot be swapped now; the text says what is missing and where.
    """
    version, kind = asked.version, "asked"
    if asked.rollback:
        version, kind = _version_before(state, recent) if version is None else version, "rollback"
    version = state.fleet.version_to_swap(version, may_be_older=asked.rollback)
    return Due(kind, version, state.fleet, asked.timeout_s, (waiter,))


def _version_before(state: ModelState, recent: Recent) -> int:
    name, live = state.fleet.name, state.live
    if live is None:
        raise RefusedError(f"model {name!r}: no version has been live yet, so that there is none to go back to")
    older = [r.version for r in recent(name, MAX_HISTORY) if r.is_decided and r.version < live]
    if not older:
        raise RefusedError(
            f"model {name!r}: the journal has no version before {live}, which is live; name one with --version "
            f"(held by every source rank: {state.fleet.complete_versions() or 'none'})"
        )
    return older[0]


def must_wait(state: ModelState, asked: local.StartSwap) -> bool:
    """Return whether a swap that is asked for now has to wait for a running one.

    Raises:
        RefusedError: it would, and whoever asks does not want it to; or too many wait already.
    """
    running = state.running
    if running is None:
        return False
    r = running.swap
    # nobody asked for a catch-up: it never has others refused
    if not asked.queue and running.kind != "catch-up":
        raise RefusedError(
            f"model {r.model!r}: swap {r.swap} to version {r.version} is running (phase {r.phase.value}); "
            "wait for it, queue behind it (--queue), or abort it with `refitctl abort`"
        )
    if len(state.queue) >= MAX_QUEUED:
        raise RefusedError(f"model {r.model!r}: {MAX_QUEUED} swaps are waiting already; wait for some of them")
    return True


def gives_way(running: Running) -> bool:
    """Return whether a running swap ends for one that is asked for: a catch-up of which nothing is decided yet."""
    return running.kind == "catch-up" and running.swap.phase not in (Phase.STAGED, Phase.COMMITTING)


def newer(state: ModelState) -> Due | None:
    """Return the swap to a complete version that is newer than all that were swapped to.

    Raises:
        RefusedError: there is one, and it cannot be swapped now.
    """
    complete = state.fleet.complete_versions()
    if not complete or complete[-1] <= state.newest or not state.fleet.targets:
        return None
    return Due("auto", state.fleet.version_to_swap(None), state.fleet)


def lagging(state: ModelState) -> Due | None:
    """Return the swap of replicas that joined, came back or failed to the live version, if sources still hold it.

    Raises:
        RefusedError: there are some, and they cannot be swapped now.
    """
    live = state.live
    if live is None or live not in state.fleet.complete_versions():
        return None
    replicas = state.fleet.behind(live)
    if not replicas:
        return None
    fleet = state.fleet.only(replicas)
    whole = len(fleet.targets) == len(state.fleet.targets)
    version = fleet.version_to_swap(live, may_be_older=True)
    return Due("catch-up", version, state.fleet if whole else fleet)


def left_behind(state: ModelState, running: Running, now: float) -> None:
    """Note which ranks a swap that did not succeed has left behind, and when to try them again."""
    s = running.swap
    if s.phase is Phase.COMMITTED:
        return
    present = {member.id: member for member in state.fleet.members()}
    for member_id in s.members:
        member = present.get(member_id)
        if member is None:
            continue
        if s.phase is Phase.ABORTED and member_id in s.poisoned:
            member.version, member.poisoned = None, f"swap {s.swap} ended while it was written in place: {s.reason}"
        member.left_behind |= member_id in s.failed  # it would most likely fail again at once
    if running.kind == "catch-up" and not running.gives_way:
        for member in running.fleet.targets.values():
            member.left_behind |= member.version != s.version
            if s.phase is Phase.ABORTED and member.left_behind and member.tries < CATCH_UP_AGAIN:
                member.tries += 1
                member.again_at = now + CATCH_UP_PAUSE_S * member.tries


def try_again(state: ModelState, now: float) -> bool:
    """Take back who was left behind for long enough: nothing may have been wrong with it. Return if there are any."""
    due = [m for m in state.fleet.targets.values() if m.again_at is not None and now >= m.again_at]
    for member in due:
        member.again_at, member.left_behind = None, False
    return bool(due)
