"""What may happen next on a node of the explored cluster: messages arrive, ranks commit, and faults.

`node_moves` lists it. The messages of the coordinator are handled in `tests.exploration.nodes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from refitd.commit import rank_state as r
from refitd.commit import target_state as t
from refitd.commit.rank_state import Bond, RankState, RankStep
from refitd.commit.target_state import Live, Step, TargetState
from refitd.protocol import local
from tests.exploration.nodes import (
    WHY,
    Mode,
    Move,
    Node,
    Rank,
    abort,
    announced,
    fresh_target,
    in_contact,
    moved,
    ordered,
    permitted,
    retarget,
    say,
    stepped,
    with_rank,
)


def node_moves(node: Node, mode: Mode, *, is_led: bool, may_fail: bool = True) -> Iterator[Move]:
    """Yield what may happen on a node.

    `is_led`: a coordinator runs that the link reaches. `may_fail`: faults may happen.
    """
    if node.down:
        rest = node._replace(down=node.down[1:])
        yield Move(f"the daemon handles {node.down[0]}", ordered(rest, node.down[0], mode))
    if node.staging:
        after = node._replace(staging="")
        for index, rank in enumerate(node.ranks):
            if rank.target is not None and rank.target.swap == node.staging:
                after = retarget(after, index, moved(rank.target, t.StageFinished(node.staging)))
        yield Move("workers have staged", say(after, ("staged", node.staging)))
    if may_fail:
        yield from _faults(node, mode)
    if not node.linked and is_led:
        yield Move("the link returns", node._replace(linked=True, greets=True, up=(("hello", False),)))
    renewed = tuple(permitted(rank, True) if in_contact(node, rank) else rank for rank in node.ranks)
    if renewed != node.ranks:
        yield Move("a heartbeat is answered", node._replace(ranks=(renewed[0], renewed[1])))
    ends = tuple(rank._replace(permit=rank.permit and in_contact(node, rank)) for rank in node.ranks)
    if ends != node.ranks:
        yield Move("permits end", node._replace(ranks=(ends[0], ends[1])))
    for index in range(2):
        yield from _rank_moves(node, index, mode, may_fail=may_fail)


def resumptions(node: Node) -> Iterator[Move]:
    """Yield the ends of hangs: they come after everything else."""
    for index, rank in enumerate(node.ranks):
        if rank.is_hung:
            yield Move(f"rank {'ab'[index]}: goes on", with_rank(node, index, rank._replace(is_hung=False)))


def _faults(node: Node, mode: Mode) -> Iterator[Move]:
    """Yield the faults of a node."""
    if node.staging:
        yield Move("staging fails", say(node, ("failed", node.staging)), 1)
    swaps = {rank.target.swap for rank in node.ranks if rank.target is not None}
    for swap in sorted(s for s in swaps if s is not None):
        if not any(
            rank.target.step is Step.COMMITTING for rank in node.ranks if rank.target and rank.target.swap == swap
        ):
            after = say(node, ("failed", swap))
            # a node that has said that it staged the version keeps it until the coordinator aborts
            yield Move("a source takes the version back", abort(after, swap) if node.staging == swap else after, 1)
    if node.linked and node.boot and not node.greets:
        yield Move("a worker of the epoch dies", say(node, ("lost-epoch",)), 1)
    if node.linked:
        yield Move("the link breaks", node._replace(linked=False, up=(), down=()), 1)
    yield Move("the daemon restarts", _restarted(node, mode), 1)


def quick(node: Node) -> Node:
    """Return the node once its daemon and its ranks have heard each other."""
    for index in range(2):
        while True:
            rank = node.ranks[index]
            if rank.up:
                node = _heard(node, index, rank.up[0])
            elif rank.process is None and rank.down:
                node = with_rank(node, index, rank._replace(down=()))
            elif rank.down:
                node = with_rank(node, index, _told(rank._replace(down=rank.down[1:]), rank.down[0]))
            else:
                break
    return node


def _restarted(node: Node, mode: Mode) -> Node:
    """Return the node after its daemon has ended: the processes wait for the next one."""
    for index, rank in enumerate(node.ranks):
        process = rank.process
        if process is not None:
            failure = local.Failure("peer-lost", WHY)
            written = rank.target.in_place and not rank.permit if rank.target is not None else False
            ended = r.DaemonEnded(failure, written) if mode.waits else r.DaemonLost(failure, written)
            process, _ = stepped(process, ended)
        # the process reads its old permit until it has joined the next daemon
        node = with_rank(node, index, Rank(rank.number, None, process, permit=rank.permit, kept=rank.kept))
    return Node(node.ranks, linked=False, boot=0)


def _rank_moves(node: Node, index: int, mode: Mode, *, may_fail: bool) -> Iterator[Move]:
    rank, who = node.ranks[index], "ab"[index]
    target, process = rank.target, rank.process

    def then(name: str, after: Rank, faults: int = 0) -> Move:
        return Move(f"rank {who}: {name}", with_rank(node, index, after), faults)

    if rank.up:
        yield Move(f"the daemon hears rank {who}: {shown(rank.up[0])}", _heard(node, index, rank.up[0]))
    if process is None:
        if target is None and node.boot and not node.greets:
            yield _registers(node, index, mode)
        yield from restorations(node, index, mode)
        return
    if rank.down:
        rest = rank._replace(down=rank.down[1:])
        yield then(f"hears {shown(rank.down[0])}", _told(rest, rank.down[0]))
    if not rank.is_hung:
        yield from _commits(rank, then, mode, may_fail=may_fail)
        if mode.hangs and may_fail and (process.pending is not None or process.step is not RankStep.IDLE):
            yield then("hangs", rank._replace(is_hung=True), 1)
    if process.step in (RankStep.IDLE, RankStep.LIVE, RankStep.FAILED):  # an interrupt may have kept its report back
        if process.bond is Bond.AWAY and node.boot and not node.greets and not rank.down:
            yield _rejoins(node, index, mode)
            if may_fail:
                refused, _ = stepped(process, r.DaemonLost(local.Failure("refused", WHY)))
                yield then("is refused by the next daemon", rank._replace(process=refused), 1)
        is_idle = process.step is RankStep.IDLE and process.pending is None
        is_free = is_idle and process.bond is Bond.JOINED and not rank.asks
        if is_free and target is not None and in_contact(node, rank):
            # the daemon asks the coordinator first, and answers when it knows
            if not process.suspended and may_fail:
                asks = with_rank(node, index, rank._replace(asks="suspend"))
                yield Move(f"rank {who}: suspends", say(asks, ("suspend", index, rank.number, True)), 1)
            elif process.suspended and target.step is Step.IDLE and not rank.down:
                yield Move(f"rank {who}: wakes", _woken(node, index, is_lost=False))
                yield Move(f"rank {who}: wakes without its tensors' contents", _woken(node, index, is_lost=True))
    if process.bond in (Bond.EVICTED, Bond.CLOSED, Bond.LOST, Bond.ORPHANED) and process.step is RankStep.IDLE:
        stepped(process, r.Closed(WHY))
        yield then("is closed, and its process ends", Rank(rank.number))
    elif process.bond is Bond.JOINED and may_fail:
        yield Move(f"rank {who}: its process dies", _died(node, index), 1)
        yield Move(f"rank {who}: closes", _closed(node, index, r.Closed(WHY)), 1)
        orphaned = r.Orphaned(local.Failure("orphaned", WHY))
        yield Move(f"rank {who}: its parent dies", _closed(node, index, orphaned), 1)


def shown(message: Any) -> str:
    """Return a message as text for traces."""
    return str(message) if isinstance(message, tuple) else type(message).__name__


def _commits(rank: Rank, then: Callable[..., Move], mode: Mode, *, may_fail: bool) -> Iterator[Move]:
    """Yield the steps of a commit in the engine's process."""
    process = rank.process
    assert process is not None
    pending = process.pending
    if process.step is RankStep.IDLE and pending is not None:
        begun, _ = stepped(process, r.Begun())
        yield then("begins to commit", rank._replace(process=begun) if mode.is_slow else _writing(rank, begun))
        if not may_fail:
            return
        given_up, report = stepped(process, r.GaveUp(WHY))
        yield then("gives the version up", rank._replace(process=given_up, up=rank.up + report), 1)
        interrupted, _ = stepped(begun, r.Interrupted())
        assert interrupted == process, "an interrupted commit has changed the state"
    elif process.step is RankStep.BEGUN:
        yield then("writes its tensors", _writing(rank, process))
        failed, _ = stepped(process, r.WriteFailed(WHY))
        yield then("cannot write its tensors", rank._replace(process=failed), 1)
    elif process.step is RankStep.WRITING:
        assert process.taking is not None
        again, _ = stepped(process, r.WriteBegan())
        assert again == process, "a repeated write has changed the state"
        for name, after, faults in _endings(rank, process, process.taking):
            yield then(name, after if mode.is_slow else _reported(after), faults)
    elif process.step in (RankStep.LIVE, RankStep.FAILED):
        if rank.has_sent or process.bond is not Bond.JOINED:
            yield then("notes its report", _noted(rank))
        else:
            assert process.last is not None
            yield then("reports", rank._replace(has_sent=True, up=(*rank.up, process.last)))


