"""A worker's epochs: services that exchange data with workers of other nodes, and their jobs."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from refitd.addressing.paths import TransferList
from refitd.addressing.places import extent_of
from refitd.buffers.arena import MappedArena
from refitd.copy_services import Arriving, Epoch, ExchangeService, PreparedJob, Route, RunResult, Transfers
from refitd.copy_services.channels import Channel
from refitd.copy_services.registry import Registry
from refitd.copy_services.wires import Wires
from refitd.dtypes import SOURCE_SIZES
from refitd.errors import ConfigError, DeadlineExceeded, TransportError
from refitd.protocol import sidecar
from refitd.worker.devices import Devices, torch_with_one_thread

if TYPE_CHECKING:
    from refitd.buffers.cuda import MappedDeviceArena
    from refitd.copy_services.pieces import Piece

# At least this many bytes arrive between two progress reports, even if messages are small.
PROGRESS_BYTES = 8 << 20
DEFAULT_S = 600.0


class Exchanges:
    """The epochs that this worker is in. Joining the first one imports the modules that they need, including torch."""

    def __init__(
        self, registry: Registry, arenas: Mapping[int, MappedArena], wires: Wires, devices: Devices | None = None
    ) -> None:
        self._registry = registry
        self._arenas = arenas
        self._wires = wires  # shared by all epochs
        self._devices = devices
        self._joined: dict[str, tuple[ExchangeService, Channel]] = {}

    def warm_up(self, service: str) -> None:
        """Import the modules that a service needs; a missing one is reported when an epoch is joined."""
        with contextlib.suppress(ConfigError):
            if self._registry.find(service).join is not None:
                torch_with_one_thread()

    def join(self, message: sidecar.JoinEpoch) -> None:
        """Join an epoch; return once all workers that this one exchanges with have joined.

        Raises:
            ConfigError: the service cannot run here.
            ArenaError: this worker does not see the epoch's GPU.
            DeadlineExceeded: this worker was not ready in time, or a peer did not join.
            TransportError: the workers could not connect; names the missing workers.
        """
        join = self._registry.find(message.service).join
        if join is None:
            raise ConfigError(f"copy service {message.service!r} does not cross nodes; set transport.service")
        started = time.monotonic()
        device = _torch_name(message.device)
        torch_with_one_thread()
        spent = time.monotonic() - started
        left = message.timeout_s - spent
        own = (
            f"{message.labels[message.index]} took {spent:.1f} s of the {message.timeout_s:.1f} s for joining epoch "
            f"{message.epoch} to load what {message.service} needs, which is loaded now: try again; where that is too "
            "slow, raise deadlines.plan_s"
        )
        if left <= 0:
            raise DeadlineExceeded(own)
        key = message.key.data
        channel = Channel(self._wires, message.epoch, message.index, message.labels, key)
        epoch = Epoch(
            id=f"{message.epoch}.{message.lane}",  # streams of two lanes have different MACs
            index=message.index,
            labels=message.labels,
            address=message.address,
            staging_bytes=message.staging_bytes,
            mailbox=channel,
            timeout=left,
            key=key,
            device=device,
            hops=message.hops,
            peers=message.peers,
        )
        try:
            self._wires.join(channel, message.doors, left)
            self._joined[message.epoch] = join(epoch), channel
        except DeadlineExceeded as exc:
            self._wires.leave(channel)
            if spent < left:
                raise
            raise DeadlineExceeded(f"{exc}; {own}") from exc  # this worker alone used up the time
        except BaseException:
            self._wires.leave(channel)
            raise

    def let_go(self, *arenas: int) -> None:
        """Have all services forget arenas, before their memory is exchanged or unmapped."""
        for service, _ in self._joined.values():
            for arena in arenas:
                service.let_go(arena)

    def leave(self, epoch: str) -> None:
        """Close an epoch's service. The connections to its workers stay, for the next epoch."""
        if (joined := self._joined.pop(epoch, None)) is not None:
            service, channel = joined
            service.close()
            self._wires.leave(channel)

    def prepare(self, epoch: str, block: bytes) -> PreparedJob:
        """Build a job for these transfers.

        Raises:
            TransportError: this worker is not in the epoch, or a transfer leaves its arena.
            ArenaError: an arena on a GPU could not be mapped.
        """
        from refitd.copy_services.pieces import piece_of
        from refitd.mxfp8.parts import Converter

        if (joined := self._joined.get(epoch)) is None:
            raise TransportError(f"this worker is not in epoch {epoch}")
        service, _ = joined
        rows = TransferList.from_bytes(block)
        on_gpus = self._devices.mapped(rows.arenas()) if self._devices is not None else {}
        arenas: dict[int, MappedArena | MappedDeviceArena] = {**self._arenas, **on_gpus}
        pieces: list[Piece] = []
        convert = Converter()
        parts: Counter[tuple[int, int, Route]] = Counter()  # rows that cross are in one order on both nodes
        try:
            for row in range(len(rows)):
                note = service.send if rows.is_send[row] else service.receive
                pieces.append(piece := piece_of(rows, row, arenas, convert))
                peer, route = service.ranks[int(rows.peer[row])], Route(int(rows.path[row]), int(rows.hop[row]))
                line = int(rows.is_send[row]), peer, route
                note(int(rows.task_id[row]), piece, peer, part=parts[line], route=route)
                parts[line] += 1
        except BaseException:
            service.hold()  # forget the transfers of a refused job
            raise
        gpus = sorted({arena.device for arena in on_gpus.values()})
        used = {arena: arenas[arena] for arena in rows.arenas() if arena in arenas}
        return ExchangeJob(service, service.hold(), rows, pieces, self._arenas, gpus, used)


