"""What reports say of outcomes, states and transfer modes; on the wire and in JSON these are their strings."""

from __future__ import annotations

from enum import StrEnum


class SwapOutcome(StrEnum):
    """How a swap ended, or stands."""

    COMMITTED = "committed"  # every member serves the version
    ABORTED = "aborted"  # nobody does; the old version serves
    INCOMPLETE = "incomplete"  # it was decided, and some member failed or was lost
    DECIDED = "decided"  # it goes on, or the journal knows nothing later


class MemberState(StrEnum):
    """Where a swap has left a target rank."""

    COMMITTED = "committed"
    STAGED = "staged"
    ABORTED = "aborted"
    LOST = "lost"
    FAILED = "failed"
    LATE = "late"  # it takes the version over at its next commit point
    POISONED = "poisoned"  # its tensors hold parts of two versions


class ServingState(StrEnum):
    """What a target rank serves."""

    SERVING = "serving"
    EMPTY = "empty"  # no version has been committed
    BEHIND = "behind"  # another version is live
    FENCED = "fenced"  # nothing, until the coordinator has said what is live
    POISONED = "poisoned"


class ProofState(StrEnum):
    """What comparing live tensors with the digests of their version has shown."""

    PROVEN = "proven"
    DIFFERS = "differs"
    UNKNOWN = "unknown"


class TransferMode(StrEnum):
    """How workers get a source's version."""

    ARENA = "arena"  # from the arena that the tensors live in
    PULLED = "pulled"  # from the trainer's memory
    COPIED = "copied"  # from a slot that the trainer copies it to
    NONE = ""  # no version yet


class LinkState(StrEnum):
    """Whether the workers of two nodes have met."""

    UP = "up"
    DOWN = "down"
