"""Gloo: TCP between processes, in main memory. Tensors on accelerators go through staging buffers."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo, Store

from refitd.copy_services import sockets
from refitd.copy_services.authentication import Authenticator, prove
from refitd.copy_services.epoch import Epoch
from refitd.copy_services.packed import STAGING_BYTES
from refitd.copy_services.peers import Deadline, Group, Peers
from refitd.copy_services.rendezvous import MailboxStore
from refitd.copy_services.windows import WindowExchange
from refitd.errors import DeadlineExceeded, TransportError

# Attempts of an epoch's workers to connect, and the seconds of the first one, once all are present; each further one
# has twice as long. The first ends before a worker that should leave its epoch counts as stuck, since a connecting
# worker does not hear of that.
MEETINGS = 6
MEET_S = 1.5
STAYED_S = 0.2  # shorter connections are not reported as strangers
MOST_NAMED = 256  # limit on reported peers of one port, since a stranger can open any number

# Places are numbered from a random number below this (skipping half of them takes 20 ms); a stranger has time for some
# hundred guesses.
SKIPPED_NUMBERS = 1 << 13


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

    Gloo accepts any connection to its port that sends the number of a place. Therefore places have numbers that cannot
    be guessed, and every worker proves over its connections that it holds the epoch's key. If a meeting fails, also if
    a stranger disturbed it, all workers repeat it until the epoch's time is over.

    Raises:
        DeadlineExceeded, PeerLost: a worker did not come; has its label.
        TransportError: the address cannot be used, or every meeting failed; strangers are named as such.
    """
    deadline, reason = Deadline.after(epoch.timeout), ""
    # wait here for workers that still load torch: in this wait an abandoned epoch is left at once
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


gloo: Any = ProcessGroupGloo  # its type stubs leave most of it out

_opening = threading.Lock()  # one listens at a time, so that each knows which socket is its own


@dataclass(frozen=True)
class _Word:
    """What each worker tells the others about a meeting, through the mailbox."""

    failure: str  # "" if every worker has proven its identity
    own: Sequence[sockets.Address]  # this worker's ends of connections
    strangers: Sequence[sockets.Address]  # peers of its port, before it is known whose ends they are


class _Watch:
    """Records this process's connections during a meeting, since failed ones disappear."""

    def __init__(self, doors: set[int]) -> None:
        self._doors = doors
        self._over = threading.Event()
        self._seen: dict[sockets.Address, tuple[float, float]] = {}  # peers of our ports -> (first seen, last seen)
        self.own: set[sockets.Address] = set()  # our ends of connections that we opened
        self._thread = threading.Thread(target=self._run, name="refitd-meeting", daemon=True)

    def _run(self) -> None:
        wait = STAYED_S / 2  # a successful meeting is over by then
        while not self._over.wait(wait):
            self._look()
            wait = STAYED_S / 10

    def _look(self) -> None:
        now = time.monotonic()
        for own, peer, is_whole in sockets.connected():
            if own[1] not in self._doors:
                self.own.add(own)
            elif is_whole:  # if a worker has closed its end, it may not have seen the connection
                self._seen[peer] = self._seen.get(peer, (now, now))[0], now

    def stayed(self) -> list[sockets.Address]:
        """Return peers that stayed long enough for a worker to have noticed the connection, if it was its own."""
        return sorted(peer for peer, (first, last) in self._seen.items() if last - first >= STAYED_S)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()


class _Meeting:
    """One attempt to connect all workers. `group` is None unless it succeeded; `reason` says what failed.

    `authenticator` is what this worker's proof has led to.
    """

    def __init__(self, epoch: Epoch, deadline: Deadline, number: int, seconds: float) -> None:
        self._epoch, self._number, self._seconds = epoch, number, seconds
        self._store = MailboxStore(epoch, deadline, f"{number}/")
        self._doors: dict[int, int] = {}  # gloo's listening sockets: descriptor -> port
        self.group: Any = None
        self.authenticator: Authenticator | None = None
        self.reason = ""

    def hold(self) -> bool:
        """Return whether all workers have connected; all of them return the same."""
        device = self._listen()
        with _Watch({*self._doors.values()}) as watch:
            failure = self._connect(device)
        for fd in self._doors:
            sockets.shut(fd)  # from now on nobody may connect
        words = self._tell(_Word(failure, sorted(watch.own), watch.stayed()[:MOST_NAMED]))
        members = {(host, port) for word in words for host, port in word.own}
        strangers = sorted({(host, port) for word in words for host, port in word.strangers} - members)
        failures = [
            (label, word.failure) for label, word in zip(self._epoch.labels, words, strict=True) if word.failure
        ]
        if not failures:
            return True
        self.group = None
        self.reason = self._explained(failures, strangers)
        return False

    def _listen(self) -> Any:
        """Return a gloo device with its own port."""
        epoch = self._epoch
        try:
            with _opening:
                before = sockets.listening().keys()
                device = gloo.create_device(hostname=epoch.address, lazy_init=False)
                self._doors = {fd: port for fd, port in sockets.listening().items() if fd not in before}
        except RuntimeError as exc:
            raise TransportError(
                f"{epoch.labels[epoch.index]} cannot listen at address {epoch.address}: {_first_line(exc)}; check "
                "node.address on each node"
            ) from exc
        return device

    def _connect(self, device: Any) -> str:
        """Form the group and have all workers prove their identity; return an error text, "" if all is well."""
        epoch, until = self._epoch, Deadline.after(self._seconds)
        options = gloo._Options()
        options._timeout = timedelta(seconds=self._seconds)
        options._devices = [device]
        # each new place takes the next number, also in a group that is dropped at once: this skips a random count
        with contextlib.suppress(RuntimeError):
            gloo(_NoStore(), 0, 1 + secrets.randbelow(SKIPPED_NUMBERS), options)
        try:
            self.group = gloo(self._store, epoch.index, epoch.size, options)
        except RuntimeError as exc:
            if self._store.failure is not None:
                raise self._store.failure from exc
            return _first_line(exc)
        try:
            self.authenticator = prove(Peers(self.group, epoch.labels), epoch, until)
        except TransportError as exc:
            return str(exc)
        return ""

    def _tell(self, word: _Word) -> list[_Word]:
        """Publish this worker's result; return the results of all workers."""
        self._store.set(f"word/{self._epoch.index}", json.dumps(asdict(word)).encode())
        found = [self._store.get(f"word/{index}") for index in range(self._epoch.size)]
        try:
            return [_Word(**json.loads(data)) for data in found]
        except (ValueError, TypeError) as exc:
            raise TransportError(f"epoch {self._epoch.id}: a worker's word cannot be read: {exc}") from exc

    def _explained(self, failures: list[tuple[str, str]], strangers: list[tuple[str, int]]) -> str:
        epoch = self._epoch
        told = "; ".join(f"{label}: {failure}" for label, failure in failures[:3])
        if strangers:
            shown = " and ".join(sockets.owner(end) for end in strangers[:3])
            more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
            return (
                "strangers, who are no workers, connected to the workers' ports while these met, "
                f"{self._number + 1} times: {shown}{more}; keep others away from these ports (node.address, "
                f"docs/reliability.md). It showed as {told}"
            )
        return (
            f"{epoch.labels[epoch.index]} cannot meet {', '.join(epoch.labels)} from address {epoch.address}: {told}; "
            "check node.address on each node"
        )


class _NoStore(Store):
    """A store that aborts the making of a group once its places have their numbers."""

    def set(self, key: str, value: str | bytes) -> None:
        raise RuntimeError("no more is wanted of this group")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
