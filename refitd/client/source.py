"""A trainer rank's registration: publish versions of its tensors, by snapshot or by lending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from refitd.client.calls import Layout, awaitable, check_process, seconds, whole
from refitd.client.connection import Connection
from refitd.client.given import NONE, Keeps, Tensors, checked_part, refuse_all
from refitd.client.reconnect import Line, renumbered
from refitd.client.slot_source import TOLD_BYTES, Progress, SlotSource, Slotted, SourceSlots, register_slots
from refitd.client.source_tensors import MXFP8Offer, SourceCasts, SourceTensors
from refitd.describe.metadata import ParameterMetadata
from refitd.describe.names import tie_problems
from refitd.errors import DeadlineExceeded, RefusedError, from_code
from refitd.protocol import local
from refitd.protocol.base import Message
from refitd.protocol.shards import shard_of
from refitd.states import TransferMode
from refitd.text import shown

if TYPE_CHECKING:
    from refitd.client.client import Client

# How long a wait sleeps before it checks again.
WAKE_S = 0.5


class Source(SlotSource):
    """A source: this rank's registered shard of a model. Created by `Client.register_source`."""

    def __init__(
        self,
        line: Line,
        connection: Connection,
        model: str,
        tensors: SourceTensors,
        registered: local.Registered,
        slots: SourceSlots,
        closed: Callable[[Source], object] = lambda source: None,
    ) -> None:
        """`closed` is called when the source is closed."""
        self._tensors = tensors
        self._lends = bool(tensors.arena_places) and not tensors.is_converted
        self._leases: dict[int, Lease] = {}
        self._is_first = True
        self._is_anew = False  # whether tensors have been replaced since the last version
        super().__init__(line, connection, model, registered, slots, tensors.wire, closed)

    def publish(self, version: int, *, timeout: float = 60.0) -> None:
        """Publish the tensors' current values as `version`; return once they may be mutated again.

        The values are copied into a slot, which takes about as long as a memcpy. Tensors in an arena are lent instead:
        this call returns when a swap has read them.

        The registered module or dict is read again: a replaced parameter (`load_state_dict(assign=True)`, `p.data =
        ...`) or dict entry is published if its shape, dtype and layout match the registration.

        Raises:
            RefusedError: the version is not newer than the last one, or a tensor differs from its registration: it is
                missing, freed, has another shape or layout, or is no longer in its arena. The error names the tensor;
                the version is not published.
            DeadlineExceeded: every slot is still being read, or no swap read the lent version in time.
            TransportError: the daemon (PeerLost) or the coordinator was lost, and did not return in time.
        """
        version, timeout = whole("version", version), seconds("timeout", timeout)
        self._check_open()
        if self._lends:
            with self.lend(version, timeout=timeout) as lease:
                lease.wait(timeout)
            return
        with self._turn.taken(timeout):
            self._line.lasting(timeout, partial(self._copy_once, version, []))

    publish_async = awaitable(publish)

    def lend(self, version: int, *, timeout: float = 60.0) -> Lease:
        """Publish the live tensors themselves; they must not change until the lease has ended.

        Use the lease as a context manager around the swap, or `wait` for another client's swap; leaving the context
        withdraws the version. If the tensors are outside arenas, or are offered in another dtype, they are copied into
        a slot as by `publish`. The returned lease has then ended already, and the version stays published.

        Raises:
            RefusedError: the version is not newer than the last one, or a tensor differs from its registration (see
                `publish`).
            DeadlineExceeded: no slot became free in time.
            TransportError: as in `publish`.
        """
        version, timeout = whole("version", version), seconds("timeout", timeout)
        if not self._lends:
            self.publish(version, timeout=timeout)
            return Lease(self, version, copied=True)
        return self._line.lasting(timeout, lambda connection, left: self._lend_now(connection, version, left))

    def _lend_now(self, connection: Connection, version: int, timeout: float) -> Lease:
        self._check_open()
        self._tensors.check_no_capture(f"version {version} cannot be lent now")
        self._is_anew = self._tensors.follow() or self._is_anew
        self._tensors.settle()
        if self._is_first or self._is_anew:
            self._check_ties()
        self._tensors.check_still("while it was being lent")
        lease = Lease(self, version)
        self._leases[version] = lease
        before = self._slots.offered(version)
        try:
            message = local.Publish(member=self.member, version=version, is_anew=self._is_anew)
            connection.request(message, local.Done, timeout)
            self._is_first = self._is_anew = False
        except BaseException as exc:
            self._leases.pop(version, None)
            if isinstance(exc, RefusedError):
                self._slots.refused(before)
            raise
        self._next_version = max(self._next_version, version + 1)
        return lease

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """See SlotSource.renumber."""
        super().renumber(numbers)
        self._tensors.arena_places = renumbered(self._tensors.arena_places, numbers)

    def arenas(self) -> set[int]:
        """See SlotSource.arenas."""
        return {place.arena for place in self._tensors.arena_places}

    @property
    def lending(self) -> TransferMode:
        """How lent versions are transferred: ARENA, without a copy, or COPIED into a slot."""
        return TransferMode.ARENA if self._lends else TransferMode.COPIED

    def _copy_once(self, version: int, tried: list[int], connection: Connection, timeout: float) -> None:
        """Publish a copy over one connection; `tried` gets `version`, and is passed again with the next connection."""
        self._check_open()
        if self._tensors.gpus:
            self._tensors.check_no_capture(f"version {version} cannot be published now")
        if tried and self._slots.passed_on(version):
            return  # the daemon ended during an earlier try, and the next daemon already knows the finished slot
        tried.append(version)
        deadline = time.monotonic() + timeout
        self._offer_unrounded(connection, timeout)
        self._is_anew = self._tensors.follow() or self._is_anew  # before asking for a slot: that drops an old version
        if self._is_first or self._is_anew:
            self._check_ties()
        with self._filling(connection, version, max(0.0, deadline - time.monotonic())) as filling:
            # again: tensors may have been replaced while waiting for the slot
            self._is_anew = self._tensors.follow() or self._is_anew
            # tensors that were replaced are compared with the other ranks' first, once all is written
            is_told = not self._is_anew and filling.arena.nbytes >= TOLD_BYTES
            wrote = Progress(connection, version, filling, self._tensors.settle) if is_told else None
            self._tensors.write_to(filling.arena, wrote)
            self._tensors.settle()  # after Publish, workers read the slot and the trainer may mutate the tensors
            self._tensors.check_still("while it was copied")
        self._filled(connection, version, filling, max(1.0, deadline - time.monotonic()), is_anew=self._is_anew)
        self._is_first = self._is_anew = False

    def _widen(self, exact: Collection[str]) -> Sequence[ParameterMetadata]:
        return self._tensors.widen(exact)

    def _check_ties(self) -> None:
        """Refuse tensors that are declared tied but differ; needed for the first version and for replaced tensors."""
        self._tensors.settle()
        tensors = dict(zip(self._tensors.names, self._tensors.tensors, strict=True))
        refuse_all(tie_problems(self._tensors.metadata, tensors))

    def _withdraw(self, version: int) -> None:
        self._leases.pop(version, None)
        self._slots.withdrawn(version)
        self._connection.request(local.Withdraw(member=self.member, version=version), local.Done, 10.0)

    def _notified(self, message: Message) -> None:
        match message:
            case local.MayDrop(_, versions):
                for version in versions:
                    lease = self._leases.pop(version, None)
                    if lease is not None:
                        lease._end(None)
            case local.Failure():
                leases, self._leases = self._leases, {}
                for lease in leases.values():
                    lease._end(message)


