"""Messages between a node's daemon and the coordinator."""

from __future__ import annotations

from typing import Literal

import msgspec

from refitd.protocol.base import Count, Events, Label, Message, Name, Seconds, Small, Step, Text, Value
from refitd.protocol.local import (
    AbortSwap,
    Done,
    Evict,
    Failure,
    GetDescription,
    GetHistory,
    GetPlan,
    GetStatus,
    StartSwap,
    Verify,
)
from refitd.protocol.reports import (
    Difference,
    EvictReport,
    HistoryReport,
    ModelDescription,
    NodeStatus,
    PlanReport,
    StatusReport,
    SwapProgress,
    SwapReport,
    VerifyReport,
)
from refitd.states import ProofState, TransferMode

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
    """First message of a daemon, and again after the coordinator has restarted. `live`: the last LiveIs."""

    protocol: Small
    status: NodeStatus
    live: tuple[LiveClaim, ...] = ()


class TargetMoved(Value, frozen=True):
    """A target rank's state on its daemon, and its last events; as in reports.TargetStatus."""

    member: Name
    step: Label
    events: Events


class NodeUpdate(Message, frozen=True):
    """The daemon's figures, and its heartbeat. `moved`: the targets whose state changed since the last one."""

    status: NodeStatus
    moved: tuple[TargetMoved, ...] = ()


class DescribeShard(Message, frozen=True):
    """The tensors that AddShard messages name by `digest` (codec.digest_of): sent once per coordinator life."""

    digest: Name
    packed: bytes  # a Shard, through codec.pack


class AddShard(Message, frozen=True, omit_defaults=True):
    """A client has registered. Reply: Done (SourceAdmitted for a source), or Failure, which undoes the registration.

    A Failure with code "unknown-shard" asks for DescribeShard first. A source without a `run` is a new one. With
    `is_question` nothing is registered: the answer is Done where it would be.
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
    modes: tuple[TransferMode, ...] = ()  # of each of these versions
    mode: TransferMode = TransferMode.NONE  # of the latest version, held or not
    mode_reason: Text = ""  # the measurement that chose it
    version: Count | None = None  # target: served
    staged: Name | None = None  # target: the swap whose staged bytes wait for commit
    held_bytes: Count = 0  # target: of its live tensors
    staging_bytes: Count = 0  # target: of what arrives and what is made of it
    converted_bytes: Count = 0  # target: of what arrives, read once more to be converted here
    stale: tuple[Name, ...] = ()  # target: tensors made of its weights that nothing makes anew
    pauses: bool = False  # target: says that it stands still before anything is decided
    in_place: bool = False  # target: is written to while staging, and stands still for that
    poisoned: Text = ""  # target: why it holds parts of two versions
    lockstep: bool = False  # target: flips in the same poll as the other ranks of its replica
    run: Label = ""  # source: its incarnation; target: that of the version it serves
    newest: Count | None = None  # source: the highest version published, held or not
    staged_version: Count | None = None  # target: what it has staged
    staged_run: Label = ""
    committing: bool = False  # target: it was told to take over what is staged, so that this is decided
    observes: bool = False  # target: takes part in catch-ups alone
    is_question: bool = False  # whether it would be taken in; Done, or Failure


class RemoveShard(Message, frozen=True):
    """A client has left or died."""

    member: Name
    reason: Text


class DetachShard(Message, frozen=True):
    """A source's client is gone; its published versions are still held."""

    member: Name
    reason: Text


class ShardPublished(Message, frozen=True):
    """A source rank holds this version. Reply: Done or Failure. `mode` and `mode_reason` are as in SourceStatus.

    `is_anew`: other tensors have taken the place of those that it was registered with.
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
    """The node has the plan; where bytes cross between nodes, its workers have joined the epoch."""

    plan: Name
    epoch: Label = ""


class PlanRefused(Message, frozen=True):
    """The node cannot use the plan; `where` says which process."""

    plan: Name
    epoch: Label
    where: Text
    reason: Text


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
    """The digests (little-endian uint64) of the rows of DigestRegions; or the reason why there are none."""

    swap: Name
    digests: bytes = b""
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
    crossing_s: Seconds = 0.0  # of it, the slowest worker's exchange with other nodes
    staging_bytes: Count = 0  # most that one worker holds in buffers of its own
    converted_bytes: Count = 0  # read once more to be converted


class StageFailed(Message, frozen=True):
    """Staging on this node has failed; `where` says which process and rank."""

    swap: Name
    where: Text
    reason: Text


class MemberQuiet(Message, frozen=True):
    """This member has paused until it has committed, or until Abort."""

    swap: Name
    member: Name


class MemberStep(Message, frozen=True):
    """This member was told to commit, and has polled as far as local.StepReached says."""

    swap: Name
    member: Name
    step: Count
    origin: Label = ""
    stands: Label = ""
    thread: Count = 0


class MemberCommitted(Message, frozen=True):
    """The version is live in this member's tensors."""

    swap: Name
    member: Name
    paused_s: Seconds


class MemberCommitFailed(Message, frozen=True):
    """This member could not take over the version."""

    swap: Name
    member: Name
    reason: Text


class MemberChecked(Value, frozen=True):
    """The result of checking one member; as in reports.MemberProof. `form` identifies what it holds."""

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
    """An answer to CheckMembers about some of its members: the others come in answers of their own."""

    check: Name
    members: tuple[MemberChecked, ...]


