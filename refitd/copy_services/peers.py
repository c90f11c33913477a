"""The processes of one group: how they meet, prove who they are, and agree by small exchanges of bytes.

A torch process group carries everything, formed through an epoch's mailbox or by the caller. All records have known
lengths and are never pickled. Every wait ends at a deadline. Each method of Peers is collective: every process of the
group calls it, in the same order.
"""

from __future__ import annotations

import hmac
import re
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, Store

from refitd.copy_services import Epoch, Posted
from refitd.copy_services.digests import MAC_BYTES, Authenticator, session
from refitd.copy_services.waits import Deadline
from refitd.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError, RefitdError, TransportError

Group = Any  # a torch ProcessGroup or one of its backends; None for the default group

# distinct from the tags that callers use on their own groups
_MEET_TAG = 0x52460000
_LENGTH_TAG = 0x52460001
_PAYLOAD_TAG = 0x52460002
_RECORD_TAG = 0x52460003

# Up to this size all processes exchange directly, so an error can name the silent one. Larger groups, which
# only the in-process library has, use torch's collectives, with fewer connections.
NAMED_SIZE = 32
_TROUBLE_BYTES = 480
_ABOUT = struct.Struct("<q")  # number of the call
_LENGTH = struct.Struct("<q")
_NONCE_BYTES = 32
MAX_PAYLOAD_BYTES = 64 << 20  # limit of one payload in `gather` and `scatter`


