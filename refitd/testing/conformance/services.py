"""Hand a plan to a one-sided service, and to a two-sided one, whose received messages may be altered."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from refitd.addressing.copies import CopyList
from refitd.addressing.paths import TransferList
from refitd.buffers.arena import MappedArena
from refitd.copy_services import Backend
from refitd.copy_services.digests import DIGEST_BYTES
from refitd.copy_services.packed import TAG
from refitd.dtypes import cast_number
from refitd.errors import TransportError
from refitd.testing.conformance.transfers import Answer, Orders, Place, Plan, Transfer, size_of

if TYPE_CHECKING:
    import torch

    from refitd.copy_services import ExchangeService
    from refitd.copy_services.pieces import Piece

_TAGS = 1 << 16  # of messages; agreements have smaller ones


class Between:
    """Intercepts a two-sided service's messages. Until told to alter them it only records them.

    flip     one bit of a stream's first message; its digest is computed again
    swap     the first two messages of a stream; its digest is computed again
    replay   all streams and their digests of the previous run
    say      one bit of each agreement
    delta NODE   one bit of the first message, on this node only; its digest stays. For a delta, this changes a word
    """

    def __init__(self, service: Any) -> None:
        self._peers = service.peers
        self._receive, self._wait = self._peers.receive, self._peers.wait
        self._how = ""
        self._is_altered = False
        self._before: dict[int, list[bytes]] = {}
        self._came: dict[int, list[bytes]] = defaultdict(list)  # messages of this run, by position
        self._posted: dict[int, list[Any]] = defaultdict(list)  # receives of messages, in order
        self._agreements: list[Any] = []
        self._peers.receive, self._peers.wait = self.receive, self.wait

    def leave(self) -> None:
        """Remove the hooks: a reference cycle would keep the peers and their connections open."""
        for name in ("receive", "wait"):
            vars(self._peers).pop(name, None)
        self.meddle("")
        self._before = {}

    def meddle(self, how: str) -> None:
        """Begin a run, and set how to alter it."""
        self._how, self._before, self._came = how, self._came, defaultdict(list)
        self._posted, self._agreements = defaultdict(list), []
        self._is_altered = False

    def receive(self, tensor: Any, position: int, tag: int) -> Any:
        """See Peers.receive."""
        posted = self._receive(tensor, position, tag)
        if tag < TAG or tag >= TAG + _TAGS:
            self._agreements.append(posted)
        else:
            self._posted[position].append(posted)
        return posted

    def wait(self, posted: Any, position: int, deadline: Any, purpose: str) -> None:
        """See Peers.wait."""
        mine = self._posted[position]
        number = next((n for n, each in enumerate(mine) if each is posted), -1)
        if self._how == "swap" and number == 1:
            return  # it has been waited for
        self._wait(posted, position, deadline, purpose)
        if self._how == "say" and any(each is posted for each in self._agreements):
            posted.tensor[0] ^= 1
        if number < 0:
            return
        arrived = [posted.tensor]
        if self._how == "swap" and number == 0:
            self._wait(mine[1], position, deadline, purpose)
            arrived.append(mine[1].tensor)
            n = min(len(tensor) for tensor in arrived)  # the last message is shorter
            first = arrived[0][:n].clone()
            arrived[0][:n].copy_(arrived[1][:n])
            arrived[1][:n].copy_(first)
        for tensor in arrived:
            self._alter(tensor, position, len(self._came[position]))
            self._came[position].append(tensor.numpy().tobytes())

    def _alter(self, tensor: Any, position: int, number: int) -> None:
        if self._how == "replay":
            self._write(tensor, self._before[position][number])
        elif self._how in ("flip", "swap") and tensor.numel() == DIGEST_BYTES:
            self._write(tensor, xxhash.xxh3_128_digest(b"".join(self._came[position])))
        elif self._how == "flip" and number == 0:
            tensor[len(tensor) // 2] ^= 1
        elif self._how.startswith("delta ") and tensor.numel() > DIGEST_BYTES and not self._is_altered:
            node = self._how.removeprefix("delta ")
            if f"on node {node} " in self._peers.label(self._peers.index):
                tensor[0] ^= 1
                self._is_altered = True

    @staticmethod
    def _write(tensor: Any, data: bytes) -> None:
        tensor.numpy()[:] = memoryview(data)


class OneSided:
    """Transfers as a CopyList between arenas that are all mapped here."""

    def __init__(self, backend: Backend, arenas: Mapping[int, MappedArena], device: str) -> None:
        assert backend.mapped is not None
        self._service = backend.mapped()
        assert self._service.name == backend.name and self._service.capabilities == backend.capabilities
        self._on_device = None if device == "cpu" else _DeviceArenas(arenas)
        # the service is given arenas on its device
        self._arenas: Any = arenas if self._on_device is None else self._on_device.mapped
        self.is_usable = True

    def prepare(self, plan: Plan, orders: Orders, written: int | None = None) -> None:
        """See MappedCopyService.prepare."""
        if self._on_device is not None:
            self._on_device.upload()
        copies = copy_list(plan)
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
        """Copy the targets back from the device, to compare them."""
        if self._on_device is not None:
            self._on_device.download()

    def close(self) -> None:
        """See CopyService.close."""
        self._service.close()
        self.is_usable = False
        if self._on_device is not None:
            self._on_device.close()


class _DeviceArenas:
    """For each arena an arena on a GPU, with the same bytes before and after a run."""

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
        """Copy every arena to the device."""
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


class TwoSided:
    """Transfers as halves that this process sends or receives."""

    def __init__(self, number: int, service: ExchangeService, arenas: Mapping[int, MappedArena], device: str) -> None:
        from refitd.copy_services import WindowExchange

        self._number = number
        self._service = service
        self._arenas = arenas
        self._device = device
        # services with other pipelines bypass their peers
        self._between = Between(service) if isinstance(service, WindowExchange) else None

    @property
    def is_usable(self) -> bool:
        """See ExchangeService.is_usable."""
        return self._service.is_usable

    def prepare(self, plan: Plan, orders: Orders) -> None:
        """Note this process's halves after making all pieces: none is noted if a piece cannot be made."""
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
                    piece, dtype = self._piece(transfer, is_send)
                    if orders.loses and not is_send:
                        piece = _losing(piece)
                    noted.append((transfer, is_send, piece, dtype, self._service.ranks[other.process]))
        for transfer, is_send, piece, dtype, peer in noted:
            if is_send:
                self._service.send(transfer.task, piece, peer, part=transfer.part, dtype=dtype)
            else:
                self._service.receive(transfer.task, piece, peer, part=transfer.part)
        self._held = self._service.hold()

    def _piece(self, transfer: Transfer, is_send: bool) -> tuple[torch.Tensor | Piece, Any]:
        if self._on_device is not None:
            import torch

            place, held = (transfer.source, transfer.held) if is_send else (transfer.target, transfer.dtype)
            return self._on_device.tensor(place, transfer.shape, held, is_send), getattr(torch, transfer.dtype)
        if 0 in transfer.shape:  # plans have none; the in-process library does
            import torch

            return torch.empty(transfer.shape, dtype=getattr(torch, transfer.dtype)), None
        from refitd.copy_services.pieces import piece_of

        return piece_of(transfer_list(transfer, is_send), 0, self._arenas), None

    def run(self, orders: Orders, on_progress: Any) -> Answer:
        """See ExchangeService.run."""

        def finish() -> None:
            if orders.fails_to_finish:
                raise ValueError("no room")

        if self._between is not None:
            self._between.meddle(orders.meddles)
        elif orders.meddles:
            raise NotImplementedError("messages that bypass the peers cannot be altered")
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
        """Copy the targets back from the device, to compare them."""
        if self._on_device is not None:
            self._on_device.download()

    def close(self) -> None:
        """See ExchangeService.close."""
        if self._between is not None:
            self._between.leave()
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

        element = size_of(dtype)
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
    """Return a piece that drops the bytes it receives."""
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


