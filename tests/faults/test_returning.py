"""Large engines that are killed and return during swaps always serve one whole, decided version."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, eventually

TENSORS = 8

# Reads all served elements between two polls, and reports the versions it found.
ENGINE = """
import json, sys, time, refitd, torch
torch.set_num_threads(1)
directory, elements = sys.argv[1], int(sys.argv[2])
client = refitd.connect(directory, name="returns")
live = {f"t{i}": torch.zeros(elements, dtype=torch.int32) for i in range(int(sys.argv[3]))}
target = client.register_target("policy", live, replica="returns", timeout=60)
while True:
    target.poll()
    before = target.version
    ends = {int(v) for t in live.values() for v in torch.aminmax(t)}
    if before is not None and before == target.version:
        print(json.dumps({"version": before, "found": sorted(ends)}), flush=True)
    time.sleep(0.001)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("megabytes", "rounds"), [(64, 6), (1024, 3)])
def test_an_engine_that_returns_during_swaps_is_never_torn(
    start_daemon: Callable[..., Daemon],
    megabytes: int,
    rounds: int,
) -> None:
    daemon = start_daemon("[deadlines]\ncommit_s = 20.0\n")
    elements = (megabytes << 20) // 4 // TENSORS
    trainer, other = daemon.connect("trainer"), daemon.connect("other")
    tensors = trainer.allocate({f"t{i}": ((elements,), torch.int32) for i in range(TENSORS)})
    source = trainer.register_source("policy", tensors)
    live = {name: torch.zeros(elements, dtype=torch.int32) for name in tensors}
    stays = other.register_target("policy", live, replica="stays")
    stop, version = threading.Event(), 0
    problems: list[str] = []

    def swaps() -> None:
        nonlocal version
        while not stop.is_set():
            version += 1
            for tensor in tensors.values():
                tensor.fill_(version)
            try:
                with source.lend(version):
                    trainer.swap("policy", version, timeout=60)
            except refitd.RefitdError:
                time.sleep(0.05)  # the engine has died during the swap

    thread = threading.Thread(target=swaps, daemon=True)
    with Engine(stays):
        thread.start()
        eventually(lambda: stays.version is not None, "the first version is live", 60)
        for _ in range(rounds):
            command = [sys.executable, "-c", ENGINE, str(daemon.directory), str(elements), str(TENSORS)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
                assert process.stdout is not None
                reads = 0
                until = time.monotonic() + 60
                while reads < 5 and time.monotonic() < until:
                    said = json.loads(process.stdout.readline())
                    reads += 1
                    if said["found"] != [said["version"]]:
                        problems.append(str(said))
                assert reads == 5
                process.kill()
                process.wait(20)
        stop.set()
        thread.join(120)
    assert not problems
    for client in (trainer, other):
        client.close()
