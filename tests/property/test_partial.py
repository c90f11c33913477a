"""For any layouts and any offered part, exactly that part arrives and no other element is written."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refitd.client.given import Keeps, kept_tensor, offered_by
from refitd.coordinator.eligibility import part_problems
from refitd.describe.layout import canonical_name
from refitd.plan.build import plan_copies
from refitd.protocol.shards import shard_of
from refitd.testing import oracle
from tests.property.layouts import Fleet, fleets


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(fleets(), st.integers())
def test_what_is_offered_arrives_and_the_rest_is_kept(fleet: Fleet, seed: int) -> None:
    rng = Random(seed)
    offered = {name for name in fleet.shapes if rng.random() < 0.6} or {min(fleet.shapes)}
    rosters = [
        replace(r, source=[m for m in r.source if canonical_name(m) in offered], label=f"rank {r.rank}")
        for r in fleet.rosters
    ]
    sources = [shard_of(r.source, is_partial=True) for r in rosters if r.source]
    unsaid = part_problems(sources, [shard_of(r.destination) for r in rosters if r.destination])
    wanted = {m.name for r in rosters for m in r.destination if np.prod(m.shape) and canonical_name(m) not in offered}
    assert {problem.partition(":")[0] for problem in unsaid} == wanted

    keeps = Keeps(offered=offered_by(rosters))
    kept = [keeps.of(list(r.destination)) for r in rosters]
    taking = [
        replace(r, destination=[m for m in r.destination if m not in mine])
        for r, mine in zip(rosters, kept, strict=True)
    ]
    shards = [
        shard_of(r.destination, kept=[kept_tensor(m) for m in mine], keeps_rest=True)
        for r, mine in zip(taking, kept, strict=True)
        if r.destination or mine
    ]
    assert part_problems(sources, shards) == []
    plan = plan_copies(taking)
    oracle.check(plan.table, taking, fleet.shapes, plan.fills)  # each offered element once
    written = {plan.table.locals[i] for i in np.unique(plan.table.dst_local).tolist()}
    written |= {plan.fills.locals[i] for i in np.unique(plan.fills.local).tolist()}
    assert written <= offered
    # refused: tensors that targets keep but sources offer now, and sources that no longer declare a partial offer
    if any(kept):
        everything = [shard_of(r.source, is_partial=True) for r in fleet.rosters if r.source]
        assert "which the sources offer" in part_problems(everything, shards)[0]
        assert "do not say that they offer a part" in part_problems([shard_of(r.source) for r in rosters], shards)[0]
