"""Engines whose tensors keep their addresses return to retained weights, wherever in its page a tensor now lies."""

from __future__ import annotations

import pytest

from refitd.daemon.members import Arena, LocalMember, new_member
from refitd.daemon.retained import RetainedTargets
from refitd.daemon.target_state import fresh, restoring
from refitd.protocol import local
from refitd.protocol.shards import Place
from tests.support.daemon_harness import SHARD

UID = 1000


def member(offset: int, *, reads_live: bool = True, strides: tuple[int, ...] = ()) -> LocalMember:
    tensors = SHARD.tensors
    live = tuple(Place(1, offset + 65536 * i, strides or rowwise(t.shape)) for i, t in enumerate(tensors))
    asked = local.RegisterTarget(
        model="m", replica="r", rank=0, world_size=1, shard=SHARD, live=live, flips=True, reads_live=reads_live
    )
    found, _ = new_member("m/r:0", 1, 7, asked, {1: Arena(1, 1 << 20, "live", 1, True)})
    found.staging = 2
    return found


def rowwise(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [4] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def left_by(one: LocalMember) -> RetainedTargets:
    kept = RetainedTargets(60.0)
    one.state = restoring(3, flips=True)
    assert kept.keep(one, UID, 0.0)
    return kept


def test_a_place_in_a_page_may_change_and_the_client_is_told_the_old_one() -> None:
    first, second, third = member(64), member(4032), member(64 + 4032)
    kept = left_by(first)
    found = kept.fitting(second, UID)
    assert found is not None
    kept.give(found, second)
    assert second.staging == 2
    assert second.content == tuple(64 + 65536 * i for i in range(len(SHARD.tensors)))
    kept = left_by(second)  # it has died before it had restored them
    found = kept.fitting(third, UID)
    assert found is not None
    kept.give(found, third)
    assert third.content == second.content, "where they are, not where the second engine wanted them"


@pytest.mark.parametrize(
    ("offset", "reads_live", "fits"), [(64, True, True), (64 + 4096, True, False), (64, False, False)]
)
def test_other_layouts_are_no_return(offset: int, reads_live: bool, fits: bool) -> None:
    again = member(offset, reads_live=reads_live)
    found = left_by(member(64)).fitting(again, UID)
    assert (found is not None) is fits
    plain = left_by(member(64, reads_live=False))
    assert plain.fitting(member(65, reads_live=False), UID) is None
    found = plain.fitting(one := member(64, reads_live=False), UID)
    assert found is not None
    plain.give(found, one)
    assert one.content == () and one.state != fresh(in_place=False, flips=True)


def test_whoever_forgets_or_replaces_a_rank_is_given_all_of_its_arenas_to_free() -> None:
    def left() -> RetainedTargets:
        one = member(64)
        one.landing = 3  # a tensor is converted into its staging arena
        return left_by(one)

    assert left().forget("m") == set(left().clear()) == left().replaced_by(member(64)) == {2, 3}
    assert left().forget("other") == set()
