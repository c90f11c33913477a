"""NCCL: group calls of packed messages between GPUs, with digests computed on the device.

A failed communicator is never reused: its worker ends, and the next epoch makes a new one. torch's own watchdog may
end the process first, if NCCL itself reports an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Backend

from refitd.copy_services.authentication import Authenticator, prove
from refitd.copy_services.base import MAX_MESSAGE_BYTES
from refitd.copy_services.device_digest import DeviceDigests
from refitd.copy_services.device_stream import DeviceStream
from refitd.copy_services.epoch import Epoch
from refitd.copy_services.packed import STAGING_BYTES
from refitd.copy_services.peers import Deadline, Group, Peers
from refitd.copy_services.rendezvous import MailboxStore
from refitd.copy_services.rounds import RoundsExchange
from refitd.copy_services.streams import Digest, InFlight
from refitd.copy_services.waits import bounded
from refitd.errors import ConfigError, DeadlineExceeded, TransportError

# An abort that takes longer is left to the end of the process.
_ABORT_S = 10.0
# Every run has its own deadline; torch's watchdog, which ends the process, must not act first.
_WATCHDOG = timedelta(days=1)


class NcclService(RoundsExchange):
    """Exchanges tensors over a process group with an nccl backend. See ExchangeService for its contract."""

    name = "nccl"
    # there is no cache to fit in, and fewer kernels are faster
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
    from torch._C._distributed_c10d import ProcessGroupNCCL  # missing in a torch without CUDA

    deadline = Deadline.after(epoch.timeout)
    store = MailboxStore(epoch, deadline)

    def meet() -> NcclService:
        # all must be present first: making the communicator cannot be interrupted
        torch.cuda.set_device(device)
        store.set(f"come/{epoch.index}", b"1")
        store.wait([f"come/{index}" for index in range(epoch.size)])
        options = ProcessGroupNCCL.Options()
        options._timeout = _WATCHDOG
        group = ProcessGroupNCCL(store, epoch.index, epoch.size, options)
        peers = Peers(group, epoch.labels)
        peers.device = device
        # NCCL's first call in a group makes communicators with every rank; later group calls may have only some
        authenticator = prove(peers, epoch, deadline)
        return NcclService(
            group,
            device=device,
            labels=epoch.labels,
            staging_bytes=epoch.staging_bytes,
            owns_group=True,
            authenticator=authenticator,
        )

    torch.cuda.set_device(device)
    try:
        return bounded(meet, deadline, f"{epoch.labels[epoch.index]}: meeting {', '.join(epoch.labels)} over NCCL")
    except RuntimeError as exc:
        if store.failure is not None:
            raise store.failure from exc
        what = (str(exc).splitlines() or [""])[0]
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
