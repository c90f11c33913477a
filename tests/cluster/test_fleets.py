"""One random fleet, as scripts/fleets makes them, for some operations."""

from __future__ import annotations

import pytest

from tests.fleets.__main__ import run


@pytest.mark.slow
def test_a_random_fleet_holds_every_byte(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(seed=5, seconds=120.0, operations=30), capsys.readouterr().out
