"""Requests for plans, by swaps that begin and by operators who want to see one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from refitd.coordinator.actions import Answer, Instruction, MakePlan, Planned, Send
from refitd.coordinator.eligibility import unoffered
from refitd.coordinator.membership import Membership
from refitd.coordinator.models import Models, ModelState, Waiter
from refitd.coordinator.plans import LoadedPlan, PlanCache, plan_report
from refitd.coordinator.rosters import ShardReader
from refitd.errors import PlanError, RefitdError
from refitd.offline.clusters import ClusterSpeeds
from refitd.protocol import local


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Who asked for a plan, and for which members: ranks may join and leave while it is made."""

    model: str
    who: str | Waiter  # a swap, or an operator
    membership: Membership
    speeds: ClusterSpeeds | None = None


class Planning:
    """Requests plans from a background thread, and caches them. Instructions go to `out`.

    Attributes:
        requests: the unanswered requests, by ticket.
        reader: the descriptions read so far.
        speeds: of the nodes' cables; None: all are equally fast.
    """

    def __init__(self, models: Models, out: Callable[[Instruction], None], *, may_relay: bool) -> None:
        """With `may_relay`, plans let nodes pass on to others what they have received."""
        self._may_relay = may_relay
        self._models = models
        self._out = out
        self._kept = PlanCache()
        self._tickets = 0
        self.requests: dict[int, PlanRequest] = {}
        self.speeds: ClusterSpeeds | None = None
        self.reader = ShardReader()

    def show(self, state: ModelState, viewer: Waiter) -> None:
        """Answer an operator's request once the plan exists.

        Raises:
            PlanError: targets want parts that no source offers.
        """
        if problems := unoffered(state.membership):
            raise PlanError(problems)
        if state.plan is not None:
            self._out(Answer(*viewer, plan_report(state.membership, state.plan)))
            return
        event = self.ask(state.membership.only({replica for replica, _ in state.membership.targets}), viewer)
        if event is not None:
            self.planned(event)

    def ask(self, membership: Membership, who: str | Waiter) -> Planned | None:
        """Request a plan for these members; if the result is known at once, return it for `planned`."""
        pools, last = membership.pools(), self._without_base(membership)
        kept = self._kept.get(pools, self.speeds)
        self._tickets += 1
        self.requests[self._tickets] = PlanRequest(membership.name, who, membership, self.speeds)
        # its copies stay right, but other nodes may have lost their base since it was made
        if kept is not None and kept.routed.relays.puts_last(last):
            return Planned(self._tickets, kept)
        try:
            rosters = self.reader.rosters(pools)
        except RefitdError as exc:  # an unreadable description: end the swap now, not at its deadline
            return Planned(self._tickets, None, exc)
        self._out(MakePlan(self._tickets, rosters, self._may_relay, last, self.speeds))
        return None

    def _without_base(self, membership: Membership) -> frozenset[str]:
        """Return the nodes with a target that can make no message of a delta.

        It does not hold the live version, or it is written in place: then it never has a base.
        """
        state = self._models.get(membership.name)
        live = None if state is None else state.live
        return frozenset(
            m.node
            for m in membership.targets.values()
            if m.added.in_place or (live is not None and not live.is_at(m.version, m.run))
        )

    def planned(self, event: Planned) -> tuple[ModelState, LoadedPlan | str] | None:
        """Cache a requested plan, and answer an operator.

        Returns:
            (model, plan or the reason why there is none) if a swap asked for it, else None.
        """
        asked = self.requests.pop(event.ticket)
        who, membership, plan = asked.who, asked.membership, event.plan
        state = self._models.get(asked.model)
        if plan is not None and state is not None:
            self._kept.put(membership.pools(), asked.speeds, plan)
            plan.belongs_to(membership.name, membership.ranks())
            if membership.ranks() == state.membership.ranks() and not membership.seeds and asked.speeds == self.speeds:
                state.plan = plan
        error = str(event.error) if event.error else ""  # one reason per line
        if not isinstance(who, str):
            if plan is None or state is None:
                failure = local.Failure(code=PlanError.code, message=error or "the model has left")
                self._out(Send(*who, failure))
            else:
                self._out(Answer(*who, plan_report(membership, plan)))
            return None
        if state is None or state.running is None or state.running.swap.swap != who:
            return None
        return state, error if plan is None else plan
