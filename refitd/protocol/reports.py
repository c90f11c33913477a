"""Reports for operators: swaps, status, plans, verification."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from refitd.errors import RefitFailed
from refitd.protocol.base import Count, Events, Label, Message, Seconds, Small, Text, Value
from refitd.protocol.shards import Shape, Shard
from refitd.states import (
    CommitMode,
    LinkState,
    MemberState,
    ProofState,
    ServingState,
    SwapCause,
    SwapOutcome,
    TransferMode,
)

_MODE = {"mode": "way", "mode_reason": "why"}  # their names in protocol 3, on the wire and in JSON


class MemberReport(Value, frozen=True):
    """One target rank's part in a swap."""

    replica: Label
    rank: Small
    node: Label
    host: Label
    pid: Count
    state: MemberState
    version: Count | None = None  # what this rank serves now
    paused_s: Seconds = 0.0
    reason: Text = ""


class SourceReport(Value, frozen=True, rename=_MODE):
    """How one source rank provided the version of a swap; with `replica`, a serving rank that seeded a catch-up."""

    rank: Small
    node: Label
    host: Label
    mode: TransferMode
    mode_reason: Text = ""  # the measurement that chose between pulling and copying, if any
    replica: Label = ""


class Crossing(Value, frozen=True):
    """What came from other nodes: `bytes` that ranks needed, for which `crossed_bytes` were sent.

    Of `bytes`, `delta_bytes` came as changes to the version before; of these, `changed_bytes` had changed.
    """

    bytes: Count = 0
    crossed_bytes: Count = 0
    delta_bytes: Count = 0
    changed_bytes: Count = 0

    def __add__(self, other: Crossing) -> Crossing:
        return Crossing(
            self.bytes + other.bytes,
            self.crossed_bytes + other.crossed_bytes,
            self.delta_bytes + other.delta_bytes,
            self.changed_bytes + other.changed_bytes,
        )

    @property
    def changed(self) -> float | None:
        """The share that had changed of what was compared; None if nothing was."""
        return self.changed_bytes / self.delta_bytes if self.delta_bytes else None


class RefusedRegistration(Value, frozen=True):
    """A process whose registration was refused, so that no swap reaches it, as its daemon knows it.

    It is listed until it registers, or has closed its connection and has not tried for 60 s.
    """

    model: Label
    replica: Label  # "" for a source
    rank: Count
    node: Label
    pid: Count
    name: Label = ""  # of its client
    reason: Text = ""  # of the last refusal
    since_s: Seconds = 0.0  # since the first refusal
    last_s: Seconds = 0.0  # since the last one
    tries: Count = 1

    def __str__(self) -> str:
        who = f"replica {self.replica!r}" if self.replica else "source"
        again = f", {self.tries} tries" if self.tries > 1 else ""
        return (
            f"{who} rank {self.rank} of model {self.model!r} is refused (node {self.node}, pid {self.pid}, for "
            f"{self.since_s:.0f} s{again}) and is not refitted: {self.reason}"
        )


class SwapReport(Message, frozen=True):
    """How a swap ended, or its present state."""

    swap: Label
    model: Label
    version: Count | None
    outcome: SwapOutcome
    phase: Label = ""  # in which it failed: "plan", "pause", "stage", "decide", "commit"
    reason: Text = ""
    bytes: Count = 0
    copies: Count = 0
    digests: Count = 0  # compared receive digests
    plan_s: Seconds = 0.0
    stage_s: Seconds = 0.0
    pause_s: Seconds = 0.0  # time engines took to stand still
    commit_s: Seconds = 0.0
    total_s: Seconds = 0.0
    members: tuple[MemberReport, ...] = ()
    sources: tuple[SourceReport, ...] = ()
    kind: Label = "asked"  # "auto", "catch-up", "rollback"
    converted_bytes: Count = 0  # read again by workers for conversions
    run: Label = ""  # of the trainer; number and run are a version's identity
    events: Events = ()  # events of the swap, with seconds since it began
    suspended: tuple[Label, ...] = ()  # replicas that it left out because their engines are asleep
    kept_tensors: Count = 0  # of all targets that took part: they keep their own values, nothing of them was sent
    kept_bytes: Count = 0
    cause: SwapCause = SwapCause.NONE  # the kind of `reason`
    crossing: Crossing = Crossing()
    drained: tuple[Label, ...] = ()  # replicas that it left out because of drained nodes
    refused: tuple[RefusedRegistration, ...] = ()  # processes of the model that it did not reach

    @property
    def seeds(self) -> tuple[str, ...]:
        """The replicas that gave what they serve to those of a catch-up; () if source ranks did."""
        return tuple(sorted({source.replica for source in self.sources if source.replica}))


