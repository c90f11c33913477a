"""The events of one swap, and the instructions that its machine (`refitd.commit.decision`) answers them with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from msgspec import Struct

from refitd.states import SwapCause

# --- events -----------------------------------------------------------------------------------------------


class PlanReady(Struct, frozen=True):
    """The plan is proven. `members` maps each target or controller to its node; `nodes` are all nodes that take part.

    The nodes in `loaded` have the plan already, or need none.
    `asked` are the controllers with a pause hook. Those in `halts` pause before staging, the others before the
    decision. Staging writes the live tensors of the targets in `in_place`. The source ranks in `publishing` still write
    the version; staging ends after them.
    """

    members: Mapping[str, str]
    nodes: frozenset[str]
    bytes_total: int
    asked: frozenset[str] = frozenset()
    halts: frozenset[str] = frozenset()
    in_place: frozenset[str] = frozenset()
    loaded: frozenset[str] = frozenset()
    publishing: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"PlanReady({len(self.members)} members on {len(self.nodes)} nodes, {self.bytes_total} bytes)"


class PlanLost(Struct, frozen=True):
    """A node cannot use the plan, or no longer can; `where` names the process and rank."""

    node: str
    where: str
    reason: str


class NodeLoaded(Struct, frozen=True):
    """A node has the plan."""

    node: str


class NodeProgress(Struct, frozen=True):
    """A node has written this many bytes."""

    node: str
    bytes_done: int


class NodeStaged(Struct, frozen=True):
    """A node has staged and verified everything it receives."""

    node: str
    copies: int
    bytes: int


class NodeFailed(Struct, frozen=True):
    """A node could not stage; `where` names the process and rank."""

    node: str
    where: str
    reason: str


class QuietReported(Struct, frozen=True):
    """This controller has paused its replica until the swap is over."""

    member: str


class SourceFinished(Struct, frozen=True):
    """This source rank has published the version in full."""

    member: str


class MemberLost(Struct, frozen=True):
    """A trainer or engine rank of this swap is gone."""

    member: str
    reason: str


class DecisionHeld(Struct, frozen=True):
    """The decision must not be written before `until`."""

    until: float


class DecisionSubmitted(Struct, frozen=True):
    """The record of the decision was submitted to the journal."""


class Journalled(Struct, frozen=True):
    """The journal's answer: the decision to commit is on disk."""


class NotJournalled(Struct, frozen=True):
    """The journal's answer: the decision is not written, and will not be."""

    reason: str


class CommitReported(Struct, frozen=True):
    """The version is live in this member."""

    member: str
    paused_s: float


class MemberFailed(Struct, frozen=True):
    """This member could not commit the version."""

    member: str
    reason: str


class AbortAsked(Struct, frozen=True):
    """Abort was requested."""

    reason: str
    cause: SwapCause = SwapCause.ASKED


class TimePassed(Struct, frozen=True):
    """Check the deadline."""


OfNode: TypeAlias = NodeLoaded | NodeProgress | NodeStaged | NodeFailed | PlanLost
OfMember: TypeAlias = QuietReported | SourceFinished | CommitReported | MemberFailed | MemberLost
OfJournal: TypeAlias = DecisionHeld | DecisionSubmitted | Journalled | NotJournalled
Event: TypeAlias = PlanReady | OfNode | OfMember | OfJournal | AbortAsked | TimePassed


# --- instructions -----------------------------------------------------------------------------------------


class SendPlan(Struct, frozen=True):
    """Send the plan to this node."""

    node: str


class PauseOn(Struct, frozen=True):
    """Ask these controllers of this node to pause their replicas."""

    node: str
    members: tuple[str, ...]


class StageOn(Struct, frozen=True):
    """Tell this node to stage."""

    node: str


class JournalDecision(Struct, frozen=True):
    """Submit the decision to the journal, feed DecisionSubmitted, then the journal's answer; or feed DecisionHeld."""


class CommitOn(Struct, frozen=True):
    """Tell this node's members to commit."""

    node: str


class AbortOn(Struct, frozen=True):
    """Tell this node to discard the swap."""

    node: str
    reason: str


class ReleaseSources(Struct, frozen=True):
    """Everything is staged: the sources may be overwritten."""


class Finished(Struct, frozen=True):
    """The swap has reached a final phase."""


Instruction = SendPlan | PauseOn | StageOn | JournalDecision | CommitOn | AbortOn | ReleaseSources | Finished
