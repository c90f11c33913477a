"""What a trainer holds: publish versions of its tensors, by snapshot or by lending them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType

from refitd.client.arguments import flag, seconds, whole
from refitd.client.connection import Connection
from refitd.client.devices import Arena
from refitd.client.given import refuse_all
from refitd.client.mxfp8 import SourceTensors
from refitd.client.reentrant_lock import Turn, check_process
from refitd.copy_services.measure import Choice, allow_reader, choose, copy_seconds, sample
from refitd.describe.digests import tie_problems
from refitd.errors import DeadlineExceeded, RefitdError, RefusedError, from_code
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.states import TransferMode

# A wait looks up this often.
WAKE_S = 0.5


class Source:
    """This rank's shard of a model, registered. Made by `Client.register_source`."""

    def __init__(
        self,
        connection: Connection,
        model: str,
        tensors: SourceTensors,
        registered: local.SourceRegistered,
        slots: tuple[Arena, ...],
        pull: bool | None,
        world_size: int = 1,
        closed: Callable[[Source], object] = lambda source: None,
    ) -> None:
        """`closed` is told when the registration has been taken back."""
        self._connection = connection
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
                TransferMode.COPIED, "tensors that are offered in MXFP8 are converted when they are published"
            )
        self._is_measured = False
        self._leases: dict[int, Lease] = {}
        self._is_first = True
        self._is_anew = False  # whether other tensors have been followed since the last version
        self._turn = Turn(f"a version of {model!r} is being published")
        self._closed = False
        self._next_version = registered.next_version
        self.model = model
        self.member = registered.member
        self.run = (
            registered.run
        )  # names this incarnation of the trainer; its versions are told apart from others' by it
        connection.listen(self.member, self._notified)

    def publish(self, version: int, *, lend: bool = False, timeout: float = 60.0) -> None:
        """Make the tensors' present values version `version`; return once they may be mutated again.

        By default they are copied into a snapshot slot, which takes about as long as a memcpy. With `lend`, and
        for tensors that live in an arena, this returns when a swap has read them, unless they were found to be
        better copied (see `lend`).

        What was registered is read again: a parameter that was assigned anew (`load_state_dict(assign=True)`,
        `p.data = ...`), or an entry of the dict that was bound anew, is what is published, if it has the shape, the
        type and the layout that were registered.

        Raises:
            RefusedError: the version is not newer than the last one, or a tensor is not what was registered: gone,
                freed, of another shape or layout, or no longer in its arena. Names the tensor; nothing was published.
            DeadlineExceeded: every snapshot slot is still being read, or nobody swapped the lent version in time.
        """
        version, timeout = whole("version", version), seconds("timeout", timeout)
        self._check_open()
        if flag("lend", lend) or not self._slots:
            with self.lend(version, timeout=timeout) as lease:
                lease.wait(timeout)
            return
        self._copy(version, timeout, "")

    def lend(self, version: int, *, timeout: float = 60.0) -> Lease:
        """Publish the live tensors themselves; they must not change until the lease has ended.

        Use it as a context manager around the swap, or `wait` for somebody else's; leaving the context takes the
        version back. Tensors outside arenas are copied into a snapshot slot instead where the workers may not read
        this process's memory or are clearly slower at it: `lending` says so, the lease has ended at once, and the
        version stays.

        Raises:
            RefusedError: the version is not newer than the last one, the tensors cannot be pulled as demanded, or one
                is not what was registered (see `publish`).
            DeadlineExceeded: no snapshot slot became free in time.
        """
        version, timeout = whole("version", version), seconds("timeout", timeout)
        self._check_open()
        if self._follow() and not self._pulls and self._is_measured:
            self._lending = None  # what was found of other memory says nothing of this
        choice = self._lending
        if choice is None:
            choice = self._lending = self._measured(timeout)
            self._is_measured = True
        if choice.mode == TransferMode.COPIED:
            self._copy(version, timeout, choice.reason)
            return Lease(self, version, copied=True)
        addresses: tuple[int, ...] = ()
        if choice.mode == TransferMode.PULLED:
            addresses = self._tensors.addresses()
            allow_reader(self._connection.daemon.pid)
        self._tensors.settle()
        self._check_ties()
        self._tensors.check_still("while it was being lent")
        lease = Lease(self, version)
        self._leases[version] = lease
        try:
            message = local.Lend(
                member=self.member,
                version=version,
                addresses=addresses,
                reason=choice.reason,
                is_anew=self._is_anew,
            )
            self._connection.request(message, local.Done, timeout)
            self._is_first = self._is_anew = False
        except BaseException:
            del self._leases[version]
            raise
        self._next_version = max(self._next_version, version + 1)
        return lease

    def close(self) -> None:
        """Take the registration and every version of it back."""
        if self._closed:
            return
        self.release()
        self._told(self)
        self._connection.request(local.Deregister(member=self.member), local.Done, 10.0)

    def arenas(self) -> set[int]:
        """Return the arenas of `allocate` that its tensors lie in."""
        return {place.arena for place in self._tensors.arena_places}

    def release(self) -> None:
        """Let go of the snapshot arenas; nothing can be published afterwards."""
        self._connection.unlisten(self.member)
        self._slots = ()
        self._closed = True

    @property
    def next_version(self) -> int:
        """The lowest version that may be published: above what was live, or was published by this rank before."""
        return self._next_version

    @property
    def lending(self) -> TransferMode:
        """How lent versions travel; NONE until the first lend has measured it."""
        return TransferMode.NONE if self._lending is None else self._lending.mode

    def _copy(self, version: int, timeout: float, reason: str) -> None:
        with self._turn.taken(timeout):
            self._copy_now(version, timeout, reason)

    def _copy_now(self, version: int, timeout: float, reason: str) -> None:
        deadline = time.monotonic() + timeout
        self._follow()  # before a slot is asked for, which lets go of an old version
        self._check_ties()
        begin = local.BeginPublish(member=self.member, version=version, timeout_s=timeout)
        # the daemon answers at its deadline; ours is a little later so that its reason arrives
        granted = self._connection.request(begin, local.SlotGranted, timeout + 2.0)
        try:
            self._follow()  # that may have taken its time
            self._tensors.write_to(self._slots[granted.slot])
            self._tensors.settle()  # once Publish has been sent the slot is read, and the tensors may be mutated
            self._tensors.check_still("while it was copied")
        except BaseException:
            with contextlib.suppress(RefitdError):
                self._withdraw(version)  # gives the slot back
            raise
        done = local.Publish(
            member=self.member, version=version, slot=granted.slot, reason=reason, is_anew=self._is_anew
        )
        self._next_version = max(self._next_version, version + 1)  # also where nobody says in time that it is published
        self._connection.request(done, local.Done, max(1.0, deadline - time.monotonic()))
        self._is_first = self._is_anew = False

    def _follow(self) -> bool:
        is_anew = self._tensors.follow()
        self._is_anew = self._is_anew or is_anew
        return is_anew

    def _check_ties(self) -> None:
        """Refuse tensors that are declared to be one weight and differ, where they have not been compared yet."""
        if self._is_first or self._is_anew:
            self._tensors.settle()
            tensors = dict(zip(self._tensors.names, self._tensors.tensors, strict=True))
            refuse_all(tie_problems(self._tensors.metadata, tensors))

    def _measured(self, timeout: float) -> Choice:
        """Choose between pulling and copying, on parts of these tensors; the daemon reads as its workers would."""
        try:
            spans = sample(self._tensors.spans())
        except RefusedError as exc:
            return Choice(TransferMode.COPIED, str(exc).partition(";")[0])
        if not spans:
            return Choice(TransferMode.COPIED, "its tensors are empty")
        allow_reader(self._connection.daemon.pid)
        message = local.MeasurePull(member=self.member, spans=spans)
        pulled = self._connection.request(message, local.PullMeasured, timeout)
        return (
            Choice(TransferMode.COPIED, pulled.reason)
            if pulled.reason
            else choose(spans, pulled.seconds, copy_seconds(spans))
        )

    def _check_open(self) -> None:
        check_process(self._pid)
        if self._closed:
            raise RefusedError(f"this source of model {self.model!r} is closed; register it again")

    def _withdraw(self, version: int) -> None:
        self._leases.pop(version, None)
        self._connection.request(local.Withdraw(member=self.member, version=version), local.Done, 10.0)

    def _notified(self, message: Message) -> None:
        match message:
            case local.LeaseEnded(_, version, _):
                lease = self._leases.pop(version, None)
                if lease is not None:
                    lease._end(None)
            case local.Failure():
                for lease in list(self._leases.values()):
                    lease._end(message)


