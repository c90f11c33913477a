"""Messages between a client (trainer, engine, operator) and its node's daemon."""

from __future__ import annotations

from typing import Annotated

import msgspec

from refitd.protocol.base import Count, Label, Message, Name, Seconds, Small, Text, Value, clipped
from refitd.protocol.cable_reports import CablesMeasured
from refitd.protocol.control import Control, Controlled, ControllerRegistered, RegisterController
from refitd.protocol.reports import (
    DrainReport,
    EvictReport,
    ForgetReport,
    HistoryReport,
    ModelDescription,
    PlanReport,
    ReloadReport,
    ResumeReport,
    StatusReport,
    SwapProgress,
    SwapReport,
    SwapReports,
    VerifyReport,
)
from refitd.protocol.shards import Place, Shard, SharedTensor
from refitd.protocol.target_forms import Conversion, DerivedTensor, HeldTensor
from refitd.protocol.traces import GetTrace, TraceReport

# --- client to daemon -------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message. `token` came over the descriptor socket, whose peer the kernel has identified."""

    protocol: Small
    token: bytes
    name: Label = ""


class CreateArena(Message, frozen=True):
    """Request an arena for the client's live tensors, in main memory or on the named GPU. Reply: ArenaCreated."""

    nbytes: Count
    label: Label = ""
    device: Label = ""  # refitd.buffers.cuda.name_of; "": main memory
    timeout_s: Seconds = 0.0  # how long the client waits; 0: the daemon's own deadline


class FreeArena(Message, frozen=True):
    """Free an arena made by CreateArena that no registration uses. Reply: Done."""

    arena: Count


class GivenSlot(Value, frozen=True):
    """An arena that the client gave back after a restart of its daemon, and the version that it holds whole."""

    arena: Count
    version: Count | None = None


class RegisterSource(Message, frozen=True):
    """Offer a shard of `model`. `live` gives its tensors' places in arenas; without it, `slots` slots are made.

    A source that registers again after a restart of its daemon names its `run` and the `newest` version that it has
    published; `given` are its slots then, unless new ones are to be made.
    """

    model: Name
    rank: Small
    world_size: Small
    shard: Shard
    slots: Small = 2
    live: tuple[Place, ...] = ()
    device: Label = ""  # the GPU for its slots; "": main memory
    timeout_s: Seconds = 0.0  # as in CreateArena
    given: tuple[GivenSlot, ...] = ()
    run: Label = ""
    newest: Count | None = None
    origin: Label = ""  # identifies the checkpoint whose part it publishes


