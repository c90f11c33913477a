"""A selection of fault cases, with each phase, victim and kind at least once; `scripts/faults` runs all cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import clock
from tests.faults.cases import FAULTS, FLIP_PHASES, PHASES, VICTIMS, Case, chosen, matrix
from tests.faults.cluster import Cluster
from tests.faults.run import Runner
from tests.support import network
from tests.support.network import TwoHosts

CHOSEN = (
    "idle/worker/kill",
    "planned/worker/kill",
    "planned/coordinator/kill",
    "halting/coordinator/kill",
    "staging/trainer/kill",
    "staging/engine/kill",
    "staging/daemon/cut",
    "staging/worker/stutter",
    "paused/engine/stop",
    "paused/source-daemon/kill",
    "paused/coordinator/full",
    "decided/daemon/kill",
    "decided/coordinator/kill",
    "decided/coordinator/clock",
    "idle/coordinator/remove",
    "paused/coordinator/replace",
    "paused/coordinator/lose",
    "decided/coordinator/exchange",
    "decided/engine/close",
    "staging/flips/kill",
    "exchanging/engine/kill",
    "exchanged/engine/kill",
    "exchanged/daemon/kill",
    "told/engine/kill",
    "told/coordinator/stop",
)
NO_NETWORK, NO_CLOCK = network.why_not(), clock.why_not()
# ten seconds for each on a slow machine; the other cases run in scripts/faults and `scripts/test -m slow`
QUICK = ("staging/worker/stutter", "staging/trainer/kill", "paused/engine/stop", "decided/coordinator/kill")
CASES = [case for name in CHOSEN for case in chosen(matrix(NO_NETWORK, NO_CLOCK), name)]


class Runners:
    """The current runner; after a failed case, a new one with a separate cluster."""

    def __init__(self) -> None:
        self._hosts = None if NO_NETWORK else TwoHosts()
        self.runner: Runner | None = None
        self._cluster: Cluster | None = None

    def current(self) -> Runner:
        if self.runner is None:
            self._cluster = Cluster(self._hosts)
            try:
                self.runner = Runner(self._cluster)
            except BaseException:
                print(self.discard())
                raise
        return self.runner

    def discard(self) -> str:
        assert self._cluster is not None
        logs = self._cluster.logs()
        self._cluster.remove()
        self.runner = self._cluster = None
        return logs

    def close(self) -> list[str]:
        left: list[str] = []
        if self._cluster is not None:
            left = self._cluster.stop() if self.runner is not None else []
            self._cluster.remove()
        if self._hosts is not None:
            self._hosts.close()
        return left


@pytest.fixture(scope="module")
def runners() -> Iterator[Runners]:
    found = Runners()
    left: list[str] = ["it was not closed"]
    try:
        yield found
    finally:
        left = found.close()
    assert not left


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in CASES],
)
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("forked")
def test_a_fault_leaves_one_version_everywhere_and_nothing_behind(runners: Runners, case: Case) -> None:
    if case.why_not:
        pytest.skip(case.why_not)
    result = runners.current().run(case)
    if result.problems:
        print(f"the swap was {result.outcome}, told: {result.told}\n{runners.discard()}")
    assert not result.problems


def test_every_phase_victim_and_fault_has_its_rows_and_the_chosen_ones_are_among_them() -> None:
    everything = list(matrix("", ""))
    assert len(CASES) == len(CHOSEN)
    phases, victims = (*PHASES, *FLIP_PHASES), (*VICTIMS, "flips")
    for names, part in ((phases, "phase"), (victims, "victim"), (tuple(FAULTS), "fault")):
        assert {getattr(case, part) for case in everything} == set(names)
    for phase in phases:
        for victim in VICTIMS:
            assert {case.fault for case in chosen(iter(everything), f"{phase}/{victim}")} >= {"kill", "stop"}
