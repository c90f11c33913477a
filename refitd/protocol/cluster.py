"""Messages between a node's daemon and the coordinator."""

from __future__ import annotations

from typing import Literal

import msgspec

from refitd.protocol.base import Count, Events, Label, Message, Name, Seconds, Secret, Small, Step, Text, Value
from refitd.protocol.control import AddController, Control, Controlled, RemoveController
from refitd.protocol.local import Done, Failure, ForwardedReply, ForwardedRequest
from refitd.protocol.reports import (
    Crossing,
    Difference,
    NodeStatus,
)
from refitd.protocol.shards import SharedTensor
from refitd.protocol.traces import CollectTrace, Moment, NodeTrace
from refitd.states import ProofState, TransferMode

# The code of the Failure that is a coordinator's last word: it was told to end, and another one may lead at once.
LEAVES = "coordinator-leaves"

# How long the last words of a process are sent, at most.
LAST_WORDS_S = 0.2

# --- daemon to coordinator --------------------------------------------------------------------------------


class LiveClaim(Value, frozen=True):
    """A model's live version (number and run), and the journal and decision that made it live."""

    model: Name
    version: Count
    run: Label = ""
    sequence: Count = 0
    swap: Label = ""
    journal: Label = ""
    highest: Count = 0  # of all versions that were ever live


class NodeHello(Message, frozen=True):
    """First message of a daemon, repeated after a coordinator restart. `live`: the last LiveIs of each model.

    With `keeps_parts` it keeps parts of plans, so that a LoadPlan need only name those that it has.
    """

    protocol: Small
    status: NodeStatus
    live: tuple[LiveClaim, ...] = ()
    keeps_parts: bool = False


class TargetMoved(Value, frozen=True):
    """A target rank's state on its daemon, and its last events; see reports.TargetStatus.

    With `spare_lost` its other arena does not hold what it did, so that no rollback may use it.
    """

    member: Name
    step: Label
    events: Events
    spare_lost: bool = False


class NodeUpdate(Message, frozen=True):
    """The daemon's status and heartbeat. `moved`: the targets whose state changed since the last one."""

    status: NodeStatus
    moved: tuple[TargetMoved, ...] = ()


class NodeLeaves(Message, frozen=True):
    """The last word of a daemon that was told to end: its workers have ended, and its name is free."""


class DescribeShard(Message, frozen=True):
    """The tensors that AddShard messages name by `digest` (codec.digest_of). Sent once to each coordinator process."""

    digest: Name
    packed: bytes  # a Shard, packed by codec.pack


class AddShard(Message, frozen=True, omit_defaults=True):
    """A client has registered. Reply: Done (SourceAdmitted for a source), or Failure, which undoes the registration.

    A Failure with code "unknown-shard" asks for DescribeShard first. A source without a `run` registers for the first
    time. With `is_question` nothing is registered: Done says that it would be accepted.
    """

    member: Name
    model: Name
    role: Literal["source", "target"]
    replica: Label
    rank: Small
    world_size: Small
    pid: Count
    digest: Name
    attached: bool = True
    versions: tuple[Count, ...] = ()  # source: published and held
    modes: tuple[TransferMode, ...] = ()  # transfer mode of each of these versions
    mode: TransferMode = TransferMode.NONE  # of the latest version, held or not
    mode_reason: Text = ""  # the measurement behind the mode
    version: Count | None = None  # target: served
    staged: Name | None = None  # target: the swap whose staged bytes wait for commit
    held_bytes: Count = 0  # target: of its live tensors
    staging_bytes: Count = 0  # target: of its staging arena
    converted_bytes: Count = 0  # target: read again for conversions
    stale: tuple[Name, ...] = ()  # target: derived tensors that nothing refreshes
    pauses: bool = False  # target: it stands still before the decision
    in_place: bool = False  # target: it stands still while staging writes its live tensors
    poisoned: Text = ""  # target: why it holds parts of two versions
    lockstep: bool = False  # target: it flips in the same poll as its replica's other ranks
    run: Label = ""  # source: its run; target: the run of the version it serves
    newest: Count | None = None  # source: the highest version published, held or not
    staged_version: Count | None = None  # target: the staged version
    staged_run: Label = ""
    committing: bool = False  # target: it was told to commit, so the swap is decided
    observes: bool = False  # target: it takes part only in catch-ups
    flips: bool = False  # target: commits exchange its arenas
    spare: Count | None = None  # target: the version that its other arena holds
    spare_run: Label = ""
    seeds: bool = False  # target: an arena holds the served version as it arrived, so that others can be given it
    suspended: bool = False  # target: its tensors are put away, and swaps leave its replica out
    controlled: bool = False  # target: it commits only when the replica's controller says so
    is_question: bool = False  # ask only whether it would be accepted
    origin: Label = ""  # source: identifies the checkpoint whose part it publishes
    shares: tuple[SharedTensor, ...] = ()  # target: tensors that versions of another model write


