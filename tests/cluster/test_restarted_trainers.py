"""A trainer that restarts with another number of ranks replaces the versions of its predecessor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, eventually

# One process is all ranks of a trainer: it publishes a version of rows that hold `value`, and is killed.
TRAINER = """
import sys, time, torch, refitd
directory, world, value = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
client = refitd.connect(directory)
for rank in range(world):
    meta = refitd.ParameterMetadata(
        "w", (6 // world, 2), torch.float32, 4, owner_rank=rank, is_tp=world > 1,
        tensor_parallel_group_ranks=list(range(world)) if world > 1 else None,
    )
    tensors = {"w": torch.full((6 // world, 2), value)}
    source = client.register_source("policy", tensors, metadata=[meta], rank=rank, world_size=world)
    first = source.next_version
    source.publish(first)
print("published", first, flush=True)
time.sleep(60)
"""


def trained(daemon: Daemon, world: int, value: float, *, ends: bool = True) -> tuple[int, subprocess.Popen[str]]:
    """Return the version that was published, and the process."""
    command = [sys.executable, "-c", TRAINER, str(daemon.directory), str(world), str(value)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    said = process.stdout.readline().split()
    if said[:1] != ["published"]:
        rest = process.communicate(timeout=30)[0]
        raise AssertionError(f"{said} {rest}")
    if ends:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)
    return int(said[1]), process


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 3, 1), (1, 2, 1)])
def test_a_trainer_that_has_crashed_starts_again_with_more_or_fewer_ranks(
    daemon: Daemon, sizes: tuple[int, ...]
) -> None:
    with daemon.connect() as engine:
        live = {"w": torch.zeros(6, 2)}
        target = engine.register_target("policy", live, replica="a")
        before = 0
        with Engine(target):
            for value, world in enumerate(sizes, 1):
                version, _ = trained(daemon, world, float(value))
                assert version > before
                before = version
                gone = [False] * world
                eventually(lambda gone=gone: attached(engine) == gone, "the trainer is seen to be gone")
                assert engine.swap("policy", version, timeout=60).outcome == "committed"
                assert (live["w"] == value).all()
                # what the trainer before it has left is given back: the target's arena, and two slots for each rank
                assert daemon.node().arenas == 1 + 2 * world


def attached(client: refitd.Client) -> list[bool]:
    return [source.attached for source in client.status().models[0].sources]


def test_ranks_of_another_size_are_refused_while_one_of_the_old_ones_runs(daemon: Daemon) -> None:
    _, process = trained(daemon, 2, 1.0, ends=False)
    try:
        with (
            daemon.connect() as client,
            pytest.raises(refitd.RefusedError, match="says there are 3 ranks, rank 0"),
        ):
            client.register_source("policy", {"w": torch.zeros(2, 2)}, rank=2, world_size=3)
    finally:
        process.kill()
        process.communicate(timeout=30)
