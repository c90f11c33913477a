"""Every order of events of a small cluster, with faults anywhere, keeps the rules of a swap."""

from __future__ import annotations

import pytest

from tests.exploration import probes
from tests.exploration.explore import Exploration
from tests.exploration.lockstep import POLLS, PollExploration, Polls
from tests.exploration.settings import SHORT
from tests.exploration.worlds import Setting


def test_events_that_no_cluster_produces_are_refused_without_effect() -> None:
    probes.check()


@pytest.mark.parametrize("setting", SHORT.values(), ids=SHORT)
def test_no_order_of_events_breaks_a_rule(setting: Setting) -> None:
    found = Exploration(setting).run()
    print(found)
    assert found.states > 1000 and found.ends > 10


@pytest.mark.parametrize("setting", POLLS.values(), ids=POLLS)
def test_no_step_of_a_lockstep_replica_sees_two_versions(setting: Polls) -> None:
    found = PollExploration(setting).run()
    print(found)
    assert found.states > 1000 and found.ends > 1
