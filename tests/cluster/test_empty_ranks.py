"""Ranks whose tensors are all empty, on clients whose arenas hold tensors of other registrations."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import refitd
from refitd import ParameterMetadata, Tile
from refitd.testing import Daemon, Engine
from tests.support.controls import Controlled
from tests.support.names import policy
from tests.support.shards import meta
from tests.support.trainer import ANSWER_S

Tensors = dict[str, torch.Tensor]
COLUMNS = 4


def empty() -> Tensors:
    return {"w": torch.empty(0, COLUMNS)}


def described(tensors: Tensors, rank: int) -> list[ParameterMetadata]:
    """Describe a share of 8 rows: all rows on one rank, none on the others."""
    mine = tensors["w"]
    tiles = (Tile("w", (0, 0), (8, COLUMNS), 0, (COLUMNS, 1)),) if mine.numel() else ()
    return [meta("w", mine, rank, tiles=tiles, global_shape=(8, COLUMNS), resolved_name="w")]


def sources(client: refitd.Client, full: Tensors) -> list[refitd.Source]:
    """Register rank 0 with all rows and rank 1 with none."""
    return [
        client.register_source(policy(), mine, rank=rank, world_size=2, metadata=described(mine, rank))
        for rank, mine in enumerate((full, empty()))
    ]


def test_an_empty_source_rank_beside_an_arena_publishes_a_copy(daemon: Daemon) -> None:
    full = {"w": torch.arange(8.0 * COLUMNS).reshape(8, COLUMNS)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        other = trainer.allocate({"x": ((16,), torch.float32)})
        live = {"w": torch.zeros(8, COLUMNS)}
        target = engine.register_target(policy(), live, replica="a")
        for source in (ranks := sources(trainer, full)):
            source.publish(1, timeout=5)  # no swap runs: a lent version would wait for one until the timeout
        assert ranks[1].next_version == 2
        with Engine(target):
            report = trainer.swap(policy(), 1, timeout=ANSWER_S)
        assert [source.mode for source in report.sources] == ["copied", "copied"]
        assert torch.equal(live["w"], full["w"]) and trainer.verify(policy()).outcome == "proven"
        del other


def test_an_empty_source_rank_lends_and_a_swap_ends_its_lease(daemon: Daemon) -> None:
    full = {"w": torch.arange(8.0 * COLUMNS).reshape(8, COLUMNS)}
    with daemon.connect() as trainer, daemon.connect() as engine, ThreadPoolExecutor() as threads:
        other = trainer.allocate({"x": ((16,), torch.float32)})
        mine = empty()
        first = trainer.register_source(policy(), full, rank=0, world_size=2, metadata=described(full, 0))
        second = trainer.register_source(policy(), mine, rank=1, world_size=2, metadata=described(mine, 1))
        live = {"w": torch.zeros(8, COLUMNS)}
        target = engine.register_target(policy(), live, replica="a")
        first.publish(1)
        with second.lend(1, timeout=ANSWER_S) as lease, Engine(target):
            ended = threads.submit(lease.wait, ANSWER_S)
            trainer.swap(policy(), 1, timeout=ANSWER_S)
            ended.result(ANSWER_S)
        assert torch.equal(live["w"], full["w"])
        del other


@pytest.mark.parametrize("mode", ["shadow", "flip", "copy", "in-place"])
@pytest.mark.parametrize("has_arena", [True, False])
def test_an_empty_target_rank_commits_with_its_replica(daemon: Daemon, mode: str, has_arena: bool) -> None:
    full = {"w": torch.zeros(8, COLUMNS)}
    with daemon.connect() as trainer, daemon.connect() as engine, daemon.connect() as second:
        ranks = sources(trainer, full)
        live = engine.allocate({"w": ((8, COLUMNS), torch.float32)})
        other = second.allocate({"x": ((16,), torch.float32)}) if has_arena else {}
        ranks_here = ((engine, live), (second, empty()))
        if mode == "in-place":
            replica = Controlled(trainer, policy(), "a", 2)
            targets = [
                replica.add(client, mine, mode=mode, metadata=described(mine, rank))
                for rank, (client, mine) in enumerate(ranks_here)
            ]
        else:
            targets = [
                client.register_target(
                    policy(), mine, replica="a", rank=rank, world_size=2, metadata=described(mine, rank), mode=mode
                )
                for rank, (client, mine) in enumerate(ranks_here)
            ]
        assert targets[1].flips is False and targets[1].arenas() == set()
        for version in (1, 2):
            full["w"].fill_(version)
            for source in ranks:
                source.publish(version, timeout=5)
            with Engine(*(() if mode == "in-place" else targets)):
                trainer.swap(policy(), version, timeout=ANSWER_S)
                assert [target.wait(version, ANSWER_S) for target in targets] == [version, version]
            assert torch.equal(live["w"], full["w"])
            assert trainer.verify(policy()).outcome == "proven"
        with Engine(*(() if mode == "in-place" else targets)):
            trainer.rollback(policy(), timeout=ANSWER_S)
            # a rank reports its commit before it sets its version, so the version may still be None here
            assert [target.wait(1, ANSWER_S) for target in targets] == [1, 1]
        assert [target.version for target in targets] == [1, 1]
        assert torch.all(live["w"] == 1)
        if has_arena:
            second.free(other)  # no registration uses it


def test_a_replica_that_keeps_all_of_an_empty_rank_takes_the_rest(daemon: Daemon) -> None:
    full = {"w": torch.full((8, COLUMNS), 3.0)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        other = engine.allocate({"x": ((16,), torch.float32)})
        ranks = [trainer.register_source(policy(), full, partial=True)]
        live = [{"w": torch.zeros(8, COLUMNS), "own": torch.ones(2)}, {"own": torch.ones(0)}]
        targets = [
            engine.register_target(policy(), mine, replica="a", rank=rank, world_size=2, keeps=["own"])
            for rank, mine in enumerate(live)
        ]
        ranks[0].publish(1)
        with Engine(*targets):
            trainer.swap(policy(), 1, timeout=ANSWER_S)
        assert [target.version for target in targets] == [1, 1] and torch.equal(live[0]["w"], full["w"])
        del other
