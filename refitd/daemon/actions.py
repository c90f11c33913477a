"""What the daemon's state is told and what it wants done: events and instructions."""

from __future__ import annotations

from dataclasses import dataclass

from refitd.daemon.members import LocalMember
from refitd.errors import RefitdError
from refitd.events import Busy, Log, Tick
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import Message
from refitd.protocol.roles import ALL_ROLES

# What a registration comes to, its member without a name yet and the bytes of its arenas, or why it is refused.
Prepared = tuple[LocalMember, int] | RefitdError

# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A client has said hello; the kernel vouches for pid and uid."""

    session: int
    pid: int
    name: str
    roles: frozenset[str] = ALL_ROLES
    uid: int = -1


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """A client has closed its connection or died."""

    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class SessionLeaves:
    """A client is about to close its session, and wants nothing kept."""

    session: int


@dataclass(frozen=True, slots=True)
class ClientSaid:
    """A client sent a message."""

    session: int
    request: int
    message: local.ClientRequest
    prepared: Prepared | None = None  # of a registration so large that it was looked at beside the loop


@dataclass(frozen=True, slots=True)
class CoordinatorSaid:
    """The coordinator sent a message."""

    request: int
    message: cluster.CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Unsent:
    """A request for the coordinator found no room in the queue to it."""

    request: int


@dataclass(frozen=True, slots=True)
class CoordinatorUnreachable:
    """No connection to the coordinator has come about, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    """A worker sent a message."""

    worker: int
    message: sidecar.FromWorker


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker process has ended by itself; a fresh one has been started in its place."""

    worker: int
    how: str


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """There is a worker again where none could be kept alive for a while."""

    worker: int


@dataclass(frozen=True, slots=True)
class Problems:
    """What stands in this node's way at present, for whoever asks how it is."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NotSent:
    """A message to a worker was not sent: its descriptor could not be had, or there is no such worker at present."""

    worker: int
    message: Message
    reason: str


@dataclass(frozen=True, slots=True)
class ArenasMade:
    """The arenas asked for with this ticket exist and are prefaulted."""

    ticket: int
    arenas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArenasRefused:
    """The arenas asked for with this ticket cannot be made."""

    ticket: int
    error: RefitdError


@dataclass(frozen=True, slots=True)
class Due:
    """The time that `Daemon.next_deadline` gave has come."""


Event = (
    SessionOpened
    | SessionClosed
    | SessionLeaves
    | ClientSaid
    | CoordinatorSaid
    | Unsent
    | CoordinatorUnreachable
    | WorkerSaid
    | WorkerDied
    | WorkerStarted
    | Problems
    | NotSent
    | Busy
    | ArenasMade
    | ArenasRefused
    | Due
    | Tick
)

# --- instructions -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToClient:
    """Send a message to a client."""

    session: int
    request: int
    message: Message


@dataclass(frozen=True, slots=True)
class ToCoordinator:
    """Send a message to the coordinator."""

    request: int
    message: Message


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Send a message to a worker, with an arena's descriptor or a block of bytes in a memory file."""

    worker: int
    message: Message
    arena: int | None = None
    block: bytes | None = None


@dataclass(frozen=True, slots=True)
class MakeArenas:
    """Allocate arenas, away from the loop; then feed ArenasMade or ArenasRefused."""

    ticket: int
    wanted: tuple[tuple[int, str], ...]  # (bytes, label)
    held: tuple[int, ...] = ()  # bytes in main memory of every arena there is, or will be before these
    device: str = ""  # the GPU to make them on
    within_s: float = 0.0  # that whoever asked for them waits; 0: the configured time


@dataclass(frozen=True, slots=True)
class TimePull:
    """Read these spans of a process, away from the loop; answer the client with PullMeasured."""

    session: int
    request: int
    pid: int
    spans: tuple[tuple[int, int, int], ...]  # (address, rows, bytes from one row to the next)


@dataclass(frozen=True, slots=True)
class WriteArena:
    """Write bytes at the start of an arena."""

    arena: int
    data: bytes


@dataclass(frozen=True, slots=True)
class SetPermit:
    """Let the target rank with this token serve until a moment of the monotonic clock (0: not at all)."""

    slot: int
    token: int
    until: float


@dataclass(frozen=True, slots=True)
class CloseArena:
    """Close the daemon's descriptor of an arena."""

    arena: int


@dataclass(frozen=True, slots=True)
class RestartWorker:
    """Kill a worker, reap it, start a fresh one. Nothing it was doing goes on after this returns."""

    worker: int


Instruction = (
    ToClient
    | ToCoordinator
    | ToWorker
    | MakeArenas
    | TimePull
    | WriteArena
    | SetPermit
    | CloseArena
    | RestartWorker
    | Log
)
