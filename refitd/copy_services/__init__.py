"""The interface of copy services: the ways to move bytes between arenas and between processes.

This file is the whole interface for a backend of another package. refitd's own backends are one file each (shm, gloo,
nccl, nvshmem, nixl, cuda) and use no other interface.

A package offers a backend as an entry point of the group `refitd.copy_services`, which names a `Backend` or a function
that returns one. A Backend has a name, Capabilities, and at least one constructor. It implements one of two kinds:

    MappedCopyService    one-sided: one worker maps both ends and copies between them (shm, cuda)
    ExchangeService      two-sided: the workers of an epoch exchange messages (gloo, nccl, nvshmem, nixl)

refitd calls a service from one thread at a time, in this order:

    one-sided    mapped() or on_device(gpu)  ->  prepare(copies, arenas)  ->  job.run(...)   repeated
                 close() once the worker ends
    two-sided    join(epoch)  ->  send(...) and receive(...) per transfer  ->  hold()  ->  run(...)   repeated
                 close() at the end of the epoch, or after an error

A service may assume:

    - Arenas stay mapped from `prepare` or `send` until the job or the transfers are dropped.
    - Sources do not change while `run` runs, except for memory lent by a trainer, which verification then reports.
    - All workers of an epoch join it, note matching transfers, and call `run` equally often.

A service must:

    - check every range before it touches memory: plans come from other processes;
    - with `verify`, read the written bytes again and compare them with the source;
    - end every wait at its deadline, with an error that names the rank that did not answer;
    - write nothing after `run` has returned or raised;
    - pass on an exception of `on_progress` between two chunks: this is how a run is cancelled.

A two-sided backend does not write the agreement, packing, verification and errors itself. It derives from
`WindowExchange` and gives it its own `EpochPeers`, which send and receive single messages. (Other bases: messages in
ordered group calls, `nccl.RoundsExchange`; messages in slots at the receiver, `nvshmem.SlottedExchange`.) These names
load torch on first use:

    EpochPeers        the workers of an epoch: override `send`, `receive` and `wait`; `introduce` exchanges addresses
    WindowExchange    the pipeline over peers: packing, messages, digests, deltas, relays
    prove             authenticates the workers of an epoch over their peers
    Deadline, poll    the time at which every wait ends; wait until a condition holds

`refitd.testing.conformance` tests every backend that is installed. examples/copy_service is a complete package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from refitd.addressing.copies import CopyList
from refitd.buffers.arena import MappedArena
from refitd.copy_services.steps import StepTimes
from refitd.errors import TransportError

if TYPE_CHECKING:
    import torch

    from refitd.buffers.cuda import MappedDeviceArena
    from refitd.copy_services.epoch_peers import EpochPeers
    from refitd.copy_services.peers import prove
    from refitd.copy_services.pieces import Piece
    from refitd.copy_services.waits import Deadline, poll
    from refitd.copy_services.windows import WindowExchange

__all__ = [
    "DIRECT",
    "PACKED",
    "Backend",
    "Capabilities",
    "CopyService",
    "Deadline",
    "DigestMismatch",
    "Epoch",
    "EpochPeers",
    "ExchangeResult",
    "ExchangeService",
    "Mailbox",
    "MappedCopyService",
    "Posted",
    "PreparedJob",
    "Route",
    "RunResult",
    "Transfers",
    "WindowExchange",
    "poll",
    "prove",
]

# names that load torch, by module
_LOADED_ON_USE = {
    "Deadline": "waits",
    "EpochPeers": "epoch_peers",
    "WindowExchange": "windows",
    "poll": "waits",
    "prove": "peers",
}


def __getattr__(name: str) -> object:
    if name not in _LOADED_ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LOADED_ON_USE[name]}"), name)


class DigestMismatch(TransportError):
    """Written bytes differ from the source, by comparison or by digests. `copy` is the row of the CopyList."""

    code = "digest"

    def __init__(self, message: str, copy: int = -1) -> None:
        super().__init__(message)
        self.copy = copy


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a service.

    Attributes:
        is_one_sided: one process reaches both ends; otherwise both ends take part in every transfer.
        crosses_nodes: the ends may be on different machines.
        devices: types of the devices that tensors may be on, by torch's names.
        needs_contiguous: strided tensors are packed before sending and unpacked after.
        max_message_bytes: maximum size of a message; longer tensors are cut. None: no limit.
    """

    is_one_sided: bool
    crosses_nodes: bool
    devices: frozenset[str] = frozenset({"cpu"})
    needs_contiguous: bool = False
    max_message_bytes: int | None = None


# Maximum message, and the capabilities, of the services over packed.py, which load torch.
MAX_MESSAGE_BYTES = 8 << 20
PACKED = Capabilities(
    is_one_sided=False,
    crosses_nodes=True,
    devices=frozenset({"cpu", "cuda"}),
    needs_contiguous=True,
    max_message_bytes=MAX_MESSAGE_BYTES,
)


