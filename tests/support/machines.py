"""Settings for Hypothesis state machines."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine


def case_of(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> Any:
    """The class that pytest runs."""
    case = machine.TestCase
    checks = list(HealthCheck)
    case.settings = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=checks
    )
    case.pytestmark = [pytest.mark.timeout(600)]  # a busy machine takes minutes
    return case
