"""A daemon per test, everybody's log on failure, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from refitd.testing import Daemon


@pytest.fixture
def daemon(start_daemon: Callable[..., Daemon]) -> Daemon:
    # a rank that misses its commit point is given up soon
    return start_daemon("[deadlines]\ncommit_s = 4.0\n")
