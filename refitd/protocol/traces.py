"""Traces of single swaps: what each process did and when, and how far clocks of nodes are apart."""

from __future__ import annotations

from typing import Annotated

import msgspec

from refitd.protocol.base import Count, Label, Message, Name, Seconds, Text, Value
from refitd.states import SwapOutcome

# Limits of a trace: spans of one node.
MAX_SPANS = 1024

# Seconds of some process's monotonic clock, or between two of them.
Moment = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class TraceSpan(Value, frozen=True):
    """Something that took time."""

    who: Label  # the process: "coordinator", "daemon", "worker 0", "engine-a rank 0 (pid 7)"
    name: Label
    began: Moment
    ended: Moment
    bytes: Count = 0
    is_open: bool = False  # it had not ended when the trace was taken
    note: Label = ""


class GetTrace(Message, frozen=True):
    """Ask for the TraceReport of a model's swap, "" for the last one."""

    model: Name
    swap: Label = ""


class CollectTrace(Message, frozen=True):
    """Ask a node for its part of a swap's trace. Reply: NodeTrace."""

    asked: Name
    swap: Name


class NodeTrace(Message, frozen=True):
    """A node's part of a swap's trace, in its own clock.

    `offset_s` added to its times gives the coordinator's; that is right within `error_s` (None: not measured).
    """

    asked: Name
    node: Label
    host: Label
    spans: Annotated[tuple[TraceSpan, ...], msgspec.Meta(max_length=MAX_SPANS)]
    dropped: Count = 0  # spans beyond the limit
    offset_s: Moment = 0.0
    error_s: Seconds | None = None


class TraceReport(Message, frozen=True):
    """One swap over all processes. `phases` and `began` are in the coordinator's clock, nodes' spans in their own."""

    swap: Label
    model: Label
    version: Count
    kind: Label
    phases: tuple[TraceSpan, ...]
    began: Moment
    at: float  # seconds since the epoch, when it began
    host: Label  # of the coordinator
    nodes: tuple[NodeTrace, ...]
    outcome: SwapOutcome | None = None  # None: it runs
    reason: Text = ""
    missing: tuple[Text, ...] = ()  # why nodes of the swap are not among `nodes`