class _Event:
    """A threading.Event that a signal handler may use even if it interrupts one of these methods."""

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

    If the tensors were copied instead, the lease has already ended when it is created.
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
        """Return when a swap has read the tensors; if they were copied, return immediately.

        Raises:
            DeadlineExceeded: no swap read them in time; the lease continues.
            RefitdError: the daemon was lost.
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
        # a copied version stays published for later swaps, unless the block raised
        if self._failure is None and not (self._copied and value is None):
            self.withdraw()


def register(
    client: Client,
    module_or_tensors: Tensors,
    layout: Layout,
    slotted: Slotted,
    mxfp8: MXFP8Offer | None,
    partial: bool | Sequence[str],
) -> Source:
    """Register a source; raises as `Client.register_source`."""
    layout, slots = layout.checked(), slotted.checked_slots()
    if mxfp8 is not None and not isinstance(mxfp8, MXFP8Offer):
        raise RefusedError(f"mxfp8 is {shown(mxfp8)}, expected an MXFP8Offer")
    part, elsewhere = checked_part("partial", partial), layout.world_size > 1
    left_out = NONE if isinstance(part, bool) else Keeps(part, all_but=True, elsewhere=elsewhere)
    tensors = SourceTensors(
        module_or_tensors,
        layout.rank,
        layout.metadata,
        layout.pg_collection,
        layout.num_experts,
        mxfp8,
        left_out,
        layout.names,
        SourceCasts(slotted.cast, elsewhere=elsewhere),
        elsewhere=elsewhere,
    )
    message = local.RegisterSource(
        model=slotted.model,
        rank=layout.rank,
        world_size=layout.world_size,
        shard=shard_of(tensors.wire, is_partial=part is not False),
        slots=slots,
        live=() if tensors.is_converted else client._live(tensors, may_flip=False),
        device=client._gpu_name(slotted.device, tensors),
        timeout_s=slotted.timeout,
    )
    connection, registered, made = register_slots(client, message)
    source = Source(client._connection, connection, slotted.model, tensors, registered, made, client._forget)
    client._add(source, connection)
    return source
