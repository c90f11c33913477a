"""Report swaps, status, verification and traces to operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from refitd.errors import RefitFailed
from refitd.protocol.base import Count, Events, Label, Message, Name, Seconds, Small, Text, Value
from refitd.protocol.plan_reports import PathTraffic
from refitd.protocol.shards import Shape
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

_MODE = {"mode": "way"}  # its name in JSON: `refitctl --json` and journals have it


class MemberReport(Value, frozen=True):
    """One target rank's part in a swap."""

    replica: Label
    rank: Small
    node: Label
    host: Label
    pid: Count
    state: MemberState
    version: Count | None = None  # the version that this rank serves now
    paused_s: Seconds = 0.0
    reason: Text = ""


class SourceReport(Value, frozen=True, rename=_MODE):
    """How one source rank provided the version of a swap; with `replica`, a serving rank that seeded a catch-up."""

    rank: Small
    node: Label
    host: Label
    mode: TransferMode
    replica: Label = ""


class Crossing(Value, frozen=True):
    """Traffic from other nodes: ranks needed `bytes`, for which `crossed_bytes` were sent.

    Of `bytes`, `delta_bytes` were sent as deltas to the previous version; of these, `changed_bytes` had changed.
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
        """The changed fraction of the bytes that were sent as deltas; None without deltas."""
        return self.changed_bytes / self.delta_bytes if self.delta_bytes else None


class RefusedRegistration(Value, frozen=True):
    """A process whose daemon refused its registration, so no swap reaches it.

    It is listed until it registers, or until it has disconnected and not retried for 60 s.
    """

    model: Label
    replica: Label  # "" for a source
    rank: Count
    node: Label
    pid: Count
    name: Label = ""  # its client's name
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
    phase: Label = ""  # the phase that failed: "plan", "pause", "stage", "decide", "commit"
    reason: Text = ""
    bytes: Count = 0
    copies: Count = 0
    digests: Count = 0  # compared receive digests
    plan_s: Seconds = 0.0
    stage_s: Seconds = 0.0
    pause_s: Seconds = 0.0  # time until the engines were paused
    commit_s: Seconds = 0.0
    total_s: Seconds = 0.0
    members: tuple[MemberReport, ...] = ()
    sources: tuple[SourceReport, ...] = ()
    kind: Label = "asked"  # "auto", "catch-up", "rollback"
    converted_bytes: Count = 0  # read again by workers for conversions
    run: Label = ""  # the trainer's incarnation; number and run identify a version
    events: Events = ()  # events of the swap, with seconds since it began
    suspended: tuple[Label, ...] = ()  # replicas that it skipped because their engines are asleep
    kept_tensors: Count = 0  # tensors, over all targets of the swap, that keep their own values and were not sent
    kept_bytes: Count = 0
    cause: SwapCause = SwapCause.NONE  # the kind of `reason`
    crossing: Crossing = Crossing()
    drained: tuple[Label, ...] = ()  # replicas that it skipped because of drained nodes
    refused: tuple[RefusedRegistration, ...] = ()  # processes of the model that it did not reach
    paths: tuple[PathTraffic, ...] = ()  # of its plan, most bytes first
    gpu_paths: tuple[Label, ...] = ()  # the paths within nodes that workers took; usually those of the plan

    @property
    def seeds(self) -> tuple[str, ...]:
        """The replicas that sent their version in a catch-up; () if source ranks sent it."""
        return tuple(sorted({source.replica for source in self.sources if source.replica}))


class SwapReports(Message, frozen=True):
    """Reports of the swaps of several models that were decided together, in the order of the request."""

    reports: tuple[SwapReport, ...]


class SwapFailed(RefitFailed):
    """A swap ended, or its caller's timeout passed, without every replica serving the version.

    `report` is the swap's report; `together` has the reports of all swaps that were decided with it.
    """

    def __init__(
        self, message: str, causes: Mapping[str, str], report: SwapReport, together: tuple[SwapReport, ...] = ()
    ) -> None:
        super().__init__(message, causes)
        self.report = report
        self.together = together or (report,)


class EvictReport(Message, frozen=True):
    """The removed ranks, by their displayed names."""

    model: Label
    replica: Label
    members: tuple[Text, ...]


class ForgetReport(Message, frozen=True):
    """The removed detached sources, by their displayed names, and the nodes that free arenas of dead engines."""

    model: Label
    sources: tuple[Text, ...]
    nodes: tuple[Label, ...]


class ReloadReport(Message, frozen=True):
    """The names of the admitted keys, the removed nodes, and the source of cable speeds."""

    uses_keys: bool  # False: no keys are read
    admitted: tuple[Label, ...] = ()
    removed: tuple[Label, ...] = ()  # nodes whose key was removed from the list, or no longer allows their name
    cables: Text = ""  # the cluster's name in the cluster file; "": without a file all cables count as equally fast
    absent: tuple[Text, ...] = ()  # nodes of that file that are not connected


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
    """A source rank on a drained node; swaps cannot skip it."""

    model: Label
    rank: Small
    host: Label
    pid: Count


class DrainReport(Message, frozen=True):
    """The effects of draining or resuming a node; `changed` is False if it was drained, or included, before."""

    node: Label
    changed: bool
    replicas: tuple[ReplicaName, ...] = ()  # replicas that new swaps skip; after `resume`, that they include again
    stranded: tuple[Label, ...] = ()  # models without any other replica
    sources: tuple[DrainedSource, ...] = ()  # swaps that read them do not begin
    running: tuple[SwapProgress, ...] = ()  # running swaps that include the node


class HistoryEntry(Value, frozen=True):
    """One swap in the journal; `report` describes its result, or the decision if it has not ended."""

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
    """A section of one live tensor that does not match the version's digest.

    Elements are counted in row-major order of the local tensor. If the staging arena still has the version, `first` and
    `last` are the first and last element that differ, and `differing` is their number. Otherwise `first` and `last` are
    the ends of the block that differs, and `differing` is 0.
    """

    parameter: Label
    shape: Shape
    first: Count
    last: Count
    slice: Label  # the box around these elements, written as an index: "[3, 0:64]"
    differing: Count = 0


class MemberProof(Value, frozen=True):
    """The result of checking one target rank; `reason` explains an unknown result."""

    replica: Label
    rank: Small
    node: Label
    host: Label
    pid: Count
    state: ProofState
    version: Count | None = None  # the version that it serves
    reason: Text = ""
    bytes: Count = 0  # number of compared bytes
    digest: Label = ""  # the expected digest of the version on this rank
    blocks: Count = 0  # number of blocks that differ; `differences` lists the first ones
    differences: tuple[Difference, ...] = ()
    run: Label = ""  # the version's run


class VerifyReport(Message, frozen=True):
    """Whether live weights match the verified version.

    PROVEN: at least one rank serves, and all serving ranks match. DIFFERS: some rank does not match.
    """

    model: Label
    outcome: ProofState
    members: tuple[MemberProof, ...]
    mixed: tuple[Text, ...] = ()  # ranks that should have equal bytes of a version but received different ones
    seconds: Seconds = 0.0


class SourceStatus(Value, frozen=True, rename=_MODE):
    """One source rank."""

    rank: Small
    node: Label
    host: Label
    pid: Count
    attached: bool  # False: the trainer has left, and its node still stores its published versions
    tensors: Count
    bytes: Count
    versions: tuple[Count, ...]
    mode: TransferMode = TransferMode.NONE  # transfer mode of its latest version
    run: Label = ""  # the incarnation of the trainer that published its versions
    is_partial: bool = False  # the sources offer only some of the targets' tensors


class TargetStatus(Value, frozen=True):
    """One target rank. `coordinator/reports.py` fills it, `cli/view.py` prints it."""

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
    staged: Count | None = None  # a decided version that it has not committed yet
    held_bytes: Count = 0  # size of its live tensors; `bytes` counts received bytes
    staging_bytes: Count = 0
    run: Label = ""  # the version's run
    step: Label = ""  # its daemon's text for the state of its swap and live tensors
    mode: CommitMode = CommitMode.COPY
    events: Events = ()  # the events that led to this state
    kept_tensors: Count = 0  # tensors that keep their own values: no swap writes them
    kept_bytes: Count = 0
    kept: tuple[Label, ...] = ()  # names of the first kept tensors
    is_drained: bool = False  # new swaps skip its replica because of a drained node


class ControllerStatus(Value, frozen=True):
    """The process that pauses, commits and resumes a replica; `step` is its progress in `swap` ("": no swap)."""

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
    live_run: Label = ""  # the live version's run
    next_version: Count = 1  # the lowest version that a new trainer may publish
    swap_events: Events = ()  # of `swap`, as in SwapReport
    controllers: tuple[ControllerStatus, ...] = ()
    begun: Count | None = None  # a version that can be swapped while its sources publish it


class GpuStatus(Value, frozen=True):
    """A daemon's arenas on one GPU; `device` is its UUID, as `nvidia-smi -L` shows it."""

    device: Label
    arenas: Count
    arena_bytes: Count


