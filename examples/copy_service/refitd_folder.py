"""A copy service of another package: messages are files in a folder that all nodes share (NFS, Lustre).

It is slow and simple. README.md beside this file leads through it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from refitd.copy_services import PACKED, Backend, Deadline, Epoch, EpochPeers, WindowExchange, poll, prove
from refitd.errors import DeadlineExceeded, TransportError

# The folder; all nodes must have it at this path.
FOLDER = "REFITD_FOLDER"


@dataclass(eq=False)
class Message:
    """A started send or receive, see refitd.copy_services.Posted."""

    tensor: torch.Tensor
    path: Path
    is_done: bool = False

    def abandon(self) -> None:
        """Ignored: only `wait` writes to the tensor."""


class FolderPeers(EpochPeers):
    """The workers of an epoch. Message n with a tag is the file SENDER-RECEIVER-TAG-n, with random names of both."""

    def __init__(self, epoch: Epoch, folder: Path, deadline: Deadline) -> None:
        super().__init__(epoch)
        self._folder = folder
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()
        # positions differ between workers, names do not; this also names a worker that does not come
        words = self.introduce(epoch, secrets.token_hex(8).encode(), deadline)
        self._names = [word.decode() if word.isalnum() else "" for word in words]  # no path from elsewhere
        self.authenticator = prove(self, epoch, deadline)

    def _path(self, sender: int, receiver: int, tag: int, counts: Counter[tuple[int, int]], other: int) -> Path:
        counts[other, tag] += 1
        return self._folder / f"{self._names[sender]}-{self._names[receiver]}-{tag}-{counts[other, tag]}"

    def send(self, tensor: torch.Tensor, position: int, tag: int) -> Message:
        """Write the whole message: its sender never waits."""
        path = self._path(self.index, position, tag, self._sent, position)
        part = path.with_name(path.name + ".part")
        part.write_bytes(tensor.view(torch.uint8).numpy().tobytes())
        part.rename(path)  # receivers see whole files only
        return Message(tensor, path, is_done=True)

    def receive(self, tensor: torch.Tensor, position: int, tag: int) -> Message:
        """Note which file will have the message."""
        return Message(tensor, self._path(position, self.index, tag, self._received, position))

    def wait(self, posted: Message, position: int, deadline: Deadline, purpose: str) -> None:
        """Wait for the file of a receive, and read it."""
        if posted.is_done:
            return
        try:
            poll(posted.path.exists, deadline, "")
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"{purpose} {self.label(position)}; {self.label(self.index)} waited {deadline.seconds:g} s"
            ) from None
        data = bytearray(posted.path.read_bytes())
        posted.path.unlink()
        if len(data) != posted.tensor.nbytes:
            raise TransportError(
                f"{self.label(position)} sends a message of {len(data)} bytes, expected {posted.tensor.nbytes}"
            )
        if data:
            posted.tensor.view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
        posted.is_done = True

    def close(self) -> None:
        """Remove what was sent to this worker and not read."""
        with contextlib.suppress(OSError):  # the last worker to close removes the folder, maybe while this one looks
            for path in self._folder.glob(f"*-{self._names[self.index]}-*"):  # messages that it never read
                path.unlink(missing_ok=True)
            self._folder.rmdir()


class FolderService(WindowExchange):
    """The pipeline of refitd, over files."""

    name = "folder"
    capabilities = PACKED

    def __init__(self, peers: FolderPeers, staging_bytes: int) -> None:
        super().__init__(peers, staging_bytes=staging_bytes)
        self._folder_peers = peers

    def close(self) -> None:
        """See ExchangeService.close."""
        super().close()
        self._folder_peers.close()


def join(epoch: Epoch) -> FolderService:
    """Join an epoch: called by each worker, once for each epoch."""
    folder = Path(os.environ.get(FOLDER, tempfile.gettempdir())) / f"refitd-{epoch.id}"
    folder.mkdir(parents=True, exist_ok=True)
    return FolderService(FolderPeers(epoch, folder, Deadline.after(epoch.timeout)), epoch.staging_bytes)


def missing() -> str:
    """Return "" if the service can run here, else what to do."""
    folder = os.environ.get(FOLDER, tempfile.gettempdir())
    return "" if os.access(folder, os.W_OK) else f"{folder} is not writable; set {FOLDER} to a shared folder"


BACKEND = Backend("folder", PACKED, missing, join=join)
