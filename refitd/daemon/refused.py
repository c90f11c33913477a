"""Registrations that were refused: which processes of this node run without being refitted, since when and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from refitd.daemon.actions import Instruction, ToClient
from refitd.daemon.sessions import ClientSession
from refitd.errors import DeadlineExceeded, PeerLost, TransportError
from refitd.protocol import local
from refitd.protocol.base import clipped
from refitd.protocol.reports import RefusedRegistration

MAX_REFUSED = 64

# How long an entry stays after the last try of a process that has closed its connection. Adapters try every 10 s.
STOPPED_S = 60.0

# Failures after which a client tries again by itself: the daemon has no coordinator, or an answer was late.
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
        self._asked: dict[tuple[int, int], _Key] = {}  # (session, request) of registrations without an answer
        self._found: dict[_Key, _Refused] = {}

    def asked(self, session: ClientSession, request: int, message: local.RegisterSource | local.RegisterTarget) -> None:
        """Remember a registration until it is answered."""
        replica = message.replica if isinstance(message, local.RegisterTarget) else ""
        self._asked[session.id, request] = (message.model, replica, message.rank, session.pid)

    def watch(self, done: Iterable[Instruction], now: float) -> bool:
        """Note how registrations were answered; return whether the table has gained or lost an entry."""
        has_changed = False
        if self._asked:
            for instruction in done:
                if isinstance(instruction, ToClient):
                    key = self._asked.pop((instruction.session, instruction.request), None)
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
        for asked in [asked for asked in self._asked if asked[0] == session]:
            del self._asked[asked]

    def expire(self, now: float) -> None:
        """Drop the entries of processes that have left and no longer try."""
        for key, one in list(self._found.items()):
            if one.session not in self._sessions and now - one.last >= STOPPED_S:
                del self._found[key]

    def report(self, now: float) -> tuple[RefusedRegistration, ...]:
        """Return the table, the longest refused first."""
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
