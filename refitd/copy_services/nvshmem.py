"""NVSHMEM: puts with signals between GPUs, polled by the host; agreements go over TCP.

SlottedExchange puts messages into slots of the peer and announces them by signals. A rank waits only for its peers.
Every ordered pair of ranks has WINDOW leaving slots in the sender's memory and WINDOW landing slots in the receiver's.
Message `number` of a pair, counted from the service's start, uses slot number % WINDOW of both. Two words track it.
Both count from 1; 0 means "never":

    arrived   at the receiver, set by the sender's put: 1 + the number of the message in the slot
    freed     at the sender, set by the receiver: 1 + the number of the last message taken out of the slot

Only one rank writes a slot's word and a slot holds one message at a time, so puts may arrive in any order. Slots are
numbered by the distance from sender to receiver, which both ends know.

nvshmem4py is loaded when a worker joins; its cu12 and cu13 builds have one module name. Only its unique id,
initialisation and a few host calls are used: puts and signals on a stream, but never a wait on a stream, nor a
collective while tensors move. So two PEs may share a GPU, and every wait has a deadline.

If a network card writes to a GPU's memory, the host may see a signal before the bytes that it announces, on machines
whose GPUs need a flush in between. NVSHMEM's own waits flush, this polling does not. Such a transfer fails its digest.
Between GPUs of one node there is no network card.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from refitd.buffers.cuda import tensor_at
from refitd.copy_services import MAX_MESSAGE_BYTES, Epoch, gloo
from refitd.copy_services.digests import DIGEST_BYTES, DeviceDigests, Digest
from refitd.copy_services.packed import WINDOW, Move, PackedExchange
from refitd.copy_services.peers import Peers
from refitd.copy_services.steps import SEND
from refitd.copy_services.streams import InFlight, Stream
from refitd.copy_services.waits import Backoff, Deadline, DeviceStream, bounded, make_current
from refitd.errors import ConfigError, RefitdError, TransportError


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The layout of slots and their words, the same on every rank.

    Attributes:
        size: number of ranks in the group.
        limit: bytes of a slot.
    """

    size: int
    limit: int

    @property
    def nbytes(self) -> int:
        """Bytes of all slots of a rank: first the landing slots, then the leaving slots."""
        return 2 * self._count * self.limit

    @property
    def words(self) -> int:
        """Number of words of a rank: `arrived` of each landing slot, then `freed` of each leaving slot."""
        return 2 * self._count

    @property
    def _count(self) -> int:
        return (self.size - 1) * WINDOW

    def _slot(self, source: int, target: int, number: int) -> int:
        return ((target - source) % self.size - 1) * WINDOW + number % WINDOW

    def landing(self, source: int, target: int, number: int) -> int:
        """Return the offset of a message's landing slot, at the target."""
        return self._slot(source, target, number) * self.limit

    def leaving(self, source: int, target: int, number: int) -> int:
        """Return the offset of a message's leaving slot, at the source."""
        return (self._count + self._slot(source, target, number)) * self.limit

    def arrived(self, source: int, target: int, number: int) -> int:
        """Return the index of a message's `arrived` word, at the target."""
        return self._slot(source, target, number)

    def freed(self, source: int, target: int, number: int) -> int:
        """Return the index of a message's `freed` word, at the source."""
        return self._count + self._slot(source, target, number)


def has_arrived(number: int, word: int) -> bool:
    """Whether message `number` is in its slot; `word` is the slot's `arrived` word."""
    return word == number + 1


def may_put(number: int, word: int) -> bool:
    """Whether the slot of message `number` is free: its predecessor was taken out. `word` is the `freed` word."""
    return word >= number + 1 - WINDOW


