"""A cache of plan parts on this node, and the assembly of a plan's tables from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import numpy as np

from refitd.errors import ProtocolError
from refitd.plan.fills import FillTable
from refitd.plan.parts import Uses, assembled
from refitd.plan.table import CopyTable, CrossingTable, PlanTable
from refitd.protocol.cluster import (
    EpochPart,
    EpochParts,
    EpochPlan,
    LoadPlan,
    LoadShare,
    NodeShare,
    PlanPart,
    ShareRanks,
)
from refitd.protocol.codec import unpack

# A node's parts take some hundred KiB; the coordinator sends evicted parts again.
MAX_BYTES = 64 << 20
# Limit on the rows of an assembled table: a few bytes can reference a large part many times.
MAX_ROWS = 1 << 21

T = TypeVar("T", bound=PlanTable)
P = TypeVar("P", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class NodeTables:
    """A node's rows of a plan. `fills` and `onward` are None, and `crossing` empty, if there are none."""

    table: CopyTable
    fills: FillTable | None
    crossing: CrossingTable
    onward: CopyTable | None
    epoch: EpochPlan | None


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

    def unfolded(self, message: LoadPlan | LoadShare) -> LoadPlan | Missing:
        """Return a share of a plan as a plan in parts with a whole epoch, or what of it is missing or damaged.

        Raises:
            ValueError: the share does not fit its ranks.
        """
        if isinstance(message, LoadPlan):
            return message
        reading = _Reading(self._parts, message.given)
        share, numbers = reading.read(message.share, NodeShare), reading.read(message.ranks, ShareRanks)
        of_epoch = reading.read(message.epoch_parts, EpochParts) if message.epoch_parts else EpochParts(())
        nodes = [reading.read(digest, EpochPart) for digest in (of_epoch.parts if of_epoch is not None else ())]
        if reading.wrong:
            return self._missing(reading)
        assert share is not None and numbers is not None
        found = _unfolded(message, share, numbers, [part for part in nodes if part is not None])
        self._keep(reading)
        return found

    def tables(self, message: LoadPlan) -> NodeTables | Missing:
        """Return the rows of a plan, or which of its parts are missing or damaged.

        Raises:
            ValueError: the parts make no plan.
        """
        reading = _Reading(self._parts, message.given)
        parts = [reading.read(digest, PlanPart) for digest in message.parts]
        of_epoch = [reading.read(digest, EpochPart) for digest in message.epoch_parts]
        if reading.wrong:
            return self._missing(reading)
        found = _tables(message, [part for part in parts if part is not None])
        self._keep(reading)
        return replace(found, epoch=_epoch(message.epoch, [part for part in of_epoch if part is not None]))

    def _missing(self, reading: _Reading) -> Missing:
        for digest in reading.damaged:
            self._drop(digest)
        return Missing(len(reading.wrong), reading.wrong[0])

    def _keep(self, reading: _Reading) -> None:
        for digest, data in reading.used.items():
            self._drop(digest)
            self._parts[digest] = data
            self._bytes += len(data)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._parts)))

    def _drop(self, digest: str) -> None:
        self._bytes -= len(self._parts.pop(digest, b""))


class _Reading:
    """Reads the parts of one message: those that came with it, else those that are kept.

    Attributes:
        used: the parts that were read, packed.
        wrong: why others were not.
        damaged: those of them that are no parts of their names.
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


def _unfolded(message: LoadShare, share: NodeShare, numbers: ShareRanks, nodes: Sequence[EpochPart]) -> LoadPlan:
    """Return the plan whose share this is; raises ValueError if it does not fit its ranks."""
    if len(numbers.ranks) != len(share.members) or max(numbers.ranks, default=0) > np.iinfo(np.int32).max:
        raise ValueError(f"plan {message.plan}: a share of {len(share.members)} members, {len(numbers.ranks)} ranks")
    if max(share.seeds, default=-1) >= len(share.members) or max(share.at, default=-1) >= len(share.nodes):
        raise ValueError(f"plan {message.plan}: its share names a member or a node that it does not have")
    epoch, ranks = _epoch(message.epoch, nodes), np.array(numbers.ranks, "<i4")
    place = {} if epoch is None else {node: i for i, node in enumerate(epoch.nodes)}
    uses = {}
    for name, columns in share.uses.items():
        at = np.frombuffer(columns.get("ranks", b""), "<i4")
        if len(at) and not 0 <= at.min() <= at.max() < len(ranks):
            raise ValueError(f"plan {message.plan}: uses of plan parts name members that their share does not have")
        uses[name] = columns | {"ranks": ranks[at].tobytes()}
    return LoadPlan(
        plan=message.plan,
        model=message.model,
        ranks=numbers.ranks,
        members=share.members,
        table={},
        crossing_nodes=tuple(place.get(share.nodes[at], -1) for at in share.at),
        epoch=epoch,
        seeds=tuple(numbers.ranks[at] for at in share.seeds),
        uses=uses,
        parts=share.parts,
        given=message.given,
    )


def _tables(message: LoadPlan, parts: Sequence[PlanPart]) -> NodeTables:
    fills = _table(FillTable, "fills", message.fills, message, parts)
    onward = _table(CopyTable, "onward", message.onward, message, parts)
    return NodeTables(
        _table(CopyTable, "table", message.table, message, parts),
        fills if len(fills) else None,
        _table(CrossingTable, "crossing", message.crossing, message, parts),
        onward if len(onward) else None,
        message.epoch,
    )


def _table(
    kind: type[T], name: str, whole: dict[str, int | bytes | list[str]], message: LoadPlan, parts: Sequence[PlanPart]
) -> T:
    """Return a table of the plan: whole, as an older coordinator sends it, or assembled from parts."""
    if whole:
        return kind.from_wire(whole)
    uses = Uses.from_wire(message.uses.get(name, {}))
    if len(uses) and int(uses.part.max()) >= len(parts):
        raise ValueError(f"uses of plan parts: part {uses.part.max()} of {len(parts)}")
    used = np.unique(uses.part)
    tables = [kind.from_wire(parts[part].table) for part in used.tolist()]
    times = np.bincount(np.searchsorted(used, uses.part), minlength=len(used)).tolist()
    if (rows := sum(n * len(part) for n, part in zip(times, tables, strict=True))) > MAX_ROWS:
        raise ValueError(f"plan {message.plan} has {rows} rows for this node; the limit is {MAX_ROWS}")
    return assembled(kind, uses.with_parts(np.searchsorted(used, uses.part)), tables)


def _epoch(epoch: EpochPlan | None, parts: Sequence[EpochPart]) -> EpochPlan | None:
    """Return an epoch with the nodes of its parts; as it is if it has none."""
    if epoch is None or not parts:
        return epoch
    hosts = {node: host for part in parts for node, host in zip(part.nodes, part.hosts, strict=True)}
    nodes = sorted(hosts)
    return msgspec.structs.replace(epoch, nodes=tuple(nodes), hosts=tuple(hosts[node] for node in nodes))
