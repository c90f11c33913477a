"""Enums of outcomes, states and transfer modes in reports; events and instructions that all state machines share.

The wire and JSON use the enums' string values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SwapOutcome(StrEnum):
    """How a swap ended, or its present state."""

    COMMITTED = "committed"  # every member serves the version
    ABORTED = "aborted"  # no member does; the old version serves
    INCOMPLETE = "incomplete"  # it was decided, but a member failed or was lost
    DECIDED = "decided"  # it is still committing, or the journal has no later entry


class SwapCause(StrEnum):
    """The kind of reason why a swap did not make its version live everywhere."""

    NONE = ""
    ASKED = "asked"  # an operator or a client has aborted it
    OVERTAKEN = "overtaken"  # by another swap or a newer version
    TOGETHER = "together"  # another swap that was to be decided with it was aborted
    PLAN = "plan"  # the plan was refused
    SOURCES_DIFFER = "sources-differ"  # source ranks hold, or may hold, different values for the same elements
    MEMBER = "member"  # a trainer or engine rank failed, or was lost
    NODE = "node"  # a node failed: its workers, its transport or its memory
    DEADLINE = "deadline"
    JOURNAL = "journal"  # the decision could not be written
    COORDINATOR = "coordinator"  # it ended before the swap did


class MemberState(StrEnum):
    """A target rank's state after a swap."""

    COMMITTED = "committed"
    STAGED = "staged"
    ABORTED = "aborted"
    LOST = "lost"
    FAILED = "failed"
    LATE = "late"  # it commits at its next commit point
    POISONED = "poisoned"  # its tensors hold parts of two versions


class ServingState(StrEnum):
    """Whether a target rank serves the live version."""

    SERVING = "serving"
    EMPTY = "empty"  # no version has been committed
    WAITING = "waiting"  # the live version is staged; the rank commits at its next commit point
    BEHIND = "behind"  # another version is live, and the rank does not have it yet
    FENCED = "fenced"  # it serves no version until the coordinator names the live one
    POISONED = "poisoned"
    SUSPENDED = "suspended"  # its process has released the tensors; swaps skip its replica


class CommitMode(StrEnum):
    """How a target rank commits a version."""

    FLIP = "flip"  # its live and its staging arena are exchanged
    COPY = "copy"  # staged bytes are copied into its tensors
    IN_PLACE = "in-place"  # workers write its tensors while the engine is paused


class ProofState(StrEnum):
    """The result of comparing live tensors with the digests of their version."""

    PROVEN = "proven"
    DIFFERS = "differs"
    UNKNOWN = "unknown"


class TransferMode(StrEnum):
    """Where workers read a source's version."""

    ARENA = "arena"  # in the arena that holds the live tensors
    COPIED = "copied"  # in a slot that the trainer has copied it to
    NONE = ""  # no version yet


class LinkState(StrEnum):
    """Whether the workers of two nodes are connected."""

    UP = "up"
    DOWN = "down"


# --- events and instructions of all state machines --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Busy:
    """This process was busy or stopped for `seconds`, so peers only seem to have been silent."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed, at most one heartbeat."""


@dataclass(frozen=True, slots=True)
class Log:
    """Instruction: write one log line."""

    event: str
    fields: dict[str, object]
