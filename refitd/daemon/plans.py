"""The plans of this node: cache their parts, assemble their tables, wait for their epochs and constants."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import msgspec
import numpy as np
import numpy.ma  # np.unique loads it at its first call, which may be when no file can be opened

from refitd.addressing.copies import constant_bytes
from refitd.addressing.paths import NodeTransfers, node_transfers, partners
from refitd.daemon.arenas import LocalArenas
from refitd.daemon.effects import Constants, Effects, WantedArenas
from refitd.daemon.jobs import GROUPED, JobTable, LocalEpochs, Seat, gpu_seats
from refitd.errors import ArenaError, ProtocolError
from refitd.plan.table import CopyTable, CrossingTable, FillTable, PlanTable, Uses, assembled
from refitd.protocol import cluster
from refitd.protocol.base import unpack
from refitd.protocol.cluster import (
    EpochPlan,
    LoadPlan,
    NodeShare,
    PeerTable,
    PlanPart,
    ShareRanks,
)

# A node's parts take some hundred KiB; the coordinator sends evicted parts again.
MAX_BYTES = 64 << 20
# Limit on the rows of an assembled table: a few bytes can reference a large part many times.
MAX_ROWS = 1 << 21

T = TypeVar("T", bound=PlanTable)
P = TypeVar("P", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class NodeTables:
    """A node's rows of a plan. `fills` and `onward` are None, and `crossing` empty, if there are none."""

    members: dict[int, str]  # plan-wide rank -> member
    seeds: frozenset[int]  # ranks of targets that are read, not written
    table: CopyTable
    fills: FillTable | None
    crossing: CrossingTable
    onward: CopyTable | None
    epoch: EpochPlan | None
    position: dict[int, int]  # plan-wide rank -> position of its node in the epoch, -1 if that is not in it
    gpu: dict[int, int]  # plan-wide rank -> position of its GPU in the epoch, if it is on one


@dataclass(frozen=True, slots=True)
class Missing:
    """Parts that a plan names and this node lacks, with the reason for one of them."""

    count: int
    reason: str


