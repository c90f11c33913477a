"""Messages between a node's daemon and the coordinator."""

from __future__ import annotations

from typing import Literal

import msgspec

from refitd.protocol.base import Count, Events, Label, Message, Name, Seconds, Secret, Small, Text, Value
from refitd.protocol.local import (
    BeginPublish,
    CommitDone,
    CommitFailed,
    Control,
    Controlled,
    Deregister,
    Done,
    Evicted,
    Failure,
    Fence,
    FlipAt,
    Forget,
    ForwardedReply,
    ForwardedRequest,
    Goodbye,
    MayDrop,
    Publish,
    RegisterController,
    StepReached,
    Suspend,
    Withdraw,
)
from refitd.protocol.reports import (
    Crossing,
    Difference,
    GetTrace,
    Moment,
    NodeStatus,
    NodeTrace,
)
from refitd.protocol.shards import SharedTensor, VersionOf
from refitd.states import ProofState, TransferMode

# The code of the last Failure that a coordinator sends when it is stopped: another one may lead immediately.
LEAVES = "coordinator-leaves"

# How long an ending process waits to send its last messages.
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
    highest: Count = 0  # the highest version that was ever live


class NodeHello(Message, frozen=True):
    """First message of a daemon, repeated after a coordinator restart. `live`: the last LiveIs of each model."""

    protocol: Small
    status: NodeStatus
    live: tuple[LiveClaim, ...] = ()


class TargetMoved(Value, frozen=True):
    """A target rank's state on its daemon, and its last events; see reports.TargetStatus.

    With `spare_lost` its other arena has lost its version, and no rollback may use it. With `lacks_base` its base is
    wrong or suspect: its next version is sent in full, also to the nodes after it on a relay path.
    """

    member: Name
    step: Label
    events: Events
    spare_lost: bool = False
    lacks_base: bool = False


class NodeUpdate(Message, frozen=True):
    """The daemon's status and heartbeat. `moved`: the targets whose state changed since the last one."""

    status: NodeStatus
    moved: tuple[TargetMoved, ...] = ()


class DescribeShard(Message, frozen=True):
    """The tensors that AddShard messages name by `digest` (codec.digest_of). Sent once to each coordinator process."""

    digest: Name
    packed: bytes  # a Shard, packed by codec.pack


class AddShard(Message, frozen=True, omit_defaults=True):
    """A client has registered. Reply: Done (SourceAdmitted for a source), or Failure, which undoes the registration.

    A Failure with code "unknown-shard" asks for DescribeShard first. A source without a `run` registers for the first
    time. With `is_question` the coordinator only checks: Done means that it would accept the registration.
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
    versions: tuple[Count, ...] = ()  # source: published versions that its node still stores
    modes: tuple[TransferMode, ...] = ()  # transfer mode of each of these versions
    mode: TransferMode = TransferMode.NONE  # of the latest version, even if it is no longer stored
    version: Count | None = None  # target: the version that it serves
    staged: Name | None = None  # target: the swap whose staged bytes wait for commit
    held_bytes: Count = 0  # target: size of its live tensors
    staging_bytes: Count = 0  # target: size of its staging arena
    converted_bytes: Count = 0  # target: bytes that conversions read again
    stale: tuple[Name, ...] = ()  # target: derived tensors without a refresh hook
    in_place: bool = False  # target: staging writes its live tensors; its controller pauses it first
    poisoned: Text = ""  # target: why its tensors are parts of two versions
    run: Label = ""  # source: its run; target: the run of the version it serves
    newest: Count | None = None  # source: the highest published version, even if it is no longer stored
    staged_version: Count | None = None  # target: the staged version
    staged_run: Label = ""
    committing: bool = False  # target: it received the order to commit, so the swap is decided
    observes: bool = False  # target: only catch-ups include it
    flips: bool = False  # target: commits exchange its arenas
    spare: Count | None = None  # target: the previous version, which its other arena holds
    spare_run: Label = ""
    seeds: bool = False  # target: an arena holds the served version as it arrived; the daemon can send it to others
    suspended: bool = False  # target: its engine is asleep, and swaps skip its replica
    controlled: bool = False  # target: it commits only when the replica's controller calls for it
    is_question: bool = False  # only check whether it would be accepted
    origin: Label = ""  # source: identifies the checkpoint if it publishes a part of one
    device: Label = ""  # the GPU of all its arenas (refitd.buffers.cuda.name_of); "": some are in main memory
    shares: tuple[SharedTensor, ...] = ()  # target: tensors that versions of another model write


class PlanLoaded(Message, frozen=True):
    """The node has loaded the plan; if it crosses nodes, the workers have joined its epoch.

    With a `reason` the plan can never be used; `where` names the process. `missing` counts parts of the LoadPlan
    that the node lacks; the coordinator then sends the message again with all parts.
    """

    plan: Name
    epoch: Label = ""
    where: Text = ""
    reason: Text = ""
    missing: Count = 0


class RegionsDigested(Message, frozen=True):
    """The digests (little-endian uint64) of the rows of DigestRegions, or the reason of a failure."""

    swap: Name
    digests: bytes = b""
    reason: Text = ""


class StageProgress(Message, frozen=True):
    """Bytes written so far on this node."""

    swap: Name
    bytes_done: Count


class StageDone(Message, frozen=True):
    """This node has staged all its tensors, and every digest matched.

    With a `reason` staging has failed; `where` names the process and rank.
    """

    swap: Name
    copies: Count = 0
    bytes: Count = 0
    seconds: Seconds = 0.0
    crossing_s: Seconds = 0.0  # part of `seconds`: the slowest worker's exchange with other nodes
    staging_bytes: Count = 0  # the largest size of one worker's own buffers
    converted_bytes: Count = 0  # read again for conversions
    crossing: Crossing = Crossing()  # traffic from other nodes to this one
    paths: tuple[Label, ...] = ()  # by GPUs within the node: names of refitd.addressing.paths
    where: Text = ""
    reason: Text = ""


class MemberChecked(Value, frozen=True):
    """The result of checking one member; see reports.MemberProof. `form` identifies its live tensors' conversions."""

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
    """The results for some members of a CheckMembers; further messages have the other members."""

    check: Name
    members: tuple[MemberChecked, ...]


