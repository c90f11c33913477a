"""Two hosts as two network namespaces: keys, a slow cable, a cable that loses packets, a pulled cable."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, RunningSwap, eventually
from tests.support import programs, shards
from tests.support.fleet import FilledFleet
from tests.support.network import TwoHosts, start_daemons, why_not

if reason := why_not():
    pytest.skip(f"no network namespaces here: {reason}", allow_module_level=True)

PORT = 7433


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    made = TwoHosts()
    yield made
    made.close()


class Fleet(FilledFleet):
    """A trainer on host a, which runs the coordinator too, and an engine on host b."""

    def __init__(self, hosts: TwoHosts, start: Callable[..., Daemon], keys: Path, rows: int, address: str = "") -> None:
        common = "[deadlines]\nplan_s = 60.0\nstage_s = 15.0\ncommit_s = 5.0\n"
        self.daemons = start_daemons(hosts, PORT, keys, start, common, address)
        trainer, engine = (daemon.connect() for daemon in self.daemons)
        super().__init__(trainer, {"w": torch.zeros(rows, 1000, dtype=torch.bfloat16), "b": torch.zeros(1001)})
        self.target = self.add(engine, shards.zeros_like(self.tensors), "far")


@pytest.fixture
def fleet(hosts: TwoHosts, start_daemon: Callable[..., Daemon], tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(rows: int, address: str = "") -> Fleet:
        made.append(Fleet(hosts, start_daemon, tmp_path, rows, address))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_weights_cross_between_hosts_that_know_each_other_by_keys(fleet: Callable[[int], Fleet]) -> None:
    found = fleet(20_000)
    found.swap(1)
    found.swap(2)
    addresses = {node.node: node.address for node in found.daemons[0].status().nodes}
    assert addresses == dict(zip("ab", TwoHosts.addresses, strict=True))
    (link,) = found.daemons[0].status().links
    assert (link.source, link.target, link.state) == ("a", "b", "up")


def test_a_slow_cable_is_filled_and_its_progress_is_told(hosts: TwoHosts, fleet: Callable[[int], Fleet]) -> None:
    """40 MB at 200 Mbit/s take 1.6 s; the progress bar moves during that time."""
    found = fleet(20_000)
    hosts.limit(200)
    found.publish(1)
    told: list[int] = []
    with Engine(found.target):
        report = found.trainer.swap(
            "policy", 1, timeout=60, on_progress=lambda p: told.append(p.bytes_done) if p.phase == "stage" else None
        )
    assert report.outcome == "committed"
    assert found.holds(1)
    partly = {nbytes for nbytes in told if 0 < nbytes < report.bytes}
    assert partly
    assert told == sorted(told)


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["a", "b"])
def test_a_cable_that_is_slow_in_one_direction_carries_all(
    hosts: TwoHosts, fleet: Callable[[int], Fleet], slow: str
) -> None:
    """The other direction carries acknowledgements, agreements and digests."""
    found = fleet(2_000)
    hosts.limit(10, slow)
    found.swap(1)
    found.swap(2)


@pytest.mark.slow
def test_a_cable_that_loses_packets_loses_no_bytes(hosts: TwoHosts, fleet: Callable[[int], Fleet]) -> None:
    found = fleet(2_000)
    if reason := hosts.lose(1.0):
        pytest.skip(reason)
    found.swap(1)


@pytest.mark.slow
@pytest.mark.parametrize("percent", [5.0, 30.0, 60.0])
def test_a_cable_that_loses_much_delays_a_swap_or_ends_it_clearly_and_the_next_one_works(
    hosts: TwoHosts, fleet: Callable[[int], Fleet], percent: float
) -> None:
    found = fleet(2_000)
    found.swap(1)
    found.publish(2)
    if reason := hosts.lose(percent):
        pytest.skip(reason)
    live, began = 2, time.monotonic()
    with Engine(found.target):
        try:
            found.trainer.swap("policy", 2, timeout=60)
        except refitd.RefitFailed as failed:
            live, said = 1, str(failed)
            assert any(
                who in said for who in ("node a", "node b", "host a", "host b", "far rank 0", "source rank 0")
            ), said
        took = time.monotonic() - began
    assert took < 60 + 15, f"the swap's own deadline is 60 s, it took {took:.1f}"
    assert found.holds(live), f"after {took:.1f} s"
    hosts.lose(0)
    eventually(lambda: len(found.daemons[0].status().nodes) == 2, "host b is back", 60)
    eventually(lambda: bool(found.daemons[0].status().models[0].targets), "its engine is back", 60)
    version, deadline = 3, time.monotonic() + 60
    while True:
        try:
            found.swap(version)
            return
        except refitd.RefitFailed:  # TCP may still wait before it sends again what was lost last, longer than stage_s
            assert time.monotonic() < deadline
            version += 1


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1", "Connection refused"),  # b's own
        pytest.param(TwoHosts.coordinator, "no answer within 5 s", marks=pytest.mark.slow),
    ],
)
def test_hosts_that_cannot_reach_each_other_are_named_with_the_address(
    hosts: TwoHosts, fleet: Callable[..., Fleet], address: str, why: str
) -> None:
    hosts.swallow(TwoHosts.coordinator, lost=True)
    found = fleet(10, address)
    (port,) = (lane.port for lane in found.daemons[0].node_of("a").lanes)
    found.publish(1)
    with Engine(found.target), pytest.raises(refitd.RefitFailed) as failed:
        found.trainer.swap("policy", 1, timeout=60)
    pair = rf"worker 0 on node b \(host \S+\) cannot reach worker 0 on node a \(host \S+\) at {address}:{port}: {why}; "
    assert re.search(f"{pair}check node.address and node.worker_ports", str(failed.value))
    for daemon in found.daemons:
        *_, last = json.loads(programs.refitctl(daemon, "doctor", "--json").stdout)["checks"]
        assert last["name"] == "daemon" and last["state"] == "warn"
        assert re.search(rf"node b: \d+ s ago: {pair}", last["advice"])
    if address == TwoHosts.coordinator:
        hosts.swallow(address, lost=False)
        found.swap(2)
        eventually(lambda: not any(node.problems for node in found.daemons[0].status().nodes), "it is forgotten")


@pytest.mark.slow
def test_a_pulled_cable_aborts_in_time_and_the_swap_works_once_it_is_back(
    hosts: TwoHosts, fleet: Callable[[int], Fleet]
) -> None:
    found = fleet(40_000)
    found.swap(1)
    hosts.limit(100)  # 80 MB would take 6 s
    found.publish(2)
    swap = RunningSwap(found.daemons[0].connect(), "policy", 2, timeout=40)
    swap.wait_phase("stage")
    hosts.cable(up=False)
    with pytest.raises(refitd.RefitFailed) as failed:
        swap.result(30)
    said = str(failed.value)
    assert "node b" in said or "replica 'far' rank 0" in said
    assert failed.value.report is not None and failed.value.report.phase == "stage"
    assert found.holds(1)
    hosts.cable(up=True)
    hosts.limit(1000)
    eventually(lambda: len(found.daemons[0].status().nodes) == 2, "host b is back", 30)
    eventually(lambda: bool(found.daemons[0].status().models[0].targets), "its engine is back", 30)
    found.swap(3)