class Peers:
    """One process's view of a group.

    Attributes:
        group: the process group.
        index: this process's position in it.
        ranks: the rank of each position, as parallel groups number ranks: the default group's if torch knows the
            group, else positions.
        device: the device that exchanged tensors must be on.
        authenticator: in an epoch, signs each record; None in a user's group.
    """

    authenticator: Authenticator | None = None
    hops = degree = 0  # see Epoch.hops and Epoch.peers; 0 without an epoch
    _records = 0  # collective calls that were authenticated
    _latest: object = None  # sends and receives of the latest exchange

    def __init__(self, group: Group = None, labels: Sequence[str] = ()) -> None:
        """Use a group; None is the default group. `labels` name each position in errors.

        Raises:
            ConfigError: this is not a group, there is no default group, or this process is not in the group.
        """
        if group is None:
            if not dist.is_initialized():
                raise ConfigError("torch.distributed is not initialised; call init_process_group, or pass a group")
            group = dist.group.WORLD
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError("this process is not in the group; only members may call")
        if not all(callable(getattr(group, each, None)) for each in ("rank", "size")):
            raise ConfigError(f"group is {group!r} ({type(group).__name__}), expected a torch process group, or None")
        self.group = group
        self.index: int = group.rank()
        try:
            self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        except (KeyError, ValueError):  # a group that torch has not registered
            self.ranks = tuple(range(group.size()))
        self.device = _device(group)
        self._labels = tuple(labels)

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This process's rank, as parallel groups number ranks."""
        return self.ranks[self.index]

    def label(self, position: int) -> str:
        """Return the name of a position, for errors."""
        return self._labels[position] if self._labels else f"rank {self.ranks[position]}"

    def meet(self, deadline: Deadline, purpose: str) -> None:
        """Return once everyone has called it. Position 0 waits for the others and names the first missing one.

        Unlike torch's monitored_barrier, which has a deadline at position 0 only, this ends everywhere in time.

        Raises:
            DeadlineExceeded, PeerLost: a process did not come.
        """
        # position 0 sends 0, or 1 + the position of a lost process
        tokens = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in self.ranks]
        if self.index:
            self.wait(self.send(tokens[0], 0, _MEET_TAG), 0, deadline, f"{purpose}: coming to")
            self.wait(self.receive(tokens[1], 0, _MEET_TAG), 0, deadline, f"{purpose}: all others, counted by")
            if gone := int(tokens[1].item()):
                raise PeerLost(f"{purpose}: {self.label(gone - 1)} has left")
            return
        lost: dict[int, PeerLost] = {}

        def trying(position: int, step: Callable[[], Posted | None]) -> Posted | None:
            try:
                return step()
            except PeerLost as exc:  # the others can still be told
                lost.setdefault(position, exc)
                return None

        for kind, what in ((self.receive, "not everyone came, missing"), (self.send, "telling")):
            said = 1 + min(lost) if lost else 0
            works = [
                (i, trying(i, partial(kind, tokens[i].fill_(said), i, _MEET_TAG)))
                for i in range(1, len(self))
                if i not in lost
            ]
            for i, work in works:
                if work is not None:
                    trying(i, partial(self.wait, work, i, deadline, f"{purpose}: {what}"))
        if lost:
            raise PeerLost(f"{purpose}: {self.label(min(lost))} has left") from lost[min(lost)]

    def all_gather(self, record: bytes, deadline: Deadline, purpose: str) -> list[bytes]:
        """Return everyone's record, by position. All records have the same length.

        Raises:
            TransportError: the record of another was altered, names it.
        """
        if self.authenticator is None:
            return self._all_gather(record, deadline, purpose)
        return self._checked(self._all_gather(self._signed(record, None, purpose), deadline, purpose), None, purpose)

    def _all_gather(self, record: bytes, deadline: Deadline, purpose: str) -> list[bytes]:
        if self._is_named:
            return self._exchange([record or b"\0"] * len(self), deadline, purpose, len(record))
        mine = _as_tensor(record or b"\0", self.device)
        found = self.all_gather_tensor(mine, deadline, purpose)
        return [_as_bytes(row)[: len(record)] for row in found]

    def all_gather_tensor(self, tensor: torch.Tensor, deadline: Deadline, purpose: str) -> torch.Tensor:
        """Return everyone's tensor, stacked by position: shape [n, *shape]. Shapes and dtypes must be equal."""
        tensor = tensor.contiguous()
        if len(self) == 1:
            return tensor.unsqueeze(0)
        found = torch.empty((len(self), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if tensor.numel() == 0:
            return found
        options = AllgatherOptions()
        options.timeout = deadline.left()
        with self.errors(deadline, purpose):
            self.group._allgather_base(found.reshape(-1), tensor.reshape(-1), options).wait(deadline.left())
        return found

    def all_to_all(self, records: Sequence[bytes], deadline: Deadline, purpose: str) -> list[bytes]:
        """Send record i to position i; return the records sent to this process. All records have the same length.

        Raises:
            TransportError: the record of another was altered, names it.
        """
        if self.authenticator is None:
            return self._all_to_all(records, deadline, purpose)
        mine = [self._signed(record, to, purpose) for to, record in enumerate(records)]
        return self._checked(self._all_to_all(mine, deadline, purpose), self.index, purpose)

    def _signed(self, record: bytes, to: int | None, purpose: str) -> bytes:
        """Return a record with its MAC; `to` None is everybody."""
        assert self.authenticator is not None
        return record + self.authenticator.mac(b"record", *self._subject(self.index, to, purpose), record)

    def _subject(self, sender: int, to: int | None, purpose: str) -> list[bytes]:
        ends = [self.label(sender), "" if to is None else self.label(to)]
        return [_ABOUT.pack(self._records), *(text.encode() for text in ends), purpose.encode()]

    def _checked(self, signed: Sequence[bytes], to: int | None, purpose: str) -> list[bytes]:
        """Check the MACs of one call's records, and return the records without them."""
        assert self.authenticator is not None
        for sender, each in enumerate(signed):
            about = self._subject(sender, to, purpose)
            record, mac = each[:-MAC_BYTES], each[-MAC_BYTES:]
            if sender != self.index and not self.authenticator.is_mac(mac, b"record", *about, record):
                raise TransportError(
                    f"{purpose}: the record from {self.label(sender)} to {self.label(self.index)} was altered on the "
                    "way; check the network between them"
                )
        self._records += 1
        return [each[:-MAC_BYTES] for each in signed]

    def _all_to_all(self, records: Sequence[bytes], deadline: Deadline, purpose: str) -> list[bytes]:
        if len(self) == 1:
            return list(records)
        if self._is_named:
            return self._exchange(records, deadline, purpose, len(records[0]))
        mine = _as_tensor(b"".join(records), self.device)
        found = torch.empty_like(mine)
        options = AllToAllOptions()
        options.timeout = deadline.left()
        with self.errors(deadline, purpose):
            self.group.alltoall_base(found, mine, [], [], options).wait(deadline.left())
        return [_as_bytes(row) for row in found.reshape(len(self), -1)]

    @property
    def _is_named(self) -> bool:
        return self.device.type == "cpu" and 1 < len(self) <= NAMED_SIZE

    def _exchange(self, records: Sequence[bytes], deadline: Deadline, purpose: str, length: int) -> list[bytes]:
        """Send record i to position i; return the received ones, of `length` bytes. Errors name the silent rank."""
        others = [i for i in range(len(self)) if i != self.index]
        found = {i: torch.empty(len(records[i]), dtype=torch.uint8) for i in others}
        receives = {i: self.receive(found[i], i, _RECORD_TAG) for i in others}
        sends = {i: self.send(_as_tensor(records[i], self.device), i, _RECORD_TAG) for i in others}
        # Dropping them after an error would close connections, and the other ranks would name this rank as the cause.
        self._latest = receives, sends
        for works, step in ((receives, "from"), (sends, "to")):
            for position, work in works.items():
                self.wait(work, position, deadline, f"{purpose}: a record {step}")
        return [(_as_bytes(found[i]) if i in found else records[i])[:length] for i in range(len(self))]

    def first_trouble(self, trouble: str, deadline: Deadline, purpose: str) -> str:
        """Return the error text of the first rank that has one, "" if none has. All ranks return the same text."""
        mine = trouble.encode()[:_TROUBLE_BYTES].ljust(_TROUBLE_BYTES, b"\0")
        said = self.all_gather(mine, deadline, purpose)
        return next((text for each in said if (text := each.rstrip(b"\0").decode(errors="ignore"))), "")

    def gather(self, payload: bytes, lengths: Sequence[int], deadline: Deadline, purpose: str) -> list[bytes] | None:
        """Return everyone's payload at position 0, None elsewhere.

        `lengths` are the payloads' lengths by position, known to everyone.

        Raises:
            ProtocolError: a payload exceeds MAX_PAYLOAD_BYTES; no memory is allocated for it.
        """
        for position, length in enumerate(lengths):
            if not 0 < length <= MAX_PAYLOAD_BYTES:
                raise ProtocolError(
                    f"{purpose}: {self.label(position)} has {length} bytes to send, expected 1 to {MAX_PAYLOAD_BYTES}"
                )
        if self.index:
            self.wait(self.send(_as_tensor(payload, self.device), 0, _PAYLOAD_TAG), 0, deadline, purpose)
            return None
        buffers = [torch.empty(length, dtype=torch.uint8, device=self.device) for length in lengths]
        works = [(i, self.receive(buffers[i], i, _PAYLOAD_TAG)) for i in range(1, len(self))]
        for position, work in works:
            self.wait(work, position, deadline, purpose)
        return [payload, *(_as_bytes(buffer) for buffer in buffers[1:])]

    def scatter(self, payloads: Sequence[bytes] | None, deadline: Deadline, purpose: str) -> bytes:
        """Send payload i of position 0 to position i; return this process's. `payloads` is None except at position 0.

        Raises:
            ProtocolError: a payload exceeds MAX_PAYLOAD_BYTES.
        """
        if payloads is not None:
            works = []
            for position in range(1, len(self)):
                for data, tag in (
                    (_LENGTH.pack(len(payloads[position])), _LENGTH_TAG),
                    (payloads[position], _PAYLOAD_TAG),
                ):
                    works.append((position, self.send(_as_tensor(data, self.device), position, tag)))
            for position, work in works:
                self.wait(work, position, deadline, purpose)
            return payloads[0]
        head = torch.empty(_LENGTH.size, dtype=torch.uint8, device=self.device)
        self.wait(self.receive(head, 0, _LENGTH_TAG), 0, deadline, purpose)
        (length,) = _LENGTH.unpack(_as_bytes(head))
        if not 0 < length <= MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"{purpose}: {self.label(0)} sends {length} bytes, expected 1 to {MAX_PAYLOAD_BYTES}")
        buffer = torch.empty(length, dtype=torch.uint8, device=self.device)
        self.wait(self.receive(buffer, 0, _PAYLOAD_TAG), 0, deadline, purpose)
        return _as_bytes(buffer)

    def send(self, tensor: torch.Tensor, position: int, tag: int) -> Posted:
        """Start sending a contiguous tensor, which must not change until `wait` returns."""
        try:
            return _Posted(self.group.send([tensor], position, tag), tensor)
        except RuntimeError as exc:
            raise PeerLost(f"sending to {self.label(position)}: {first_line(exc)}") from exc

    def receive(self, tensor: torch.Tensor, position: int, tag: int) -> Posted:
        """Start receiving into a contiguous tensor, which is filled when `wait` returns."""
        try:
            return _Posted(self.group.recv([tensor], position, tag), tensor)
        except RuntimeError as exc:
            raise PeerLost(f"receiving from {self.label(position)}: {first_line(exc)}") from exc

    def wait(self, posted: Any, position: int, deadline: Deadline, purpose: str) -> None:
        """Wait for one send or receive.

        Raises:
            DeadlineExceeded, PeerLost: names the rank; the group cannot be used for transfers afterwards.
        """
        with self.errors(deadline, f"{purpose} {self.label(position)}"):
            posted.work.wait(deadline.left())

    def errors(self, deadline: Deadline, subject: str) -> _Translating:
        """Return a block that turns torch's errors into DeadlineExceeded or PeerLost about `subject`."""
        return _Translating(deadline, subject, self.label(self.index))


@dataclass(slots=True)
class _Posted:
    """A started transfer. It keeps the tensor, and therefore its memory, alive."""

    work: Any
    tensor: torch.Tensor

    def abandon(self) -> None:
        """Drop a receive: it is then never filled, because gloo closes a connection whose next message has no receive.

        No other object may refer to the receive. If a transfer is still in flight, the group cannot be used afterwards.
        """
        self.work = None


@dataclass(frozen=True, slots=True)
class _Translating:
    """Turns torch's errors inside the block into refitd's errors."""

    deadline: Deadline
    subject: str
    who: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _: object) -> None:
        if isinstance(exc, RuntimeError):
            raise _translated(exc, self.deadline, self.subject, self.who) from exc


