"""Replica controllers: clients that pause, commit and resume an engine for all of its ranks, and their progress.

A controller is a member of every swap of its replica. It is asked to pause before the decision, is called once all
ranks know of the decision, and resumes once no rank has the version pending. A controller that registers while ranks
have a decided version pending begins with that version immediately.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from refitd.commit import decision, swap_events
from refitd.coordinator.fleet import Turn
from refitd.coordinator.members import Controller, ControlStep, Member, Membership, Node, by_node
from refitd.errors import RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.shards import VersionOf
from refitd.text import called

MAX_CONTROLLERS = 1 << 16

# A controller whose swap is unknown waits this long for its replica's ranks; then it resumes, and its engine serves no
# version.
RANKS_S = 15.0


# --- registration -----------------------------------------------------------------------------------------


def add(turn: Turn, node: Node, added: local.RegisterController, membership: Membership) -> None:
    """Register a controller.

    Raises:
        RefusedError: the replica has one already, or there are too many.
    """
    known = turn.fleet.controllers
    if len(known) >= MAX_CONTROLLERS:
        raise RefusedError(f"{called(added.member)}: there are {MAX_CONTROLLERS} already, which is the limit")
    there = membership.controllers.get(added.replica)
    if added.member in known:
        raise RefusedError(f"{called(added.member)} is registered already, on {known[added.member].node}")
    if there is not None:
        raise RefusedError(
            f"model {added.model!r} replica {added.replica!r} is controlled by pid {there.added.pid} on "
            f"{there.host} already; close that controller first"
        )
    found = Controller(added, node.status.node, node.status.host, refuses=added.refuses)
    membership.controllers[added.replica] = known[found.id] = found
    turn.log("registered", model=added.model, member=found.id, who=found.describe(), bytes=0)
    if added.busy:  # its engine is paused for a swap of an earlier coordinator
        found.swap, found.step, found.due_at = added.busy, ControlStep.PAUSED, turn.now + RANKS_S


def remove(turn: Turn, member: str, node: str, reason: str) -> str | None:
    """Forget a controller; return its model, None if it is not registered. Its undecided swap aborts."""
    found = turn.fleet.controllers.get(member)
    if found is None:
        return None
    _check_owner(found, node)
    del turn.fleet.controllers[member]
    model = found.added.model
    turn.log("left", model=model, member=member, who=found.describe(), reason=reason)
    state = turn.fleet.models[model]
    if state.membership.controllers.get(found.added.replica) is found:
        del state.membership.controllers[found.added.replica]
    if state.running is not None and member in state.running.swap.names:
        swap = state.running.swap.swap
        # an engine may end in its commit hook: its ranks have committed then, and the controller has no more to do
        is_done = found.is_decided and found.swap == swap and all(m.staged != swap for m in _ranks(turn, found))
        outcome = (
            swap_events.CommitReported(member, found.paused_s) if is_done else swap_events.MemberLost(member, reason)
        )
        turn.post(swap, outcome)
    return model


# --- a swap -----------------------------------------------------------------------------------------------


def pause(turn: Turn, swap: decision.Swap, members: Iterable[str]) -> None:
    """Ask controllers to pause their engines."""
    for member in members:
        found = turn.fleet.controllers.get(member)
        if found is not None:
            found.enter(swap.swap, swap.version, is_decided=False)
            found.step = ControlStep.PAUSING
            _say(turn, found, "pause")


def note_decided(turn: Turn, swap: decision.Swap) -> None:
    """Note that a swap is decided; call `ranks_changed` after its ranks got the message."""
    known = turn.fleet.controllers
    for found in [known[member] for member in sorted(swap.members) if member in known]:
        if found.swap != swap.swap:  # it has no pause hook
            found.enter(swap.swap, swap.version, is_decided=True)
        found.is_decided, found.step, found.due_at = True, ControlStep.GATHERING, None


def caller(turn: Turn, swap: str, member: Member) -> Controller | None:
    """Return the controller that calls this rank to commit this swap; None if the rank commits by itself."""
    found = turn.fleet.models[member.added.model].membership.controllers.get(member.added.replica)
    return found if found is not None and found.swap == swap and found.is_decided else None


def tell_staged(turn: Turn, node: str, ranks: Collection[Member], swap: str, version: int, run: str) -> None:
    """Tell ranks of a node that their staged version is decided; name the ranks that a controller calls."""
    called = tuple(m.id for m in ranks if caller(turn, swap, m) is not None) if turn.fleet.controllers else ()
    sharing = [m for m in ranks if m.added.shares]
    beside = versions_beside(turn, sharing, swap) if sharing else ()
    turn.to_node(node, cluster.CommitStaged(swap, version, run, called, beside))


def tell_again(turn: Turn, ranks: Iterable[Member], swap: str, version: int, run: str) -> None:
    """Tell ranks once more that their staged version is decided, with all ranks of their nodes that have it staged.

    A node applies CommitStaged to all its ranks of the swap: a message that named only some of the called ranks would
    take the others from their controllers.
    """
    told = {member.id: member for member in ranks}
    nodes, models = {m.node for m in told.values()}, {m.added.model for m in told.values()}
    for model in models:
        targets = turn.fleet.models[model].membership.targets.values()
        told |= {m.id: m for m in targets if m.node in nodes and m.staged == swap}
    for node, there in sorted(by_node(told.values()).items()):
        tell_staged(turn, node, there, swap, version, run)


def versions_beside(turn: Turn, ranks: Iterable[Member], swap: str) -> tuple[VersionOf, ...]:
    """Return the version that each owner of the ranks' shared tensors serves once `swap` has committed.

    It is the version of the same joint swap, or else the live version.
    """
    models, found = turn.fleet.models, dict[str, VersionOf]()
    for member in ranks:
        running = models[member.added.model].running
        joint = running.together if running is not None and running.swap.swap == swap else None
        for name in {shared.model for shared in member.added.shares} - found.keys():
            owner = models.get(name)
            if owner is None:
                continue
            if joint is not None and owner.running is not None and owner.running.together is joint:
                found[name] = VersionOf(name, owner.running.version, owner.running.run)
            elif owner.live is not None:
                found[name] = VersionOf(name, owner.live.version, owner.live.run)
    return tuple(found[name] for name in sorted(found))


def acked(turn: Turn, found: Controller, member: Member) -> None:
    """Note that a rank knows of the decision."""
    found.acked.add(member.id)
    _look(turn, found)


def aborted(turn: Turn, swap: str) -> None:
    """Resume the engines that are paused for a swap that has been aborted."""
    for found in turn.fleet.controllers.values():
        if found.swap == swap and found.step in (ControlStep.PAUSING, ControlStep.PAUSED):
            _resume(turn, found)


def said(turn: Turn, node: str, message: local.Controlled) -> None:
    """Handle a controller's report that a hook has returned or failed."""
    found = turn.fleet.controllers.get(message.member)
    if found is None or found.swap != message.swap:
        return  # that swap is over
    _check_owner(found, node)
    found.paused_s = message.paused_s
    if message.reason:
        turn.log("swap", swap=found.swap, phase="failed", member=found.id, reason=message.reason)
    if message.what == "pause" and found.step is ControlStep.PAUSING:
        _paused(turn, found, message.reason)
    elif message.what == "commit" and found.step is ControlStep.COMMITTING:
        if message.reason:
            found.note_failure(turn.now)
            turn.post(found.swap, swap_events.MemberFailed(found.id, message.reason))
        else:
            found.step = ControlStep.FINISHING
        _look(turn, found)


