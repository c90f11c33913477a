"""Versions travel from sharded sources into sharded targets, in place, through real processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, eventually
from tests.support import shards
from tests.support.controls import controlled
from tests.support.fleet import CutReplica, CutSource, go_live
from tests.support.names import named, policy


def test_two_replicas_of_other_layouts_get_every_byte_in_place(daemon: Daemon) -> None:
    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        sources = CutSource([trainer], 2, shards.whole(1))
        replicas = [CutReplica([engine], "fine", 4), CutReplica([engine], "whole")]
        targets = [target for replica in replicas for target in replica.targets]

        def pointers() -> list[int]:
            return [t.data_ptr() for replica in replicas for live in replica.lives for t in live.values()]

        before = pointers()
        with Engine(*targets) as running:
            for version in range(1, 4):
                sources.publish(full := shards.whole(seed=version), version)
                for mine in sources.tensors:  # publish has returned: the trainer may overwrite its tensors
                    for tensor in mine.values():
                        tensor.zero_()
                report = trainer.swap(policy(), version, timeout=60)
                assert report.digests == report.copies > 0
                assert all(replica.holds(full) for replica in replicas)
        assert not running.errors and pointers() == before
        assert [target.version for target in targets] == [3] * 5


def test_models_of_equal_layout_do_not_share_what_a_plan_says_of_members(daemon: Daemon) -> None:
    """A policy and its reference have equal rosters, and so equal plans."""
    with daemon.connect() as trainer, daemon.connect() as engine:
        sources, targets, live = {}, [], {}
        for model in (policy(), "reference"):
            sources[model] = (trainer.register_source(model, mine := shards.whole(0)), mine)
            live[model] = shards.zeros_like(mine)
            targets.append(engine.register_target(model, live[model], replica="r"))
        with Engine(*targets):
            for version in (1, 2, 3):
                for seed, (model, (source, mine)) in enumerate(sources.items()):
                    full = shards.whole(10 * version + seed)
                    for name, tensor in full.items():
                        mine[name].copy_(tensor)
                    go_live(trainer, source, version, model=model)
                    assert shards.equal(live[model], full)


def test_a_target_of_transposed_tensors_keeps_its_strides(daemon: Daemon) -> None:
    full = {"w": torch.arange(6 * 8, dtype=torch.float32).reshape(6, 8)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(policy(), full)
        own = {"w": torch.zeros(8, 6).t()}
        arena = {"w": engine.allocate({"w": ((8, 6), torch.float32)})["w"].t()}
        targets = [engine.register_target(policy(), t, replica=r) for t, r in ((own, "own"), (arena, "arena"))]
        go_live(trainer, source, 1, *targets)
        for live in (own, arena):
            assert torch.equal(live["w"], full["w"])
            assert live["w"].stride() == (1, 6)
    del arena, live


def in_arena(client: refitd.Client, full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    live = client.allocate({name: (tuple(t.shape), t.dtype) for name, t in full.items()})
    for name, tensor in live.items():
        tensor.copy_(full[name])
    return live


def test_lent_tensors_are_read_where_they_live(daemon: Daemon) -> None:
    full = shards.whole(3)
    with daemon.connect() as trainer, daemon.connect() as engine:
        live = in_arena(trainer, full)
        source = trainer.register_source(policy(), live)
        before = daemon.node().arenas
        replica = CutReplica([engine], "r")
        with Engine(*replica.targets), source.lend(5) as lease:
            assert not lease.has_ended
            report = trainer.swap(policy(), 5, timeout=60)
            lease.wait(5)
        assert source.lending == report.sources[0].mode == "arena"
        assert replica.holds(full)
        assert before == 1
        # the tensors were only lent: the version is gone
        with pytest.raises(refitd.RefusedError, match="no version"):
            trainer.swap(policy(), timeout=5)
    del live


def test_publishing_lent_returns_when_the_swap_has_read(daemon: Daemon) -> None:
    full = shards.whole(3)
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(policy(), in_arena(trainer, full))
        replica = CutReplica([engine], "r")
        with pytest.raises(refitd.DeadlineExceeded, match="no swap read it"):
            source.publish(1, timeout=2.0)
        thread = threading.Thread(target=source.publish, args=(2,), kwargs={"timeout": 20})
        thread.start()
        eventually(lambda: trainer.status().models[0].complete_versions == (2,), "version 2 is lent")
        with Engine(*replica.targets):
            trainer.swap(policy(), 2, timeout=60)
        thread.join(10)
        assert not thread.is_alive()
        assert replica.holds(full)


def test_a_published_version_outlives_its_trainer(daemon: Daemon) -> None:
    full = shards.whole(4)
    with daemon.connect() as trainer:
        trainer.register_source(policy(), full).publish(9)
    with daemon.connect() as engine, daemon.connect() as operator:
        eventually(lambda: not operator.status().models[0].sources[0].attached, "the trainer has left")
        replica = CutReplica([engine], "r")
        with Engine(*replica.targets):
            operator.swap(policy(), timeout=60)
        assert replica.holds(full)
        # a new trainer registers the same rank, and version numbers continue
        source = operator.register_source(policy(), full)
        assert operator.status().models[0].sources[0].attached
        source.publish(10)


@pytest.mark.parametrize("cast", [True, "float32", torch.float32])
def test_an_engine_of_another_type_says_so_once_for_all_tensors(daemon: Daemon, cast: object) -> None:
    held = {"w": torch.randn(33, 7), "norm": torch.randn(7), "steps": torch.arange(3)}
    live = {"w": torch.zeros(33, 7).bfloat16(), "norm": torch.zeros(7), "steps": torch.zeros(3, dtype=torch.int64)}
    if cast is not True:
        held["norm"] = held["norm"].clone()
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(named("m"), held)
        target = engine.register_target(named("m"), live, replica="a", cast=cast)
        with Engine(target):
            for version in (1, 2):
                held["w"].mul_(1.5)
                go_live(trainer, source, version, model=named("m"))
                assert torch.equal(live["w"], held["w"].bfloat16())
                assert torch.equal(live["norm"], held["norm"]) and torch.equal(live["steps"], held["steps"])


def test_a_cast_that_there_is_not_is_refused_by_name_before_anything_is_registered(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        trainer.register_source(named("m"), {"w": torch.zeros(4, dtype=torch.float64)})
        live = {"w": torch.zeros(4).bfloat16()}
        for cast, words in ((True, "w: cast is 'float64'"), ("int8", "cast is 'int8'"), (3, "cast is 3")):
            with pytest.raises(refitd.RefusedError, match=words):
                engine.register_target(named("m"), live, replica="a", cast=cast)
        with pytest.raises(refitd.DeadlineExceeded, match="no tensors are offered"):
            engine.register_target("nobody's", live, replica="a", cast=True, timeout=2.0)
        assert not engine.status().models[0].targets


def test_a_source_offers_another_type_than_it_holds(daemon: Daemon) -> None:
    """A trainer with float32 master weights offers bfloat16: it rounds when it copies into the slot."""
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
            trainer.register_source(named("m"), held, cast="int8")
        with pytest.raises(refitd.RefusedError, match="d: cast is 'float16' for a tensor of bfloat16"):
            trainer.register_source(named("m"), {"d": torch.zeros(2).half(), **held}, cast="bfloat16")
        source = trainer.register_source(named("m"), held, cast=torch.bfloat16)
        # an engine may take them in the source's dtype
        assert {name: dtype for name, (_, dtype) in trainer.tensors(named("m")).items()} == {
            name: t.dtype for name, t in held.items()
        }
        with (
            Engine(engine.register_target(named("m"), live, replica="a")),
            Engine(other.register_target(named("m"), wide, replica="b", cast="bfloat16")),
        ):
            go_live(trainer, source, 1, model=named("m"))
            assert shards.equal(live, rounded)
            assert all(torch.equal(wide[name], t.to(held[name].dtype)) for name, t in rounded.items())
            held["w"].mul_(3)
            with source.lend(2):  # converted, so copied
                (given,) = trainer.swap(named("m"), 2, timeout=60).sources
            assert given.mode == "copied"
            assert torch.equal(live["w"], held["w"].bfloat16())


def test_flat_slices_of_several_ranks_make_up_an_engines_tensors(daemon: Daemon) -> None:
    """As FSDP1 and ZeRO-3 cut: contiguous ranges of elements at any offset."""
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
                metadata.append(shards.meta(name, tensors[name], rank, tiles=tiles, global_shape=tensor.shape))
            trainer.register_source(named("m"), tensors, metadata=metadata, rank=rank, world_size=3).publish(1)
        live = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        with Engine(engine.register_target(named("m"), live, replica="a")):
            assert trainer.swap(named("m"), 1, timeout=60).outcome == "committed"
        assert all(torch.equal(live[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("mode", ["shadow", "in-place"])
def test_a_thread_that_waits_commits_while_the_controller_keeps_the_engine_paused(daemon: Daemon, mode: str) -> None:
    said: list[tuple[str, object]] = []
    with daemon.connect() as trainer, daemon.connect() as engine:
        held = {"w": torch.zeros(64)}
        source = trainer.register_source(named("m"), held)
        live = engine.allocate({"w": ((64,), torch.float32)})
        target = controlled(
            engine,
            named("m"),
            live,
            replica="a",
            mode=mode,
            pause=lambda version: said.append(("pause", version)),
            commit=lambda version: None,
            resume=lambda version: said.append(("on", version)),
        )
        for version in range(1, 11):
            held["w"].fill_(version)
            source.publish(version)
            with ThreadPoolExecutor() as pool:
                waits = pool.submit(target.wait, version, 20)
                trainer.swap(named("m"), version, timeout=60)
                assert waits.result() == version
            eventually(lambda v=version: said[-2:] == [("pause", v), ("on", v)], "it was paused and resumed")
            assert live["w"].unique().tolist() == [version]