class KeptParts:
    """Caches the most recently used parts, still packed, up to `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._parts: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def tables(self, message: LoadPlan) -> NodeTables | Missing:
        """Return the rows of a plan, or its missing parts if it lacks any.

        Raises:
            ValueError: the parts do not form a plan, or the share does not fit its ranks.
        """
        reading = _Reading(self._parts, message.given)
        share, numbers = reading.read(message.share, NodeShare), reading.read(message.ranks, ShareRanks)
        peers = reading.read(message.peers, PeerTable) if message.peers else None
        parts = [reading.read(digest, PlanPart) for digest in (share.parts if share is not None else ())]
        if reading.wrong or share is None or numbers is None:
            for digest in reading.damaged:
                self._drop(digest)
            return Missing(len(reading.wrong), reading.wrong[0])
        epoch = _epoch(message.epoch, peers)
        found = _tables(message.plan, share, numbers, epoch, [part for part in parts if part is not None])
        for digest, data in reading.used.items():
            self._drop(digest)
            self._parts[digest] = data
            self._bytes += len(data)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._parts)))
        return found

    def _drop(self, digest: str) -> None:
        self._bytes -= len(self._parts.pop(digest, b""))


class _Reading:
    """Reads the parts of one message, from the message itself or else from the cache.

    Attributes:
        used: the parts that were read, packed.
        wrong: for each part that could not be read, the reason.
        damaged: the digests of parts whose bytes are invalid.
    """

    def __init__(self, kept: Mapping[str, bytes], given: Mapping[str, bytes]) -> None:
        self._kept, self._given = kept, given
        self.used: dict[str, bytes] = {}
        self.wrong: list[str] = []
        self.damaged: list[str] = []

    def read(self, digest: str, kind: type[P]) -> P | None:
        """Return a part; None if it is missing or damaged."""
        data = self._given.get(digest, self._kept.get(digest))
        if data is None:
            self.wrong.append(f"part {digest} is not here")
            return None
        try:
            found = unpack(data, kind, digest)
        except ProtocolError as exc:
            self.wrong.append(str(exc))
            self.damaged.append(digest)
            return None
        self.used[digest] = data
        return found


def _tables(
    plan: str, share: NodeShare, numbers: ShareRanks, epoch: EpochPlan | None, parts: Sequence[PlanPart]
) -> NodeTables:
    """Return the tables of a share; raises ValueError if it does not fit its ranks."""
    if len(numbers.ranks) != len(share.members) or max(numbers.ranks, default=0) > np.iinfo(np.int32).max:
        raise ValueError(f"plan {plan}: a share of {len(share.members)} members, {len(numbers.ranks)} ranks")
    if max(share.seeds, default=-1) >= len(share.members) or max(share.at, default=-1) >= len(share.nodes):
        raise ValueError(f"plan {plan}: its share names a member or a node that it does not have")
    ranks, uses = np.array(numbers.ranks, "<i4"), dict[str, dict[str, bytes]]()
    for name, columns in share.uses.items():
        at = np.frombuffer(columns.get("ranks", b""), "<i4")
        if len(at) and not 0 <= at.min() <= at.max() < len(ranks):
            raise ValueError(f"plan {plan}: uses of plan parts name members that their share does not have")
        uses[name] = columns | {"ranks": ranks[at].tobytes()}
    place = {} if epoch is None else {node: i for i, node in enumerate(epoch.nodes)}
    positions = [place.get(share.nodes[at], -1) for at in share.at]
    fills = _table(FillTable, plan, uses.get("fills", {}), parts)
    onward = _table(CopyTable, plan, uses.get("onward", {}), parts)
    return NodeTables(
        dict(zip(numbers.ranks, share.members, strict=True)),
        frozenset(numbers.ranks[at] for at in share.seeds),
        _table(CopyTable, plan, uses.get("table", {}), parts),
        fills if len(fills) else None,
        _table(CrossingTable, plan, uses.get("crossing", {}), parts),
        onward if len(onward) else None,
        epoch,
        dict(zip(numbers.ranks, positions, strict=False)),  # none without an epoch
        _gpus(plan, share, numbers, epoch, positions),
    )


def _gpus(
    plan: str, share: NodeShare, numbers: ShareRanks, epoch: EpochPlan | None, positions: Sequence[int]
) -> dict[int, int]:
    """Return plan-wide rank -> position of its GPU among the epoch's; raises ValueError for a GPU that is not there."""
    if epoch is None or not epoch.gpu_service or not share.on:
        return {}
    if max(share.on) >= len(share.gpus) or len(share.on) != len(positions):
        raise ValueError(f"plan {plan}: its share names a GPU that it does not have")
    seats = gpu_seats(epoch)
    found = {
        rank: seats.get((node, share.gpus[gpu]), -1)
        for rank, node, gpu in zip(numbers.ranks, positions, share.on, strict=True)
        if share.gpus[gpu]
    }
    if -1 in found.values():
        raise ValueError(f"plan {plan}: a rank is on a GPU that epoch {epoch.id} does not have")
    return found


def _table(kind: type[T], plan: str, wire: dict[str, bytes], parts: Sequence[PlanPart]) -> T:
    """Return a table, assembled from its uses of parts."""
    uses = Uses.from_wire(wire)
    if len(uses) and int(uses.part.max()) >= len(parts):
        raise ValueError(f"uses of plan parts: part {uses.part.max()} of {len(parts)}")
    used = np.unique(uses.part)
    tables = [kind.from_wire(parts[part].table) for part in used.tolist()]
    times = np.bincount(np.searchsorted(used, uses.part), minlength=len(used)).tolist()
    if (rows := sum(n * len(part) for n, part in zip(times, tables, strict=True))) > MAX_ROWS:
        raise ValueError(f"plan {plan} has {rows} rows for this node; the limit is {MAX_ROWS}")
    return assembled(kind, uses.with_parts(np.searchsorted(used, uses.part)), tables)


def _epoch(epoch: EpochPlan | None, peers: PeerTable | None) -> EpochPlan | None:
    """Return an epoch with the nodes that this node exchanges with; raises ValueError if their table has holes."""
    if epoch is None or peers is None:
        return epoch
    columns = [peers.hosts, *(column for column in (peers.gpus, peers.doors, peers.gpu_doors) if column)]
    if list(peers.nodes) != sorted(set(peers.nodes)) or any(len(column) != len(peers.nodes) for column in columns):
        raise ValueError(f"epoch {epoch.id}: the table of its nodes has holes")
    return msgspec.structs.replace(
        epoch,
        nodes=peers.nodes,
        hosts=peers.hosts,
        gpus=peers.gpus,
        doors=peers.doors,
        gpu_doors=peers.gpu_doors,
    )