class MemberSuspended(Message, frozen=True):
    """A target rank has put its tensors away, or has them again (`is_lost`: without their contents).

    Reply: Done, or Failure if it has a decided version pending, which it must commit first.
    """

    member: Name
    suspended: bool
    is_lost: bool = False


class RemoveShard(Message, frozen=True):
    """A client has left or died."""

    member: Name
    reason: Text


class DetachShard(Message, frozen=True):
    """A source's client is gone; the node still holds its published versions."""

    member: Name
    reason: Text


class ShardPublished(Message, frozen=True):
    """A source rank holds this version. Reply: Done or Failure. `mode` and `mode_reason` are as in SourceStatus.

    `is_anew`: the source provides other tensors than before.
    """

    member: Name
    version: Count
    mode: TransferMode = TransferMode.NONE
    mode_reason: Text = ""
    is_anew: bool = False


class ShardWithdrawn(Message, frozen=True):
    """A source rank no longer holds this version."""

    member: Name
    version: Count


class WantsRoom(Message, frozen=True):
    """A source rank needs a slot for this version. MayDrop says what it may overwrite, now and later."""

    member: Name
    version: Count
    slots: Small


class PlanLoaded(Message, frozen=True):
    """The node has loaded the plan; if it crosses nodes, the workers have joined its epoch."""

    plan: Name
    epoch: Label = ""


class PlanRefused(Message, frozen=True):
    """The node cannot use the plan; `where` names the process."""

    plan: Name
    epoch: Label
    where: Text
    reason: Text


class PartsMissing(Message, frozen=True):
    """The node lacks parts that a LoadPlan or LoadShare names. Answered by the same with all of its parts."""

    plan: Name
    epoch: Label
    missing: Count


class EpochPut(Message, frozen=True):
    """A worker's value for the workers of its lane on other nodes."""

    epoch: Name
    lane: Small
    key: Name
    value: bytes


class EpochLost(Message, frozen=True):
    """A worker of the epoch is gone: a new epoch must be formed before the plan is used again."""

    plan: Name
    epoch: Name
    where: Text
    reason: Text


class RegionsDigested(Message, frozen=True):
    """The digests (little-endian uint64) of the rows of DigestRegions, or the reason why there are none."""

    swap: Name
    digests: bytes = b""
    reason: Text = ""


class CableMeasured(Message, frozen=True):
    """What this node's workers have received in a MeasureCable, or why they have not; who sends only says that."""

    test: Name
    bytes: Count = 0
    speed: Count = 0  # bytes per second
    reason: Text = ""


class StageProgress(Message, frozen=True):
    """Bytes written so far on this node."""

    swap: Name
    bytes_done: Count


class StageDone(Message, frozen=True):
    """Everything this node receives is staged and every digest matched."""

    swap: Name
    copies: Count
    bytes: Count
    seconds: Seconds
    crossing_s: Seconds = 0.0  # of that, the slowest worker's exchange with other nodes
    staging_bytes: Count = 0  # the most that one worker holds in its own buffers
    converted_bytes: Count = 0  # read again for conversions
    crossing: Crossing = Crossing()  # what came here from other nodes


