"""Choose a model's next swap: a requested one, then a newer version, then a catch-up, and its seeds.

Seeds are serving replicas that give the live version to replicas that join, in place of the sources.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from refitd.commit.decision import Phase
from refitd.commit.swap_events import AbortAsked
from refitd.coordinator.actions import Waiter
from refitd.coordinator.descriptions import canonical_names
from refitd.coordinator.eligibility import check_targets, spare_run, version_to_swap
from refitd.coordinator.fleet import ModelState, Running
from refitd.coordinator.journals import Journal, LiveVersion
from refitd.coordinator.members import Forms, Member, Membership, poison
from refitd.coordinator.plans import LoadedPlan
from refitd.coordinator.reports import source_reports
from refitd.errors import RefusedError
from refitd.protocol import local
from refitd.protocol.shards import Shard
from refitd.states import SwapCause

# Retries of an aborted catch-up per registration, and the pause that each adds.
CATCH_UP_AGAIN = 3
CATCH_UP_PAUSE_S = 3.0

# A catch-up of large replicas waits this long after the last, or after the first, of them has joined. Engines that are
# started together do not join at the same moment, and a second catch-up would use the cables' time again.
GATHER_S = 1.0
GATHER_AT_MOST_S = 4.0
GATHER_BYTES = 64 << 20  # smaller replicas are caught up faster than this wait

# Seeds of one catch-up, unless more replicas join: more seeds would not use the joining replicas' cables better, and
# the loss of any of them ends the catch-up.
MAX_SEEDS = 8

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
    flips_back: bool = False  # every target has the version in its other arena; no bytes move


def asked_for(
    state: ModelState, asked: local.StartSwap, waiter: Waiter, past: Journal, waited_s: float = 0.0
) -> DueSwap:
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
    version = version_to_swap(membership, version, may_be_older=asked.rollback, is_planned=state.plan is not None)
    run = state.membership.offered().run or ""
    if text := used_up(state, version, run):
        raise RefusedError(f"model {state.membership.name!r}: {text}")
    return DueSwap(kind, version, run, membership, timeout_s, (waiter,), asked.progress)


def _version_before(state: ModelState, past: Journal) -> int:
    name, live = state.membership.name, state.live
    if live is None:
        raise RefusedError(f"model {name!r}: no version has been live yet, so that there is none to go back to")
    older = past.before(name, live.version)
    if older is None:
        raise RefusedError(
            f"model {name!r}: the journal has no version before {live.version}, which is live; name one with --version "
            f"(held by every source rank: {state.membership.offered().complete or 'none'})"
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


# The task of nodes or ranks in each phase, for messages.
_AWAITED = {
    Phase.PLANNED: "load its plan",
    Phase.HALTING: "stand still",
    Phase.STAGING: "stage it",
    Phase.PAUSING: "stand still",
    Phase.COMMITTING: "take it over (poll() or wait(), or its controller's call)",
}


def no_turn(state: ModelState, waited_s: float) -> str:
    """Return why a queued swap has not begun: the running swap, the members that it waits for, and the next step."""
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
    """Return the swap to a version newer than every decided one and any that this run tried.

    It is complete, or every source rank has begun it.

    Raises:
        RefusedError: such a version exists and cannot be swapped now.
    """
    membership = state.membership.engines()
    offered = membership.offered()
    run, (tried, tried_run) = offered.run or "", state.tried
    if offered.run is None or offered.missing or not membership.targets or offered.drained:
        return None
    past = max(state.highest, tried if run == tried_run else -1)
    for newest in (*offered.complete[-1:], membership.forming()):
        if newest is not None and newest > past:
            version = version_to_swap(membership, newest, is_planned=state.plan is not None)
            return DueSwap("auto", version, run, membership)
    return None


def lagging(state: ModelState, *, only_observers: bool = False) -> DueSwap | None:
    """Return the catch-up of replicas that joined, returned or failed, if others or sources hold the live version.

    An aborted catch-up is retried from the sources, if they have the version.

    Raises:
        RefusedError: such replicas exist and cannot be swapped now, or no rank can give them the live version.
    """
    live = state.live
    replicas = state.membership.behind(live, only_observers=only_observers) if live is not None else []
    if live is None or not replicas:
        return None
    is_held = state.membership.sources_give(live)
    membership = state.membership.only(replicas)
    if not (is_held and any(member.catch_up.tries for member in membership.targets.values())):
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
    offered = membership.offered()
    held = offered.complete if offered.run == live.run else []
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
        whole_at[replica] = max(member.catch_up.joined_at, whole_at.get(replica, 0.0))
        nbytes[replica] = nbytes.get(replica, 0) + member.described.bytes
    if max(nbytes.values(), default=0) < GATHER_BYTES:
        return 0.0
    return min(max(whole_at.values()) + GATHER_S, min(whole_at.values()) + GATHER_AT_MOST_S)


def left_behind(state: ModelState, running: Running, now: float) -> None:
    """Note which ranks a failed swap left behind, and when to retry them."""
    s = running.swap
    sources = [source.source for source in state.membership.sources.values()]
    if s.phase is Phase.ABORTED and running.is_early and any(s.version not in one.versions for one in sources):
        # it is tried again once it is complete, not before
        state.tried = s.version - 1, running.run
        for one in sources:
            one.begun = None if one.begun == s.version else one.begun
    present = {member.id: member for member in state.membership.members()}
    for member_id in s.members:
        member = present.get(member_id)
        if member is None:
            continue
        if s.phase is Phase.ABORTED and member_id in s.poisoned:
            poison(member, s.swap, s.reason)
        member.catch_up.failed |= member_id in s.failed  # it would most likely fail again
    if running.kind == "catch-up" and not running.gives_way and not seeds_failed(running):
        for member in running.membership.targets.values():
            member.catch_up.failed |= (member.version, member.run) != (s.version, running.run)
            if s.phase is Phase.ABORTED and member.catch_up.failed and member.catch_up.tries < CATCH_UP_AGAIN:
                member.catch_up.tries += 1
                member.catch_up.again_at = now + CATCH_UP_PAUSE_S * member.catch_up.tries


def try_again(state: ModelState, now: float) -> bool:
    """Mark ranks as due whose retry pause is over; return whether there are any."""
    due = [
        m for m in state.membership.targets.values() if m.catch_up.again_at is not None and now >= m.catch_up.again_at
    ]
    for member in due:
        member.catch_up.again_at, member.catch_up.failed = None, False
    return bool(due)


# --- seeds ------------------------------------------------------------------------------------------------


def seeded(membership: Membership, live: LiveVersion, behind: Collection[str]) -> Membership | None:
    """Return the members of a catch-up without sources: those `behind` that can be seeded, and their seeds.

    None if no serving replica can seed any of them, or if the sources are nearer.
    """
    replicas, left_out = membership.replicas(), {*behind, *membership.drained()}
    serving = {name: ranks for name, ranks in replicas.items() if name not in left_out and _can_seed(ranks, live)}
    fitting = _Fitting(membership, serving)
    joining: dict[str, frozenset[str]] = {}  # replica -> replicas that can seed it
    for name in behind if serving else ():
        refused = frozenset[str]().union(*(m.arenas.refused for m in replicas[name]))
        fit = fitting.who_gives(replicas[name])
        if any(m.id not in refused for one in fit for m in serving[one]):
            joining[name] = fit
    if not joining:
        return None
    # each seed must fit all of them: a plan that casts would not give what the sources would have given
    fit = frozenset.intersection(*joining.values())
    if not fit:
        first = min(joining)
        joining, fit = {first: joining[first]}, joining[first]
    nodes = {m.node for name in joining for m in replicas[name]}
    seeds = _nearest({name: serving[name] for name in fit}, nodes, max(MAX_SEEDS, len(joining)), min(joining))
    sources = {m.node for m in membership.sources.values()}
    is_near = any(m.node in nodes for name in seeds for m in serving[name])
    if membership.sources_give(live) and sources <= nodes and not is_near:
        return None
    found = membership.seeded_by(seeds, joining)
    able = list(joining)
    if not _can_follow(found, live):
        able = [name for name in joining if _can_follow(found.only({name}), live)]
    alone = [name for name in able if any(m.arenas.alone for m in replicas[name])]
    return found.only(alone[:1] or able) if able else None


def seeds_failed(running: Running) -> bool:
    """Exclude seeds from the retry of an aborted catch-up; return whether the retry can begin now."""
    seeds, s = running.membership.seeds.values(), running.swap
    if s.phase is not Phase.ABORTED or not seeds:
        return False
    at_fault = [member for member in seeds if member.id == s.culprit]
    for member in at_fault:
        member.arenas.unfit = True
    tried, is_alone = {member.id for member in seeds}, _joins_alone(running.membership)
    unplanned = all(
        tried <= m.arenas.refused if is_alone else m.arenas.alone for m in running.membership.targets.values()
    )
    return bool(at_fault) or unplanned


def without_unread(running: Running, plan: LoadedPlan) -> None:
    """Drop the seeds that a catch-up's plan does not read: it must not depend on them."""
    membership = running.membership
    read = {key: member for key, member in membership.seeds.items() if plan.members[member.id] in plan.senders}
    unread = {member.id for key, member in membership.seeds.items() if key not in read}
    running.membership = replace(membership, seeds=read)
    running.sources = source_reports(running.membership, running.version)
    running.members = {name: member for name, member in running.members.items() if name not in unread}
    plan.belongs_to(membership.name, {name: rank for name, rank in plan.members.items() if name not in unread})


