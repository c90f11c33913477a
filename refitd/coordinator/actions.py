"""Events that the coordinator's state handles, and instructions that it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from refitd.coordinator.journal import Record, Recovered
from refitd.coordinator.plans import LoadedPlan
from refitd.coordinator.rosters import ShardRead
from refitd.describe.roster import Roster
from refitd.errors import RefitdError
from refitd.events import Busy, Log, Tick
from refitd.protocol import cluster
from refitd.protocol.base import Message
from refitd.protocol.roles import ANYONE, Allowed

# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromNode:
    """A message of a daemon. Its connection was admitted with `key`; `allowed` is that key's line of the list."""

    identity: bytes
    request: int
    message: cluster.NodeMessage
    key: str = ""
    allowed: Allowed = ANYONE
    read: ShardRead | None = None  # of a DescribeShard that was unpacked beside the loop


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan requested with this ticket, or the error."""

    ticket: int
    plan: LoadedPlan | None
    error: RefitdError | None = None


@dataclass(frozen=True, slots=True)
class JournalWritten:
    """The decision is durable (or `error` says why not)."""

    swap: str
    error: RefitdError | None = None


Event = FromNode | Planned | JournalWritten | Busy | Tick


# --- instructions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a daemon."""

    identity: bytes
    request: int
    message: Message


@dataclass(frozen=True, slots=True)
class Answer:
    """Send a daemon what `make` returns. Make and encode it outside the loop, because it takes long."""

    identity: bytes
    request: int
    make: Callable[[], Message]


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
    """Journal how a swap ended, with its report, or a live version that only the daemons knew."""

    record: Record | Recovered


Instruction = Send | Answer | MakePlan | Decide | Remember | Log
