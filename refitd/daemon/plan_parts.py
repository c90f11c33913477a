"""A cache of plan parts on this node, and the assembly of a plan's tables from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import numpy as np

from refitd.errors import ProtocolError
from refitd.plan.fills import FillTable
from refitd.plan.parts import Uses, assembled
from refitd.plan.table import CopyTable, CrossingTable, PlanTable
from refitd.protocol.cluster import EpochPart, EpochPlan, LoadPlan, PlanPart
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

    def tables(self, message: LoadPlan) -> NodeTables | Missing:
        """Return the rows of a plan, or which of its parts are missing or damaged.

        Raises:
            ValueError: the parts make no plan.
        """
        wrong: list[str] = []
        used: dict[str, bytes] = {}

        def read(digest: str, kind: type[P]) -> P | None:
            data = message.given.get(digest, self._parts.get(digest))
            if data is None:
                wrong.append(f"part {digest} is not here")
                return None
            used[digest] = data
            try:
                return unpack(data, kind, digest)
            except ProtocolError as exc:
                wrong.append(str(exc))
                self._drop(digest)
                return None

        parts = [read(digest, PlanPart) for digest in message.parts]
        of_epoch = [read(digest, EpochPart) for digest in message.epoch_parts]
        if wrong:
            return Missing(len(wrong), wrong[0])
        found = _tables(message, [part for part in parts if part is not None])
        for digest, data in used.items():
            self._drop(digest)
            self._parts[digest] = data
            self._bytes += len(data)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._parts)))
        return replace(found, epoch=_epoch(message, [part for part in of_epoch if part is not None]))

    def _drop(self, digest: str) -> None:
        self._bytes -= len(self._parts.pop(digest, b""))


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


def _epoch(message: LoadPlan, parts: Sequence[EpochPart]) -> EpochPlan | None:
    if message.epoch is None or not parts:
        return message.epoch
    hosts = {node: host for part in parts for node, host in zip(part.nodes, part.hosts, strict=True)}
    nodes = sorted(hosts)
    return msgspec.structs.replace(message.epoch, nodes=tuple(nodes), hosts=tuple(hosts[node] for node in nodes))