def no_plan(membership: Membership) -> None:
    """Note that no plan fits the joining replicas and these seeds: other seeds or the sources give the version.

    If several replicas join, one of them may be at fault: each is tried alone first.
    """
    seeds = {seed.id for seed in membership.seeds.values()}
    for member in membership.targets.values() if seeds else ():
        if _joins_alone(membership):
            member.arenas.refused |= seeds
        else:
            member.arenas.alone = True


def _joins_alone(membership: Membership) -> bool:
    return len({replica for replica, _ in membership.targets}) == 1


def _can_seed(ranks: Sequence[Member], live: LiveVersion) -> bool:
    """Return whether a replica is whole, serves the live version, and can give it to others."""
    return len(ranks) == ranks[0].added.world_size and all(
        m.arenas.gives
        and live.is_at(m.version, m.run)
        and m.staged is None
        and not (m.arenas.unfit or m.suspended or m.added.observes)
        for m in ranks
    )


def _can_follow(joins: Membership, live: LiveVersion) -> bool:
    try:
        check_targets(joins, live.version, may_be_older=True)
    except RefusedError:
        return False
    return True


class _Fitting:
    """Compares how replicas hold tensors, once for all replicas with equal descriptions."""

    def __init__(self, membership: Membership, serving: Mapping[str, Sequence[Member]]) -> None:
        """`serving` are the replicas that may give."""
        self._known = membership.forms
        self._of: dict[frozenset[str], Forms] = {}
        self._serving: dict[frozenset[str], tuple[Sequence[Member], set[str]]] = {}
        for name, ranks in serving.items():
            self._serving.setdefault(_kind(ranks), (ranks, set()))[1].add(name)
        self._givers: dict[frozenset[str], frozenset[str]] = {}

    def who_gives(self, joins: Sequence[Member]) -> frozenset[str]:
        """Return the replicas that hold all that another wants, exactly as the sources would have given it."""
        kind = _kind(joins)
        if kind not in self._givers:
            wanted = self._forms(kind, joins)
            able = (n for k, (ranks, n) in self._serving.items() if np.isin(wanted, self._forms(k, ranks)).all())
            self._givers[kind] = frozenset[str]().union(*able)
        return self._givers[kind]

    def _forms(self, key: frozenset[str], ranks: Sequence[Member]) -> Forms:
        if key not in self._of:
            found = []
            for digest, shard in {m.added.digest: m.described.shard for m in ranks}.items():
                forms = self._known.get(digest)
                if forms is None:
                    self._known.put(digest, forms := _forms(shard))
                found.append(forms)
            self._of[key] = np.unique(np.concatenate(found))
        return self._of[key]


def _kind(ranks: Sequence[Member]) -> frozenset[str]:
    return frozenset(m.added.digest for m in ranks)


def _forms(shard: Shard) -> Forms:
    return np.array(
        [
            xxhash.xxh3_64_intdigest(f"{name}\0{tensor.dtype}\0{tensor.cast_from}".encode())
            for tensor in shard.tensors
            for name in (*canonical_names(tensor), *tensor.aliases)
        ],
        np.uint64,
    )


def _nearest(serving: dict[str, list[Member]], nodes: set[str], limit: int, joins: str) -> list[str]:
    """Return up to `limit` replicas: replicas on `nodes` first, then others in an order that depends on `joins`."""

    def far(name: str) -> tuple[bool, str]:
        return all(m.node not in nodes for m in serving[name]), xxhash.xxh3_64_hexdigest(f"{joins} {name}".encode())

    found = sorted(serving, key=far)
    near = [name for name in found if not far(name)[0]]
    if {m.node for name in near for m in serving[name]} >= nodes:
        return near[:limit]
    return found[:limit]
