"""Requests to an etcd cluster over its JSON gateway, with limits on time and size; any member may answer."""

from __future__ import annotations

import base64
import binascii
import contextlib
import copy
import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from refitd.config import EtcdConfig, EtcdPlace
from refitd.errors import CommitError
from refitd.files import check_regular, open_regular
from refitd.text import brief, printable

# Seconds that one member may take for one request. A frozen one costs this once; then the others are asked first.
CALL_S = 0.8

# Limit on the body of an answer.
MAX_ANSWER_BYTES = 64 << 20

Json: TypeAlias = Mapping[str, Any]

# gRPC codes of requests that etcd has certainly not executed. After other codes (timeout, leader change) it may still
# execute it.
_INVALID, _NOT_FOUND, _DENIED, _EXHAUSTED, _PRECONDITION, _UNAUTHENTICATED = 3, 5, 7, 8, 9, 16
_CERTAIN = frozenset({_INVALID, _NOT_FOUND, _DENIED, _EXHAUSTED, _PRECONDITION, _UNAUTHENTICATED})
_AGAIN = ("too many requests",)  # texts among these after which a retry may succeed


class NotReached(CommitError):
    """No member has answered in time.

    Attributes:
        may_hold: whether a member may have executed the request, or may still do so.
    """

    def __init__(self, text: str, *, may_hold: bool) -> None:
        super().__init__(text)
        self.may_hold = may_hold


class Refused(CommitError):
    """etcd has answered that it has not executed the request.

    Attributes:
        may_hold: whether an earlier try of the same request may have been executed.
    """

    def __init__(self, text: str, *, may_hold: bool) -> None:
        super().__init__(text)
        self.may_hold = may_hold


