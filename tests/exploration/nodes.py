"""A node of the explored cluster: a daemon, one rank of each replica, and the queues between them.

`ordered` handles the coordinator's messages; `tests.exploration.moves` lists what else may happen. The daemon's record
of a rank is a real TargetState, the rank's process a real RankState. Only the code that carries messages between the
machines is written here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from refitd.commit import rank_state as r
from refitd.commit import target_state as t
from refitd.commit.rank_state import RankState
from refitd.commit.target_state import Live, Step, TargetState
from refitd.errors import IllegalTransition
from refitd.protocol import local

# A message is a tuple of its name and its fields.
Message = tuple[Any, ...]
Queue = tuple[Message, ...]

# Exchanged with the engine instead of real times and texts.
WHY = "why"


class Mode(NamedTuple):
    """How ranks take a version over, in one exploration."""

    flips: bool = False
    in_place: bool = False
    is_slow: bool = False  # messages between a daemon and its ranks take time, and a commit takes several steps
    hangs: bool = False  # a rank may stop in a commit for as long as anything else happens
    waits: bool = True  # clients wait for the next daemon


class Rank(NamedTuple):
    """One rank: the daemon's record, the process, and the queues between both."""

    number: int = 1  # of its registration; a new one has a new number
    target: TargetState | None = None  # None: the daemon does not know it
    process: RankState | None = None  # None: the process has ended
    boot: int = 0  # the coordinator that has admitted it; 0: none yet
    permit: bool = False
    down: Queue = ()
    up: Queue = ()
    kept: int | None = None  # the version in a staging arena whose process has ended
    asks: str = ""  # "suspend": it waits for the coordinator's answer
    is_hung: bool = False
    has_sent: bool = False  # it has sent its report, and has not noted that

    @property
    def serves(self) -> int | None:
        """The version that the engine serves now."""
        process = self.process
        return process.version if process is not None and self.permit and process.may_serve else None


class Node(NamedTuple):
    """One node. `boot` is the coordinator that has welcomed it; 0 for none."""

    ranks: tuple[Rank, Rank]
    linked: bool = True
    greets: bool = False  # NodeHello is on its way, or not yet sent
    boot: int = 1
    staging: str = ""  # the swap whose bytes workers write
    paused: str = ""  # the swap for which the controller on this node has paused its engine
    down: Queue = ()
    up: Queue = ()


class Move(NamedTuple):
    """Something that may happen: its name, the node afterwards, and how many faults it takes."""

    name: str
    node: Node
    faults: int = 0


class Refused(Exception):
    """A machine has refused an event that the cluster can produce: its table lacks a row."""


def running(mode: Mode, version: int = 1, *, asleep: bool = False) -> Node:
    """Return a node whose two ranks serve `version`; with `asleep` the second one is suspended."""
    rank = Rank(
        target=fresh_target(mode, version), process=r.joined("m", version, in_place=mode.in_place), boot=1, permit=True
    )
    if not asleep:
        return Node((rank, rank))
    suspended, _ = stepped(rank.process, r.Suspended())
    return Node((rank, rank._replace(target=moved(rank.target, t.Suspended()), process=suspended, permit=False)))


def fresh_target(mode: Mode, version: int | None) -> TargetState:
    return t.fresh(in_place=mode.in_place, version=version, flips=mode.flips)


def moved(target: TargetState | None, event: t.Event) -> TargetState:
    """Return the daemon's next record of a rank."""
    assert target is not None
    try:
        return t.step_of(target, event)
    except IllegalTransition as exc:
        raise Refused(str(exc)) from exc


def stepped(process: RankState | None, event: r.Event) -> tuple[RankState, Queue]:
    """Return the process's next state, and its report to the daemon."""
    assert process is not None
    try:
        state, report = r.step(process, event)
    except IllegalTransition as exc:
        raise Refused(str(exc)) from exc
    return state, () if report is None else (report,)


def with_rank(node: Node, index: int, rank: Rank) -> Node:
    return node._replace(ranks=(rank, node.ranks[1]) if index == 0 else (node.ranks[0], rank))


def say(node: Node, *messages: Message) -> Node:
    """Send messages to the coordinator; without a link they are lost."""
    return node._replace(up=node.up + messages) if node.linked and node.boot and not node.greets else node


def permitted(rank: Rank, is_renewed: bool) -> Rank:
    """Return the rank with the permit that its daemon's rules give it."""
    may = rank.target is not None and rank.target.may_serve
    permit = may and (is_renewed or rank.permit)
    return rank if permit == rank.permit else rank._replace(permit=permit)


def in_contact(node: Node, rank: Rank) -> bool:
    """Whether the coordinator's answers renew this rank's permit."""
    return node.linked and not node.greets and node.boot != 0 and rank.boot == node.boot


