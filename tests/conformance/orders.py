"""What processes of a world are asked to do, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

TIMEOUT_S = 20.0
Lent = Mapping[int, tuple[int, int]]  # process whose source arena was copied -> pid and address of the copy


@dataclass(frozen=True)
class Orders:
    """How a plan is to be run, and what goes wrong in it.

    Attributes:
        verify: whether what was written is compared with what was read.
        timeout: seconds.
        refuse: what stands in the way; two-sided services only.
        loses: whether what arrives is not written; two-sided services only.
        kill_at: the process kills itself when it is told of so many bytes.
        stop_at: likewise, it stops itself once, until somebody sends SIGCONT.
        raise_at: on_progress raises when it is told of so many bytes.
        pause_s: seconds that on_progress takes.
        linger_s: after an error, how long to look for bytes that are still written.
        fails_to_finish: whether `finish` raises; two-sided services only.
        forgets_local_receive: whether the receives of what stays here are not noted; two-sided services only.
        meddles: what somebody does to what comes here, see tests.support.meddling; two-sided services only.
    """

    verify: bool = True
    timeout: float = TIMEOUT_S
    refuse: str = ""
    loses: bool = False
    kill_at: int | None = None
    stop_at: int | None = None
    raise_at: int | None = None
    pause_s: float = 0.0
    linger_s: float = 0.0
    fails_to_finish: bool = False
    forgets_local_receive: bool = False
    meddles: str = ""


@dataclass(frozen=True)
class Answer:
    """What one process says about one call.

    Attributes:
        error: name of the class that was raised, "" for none; `said` is its text, `kinds` are its base classes.
        seconds: that the call took.
        progress: what on_progress was told.
        received: bytes that came, by the service's own account; those that stayed are in `local`.
        copy: the row that DigestMismatch names.
        is_usable: whether the service may still be used.
        wrote_late: whether targets changed after the error had been raised.
    """

    error: str = ""
    said: str = ""
    kinds: tuple[str, ...] = ()
    seconds: float = 0.0
    progress: tuple[int, ...] = ()
    received: int = 0
    local: int = 0
    messages: int = 0
    staging_bytes: int = 0
    copy: int = -1
    is_usable: bool = True
    wrote_late: bool = False


@dataclass(frozen=True)
class Vitals:
    """What a process holds of the kernel."""

    descriptors: int
    threads: int
    resident_bytes: int


class Stop(Exception):
    """Raised by on_progress."""
