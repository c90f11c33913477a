"""Ranks and controllers that register, return, sleep and leave.

The functions keep `fleet.members`, and the models that have members.
"""

from __future__ import annotations

import itertools
from fnmatch import fnmatchcase

from refitd.commit import decision, swap_events
from refitd.config import ModelConfig
from refitd.coordinator import controllers, preparation, swap_queue, swaps
from refitd.coordinator.actions import Remember, WriteDrain
from refitd.coordinator.fleet import MAX_HISTORY, ModelState, Turn
from refitd.coordinator.journals import Drain, KnownNode
from refitd.coordinator.members import Arenas, CatchUp, Lost, Member, Membership, Node, Place, Published
from refitd.coordinator.publications import MAX_VERSIONS, room_changed
from refitd.errors import RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.base import Message
from refitd.protocol.reports import EvictReport, ForgetReport
from refitd.protocol.shards import Shard
from refitd.text import called, target_rank

# Limit on replicas recorded for a drained node. A further replica that loses its rank there counts as incomplete.
MAX_REPLICAS = 4096

MAX_MEMBERS = 1 << 16
MAX_LOST = 256  # nodes; the longest lost are dropped first

_BEING_DECIDED = (decision.Phase.STAGED, decision.Phase.DECIDING)

# --- ranks ------------------------------------------------------------------------------------------------


def _state_of(turn: Turn, model: str) -> ModelState:
    """Return a model's state; a new model has its history from the journal and the daemons."""
    fleet = turn.fleet
    if (known := fleet.models.get(model)) is not None:
        return known
    config = fleet.config.models.get(model) or ModelConfig()
    membership = Membership(model, config.auto_swap, check_replicas=config.check_replicas, drains=fleet.drained)
    state = ModelState(membership, config, fleet.lives.of(model), fleet.lives.highest(model), fleet.past.tried(model))
    past = fleet.past.recent(model, MAX_HISTORY)
    state.last = next((report for r in past if (report := r.written_report()) is not None), None)
    return state


def add(turn: Turn, node: Node, added: cluster.AddShard) -> Message:
    """Register a rank, or say whether it could be registered; return the answer.

    Raises:
        RefusedError: it cannot be registered; the state is unchanged.
    """
    fleet, name = turn.fleet, node.status.node
    if (there := fleet.members.get(added.member)) is not None:
        raise RefusedError(f"{called(added.member)} is registered already, on node {there.node!r}")
    if len(fleet.members) >= MAX_MEMBERS:
        raise RefusedError(f"{called(added.member)}: {MAX_MEMBERS} ranks are registered, which is the limit")
    if len(added.versions) > MAX_VERSIONS:
        raise RefusedError(f"{called(added.member)}: holds {len(added.versions)} versions, at most {MAX_VERSIONS}")
    if added.rank >= added.world_size:
        raise RefusedError(f"{called(added.member)}: rank {added.rank} is not below world_size {added.world_size}")
    if added.observes and name in fleet.drained:
        raise RefusedError(
            f"model {added.model!r}: node {name!r} is drained, so replica {added.replica!r}, which "
            f"observes, gets no version there; use another node, or refitctl resume {name}"
        )
    state = _state_of(turn, added.model)
    _check_replica(added, state.config)
    described = fleet.descriptions.of(added)
    _check_part(state.membership, added, described.shard)
    replaced = _replaced_by(state.membership, added)
    if added.is_question:
        return local.Done()
    is_source = added.role == "source"
    run, newest, base = _run_of(turn, state, added) if is_source else (added.run, -1, None)
    member = Member(
        added,
        described,
        Place(name, node.status.host),
        run=run,
        source=Published(
            added.attached,
            set(added.versions),
            dict(zip(added.versions, added.modes, strict=False)),
            added.mode,
            newest,
        ),
        version=added.version,
        pending=None if added.staged is None else (added.staged, added.staged_version),
        suspended=added.suspended,
        poisoned=added.poisoned,
        arenas=Arenas(None if added.spare is None else (added.spare, added.spare_run), added.seeds),
        catch_up=CatchUp(joined_at=turn.now),
    )
    for one in replaced:
        state.membership.remove(one)
    state.membership.add(member)
    fleet.models[added.model] = state
    for one in replaced:
        _replace(turn, one, member)
    fleet.lives.keep(added.model)
    fleet.members[member.id] = member
    if fleet.absent.registered(member) and state.running is not None:
        state.running.look_again(turn.now)
    _note_drained(turn, added.model, added.replica, name)
    preparation.members_changed(turn, state)
    nbytes = described.bytes
    turn.log("registered", model=added.model, member=member.id, who=member.describe(), bytes=nbytes)
    if is_source:
        _source_registered(turn, state, member, base)
        return local.Done(run=run, next_version=newest + 1)
    _target_registered(turn, member)
    return local.Done()


