"""What waits for the coordinator's answer or for arenas: who asked, and what the answer is for."""

from __future__ import annotations

from dataclasses import dataclass

from refitd.daemon.members import LocalMember
from refitd.protocol import cluster
from refitd.states import TransferMode

# --- for arenas -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClientArena:
    """An arena that a client asked for, to keep its tensors in."""


@dataclass(frozen=True, slots=True)
class MemberArenas:
    """The snapshot slots of a source, or the staging arena of a target.

    `is_admitted`: the coordinator has said that it would take this rank, so that retained targets may make room for it.
    """

    member: LocalMember
    nbytes: int  # of each
    is_admitted: bool = False


@dataclass(frozen=True, slots=True)
class Constants:
    """What a plan fills paddings with."""

    plan: str
    loading: object  # identifies one attempt to load it
    data: bytes


@dataclass(frozen=True, slots=True)
class WantedArenas:
    """Arenas that somebody waits for; session 0 is the daemon itself."""

    session: int
    request: int
    wanted: tuple[tuple[int, str], ...]  # (bytes, label)
    purpose: ClientArena | MemberArenas | Constants
    device: str = ""  # "" is main memory
    within_s: float = 0.0  # 0: the configured time


# --- for the coordinator's answer -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PassedOn:
    """A client's request; the answer goes to the client as it is."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Whether the coordinator would take a rank in whose arenas fit only in place of retained targets."""

    wanted: WantedArenas
    purpose: MemberArenas


@dataclass(frozen=True, slots=True)
class Introduced:
    """A new rank; it ends if the coordinator refuses it."""

    member: LocalMember
    arenas: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Returned:
    """A target that has copied back what its predecessor held."""

    member: LocalMember
    uid: int


@dataclass(frozen=True, slots=True)
class Readmitted:
    """A rank that another coordinator, or another life of this one, is told of."""

    member: LocalMember


@dataclass(frozen=True, slots=True)
class Described:
    """One of these that named a description; it is sent again if the coordinator does not know that description."""

    about: Asked | Introduced | Returned | Readmitted
    shard: cluster.AddShard


@dataclass(frozen=True, slots=True)
class Before:
    """What a source said of its newest version before the one that is being announced."""

    newest: int
    mode: TransferMode
    mode_reason: str


@dataclass(frozen=True, slots=True)
class Announced:
    """A version that a source has published or lent; it is taken back if the coordinator refuses it."""

    member: LocalMember
    version: int
    before: Before


About = PassedOn | Asked | Introduced | Returned | Readmitted | Described | Announced


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for the coordinator's answer; session 0 is the daemon itself."""

    session: int
    request: int
    about: About
