"""The daemon's worker processes: start them, send to them without blocking, replace dead ones.

Each worker uses a GPU, the CPUs of its NUMA node, and a network card, read from sysfs. The card of a GPU has the
longest PCI path in common with it:

    GPU     0000:17:00.0    pci0000:16 / 16:00.0 / 17:00.0
    mlx5_0  0000:18:00.0    pci0000:16 / 16:00.0 / 18:00.0    two steps in common: this one
    mlx5_1  0000:3a:00.0    pci0000:39 / 39:00.0 / 3a:00.0    none

Of equally long ones the card on the GPU's NUMA node is closest, then the card that fewer workers use.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from refitd.buffers import handoff
from refitd.buffers.cuda_driver import Driver
from refitd.daemon.coordinator import pause_s
from refitd.errors import ArenaError, ConfigError, PeerLost, RefitdError
from refitd.protocol import sidecar
from refitd.protocol.base import Decoder, Message, encode
from refitd.protocol.reports import LaneStatus

# If a worker dies this often in a row, each time this soon after its start, it is restarted after a pause.
MAX_QUICK_DEATHS = 5
_QUICK_S = 2.0
_EXIT_S = 5.0  # for the exit of a worker that has closed its socket; then it is killed


@dataclass(slots=True)
class _Process:
    popen: subprocess.Popen[bytes]
    socket: socket.socket
    started: float
    outbox: deque[tuple[bytes, tuple[int, ...]]] = field(default_factory=deque)
    awaits_room: bool = False  # polling reports when its socket has room for the outbox
    lost: bool = False
    exit_fd: int = -1  # a pidfd, polled instead of the socket once the worker has closed that
    exits_by: float = 0.0


@dataclass(frozen=True, slots=True)
class Kit:
    """A worker's settings: variables for its libraries, and the CPUs that it may use, if not all.

    Workers of other nodes connect to `door`. The daemon keeps it, so a worker's successor listens there, too.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    cpus: Collection[int] = ()
    door: socket.socket | None = None


@contextlib.contextmanager
def _on(cpus: Collection[int]) -> Iterator[None]:
    """Have processes that this thread starts use only these CPUs, from their first instruction; () changes nothing."""
    before = os.sched_getaffinity(0)
    try:
        if cpus:
            with contextlib.suppress(OSError):  # the kernel or a control group does not allow it
                os.sched_setaffinity(0, cpus)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


