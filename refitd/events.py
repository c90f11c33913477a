"""What the states of daemon and coordinator share: events that tell of time, and the log as an instruction."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Busy:
    """This process was busy or stopped for so long: the others were not silent."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: a heartbeat or less."""


@dataclass(frozen=True, slots=True)
class Log:
    """Write one line."""

    event: str
    fields: dict[str, object]
