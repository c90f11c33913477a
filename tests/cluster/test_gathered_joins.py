"""Replicas on several nodes that join together cost the seed's cable about one copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from refitd.testing import Daemon, Engine, eventually
from tests.support.network import SwitchedHosts, start_daemons, why_not

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
