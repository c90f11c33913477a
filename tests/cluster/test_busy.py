"""Large messages, descriptions, plans and models are handled on threads, and the loops keep answering."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine
from tests.support.hostile import RawPeer, fleet

LARGE = """
import json, sys, time, torch, refitd
directory, number, tensors = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
client = refitd.connect(directory, name=f"large{number}")
model = f"large{number // 2}"
held = {f"{model}.layers.{i // 100}.mlp.experts.{i}.weight": torch.zeros(4) for i in range(tensors)}
if number % 2:
    client.register_target(model, held, replica="r", timeout=300)
else:
    client.register_source(model, held, timeout=300)
print(json.dumps("registered"), flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_four_that_register_fifty_thousand_tensors_each_keep_nobody_else_from_swapping(
    start_daemon: Callable[..., Daemon],
) -> None:
    daemon = start_daemon()
    with fleet(daemon) as here:
        command = [sys.executable, "-c", LARGE, str(daemon.directory)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        large = [subprocess.Popen([*command, str(i), "50000"], **pipes) for i in range(4)]
        said: list[str] = []

        def wait() -> None:
            for process in large:
                assert process.stdout is not None
                said.append(process.stdout.readline())

        waits = threading.Thread(target=wait)
        waits.start()
        try:
            swaps = 0
            while waits.is_alive():
                here.swap()
                swaps += 1
            assert swaps > 0 and [json.loads(line) for line in said] == ["registered"] * 4
            with daemon.connect("operator") as operator:
                planned = threading.Thread(target=lambda: operator.plan("large0"))
                planned.start()
                while planned.is_alive():  # during the planning another model swaps, and status is answered
                    here.swap()
                assert {m.model for m in operator.status().models} == {"policy", "large0", "large1"}
        finally:
            for process in large:
                process.kill()
                process.communicate()
            waits.join(30)
    log = daemon.log()
    assert "coordinator-silent" not in log and "node-lost" not in log


def test_what_a_client_sends_after_a_large_message_is_taken_after_it(start_daemon: Callable[..., Daemon]) -> None:
    from refitd.protocol import local, shards
    from refitd.protocol.base import encode

    daemon = start_daemon()
    tensors = tuple(shards.WireTensor(f"layers.{i}.weight", (4,), "float32") for i in range(20_000))
    register = local.RegisterSource(model="large", rank=0, world_size=1, shard=shards.Shard(tensors), slots=1)
    with RawPeer(daemon.directory) as peer, RawPeer(daemon.directory) as other:
        peer.socket.send(encode(3, register))
        peer.socket.send(encode(4, local.GetDescription(model="large")))
        peer.socket.send(encode(5, register))  # twice; the first registration is done by then
        answers = dict(peer.receive() for _ in range(3))
        assert list(answers) in ([3, 4, 5], [4, 3, 5])
        assert isinstance(answers[3], local.Registered)
        assert isinstance(answers[5], local.Failure) and "already registered" in answers[5].message
        # a client whose large message cannot be decoded gets an error and stays connected
        frame = encode(6, register)
        peer.socket.send(frame[:-12] + b"\xc1" * 12)
        while not isinstance(failure := peer.receive()[1], local.Failure):
            pass
        assert failure.code == refitd.errors.ProtocolError.code
        assert not isinstance(peer.ask(local.GetStatus()), local.Failure)
        assert not isinstance(other.ask(local.GetStatus()), local.Failure)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hundred_thousand_tensors_are_swapped_and_nobody_is_taken_for_dead(
    start_daemon: Callable[..., Daemon],
) -> None:
    """Addressing was once quadratic in the number of tensors, and the node was dropped while it ran."""
    daemon = start_daemon("[deadlines]\ncommit_s = 60.0\nstage_s = 60.0\n")
    count, size = 100_000, 16
    flat, live = torch.zeros(count * size), torch.zeros(count * size)

    def named(whole: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"layers.{i // 100}.block.{i % 100}.weight": part for i, part in enumerate(whole.split(size))}

    with daemon.connect("trainer") as trainer, daemon.connect("engine") as engine:
        source = trainer.register_source("m", named(flat), timeout=120)
        target = engine.register_target("m", named(live), replica="r", timeout=120)
        with Engine(target) as running:
            for version in (1, 2, 3):
                flat.copy_(torch.arange(len(flat), dtype=torch.float32) + version)
                source.publish(version, timeout=60)
                report = trainer.swap("m", version, timeout=120)
                assert report.outcome == "committed" and report.copies == count
                assert torch.equal(live, flat)
            assert trainer.verify("m", timeout=60).outcome == "proven"
        assert not running.errors
