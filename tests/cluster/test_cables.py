"""Cables of one switch between real nodes: a slow one comes last; joining together costs a seed one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from refitd.errors import ConfigError
from refitd.testing import Daemon, Engine, eventually
from tests.support.network import SwitchedHosts, start_daemons, why_not

PORT, MBIT, SLOW = 7439, 200, 40
ALIKE = 'kind = "cluster"\nname = "alike"\nnics_per_node = 1\nnic_gb_s = 0.025\n'
STATED = ALIKE.replace("alike", "stated") + f'[[nodes]]\nname = "b"\nsend_gb_s = {SLOW / 8000}\n'
COMMON = "[deadlines]\nplan_s = 60.0\nstage_s = 30.0\ncommit_s = 10.0\nlease_s = 30.0\n"


@pytest.fixture
def hosts() -> Iterator[SwitchedHosts]:
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    made = SwitchedHosts(4, MBIT)
    yield made
    made.close()


@pytest.mark.slow
def test_a_node_that_sends_slowly_passes_nothing_on(
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
    file.write_text(STATED)
    assert clients[0].reload().cables == "stated"
    assert swap(2) < 0.2 * nbytes, "it comes last"
    plan = clients[0].plan("policy")
    assert plan.relays.paths[0].nodes[-1] == "b" and plan.speeds == "stated"
    file.write_text(ALIKE.replace("0.025", "nan"))
    with pytest.raises(ConfigError, match=r"transport.cables: .*nic_gb_s"):
        clients[0].reload()
    assert clients[0].plan("policy").speeds == "stated"
    assert clients[0].verify("policy").outcome == "proven"


JOINING = 4


@pytest.fixture
def switched() -> Iterator[SwitchedHosts]:
    if reason := why_not():
        pytest.skip(reason)
    hosts = SwitchedHosts(2 + JOINING, 400, "g")
    yield hosts
    hosts.close()


@pytest.mark.slow
def test_joining_at_once_costs_who_serves_one_copy(
    switched: SwitchedHosts, start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    config = "[deadlines]\nlease_s = 60.0\nconnect_s = 60.0\n[transport]\ndeltas = false\n"
    daemons = start_daemons(switched, 7438, tmp_path, start_daemon, config)
    with ExitStack() as stack:
        clients = [stack.enter_context(each.connect()) for each in daemons]
        tensors = {"w": torch.randn(4096, 8192).to(torch.bfloat16)}
        nbytes = 2 * tensors["w"].numel()
        source = clients[0].register_source("m", tensors)
        held = [{"w": torch.zeros_like(tensors["w"])} for _ in range(1 + JOINING)]
        targets = [clients[1].register_target("m", held[0], replica="serves")]
        source.publish(1)
        with Engine(targets[0]):
            clients[0].swap("m", 1, timeout=120)
        before = [switched.sent(host) for host in range(2 + JOINING)]
        for number in range(1, 1 + JOINING):
            targets.append(clients[1 + number].register_target("m", held[number], replica=f"r{number}"))
        with Engine(*targets[1:]):
            eventually(lambda: all(target.version == 1 for target in targets), "all have joined", 240)
        sent = [(switched.sent(host) - then) / nbytes for host, then in enumerate(before)]
        assert all(torch.equal(each["w"], tensors["w"]) for each in held)
        assert sent[0] < 0.1, "the trainer's cable is silent"
        assert sent[1] < 1.2, sent
        assert max(sent[2:]) < 1.2, sent
        report = clients[0].history("m", 1).swaps[0].report
        assert report is not None and len(report.members) == JOINING and report.seeds == ("serves",)
