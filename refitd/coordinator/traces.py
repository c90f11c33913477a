"""Traces of swaps: remembers the phases of the last swaps, and collects the nodes' timelines for one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from refitd.coordinator.decision import Phase, Swap
from refitd.coordinator.models import Models, Waiter
from refitd.errors import RefusedError
from refitd.protocol.base import clipped
from refitd.protocol.reports import SwapReport
from refitd.protocol.traces import CollectTrace, GetTrace, NodeTrace, TraceReport, TraceSpan
from refitd.states import SwapOutcome

# Swaps of all models that are kept; daemons keep as many.
MAX_SWAPS = 16

# Limit on traces that are collected at a time, and on the wait for nodes, in seconds.
MAX_COLLECTIONS = 16
COLLECT_S = 5.0

_NAMES = {
    Phase.IDLE: "plan",
    Phase.PLANNED: "send plan",
    Phase.HALTING: "halt",
    Phase.STAGING: "stage",
    Phase.PAUSING: "pause",
    Phase.STAGED: "decide",
    Phase.DECIDING: "journal",
    Phase.COMMITTING: "commit",
}


@dataclass(slots=True)
class _Ended:
    swap: Swap
    kind: str
    outcome: SwapOutcome
    at: float


@dataclass(slots=True)
class _Collection:
    waiter: Waiter
    report: TraceReport
    awaited: set[str]
    deadline: float
    found: dict[str, NodeTrace] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def finished(self) -> TraceReport:
        nodes = tuple(found for _, found in sorted(self.found.items()))
        return replace(self.report, nodes=nodes, missing=tuple(self.missing))


class Traces:
    """The last swaps that have ended, and collections under way."""

    def __init__(self, host: str, models: Models) -> None:
        self._host, self._models = host, models
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._running: dict[str, _Collection] = {}

    def ended(self, swap: Swap, report: SwapReport, at: float) -> None:
        """Remember a swap; it ended `at` (seconds since the epoch)."""
        brief = replace(swap, names={}, members={}, progress={}, paused={}, failed={})  # leave out thousands of entries
        self._ended[swap.swap] = _Ended(brief, report.kind, report.outcome, at - report.total_s)
        while len(self._ended) > MAX_SWAPS:
            self._ended.popitem(last=False)

    def begin(
        self, number: str, asked: GetTrace, waiter: Waiter, nodes: Collection[str], now: float, wall: float
    ) -> CollectTrace:
        """Begin to collect a trace; return the message for every one of `nodes`.

        Raises:
            RefusedError: the swap is not kept, or too many traces are being collected.
        """
        if len(self._running) >= MAX_COLLECTIONS:
            raise RefusedError(f"{MAX_COLLECTIONS} traces are being collected already; wait for some of them")
        swap, kind, outcome, at = self._swap_of(asked, now, wall)
        entered = sorted(swap.entered.items(), key=lambda entry: entry[1])
        ends = [began for _, began in entered[1:]] + [now]
        phases = tuple(
            TraceSpan("coordinator", _NAMES[phase], began, ended, is_open=phase is swap.phase)
            for (phase, began), ended in zip(entered, ends, strict=True)
            if not phase.is_final
        )
        report = TraceReport(
            swap.swap,
            swap.model,
            swap.version,
            kind,
            phases,
            swap.started,
            at,
            self._host,
            (),
            outcome,
            clipped(swap.reason),
        )
        found = _Collection(waiter, report, set(nodes), now + COLLECT_S)
        found.missing = [f"node {name} is not here any more" for name in sorted(swap.nodes - set(nodes))]
        self._running[number] = found
        return CollectTrace(number, swap.swap)

    def _swap_of(self, asked: GetTrace, now: float, wall: float) -> tuple[Swap, str, SwapOutcome | None, float]:
        state = self._models.get(asked.model)
        running = state.running if state is not None else None
        if running is not None and asked.swap in ("", running.swap.swap):
            return running.swap, running.kind, None, wall - (now - running.swap.started)
        ended = [one for one in self._ended.values() if one.swap.model == asked.model]
        found = next((one for one in reversed(ended) if asked.swap in ("", one.swap.swap)), None)
        if found is None:
            kept = ", ".join(one.swap.swap for one in ended) or "none"
            what = f"swap {asked.swap!r}" if asked.swap else "a swap"
            raise RefusedError(
                f"model {asked.model!r}: no trace of {what}; the coordinator keeps those of the last {MAX_SWAPS} swaps "
                f"since it started, of this model: {kept} (`refitctl history` lists swaps)"
            )
        return found.swap, found.kind, found.outcome, found.at

    def answered(self, node: str, trace: NodeTrace) -> Iterator[tuple[Waiter, TraceReport]]:
        """Handle a node's part; yield the report if it was the last one."""
        collection = self._running.get(trace.asked)
        if collection is not None and node in collection.awaited:
            collection.awaited.discard(node)
            if trace.spans:
                collection.found[node] = replace(trace, node=node)  # by its connection, not by its own claim
            elif node in self._nodes_of(collection.report.swap):
                collection.missing.append(f"node {node} has kept nothing of it")
            yield from self._finish(trace.asked, collection)

    def _nodes_of(self, swap: str) -> frozenset[str]:
        if (ended := self._ended.get(swap)) is not None:
            return ended.swap.nodes
        state = self._models.swapping(swap)
        return state.running.swap.nodes if state is not None and state.running is not None else frozenset()

    def lost(self, node: str) -> Iterator[tuple[Waiter, TraceReport]]:
        """Handle a lost node; yield the reports that waited only for it."""
        for number, collection in list(self._running.items()):
            if node in collection.awaited:
                collection.awaited.discard(node)
                collection.missing.append(f"node {node} is lost")
                yield from self._finish(number, collection)

    def tick(self, now: float) -> Iterator[tuple[Waiter, TraceReport]]:
        """Yield the reports whose deadline has passed."""
        for number, collection in list(self._running.items()):
            if now >= collection.deadline:
                late = sorted(collection.awaited)
                collection.missing += [f"node {node} has not answered within {COLLECT_S:.0f} s" for node in late]
                collection.awaited.clear()
                yield from self._finish(number, collection)

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed, None if nothing is being collected."""
        return min((collection.deadline for collection in self._running.values()), default=None)

    def _finish(self, number: str, collection: _Collection) -> Iterator[tuple[Waiter, TraceReport]]:
        if not collection.awaited:
            del self._running[number]
            yield collection.waiter, collection.finished()
