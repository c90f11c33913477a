"""Notifications between a process and its service manager (man 3 sd_notify), and the end of a process."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
from collections.abc import MutableMapping
from typing import NoReturn


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
