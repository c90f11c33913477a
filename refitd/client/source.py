"""A trainer rank's registration: publish versions of its tensors, by snapshot or by lending."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from msgspec import structs

from refitd.client.aio import awaitable
from refitd.client.arguments import flag, seconds, whole
from refitd.client.connection import Connection
from refitd.client.given import refuse_all
from refitd.client.mxfp8 import SourceTensors
from refitd.client.reconnect import Give, Line, renumbered
from refitd.client.reentrant_lock import Turn, check_process
from refitd.client.rounding import offer_unrounded
from refitd.client.slots import SourceSlots
from refitd.copy_services.measure import Choice, allow_reader, choose, copy_seconds, sample
from refitd.describe.digests import tie_problems
from refitd.errors import DeadlineExceeded, RefitdError, RefusedError, TransportError, from_code
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.states import TransferMode

# How long a wait sleeps before it checks again.
WAKE_S = 0.5


class Source:
    """A source: this rank's registered shard of a model. Made by `Client.register_source`."""

    def __init__(
        self,
        line: Line,
        connection: Connection,
        model: str,
        tensors: SourceTensors,
        registered: local.SourceRegistered,
        slots: SourceSlots,
        pull: bool | None,
        closed: Callable[[Source], object] = lambda source: None,
    ) -> None:
        """`closed` is called when the source is closed."""
        self._line = line
        self._connection = connection
        self._failure: local.Failure | None = None  # why it could not be registered again
        self._pid = os.getpid()
        self._told = closed
        self._pulls = pull is True
        self._tensors = tensors
        self._slots = slots
        self._lending = None if pull is None else Choice(TransferMode.PULLED if pull else TransferMode.COPIED, "")
        if tensors.arena_places:
            self._lending = Choice(TransferMode.ARENA, "")
        if tensors.is_converted:
            self._lending = Choice(
                TransferMode.COPIED, "tensors that are offered in another type are converted when they are published"
            )
        self._is_measured = False
        self._leases: dict[int, Lease] = {}
        self._is_first = True
        self._is_anew = False  # whether tensors have been replaced since the last version
        self._turn = Turn(f"a version of {model!r} is being published")
        self._closed = False
        self._next_version = registered.next_version
        self.model = model
        self.member = registered.member
        self.run = registered.run  # identifies this incarnation of the trainer and its versions
        connection.listen(self.member, self._notified)

    def publish(self, version: int, *, lend: bool = False, timeout: float = 60.0) -> None:
        """Publish the tensors' current values as `version`; return once they may be mutated again.

        By default the values are copied into a slot, which takes about as long as a memcpy. With `lend`, and for
        tensors that live in an arena, this returns when a swap has read them, unless copying was found to be faster
        (see `lend`).

        The registered module or dict is read again: a replaced parameter (`load_state_dict(assign=True)`, `p.data =
        ...`) or dict entry is published if its shape, dtype and layout are those registered.

        Raises:
            RefusedError: the version is not newer than the last one, or a tensor is not as registered: missing, freed,
                of another shape or layout, or no longer in its arena. Names the tensor; nothing was published.
            DeadlineExceeded: every slot is still being read, or no swap read the lent version in time.
            TransportError: the daemon (PeerLost) or the coordinator is away, and not back in time.
        """
        version, timeout = whole("version", version), seconds("timeout", timeout)
        self._check_open()
        if flag("lend", lend) or not self._slots.arenas:
            with self.lend(version, timeout=timeout) as lease:
                lease.wait(timeout)
            return
        self._copy(version, timeout, "")

    publish_async = awaitable(publish)

    def lend(self, version: int, *, timeout: float = 60.0) -> Lease:
        """Publish the live tensors themselves; they must not change until the lease has ended.

        Use the lease as a context manager around the swap, or `wait` for another client's swap; leaving the context
        withdraws the version. Tensors outside arenas are copied into a slot instead if the workers may not read this
        process's memory, or read it clearly more slowly. Then `lending` is COPIED, the lease has ended at once, and
        the version stays.

        Raises:
            RefusedError: the version is not newer than the last one, the tensors cannot be pulled as requested, or one
                is not as registered (see `publish`).
            DeadlineExceeded: no slot became free in time.
            TransportError: as for `publish`.
        """
        version, timeout = whole("version", version), seconds("timeout", timeout)
        return self._line.lasting(timeout, lambda connection, left: self._lend_now(connection, version, left))

    def _lend_now(self, connection: Connection, version: int, timeout: float) -> Lease:
        self._check_open()
        if self._follow() and not self._pulls and self._is_measured:
            self._lending = None  # the measurement was of other memory
        choice = self._lending
        if choice is None:
            choice = self._lending = self._measured(connection, timeout)
            self._is_measured = True
        if choice.mode == TransferMode.COPIED:
            self._copy(version, timeout, choice.reason)
            return Lease(self, version, copied=True)
        addresses: tuple[int, ...] = ()
        if choice.mode == TransferMode.PULLED:
            addresses = self._tensors.addresses()
            allow_reader(connection.daemon.pid)
        self._tensors.settle()
        self._check_ties()
        self._tensors.check_still("while it was being lent")
        lease = Lease(self, version)
        self._leases[version] = lease
        before = self._slots.offered(version)
        try:
            message = local.Lend(
                member=self.member,
                version=version,
                addresses=addresses,
                reason=choice.reason,
                is_anew=self._is_anew,
            )
            connection.request(message, local.Done, timeout)
            self._is_first = self._is_anew = False
        except BaseException as exc:
            self._leases.pop(version, None)
            if isinstance(exc, RefusedError):
                self._slots.refused(before)
            raise
        self._next_version = max(self._next_version, version + 1)
        return lease

    def close(self) -> None:
        """End the registration and withdraw all its versions."""
        if self._closed:
            return
        connection, member = self._connection, self.member
        is_registered = bool(self._slots.arenas) or not self._tensors.is_converted
        self.release()
        self._told(self)
        if is_registered:
            self._line.deregister(connection, member)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Take over the new numbers of arenas that have been given to another daemon."""
        self._slots.message = structs.replace(self._slots.message, live=renumbered(self._slots.message.live, numbers))
        self._tensors.arena_places = renumbered(self._tensors.arena_places, numbers)

    def register_again(self, connection: Connection, give: Give, timeout: float) -> None:
        """Register over a new connection; raises RefitdError if that is refused, or the daemon is gone again."""
        registered = self._slots.register_again(connection, give, timeout)
        self._next_version = max(self._next_version, registered.next_version)
        self.member, self.run = registered.member, registered.run
        self._connection = connection  # last: whoever has read it before gets PeerLost, and does it again
        connection.listen(self.member, self._notified)

    def give_up(self, failure: local.Failure) -> None:
        """Take note that it could not be registered again."""
        self._failure = failure

    def arenas(self) -> set[int]:
        """Return the arenas from `allocate` that hold its tensors."""
        return {place.arena for place in self._tensors.arena_places}

    def release(self) -> None:
        """Drop the slots; nothing can be published afterwards."""
        self._connection.unlisten(self.member)
        self._slots.arenas = ()
        self._closed = True

    @property
    def next_version(self) -> int:
        """The lowest version that may be published: above the live one and all that this rank has published."""
        check_process(self._pid)
        return self._next_version

    @property
    def lending(self) -> TransferMode:
        """How lent versions travel; NONE until the first lend has decided it."""
        return TransferMode.NONE if self._lending is None else self._lending.mode

    def _copy(self, version: int, timeout: float, reason: str) -> None:
        tried: list[int] = []

        def copy(connection: Connection, left: float) -> None:
            self._check_open()
            # the daemon has ended over an earlier try, and the next one has been told of the finished slot
            if not tried or not self._slots.passed_on(version):
                tried.append(version)
                deadline = time.monotonic() + left
                offer_unrounded(self, connection, self._tensors.wire, self._tensors.widen, left)
                self._copy_now(connection, version, max(0.0, deadline - time.monotonic()), reason)

        with self._turn.taken(timeout):
            self._line.lasting(timeout, copy)

    def _copy_now(self, connection: Connection, version: int, timeout: float, reason: str) -> None:
        deadline = time.monotonic() + timeout
        member = self.member
        self._follow()  # before asking for a slot, because that drops an old version
        self._check_ties()
        begin = local.BeginPublish(member=member, version=version, timeout_s=timeout)
        # the daemon answers at its deadline; wait a little longer so that its reason arrives
        granted = connection.request(begin, local.SlotGranted, timeout + 2.0).slot
        try:
            slot = self._slots.granted(granted, connection)
            self._follow()  # again: tensors may have been replaced while waiting for the slot
            self._tensors.write_to(slot)
            self._tensors.settle()  # after Publish, workers read the slot and the trainer may mutate the tensors
            self._tensors.check_still("while it was copied")
        except BaseException:
            with contextlib.suppress(RefitdError):
                self._withdraw(version)  # gives the slot back
            raise
        done = local.Publish(member=member, version=version, slot=granted, reason=reason, is_anew=self._is_anew)
        self._next_version = max(self._next_version, version + 1)  # first: it may be published though no answer comes
        before = self._slots.offered(version, granted, slot)
        try:
            connection.request(done, local.Done, max(1.0, deadline - time.monotonic()))
        except RefitdError as exc:
            if exc.code in (
                RefusedError.code,
                TransportError.code,
            ):  # not PeerLost: the next daemon is told of the slot
                self._slots.refused(before, granted)
            raise
        self._is_first = self._is_anew = False

    def _follow(self) -> bool:
        is_anew = self._tensors.follow()
        self._is_anew = self._is_anew or is_anew
        return is_anew

    def _check_ties(self) -> None:
        """Refuse tensors that are declared tied but differ; each set of tensors is compared once."""
        if self._is_first or self._is_anew:
            self._tensors.settle()
            tensors = dict(zip(self._tensors.names, self._tensors.tensors, strict=True))
            refuse_all(tie_problems(self._tensors.metadata, tensors))

    def _measured(self, connection: Connection, timeout: float) -> Choice:
        """Choose pulling or copying by a measurement on samples of the tensors; the daemon reads them like a worker."""
        try:
            spans = sample(self._tensors.spans())
        except RefusedError as exc:
            return Choice(TransferMode.COPIED, str(exc).partition(";")[0])
        if not spans:
            return Choice(TransferMode.COPIED, "its tensors are empty")
        allow_reader(connection.daemon.pid)
        message = local.MeasurePull(member=self.member, spans=spans)
        pulled = connection.request(message, local.PullMeasured, timeout)
        return (
            Choice(TransferMode.COPIED, pulled.reason)
            if pulled.reason
            else choose(spans, pulled.seconds, copy_seconds(spans))
        )

    def _check_open(self) -> None:
        check_process(self._pid)
        if self._failure is not None:
            raise from_code(self._failure.code, self._failure.message)
        if self._closed:
            raise RefusedError(f"this source of model {self.model!r} is closed; register it again")

    def _withdraw(self, version: int) -> None:
        self._leases.pop(version, None)
        self._slots.withdrawn(version)
        self._connection.request(local.Withdraw(member=self.member, version=version), local.Done, 10.0)

    def _notified(self, message: Message) -> None:
        match message:
            case local.LeaseEnded(_, version, _):
                lease = self._leases.pop(version, None)
                if lease is not None:
                    lease._end(None)
            case local.Failure():
                leases, self._leases = self._leases, {}
                for lease in leases.values():
                    lease._end(message)


class _Event:
    """A threading.Event that a signal handler may use even if it has interrupted one of these calls."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock is reentrant; an Event's is not
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        with self._changed:
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        until = time.monotonic() + timeout
        while not self._is_set and (left := until - time.monotonic()) > 0:
            with self._changed:
                if not self._is_set:
                    self._changed.wait(min(left, WAKE_S))  # a handler may have set it just before the wait began
        return self._is_set


