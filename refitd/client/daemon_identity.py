"""Check which user owns the daemon before anything is sent to it."""

from __future__ import annotations

import difflib
import os
import pwd
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from refitd.buffers import handoff
from refitd.errors import ConfigError, RefusedError, TransportError

VARIABLE = "REFITD_DAEMON_UID"


@dataclass(frozen=True, slots=True)
class Trusted:
    """The users that this process trusts to run its daemon."""

    uids: frozenset[int]
    stated: bool  # by the caller or the environment; otherwise the default applies

    def text(self) -> str:
        """Describe the users for an error message."""
        whose = " or ".join(map(_user, sorted(self.uids)))
        return whose if self.stated else f"{whose}: this process's own user, or root"


def trusted(uid: int | None, environ: Mapping[str, str] = os.environ) -> Trusted:
    """Return the trusted users: `uid`, else $REFITD_DAEMON_UID, else this process's user and root.

    Raises:
        ConfigError: `uid` or the variable is not a user id, or a similar variable is set (probably a typing error).
    """
    where, found = "uid", uid
    # not those that Kubernetes sets for a service called refitd-daemon, such as REFITD_DAEMON_PORT
    if VARIABLE not in environ and (wrong := difflib.get_close_matches(VARIABLE, environ, 1, 0.85)):
        raise ConfigError(f"the environment variable {wrong[0]} has no effect; did you mean {VARIABLE}?")
    if uid is None and (text := environ.get(VARIABLE)):
        where = f"the environment variable {VARIABLE}"
        try:
            found = int(text)
        except ValueError:
            raise ConfigError(f"{where} is {text!r}; expected a user id, for instance {os.geteuid()}") from None
    if found is None:
        return Trusted(frozenset({os.geteuid(), 0}), stated=False)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 1 << 32:
        raise ConfigError(f"{where} is {found!r}; expected the user id of a daemon, 0 to {(1 << 32) - 1}")
    return Trusted(frozenset({found}), stated=True)


def enter(directory: Path, whose: Trusted, timeout: float, *, may_be_link: bool) -> tuple[socket.socket, handoff.Peer]:
    """Connect to the descriptor socket of the daemon in `directory`; return the socket and the daemon's process.

    This function sends no data. With `may_be_link` (the caller has named the directory), the directory may be a
    symbolic link that a trusted user made.

    Raises:
        TransportError: no daemon runs there.
        RefusedError: the directory or the daemon belongs to an untrusted user, or users other than the directory's
            owner may write to it.
    """
    path = directory / "refitd.fds"
    try:
        _check_directory(directory, whose, may_be_link=may_be_link)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except (FileNotFoundError, NotADirectoryError):
        raise _nobody(directory) from None
    except PermissionError as exc:
        raise _closed(path) from exc
    except OSError as exc:
        raise TransportError(f"{path}: {exc.strerror or exc}") from exc
    try:
        sock.settimeout(timeout)
        sock.connect(str(path))
        peer = handoff.peer_of(sock)
        if peer.uid not in whose.uids:
            raise _somebody_else(f"{directory}: the daemon here (pid {peer.pid})", peer.uid, whose)
    except BaseException as exc:
        sock.close()
        if isinstance(exc, FileNotFoundError | ConnectionRefusedError | NotADirectoryError):
            raise _nobody(directory) from None
        if isinstance(exc, PermissionError):
            raise _closed(path) from exc
        if isinstance(exc, OSError):
            raise TransportError(f"{path}: {exc.strerror or exc}") from exc
        raise
    return sock, peer


def message_socket(directory: Path, endpoint: str, peer: handoff.Peer) -> str:
    """Check and return the endpoint for messages: a socket of the daemon's user in the daemon's directory.

    Raises:
        RefusedError: the endpoint is in another directory or belongs to another user.
    """
    said = Path(endpoint.removeprefix("ipc://"))
    path = directory / said.name
    try:
        inside = not said.is_absolute() or said.parent.samefile(directory)
        found = path.lstat()
    except OSError as exc:
        raise RefusedError(
            f"{directory}: the daemon here wants messages sent to {endpoint!r}: {exc.strerror or exc}; its socket must "
            "lie in this directory, under the same path in both processes' mounts"
        ) from exc
    if not endpoint.startswith("ipc://") or not said.name or not inside:
        raise RefusedError(
            f"{directory}: the daemon here wants messages sent to {endpoint!r}, which is not in this directory; "
            "nothing has been sent there"
        )
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != peer.uid:
        raise RefusedError(
            f"{path}: expected a socket of {_user(peer.uid)}, whose daemon is here, found one of "
            f"{_user(found.st_uid)} (mode {found.st_mode:o}); nothing has been sent there"
        )
    return f"ipc://{path}"


def _check_directory(directory: Path, whose: Trusted, *, may_be_link: bool) -> None:
    found = directory.lstat()
    if stat.S_ISLNK(found.st_mode):
        if not may_be_link:
            raise RefusedError(
                f"{directory} is a symbolic link (of {_user(found.st_uid)}), and the default directory is never one: "
                "nothing has been sent there; remove it, or name the directory of the daemon that you mean"
            )
        if found.st_uid not in whose.uids | {0}:
            raise _somebody_else(f"the symbolic link {directory}", found.st_uid, whose)
        found = directory.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{directory}")
    # trusting root adds no risk: it can read and write all files anyway
    if found.st_uid not in whose.uids | {0}:
        raise _somebody_else(f"the directory {directory}", found.st_uid, whose)
    if found.st_mode & 0o022:
        raise RefusedError(
            f"{directory} has mode {found.st_mode & 0o7777:o}: others than its owner can put sockets there; nothing "
            f"has been sent to them; close it (`chmod go-w {directory}`)"
        )


def _somebody_else(what: str, uid: int, whose: Trusted) -> RefusedError:
    return RefusedError(
        f"{what} belongs to {_user(uid)}, expected {whose.text()}; nothing has been sent to it. If that is the daemon "
        f"you mean, say so: refitd.connect(..., uid={uid}), {VARIABLE}={uid}, or refitctl --uid {uid}; else name the "
        "directory of yours (refitd.connect(DIR), refitctl --runtime-dir DIR, REFITD_RUNTIME_DIR)"
    )


def _nobody(directory: Path) -> TransportError:
    return TransportError(
        f"no refitd daemon is running in {directory}; start one with `refitd serve --standalone`, or give the "
        "directory of a running one (refitd.connect(DIR), refitctl --runtime-dir DIR, REFITD_RUNTIME_DIR)"
    )


def _closed(path: Path) -> RefusedError:
    return RefusedError(f"{path}: permission denied; run as the daemon's user or have its admin allow yours")


def _user(uid: int) -> str:
    try:
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"uid {uid}"
