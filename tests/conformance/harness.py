"""What the suite knows of backends: how each is made, given memory and transfers, and asked what it did.

A `World` is some processes with a source and a target arena each, and a service that moves between them:

    one-sided     process 0 maps all arenas and runs every transfer
    two-sided     process i maps its own arenas, joins an epoch with the others and runs its halves

One more process, the last one, lends its memory, and writes where it should not when a test asks for that. It stands
for a client, and may be killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from refitd.addressing.between_nodes import TransferList
from refitd.addressing.copies import CopyList
from refitd.addressing.places import PROCESS_MEMORY
from refitd.buffers import arena as memory
from refitd.buffers.arena import MappedArena
from refitd.copy_services.base import Capabilities
from refitd.copy_services.epoch import Epoch
from refitd.copy_services.registry import Backend, installed
from refitd.describe.casts import cast_number
from refitd.errors import TransportError
from tests.conformance.crew import Crew, Mailroom
from tests.conformance.transfers import SIZES, Place, Plan, Transfer, performed, put_numbers

if TYPE_CHECKING:
    import torch

    from refitd.copy_services.exchange import ExchangeService
    from refitd.copy_services.pieces import Piece

ROOM = 2 << 20  # bytes of each arena
STAGING_BYTES = 512 << 10  # of each service; the largest transfers are larger
TIMEOUT_S = 20.0
LABELS = ("alpha", "beta", "gamma", "delta")
THREADS = 2  # of one-sided services

Lent = Mapping[int, tuple[int, int]]  # process whose source arena was copied -> pid and address of the copy


@dataclass(frozen=True)
class Contestant:
    """A backend, and where the tensors lie that it is given."""

    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"

    @property
    def capabilities(self) -> Capabilities:
        """What the registry says of it."""
        return _backend(self.backend).capabilities

    @property
    def is_shared(self) -> bool:
        """Whether any process reaches the tensors, as clients and their lent memory do."""
        return self.device == "cpu"

    @property
    def converts(self) -> bool:
        """Whether it converts numbers on the way."""
        return self.device == "cpu" or not self.capabilities.is_one_sided

    @property
    def takes_any_address(self) -> bool:
        """Whether elements may lie at addresses that are no multiples of them; torch's tensors may not."""
        return self.device == "cpu" or self.capabilities.is_one_sided

    def found(self) -> Backend:
        """Return it as the registry gives it."""
        return installed().find(self.backend)

    def missing(self) -> str:
        """Return why it cannot be tested here, or ""."""
        backend = _backend(self.backend)
        if missing := backend.missing():
            return missing
        if backend.mapped is None and backend.join is None:
            return f"{self.backend} can neither be made for arenas nor join an epoch; this suite needs one of them"
        if self.device not in ("cpu", "cuda"):
            return f"this suite has no memory on {self.device}; add it to tests/conformance/harness.py"
        if self.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                return "no CUDA device on this machine"
        return ""


def contestants() -> list[Contestant]:
    """Return every installed backend, once for each kind of memory that it says it takes."""
    return [
        Contestant(backend.name, device) for backend in installed() for device in sorted(backend.capabilities.devices)
    ]


@dataclass(frozen=True)
class Orders:
    """How a plan is to be run, and what goes wrong in it.

    Attributes:
        verify: whether what was written is compared with what was read.
        timeout: seconds.
        refuse: what stands in the way; two-sided services only.
        loses: whether what arrives is not written; two-sided services only.
        kill_at: the process kills itself when it is told of so many bytes.
        stop_at: likewise, it stops itself once, until somebody sends SIGCONT.
        raise_at: on_progress raises when it is told of so many bytes.
        pause_s: seconds that on_progress takes.
        linger_s: after an error, how long to look for bytes that are still written.
        fails_to_finish: whether `finish` raises; two-sided services only.
        forgets_local_receive: whether the receives of what stays here are not noted; two-sided services only.
    """

    verify: bool = True
    timeout: float = TIMEOUT_S
    refuse: str = ""
    loses: bool = False
    kill_at: int | None = None
    stop_at: int | None = None
    raise_at: int | None = None
    pause_s: float = 0.0
    linger_s: float = 0.0
    fails_to_finish: bool = False
    forgets_local_receive: bool = False