def _check_replica(added: cluster.AddShard, model: ModelConfig) -> None:
    """Refuse a replica that is not listed: it would receive the weights and could delay every swap.

    Raises:
        RefusedError: names the replica, the expected ones and where they are listed.
    """
    if added.role != "target" or not model.replicas:
        return  # no list: any process with the engine role may register any replica
    if not any(fnmatchcase(added.replica, pattern) for pattern in model.replicas):
        expected = ", ".join(map(repr, model.replicas))
        raise RefusedError(
            f"model {added.model!r}: nobody expects replica {added.replica!r} (rank {added.rank}, pid {added.pid}); "
            f"models.{added.model}.replicas of the coordinator has {expected}: add it there and start the coordinator "
            "again, or register under one of these names"
        )


def _check_part(membership: Membership, a: cluster.AddShard, shard: Shard) -> None:
    """Check that a source rank and the attached ones offer parts of one checkpoint, and agree on `partial`.

    Raises:
        RefusedError: it says that all is offered and others that a part is, or the reverse; or its part is of
            another checkpoint than theirs.
    """
    what = f"model {membership.name!r} source rank {a.rank}"
    for other in membership.sources.values() if a.role == "source" else ():
        if not other.source.attached or other.added.rank == a.rank:
            continue
        is_partial = other.described.shard.is_partial
        if is_partial != shard.is_partial:
            raise RefusedError(
                f"{what} has partial={shard.is_partial}, {other.describe()} has partial={is_partial}; give all ranks "
                "of the trainer the same"
            )
        if other.added.origin != a.origin:
            raise RefusedError(
                f"{what} publishes from other files (names, sizes or times) than {other.describe()}; the folder was "
                "replaced, or the nodes see different folders: publish all parts again, from one folder or from copies "
                "that keep their times (cp -p)"
            )
        break  # it agreed with all others when it registered


def _replaced_by(membership: Membership, a: cluster.AddShard) -> list[Member]:
    """Return the detached ranks that a new rank replaces: its own, or a whole pool of another size.

    Raises:
        RefusedError: the rank is taken, or attached ranks have another size or another `controlled`.
    """
    is_source = a.role == "source"
    pool = membership.sources if is_source else membership.pool(a.replica)
    what = f"model {membership.name!r} " + ("source" if is_source else f"replica {a.replica!r}")
    # two attached ranks are enough: each agreed with all others when it registered, also on the size of the pool
    for other in itertools.islice((other for other in pool.values() if other.source.attached), 2):
        if other.added.world_size != a.world_size:
            raise RefusedError(
                f"{what} rank {a.rank} says there are {a.world_size} ranks, rank {other.added.rank} "
                f"(host {other.place.host}, pid {other.added.pid}) said {other.added.world_size}; start all with "
                "one size"
            )
        if other.added.controlled != a.controlled and other.added.rank != a.rank:
            raise RefusedError(
                f"{what} rank {a.rank} has controlled={a.controlled}, rank {other.added.rank} (host "
                f"{other.place.host}, pid {other.added.pid}) has controlled={other.added.controlled}; register all "
                "ranks of a replica alike (mode='in-place' is controlled)"
            )
    if any(other.added.world_size != a.world_size for other in itertools.islice(pool.values(), 1)):
        return list(pool.values())  # the trainer is gone and restarts with another number of ranks
    old = pool.get(a.rank)
    if old is not None and old.source.attached:
        raise RefusedError(
            f"{what} rank {a.rank} is already registered by pid {old.added.pid} on {old.place.host}; "
            "close that registration first, or use another rank"
        )
    return [] if old is None else [old]


def _target_registered(turn: Turn, member: Member) -> None:
    """Settle the version that a registering target has staged or serves."""
    fleet, added = turn.fleet, member.added
    if added.staged is not None:
        if added.committing and added.staged_version is not None:
            fleet.lives.told(added.staged, added.staged_version, added.staged_run)
        swap_queue.settle(turn, member, added.staged)
    elif added.version is not None:
        if fleet.lives.serves(turn, added.model, member.describe(), added.version, added.run):
            swap_queue.live_learned(turn, added.model)
        turn.fence_unless_live(member)
    turn.note_ends(fleet.recovery.registered(member))


def _replace(turn: Turn, old: Member, by: Member) -> None:
    """Forget a detached rank, and have its daemon free its memory.

    If the new rank has the same number and daemon, that daemon frees the memory without being told.
    """
    is_same = old.added.rank == by.added.rank and old.added.world_size == by.added.world_size
    if is_same and old.node == by.node:
        turn.fleet.members.pop(old.id, None)
        return
    _evict(turn, old, f"its trainer is gone, and {by.describe()} has registered anew")


