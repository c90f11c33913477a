"""Whatever the layouts: the plan gives each destination exactly what slicing the whole tensor gives it."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from refitd.plan.build import plan_copies
from refitd.plan.validate import violations
from tests.property.layouts import Fleet, fleets
from tests.support import oracle

many = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@many
@given(fleets())
def test_every_destination_gets_what_slicing_gives(fleet: Fleet) -> None:
    plan = plan_copies(fleet.rosters)
    oracle.check(plan.table, fleet.rosters, fleet.shapes)
    assert violations(plan.table, fleet.rosters) == []