class LaneStatus(Value, frozen=True):
    """The devices of one worker (refitd.daemon.workers). A worker without a GPU copies main memory only."""

    gpu: Label = ""  # its UUID; "": none
    numa: Small | None = None  # the NUMA node of its GPU, if known
    card: Label = ""  # the network card that it uses; "": none was found
    reaches: tuple[Small, ...] = ()  # workers whose GPUs its GPU can address
    port: Small = 0  # workers of other nodes connect to it here; 0: unknown


HEARTBEAT_S = 1.0  # between two heartbeats of a daemon


class NodeStatus(Value, frozen=True):
    """One daemon."""

    node: Label
    host: Label
    pid: Count
    workers: tuple[Count, ...]  # pids
    clients: Count
    arenas: Count
    arena_bytes: Count
    address: Label = ""  # other nodes connect to its workers here
    services: tuple[Label, ...] = ()  # copy services that can run there
    gpus: tuple[GpuStatus, ...] = ()  # GPUs with arenas; `arenas` and `arena_bytes` count these too
    lanes: tuple[LaneStatus, ...] = ()  # by worker
    has_kernels: bool = False  # Triton, which compiles kernels that copy, is installed
    problems: tuple[Text, ...] = ()  # current problems
    refused: tuple[RefusedRegistration, ...] = ()  # at most 64; the longest refused first
    refitd: Label = ""  # the daemon's version of refitd
    uptime_s: Seconds = 0.0
    silent_s: Seconds = 0.0  # since its last heartbeat; daemons send one every second

    @property
    def is_late(self) -> bool:
        """Whether two heartbeats are missing."""
        return self.silent_s > 2 * HEARTBEAT_S


