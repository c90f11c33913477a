"""The plans that this node has loaded, and what must exist before each can be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.ma  # np.unique loads it at its first call, which may be when no file can be opened

from refitd.addressing.between_nodes import NodeTransfers, node_transfers
from refitd.addressing.copies import constant_bytes
from refitd.daemon.actions import Instruction, ToCoordinator
from refitd.daemon.epochs import LocalEpochs
from refitd.daemon.jobs import JobTable
from refitd.daemon.pending import Constants, WantedArenas
from refitd.daemon.plan_parts import KeptParts, Missing, NodeTables
from refitd.errors import ArenaError
from refitd.events import Log
from refitd.plan.fills import FillTable
from refitd.plan.table import CopyTable
from refitd.protocol import cluster
from refitd.protocol.base import Message


@dataclass(frozen=True)
class NodePlan:
    """One node's part of a plan. Figures that every swap needs are computed once."""

    id: str
    members: dict[int, str]  # plan-wide rank -> member
    table: CopyTable
    fills: FillTable | None
    constants: int  # arena of the fill constants; -1 if there are none
    outer: OuterTransfers | None = None
    onward: CopyTable | None = None  # copies between targets of this node, after everything has arrived
    seeds: frozenset[int] = frozenset()  # ranks of targets that are read, not written

    @cached_property
    def read_ranks(self) -> frozenset[int]:
        """The ranks of this node that are read."""
        sent = self.outer.sent_ranks() if self.outer else ()
        return frozenset({*np.unique(self.table.src_rank).tolist(), *sent})

    @cached_property
    def written_ranks(self) -> frozenset[int]:
        """The ranks of this node that are written, except those that only receive copies from other ranks here."""
        received = self.outer.received_ranks() if self.outer else ()
        return frozenset({*np.unique(self.table.dst_rank).tolist(), *received})

    def tensors_read(self, rank: int) -> set[str]:
        """Return the names of the local tensors that are read of a rank of this node."""
        tables = [self.table] if self.outer is None else [self.table, self.outer.rows.table]
        return {
            table.locals[number] for table in tables for number in np.unique(table.src_local[table.src_rank == rank])
        }

    def row_name(self, row: int, *, is_onward: bool) -> str:
        """Describe what a row within this node copies, for an error; "" for a row that fills."""
        table = self.onward if is_onward and self.onward is not None else self.table
        if row >= len(table):
            return ""
        src, dst = (self.members.get(int(rank[row]), f"rank {rank[row]}") for rank in (table.src_rank, table.dst_rank))
        return f"parameter {table.tensors[int(table.tensor[row])]!r} of {dst} from {src}"


@dataclass(slots=True, eq=False)
class _Loading:
    """A plan that still lacks its epoch, or the arena with its fill constants."""

    plan: str
    members: dict[int, str]
    table: CopyTable
    fills: FillTable | None
    outer: OuterTransfers | None
    onward: CopyTable | None
    seeds: frozenset[int]
    constants: int = -1
    missing: set[str] = field(default_factory=set)

    @property
    def epoch(self) -> str:
        """The epoch being formed for this plan; "" if it needs none."""
        return self.outer.epoch.id if self.outer is not None else ""