class SwapReports(Message, frozen=True):
    """How the swaps of several models ended that were decided together, in the order in which they were asked for."""

    reports: tuple[SwapReport, ...]


class SwapFailed(RefitFailed):
    """A swap ended, or its caller's timeout passed, without every replica serving the version.

    `report` is that of the swap; `together` has the reports of all swaps that were decided with it.
    """

    def __init__(
        self, message: str, causes: Mapping[str, str], report: SwapReport, together: tuple[SwapReport, ...] = ()
    ) -> None:
        super().__init__(message, causes)
        self.report = report
        self.together = together or (report,)


class EvictReport(Message, frozen=True):
    """The removed ranks, by their names for people."""

    model: Label
    replica: Label
    members: tuple[Text, ...]


class ForgetReport(Message, frozen=True):
    """The removed detached sources, by their names for people, and the nodes that free what they keep of engines."""

    model: Label
    sources: tuple[Text, ...]
    nodes: tuple[Label, ...]


class ReloadReport(Message, frozen=True):
    """The names of the keys that are admitted now, the nodes that were removed, and what says how fast cables are."""

    uses_keys: bool  # False: no keys are read
    admitted: tuple[Label, ...] = ()
    removed: tuple[Label, ...] = ()  # nodes whose key was taken off the list, or may not be theirs any more
    cables: Text = ""  # the name of the cluster file's cluster; "": there is no file, and all cables are alike
    absent: tuple[Text, ...] = ()  # nodes of that file that are not here


class SwapProgress(Message, frozen=True):
    """A running swap, for the progress bar."""

    swap: Label
    model: Label
    version: Count
    phase: Label  # "plan", "pause", "stage", "decide", "commit"
    bytes_done: Count = 0
    bytes_total: Count = 0
    members_done: Count = 0
    members_total: Count = 0


class ReplicaName(Value, frozen=True):
    """A replica of a model."""

    model: Label
    replica: Label


class DrainedSource(Value, frozen=True):
    """A source rank on a drained node: no swap can leave it out."""

    model: Label
    rank: Small
    host: Label
    pid: Count


class DrainReport(Message, frozen=True):
    """What a drained node means for its models; `changed` is False if it was drained before."""

    node: Label
    changed: bool
    replicas: tuple[ReplicaName, ...] = ()  # left out of new swaps
    stranded: tuple[Label, ...] = ()  # models of which every replica is left out
    sources: tuple[DrainedSource, ...] = ()  # no swap that reads them begins
    running: tuple[SwapProgress, ...] = ()  # swaps in which the node still takes part


class ResumeReport(Message, frozen=True):
    """The replicas that take part in swaps again; `changed` is False if the node was not drained."""

    node: Label
    changed: bool
    replicas: tuple[ReplicaName, ...] = ()


class HistoryEntry(Value, frozen=True):
    """One swap in the journal; `report` says how it ended, or what was decided if it has not ended."""

    swap: Label
    model: Label
    version: Count
    state: SwapOutcome
    at: float  # seconds since the epoch
    reason: Text = ""
    report: SwapReport | None = None
    run: Label = ""


class HistoryReport(Message, frozen=True):
    """The last swaps, the newest first."""

    swaps: tuple[HistoryEntry, ...]


