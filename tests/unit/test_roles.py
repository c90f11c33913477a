"""Coordinator and daemon refuse calls by role, by owner of a member, and by a peer's limits."""

from __future__ import annotations

import os
from typing import get_args

import pytest
from msgspec import structs

from refitd.config import Config, NodeConfig, Role
from refitd.coordinator import actions as act
from refitd.coordinator import descriptions, nodes
from refitd.daemon import actions as daemon_act
from refitd.daemon.links import MAX_WAITING
from refitd.daemon.publishing import MAX_OPEN
from refitd.errors import ConfigError, ProtocolError, RefusedError
from refitd.protocol import cluster, local
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.keys import ALL_ROLES, Allowed, check_role
from refitd.protocol.reports import NodeStatus, ReloadReport
from refitd.protocol.shards import Shard, WireTensor
from refitd.security import node_users
from tests.support.coordinator_harness import Harness as Fleet
from tests.support.daemon_harness import SOURCE, TARGET, live_in_arena
from tests.support.daemon_harness import Harness as OneNode

TRAINER, ENGINE, OPERATOR = (frozenset({role}) for role in ("trainer", "engine", "operator"))


def test_configuration_knows_the_same_roles():
    assert set(get_args(Role)) == ALL_ROLES


@pytest.mark.parametrize(
    ("message", "roles"),
    [
        (SOURCE, TRAINER),
        (TARGET, ENGINE),
        (local.CreateArena(nbytes=1), TRAINER | ENGINE),
        (local.StartSwap(model="m"), TRAINER | OPERATOR),
        (local.AbortSwap(model="m"), TRAINER | OPERATOR),
        (local.Evict(model="m", replica="r"), TRAINER | OPERATOR),
        (local.Forget(model="m"), TRAINER | OPERATOR),
        (local.Reload(), OPERATOR),
        (local.Publish(member="m", version=1), TRAINER),
        (local.GetStatus(), ALL_ROLES),
        (local.GetPlan(model="m"), ALL_ROLES),
    ],
)
def test_message_needs_these_roles(message, roles):
    for role in ALL_ROLES:
        if role in roles:
            check_role(message, frozenset({role}), "x", "y")
        else:
            with pytest.raises(RefusedError, match=f"needs the role .*and x has {role}; y gives roles"):
                check_role(message, frozenset({role}), "x", "y")


# --- between nodes ----------------------------------------------------------------------------------------


def hello(node: str, pid: int = 10) -> cluster.NodeHello:
    status = NodeStatus(node=node, host="h", pid=pid, workers=(), clients=0, arenas=0, arena_bytes=0)
    return cluster.NodeHello(protocol=PROTOCOL_VERSION, status=status)


def say(h: Fleet, identity: str, message, key: str = "", allowed: Allowed = Allowed("")):  # noqa: B008
    h.sent.clear()
    h.feed(act.FromNode(identity.encode(), 5, message, key, allowed))
    return [message for _, _, message in h.sent]


def failure(sent: list[object]) -> str:
    (found,) = [m for m in sent if isinstance(m, local.Failure)]
    return found.message


def test_key_may_only_be_its_own_node():
    h = Fleet()
    only_a = Allowed("a-key", node="a")
    assert "may be node 'a', not 'b'" in failure(say(h, "x", hello("b"), "K1", only_a))
    assert isinstance(say(h, "x", hello("a"), "K1", only_a)[0], cluster.NodeWelcome)
    # another key cannot claim a live node's name, even with its pid; the node's key can, over a new connection
    assert "another key" in failure(say(h, "y", hello("a"), "K2"))
    assert isinstance(say(h, "z", hello("a"), "K1", only_a)[0], cluster.NodeWelcome)


def test_keys_that_are_read_again_remove_nodes_and_change_roles():
    h = Fleet()
    rights = {key: Allowed(name, node=name) for key, name in (("K1", "a"), ("K2", "b"), ("K3", "c"))}
    for key, allowed in rights.items():
        say(h, key, hello(allowed.name), key, allowed)
    less = {"K1": Allowed("a", node="a", roles=ENGINE), "K3": Allowed("c", node="other")}
    h.sent.clear()
    h.feed(act.FilesRead(less, (b"K1", 5)))
    (report,) = [m for _, _, m in h.sent if isinstance(m, ReloadReport)]
    assert (report.admitted, report.removed) == (("a", "c"), ("b", "c"))
    assert {identity: m.message for identity, _, m in h.sent if isinstance(m, local.Failure)} == {
        "K2": "the key of 'b' was taken off security.allowed",
        "K3": "the key of 'c' may be node 'other' only",
    }
    assert h.state.nodes.keys() == {"a"}
    assert "needs the role" in failure(say(h, "K1", local.StartSwap(model="m"), "K1", less["K1"]))
    assert "say NodeHello first" in failure(say(h, "K2", local.GetStatus(), "K2"))
    h.sent.clear()
    h.feed(act.FilesRead(None, (b"K1", 6)))  # a coordinator without keys
    assert [m.uses_keys for _, _, m in h.sent if isinstance(m, ReloadReport)] == [False]


def test_connection_that_changes_its_key_or_its_name_is_nobody():
    h = Fleet()
    say(h, "x", hello("a"), "K1")
    assert "say NodeHello first" in failure(say(h, "x", local.GetStatus(), "K2"))
    assert "is another node already" in failure(say(h, "x", hello("b"), "K1"))
    renamed = cluster.NodeUpdate(status=hello("b").status)
    assert "calls itself 'b'" in failure(say(h, "x", renamed, "K1"))
    assert list(h.state.nodes) == ["a"]


