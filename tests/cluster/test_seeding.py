"""Joining replicas get the live version from those that serve it, without a trainer."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, eventually, stopped
from tests.support import shards
from tests.support.programs import ended, python, refitctl

Nodes = tuple[Daemon, ...]
Live = dict[str, torch.Tensor]


class Replica:
    """The ranks of a replica, in one process."""

    def __init__(
        self,
        client: refitd.Client,
        name: str,
        world: int = 1,
        *,
        flips: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        cast_from: str | None = None,
        model: str = "policy",
    ) -> None:
        self.world, self.dtype = world, dtype
        self.live: list[Live] = []
        self.targets: list[refitd.Target] = []
        for rank in range(world):
            mine = shards.cut(shards.whole(0, dtype), rank, world)
            live = shards.zeros_like(mine)
            if flips:
                live = client.allocate({name: (t.shape, t.dtype) for name, t in mine.items()})
            described = [replace(meta, cast_from=cast_from) for meta in shards.describe(mine, rank, world)]
            target = client.register_target(model, live, replica=name, rank=rank, world_size=world, metadata=described)
            assert target.flips == flips
            self.live.append(live)
            self.targets.append(target)

    def serves(self, version: int) -> bool:
        """Whether every rank serves this version, to the last byte."""
        if any(target.version != version for target in self.targets):
            return False
        full = {name: tensor.to(self.dtype) for name, tensor in shards.whole(version, torch.float32).items()}
        return all(shards.equal(live, shards.cut(full, rank, self.world)) for rank, live in enumerate(self.live))


def publish(source: refitd.Source, given: Live, version: int) -> None:
    for name, tensor in shards.whole(version, torch.float32).items():
        given[name].copy_(tensor)
    source.publish(version)


def last(client: refitd.Client) -> refitd.SwapReport:
    """How the last swap of the only model has ended."""
    report = client.history(client.status().models[0].model, 1).swaps[0].report
    assert report is not None
    return report


def caught_up(looks: refitd.Client, *replicas: Replica, seeds: set[str]) -> None:
    """Wait until these replicas serve version 1, and check who gave it to them."""
    targets = [target for replica in replicas for target in replica.targets]
    with Engine(*targets):
        eventually(lambda: all(replica.serves(1) for replica in replicas), "those that join serve version 1")
    eventually(lambda: looks.status().models[0].swap is None, "the catch-up has ended")
    assert (last(looks).kind, set(last(looks).seeds)) == ("catch-up", seeds), last(looks)


def test_joining_replicas_are_given_what_others_serve(nodes: Callable[..., Nodes]) -> None:
    n0, n1 = nodes(2)
    with n0.connect() as c0, n1.connect() as c1, n0.connect("looks") as looks:
        given = shards.whole(0)
        source = c0.register_source("policy", given)
        a = Replica(c1, "a", 2)
        with Engine(*a.targets):
            publish(source, given, 1)
            c0.swap("policy", 1, timeout=60)
        # on the node of the seed: nothing crosses, and only that node takes part
        caught_up(looks, Replica(c1, "b", 4), seeds={"a"})
        assert {source.node for source in last(looks).sources} == {"n1"}
        publish(source, given, 2)
        publish(source, given, 3)
        assert looks.status().models[0].complete_versions == (2, 3)
        source.close()
        # over the cable; the trainer, which has version 1 no longer, has gone
        caught_up(looks, Replica(c0, "c", flips=True), seeds={"a", "b"})
        assert looks.verify("policy").outcome == "proven"
        told = refitctl(n0, "history", "policy")
        assert "catch-up from a, b" in " ".join(told.stdout.split()), told.stdout


def spoil(daemon: Daemon, replica: Replica) -> None:
    """Change an element of every tensor of a replica where it lies in an arena."""
    for target, live in zip(replica.targets, replica.live, strict=True):
        for tensor in live.values() if target.flips else ():
            tensor.view(torch.uint8)[0] ^= 1
        if not target.flips:
            held = {name: tensor.clone().view(torch.uint8).numpy().tobytes() for name, tensor in live.items()}
            assert sum(_spoil_file(path, held) for path in Path(f"/proc/{daemon.pid}/fd").iterdir()) == 1


def _spoil_file(path: Path, held: dict[str, bytes]) -> bool:
    if not os.readlink(path).startswith("/memfd:"):
        return False
    with path.open("r+b") as file:
        found = file.read()
        if any(content not in found for content in held.values()):
            return False
        for content in held.values():
            at = found.index(content)
            file.seek(at)
            file.write(bytes([found[at] ^ 1]))
    return True


@pytest.mark.parametrize("form", ["flips", "copies"])
def test_a_seed_whose_memory_was_changed_seeds_nobody(shared_daemon: Daemon, form: str) -> None:
    model, flips = f"spoilt-{form}", form == "flips"
    with shared_daemon.connect() as client, shared_daemon.connect("looks") as looks:
        given = shards.whole(0)
        source = client.register_source(model, given)
        a, b = (Replica(client, name, world, flips=flips, model=model) for name, world in (("a", 1), ("b", 2)))
        with Engine(*a.targets, *b.targets):
            publish(source, given, 1)
            client.swap(model, 1, timeout=60)
        source.close()
        assert client.verify(model).outcome == "proven"
        spoil(shared_daemon, a)
        caught_up(looks, c := Replica(client, "c", model=model), seeds={"b"})
        assert ["a rank 0 (node n0, host" in swap.reason for swap in looks.history(model, 2).swaps] == [False, True]
        for target in (*b.targets, *c.targets):
            target.close()
        d = Replica(client, "d", model=model)  # nobody can seed it: it waits for the next swap
        with Engine(*a.targets, *d.targets), closing(client.register_source(model, given)) as source:
            publish(source, given, 2)
            client.swap(model, 2, timeout=60)
            assert d.serves(2) and a.serves(2)
        ended = [swap.state for swap in looks.history(model).swaps]
        assert ended == ["committed", "committed", "aborted", "committed"], "a is asked once"


def test_only_the_same_elements_are_given(shared_daemon: Daemon) -> None:
    """What a trainer of float32 gives a replica of float32 is not what one of bfloat16 holds."""
    with shared_daemon.connect() as client, shared_daemon.connect("looks") as looks:
        given = shards.whole(0, torch.float32)
        source = client.register_source("casts", given)
        bf16 = partial(Replica, client, cast_from="float32", model="casts")
        fp32 = partial(Replica, client, dtype=torch.float32, model="casts")
        with Engine(*(a := bf16("a", 2)).targets):
            publish(source, given, 1)
            client.swap("casts", 1, timeout=60)
        caught_up(looks, bf16("b"), seeds={"a"})
        caught_up(looks, fp32("c", 2), seeds=set())
        caught_up(looks, fp32("d", 4, flips=True), seeds={"c"})
        source.close()
        caught_up(looks, bf16("e", 4), seeds={"a", "b"})
        assert a.serves(1) and looks.verify("casts").outcome == "proven"


ENGINE = """
import sys, time
import torch, refitd
from tests.cluster.test_seeding import Replica
with refitd.connect(sys.argv[1]) as client:
    replica = Replica(client, sys.argv[2], flips=sys.argv[3] == "flips")
    print("ready", flush=True)
    while True:
        for target in replica.targets:
            target.poll()
        time.sleep(0.005)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["flips", "copies"])