class Difference(Value, frozen=True):
    """A part of one live tensor that does not match the version's digest.

    Elements are counted in row-major order of the local tensor. If the staging arena still held the version,
    `first` and `last` are the first and last element that differ, and `differing` counts them; otherwise they are the
    ends of the block that differs, and `differing` is 0.
    """

    parameter: Label
    shape: Shape
    first: Count
    last: Count
    slice: Label  # the box that holds them, written as an index: "[3, 0:64]"
    differing: Count = 0


class MemberProof(Value, frozen=True):
    """The result of checking one target rank; `reason` says why it is unknown."""

    replica: Label
    rank: Small
    node: Label
    host: Label
    pid: Count
    state: ProofState
    version: Count | None = None  # what it serves
    reason: Text = ""
    bytes: Count = 0  # compared
    digest: Label = ""  # of the version, as this rank should hold it
    blocks: Count = 0  # that differ; `differences` lists the first
    differences: tuple[Difference, ...] = ()
    run: Label = ""  # of the version


class VerifyReport(Message, frozen=True):
    """Whether live weights are what was verified: PROVEN if all that serve are, and one does, DIFFERS if any is not."""

    model: Label
    outcome: ProofState
    members: tuple[MemberProof, ...]
    mixed: tuple[Text, ...] = ()  # ranks that should hold the same bytes of a version but were given different ones
    seconds: Seconds = 0.0


class SourceStatus(Value, frozen=True, rename=_MODE):
    """One source rank."""

    rank: Small
    node: Label
    host: Label
    pid: Count
    attached: bool  # False: the trainer is gone, its published versions are still held
    tensors: Count
    bytes: Count
    versions: tuple[Count, ...]
    mode: TransferMode = TransferMode.NONE  # transfer mode of its latest version
    mode_reason: Text = ""  # the measurement that chose between pulling and copying, if any
    run: Label = ""  # of the trainer that published its versions
    is_partial: bool = False  # the sources offer a part of what targets hold


class TargetStatus(Value, frozen=True):
    """One target rank."""

    replica: Label
    rank: Small
    world_size: Small
    node: Label
    host: Label
    pid: Count
    tensors: Count
    bytes: Count
    state: ServingState
    version: Count | None = None
    staged: Count | None = None  # a decided version that it has not taken over yet
    held_bytes: Count = 0  # of its live tensors; `bytes` counts what arrives
    staging_bytes: Count = 0
    run: Label = ""  # of the version
    step: Label = ""  # its daemon's text for the state of its swap and live tensors
    mode: CommitMode = CommitMode.COPY
    events: Events = ()  # the events that led there
    kept_tensors: Count = 0  # that no swap writes: it keeps its own values
    kept_bytes: Count = 0
    kept: tuple[Label, ...] = ()  # names of the first of them
    is_drained: bool = False  # new swaps leave its replica out because of a drained node


class ControllerStatus(Value, frozen=True):
    """The process that pauses, commits and resumes a replica; `step`: how far it is with `swap` ("": none)."""

    replica: Label
    node: Label
    host: Label
    pid: Count
    step: Label
    swap: Label = ""


class ModelStatus(Value, frozen=True):
    """One model: its sources, its targets, its running swap."""

    model: Label
    source_world_size: Small
    complete_versions: tuple[Count, ...]
    auto_swap: bool
    sources: tuple[SourceStatus, ...]
    targets: tuple[TargetStatus, ...]
    swap: SwapProgress | None = None
    last_swap: SwapReport | None = None
    live: Count | None = None  # the version that was decided last
    queued: Count = 0  # swaps that wait for the running one
    verify: bool = True  # False: neither staged bytes nor live weights are compared
    live_run: Label = ""  # of the live version
    next_version: Count = 1  # the lowest that a new trainer may publish
    swap_events: Events = ()  # of `swap`, as in SwapReport
    controllers: tuple[ControllerStatus, ...] = ()


