"""Memory that swaps write has one owner: a second target over it is refused, whatever its model, replica or client."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import refitd
from refitd import Derived, RefusedError
from refitd.testing import Daemon, Engine, eventually
from tests.support.fleet import go_live
from tests.support.names import named, policy
from tests.support.trainer import ANSWER_S, Trainer

Tensors = dict[str, torch.Tensor]


def private(client: refitd.Client) -> Tensors:
    return {"w": torch.zeros(64, 64)}


def allocated(client: refitd.Client) -> Tensors:
    return client.allocate({"w": ((64, 64), torch.float32)})


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(64, 64), requires_grad=False)


def adopted(client: refitd.Client) -> Tensors:
    module = Layer()
    client.adopt(module)
    return {"w": module.w}


def adopted_in_place(client: refitd.Client) -> Tensors:
    module = Layer()
    client.adopt(module, keep_addresses=True)
    return {"w": module.w}


MEMORY = [private, allocated, adopted, adopted_in_place]


@pytest.mark.parametrize("make", MEMORY)
def test_a_second_target_over_the_same_bytes_is_refused_and_names_the_first(
    shared_daemon: Daemon, make: Callable[[refitd.Client], Tensors]
) -> None:
    with shared_daemon.connect("one") as one, shared_daemon.connect("two") as two:
        live = make(one)
        first = one.register_target(policy(), live, replica="a")
        for client in (one, two):
            for model, replica in (("other", "a"), (policy(), "b"), ("other", "b")):
                for tensors in (live, {"v": live["w"]}, {"part": live["w"][:1]}, {"x": torch.zeros(2), **live}):
                    with pytest.raises(RefusedError, match=f"w of model '{policy()}' replica 'a' rank 0"):
                        client.register_target(model, tensors, replica=replica)
        assert [t.replica for m in one.status().models for t in m.targets] == ["a"]
        first.close()
        one.register_target("other", live, replica="b").close()


def test_kept_tensors_are_in_no_other_registration_that_writes_them(shared_daemon: Daemon) -> None:
    base, a, b = torch.ones(8, 8), torch.zeros(4), torch.zeros(4)
    with shared_daemon.connect("one") as one, shared_daemon.connect("two") as two:
        first = one.register_target("a", {"base": base, "adapter": a}, replica="r", keeps=["base"])
        two.register_target("b", {"base": base, "adapter": b}, replica="r", keeps=["base"])  # swaps do not write it
        with pytest.raises(
            RefusedError, match=r"base: it is to keep its values .* with w of model 'c' replica 'r' rank 0"
        ):
            two.register_target("c", {"w": base}, replica="r")
        first.close()
        with pytest.raises(
            RefusedError,
            match=r"base: it is to keep its values .* of model 'c' replica 'r' rank 0, which registers now",
        ):
            two.register_target("c", {"w": base}, replica="r")
    with shared_daemon.connect("three") as three:
        three.register_target("c", {"w": base}, replica="r")
        with pytest.raises(
            RefusedError, match=r"base: it is to keep .* shares memory with w of model 'c' replica 'r' rank 0"
        ):
            three.register_target("a", {"base": base, "adapter": a}, replica="r", keeps=["base"])


def test_a_derived_tensor_of_one_target_is_not_in_another(shared_daemon: Daemon) -> None:
    scratch = torch.zeros(8)
    with shared_daemon.connect() as client:
        client.register_target("a", {"w": torch.zeros(4)}, replica="r", derived={"s": Derived(scratch, ("w",), print)})
        with pytest.raises(RefusedError, match="s: it shares memory with s of model 'a' replica 'r' rank 0"):
            client.register_target(
                "b", {"w": torch.zeros(4)}, replica="r", derived={"s": Derived(scratch, ("w",), print)}
            )


def test_the_same_rank_registers_its_tensors_again_after_each_end(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    trainer = Trainer(daemon)
    live = {"w": torch.zeros(64, 64)}

    def serves(target: refitd.Target) -> None:
        trainer.publish()
        with Engine(target):
            trainer.client.swap(policy(), timeout=ANSWER_S)
        assert target.version == trainer.version and torch.all(live["w"] == trainer.version)

    client = daemon.connect("closed target")
    client.register_target(policy(), live, replica="a").close()
    serves(client.register_target(policy(), live, replica="a"))
    with pytest.raises(RefusedError, match=r"policy.*a.*0"):
        client.register_target(policy(), live, replica="a")
    client.close()  # close() ends the client's ownership
    client = daemon.connect("evicted")
    target = client.register_target(policy(), live, replica="a")
    trainer.client.evict(policy(), "a")
    target = client.register_target(policy(), live, replica="a")  # the evicted client may not know yet
    serves(target)
    client.close()
    with daemon.connect("another model") as again:
        again.register_target("other", live, replica="b")


def test_a_lost_target_owns_its_memory_as_long_as_it_says_that_it_serves(start_daemon: Callable[..., Daemon]) -> None:
    daemon, live, given = start_daemon(), {"w": torch.zeros(4)}, {"w": torch.ones(4)}
    lost = daemon.connect(reconnect=False)
    source, target = lost.register_source(policy(), given), lost.register_target(policy(), live, replica="a")
    go_live(lost, source, 1, target)
    daemon.kill()
    daemon.start()
    with daemon.connect() as client:
        assert target.version == 1  # until its permit ends
        with pytest.raises(RefusedError, match=f"w of model '{policy()}' replica 'a' rank 0"):
            client.register_target("other", live, replica="a")
        lost.close()
        assert target.version is None
        client.register_target("other", live, replica="a")


def test_an_address_that_is_used_again_belongs_to_no_target_that_has_ended(shared_daemon: Daemon) -> None:
    with shared_daemon.connect() as client:
        freed = {"w": torch.zeros(1 << 16)}
        client.register_target("freed", freed, replica="a")
        freed["w"].untyped_storage().resize_(0)
        for turn in range(20):  # the allocator gives the same addresses again
            target = client.register_target(policy(), {"w": torch.zeros(1 << 16)}, replica=f"a{turn}")
            if turn % 2:
                target.close()
            del target
            gc.collect()
    with shared_daemon.connect() as other:
        eventually(lambda: not any(m.targets for m in other.status().models), "all targets are gone")
        other.register_target(policy(), {"w": torch.zeros(1 << 16)}, replica="a")


def test_sources_read_memory_that_another_registration_owns(daemon: Daemon) -> None:
    """An engine offers its weights under another name: each publication copies them."""
    live = {"w": torch.zeros(64, 64)}
    trainer = Trainer(daemon)
    with daemon.connect() as client:
        target = client.register_target(policy(), live, replica="a")
        source = client.register_source("copy", live)
        trainer.publish()
        with Engine(target):
            trainer.client.swap(policy(), timeout=ANSWER_S)
        source.publish(trainer.version)


class Drafted:
    """A policy and its draft in one engine; the draft uses the policy's embedding."""

    def __init__(self, daemon: Daemon, offers: bool, other: refitd.Client | None = None) -> None:
        returns = other is not None  # a client that waits for the next daemon must be closed
        self.trainer, self.engine = daemon.connect(reconnect=returns), daemon.connect(reconnect=returns)
        self.other = other or daemon.connect()
        self.given = {
            policy(): {"embed": torch.zeros(16, 8), "head": torch.zeros(8)},
            named("draft"): {"head": torch.zeros(4)},
        }
        if offers:
            self.given[named("draft")]["embed"] = torch.full((16, 8), 77.0)
        self.sources = {name: self.trainer.register_source(name, given) for name, given in self.given.items()}
        self.policy = {"embed": torch.zeros(16, 8), "head": torch.zeros(8)}
        self.draft = {"embed": self.policy["embed"], "head": torch.zeros(4)}
        self.target = self.engine.register_target(policy(), self.policy, replica="a")
        shared = {"embed": self.target}
        self.second = self.other.register_target(named("draft"), self.draft, replica="a", shared=shared)

    def publish(self, version: int) -> None:
        for name, source in self.sources.items():
            self.given[name]["head"].fill_(version)
            source.publish(version)

    def publish_all(self, version: int) -> None:
        self.given[policy()]["embed"].fill_(version)
        self.publish(version)

    def holds(self, version: int) -> bool:
        return all(bool((t == version).all()) for live in (self.policy, self.draft) for t in live.values())


