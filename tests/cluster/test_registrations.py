"""Registrations as users make them: wrong arguments, empty ranks, wrappers, replaced tensors, many in a row."""

from __future__ import annotations

import gc
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import refitd
from refitd import ParameterMetadata, RefitdError, RefusedError
from refitd.client import Client
from refitd.client.source_tensors import SourceTensors
from refitd.testing import Daemon, Engine, eventually
from tests.support.controls import Controlled
from tests.support.fleet import go_live
from tests.support.names import policy
from tests.support.shards import meta


def test_no_wrong_argument_ends_a_session_and_numbers_of_numpy_and_torch_are_numbers(daemon: Daemon) -> None:
    full, live = {"w": torch.arange(8.0)}, {"w": torch.zeros(8)}

    def described(**more: Any) -> list[ParameterMetadata]:
        one: dict[str, Any] = {"name": "w", "shape": (np.int64(8),), "dtype": torch.float32, "element_size": 4, **more}
        return [ParameterMetadata(**one)]

    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(
            policy(), full, rank=np.int64(0), world_size=torch.tensor(1), slots=np.int32(2), metadata=described()
        )
        target = engine.register_target(
            policy(), live, replica=np.str_("a"), metadata=described(fill=torch.tensor(0.0)), timeout=np.float64(20)
        )
        wrong: list[Any] = [
            lambda: source.publish(1.5),
            lambda: source.publish(None),
            lambda: source.publish(torch.zeros(2)),
            lambda: source.publish(-1),
            lambda: source.publish(1, timeout=math.inf),
            lambda: source.lend(1, timeout=None),
            lambda: source.lend("1"),
            lambda: target.wait("1"),
            lambda: target.wait(1, timeout=math.nan),
            lambda: trainer.swap(policy(), 1.5),
            lambda: trainer.swap(policy(), 1, timeout=-1),
            lambda: trainer.swap(policy(), 1, timeout=math.inf),
            lambda: trainer.swap(None),
            lambda: trainer.swap(3),
            lambda: trainer.rollback(policy(), "old"),
            lambda: trainer.verify(policy(), timeout=math.nan),
            lambda: trainer.history(policy(), limit="all"),
            lambda: trainer.abort(policy(), reason=3),
            lambda: trainer.plan(b"policy"),
            lambda: trainer.allocate({"w": ((2.5,), torch.float32)}),
            lambda: trainer.allocate({"w": ((2,), torch.float32)}, timeout=None),
            lambda: trainer.free("w"),
            lambda: trainer.free({"w": full["w"]}),
            lambda: trainer.register_source("x", "weights.pt"),
            lambda: trainer.register_source("x", {"w": 3}),
            lambda: trainer.register_source("x", full, rank=None),
            lambda: trainer.register_source("x", full, rank="0"),
            lambda: trainer.register_source("x", full, slots=None),
            lambda: trainer.register_source("x", full, mxfp8=("w",)),
            lambda: trainer.register_source("x", full, metadata=described(fill="zero")),
            lambda: trainer.register_source("x", full, metadata=described(element_size=8)),
            lambda: trainer.register_source("x", full, metadata=described(cast_from=16)),
            lambda: trainer.register_source("x", full, timeout=math.inf),
            lambda: engine.register_target("x", live, replica=None),
            lambda: engine.control_replica("x", "a", commit="later"),
            lambda: engine.control_replica("x", "a", pause="later", commit=print),
            lambda: engine.register_target("x", live, replica="a", derived={"d": live["w"]}),
            lambda: engine.register_target("x", live, replica="a", convert_on_send=None),
            lambda: refitd.connect(3),  # type: ignore[arg-type]
            lambda: refitd.connect(daemon.directory, timeout=math.inf),
        ]
        for number, call in enumerate(wrong):
            with pytest.raises(RefitdError):
                pytest.fail(f"call {number} returned {call()!r}")
        source.publish(np.int64(1), timeout=torch.tensor(20))
        with Engine(target):
            assert trainer.swap(policy(), np.uint8(1), timeout=np.float32(20)).outcome == "committed"
            assert target.wait(torch.tensor(1)) == 1
        assert torch.equal(live["w"], full["w"])
        assert [m.model for m in trainer.status().models] == [policy()]


