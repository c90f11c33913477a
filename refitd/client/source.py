"""What a trainer holds: publish versions of its tensors, by snapshot or by lending them."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from refitd.client.connection import Connection
from refitd.client.devices import Arena
from refitd.client.mxfp8 import SourceTensors
from refitd.copy_services.measure import ARENA, COPIED, PULLED, Choice, allow_reader, choose, copy_seconds, sample
from refitd.errors import DeadlineExceeded, RefusedError, from_code
from refitd.protocol import local
from refitd.protocol.base import Message


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
    ) -> None:
        self._connection = connection
        self._tensors = tensors
        self._slots = slots
        self._lending = None if pull is None else Choice(PULLED if pull else COPIED, "")
        if tensors.arena_places:
            self._lending = Choice(ARENA, "")
        if tensors.is_converted:
            self._lending = Choice(COPIED, "tensors that are offered in MXFP8 are converted when they are published")
        self._leases: dict[int, Lease] = {}
        self._closed = False
        self.model = model
        self.member = registered.member
        connection.listen(self.member, self._notified)

    def publish(self, version: int, *, lend: bool = False, timeout: float = 60.0) -> None:
        """Make the tensors' present values version `version`; return once they may be mutated again.

        By default they are copied into a snapshot slot, which takes about as long as a memcpy. With `lend`, and
        for tensors that live in an arena, this returns when a swap has read them, unless they were found to be
        better copied (see `lend`).

        Raises:
            RefusedError: the version is not newer than the last one.
            DeadlineExceeded: every snapshot slot is still being read, or nobody swapped the lent version in time.
        """
        self._check_open()
        if lend or not self._slots:
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
            RefusedError: the version is not newer than the last one, or the tensors cannot be pulled as demanded.
            DeadlineExceeded: no snapshot slot became free in time.
        """
        self._check_open()
        choice = self._lending = self._lending or self._measured(timeout)
        if choice.way == COPIED:
            self._copy(version, timeout, choice.why)
            return Lease(self, version, copied=True)
        addresses: tuple[int, ...] = ()
        if choice.way == PULLED:
            addresses = self._tensors.addresses()
            allow_reader(self._connection.daemon.pid)
        self._tensors.settle()
        lease = Lease(self, version)
        self._leases[version] = lease
        try:
            message = local.Lend(member=self.member, version=version, addresses=addresses, why=choice.why)
            self._connection.request(message, local.Done, timeout)
        except BaseException:
            del self._leases[version]
            raise
        return lease

    def close(self) -> None:
        """Take the registration and every version of it back."""
        self.release()
        self._connection.request(local.Deregister(member=self.member), local.Done, 10.0)

    def release(self) -> None:
        """Let go of the snapshot arenas; nothing can be published afterwards."""
        self._connection.unlisten(self.member)
        self._slots = ()
        self._closed = True

    @property
    def lending(self) -> str:
        """How lent versions travel: "arena", "pulled" or "copied"; "" until the first lend has measured it."""
        return "" if self._lending is None else self._lending.way

    def _copy(self, version: int, timeout: float, why: str) -> None:
        deadline = time.monotonic() + timeout
        begin = local.BeginPublish(member=self.member, version=version, timeout_s=timeout)
        # the daemon answers at its deadline; ours is a little later so that its reason arrives
        granted = self._connection.request(begin, local.SlotGranted, timeout + 2.0)
        self._tensors.write_to(self._slots[granted.slot])
        self._tensors.settle()  # once Publish has been sent the slot is read, and the tensors may be mutated
        done = local.Publish(member=self.member, version=version, slot=granted.slot, why=why)
        self._connection.request(done, local.Done, max(1.0, deadline - time.monotonic()))

    def _measured(self, timeout: float) -> Choice:
        """Choose between pulling and copying, on parts of these tensors; the daemon reads as its workers would."""
        try:
            spans = sample(self._tensors.spans())
        except RefusedError as exc:
            return Choice(COPIED, str(exc).partition(";")[0])
        if not spans:
            return Choice(COPIED, "its tensors are empty")
        allow_reader(self._connection.daemon.pid)
        message = local.MeasurePull(member=self.member, spans=spans)
        pulled = self._connection.request(message, local.PullMeasured, timeout)
        return Choice(COPIED, pulled.reason) if pulled.reason else choose(spans, pulled.seconds, copy_seconds(spans))

    def _check_open(self) -> None:
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


class Lease:
    """Live tensors lent as a version; they may be mutated once it has ended.

    One whose tensors have been copied has ended from the start.
    """

    def __init__(self, source: Source, version: int, *, copied: bool = False) -> None:
        self._source = source
        self._ended = threading.Event()
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
        if not self._ended.wait(timeout):
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
    if not 1 <= slots <= 16:
        raise RefusedError(f"slots must be 1..16, found {slots}; each takes the size of the shard")
    return slots
