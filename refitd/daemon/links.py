"""What the daemon is connected to: the coordinator, with the requests and permits that it answers, and the clients.

Each client has a session, with limits. Registrations that were refused are stored for status.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from refitd.buffers.permits import SLOTS
from refitd.daemon.actions import Instruction, SetPermit, ToClient
from refitd.daemon.effects import About, Answered, Effects, Waiting
from refitd.daemon.members import LocalMember, PermitSlot
from refitd.errors import DeadlineExceeded, PeerLost, RefusedError, TransportError
from refitd.protocol import local
from refitd.protocol.base import Message, clipped
from refitd.protocol.keys import ALL_ROLES
from refitd.protocol.reports import RefusedRegistration, SwapProgress
from refitd.text import called

# The coordinator answers every update (one a second). After this long without a message it counts as lost.
COORDINATOR_SILENCE_S = 5.0


class CoordinatorLink:
    """Numbers requests and stores them until they are answered.

    If no coordinator answers, the answer is a note (`Answered`) with a failure.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._numbers = 0
        self.waiting: dict[int, Waiting] = {}  # by number
        self._heard = -1e9
        self._unreachable = ""  # the reason, if known
        self._has_left = False  # it announced its end
        self.now = 0.0
        self.boot = ""  # id of the coordinator's incarnation; "" until it welcomes this node

    @property
    def is_up(self) -> bool:
        """Whether a coordinator has sent a message lately; after COORDINATOR_SILENCE_S it counts as lost."""
        return bool(self.boot) and not self._has_left and self.now - self._heard < COORDINATOR_SILENCE_S

    @property
    def unheard_s(self) -> float:
        """Seconds since the last message of a coordinator; 0 while one answers."""
        return 0.0 if self.is_up else self.now - self._heard

    def heard(self) -> None:
        """Note that the coordinator sent a message."""
        self._heard, self._unreachable, self._has_left = self.now, "", False

    def left(self, effects: Effects, reason: str) -> None:
        """Treat a coordinator that announced its end as lost: fail its requests; seek a successor immediately."""
        self._unreachable, self._has_left = reason, True
        self.fail_all(effects, reason)

    def was_busy(self, seconds: float) -> None:
        """Exclude time during which this process was busy from the coordinator's silence."""
        self._heard = min(self.now, self._heard + seconds)

    def unreachable(self, reason: str) -> None:
        """Note why connecting failed."""
        self._unreachable = reason

    def check(self) -> None:
        """Raise TransportError if no coordinator answers."""
        if not self.is_up:
            raise TransportError(self._absence())

    def next_number(self) -> int:
        """Return a number that this daemon has not used for a request or registration."""
        self._numbers += 1
        return self._numbers

    def ask(self, effects: Effects, session: int, request: int, message: Message, about: About) -> None:
        """Send a request; without a coordinator, fail it immediately."""
        waiting = Waiting(session, request, about)
        if not self.is_up:
            effects.notes.append(Answered(waiting, _failed(self._absence())))
            return
        number = self.next_number()
        self.waiting[number] = waiting
        effects.say(message, number)

    def answered(self, request: int, message: Message) -> Waiting | None:
        """Return the request that the coordinator's message answers; it waits no longer, except after progress."""
        if isinstance(message, SwapProgress):
            return self.waiting.get(request)
        return self.waiting.pop(request, None)

    def unsent(self, effects: Effects, request: int, lost: bool) -> None:
        """Fail a request that did not fit in the queue to the coordinator, or whose connection is `lost`."""
        if (waiting := self.waiting.pop(request, None)) is not None:
            text = f"node {self._node}: too much waits to be sent to the coordinator; try again"
            failure = local.Failure(code=RefusedError.code, message=text)
            effects.notes.append(Answered(waiting, _failed(self._absence()) if lost else failure))

    def fail_all(self, effects: Effects, reason: str) -> None:
        """Fail all waiting requests, because the coordinator that received them is lost."""
        waiting, self.waiting = self.waiting, {}
        for one in waiting.values():
            effects.notes.append(Answered(one, _failed(reason)))

    def __len__(self) -> int:
        """Return how many requests are waiting."""
        return len(self.waiting)

    def _absence(self) -> str:
        reason = self._unreachable or "check that it runs, then try again"
        return f"node {self._node} has no coordinator at present; {reason}"


def _failed(reason: str) -> local.Failure:
    return local.Failure(code=TransportError.code, message=reason)


# Limit on stored round trips, one per second. The shortest is the most accurate; clocks drift, so old ones expire.
KEPT = 32

# Limit on stored heartbeats without an answer.
_MAX_SENT = 64


@dataclass(frozen=True, slots=True)
class Alignment:
    """The seconds to add to this clock to get the coordinator's, and the largest possible error."""

    offset_s: float
    error_s: float