class StageFailed(Message, frozen=True):
    """Staging on this node has failed; `where` names the process and rank."""

    swap: Name
    where: Text
    reason: Text


class MemberQuiet(Message, frozen=True):
    """This member has paused until it has committed, or until Abort."""

    swap: Name
    member: Name


class MemberStep(Message, frozen=True):
    """How far a member that was told to commit has polled; see local.StepReached."""

    swap: Name
    member: Name
    step: Count
    origin: Label = ""
    stands: Label = ""
    thread: Count = 0


class MemberCommitted(Message, frozen=True):
    """The version is live in this member's tensors; its other arena holds version `spare`, if it flips.

    `seeds` is as in AddShard.
    """

    swap: Name
    member: Name
    paused_s: Seconds
    spare: Count | None = None
    spare_run: Label = ""
    seeds: bool = False


class MemberCommitFailed(Message, frozen=True):
    """This member could not commit the version."""

    swap: Name
    member: Name
    reason: Text


class MemberChecked(Value, frozen=True):
    """The result of checking one member; see reports.MemberProof. `form` identifies its held form."""

    member: Name
    state: ProofState
    version: Count | None = None
    reason: Text = ""
    bytes: Count = 0
    digest: Label = ""
    form: Label = ""
    blocks: Count = 0
    differences: tuple[Difference, ...] = ()
    run: Label = ""


class MembersChecked(Message, frozen=True):
    """The results for some members of a CheckMembers; the others follow in further messages."""

    check: Name
    members: tuple[MemberChecked, ...]


# --- coordinator to daemon --------------------------------------------------------------------------------


class NodeWelcome(Message, frozen=True):
    """The coordinator has accepted the node. A new `boot` means that it has restarted: register everything again.

    Each answer to a NodeHello or NodeUpdate lets the node's engines serve until `lease_s` after that was sent.
    """

    protocol: Small
    boot: Name
    lease_s: Seconds = 10.0
    clock_s: Moment = 0.0  # the coordinator's monotonic clock


class HeartbeatAnswer(Message, frozen=True):
    """The answer to a NodeUpdate."""

    clock_s: Moment  # the coordinator's monotonic clock


class SourceAdmitted(Message, frozen=True):
    """A source was admitted into this run; it may publish `next_version` and above."""

    run: Label
    next_version: Count


class LiveIs(Message, frozen=True):
    """A new live version. The daemon remembers it for a coordinator that has lost its journal."""

    live: LiveClaim


class MayDrop(Message, frozen=True):
    """The versions that a source rank may overwrite: a newer one is complete, or they can never be complete.

    If there are none, `reason` names the ranks that must publish first.
    """

    member: Name
    versions: tuple[Count, ...]
    reason: Text = ""


class EpochPlan(Value, frozen=True):
    """The workers that exchange between nodes. Worker i of each node is in lane i, at the position of its node."""

    id: Name
    service: Name
    nodes: tuple[Name, ...]
    hosts: tuple[Label, ...]
    lanes: Small
    staging_bytes: Count  # per worker
    timeout_s: Seconds  # to join
    key: Secret  # by which its workers know each other


class PlanPart(Value, frozen=True):
    """Rows that several plans may use: a table's wire form (refitd.plan.parts). It travels packed, by digest."""

    table: dict[str, int | bytes | list[str]]


class EpochPart(Value, frozen=True):
    """Some of an epoch's nodes, in order, with their hosts. It travels packed, by digest."""

    nodes: tuple[Name, ...]
    hosts: tuple[Label, ...]