def _writing(rank: Rank, begun: RankState) -> Rank:
    """Return the rank once it writes its tensors."""
    return rank._replace(process=stepped(begun, r.WriteBegan())[0])


def _endings(rank: Rank, process: RankState, taking: local.PrepareCommit) -> Iterator[tuple[str, Rank, int]]:
    """Yield how a commit may end: its name, the rank, and the faults that this takes."""
    failed, _ = stepped(process, r.WriteFailed(WHY))
    if taking.flips:
        exchanged, _ = stepped(process, r.Exchanged())
        yield "has the version live", rank._replace(process=stepped(exchanged, r.Written(0.0, True))[0]), 0
        yield "has the version live by a copy", rank._replace(process=stepped(process, r.Written(0.0))[0]), 1
        yield "fails after the exchange", rank._replace(process=stepped(exchanged, r.WriteFailed(WHY))[0]), 1
    else:
        yield "has the version live", rank._replace(process=stepped(process, r.Written(0.0))[0]), 0
        yield "fails to commit", rank._replace(process=failed), 1


def _reported(rank: Rank) -> Rank:
    """Return the rank once it has reported the outcome of its commit."""
    process = rank.process
    if process is None or process.last is None or process.step not in (RankStep.LIVE, RankStep.FAILED):
        return rank
    return _noted(rank._replace(up=rank.up + ((process.last,) if process.bond is Bond.JOINED else ())))


