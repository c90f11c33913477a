"""The identity of versions: trainers that restart, journals that are lost or exchanged, ranks that drift apart."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Coordinator, Daemon, Engine, ProcessFailed, RunningSwap, eventually
from tests.support import shards
from tests.support.fleet import FilledFleet
from tests.support.names import policy
from tests.support.programs import Program, python

Start = Callable[..., Daemon]


class Fleet(FilledFleet):
    """A trainer of one rank, and replicas a and b that serve version 1."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        super().__init__(daemon.connect("trainer"), {name: torch.zeros(64, 48) for name in ("x", "y")})
        self.client = daemon.connect("engines")
        for replica in ("a", "b"):
            self.add(self.client, shards.zeros_like(self.tensors), replica)
        self.swap(1)

    def a_alone_takes_over(self, version: int) -> None:
        """Version 2 is decided, a serves it, and b has not reached a commit point yet."""
        self.publish(version)
        running = RunningSwap(self.daemon.connect(), policy(), version)
        running.wait_phase("commit")
        with Engine(self.targets[0]):
            assert self.targets[0].wait(version, timeout=60) == version
        self.running = running

    def status(self) -> refitd.protocol.reports.ModelStatus | None:  # type: ignore[name-defined]
        try:
            return next((m for m in self.trainer.status().models if m.sources and len(m.targets) == 2), None)
        except refitd.RefitdError:
            return None


@pytest.fixture
def alone(start_daemon: Start) -> Iterator[tuple[Fleet, Coordinator]]:
    """A fleet whose coordinator is a separate process."""
    daemon = start_daemon("[deadlines]\ncommit_s = 5.0\n", standalone=False)
    coordinator = daemon.start_coordinator()
    fleet = Fleet(daemon)
    yield fleet, coordinator
    fleet.close()


def journal_files(daemon: Daemon) -> list[Path]:
    return sorted(daemon.directory.glob("journal.sqlite*"))


@pytest.mark.own_daemon
@pytest.mark.parametrize(
    "how", ["lost", pytest.param("older", marks=pytest.mark.slow), pytest.param("another's", marks=pytest.mark.slow)]
)
def test_a_coordinator_on_another_journal_lets_no_two_versions_be_served(
    alone: tuple[Fleet, Coordinator], how: str, tmp_path: Path
) -> None:
    fleet, coordinator = alone
    journal = fleet.daemon.directory / "journal.sqlite"
    shutil.copy(journal, tmp_path / "older")
    fleet.a_alone_takes_over(2)
    coordinator.kill()
    for path in journal_files(fleet.daemon):
        path.unlink()
    if how == "older":
        shutil.copy(tmp_path / "older", journal)
    elif how == "another's":
        code = "import sys; from pathlib import Path; from refitd.coordinator.journals.file import FileJournal\n"
        code += "from refitd.coordinator.journals import SwapRecord; j = FileJournal(Path(sys.argv[1]))\n"
        code += "for v in range(9): j.write(SwapRecord(f's{v}', 'policy', v, 'decided', '', '', 1.0, run='else'))"
        subprocess.run([sys.executable, "-c", code, journal], check=True, timeout=60)
    fleet.daemon.start_coordinator()
    eventually(lambda: (found := fleet.status()) is not None and found.live == 2, "it knows that 2 is live")
    # b either gets the decision again, or is fenced and caught up; it must not continue with 1
    with Engine(*fleet.targets):
        eventually(lambda: fleet.serves() == {2}, "both serve 2")
        assert fleet.holds(2)
        version = 3 if how != "another's" else 9
        fleet.publish(version)
        assert fleet.trainer.swap(policy(), version, timeout=60).outcome == "committed"
    assert fleet.serves() == {version}


@pytest.mark.own_daemon
def test_a_second_coordinator_on_a_journal_is_refused_and_the_next_one_after_it_is_killed_is_not(
    alone: tuple[Fleet, Coordinator], tmp_path: Path
) -> None:
    fleet, coordinator = alone
    linked = tmp_path / "linked"
    os.link(fleet.daemon.directory / "journal.sqlite", linked)
    with pytest.raises(ProcessFailed, match=rf"is in use by another coordinator \(pid {coordinator.pid}\)"):
        Coordinator(f'[coordinator]\njournal = "{linked}"\n').start()
    coordinator.kill()
    fleet.daemon.start_coordinator()
    eventually(lambda: (found := fleet.status()) is not None and found.live == 1, "the next one has started")


