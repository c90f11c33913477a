"""The connected clients of one node, and what each may have under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from refitd.errors import RefusedError
from refitd.protocol import local
from refitd.protocol.roles import ALL_ROLES

# What one client may have waiting for the coordinator and for arenas, and how many ranks it may register.
MAX_WAITING = 128
MAX_SESSION_MEMBERS = 4096

# Whoever waits for much may still give things back.
_ENDINGS = (
    local.Deregister
    | local.FreeArena
    | local.Withdraw
    | local.StepReached
    | local.CommitQuiet
    | local.CommitDone
    | local.CommitFailed
    | local.Paused
    | local.LiveDigests
    | local.LiveCompared
)


@dataclass(slots=True)
class Session:
    """One connected client."""

    id: int
    pid: int
    name: str
    roles: frozenset[str] = ALL_ROLES
    uid: int = -1
    leaves: bool = False  # it has said goodbye
    members: set[str] = field(default_factory=set)
    arenas: set[int] = field(default_factory=set)

    def check_room(self, message: local.ClientRequest, waiting: int) -> None:
        """Refuse more of a client that has much under way: what waits for others is kept here.

        Raises:
            RefusedError: it waits for too many answers (`waiting` of them), or has too many registrations.
        """
        if isinstance(message, _ENDINGS):
            return
        if waiting >= MAX_WAITING:
            raise RefusedError(f"this client waits for {waiting} answers already, at most {MAX_WAITING}; wait for them")
        registers = isinstance(message, local.RegisterSource | local.RegisterTarget)
        if registers and len(self.members) >= MAX_SESSION_MEMBERS:
            raise RefusedError(f"this client has {len(self.members)} registrations already; close some first")