class Workers:
    """A fixed number of worker processes, each replaced when it dies.

    Attributes:
        fds: descriptor -> worker.
        down: workers that are down -> time of their next start.
    """

    def __init__(self, kits: Sequence[Kit], on_change: Callable[[int, int], None]) -> None:
        """Start a worker for each kit; `on_change(fd, events)` requests polling of a descriptor (0: stop polling)."""
        self._on_change, self._kits = on_change, kits
        count = len(kits)
        self._decoder: Decoder[sidecar.FromWorker] = Decoder(sidecar.FromWorker, handoff.MAX_DATAGRAM)
        self._quick_deaths = [0] * count
        self._how = [""] * count  # how the last process of each worker ended
        self.down: dict[int, float] = {}
        self.fds: dict[int, int] = {}
        self._has_worked = False
        self._processes: list[_Process] = [self._spawn(worker) for worker in range(count)]

    def send(self, worker: int, message: Message, fd: int | None = None, block: bytes | None = None) -> None:
        """Queue a message with a duplicate of `fd`, or with `block` in a memory file.

        Raises:
            OSError: no descriptor or no memory is left; the message was not queued.
        """
        process = self._processes[worker]
        fds: tuple[int, ...] = ()
        if fd is not None:
            fds = (os.dup(fd),)
        elif block is not None:
            fds = (_memory_file(block),)
        process.outbox.append((encode(0, message), fds))
        self.flush(worker)

    def flush(self, worker: int) -> None:
        """Send queued messages until the socket is full; the rest is sent when polling reports room."""
        process = self._processes[worker]
        while process.outbox and not process.lost:
            data, fds = process.outbox[0]
            try:
                process.socket.sendmsg(
                    [data],
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(f.to_bytes(4, sys.byteorder) for f in fds))]
                    if fds
                    else [],
                    socket.MSG_NOSIGNAL,
                )
            except BlockingIOError:
                break
            except OSError:
                break  # the worker has died; polling its socket reports that
            if fds:
                handoff.close_all(fds)
            process.outbox.popleft()
        if not process.lost and process.exit_fd < 0 and bool(process.outbox) != process.awaits_room:
            process.awaits_room = bool(process.outbox)
            self._on_change(process.socket.fileno(), select.POLLIN | (select.POLLOUT if process.outbox else 0))

    def why_down(self, worker: int) -> str:
        """Return the reason why a worker in `down` is down."""
        left = max(0.0, self.down[worker] - time.monotonic())
        return (
            f"it {self._how[worker]}, for the {self._quick_deaths[worker]}th time as soon as it had started; the next "
            f"one is started in {left:.0f} s, see the daemon's log"
        )

    def problems(self) -> tuple[str, ...]:
        """Return one line of status text for each worker that is down."""
        return tuple(
            f"worker {worker} cannot be kept alive: it {self._how[worker]}, {self._quick_deaths[worker]} times as soon "
            "as it had started; swaps that need it are refused until the next one, which is started after a pause"
            for worker in sorted(self.down)
        )

    def start_due(self, now: float) -> list[int]:
        """Start workers after their pause, and kill workers that do not exit; return the started ones."""
        for process in self._processes:
            if process.exit_fd >= 0 and not process.lost and now >= process.exits_by:
                process.popen.kill()
        due = [worker for worker, at in self.down.items() if now >= at]
        return [worker for worker in due if self._replace(worker)]

    def receive(self, worker: int) -> list[sidecar.FromWorker] | str:
        """Return a worker's messages; if it died, replace it and return a text on how it died."""
        process = self._processes[worker]
        said: list[sidecar.FromWorker] = []
        while not process.lost:
            try:
                data, fds = handoff.receive(process.socket)
                if fds:
                    handoff.close_all(fds)
                said.append(self._decoder.decode(data)[1])
                self._has_worked = True
            except BlockingIOError:
                return said
            except RefitdError as exc:
                if said and isinstance(exc, PeerLost):
                    return said  # the socket stays readable: its end is reported next time
                if isinstance(exc, PeerLost) and self._awaits_exit(worker, process):
                    return said
                how = self._end(process) if isinstance(exc, PeerLost) else f"said nonsense: {exc}"
                self._end(process)
                self._died(worker, how, time.monotonic() - process.started < _QUICK_S)
                return how
        return said

    def restart(self, worker: int) -> None:
        """Kill, reap and replace a worker. Once this returns, the old process no longer writes."""
        # not counted as a quick death, because the daemon killed it
        if worker not in self.down:
            self._end(self._processes[worker])
            self._replace(worker)

    def _died(self, worker: int, how: str, quick: bool) -> None:
        self._how[worker] = how
        self._quick_deaths[worker] = self._quick_deaths[worker] + 1 if quick else 0
        wait_s = pause_s(self._quick_deaths[worker] - MAX_QUICK_DEATHS + 1)
        if wait_s:
            self.down[worker] = time.monotonic() + wait_s
        else:
            self._replace(worker)

    def _replace(self, worker: int) -> bool:
        """Start a worker; if no process can be started, retry later."""
        try:
            self._processes[worker] = self._spawn(worker)
        except OSError as exc:
            self._how[worker] = f"could not be started: {exc.strerror}"
            self._quick_deaths[worker] += 1
            self.down[worker] = time.monotonic() + max(1.0, pause_s(self._quick_deaths[worker]))
            return False
        self.down.pop(worker, None)
        return True

    def is_failing(self, worker: int) -> bool:
        """Whether no worker can run here: none has ever sent a message, and this one died early several times."""
        return not self._has_worked and self._quick_deaths[worker] >= MAX_QUICK_DEATHS

    def close(self) -> None:
        """End all workers."""
        for process in self._processes:
            self._end(process)

    def _spawn(self, worker: int) -> _Process:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        door = self._kits[worker].door
        fds = (theirs.fileno(), *(() if door is None else (door.fileno(),)))
        try:
            with _on(self._kits[worker].cpus):
                popen = subprocess.Popen(
                    [sys.executable, "-m", "refitd.worker", *map(str, fds)],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **self._kits[worker].variables},
                    # Ctrl-C reaches the whole process group, but the daemon decides when workers end
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.fds[ours.fileno()] = worker
        self._on_change(ours.fileno(), select.POLLIN)
        return _Process(popen, ours, time.monotonic())

    def _awaits_exit(self, worker: int, process: _Process) -> bool:
        """Whether a worker that has closed its socket has still to exit; polling then reports its exit."""
        with contextlib.suppress(OSError):  # no descriptor is left
            if process.exit_fd < 0 and process.popen.poll() is None:
                process.exit_fd, process.exits_by = os.pidfd_open(process.popen.pid), time.monotonic() + _EXIT_S
                self._forget(process.socket.fileno())
                self.fds[process.exit_fd] = worker
                self._on_change(process.exit_fd, select.POLLIN)
        return process.exit_fd >= 0 and process.popen.poll() is None

    def _forget(self, fd: int) -> None:
        del self.fds[fd]
        self._on_change(fd, 0)

    def _end(self, process: _Process) -> str:
        if process.lost:
            return ""
        process.lost = True
        self._forget(process.socket.fileno() if process.exit_fd < 0 else process.exit_fd)
        process.popen.kill()  # without effect if it has exited
        status = process.popen.wait()
        process.socket.close()
        if process.exit_fd >= 0:
            os.close(process.exit_fd)
        for _, fds in process.outbox:
            handoff.close_all(fds)
        process.outbox.clear()
        if status == sidecar.NO_MEMORY_STATUS:
            return "got no memory (the machine, a cgroup, RLIMIT_AS or vm.max_map_count; see the daemon's log)"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


