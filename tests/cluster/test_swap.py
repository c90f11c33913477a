"""Versions travel from sharded sources into sharded targets, in place, through real processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, eventually
from tests.support import shards


def register_sources(client: refitd.Client, world: int, seed: int) -> list[tuple[object, dict[str, torch.Tensor]]]:
    full = shards.whole(seed)
    found = []
    for rank in range(world):
        mine = shards.cut(full, rank, world)
        source = client.register_source(
            "policy", mine, rank=rank, world_size=world, metadata=shards.describe(mine, rank, world)
        )
        found.append((source, mine))
    return found


def register_targets(client: refitd.Client, replica: str, world: int, **options: object):
    found = []
    for rank in range(world):
        mine = shards.zeros_like(shards.cut(shards.whole(0), rank, world))
        target = client.register_target(
            "policy",
            mine,
            replica=replica,
            rank=rank,
            world_size=world,
            metadata=shards.describe(mine, rank, world),
            **options,
        )
        found.append((target, mine))
    return found


def test_two_replicas_of_other_layouts_get_every_byte_in_place(daemon: Daemon) -> None:
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        sources = register_sources(trainer, 2, seed=1)
        targets = register_targets(engine, "fine", 4) + register_targets(engine, "whole", 1)
        pointers = [t.data_ptr() for _, mine in targets for t in mine.values()]
        with Engine(*(target for target, _ in targets)) as running:
            for version in range(1, 4):
                full = shards.whole(seed=version)
                for rank, (source, mine) in enumerate(sources):
                    for name, tensor in shards.cut(full, rank, 2).items():
                        mine[name].copy_(tensor)
                    source.publish(version)
                    # the promise of publish: the trainer may go on at once
                    for tensor in mine.values():
                        tensor.zero_()
                report = trainer.swap("policy", version, timeout=60)
                assert report.outcome == "committed"
                assert report.digests == report.copies > 0
                for rank in range(4):
                    assert shards.equal(targets[rank][1], shards.cut(full, rank, 4))
                assert shards.equal(targets[4][1], full)
        assert not running.errors
        assert pointers == [t.data_ptr() for _, mine in targets for t in mine.values()]
        assert [target.version for target, _ in targets] == [3] * 5


def test_models_of_equal_layout_do_not_share_what_a_plan_says_of_members(daemon: Daemon) -> None:
    """A policy and its reference: their rosters, and so their plans, are the same."""
    with daemon.connect() as trainer, daemon.connect() as engine:
        sources, targets, live = {}, [], {}
        for model in ("policy", "reference"):
            sources[model] = (trainer.register_source(model, mine := shards.whole(0)), mine)
            live[model] = shards.zeros_like(mine)
            targets.append(engine.register_target(model, live[model], replica="r"))
        with Engine(*targets):
            for version in (1, 2, 3):
                for seed, (model, (source, mine)) in enumerate(sources.items()):
                    full = shards.whole(10 * version + seed)
                    for name, tensor in full.items():
                        mine[name].copy_(tensor)
                    source.publish(version)
                    assert trainer.swap(model, version, timeout=60).outcome == "committed"
                    assert shards.equal(live[model], full)


def test_tensors_in_an_arena_are_written_by_the_worker(daemon: Daemon) -> None:
    full = shards.whole(7)
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source("policy", full)
        live = engine.allocate({name: (tuple(t.shape), t.dtype) for name, t in full.items()})
        target = engine.register_target("policy", live, replica="arena")
        pointers = [t.data_ptr() for t in live.values()]
        source.publish(1)
        with Engine(target):
            trainer.swap("policy", timeout=60)
        assert shards.equal(live, full)
        assert pointers == [t.data_ptr() for t in live.values()]
        assert target.last_pause_s > 0
    del live


def test_a_target_of_transposed_tensors_keeps_its_strides(daemon: Daemon) -> None:
    full = {"w": torch.arange(6 * 8, dtype=torch.float32).reshape(6, 8)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source("policy", full)
        own = {"w": torch.zeros(8, 6).t()}
        arena = {"w": engine.allocate({"w": ((8, 6), torch.float32)})["w"].t()}
        targets = [engine.register_target("policy", t, replica=r) for t, r in ((own, "own"), (arena, "arena"))]
        source.publish(1)
        with Engine(*targets):
            trainer.swap("policy", timeout=60)
        for live in (own, arena):
            assert torch.equal(live["w"], full["w"])
            assert live["w"].stride() == (1, 6)
    del arena, live


@pytest.mark.parametrize("in_arena", [False, True])
def test_lent_tensors_are_read_where_they_live(daemon: Daemon, in_arena: bool) -> None:
    full = shards.whole(3)
    with daemon.connect() as trainer, daemon.connect() as engine:
        live = full
        if in_arena:
            live = trainer.allocate({name: (tuple(t.shape), t.dtype) for name, t in full.items()})
            for name, tensor in live.items():
                tensor.copy_(full[name])
        source = trainer.register_source("policy", live, pull=True)
        before = daemon.node().arenas
        target, mine = register_targets(engine, "r", 1)[0]
        with Engine(target), source.lend(5) as lease:
            assert not lease.has_ended
            report = trainer.swap("policy", 5, timeout=60)
            lease.wait(5)
        assert source.lending == report.sources[0].mode == ("arena" if in_arena else "pulled")
        assert shards.equal(mine, full)
        assert before == (1 if in_arena else 2)
        # the tensors were only lent: the version is not held any more
        with pytest.raises(refitd.RefusedError, match="no version"):
            trainer.swap("policy", timeout=5)
    del live


def test_publishing_lent_returns_when_the_swap_has_read(daemon: Daemon) -> None:
    full = shards.whole(3)
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source("policy", full, pull=True)
        target, mine = register_targets(engine, "r", 1)[0]
        with pytest.raises(refitd.DeadlineExceeded, match="no swap read it"):
            source.publish(1, lend=True, timeout=0.2)
        thread = threading.Thread(target=source.publish, args=(2,), kwargs={"lend": True, "timeout": 20})
        thread.start()
        eventually(lambda: trainer.status().models[0].complete_versions == (2,), "version 2 is lent")
        with Engine(target):
            trainer.swap("policy", 2, timeout=60)
        thread.join(10)
        assert not thread.is_alive()
        assert shards.equal(mine, full)


def test_a_model_configured_so_swaps_as_soon_as_a_version_is_complete(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("[models.policy]\nauto_swap = true\n")
    with daemon.connect() as trainer, daemon.connect() as engine:
        sources = register_sources(trainer, 2, seed=1)
        target, mine = register_targets(engine, "r", 1)[0]
        for version in (1, 2):
            for source, _ in sources:
                source.publish(version)
            assert target.wait(version, timeout=60) == version
        assert shards.equal(mine, shards.whole(1))


def test_a_published_version_outlives_its_trainer(daemon: Daemon) -> None:
    full = shards.whole(4)
    with daemon.connect() as trainer:
        trainer.register_source("policy", full).publish(9)
    with daemon.connect() as engine, daemon.connect() as operator:
        eventually(lambda: not operator.status().models[0].sources[0].attached, "the trainer has left")
        target, mine = register_targets(engine, "r", 1)[0]
        with Engine(target):
            operator.swap("policy", timeout=60)
        assert shards.equal(mine, full)
        # a new trainer takes its place, and versions go on
        source = operator.register_source("policy", full)
        assert operator.status().models[0].sources[0].attached
        source.publish(10)


def test_an_on_commit_callback_decides_when_the_engine_is_quiet(daemon: Daemon) -> None:
    full = shards.whole(5)
    lock, seen = threading.Lock(), []

    def on_commit(commit: object) -> None:
        with lock:
            seen.append(commit.version)
            commit.apply()

    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source("policy", full)
        target, mine = register_targets(engine, "r", 1, on_commit=on_commit)[0]
        source.publish(1)
        lock.acquire()
        with pytest.raises(refitd.RefitFailed, match="did not take over"):
            trainer.swap("policy", 1)
        lock.release()
        eventually(lambda: target.version == 1, "the late commit has been made")
        assert seen == [1]
        assert shards.equal(mine, full)
        eventually(lambda: trainer.status().models[0].targets[0].state == "serving", "the coordinator knows")


def test_an_agreeing_replica_flips_all_ranks_at_the_same_poll(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source("policy", shards.whole(1))
        targets = register_targets(engine, "r", 2)
        source.publish(1)
        barrier, polls, stop = threading.Barrier(2), [[], []], threading.Event()
        votes = [0, 0]

        def run(rank: int) -> None:
            def agree(pending: int) -> int:
                votes[rank] = pending
                barrier.wait(10)
                agreed = min(votes)
                barrier.wait(10)
                return agreed

            while not (polls[rank] and polls[rank][-1] == 1) and not stop.is_set():
                polls[rank].append(targets[rank][0].poll(agree=agree))

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        trainer.swap("policy", timeout=60)
        for thread in threads:
            thread.join(10)
        stop.set()
        assert len(polls[0]) == len(polls[1])
        assert polls[0][-1] == polls[1][-1] == 1


def test_many_swaps_leave_no_descriptor_in_the_daemon(daemon: Daemon) -> None:
    from pathlib import Path

    fds = Path(f"/proc/{daemon.pid}/fd")
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source("policy", shards.whole(1))
        target, _ = register_targets(engine, "r", 1)[0]
        with Engine(target):
            counts = []
            for version in range(1, 60):
                source.publish(version)
                trainer.swap("policy", version, timeout=60)
                counts.append(len(list(fds.iterdir())))
        assert counts[-1] == counts[2]
    with daemon.connect() as client:
        # what the trainer had published is still held, nothing else
        eventually(lambda: client.status().nodes[0].arenas == 2, "the engine's arenas are freed")


def test_a_rank_whose_shards_are_all_empty_commits_with_the_others(daemon: Daemon) -> None:
    full = {"w": torch.arange(8.0)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        trainer.register_source("policy", full).publish(1)
        live = [full["w"].clone().zero_(), torch.empty(0)]
        targets = []
        for rank, mine in enumerate(live):
            tile = (refitd.Tile("w", (0,), (8,), 0, (1,)),) if rank == 0 else ()
            described = refitd.ParameterMetadata(
                "w", tuple(mine.shape), mine.dtype, 4, owner_rank=rank, tiles=tile, global_shape=(8,), resolved_name="w"
            )
            targets.append(
                engine.register_target(
                    "policy", {"w": mine}, replica="r", rank=rank, world_size=2, metadata=[described]
                )
            )
        with Engine(*targets):
            assert trainer.swap("policy", timeout=60).outcome == "committed"
        assert [target.version for target in targets] == [1, 1]
        assert torch.equal(live[0], full["w"])


def test_rows_that_pad_a_vocabulary_hold_what_was_declared(daemon: Daemon) -> None:
    full = {"embedding": torch.arange(10 * 4, dtype=torch.float32).reshape(10, 4)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        trainer.register_source("policy", full).publish(1)
        # the engine pads 10 rows to 12, six on each of two ranks
        targets, live = [], [torch.ones(6, 4), torch.ones(6, 4)]
        for rank, mine in enumerate(live):
            rows = min(6, 10 - 6 * rank)
            described = refitd.ParameterMetadata(
                "embedding",
                (6, 4),
                mine.dtype,
                4,
                owner_rank=rank,
                resolved_name="embedding",
                tiles=(refitd.Tile("embedding", (6 * rank, 0), (rows, 4), 0, (4, 1)),),
                global_shape=(10, 4),
                fill=-1.5,
            )
            options = {"replica": "r", "rank": rank, "world_size": 2, "metadata": [described]}
            targets.append(engine.register_target("policy", {"embedding": mine}, **options))
        with Engine(*targets):
            assert trainer.swap("policy", timeout=60).outcome == "committed"
        assert torch.equal(torch.cat(live)[:10], full["embedding"])
        assert torch.equal(live[1][4:], torch.full((2, 4), -1.5))


def test_a_declared_cast_is_made_on_the_way(daemon: Daemon) -> None:
    full = {"w": torch.randn(33, 7)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        trainer.register_source("policy", full).publish(1)
        live = {"w": torch.zeros(33, 7, dtype=torch.bfloat16)}
        described = refitd.ParameterMetadata(
            "w", (33, 7), torch.bfloat16, 2, owner_rank=0, resolved_name="w", cast_from="float32"
        )
        target = engine.register_target("policy", live, replica="r", metadata=[described])
        with Engine(target):
            assert trainer.swap("policy", timeout=60).outcome == "committed"
        assert torch.equal(live["w"], full["w"].to(torch.bfloat16))


@pytest.mark.parametrize("cast", [True, "float32", torch.float32])
def test_an_engine_of_another_type_says_so_once_for_all_tensors(daemon: Daemon, cast: object) -> None:
    held = {"w": torch.randn(33, 7), "norm": torch.randn(7), "steps": torch.arange(3)}
    live = {"w": torch.zeros(33, 7).bfloat16(), "norm": torch.zeros(7), "steps": torch.zeros(3, dtype=torch.int64)}
    if cast is not True:
        held["norm"] = held["norm"].clone()
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source("m", held)
        target = engine.register_target("m", live, replica="a", cast=cast)
        with Engine(target):
            for version in (1, 2):
                held["w"].mul_(1.5)
                source.publish(version)
                assert trainer.swap("m", version, timeout=60).outcome == "committed"
                assert torch.equal(live["w"], held["w"].bfloat16())
                assert torch.equal(live["norm"], held["norm"]) and torch.equal(live["steps"], held["steps"])


def test_a_cast_that_there_is_not_is_refused_by_name_before_anything_is_registered(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        trainer.register_source("m", {"w": torch.zeros(4, dtype=torch.float64)})
        live = {"w": torch.zeros(4).bfloat16()}
        for cast, words in ((True, "w: cast is 'float64'"), ("int8", "cast is 'int8'"), (3, "cast is 3")):
            with pytest.raises(refitd.RefusedError, match=words):
                engine.register_target("m", live, replica="a", cast=cast)
        with pytest.raises(refitd.DeadlineExceeded, match="no tensors are offered"):
            engine.register_target("nobody's", live, replica="a", cast=True, timeout=0.5)
        assert not engine.status().models[0].targets


def test_a_source_offers_another_type_than_it_holds(daemon: Daemon) -> None:
    """As a trainer with float32 master weights does: what is copied into the slot is rounded already."""
    held = {
        "w": torch.randn(33, 7),
        "t": torch.randn(5, 9)[:, ::2],
        "steps": torch.arange(3),
        "none": torch.zeros(0, 4),
    }
    rounded = {name: (t.bfloat16() if t.is_floating_point() else t).contiguous() for name, t in held.items()}
    live, wide = shards.zeros_like(rounded), shards.zeros_like(held)
    with daemon.connect() as trainer, daemon.connect() as engine, daemon.connect() as other:
        with pytest.raises(refitd.RefusedError, match=r"cast is 'int8' .*expected the type to offer: bfloat16"):
            trainer.register_source("m", held, cast="int8")
        with pytest.raises(refitd.RefusedError, match="d: cast is 'float16' for a tensor of bfloat16"):
            trainer.register_source("m", {"d": torch.zeros(2).half(), **held}, cast="bfloat16")
        with pytest.raises(refitd.RefusedError, match="another type cannot be pulled"):
            trainer.register_source("m", held, cast="bfloat16", pull=True)
        source = trainer.register_source("m", held, cast=torch.bfloat16)
        # an engine may have them as they are held
        assert {name: dtype for name, (_, dtype) in trainer.tensors("m").items()} == {
            name: t.dtype for name, t in held.items()
        }
        with (
            Engine(engine.register_target("m", live, replica="a")),
            Engine(other.register_target("m", wide, replica="b", cast="bfloat16")),
        ):
            source.publish(1)
            assert trainer.swap("m", 1, timeout=60).outcome == "committed"
            assert shards.equal(live, rounded)
            assert all(torch.equal(wide[name], t.to(held[name].dtype)) for name, t in rounded.items())
            held["w"].mul_(3)
            with source.lend(2):  # converted, so copied
                (given,) = trainer.swap("m", 2, timeout=60).sources
            assert given.mode == "copied" and "another type" in given.mode_reason
            assert torch.equal(live["w"], held["w"].bfloat16())


def test_flat_slices_of_several_ranks_make_up_an_engines_tensors(daemon: Daemon) -> None:
    """As FSDP1 and ZeRO-3 cut: runs of elements, anywhere."""
    whole = {"a": torch.randn(7, 5, 3), "b": torch.randn(11)}
    cuts = {"a": [0, 40, 41, 105], "b": [0, 0, 7, 11]}
    with daemon.connect() as trainer, daemon.connect() as engine:
        for rank in range(3):
            tensors, metadata = {}, []
            for name, tensor in whole.items():
                start, stop = cuts[name][rank : rank + 2]
                if start == stop:
                    continue
                tensors[name] = tensor.reshape(-1)[start:stop].clone()
                tiles = refitd.flat_tiles(name, tensor.shape, start, stop)
                metadata.append(
                    refitd.ParameterMetadata(
                        name, (stop - start,), torch.float32, 4, owner_rank=rank, tiles=tiles, global_shape=tensor.shape
                    )
                )
            trainer.register_source("m", tensors, metadata=metadata, rank=rank, world_size=3).publish(1)
        live = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        with Engine(engine.register_target("m", live, replica="a")):
            assert trainer.swap("m", 1, timeout=60).outcome == "committed"
        assert all(torch.equal(live[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("mode", ["shadow", "in-place"])
@pytest.mark.parametrize("callback", ["on_pause", "on_commit"])
def test_a_thread_that_waits_leaves_the_commit_to_the_callback(daemon: Daemon, mode: str, callback: str) -> None:
    if (mode, callback) == ("in-place", "on_commit"):
        pytest.skip("an engine that is written in place is asked to stand still")
    said: list[tuple[str, object]] = []
    with daemon.connect() as trainer, daemon.connect() as engine:
        held = {"w": torch.zeros(64)}
        source = trainer.register_source("m", held)
        live = engine.allocate({"w": ((64,), torch.float32)})

        def committed(commit: refitd.Commit) -> None:
            said.extend([("pause", commit.apply()), ("on", commit.version)])

        attends = {"on_pause": lambda v: said.append(("pause", v)), "on_resume": lambda v: said.append(("on", v))}
        hooks = attends if callback == "on_pause" else {"on_commit": committed}
        target = engine.register_target("m", live, replica="a", mode=mode, **hooks)
        for version in range(1, 11):
            held["w"].fill_(version)
            source.publish(version)
            with ThreadPoolExecutor() as pool:
                waits = pool.submit(target.wait, version, 20)
                trainer.swap("m", version, timeout=20)
                assert waits.result() == version
            eventually(lambda v=version: said[-2:] == [("pause", v), ("on", v)], "the callbacks were called")
            assert live["w"].unique().tolist() == [version]
