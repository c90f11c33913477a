"""The plans that a node has been given, and what has to be there before one can be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.ma  # np.unique loads it at its first call, which may be when no file can be opened

from refitd.addressing.between_nodes import Crossing, crossing
from refitd.addressing.copies import constant_bytes
from refitd.daemon.actions import Instruction, Log, ToCoordinator
from refitd.daemon.epochs import LocalEpochs
from refitd.daemon.jobs import JobTable
from refitd.errors import ArenaError
from refitd.plan.fills import FillTable
from refitd.plan.table import CopyTable
from refitd.protocol import cluster
from refitd.protocol.base import Message


@dataclass(frozen=True, slots=True)
class Plan:
    """What one node performs of a plan."""

    id: str
    members: dict[int, str]  # plan-wide rank -> member
    table: CopyTable
    fills: FillTable | None
    constants: int  # arena of what is filled in; -1 where nothing is
    outer: Outer | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Loading:
    """A plan that is being loaded; `epoch` is the one that is being formed for it, if any."""

    epoch: str


@dataclass(frozen=True, slots=True)
class Outer:
    """What a plan moves between this node and others."""

    rows: Crossing
    index: int  # this node's position in the epoch
    epoch: cluster.EpochPlan

    def sent_ranks(self) -> set[int]:
        """Return the plan-wide ranks here that send to other nodes."""
        return set(np.unique(self.rows.table.src_rank[self.rows.src_node == self.index]).tolist())

    def received_ranks(self) -> set[int]:
        """Return the plan-wide ranks here that other nodes send to."""
        return set(np.unique(self.rows.table.dst_rank[self.rows.dst_node == self.index]).tolist())

    def received(self) -> tuple[int, int]:
        """Return (rows of the plan, bytes) that come here."""
        here = self.rows.dst_node == self.index
        return len(np.unique(self.rows.origin[here])), int(self.rows.table.row_bytes[here].sum())


class LocalPlans:
    """Keeps plans until they are dropped. Instructions go to `out`."""

    def __init__(
        self,
        node: str,
        workers: int,
        jobs: JobTable,
        epochs: LocalEpochs,
        make_constants: Callable[[bytes, str, Callable[[int], None]], None],
        out: Callable[[Instruction], None],
    ) -> None:
        """`make_constants` puts what paddings are filled with into an arena, and calls back with it."""
        self._node = node
        self._workers = workers
        self._jobs = jobs
        self._epochs = epochs
        self._make_constants = make_constants
        self._out = out
        self._plans: dict[str, Plan] = {}
        self._loading: dict[str, _Loading] = {}  # plans of which something is not there yet
        self._unneeded: set[int] = set()  # arenas that came too late for the plan they were made for

    def get(self, plan: str) -> Plan | None:
        """Return a plan that can be used."""
        return self._plans.get(plan)

    def load(self, message: cluster.LoadPlan) -> None:
        """Keep a plan until it is dropped; have the workers meet those of other nodes where it crosses to them."""
        self._unneeded |= self.drop(message.plan)
        try:
            table = CopyTable.from_wire(message.table)
            fills = FillTable.from_wire(message.fills) if message.fills else None
            outer = self._outer(message)
        except ValueError as exc:
            self._plan_refused(message, str(exc))
            return
        members = dict(zip(message.ranks, message.members, strict=True))
        missing = {"constants"} if fills is not None else set()
        missing |= {"epoch"} if outer is not None else set()
        constants = -1
        loading = self._loading[message.plan] = _Loading(outer.epoch.id if outer is not None else "")

        def is_dropped() -> bool:
            return self._loading.get(message.plan) is not loading

        def done(what: str) -> None:
            missing.discard(what)
            if not missing and not is_dropped():
                del self._loading[message.plan]
                self._plans[message.plan] = Plan(message.plan, members, table, fills, constants, outer)
                epoch = outer.epoch.id if outer is not None else ""
                self._say(cluster.PlanLoaded(plan=message.plan, epoch=epoch))

        def made(arena: int) -> None:
            nonlocal constants
            constants = arena
            if is_dropped():
                self._unneeded.add(arena)
            done("constants")

        if outer is not None:
            self._epochs.join(message.plan, outer.epoch, lambda: done("epoch"))
        if fills is not None:
            try:
                self._make_constants(constant_bytes(fills), f"fills of plan {message.plan}", made)
            except ArenaError as exc:
                self._plan_refused(message, str(exc))
        done("")

    def _outer(self, message: cluster.LoadPlan) -> Outer | None:
        epoch = message.epoch
        if epoch is None:
            return None
        if self._node not in epoch.nodes or not 0 < epoch.lanes <= self._workers:
            raise ValueError(f"an epoch of nodes {epoch.nodes} with {epoch.lanes} lanes does not fit this node")
        node_of = dict(zip(message.ranks, message.crossing_nodes, strict=True))
        table = CopyTable.from_wire(message.crossing)
        used = {*np.unique(table.src_rank).tolist(), *np.unique(table.dst_rank).tolist()}
        if not all(0 <= node_of.get(rank, -1) < len(epoch.nodes) for rank in used):
            raise ValueError("a crossing row names a rank whose node is not in the epoch")
        return Outer(crossing(table, node_of, epoch.lanes), epoch.nodes.index(self._node), epoch)

    def _plan_refused(self, message: cluster.LoadPlan, reason: str) -> None:
        self._log("bad-plan", plan=message.plan, reason=reason)
        epoch = message.epoch.id if message.epoch is not None else ""
        where = f"node {self._node}"
        self._say(cluster.PlanRefused(plan=message.plan, epoch=epoch, where=where, reason=reason))

    def drop(self, plan_id: str) -> set[int]:
        """Forget a plan and the jobs made from it; return the arenas that nobody needs any more."""
        plan, loading = self._plans.pop(plan_id, None), self._loading.pop(plan_id, None)
        if loading is not None and loading.epoch:
            # its workers are still waiting for each other: they are wanted for the next epoch
            self._epochs.leave(loading.epoch)
        self._jobs.drop_keys(lambda key: isinstance(key, tuple) and key[:2] == ("stage", plan_id))
        if plan is not None and plan.outer is not None:
            self._epochs.leave(plan.outer.epoch.id)
        return {plan.constants} if plan is not None and plan.constants >= 0 else set()

    def drop_all(self) -> set[int]:
        """Forget all plans: another coordinator knows nothing of them, and one that lost this node has dropped them."""
        return {arena for plan in [*self._plans, *self._loading] for arena in self.drop(plan)}

    def unneeded(self) -> set[int]:
        """Return, once, the arenas that nobody needs any more."""
        found, self._unneeded = self._unneeded, set()
        return found

    # --- output -------------------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        self._out(ToCoordinator(0, message))

    def _log(self, event: str, **fields: object) -> None:
        self._out(Log(event, fields))