@pytest.mark.parametrize("offers", [False, True])
def test_a_tensor_that_a_draft_shares_moves_in_a_joint_swap_only(daemon: Daemon, offers: bool) -> None:
    pair = Drafted(daemon, offers)
    assert pair.second.kept == ()
    with Engine(pair.target, pair.second):
        for version in (1, 2):
            pair.publish_all(version)
            shares = rf"holds embed for model '{named('draft')}' too .*refitctl swap {policy()} --with {named('draft')}"
            with pytest.raises(RefusedError, match=shares):
                pair.trainer.swap(policy(), version, timeout=ANSWER_S)
            pair.trainer.swap_together({policy(): version, named("draft"): version}, timeout=ANSWER_S)
            assert pair.holds(version)
            eventually(lambda: pair.target.version == pair.second.version == version, "both serve it")  # noqa: B023
        with pytest.raises(RefusedError, match=r"publish the older weights as new versions of both"):
            pair.trainer.rollback(policy(), timeout=ANSWER_S)
        pair.publish_all(3)
        pair.trainer.swap(named("draft"), 3, timeout=ANSWER_S)  # changes no shared tensor
        assert torch.all(pair.draft["embed"] == 2) and torch.all(pair.draft["head"] == 3)
        assert {pair.trainer.verify(model).outcome for model in (policy(), named("draft"))} == {"proven"}
    pair.second.close()
    with Engine(pair.target):
        pair.trainer.swap(policy(), 3, timeout=ANSWER_S)
        assert pair.holds(3)


