"""Replica controllers: clients that pause, commit and resume an engine for all of its ranks, and their progress.

A controller is a member of every swap of its replica: it is asked to pause before the decision, called once all ranks
know of the decision, and resumed once none of them has the version pending any more. A controller that comes while
ranks have a decided version pending begins with it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from refitd.coordinator import decision
from refitd.coordinator.members import Controller, ControlStep, Member, Node
from refitd.coordinator.membership import Membership
from refitd.coordinator.models import Models
from refitd.errors import RefusedError
from refitd.protocol import control
from refitd.protocol.base import Message

MAX_CONTROLLERS = 1 << 16

# Retries of a failed commit hook while ranks still have the version pending, and the pause that each adds.
COMMIT_AGAIN = 3
COMMIT_PAUSE_S = 3.0

# A controller whose swap is unknown waits this long for its replica's ranks; then it is told that they serve nothing.
RANKS_S = 15.0

Step = Callable[[str, decision.Event, float], None]


class Controllers:
    """All controllers. `step_swap(swap, event, now)` steps a running swap; `decided(swap)` returns (version, run)."""

    def __init__(
        self,
        models: Models,
        to_node: Callable[[str, Message], None],
        step_swap: Step,
        decided: Callable[[str], tuple[int, str] | None],
        tell_staged: Callable[[Iterable[Member], str, int, str], None],
        log: Callable[..., None],
    ) -> None:
        """`tell_staged(ranks, swap, version, run)` repeats a decision for ranks that a controller now calls."""
        self._models = models
        self._to_node = to_node
        self._step_swap = step_swap
        self._decided = decided
        self._tell_staged = tell_staged
        self._log = log
        self._all: dict[str, Controller] = {}

    # --- registration -------------------------------------------------------------------------------------

    def add(self, node: Node, added: control.AddController, membership: Membership, now: float) -> None:
        """Register a controller.

        Raises:
            RefusedError: the replica has one already, or there are too many.
        """
        if len(self._all) >= MAX_CONTROLLERS:
            raise RefusedError(f"controller {added.member!r}: there are {MAX_CONTROLLERS} already, which is the limit")
        there = membership.controllers.get(added.replica)
        if added.member in self._all:
            raise RefusedError(f"controller {added.member!r} is registered already, on {self._all[added.member].node}")
        if there is not None:
            raise RefusedError(
                f"model {added.model!r} replica {added.replica!r} is controlled by pid {there.added.pid} on "
                f"{there.host} already; close that controller first"
            )
        found = Controller(added, node.status.node, node.status.host)
        membership.controllers[added.replica] = self._all[found.id] = found
        self._log("registered", model=added.model, member=found.id, who=found.describe(), bytes=0)
        if added.busy:  # it stands still for a swap of an earlier coordinator
            found.swap, found.step, found.due_at = added.busy, ControlStep.PAUSED, now + RANKS_S

    def remove(self, member: str, node: str, reason: str, now: float) -> str | None:
        """Forget a controller; return its model, None if there is none. Its undecided swap aborts."""
        found = self._all.get(member)
        if found is None:
            return None
        _check_owner(found, node)
        del self._all[member]
        model = found.added.model
        self._log("left", model=model, member=member, who=found.describe(), reason=reason)
        membership = self._models[model].membership
        if membership.controllers.get(found.added.replica) is found:
            del membership.controllers[found.added.replica]
        state = self._models[model]
        if state.running is not None and member in state.running.swap.names:
            self._step_swap(state.running.swap.swap, decision.MemberLost(member, reason), now)
        return model

    def on_node(self, node: str) -> list[str]:
        """Return the ids of a node's controllers."""
        return [found.id for found in self._all.values() if found.node == node]

    def __contains__(self, member: str) -> bool:
        """Whether this is a controller's id."""
        return member in self._all

    # --- a swap -------------------------------------------------------------------------------------------

    def pause(self, swap: str, version: int, members: Iterable[str]) -> None:
        """Ask controllers to let their engines stand still."""
        for member in members:
            found = self._all.get(member)
            if found is not None:
                self._enter(found, swap, version, is_decided=False)
                self._ask_pause(found)

    def decided(self, swap: decision.Swap) -> None:
        """Note that a swap is decided; `ranks_changed` follows once its ranks are told."""
        for found in [self._all[member] for member in sorted(swap.members) if member in self._all]:
            if found.swap != swap.swap:  # it has no pause hook
                self._enter(found, swap.swap, swap.version, is_decided=True)
            found.is_decided, found.step, found.due_at = True, ControlStep.GATHERING, None

    def controls(self, swap: str, member: Member) -> bool:
        """Whether a controller calls this rank to commit this swap."""
        found = self._of(member)
        return found is not None and found.swap == swap and found.is_decided

    def acked(self, swap: str, member: Member, now: float) -> None:
        """Note that a rank knows of the decision."""
        found = self._of(member)
        if found is not None and found.swap == swap:
            found.acked.add(member.id)
            self._look(found, now)

    def aborted(self, swap: str, now: float) -> None:
        """Resume the engines that stand still for a swap that has been aborted."""
        for found in self._all.values():
            if found.swap == swap and found.step in (ControlStep.PAUSING, ControlStep.PAUSED):
                self._resume(found, now)

    def said(self, node: str, message: control.Controlled, now: float) -> None:
        """Handle a controller's report that a hook has returned or failed."""
        found = self._all.get(message.member)
        if found is None or found.swap != message.swap:
            return  # that swap is over
        _check_owner(found, node)
        found.paused_s = message.paused_s
        if message.reason:
            self._log("swap", swap=found.swap, phase="failed", member=found.id, reason=message.reason)
        if message.what == "pause" and found.step is ControlStep.PAUSING:
            self._paused(found, message.reason, now)
        elif message.what == "commit" and found.step is ControlStep.COMMITTING:
            if message.reason:
                found.step, found.tries = ControlStep.FAILED, found.tries + 1
                found.due_at = now + COMMIT_PAUSE_S * found.tries if found.tries <= COMMIT_AGAIN else None
                self._step_swap(found.swap, decision.MemberFailed(found.id, message.reason), now)
            else:
                found.step = ControlStep.FINISHING
            self._look(found, now)

    def _paused(self, found: Controller, reason: str, now: float) -> None:
        if not found.is_decided:
            found.step = ControlStep.PAUSED
            event = decision.MemberFailed(found.id, f"its pause hook failed: {reason}")
            self._step_swap(found.swap, event if reason else decision.QuietReported(found.id), now)
        elif reason:
            found.step, found.tries = ControlStep.FAILED, found.tries + 1
            found.due_at = now + COMMIT_PAUSE_S * found.tries if found.tries <= COMMIT_AGAIN else None
        else:
            self._gather(found, now)

    # --- changes of ranks ---------------------------------------------------------------------------------

    def ranks_changed(self, model: str, replica: str, now: float) -> None:
        """Continue after a rank of this replica registered, committed, failed or left."""
        state = self._models.get(model)
        found = None if state is None else state.membership.controllers.get(replica)
        if found is not None:
            self._look(found, now)

    def _look(self, found: Controller, now: float) -> None:
        ranks = self._ranks(found)
        pending = [m for m in ranks if m.staged == found.swap and found.swap]
        match found.step:
            case ControlStep.FREE:
                self._begin_late(found, ranks, now)
            case ControlStep.PAUSED if found.due_at is not None:  # of an earlier coordinator's swap
                if (was := self._decided(found.swap)) is not None and pending:
                    found.version, found.is_decided, found.due_at = was[0], True, None
                    self._gather(found, now)
                elif len(ranks) == max((m.added.world_size for m in ranks), default=1) and not pending:
                    self._resume(found, now)
            case ControlStep.GATHERING:
                if not pending:
                    self._resume(found, now)
                elif all(m.id in found.acked for m in pending):
                    found.step = ControlStep.COMMITTING
                    self._say(found, "commit")
            case ControlStep.FAILED | ControlStep.FINISHING:
                if not pending:
                    self._resume(found, now)

    def _begin_late(self, found: Controller, ranks: list[Member], now: float) -> None:
        """Begin with a decided version that ranks have pending: no controller was there, or it failed."""
        swap = next((m.staged for m in ranks if m.staged is not None and self._decided(m.staged) is not None), None)
        was = None if swap is None else self._decided(swap)
        if swap is None or was is None:
            return
        self._enter(found, swap, was[0], is_decided=True)
        if found.added.pauses:
            self._ask_pause(found)
        else:
            self._gather(found, now)

    def _gather(self, found: Controller, now: float) -> None:
        """Tell the ranks that a controller calls them; each answers."""
        found.step, found.due_at = ControlStep.GATHERING, None
        found.acked.clear()
        was = self._decided(found.swap)
        pending = [m for m in self._ranks(found) if m.staged == found.swap]
        if was is not None and pending:
            self._tell_staged(pending, found.swap, *was)
        self._look(found, now)

    def _resume(self, found: Controller, now: float) -> None:
        ranks = self._ranks(found)
        is_whole = bool(ranks) and len(ranks) == ranks[0].added.world_size
        served = {(m.version, m.run) if not m.poisoned else (None, "") for m in ranks}
        version = served.pop()[0] if is_whole and len(served) == 1 else None
        swap, is_decided = found.swap, found.is_decided
        found.step, found.swap, found.is_decided, found.due_at = ControlStep.FREE, "", False, None
        found.acked.clear()
        self._to_node(found.node, control.Control(member=found.id, swap=swap, what="resume", version=version))
        if is_decided:
            self._step_swap(swap, decision.CommitReported(found.id, found.paused_s), now)

    def tick(self, now: float) -> None:
        """Call again those whose hook failed; stop waiting for ranks that do not come back."""
        for found in [c for c in self._all.values() if c.due_at is not None and now >= c.due_at]:
            found.due_at = None
            if found.step is ControlStep.FAILED:
                self._gather(found, now)
            else:
                self._resume(found, now)

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed; None: never."""
        return min((c.due_at for c in self._all.values() if c.due_at is not None), default=None)

    # --- details ------------------------------------------------------------------------------------------

    def _of(self, member: Member) -> Controller | None:
        return self._models[member.added.model].membership.controllers.get(member.added.replica)

    def _ranks(self, found: Controller) -> list[Member]:
        state = self._models.get(found.added.model)
        return [] if state is None else state.membership.replica(found.added.replica)

    def _enter(self, found: Controller, swap: str, version: int, *, is_decided: bool) -> None:
        found.swap, found.version, found.is_decided = swap, version, is_decided
        found.paused_s, found.tries, found.due_at = 0.0, 0, None
        found.acked.clear()

    def _ask_pause(self, found: Controller) -> None:
        found.step = ControlStep.PAUSING
        self._say(found, "pause")

    def _say(self, found: Controller, what: Literal["pause", "commit"]) -> None:
        self._log("swap", swap=found.swap, version=found.version, phase=what, member=found.id)
        message = control.Control(member=found.id, swap=found.swap, what=what, version=found.version)
        self._to_node(found.node, message)


def _check_owner(found: Controller, node: str) -> None:
    if found.node != node:
        raise RefusedError(f"controller {found.id!r} is one of node {found.node!r}; node {node!r} cannot speak for it")