class Lease:
    """Live tensors lent as a version; they may be mutated once the lease has ended.

    If the tensors were copied instead, the lease has ended from the start.
    """

    def __init__(self, source: Source, version: int, *, copied: bool = False) -> None:
        self._source = source
        self._ended = _Event()
        self._failure: local.Failure | None = None
        self._copied = copied
        if copied:
            self._ended.set()
        self.version = version

    @property
    def has_ended(self) -> bool:
        """Whether the tensors may be mutated again."""
        check_process(self._source._pid)
        return self._ended.is_set()

    def wait(self, timeout: float) -> None:
        """Return when a swap has read the tensors, or at once if they were copied.

        Raises:
            DeadlineExceeded: no swap read them in time; the lease continues.
            RefitdError: the daemon has gone.
        """
        check_process(self._source._pid)
        if not self._ended.wait(seconds("timeout", timeout)):
            raise DeadlineExceeded(
                f"model {self._source.model!r} version {self.version} was lent, and no swap read it within "
                f"{timeout:.1f} s; start one (`refitctl swap`), set auto_swap, or publish a snapshot"
            )
        if self._failure is not None:
            raise from_code(self._failure.code, self._failure.message)

    def withdraw(self) -> None:
        """Withdraw the version unless a swap has read it; a swap that is reading it is aborted first."""
        if self._copied or not self._ended.is_set():
            self._source._withdraw(self.version)
            self._ended.set()

    def _end(self, failure: local.Failure | None) -> None:
        self._failure = failure
        self._ended.set()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        # a copied version stays for later swaps, unless the block raised
        if self._failure is None and not (self._copied and value is None):
            self.withdraw()


def check_slots(slots: int) -> int:
    """Return the number of slots as an int; raises RefusedError unless it is in 1..16."""
    slots = whole("slots", slots)
    if not 1 <= slots <= 16:
        raise RefusedError(f"slots must be 1..16, found {slots}; each takes the size of the shard")
    return slots
