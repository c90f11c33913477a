"""NCCL: group calls of packed messages between GPUs, with digests computed on the device.

Some transports match operations by their order and run a group call as a whole (NCCL). Their ranks can wait for each
other in a circle unless all issue matching calls in one order. RoundsExchange therefore moves messages in symmetric
rounds: round k has the k-th message of every stream. Every message has a place that both its ends derive from its
number and their distance, and all ranks go through the places in this order:

    (number, class)     class = (distance - 1) // 128,  distance = (destination - source) mod size

A class has at most 128 sends and 128 receives on any rank, so a group call has at most 256 operations.

A failed communicator is never reused: its worker ends, and the next epoch makes a new one. torch's own watchdog may
end the process first, if NCCL itself reports an error.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Backend

from refitd.copy_services import MAX_MESSAGE_BYTES, Epoch
from refitd.copy_services.digests import Authenticator, DeviceDigests, Digest
from refitd.copy_services.packed import STAGING_BYTES, WINDOW, Move, PackedExchange
from refitd.copy_services.peers import Group, MailboxStore, Peers, first_line, prove
from refitd.copy_services.streams import InFlight
from refitd.copy_services.waits import Deadline, DeviceStream, bounded, make_current, poll
from refitd.errors import ConfigError, DeadlineExceeded, TransportError

MAX_OPERATIONS = 256
_CLASS = MAX_OPERATIONS // 2

Turn = tuple[int, bool]  # position of the peer; whether it is a send


def rounds(index: int, size: int, sends: Mapping[int, int], receives: Mapping[int, int]) -> Iterator[list[Turn]]:
    """Yield the turns of each group call; each turn is the next message of its stream.

    Args:
        index: this rank's position in its group.
        size: size of the group.
        sends: number of messages to each position, without this rank itself.
        receives: number of messages from each position.
    """
    classes: dict[int, list[tuple[Turn, int]]] = {}
    for is_send, counts in ((False, receives), (True, sends)):
        for position, count in counts.items():
            distance = (position - index if is_send else index - position) % size
            classes.setdefault((distance - 1) // _CLASS, []).append(((position, is_send), count))
    for number in range(max([*sends.values(), *receives.values()], default=0)):
        for _, members in sorted(classes.items()):
            if turns := [turn for turn, count in members if count > number]:
                yield turns


class RoundsExchange(PackedExchange):
    """The pipeline of packed.py with group calls instead of single messages; WINDOW calls are in flight."""

    @abstractmethod
    def _issue(self, flights: Sequence[InFlight], deadline: Deadline, subject: str) -> Any:
        """Start sending and receiving these buffers in one group call; return a handle for it.

        Raises:
            PeerLost: the transport refuses.
        """

    @abstractmethod
    def _is_over(self, issued: Any) -> bool:
        """Whether a group call has ended, well or not. Never waits."""

    @abstractmethod
    def _finish(self, issued: Any, deadline: Deadline, subject: str) -> None:
        """Complete a group call that has ended; work queued afterwards sees the buffers that it filled.

        Raises:
            PeerLost: it has failed.
        """

    def _working(self, deadline: Deadline) -> AbstractContextManager[object]:
        """Return a context for packing and unpacking; both are done when it ends."""
        return nullcontext()

    def _move(self, move: Move) -> str:
        """See PackedExchange._move."""
        by_turn = {(stream.position, stream.is_send): stream for stream in move.streams}
        counts = {turn: len(s.messages) + move.verify for turn, s in by_turn.items() if s.messages}
        calls = rounds(
            self.peers.index,
            len(self.peers),
            {position: count for (position, is_send), count in counts.items() if is_send},
            {position: count for (position, is_send), count in counts.items() if not is_send},
        )
        flying: deque[tuple[list[InFlight], str, Any]] = deque()

        def launch() -> None:
            turns = next(calls, ())
            flights = []
            for turn in turns:
                made = self._next_buffer(by_turn[turn], move.verify)
                assert made is not None  # there are as many turns as messages
                number, buffer, is_staged = made
                flights.append(InFlight(by_turn[turn], number, None, buffer, is_staged))
            if flights:
                subject = self._subject(flights)
                flying.append((flights, subject, self._issue(flights, move.deadline, subject)))

        arrived = 0
        with self._working(move.deadline):
            for _ in range(WINDOW):
                launch()
            trouble = move.meanwhile()
            while flying:
                flights, subject, issued = flying.popleft()
                poll(partial(self._is_over, issued), move.deadline, subject)
                self._finish(issued, move.deadline, subject)
                for flight in flights:
                    flight.passed()
                    if not flight.stream.is_send:
                        trouble = self._land(flight, move.verify) or trouble
                        arrived += flight.payload
                    if flight.is_staged:
                        self._give_back(flight.buffer)
                if move.on_progress is not None:
                    move.on_progress(arrived)
                launch()
        return trouble

    def _subject(self, flights: Sequence[InFlight]) -> str:
        """Name the participants of a group call, for errors."""
        positions = sorted({flight.stream.position for flight in flights})
        names = ", ".join(self.peers.label(position) for position in positions[:8])
        more = f" and {len(positions) - 8} more" if len(positions) > 8 else ""
        return f"{self.peers.label(self.peers.index)} exchanged no message {flights[0].number} with {names}{more}"


# An abort that takes longer is left to the end of the process.
_ABORT_S = 10.0
# Every run has its own deadline; torch's watchdog, which ends the process, must not act first.
_WATCHDOG = timedelta(days=1)


class NcclService(RoundsExchange):
    """Exchanges tensors over a process group with an nccl backend. See ExchangeService for its contract."""

    name = "nccl"
    # a GPU has no cache that steps should fit into, and fewer kernels are faster
    step_bytes = MAX_MESSAGE_BYTES

    def __init__(
        self,
        group: Group = None,
        *,
        device: torch.device | None = None,
        labels: tuple[str, ...] = (),
        message_bytes: int | None = None,
        staging_bytes: int = STAGING_BYTES,
        owns_group: bool = False,
        authenticator: Authenticator | None = None,
    ) -> None:
        """Use a group; None is the default group.

        Args:
            group: a torch process group with nccl for CUDA, or a ProcessGroupNCCL.
            device: the device of messages, by default the current CUDA device.
            labels: name of each position in errors, by default its rank.
            message_bytes: see PackedExchange.
            staging_bytes: see PackedExchange.
            owns_group: whether `close` aborts the group's communicators.
            authenticator: see Peers.

        Raises:
            ConfigError: the group has no nccl backend.
        """
        peers = Peers(group, labels)
        peers.authenticator = authenticator
        peers.device = device or torch.device("cuda", torch.cuda.current_device())
        super().__init__(peers, message_bytes=message_bytes, staging_bytes=staging_bytes)
        self._backend = _backend(self.group, self.device)
        self._owns_group = owns_group
        self._stream = DeviceStream(self.device)
        self._digests = DeviceDigests(self.device, authenticator)
        self._store: object = None

    def _working(self, deadline: Deadline) -> AbstractContextManager[object]:
        """See RoundsExchange._working."""
        return self._stream.work(deadline, self.peers.label(self.peers.index))

    def _issue(self, flights: Sequence[InFlight], deadline: Deadline, subject: str) -> Any:
        """See RoundsExchange._issue. NCCL's stream starts after the work queued on this service's stream."""
        backend = self._backend
        with self.peers.errors(deadline, subject):
            backend._start_coalescing()
            for flight in flights:
                step = backend.send if flight.stream.is_send else backend.recv
                step([flight.buffer], flight.stream.position, 0)
            return backend._end_coalescing()

    def _is_over(self, issued: Any) -> bool:
        """See RoundsExchange._is_over."""
        return bool(issued.is_completed())

    def _finish(self, issued: Any, deadline: Deadline, subject: str) -> None:
        """See RoundsExchange._finish. Without a timeout, torch's wait only makes this stream wait for NCCL's."""
        with self.peers.errors(deadline, subject):
            issued.wait()

    def _new_digest(self, about: bytes) -> Digest:
        return self._digests.new(about)

    def close(self) -> None:
        """See ExchangeService.close."""
        super().close()
        if not self._owns_group:
            return
        self._owns_group = False
        # an abort that hangs ends with the process, which is about to end
        with suppress(DeadlineExceeded, RuntimeError):
            bounded(self._backend.abort, Deadline.after(_ABORT_S), "aborting NCCL's communicators")


def join(epoch: Epoch) -> NcclService:
    """Join an epoch with new communicators, formed through the epoch's mailbox. Returns once all have joined.

    Raises:
        ConfigError: this worker has no CUDA device.
        DeadlineExceeded, PeerLost: a worker did not come; has its label. The process should end.
        TransportError: NCCL cannot run here; has NCCL's message.
    """
    device = torch.device(epoch.device)
    if device.type != "cuda":
        raise ConfigError(f"{epoch.labels[epoch.index]}: NCCL needs a CUDA device, this worker has {epoch.device!r}")
    deadline = Deadline.after(epoch.timeout)
    store = MailboxStore(epoch, deadline)

    def meet() -> NcclService:
        # wait for all workers first: making the communicator cannot be interrupted
        make_current(device)
        store.set(f"come/{epoch.index}", b"1")
        store.wait([f"come/{index}" for index in range(epoch.size)])
        options = ProcessGroupNCCL.Options()
        options._timeout = _WATCHDOG
        group = ProcessGroupNCCL(store, epoch.index, epoch.size, options)
        peers = Peers(group, epoch.labels)
        peers.device = device
        # NCCL's first call in a group makes communicators with every rank; later group calls may have only some
        authenticator = prove(peers, epoch, deadline)
        service = NcclService(
            group,
            device=device,
            labels=epoch.labels,
            staging_bytes=epoch.staging_bytes,
            owns_group=True,
            authenticator=authenticator,
        )
        store.formed()
        service._store = store  # torch's heartbeat thread calls it as long as the group lives
        return service

    device = make_current(device)
    from torch._C._distributed_c10d import ProcessGroupNCCL  # missing in a torch without CUDA

    try:
        return bounded(meet, deadline, f"{epoch.labels[epoch.index]}: meeting {', '.join(epoch.labels)} over NCCL")
    except RuntimeError as exc:
        if store.failure is not None:
            raise store.failure from exc
        what = first_line(exc)
        raise TransportError(
            f"{epoch.labels[epoch.index]} cannot meet {', '.join(epoch.labels)} over NCCL: {what}; "
            "NCCL_DEBUG=WARN makes it say more"
        ) from exc


def _backend(group: Any, device: torch.device) -> Any:
    """Return the backend for CUDA tensors of a group: the group itself if torch has not registered it."""
    try:
        backend = group if isinstance(group, Backend) else group._get_backend(device)
        name = backend.name()
    except RuntimeError:  # it has no backend for this device type
        name = "nothing"
    if name != "nccl":
        raise ConfigError(f"the group moves CUDA tensors with {name}, not nccl; make it with 'cpu:gloo,cuda:nccl'")
    return backend