class SlottedExchange(PackedExchange):
    """The pipeline of packed.py over one-sided puts. A new service starts with all words 0 on all ranks."""

    def __init__(self, peers: Peers, *, message_bytes: int | None, staging_bytes: int) -> None:
        """See PackedExchange."""
        super().__init__(peers, message_bytes=message_bytes, staging_bytes=staging_bytes)
        self.slots = SlotLayout(len(peers), self._limit)
        self._put_count = [0] * len(peers)
        self._taken_count = [0] * len(peers)

    @abstractmethod
    def _room(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return part of this rank's slots as a uint8 tensor."""

    @abstractmethod
    def _put(self, position: int, leaving: int, landing: int, nbytes: int, word: int, value: int) -> None:
        """Copy from this rank's slots to another rank's; then set a word there."""

    @abstractmethod
    def _signal(self, position: int, word: int, value: int) -> None:
        """Set a word of another rank, after all work queued before."""

    @abstractmethod
    def _look(self) -> Sequence[int]:
        """Return this rank's words now. Work queued afterwards sees the messages that they announce."""

    def _working(self, deadline: Deadline) -> AbstractContextManager[object]:
        """Return a context for packing and unpacking; both are done when it ends."""
        return nullcontext()

    def _move(self, move: Move) -> str:
        """See PackedExchange._move."""
        left = {id(s): len(s.messages) + move.verify for s in move.streams if s.messages}
        waiting = [s for s in self._order(move.streams) if s.messages]
        found, arrived, pause = "", 0, Backoff()
        is_first = True
        with self._working(move.deadline):
            while waiting or is_first:
                words, moved = self._look(), False
                for stream in waiting:
                    step = self._leave if stream.is_send else self._take
                    for _ in range(WINDOW):
                        if not left[id(stream)] or (done := step(stream, words, move.verify)) is None:
                            break
                        nbytes, trouble = done
                        left[id(stream)] -= 1
                        arrived += nbytes
                        found = trouble or found
                        moved = True
                if is_first:
                    found, is_first = move.meanwhile() or found, False
                waiting = [s for s in waiting if left[id(s)]]
                if moved:
                    pause = Backoff()
                    if move.on_progress is not None:
                        move.on_progress(arrived)
                elif waiting:
                    pause.take(move.deadline, self._subject(waiting))
        return found

    def _leave(self, stream: Stream, words: Sequence[int], verify: bool) -> tuple[int, str] | None:
        """Put a stream's next message if its slot is free; return (0 bytes arrived, ""), or None if it is not."""
        me, target = self.peers.index, stream.position
        number = self._put_count[target]
        if not may_put(number, words[self.slots.freed(me, target, number)]):
            return None
        leaving = self.slots.leaving(me, target, number)
        made = self._next_buffer(stream, verify, self._room(leaving, self._limit))
        assert made is not None  # the caller has checked that messages are left
        _, buffer, is_staged = made
        if not is_staged:  # the digest
            self._room(leaving, buffer.numel()).copy_(buffer)
        landing, word = self.slots.landing(me, target, number), self.slots.arrived(me, target, number)
        stream.steps.time(SEND, self._put, target, leaving, landing, buffer.numel(), word, number + 1)
        self._put_count[target] += 1
        return 0, ""

    def _take(self, stream: Stream, words: Sequence[int], verify: bool) -> tuple[int, str] | None:
        """Take a stream's next message from its slot; return (bytes, error text), or None if it has not arrived."""
        me, source = self.peers.index, stream.position
        number = self._taken_count[source]
        if not has_arrived(number, words[self.slots.arrived(source, me, number)]):
            return None
        nth, stream.next = stream.next, stream.next + 1
        nbytes = stream.messages[nth].nbytes if nth < len(stream.messages) else DIGEST_BYTES
        buffer = self._room(self.slots.landing(source, me, number), nbytes)
        flight = InFlight(stream, nth, None, buffer, True)
        flight.passed()
        trouble = self._land(flight, verify)
        self._signal(source, self.slots.freed(source, me, number), number + 1)
        self._taken_count[source] += 1
        return flight.payload, trouble

    def _subject(self, waiting: Sequence[Stream]) -> str:
        """Name the ranks that are awaited, for errors."""
        told = [f"{'room at' if s.is_send else 'message from'} {self.peers.label(s.position)}" for s in waiting]
        more = f" and {len(told) - 8} more" if len(told) > 8 else ""
        return f"{self.peers.label(self.peers.index)} got no {', no '.join(told[:8])}{more}"


UNIQUE_ID_BYTES = 128
_WORD_BYTES = 8
_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Library:
    """nvshmem4py's public interface and the bindings below it; both untyped."""

    core: Any
    bindings: Any

    @property
    def set_signal(self) -> int:
        """The operation code that stores a signal."""
        return int(self.bindings.Signal_op.SIGNAL_SET)


def load() -> _Library:
    """Import nvshmem4py.

    Raises:
        ConfigError: it is not installed, or its library cannot be loaded.
    """
    # nvshmem4py searches its library only where this interpreter is installed, not on sys.path
    for folder in sys.path:
        path = os.path.join(folder, "nvidia", "nvshmem", "lib", "libnvshmem_host.so.3")
        if os.path.exists(path):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            break
    try:
        return _Library(importlib.import_module("nvshmem.core"), importlib.import_module("nvshmem.bindings"))
    except (ImportError, RuntimeError, OSError) as exc:
        raise ConfigError(
            f"nvshmem4py cannot be loaded: {exc}; install nvshmem4py-cu12 or -cu13, as torch needs, never both"
        ) from exc


def unique_id(library: _Library, data: bytes = b"") -> tuple[Any, bytes]:
    """Return the id that initialises all PEs of an epoch, and its bytes; a new id unless `data` is given."""
    made = library.core.get_unique_id(empty=bool(data))
    if data:
        if len(data) != UNIQUE_ID_BYTES:
            raise TransportError(f"an NVSHMEM id has {len(data)} bytes, expected {UNIQUE_ID_BYTES}; use one version")
        ctypes.memmove(made.ptr, data, UNIQUE_ID_BYTES)
    return made, ctypes.string_at(made.ptr, UNIQUE_ID_BYTES)


class NvshmemService(SlottedExchange):
    """Exchanges tensors through slots in symmetric memory. See ExchangeService for its contract."""

    name = "nvshmem"
    step_bytes = MAX_MESSAGE_BYTES

    def __init__(
        self,
        library: _Library,
        peers: Peers,
        device: torch.device,
        *,
        message_bytes: int | None = None,
        staging_bytes: int,
    ) -> None:
        """Allocate slots and words. Collective, and cannot be interrupted. NVSHMEM must be initialised.

        Args:
            library: NVSHMEM.
            peers: the PEs, for agreements in main memory.
            device: this PE's device.
            message_bytes: see PackedExchange.
            staging_bytes: see PackedExchange.

        Raises:
            TransportError: the device has too little memory.
        """
        super().__init__(peers, message_bytes=message_bytes, staging_bytes=staging_bytes)
        self.device = device
        self._library = library
        self._is_initialized = True
        self._stream, self._looks = DeviceStream(device), DeviceStream(device)
        self._digests = DeviceDigests(device, peers.authenticator)
        sizes = max(1, self.slots.nbytes), max(1, self.slots.words) * _WORD_BYTES
        self._slots_at, self._words_at = (self._allocate(size) for size in sizes)
        self._room_all = tensor_at(self._slots_at, sizes[0], device)
        self._words = tensor_at(self._words_at, sizes[1], device).view(torch.int64)
        # before any put: `join` synchronizes all PEs afterwards
        with self._stream.work(Deadline.after(_WAIT_S), f"{self.peers.label(self.peers.index)}: first words"):
            self._words.zero_()

    def _allocate(self, nbytes: int) -> int:
        address = int(self._library.bindings.malloc(nbytes))
        if not address:
            raise TransportError(
                f"{self.peers.label(self.peers.index)}: NVSHMEM has no {nbytes} bytes of symmetric memory; "
                "free memory of the GPU, or raise NVSHMEM_SYMMETRIC_SIZE if it is set"
            )
        return address

    def _working(self, deadline: Deadline) -> AbstractContextManager[object]:
        """See SlottedExchange._working."""
        return self._stream.work(deadline, self.peers.label(self.peers.index))

    def _room(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._room_all[offset : offset + nbytes]

    def _put(self, position: int, leaving: int, landing: int, nbytes: int, word: int, value: int) -> None:
        self._library.bindings.putmem_signal_on_stream(
            self._slots_at + landing,  # symmetric memory: the other PE's slots, by this PE's address
            self._slots_at + leaving,
            nbytes,
            self._words_at + word * _WORD_BYTES,
            value,
            self._library.set_signal,
            position,
            self._stream.handle,
        )

    def _signal(self, position: int, word: int, value: int) -> None:
        self._library.bindings.signal_op_on_stream(
            self._words_at + word * _WORD_BYTES, value, self._library.set_signal, position, self._stream.handle
        )

    def _look(self) -> Sequence[int]:
        with self._looks.queue():  # without waiting for queued copies
            words: list[int] = self._words.tolist()
        return words

    def _new_digest(self, about: bytes) -> Digest:
        return self._digests.new(about)

    def close(self) -> None:
        """See ExchangeService.close. Collective.

        Raises:
            TransportError: NVSHMEM cannot be finalized, because a transfer or another PE has failed. This process must
                end, since NVSHMEM starts only once in a process.
        """
        is_in_order = self.is_usable
        super().close()
        if not self._is_initialized:
            return
        self._is_initialized = False

        def finalize() -> None:
            make_current(self.device)
            for address in (self._words_at, self._slots_at):
                self._library.bindings.free(address)
            self._library.core.finalize()

        me = self.peers.label(self.peers.index)
        if not is_in_order:
            raise TransportError(f"{me} ends, because a transfer over NVSHMEM has failed")
        try:
            bounded(finalize, Deadline.after(_WAIT_S), "finalizing NVSHMEM")
        except Exception as exc:
            raise TransportError(f"{me} ends, because it cannot finalize NVSHMEM: {exc}") from exc


def join(epoch: Epoch) -> NvshmemService:
    """Join an epoch: initialise NVSHMEM with an id from the epoch's mailbox. Returns once all have joined.

    Raises:
        ConfigError: nvshmem4py is missing, or this worker has no CUDA device.
        DeadlineExceeded, PeerLost: a worker did not come; has its label. The process should end.
        TransportError: NVSHMEM cannot run here; it wrote the reason to stderr.
    """
    device, me = torch.device(epoch.device), epoch.labels[epoch.index]
    if device.type != "cuda":
        raise ConfigError(f"{me}: NVSHMEM needs a CUDA device, this worker has {epoch.device!r}")
    deadline = Deadline.after(epoch.timeout)
    library = load()
    device = make_current(device)
    torch.zeros(1, device=device)  # creates torch's context of the device, which NVSHMEM then uses
    met = gloo.join(epoch)
    key = "nvshmem/unique-id"
    if epoch.index == 0:
        made, data = unique_id(library)
        epoch.mailbox.put(key, data)
    else:
        made, _ = unique_id(library, epoch.mailbox.get(key, deadline.left().total_seconds()))

    def initialize() -> NvshmemService:
        make_current(device)
        library.core.init(uid=made, rank=epoch.index, nranks=epoch.size, initializer_method="uid")
        return NvshmemService(
            library,
            met.peers,
            device,
            staging_bytes=epoch.staging_bytes,
        )

    try:
        service = bounded(initialize, deadline, f"{me}: initialising NVSHMEM with {', '.join(epoch.labels)}")
    except RefitdError:
        raise
    except Exception as exc:  # NVSHMEM raises several types; their texts are only a number
        raise TransportError(
            f"{me} cannot initialise NVSHMEM: {exc}; stderr has its reason, and NVSHMEM_DEBUG=INFO makes it say more"
        ) from exc
    # no worker may put before the words of all workers are 0
    service.peers.first_trouble("", deadline, "initialising NVSHMEM")
    return service