def retarget(node: Node, index: int, target: TargetState | None, *told: Message) -> Node:
    """Store the daemon's next record of a rank; its permit follows, and the messages go to the process."""
    rank = node.ranks[index]
    rank = rank._replace(target=target, down=rank.down + told)
    return with_rank(node, index, permitted(rank, in_contact(node, rank)))


# --- the daemon hears the coordinator ---------------------------------------------------------------------


def ordered(node: Node, message: Message, mode: Mode) -> Node:
    """Return the node after the daemon has handled a message of the coordinator."""
    match message:
        case ("load",):
            return say(node, ("loaded",))
        case ("stage", swap, version, indices):
            return _stage(node, swap, version, indices, mode)
        case ("spare", swap, version, indices):
            for index in indices:
                try:
                    target = node.ranks[index].target
                    if target is None:
                        raise IllegalTransition("it has left")
                    node = retarget(node, index, t.step_of(target, t.SpareStaged(swap, version)))
                except IllegalTransition:  # the daemon has given that version up
                    return abort(say(node, ("failed", swap)), swap)
            return say(node, ("staged", swap))
        case ("pause", swap):
            return say(node._replace(paused=swap), ("paused", swap))
        case ("resume", swap):
            return node._replace(paused="" if node.paused == swap else node.paused)
        case ("commit", swap, version):
            return _commit(node, swap, version, mode)
        case ("abort", swap):
            return abort(node, swap)
        case ("fence", index, number, _):
            rank = node.ranks[index]
            if (target := _registered(rank, number)) is None:
                return node
            told = local.Fence("m", WHY)
            return retarget(node, index, moved(target, t.FellBehind(WHY)), told)
        case ("evict", index, number):
            rank = node.ranks[index]
            if _registered(rank, number) is None:
                return node
            node = say(node, ("left", index, number))
            return retarget(node, index, None, local.Evicted("m", WHY))
        case ("welcome", boot):
            return _welcomed(node, boot)
        case ("admitted", index, number):
            rank = node.ranks[index]
            if _registered(rank, number) is None:
                return node
            return with_rank(node, index, permitted(rank._replace(boot=node.boot), True))
        case ("suspended", index, number, is_allowed):
            rank = node.ranks[index]
            node = with_rank(node, index, rank._replace(asks=""))
            if not is_allowed or (target := _registered(rank, number)) is None or rank.process is None:
                return node
            node = retarget(node, index, moved(target, t.Suspended()))
            process, _ = stepped(rank.process, r.Suspended())
            return with_rank(node, index, node.ranks[index]._replace(process=process))
    raise AssertionError(message)


def _registered(rank: Rank, number: int) -> TargetState | None:
    """Return the registration that the coordinator knows by this number; one that restores still has the old one."""
    target = rank.target
    is_known = target is not None and target.step is not Step.RESTORING and rank.number == number
    return target if is_known else None


def _stage(node: Node, swap: str, version: int, indices: tuple[int, ...], mode: Mode) -> Node:
    event = t.StageBegan(swap, version)
    try:
        targets = [node.ranks[index].target for index in indices]
        after = [t.step_of(target, event) for target in targets if target is not None]
    except IllegalTransition:
        return say(node, ("failed", swap))
    if len(after) < len(targets):
        return say(node, ("failed", swap))  # it is no longer registered
    for index, target in zip(indices, after, strict=True):
        node = retarget(node, index, target)
    return node._replace(staging=swap)


def _commit(node: Node, swap: str, version: int, mode: Mode) -> Node:
    for index, rank in enumerate(node.ranks):
        if rank.target is not None and rank.target.staged == swap:
            target = moved(rank.target, t.Decided(swap, version))
            told = local.PrepareCommit(swap, "m", version, mode.in_place, flips=mode.flips, run=target.next_run)
            node = retarget(node, index, target, told)
    return node


def abort(node: Node, swap: str) -> Node:
    for index, rank in enumerate(node.ranks):
        if rank.target is not None and rank.target.swap == swap:
            target = moved(rank.target, t.Aborted(swap, WHY))
            is_poisoned = target.in_place and target.live is Live.POISONED
            node = retarget(node, index, target, *((local.Poisoned(swap, "m", WHY),) if is_poisoned else ()))
    return node._replace(staging="") if node.staging == swap else node


def _welcomed(node: Node, boot: int) -> Node:
    """Answer a coordinator's welcome: undecided writing ends, and every rank is announced."""
    if node.staging:
        node = abort(node, node.staging)
    node = node._replace(boot=boot, greets=False, paused="")
    told: list[Message] = []
    for index, rank in enumerate(node.ranks):
        node = with_rank(node, index, rank._replace(boot=0, asks=""))
        if rank.target is not None and rank.target.step is not Step.RESTORING:
            told.append(announced(index, rank.number, rank.target))
    return say(node, ("all", *told)) if told else node


def announced(index: int, number: int, target: TargetState) -> Message:
    """Return the message that announces a rank to a coordinator."""
    suspended = target.live is Live.SUSPENDED
    return "add", index, number, target.version, target.staged, target.next, target.spare, suspended
