"""Orders to the processes of a world, and their answers."""

from __future__ import annotations

from dataclasses import dataclass

TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Orders:
    """How to run a plan, and which faults to inject.

    Attributes:
        verify: whether written bytes are compared with the bytes that were read.
        timeout: seconds.
        refuse: the reason with which this process refuses; two-sided services only.
        loses: whether received bytes are dropped; two-sided services only.
        kill_at: bytes of progress at which the process kills itself.
        stop_at: bytes of progress at which the process stops itself once, until it receives SIGCONT.
        raise_at: bytes of progress at which on_progress raises.
        pause_s: seconds that on_progress takes.
        linger_s: after an error, how long to look for bytes that are still written.
        fails_to_finish: whether `finish` raises; two-sided services only.
        forgets_local_receive: whether to skip noting receives from this process itself; two-sided services only.
        meddles: how to alter received bytes, see refitd.testing.conformance.meddling; two-sided services only.
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
    """The answer of one process to one call.

    Attributes:
        error: name of the class that was raised, "" for none; `said` is its text, `kinds` are its base classes.
        seconds: that the call took.
        progress: the arguments of on_progress.
        received: bytes received from other processes, as counted by the service; `local` has those from this process.
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
    """Kernel resources of a process."""

    descriptors: int
    threads: int
    resident_bytes: int


class Stop(Exception):
    """Raised by on_progress."""