def copy_list(plan: Plan) -> CopyList:
    """Return a plan in the form of one-sided services; source arenas have even numbers, targets odd ones."""
    transfers = plan.transfers
    dims = max((len(t.shape) for t in transfers), default=0) or 1

    def box(values: tuple[int, ...], front: int) -> list[int]:
        return [front] * (dims - len(values)) + list(values)

    def table(rows: list[list[int]]) -> np.ndarray:
        return np.array(rows, dtype=np.int64).reshape(len(rows), dims)

    return CopyList(
        size=table([box(t.shape, 1) for t in transfers]),
        element_size=_column(size_of(t.dtype) for t in transfers),
        cast=_column(_cast(t) for t in transfers),
        src_arena=_column(2 * t.source.process for t in transfers),
        src_offset=_column(t.source.offset for t in transfers),
        src_stride=table([box(t.source.strides, 0) for t in transfers]),
        dst_arena=_column(2 * t.target.process + 1 for t in transfers),
        dst_offset=_column(t.target.offset for t in transfers),
        dst_stride=table([box(t.target.strides, 0) for t in transfers]),
        origin=_column(range(len(transfers))),
    )


def transfer_list(transfer: Transfer, is_send: bool) -> TransferList:
    """Return one end of a transfer in the form of workers."""
    place = transfer.source if is_send else transfer.target
    return TransferList(
        is_send=_column([is_send]),
        peer=_column([(transfer.target if is_send else transfer.source).process]),
        task_id=_column([transfer.task]),
        part=_column([transfer.part]),
        size=np.array([transfer.shape or (1,)], dtype=np.int64),
        element_size=_column([size_of(transfer.dtype)]),
        cast=_column([_cast(transfer) if is_send else 0]),
        path=_column([0]),
        hop=_column([0]),
        arena=_column([2 * place.process + (not is_send)]),
        offset=_column([place.offset]),
        stride=np.array([place.strides or (0,)], dtype=np.int64),
        origin=_column([0]),
    )
