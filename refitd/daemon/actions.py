"""The events that the daemon's state handles and the instructions that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from refitd.daemon.members import Registration
from refitd.errors import RefitdError
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import Message
from refitd.protocol.keys import ALL_ROLES
from refitd.states import Busy, Log, Tick

# A checked registration, or the reason of its refusal.
Prepared = Registration | RefitdError

# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A client has sent Hello; the kernel has verified pid and uid."""

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
    """A client is about to close its session; none of its targets is to be retained."""

    session: int


@dataclass(frozen=True, slots=True)
class ClientSaid:
    """A client sent a message."""

    session: int
    request: int
    message: local.ClientRequest
    prepared: Prepared | None = None  # set if the registration was large and was checked on another thread


@dataclass(frozen=True, slots=True)
class CoordinatorSaid:
    """The coordinator sent a message."""

    request: int
    message: cluster.CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Unsent:
    """A request to the coordinator was dropped: its queue is full, or the connection is `lost`."""

    request: int
    lost: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorUnreachable:
    """No connection to the coordinator could be made; `reason` says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    """A worker sent a message."""

    worker: int
    message: sidecar.FromWorker


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker process died; a replacement has been started."""

    worker: int
    how: str


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker runs again after a pause without a process."""

    worker: int


@dataclass(frozen=True, slots=True)
class Problems:
    """The current problems of this node, for status."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TookOver:
    """A member has committed a version and the coordinator knows; `exchanged`: it has exchanged its arenas."""

    member: str
    exchanged: bool


@dataclass(frozen=True, slots=True)
class NotSent:
    """A message to a worker was not sent: no descriptor was available, or that worker is down."""

    worker: int
    message: Message
    reason: str


@dataclass(frozen=True, slots=True)
class ArenasMade:
    """The arenas requested under this ticket exist and are prefaulted."""

    ticket: int
    arenas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArenaHandedBack:
    """A client has handed over an arena that it kept during a restart of its daemon (see `DaemonState.check_given`)."""

    session: int
    arena: int
    nbytes: int
    writable: bool  # for the client


@dataclass(frozen=True, slots=True)
class ArenasRefused:
    """The arenas requested under this ticket cannot be made."""

    ticket: int
    error: RefitdError


@dataclass(frozen=True, slots=True)
class Due:
    """The deadline that `DaemonState.next_deadline` returned has passed."""


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
    | TookOver
    | NotSent
    | Busy
    | ArenasMade
    | ArenaHandedBack
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
    """Allocate arenas on another thread; then feed ArenasMade or ArenasRefused."""

    ticket: int
    wanted: tuple[tuple[int, str], ...]  # (bytes, label)
    held: tuple[int, ...] = ()  # bytes in main memory of each existing and each requested arena
    device: str = ""  # the GPU for their memory; "" is main memory
    within_s: float = 0.0  # how long the requester waits; 0: the configured time


@dataclass(frozen=True, slots=True)
class WriteArena:
    """Write bytes at the start of an arena."""

    arena: int
    data: bytes


@dataclass(frozen=True, slots=True)
class SetPermit:
    """Let the target rank with this token serve until `until`, in monotonic seconds (0: not at all)."""

    slot: int
    token: int
    until: float


@dataclass(frozen=True, slots=True)
class CloseArena:
    """Close the daemon's descriptor of an arena."""

    arena: int


@dataclass(frozen=True, slots=True)
class SwitchArenas:
    """Exchange the daemon's descriptors of two arenas: afterwards each id refers to the other's memory file."""

    arena: int
    other: int


@dataclass(frozen=True, slots=True)
class RestartWorker:
    """Kill and reap a worker, then start a new one. Once this returns, the old process has ended."""

    worker: int


@dataclass(frozen=True, slots=True)
class Follow:
    """Handle this event next, after the instructions before this one."""

    event: Event


Instruction = (
    ToClient
    | ToCoordinator
    | ToWorker
    | MakeArenas
    | WriteArena
    | SetPermit
    | CloseArena
    | SwitchArenas
    | RestartWorker
    | Follow
    | Log
)
