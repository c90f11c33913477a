"""Seeding between replicas that differ in experts, ties, padding, MXFP8 or partial models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import refitd
from refitd import ParameterMetadata, Tile
from refitd.testing import Daemon, Engine, eventually
from tests.support import mxfp8_replicas

BF16 = torch.bfloat16


def history(client: refitd.Client, model: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return (state, seeds) of the last catch-ups, the newest first."""
    reports = [(swap.state, swap.report) for swap in client.history(model).swaps]
    return [(state, report.seeds) for state, report in reports if report is not None and report.kind == "catch-up"]


def seeded(client: refitd.Client, model: str, *targets: refitd.Target) -> tuple[str, ...]:
    """Wait until these targets serve the live version; return who gave it to them."""
    with Engine(*targets):
        eventually(lambda: all(target.version is not None for target in targets), "they are caught up")
        eventually(lambda: client.status().models[0].swap is None, "the catch-up has ended")
    ((state, seeds), *_) = history(client, model)
    assert state == "committed"
    return seeds


def meta(name: str, live: torch.Tensor, tiles: tuple[Tile, ...], **fields: object) -> ParameterMetadata:
    size = live.element_size()
    return ParameterMetadata(name, tuple(live.shape), live.dtype, size, tiles=tiles, **fields)  # type: ignore[arg-type]


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
            live["frozen"] = torch.full((5,), float(rank), dtype=BF16)  # its own: no version has it
            self.lives.append(live)
            described = [self._experts(live["experts"], rank)]
            described += [self._embed(key, live[key], rank, ("head",) if tied else ()) for key in self.names]
            described += [meta("frozen", live["frozen"], (Tile("frozen", (0,), (5,), 0, (1,)),))]
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
        return meta("experts", live, tiles, global_shape=(EXPERTS, 4, WIDTH))

    def _embed(self, name: str, live: torch.Tensor, rank: int, aliases: tuple[str, ...]) -> ParameterMetadata:
        first = rank * self.rows
        there = max(0, min(self.rows, VOCABULARY - first))
        tiles = (Tile(name, (first, 0), (there, WIDTH), 0, (WIDTH, 1)),) if there else ()
        fields = {"global_shape": (VOCABULARY, WIDTH), "fill": 3.0, "resolved_name": name}
        return meta(name, live, tiles, aliases=aliases, **fields)

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
    """Scales that arrive in MXFP8 are given on as they are; blocks that a replica has made itself are not."""
    with daemon.connect() as client:
        clients = (client,)
        sources = mxfp8_replicas.Trainer(clients, 1, mxfp8=mxfp8_replicas.OFFER if on_send else None)
        a = mxfp8_replicas.Replica(clients, "a", 2, convert_on_send=on_send)
        with Engine(*a.targets):
            full = sources.publish(1)
            client.swap("m", 1, timeout=60)
        b = mxfp8_replicas.Replica(clients, "b", 1, convert_on_send=on_send)
        assert seeded(client, "m", *b.targets) == (("a",) if on_send else ())
        b.assert_holds(full)
        if on_send:
            c = mxfp8_replicas.Replica(clients, "c", 1, swizzled=True, convert_on_send=True)
            assert set(seeded(client, "m", *c.targets)) <= {"a", "b"}
            c.assert_holds(full)
        assert client.verify("m").outcome == "proven"


class Kept(nn.Module):
    """Tensors at odd addresses that stay: pages that are shown, edges beside them, one that is copied whole."""

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
        # what an engine writes beside the pages that an arena shows is its own: it does not spread, and is named
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
