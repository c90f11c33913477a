"""Events and instructions that the daemon's and the coordinator's state share: time and logging."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Busy:
    """This process was busy or stopped for `seconds`, so peers only seem to have been silent."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed, at most one heartbeat."""


@dataclass(frozen=True, slots=True)
class Log:
    """Instruction: write one log line."""

    event: str
    fields: dict[str, object]