def _torch_name(gpu: str) -> str:
    """Return torch's name of a GPU in this process; "" is main memory."""
    if not gpu:
        return "cpu"
    from refitd.buffers.cuda import index_of

    return f"cuda:{index_of(gpu)}"


class ExchangeJob(PreparedJob):
    """Transfers of one worker. `pieces` are this end of `rows`; some pieces are on `gpus`."""

    def __init__(
        self,
        service: ExchangeService,
        transfers: Transfers,
        rows: TransferList,
        pieces: list[Piece],
        arenas: Mapping[int, MappedArena],
        gpus: list[int],
        used: Mapping[int, MappedArena | MappedDeviceArena],
    ) -> None:
        self._used = used
        self._service, self._transfers, self._gpus = service, transfers, gpus
        self._rows, self._pieces, self._arenas = rows, pieces, arenas
        self._receives = int((rows.is_send == 0).sum())
        self._ends_comparing: Callable[[], bool] = lambda: False
        self._on_wrong_base: Callable[[], object] | None = None
        self._held_in: dict[int, int] = {}  # arena -> the arena of its base, in the last run
        self._bases: list[Piece | None] = [None] * len(rows)
        self._awaits: list[int] = []  # rows whose pieces are written during the run

    def use(
        self,
        bases: Sequence[sidecar.HeldBase],
        *,
        ends_comparing: Callable[[], bool],
        on_wrong_base: Callable[[], object],
    ) -> None:
        """Set the bases (earlier versions) on this end for the next run. Arenas on GPUs are ignored.

        The run calls `ends_comparing`; if that returns True, the rest is sent in full, not as a delta. `on_wrong_base`:
        see ExchangeService.run.

        Raises:
            TransportError: a base's arena is not mapped here, or is too short.
        """
        from refitd.copy_services.pieces import Base

        self._ends_comparing, self._on_wrong_base = ends_comparing, on_wrong_base
        of_arena = {base.arena: base for base in bases if {base.arena, base.held_in} <= self._arenas.keys()}
        held_in = {base.arena: base.held_in for base in of_arena.values()}
        if held_in != self._held_in:
            self._bases, self._held_in = self._bases_in(held_in), held_in
        for piece, base, arena in zip(self._pieces, self._bases, self._rows.arena.tolist(), strict=True):
            piece.base = None if base is None else Base(base, of_arena[arena].version)

    def follow(self, arriving: Arriving | None) -> bool:
        """See PreparedJob.follow."""
        for row in self._awaits:
            self._pieces[row].await_written = None
        self._awaits, arenas = [], self._rows.arena
        if arriving is None:
            return True
        self._awaits = np.flatnonzero(np.isin(arenas, sorted(arriving.arenas))).tolist()
        for row in self._awaits:
            held = SOURCE_SIZES[int(self._rows.cast[row])] or int(self._rows.element_size[row])
            begin = int(self._rows.offset[row])
            end = begin + extent_of(self._rows.size[row].tolist(), self._rows.stride[row].tolist(), held)
            self._pieces[row].await_written = partial(arriving.wait, int(arenas[row]), begin, end)
        return True

    def _bases_in(self, held_in: Mapping[int, int]) -> list[Piece | None]:
        from refitd.copy_services.pieces import piece_of
        from refitd.mxfp8.parts import Converter

        convert = Converter()
        arenas = self._rows.arena.tolist()
        there = np.array([held_in.get(arena, arena) for arena in arenas], np.int64)
        rows = replace(self._rows, arena=there, is_send=np.ones_like(there))  # bases are only read
        found: list[Piece | None] = [None] * len(rows)
        for row, arena in enumerate(arenas):
            if arena in held_in:
                is_same = held_in[arena] == arena
                found[row] = self._pieces[row] if is_same else piece_of(rows, row, self._arenas, convert)
        return found

    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """See PreparedJob.run."""
        told = 0

        def progress(arrived: int) -> None:
            nonlocal told
            if self._held_in and self._ends_comparing():
                for piece, is_send in zip(self._pieces, self._rows.is_send.tolist(), strict=True):
                    if is_send:
                        piece.base = None
            if arrived >= told + PROGRESS_BYTES:
                told = arrived
                on_progress(arrived)

        timeout = timeout or DEFAULT_S
        self._service.use(self._used)
        with ExitStack() as streams:
            if self._gpus:
                from refitd.copy_services.waits import on_streams

                streams.enter_context(on_streams(self._gpus, timeout, "what crosses between nodes"))
            result = self._service.run(
                timeout, self._transfers, verify=verify, on_progress=progress, on_wrong_base=self._on_wrong_base
            )
        return RunResult(
            self._receives,
            result.received_bytes,
            result.seconds,
            result.staging_bytes,
            result.crossed_bytes,
            result.delta_bytes,
            result.changed_bytes,
            result.steps,
        )
