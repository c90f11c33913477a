"""Versions that a daemon's sources publish: slots, numbers, ways, and what is refused."""

from __future__ import annotations

import pytest

from refitd.daemon import actions as act
from refitd.events import Tick
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION
from tests.support.daemon_harness import SHARD, SOURCE, Harness


def test_a_slot_that_is_being_read_is_not_overwritten() -> None:
    h = Harness()
    source, _ = h.fleet()
    runs = h.stage()
    assert h.publish(source, 2) == local.Done()  # the other slot
    assert h.ask(local.BeginPublish(member=source, version=3, timeout_s=5.0)) == local.SlotGranted(slot=1)
    assert h.said(cluster.ShardWithdrawn) == [cluster.ShardWithdrawn(member=source, version=2)]
    # now both are taken: the next one waits, and is served when the swap has read
    assert h.ask(local.BeginPublish(member=source, version=4, timeout_s=5.0)) is None
    h.done(runs)
    h.feed(act.CoordinatorSaid(0, cluster.EndSwap(swap="s")))
    assert (1, 7, local.SlotGranted(slot=0)) in h.to_client


def test_a_publish_that_waits_too_long_is_told_who_reads() -> None:
    h = Harness()
    source, _ = h.fleet()
    h.stage()
    h.ask(local.BeginPublish(member=source, version=2, timeout_s=5.0))
    assert h.ask(local.BeginPublish(member=source, version=3, timeout_s=5.0)) is None
    h.now = 6.0
    h.feed(act.CoordinatorSaid(0, local.Done()), Tick())
    (failure,) = [m for _, _, m in h.to_client if isinstance(m, local.Failure)]
    assert "no snapshot slot became free for version 3" in failure.message and "['s']" in failure.message


def test_a_trainer_that_leaves_keeps_its_versions_and_an_engine_that_leaves_nothing() -> None:
    h = Harness()
    source, target = h.fleet()
    h.feed(act.SessionClosed(1, "died"))
    assert list(h.daemon.members) == [source]
    assert h.said(cluster.DetachShard) and h.said(cluster.RemoveShard)[0].member == target
    assert len(h.daemon.arenas) == 2
    # its rank registers again and takes the place
    h.feed(act.SessionOpened(2, 200, "again"))
    assert isinstance(h.ask(SOURCE, session=2), local.SourceRegistered)
    assert source not in h.daemon.members and len(h.daemon.members) == 1
    assert len(h.daemon.arenas) == 2


def test_the_coordinator_is_told_in_which_way_each_version_is_given() -> None:
    h = Harness()
    source = h.ask(SOURCE)
    assert isinstance(source, local.SourceRegistered)
    h.publish(source.member, 1)
    addresses = (1 << 20,) * len(SHARD.tensors)
    assert h.ask(local.Lend(member=source.member, version=2, addresses=addresses, reason="it is fast")) == local.Done()
    assert h.said(cluster.ShardPublished) == [
        cluster.ShardPublished(member=source.member, version=1, mode="copied"),
        cluster.ShardPublished(member=source.member, version=2, mode="pulled", mode_reason="it is fast"),
    ]
    # a coordinator that starts anew learns the same
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="other")))
    added = h.said(cluster.AddShard)[-1]
    assert (added.versions, added.modes) == ((1, 2), ("copied", "pulled"))
    assert (added.mode, added.mode_reason) == ("pulled", "it is fast")


def test_a_version_that_the_coordinator_refuses_is_not_held_and_its_slot_is_free() -> None:
    h = Harness()
    source, _ = h.fleet()
    h.refuse_with = local.Failure(code="refused", message="version 2 was live with other contents; publish 5 or above")
    assert isinstance(h.publish(source, 2), local.Failure)
    assert h.daemon.members[source].held() == [1]
    h.refuse_with = None
    assert h.publish(source, 2) == local.Done()


def test_a_source_that_was_admitted_above_what_was_live_is_refused_lower_numbers_before_it_copies() -> None:
    h = Harness()
    h.refuse_with = cluster.SourceAdmitted(run="r2", next_version=12)
    source = h.ask(SOURCE)
    assert isinstance(source, local.SourceRegistered) and (source.next_version, source.run) == (12, "r2")
    h.refuse_with = None
    refused = h.ask(local.BeginPublish(member=source.member, version=3, timeout_s=5.0))
    assert isinstance(refused, local.Failure) and "publish 12 or above" in refused.message
    assert h.publish(source.member, 12) == local.Done()
    # whoever coordinates next is told what it may not publish again, and whose versions these are
    h.to_coordinator.clear()
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="another")))
    (again,) = h.said(cluster.AddShard)
    assert (again.run, again.newest, again.versions) == ("r2", 12, (12,))


@pytest.mark.parametrize("code", ["refused", "protocol"])
def test_a_version_that_the_coordinator_refuses_leaves_the_source_as_it_was(code: str) -> None:
    h = Harness()
    source, _ = h.fleet()
    member = h.daemon.members[source]
    before = (member.newest, member.mode, member.mode_reason, member.held(), member.where(1))
    h.refuse_with = local.Failure(code=code, message="no")
    lent = local.Lend(member=source, version=2, addresses=(1, 2, 3, 4), reason="fast")
    assert h.ask(lent) == h.refuse_with
    assert (
        member.newest,
        member.mode,
        member.mode_reason,
        member.held(),
        member.where(1),
    ) == before


def test_a_version_whose_coordinator_is_lost_before_it_answers_is_published() -> None:
    h = Harness()
    source, _ = h.fleet()
    h.refuse_with = local.Failure(code="transport", message="the coordinator has restarted")
    assert h.publish(source, 2) == local.Done()
    assert h.daemon.members[source].held() == [1, 2]
    h.refuse_with = None
    h.to_coordinator.clear()
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="another")))
    assert {again.versions for again in h.said(cluster.AddShard)} == {(1, 2), ()}


def test_without_a_coordinator_nothing_is_published() -> None:
    h = Harness()
    source, _ = h.fleet()
    h.now = 100.0
    for failed in (h.publish(source, 2), h.ask(local.Lend(member=source, version=2, addresses=(1, 2, 3, 4)))):
        assert isinstance(failed, local.Failure) and "no coordinator" in failed.message
    h.feed(act.CoordinatorSaid(0, local.Done()))
    assert h.daemon.members[source].held() == [1]
    assert h.publish(source, 2) == local.Done()