class CoordinatorClock:
    """Compares two monotonic clocks. `alignment` is the best estimate; None before the first answer.

    A heartbeat is sent at `sent`. Its answer arrives at `now` and contains the coordinator's time `there`, which is
    between both. So the offset is `there - (sent + now) / 2`, with an error of at most half of the round trip.
    """

    def __init__(self) -> None:
        self._sent: dict[int, float] = {}
        self._found: deque[Alignment] = deque(maxlen=KEPT)
        self.alignment: Alignment | None = None  # the best of them

    def forget(self) -> None:
        """Drop all estimates: another coordinator answers, perhaps on another host."""
        self._found.clear()
        self.alignment = None

    def sent(self, number: int, now: float) -> None:
        """Record that a heartbeat was sent."""
        self._sent[number] = now
        if len(self._sent) > _MAX_SENT:
            del self._sent[next(iter(self._sent))]

    def heard(self, number: int, there: float, now: float) -> None:
        """Record the answer to a heartbeat."""
        since = self._sent.pop(number, None)
        if since is not None:
            self._found.append(Alignment(there - (since + now) / 2, (now - since) / 2))
            self.alignment = min(self._found, key=lambda found: found.error_s)


# Limit on stored heartbeats without an answer; the oldest are dropped.
MAX_SENT = 64


class Permits:
    """Allots permits and renews them.

    An answer proves only that this node was alive when it sent the heartbeat. So a permit's time starts when the
    heartbeat is sent, not when the answer arrives.

    A rank that the present coordinator has not admitted yet keeps the permit of the previous coordinator, but that
    permit is not extended. Before the present coordinator decides a swap, it waits until such permits expire or their
    ranks register.
    """

    def __init__(self, members: dict[str, LocalMember]) -> None:
        self._members = members
        self._lasts_s = 0.0  # duration of the lease granted by the coordinator
        self._until = 0.0
        self._sent: dict[int, float] = {}  # heartbeat number -> time sent
        self._free = list(range(SLOTS - 1, -1, -1))
        self._tokens = 0
        self._slots: dict[str, PermitSlot] = {}  # by member
        self._written: dict[str, float] = {}  # by member: the last deadline written
        self._admitted: set[str] = set()  # members that the present coordinator has admitted

    def sent(self, number: int, now: float) -> None:
        """Record that a heartbeat was sent."""
        self._sent[number] = now
        for old in list(self._sent)[:-MAX_SENT]:
            del self._sent[old]

    def answered(self, effects: Effects, number: int) -> None:
        """Extend all permits: the coordinator has answered a heartbeat."""
        since = self._sent.pop(number, None)
        if since is not None and self._lasts_s:
            self._until = max(self._until, since + self._lasts_s)
            for member in self._members.values():
                self.renew(effects, member)

    def granted(self, lasts_s: float) -> None:
        """Store the lease of a coordinator that accepted this node; it extends the permits of ranks that it admits."""
        self._lasts_s = lasts_s

    def admit(self, member: LocalMember) -> None:
        """Note that the present coordinator has admitted a rank."""
        self._admitted.add(member.id)

    def none_admitted(self) -> None:
        """Note that the present coordinator has admitted no rank yet."""
        self._admitted.clear()

    def has_admitted(self, member_id: str) -> bool:
        """Whether the present coordinator has admitted this rank."""
        return member_id in self._admitted

    def of(self, member_id: str) -> PermitSlot | None:
        """Return the slot of a rank, None if it has none."""
        return self._slots.get(member_id)

    def check_free(self) -> None:
        """Check that one more target rank can get a slot.

        Raises:
            RefusedError: all slots are taken.
        """
        if not self._free:
            raise RefusedError(f"this node has {SLOTS} registered target ranks already; close some first")

    def allot(self, effects: Effects, member: LocalMember) -> None:
        """Assign a free slot (see `check_free`) to a target rank, which may not serve yet."""
        self._tokens += 1
        self._slots[member.id] = PermitSlot(self._free.pop(), self._tokens)
        self._write(effects, member, 0.0)

    def withdraw(self, effects: Effects, member: LocalMember) -> None:
        """Revoke the permit of a rank that is no longer registered; its process may not serve."""
        self._admitted.discard(member.id)
        if member.id in self._slots:
            self._write(effects, member, 0.0)
            self._free.append(self._slots.pop(member.id).slot)
            self._written.pop(member.id, None)

    def refuse(self, effects: Effects, member: LocalMember) -> None:
        """Revoke the permit of a rank that the present coordinator has refused."""
        if member.id in self._slots:
            self._write(effects, member, 0.0)

    def renew(self, effects: Effects, member: LocalMember) -> None:
        """Write a rank's present permit."""
        if member.id not in self._slots:
            return
        written = self._written.get(member.id, 0.0)
        until = self._until if member.id in self._admitted else written
        if not member.state.may_serve:
            until = 0.0
        if until != written:
            self._write(effects, member, until)

    def _write(self, effects: Effects, member: LocalMember, until: float) -> None:
        permit = self._slots[member.id]
        self._written[member.id] = until
        effects.append(SetPermit(permit.slot, permit.token, until))


# --- sessions of clients ----------------------------------------------------------------------------------

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

    def own(self, members: Mapping[str, LocalMember], member_id: str) -> LocalMember:
        """Return a member of this session.

        Raises:
            RefusedError: it is not registered, or belongs to another session.
        """
        member = members.get(member_id)
        if member is None or member.session != self.id:
            raise RefusedError(f"{called(member_id)!r} is not a registration of this session; register again")
        return member

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