def _noted(rank: Rank) -> Rank:
    """Return the rank once it has noted its report."""
    done, _ = stepped(rank.process, r.Reported())
    return rank._replace(process=done, has_sent=False)


def _told(rank: Rank, message: Any) -> Rank:
    """Return the rank after its process has heard its daemon."""
    process, report = stepped(rank.process, message)
    return rank._replace(process=process, up=rank.up + report)


def _heard(node: Node, index: int, message: Any) -> Node:
    """Return the node after its daemon has heard a rank."""
    rank = node.ranks[index]
    node = with_rank(node, index, rank._replace(up=rank.up[1:]))
    target, number = rank.target, rank.number
    if target is None or target.swap != getattr(message, "swap", None):
        return node  # that registration or that swap is over
    match message:
        case local.CommitDone(swap, _, _, exchanged) if target.step is Step.COMMITTING:
            is_copy = target.flips and not exchanged
            node = retarget(node, index, moved(target, t.CommittedByCopy(swap) if is_copy else t.Committed(swap)))
            spare = node.ranks[index].target
            node = say(node, ("committed", swap, index, number, spare.spare if spare is not None else None))
        case local.CommitFailed(swap) if target.step is Step.COMMITTING:
            node = retarget(node, index, moved(target, t.Failed(swap)))
            node = say(node, ("commit-failed", swap, index, number))
    return node