# --- coordinator to daemon --------------------------------------------------------------------------------


class NodeWelcome(Message, frozen=True):
    """The coordinator has accepted the node. A new `boot` means that it has restarted: send everything again.

    Each answer lets the node's engines serve until `lease_s` after the NodeHello or NodeUpdate was sent.
    """

    protocol: Small
    boot: Name
    lease_s: Seconds = 10.0


class SourceAdmitted(Message, frozen=True):
    """A source was admitted into this run; it may publish `next_version` and above."""

    run: Label
    next_version: Count


class LiveIs(Message, frozen=True):
    """The live versions from now on. The daemon remembers them for a coordinator that has lost its journal."""

    live: LiveClaim


class MayDrop(Message, frozen=True):
    """The versions that a source rank may overwrite: newer ones are complete, or these never will be.

    If there is none, `reason` says which ranks the versions wait for.
    """

    member: Name
    versions: tuple[Count, ...]
    reason: Text = ""


class EpochPlan(Value, frozen=True):
    """The workers that exchange between nodes: worker i of each node is in lane i, at its node's position."""

    id: Name
    service: Name
    nodes: tuple[Name, ...]
    hosts: tuple[Label, ...]
    lanes: Small
    staging_bytes: Count  # per worker
    timeout_s: Seconds  # to meet


class LoadPlan(Message, frozen=True):
    """The part of a plan that this node executes; `members[i]` has rank `ranks[i]`.

    `table` is CopyTable.to_wire() of what is copied within this node, `fills` FillTable.to_wire(), empty where
    nothing is filled. `crossing` is CopyTable.to_wire() of what this node sends to, or receives from, others, empty
    where nothing is; `crossing_nodes[i]` is then the position of rank `ranks[i]`'s node in the epoch, -1 where that
    takes no part.
    """

    plan: Name
    model: Name
    ranks: tuple[Count, ...]
    members: tuple[Name, ...]
    table: dict[str, int | bytes | list[str]]
    fills: dict[str, int | bytes | list[str]] = msgspec.field(default_factory=dict)
    crossing: dict[str, int | bytes | list[str]] = msgspec.field(default_factory=dict)
    crossing_nodes: tuple[Step, ...] = ()
    epoch: EpochPlan | None = None


class EpochValue(Message, frozen=True):
    """The value of a worker of this lane on another node."""

    epoch: Name
    lane: Small
    key: Name
    value: bytes


class DropPlan(Message, frozen=True):
    """The plan will not be used again."""

    plan: Name


class FenceMember(Message, frozen=True):
    """This member does not hold the version decided last: it serves nothing until it has caught up."""

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
    verify: bool = True  # compare what is written with its source, and take the version's digests once it is live
    run: Label = ""  # of the sources, and so of the version


class CommitStaged(Message, frozen=True):
    """The decision is journalled: make the staged version live."""

    swap: Name
    version: Count
    run: Label = ""


class FlipMember(Message, frozen=True):
    """This member commits the decided version in its poll number `step`; see local.FlipAt."""

    swap: Name
    member: Name
    step: Count
    origin: Label = ""


class PassMember(Message, frozen=True):
    """This member leaves the poll in which it waits; see local.PassPoll."""

    swap: Name
    member: Name


class Abort(Message, frozen=True):
    """Discard the swap; nothing is written for it once this has been handled."""

    swap: Name
    reason: Text


class CheckMembers(Message, frozen=True):
    """Check the live weights of these members of this node. Replies: MembersChecked, all of them within `timeout_s`."""

    check: Name
    members: tuple[Name, ...]
    timeout_s: Seconds


class DigestRegions(Message, frozen=True):
    """Digest regions of source ranks of this node at a version. Reply: RegionsDigested, within `timeout_s`.

    `table` is `refitd.plan.regions.RegionTable.to_wire()`. Of each of `members`, `ranks` has the source rank and
    `holders` says which rows of the table it holds.
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
    """This member was evicted by an operator, or is what a trainer that is gone has left: free what is kept for it."""

    member: Name
    reason: Text


class EndSwap(Message, frozen=True):
    """The swap is over: its sources may be overwritten, leases end, of those `members` too that it did not read."""

    swap: Name
    version: Count = 0
    members: tuple[Name, ...] = ()


NodeMessage = (
    NodeHello
    | NodeUpdate
    | DescribeShard
    | AddShard
    | RemoveShard
    | DetachShard
    | ShardPublished
    | ShardWithdrawn
    | WantsRoom
    | PlanLoaded
    | PlanRefused
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
    | StartSwap
    | AbortSwap
    | Evict
    | Verify
    | GetStatus
    | GetPlan
    | GetHistory
    | GetDescription
)

CoordinatorMessage = (
    NodeWelcome
    | SourceAdmitted
    | LiveIs
    | MayDrop
    | Done
    | Failure
    | LoadPlan
    | EpochValue
    | DropPlan
    | FenceMember
    | Pause
    | Stage
    | CommitStaged
    | FlipMember
    | PassMember
    | Abort
    | EndSwap
    | CheckMembers
    | DigestRegions
    | EvictMember
    | EvictReport
    | SwapProgress
    | SwapReport
    | VerifyReport
    | StatusReport
    | PlanReport
    | HistoryReport
    | ModelDescription
)