def _memory_file(block: bytes) -> int:
    fd = os.memfd_create("refitd:job", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        view = memoryview(block)
        while view:
            view = view[os.write(fd, view) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


# --- devices of workers -----------------------------------------------------------------------------------

SYSFS = Path("/sys")
MAIN_MEMORY = "main"  # in node.cards: the workers without a GPU

_PCI = re.compile(r"pci[0-9a-f]+:[0-9a-f]+|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: its name (refitd.buffers.cuda.name_of), its PCI address, and the numbers of the GPUs that it reaches."""

    name: str
    address: str
    reaches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Spot:
    """A device: the PCI addresses from its root to it (() if unknown) and its NUMA node (None if unknown)."""

    path: tuple[str, ...] = ()
    numa: int | None = None

    def steps_with(self, other: Spot) -> int:
        """Return how many steps the two paths share, from the root on."""
        pairs = zip(self.path, other.path, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.path), len(other.path)))


@dataclass(frozen=True, slots=True)
class Card:
    """A network card that is up. `port` is the first active port of an RDMA device, 0 for an interface without RDMA."""

    name: str
    spot: Spot
    port: int = 0


def gpus_of(driver: Driver) -> list[Gpu]:
    """Return the GPUs that this process sees; raises ArenaError if the driver fails."""
    everyone = range(driver.count())
    return [
        Gpu(driver.name(gpu), driver.bus_id(gpu), tuple(peer for peer in everyone if driver.reaches(gpu, peer)))
        for gpu in everyone
    ]


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that this process sees; [] without a driver that can share memory."""
    with suppress(ArenaError):
        return gpus_of(Driver())
    return []


def spot_of(address: str, sysfs: Path) -> Spot:
    """Return the place of the device with this PCI address, such as 0000:17:00.0."""
    return _spot(sysfs / "bus/pci/devices" / address.lower())


def _spot(device: Path) -> Spot:
    if not device.exists():
        return Spot()
    numa: int | None = None
    steps = [step for step in Path(os.path.realpath(device)).parts if _PCI.fullmatch(step)]
    for folder in (device.resolve(), *device.resolve().parents):  # a virtio interface is below its PCI device
        if (found := _text(folder / "numa_node")) and steps:
            numa = int(found) if int(found) >= 0 else None  # -1: the firmware does not tell
            break
    return Spot(tuple(steps), numa)


def cards(sysfs: Path) -> list[Card]:
    """Return the RDMA devices with an active port; without any, the physical network interfaces that are up.

    Containers see the RDMA devices of their host, but can use only those that have a file in /dev. Bridges, VLANs and
    other virtual interfaces have no device.
    """
    found = []
    for device in _folders(sysfs / "class/infiniband"):
        active = [int(port.name) for port in _folders(device / "ports") if "ACTIVE" in _text(port / "state")]
        files = [sysfs.parent / "dev/infiniband" / one.name for one in _folders(device / "device/infiniband_verbs")]
        if active and any(os.access(file, os.R_OK | os.W_OK) for file in files):
            found.append(Card(device.name, _spot(device / "device"), min(active)))
    return found or [
        Card(device.name, _spot(device / "device"))
        for device in _folders(sysfs / "class/net")
        if (device / "device").exists() and _is_up(device)
    ]


def lanes_of(gpus: Sequence[Gpu], workers: int, chosen: Mapping[str, str], sysfs: Path) -> list[LaneStatus]:
    """Return what each worker uses: worker i has GPU i, the workers after the last GPU only main memory.

    Args:
        gpus: the node's GPUs.
        workers: at least as many.
        chosen: node.cards: a GPU's name or number, or MAIN_MEMORY -> the card to use instead of the closest one.
        sysfs: the root of the tree.

    Raises:
        ConfigError: `chosen` names a GPU or a card that is not there; names those that are.
    """
    there = cards(sysfs)
    names = {card.name: card for card in there} | {
        path.name: Card(path.name, _spot(path / "device")) for path in _folders(sysfs / "class/net")
    }
    known = {str(i): i for i in range(len(gpus))} | {gpu.name: i for i, gpu in enumerate(gpus)}
    wanted: dict[int | None, Card] = {}
    for owner, name in chosen.items():
        if owner != MAIN_MEMORY and owner not in known:
            told = ", ".join(f"{i} ({gpu.name})" for i, gpu in enumerate(gpus)) or "none"
            raise ConfigError(f"node.cards: {owner!r} is no GPU of this node; GPUs: {told}; or {MAIN_MEMORY!r}")
        if name not in names:
            told = ", ".join(sorted(names)) or "none"
            raise ConfigError(f"node.cards: {owner!r} has {name!r}, which is not here or not up; network cards: {told}")
        wanted[None if owner == MAIN_MEMORY else known[owner]] = names[name]
    uses = dict.fromkeys(names, 0)
    lanes = []
    for worker in range(workers):
        gpu = gpus[worker] if worker < len(gpus) else None
        spot = spot_of(gpu.address, sysfs) if gpu is not None else Spot()
        card = wanted.get(worker if gpu is not None else None) or _closest(spot, there, uses)
        if card is not None:
            uses[card.name] += 1
        lanes.append(
            LaneStatus(
                gpu=gpu.name if gpu is not None else "",
                numa=spot.numa,
                card=card.name if card is not None else "",
                reaches=gpu.reaches if gpu is not None else (),
            )
        )
    return lanes


def _closest(spot: Spot, there: Sequence[Card], uses: Mapping[str, int]) -> Card | None:
    def distance(card: Card) -> tuple[int, bool, int]:
        is_apart = spot.numa is None or card.spot.numa != spot.numa
        return -spot.steps_with(card.spot), is_apart, uses[card.name]

    return min(there, key=distance, default=None)


def variables(lane: LaneStatus, chosen: Mapping[str, str], environ: Mapping[str, str], sysfs: Path) -> dict[str, str]:
    """Return the variables that tell a worker's libraries its card; variables in `environ` are left alone.

    An interface without RDMA is named to them only if the configuration chose it: it may have no address, and the
    libraries choose among those that have one. Gloo listens on node.address and reads no variable.
    """
    card = next((card for card in cards(sysfs) if card.name == lane.card), None)
    if card is not None and card.port:
        at = f"{card.name}:{card.port}"
        # by the interfaces UCX reaches nodes without RDMA
        ucx = [at, *(interface.name for interface in _folders(sysfs / "class/net") if _is_up(interface))]
        wanted = {"NCCL_IB_HCA": f"={at}", "UCX_NET_DEVICES": ",".join(ucx), "NVSHMEM_HCA_LIST": at}
    elif lane.card in chosen.values():
        wanted = {"NCCL_SOCKET_IFNAME": f"={lane.card}", "UCX_NET_DEVICES": lane.card}
    else:
        wanted = {}
    return {name: value for name, value in wanted.items() if name not in environ}


def cpus_of(lane: LaneStatus, sysfs: Path) -> set[int]:
    """Return the CPUs of a GPU's NUMA node that this process may use, for the GPU's worker; () for any.

    Workers of main memory copy between all NUMA nodes, and are not bound.
    """
    if not lane.gpu or lane.numa is None:
        return set()
    found: set[int] = set()
    for part in _text(sysfs / f"devices/system/node/node{lane.numa}/cpulist").split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found & os.sched_getaffinity(0)


def _is_up(interface: Path) -> bool:
    """Return whether a network interface is up and no member of a bond or bridge, which has no address of its own."""
    return _text(interface / "operstate") == "up" and not (interface / "master").exists()


def _folders(path: Path) -> list[Path]:
    def numbered(entry: Path) -> list[int | str]:  # mlx5_2 before mlx5_10
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", entry.name)]

    with suppress(OSError):
        return sorted(path.iterdir(), key=numbered)
    return []


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