# --- coordinator to daemon --------------------------------------------------------------------------------


class NodeWelcome(Message, frozen=True):
    """The coordinator has accepted the node. A new `boot` means that it has restarted: register everything again.

    Each answer to a NodeHello or NodeUpdate permits the node's engines to serve until `lease_s` after the node sent the
    message.
    """

    protocol: Small
    boot: Name
    lease_s: Seconds = 10.0
    clock_s: Moment = 0.0  # the coordinator's monotonic clock


class HeartbeatAnswer(Message, frozen=True):
    """The answer to a NodeUpdate."""

    clock_s: Moment  # the coordinator's monotonic clock


class LiveIs(Message, frozen=True):
    """A new live version. The daemon stores it for a coordinator that has lost its journal."""

    live: LiveClaim


class EpochPlan(Value, frozen=True):
    """The workers that exchange bytes between nodes. Worker i of each node is in lane i, at its node's position.

    A node is told only the nodes that it exchanges with, so each node has its own positions. With a `gpu_service`, the
    workers of all `gpus` form one group more, over that service: its positions are the GPUs of the first node, in
    order, then those of the next node. It moves the rows whose both ends are on GPUs.
    """

    id: Name
    service: Name
    nodes: tuple[Name, ...]
    hosts: tuple[Label, ...]
    lanes: Small
    staging_bytes: Count  # per worker
    timeout_s: Seconds  # to join
    key: Secret  # authenticates the epoch's workers to each other
    gpu_service: Label = ""  # "": the lanes move all rows
    gpus: tuple[tuple[Label, ...], ...] = ()  # of each node, with gpu_service
    doors: tuple[tuple[Label, ...], ...] = ()  # HOST:PORT of each node's workers
    gpu_doors: tuple[tuple[Label, ...], ...] = ()  # of the workers of its `gpus`
    hops: Small = 0  # the largest number of nodes on one path
    peers: Small = 0  # the largest number of peers of a worker in a lane, and
    gpu_peers: Small = 0  # of a GPU

    @property
    def gpu_group(self) -> str:
        """The name of the GPUs' group, in the place of the epoch's id, in messages to and from its workers."""
        return f"{self.id}/gpus"


class PlanPart(Value, frozen=True):
    """Rows that several plans may use: a table's wire form (refitd.plan.table). Sent packed, under its digest."""

    table: dict[str, int | bytes | list[str]]


class PeerTable(Value, frozen=True):
    """The nodes of an epoch that one node exchanges with, and itself. Sent packed, under its digest."""

    nodes: tuple[Name, ...]
    hosts: tuple[Label, ...]
    gpus: tuple[tuple[Label, ...], ...] = ()
    doors: tuple[tuple[Label, ...], ...] = ()
    gpu_doors: tuple[tuple[Label, ...], ...] = ()


