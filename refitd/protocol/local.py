"""Messages between a client (trainer, engine, operator) and its node's daemon."""

from __future__ import annotations

import msgspec

from refitd.protocol.base import Count, Label, Message, Name, Seconds, Small, Text, clipped
from refitd.protocol.held import Conversion, DerivedTensor, HeldTensor
from refitd.protocol.reports import (
    HistoryReport,
    ModelDescription,
    PlanReport,
    StatusReport,
    SwapProgress,
    SwapReport,
    VerifyReport,
)
from refitd.protocol.shards import Place, Shard

# --- client to daemon -------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message. `token` came over the descriptor socket, whose peer the kernel has identified."""

    protocol: Small
    token: bytes
    name: Label = ""


class CreateArena(Message, frozen=True):
    """Ask for an arena of the client's own, for live tensors, on the GPU of this name. Reply: ArenaCreated."""

    nbytes: Count
    label: Label = ""
    device: Label = ""  # refitd.buffers.cuda.name_of; "": main memory


class RegisterSource(Message, frozen=True):
    """Offer a shard of `model`. `live` places its tensors, if they live in arenas; else it has `slots` snapshots."""

    model: Name
    rank: Small
    world_size: Small
    shard: Shard
    slots: Small = 2
    live: tuple[Place, ...] = ()
    device: Label = ""  # the GPU its slots are to lie on; "": main memory