class LoadPlan(Message, frozen=True):
    """The part of a plan that this node executes; `members[i]` has rank `ranks[i]`.

    `table` (CopyTable.to_wire()) lists the copies within this node, `fills` (FillTable.to_wire()) what is filled with
    constants, `crossing` (CopyTable.to_wire()) what this node sends to or receives from others, `onward` (likewise)
    what is copied between targets of this node once that has arrived. Each is empty if there is nothing. With
    `crossing`, `crossing_nodes[i]` is the position of rank `ranks[i]`'s node in the epoch, or -1 if that node takes no
    part. `seeds` are the ranks of targets that are read, not written.

    To a node that keeps parts, tables travel in parts: `uses` says for each of the four, by name, which of `parts` it
    is made of and for which ranks (refitd.plan.parts.Uses.to_wire()). `parts` are digests of PlanPart values,
    `epoch_parts` of EpochPart values, together all of the epoch's nodes; `given` has those, packed, that the node is
    not known to hold.
    """

    plan: Name
    model: Name
    ranks: tuple[Count, ...]
    members: tuple[Name, ...]
    table: dict[str, int | bytes | list[str]]
    fills: dict[str, int | bytes | list[str]] = msgspec.field(default_factory=dict)
    crossing: dict[str, int | bytes | list[str]] = msgspec.field(default_factory=dict)
    onward: dict[str, int | bytes | list[str]] = msgspec.field(default_factory=dict)
    crossing_nodes: tuple[Step, ...] = ()
    epoch: EpochPlan | None = None
    seeds: tuple[Count, ...] = ()
    uses: dict[str, dict[str, bytes]] = msgspec.field(default_factory=dict)
    parts: tuple[Name, ...] = ()
    epoch_parts: tuple[Name, ...] = ()
    given: dict[str, bytes] = msgspec.field(default_factory=dict)


class NodeShare(Value, frozen=True):
    """What one node executes of a plan, without numbers of ranks, which change. It travels packed, by digest.

    `uses` and `parts` are as in LoadPlan, but for ranks: here and in `seeds` these are positions in `members`. Member i
    is on nodes[at[i]], if anything crosses between nodes.
    """

    members: tuple[Name, ...]
    nodes: tuple[Name, ...]
    at: tuple[Small, ...]
    seeds: tuple[Small, ...]
    uses: dict[str, dict[str, bytes]]
    parts: tuple[Name, ...]


class ShareRanks(Value, frozen=True):
    """The plan-wide ranks of the members of a NodeShare. It travels packed, by digest."""

    ranks: tuple[Count, ...]


class EpochParts(Value, frozen=True):
    """The digests of the EpochPart values of an epoch. It travels packed, by digest."""

    parts: tuple[Name, ...]


class LoadShare(Message, frozen=True):
    """A LoadPlan by digests, so that a node for which nothing changes is told little; from minor version 3 on.

    `share`, `ranks` and `epoch_parts` ("" without an epoch) name a NodeShare, ShareRanks and EpochParts; `epoch` has no
    nodes. `given` has what these are made of, packed, and themselves, unless the node is known to hold it. A node that
    lacks any of it says PartsMissing.
    """

    plan: Name
    model: Name
    share: Name
    ranks: Name
    epoch_parts: Label = ""
    epoch: EpochPlan | None = None
    given: dict[str, bytes] = msgspec.field(default_factory=dict)


class EpochValue(Message, frozen=True):
    """The value of a worker of this lane on another node."""

    epoch: Name
    lane: Small
    key: Name
    value: bytes


class MeasureCable(Message, frozen=True):
    """Join this epoch, and send to, or receive from, the node `peer` for so long. Reply: CableMeasured, or PlanRefused.

    `test` is in the place of a plan: DropPlan ends it.
    """

    test: Name
    epoch: EpochPlan
    peer: Name
    sends: bool
    seconds: Seconds


class DropPlan(Message, frozen=True):
    """The plan will not be used again."""

    plan: Name


class FenceMember(Message, frozen=True):
    """This member does not hold the live version: it must serve nothing until it has caught up."""

    member: Name
    reason: Text


class Pause(Message, frozen=True):
    """Ask these members to pause; each answers with MemberQuiet or MemberCommitFailed."""

    swap: Name
    version: Count
    members: tuple[Name, ...]