def test_nodes_are_bounded(monkeypatch):
    monkeypatch.setattr(nodes, "MAX_NODES", 2)
    h = Fleet()
    for name in "ab":
        say(h, name, hello(name))
    assert "2 nodes already" in failure(say(h, "c", hello("c")))


@pytest.mark.parametrize("member", ["src", "a"])
def test_node_does_not_speak_for_members_of_another(member):
    h = Fleet()
    h.ready()
    h.join("n1", pid=11)
    swap = h.until_staging()
    for message in (
        local.Deregister(member=member, reason="r"),
        local.Deregister(member=member, reason="r", detached=True),
        local.Publish(member=member, version=2),
        local.Withdraw(member=member, version=1),
        local.CommitDone(swap=swap, member=member, paused_s=0.0),
        local.CommitFailed(swap=swap, member=member, reason="r"),
    ):
        assert "is one of node 'n0'; node 'n1' cannot speak for it" in failure(h.say("n1", message, request=5))
    assert "is registered already" in failure(h.add(member, node="n1", model="other"))
    assert h.state.models["m"].running is not None


def test_what_nobody_can_have_staged_is_not_believed():
    h = Fleet()
    h.ready()
    swap = h.until_staging()
    assert "at most" in failure(h.say("n0", cluster.StageDone(swap=swap, copies=1, bytes=1 << 60, seconds=0.1)))


def test_shard_larger_than_can_be_counted_is_refused():
    with pytest.raises(ProtocolError, match="w: a shard of more than"):
        descriptions.check_shard(Shard((WireTensor("w", (1 << 62, 1 << 62), "float32"),)))


def test_descriptions_nobody_uses_make_room_by_size(monkeypatch):
    from refitd.protocol.base import digest_of, pack

    monkeypatch.setattr(descriptions, "MAX_UNUSED_PARTS", 10)
    h = Fleet()
    h.join()
    for number in range(20):
        shard = Shard(tuple(WireTensor(f"w{number}.{i}", (1,), "float32") for i in range(4)))
        h.say("n0", cluster.DescribeShard(digest=digest_of(shard), packed=pack(shard)))
    known = h.state.descriptions._known
    assert 1 < len(known) <= (10 + 4) // 4
    for position in range(10):  # ranks that share their list of tensors count it once
        alike = Shard(shard.tensors, ((-position,),))
        h.say("n0", cluster.DescribeShard(digest=digest_of(alike), packed=pack(alike)))
    assert len([one for one in known.values() if len(one.shard.groups) == 1]) >= 6


# --- on a node --------------------------------------------------------------------------------------------


def test_what_a_client_may_have_waiting_is_bounded():
    h = OneNode()
    for number in range(MAX_WAITING + 5):
        h.feed(daemon_act.ClientSaid(1, 100 + number, local.StartSwap(model="m")))
    answer = h.ask(local.StartSwap(model="m"))
    assert isinstance(answer, local.Failure) and f"waits for {MAX_WAITING} answers" in answer.message


def test_request_that_finds_no_room_to_the_coordinator_fails_at_once():
    h = OneNode()
    h.feed(daemon_act.ClientSaid(1, 9, local.StartSwap(model="m")))
    (number,) = h.daemon.link.waiting
    h.feed(daemon_act.Unsent(number))
    assert not h.daemon.link.waiting
    (answer,) = [m for s, r, m in h.to_client if (s, r) == (1, 9)]
    assert isinstance(answer, local.Failure) and answer.code == "refused"


def test_slots_asked_for_and_versions_lent_are_bounded():
    h = OneNode()
    registered = h.ask(SOURCE)
    assert isinstance(registered, local.Registered)
    for version in range(2 + MAX_OPEN):  # two slots are granted
        h.feed(daemon_act.ClientSaid(1, 1, local.BeginPublish(member=registered.member, version=version, timeout_s=9)))
    answer = h.ask(local.BeginPublish(member=registered.member, version=99, timeout_s=9))
    assert isinstance(answer, local.Failure) and "requests for a snapshot slot" in answer.message
    lent = h.ask(structs.replace(SOURCE, model="lent", live=live_in_arena(h)))
    assert isinstance(lent, local.Registered)
    for version in range(MAX_OPEN):
        assert h.ask(local.Publish(member=lent.member, version=version)) == local.Done()
    answer = h.ask(local.Publish(member=lent.member, version=99))
    assert isinstance(answer, local.Failure) and "versions that are lent" in answer.message


def users(**node: object):
    return node_users(Config(node=NodeConfig(**node)))


def test_roles_are_given_by_user_id_or_name_and_everybody_else_has_all():
    own = os.getuid()
    found = users(allowed_uids=(own + 1, own + 2), roles={str(own + 1): ("engine",)})
    assert found.uids == {own, own + 1, own + 2}
    assert (found.roles_of(own + 1), found.roles_of(own + 2), found.roles_of(own)) == (ENGINE, ALL_ROLES, ALL_ROLES)
    assert users(allowed_uids=(0,), roles={"root": ("operator",)}).roles_of(0) == OPERATOR


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        ({"no such user": ("engine",)}, "is no user of this host"),
        ({"4242": ("engine",)}, "add 4242 to node.allowed_uids"),
        ({"0": ("engine",), "root": ("trainer",)}, "names uid 0 twice"),
    ],
)
def test_roles_of_nobody_are_refused(roles, why):
    with pytest.raises(ConfigError, match=why):
        users(allowed_uids=(0,), roles=roles)


def test_an_error_that_is_too_long_to_travel_is_cut():
    assert len(local.Failure(code="x", message="y" * 100_000).message) < 1 << 16