class _Event:
    """A threading.Event that a signal handler may set, and wait for, while its thread is in one of these calls."""

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
                    self._changed.wait(min(left, WAKE_S))  # a handler may have set it just before
        return self._is_set


class Lease:
    """Live tensors lent as a version; they may be mutated once it has ended.

    One whose tensors have been copied has ended from the start.
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
        return self._ended.is_set()

    def wait(self, timeout: float) -> None:
        """Return when a swap has read the tensors, or at once where they have been copied.

        Raises:
            DeadlineExceeded: no swap read them in time; the lease goes on.
        """
        if not self._ended.wait(seconds("timeout", timeout)):
            raise DeadlineExceeded(
                f"model {self._source.model!r} version {self.version} was lent, and no swap read it within "
                f"{timeout:.1f} s; start one (`refitctl swap`), set auto_swap, or publish a snapshot"
            )
        if self._failure is not None:
            raise from_code(self._failure.code, self._failure.message)

    def withdraw(self) -> None:
        """Take the version back now, unless a swap has read it; one that is reading it is aborted first."""
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
        # a copy keeps: somebody's swap may want it later, unless this ended with an error
        if self._failure is None and not (self._copied and value is None):
            self.withdraw()


def check_slots(slots: int) -> int:
    """Return the number of snapshot slots; raises RefusedError when it is not 1..16."""
    slots = whole("slots", slots)
    if not 1 <= slots <= 16:
        raise RefusedError(f"slots must be 1..16, found {slots}; each takes the size of the shard")
    return slots
