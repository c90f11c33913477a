"""The matrix: swap phases, victims, faults, and the outcomes that each combination allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

PHASES = ("idle", "planned", "halting", "staging", "paused", "decided")
FLIP_PHASES = {
    "exchanging": "the engine `flips` has moved one of its two arenas",
    "exchanged": "it has exchanged them, and told nobody",
    "told": "it has said so, serves the version, and its daemon has not read that",
}
VICTIMS = ("trainer", "engine", "worker", "daemon", "source-daemon", "coordinator")

FAULTS = {
    "kill": "SIGKILL; started again a second later",
    "stop": "SIGSTOP for a second more than the phase's deadline, then SIGCONT",
    "cut": "its network is gone for as long",
    "full": "its files may not grow (RLIMIT_FSIZE), as on a full disk",
    "slow": "its link carries 48 Mbit/s",
    "crawl": "its link carries 2 Mbit/s, too little for the deadline",
    "stutter": "stopped and continued ten times a second",
    "clock": "its wall clock jumps a day ahead, then two days back",
    "unsynced": "its disk fails to sync what was written, until it is killed and started again",
    "remove": "its journal is removed while it runs; then it is killed and started again",
    "replace": "its journal is replaced by an earlier copy while it runs; then it is killed and started again",
    "lose": "SIGKILL; its journal is removed; started again a second later",
    "exchange": "SIGKILL; its journal is replaced by an earlier copy; started again a second later",
    "close": "it closes its client right after the commit, and registers again",
}

ABORTED = frozenset({"aborted"})
LIVE = frozenset({"committed", "incomplete"})
COMMITTED = frozenset({"committed"})
DECIDED = LIVE | {"decided"}  # after the journal is lost, no journal may have the end of the swap
ANY = ABORTED | LIVE


@dataclass(frozen=True, slots=True)
class Case:
    """One row. `outcomes` are the allowed outcomes of the swap that is held at this phase."""

    phase: str
    victim: str
    fault: str
    outcomes: frozenset[str]
    why_not: str = ""

    @property
    def name(self) -> str:
        """The name that `--only` matches."""
        return f"{self.phase}/{self.victim}/{self.fault}"


def matrix(no_network: str, no_clock: str) -> Iterator[Case]:
    """Yield all cases. Cases that cannot run here have a reason in `why_not`."""
    for phase in PHASES:
        for victim in VICTIMS:
            for fault in ("kill", "stop"):
                yield Case(phase, victim, fault, outcomes(phase, victim, fault))
    for phase in PHASES:
        for fault in ("kill", "stop"):  # the engine that flips, while another engine holds the swap
            yield Case(phase, "flips", fault, outcomes(phase, "flips", fault))
    for phase in FLIP_PHASES:
        for victim in VICTIMS:
            for fault in ("kill", "stop"):
                yield Case(phase, victim, fault, outcomes(phase, victim, fault))
    for phase in PHASES:
        for victim in ("worker", "daemon", "coordinator"):
            yield Case(phase, victim, "cut", outcomes(phase, victim, "cut"), no_network)
    for phase in PHASES:
        for victim in ("daemon", "coordinator", "engine", "trainer"):
            yield Case(phase, victim, "clock", COMMITTED, no_clock)
    for phase in FLIP_PHASES:
        yield Case(phase, "engine", "clock", LIVE, no_clock)
    # in the first case the decision cannot be written; in the second its completion cannot
    yield Case("paused", "coordinator", "full", ABORTED)
    yield Case("decided", "coordinator", "full", COMMITTED)
    # a decision that may be on disk is neither committed nor aborted before the journal is read again
    yield Case("paused", "coordinator", "unsynced", LIVE, no_clock)
    for fault in ("remove", "replace", "lose", "exchange"):
        yield Case("idle", "coordinator", fault, COMMITTED)
        yield Case("paused", "coordinator", fault, ABORTED)
        yield Case("decided", "coordinator", fault, DECIDED)
    yield Case("decided", "engine", "close", COMMITTED)
    yield Case("staging", "daemon", "slow", COMMITTED, no_network)
    yield Case("staging", "daemon", "crawl", ABORTED, no_network)
    yield Case("staging", "worker", "stutter", COMMITTED | ABORTED)


def outcomes(phase: str, victim: str, fault: str) -> frozenset[str]:
    """Return the allowed outcomes: a decided swap never aborts; a swap that needs its victim is not decided."""
    if phase == "decided" or phase in FLIP_PHASES:
        return LIVE
    match phase, victim, fault:
        case "idle", _, _:
            return COMMITTED  # no swap runs during the fault, and the next one begins after recovery
        case _, "trainer", "stop":
            return COMMITTED  # its version is in a slot of the daemon, so the swap does not need the trainer
        case _, ("engine" | "flips"), "kill":
            return ABORTED
        case "planned", "worker", "kill":
            return ABORTED | COMMITTED  # its successor may be ready before the plan needs it
        case (("planned" | "halting" | "staging"), "worker", ("kill" | "stop")):
            return ABORTED
        case "paused", "daemon", "kill":
            return ANY  # all is staged; if the swap is decided before silence shows the loss, it is incomplete
        case _, ("daemon" | "source-daemon"), "kill":
            return ABORTED
        case _, "coordinator", "kill":
            return ABORTED
        case (("halting" | "paused"), "engine", "stop"):
            return ABORTED
        case "paused", "worker", _:
            return COMMITTED  # all is staged
    return ANY


def chosen(cases: Iterator[Case], only: str) -> list[Case]:
    """Return the cases that match patterns like staging/*/kill, separated by commas. A missing field matches all."""
    patterns = [[*(pattern or "*").split("/"), "*", "*"][:3] for pattern in only.split(",")]
    return [case for case in cases if any(_matches(case, parts) for parts in patterns)]


def _matches(case: Case, parts: list[str]) -> bool:
    return all(fnmatchcase(has, part) for has, part in zip((case.phase, case.victim, case.fault), parts, strict=True))
