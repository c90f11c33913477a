"""Messages between a client (trainer, engine, operator) and its node's daemon."""

from __future__ import annotations

from typing import Literal

import msgspec

from refitd.protocol.base import Count, Label, Message, Name, Seconds, Small, Text, Value, clipped
from refitd.protocol.plan_reports import ModelDescription, PlanReport
from refitd.protocol.reports import (
    DrainReport,
    EvictReport,
    ForgetReport,
    GetTrace,
    HistoryReport,
    ReloadReport,
    StatusReport,
    SwapProgress,
    SwapReport,
    SwapReports,
    TraceReport,
    VerifyReport,
)
from refitd.protocol.shards import Conversion, DerivedTensor, HeldTensor, Place, Shard, SharedTensor, VersionOf
from refitd.states import TransferMode

# --- client to daemon -------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message. `token` is from the descriptor socket, where the kernel identifies the peer."""

    protocol: Small
    token: bytes
    name: Label = ""


class CreateArena(Message, frozen=True):
    """Request an arena for the client's live tensors, in main memory or on the named GPU. Reply: ArenaDescriptor."""

    nbytes: Count
    label: Label = ""
    device: Label = ""  # refitd.buffers.cuda.name_of; "": main memory
    timeout_s: Seconds = 0.0  # how long the client waits; 0: the daemon's own deadline


class FreeArena(Message, frozen=True):
    """Free an arena made by CreateArena that no registration uses. Reply: Done.

    The daemon sends this to its workers, which unmap the arena, after it has dropped the jobs that used it.
    """

    arena: Count


class GivenSlot(Value, frozen=True):
    """An arena that the client handed over after its daemon's restart, and the full version in it, if any."""

    arena: Count
    version: Count | None = None


