"""Messages between a node's daemon and the coordinator."""

from __future__ import annotations

from typing import Literal

import msgspec

from refitd.protocol.base import Count, Label, Message, Name, Seconds, Small, Step, Text, Value
from refitd.protocol.local import (
    AbortSwap,
    Done,
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
    HistoryReport,
    ModelDescription,
    NodeStatus,
    PlanReport,
    StatusReport,
    SwapProgress,
    SwapReport,
    VerifyReport,
)

# --- daemon to coordinator --------------------------------------------------------------------------------


class NodeHello(Message, frozen=True):
    """First message of a daemon, and again after the coordinator has restarted."""

    protocol: Small
    status: NodeStatus


class NodeUpdate(Message, frozen=True):
    """The daemon's figures have changed; also its sign of life."""

    status: NodeStatus


class DescribeShard(Message, frozen=True):
    """The tensors that AddShard messages name by `digest` (codec.digest_of): sent once per coordinator life."""

    digest: Name
    packed: bytes  # a Shard, through codec.pack


class AddShard(Message, frozen=True, omit_defaults=True):
    """A client has registered. Reply: Done, or Failure and the registration is taken back.

    A Failure with code "unknown-shard" asks for DescribeShard first.
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
    ways: tuple[Label, ...] = ()  # of each of these versions: "arena", "pulled", "copied"
    way: Label = ""  # of the latest version, held or not
    why: Text = ""  # the measurement that chose it
    version: Count | None = None  # target: served
    staged: Name | None = None  # target: the swap whose staged bytes wait for commit
    held_bytes: Count = 0  # target: of its live tensors
    staging_bytes: Count = 0  # target: of what arrives and what is made of it
    converted_bytes: Count = 0  # target: of what arrives, read once more to be converted here
    stale: tuple[Name, ...] = ()  # target: tensors made of its weights that nothing makes anew
    pauses: bool = False  # target: says that it stands still before anything is decided
    in_place: bool = False  # target: is written to while staging, and stands still for that
    poisoned: Text = ""  # target: why it holds parts of two versions


class RemoveShard(Message, frozen=True):
    """A client has left or died."""

    member: Name
    reason: Text


class DetachShard(Message, frozen=True):
    """A source's client is gone; what it had published is still held."""

    member: Name
    reason: Text


class ShardPublished(Message, frozen=True):
    """A source rank holds this version. Reply: Done or Failure. `way` and `why`: as in SourceStatus."""

    member: Name
    version: Count
    way: Label = ""
    why: Text = ""


class ShardWithdrawn(Message, frozen=True):
    """A source rank no longer holds this version."""

    member: Name
    version: Count


class PlanLoaded(Message, frozen=True):
    """The node has the plan, and its workers have met those of the other nodes where bytes cross between nodes."""

    plan: Name
    epoch: Label = ""


class PlanRefused(Message, frozen=True):
    """The node cannot use the plan; `where` says which process."""

    plan: Name
    epoch: Label
    where: Text
    reason: Text


class EpochPut(Message, frozen=True):
    """A worker leaves a value for those of its lane on other nodes."""

    epoch: Name
    lane: Small
    key: Name
    value: bytes


class EpochLost(Message, frozen=True):
    """A worker of the epoch is gone: it must be formed anew before the plan is used again."""

    plan: Name
    epoch: Name
    where: Text
    reason: Text


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
    """This member stands still until it has committed, or Abort."""

    swap: Name
    member: Name


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
    """What became of checking one member; as in reports.MemberProof. `form` names what it holds and how it is made."""

    member: Name
    state: Literal["proven", "differs", "unknown"]
    version: Count | None = None
    reason: Text = ""
    bytes: Count = 0
    digest: Label = ""
    form: Label = ""
    blocks: Count = 0
    differences: tuple[Difference, ...] = ()


class MembersChecked(Message, frozen=True):
    """The answer to CheckMembers."""

    check: Name
    members: tuple[MemberChecked, ...]


# --- coordinator to daemon --------------------------------------------------------------------------------


class NodeWelcome(Message, frozen=True):
    """The coordinator has accepted the node. Another `boot` than before means: it has restarted, say all again."""

    protocol: Small
    boot: Name


class EpochPlan(Value, frozen=True):
    """The workers that exchange between nodes: worker i of each node is in lane i, at the position of its node."""

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
    """What a worker of this lane on another node has left for all."""

    epoch: Name
    lane: Small
    key: Name
    value: bytes


class DropPlan(Message, frozen=True):
    """The plan will not be used again."""

    plan: Name


class FenceMember(Message, frozen=True):
    """This member holds another version than the one that was decided last: it serves none until it has caught up."""

    member: Name
    reason: Text


class Pause(Message, frozen=True):
    """Have these members stand still; each is answered with MemberQuiet or MemberCommitFailed."""

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


class Commit(Message, frozen=True):
    """The decision is journalled: make the staged version live."""

    swap: Name
    version: Count


class Abort(Message, frozen=True):
    """Forget the swap; nothing may be written for it after this is handled."""

    swap: Name
    reason: Text


class CheckMembers(Message, frozen=True):
    """Check the live weights of these members of this node. Reply: MembersChecked, within `timeout_s`."""

    check: Name
    members: tuple[Name, ...]
    timeout_s: Seconds


class EndSwap(Message, frozen=True):
    """The swap is over: its sources may be overwritten, leases end."""

    swap: Name


NodeMessage = (
    NodeHello
    | NodeUpdate
    | DescribeShard
    | AddShard
    | RemoveShard
    | DetachShard
    | ShardPublished
    | ShardWithdrawn
    | PlanLoaded
    | PlanRefused
    | EpochPut
    | EpochLost
    | StageProgress
    | StageDone
    | StageFailed
    | MemberQuiet
    | MemberCommitted
    | MemberCommitFailed
    | MembersChecked
    | StartSwap
    | AbortSwap
    | Verify
    | GetStatus
    | GetPlan
    | GetHistory
    | GetDescription
)

CoordinatorMessage = (
    NodeWelcome
    | Done
    | Failure
    | LoadPlan
    | EpochValue
    | DropPlan
    | FenceMember
    | Pause
    | Stage
    | Commit
    | Abort
    | EndSwap
    | CheckMembers
    | SwapProgress
    | SwapReport
    | VerifyReport
    | StatusReport
    | PlanReport
    | HistoryReport
    | ModelDescription
)