def test_what_is_named_as_shared_is_a_tensor_of_the_other_target(daemon: Daemon) -> None:
    pair = Drafted(daemon, offers=False)
    pair.second.close()
    own = {"embed": torch.zeros(16, 8), "head": torch.zeros(4)}
    for shared, tensors, said in (
        (
            {"embed": pair.target},
            own,
            "embed: it is named as shared with .* replica 'a' rank 0, and is no tensor of it",
        ),
        ({"other": pair.target}, pair.draft, "shared: no tensor registered here is called 'other'"),
        ({"embed": policy()}, pair.draft, "expected the Target"),
        ({"embed": pair.second}, pair.draft, "that target is closed or lost"),
        ({}, pair.draft, f"embed: it shares memory with embed of model '{policy()}' replica 'a' rank 0"),
    ):
        with pytest.raises(RefusedError, match=said):
            pair.other.register_target(named("draft"), tensors, replica="a", shared=shared)  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match="is of the same model"):
        pair.other.register_target(policy(), pair.policy, replica="b", shared={"embed": pair.target})
    second = pair.other.register_target(named("draft"), pair.draft, replica="a", shared={"embed": pair.target})
    pair.target.close()
    pair.target = pair.engine.register_target(policy(), pair.policy, replica="a")  # the owner registers again
    with pytest.raises(
        RefusedError, match=r"embed: it is to keep its values .* with w of model 'x' replica 'r' rank 0"
    ):
        pair.target.close()
        pair.engine.register_target("x", {"w": pair.policy["embed"]}, replica="r")
    second.close()


@pytest.mark.parametrize("first", ["owner", "user"])
def test_between_two_commits_of_a_joint_swap_the_draft_serves_nothing(daemon: Daemon, first: str) -> None:
    pair = Drafted(daemon, offers=False)
    for version in (1, 2):
        pair.publish_all(version)
        swap = threading.Thread(target=pair.trainer.swap_together, args=({policy(): version, named("draft"): version},))
        swap.start()
        eventually(lambda: pair.target.pending == pair.second.pending == version, "decided")  # noqa: B023
        order = (pair.target, pair.second) if first == "owner" else (pair.second, pair.target)
        assert order[0].poll() == version
        assert pair.second.version is None
        if version == 2:
            assert "was decided with its version" in pair.second.fenced or pair.second.pending == 2
        assert order[1].poll() == version
        assert (pair.target.version, pair.second.version, pair.second.fenced) == (version, version, "")
        swap.join(ANSWER_S)
        assert not swap.is_alive()


def test_a_draft_that_missed_a_swap_of_its_owner_serves_nothing_until_both_are_swapped(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = start_daemon()
    path = tmp_path / "daemon"
    path.symlink_to(daemon.directory)
    pair = Drafted(daemon, offers=False, other=refitd.connect(path))
    pair.publish_all(1)
    with Engine(pair.target, pair.second):
        pair.trainer.swap_together({policy(): 1, named("draft"): 1}, timeout=ANSWER_S)
    daemon.kill()
    path.unlink()  # the draft's client does not find the next daemon
    daemon.start()
    pair.publish_all(2)
    with Engine(pair.target):
        eventually(lambda: _accepts(pair, 2), "the policy alone is swapped")
    assert pair.target.version == 2 and pair.second.version is None
    path.symlink_to(daemon.directory)
    with Engine(pair.target, pair.second):
        eventually(
            lambda: any(model.model == named("draft") and model.targets for model in daemon.status().models),
            "it is back",
        )
        assert pair.second.version is None and "was decided with its version 1" in pair.second.fenced
        pair.publish_all(3)
        pair.trainer.swap_together({policy(): 3, named("draft"): 3}, timeout=ANSWER_S)
        assert pair.holds(3)
        eventually(lambda: pair.second.version == 3, "the draft serves again")
    for client in (pair.trainer, pair.engine, pair.other):
        client.close()


def _accepts(pair: Drafted, version: int) -> bool:
    try:
        pair.trainer.swap(policy(), version, timeout=ANSWER_S)
    except refitd.RefitdError:
        return False
    return True


def test_a_draft_serves_nothing_while_the_owner_of_its_tensor_serves_nothing(daemon: Daemon) -> None:
    pair = Drafted(daemon, offers=False)
    pair.publish_all(1)
    with Engine(pair.target, pair.second):
        pair.trainer.swap_together({policy(): 1, named("draft"): 1}, timeout=ANSWER_S)
    pair.target.suspend()
    assert pair.second.version is None and "it is suspended" in pair.second.fenced
    with Engine(pair.target, pair.second):
        pair.target.resume(kept=False)
        eventually(lambda: pair.target.version == pair.second.version == 1, "the owner catches up")
    pair.target.close()
    assert pair.second.version is None and "was closed" in pair.second.fenced


def test_an_owner_that_is_written_in_place_shares_no_tensor(daemon: Daemon) -> None:
    with daemon.connect() as client:
        live = client.allocate({"embed": ((64, 64), torch.float32)})
        owner = client.register_target(policy(), live, replica="a", mode="in-place")
        with pytest.raises(RefusedError, match=f"model '{policy()}' replica 'a' rank 0 is written in place"):
            client.register_target(named("draft"), {**live, "h": torch.zeros(2)}, replica="a", shared={"embed": owner})
