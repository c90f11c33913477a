"""The processes that a client depends on: its daemon, and its lifeline.

The user who owns the daemon is checked before anything is sent to it. Pidfds watch the other processes.
"""

from __future__ import annotations

import difflib
import errno
import multiprocessing
import os
import pwd
import select
import socket
import stat
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from refitd.buffers import handoff
from refitd.client.calls import MAX_PID, text, whole
from refitd.errors import ConfigError, Orphaned, RefusedError, TransportError
from refitd.text import shown


class Lifeline:
    """The processes that this one serves for, such as the server of an engine; pass it to `connect(lives_with=)`.

    A pidfd refers to a process; the kernel may reuse a pid, but not a pidfd. A pidfd is readable once the process has
    ended, for any reason, even before it is reaped. It works for a parent, for a grandparent (a worker's server), and
    for an unrelated process. After `fork`, `setsid` or a second fork of this process it still refers to the same
    process. Several clients of a process may share a lifeline.
    """

    def __init__(self, processes: Mapping[int, str]) -> None:
        """Open the pidfds and start the watching thread.

        Args:
            processes: {pid: name in messages}, such as {pid: "the API server"}. The pids belong to this process's pid
                namespace. Let a process that knows the pid for certain pass it on: if a child's parent has ended,
                `os.getppid()` returns the pid of another process.

        Raises:
            Orphaned: one of them has ended.
            RefusedError: an argument is invalid, or the kernel has no pidfds (Linux before 5.3, or a seccomp filter).
        """
        self._ended = ""
        self._calls: list[weakref.WeakMethod[Callable[[Orphaned], None]]] = []
        self._lock = threading.Lock()
        if not isinstance(processes, Mapping) or not processes:
            raise RefusedError(f"a lifeline's processes are {shown(processes)}, expected {{pid: name}}")
        names = {whole("pid", pid, 1, MAX_PID): text("process", what) for pid, what in processes.items()}
        fds: dict[int, str] = {}
        wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            for pid, what in names.items():
                fds[_opened(pid, what)] = f"{what} (pid {pid})"
            self._ended = _ended(fds)
            self.check()
        except BaseException:
            _close_all([*fds, wake])
            raise
        self._close = weakref.finalize(self, _stop, wake, os.getpid())
        self._close.atexit = False
        watched = fds, wake, weakref.ref(self)
        threading.Thread(target=_watch, args=watched, name="refitd-lifeline", daemon=True).start()

    @classmethod
    def of_parent(cls, what: str, others: Mapping[int, str] | None = None) -> Self:
        """Return the lifeline of the process that started this one; `what` is its name in messages.

        In a process of `multiprocessing` it watches the process that created this one. Elsewhere it watches the
        parent, which must live when this is called. `others` are further processes, as in the constructor.

        Raises:
            Orphaned: one of the processes has ended.
            RefusedError: as the constructor.
        """
        started = multiprocessing.parent_process()
        pid = os.getppid() if started is None or started.pid is None else started.pid
        lifeline = cls({pid: what, **(others or {})})
        # If the parent lives now, the pid is the parent's. Otherwise the kernel may have reused it.
        if os.getppid() != pid and (started is None or not started.is_alive()):
            lifeline.close()
            raise _orphaned(f"{what} (pid {pid}) has ended")
        return lifeline

    @property
    def ended(self) -> str:
        """The processes that have ended, such as "the API server (pid 71) has ended"; "" while all live."""
        return self._ended

    def check(self) -> None:
        """Raise Orphaned if one of the processes has ended."""
        if self._ended:
            raise _orphaned(self._ended)

    def on_end(self, call: Callable[[Orphaned], None]) -> None:
        """Call a bound method with the error, once, on the lifeline's thread; do not keep its object alive.

        If a process has ended already, this calls the method before it returns.
        """
        with self._lock:
            if not self._ended:
                self._calls.append(weakref.WeakMethod(call))
                return
        call(_orphaned(self._ended))

    def close(self) -> None:
        """Stop watching; `ended` does not change afterwards."""
        self._close()

    def _end(self, ended: str) -> None:
        with self._lock:
            self._ended = ended
            calls, self._calls = self._calls, []
        for each in calls:
            if (call := each()) is not None:
                call(_orphaned(ended))


def _orphaned(ended: str) -> Orphaned:
    return Orphaned(
        f"{ended}, and this process serves for it: its registrations are closed, and it must serve nothing; end this "
        "process, and start it again together with its server"
    )


def _opened(pid: int, what: str) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise _orphaned(f"{what} (pid {pid}) has ended") from None
    except OSError as exc:
        why = "the kernel is older than Linux 5.3" if exc.errno == errno.ENOSYS else f"pidfd_open: {exc.strerror}"
        raise RefusedError(
            f"the end of {what} (pid {pid}) cannot be noticed: {why}; allow pidfd_open in the container's seccomp "
            "profile, or connect without lives_with"
        ) from exc


def _ended(fds: Mapping[int, str], wake: int | None = None) -> str:
    """Return which processes have ended, "" if none; given `wake`, wait for an end or a write to `wake`."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    if wake is not None:
        poller.register(wake, select.POLLIN)
    ready = [fd for fd, _ in poller.poll(0 if wake is None else None) if fd != wake]
    return " and ".join(f"{fds[fd]} has ended" for fd in ready)


def _watch(fds: Mapping[int, str], wake: int, of: weakref.ref[Lifeline]) -> None:
    """Wait for the end of a process, then until the lifeline is closed: the body of a thread."""
    try:
        if (ended := _ended(fds, wake)) and (lifeline := of()) is not None:
            lifeline._end(ended)
            del lifeline
        _ended({}, wake)
    finally:
        _close_all([*fds, wake])


def _stop(wake: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child shares the descriptor with its parent's thread
        os.eventfd_write(wake, 1)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


# --- the daemon -------------------------------------------------------------------------------------------

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