@dataclass(frozen=True)
class NodePlan:
    """One node's section of a plan. Figures that every swap needs are computed once."""

    id: str
    members: dict[int, str]  # plan-wide rank -> member
    table: CopyTable
    fills: FillTable | None
    constants: int  # arena of the fill constants; -1 if there are none
    outer: OuterTransfers | None = None
    onward: CopyTable | None = None  # copies between targets of this node, after all tensors have arrived
    seeds: frozenset[int] = frozenset()  # ranks of targets that are read, not written

    @cached_property
    def staged(self) -> tuple[int, int]:
        """How many copies and bytes this node receives."""
        received = self.outer.received() if self.outer is not None else (0, 0)
        there = [(len(table), table.total_bytes) for table in (self.table, self.onward) if table is not None]
        copies, nbytes = zip(received, *there, strict=True)
        return sum(copies), sum(nbytes)

    @cached_property
    def read_ranks(self) -> frozenset[int]:
        """The ranks of this node that are read."""
        sent = self.outer.sent_ranks() if self.outer else ()
        return frozenset({*np.unique(self.table.src_rank).tolist(), *sent})

    @cached_property
    def written_ranks(self) -> frozenset[int]:
        """The ranks of this node that are written, except ranks that only receive copies from other targets here."""
        received = self.outer.received_ranks() if self.outer else ()
        return frozenset({*np.unique(self.table.dst_rank).tolist(), *received})

    def tensors_read(self, rank: int) -> set[str]:
        """Return the names of the local tensors of a rank that this node's copies read."""
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
    """The transfers of a plan between this node and other nodes."""

    rows: NodeTransfers
    index: int  # this node's position in the epoch
    epoch: cluster.EpochPlan
    met: Mapping[Seat, tuple[int, ...]]  # the partners of each worker of this node that has some
    gpus: Mapping[int, int] = field(default_factory=dict)  # position of each GPU of this node -> its worker

    def sent_ranks(self) -> set[int]:
        """Return the plan-wide ranks on this node that send their own data to other nodes; relays are not counted."""
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
    """Stores plans until they are dropped; `ready` are the plans that can be used, which only this class changes."""

    def __init__(
        self,
        node: str,
        workers: int,
        jobs: JobTable,
        epochs: LocalEpochs,
        arenas: LocalArenas,
    ) -> None:
        self._node = node
        self._workers = workers
        self._jobs = jobs
        self._epochs = epochs
        self._arenas = arenas
        self.ready: dict[str, NodePlan] = {}
        self._loading: dict[str, _Loading] = {}  # plans that cannot be used yet
        self._parts = KeptParts()
        self._unneeded: set[int] = set()  # arenas that were made after their plan was dropped

    def load(self, effects: Effects, message: cluster.LoadPlan) -> None:
        """Load a plan; form its epoch if it crosses nodes."""
        self._unneeded |= self.drop(effects, message.plan)
        epoch = message.epoch.id if message.epoch is not None else ""
        try:
            found = self._parts.tables(message)
            if isinstance(found, Missing):
                effects.log("plan-parts-missing", plan=message.plan, missing=found.count, reason=found.reason)
                effects.say(cluster.PlanLoaded(plan=message.plan, epoch=epoch, missing=found.count))
                return
            outer = self._outer(found)
        except ValueError as exc:
            self._plan_refused(effects, message.plan, epoch, str(exc))
            return
        fills = found.fills
        loading = _Loading(message.plan, found.members, found.table, fills, outer, found.onward, found.seeds)
        self._loading[message.plan] = loading
        if outer is not None:
            loading.missing.add("epoch")
            formed = self._epochs.join(effects, message.plan, outer.epoch, outer.met)
        if fills is not None:
            loading.missing.add("constants")
            data = constant_bytes(fills)
            wanted = ((len(data), f"fills of plan {message.plan}"),)
            try:
                self._arenas.ask(effects, WantedArenas(0, 0, wanted, Constants(message.plan, loading, data)))
            except ArenaError as exc:
                self._plan_refused(effects, message.plan, epoch, str(exc))
        if outer is not None and formed:
            loading.missing.discard("epoch")
        self._use_if_whole(effects, loading)

    def epoch_formed(self, effects: Effects, plan: str, epoch: str) -> None:
        """Handle that the workers of all nodes have joined the plan's epoch."""
        loading = self._loading.get(plan)
        if loading is not None and loading.epoch == epoch:
            loading.missing.discard("epoch")
            self._use_if_whole(effects, loading)

    def constants_made(self, effects: Effects, constants: Constants, arena: int) -> None:
        """Store the arena of a plan's fill constants; free the arena if the plan has since been dropped."""
        loading = self._loading.get(constants.plan)
        if loading is None or loading is not constants.loading:
            self._unneeded.add(arena)
            return
        loading.constants = arena
        loading.missing.discard("constants")
        self._use_if_whole(effects, loading)

    def _use_if_whole(self, effects: Effects, loading: _Loading) -> None:
        if loading.missing:
            return
        plan = loading.plan
        del self._loading[plan]
        self.ready[plan] = NodePlan(
            plan,
            loading.members,
            loading.table,
            loading.fills,
            loading.constants,
            loading.outer,
            loading.onward,
            loading.seeds,
        )
        effects.say(cluster.PlanLoaded(plan=plan, epoch=loading.epoch))

    def _outer(self, found: NodeTables) -> OuterTransfers | None:
        epoch, table = found.epoch, found.crossing
        if epoch is None:
            return None
        if self._node not in epoch.nodes or not 0 < epoch.lanes <= self._workers:
            raise ValueError(f"an epoch of nodes {epoch.nodes} with {epoch.lanes} lanes does not fit this node")
        node_of = found.position
        used = {*np.unique(table.src_rank).tolist(), *np.unique(table.dst_rank).tolist()}
        if not all(0 <= node_of.get(rank, -1) < len(epoch.nodes) for rank in used):
            raise ValueError("a crossing row names a rank whose node is not in the epoch")
        rows = node_transfers(table, node_of, epoch.lanes, found.gpu)
        index = epoch.nodes.index(self._node)
        gpus = {seat: worker for worker, (seat, _) in self._epochs.gpu_workers(epoch).items()}
        seats = [(lane, index) for lane in range(epoch.lanes)] + [(epoch.lanes, seat) for seat in gpus]
        met = {(lane, at): some for lane, at in seats if (some := partners(rows, at, lane))}
        if epoch.gpu_service in GROUPED:
            everyone = tuple(range(len(gpu_seats(epoch))))
            met |= {(epoch.lanes, seat): everyone for seat in gpus}
        return OuterTransfers(rows, index, epoch, met, gpus)

    def _plan_refused(self, effects: Effects, plan: str, epoch: str, reason: str) -> None:
        effects.log("bad-plan", plan=plan, reason=reason)
        effects.say(cluster.PlanLoaded(plan=plan, epoch=epoch, where=f"node {self._node}", reason=reason))

    def drop(self, effects: Effects, plan_id: str) -> set[int]:
        """Drop a plan and its jobs; return the arenas that are no longer needed."""
        plan, loading = self.ready.pop(plan_id, None), self._loading.pop(plan_id, None)
        self._jobs.drop_keys(effects, "stage", plan_id)
        if loading is not None and loading.epoch:
            # its workers still wait for their peers; free them for the next epoch
            self._epochs.leave(effects, loading.epoch)
        if plan is not None and plan.outer is not None:
            self._epochs.leave(effects, plan.outer.epoch.id)
        return {held.constants for held in (plan, loading) if held is not None and held.constants >= 0}

    def drop_all(self, effects: Effects) -> set[int]:
        """Drop all plans: a new coordinator does not know them, and a coordinator that lost this node dropped them."""
        return {arena for plan in [*self.ready, *self._loading] for arena in self.drop(effects, plan)}

    def unneeded(self) -> set[int]:
        """Return the arenas that are no longer needed; each is returned once."""
        found, self._unneeded = self._unneeded, set()
        return found
