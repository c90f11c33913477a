"""Events that the coordinator's state handles, and instructions that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from refitd.coordinator.plans import LoadedPlan
from refitd.coordinator.records import Drain, Recovered, SwapRecord
from refitd.coordinator.rosters import ShardRead
from refitd.describe.roster import Roster
from refitd.errors import RefitdError
from refitd.events import Busy, Log, Tick
from refitd.offline.clusters import ClusterSpeeds
from refitd.protocol import cluster
from refitd.protocol.base import Message
from refitd.protocol.roles import ANYONE, Allowed

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
    """The plan requested with this ticket, or the error."""

    ticket: int
    plan: LoadedPlan | None
    error: RefitdError | None = None


class JournalWritten(Struct, frozen=True):
    """The decision about these swaps is durable (or `error` says why not)."""

    swaps: tuple[str, ...]
    error: RefitdError | None = None


class FilesRead(Struct, frozen=True):
    """The list of admitted keys and the cluster file were read again; `waiter` asked for it, if anybody did.

    Each is None if this coordinator uses none.
    """

    allowed: Mapping[str, Allowed] | None
    waiter: tuple[bytes, int] | None = None
    cluster: ClusterSpeeds | None = None


class DrainWritten(Struct, frozen=True):
    """The journal has recorded this change of a drain; `waiter` asked for it, if anybody did."""

    drain: Drain
    waiter: tuple[bytes, int] | None = None


Event = FromNode | Planned | JournalWritten | FilesRead | DrainWritten | Busy | Tick


# --- instructions -----------------------------------------------------------------------------------------


class Send(Struct, frozen=True):
    """Send a message to a daemon."""

    identity: bytes
    request: int
    message: Message


class Answer(Struct, frozen=True):
    """Send a daemon the result of `make`, which takes long: call it, and encode the result, on another thread."""

    identity: bytes
    request: int
    make: Callable[[], Message]


class MakePlan(Struct, frozen=True):
    """Make the plan, then feed Planned.

    With `may_relay`, nodes may pass on to others what they have received, those of `last` after all others. `cluster`
    says how fast their cables are; None: equally.
    """

    ticket: int
    rosters: list[Roster]
    may_relay: bool = True
    last: frozenset[str] = frozenset()
    cluster: ClusterSpeeds | None = None


class Decide(Struct, frozen=True):
    """Journal this decision, about one swap or several, in one durable write; then feed JournalWritten."""

    records: tuple[SwapRecord, ...]

    @property
    def swaps(self) -> tuple[str, ...]:
        """The ids of the swaps."""
        return tuple(record.swap for record in self.records)


class Remember(Struct, frozen=True):
    """Journal how a swap ended, with its report, or a live version that only daemons knew."""

    record: SwapRecord | Recovered


class WriteDrain(Struct, frozen=True):
    """Journal a change of a drain, then feed DrainWritten; if it cannot be written, only answer that."""

    drain: Drain
    waiter: tuple[bytes, int] | None = None


class ReadFiles(Struct, frozen=True):
    """Read admitted keys and the cluster file again, then feed FilesRead; if one cannot be used, only answer that."""

    waiter: tuple[bytes, int]


Instruction = ReadFiles | WriteDrain | Send | Answer | MakePlan | Decide | Remember | Log
