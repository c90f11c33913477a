"""The connected clients of one node, limits on each, and the registrations that were refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from refitd.daemon.actions import Instruction, ToClient
from refitd.errors import DeadlineExceeded, PeerLost, RefusedError, TransportError
from refitd.protocol import local
from refitd.protocol.base import clipped
from refitd.protocol.reports import RefusedRegistration
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
    | local.CommitDone
    | local.CommitFailed
    | local.Controlled
    | local.LiveChecked
)


@dataclass(slots=True)
class ClientSession:
    """One connected client."""

    id: int
    pid: int
    name: str
    roles: frozenset[str] = ALL_ROLES
    uid: int = -1
    leaves: bool = False  # it has announced that it leaves
    members: set[str] = field(default_factory=set)
    arenas: set[int] = field(default_factory=set)
    controllers: set[str] = field(default_factory=set)

    def check_room(self, message: local.ClientRequest, waiting: int) -> None:
        """Refuse a request beyond this client's limits; waiting requests use the daemon's memory.

        Raises:
            RefusedError: too many requests (`waiting`) are open, or too many ranks registered.
        """
        if isinstance(message, _ENDINGS):
            return
        if waiting >= MAX_WAITING:
            raise RefusedError(f"this client waits for {waiting} answers already, at most {MAX_WAITING}; wait for them")
        registers = isinstance(message, local.RegisterSource | local.RegisterTarget | local.RegisterController)
        if registers and (count := len(self.members) + len(self.controllers)) >= MAX_SESSION_MEMBERS:
            raise RefusedError(f"this client has {count} registrations already; close some first")


MAX_REFUSED = 64

# How long an entry stays after the last try of a process that has closed its connection. Adapters try every 10 s.
STOPPED_S = 60.0

# Failures after which a client retries by itself: the daemon has no coordinator, or an answer was late.
_NO_REFUSALS = {TransportError.code, PeerLost.code, DeadlineExceeded.code}

_Key = tuple[str, str, int, int]  # model, replica ("" for a source), rank, pid


@dataclass(slots=True)
class _Refused:
    session: int
    name: str
    reason: str
    since: float
    last: float
    tries: int


class RefusedRegistrations:
    """A bounded table, filled from the daemon's answers to its clients."""

    def __init__(self, node: str, sessions: Mapping[int, ClientSession]) -> None:
        self._node = node
        self._sessions = sessions
        self.asked: dict[tuple[int, int], _Key] = {}  # (session, request) of registrations without an answer
        self._found: dict[_Key, _Refused] = {}

    def await_answer(
        self, session: ClientSession, request: int, message: local.RegisterSource | local.RegisterTarget
    ) -> None:
        """Remember a registration until it is answered."""
        replica = message.replica if isinstance(message, local.RegisterTarget) else ""
        self.asked[session.id, request] = (message.model, replica, message.rank, session.pid)

    def watch(self, done: Iterable[Instruction], now: float) -> bool:
        """Record the answers to registrations; return whether the table gained or lost an entry."""
        has_changed = False
        for instruction in done:
            if isinstance(instruction, ToClient):
                key = self.asked.pop((instruction.session, instruction.request), None)
                if key is not None:
                    has_changed |= self._answered(key, instruction, now)
        return has_changed

    def _answered(self, key: _Key, answer: ToClient, now: float) -> bool:
        model, replica, _, pid = key
        if not isinstance(answer.message, local.Failure):
            # The process is registered, under this name or another one.
            gone = [old for old in self._found if (old[0], not old[1], old[3]) == (model, not replica, pid)]
            for old in gone:
                del self._found[old]
            return bool(gone)
        if answer.message.code in _NO_REFUSALS:
            return False
        session = self._sessions.get(answer.session)
        name, reason = "" if session is None else session.name, clipped(answer.message.message)
        if (found := self._found.get(key)) is not None:
            found.session, found.name, found.reason, found.last = answer.session, name, reason, now
            found.tries += 1
            return False
        if len(self._found) >= MAX_REFUSED:
            del self._found[min(self._found, key=lambda one: self._found[one].last)]
        self._found[key] = _Refused(answer.session, name, reason, now, now, 1)
        return True

    def closed(self, session: int) -> None:
        """Forget the unanswered registrations of a session."""
        for asked in [asked for asked in self.asked if asked[0] == session]:
            del self.asked[asked]

    def expire(self, now: float) -> None:
        """Drop the entries of processes that have left and no longer retry."""
        for key, one in list(self._found.items()):
            if one.session not in self._sessions and now - one.last >= STOPPED_S:
                del self._found[key]

    def report(self, now: float) -> tuple[RefusedRegistration, ...]:
        """Return the table, ordered by the time of the first refusal."""
        return tuple(
            RefusedRegistration(
                model=model,
                replica=replica,
                rank=rank,
                node=self._node,
                pid=pid,
                name=one.name,
                reason=one.reason,
                since_s=max(0.0, now - one.since),
                last_s=max(0.0, now - one.last),
                tries=one.tries,
            )
            for (model, replica, rank, pid), one in sorted(self._found.items(), key=lambda item: item[1].since)
        )