def _paused(turn: Turn, found: Controller, reason: str) -> None:
    if not found.is_decided:
        found.step = ControlStep.PAUSED
        failed = swap_events.MemberFailed(found.id, reason)
        turn.post(found.swap, failed if reason else swap_events.QuietReported(found.id))
    elif reason:
        found.note_failure(turn.now)
    else:
        _gather(turn, found)


# --- changes of ranks -------------------------------------------------------------------------------------


def ranks_changed(turn: Turn, model: str, replica: str) -> None:
    """Continue after a rank of this replica registered, committed, failed or left."""
    state = turn.fleet.models.get(model)
    found = None if state is None else state.membership.controllers.get(replica)
    if found is not None:
        _look(turn, found)


def _look(turn: Turn, found: Controller) -> None:
    ranks = _ranks(turn, found)
    pending = [m for m in ranks if m.staged == found.swap and found.swap]
    match found.step:
        case ControlStep.FREE:
            _begin_late(turn, found, ranks)
            if found.step is ControlStep.FREE and found.refuses:
                _serve_again(turn, found, ranks)
        case ControlStep.PAUSED if found.due_at is not None:  # of an earlier coordinator's swap
            if (was := turn.fleet.identity_of(found.swap)) is not None and pending:
                found.version, found.is_decided, found.due_at = was[0], True, None
                _gather(turn, found)
            elif len(ranks) == max((m.added.world_size for m in ranks), default=1) and not pending:
                _resume(turn, found)
        case ControlStep.GATHERING:
            if not pending:
                _resume(turn, found)
            elif all(m.id in found.acked for m in pending):
                found.step = ControlStep.COMMITTING
                _say(turn, found, "commit")
        case ControlStep.FAILED | ControlStep.FINISHING:
            if not pending:
                _resume(turn, found)