def _woken(node: Node, index: int, *, is_lost: bool) -> Node:
    rank = node.ranks[index]
    node = retarget(node, index, moved(rank.target, t.WokenEmpty() if is_lost else t.Woken()))
    process, _ = stepped(rank.process, r.Woken(is_lost))
    node = with_rank(node, index, node.ranks[index]._replace(process=process))
    return say(node, ("suspend", index, rank.number, False, is_lost))


def _died(node: Node, index: int) -> Node:
    """Return the node after a process has died; its daemon keeps a staging arena that holds a whole version."""
    rank = node.ranks[index]
    target = rank.target
    kept = None
    if target is not None and not target.in_place and target.holds is not None:
        busy = target.step is Step.COMMITTING or target.step is Step.STAGING or target.live is Live.SUSPENDED
        kept = None if target.flips and busy else target.holds
    node = _left(node, index)
    return with_rank(node, index, Rank(rank.number, kept=kept))


def _closed(node: Node, index: int, event: r.Event) -> Node:
    rank = node.ranks[index]
    process, _ = stepped(rank.process, event)
    node = _left(node, index)
    return with_rank(node, index, node.ranks[index]._replace(process=process))


def _left(node: Node, index: int) -> Node:
    """Return the node after its daemon has forgotten a rank."""
    rank = node.ranks[index]
    if rank.target is None:
        return node
    swap, node = rank.target.swap, with_rank(node, index, rank._replace(target=None, permit=False, up=()))
    if swap is not None and node.staging == swap:
        others = [one.target for one in node.ranks if one.target is not None and one.target.swap == swap]
        node = node if others else node._replace(staging="")
    return say(node, ("left", index, rank.number))


def _registers(node: Node, index: int, mode: Mode) -> Move:
    """A new process registers; a kept staging arena is restored first."""
    rank = node.ranks[index]
    if rank.kept is not None:
        target = t.restoring(rank.kept, flips=mode.flips)
        after = Rank(rank.number, target)
        return Move(f"rank {'ab'[index]}: returns and restores", with_rank(node, index, after))
    return _enters(node, index, fresh_target(mode, None), r.joined("m", None, in_place=mode.in_place), "returns")


def _enters(node: Node, index: int, target: TargetState, process: RankState, name: str, faults: int = 0) -> Move:
    rank = node.ranks[index]
    after = Rank(rank.number + 1, target, process)
    node = say(with_rank(node, index, after), announced(index, after.number, target))
    return Move(f"rank {'ab'[index]}: {name}", node, faults)


def restorations(node: Node, index: int, mode: Mode) -> Iterator[Move]:
    """Yield how the restoration of a kept staging arena may end."""
    target = node.ranks[index].target
    if target is None or target.step is not Step.RESTORING or not node.boot or node.greets:
        return
    restored = moved(target, t.ContentRestored())
    yield _enters(node, index, restored, r.joined("m", restored.version, in_place=mode.in_place), "has restored")
    refused = moved(target, t.ContentRefused())
    yield _enters(node, index, refused, r.joined("m", None, in_place=mode.in_place), "cannot restore", 1)


def _rejoins(node: Node, index: int, mode: Mode) -> Move:
    rank = node.ranks[index]
    process, _ = stepped(rank.process, r.Rejoined("m"))
    target = fresh_target(mode, process.version)
    if process.suspended:
        target = moved(target, t.Suspended())
    return _enters(node, index, target, process, "joins the next daemon")
