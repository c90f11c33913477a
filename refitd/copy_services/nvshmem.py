"""NVSHMEM: puts with signals between GPUs, polled by the host; agreements go over gloo.

nvshmem4py is loaded when a worker joins; its cu12 and cu13 builds have the same module name. Only its unique id,
initialisation and a few host calls are used: puts and signals on a stream, but never a wait on a stream, nor a
collective while tensors move. So two PEs may share a GPU, and every wait has a deadline.

If a network card writes to a GPU's memory, the host may see a signal before the bytes that it announces, on machines
whose GPUs need a flush in between. NVSHMEM's own waits flush, this polling does not. A transfer affected by that fails
its digest. Between GPUs of one node there is no network card.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from refitd.buffers.cuda import tensor_at
from refitd.copy_services import gloo
from refitd.copy_services.authentication import Authenticator
from refitd.copy_services.base import MAX_MESSAGE_BYTES
from refitd.copy_services.device_digest import DeviceDigests
from refitd.copy_services.device_stream import DeviceStream
from refitd.copy_services.epoch import Epoch
from refitd.copy_services.peers import Deadline, Group, Peers
from refitd.copy_services.slots import SlottedExchange
from refitd.copy_services.streams import Digest
from refitd.copy_services.waits import bounded
from refitd.errors import ConfigError, RefitdError, TransportError

UNIQUE_ID_BYTES = 128
_WORD_BYTES = 8
_FINALIZE_S = 10.0


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
    """Return an id with which all PEs of an epoch are initialised, and its bytes; a new id unless `data` is given."""
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
        group: Group,
        device: torch.device,
        *,
        labels: tuple[str, ...] = (),
        message_bytes: int | None = None,
        staging_bytes: int,
        authenticator: Authenticator | None = None,
    ) -> None:
        """Allocate slots and words. Collective, and cannot be interrupted. NVSHMEM must be initialised.

        Args:
            library: NVSHMEM.
            group: a gloo group whose positions are the PEs.
            device: this PE's device.
            labels: name of each position in errors.
            message_bytes: see PackedExchange.
            staging_bytes: see PackedExchange.
            authenticator: see Peers.

        Raises:
            TransportError: the device has too little memory.
        """
        super().__init__(Peers(group, labels), message_bytes=message_bytes, staging_bytes=staging_bytes)
        self.device = device
        self.peers.authenticator = authenticator
        self._library = library
        self._is_initialized = True
        self._stream, self._looks = DeviceStream(device), DeviceStream(device)
        self._digests = DeviceDigests(device, authenticator)
        sizes = max(1, self.slots.nbytes), max(1, self.slots.words) * _WORD_BYTES
        self._slots_at, self._words_at = (self._allocate(size) for size in sizes)
        self._room_all = tensor_at(self._slots_at, sizes[0], device)
        self._words = tensor_at(self._words_at, sizes[1], device).view(torch.int64)
        # before any put: `join` synchronizes all PEs afterwards
        self._words.zero_()
        torch.cuda.synchronize(device)

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
        """See ExchangeService.close. Collective. After a failure everything is left to the end of the process."""
        is_in_order = self.is_usable
        super().close()
        if not self._is_initialized:
            return
        self._is_initialized = False
        if not is_in_order:
            return

        def finalize() -> None:
            torch.cuda.set_device(self.device)
            for address in (self._words_at, self._slots_at):
                self._library.bindings.free(address)
            self._library.core.finalize()

        # if the others do not finalize too, the process's end releases everything
        with suppress(Exception):
            bounded(finalize, Deadline.after(_FINALIZE_S), "finalizing NVSHMEM")


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
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # creates torch's context of the device, which NVSHMEM then uses
    met = gloo.join(epoch)
    key = "nvshmem/unique-id"
    if epoch.index == 0:
        made, data = unique_id(library)
        epoch.mailbox.put(key, data)
    else:
        made, _ = unique_id(library, epoch.mailbox.get(key, deadline.left().total_seconds()))

    def initialize() -> NvshmemService:
        torch.cuda.set_device(device)
        library.core.init(uid=made, rank=epoch.index, nranks=epoch.size, initializer_method="uid")
        return NvshmemService(
            library,
            met.group,
            device,
            labels=epoch.labels,
            staging_bytes=epoch.staging_bytes,
            authenticator=met.peers.authenticator,
        )

    try:
        service = bounded(initialize, deadline, f"{me}: initialising NVSHMEM with {', '.join(epoch.labels)}")
    except RefitdError:
        raise
    except Exception as exc:  # of several types, each with no more than a number
        raise TransportError(
            f"{me} cannot initialise NVSHMEM: {exc}; stderr has its reason, and NVSHMEM_DEBUG=INFO makes it say more"
        ) from exc
    # nobody may put before everybody's words are 0
    service.peers.first_trouble("", deadline, "initialising NVSHMEM")
    return service
