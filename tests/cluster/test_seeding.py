"""Joining replicas get the live version from serving replicas, also of other forms, without a trainer."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import refitd
from refitd import ParameterMetadata, Tile
from refitd.testing import Daemon, Engine, eventually, stopped
from tests.support import mxfp8_replicas, shards
from tests.support.names import named, policy
from tests.support.programs import Program, python, refitctl
from tests.support.shards import meta

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
        model: str = "",
    ) -> None:
        self.world, self.dtype, model = world, dtype, model or policy()
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
        """Return whether every rank serves this version, to the last byte."""
        if any(target.version != version for target in self.targets):
            return False
        full = {name: tensor.to(self.dtype) for name, tensor in shards.whole(version, torch.float32).items()}
        return all(shards.equal(live, shards.cut(full, rank, self.world)) for rank, live in enumerate(self.live))


def publish(source: refitd.Source, given: Live, version: int) -> None:
    for name, tensor in shards.whole(version, torch.float32).items():
        given[name].copy_(tensor)
    source.publish(version)


def last(client: refitd.Client) -> refitd.SwapReport:
    """Return the last swap of the only model."""
    report = client.history(client.status().models[0].model, 1).swaps[0].report
    assert report is not None
    return report


def caught_up(looks: refitd.Client, *replicas: Replica, seeds: set[str]) -> None:
    """Wait until these replicas serve version 1, and check which replicas seeded it."""
    targets = [target for replica in replicas for target in replica.targets]
    with Engine(*targets):
        eventually(lambda: all(replica.serves(1) for replica in replicas), "those that join serve version 1")
    eventually(lambda: looks.status().models[0].swap is None, "the catch-up has ended")
    assert (last(looks).kind, set(last(looks).seeds)) == ("catch-up", seeds), last(looks)


def test_joining_replicas_are_given_what_others_serve(nodes: Callable[..., Nodes]) -> None:
    n0, n1 = nodes(2)
    with n0.connect() as c0, n1.connect() as c1, n0.connect("looks") as looks:
        given = shards.whole(0)
        source = c0.register_source(policy(), given)
        a = Replica(c1, "a", 2)
        with Engine(*a.targets):
            publish(source, given, 1)
            c0.swap(policy(), 1, timeout=60)
        # joining on the seed's node: no bytes go over the network, and only that node takes part
        caught_up(looks, Replica(c1, "b", 4), seeds={"a"})
        assert {source.node for source in last(looks).sources} == {"n1"}
        publish(source, given, 2)
        publish(source, given, 3)
        assert looks.status().models[0].complete_versions == (2, 3)
        source.close()
        # over the cable; the trainer has ended, and its slots had dropped version 1
        caught_up(looks, Replica(c0, "c", flips=True), seeds={"a", "b"})
        assert looks.verify(policy()).outcome == "proven"
        told = refitctl(n0, "history", policy())
        assert "catch-up from a, b" in " ".join(told.stdout.split()), told.stdout


def spoil(daemon: Daemon, replica: Replica) -> None:
    """Change an element of every tensor of a replica in its arena."""
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
        assert ["'a' rank 0 (node n0, host" in swap.reason for swap in looks.history(model, 2).swaps] == [False, True]
        for target in (*b.targets, *c.targets):
            target.close()
        d = Replica(client, "d", model=model)  # no replica can seed it: it waits for the next swap
        with Engine(*a.targets, *d.targets), closing(client.register_source(model, given)) as source:
            publish(source, given, 2)
            client.swap(model, 2, timeout=60)
            eventually(lambda: d.serves(2) and a.serves(2), "both serve it")
        ended = [swap.state for swap in looks.history(model).swaps]
        assert ended == ["committed", "committed", "aborted", "committed"], "a is asked once"


def test_only_the_same_elements_are_given(shared_daemon: Daemon) -> None:
    """A float32 and a bfloat16 replica of one float32 trainer have different elements."""
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
        source = c0.register_source(policy(), given)
        other = Replica(c0, "other")
        with Program(python(near, ENGINE, "dies", form)) as engine, Engine(*other.targets):
            assert engine.line() == "ready"
            publish(source, given, 1)
            c0.swap(policy(), 1, timeout=60)
            source.close()
            (workers,) = [n.workers for n in looks.status().nodes if n.pid == near.pid]
            with stopped(workers):
                joins, late = Replica(c1, "joins"), Replica(c1, "late", 2)
                # over the cable, the stopped workers have not even connected to the others
                phase = "stage" if where == "near" else "plan"
                eventually(lambda: (s := looks.status().models[0].swap) is not None and s.phase == phase, phase)
                engine.kill()
                eventually(lambda: looks.history(policy(), 1).swaps[0].state == "aborted", "it was the seed")
            caught_up(looks, joins, late, seeds={"other"})
            assert "replica 'dies' rank 0" in looks.history(policy(), 2).swaps[1].reason


@pytest.mark.slow
def test_a_seed_whose_node_dies_is_replaced_by_another(nodes: Callable[..., Nodes]) -> None:
    n0, n1, n2 = nodes(3)
    with n0.connect() as c0, n2.connect() as c2, n0.connect("looks") as looks:
        given = shards.whole(0)
        source = c0.register_source(policy(), given)
        c1 = n1.connect()
        dies, other = Replica(c1, "dies"), Replica(c2, "other")
        with Engine(*dies.targets, *other.targets):
            publish(source, given, 1)
            c0.swap(policy(), 1, timeout=60)
        source.close()
        (workers,) = [n.workers for n in looks.status().nodes if n.pid == n1.pid]
        with stopped(workers):
            joins = Replica(c0, "joins")
            eventually(lambda: looks.status().models[0].swap is not None, "it is read")
            n1.kill()
        caught_up(looks, joins, seeds={"other"})
        c1.close()


BF16 = torch.bfloat16


def history(client: refitd.Client, model: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return (state, seeds) of the last catch-ups, the newest first."""
    reports = [(swap.state, swap.report) for swap in client.history(model).swaps]
    return [(state, report.seeds) for state, report in reports if report is not None and report.kind == "catch-up"]


