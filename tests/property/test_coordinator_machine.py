"""The coordinator under any order of events, duplicates, losses of nodes and restarts, with its journal on disk."""

from __future__ import annotations

from tests.support.coordinator_machine import CoordinatorMachine
from tests.support.machines import case_of

TestCoordinator = case_of(CoordinatorMachine, examples=30, steps=50)