def _begin_late(turn: Turn, found: Controller, ranks: list[Member]) -> None:
    """Begin with a decided version that ranks have pending: they had no controller, or it failed."""
    staged = (m.staged for m in ranks if m.staged is not None)
    decided = ((swap, was) for swap in staged if (was := turn.fleet.identity_of(swap)) is not None)
    if (first := next(decided, None)) is None:
        return
    swap, (version, _) = first
    found.enter(swap, version, is_decided=True)
    if found.added.pauses:
        found.step = ControlStep.PAUSING
        _say(turn, found, "pause")
    else:
        _gather(turn, found)


def _gather(turn: Turn, found: Controller) -> None:
    """Tell the ranks that a controller calls them; each answers."""
    found.step, found.due_at = ControlStep.GATHERING, None
    found.acked.clear()
    was = turn.fleet.identity_of(found.swap)
    pending = [m for m in _ranks(turn, found) if m.staged == found.swap]
    if was is not None and pending:
        tell_again(turn, pending, found.swap, *was)
    _look(turn, found)


def _served(ranks: list[Member]) -> tuple[int | None, str]:
    """Return (version, run) that all ranks of a replica serve; (None, "") if they do not serve one."""
    is_complete = bool(ranks) and len(ranks) == ranks[0].added.world_size
    served = {(m.version, m.run) if not m.poisoned else (None, "") for m in ranks}
    return served.pop() if is_complete and len(served) == 1 else (None, "")


def _serve_again(turn: Turn, found: Controller, ranks: list[Member]) -> None:
    """Resume an engine with the live version: its ranks lacked a version, or were unknown, when it was resumed."""
    live, is_ready = turn.fleet.models[found.added.model].live, all(m.staged is None and not m.suspended for m in ranks)
    if live is not None and is_ready and live.is_at(*_served(ranks)):
        found.swap = live.swap or "recovered"
        _resume(turn, found)


def _resume(turn: Turn, found: Controller) -> None:
    version, _ = _served(_ranks(turn, found))
    swap, is_decided = found.swap, found.is_decided
    found.step, found.swap, found.is_decided, found.due_at = ControlStep.FREE, "", False, None
    found.acked.clear()
    found.refuses = version is None
    turn.to_node(found.node, local.Control(member=found.id, swap=swap, what="resume", version=version))
    if is_decided:
        turn.post(swap, swap_events.CommitReported(found.id, found.paused_s))


def tick(turn: Turn) -> None:
    """Call again those whose hook failed; stop waiting for ranks that do not return."""
    for found in [c for c in turn.fleet.controllers.values() if c.due_at is not None and turn.now >= c.due_at]:
        found.due_at = None
        if found.step is ControlStep.FAILED:
            _gather(turn, found)
        else:
            _resume(turn, found)


# --- details ----------------------------------------------------------------------------------------------


def _ranks(turn: Turn, found: Controller) -> list[Member]:
    state = turn.fleet.models.get(found.added.model)
    return [] if state is None else state.membership.replica(found.added.replica)


def _say(turn: Turn, found: Controller, what: Literal["pause", "commit"]) -> None:
    turn.log("swap", swap=found.swap, version=found.version, phase=what, member=found.id)
    message = local.Control(member=found.id, swap=found.swap, what=what, version=found.version)
    turn.to_node(found.node, message)


def _check_owner(found: Controller, node: str) -> None:
    if found.node != node:
        raise RefusedError(f"controller {found.id!r} is one of node {found.node!r}; node {node!r} cannot speak for it")