class _Failed(Exception):
    """One try has failed. `sent`: something of the request was sent."""

    def __init__(self, text: str, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent


class _Answered(Exception):
    """A member has answered with an error."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Gateway:
    """Sends requests to the members of one etcd cluster, one at a time, from one thread.

    Attributes:
        cluster: the id of the cluster, which every answer must come from; "" before the first answer.
    """

    def __init__(self, place: EtcdPlace, options: EtcdConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the certificates and the password; do not connect.

        Raises:
            CommitError: a file cannot be read.
        """
        self.name, self.cluster = str(place), ""
        self._clock = clock
        self._members = list(place.members)
        self._addresses: dict[tuple[str, int], str] = {}
        self._connections: dict[tuple[str, int], http.client.HTTPConnection] = {}
        self._user, self._password, self._token = options.user, "", ""
        try:
            self._tls = _tls(options) if place.tls else None
            if options.password_file:
                self._password = _secret(Path(options.password_file))
        except (OSError, UnicodeDecodeError) as exc:  # ssl's errors are OSErrors
            raise CommitError(f"journal {self.name}: {exc}; check the files that [etcd] names") from exc

    def another(self) -> Gateway:
        """Return a gateway to the same members with its own connections, for another thread."""
        made = copy.copy(self)
        made._members, made._addresses, made._connections = list(self._members), dict(self._addresses), {}
        return made

    def look_up(self) -> None:
        """Forget the members' addresses: the next requests resolve their names again, which may take seconds."""
        self._addresses.clear()

    def ask(self, what: str, body: Json, within_s: float) -> Json:
        """Send one request, to one member after the other until one answers; return the answer.

        A request may be sent to several members: it must have the same effect if it is carried out twice.

        Args:
            what: the path below /v3, as "kv/txn".
            body: the request; see etcd's API.
            within_s: seconds for all tries together.

        Raises:
            NotReached: no member answered in time.
            Refused: etcd answered with an error that another try does not mend.
        """
        until = self._clock() + within_s
        said: dict[str, str] = {}  # errors by member
        may_hold = authenticated = False
        while (left := until - self._clock()) > 0:
            member = self._members[0]
            where = f"{member[0]}:{member[1]}"
            began = self._clock()
            try:
                if self._user and not self._token:
                    self._authenticate(member, min(CALL_S, left))
                return self._try(member, what, body, min(CALL_S, left))
            except _Failed as exc:
                said[where] = str(exc)
                may_hold |= exc.sent
            except _Answered as exc:
                text, again = str(exc), any(word in str(exc) for word in _AGAIN)
                if self._user and exc.code == _UNAUTHENTICATED and not authenticated:
                    authenticated, self._token = True, ""  # it has run out
                    continue
                if exc.code in _CERTAIN and not again:
                    raise Refused(self._refusal(text), may_hold=may_hold) from None
                said[where] = text
                may_hold |= not again
            self._members.append(self._members.pop(0))
            if self._clock() - began < CALL_S / 4:  # refused without delay, as during an election
                time.sleep(min(0.05, max(0.0, until - self._clock())))
        found = "; ".join(f"{where}: {text}" for where, text in sorted(said.items())) or "no time was left"
        text = (
            f"journal {self.name}: no majority of etcd has answered within {within_s:.1f} s ({found}); check its "
            "members (`etcdctl endpoint status`) and the network"
        )
        raise NotReached(text, may_hold=may_hold)

    def _refusal(self, text: str) -> str:
        advice = "check coordinator.journal and [etcd]"
        if "database space exceeded" in text:
            advice = (
                "etcd is full: compact and defragment it, then `etcdctl alarm disarm`, or raise --quota-backend-bytes; "
                "see `refitctl docs runbook`"
            )
        elif "too large" in text or "too many operations" in text:
            advice = "raise --max-request-bytes and --max-txn-ops of etcd, or swap fewer models together"
        elif "authentication failed" in text or "user name" in text or "permission denied" in text:
            advice = "check etcd.user, etcd.password_file, and that the user's role may read and write the prefix"
        return f"journal {self.name}: etcd answers: {text}; {advice}"

    def _authenticate(self, member: tuple[str, int], within_s: float) -> None:
        body = {"name": self._user, "password": self._password}
        try:
            answer = self._try(member, "auth/authenticate", body, within_s)
        except _Failed as exc:
            raise _Failed(str(exc), sent=False) from None
        except _Answered as exc:
            if exc.code == _PRECONDITION:  # etcd asks for no password
                self._token = "-"
                return
            raise
        self._token = str(answer.get("token", ""))

    def _try(self, member: tuple[str, int], what: str, body: Json, within_s: float) -> Json:
        until = self._clock() + within_s
        sent = False
        try:
            connection = self._connection(member, within_s)
            if connection.sock is not None:
                connection.sock.settimeout(max(0.01, until - self._clock()))
            headers = {"Content-Type": "application/json"}
            if len(self._token) > 1:
                headers["Authorization"] = self._token
            sent = True
            connection.request("POST", f"/v3/{what}", json.dumps(body), headers)
            answer = connection.getresponse()
            data = self._read(connection, answer, until)
        except (OSError, http.client.HTTPException, ValueError) as exc:
            self._drop(member)
            text = "no answer in time" if isinstance(exc, TimeoutError) else str(exc) or type(exc).__name__
            raise _Failed(brief(printable(text)), sent) from None
        try:
            found = json.loads(data)
            if not isinstance(found, dict):
                raise ValueError
        except ValueError:
            self._drop(member)
            text = f"HTTP {answer.status}, and no JSON: {printable(data[:120].decode(errors='replace').strip())!r}"
            raise _Failed(f"{text}; is it etcd 3.4 or newer?", sent) from None
        found = found.get("result", found)  # of a stream
        if answer.status != 200 or "error" in found:
            code = found.get("code", 0)
            text = brief(printable(str(found.get("message") or found.get("error"))))
            raise _Answered(code if isinstance(code, int) else 0, text)
        answered: Json = found
        self._check_cluster(member, answered)
        return answered

    def _check_cluster(self, member: tuple[str, int], found: Json) -> None:
        header = found.get("header")
        cluster = str(header.get("cluster_id", "")) if isinstance(header, dict) else ""
        self.cluster = self.cluster or cluster
        if cluster != self.cluster:
            raise Refused(
                f"journal {self.name}: {member[0]}:{member[1]} is of another etcd cluster ({cluster}) than the members "
                f"asked before ({self.cluster}); name members of one cluster in coordinator.journal",
                may_hold=True,
            )

    def _read(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse, until: float) -> bytes:
        parts, size = list[bytes](), 0
        while True:
            if (left := until - self._clock()) <= 0:
                raise TimeoutError
            if connection.sock is not None:
                connection.sock.settimeout(left)
            part = answer.read1(1 << 16)
            if not part:
                answer.close()  # the connection is free for the next request
                return b"".join(parts)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
            parts.append(part)

    def _connection(self, member: tuple[str, int], within_s: float) -> http.client.HTTPConnection:
        found = self._connections.get(member)
        if found is not None and found.sock is not None:
            return found
        address = self._addresses.get(member)
        if address is None:
            address = str(socket.getaddrinfo(*member, type=socket.SOCK_STREAM)[0][4][0])
            self._addresses[member] = address
        found = http.client.HTTPConnection(address, member[1], timeout=within_s)
        found.connect()
        if self._tls is not None:
            assert found.sock is not None
            found.sock = self._tls.wrap_socket(found.sock, server_hostname=member[0])
        self._connections[member] = found
        return found

    def _drop(self, member: tuple[str, int]) -> None:
        if (found := self._connections.pop(member, None)) is not None:
            found.close()

    def close(self) -> None:
        """Close all connections."""
        for member in list(self._connections):
            with contextlib.suppress(OSError):
                self._drop(member)


def _secret(path: Path) -> str:
    with open(open_regular(path), encoding="utf-8") as file:
        if (mode := os.fstat(file.fileno()).st_mode & 0o777) & 0o077:
            raise OSError(f"{path}: mode {mode:o} lets others read the password; chmod 600 {path}")
        return file.read(4096).rstrip("\n")


def _tls(options: EtcdConfig) -> ssl.SSLContext:
    for path in filter(None, (options.ca, options.cert, options.key)):
        check_regular(path)
    found = ssl.create_default_context(cafile=options.ca or None)
    if options.cert:
        found.load_cert_chain(options.cert, options.key or None)
    return found


def encoded(data: bytes) -> str:
    """Return bytes as the gateway writes them."""
    return base64.b64encode(data).decode()


def decoded(text: object) -> bytes:
    """Return bytes that the gateway wrote; b"" for omitted ones.

    Raises:
        ValueError: it is no base64.
    """
    try:
        return base64.b64decode(str(text or ""), validate=True)
    except binascii.Error as exc:
        raise ValueError(str(exc)) from exc


def number(value: object) -> int:
    """Return a number that the gateway wrote as text; 0 for an omitted one."""
    return int(str(value or 0))
