"""The service `gloo`: TCP between processes, in main memory. Tensors on accelerators go through staging buffers.

The in-process library uses a caller's process group (`GlooService`). Workers use the connections that they keep for all
of their epochs (`TcpService`, wires.py): messages travel straight from the memory that is sent into the memory that is
written, without a thread.
"""

from __future__ import annotations

import time
from typing import Any, cast

import torch

from refitd.copy_services import Epoch, ExchangeResult
from refitd.copy_services.channels import LOOK_S, Channel, Pending
from refitd.copy_services.digests import session
from refitd.copy_services.epoch_peers import EpochPeers
from refitd.copy_services.packed import STAGING_BYTES
from refitd.copy_services.peers import Group, Peers
from refitd.copy_services.waits import Deadline
from refitd.copy_services.windows import WindowExchange
from refitd.copy_services.wires import Wires, listen_at
from refitd.errors import DeadlineExceeded, PeerLost


class GlooService(WindowExchange):
    """Exchanges tensors over a process group with a gloo backend. See ExchangeService for its contract."""

    name = "gloo"

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
            labels: name of each position in errors, by default its rank.
            message_bytes: see PackedExchange.
            staging_bytes: see PackedExchange.
        """
        super().__init__(Peers(group, labels), message_bytes=message_bytes, staging_bytes=staging_bytes)


class TcpPeers(EpochPeers):
    """The workers of an epoch over a channel. Sends and receives are matched by tag and order."""

    def __init__(self, epoch: Epoch, channel: Channel) -> None:
        """Use a formed channel of this epoch."""
        super().__init__(epoch)
        self.channel = channel
        self.authenticator = session(epoch.key, epoch.id)

    def send(self, tensor: torch.Tensor, position: int, tag: int) -> Any:
        """See EpochPeers.send."""
        return self.channel.send(_posted(tensor), position, tag)

    def receive(self, tensor: torch.Tensor, position: int, tag: int) -> Any:
        """See EpochPeers.receive."""
        return self.channel.receive(_posted(tensor), position, tag)

    def wait(self, posted: Any, position: int, deadline: Deadline, purpose: str) -> None:
        """See EpochPeers.wait."""
        channel, me = self.channel, self.label(self.index)
        channel.wires.step(0.0)
        while not posted.is_done:
            for lost, how in channel.lost.items():
                doing = purpose if lost == position else "exchanging with"
                raise PeerLost(
                    f"{doing} {self.label(lost)}; {me} lost its connection ({how}); another rank's error may say why"
                )
            channel.check()
            if (left := deadline.at - time.monotonic()) <= 0:
                raise DeadlineExceeded(f"{purpose} {self.label(position)}; {me} waited {deadline.seconds:g} s")
            channel.wires.step(min(left, LOOK_S))


def _posted(tensor: torch.Tensor) -> Pending:
    flat = tensor.detach().view(-1).view(torch.uint8)
    return Pending(memoryview(cast(Any, flat.numpy())) if flat.numel() else memoryview(b""), flat)


class TcpService(WindowExchange):
    """Exchanges tensors over TCP. See ExchangeService for its contract."""

    name = "gloo"

    def __init__(
        self, epoch: Epoch, channel: Channel, *, message_bytes: int | None = None, owned: Wires | None = None
    ) -> None:
        """Use a formed channel, which `close` leaves; `owned` are closed, too."""
        self.peers: TcpPeers = TcpPeers(epoch, channel)
        super().__init__(self.peers, message_bytes=message_bytes, staging_bytes=epoch.staging_bytes)
        self._owned = owned

    def run(self, *args: Any, **kwargs: Any) -> ExchangeResult:
        """See ExchangeService.run."""
        try:
            return super().run(*args, **kwargs)
        except BaseException:
            if not self.is_usable:
                self.peers.channel.stop()
            raise

    def close(self) -> None:
        """See ExchangeService.close."""
        super().close()
        channel = self.peers.channel
        channel.wires.leave(channel)
        if self._owned is not None:
            self._owned.close()


def join(epoch: Epoch) -> TcpService:
    """Join an epoch; return once all of its workers have proven that they hold the key.

    Raises:
        DeadlineExceeded, PeerLost: a worker did not come; has its label.
        TransportError: a worker cannot be reached, or this one cannot listen.
    """
    if isinstance(epoch.mailbox, Channel):
        return TcpService(epoch, epoch.mailbox)
    deadline = Deadline.after(epoch.timeout)
    with listen_at(epoch.address) as listener:
        epoch.mailbox.put(f"at/{epoch.index}", f"{epoch.address}:{listener.getsockname()[1]}".encode())
        addresses = []
        for position in range(epoch.size):
            try:
                left = max(0.001, deadline.at - time.monotonic())
                addresses.append("" if position == epoch.index else epoch.mailbox.get(f"at/{position}", left).decode())
            except DeadlineExceeded as exc:
                raise DeadlineExceeded(
                    f"{epoch.labels[position]} did not come to epoch {epoch.id} within {epoch.timeout:.1f} s"
                ) from exc
        wires = Wires(listener)
        try:
            channel = formed(wires, epoch, addresses, deadline)
        except BaseException:
            wires.close()
            raise
    return TcpService(epoch, channel, owned=wires)


def formed(wires: Wires, epoch: Epoch, addresses: list[str], deadline: Deadline) -> Channel:
    """Return the channel of an epoch, with position i listening at addresses[i]; raises as Wires.join does."""
    channel = Channel(wires, epoch.id, epoch.index, epoch.labels, epoch.key)
    wires.join(channel, addresses, max(0.001, deadline.at - time.monotonic()))
    return channel
