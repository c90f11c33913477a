"""Report a plan's traffic, and the tensors of a model's registered ranks, to operators."""

from __future__ import annotations

from refitd.protocol.base import Count, Label, Message, Seconds, Small, Text, Value
from refitd.protocol.shards import Shard
from refitd.states import CommitMode


class PairTraffic(Value, frozen=True):
    """The traffic from one rank to another in a swap."""

    source: Label
    target: Label
    bytes: Count
    copies: Count


class ParameterTraffic(Value, frozen=True):
    """The traffic of one parameter, over all targets."""

    name: Label
    bytes: Count
    copies: Count


class KeptTraffic(Value, frozen=True):
    """A tensor that keeps its own values, by the targets' name for it, over all targets."""

    name: Label
    bytes: Count


class LinkTraffic(Value, frozen=True):
    """The traffic from one node to another: `bytes` are sent, while ranks there need `needed_bytes` of its sources.

    The two differ because bytes that several ranks of a node need are sent once, and because relays forward bytes.
    """

    source: Label
    target: Label
    bytes: Count
    needed_bytes: Count


class RelayPath(Value, frozen=True):
    """The nodes that forward the same bytes: `source` sends them to the first of `nodes`, each node to the next."""

    source: Label
    nodes: tuple[Label, ...]
    bytes: Count


class CableTraffic(Value, frozen=True):
    """The traffic of one node's cable in one direction, and the seconds that it takes at the cable's speed."""

    node: Label
    is_send: bool
    bytes: Count
    speed: Count  # bytes per second
    seconds: Seconds


class Relaying(Value, frozen=True):
    """The nodes that relay bytes that several nodes need. Byte counts are for the busiest cable, in one direction.

    Without paths, `direct_bytes` is 0 if no two nodes need the same bytes; otherwise relays would not be faster.
    """

    paths: tuple[RelayPath, ...] = ()
    bytes: Count = 0
    direct_bytes: Count = 0
    seconds: Seconds = 0.0  # predicted, over all cables; 0 if their speeds are not known
    direct_seconds: Seconds = 0.0  # predicted without relays


class PathTraffic(Value, frozen=True):
    """The traffic from one kind of memory to another on one path, with the reason if another path would be faster."""

    source: Label  # "main memory", "GPU"
    target: Label  # "main memory", "GPU", "same GPU", "other GPU", "main memory of another node", "GPU of another node"
    path: Label  # within a node see refitd.addressing.paths, between nodes the service
    rows: Count
    bytes: Count
    reason: Label = ""


class LiveMemory(Value, frozen=True, rename={"mode": "way"}):
    """The memory that a target rank needs to go live, and how long its engine paused in the last swap."""

    replica: Label
    rank: Small
    mode: CommitMode
    device: Label  # its GPU; "": main memory
    held_bytes: Count  # its live tensors
    staging_bytes: Count  # beside them
    pause_s: Seconds | None = None  # None: not measured
    stage_s: Seconds | None = None  # of the last swap; an engine that is written in place pauses as long

    @property
    def other_way(self) -> CommitMode:
        """The way to go live with the other need for memory: twice as much as in place, and a short pause."""
        return CommitMode.FLIP if self.mode == CommitMode.IN_PLACE else CommitMode.IN_PLACE


class PlanReport(Message, frozen=True):
    """The traffic that a swap of this model would cause."""

    model: Label
    digest: Label
    bytes: Count
    copies: Count
    plan_s: Seconds
    pairs: tuple[PairTraffic, ...]
    parameters: tuple[ParameterTraffic, ...]
    unused_sources: tuple[Label, ...] = ()
    converted_bytes: Count = 0  # read again by workers for conversions
    staging_bytes: Count = 0  # of all targets' staging arenas
    held_bytes: Count = 0  # of all targets' live tensors
    kept: tuple[KeptTraffic, ...] = ()  # tensors that keep their own values, largest first
    links: tuple[LinkTraffic, ...] = ()
    relays: Relaying = Relaying()
    cables: tuple[CableTraffic, ...] = ()  # slowest first; () if no speeds are known
    paths: tuple[PathTraffic, ...] = ()  # most bytes first
    memory: tuple[LiveMemory, ...] = ()
    speeds: Text = ""  # the cluster whose cable speeds the plan uses; "": all cables count as equally fast


class DescribedMember(Value, frozen=True):
    """One registered rank of a model, with the index of its description."""

    role: Label  # "source", "target"
    replica: Label
    rank: Small
    world_size: Small
    node: Label
    host: Label
    shard: Small  # index into ModelDescription.shards


class ModelDescription(Message, frozen=True):
    """The tensors of every registered rank of a model; equal descriptions appear once."""

    model: Label
    shards: tuple[Shard, ...]
    members: tuple[DescribedMember, ...]