@pytest.mark.parametrize("where", ["near", "far"])
def test_a_seed_that_dies_is_replaced_by_another(nodes: Callable[..., Nodes], form: str, where: str) -> None:
    n0, n1 = nodes(2)
    near = n1 if where == "near" else n0
    with n0.connect() as c0, n1.connect() as c1, n0.connect("looks") as looks:
        given = shards.whole(0)
        source = c0.register_source("policy", given)
        other = Replica(c0, "other")
        program = subprocess.Popen(python(near, ENGINE, "dies", form), stdout=subprocess.PIPE, text=True)
        with ended(program) as engine, Engine(*other.targets):
            assert engine.stdout is not None and engine.stdout.readline() == "ready\n"
            publish(source, given, 1)
            c0.swap("policy", 1, timeout=60)
            source.close()
            (workers,) = [n.workers for n in looks.status().nodes if n.pid == near.pid]
            with stopped(workers):
                joins, late = Replica(c1, "joins"), Replica(c1, "late", 2)
                # over the cable, the workers that are stopped have not even met the others
                phase = "stage" if where == "near" else "plan"
                eventually(lambda: (s := looks.status().models[0].swap) is not None and s.phase == phase, phase)
                engine.send_signal(signal.SIGKILL)
                engine.wait()
                eventually(lambda: looks.history("policy", 1).swaps[0].state == "aborted", "it was the seed")
            caught_up(looks, joins, late, seeds={"other"})
            assert "dies rank 0" in looks.history("policy", 2).swaps[1].reason


@pytest.mark.slow
def test_a_seed_whose_node_dies_is_replaced_by_another(nodes: Callable[..., Nodes]) -> None:
    n0, n1, n2 = nodes(3)
    with n0.connect() as c0, n2.connect() as c2, n0.connect("looks") as looks:
        given = shards.whole(0)
        source = c0.register_source("policy", given)
        c1 = n1.connect()
        dies, other = Replica(c1, "dies"), Replica(c2, "other")
        with Engine(*dies.targets, *other.targets):
            publish(source, given, 1)
            c0.swap("policy", 1, timeout=60)
        source.close()
        (workers,) = [n.workers for n in looks.status().nodes if n.pid == n1.pid]
        with stopped(workers):
            joins = Replica(c0, "joins")
            eventually(lambda: looks.status().models[0].swap is not None, "it is read")
            n1.kill()
        caught_up(looks, joins, seeds={"other"})
        c1.close()
