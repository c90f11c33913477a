"""Permits of a node's ranks while coordinators come and go."""

from __future__ import annotations

import pytest
from msgspec import structs

from refitd.daemon import actions as act
from refitd.errors import RefusedError, TransportError
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION
from tests.support.daemon_harness import TARGET, Harness

LEASE_S = 20.0


def welcome(boot: str) -> cluster.NodeWelcome:
    return cluster.NodeWelcome(protocol=PROTOCOL_VERSION, boot=boot, lease_s=LEASE_S)


class Node(Harness):
    """A node with one target that serves version 1, and the time until which its permit lets it."""

    def __init__(self) -> None:
        self.until = -1.0
        self.is_silent = False  # the coordinator
        self.unanswered: list[int] = []  # numbers of requests that it did not answer
        super().__init__()
        self.feed(act.CoordinatorSaid(0, welcome("first")))
        (_, target) = self.fleet()
        self.member = target
        self.done(self.stage())
        self.commit(target)
        self.beat(0.0)
        assert self.until == LEASE_S

    def feed(self, *events: act.Event) -> None:
        handle = self.daemon.handle

        def watched(event: act.Event, now: float) -> list[act.Instruction]:
            done = handle(event, now)
            for one in done:
                if isinstance(one, act.SetPermit):
                    self.until = one.until
            if self.is_silent:
                self.unanswered += [one.request for one in done if isinstance(one, act.ToCoordinator) and one.request]
                done = [one for one in done if not isinstance(one, act.ToCoordinator)]
            return done

        self.daemon.handle = watched  # type: ignore[method-assign]
        try:
            super().feed(*events)
        finally:
            self.daemon.handle = handle  # type: ignore[method-assign]

    def beat(self, now: float) -> None:
        """Let a second pass; the coordinator answers the heartbeat unless it is silent."""
        self.now = now
        self.feed(act.Tick())


def test_a_rank_serves_on_until_its_permit_ends_while_the_next_coordinator_admits_it() -> None:
    node = Node()
    node.is_silent = True
    node.beat(0.5)
    node.feed(act.CoordinatorSaid(node.unanswered[-1], welcome("second")))  # the answer about the rank is on its way
    for now in (1.0, 2.0, 3.0):
        node.beat(now)
        assert node.until == LEASE_S, "neither revoked nor prolonged by a coordinator that does not know the rank"
    node.is_silent = False
    node.feed(act.CoordinatorSaid(0, welcome("third")))
    node.beat(4.0)
    assert node.until == 4.0 + LEASE_S


def test_a_rank_that_the_next_coordinator_refuses_serves_no_longer() -> None:
    node = Node()
    node.refuse_with = local.Failure(code=RefusedError.code, message="replica 'r' is not listed")
    node.feed(act.CoordinatorSaid(0, welcome("second")))
    assert node.until == 0.0
    node.refuse_with = None
    node.beat(1.0)
    assert node.until == 1.0 + LEASE_S, "it is announced again"


def test_a_rank_whose_announcement_was_lost_is_announced_again() -> None:
    node = Node()
    node.refuse_with = local.Failure(code=TransportError.code, message="lost on its way")
    node.feed(act.CoordinatorSaid(0, welcome("second")))
    assert node.until == LEASE_S
    node.refuse_with = None
    node.beat(1.0)
    assert node.until == 1.0 + LEASE_S


@pytest.mark.parametrize("reason", ["it holds version 1, and 2 is live"])
def test_a_fence_revokes_a_permit_of_the_previous_coordinator_for_good(reason: str) -> None:
    node = Node()
    node.is_silent = True
    node.feed(act.CoordinatorSaid(0, welcome("second")))
    node.feed(act.CoordinatorSaid(0, cluster.FenceMember(member=node.member, reason=reason)))
    assert node.until == 0.0
    node.beat(1.0)
    assert node.until == 0.0


def test_a_new_rank_has_no_permit_before_it_is_admitted() -> None:
    node = Node()
    node.is_silent = True
    node.ask(structs.replace(TARGET, replica="q"))
    assert node.until == 0.0
