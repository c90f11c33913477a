"""Asks this node's members and replica controllers to pause, commit, resume or stop serving."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from refitd.commit.lockstep import Reached, meeting
from refitd.commit.target_state import (
    Aborted,
    Committed,
    CommittedByCopy,
    Decided,
    Failed,
    FellBehind,
    Live,
    Step,
)
from refitd.daemon.arenas import LocalArenas
from refitd.daemon.effects import ControllerIntroduced, Effects, Replace
from refitd.daemon.links import ClientSession, CoordinatorLink
from refitd.daemon.members import LocalMember
from refitd.daemon.new_members import member_id
from refitd.errors import IllegalTransition, RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.base import Message, clipped
from refitd.text import called


@dataclass(slots=True)
class _ReplicaSteps:
    """The poll counts of one replica's ranks during one swap."""

    said: dict[str, local.StepReached] = field(default_factory=dict)  # by member
    flips: dict[str, local.FlipAt] | None = None  # by member, once the polls are chosen
    is_handed_over: bool = False  # the coordinator chooses the polls


class LocalSteps:
    """Chooses the poll for each flip of a lockstep rank.

    If the ranks here cannot determine a replica's polls, the coordinator chooses them.
    """

    def __init__(self, members: Mapping[str, LocalMember]) -> None:
        self._members = members
        self._replicas: dict[tuple[str, str, str], _ReplicaSteps] = {}  # by swap, model, replica

    def reached(self, effects: Effects, member: LocalMember, said: local.StepReached) -> None:
        """Record a rank's poll count; once all ranks of its replica have reported, send each its poll to flip in."""
        registered = member.registration.request
        assert isinstance(registered, local.RegisterTarget)
        replica = self._replicas.setdefault((said.swap, registered.model, registered.replica), _ReplicaSteps())
        ranks = self._ranks(said.swap, registered.model, registered.replica)
        replica.said[member.id] = said
        if replica.flips is not None:
            if member.id in replica.flips:
                _tell(
                    effects, member, replica.flips[member.id]
                )  # after a restart of the coordinator, the rank is asked again
                return
            replica.is_handed_over = True
        if replica.is_handed_over:
            say_step(effects, member, said)
        elif len(ranks) < registered.world_size:
            self._give_up(effects, replica)
        elif all(rank.id in replica.said for rank in ranks):
            self._choose(effects, replica, ranks)

    def _ranks(self, swap: str, model: str, replica: str) -> list[LocalMember]:
        """Return the ranks of a replica on this node that wait for their commit point."""
        return [
            member
            for member in self._members.values()
            if member.state.swap == swap
            and member.state.step is Step.COMMITTING
            and isinstance(member.registration.request, local.RegisterTarget)
            and (member.registration.request.model, member.registration.request.replica) == (model, replica)
        ]

    def _choose(self, effects: Effects, replica: _ReplicaSteps, ranks: Iterable[LocalMember]) -> None:
        there = {rank.id: rank for rank in ranks}
        said = {id_: one for id_, one in replica.said.items() if id_ in there}
        polls = meeting(
            {
                id_: Reached(
                    one.step,
                    one.origin,
                    one.stands,
                    ("", there[id_].registration.pid, one.thread) if one.thread else None,
                )
                for id_, one in said.items()
            }
        )
        if polls is None:
            self._give_up(effects, replica)
            return
        # the swap becomes the common origin of the ranks' counts, because all flip together
        replica.flips = {id_: local.FlipAt(said[id_].swap, id_, step, said[id_].swap) for id_, step in polls.items()}
        for id_, flip in replica.flips.items():
            _tell(effects, there[id_], flip)

    def _give_up(self, effects: Effects, replica: _ReplicaSteps) -> None:
        """Leave the choice to the coordinator: it knows the ranks on other nodes and waits for late ranks."""
        replica.is_handed_over = True
        for id_, said in replica.said.items():
            if (member := self._members.get(id_)) is not None:
                say_step(effects, member, said)

    def tick(self, effects: Effects) -> None:
        """Drop replicas that have flipped; hand over replicas with a rank that has not answered or has left."""
        for key, replica in list(self._replicas.items()):
            if not self._ranks(*key):
                del self._replicas[key]
            elif replica.flips is None and not replica.is_handed_over:
                self._give_up(effects, replica)


def _tell(effects: Effects, member: LocalMember, message: local.FlipAt | local.Poisoned) -> None:
    if member.session is not None:
        effects.tell(member.session, 0, message)


def say_step(effects: Effects, member: LocalMember, said: local.StepReached) -> None:
    """Send the coordinator a rank's poll count."""
    effects.say(local.StepReached(said.swap, member.id, said.step, said.origin, said.stands, said.thread))