class NodeShare(Value, frozen=True):
    """One node's share of a plan, without rank numbers, because they change. Sent packed, under its digest.

    The share has up to four tables, by name; each lists work in rows:

    - `table` (CopyTable): copies within this node;
    - `fills` (FillTable): boxes to fill with constants;
    - `crossing` (CrossingTable): copies that this node sends to or receives from other nodes;
    - `onward` (CopyTable): copies between targets of this node, once the crossing bytes have arrived.

    For each table `uses` lists the `parts` that it consists of, and their ranks (refitd.plan.table.Uses.to_wire()) as
    positions in `members`. `parts` are digests of PlanPart values. `seeds` are the positions of targets that are read,
    not written. If bytes cross between nodes, member i is on nodes[at[i]]. If some of them cross between GPUs, its
    arenas are on gpus[on[i]]; "" is main memory.
    """

    members: tuple[Name, ...]
    nodes: tuple[Name, ...]
    at: tuple[Small, ...]
    seeds: tuple[Small, ...]
    uses: dict[str, dict[str, bytes]]
    parts: tuple[Name, ...]
    gpus: tuple[Label, ...] = ()
    on: tuple[Small, ...] = ()


class ShareRanks(Value, frozen=True):
    """The plan-wide ranks of the members of a NodeShare. Sent packed, under its digest."""

    ranks: tuple[Count, ...]


class LoadPlan(Message, frozen=True):
    """One node's share of a plan, by digests: the message is short if the share has not changed.

    `share`, `ranks` and `peers` ("" without an epoch) are the digests of a NodeShare, ShareRanks and PeerTable;
    `epoch` lists no nodes. `given` has the packed values, and the packed parts that they name, that the node may lack.
    If the node still lacks some, its PlanLoaded counts them as `missing`.
    """

    plan: Name
    model: Name
    share: Name
    ranks: Name
    peers: Label = ""
    epoch: EpochPlan | None = None
    given: dict[str, bytes] = msgspec.field(default_factory=dict)


class DropPlan(Message, frozen=True):
    """The plan will not be used again."""

    plan: Name


class Stage(Message, frozen=True):
    """Copy `version` into the staging arenas and verify it. Reply: StageDone.

    With `members` no bytes are copied: the version in their other arenas counts as staged.
    """

    swap: Name
    plan: Label
    version: Count
    timeout_s: Seconds = 60.0
    verify: bool = True  # compare written bytes with their source, and digest the version once it is live
    run: Label = ""  # of the version
    base: Count | None = None  # a version that targets may still hold; crossing bytes may be sent as deltas to it
    base_run: Label = ""
    members: tuple[Name, ...] = ()


class CommitStaged(Message, frozen=True):
    """The decision is journalled: make the staged version live. A controller calls `controlled` members to commit.

    `beside`: the live versions of the models whose targets own shared tensors of these members.
    """

    swap: Name
    version: Count
    run: Label = ""
    controlled: tuple[Name, ...] = ()
    beside: tuple[VersionOf, ...] = ()


class Abort(Message, frozen=True):
    """Discard the swap; after the node has handled this, it does not write for the swap."""

    swap: Name
    reason: Text


class CheckMembers(Message, frozen=True):
    """Check the live weights of these members of this node. Replies: MembersChecked, within `timeout_s`."""

    check: Name
    members: tuple[Name, ...]
    timeout_s: Seconds


class DigestRegions(Message, frozen=True):
    """Digest regions of this node's source ranks at a version. Reply: RegionsDigested, within `timeout_s`.

    `table` is `refitd.plan.table.RegionTable.to_wire()`. `members[i]` is source rank `ranks[i]`; it digests the rows
    of holder `holders[i]`.
    """

    swap: Name
    version: Count
    run: Label
    members: tuple[Name, ...]
    ranks: tuple[Count, ...]
    holders: tuple[Count, ...]
    table: dict[str, int | bytes | list[str]]
    timeout_s: Seconds


class EndSwap(Message, frozen=True):
    """The swap has ended: its sources may be overwritten, and leases end.

    This includes the leases of `members`, which the swap did not read.
    """

    swap: Name
    version: Count = 0
    members: tuple[Name, ...] = ()


NodeMessage = (
    NodeHello
    | NodeUpdate
    | Goodbye
    | DescribeShard
    | AddShard
    | Deregister
    | Suspend
    | Publish
    | Withdraw
    | BeginPublish
    | PlanLoaded
    | StageProgress
    | StageDone
    | StepReached
    | CommitDone
    | CommitFailed
    | MembersChecked
    | RegionsDigested
    | RegisterController
    | Controlled
    | ForwardedRequest
    | NodeTrace
)

CoordinatorMessage = (
    NodeWelcome
    | HeartbeatAnswer
    | Done
    | LiveIs
    | MayDrop
    | Failure
    | LoadPlan
    | DropPlan
    | Fence
    | Stage
    | CommitStaged
    | FlipAt
    | Control
    | Abort
    | EndSwap
    | CheckMembers
    | DigestRegions
    | GetTrace
    | Evicted
    | Forget
    | ForwardedReply
)
