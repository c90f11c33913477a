"""Gloo: TCP between processes, in main memory. Tensors on accelerators go through staging buffers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo, Store

from refitd.copy_services import Epoch
from refitd.copy_services.digests import Authenticator
from refitd.copy_services.packed import STAGING_BYTES
from refitd.copy_services.peers import Group, MailboxStore, Peers, first_line, prove
from refitd.copy_services.waits import Deadline
from refitd.copy_services.windows import WindowExchange
from refitd.errors import DeadlineExceeded, TransportError

# Attempts of an epoch's workers to connect, and the seconds of the first one, once all are present; each further one
# has twice as long. The first attempt is shorter than the time after which a worker that should leave its epoch counts
# as stuck: a connecting worker does not receive the request to leave.
MEETINGS = 6
MEET_S = 1.5

# Places are numbered from a random number below this (skipping half of them takes 20 ms); a stranger has time for some
# hundred guesses.
SKIPPED_NUMBERS = 1 << 13

_MET = "met"


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
        authenticator: Authenticator | None = None,
    ) -> None:
        """Use a group; None is the default group.

        Args:
            group: a torch process group with gloo for the CPU.
            labels: name of each position in errors, by default its rank.
            message_bytes: see PackedExchange.
            staging_bytes: see PackedExchange.
            authenticator: see Peers.
        """
        super().__init__(Peers(group, labels), message_bytes=message_bytes, staging_bytes=staging_bytes)
        self.peers.authenticator = authenticator


def join(epoch: Epoch) -> GlooService:
    """Join an epoch with a new process group, formed through the epoch's mailbox. Returns once all have joined.

    Gloo accepts any connection to its port that sends the number of a place. Therefore places have unpredictable
    numbers, and every worker proves over its connections that it holds the epoch's key. If a meeting fails, for example
    because a stranger disturbed it, all workers repeat it until the epoch's time is over.

    Raises:
        DeadlineExceeded, PeerLost: a worker did not come; has its label.
        TransportError: the address cannot be used, or every meeting failed.
    """
    deadline, reason = Deadline.after(epoch.timeout), ""
    # wait here for workers that still load torch: this wait ends as soon as the epoch is abandoned
    here = MailboxStore(epoch, deadline)
    here.set(f"here/{epoch.index}", b"1")
    here.wait([f"here/{index}" for index in range(epoch.size)])
    for number in range(MEETINGS):
        left = deadline.at - time.monotonic()
        if reason and left <= 0:
            break
        meeting = _Meeting(epoch, deadline, number, min(MEET_S * 2**number, max(0.1, left)))
        try:
            if meeting.hold():
                assert meeting.group is not None
                return GlooService(
                    meeting.group,
                    labels=epoch.labels,
                    staging_bytes=epoch.staging_bytes,
                    authenticator=meeting.authenticator,
                )
        except DeadlineExceeded as exc:
            if reason:  # other workers had no time left for another meeting
                raise DeadlineExceeded(f"{exc}; before, {reason}") from exc
            raise
        reason = meeting.reason
    raise TransportError(reason)


gloo: Any = ProcessGroupGloo  # its type stubs lack most of its methods

_opening = threading.Lock()  # one thread listens at a time, to tell which socket is its own


class _Meeting:
    """One attempt to connect all workers. `group` is None unless it succeeded; `reason` says what failed.

    `authenticator` is the result of this worker's proof.
    """

    def __init__(self, epoch: Epoch, deadline: Deadline, number: int, seconds: float) -> None:
        self._epoch, self._number, self._seconds = epoch, number, seconds
        self._store = MailboxStore(epoch, deadline, f"{number}/")
        self._doors: dict[int, int] = {}  # gloo's listening sockets: descriptor -> port
        self.group: Any = None
        self.authenticator: Authenticator | None = None
        self.reason = ""

    def hold(self) -> bool:
        """Return whether all workers have connected; the result is equal on all of them."""
        failure = self._connect(self._listen())
        for fd in self._doors:
            shut(fd)  # no process may connect from now on
        words = zip(self._epoch.labels, self._tell(failure or _MET), strict=True)
        failures = [f"{label}: {word}" for label, word in words if word != _MET]
        if not failures:
            return True
        self.group = None
        epoch = self._epoch
        self.reason = (
            f"{epoch.labels[epoch.index]} cannot meet {', '.join(epoch.labels)} from address {epoch.address} in "
            f"{self._number + 1} attempts: {'; '.join(failures[:3])}; check node.address on each node, and that no "
            "other program connects to the workers' ports"
        )
        return False

    def _listen(self) -> Any:
        """Return a gloo device with its own port."""
        epoch = self._epoch
        try:
            with _opening:
                before = listening().keys()
                device = gloo.create_device(hostname=epoch.address, lazy_init=False)
                self._doors = {fd: port for fd, port in listening().items() if fd not in before}
        except RuntimeError as exc:
            raise TransportError(
                f"{epoch.labels[epoch.index]} cannot listen at address {epoch.address}: {first_line(exc)}; check "
                "node.address on each node"
            ) from exc
        return device

    def _connect(self, device: Any) -> str:
        """Form the group and have all workers prove their identity; return an error text, "" if all is well."""
        epoch, until = self._epoch, Deadline.after(self._seconds)
        options = gloo._Options()
        options._timeout = timedelta(seconds=self._seconds)
        options._devices = [device]
        # each new place takes the next number, even in a group that is dropped: this skips a random count
        with contextlib.suppress(RuntimeError):
            gloo(_NoStore(), 0, 1 + secrets.randbelow(SKIPPED_NUMBERS), options)
        try:
            self.group = gloo(self._store, epoch.index, epoch.size, options)
        except RuntimeError as exc:
            if self._store.failure is not None:
                raise self._store.failure from exc
            return first_line(exc)
        try:
            self.authenticator = prove(Peers(self.group, epoch.labels), epoch, until)
        except TransportError as exc:
            return str(exc)
        return ""

    def _tell(self, word: str) -> list[str]:
        """Publish this worker's error text, or that it has met all others; return the words of all workers."""
        self._store.set(f"word/{self._epoch.index}", word)
        return [self._store.get(f"word/{index}").decode(errors="replace") for index in range(self._epoch.size)]


class _NoStore(Store):
    """A store that aborts the making of a group once its places have their numbers."""

    def set(self, key: str, value: str | bytes) -> None:
        raise RuntimeError("this group only skips numbers of places")


_SO_ATTACH_FILTER = 26
_RETURN = 0x06  # BPF_RET | BPF_K: how many bytes of a packet pass


def _tcp() -> Iterator[tuple[int, socket.socket]]:
    """Yield (descriptor, a duplicate as a socket) for each TCP socket of this process; duplicates are closed again."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type & socket.SOCK_STREAM:
                    yield int(name), sock


def listening() -> dict[int, int]:
    """Return this process's listening sockets: descriptor -> port."""
    return {
        fd: sock.getsockname()[1] for fd, sock in _tcp() if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def shut(fd: int) -> None:
    """Make a listening socket ignore all packets, without closing it; without effect if the kernel refuses."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    wanted = struct.pack("HP", 1, ctypes.addressof(program))
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, wanted)