class Commits:
    """Runs the commits of this node's members."""

    def __init__(self, members: dict[str, LocalMember], arenas: LocalArenas) -> None:
        self._arenas = arenas
        self._members = members
        self._controlled: dict[str, str] = {}  # member -> the last swap that its controller had to commit
        self._exchanged: dict[str, str] = {}  # member -> the last swap that exchanged its arenas
        self._steps = LocalSteps(members)

    # --- fence and abort ----------------------------------------------------------------------------------

    def fence_behind(self, effects: Effects, member: LocalMember, reason: str) -> None:
        """Fence a member that does not have the live version, until it has caught up."""
        is_news = member.state.live is not Live.BEHIND  # a fenced member is fenced again at each decision
        effects.move(member, FellBehind(reason))
        if member.session is not None:
            if is_news:
                effects.log("fenced", member=member.id, reason=reason)
            effects.tell(member.session, 0, local.Fence(member=member.id, reason=reason))

    def aborted(self, effects: Effects, swap: str, reason: str) -> None:
        """End an aborted swap in its members. Call this once the workers have stopped writing for it."""
        for member in self._members.values():
            if member.state.swap != swap:
                continue
            try:
                effects.move(member, Aborted(swap, reason))
            except IllegalTransition as exc:
                effects.log(
                    "illegal", reason=str(exc)
                )  # a coordinator that aborts a decided swap has lost its records; do not undo the decision
                continue
            if member.registration.in_place and member.state.live is Live.POISONED:
                _tell(effects, member, local.Poisoned(swap=swap, member=member.id, reason=reason))

    # --- commit -------------------------------------------------------------------------------------------

    def begin(self, effects: Effects, message: cluster.CommitStaged) -> None:
        """Tell every member that has staged this swap to commit it at its next commit point.

        Once every `controlled` member has answered with its step, its controller starts the commit.
        """
        swap, version, controlled = message.swap, message.version, message.controlled
        effects.log("swap", swap=swap, version=version, phase="commit")
        for member in self._members.values():
            if member.state.staged != swap or member.session is None:
                continue
            try:
                effects.move(member, Decided(swap, version))
            except IllegalTransition as exc:
                effects.log("illegal", reason=str(exc))
                effects.say(local.CommitFailed(swap=swap, member=member.id, reason=clipped(str(exc))))
                continue
            r = member.registration
            is_controlled = member.id in controlled
            self._controlled[member.id] = swap if is_controlled else ""
            prepare = local.PrepareCommit(
                swap=swap,
                member=member.id,
                version=version,
                run=member.state.next_run,
                flips=r.flips,
                in_place=r.in_place,
                lockstep=not is_controlled and r.in_lockstep,
                controlled=is_controlled,
                beside=message.beside,
            )
            effects.tell(member.session, 0, prepare)

    def step_reached(self, effects: Effects, member: LocalMember, said: local.StepReached) -> None:
        """Handle a member's poll count, for which the other ranks of its replica or its controller wait."""
        if member.state.swap != said.swap or member.state.step is not Step.COMMITTING:
            return
        if self._controlled.get(member.id) == said.swap:
            say_step(effects, member, said)
        else:
            self._steps.reached(effects, member, said)

    def in_step(self, effects: Effects, message: local.FlipAt) -> None:
        """Forward the poll for a member's commit, or the order to leave the current poll with the old version."""
        member = self._members.get(message.member)
        if member is not None and member.state.swap == message.swap and member.session is not None:
            effects.tell(member.session, 0, message)

    def tick(self, effects: Effects) -> None:
        """Hand replicas without an agreed poll over to the coordinator."""
        self._steps.tick(effects)

    def committed(
        self, effects: Effects, swap: str, member: LocalMember, paused_s: float, *, exchanged: bool = False
    ) -> bool:
        """Record that the member committed; return False if it was not asked to."""
        if member.state.swap != swap or member.state.step is not Step.COMMITTING:
            return False
        effects.move(member, Committed(swap) if exchanged or not member.registration.flips else CommittedByCopy(swap))
        if exchanged and member.registration.flips:
            self.exchange(effects, member)
            self._exchanged[member.id] = swap
            member.proofs = member.proofs.exchanged()
        version = member.state.version
        effects.log("swap", swap=swap, version=version, phase="committed", member=member.id, paused=paused_s)
        spare, run = member.state.spare, member.state.spare_run
        effects.say(local.CommitDone(swap, member.id, paused_s, exchanged, spare, run, member.seeds))
        return True

    def failed(self, effects: Effects, swap: str, member: LocalMember, reason: str, *, exchanged: bool = False) -> None:
        """Record and report that the member failed to commit; it stops serving."""
        if member.state.swap != swap:
            return
        effects.log("swap", swap=swap, phase="failed", member=member.id, reason=reason)
        if member.state.step is not Step.COMMITTING:
            return
        effects.move(member, Failed(swap))
        if member.registration.flips:
            member.proofs = replace(member.proofs, live=None, spare=None)
        if exchanged and member.registration.flips:  # a hook of its engine failed after the exchange
            self.exchange(effects, member)
            self._exchanged[member.id] = swap
        effects.say(local.CommitFailed(swap=swap, member=member.id, reason=reason))

    def exchange(self, effects: Effects, member: LocalMember) -> None:
        """Record that a member has exchanged its live and staging arenas; replace workers that mapped only one."""
        arena, other = member.registration.live_arena, member.memory.staging
        for worker in self._arenas.exchange(effects, arena, other):
            reason = f"arenas {arena} and {other} were exchanged, and it has mapped only one"
            effects.notes.append(Replace(worker, reason))

    def exchanged_in(self, member: LocalMember) -> str:
        """Return the last swap that exchanged a member's arenas, "" if none did."""
        return self._exchanged.get(member.id, "")

    def member_left(self, member: LocalMember) -> None:
        """Forget a member that left."""
        self._controlled.pop(member.id, None)
        self._exchanged.pop(member.id, None)