@dataclass(frozen=True, slots=True)
class OuterTransfers:
    """The part of a plan that moves between this node and others."""

    rows: NodeTransfers
    index: int  # this node's position in the epoch
    epoch: cluster.EpochPlan

    def sent_ranks(self) -> set[int]:
        """Return the plan-wide ranks on this node that send to other nodes what they hold, not what they receive."""
        table = self.rows.table
        return set(np.unique(table.src_rank[(self.rows.src_node == self.index) & ~table.is_relayed]).tolist())

    def received_ranks(self) -> set[int]:
        """Return the plan-wide ranks on this node that receive from other nodes."""
        return set(np.unique(self.rows.table.dst_rank[self.rows.dst_node == self.index]).tolist())

    def received(self) -> tuple[int, int]:
        """Return (rows of the plan, bytes) that arrive here."""
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
        make_arenas: Callable[[WantedArenas], None],
        out: Callable[[Instruction], None],
    ) -> None:
        """`make_arenas` requests arenas or raises ArenaError; `constants_made` then receives the arena."""
        self._node = node
        self._workers = workers
        self._jobs = jobs
        self._epochs = epochs
        self._make_arenas = make_arenas
        self._out = out
        self._plans: dict[str, NodePlan] = {}
        self._loading: dict[str, _Loading] = {}  # plans that cannot be used yet
        self._parts = KeptParts()
        self._unneeded: set[int] = set()  # arenas that were made after their plan was dropped

    def get(self, plan: str) -> NodePlan | None:
        """Return a plan that is ready for use, None otherwise."""
        return self._plans.get(plan)

    def load(self, asked: cluster.LoadPlan | cluster.LoadShare) -> None:
        """Load a plan and keep it until it is dropped; form its epoch if it crosses nodes."""
        self._unneeded |= self.drop(asked.plan)
        try:
            message = self._parts.unfolded(asked)
            if isinstance(message, Missing):
                self._lacks_parts(asked, message)
                return
            found = self._parts.tables(message)
            if isinstance(found, Missing):
                self._lacks_parts(asked, found)
                return
            outer = self._outer(message, found)
        except ValueError as exc:
            self._plan_refused(asked, str(exc))
            return
        members = dict(zip(message.ranks, message.members, strict=True))
        fills, seeds = found.fills, frozenset(message.seeds)
        loading = _Loading(message.plan, members, found.table, fills, outer, found.onward, seeds)
        self._loading[message.plan] = loading
        if outer is not None:
            loading.missing.add("epoch")
            self._epochs.join(message.plan, outer.epoch)
        if fills is not None:
            loading.missing.add("constants")
            data = constant_bytes(fills)
            wanted = ((len(data), f"fills of plan {message.plan}"),)
            try:
                self._make_arenas(WantedArenas(0, 0, wanted, Constants(message.plan, loading, data)))
            except ArenaError as exc:
                self._plan_refused(message, str(exc))
        self._use_if_whole(loading)

    def epoch_formed(self, plan: str, epoch: str) -> None:
        """Note that the workers of all nodes have joined the plan's epoch."""
        loading = self._loading.get(plan)
        if loading is not None and loading.epoch == epoch:
            loading.missing.discard("epoch")
            self._use_if_whole(loading)

    def constants_made(self, constants: Constants, arena: int) -> None:
        """Store the arena of a plan's fill constants; free it if the plan has been dropped meanwhile."""
        loading = self._loading.get(constants.plan)
        if loading is None or loading is not constants.loading:
            self._unneeded.add(arena)
            return
        loading.constants = arena
        loading.missing.discard("constants")
        self._use_if_whole(loading)

    def _use_if_whole(self, loading: _Loading) -> None:
        if loading.missing:
            return
        plan = loading.plan
        del self._loading[plan]
        self._plans[plan] = NodePlan(
            plan,
            loading.members,
            loading.table,
            loading.fills,
            loading.constants,
            loading.outer,
            loading.onward,
            loading.seeds,
        )
        self._say(cluster.PlanLoaded(plan=plan, epoch=loading.epoch))

    def _outer(self, message: cluster.LoadPlan, found: NodeTables) -> OuterTransfers | None:
        epoch, table = found.epoch, found.crossing
        if epoch is None:
            return None
        if self._node not in epoch.nodes or not 0 < epoch.lanes <= self._workers:
            raise ValueError(f"an epoch of nodes {epoch.nodes} with {epoch.lanes} lanes does not fit this node")
        node_of = dict(zip(message.ranks, message.crossing_nodes, strict=True))
        used = {*np.unique(table.src_rank).tolist(), *np.unique(table.dst_rank).tolist()}
        if not all(0 <= node_of.get(rank, -1) < len(epoch.nodes) for rank in used):
            raise ValueError("a crossing row names a rank whose node is not in the epoch")
        return OuterTransfers(node_transfers(table, node_of, epoch.lanes), epoch.nodes.index(self._node), epoch)

    def _lacks_parts(self, message: cluster.LoadPlan | cluster.LoadShare, missing: Missing) -> None:
        self._log("plan-parts-missing", plan=message.plan, missing=missing.count, reason=missing.reason)
        epoch = message.epoch.id if message.epoch is not None else ""
        self._say(cluster.PartsMissing(plan=message.plan, epoch=epoch, missing=missing.count))

    def _plan_refused(self, message: cluster.LoadPlan | cluster.LoadShare, reason: str) -> None:
        self._log("bad-plan", plan=message.plan, reason=reason)
        epoch = message.epoch.id if message.epoch is not None else ""
        where = f"node {self._node}"
        self._say(cluster.PlanRefused(plan=message.plan, epoch=epoch, where=where, reason=reason))

    def drop(self, plan_id: str) -> set[int]:
        """Forget a plan and its jobs; return the arenas that are no longer needed."""
        plan, loading = self._plans.pop(plan_id, None), self._loading.pop(plan_id, None)
        self._jobs.drop_keys(lambda key: isinstance(key, tuple) and key[:2] == ("stage", plan_id))
        if loading is not None and loading.epoch:
            # its workers still wait for their peers; free them for the next epoch
            self._epochs.leave(loading.epoch)
        if plan is not None and plan.outer is not None:
            self._epochs.leave(plan.outer.epoch.id)
        return {held.constants for held in (plan, loading) if held is not None and held.constants >= 0}

    def drop_all(self) -> set[int]:
        """Forget all plans: a new coordinator does not know them, and one that lost this node has dropped them."""
        return {arena for plan in [*self._plans, *self._loading] for arena in self.drop(plan)}

    def unneeded(self) -> set[int]:
        """Return, once, the arenas that are no longer needed."""
        found, self._unneeded = self._unneeded, set()
        return found

    # --- output -------------------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        self._out(ToCoordinator(0, message))

    def _log(self, event: str, **fields: object) -> None:
        self._out(Log(event, fields))
