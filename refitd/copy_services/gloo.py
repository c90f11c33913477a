"""Gloo: between processes over TCP, in main memory; tensors on accelerators go through staging."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo

from refitd.copy_services.base import Capabilities
from refitd.copy_services.epoch import Epoch
from refitd.copy_services.packed import MAX_MESSAGE_BYTES, STAGING_BYTES, PackedExchange
from refitd.copy_services.peers import Group, Peers
from refitd.copy_services.rendezvous import MailboxStore
from refitd.errors import TransportError


class GlooService(PackedExchange):
    """Exchanges tensors over a process group with a gloo backend. See ExchangeService for the promises."""

    name = "gloo"
    capabilities = Capabilities(
        is_one_sided=False,
        crosses_nodes=True,
        devices=frozenset({"cpu", "cuda"}),
        needs_contiguous=True,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )

    def __init__(
        self,
        group: Group = None,
        *,
        labels: tuple[str, ...] = (),
        message_bytes: int | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """Use a group; None is the default group.

        Args:
            group: a torch process group with gloo for the CPU.
            labels: how errors name each position of the group, by default by rank.
            message_bytes: see PackedExchange.
            staging_bytes: see PackedExchange.
        """
        super().__init__(Peers(group, labels), message_bytes=message_bytes, staging_bytes=staging_bytes)


def join(epoch: Epoch) -> GlooService:
    """Join a membership epoch: a process group of its own, found through the epoch's mailbox. Returns once all have.

    Raises:
        DeadlineExceeded, PeerLost: somebody did not come, by label.
        TransportError: the address cannot be used.
    """
    store = MailboxStore(epoch)
    gloo: Any = ProcessGroupGloo  # whose stubs leave most of it out
    options = gloo._Options()
    options._timeout = timedelta(seconds=epoch.timeout)
    try:
        options._devices = [gloo.create_device(hostname=epoch.address, lazy_init=False)]
        group = gloo(store, epoch.index, epoch.size, options)
    except RuntimeError as exc:
        if store.failure is not None:
            raise store.failure from exc
        what = (str(exc).splitlines() or [""])[0]
        raise TransportError(
            f"{epoch.labels[epoch.index]} cannot meet {', '.join(epoch.labels)} from address {epoch.address}: {what}; "
            "check node.address on each node"
        ) from exc
    return GlooService(group, labels=epoch.labels, staging_bytes=epoch.staging_bytes)