class Stage(Message, frozen=True):
    """Copy `version` into the staging arenas and verify it."""

    swap: Name
    plan: Name
    version: Count
    timeout_s: Seconds = 60.0
    verify: bool = True  # compare what is written with its source, and digest the version once it is live
    run: Label = ""  # of the version
    base: Count | None = None  # a version that targets may still hold: what crosses may be sent as changes to it
    base_run: Label = ""


class StageSpare(Message, frozen=True):
    """Take the version that the other arenas of these members hold as staged. Reply: StageDone or StageFailed."""

    swap: Name
    version: Count
    run: Label
    members: tuple[Name, ...]


class CommitStaged(Message, frozen=True):
    """The decision is journalled: make the staged version live. A controller calls `controlled` members to commit."""

    swap: Name
    version: Count
    run: Label = ""
    controlled: tuple[Name, ...] = ()


class FlipMember(Message, frozen=True):
    """This member commits the decided version in poll number `step`; see local.FlipAt."""

    swap: Name
    member: Name
    step: Count
    origin: Label = ""


class PassMember(Message, frozen=True):
    """This member leaves the poll in which it stands; see local.PassPoll."""

    swap: Name
    member: Name


class Abort(Message, frozen=True):
    """Discard the swap; once this is handled, nothing is written for it."""

    swap: Name
    reason: Text


class CheckMembers(Message, frozen=True):
    """Check the live weights of these members of this node. Replies: MembersChecked, within `timeout_s`."""

    check: Name
    members: tuple[Name, ...]
    timeout_s: Seconds


class DigestRegions(Message, frozen=True):
    """Digest regions of this node's source ranks at a version. Reply: RegionsDigested, within `timeout_s`.

    `table` is `refitd.plan.regions.RegionTable.to_wire()`. `members[i]` is source rank `ranks[i]`; it holds the rows of
    holder `holders[i]`.
    """

    swap: Name
    version: Count
    run: Label
    members: tuple[Name, ...]
    ranks: tuple[Count, ...]
    holders: tuple[Count, ...]
    table: dict[str, int | bytes | list[str]]
    timeout_s: Seconds


class EvictMember(Message, frozen=True):
    """Free the memory of this member: an operator evicted it, or it is a detached source that was replaced."""

    member: Name
    reason: Text


class ForgetRetained(Message, frozen=True):
    """Free the staging arenas that were kept of dead engines of this model."""

    model: Name


class EndSwap(Message, frozen=True):
    """The swap is over: its sources may be overwritten and leases end, also those of `members` that it did not read."""

    swap: Name
    version: Count = 0
    members: tuple[Name, ...] = ()


NodeMessage = (
    NodeHello
    | NodeUpdate
    | NodeLeaves
    | DescribeShard
    | AddShard
    | RemoveShard
    | MemberSuspended
    | DetachShard
    | ShardPublished
    | ShardWithdrawn
    | WantsRoom
    | PlanLoaded
    | PlanRefused
    | PartsMissing
    | EpochPut
    | EpochLost
    | StageProgress
    | StageDone
    | StageFailed
    | MemberQuiet
    | MemberStep
    | MemberCommitted
    | MemberCommitFailed
    | MembersChecked
    | RegionsDigested
    | CableMeasured
    | AddController
    | RemoveController
    | Controlled
    | ForwardedRequest
    | NodeTrace
)

CoordinatorMessage = (
    NodeWelcome
    | HeartbeatAnswer
    | SourceAdmitted
    | LiveIs
    | MayDrop
    | Done
    | Failure
    | LoadPlan
    | LoadShare
    | EpochValue
    | DropPlan
    | MeasureCable
    | FenceMember
    | Pause
    | Stage
    | StageSpare
    | CommitStaged
    | FlipMember
    | PassMember
    | Control
    | Abort
    | EndSwap
    | CheckMembers
    | DigestRegions
    | CollectTrace
    | EvictMember
    | ForgetRetained
    | ForwardedReply
)