def remove(turn: Turn, member: Member, reason: str) -> None:
    """Forget a rank, and step its running swap."""
    if turn.fleet.members.pop(member.id, None) is None:
        return
    state = turn.fleet.models[member.added.model]
    turn.log("left", model=state.membership.name, member=member.id, who=member.describe(), reason=reason)
    running = state.running
    takes_part = state.takes_part(member)
    state.membership.remove(member)
    preparation.members_changed(turn, state)
    if takes_part and running is not None:
        turn.post(running.swap.swap, swap_events.MemberLost(member.id, reason))
        swaps.run(turn)
    controllers.ranks_changed(turn, state.membership.name, member.added.replica)
    if state.wants_room:
        room_changed(turn, state)
    _forget_if_empty(turn, state)


def add_controller(turn: Turn, node: Node, added: local.RegisterController) -> None:
    """Register the controller of a replica; raises RefusedError if it has one."""
    state = _state_of(turn, added.model)
    controllers.add(turn, node, added, state.membership)
    turn.fleet.models[added.model] = state
    _note_drained(turn, added.model, added.replica, node.status.node)


def remove_controller(turn: Turn, member: str, node: str, reason: str) -> None:
    """Forget a controller; its undecided swap aborts."""
    model = controllers.remove(turn, member, node, reason)
    swaps.run(turn)
    if model is not None:
        _forget_if_empty(turn, turn.fleet.models[model])


def _note_drained(turn: Turn, model: str, replica: str, node: str) -> None:
    """Record a replica that has a rank or its controller on this node, if the node is drained."""
    known = turn.fleet.drained.get(node)
    if replica and known is not None and (model, replica) not in known and len(known) < MAX_REPLICAS:
        turn.effects.append(WriteDrain(Drain(node, known | {(model, replica)})))


def _forget_if_empty(turn: Turn, state: ModelState) -> None:
    if not state.membership.members() and not state.membership.controllers and state.running is None:
        for queued in state.queue:
            gone = f"model {state.membership.name!r}: everybody has left before the swap could begin"
            turn.send(queued.waiter, local.Failure(code=RefusedError.code, message=gone))
        turn.fleet.models.pop(state.membership.name, None)


def forget_node(turn: Turn, name: str, reason: str, *, event: str = "node-lost") -> None:
    """Forget a node and all members on it."""
    fleet = turn.fleet
    node = fleet.nodes.pop(name)
    del fleet.node_at[node.identity]
    turn.answer_checks(fleet.checks.lost(name, reason, turn.now))
    turn.answer_traces(fleet.traces.lost(name))
    turn.log(event, node=name, pid=node.status.pid, reason=reason)
    members = [m for m in fleet.members.values() if m.node == name]
    if event == "node-lost":
        lose(turn, Lost.of(node, members, reason))
    elif event == "node-left":
        turn.effects.append(Remember(KnownNode(name, None)))
    for member in members:
        fleet.absent.lost(member, node.last_heard + fleet.config.deadlines.lease_s)
        remove(turn, member, f"node {name}: {reason}")
    for controller in [c for c in fleet.controllers.values() if c.node == name]:
        remove_controller(turn, controller.id, name, f"node {name}: {reason}")


def write_node(turn: Turn, found: Lost) -> None:
    """Write a connected or lost node to the journal."""
    heard = turn.wall - (turn.now - found.last_heard)
    turn.effects.append(Remember(KnownNode(found.described.node, found.described, heard)))


def lose(turn: Turn, lost: Lost) -> None:
    """Show a node as lost until it returns or is forgotten, also after a restart of the coordinator."""
    names = turn.fleet.lost
    names.pop(lost.described.node, None)
    names[lost.described.node] = lost
    write_node(turn, lost)
    if len(names) > MAX_LOST:
        oldest = next(iter(names))
        del names[oldest]
        turn.effects.append(Remember(KnownNode(oldest, None)))


def suspend(turn: Turn, member: Member, asked: local.Suspend) -> None:
    """Leave a replica out of swaps, or let it take part again; an undecided swap of it aborts.

    Raises:
        RefusedError: the rank has a decided version to commit first, or a decision about one is being written.
    """
    suspended, is_lost = asked.suspended, asked.is_lost
    state = turn.fleet.models[member.added.model]
    running = state.running
    takes_part = running is not None and state.takes_part(member)
    is_written = running is not None and member.id in running.swap.members
    being_decided = is_written and running is not None and running.swap.phase in _BEING_DECIDED
    if suspended and (member.staged is not None or being_decided):
        raise RefusedError(
            f"{member.describe()} has a version that is decided, or is being decided; take it over first (poll or "
            "wait), then suspend"
        )
    if is_lost and not suspended and not member.suspended and (takes_part or member.staged is not None):
        raise RefusedError(f"{member.describe()} is not suspended, and a swap writes or reads it; suspend it first")
    if suspended and takes_part and running is not None:
        turn.post(running.swap.swap, swap_events.MemberLost(member.id, "its engine was suspended"))
        swaps.run(turn)
    turn.log("suspended" if suspended else "woken", model=state.membership.name, member=member.id)
    member.suspended = suspended
    if is_lost and not suspended:
        member.version = None
    turn.fence_unless_live(member)
    turn.due[state.membership.name] = None


