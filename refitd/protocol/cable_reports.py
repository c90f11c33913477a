"""Reports of how fast the nodes' cables are."""

from __future__ import annotations

from refitd.protocol.base import Count, Label, Message, Small, Text, Value


class CableRate(Value, frozen=True):
    """How fast one node's workers got bytes to another's; without any, `reason` says why."""

    source: Label
    target: Label
    bytes: Count  # that came while it was timed
    speed: Count  # bytes per second
    reason: Text = ""


class CablesMeasured(Message, frozen=True):
    """What was measured at one time, over this copy service, with so many pairs of workers each."""

    service: Label
    lanes: Small
    rates: tuple[CableRate, ...]


class CableSpeed(Value, frozen=True):
    """What one node's cable was measured to do, in bytes per second; 0 if nothing arrived."""

    node: Label
    send: Count
    receive: Count


class CableReport(Message, frozen=True):
    """What `refitctl doctor --links` has measured: each node's cable, the most it did with anybody, and each pair."""

    service: Label
    lanes: Small
    nodes: tuple[CableSpeed, ...]
    rates: tuple[CableRate, ...]
    file: Text = ""  # the cluster file, for transport.cables
