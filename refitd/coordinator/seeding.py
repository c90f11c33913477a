"""Chooses the serving replicas that give the live version to replicas that join, so that no source has to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import xxhash

from refitd.coordinator.decision import Phase
from refitd.coordinator.eligibility import check_targets
from refitd.coordinator.members import Member
from refitd.coordinator.membership import Forms, Membership
from refitd.coordinator.models import Running
from refitd.coordinator.plans import LoadedPlan
from refitd.coordinator.records import LiveVersion
from refitd.coordinator.report import source_reports
from refitd.coordinator.requirements import canonical_names
from refitd.errors import RefusedError
from refitd.protocol.shards import Shard

# Seeds of one catch-up, unless more replicas join: more seeds would not use the joining replicas' cables better, and
# the loss of any of them ends the catch-up.
MAX_SEEDS = 8


def seeded(membership: Membership, live: LiveVersion, behind: Collection[str]) -> Membership | None:
    """Return the members of a catch-up without sources: those `behind` that can be seeded, and their seeds.

    None if no serving replica can seed any of them, or if the sources are nearer.
    """
    replicas, left_out = membership.replicas(), {*behind, *membership.drained()}
    serving = {name: ranks for name, ranks in replicas.items() if name not in left_out and _can_seed(ranks, live)}
    fitting = _Fitting(membership, serving)
    joining: dict[str, frozenset[str]] = {}  # replica -> those that can seed it
    for name in behind if serving else ():
        refused = frozenset[str]().union(*(m.unseeded for m in replicas[name]))
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
    alone = [name for name in able if any(m.seeded_alone for m in replicas[name])]
    return found.only(alone[:1] or able) if able else None


def seeds_failed(running: Running) -> bool:
    """Exclude seeds from the retry of an aborted catch-up; return whether it can begin at once."""
    seeds, s = running.membership.seeds.values(), running.swap
    if s.phase is not Phase.ABORTED or not seeds:
        return False
    at_fault = [member for member in seeds if member.id == s.culprit]
    for member in at_fault:
        member.unfit = True
    tried, is_alone = {member.id for member in seeds}, _joins_alone(running.membership)
    unplanned = all(tried <= m.unseeded if is_alone else m.seeded_alone for m in running.membership.targets.values())
    return bool(at_fault) or unplanned


def without_unread(running: Running, plan: LoadedPlan) -> None:
    """Drop the seeds that a catch-up's plan does not read, so that it does not depend on them."""
    membership = running.membership
    read = {key: member for key, member in membership.seeds.items() if plan.members[member.id] in plan.senders}
    unread = {member.id for key, member in membership.seeds.items() if key not in read}
    running.membership = replace(membership, seeds=read)
    running.sources = source_reports(running.membership, running.version)
    running.members = {name: member for name, member in running.members.items() if name not in unread}
    plan.belongs_to(membership.name, {name: rank for name, rank in plan.members.items() if name not in unread})


def no_plan(membership: Membership) -> None:
    """Note that no plan fits those that join and these seeds: others seed them, or the sources.

    If several replicas join, one of them may be at fault: each is tried alone first.
    """
    seeds = {seed.id for seed in membership.seeds.values()}
    for member in membership.targets.values() if seeds else ():
        if _joins_alone(membership):
            member.unseeded |= seeds
        else:
            member.seeded_alone = True


def _joins_alone(membership: Membership) -> bool:
    return len({replica for replica, _ in membership.targets}) == 1


def _can_seed(ranks: Sequence[Member], live: LiveVersion) -> bool:
    """Return whether a replica is whole, serves the live version, and can give it to others."""
    return len(ranks) == ranks[0].added.world_size and all(
        m.seeds
        and live.is_at(m.version, m.run)
        and m.staged is None
        and not (m.unfit or m.suspended or m.added.observes)
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
            for digest, shard in {m.added.digest: m.shard for m in ranks}.items():
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
    """Return up to `limit` replicas: those on `nodes` first, and of others not always the same."""

    def far(name: str) -> tuple[bool, str]:
        return all(m.node not in nodes for m in serving[name]), xxhash.xxh3_64_hexdigest(f"{joins} {name}".encode())

    found = sorted(serving, key=far)
    near = [name for name in found if not far(name)[0]]
    if {m.node for name in near for m in serving[name]} >= nodes:
        return near[:limit]
    return found[:limit]
