"""Checkpoints and a live cluster: published without a trainer, saved from the live version."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import refitd
from refitd.checkpoints.safetensors import INDEX, WHOLE
from refitd.client.calls import Layout
from refitd.client.new_target import EngineOptions, register
from refitd.testing import Daemon, Engine, eventually
from tests.support import programs, shards
from tests.support.fleet import CutReplica, CutSource
from tests.support.names import policy

KINDS = {"scalar": torch.tensor(3.5), "flags": torch.tensor([True, False]), "empty": torch.empty(0, 4)}
KINDS |= {"fp8": torch.arange(16.0).view(4, 4).to(torch.float8_e4m3fn)}


def refitctl(daemon: Daemon, *arguments: str) -> tuple[int, dict]:
    """Return the exit status and the JSON object on stdout."""
    ran = programs.refitctl(daemon, *arguments, "--json")
    return ran.returncode, json.loads(ran.stdout)


def publish(daemon: Daemon, folder: Path, *, swap: bool = False) -> int:
    """Publish a folder and leave; return the version."""
    with daemon.connect() as client:
        version = refitd.publish_checkpoint(client, policy(), folder).version
    with daemon.connect() as client:
        assert not swap or client.swap(policy()).version == version
    return version


@contextlib.contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Limit the size of files, like a full disk."""
    before, writes = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python would cache truncated bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes


def folder_of(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    save_file(tensors, path / WHOLE, metadata={"format": "pt"})
    (path / "config.json").write_text('{"model_type": "none"}')
    return path


def test_a_client_that_holds_one_checkpoint_is_told_why_it_cannot_publish_the_next(
    daemon: Daemon, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "given", {"w": torch.ones(3)})
    with daemon.connect() as client:
        refitd.publish_checkpoint(client, policy(), folder)
        with pytest.raises(refitd.RefusedError, match="this client holds its source rank 0; close the client"):
            refitd.publish_checkpoint(client, policy(), folder)
    assert publish(daemon, folder) == 1  # no engine has served the version


def test_what_was_published_and_swapped_is_saved_byte_for_byte(daemon: Daemon, tmp_path: Path) -> None:
    model = shards.whole(1) | KINDS
    given = folder_of(tmp_path / "given", model)
    with daemon.connect() as engine:
        targets = CutReplica([engine], "tp2", 2).targets
        with Engine(targets[0]), Engine(targets[1]):
            status, said = refitctl(daemon, "publish", policy(), "--from", str(given), "--version", "7", "--swap")
        assert (status, said["outcome"], said["published"]["version"]) == (0, "committed", 7)
        assert targets[0].version == targets[1].version == 7
        # the publisher has left; its version is still available to new targets
        joined = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
        assert engine.register_target(policy(), joined, replica="late").wait(7) == 7
        assert all(torch.equal(joined[n].view(torch.uint8), t.view(torch.uint8)) for n, t in model.items() if t.dim())
        out = tmp_path / "out"
        status, said = refitctl(daemon, "save", policy(), "--version", "7", "-o", str(out))
        assert (status, said["version"], said["files"], said["tensors"]) == (0, 7, 1, len(model))
        assert (out / WHOLE).read_bytes() == (given / WHOLE).read_bytes()
        # written in shards, over a folder that has a config: different steps must give the same bytes
        done: list[tuple[int, int]] = []
        again = refitd.save_checkpoint(
            engine, policy(), given, max_shard_bytes=9000, on_progress=lambda *progress: done.append(progress)
        )
        assert again.files > 1 and done[-1] == (again.bytes, again.bytes) == (said["bytes"], said["bytes"])
        files = sorted(set(json.loads((given / INDEX).read_text())["weight_map"].values()))
        assert sorted(each.name for each in given.iterdir()) == sorted(["config.json", INDEX, *files])
        saved = {name: tensor for file in files for name, tensor in load_file(given / file).items()}
        assert shards.equal({n: t for n, t in saved.items() if t.dim()}, {n: t for n, t in model.items() if t.dim()})
        (seen,) = engine.status().models
        assert {target.replica for target in seen.targets} == {"tp2", "late"}
        assert publish(daemon, given) == 8


def test_a_running_trainers_version_is_saved_whole_and_a_disk_that_fails_leaves_the_older_one(
    daemon: Daemon, tmp_path: Path
) -> None:
    model = shards.whole(3)
    with daemon.connect() as trainer, daemon.connect() as engine:
        sources = CutSource([trainer], 2, model).sources
        target = engine.register_target(policy(), shards.zeros_like(model), replica="a")
        with pytest.raises(refitd.RefusedError, match="no version is live; swap one first"):
            refitd.save_checkpoint(engine, policy(), tmp_path / "out")
        for source in sources:
            source.publish(1)
        with Engine(target):
            trainer.swap(policy(), 1)
        older = folder_of(tmp_path / "older", shards.whole(9))
        before = (older / WHOLE).read_bytes()
        with largest_file(4096), pytest.raises(refitd.CheckpointError, match=f"{tmp_path}.*: File too large"):
            refitd.save_checkpoint(engine, policy(), older)
        assert [each.name for each in tmp_path.iterdir()] == ["older"]
        assert (older / WHOLE).read_bytes() == before
        assert refitd.save_checkpoint(engine, policy(), older).version == 1
        assert shards.equal(load_file(older / WHOLE), model)
        with pytest.raises(refitd.RefusedError, match="version 1 is live, and 2 was to be saved"):
            refitd.save_checkpoint(engine, policy(), older, version=2)
        # engines serve version 1, and the trainer's slots hold newer ones
        for version in (2, 3):
            for source in sources:
                source.publish(version)
        with pytest.raises(refitd.RefusedError, match=r"sources hold it no more \(complete versions: \[2, 3\]\)"):
            refitd.save_checkpoint(engine, policy(), tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_a_version_that_goes_live_between_two_shards_is_saved_in_its_place_or_refuses_the_save(
    daemon: Daemon, tmp_path: Path
) -> None:
    model = shards.whole(1)
    with daemon.connect() as trainer, daemon.connect() as engine:
        source = trainer.register_source(policy(), model)
        target = engine.register_target(policy(), shards.zeros_like(model), replica="a")

        def step() -> None:
            for tensor in model.values():
                tensor.add_(1)
            source.publish(source.next_version)
            trainer.swap(policy())

        with Engine(target), daemon.connect() as saver:
            step()
            stepped = iter([step])
            done = refitd.save_checkpoint(
                saver, policy(), tmp_path / "out", max_shard_bytes=9000, on_progress=lambda *_: next(stepped, int)()
            )
            assert done.version == 2 and done.files > 1
            saved = {n: t for file in (tmp_path / "out").glob("*.safetensors") for n, t in load_file(file).items()}
            assert shards.equal(saved, model)
            stepped = iter([step])
            with pytest.raises(refitd.RefusedError, match="version 3 went live while 2 was saved; save again"):
                refitd.save_checkpoint(
                    saver,
                    policy(),
                    tmp_path / "new",
                    version=2,
                    max_shard_bytes=9000,
                    on_progress=lambda *_: next(stepped, int)(),
                )
        assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_checkpoint_is_refused_by_name_before_anything_is_registered(daemon: Daemon, tmp_path: Path) -> None:
    given = folder_of(tmp_path / "given", shards.whole(1))
    os.truncate(given / WHOLE, 5000)
    status, said = refitctl(daemon, "publish", policy(), "--from", str(given))
    assert status == 1 and said["error"]["code"] == "checkpoint"
    assert f"{given / WHOLE}: its tensors end at byte" in said["error"]["message"]
    with daemon.connect() as client:
        assert client.status().models == ()
        client.register_source(policy(), shards.whole(2))
        with pytest.raises(refitd.RefusedError, match=f"already registered by pid {os.getpid()}"):
            publish(daemon, folder_of(tmp_path / "good", shards.whole(1)))


def test_no_version_has_parts_of_two_folders_that_look_alike(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    """Names, sizes and times of both are equal, and an automatic swap begins when all sections are published."""
    daemon = start_daemon("[models.policy]\nauto_swap = true\n")
    path = folder_of(tmp_path / "given", shards.whole(1))
    other = folder_of(tmp_path / "other", shards.whole(2))
    for folder in (path, other):
        for file in folder.iterdir():
            os.utime(file, (1e9, 1e9))

    def part(rank: int) -> refitd.checkpoints.publish.Published:
        with daemon.connect() as client:
            return refitd.publish_checkpoint(client, policy(), path, rank=rank, world_size=2, timeout=5.0)

    with daemon.connect() as client, ThreadPoolExecutor() as pool:
        target = client.register_target(policy(), shards.whole(0), replica="a")
        with Engine(target):
            first = pool.submit(part, 0)
            eventually(lambda: any(m.sources for m in client.status().models), "part 1 is there")
            path.rename(tmp_path / "older")
            other.rename(path)
            second = pool.submit(part, 1)
            with pytest.raises(refitd.CheckpointError, match="the folder was replaced while it was read"):
                first.result()
            with pytest.raises(refitd.RefitdError):
                second.result()
        assert target.version is None and client.history(policy()).swaps == ()


def test_several_nodes_publish_a_part_each_and_none_leaves_before_all_have(daemon: Daemon, tmp_path: Path) -> None:
    model = shards.whole(1)
    given = folder_of(tmp_path / "given", model)

    def part(rank: int, timeout: float) -> refitd.checkpoints.publish.Published:
        with daemon.connect() as client:
            return refitd.publish_checkpoint(client, policy(), given, rank=rank, world_size=3, timeout=timeout)

    with pytest.raises(refitd.DeadlineExceeded, match=r"parts \[1, 3\] of 3 were not published"):
        part(1, 2.0)
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(part, range(3), [60.0] * 3))
    assert {each.version for each in done} == {1}
    assert sum(each.bytes for each in done) == sum(tensor.nbytes for tensor in model.values())
    with daemon.connect() as engine:
        live = shards.zeros_like(model)
        with Engine(engine.register_target(policy(), live, replica="a")):
            engine.swap(policy(), 1)
    assert shards.equal(live, model)


def test_a_trainer_of_any_size_takes_over_from_a_checkpoint_and_a_checkpoint_from_a_trainer(
    daemon: Daemon, tmp_path: Path
) -> None:
    first, second = shards.whole(1), shards.whole(2)
    given = folder_of(tmp_path / "given", first)
    with daemon.connect() as engine:
        live = shards.zeros_like(first)
        target = engine.register_target(policy(), live, replica="a")
        with Engine(target):
            assert publish(daemon, given, swap=True)
            assert shards.equal(live, first)
            with daemon.connect() as trainer:
                sources = CutSource([trainer], 2, second).sources
                for source in sources:
                    source.publish(source.next_version)
                assert trainer.swap(policy()).version == 2
                assert shards.equal(live, second)
            # the trainer has ended; its versions are still there
            assert publish(daemon, given, swap=True)
            assert shards.equal(live, first)
        with daemon.connect() as client:
            (seen,) = client.status().models
            assert [(source.rank, source.versions) for source in seen.sources] == [(0, (3,))]
    eventually(lambda: daemon.node().arenas <= 1, "the slots of whom nobody needs are free")


def test_no_swap_waits_for_a_replica_that_only_observes_or_ends_with_it(daemon: Daemon) -> None:
    model = shards.whole(1)
    with daemon.connect() as client, daemon.connect() as other:
        source = client.register_source(policy(), model)
        source.publish(1)
        observer = register(other, policy(), shards.zeros_like(model), "o", Layout(), EngineOptions(observes=True))
        with pytest.raises(refitd.RefusedError, match="has no target"):
            client.swap(policy())
        target = client.register_target(policy(), shards.zeros_like(model), replica="a")
        with Engine(target):
            assert {member.replica for member in client.swap(policy()).members} == {"a"}
            assert observer.wait(1) == 1
            source.publish(2)
            assert client.swap(policy()).version == 2  # the observer does not poll
            eventually(lambda: target.version == 2, "it has committed")  # a rank reports its commit first
            assert observer.version is None
            assert observer.wait(2) == 2


def test_parts_of_two_checkpoints_are_never_one_version(daemon: Daemon, tmp_path: Path) -> None:
    """The folder is replaced between the moments at which two nodes open it."""
    first, second = tmp_path / "first", tmp_path / "second"
    for number, folder in enumerate((first, second)):
        folder.mkdir()
        save_file({name: torch.full((8,), float(number)) for name in "ab"}, folder / WHOLE)
    os.utime(second / WHOLE, ns=(0, 0))

    def part(folder: Path, rank: int, timeout: float) -> refitd.checkpoints.publish.Published:
        with daemon.connect() as client:
            return refitd.publish_checkpoint(client, policy(), folder, rank=rank, world_size=2, timeout=timeout)

    with daemon.connect() as client, ThreadPoolExecutor() as pool:
        waits = pool.submit(part, first, 0, 6.0)
        eventually(
            lambda: any(source.attached for m in client.status().models for source in m.sources), "part 1 is there"
        )
        with pytest.raises(
            refitd.RefusedError, match=r"source rank 1 publishes from other files .* than source rank 0"
        ):
            part(second, 1, 5.0)
        with pytest.raises(refitd.DeadlineExceeded, match=r"parts \[2\] of 2 were not published"):
            waits.result()
        copy = shutil.copytree(first, tmp_path / "copy")  # with its times
        done = list(pool.map(part, (first, copy), (0, 1), (60.0, 60.0)))
        assert client.status().models[0].complete_versions == (done[0].version,)