@dataclass(slots=True)
class LocalController:
    """One controller. `busy` is the swap for which its engine is paused, or may be.

    `refuses`: its engine was last resumed without a version.
    """

    id: str
    session: int
    pid: int
    asked: local.RegisterController
    busy: str = ""
    refuses: bool = False


class LocalControllers:
    """This node's controllers."""

    def __init__(self, node: str, link: CoordinatorLink) -> None:
        self._node = node
        self._link = link
        self._all: dict[str, LocalController] = {}

    def register(self, effects: Effects, session: ClientSession, request: int, asked: local.RegisterController) -> None:
        """Announce a controller to the coordinator, then answer the client."""
        self._link.check()
        number = self._link.next_number()
        name = member_id(asked.model, f"replica {asked.replica!r} controller", self._node, number)
        found = LocalController(name, session.id, session.pid, asked, refuses=asked.refuses)
        self._all[found.id] = found
        session.controllers.add(found.id)
        self._announce(effects, session.id, request, found)

    def introduced(
        self, effects: Effects, session: ClientSession | None, request: int, about: ControllerIntroduced, reply: Message
    ) -> None:
        """Handle the coordinator's answer about a controller."""
        if isinstance(reply, local.Failure):
            if not request:
                effects.log("not-readmitted", member=about.member, reason=reply.message)
                return
            self._all.pop(about.member, None)
            if session is not None:
                session.controllers.discard(about.member)
                effects.tell(session.id, request, reply)
        elif request and session is not None:
            effects.tell(session.id, request, local.Registered(member=about.member))

    def readmit(self, effects: Effects) -> None:
        """Announce all controllers again to a coordinator that does not know this node."""
        for found in self._all.values():
            self._announce(effects, 0, 0, found)

    def _announce(self, effects: Effects, session: int, request: int, found: LocalController) -> None:
        message = local.RegisterController(
            member=found.id,
            model=found.asked.model,
            replica=found.asked.replica,
            pid=found.pid,
            pauses=found.asked.pauses,
            busy=found.busy,
            refuses=found.refuses,
        )
        self._link.ask(effects, session, request, message, ControllerIntroduced(found.id))

    def __contains__(self, member: str) -> bool:
        """Whether this is the id of a controller of this node."""
        return member in self._all

    def remove(self, effects: Effects, session: ClientSession, member: str, reason: str) -> None:
        """End a controller's registration."""
        self._own(session, member)
        del self._all[member]
        session.controllers.discard(member)
        effects.say(local.Deregister(member=member, reason=reason))

    def told(self, effects: Effects, message: local.Control) -> None:
        """Forward the coordinator's request to a controller."""
        found = self._all.get(message.member)
        if found is not None:
            resumes = message.what == "resume"
            found.busy, found.refuses = "" if resumes else message.swap, resumes and message.version is None
            effects.tell(found.session, 0, message)

    def said(self, effects: Effects, session: ClientSession, message: local.Controlled) -> None:
        """Forward a controller's answer to the coordinator."""
        self._own(session, message.member)
        effects.say(message)

    def _own(self, session: ClientSession, member: str) -> LocalController:
        found = self._all.get(member)
        if found is None or found.session != session.id:
            raise RefusedError(f"{called(member)!r} is not a controller of this session; register again")
        return found