@dataclass(frozen=True)
class Backend:
    """One way to move bytes. Its dependencies are imported only when a service is made.

    Attributes:
        name: its name in configurations and errors.
        capabilities: see Capabilities.
        missing: returns "" if it can run here, else the missing dependency and the command that installs it.
        mapped: makes a one-sided service.
        on_device: makes a one-sided service for arenas of a GPU, by its number in this process.
        over_group: makes a two-sided service over a torch process group (None: the default group).
        join: makes a two-sided service by joining an epoch, with a new process group each time.
    """

    name: str
    capabilities: Capabilities
    missing: Callable[[], str]
    mapped: Callable[[], MappedCopyService] | None = None
    over_group: Callable[[Any], ExchangeService] | None = None
    join: Callable[[Epoch], ExchangeService] | None = None
    on_device: Callable[[int], MappedCopyService] | None = None


class CopyService(ABC):
    """One way to move bytes. Its creator closes it."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    @abstractmethod
    def close(self) -> None:
        """Release everything. The service cannot run afterwards. May be called again."""


# ---- one-sided services


@dataclass(frozen=True, slots=True)
class RunResult:
    """The counts of one run of a job."""

    copies: int
    bytes: int
    seconds: float
    staging_bytes: int = 0  # size of the service's own buffers
    crossed_bytes: int = 0  # received from other nodes
    delta_bytes: int = 0  # size of the pieces that travelled as deltas
    changed_bytes: int = 0  # changed bytes within these pieces
    steps: tuple[StepTimes, ...] = ()  # between nodes
    paths: tuple[str, ...] = ()  # within the node, by GPUs: names of refitd.addressing.paths


class Arriving(ABC):
    """Source arenas into which a client still writes the version that a run copies."""

    #: their ids
    arenas: frozenset[int]

    @abstractmethod
    def holds(self, arena: int, begin: int, end: int) -> bool:
        """Return whether these bytes of an arena are written."""

    @abstractmethod
    def wait(self, arena: int, begin: int, end: int) -> None:
        """Return once these bytes of an arena are written.

        Raises:
            DeadlineExceeded: they are not written before the run's deadline; names the rank that writes.
        """

    def await_all(self, reads: Iterable[tuple[int, int, int]]) -> None:
        """Return once all of (arena, first byte, byte behind the last) are written; other arenas are ignored."""
        for arena, begin, end in reads:
            if arena in self.arenas:
                self.wait(arena, begin, end)


class PreparedJob(ABC):
    """Copies prepared for a service: views built, addresses checked. May be run repeatedly."""

    def follow(self, arriving: Arriving | None) -> bool:
        """Return whether the next run copies each part of `arriving` once it is written; None: all is written.

        By default False: the run begins once everything is written.
        """
        return False

    @abstractmethod
    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """Perform every copy; return once all bytes are visible to every process that maps the destination.

        The sources must not change until this returns. `on_progress` gets the bytes written so far, at most every few
        milliseconds; if it raises, the run ends. `timeout` limits waits for other processes, in seconds.

        Raises:
            DigestMismatch: with `verify`, a copy's destination differs from its source, which is read again for this.
            PeerLost: a process whose memory is read has ended.
        """


class MappedCopyService(CopyService):
    """A one-sided service: copies between arenas that are mapped into one process."""

    @abstractmethod
    def prepare(self, copies: CopyList, arenas: Mapping[int, MappedArena]) -> PreparedJob:
        """Check that every copy stays inside its arenas, and build a job.

        Raises:
            TransportError: a copy leaves its arena, or this service cannot perform it.
        """


# ---- two-sided services: both ends note each transfer, then all ranks of a group run theirs together


class Mailbox(ABC):
    """Values that the workers of an epoch publish to each other, carried by daemons and the coordinator."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Publish a value to all other workers; each key is put once, by one worker."""

    @abstractmethod
    def get(self, key: str, timeout: float) -> bytes:
        """Wait for a value and return it.

        Raises:
            DeadlineExceeded: no worker put it within `timeout` seconds.
            PeerLost: the epoch was abandoned during the wait.
        """


@dataclass(frozen=True)
class Epoch:
    """One worker's part in an epoch: the workers that it exchanges with for one plan. Theirs may have other positions.

    Attributes:
        id: the epoch's id, never reused.
        index: this worker's position.
        labels: name of each position, for errors; their number is the epoch's size.
        address: this node's address, at which the other workers reach this one.
        device: the device of this worker's tensors, by torch's name.
        staging_bytes: limit on the service's buffers, equal on all workers.
        mailbox: how the workers find each other.
        timeout: seconds within which all must join.
        key: 32 bytes that only the epoch's workers, their daemons and the coordinator know.
        hops: the largest number of workers on one path, equal on all workers; 0: `size`.
        peers: the largest number of peers that a worker of the epoch has, equal on all workers; 0: `size` - 1.
    """

    id: str
    index: int
    labels: tuple[str, ...]
    address: str
    staging_bytes: int
    mailbox: Mailbox
    timeout: float
    key: bytes = field(repr=False)
    device: str = "cpu"
    hops: int = 0
    peers: int = 0

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.labels)