class RegisterTarget(Message, frozen=True):
    """Request a shard of `model`. With `live` places the worker writes them at commit, otherwise the client does.

    `held` lists the live tensors if they differ from the shard's; `conversions` say how they are made.

    A target that registers again after a restart of its daemon says which `version` of which `run` its live tensors
    hold; the coordinator confirms that. `given` is its staging arena then, unless a new one is to be made.
    """

    model: Name
    replica: Name
    rank: Small
    world_size: Small
    shard: Shard
    live: tuple[Place, ...] = ()
    version: Count | None = None  # the version it already serves
    run: Label = ""  # of that version
    given: Count | None = None
    returns: bool = False  # what an earlier process of this rank has left is not for it
    suspended: bool = False  # it has put its tensors away
    held: tuple[HeldTensor, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    derived: tuple[DerivedTensor, ...] = ()
    pauses: bool = False  # it gets AskPause before a version is decided
    in_place: bool = False  # it stands still while staging writes its live tensors; no staging arena
    lockstep: bool = False  # the replica's ranks poll equally often and flip in the same poll
    device: Label = ""  # the GPU for its staging arena; "": main memory
    timeout_s: Seconds = 0.0  # as in CreateArena
    observes: bool = False  # not an engine: only catch-ups bring it versions, and no other swap waits for it
    flips: bool = False  # `live` is all of one arena: versions are staged into its twin, and commits exchange the two
    controlled: bool = False  # it commits only when the replica's controller says so; no swap begins without one
    reads_live: bool = False  # its process reads `live` for checks: there are bytes that no worker sees
    shares: tuple[SharedTensor, ...] = ()  # tensors that are no part of `shard`: another model's versions write them


class Restored(Message, frozen=True):
    """This rank has restored the version of TargetRegistered and compared it byte for byte. Reply: Done."""

    member: Name


class Suspend(Message, frozen=True):
    """This rank puts its tensors away: no swap reaches its replica until Wake. Reply: Done."""

    member: Name


class Wake(Message, frozen=True):
    """The tensors of a suspended rank are back at their addresses; `is_lost`: without their contents. Reply: Done."""

    member: Name
    is_lost: bool = False


class Deregister(Message, frozen=True):
    """End a registration."""

    member: Name


class BeginPublish(Message, frozen=True):
    """Request a slot to write `version` into; waits up to `timeout_s` for one to become free."""

    member: Name
    version: Count
    timeout_s: Seconds


class Publish(Message, frozen=True):
    """The snapshot in `slot` is complete. `reason` says why the tensors were copied instead of lent."""

    member: Name
    version: Count
    slot: Small
    reason: Text = ""
    is_anew: bool = False  # as in ShardPublished


class MeasurePull(Message, frozen=True):
    """Ask the daemon to time reading parts of this source's private tensors. Reply: PullMeasured.

    `spans` are (address, rows, bytes from one row to the next).
    """

    member: Name
    spans: tuple[tuple[Count, Count, Count], ...]


class Lend(Message, frozen=True):
    """The live tensors are `version` and stay unchanged until LeaseEnded.

    `addresses` are where tensors outside arenas begin in this process. `reason` says why they are not copied.
    """

    member: Name
    version: Count
    addresses: tuple[Count, ...] = ()
    reason: Text = ""
    is_anew: bool = False  # as in ShardPublished


class Withdraw(Message, frozen=True):
    """End a lease or drop a published version; a swap that is reading it is aborted."""

    member: Name
    version: Count


class Paused(Message, frozen=True):
    """This rank has paused after AskPause, until it has committed or gets Resume."""

    swap: Name
    member: Name


class StepReached(Message, frozen=True):
    """How far this rank has polled: the answer to PrepareCommit, repeated while it waits in a poll.

    `step` numbers its last poll; it goes no further before FlipAt or PassPoll. `origin` is what it counts from: "" its
    registration, `lockstep.CALLERS_STEP`, or the last swap that all ranks of the replica committed in the same poll.
    `stands`: "poll", it is held in that poll; "wait", it computes nothing. `thread` is the thread that polls it.
    """

    swap: Name
    member: Name
    step: Count
    origin: Label = ""
    stands: Label = ""
    thread: Count = 0


class CommitQuiet(Message, frozen=True):
    """This rank has paused at its commit point, until CommitApplied."""

    swap: Name
    member: Name


class CommitDone(Message, frozen=True):
    """The version is live in this rank's tensors; the rank paused for `paused_s`.

    `exchanged`: it has exchanged its live and its staging arena; otherwise the version was copied or written.
    """

    swap: Name
    member: Name
    paused_s: Seconds
    exchanged: bool = False


class CommitFailed(Message, frozen=True):
    """This rank could not commit the version.

    `exchanged`: it had exchanged its live and its staging arena before it failed.
    """

    swap: Name
    member: Name
    reason: Text
    exchanged: bool = False

    def __post_init__(self) -> None:
        # the reason quotes the engine's errors; a too long one would be refused, and the failure lost
        msgspec.structs.force_setattr(self, "reason", clipped(self.reason))


class LiveDigests(Message, frozen=True):
    """The digests for DigestLive, or a reason; `again` if a version was committed meanwhile."""

    member: Name
    check: Count
    digests: bytes = b""
    reason: Text = ""
    again: bool = False


class LiveCompared(Message, frozen=True):
    """The result of CompareLive: per block, the first and last element that differ, and how many differ."""

    member: Name
    check: Count
    found: tuple[tuple[Count, Count, Count], ...] = ()
    reason: Text = ""


class StartSwap(Message, frozen=True):
    """Make a version live everywhere. Replies: SwapProgress repeatedly if asked for, then SwapReport or Failure."""

    model: Name
    version: Count | None = None
    timeout_s: Seconds = 0.0  # 0: only the configured deadlines
    queue: bool = False  # if a swap of the model is running, wait for it instead of being refused
    rollback: bool = False  # the version may be older than the served one; None: the previous one
    progress: bool = True  # whether progress is to be sent


class ModelVersion(Value, frozen=True):
    """A model, and the version to make live (None: the newest complete one)."""

    model: Name
    version: Count | None = None


class StartSwaps(Message, frozen=True):
    """Make versions of several models live by one decision. Replies as to StartSwap, with SwapReports at the end."""

    swaps: tuple[ModelVersion, ...]
    timeout_s: Seconds = 0.0  # as in StartSwap
    progress: bool = True  # as in StartSwap


class AbortSwap(Message, frozen=True):
    """Abort the running swap of a model, if it has not been decided yet."""

    model: Name
    reason: Text = ""


class Evict(Message, frozen=True):
    """Remove a replica, or one of its ranks, from a model, e.g. an engine that hangs. Reply: EvictReport.

    It must stop serving when it hears of this, and must register again to take part.
    """

    model: Name
    replica: Name
    rank: Small | None = None  # None: all of its ranks
    reason: Text = ""


class Forget(Message, frozen=True):
    """Free what dead processes left of a model: ended trainers' versions, dead engines' arenas. Reply: ForgetReport."""

    model: Name


class Reload(Message, frozen=True):
    """Read the list of admitted keys again. Reply: ReloadReport."""


class CablePair(Value, frozen=True):
    """Nodes of which one sends to the other."""

    source: Name
    target: Name


class MeasureCables(Message, frozen=True):
    """Measure how fast these nodes send to each other, all at once, for so long. Reply: CablesMeasured.

    Each node is in one pair.
    """

    pairs: Annotated[tuple[CablePair, ...], msgspec.Meta(min_length=1, max_length=1024)]
    seconds: Annotated[float, msgspec.Meta(ge=0.1, le=10.0)] = 2.0


class DrainNode(Message, frozen=True):
    """Leave this node out of all swaps that have not begun, until ResumeNode. Reply: DrainReport."""

    node: Name


class ResumeNode(Message, frozen=True):
    """Let a drained node take part in swaps again. Reply: ResumeReport."""

    node: Name


class Verify(Message, frozen=True):
    """Check the live weights of all replicas of a model. Reply: VerifyReport, within `timeout_s` (0: request_s)."""

    model: Name
    timeout_s: Seconds = 0.0


class GetStatus(Message, frozen=True):
    """Ask for StatusReport."""


class GetPlan(Message, frozen=True):
    """Ask for the PlanReport of a model."""

    model: Name


class GetHistory(Message, frozen=True):
    """Ask for the HistoryReport of a model, "" for all."""

    model: Label = ""
    limit: Small = 20


class GetDescription(Message, frozen=True):
    """Ask for the ModelDescription of a model."""

    model: Name


class GetUnrounded(Message, frozen=True):
    """Ask which tensors of a source rank are needed unrounded, before it publishes. Reply: Unrounded."""

    member: Name


# --- daemon to client -------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The daemon has accepted the session."""

    protocol: Small
    node: Label
    host: Label
    coordinator: bool  # whether a coordinator is connected now


class Unrounded(Message, frozen=True):
    """The canonical tensors that this rank rounds and that some target needs unrounded.

    `is_read`: a running swap may read what the rank has published.
    """

    names: tuple[Name, ...] = ()
    is_read: bool = False


class Done(Message, frozen=True):
    """The request was carried out."""


class Failure(Message, frozen=True):
    """The request was refused or failed; `code` names the class in refitd.errors."""

    code: Label
    message: Text

    def __post_init__(self) -> None:
        # errors quote their subject; a too long text would be refused, and the failure lost
        msgspec.structs.force_setattr(self, "message", clipped(self.message))


class ArenaCreated(Message, frozen=True):
    """The arena exists and is prefaulted; its descriptor is fetched over the descriptor socket."""

    arena: Count
    nbytes: Count


class SourceRegistered(Message, frozen=True):
    """`slots` are the source's arenas, laid out as in refitd.buffers.layout."""

    member: Name
    slots: tuple[Count, ...]
    nbytes: Count
    next_version: Count = 1  # lower numbers were live, or published earlier in this run
    run: Label = ""


class TargetRegistered(Message, frozen=True):
    """`staging` is the staging arena, laid out as in refitd.buffers.layout.

    With `restores` it already holds `version`, left by an earlier process: the client copies it and sends Restored.
    `content` says at which offset each tensor was left, if not where it is registered; `not_restored`, why it is not
    given back what an earlier process has left.
    `permit_slot` and `permit_token` locate this rank's permit in the page of permits (refitd.buffers.permits).
    """

    member: Name
    staging: Count
    nbytes: Count
    version: Count | None = None
    permit_slot: Count = 0
    permit_token: Count = 0
    restores: bool = False
    run: Label = ""  # of `version`
    content: tuple[Count, ...] = ()
    not_restored: Text = ""


class SlotGranted(Message, frozen=True):
    """The snapshot may be written into this slot."""

    slot: Small


class PullMeasured(Message, frozen=True):
    """How long reading the spans took, or the reason why they cannot be read."""

    seconds: Seconds
    reason: Text = ""


class AskPause(Message, frozen=True):
    """Pause and answer Paused, or CommitFailed with the reason. PrepareCommit or Resume follows."""

    swap: Name
    member: Name
    version: Count


class Resume(Message, frozen=True):
    """Go on with the present version: the swap was aborted. `is_poisoned`: serve nothing, two versions are mixed."""

    swap: Name
    member: Name
    reason: Text = ""
    is_poisoned: bool = False


class Fence(Message, frozen=True):
    """Stop serving: this rank's version is not, or may not be, the live one. An empty reason: serve again."""

    member: Name
    reason: Text = ""


class PrepareCommit(Message, frozen=True):
    """A verified version is staged and decided: commit it at the next commit point.

    `by_worker`: report CommitQuiet and wait for CommitApplied; otherwise copy and report CommitDone. `in_place`: the
    live tensors already hold it. `flips`: exchange the live and the staging arena. `lockstep`: answer StepReached, and
    commit in the poll that FlipAt names. `controlled`: answer StepReached, and commit in any later poll; the replica's
    controller calls for it.
    """

    swap: Name
    member: Name
    version: Count
    by_worker: bool
    in_place: bool = False
    lockstep: bool = False
    controlled: bool = False
    flips: bool = False
    run: Label = ""  # of the version


class FlipAt(Message, frozen=True):
    """Commit the decided version in poll number `step`.

    With an `origin`, all ranks of the replica commit in that poll and count from there.
    """

    swap: Name
    member: Name
    step: Count
    origin: Label = ""


class PassPoll(Message, frozen=True):
    """Leave the poll in which the rank stands, with its present version; send StepReached in the next one."""

    swap: Name
    member: Name


class CommitApplied(Message, frozen=True):
    """The worker has written the live tensors (or failed to, with a reason)."""

    swap: Name
    member: Name
    reason: Text = ""


class DigestLive(Message, frozen=True):
    """Digest this rank's live tensors, `steps[i]` elements of tensor i at a time. Reply: LiveDigests."""

    member: Name
    check: Count
    steps: tuple[Count, ...]


class CompareLive(Message, frozen=True):
    """Compare live blocks (tensor, first element, elements) with the staging arena. Reply: LiveCompared."""

    member: Name
    check: Count
    blocks: tuple[tuple[Small, Count, Count], ...]


class Evicted(Message, frozen=True):
    """This target was evicted: serve nothing, and register again.

    `exchanged` is the last swap for which the daemon knows that its arenas were exchanged.
    """

    member: Name
    reason: Text
    exchanged: Text = ""


class LeaseEnded(Message, frozen=True):
    """Lent tensors may be mutated again."""

    member: Name
    version: Count
    reason: Text = ""


# Requests about the whole cluster, which a daemon forwards to the coordinator, and the coordinator's replies.
ForwardedRequest = (
    StartSwap
    | StartSwaps
    | AbortSwap
    | Evict
    | Forget
    | Reload
    | MeasureCables
    | DrainNode
    | ResumeNode
    | Verify
    | GetStatus
    | GetPlan
    | GetHistory
    | GetDescription
    | GetUnrounded
    | GetTrace
)

ForwardedReply = (
    EvictReport
    | ForgetReport
    | ReloadReport
    | CablesMeasured
    | DrainReport
    | ResumeReport
    | SwapProgress
    | SwapReport
    | SwapReports
    | VerifyReport
    | StatusReport
    | PlanReport
    | HistoryReport
    | ModelDescription
    | Unrounded
    | TraceReport
)

ClientRequest = (
    Hello
    | CreateArena
    | FreeArena
    | RegisterSource
    | RegisterTarget
    | RegisterController
    | Restored
    | Suspend
    | Wake
    | Deregister
    | BeginPublish
    | Publish
    | MeasurePull
    | Lend
    | Withdraw
    | Paused
    | StepReached
    | CommitQuiet
    | CommitDone
    | CommitFailed
    | Controlled
    | LiveDigests
    | LiveCompared
    | ForwardedRequest
)

# A member's messages about its commits. On the descriptor socket, since the daemon reads its end only after them.
Told = Paused | CommitQuiet | CommitDone | CommitFailed

ClientReply = (
    Welcome
    | Done
    | Failure
    | ArenaCreated
    | SourceRegistered
    | TargetRegistered
    | ControllerRegistered
    | SlotGranted
    | PullMeasured
    | AskPause
    | Resume
    | Fence
    | PrepareCommit
    | FlipAt
    | PassPoll
    | CommitApplied
    | Control
    | DigestLive
    | CompareLive
    | LeaseEnded
    | Evicted
    | ForwardedReply
)