def is_at_rest(journal: Path) -> bool:
    """Whether the first swap's end is in the file, and the files stay as they are.

    A change during a write counts as the writer's own, and the coordinator moves entries into the file some time later.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"file:{journal}?immutable=1", uri=True)) as file:  # without the -wal
            if file.execute("SELECT state FROM swaps").fetchall() != [("committed",)]:
                return False
    except sqlite3.Error:
        return False

    def files() -> list[tuple[int, int]]:
        found = (journal, journal.with_name(f"{journal.name}-wal"))
        return [(path.stat().st_size, path.stat().st_mtime_ns) for path in found]

    before = files()
    time.sleep(0.5)
    return files() == before


@pytest.mark.own_daemon
@pytest.mark.parametrize("damage", ["removed", "replaced", "truncated", "garbled"])
def test_a_swap_is_not_committed_with_a_journal_that_somebody_has_touched(daemon: Daemon, damage: str) -> None:
    fleet = Fleet(daemon)
    journal = daemon.directory / "journal.sqlite"
    eventually(lambda: is_at_rest(journal), "the coordinator has tidied its journal")
    if damage == "removed":
        journal.unlink()
    elif damage == "replaced":
        shutil.copy(journal, journal.with_name("journal.copy"))
        journal.with_name("journal.copy").rename(journal)
    elif damage == "truncated":
        os.truncate(journal, 0)
    else:
        journal.with_name("journal.sqlite-wal").write_bytes(os.urandom(8192))
    fleet.publish(2)
    with Engine(*fleet.targets), pytest.raises(refitd.RefitFailed, match="could not be journalled") as failed:
        fleet.trainer.swap(policy(), 2, timeout=60)
    assert failed.value.report is not None and failed.value.report.outcome == "aborted"
    assert fleet.serves() == {1}
    fleet.close()


def test_a_trainer_that_starts_again_cannot_publish_other_weights_under_a_number_that_was_live(daemon: Daemon) -> None:
    fleet = Fleet(daemon)
    first = fleet.source.run
    fleet.trainer.close()
    with daemon.connect("trainer again") as trainer:
        source = trainer.register_source(policy(), fleet.tensors)
        assert source.run != first and source.next_version == 2
        for tensor in fleet.tensors.values():
            tensor.fill_(7)
        with pytest.raises(refitd.RefusedError, match="publish 2 or above"):
            source.publish(1)
        with pytest.raises(refitd.RefusedError, match="publish 2 or above"), source.lend(1):
            pass
        with daemon.connect("late") as client:
            joining = client.register_target(policy(), shards.zeros_like(fleet.tensors), replica="c")
            source.publish(source.next_version)
            assert source.next_version == 3
            with Engine(joining, *fleet.targets):
                assert trainer.swap(policy(), timeout=60).version == 2
            eventually(lambda: fleet.serves() == {2} and joining.version == 2, "all serve it")
            found = trainer.status().models[0]
            assert {t.run for t in found.targets} == {source.run} == {found.live_run}
    fleet.client.close()


NAME = "embedding.weight"


def ranks_whole() -> dict[str, torch.Tensor]:
    return {NAME: torch.zeros(64, 48)}


class Ranks:
    """Two source ranks of a model, each with two slots; one thread per rank publishes."""

    def __init__(self, daemon: Daemon, versions: int) -> None:
        self.clients = [daemon.connect(f"rank {rank}") for rank in range(2)]
        self.sources = []
        self.tensors = [shards.cut(ranks_whole(), rank, 2)[NAME] for rank in range(2)]
        for rank, client in enumerate(self.clients):
            described = shards.describe({NAME: self.tensors[rank]}, rank, 2)
            self.sources.append(
                client.register_source(
                    policy(), {NAME: self.tensors[rank]}, rank=rank, world_size=2, metadata=described
                )
            )
        self.versions = versions
        self.errors: list[Exception] = []

    def publish(self, rank: int, version: int, timeout: float = 30.0) -> None:
        self.tensors[rank].fill_(version)
        self.sources[rank].publish(version, timeout=timeout)

    def close(self) -> None:
        for client in self.clients:
            client.close()


@pytest.mark.parametrize("auto", [False, True])
def test_ranks_that_drift_complete_every_version_with_two_slots(start_daemon: Start, auto: bool) -> None:
    daemon = start_daemon("[models.policy]\nauto_swap = true\n" if auto else "")
    ranks = Ranks(daemon, 12)
    engine = daemon.connect("engine")
    live = shards.zeros_like(ranks_whole())
    target = engine.register_target(policy(), live, replica="a")
    published = [0, 0]
    moved = threading.Condition()

    def slow() -> None:
        wait = random.Random(1)
        try:
            for version in range(1, ranks.versions + 1):
                # lag behind rank 0 by a random number of versions, at most two; the rank ahead may wait for a slot
                ahead = min(wait.randrange(3), ranks.versions - version)
                with moved:
                    moved.wait_for(lambda at=version + ahead: published[0] >= at, 0.3)
                ranks.publish(1, version)
                if not auto:
                    assert version in ranks.clients[1].status().models[0].complete_versions
                    assert ranks.clients[1].swap(policy(), version, timeout=60).version == version
        except Exception as exc:
            ranks.errors.append(exc)

    def fast() -> None:
        try:
            for version in range(1, ranks.versions + 1):
                ranks.publish(0, version)
                with moved:
                    published[0] = version
                    moved.notify_all()
        except Exception as exc:
            ranks.errors.append(exc)

    threads = [threading.Thread(target=work) for work in (slow, fast)]
    with Engine(target):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not ranks.errors, ranks.errors
        eventually(lambda: target.version == ranks.versions, "the last version is live")
    assert (live[NAME] == ranks.versions).all()
    engine.close()
    ranks.close()


def test_a_rank_that_is_too_far_ahead_is_told_whom_it_waits_for(daemon: Daemon) -> None:
    ranks = Ranks(daemon, 3)
    for rank in range(2):
        ranks.publish(rank, 1)
    ranks.publish(0, 2)
    with pytest.raises(refitd.DeadlineExceeded, match=r"source rank 1 .* has published 1 last"):
        ranks.publish(0, 3, timeout=2.0)
    assert ranks.clients[0].status().models[0].complete_versions == (1,)
    waiting = threading.Thread(target=ranks.publish, args=(0, 3))
    waiting.start()
    ranks.publish(1, 2)
    waiting.join(20)
    assert not waiting.is_alive()
    assert ranks.clients[0].status().models[0].complete_versions == (2,)
    ranks.close()


# One process is all ranks of a trainer: it publishes a version of rows of `value`, and is killed.
TRAINER = """
from tests.support.names import policy
import sys, time, torch, refitd
directory, world, value = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
client = refitd.connect(directory)
for rank in range(world):
    meta = refitd.ParameterMetadata(
        "w", (6 // world, 2), torch.float32, 4, owner_rank=rank, is_tp=world > 1,
        tensor_parallel_group_ranks=list(range(world)) if world > 1 else None,
    )
    tensors = {"w": torch.full((6 // world, 2), value)}
    source = client.register_source(policy(), tensors, metadata=[meta], rank=rank, world_size=world)
    first = source.next_version
    source.publish(first)
print("published", first, flush=True)
time.sleep(60)
"""


def trained(daemon: Daemon, world: int, value: float) -> tuple[int, Program]:
    """Return the version that was published, and the process."""
    process = Program(python(daemon, TRAINER, str(world), str(value)))
    word, _, version = process.line().partition(" ")
    assert word == "published"
    return int(version), process


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 3, 1), (1, 2, 1)])
def test_a_trainer_that_has_crashed_starts_again_with_more_or_fewer_ranks(
    daemon: Daemon, sizes: tuple[int, ...]
) -> None:
    with daemon.connect() as engine:
        live = {"w": torch.zeros(6, 2)}
        target = engine.register_target(policy(), live, replica="a")
        before = 0
        with Engine(target):
            for value, world in enumerate(sizes, 1):
                version, process = trained(daemon, world, float(value))
                process.kill()
                assert version > before
                before = version
                gone = [False] * world
                eventually(lambda gone=gone: attached(engine) == gone, "the trainer is seen to be gone")
                assert engine.swap(policy(), version, timeout=60).outcome == "committed"
                assert (live["w"] == value).all()
                # the previous trainer's slots are freed; the target's arena and two slots for each rank remain
                assert daemon.node().arenas == 1 + 2 * world


def attached(client: refitd.Client) -> list[bool]:
    return [source.attached for source in client.status().models[0].sources]


def test_ranks_of_another_size_are_refused_while_one_of_the_old_ones_runs(daemon: Daemon) -> None:
    _, process = trained(daemon, 2, 1.0)
    with (
        process,
        daemon.connect() as client,
        pytest.raises(refitd.RefusedError, match="says there are 3 ranks, rank 0"),
    ):
        client.register_source(policy(), {"w": torch.zeros(2, 2)}, rank=2, world_size=3)