class GpuStatus(Value, frozen=True):
    """A daemon's arenas on one GPU; `device` is its UUID, as `nvidia-smi -L` shows it."""

    device: Label
    arenas: Count
    arena_bytes: Count


class NodeStatus(Value, frozen=True):
    """One daemon."""

    node: Label
    host: Label
    pid: Count
    workers: tuple[Count, ...]  # pids
    clients: Count
    arenas: Count
    arena_bytes: Count
    address: Label = ""  # at which other nodes reach its workers
    services: tuple[Label, ...] = ()  # copy services that can run there
    gpus: tuple[GpuStatus, ...] = ()  # GPUs with arenas; `arenas` and `arena_bytes` count these too
    problems: tuple[Text, ...] = ()  # current problems
    refused: tuple[RefusedRegistration, ...] = ()  # at most 64; the longest refused first


class LinkStatus(Value, frozen=True):
    """What one node sends another for one model."""

    model: Label
    source: Label  # node
    target: Label  # node
    service: Label
    lanes: Small  # pairs of workers
    bytes: Count  # per swap
    state: LinkState
    seconds: Seconds = 0.0  # time of the target's slowest worker in the last swap


class StatusReport(Message, frozen=True):
    """The whole cluster as the coordinator sees it."""

    coordinator_pid: Count
    uptime_s: Seconds
    nodes: tuple[NodeStatus, ...]
    models: tuple[ModelStatus, ...]
    links: tuple[LinkStatus, ...] = ()
    drained: tuple[Label, ...] = ()  # drained nodes, connected or not
    protocol: Small = 0  # that the coordinator speaks, as in NodeHello
    protocols: dict[Label, Small] = msgspec.field(default_factory=dict)  # that each daemon speaks


class PairTraffic(Value, frozen=True):
    """What one rank sends to another in a swap."""

    source: Label
    target: Label
    bytes: Count
    copies: Count


class ParameterTraffic(Value, frozen=True):
    """What moves of one parameter, over all targets."""

    name: Label
    bytes: Count
    copies: Count


class KeptTraffic(Value, frozen=True):
    """A tensor that targets keep, by the name that they have for it, over all targets."""

    name: Label
    bytes: Count


class LinkTraffic(Value, frozen=True):
    """What crosses from one node to another: `bytes`, where ranks there need `needed_bytes` of this one's sources.

    What several ranks of a node need crosses once, and relays send what others have given them.
    """

    source: Label
    target: Label
    bytes: Count
    needed_bytes: Count


class RelayPath(Value, frozen=True):
    """What `source` sends to the first of `nodes`, and each of them to the next."""

    source: Label
    nodes: tuple[Label, ...]
    bytes: Count


class CableTraffic(Value, frozen=True):
    """What one node's cable carries in one direction, and the seconds that takes at its speed."""

    node: Label
    is_send: bool
    bytes: Count
    speed: Count  # bytes per second
    seconds: Seconds


class Relaying(Value, frozen=True):
    """Over which nodes a plan passes on what several need. Bytes go through the busiest cable, in one direction.

    Without paths, `direct_bytes` is 0 if no two nodes need the same; else relays would not be worth their while.
    """

    paths: tuple[RelayPath, ...] = ()
    bytes: Count = 0
    direct_bytes: Count = 0
    seconds: Seconds = 0.0  # predicted, of all cables; 0 if their speeds are not known
    direct_seconds: Seconds = 0.0  # the same without relays


class PlanReport(Message, frozen=True):
    """What a swap of this model would move."""

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
    kept: tuple[KeptTraffic, ...] = ()  # what targets keep of their own, largest first
    links: tuple[LinkTraffic, ...] = ()
    relays: Relaying = Relaying()
    cables: tuple[CableTraffic, ...] = ()  # the one that takes longest first; () if no speeds are known
    speeds: Text = ""  # the cluster whose speeds the plan goes by; "": all cables count as equally fast


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
    """What every registered rank of a model holds; equal descriptions appear once."""

    model: Label
    shards: tuple[Shard, ...]
    members: tuple[DescribedMember, ...]