class Posted(Protocol):
    """A started send or receive of one message: what `send` and `receive` of peers return.

    Attributes:
        tensor: the message's bytes, or the place that gets them; keeps that memory alive.
    """

    tensor: torch.Tensor

    def abandon(self) -> None:
        """Drop it after a failed run. From now on the transport writes no byte to `tensor`."""


@dataclass(frozen=True, slots=True)
class ExchangeResult:
    """The counts of one run on this rank."""

    sent_bytes: int
    received_bytes: int
    local_bytes: int
    messages: int
    seconds: float
    staging_bytes: int = 0  # maximum size of the service's own buffers
    crossed_bytes: int = 0  # received from other ranks: `received_bytes`, or less if deltas were used
    delta_bytes: int = 0  # size of the pieces that were received as deltas
    changed_bytes: int = 0  # changed bytes within these pieces
    steps: tuple[StepTimes, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """The path that transfers follow over several ranks, and how many ranks have passed them on before.

    A rank sends the data that it receives on a path to the next rank of that path. All transfers of a path have one
    origin, and all its ranks note them in one order, with equal sizes. Path 0 is none: from one rank to another.
    """

    path: int = 0
    hop: int = 0


DIRECT = Route()


class Transfers:
    """Noted transfers, prepared for repeated runs. Made by `ExchangeService.hold`."""


class ExchangeService(CopyService):
    """One way to exchange tensors within a process group.

    A transfer's id is (task id, part); parts number the tensors of a task from 0. An id is used once per direction and
    run.
    """

    #: the torch process group whose ranks exchange
    group: Any
    #: its ranks, as parallel groups number them; they name peers
    ranks: tuple[int, ...]

    @property
    @abstractmethod
    def is_usable(self) -> bool:
        """Whether `run` may be called: False once closed, or after a transport error, which needs a new group."""

    @abstractmethod
    def send(
        self,
        task_id: int,
        data: torch.Tensor | Piece,
        peer: int,
        *,
        part: int = 0,
        dtype: torch.dtype | None = None,
        route: Route = DIRECT,
    ) -> None:
        """Note that `data` goes to rank `peer`; if that is this rank, to the receive with the same id.

        `data` is read during `run` and must not change until that returns. If `route` has hops before this rank, `data`
        is the destination of this rank's receive on the same path. `dtype` converts a tensor's elements in transit;
        None keeps them.

        Raises:
            TransportError: the service does not support paths.
        """

    @abstractmethod
    def receive(
        self, task_id: int, data: torch.Tensor | Piece, peer: int, *, part: int = 0, route: Route = DIRECT
    ) -> None:
        """Note that rank `peer` fills `data`, in the order of its elements.

        `data` may change at any time during `run`. It has the sent values once `run` has returned; after an error its
        content is undefined.
        """

    def use(self, arenas: Mapping[int, MappedArena | MappedDeviceArena]) -> None:
        """Note the arenas, by their ids, of the next run's pieces: a service may register them."""

    def let_go(self, arena: int) -> None:
        """Forget an arena that was used: its memory is about to be exchanged or unmapped."""

    @abstractmethod
    def hold(self) -> Transfers:
        """Return the transfers noted since the last run or `hold`, for repeated runs."""

    @abstractmethod
    def run(
        self,
        timeout: float,
        transfers: Transfers | None = None,
        *,
        verify: bool = True,
        refuse: str = "",
        finish: Callable[[], object] | None = None,
        on_progress: Callable[[int], None] | None = None,
        on_wrong_base: Callable[[], object] | None = None,
    ) -> ExchangeResult:
        """Run the given transfers, or else those noted since the last run, which are then forgotten. Collective.

        Every rank of the group must call it, even without transfers. All pairs of ranks first compare the sends of one
        with the receives of the other. Unless all agree, no data moves and every rank raises. When it returns on any
        rank, the destinations on every rank are complete.

        Args:
            timeout: seconds after which every wait of this run ends. Some waits end up to 5 % earlier: a rank that
                stops is then named by a rank that waits for it directly.
            transfers: the transfers to run; None runs the noted ones.
            verify: read the written data back, and compare its digest with the digest of the source. Must be equal on
                all ranks.
            refuse: if not empty, why this rank refuses; then no data moves and every rank raises it.
            finish: called on this rank once everything has arrived; if it raises, every rank raises.
            on_progress: gets the bytes that have arrived here after each message; if it raises, the run ends.
            on_wrong_base: called if this rank built wrong bytes from a delta and a base, one of which is wrong;
                no other rank knows yet that the run fails.

        Raises:
            RefusedError: a rank refuses, or the ends differ (names the first difference); tensors are unchanged.
            RefitFailed: everything arrived, but a rank could not finish.
            DigestMismatch: the written data differs from the source.
            DeadlineExceeded, PeerLost: names the rank that did not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Release every buffer, but not the group, which the caller owns. May be called again."""
