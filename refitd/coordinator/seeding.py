"""Chooses the serving replicas that give the live version to replicas that join, so that no source has to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import xxhash

from refitd.coordinator.decision import Phase
from refitd.coordinator.membership import Member, Model
from refitd.coordinator.models import Running
from refitd.coordinator.plans import LoadedPlan
from refitd.coordinator.records import LiveVersion
from refitd.coordinator.requirements import canonical_names
from refitd.errors import RefusedError
from refitd.protocol.shards import Shard

# Replicas that one catch-up reads, unless more join: more of them would not fill the cables of those that join better,
# and each that is lost meanwhile ends it.
MAX_SEEDS = 8

# By canonical tensor: (dtype, cast by which it arrived).
_Forms = dict[str, tuple[str, str | None]]


def seeded(fleet: Model, live: LiveVersion, behind: Collection[str]) -> Model | None:
    """Return the members of a catch-up without sources: those `behind` that can be seeded, and their seeds.

    None if no serving replica can seed any of them, or if the sources are nearer.
    """
    replicas = _replicas(fleet)
    serving = {
        name: ranks for name, ranks in replicas.items() if name not in behind and all(_seeds(m, live) for m in ranks)
    }
    serving = {name: ranks for name, ranks in serving.items() if len(ranks) == ranks[0].added.world_size}
    if not serving:
        return None
    forms: dict[str, _Forms] = {}
    joining: dict[str, set[str]] = {}  # replica -> the replicas that can seed it
    for name in behind:
        wanted = _forms_of(replicas[name], forms)
        fit = {one for one, ranks in serving.items() if _gives(_forms_of(ranks, forms), wanted)}
        refused = frozenset().union(*(m.unseeded for m in replicas[name]))
        if any(m.id not in refused for one in fit for m in serving[one]) and _can_follow(fleet, live, fit, name):
            joining[name] = fit
    if not joining:
        return None
    # each of them must fit all: a plan that casts would not give what the sources would have given
    fit = set.intersection(*joining.values())
    if not fit:
        first = min(joining)
        joining, fit = {first: joining[first]}, joining[first]
    nodes = {m.node for name in joining for m in replicas[name]}
    seeds = _nearest({name: serving[name] for name in fit}, nodes, max(MAX_SEEDS, len(joining)), min(joining))
    sources = {m.node for m in fleet.sources.values()}
    is_held = live.version in fleet.complete_versions() and fleet.run() == live.run
    if is_held and sources <= nodes and not any(m.node in nodes for name in seeds for m in serving[name]):
        return None
    return fleet.seeded_by(seeds, joining)


def seeds_failed(running: Running, live: LiveVersion | None) -> bool:
    """Note which seeds an aborted catch-up shall do without; return whether it can begin again at once."""
    seeds, s = running.fleet.seeds.values(), running.swap
    if s.phase is not Phase.ABORTED or not seeds:
        return False
    at_fault = [member for member in seeds if member.id == s.culprit]
    for member in at_fault:
        member.unfit = live
    tried = {member.id for member in seeds}
    return bool(at_fault) or all(tried <= member.unseeded for member in running.fleet.targets.values())


def without_unread(running: Running, plan: LoadedPlan) -> None:
    """Leave the seeds out of a catch-up that its plan does not read: it does not depend on them."""
    fleet = running.fleet
    read = {key: member for key, member in fleet.seeds.items() if plan.members[member.id] in plan.senders}
    unread = {member.id for key, member in fleet.seeds.items() if key not in read}
    running.fleet = replace(fleet, seeds=read)
    running.sources = running.fleet.source_reports(running.version)
    running.members = {name: member for name, member in running.members.items() if name not in unread}
    plan.members = {name: rank for name, rank in plan.members.items() if name not in unread}


def no_plan(fleet: Model) -> None:
    """Note that no plan fits those that join and these seeds: others seed them, or the sources."""
    for member in fleet.targets.values():
        member.unseeded |= {seed.id for seed in fleet.seeds.values()}


def _replicas(fleet: Model) -> dict[str, list[Member]]:
    found: dict[str, list[Member]] = {}
    for (replica, _), member in sorted(fleet.targets.items()):
        found.setdefault(replica, []).append(member)
    return found


def _seeds(member: Member, live: LiveVersion) -> bool:
    """Return whether this rank serves the live version and others can be given it."""
    is_ready = member.seeds and member.staged is None and not member.suspended and not member.added.observes
    return is_ready and live.is_at(member.version, member.run) and member.unfit != live


def _can_follow(fleet: Model, live: LiveVersion, seeds: Collection[str], replica: str) -> bool:
    try:
        fleet.seeded_by(seeds, {replica}).check_seeded(live.version)
    except RefusedError:
        return False
    return True


def _gives(held: _Forms, wanted: _Forms) -> bool:
    """Return whether seeds hold all that is wanted exactly as the sources would have given it."""
    return all(held.get(name) == form for name, form in wanted.items())


def _forms_of(ranks: Collection[Member], known: dict[str, _Forms]) -> _Forms:
    """Return how a replica holds each canonical tensor; `known` caches that by description."""
    found: _Forms = {}
    for member in ranks:
        digest = member.added.digest
        if digest not in known:
            known[digest] = _forms(member.shard)
        found |= known[digest]
    return found


def _forms(shard: Shard) -> _Forms:
    return {
        name: (tensor.dtype, tensor.cast_from)
        for tensor in shard.tensors
        for name in (*canonical_names(tensor), *tensor.aliases)
    }


def _nearest(serving: dict[str, list[Member]], nodes: set[str], limit: int, joins: str) -> list[str]:
    """Return up to `limit` replicas: those on `nodes` first, and of others not always the same."""

    def far(name: str) -> tuple[bool, str]:
        return all(m.node not in nodes for m in serving[name]), xxhash.xxh3_64_hexdigest(f"{joins} {name}".encode())

    found = sorted(serving, key=far)
    near = [name for name in found if not far(name)[0]]
    if {m.node for name in near for m in serving[name]} >= nodes:
        return near[:limit]
    return found[:limit]