@dataclass(frozen=True)
class Answer:
    """What one process says about one call.

    Attributes:
        error: name of the class that was raised, "" for none; `said` is its text, `kinds` are its base classes.
        seconds: that the call took.
        progress: what on_progress was told.
        received: bytes that came, by the service's own account; those that stayed are in `local`.
        copy: the row that DigestMismatch names.
        is_usable: whether the service may still be used.
        wrote_late: whether targets changed after the error had been raised.
    """

    error: str = ""
    said: str = ""
    kinds: tuple[str, ...] = ()
    seconds: float = 0.0
    progress: tuple[int, ...] = ()
    received: int = 0
    local: int = 0
    messages: int = 0
    staging_bytes: int = 0
    copy: int = -1
    is_usable: bool = True
    wrote_late: bool = False


@dataclass(frozen=True)
class Vitals:
    """What a process holds of the kernel."""

    descriptors: int
    threads: int
    resident_bytes: int


class Stop(Exception):
    """Raised by on_progress."""


def _backend(name: str) -> Backend:
    return next(backend for backend in installed() if backend.name == name)


# --- in the process that runs the tests ----------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of one run: answers by process, and what lay in the targets before, should, and does now.

    Of the targets these are the bytes that the plan has room in; behind them nothing has changed.
    """

    answers: dict[int, Answer]
    before: list[np.ndarray]
    wanted: list[np.ndarray]
    found: list[np.ndarray]

    @property
    def arrived(self) -> bool:
        """Whether every byte that was to be written was, and no other was."""
        return _equal(self.found, self.wanted)

    @property
    def untouched(self) -> bool:
        """Whether the targets are as they were."""
        return _equal(self.found, self.before)

    def errors(self) -> set[str]:
        """Return the names of what was raised, "" among them if some process succeeded."""
        return {answer.error for answer in self.answers.values()}


def _equal(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


class World:
    """`size` processes with arenas, one more that lends, and a service between them. See the module."""

    def __init__(self, contestant: Contestant, size: int = 3, room: int = ROOM) -> None:
        self.contestant = contestant
        self.size = size
        self.room = room
        self.lender = size if not contestant.capabilities.is_one_sided else 1
        self._random = np.random.default_rng(size)
        self._noise = self._random.integers(0, 256, 2 * room + 4099, dtype=np.uint8)
        self._ids = count()
        self.is_ready = False
        self.lenders_pid = 0
        self.crew = Crew(partial(Member, contestant.backend, contestant.device), self.lender + 1)
        self._descriptors: list[int] = []
        self._arenas: list[MappedArena] = []  # source and target of each process
        self._known: list[np.ndarray] = []  # what lies in them
        try:
            for number in range(2 * size):
                self._descriptors.append(memory.create(room, f"conformance{number}"))
                self._arenas.append(MappedArena(self._descriptors[-1], room, write=True))
                self._arenas[-1].bytes[:] = self._noise[:room]
                self._known.append(self._noise[:room].copy())
            for process in [*self.runners, self.lender]:
                self._equip(process)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes and give back all memory."""
        self.is_ready = False
        self.crew.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors, self._arenas = [], []

    @property
    def runners(self) -> list[int]:
        """The processes that run transfers."""
        return [0] if self.contestant.capabilities.is_one_sided else list(range(self.size))

    def _equip(self, process: int) -> None:
        """Map the arenas that a process needs; sources so that the kernel lets nobody write to them."""
        is_everywhere = process == self.lender or self.contestant.capabilities.is_one_sided
        for number, descriptor in enumerate(self._descriptors):
            if not is_everywhere and number // 2 != process:
                continue
            is_target = bool(number % 2)
            given = descriptor if is_target else memory.read_only(descriptor)
            self.crew.hand(process, given, "map", number, self.room, is_target)
            if given != descriptor:
                os.close(given)

    def replace(self, process: int) -> None:
        """Start a fresh process in the place of one that has ended."""
        self.crew.replace(process)
        self._equip(process)

    # --- epochs ---

    def new_epoch(self) -> str:
        """Return the name of an epoch that has not been yet."""
        return f"e{next(self._ids)}"

    def join(
        self,
        processes: Sequence[int] | None = None,
        *,
        epoch: str | None = None,
        staging: Mapping[int, int] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> dict[int, Answer]:
        """Have processes make their services: together, as an epoch of all runners, where they are two-sided.

        Args:
            processes: who comes, by default all runners.
            epoch: its name, by default a new one.
            staging: staging_bytes of some processes, where they are not STAGING_BYTES.
            timeout: seconds until joining ends.
        """
        self.tell_to_join(processes, epoch=epoch, staging=staging, timeout=timeout)
        answers: dict[int, Answer] = self.crew.collect(self.runners if processes is None else processes, timeout + 10)
        self.is_ready = not any(answer.error for answer in answers.values())
        return answers

    def tell_to_join(
        self,
        processes: Sequence[int] | None = None,
        *,
        epoch: str | None = None,
        staging: Mapping[int, int] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        """Do as `join`, without waiting for the answers."""
        name = epoch or self.new_epoch()
        for process in self.runners if processes is None else processes:
            bytes_there = (staging or {}).get(process, STAGING_BYTES)
            self.crew.tell(process, "join", name, len(self.runners), bytes_there, timeout)

    def leave(self) -> None:
        """Have all runners close their services."""
        for process in self.runners:
            self.crew.tell(process, "leave")
        self.crew.collect(self.runners, 20)

    # --- runs ---

    def lay(self, plan: Plan) -> None:
        """Fill what a plan may touch of every arena with noise."""
        assert plan.room <= self.room
        for arena in self._arenas:
            start = int(self._random.integers(0, len(self._noise) - plan.room))
            arena.bytes[: plan.room] = self._noise[start : start + plan.room]
        put_numbers(plan, self._sources, self._random)
        self._note(plan.room)

    def _note(self, room: int) -> None:
        for known, arena in zip(self._known, self._arenas, strict=True):
            known[:room] = arena.bytes[:room]

    @property
    def _sources(self) -> list[np.ndarray]:
        return [arena.bytes for arena in self._arenas[0::2]]

    @property
    def _targets(self) -> list[np.ndarray]:
        return [arena.bytes for arena in self._arenas[1::2]]

    def run(
        self,
        plan: Plan,
        orders: Orders | None = None,
        *,
        orders_of: Mapping[int, Orders] | None = None,
        plan_of: Mapping[int, Plan] | None = None,
        answering: Sequence[int] | None = None,
        during: Callable[[], object] | None = None,
        lender_dies: bool = False,
    ) -> Outcome:
        """Run a plan with fresh noise in the arenas; return once all who can answer have.

        Args:
            plan: the transfers.
            orders: how, by default as `Orders()` says.
            orders_of: orders of processes for which others count.
            plan_of: plans of processes that believe in another one.
            answering: who lives to answer, by default all runners.
            during: what is done while they run.
            lender_dies: whether it does, before anything is read from it.
        """
        self.lay(plan)
        lent = self.lend() if any(t.lent for t in plan.transfers) else {}
        if lender_dies:
            self.crew.kill(self.lender)
        before = [known[: plan.room].copy() for known in self._known[1::2]]
        self.tell_to_run(plan, lent, orders, orders_of, plan_of)
        if during is not None:
            during()
        self.is_ready = False
        timeout = max(o.timeout + o.linger_s for o in [orders or Orders(), *(orders_of or {}).values()]) + 20
        answers = self.crew.collect(self.runners if answering is None else answering, timeout)
        self.is_ready = all(answer.is_usable for answer in answers.values())
        held = self._known[0::2]
        assert _equal(self._sources, held), "a source has been written to"
        behind = [target[plan.room :] for target in self._targets]
        assert _equal(behind, [known[plan.room :] for known in self._known[1::2]]), "bytes behind the plan have changed"
        wanted = performed(plan, held, before)
        self._note(plan.room)
        return Outcome(answers, before, wanted, [target[: plan.room].copy() for target in self._targets])

    def prepare(self, plan: Plan, *, written: int | None = None) -> Answer:
        """Have a one-sided service prepare a plan; `written` is the number of an arena in the place of all targets."""
        self.lay(replace(plan, transfers=()))
        answer: Answer = self.crew.ask(0, "prepare", plan, written)
        return answer

    @property
    def untouched(self) -> bool:
        """Whether the targets are as they were before `prepare`."""
        return _equal(self._targets, self._known[1::2])

    def tell_to_run(
        self,
        plan: Plan,
        lent: Lent,
        orders: Orders | None = None,
        orders_of: Mapping[int, Orders] | None = None,
        plan_of: Mapping[int, Plan] | None = None,
    ) -> None:
        """Have all runners begin; nothing is waited for."""
        for process in self.runners:
            mine = (plan_of or {}).get(process, plan)
            how = (orders_of or {}).get(process, orders or Orders())
            self.crew.tell(process, "run", mine, lent, how)

    def lend(self) -> Lent:
        """Have the lender copy all source arenas into memory of its own; return where the copies lie."""
        found: dict[int, tuple[int, int]] = self.crew.ask(self.lender, "lend")
        self.lenders_pid = found[0][0]
        return found

    def run_one(self, process: int, plan: Plan) -> Answer:
        """Have one process run a plan that the others know nothing of."""
        answer: Answer = self.crew.ask(process, "run", plan, {}, Orders())
        return answer

    def still_is(self, outcome: Outcome) -> bool:
        """Whether the targets are as a run left them."""
        return _equal([target[: len(outcome.found[0])] for target in self._targets], outcome.found)

    def vitals(self) -> dict[int, Vitals]:
        """Return what every runner holds, once it has stayed the same for a moment: threads end when they like."""
        for process in self.runners:
            self.crew.tell(process, "vitals")
        return self.crew.collect(self.runners, 20)

    @contextlib.contextmanager
    def scribbling(self, process: int, start: int, end: int) -> Iterator[None]:
        """Have the lender write to part of a target, again and again."""
        self.crew.tell(self.lender, "scribble", 2 * process + 1, start, end)
        try:
            yield
        finally:
            self.crew.tell(self.lender, "nothing")
            self.crew.collect([self.lender], 10)
            self.crew.collect([self.lender], 10)


# --- in the processes of a world -----------------------------------------------------------------------------


class Member:
    """One process's arenas and service."""

    def __init__(self, backend: str, device: str, number: int, room: Mailroom) -> None:
        # two processes of one node may share its only GPU
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        os.environ.setdefault("NCCL_HOSTID", f"conformance{number}")
        self._number = number
        self._room = room
        self._backend = installed().find(backend)
        self._device = device
        self._arenas: dict[int, MappedArena] = {}
        self._private: list[np.ndarray] = []
        self._service: _OneSided | _TwoSided | None = None

    def map(self, number: int, nbytes: int, write: bool) -> None:
        """Map the arena whose descriptor comes with this call."""
        descriptor = self._room.take_descriptor()
        self._arenas[number] = MappedArena(descriptor, nbytes, write=write)
        os.close(descriptor)

    def nothing(self) -> None:
        """End a `scribble`."""

    def lend(self) -> dict[int, tuple[int, int]]:
        """Copy all sources into private memory; return pid and address of each copy."""
        self._private = [arena.bytes.copy() for number, arena in sorted(self._arenas.items()) if number % 2 == 0]
        return {process: (os.getpid(), copy.ctypes.data) for process, copy in enumerate(self._private)}

    def scribble(self, number: int, start: int, end: int) -> None:
        """Write to a part of an arena until something else is asked."""
        part = self._arenas[number].bytes[start:end]
        value = 0
        while not self._room.is_asked():
            for _ in range(50):
                part[:] = value = (value + 1) % 251

    def join(self, epoch: str, size: int, staging_bytes: int, timeout: float) -> Answer:
        """Make a service in the place of the one there is."""
        self.leave()
        started = time.monotonic()

        def make() -> Answer:
            if self._backend.mapped is not None:
                self._service = _OneSided(self._backend, self._arenas, self._device)
                return Answer()
            import torch

            torch.set_num_threads(1)
            assert self._backend.join is not None
            devices = self._backend.capabilities.devices
            on_device = "cuda" in devices and torch.cuda.is_available()
            service = self._backend.join(
                Epoch(
                    id=epoch,
                    index=self._number,
                    labels=LABELS[:size],
                    address="127.0.0.1",
                    staging_bytes=staging_bytes,
                    mailbox=self._room.mailbox(epoch),
                    timeout=timeout,
                    device=f"cuda:{self._number % torch.cuda.device_count()}" if on_device else "cpu",
                )
            )
            assert service.name == self._backend.name and service.capabilities == self._backend.capabilities
            self._service = _TwoSided(self._number, service, self._arenas, self._device)
            return Answer()

        answer = _answered(make)
        return replace(answer, seconds=time.monotonic() - started, is_usable=self._service is not None)

    def leave(self) -> None:
        """Close the service, twice: that is allowed."""
        service, self._service = self._service, None
        if service is not None:
            service.close()
            service.close()
            assert not service.is_usable

    def prepare(self, plan: Plan, written: int | None) -> Answer:
        """Make a plan ready without running it; see World.prepare."""
        assert isinstance(self._service, _OneSided)
        return _answered(partial(self._service.prepare, plan, {}, Orders(), written))

    def run(self, plan: Plan, lent: Lent, orders: Orders) -> Answer:
        """Make a plan ready and run it."""
        service = self._service
        assert service is not None
        told: list[int] = []
        started = time.monotonic()

        def on_progress(nbytes: int) -> None:
            told.append(nbytes)
            if orders.kill_at is not None and nbytes >= orders.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if (
                orders.stop_at is not None
                and nbytes >= orders.stop_at
                and not any(n >= orders.stop_at for n in told[:-1])
            ):
                os.kill(os.getpid(), signal.SIGSTOP)
            if orders.raise_at is not None and nbytes >= orders.raise_at:
                raise Stop(f"at {nbytes} bytes")
            if orders.pause_s:
                time.sleep(orders.pause_s)

        def run() -> Answer:
            service.prepare(plan, lent, orders)
            return service.run(orders, on_progress)

        seconds = 0.0

        def watch() -> bool:
            nonlocal seconds
            seconds = time.monotonic() - started
            before = self._targets()
            time.sleep(orders.linger_s)
            service.look_again()
            return self._targets() != before

        answer = _answered(run, watch)
        return replace(
            answer,
            seconds=seconds or time.monotonic() - started,
            progress=tuple(told),
            is_usable=service.is_usable,
        )

    def vitals(self) -> Vitals:
        """Return what this process holds, once threads have stopped ending."""
        threads, since = len(os.listdir("/proc/self/task")), time.monotonic()
        while time.monotonic() < since + 0.1:
            time.sleep(0.01)
            if len(os.listdir("/proc/self/task")) != threads:
                threads, since = len(os.listdir("/proc/self/task")), time.monotonic()
        assert threading.active_count() <= threads
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Vitals(len(os.listdir("/proc/self/fd")), threads, resident)

    def _targets(self) -> list[bytes]:
        return [arena.bytes.tobytes() for arena in self._arenas.values() if arena.writable]


def _answered(step: Any, watch: Any = None) -> Answer:
    """Return what a step answers, or what it raised; `watch` is called while the error is still held."""
    try:
        answer = step()
        return answer if isinstance(answer, Answer) else Answer()
    except Exception as exc:
        return Answer(
            error=type(exc).__name__,
            said=str(exc),
            kinds=tuple(kind.__name__ for kind in type(exc).__mro__),
            copy=getattr(exc, "copy", -1),
            wrote_late=bool(watch and watch()),
        )


class _OneSided:
    """Transfers as a CopyList between arenas that are all mapped here."""

    def __init__(self, backend: Backend, arenas: Mapping[int, MappedArena], device: str) -> None:
        assert backend.mapped is not None
        self._service = backend.mapped(THREADS)
        assert self._service.name == backend.name and self._service.capabilities == backend.capabilities
        self._on_device = None if device == "cpu" else _DeviceArenas(arenas)
        # what lies on a device, in arenas there, is what the service is given
        self._arenas: Any = arenas if self._on_device is None else self._on_device.mapped
        self.is_usable = True

    def prepare(self, plan: Plan, lent: Lent, orders: Orders, written: int | None = None) -> None:
        """See MappedCopyService.prepare."""
        if self._on_device is not None:
            self._on_device.upload()
        copies = copy_list(plan, lent)
        if written is not None:
            copies.dst_arena[:] = written
        self._job = self._service.prepare(copies, self._arenas)

    def run(self, orders: Orders, on_progress: Any) -> Answer:
        """See PreparedJob.run."""
        try:
            result = self._job.run(verify=orders.verify, on_progress=on_progress, timeout=orders.timeout)
        finally:
            self.look_again()
        return Answer(received=result.bytes, messages=result.copies, staging_bytes=result.staging_bytes)

    def look_again(self) -> None:
        """Have the arenas show what lies in the targets now."""
        if self._on_device is not None:
            self._on_device.download()

    def close(self) -> None:
        """See CopyService.close."""
        self._service.close()
        self.is_usable = False
        if self._on_device is not None:
            self._on_device.close()


class _DeviceArenas:
    """For each arena one of a GPU, which holds the same bytes before and behind a run."""

    def __init__(self, arenas: Mapping[int, MappedArena]) -> None:
        from refitd.buffers import cuda

        self._arenas = arenas
        self.mapped, self._written = {}, {}
        for number, arena in arenas.items():
            descriptor = cuda.create(arena.nbytes, f"conformance{number}")
            self.mapped[number] = cuda.MappedDeviceArena(descriptor, arena.nbytes, write=arena.writable)
            self._written[number] = cuda.MappedDeviceArena(descriptor, arena.nbytes, write=True)
            os.close(descriptor)

    def upload(self) -> None:
        """Copy every arena there."""
        import torch

        for number, arena in self._arenas.items():
            self._written[number].tensor.copy_(torch.from_numpy(arena.bytes.copy()))
        torch.cuda.synchronize()

    def download(self) -> None:
        """Copy targets back, and check that sources are as they were."""
        for number, arena in self._arenas.items():
            _compare_or_copy(self._written[number].tensor.cpu().numpy(), arena)

    def close(self) -> None:
        """Unmap all."""
        for mapped in (*self.mapped.values(), *self._written.values()):
            mapped.close()


def _compare_or_copy(found: np.ndarray, arena: MappedArena) -> None:
    if arena.writable:
        arena.bytes[: len(found)] = found
    else:
        assert np.array_equal(found, arena.bytes[: len(found)]), "a source has been written to"


class _TwoSided:
    """Transfers as halves that this process sends or receives."""

    def __init__(self, number: int, service: ExchangeService, arenas: Mapping[int, MappedArena], device: str) -> None:
        self._number = number
        self._service = service
        self._arenas = arenas
        self._device = device

    @property
    def is_usable(self) -> bool:
        """See ExchangeService.is_usable."""
        return self._service.is_usable

    def prepare(self, plan: Plan, lent: Lent, orders: Orders) -> None:
        """Note this process's halves, pieces first: none is noted if one cannot be made."""
        # on a device: the arenas' bytes, read there before the run and written back behind it
        self._on_device = None if self._device == "cpu" else _Uploaded(self._arenas, plan.room, self._device)
        noted = []
        for transfer in plan.transfers:
            for is_send, mine, other in (
                (True, transfer.source, transfer.target),
                (False, transfer.target, transfer.source),
            ):
                is_forgotten = orders.forgets_local_receive and not is_send and mine.process == other.process
                if mine.process == self._number and not is_forgotten:
                    piece, dtype = self._piece(transfer, is_send, lent)
                    if orders.loses and not is_send:
                        piece = _losing(piece)
                    noted.append((transfer, is_send, piece, dtype, self._service.ranks[other.process]))
        for transfer, is_send, piece, dtype, peer in noted:
            if is_send:
                self._service.send(transfer.task, piece, peer, part=transfer.part, dtype=dtype)
            else:
                self._service.receive(transfer.task, piece, peer, part=transfer.part)
        self._held = self._service.hold()

    def _piece(self, transfer: Transfer, is_send: bool, lent: Lent) -> tuple[torch.Tensor | Piece, Any]:
        if self._on_device is not None:
            import torch

            place, held = (transfer.source, transfer.held) if is_send else (transfer.target, transfer.dtype)
            return self._on_device.tensor(place, transfer.shape, held, is_send), getattr(torch, transfer.dtype)
        if 0 in transfer.shape:  # plans have none; the in-process library does
            import torch

            return torch.empty(transfer.shape, dtype=getattr(torch, transfer.dtype)), None
        from refitd.copy_services.arena_pieces import piece_of

        return piece_of(transfer_list(transfer, is_send, lent), 0, self._arenas), None

    def run(self, orders: Orders, on_progress: Any) -> Answer:
        """See ExchangeService.run."""

        def finish() -> None:
            if orders.fails_to_finish:
                raise ValueError("no room")

        try:
            result = self._service.run(
                orders.timeout,
                self._held,
                verify=orders.verify,
                refuse=orders.refuse,
                finish=finish,
                on_progress=on_progress,
            )
        finally:
            self.look_again()
        return Answer(
            received=result.received_bytes,
            local=result.local_bytes,
            messages=result.messages,
            staging_bytes=result.staging_bytes,
        )

    def look_again(self) -> None:
        """Have the arenas show what lies in the targets now."""
        if self._on_device is not None:
            self._on_device.download()

    def close(self) -> None:
        """See ExchangeService.close."""
        self._service.close()


class _Uploaded:
    """Arenas' first bytes in tensors on a device."""

    def __init__(self, arenas: Mapping[int, MappedArena], room: int, device: str) -> None:
        import torch

        self._arenas, self._room = arenas, room
        self._tensors = {n: torch.from_numpy(arena.bytes[:room].copy()).to(device) for n, arena in arenas.items()}

    def tensor(self, place: Place, shape: tuple[int, ...], dtype: str, is_source: bool) -> torch.Tensor:
        """Return a box as a tensor."""
        import torch

        element = SIZES[dtype]
        memory_there = self._tensors[2 * place.process + (not is_source)]
        assert place.offset % element == 0 and not any(stride % element for stride in place.strides)
        elements = memory_there[: self._room // element * element].view(getattr(torch, dtype))
        strides = [stride // element for stride in place.strides]
        return elements.as_strided(shape, strides, place.offset // element)

    def download(self) -> None:
        """Write targets back, and check that sources are as they were."""
        for number, arena in self._arenas.items():
            _compare_or_copy(self._tensors[number].cpu().numpy(), arena)


def _losing(piece: torch.Tensor | Piece) -> Piece:
    """Return a piece to which nothing is written."""
    import torch

    from refitd.copy_services.pieces import Piece, TensorPiece

    inner = TensorPiece(piece, piece.dtype) if isinstance(piece, torch.Tensor) else piece

    class Losing(Piece):
        nbytes = inner.nbytes
        itemsize = inner.itemsize
        describe = inner.describe
        pack = inner.pack

        def direct(self, start: int, end: int) -> torch.Tensor | None:
            return None

        def unpack(self, start: int, end: int, found: torch.Tensor) -> None:
            pass

    return Losing()


def _cast(transfer: Transfer) -> int:
    number = cast_number(transfer.held, transfer.dtype)
    if number is None:
        raise TransportError(f"there is no conversion from {transfer.held} to {transfer.dtype}")
    return number


def _column(values: Iterable[object]) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)


def copy_list(plan: Plan, lent: Lent) -> CopyList:
    """Return a plan as one-sided services take it; source arenas have even numbers, targets odd ones."""
    transfers = plan.transfers
    dims = max((len(t.shape) for t in transfers), default=0) or 1

    def box(values: tuple[int, ...], front: int) -> list[int]:
        return [front] * (dims - len(values)) + list(values)

    def table(rows: list[list[int]]) -> np.ndarray:
        return np.array(rows, dtype=np.int64).reshape(len(rows), dims)

    def source(transfer: Transfer) -> tuple[int, int, int]:
        place = transfer.source
        if not transfer.lent:
            return 2 * place.process, 0, place.offset
        pid, address = lent[place.process]
        return PROCESS_MEMORY, pid, address + place.offset

    return CopyList(
        size=table([box(t.shape, 1) for t in transfers]),
        element_size=_column(SIZES[t.dtype] for t in transfers),
        cast=_column(_cast(t) for t in transfers),
        src_arena=_column(source(t)[0] for t in transfers),
        src_pid=_column(source(t)[1] for t in transfers),
        src_offset=_column(source(t)[2] for t in transfers),
        src_stride=table([box(t.source.strides, 0) for t in transfers]),
        dst_arena=_column(2 * t.target.process + 1 for t in transfers),
        dst_offset=_column(t.target.offset for t in transfers),
        dst_stride=table([box(t.target.strides, 0) for t in transfers]),
        origin=_column(range(len(transfers))),
    )


def transfer_list(transfer: Transfer, is_send: bool, lent: Lent) -> TransferList:
    """Return one end of a transfer as workers take it."""
    place = transfer.source if is_send else transfer.target
    is_lent = is_send and transfer.lent
    pid, address = lent[place.process] if is_lent else (0, 0)
    return TransferList(
        is_send=_column([is_send]),
        peer=_column([(transfer.target if is_send else transfer.source).process]),
        task_id=_column([transfer.task]),
        part=_column([transfer.part]),
        size=np.array([transfer.shape or (1,)], dtype=np.int64),
        element_size=_column([SIZES[transfer.dtype]]),
        cast=_column([_cast(transfer) if is_send else 0]),
        arena=_column([PROCESS_MEMORY if is_lent else 2 * place.process + (not is_send)]),
        pid=_column([pid]),
        offset=_column([address + place.offset]),
        stride=np.array([place.strides or (0,)], dtype=np.int64),
        origin=_column([0]),
    )
