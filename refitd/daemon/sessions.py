"""The connected clients of one node, and limits on each client's open requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from refitd.errors import RefusedError
from refitd.protocol import control, local
from refitd.protocol.roles import ALL_ROLES

# Limits for one client: requests that wait for the coordinator or for arenas, and registered ranks.
MAX_WAITING = 128
MAX_SESSION_MEMBERS = 4096

# Always allowed, even at the limit: they release things.
_ENDINGS = (
    local.Deregister
    | local.FreeArena
    | local.Withdraw
    | local.StepReached
    | local.CommitQuiet
    | local.CommitDone
    | local.CommitFailed
    | control.Controlled
    | local.Paused
    | local.LiveDigests
    | local.LiveCompared
)


@dataclass(slots=True)
class ClientSession:
    """One connected client."""

    id: int
    pid: int
    name: str
    roles: frozenset[str] = ALL_ROLES
    uid: int = -1
    leaves: bool = False  # it has said goodbye
    members: set[str] = field(default_factory=set)
    arenas: set[int] = field(default_factory=set)
    controllers: set[str] = field(default_factory=set)

    def check_room(self, message: local.ClientRequest, waiting: int) -> None:
        """Refuse a request beyond this client's limits; waiting requests take memory here.

        Raises:
            RefusedError: too many requests (`waiting`) are open, or too many ranks registered.
        """
        if isinstance(message, _ENDINGS):
            return
        if waiting >= MAX_WAITING:
            raise RefusedError(f"this client waits for {waiting} answers already, at most {MAX_WAITING}; wait for them")
        registers = isinstance(message, local.RegisterSource | local.RegisterTarget | control.RegisterController)
        if registers and (count := len(self.members) + len(self.controllers)) >= MAX_SESSION_MEMBERS:
            raise RefusedError(f"this client has {count} registrations already; close some first")
