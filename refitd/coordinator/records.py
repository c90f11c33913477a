"""What the journal records: how swaps ended, and which version is live."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwapRecord:
    """One swap in the journal."""

    swap: str
    model: str
    version: int
    state: str
    plan: str
    reason: str
    at: float
    report: bytes = b""
    run: str = ""

    @property
    def is_decided(self) -> bool:
        """Whether the swap was decided to commit."""
        return self.state != "aborted"


@dataclass(frozen=True, slots=True)
class LiveVersion:
    """The version of a model that was decided last; number and run identify it.

    `sequence` increases with every decision, also across journals that continue each other.
    """

    version: int
    run: str = ""
    sequence: int = 0
    swap: str = ""

    def is_at(self, version: int | None, run: str) -> bool:
        """Whether this is the given version of the given run."""
        return version == self.version and run == self.run

    def __str__(self) -> str:
        return f"{self.version} (run {self.run})" if self.run else str(self.version)


# (model, replica) of each replica that has, or had, a rank or its controller on a drained node, by node.
Drained = dict[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Drain:
    """A drained node, with its replicas as (model, replica); None: it takes part again."""

    node: str
    replicas: frozenset[tuple[str, str]] | None


@dataclass(frozen=True, slots=True)
class Recovered:
    """A live version that daemons know and this journal does not; `continues` is the journal that it came from."""

    model: str
    live: LiveVersion
    continues: str
    at: float
    highest: int = -1  # of all versions that were ever live
