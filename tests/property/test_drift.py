"""Source ranks that publish the same versions, each in its own time, into few slots."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import given, settings

from refitd import ParameterMetadata
from refitd.coordinator.members import Member
from refitd.coordinator.membership import Membership
from refitd.protocol.cluster import AddShard
from refitd.protocol.codec import digest_of
from refitd.protocol.shards import shard_of

SHARD = shard_of([ParameterMetadata("w", (4, 4), "bfloat16", 2, resolved_name="w")])
LAST = 9


def pool(ranks: int) -> Membership:
    model = Membership("m", auto_swap=False)
    for rank in range(ranks):
        added = AddShard(f"src{rank}", "m", "source", "", rank, ranks, 5, digest_of(SHARD))
        model.add(Member(added, SHARD, "n0", "h", 32, run="x"))
    return model


def publishes(model: Membership, rank: int, version: int, slots: int) -> bool:
    """As daemon and coordinator do together; False: it has to wait."""
    member = model.sources[rank]
    if len(member.versions) == slots:
        droppable, complete = model.droppable()
        may = member.versions & (droppable | {complete} if slots == 1 else droppable)
        if not may:
            return False
        member.versions.discard(min(may))
    member.versions.add(version)
    member.newest = version
    return True


@settings(max_examples=300, deadline=None)
@given(ranks=st.integers(2, 5), slots=st.integers(1, 4), seed=st.integers(0, 1 << 32))
def test_every_version_that_all_ranks_publish_completes_and_the_newest_stays(ranks: int, slots: int, seed: int) -> None:
    model, newest, chance = pool(ranks), -1, random.Random(seed)
    while any(member.newest < LAST for member in model.sources.values()):
        rank = chance.choice([r for r, member in model.sources.items() if member.newest < LAST])
        member = model.sources[rank]
        version = max(1, member.newest + 1)
        others = [m.newest for r, m in model.sources.items() if r != rank]
        went = publishes(model, rank, version, slots)
        if all(other >= version for other in others):
            assert went, f"rank {rank} is the last one, and waits: {[m.versions for m in model.sources.values()]}"
            assert version in model.complete_versions()
        if not went:
            assert model.lagging_sources(member), "it says whom it waits for"
        complete = max(model.complete_versions(), default=-1)
        if slots > 1:
            assert complete >= newest, "the newest complete version stays until a newer one is complete"
        newest = complete
    assert newest == LAST


@settings(max_examples=200, deadline=None)
@given(ranks=st.integers(2, 4), data=st.data())
def test_ranks_that_leave_versions_out_hinder_nobody_for_ever(ranks: int, data: st.DataObject) -> None:
    model = pool(ranks)
    plans = [[*sorted(data.draw(st.sets(st.integers(1, LAST)))), LAST + 1] for _ in range(ranks)]
    while any(plans):
        went = False
        for rank in data.draw(st.permutations(range(ranks))):
            if plans[rank] and publishes(model, rank, plans[rank][0], 2):
                plans[rank].pop(0)
                went = True
        assert went, [m.versions for m in model.sources.values()]
    assert LAST + 1 in model.complete_versions()