def _translated(exc: RuntimeError, deadline: Deadline, subject: str, who: str) -> TransportError:
    said = first_line(exc)
    if time.monotonic() >= deadline.at or "imed out" in said:
        return DeadlineExceeded(f"{subject}; {who} waited {deadline.seconds:g} s ({said})")
    return PeerLost(f"{subject}; {who} lost its connection ({said}); another rank's error may say why")


_SOURCE_LINE = re.compile(r"\[?[\w./-]*/[\w.-]+\.(?:cc|cpp|cu|h|hpp):\d+\]?:?")


def first_line(exc: BaseException) -> str:
    """Return the first line of a library's error, in ASCII and without its source file; its type if it has no text."""
    line = _SOURCE_LINE.sub("", (str(exc).splitlines() or [""])[0])
    return " ".join(line.encode("ascii", "ignore").decode().split()) or type(exc).__name__


def _device(group: Any) -> torch.device:
    """Return the device for tensors that the group moves: the CPU if possible."""
    kinds = [kind.type for kind in getattr(group, "_device_types", ())]
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    if kinds[0] == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(kinds[0])


def _as_tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


class MailboxStore(Store):
    """A torch Store over an epoch's mailbox: process groups form through the control plane, without an open port.

    It implements the methods that process groups use while they form: set, wait, get. Threads of a formed group may
    call the others until the group ends, so its owner keeps this object as long: torch's part alone refuses every call.
    `failure` is the error that ended a wait; torch raises another exception instead.
    """

    def __init__(self, epoch: Epoch, deadline: Deadline, attempt: str = "") -> None:
        """`deadline` applies to all attempts to join together; each `attempt` has its own keys."""
        super().__init__()
        self._epoch, self._deadline, self._attempt = epoch, deadline, attempt
        self._found: dict[str, bytes] = {}
        self._is_formed = False
        self.failure: RefitdError | None = None

    def formed(self) -> None:
        """Note that the group has formed. From now on values are known only here: a mailbox belongs to one thread."""
        self._is_formed = True

    def set(self, key: str, value: str | bytes) -> None:
        """Publish a value to the other workers, once."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._found[key] = data
        if not self._is_formed:
            self._epoch.mailbox.put(self._attempt + key, data)

    def get(self, key: str) -> bytes:
        """Wait for a value until the deadline, and return it.

        Raises:
            DeadlineExceeded, PeerLost: no worker put it.
            TransportError: the group has formed, and no value is exchanged any more.
        """
        if key not in self._found:
            if self._is_formed:
                raise TransportError(f"epoch {self._epoch.id}: its group has formed, and no worker puts {key!r} now")
            left = self._deadline.at - time.monotonic()
            try:
                self._found[key] = self._epoch.mailbox.get(self._attempt + key, max(0.001, left))
            except DeadlineExceeded as exc:
                # report the whole timeout: this wait may have had only the rest of it
                self.failure = DeadlineExceeded(
                    f"{self._who(key)} did not come to epoch {self._epoch.id} within {self._deadline.seconds:.1f} s"
                )
                raise self.failure from exc
            except RefitdError as exc:
                self.failure = exc
                raise
        return self._found[key]

    def _who(self, key: str) -> str:
        """Return the label of the worker that puts a key's value: process groups end their keys with the position."""
        position = key.rpartition("/")[2]
        if position.isdecimal() and int(position) < self._epoch.size:
            return self._epoch.labels[int(position)]
        return "some worker"

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all values are known."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all values are known."""
        return all(key in self._found for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Refuse: a counter needs one central place, and no transport of refitd uses one."""
        raise TransportError(f"epoch {self._epoch.id}: the rendezvous has no counters (asked for {key!r})")

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Refuse: this too needs one central place."""
        raise TransportError(f"epoch {self._epoch.id}: the rendezvous compares no values (asked for {key!r})")

    def clone(self) -> MailboxStore:
        """Return this store: its state may be used by several threads."""
        return self

    # torch calls these two methods by their names in C++

    def deleteKey(self, key: str) -> bool:
        """Ignored: values are dropped with their epoch."""
        return False

    delete_key = deleteKey

    def getNumKeys(self) -> int:
        """Return the number of values known here."""
        return len(self._found)

    num_keys = getNumKeys

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignored: the deadline of joining applies."""


def prove(peers: Peers, epoch: Epoch, deadline: Deadline) -> Authenticator:
    """Prove over the connections of a group that this worker has the epoch's key, and check the others' proofs.

    Collective. Return the authenticator for everything that these connections carry from now on.

    Raises:
        DeadlineExceeded, PeerLost: a worker did not answer.
        TransportError: a process without the key came as a worker; has its label.
    """
    held = Authenticator(epoch.key)
    nonces = peers.all_gather(secrets.token_bytes(_NONCE_BYTES), deadline, "proving who is there")

    def proof(prover: int, to: int) -> bytes:
        ends = [epoch.labels[prover].encode(), epoch.labels[to].encode(), nonces[prover], nonces[to]]
        return held.mac(b"proof", epoch.id.encode(), *ends)

    proofs = peers.all_to_all([proof(peers.index, to) for to in range(len(peers))], deadline, "proving who is there")
    for position, found in enumerate(proofs):
        if not hmac.compare_digest(found, proof(position, peers.index)):
            raise TransportError(
                f"the process that came as {epoch.labels[position]} does not hold the key of epoch {epoch.id}, or its "
                f"proof was altered on the way to {epoch.labels[peers.index]}"
            )
    return session(epoch.key, epoch.id)
