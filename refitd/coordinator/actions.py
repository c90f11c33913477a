"""What the coordinator's state is told and what it wants done: events and instructions."""

from __future__ import annotations

from dataclasses import dataclass

from refitd.commit.journal import Record
from refitd.coordinator.plans import LoadedPlan
from refitd.describe.roster import Roster
from refitd.errors import RefitdError
from refitd.protocol import cluster
from refitd.protocol.base import Message
from refitd.protocol.roles import ANYONE, Allowed

# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromNode:
    """A daemon said something, over a connection that was let in with `key`, of which the list says `allowed`."""

    identity: bytes
    request: int
    message: cluster.NodeMessage
    key: str = ""
    allowed: Allowed = ANYONE


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan asked for with this ticket, or why there is none."""

    ticket: int
    plan: LoadedPlan | None
    error: RefitdError | None = None


@dataclass(frozen=True, slots=True)
class JournalWritten:
    """The decision is durable (or `error` says why not)."""

    swap: str
    error: RefitdError | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = FromNode | Planned | JournalWritten | Tick


# --- instructions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a daemon."""

    identity: bytes
    request: int
    message: Message


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Plan, then feed Planned."""

    ticket: int
    rosters: list[Roster]


@dataclass(frozen=True, slots=True)
class Decide:
    """Journal this decision durably, then feed JournalWritten."""

    record: Record


@dataclass(frozen=True, slots=True)
class Remember:
    """Journal how a swap ended, with its report."""

    record: Record


@dataclass(frozen=True, slots=True)
class Log:
    """Write one line."""

    event: str
    fields: dict[str, object]


Instruction = Send | MakePlan | Decide | Remember | Log
