"""The results of handling one event: instructions, notes between components, and requests that await an answer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from refitd.buffers.layout import Spans, Written
from refitd.commit.target_state import Event, Suspended, Woken, WokenEmpty, step_of
from refitd.daemon.actions import Instruction, ToClient, ToCoordinator, ToWorker
from refitd.daemon.members import BaseVersion, LocalMember
from refitd.errors import IllegalTransition, RefitdError
from refitd.protocol import cluster, local, sidecar
from refitd.protocol.base import Message
from refitd.states import Log

# --- notes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """This node has failed a request to the coordinator."""

    waiting: Waiting
    reply: Message


@dataclass(frozen=True, slots=True)
class SeedOf:
    """A seed is compared with its digests for a swap that has read it."""

    swap: str


@dataclass(frozen=True, slots=True)
class BaseOf:
    """A base is compared with its digests, because a delta on it gave wrong bytes."""

    base: BaseVersion


@dataclass(frozen=True, slots=True)
class Proven:
    """A target's live version was compared with its digests; `wrong` names the difference, "" without one."""

    member: str
    purpose: SeedOf | BaseOf
    wrong: str


@dataclass(frozen=True, slots=True)
class RetainedCompared:
    """A returning rank's retained arena was compared with its digests."""

    session: int
    request: int
    about: Introduced
    found: cluster.MemberChecked


@dataclass(frozen=True, slots=True)
class SlotsFreed:
    """Slots of sources are no longer compared with newer versions."""


@dataclass(frozen=True, slots=True)
class Leaves:
    """A registration has ended: every component drops it. With `keep` its arenas are retained."""

    member: LocalMember
    reason: str
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Replace:
    """A worker must be replaced."""

    worker: int
    reason: str


Note: TypeAlias = Answered | Proven | RetainedCompared | SlotsFreed | Leaves | Replace


# --- effects ----------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Effects(list[Instruction]):
    """The instructions that result from one event, in order. Each component appends its own.

    Attributes:
        now: the time of the event, in monotonic seconds.
        notes: messages between components. The state handles them after the event, in order.
        moved: the targets whose state has changed. Their permits are renewed before any message is sent.
        is_news: whether to send this node's status to the coordinator after the event.
    """

    now: float
    notes: deque[Note] = field(default_factory=deque)
    moved: dict[str, LocalMember] = field(default_factory=dict)
    is_news: bool = False

    def say(self, message: Message, request: int = 0) -> None:
        """Send the coordinator a message; a non-zero `request` asks for an answer."""
        self.append(ToCoordinator(request, message))

    def tell(self, session: int, request: int, message: Message) -> None:
        """Answer a client's request; request 0 is a notification."""
        self.append(ToClient(session, request, message))

    def fail(self, session: int, request: int, error: RefitdError) -> None:
        """Answer a client's request with an error."""
        self.tell(session, request, local.Failure(code=error.code, message=str(error)))

    def order(self, worker: int, message: Message, arena: int | None = None, block: bytes | None = None) -> None:
        """Send a worker a message; see ToWorker."""
        self.append(ToWorker(worker, message, arena, block))

    def log(self, event: str, **fields: object) -> None:
        """Write a log line."""
        self.append(Log(event, fields))

    def move(self, member: LocalMember, event: Event) -> None:
        """Apply an event to a target's state.

        Raises:
            IllegalTransition: the event cannot happen now; the state is unchanged. The text includes the last events.
        """
        try:
            state = step_of(member.state, event)
        except IllegalTransition as exc:
            before = "; ".join(member.events()) or "none"
            raise IllegalTransition(f"{member.name}: {exc}; its last events: {before}") from None
        member.state = state
        member.history.append((event, state))
        self.moved[member.id] = member


# Ranges in one message to a worker: datagrams have a size limit.
MAX_SPANS = 2048


@dataclass(frozen=True, slots=True)
class Unwritten:
    """An arena that the client of `member` still writes a version into; `written` grows."""

    arena: int
    version: int
    member: str
    written: Written

    @property
    def named(self) -> sidecar.Unwritten:
        """It as a worker knows it."""
        return sidecar.Unwritten(self.arena, self.version, self.member)

    def tell(self, effects: Effects, worker: int, spans: Spans) -> None:
        """Tell a worker that these ranges are written."""
        for at in range(0, len(spans), MAX_SPANS):
            part = spans[at : at + MAX_SPANS]
            effects.order(worker, local.Wrote(self.member, self.version, part, self.arena))


# --- for arenas -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClientArena:
    """An arena for a client's tensors."""


@dataclass(frozen=True, slots=True)
class MemberArenas:
    """The slots of a source, or the staging arena of a target.

    `is_admitted`: the coordinator would accept this rank, so retained targets may be freed for it.
    """

    member: LocalMember
    is_admitted: bool = False


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants that a plan fills paddings with."""

    plan: str
    loading: object  # identifies one attempt to load the plan
    data: bytes


@dataclass(frozen=True, slots=True)
class WantedArenas:
    """Arenas for which a session waits; session 0 is the daemon itself."""

    session: int
    request: int
    wanted: tuple[tuple[int, str], ...]  # (bytes, label) of each
    purpose: ClientArena | MemberArenas | Constants
    device: str = ""  # "" is main memory
    within_s: float = 0.0  # 0: the configured time


# --- for the coordinator's answer -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PassedOn:
    """A client's request; the client receives the coordinator's answer unchanged."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question whether the coordinator would accept this rank; its arenas need the memory of retained targets."""

    wanted: WantedArenas
    purpose: MemberArenas


@dataclass(frozen=True, slots=True)
class Introduced:
    """A new rank; it is removed if the coordinator refuses it."""

    member: LocalMember
    arenas: tuple[int, ...]
    not_restored: str = ""  # why its predecessor's version is not restored


@dataclass(frozen=True, slots=True)
class Returned:
    """A target that has restored its predecessor's version."""

    member: LocalMember
    uid: int


@dataclass(frozen=True, slots=True)
class Readmitted:
    """A rank that is registered again with a coordinator that restarted or lost this node."""

    member: LocalMember


@dataclass(frozen=True, slots=True)
class Slept:
    """A target that suspends or wakes; its state changes once the coordinator agrees."""

    member: LocalMember
    event: Suspended | Woken | WokenEmpty


@dataclass(frozen=True, slots=True)
class ControllerIntroduced:
    """A replica controller, new or announced again; a new one is removed if the coordinator refuses it."""

    member: str


@dataclass(frozen=True, slots=True)
class Described:
    """A request that names a description; if the coordinator does not know it, send the request again with it."""

    about: Asked | Introduced | Returned | Readmitted
    shard: cluster.AddShard


@dataclass(frozen=True, slots=True)
class Announced:
    """A version that a source published or lent; it is withdrawn if the coordinator refuses it."""

    member: LocalMember
    version: int
    before: int  # its newest version before this one


About = PassedOn | Asked | Introduced | Returned | Readmitted | Slept | ControllerIntroduced | Described | Announced


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that awaits the coordinator's answer; session 0 is the daemon itself."""

    session: int
    request: int
    about: About
