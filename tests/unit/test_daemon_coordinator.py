"""A daemon and its coordinator: one that is absent, silent or new, and what each is told."""

from __future__ import annotations

from msgspec import structs

from refitd.daemon import actions as act
from refitd.events import Busy, Tick
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION
from tests.support.daemon_harness import SHARD, SOURCE, TARGET, Harness


def test_whoever_was_halted_for_a_swap_that_never_began_is_told_to_go_on() -> None:
    h = Harness()
    _, target = h.fleet()
    h.feed(act.CoordinatorSaid(0, cluster.Pause(swap="s", version=1, members=(target,))))
    h.to_client.clear()
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="another")))
    (resume,) = [message for _, _, message in h.to_client if isinstance(message, local.Resume)]
    assert (resume.swap, resume.member, resume.is_poisoned) == ("s", target, False)


def test_a_heartbeat_tells_where_targets_stand_that_have_moved_since_the_last_one() -> None:
    h = Harness()
    _, target = h.fleet()

    def told() -> list[tuple[str, str, int]]:
        h.to_coordinator.clear()
        h.feed(Tick())
        (update,) = h.said(cluster.NodeUpdate)
        assert isinstance(update, cluster.NodeUpdate)
        return [(moved.member, moved.step, len(moved.events)) for moved in update.moved]

    assert (told(), told()) == ([(target, "idle, empty", 0)], [])
    h.done(h.stage())
    assert (told(), told()) == ([(target, "staged swap s, empty", 2)], [])
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="another")))
    assert told() == [(target, "staged swap s, empty", 2)]


def test_without_a_coordinator_requests_fail_at_once() -> None:
    h = Harness()
    h.now = 100.0
    for request in (SOURCE, local.StartSwap(model="m"), local.GetStatus()):
        failure = h.ask(request)
        assert isinstance(failure, local.Failure) and "no coordinator" in failure.message


def test_a_coordinator_that_falls_silent_fails_what_waits_for_it() -> None:
    h = Harness()
    assert h.ask(local.StartSwap(model="m")) is None
    h.now = 6.0
    h.feed(Tick())
    (failure,) = [m for _, _, m in h.to_client if isinstance(m, local.Failure)]
    assert "has said nothing for 5 s" in failure.message
    assert isinstance(h.to_coordinator[-1], cluster.NodeUpdate | cluster.NodeHello)


def test_a_coordinator_that_says_goodbye_fails_requests_at_once_and_fences_no_staged_rank() -> None:
    h = Harness()
    h.fleet()
    h.done(h.stage())
    assert h.ask(local.StartSwap(model="m")) is None
    h.to_client.clear()
    h.feed(act.CoordinatorSaid(0, local.Failure(code=cluster.LEAVES, message="it was stopped")))
    (failure,) = [m for _, _, m in h.to_client if isinstance(m, local.Failure)]
    assert failure.message == "it was stopped" and not h.daemon.is_coordinated
    refused = h.ask(local.GetStatus())
    assert isinstance(refused, local.Failure) and "no coordinator at present; it was stopped" in refused.message

    def fences() -> list[str]:
        h.to_client.clear()
        h.feed(Tick())
        return [m.member for _, _, m in h.to_client if isinstance(m, local.Fence)]

    assert fences() == []
    h.now += 6.0
    assert fences() == [], "it serves until its permit ends"
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="another")))
    assert h.daemon.is_coordinated


def test_a_new_coordinator_is_told_of_every_member_and_what_it_holds() -> None:
    h = Harness()
    source, target = h.fleet()
    h.done(h.stage())
    h.to_coordinator.clear()
    h.feed(act.CoordinatorSaid(0, local.Failure(code="unknown-node", message="hello?")))
    assert h.said(cluster.NodeHello)
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="other")))
    added = {m.member: m for m in h.said(cluster.AddShard)}
    assert added[source].versions == (1,)
    assert added[target].staged == "s"


def test_a_description_is_sent_once_per_layout_and_again_when_it_was_forgotten() -> None:
    h = Harness()
    for rank in range(3):
        registration = local.RegisterTarget(model="m", replica="r", rank=rank, world_size=3, shard=SHARD)
        assert isinstance(h.ask(registration), local.TargetRegistered)
    assert len(h.said(cluster.DescribeShard)) == 1
    assert len({m.digest for m in h.said(cluster.AddShard)}) == 1
    h.refuse_with = local.Failure(code="unknown-shard", message="forgotten")
    answer = h.ask(local.RegisterTarget(model="m", replica="q", rank=0, world_size=1, shard=SHARD))
    # it was described again, once; a coordinator that still does not know it refuses the registration
    assert len(h.said(cluster.DescribeShard)) == 2
    assert answer == h.refuse_with


def test_what_was_being_staged_is_forgotten_when_a_coordinator_takes_the_node_back_in() -> None:
    h = Harness()
    source, _ = h.fleet()
    h.stage()
    h.feed(act.CoordinatorSaid(0, local.Failure(code="unknown-node", message="hello?")))
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="b")))
    assert h.restarted == [0, 1], "nothing is written for it any more"
    assert h.publish(source, 2) == local.Done() and h.publish(source, 3) == local.Done(), "and nothing holds a slot"


def test_a_daemon_says_what_it_was_told_is_live_to_a_coordinator_that_does_not_know_it() -> None:
    h = Harness()
    claim = cluster.LiveClaim("m", 4, "r", 9, "s", "journal", 4)
    h.feed(act.CoordinatorSaid(0, cluster.LiveIs(live=claim)))
    h.feed(act.CoordinatorSaid(0, local.Failure(code="unknown-node", message="who?")))
    assert h.said(cluster.NodeHello)[-1].live == (claim,)


def test_what_a_target_was_told_to_commit_is_said_to_the_next_coordinator() -> None:
    h = Harness()
    _, target = h.fleet()
    h.done(h.stage())
    h.feed(act.CoordinatorSaid(0, cluster.CommitStaged(swap="s", version=1)))
    h.to_coordinator.clear()
    h.feed(act.CoordinatorSaid(0, cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot="another")))
    told = {m.member: m for m in h.said(cluster.AddShard)}
    assert (told[target].staged, told[target].staged_version, told[target].committing) == ("s", 1, True)


def test_a_daemon_that_was_busy_does_not_call_its_coordinator_silent() -> None:
    h = Harness()
    h.now = 6.0
    h.feed(Busy(5.5), Tick())
    assert h.daemon.is_coordinated
    h.feed(act.CoordinatorSaid(0, local.Done()), Busy(5.5))  # what was heard since is excused nothing
    h.now = 12.0
    h.feed(Tick())
    assert not h.daemon.is_coordinated


def test_a_coordinator_that_has_forgotten_a_description_is_sent_it_again_once() -> None:
    h = Harness()
    assert isinstance(h.ask(TARGET), local.TargetRegistered)
    h.to_coordinator.clear()
    h.refuse_with = local.Failure(code="unknown-shard", message="which?")
    refused = h.ask(structs.replace(TARGET, replica="another"))
    assert refused == h.refuse_with
    *sent, update = [type(m) for m in h.to_coordinator]
    assert sent == [cluster.AddShard, cluster.DescribeShard, cluster.AddShard]
    assert update is cluster.NodeUpdate  # with the refused registration