class LostNode(Value, frozen=True):
    """A node that the coordinator has removed because its heartbeats ended, until it returns or is forgotten."""

    node: Label
    host: Label
    pid: Count
    silent_s: Seconds  # since its last heartbeat
    reason: Label
    replicas: tuple[ReplicaName, ...] = ()  # with ranks there
    sources: tuple[Label, ...] = ()  # models with source ranks there


class LinkStatus(Value, frozen=True):
    """The traffic from one node to another for one model."""

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
    protocol: Small = 0  # the coordinator's protocol version, as in NodeHello
    protocols: dict[Label, Small] = msgspec.field(default_factory=dict)  # each daemon's protocol version
    host: Label = ""  # of the coordinator
    lost: tuple[LostNode, ...] = ()  # the longest lost first


# The limit of spans of one node in a trace.
MAX_SPANS = 1024

# Seconds of some process's monotonic clock, or between two of them.
Moment = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class TraceSpan(Value, frozen=True):
    """One timed operation of a process."""

    who: Label  # the process: "coordinator", "daemon", "worker 0", "engine-a rank 0 (pid 7)"
    name: Label
    began: Moment
    ended: Moment
    bytes: Count = 0
    is_open: bool = False  # the operation was still running when the trace was taken
    note: Label = ""


class GetTrace(Message, frozen=True):
    """Ask for the TraceReport of a model's swap, "" for the last one.

    The coordinator also sends this to daemons, with the number of the question in `asked`. Their reply is NodeTrace.
    """

    model: Name
    swap: Label = ""
    asked: Label = ""


class NodeTrace(Message, frozen=True):
    """A node's spans of a swap, in its own clock.

    Add `offset_s` to its times for the coordinator's clock; the error is at most `error_s` (None: not measured).
    """

    asked: Name
    node: Label
    host: Label
    spans: Annotated[tuple[TraceSpan, ...], msgspec.Meta(max_length=MAX_SPANS)]
    dropped: Count = 0  # spans beyond the limit
    offset_s: Moment = 0.0
    error_s: Seconds | None = None


class TraceReport(Message, frozen=True):
    """One swap over all processes. `phases` and `began` use the coordinator's clock, each node's spans its own."""

    swap: Label
    model: Label
    version: Count
    kind: Label
    phases: tuple[TraceSpan, ...]
    began: Moment
    at: float  # seconds since the epoch, when it began
    host: Label  # the coordinator's
    nodes: tuple[NodeTrace, ...]
    outcome: SwapOutcome | None = None  # None: it is running
    reason: Text = ""
    missing: tuple[Text, ...] = ()  # why nodes of the swap are not among `nodes`
