"""Requests that wait for arenas or for the coordinator's answer: who asked, and why."""

from __future__ import annotations

from dataclasses import dataclass

from refitd.daemon.members import LocalMember
from refitd.daemon.target_state import Suspended, Woken, WokenEmpty
from refitd.protocol import cluster
from refitd.states import TransferMode

# --- for arenas -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClientArena:
    """An arena in which a client will keep its tensors."""


@dataclass(frozen=True, slots=True)
class MemberArenas:
    """The slots of a source, or the staging arena of a target.

    `is_admitted`: the coordinator would accept this rank, so retained targets may be freed for it.
    """

    member: LocalMember
    nbytes: int  # of each
    is_admitted: bool = False


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants that a plan fills paddings with."""

    plan: str
    loading: object  # identifies one attempt to load the plan
    data: bytes


@dataclass(frozen=True, slots=True)
class WantedArenas:
    """Arenas that a session waits for; session 0 is the daemon itself."""

    session: int
    request: int
    wanted: tuple[tuple[int, str], ...]  # (bytes, label)
    purpose: ClientArena | MemberArenas | Constants
    device: str = ""  # "" is main memory
    within_s: float = 0.0  # 0: the configured time


# --- for the coordinator's answer -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PassedOn:
    """A client's request, whose answer is passed on unchanged."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question to the coordinator: would it accept this rank, whose arenas need the memory of retained targets?"""

    wanted: WantedArenas
    purpose: MemberArenas


@dataclass(frozen=True, slots=True)
class Introduced:
    """A new rank; it is removed if the coordinator refuses it."""

    member: LocalMember
    arenas: tuple[int, ...]
    nbytes: int
    not_restored: str = ""  # why what its predecessor left is not given back


@dataclass(frozen=True, slots=True)
class Returned:
    """A target that has copied back what its predecessor held."""

    member: LocalMember
    uid: int


@dataclass(frozen=True, slots=True)
class Readmitted:
    """A rank that is registered again with a coordinator that restarted or lost this node."""

    member: LocalMember


@dataclass(frozen=True, slots=True)
class Slept:
    """A target that suspends, or wakes; its state changes once the coordinator agrees."""

    member: LocalMember
    event: Suspended | Woken | WokenEmpty


@dataclass(frozen=True, slots=True)
class ControllerIntroduced:
    """A replica controller, new or announced again; a new one is removed if the coordinator refuses it."""

    member: str


@dataclass(frozen=True, slots=True)
class Described:
    """A request that named a description; it is repeated with the description if the coordinator does not know it."""

    about: Asked | Introduced | Returned | Readmitted
    shard: cluster.AddShard


@dataclass(frozen=True, slots=True)
class Before:
    """The state of a source's newest version before the one being announced."""

    newest: int
    mode: TransferMode
    mode_reason: str


@dataclass(frozen=True, slots=True)
class Announced:
    """A version that a source published or lent; it is taken back if the coordinator refuses it."""

    member: LocalMember
    version: int
    before: Before


About = PassedOn | Asked | Introduced | Returned | Readmitted | Slept | ControllerIntroduced | Described | Announced


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for the coordinator's answer; session 0 is the daemon itself."""

    session: int
    request: int
    about: About