class RegisterSource(Message, frozen=True):
    """Offer a shard of `model`. `live` gives its tensors' places in arenas; without it, `slots` slots are made.

    If a source registers again after its daemon's restart, it names its `run` and the `newest` version that it has
    published. `given` are then its slots; if empty, new slots are made.
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
    origin: Label = ""  # identifies the checkpoint if it publishes a part of one


class RegisterTarget(Message, frozen=True):
    """Request a shard of `model`. With `live` places a worker writes them at commit, otherwise the client does.

    `held` lists the live tensors if they differ from the shard's; `conversions` make them.

    If a target registers again after its daemon's restart, it names the `version` and `run` that its live tensors hold,
    and the coordinator confirms it. `given` is then its staging arena; without it, a new one is made.
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
    returns: bool = False  # the same process registers again: do not restore the version of an earlier process
    suspended: bool = False  # its engine is asleep, and its tensors are unmapped
    held: tuple[HeldTensor, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    derived: tuple[DerivedTensor, ...] = ()
    in_place: bool = False  # staging writes its live tensors, while its controller pauses it; no staging arena
    device: Label = ""  # the GPU for its staging arena; "": main memory
    timeout_s: Seconds = 0.0  # as in CreateArena
    observes: bool = False  # not an engine: only catch-ups include it, and no other swap waits for it
    flips: bool = False  # `live` fills one arena: versions are staged into its twin, and commits exchange the two
    controlled: bool = False  # it commits only when the replica's controller calls for it; swaps need a controller
    reads_live: bool = False  # its process reads `live` for checks, because workers cannot read some of the bytes
    shares: tuple[SharedTensor, ...] = ()  # tensors outside `shard` that another model's versions write


class Restored(Message, frozen=True):
    """This rank has restored the version of Registered and compared it byte for byte. Reply: Done."""

    member: Name


class Suspend(Message, frozen=True):
    """This rank unmaps its tensors, or (not `suspended`) has mapped them again (`is_lost`: without their bytes).

    Swaps skip the replica of a suspended rank. The daemon forwards this to the coordinator. Reply: Done, or Failure if
    a decided version is pending, which the rank must commit first.
    """

    member: Name
    suspended: bool = True
    is_lost: bool = False


class Deregister(Message, frozen=True):
    """End a registration. A client sends this to its daemon, which sends it to the coordinator with a `reason`.

    `detached`: only the client of a source has left; the node still stores the published versions.
    """

    member: Name
    reason: Text = ""
    detached: bool = False


class BeginPublish(Message, frozen=True):
    """Request a slot to write `version` into; waits up to `timeout_s` for one to become free.

    If all of the rank's `slots` are used, the daemon sends this to the coordinator. MayDrop lists the versions that the
    rank may overwrite, now and later. With `is_writing` the rank has a slot and writes the version.
    """

    member: Name
    version: Count
    timeout_s: Seconds = 0.0
    slots: Small = 0
    is_writing: bool = False


class Wrote(Message, frozen=True):
    """Ranges of bytes of a version's slot are written: (first byte, byte behind the last) of each.

    A client may send this to its daemon during a long publication; the daemon passes it to the workers that read the
    slot, with its `arena`.
    """

    member: Name
    version: Count
    spans: tuple[tuple[Count, Count], ...]
    arena: Count = 0


class Publish(Message, frozen=True):
    """A version is complete: in `slot`, or in the live tensors, which then stay unchanged until MayDrop.

    A client sends this to its daemon, and the daemon to the coordinator. Reply: Done or Failure.
    """

    member: Name
    version: Count
    slot: Small | None = None  # None: the live tensors are lent
    is_anew: bool = False  # the source provides other tensors than before
    mode: TransferMode = TransferMode.NONE  # set by the daemon: how the version will be transferred


class Withdraw(Message, frozen=True):
    """A source no longer offers a version: its lease ends, or its slot is free. A swap that reads it is aborted.

    A client sends this to its daemon, and the daemon to the coordinator.
    """

    member: Name
    version: Count


class StepReached(Message, frozen=True):
    """The number of this rank's last poll: the answer to PrepareCommit, repeated while the rank waits in a poll.

    The rank does not pass poll `step` before FlipAt. Polls are counted from `origin`: "" is its registration; else
    `lockstep.CALLERS_STEP`, or the last swap that all ranks of the replica committed in the same poll. `stands` is
    "poll" if the rank is paused in that poll, "wait" if it is paused in a wait and computes no step. `thread` is the
    thread that polls it. The daemon forwards this if it cannot choose the poll.
    """

    swap: Name
    member: Name
    step: Count
    origin: Label = ""
    stands: Label = ""
    thread: Count = 0


class CommitDone(Message, frozen=True):
    """The version is live in this rank's tensors; the rank paused for `paused_s`. The daemon forwards this.

    `exchanged`: the rank has exchanged its live and its staging arena; otherwise the version was copied or written. The
    daemon adds `spare`, the version in the other arena of a flipping rank, and `seeds`, as in AddShard.
    """

    swap: Name
    member: Name
    paused_s: Seconds
    exchanged: bool = False
    spare: Count | None = None
    spare_run: Label = ""
    seeds: bool = False


class CommitFailed(Message, frozen=True):
    """This rank failed to commit the version. The daemon forwards this.

    `exchanged`: the rank had exchanged its live and its staging arena before the failure.
    """

    swap: Name
    member: Name
    reason: Text
    exchanged: bool = False

    def __post_init__(self) -> None:
        # the reason quotes the engine's errors; if it were too long, the message would be refused and the failure lost
        msgspec.structs.force_setattr(self, "reason", clipped(self.reason))


class LiveChecked(Message, frozen=True):
    """The result of CheckLive: digests, or differences; or the `reason` of a failure.

    `found` has, per block, the first and last differing element and their number. `again`: a version was committed
    during the check, so the check must be repeated.
    """

    member: Name
    check: Count
    digests: bytes = b""
    found: tuple[tuple[Count, Count, Count], ...] = ()
    reason: Text = ""
    again: bool = False


class Goodbye(Message, frozen=True):
    """A client closes its session, and retains no memory for a successor; or a daemon ends, and frees its name."""


class StartSwap(Message, frozen=True):
    """Make a version live everywhere. Replies: SwapProgress repeatedly if `progress`, then SwapReport or Failure."""

    model: Name
    version: Count | None = None
    timeout_s: Seconds = 0.0  # 0: only the configured deadlines
    queue: bool = False  # if a swap of the model is running, wait for it instead of being refused
    rollback: bool = False  # the version may be older than the served one; None: the previous one
    progress: bool = True  # send SwapProgress


class ModelVersion(Value, frozen=True):
    """A model, and the version to make live (None: the newest complete one)."""

    model: Name
    version: Count | None = None


class StartSwaps(Message, frozen=True):
    """Make versions of several models live by one decision. Replies as for StartSwap, but SwapReports at the end."""

    swaps: tuple[ModelVersion, ...]
    timeout_s: Seconds = 0.0  # as in StartSwap
    progress: bool = True  # as in StartSwap


class AbortSwap(Message, frozen=True):
    """Abort the running swap of a model, if it has not been decided yet."""

    model: Name
    reason: Text = ""


class Evict(Message, frozen=True):
    """Remove a replica, or one of its ranks, from a model, e.g. an engine that hangs. Reply: EvictReport.

    Its engines must stop serving when they learn this, and must register again before swaps include them.
    """

    model: Name
    replica: Name
    rank: Small | None = None  # None: all of its ranks
    reason: Text = ""


class Forget(Message, frozen=True):
    """Free a model's memory of dead processes: ended trainers' versions, dead engines' arenas. Reply: ForgetReport.

    The coordinator also sends this to daemons: they free the arenas of dead engines, without a reply. With a `node`,
    the coordinator only removes that lost node from its reports.
    """

    model: Label = ""
    node: Label = ""


class Reload(Message, frozen=True):
    """Read the list of admitted keys again. Reply: ReloadReport."""


class DrainNode(Message, frozen=True):
    """Exclude this node from all swaps that have not begun, or (not `drained`) include it again.

    Reply: DrainReport.
    """

    node: Name
    drained: bool = True


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


class RegisterController(Message, frozen=True):
    """Control a replica of `model`. `pauses`: the controller has a pause hook. Reply: Registered.

    The daemon adds `member` (its id) and `pid`, and sends this to the coordinator. Reply: Done, or Failure, which
    undoes the registration. If a controller registers again, `busy` is the swap for which the engine is paused, and
    `refuses` says that it was resumed without a version: it is resumed again once its ranks serve one.
    """

    model: Name
    replica: Name
    pauses: bool = False
    member: Label = ""
    pid: Count = 0
    busy: Label = ""
    refuses: bool = False


class Control(Message, frozen=True):
    """Coordinator to daemon to client: pause the engine, let all its ranks commit, or resume it.

    `version` is the version that will be live ("pause", "commit"), or that the replica serves ("resume"; None: it must
    not serve).
    """

    member: Name
    swap: Name
    what: Literal["pause", "commit", "resume"]
    version: Count | None = None


class Controlled(Message, frozen=True):
    """Client to daemon to coordinator: a "pause" or "commit" has returned, or failed if there is a `reason`."""

    member: Name
    swap: Name
    what: Literal["pause", "commit"]
    paused_s: Seconds = 0.0
    reason: Text = ""

    def __post_init__(self) -> None:
        # the reason quotes the engine's errors; if it were too long, the message would be refused and the failure lost
        msgspec.structs.force_setattr(self, "reason", clipped(self.reason))


# --- daemon to client -------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The daemon has accepted the session."""

    protocol: Small
    node: Label
    host: Label
    coordinator: bool  # whether a coordinator is connected now


class Unrounded(Message, frozen=True):
    """The canonical tensors that this rank rounds and that some target needs unrounded.

    `is_read`: a running swap may read the rank's published version.
    """

    names: tuple[Name, ...] = ()
    is_read: bool = False


class Done(Message, frozen=True):
    """The request succeeded. As the reply to a source's AddShard: it may publish `next_version` and above in `run`."""

    run: Label = ""
    next_version: Count | None = None


class Failure(Message, frozen=True):
    """The request was refused or failed; `code` names the class in refitd.errors."""

    code: Label
    message: Text

    def __post_init__(self) -> None:
        # errors quote their subject; if the text were too long, the message would be refused and the failure lost
        msgspec.structs.force_setattr(self, "message", clipped(self.message))


class ArenaDescriptor(Message, frozen=True):
    """The arena that was made, handed over or fetched. The reply to FetchArena comes with its descriptor."""

    arena: Count
    nbytes: Count
    device: Label = ""  # its GPU; "": main memory


class Registered(Message, frozen=True):
    """The registration of a source, a target or a replica controller is accepted.

    `slots` are a source's arenas, `staging` is a target's staging arena; refitd.buffers.layout has their layout. With
    `restores` the staging arena already holds `version`, from an earlier process: the client copies it and sends
    Restored. `content` gives the offset of each tensor in it, if it differs from the registered one. `not_restored`
    says why the version of an earlier process is not restored. `permit_slot` and `permit_token` locate a target's
    permit in the page of permits (refitd.buffers.permits).
    """

    member: Name
    slots: tuple[Count, ...] = ()
    staging: Count = 0
    nbytes: Count = 0
    next_version: Count = 1  # source: lower numbers were live, or published earlier in this run
    run: Label = ""  # the source's run, or the run of `version`
    version: Count | None = None
    permit_slot: Count = 0
    permit_token: Count = 0
    restores: bool = False
    content: tuple[Count, ...] = ()
    not_restored: Text = ""


class CheckLive(Message, frozen=True):
    """Digest this rank's live tensors, `steps[i]` elements of tensor i at a time. Reply: LiveChecked.

    With `blocks` (tensor, first element, elements), compare these with the staging arena instead.
    """

    member: Name
    check: Count
    steps: tuple[Count, ...] = ()
    blocks: tuple[tuple[Small, Count, Count], ...] = ()


class SlotGranted(Message, frozen=True):
    """The snapshot may be written into this slot."""

    slot: Small


class Poisoned(Message, frozen=True):
    """Stop serving: the swap was aborted while it wrote the live tensors, which are now parts of two versions."""

    swap: Name
    member: Name
    reason: Text = ""


class Fence(Message, frozen=True):
    """This member does not hold the live version: it must not serve until it has caught up.

    The coordinator sends this to the daemon, and the daemon to the client. An empty `reason`: serve again.
    """

    member: Name
    reason: Text = ""


class PrepareCommit(Message, frozen=True):
    """A verified version is staged and decided: commit it at the next commit point.

    `in_place`: the live tensors already hold the version. `flips`: exchange the live and the staging arena; otherwise
    copy from the staging arena. `lockstep`: answer StepReached, and commit in the poll that FlipAt names. `controlled`:
    answer StepReached, and commit in any later poll, once the replica's controller calls for it. `beside`: the live
    versions of the models whose targets own this member's shared tensors.
    """

    swap: Name
    member: Name
    version: Count
    in_place: bool = False
    lockstep: bool = False
    controlled: bool = False
    flips: bool = False
    run: Label = ""  # of the version
    beside: tuple[VersionOf, ...] = ()


class FlipAt(Message, frozen=True):
    """Commit the decided version in poll number `step`; without a step, leave the current poll with the old version.

    With an `origin`, all ranks of the replica commit in poll `step` and count polls from it. A rank that leaves a poll
    with the old version sends StepReached in its next poll.
    """

    swap: Name
    member: Name
    step: Count | None = None
    origin: Label = ""


class Evicted(Message, frozen=True):
    """This member was evicted, or it is a detached source that was replaced: its memory is freed.

    The coordinator sends this to the daemon. The daemon sends it to the client of a target, which stops serving and
    registers again. `exchanged` is the last swap for which the daemon knows that the target's arenas were exchanged.
    """

    member: Name
    reason: Text
    exchanged: Text = ""


class MayDrop(Message, frozen=True):
    """The versions that a source rank may overwrite: a newer one is complete, or they can never be complete.

    The coordinator sends this to the daemon. If there are no versions, `reason` names the ranks that must publish
    first. The daemon sends this to a client that has lent these versions: the tensors may be mutated again.
    """

    member: Name
    versions: tuple[Count, ...]
    reason: Text = ""


# Requests about the whole cluster, which a daemon forwards to the coordinator, and the coordinator's replies.
ForwardedRequest = (
    StartSwap
    | StartSwaps
    | AbortSwap
    | Evict
    | Forget
    | Reload
    | DrainNode
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
    | DrainReport
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
    | Deregister
    | BeginPublish
    | Wrote
    | Publish
    | Withdraw
    | StepReached
    | CommitDone
    | CommitFailed
    | Controlled
    | LiveChecked
    | ForwardedRequest
)

# A member's messages about its commits. They use the descriptor socket: the daemon reads them before it sees the
# connection's end.
Told = CommitDone | CommitFailed

ClientReply = (
    Welcome
    | Done
    | Failure
    | ArenaDescriptor
    | Registered
    | SlotGranted
    | Poisoned
    | Fence
    | PrepareCommit
    | FlipAt
    | Control
    | CheckLive
    | MayDrop
    | Evicted
    | ForwardedReply
)
