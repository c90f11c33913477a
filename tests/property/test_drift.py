"""Source ranks that publish the same versions, each in its own time, into few slots."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import given, settings

from refitd import ParameterMetadata
from refitd.coordinator.descriptions import Described
from refitd.coordinator.members import Member, Membership, Place
from refitd.protocol.base import digest_of
from refitd.protocol.cluster import AddShard
from refitd.protocol.shards import shard_of

SHARD = shard_of([ParameterMetadata("w", (4, 4), "bfloat16", 2, resolved_name="w")])
LAST = 9


def pool(ranks: int) -> Membership:
    model = Membership("m", auto_swap=False)
    for rank in range(ranks):
        added = AddShard(f"src{rank}", "m", "source", "", rank, ranks, 5, digest_of(SHARD))
        model.add(Member(added, Described(SHARD, 32), Place("n0", "h"), run="x"))
    return model


def publishes(model: Membership, rank: int, version: int, slots: int) -> bool:
    """Publish like daemon and coordinator together; False if the rank has to wait."""
    member = model.sources[rank]
    if len(member.source.versions) == slots:
        droppable, complete = model.droppable()
        may = member.source.versions & (droppable | {complete} if slots == 1 else droppable)
        if not may:
            return False
        member.source.versions.discard(min(may))
    member.source.versions.add(version)
    member.source.newest = version
    return True


@settings(max_examples=300, deadline=None)
@given(ranks=st.integers(2, 5), slots=st.integers(1, 4), seed=st.integers(0, 1 << 32))
def test_every_version_that_all_ranks_publish_completes_and_the_newest_stays(ranks: int, slots: int, seed: int) -> None:
    model, newest, chance = pool(ranks), -1, random.Random(seed)
    while any(member.source.newest < LAST for member in model.sources.values()):
        rank = chance.choice([r for r, member in model.sources.items() if member.source.newest < LAST])
        member = model.sources[rank]
        version = max(1, member.source.newest + 1)
        others = [m.source.newest for r, m in model.sources.items() if r != rank]
        went = publishes(model, rank, version, slots)
        if all(other >= version for other in others):
            assert went, (
                f"rank {rank} is the last one, and waits: {[m.source.versions for m in model.sources.values()]}"
            )
            assert version in model.offered().complete
        if not went:
            assert model.lagging_sources(member), "it says whom it waits for"
        complete = max(model.offered().complete, default=-1)
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
        assert went, [m.source.versions for m in model.sources.values()]
    assert LAST + 1 in model.offered().complete
