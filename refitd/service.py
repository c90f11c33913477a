"""What a process and its service manager tell each other: reloads, readiness, signs of life (man 3 sd_notify)."""

from __future__ import annotations

import os
import signal


def may_reload() -> bool:
    """Whether SIGHUP asks for a reload: not in a terminal, whose end it announces, nor under nohup."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return True
    return False
