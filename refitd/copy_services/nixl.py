"""NIXL: receivers read messages from their senders' memory over UCX, by RDMA if available, else TCP or cma."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from refitd.copy_services.base import NIXL
from refitd.copy_services.epoch import Epoch
from refitd.copy_services.exchange import ExchangeResult
from refitd.copy_services.nixl_peers import NixlPeers
from refitd.copy_services.packed import STAGING_BYTES
from refitd.copy_services.peers import Deadline
from refitd.copy_services.windows import WindowExchange

# progress calls after a run, so that the last notification is sent
_LAST_LOOKS = 4


class NixlService(WindowExchange):
    """Exchanges tensors by reads between NIXL agents. See ExchangeService for its contract."""

    name = "nixl"
    capabilities = NIXL

    def __init__(self, epoch: Epoch, *, message_bytes: int | None = None) -> None:
        """Join an epoch. Half of its `staging_bytes` is for messages, half for the slab.

        `message_bytes` is as in PackedExchange. Raises as NixlPeers does.
        """
        half = (epoch.staging_bytes or STAGING_BYTES) // 2
        self.peers: NixlPeers = NixlPeers(epoch, half, Deadline.after(epoch.timeout))
        super().__init__(self.peers, message_bytes=message_bytes, staging_bytes=half)

    def run(self, *args: Any, **kwargs: Any) -> ExchangeResult:
        """See ExchangeService.run."""
        found = super().run(*args, **kwargs)
        for _ in range(_LAST_LOOKS):
            self.peers.look()
        return replace(found, staging_bytes=found.staging_bytes + self.peers.slab_bytes)

    def close(self) -> None:
        """See ExchangeService.close."""
        super().close()
        self.peers.close()


def join(epoch: Epoch) -> NixlService:
    """Join an epoch; return once all workers have proven who they are.

    Raises:
        ConfigError: NIXL cannot be loaded, or there are too many workers for `staging_bytes`.
        DeadlineExceeded, PeerLost: a worker did not come; has its label.
        TransportError: the workers cannot reach each other.
    """
    return NixlService(epoch)