def test_ranks_without_tensors_and_tensors_held_twice_take_part(daemon: Daemon) -> None:
    """A pipeline stage without parameters, an expert in two places, an empty tensor in an arena."""

    def described(tensors: dict[str, torch.Tensor], rank: int, **names: str) -> list[ParameterMetadata]:
        return [meta(name, t, rank, resolved_name=names.get(name, name)) for name, t in tensors.items()]

    full = {"w": torch.arange(6.0), "again": torch.arange(6.0), "e": torch.zeros(0, 4)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        sources = [
            trainer.register_source(policy(), full, rank=0, world_size=2, metadata=described(full, 0, again="w")),
            trainer.register_source(policy(), {}, rank=1, world_size=2),
        ]
        own = {"w": torch.zeros(6), "e": torch.zeros(0, 4)}
        live = engine.allocate({"w": ((6,), torch.float32), "e": ((0, 4), torch.float32)})
        replica = Controlled(engine, policy(), "b", 2)
        targets = [
            engine.register_target(policy(), own, replica="a", rank=0, world_size=2, metadata=described(own, 0)),
            engine.register_target(policy(), nn.Identity(), replica="a", rank=1, world_size=2),
            replica.add(engine, live, metadata=described(live, 0), mode="in-place"),
            replica.add(engine, {}, mode="in-place"),
        ]
        with Engine(*targets[:2]):
            for version in (1, 2):
                full["w"].fill_(version)
                full["again"].fill_(version)
                for source in sources:
                    source.publish(version)
                report = trainer.swap(policy(), version, timeout=60)
                assert report.outcome == "committed"
                assert [target.wait(version) for target in targets] == [version] * 4
                assert torch.equal(own["w"], full["w"]) and torch.equal(live["w"], full["w"])
        assert trainer.verify(policy(), timeout=60).outcome == "proven"
    del live


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)


def plain_model(value: float) -> nn.Module:
    model = nn.Sequential(Block(), Block())
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def wrapped_model(value: float, tmp_path: Path) -> nn.Module:
    """Return DDP around a compiled model that has one compiled layer and one in a checkpoint wrapper."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.nn.parallel import DistributedDataParallel

    model = plain_model(value)
    model[0].fc1 = torch.compile(model[0].fc1)  # type: ignore[assignment]
    model[1] = checkpoint_wrapper(model[1])
    return DistributedDataParallel(torch.compile(model))  # type: ignore[arg-type]


@pytest.mark.slow
def test_wrappers_have_no_names(daemon: Daemon, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with daemon.connect() as trainer, daemon.connect() as engine:
            model = wrapped_model(1.0, tmp_path)
            assert any(name.startswith("module._orig_mod.0.fc1._orig_mod.") for name, _ in model.named_parameters())
            source = trainer.register_source(policy(), model)
            by_dict = trainer.register_source("dict", dict(model.named_parameters()))
            bare, named = plain_model(0.0), dict(plain_model(0.0).named_parameters())
            back = wrapped_model(0.0, tmp_path)
            targets = [
                engine.register_target(policy(), bare, replica="module"),
                engine.register_target(policy(), back, replica="wrapped"),
                engine.register_target("dict", named, replica="dict"),
            ]
            source.publish(1)
            by_dict.publish(1)
            with Engine(*targets):
                trainer.swap(policy(), 1, timeout=60)
                trainer.swap("dict", 1, timeout=60)
            for tensors in (bare.parameters(), back.parameters(), named.values()):
                assert all(bool((tensor == 1).all()) for tensor in tensors)
            clash = {"_orig_mod.w": torch.zeros(2), "w": torch.zeros(2)}
            with pytest.raises(RefusedError, match=r"_orig_mod\.w and w"):
                trainer.register_source("clash", clash)
    finally:
        torch.distributed.destroy_process_group()


def test_of_targets_that_two_threads_register_at_once_one_gets_the_memory(daemon: Daemon) -> None:
    whole = torch.zeros(64)
    with daemon.connect("one") as one, daemon.connect("two") as two:
        for turn in range(5):
            together = threading.Barrier(2)

            def registered(client: refitd.Client, name: str, turn: int, together: threading.Barrier) -> object:
                together.wait(30)
                try:
                    return client.register_target(policy(), {name: whole}, replica=f"{name}{turn}")
                except refitd.RefusedError as exc:
                    return exc

            with ThreadPoolExecutor() as threads:
                asked = [threads.submit(registered, c, n, turn, together) for c, n in ((one, "a"), (two, "b"))]
                found = [one_of.result(60) for one_of in asked]
            (refused,) = [each for each in found if isinstance(each, refitd.RefusedError)]
            assert "shares memory with" in str(refused)
            for each in found:
                if each is not refused:
                    each.close()  # type: ignore[attr-defined]


def test_a_trainer_that_frees_what_it_has_registered_is_refused_and_goes_on(daemon: Daemon) -> None:
    """FSDP2 registered while it is unsharded, and resharded later: a segmentation fault before."""
    given, live = {"w": torch.ones(1 << 20), "v": torch.ones(4)}, {"w": torch.zeros(1 << 20), "v": torch.zeros(4)}
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(policy(), given)
        target = engine.register_target(policy(), live, replica="a")
        source.publish(1)
        kept = given["w"]
        kept.untyped_storage().resize_(0)
        for _ in range(5):  # more often than there are slots
            for give in (source.publish, source.lend):
                with pytest.raises(RefusedError, match="w: its storage holds 0 bytes"):
                    give(2)
        given["w"] = torch.full((1 << 20,), 2.0)
        source.publish(2)
        with Engine(target):
            trainer.swap(policy(), 2, timeout=60)
            assert bool((live["w"] == 2).all()) and bool((live["v"] == 1).all())
            given["w"] = torch.full((1 << 20,), 3.0)
            with source.lend(3):
                trainer.swap(policy(), 3, timeout=60)
        assert bool((live["w"] == 3).all())


def test_a_copy_that_fails_gives_its_slot_back(daemon: Daemon) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no")

    with daemon.connect() as trainer:
        source = trainer.register_source(policy(), {"w": torch.ones(4)}, slots=1)
        with pytest.MonkeyPatch.context() as fails:
            fails.setattr(SourceTensors, "write_to", fail)
            for version in (1, 2, 2):
                with pytest.raises(MemoryError):
                    source.publish(version)
        source.publish(2)
        assert trainer.status().models[0].complete_versions == (2,)


MIB = 1 << 20

# The allowed growth of each process: Python and the C library allocate by the MiB, SQLite caches up to 2 MiB of the
# journal's pages. `docs/reliability.md` has the measured growth.
MAY_GROW = 4 * MIB


def private_bytes(pid: int | str) -> int:
    """Return a process's private memory and its mapped memory files, without programs and shared libraries."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) << 10


