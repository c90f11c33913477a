"""Chooses in which poll the ranks of a replica flip, where all of them are on this node: nobody else need be asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from refitd.daemon.members import LocalMember
from refitd.lockstep import Reached, meeting
from refitd.protocol import local


@dataclass(slots=True)
class _ReplicaSteps:
    """One replica's ranks during one swap."""

    said: dict[str, local.StepReached] = field(default_factory=dict)  # by member
    flips: dict[str, local.FlipAt] | None = None  # what they were told, once that is known
    is_handed_over: bool = False  # the coordinator chooses


class LocalSteps:
    """What ranks in lockstep have said of where they are. A choice that is not certain at once is the coordinator's.

    `tell(member, message)` tells a rank what was chosen, `hand_over(member, said)` tells the coordinator what it said.
    """

    def __init__(
        self,
        members: Mapping[str, LocalMember],
        tell: Callable[[LocalMember, local.FlipAt], None],
        hand_over: Callable[[LocalMember, local.StepReached], None],
    ) -> None:
        self._members, self._tell, self._hand_over = members, tell, hand_over
        self._replicas: dict[tuple[str, str, str], _ReplicaSteps] = {}  # by swap, model, replica

    def reached(self, member: LocalMember, said: local.StepReached) -> None:
        """Note where a rank is; tell all ranks of its replica in which poll they flip, once all have said it."""
        registered = member.registration
        assert isinstance(registered, local.RegisterTarget)
        replica = self._replicas.setdefault((said.swap, registered.model, registered.replica), _ReplicaSteps())
        ranks = self._ranks(said.swap, registered.model, registered.replica)
        replica.said[member.id] = said
        if replica.flips is not None:
            if member.id in replica.flips:
                self._tell(member, replica.flips[member.id])  # a coordinator that started anew has had it asked again
                return
            replica.is_handed_over = True
        if replica.is_handed_over:
            self._hand_over(member, said)
        elif len(ranks) < registered.world_size:
            self._give_up(replica)
        elif all(rank.id in replica.said for rank in ranks):
            self._choose(replica, ranks)

    def _ranks(self, swap: str, model: str, replica: str) -> list[LocalMember]:
        """Return the ranks of a replica that are here and wait for their commit point."""
        return [
            member
            for member in self._members.values()
            if member.state.swap == swap
            and member.state.step.is_decided
            and isinstance(member.registration, local.RegisterTarget)
            and (member.registration.model, member.registration.replica) == (model, replica)
        ]

    def _choose(self, replica: _ReplicaSteps, ranks: Iterable[LocalMember]) -> None:
        there = {rank.id: rank for rank in ranks}
        said = {id_: one for id_, one in replica.said.items() if id_ in there}
        polls = meeting(
            {
                id_: Reached(one.step, one.origin, one.stands, ("", there[id_].pid, one.thread) if one.thread else None)
                for id_, one in said.items()
            }
        )
        if polls is None:
            self._give_up(replica)
            return
        # they flip together, so that they count from there
        replica.flips = {id_: local.FlipAt(said[id_].swap, id_, step, said[id_].swap) for id_, step in polls.items()}
        for id_, flip in replica.flips.items():
            self._tell(there[id_], flip)

    def _give_up(self, replica: _ReplicaSteps) -> None:
        """Leave the choice to the coordinator, which knows ranks elsewhere and waits for those that are late."""
        replica.is_handed_over = True
        for id_, said in replica.said.items():
            if (member := self._members.get(id_)) is not None:
                self._hand_over(member, said)

    def tick(self) -> None:
        """Forget replicas that have flipped; hand those over of which a rank has not answered, or has left."""
        for key, replica in list(self._replicas.items()):
            if not self._ranks(*key):
                del self._replicas[key]
            elif replica.flips is None and not replica.is_handed_over:
                self._give_up(replica)
