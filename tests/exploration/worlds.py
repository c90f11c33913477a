"""The values of an exploration: its setting, the states of the explored cluster, and broken rules."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from tests.exploration.fleet import Write
from tests.exploration.nodes import Mode


class Setting(NamedTuple):
    """The subject of one exploration."""

    mode: Mode = Mode()
    controlled: bool = False  # a controller pauses replica a
    swaps: int = 1  # that the operator asks for
    faults: int = 2
    held: bool = False  # a rank that has left the cluster may serve until its permit ends
    early: bool = False  # a swap is asked for while the trainer still writes the version
    asleep: bool = False  # replica b is suspended at the start
    delays: int | None = None  # how often another event than the next one may come first; None: in every order


class Journal(NamedTuple):
    """The journal: decided swaps with their versions, and the write under way."""

    live: int = 1
    decided: tuple[tuple[str, int], ...] = ()
    ranks: frozenset[tuple[int, int]] = frozenset()  # that were registered when the last decision was made
    before: int = 1  # the live version before it
    write: Write | None = None
    is_written: bool = False  # the write is on disk, and not answered
    crashed: tuple[int, int, int] = (0, 0, 0)  # boot, swaps begun, swaps wanted, when no coordinator runs


class World(NamedTuple):
    """A state of the cluster, as numbers of its parts."""

    fleet: int  # -1: no coordinator runs
    journal: int
    nodes: tuple[int, int]
    faults: int  # that may still happen
    delays: int = 0  # that may still happen


class Violation(Exception):
    """An order of events that breaks a rule."""

    def __init__(self, reason: str, trace: list[str]) -> None:
        super().__init__(reason + "".join(f"\n  {n:>2}. {what}" for n, what in enumerate(trace, 1)))
        self.reason, self.trace = reason, trace


class Found(NamedTuple):
    """The result of one exploration."""

    states: int
    transitions: int
    ends: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.states} states, {self.transitions} transitions, {self.ends} ends, {self.seconds:.1f} s"


class Store:
    """Values by number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def __call__(self, value: Hashable) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


class Broken(Exception):
    """A rule is broken in `world`; `last` names the event that breaks it if no world follows."""

    def __init__(self, reason: str, *, world: World | None = None, last: list[str] | None = None) -> None:
        super().__init__(reason)
        self.reason, self.world, self.last = reason, world, last or []


def on_disk(journal: Journal) -> Journal:
    """Return the journal once the decision is written."""
    write = journal.write
    assert write is not None
    decided = (*journal.decided, (write.swap, write.version))
    before = journal.before if write.version == journal.live else journal.live
    ranks = write.ranks | journal.ranks
    return journal._replace(live=write.version, decided=decided, ranks=ranks, before=before, is_written=True)