def _arenas(maps: str) -> list[str]:
    """Return the arenas among a process's mappings; the page of permits stays as long as its client."""
    return [line for line in maps.splitlines() if "memfd:refitd" in line and "permits" not in line]


def register_swap_and_close(trainer: Client, engine: Client, version: int, count: int) -> None:
    """Register a source and two targets of `count` elements, one in an arena of `allocate`; swap and free all.

    The function makes no other tensor, because the C allocator keeps up to 64 MiB of freed memory.
    """
    full, live = {"w": torch.full((count,), float(version))}, {"w": torch.zeros(count)}
    placed = engine.allocate({"w": ((count,), torch.float32), "e": ((0,), torch.float32)})
    source = trainer.register_source(policy(), full)
    targets = [engine.register_target(policy(), t, replica=r) for r, t in (("a", live), ("b", placed))]
    go_live(trainer, source, version, *targets)
    assert torch.equal(placed["w"], full["w"]) and torch.equal(live["w"], full["w"])
    with pytest.raises(RefusedError, match=f"holds tensors of model '{policy()}' replica 'b' rank 0 on"):
        engine.free(placed)
    for registered in (*targets, source):
        registered.close()
        registered.close()  # a second close has no effect
    engine.free(placed)
    with pytest.raises(RefusedError, match="free already"):
        engine.free(placed)


def held_by_each(daemon: Daemon) -> dict[str, int]:
    """Return the memory of each process after all arenas are freed."""
    # close() frees immediately, without waiting for the session's end or the garbage collector
    status = daemon.node()
    assert (status.arenas, status.arena_bytes) == (0, 0)
    pids = ["self", *map(str, (daemon.pid, *daemon.children()))]
    for pid in pids:  # workers unmap asynchronously
        maps = Path(f"/proc/{pid}/maps")
        eventually(lambda maps=maps: not _arenas(maps.read_text()), f"{pid} maps no arena")
    return {pid: private_bytes(pid) for pid in pids}


@pytest.mark.slow
def test_memory_stays_flat_over_registrations_that_are_closed_and_arenas_that_are_freed(daemon: Daemon) -> None:
    seen = []
    with daemon.connect() as trainer, daemon.connect() as engine:
        for version in range(1, 7):
            register_swap_and_close(trainer, engine, version, 32 * MIB // 4)
            seen.append(held_by_each(daemon))
            gc.collect()
    assert {pid: after - seen[1][pid] for pid, after in seen[-1].items() if after - seen[1][pid] > MAY_GROW} == {}, seen


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_stays_flat_over_two_thousand_small_registrations(daemon: Daemon) -> None:
    with daemon.connect() as trainer, daemon.connect() as engine:
        for version in range(1, 2001):
            register_swap_and_close(trainer, engine, version, 16_384)
            if version == 1000:  # by then bounded caches are nearly full
                before = held_by_each(daemon)
        after = held_by_each(daemon)
    grown = {pid: after[pid] - before[pid] for pid in after}
    assert max(grown.values()) < MAY_GROW, grown