def seeded(client: refitd.Client, model: str, *targets: refitd.Target) -> tuple[str, ...]:
    """Wait until these targets serve the live version; return the replicas that seeded it."""
    with Engine(*targets):
        eventually(lambda: all(target.version is not None for target in targets), "they are caught up")
        eventually(lambda: client.status().models[0].swap is None, "the catch-up has ended")
    ((state, seeds), *_) = history(client, model)
    assert state == "committed"
    return seeds


EXPERTS, VOCABULARY, WIDTH = 8, 10, 6


def model(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"experts": (EXPERTS, 4, WIDTH), "embed": (VOCABULARY, WIDTH), "frozen": (5,)}
    return {name: torch.randn(shape, generator=generator).to(BF16) for name, shape in shapes.items()}


class Ranks:
    """A replica with its experts and its padded, tied vocabulary over all of its ranks."""

    def __init__(self, client: refitd.Client, name: str, world: int, *, flips: bool, tied: bool = True) -> None:
        self.world, self.lives, self.targets = world, [], []
        self.rows, self.names = -(-VOCABULARY // 4) * 4 // world, ("embed",) if tied else ("embed", "head")
        for rank in range(world):
            shapes = {"experts": (EXPERTS // world, 4, WIDTH)} | dict.fromkeys(self.names, (self.rows, WIDTH))
            live = {key: torch.zeros(shape, dtype=BF16) for key, shape in shapes.items()}
            if flips:
                live = client.allocate({key: (shape, BF16) for key, shape in shapes.items()})
            live["frozen"] = torch.full((5,), float(rank), dtype=BF16)  # a kept tensor: no version has it
            self.lives.append(live)
            described = [self._experts(live["experts"], rank)]
            described += [self._embed(key, live[key], rank, ("head",) if tied else ()) for key in self.names]
            described += [meta("frozen", live["frozen"], tiles=(Tile("frozen", (0,), (5,), 0, (1,)),))]
            self.targets.append(
                client.register_target(
                    "cuts", live, replica=name, rank=rank, world_size=world, metadata=described, keeps=("frozen",)
                )
            )

    def _experts(self, live: torch.Tensor, rank: int) -> ParameterMetadata:
        count = len(live)
        # the last expert first
        tiles = tuple(
            Tile("experts", (rank * count + i, 0, 0), (1, 4, WIDTH), (count - 1 - i) * 4 * WIDTH, (4 * WIDTH, WIDTH, 1))
            for i in range(count)
        )
        return meta("experts", live, tiles=tiles, global_shape=(EXPERTS, 4, WIDTH))

    def _embed(self, name: str, live: torch.Tensor, rank: int, aliases: tuple[str, ...]) -> ParameterMetadata:
        first = rank * self.rows
        there = max(0, min(self.rows, VOCABULARY - first))
        tiles = (Tile(name, (first, 0), (there, WIDTH), 0, (WIDTH, 1)),) if there else ()
        fields = {"global_shape": (VOCABULARY, WIDTH), "fill": 3.0, "resolved_name": name}
        return meta(name, live, tiles=tiles, aliases=aliases, **fields)

    def assert_holds(self, full: dict[str, torch.Tensor]) -> None:
        padded = torch.full((self.rows * self.world, WIDTH), 3.0, dtype=BF16)
        padded[:VOCABULARY] = full["embed"]
        for rank, live in enumerate(self.lives):
            assert torch.equal(live["experts"], full["experts"].chunk(self.world)[rank].flip(0))
            for name in self.names:
                assert torch.equal(live[name], padded.chunk(self.world)[rank])
            assert live["frozen"].tolist() == [rank] * 5


def test_other_cuts_of_experts_ties_and_padding(shared_daemon: Daemon) -> None:
    with shared_daemon.connect() as client:
        full = model(1)
        del full["frozen"]
        described = [
            ParameterMetadata("experts", (EXPERTS, 4, WIDTH), BF16, 2, resolved_name="experts"),
            ParameterMetadata("embed", (VOCABULARY, WIDTH), BF16, 2, resolved_name="embed", aliases=("head",)),
        ]
        source = client.register_source("cuts", full, metadata=described, partial=True)
        source.publish(1)
        a = Ranks(client, "a", 2, flips=True)
        with Engine(*a.targets):
            client.swap("cuts", 1, timeout=60)
        a.assert_holds(full)
        source.close()
        for name, world, flips, tied in (("b", 4, False, True), ("c", 1, True, True), ("d", 2, False, False)):
            replica = Ranks(client, name, world, flips=flips, tied=tied)
            assert set(seeded(client, "cuts", *replica.targets)) <= {"a", "b", "c"}
            replica.assert_holds(full)


@pytest.mark.slow
@pytest.mark.parametrize("on_send", [True, False])
def test_what_was_converted_seeds_nobody_and_what_arrived_converted_does(daemon: Daemon, on_send: bool) -> None:
    """Scales that arrive in MXFP8 are seeded unchanged; blocks that a replica has converted itself are not seeded."""
    with daemon.connect() as client:
        clients = (client,)
        sources = mxfp8_replicas.Trainer(clients, 1, mxfp8=mxfp8_replicas.OFFER if on_send else None)
        a = mxfp8_replicas.Replica(clients, "a", 2, convert_on_send=on_send)
        with Engine(*a.targets):
            full = sources.publish(1)
            client.swap(named("m"), 1, timeout=60)
        b = mxfp8_replicas.Replica(clients, "b", 1, convert_on_send=on_send)
        assert seeded(client, named("m"), *b.targets) == (("a",) if on_send else ())
        b.assert_holds(full)
        if on_send:
            c = mxfp8_replicas.Replica(clients, "c", 1, swizzled=True, convert_on_send=True)
            assert set(seeded(client, named("m"), *c.targets)) <= {"a", "b"}
            c.assert_holds(full)
        assert client.verify(named("m")).outcome == "proven"


class Kept(nn.Module):
    """Tensors at odd, fixed addresses: mapped pages, the edges beside them, and one tensor copied completely."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(700 * 333 + 5, dtype=BF16)
        self.wide = nn.Parameter(memory[5:].view(333, 700).t(), requires_grad=False)
        self.odd = nn.Parameter(torch.zeros(131077, dtype=BF16), requires_grad=False)
        self.small = nn.Parameter(torch.zeros(9, dtype=BF16), requires_grad=False)
        self.tied = self.odd


def test_replicas_that_keep_their_addresses_seed_and_are_seeded(shared_daemon: Daemon) -> None:
    with shared_daemon.connect() as client:
        generator = torch.Generator().manual_seed(3)
        full = {
            name: torch.randn(value.shape, generator=generator).to(BF16) for name, value in Kept().state_dict().items()
        }
        full["tied"] = full["odd"]
        aliases = {"odd": ("tied",)}
        names = ("wide", "odd", "small")
        described = [
            ParameterMetadata(name, tuple(full[name].shape), BF16, 2, resolved_name=name, aliases=aliases.get(name, ()))
            for name in names
        ]
        source = client.register_source("kept", {name: full[name] for name in names}, metadata=described)
        source.publish(1)

        def joins(replica: str) -> tuple[Kept, refitd.Target]:
            client.adopt(module := Kept(), keep_addresses=True)
            held = {name: getattr(module, name).data for name in names}
            return module, client.register_target("kept", held, replica=replica, metadata=described, mode="flip")

        a, first = joins("a")
        with Engine(first):
            client.swap("kept", 1, timeout=60)
        source.close()
        assert client.verify("kept").outcome == "proven"
        # an engine's writes outside the mapped pages do not spread to other replicas, and verify names them
        a.small.data[8] += 1
        a.odd.data[-1] += 1
        b, second = joins("b")
        assert seeded(client, "kept", first, second) == ("a",)
        for name, value in full.items():
            assert torch.equal(getattr(b, name), value), name
        assert client.verify("kept").outcome == "differs"
        a.small.data[8], a.odd.data[-1] = full["small"][8], full["odd"][-1]
        assert client.verify("kept").outcome == "proven"
        first.close()
        second.close()