def detach(turn: Turn, member: Member, reason: str) -> None:
    """Note that a source rank's trainer has ended; the versions that it has published stay."""
    member.source.attached = False
    room_changed(turn, turn.fleet.models[member.added.model])
    turn.log("detached", model=member.added.model, member=member.id, reason=reason)


# --- removals on request ----------------------------------------------------------------------------------


def evict(turn: Turn, asked: local.Evict) -> EvictReport:
    """Evict a replica, or one of its ranks; a running swap treats it like the death of the process.

    Raises:
        RefusedError: no such rank is registered; lists the registered ones.
    """
    membership = turn.fleet.models.named(asked.model).membership
    found = [m for m in membership.replica(asked.replica) if asked.rank in (None, m.added.rank)]
    if not found:
        there = ", ".join(target_rank(replica, rank) for replica, rank in sorted(membership.targets)) or "none"
        rank = "" if asked.rank is None else f" rank {asked.rank}"
        raise RefusedError(f"model {asked.model!r} has no replica {asked.replica!r}{rank}; registered: {there}")
    reason = f"it was evicted on request: {asked.reason or 'no reason given'}"
    members = tuple(member.describe() for member in found)
    for member in found:
        _evict(turn, member, reason)
    return EvictReport(model=asked.model, replica=asked.replica, members=members)


def forget(turn: Turn, model: str) -> ForgetReport:
    """Free the memory of a model's dead processes: versions of ended trainers, arenas that nodes keep of engines.

    Raises:
        RefusedError: a swap is running, which may read these versions.
    """
    fleet = turn.fleet
    state = fleet.models.get(model)
    if state is not None and state.running is not None:
        raise RefusedError(
            f"model {model!r}: swap {state.running.swap.swap} is running; wait for its end, or abort it "
            f"(refitctl abort {model})"
        )
    pool = {} if state is None else state.membership.sources
    sources = [m for _, m in sorted(pool.items()) if not m.source.attached]
    names = tuple(member.describe() for member in sources)
    for member in sources:
        _evict(turn, member, "its trainer is gone, and it was forgotten on request")
    for node in sorted(fleet.nodes):
        turn.to_node(node, local.Forget(model=model))
    turn.log("forgotten", model=model, sources=len(names))
    return ForgetReport(model=model, sources=names, nodes=tuple(sorted(fleet.nodes)))


def _evict(turn: Turn, member: Member, reason: str) -> None:
    remove(turn, member, reason)  # first: the abort stops workers that write or read its arenas
    turn.to_node(member.node, local.Evicted(member=member.id, reason=reason))


# --- runs of sources --------------------------------------------------------------------------------------


def _run_of(turn: Turn, state: ModelState, added: cluster.AddShard) -> tuple[str, int, int | None]:
    """Return (run that a source rank joins, highest number that it may no longer publish, base).

    `base` is the highest number that earlier runs used up, if this rank begins the run, else None.
    """
    if added.run:  # it registered before
        used = max(added.versions, default=-1) if added.newest is None else added.newest
        return added.run, max(used, state.published.get(added.run, {}).get(added.rank, -1)), None
    attached = (m.run for m in state.membership.sources.values() if m.source.attached)
    run = next(attached, "") if len(state.published) == 1 else min(attached, default="")
    if not run:
        running = state.running
        base = max(state.highest, -1 if running is None else running.version)
        return turn.fleet.ids.run(), base, base
    used = -1
    if added.rank in state.published[run]:
        # it returns alone, with weights that differ from every version published before
        used = max(state.published[run].values())
    return run, max(state.bases.get(run, state.highest), used), None


def _source_registered(turn: Turn, state: ModelState, member: Member, base: int | None) -> None:
    """Record a registered source rank and the base from `_run_of`; forget runs that have no rank left."""
    if base is not None:
        state.bases[member.run] = base
    state.published.setdefault(member.run, {})[member.added.rank] = member.source.newest
    if len(state.published) > 1:
        for old in state.published.keys() - {m.run for m in state.membership.sources.values()}:
            state.bases.pop(old, None)
            del state.published[old]
    if state.wants_room:
        room_changed(turn, state)