class RegisterTarget(Message, frozen=True):
    """Want a shard of `model`. With `live` places the worker writes at commit, otherwise the client does.

    `held` are the live tensors, where they are not simply those of the shard, and `conversions` how they are made.
    """

    model: Name
    replica: Name
    rank: Small
    world_size: Small
    shard: Shard
    live: tuple[Place, ...] = ()
    version: Count | None = None  # what it already serves
    held: tuple[HeldTensor, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    derived: tuple[DerivedTensor, ...] = ()
    pauses: bool = False  # it is asked to stand still, with AskPause, before a version is decided
    in_place: bool = False  # its live tensors are written while staging, for which it stands still; no staging arena
    device: Label = ""  # the GPU its staging arena is to lie on; "": main memory


class Deregister(Message, frozen=True):
    """Take a registration back."""

    member: Name


class BeginPublish(Message, frozen=True):
    """Ask for a snapshot slot to write `version` into; waits up to `timeout_s` for one that no swap is reading."""

    member: Name
    version: Count
    timeout_s: Seconds


class Publish(Message, frozen=True):
    """The snapshot in `slot` is complete. `why` it was made, where the tensors could have been lent instead."""

    member: Name
    version: Count
    slot: Small
    why: Text = ""


class MeasurePull(Message, frozen=True):
    """Have the daemon read parts of this source's private tensors and say how long that takes. Reply: PullMeasured.

    `spans` are (address, rows, bytes from one row to the next).
    """

    member: Name
    spans: tuple[tuple[Count, Count, Count], ...]


class Lend(Message, frozen=True):
    """The live tensors are `version` and stay unchanged until LeaseEnded.

    `addresses` are needed for tensors outside arenas: where each starts in this process. `why` they are not copied.
    """

    member: Name
    version: Count
    addresses: tuple[Count, ...] = ()
    why: Text = ""


class Withdraw(Message, frozen=True):
    """End a lease or drop a published version; a swap that is reading it is aborted."""

    member: Name
    version: Count


class Paused(Message, frozen=True):
    """This rank stands still, as AskPause wanted, until it has committed or is told to Resume."""

    swap: Name
    member: Name


class CommitQuiet(Message, frozen=True):
    """This rank has paused at its commit point and stays so until CommitApplied."""

    swap: Name
    member: Name


class CommitDone(Message, frozen=True):
    """The version is live in this rank's tensors; `paused_s` is how long it stood still."""

    swap: Name
    member: Name
    paused_s: Seconds


class CommitFailed(Message, frozen=True):
    """This rank could not take the version over."""

    swap: Name
    member: Name
    reason: Text


class LiveDigests(Message, frozen=True):
    """What DigestLive asked for, or a reason; `again` where a version was taken over meanwhile."""

    member: Name
    check: Count
    digests: bytes = b""
    reason: Text = ""
    again: bool = False


class LiveCompared(Message, frozen=True):
    """What CompareLive asked for: of each block the first and last element that differ, and how many do."""

    member: Name
    check: Count
    found: tuple[tuple[Count, Count, Count], ...] = ()
    reason: Text = ""


class StartSwap(Message, frozen=True):
    """Make a version live everywhere. Replies: SwapProgress repeatedly, then SwapReport or Failure."""

    model: Name
    version: Count | None = None
    timeout_s: Seconds = 0.0  # 0: the configured deadlines alone
    queue: bool = False  # where a swap of the model is running, wait for it instead of being refused
    rollback: bool = False  # the version may be older than what is served; None: the one before


class AbortSwap(Message, frozen=True):
    """Abort the running swap of a model, if it has not been decided yet."""

    model: Name
    reason: Text = ""


class Verify(Message, frozen=True):
    """Have the live weights of all replicas of a model checked. Reply: VerifyReport, in `timeout_s` (0: request_s)."""

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


# --- daemon to client -------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The daemon has accepted the session."""

    protocol: Small
    node: Label
    host: Label
    coordinator: bool  # whether a coordinator is connected now


class Done(Message, frozen=True):
    """The request has been carried out."""


class Failure(Message, frozen=True):
    """The request has been refused or has failed; `code` names the class in refitd.errors."""

    code: Label
    message: Text

    def __post_init__(self) -> None:
        # errors quote what they are about; one that is too long would be refused, and nobody told of it
        msgspec.structs.force_setattr(self, "message", clipped(self.message))


class ArenaCreated(Message, frozen=True):
    """The arena exists and is prefaulted; its descriptor is fetched over the descriptor socket."""

    arena: Count
    nbytes: Count


class SourceRegistered(Message, frozen=True):
    """`slots` are the snapshot arenas, laid out as refitd.buffers.layout says."""

    member: Name
    slots: tuple[Count, ...]
    nbytes: Count


class TargetRegistered(Message, frozen=True):
    """`staging` is the arena that new versions are staged in, laid out as refitd.buffers.layout says.

    It holds `version` already where a process before this one has left it: the client takes it over at once.
    """

    member: Name
    staging: Count
    nbytes: Count
    version: Count | None = None


class SlotGranted(Message, frozen=True):
    """The snapshot may be written into this slot."""

    slot: Small


class PullMeasured(Message, frozen=True):
    """Reading the spans took this long, or, with a `reason`, is not possible."""

    seconds: Seconds
    reason: Text = ""


class AskPause(Message, frozen=True):
    """Stand still and say Paused; CommitFailed says why that cannot be. PrepareCommit or Resume follows."""

    swap: Name
    member: Name
    version: Count


class Resume(Message, frozen=True):
    """Go on with what is there: the swap was aborted. `is_poisoned`: with nothing, parts of two versions are there."""

    swap: Name
    member: Name
    reason: Text = ""
    is_poisoned: bool = False


class Fence(Message, frozen=True):
    """Serve none: this rank's version is not the live one, or that cannot be known now. No reason: serve again."""

    member: Name
    reason: Text = ""


class PrepareCommit(Message, frozen=True):
    """A verified version is staged and decided: take it over at your next commit point.

    `by_worker`: report CommitQuiet and wait for CommitApplied; otherwise copy and report CommitDone. `in_place`: it is
    in the live tensors already.
    """

    swap: Name
    member: Name
    version: Count
    by_worker: bool
    in_place: bool = False


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
    """Compare blocks, (tensor, first element, elements), with the staging arena. Reply: LiveCompared."""

    member: Name
    check: Count
    blocks: tuple[tuple[Small, Count, Count], ...]


class LeaseEnded(Message, frozen=True):
    """Lent tensors may be mutated again."""

    member: Name
    version: Count
    reason: Text = ""


ClientRequest = (
    Hello
    | CreateArena
    | RegisterSource
    | RegisterTarget
    | Deregister
    | BeginPublish
    | Publish
    | MeasurePull
    | Lend
    | Withdraw
    | Paused
    | CommitQuiet
    | CommitDone
    | CommitFailed
    | LiveDigests
    | LiveCompared
    | StartSwap
    | AbortSwap
    | Verify
    | GetStatus
    | GetPlan
    | GetHistory
    | GetDescription
)

OperatorRequest = StartSwap | AbortSwap | Verify | GetStatus | GetPlan | GetHistory | GetDescription

ClientReply = (
    Welcome
    | Done
    | Failure
    | ArenaCreated
    | SourceRegistered
    | TargetRegistered
    | SlotGranted
    | PullMeasured
    | AskPause
    | Resume
    | Fence
    | PrepareCommit
    | CommitApplied
    | DigestLive
    | CompareLive
    | LeaseEnded
    | SwapProgress
    | SwapReport
    | VerifyReport
    | StatusReport
    | PlanReport
    | HistoryReport
    | ModelDescription
)
