"""A daemon under any order of clients, coordinator and workers: resources stay with their owners and are freed."""

from __future__ import annotations

from tests.support.daemon_machine import DaemonMachine
from tests.support.machines import case_of

TestDaemon = case_of(DaemonMachine, examples=40, steps=40)
