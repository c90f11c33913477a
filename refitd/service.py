"""A service process: its runtime directory, notifications to its service manager (man 3 sd_notify), and its end."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import NoReturn

from refitd.errors import ConfigError, RefusedError


def end(status: int) -> NoReturn:
    """End this process after its work is done.

    Its output is flushed and its atexit functions are called. Modules are not torn down: that takes longer than most
    commands, and 0.4 s with torch.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, full, or None
            stream.flush()
    os._exit(status & 0xFF)


def may_reload() -> bool:
    """Whether SIGHUP asks for a reload: not in a terminal (SIGHUP announces its end), nor under nohup."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return True
    return False


class ServiceManager:
    """Sends datagrams to the socket in $NOTIFY_SOCKET, which a unit of Type=notify has; without one, sends none."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Take the socket out of the environment: it is not for this process's children."""
        self._address = environ.pop("NOTIFY_SOCKET", "")
        mine = environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = environ.pop("WATCHDOG_USEC", "")
        self._period_s = int(usec) / 2e6 if mine and usec.isdecimal() else 0.0  # twice as often as it must
        self._last = float("inf")  # the watchdog is only on once start-up is completed (man 5 systemd.service)

    def ready(self) -> None:
        """Say that the service has started; from then on `alive` says something."""
        self._last = float("-inf")
        self._say("READY=1")

    def alive(self, now: float) -> None:
        """Notify the watchdog that this process's loop runs, if it is ready and the unit has one; call it every second.

        Args:
            now: monotonic seconds.
        """
        if self._period_s and now - self._last >= self._period_s:
            self._last = now
            self._say("WATCHDOG=1")

    def stopping(self) -> None:
        """Say that the service ends."""
        self._say("STOPPING=1")

    def _say(self, text: str) -> None:
        if not self._address:
            return
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        # a manager that is gone must not end what it has started
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.setblocking(False)
            end.sendto(text.encode(), address)


# --- the runtime directory --------------------------------------------------------------------------------

LOCK = "refitd.lock"

_OWNER_S = 1.0  # time for a process that has just locked a directory to write its pid


def make_runtime_dir(path: Path, *, opened: bool = False) -> None:
    """Create or check the runtime directory: mode 0700 and owned by this user.

    Args:
        path: the directory.
        opened: whether other users may enter it (node.allowed_uids), through its mode or an access list (whose mask is
            the group's mode). Other users may never write there.

    Raises:
        ConfigError: it belongs to another user, is open to others, or cannot be created.
    """
    try:
        if not path.is_dir():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)  # mkdir applies the umask
    except OSError as exc:
        raise ConfigError(f"node.runtime_dir {path}: {exc.strerror}; choose a directory this user can make") from exc
    check_runtime_dir(path, opened=opened)


def check_runtime_dir(path: Path, *, opened: bool = False) -> None:
    """Raise ConfigError if an existing runtime directory belongs to another user or is open to others.

    Takes the same arguments as `make_runtime_dir`.
    """
    try:
        stat = path.lstat()
    except OSError as exc:
        raise ConfigError(f"node.runtime_dir {path}: {exc.strerror}; choose a directory this user can make") from exc
    closed = 0o022 if opened else 0o077
    if stat.st_uid != os.getuid() or stat.st_mode & closed or path.is_symlink():
        wanted = "that nobody else may write to" if opened else "with mode 0700"
        raise ConfigError(
            f"node.runtime_dir {path} must be a directory of uid {os.getuid()} {wanted} "
            f"(found uid {stat.st_uid}, mode {stat.st_mode & 0o777:o}); fix it or choose another; "
            "it may be opened to the users of node.allowed_uids only"
        )


def _is_running(pid: str) -> bool:
    """Whether the text is the id of a running process of this machine."""
    try:
        os.kill(int(pid), 0)  # signal 0 only checks whether the process exists
    except PermissionError:  # it is running, as another user
        return True
    except (ValueError, OverflowError, OSError):
        return False
    return True


class DirectoryLock:
    """One daemon's lock on a runtime directory, for the life of its process."""

    def __init__(self, directory: Path) -> None:
        """Lock the directory.

        Raises:
            RefusedError: another process has locked it; the error names the process.
            ConfigError: files cannot be created there.
        """
        self._path = directory / LOCK
        deadline = time.monotonic() + _OWNER_S
        while True:
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as exc:
                raise ConfigError(f"{self._path}: {exc.strerror}; check node.runtime_dir") from exc
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                owner = os.pread(fd, 20, 0).decode(errors="replace").strip()
                os.close(fd)
                # a process that has just locked the file may not have overwritten its predecessor's id yet
                if not _is_running(owner) and time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
                raise RefusedError(
                    f"{directory}: another refitd process (pid {owner or 'unknown'}) is already listening here; "
                    "stop it, or choose another node.runtime_dir"
                ) from exc
            # the last owner may have removed the file between open and flock
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(fd).st_ino == self._path.stat().st_ino:
                    break
            os.close(fd)
        self._fd = fd
        os.ftruncate(fd, 0)
        with contextlib.suppress(OSError):  # on a full disk the lock works without the pid
            os.write(fd, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Unlock the directory and remove the lock file."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
