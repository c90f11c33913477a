"""Cables of different speed between real nodes: measured, written to a file, and used in plans."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from refitd.errors import ConfigError, RefusedError, TransportError
from refitd.protocol.cable_reports import CablesMeasured
from refitd.testing import Daemon, Engine, eventually, stopped
from tests.support.network import SwitchedHosts, start_daemons, why_not
from tests.support.programs import refitctl

PORT, MBIT, SLOW = 7439, 200, 40
ALIKE = 'kind = "cluster"\nname = "alike"\nnics_per_node = 1\nnic_gb_s = 0.025\n'
COMMON = "[deadlines]\nplan_s = 60.0\nstage_s = 30.0\ncommit_s = 10.0\nlease_s = 30.0\n"


@pytest.fixture
def hosts() -> Iterator[SwitchedHosts]:
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    made = SwitchedHosts(4, MBIT)
    yield made
    made.close()


@pytest.mark.slow
def test_who_sends_slowly_is_found_and_passes_nothing_on(
    hosts: SwitchedHosts, start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    hosts.limit(1, send=SLOW)
    file = tmp_path / "cables.toml"
    file.write_text(ALIKE)
    daemons = start_daemons(hosts, PORT, tmp_path, start_daemon, f'{COMMON}[transport]\ncables = "{file}"\n')
    clients = [daemon.connect() for daemon in daemons]
    full = {f"t{i}": torch.randn(512, 1024) for i in range(4)}
    held = {node: {name: torch.zeros_like(tensor) for name, tensor in full.items()} for node in (1, 2, 3)}
    source = clients[0].register_source("policy", full)
    targets = [clients[node].register_target("policy", live, replica=f"r{node}") for node, live in held.items()]

    def swap(version: int) -> int:
        for tensor in full.values():
            tensor.add_(1.0)
        source.publish(version)
        before = hosts.sent(1)
        with Engine(*targets):
            clients[0].swap("policy", version, timeout=60)
        for live in held.values():
            assert all(torch.equal(live[name], tensor) for name, tensor in full.items())
        return hosts.sent(1) - before

    nbytes = sum(4 * tensor.numel() for tensor in full.values())
    assert swap(1) > nbytes, "the slow one passes it on"
    measured = refitctl(daemons[2], "doctor", "--links", "--seconds", "1", "-o", str(file), "--json")
    assert measured.returncode == 0, measured.stderr
    speeds = {one["node"]: (one["send"], one["receive"]) for one in json.loads(measured.stdout)["nodes"]}
    mbit = {node: tuple(8 * speed / 1e6 for speed in both) for node, both in speeds.items()}
    assert 0.5 * SLOW < mbit["b"][0] < 1.2 * SLOW, mbit
    assert all(0.5 * MBIT < both[1] < 1.2 * MBIT for both in mbit.values()), mbit
    assert clients[0].reload().cables == "measured"
    assert swap(2) < 0.2 * nbytes, "it comes last"
    plan = clients[0].plan("policy")
    assert plan.relays.paths[0].nodes[-1] == "b" and plan.speeds == "measured"
    file.write_text(ALIKE.replace("0.025", "nan"))
    with pytest.raises(ConfigError, match=r"transport.cables: .*nic_gb_s"):
        clients[0].reload()
    assert clients[0].plan("policy").speeds == "measured"
    assert clients[0].verify("policy").outcome == "proven"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_dies_or_stops_while_it_is_measured_is_named(
    nodes: Callable[..., tuple[Daemon, ...]], how: signal.Signals
) -> None:
    cluster = nodes(3, COMMON, (2, 2, 2))
    client = cluster[0].connect()
    assert all(rate.speed for rate in client.measure_cables([("n0", "n1")], duration=0.3).rates)
    victim = cluster[1].node_of("n1").workers[0]
    found: list[object] = []

    def measure() -> None:
        try:
            found.append(client.measure_cables([("n0", "n1")], duration=3.0))
        except Exception as exc:
            found.append(exc)

    thread = threading.Thread(target=measure)
    thread.start()
    time.sleep(1.5)
    with pytest.raises(RefusedError, match="measured already"):
        cluster[1].connect().measure_cables([("n0", "n2")], duration=0.3)
    os.kill(victim, how)
    thread.join(60)
    if how == signal.SIGSTOP:
        os.kill(victim, signal.SIGCONT)
        assert isinstance(found[0], TransportError | CablesMeasured), found
    else:
        assert isinstance(found[0], TransportError) and "n1" in str(found[0]), found

    def works() -> bool:
        try:
            return all(
                rate.speed
                for rate in client.measure_cables(
                    [
                        ("n0", "n1"),
                    ],
                    duration=0.3,
                ).rates
            )
        except (TransportError, RefusedError):
            return False

    eventually(works, "the next measurement works", 60)


@pytest.mark.slow
def test_a_swap_and_a_measurement_do_not_harm_each_other(nodes: Callable[..., tuple[Daemon, ...]]) -> None:
    cluster = nodes(2, COMMON, (2, 2))
    trainer, engine = cluster[0].connect(), cluster[1].connect()
    tensors = {"w": torch.randn(1024, 1024)}
    live = {"w": torch.zeros(1024, 1024)}
    source = trainer.register_source("policy", tensors)
    target = engine.register_target("policy", live, replica="a")
    source.publish(1)

    def measure() -> None:
        with pytest.raises(TransportError, match="a swap of model 'policy' has begun"):
            cluster[1].connect().measure_cables([("n1", "n0")], duration=8.0)

    thread = threading.Thread(target=measure)
    thread.start()
    eventually(lambda: "event=cables" in cluster[0].log(), "the measurement has begun")
    time.sleep(1.0)
    with Engine(target):
        assert trainer.swap("policy", 1, timeout=60).outcome == "committed"
    thread.join(60)
    assert torch.equal(live["w"], tensors["w"])
    source.publish(2)
    with stopped(cluster[1].workers()):
        swap = threading.Thread(target=lambda: trainer.swap("policy", 2, timeout=60))
        swap.start()
        eventually(lambda: trainer.status().models[0].swap is not None, "the swap has begun")
        with pytest.raises(RefusedError, match="a swap of model 'policy' is running"):
            trainer.measure_cables([("n1", "n0")])
    with Engine(target):
        swap.join(60)
