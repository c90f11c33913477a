"""Events that the coordinator's state handles, and instructions that it returns."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from refitd.clusters import ClusterSpeeds
from refitd.coordinator.descriptions import ShardRead
from refitd.coordinator.journals import Drain, KnownNode, Recovered, SwapRecord
from refitd.coordinator.paths import Wiring
from refitd.coordinator.plans import LoadedPlan
from refitd.describe.metadata import Roster
from refitd.errors import RefitdError
from refitd.protocol import cluster
from refitd.protocol.base import Message
from refitd.protocol.keys import ANYONE, Allowed
from refitd.states import Busy, Log, Tick

# A waiter for an answer: (connection of a daemon, number of its request).
Waiter = tuple[bytes, int]

# --- events -----------------------------------------------------------------------------------------------


class FromNode(Struct, frozen=True):
    """A message from a daemon. `key` authenticated its connection; `allowed` is that key's line in security.allowed."""

    identity: bytes
    request: int
    message: cluster.NodeMessage
    key: str = ""
    allowed: Allowed = ANYONE
    read: ShardRead | None = None  # for a DescribeShard that was unpacked on another thread


class Planned(Struct, frozen=True):
    """The plan requested with this ticket, or the error. The state copies the plan before it changes it."""

    ticket: int
    plan: LoadedPlan | None
    error: RefitdError | None = None


class JournalWritten(Struct, frozen=True):
    """The decision about these swaps is durable, or `error` says why not."""

    swaps: tuple[str, ...]
    error: RefitdError | None = None
    sequences: tuple[int, ...] = ()  # of the decisions in the journal, one for each swap; with an error none


class FilesRead(Struct, frozen=True):
    """The list of admitted keys and the cluster file were read again, for `waiter` if it is set.

    Each is None if this coordinator uses none.
    """

    allowed: Mapping[str, Allowed] | None
    waiter: Waiter | None = None
    cluster: ClusterSpeeds | None = None


class DrainWritten(Struct, frozen=True):
    """The journal has recorded this change of a drain, for `waiter` if it is set."""

    drain: Drain
    waiter: Waiter | None = None


Event = FromNode | Planned | JournalWritten | FilesRead | DrainWritten | Busy | Tick


# --- instructions -----------------------------------------------------------------------------------------


class Send(Struct, frozen=True):
    """Send a message to a daemon."""

    identity: bytes
    request: int
    message: Message


class Answer(Struct, frozen=True):
    """Send a daemon a large report: complete it (`plan_reports.completed`) and encode it on another thread."""

    identity: bytes
    request: int
    report: Message
    plan: LoadedPlan | None = None  # of a report of a plan
    wiring: Wiring | None = None


class MakePlan(Struct, frozen=True):
    """Make the plan, then feed Planned.

    With `may_relay`, nodes may relay data to other nodes, and the nodes in `last` come last in each path. `cluster` has
    the speeds of their cables; None: all are equal.
    """

    ticket: int
    rosters: list[Roster]
    may_relay: bool = True
    last: frozenset[str] = frozenset()
    cluster: ClusterSpeeds | None = None


class Decide(Struct, frozen=True):
    """Journal this decision, about one swap or several, in one durable write; then feed JournalWritten."""

    records: tuple[SwapRecord, ...]


class Remember(Struct, frozen=True):
    """Journal how a swap ended, with its report, a live version that only daemons knew, or a node."""

    record: SwapRecord | Recovered | KnownNode


class WriteDrain(Struct, frozen=True):
    """Journal a change of a drain, then feed DrainWritten; if it cannot be written, only answer that."""

    drain: Drain
    waiter: Waiter | None = None


class ReadFiles(Struct, frozen=True):
    """Read admitted keys and the cluster file again, then feed FilesRead; if one cannot be used, only answer that."""

    waiter: Waiter


Instruction = ReadFiles | WriteDrain | Send | Answer | MakePlan | Decide | Remember | Log
