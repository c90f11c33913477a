"""Real processes of several minor versions of the protocol in one fleet, and of another major version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping

import pytest
import torch

import refitd
from refitd.protocol.base import PROTOCOL_VERSION, shown
from refitd.testing import Cluster, Coordinator, Daemon, Engine, eventually
from tests.support.programs import ROOT, refitctl, run

FOLDER = ROOT / "tests" / "support" / "other_minor"
JOIN_S = 60.0
HERE = shown(PROTOCOL_VERSION)
MAJOR = PROTOCOL_VERSION // 1000
NEXT = MAJOR + 1


def speaks(minor: str = "same", major: int = MAJOR) -> dict[str, str]:
    """Return the environment of a process of another protocol version."""
    return {"PYTHONPATH": str(FOLDER), "TESTED_MINOR": minor, "TESTED_MAJOR": str(major)}


class Mixed(Cluster):
    """A cluster whose processes may have different versions."""

    def __init__(self, minors: Mapping[str, str]) -> None:
        super().__init__(("n0", "n1"), "[deadlines]\nlease_s = 3.0\n")
        self.minors = minors

    def environment(self, name: str) -> Mapping[str, str]:
        return speaks(self.minors[name])

    def start_coordinator(self) -> None:
        self.coordinator = Coordinator(self._config, **self._options("coordinator")).start()


@pytest.mark.slow
def test_a_fleet_of_three_minor_versions_swaps() -> None:
    with Mixed({"coordinator": "same", "n0": "newer", "n1": "older"}) as cluster:
        n0, n1 = cluster.daemons["n0"], cluster.daemons["n1"]
        with n0.connect() as trainer, n1.connect() as far:
            given = {"w": torch.arange(6000.0).reshape(60, 100), "b": torch.ones(7, dtype=torch.bfloat16)}
            live = [{name: torch.zeros_like(tensor) for name, tensor in given.items()} for _ in range(2)]
            source = trainer.register_source("policy", given)
            a = trainer.register_target("policy", live[0], replica="a")
            b = far.register_target("policy", live[1], replica="b")
            source.publish(1)
            with Engine(a, b):
                assert trainer.swap("policy", 1, timeout=60).outcome == "committed"
                given["w"].neg_()
                source.publish(2)
                # an operator of each version
                for number, (minor, daemon) in enumerate((("newer", n1), ("older", n0)), 2):
                    done = operator(daemon, minor, "swap", "policy", "--json")
                    assert json.loads(done.stdout)["outcome"] == "committed", done
                    source.publish(number + 1)
                # and a coordinator that is replaced by one of another version
                cluster.coordinator.kill()
                cluster.minors = {**cluster.minors, "coordinator": "newer"}
                cluster.start_coordinator()
                eventually(lambda: len(_nodes(trainer)) == 2, "both have joined it", JOIN_S)
                eventually(lambda: _swapped(trainer), "it swaps", JOIN_S)
            assert all(torch.equal(held[name], given[name]) for held in live for name in given)
            assert trainer.verify("policy").outcome == "proven"
            for unknown in (cluster.coordinator.log(), n1.log()):
                assert unknown.count("'OfANewerVersion' refused") in range(1, 60), (
                    "it is ignored, and logged now and then"
                )
            told = operator(n0, "older", "status").stdout
            assert (
                f"protocol versions differ: coordinator {MAJOR}.501" in told
                and f"n0 {MAJOR}.501, n1 {MAJOR}.499" in told
            )


def operator(daemon: Daemon, minor: str, command: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run refitctl as another version."""
    line = [sys.executable, "-m", "refitd_cli.control", command, "--address", str(daemon.directory), *words]
    return run(line, env={**os.environ, **speaks(minor)})


def _nodes(client: refitd.Client) -> Mapping[str, int]:
    try:
        return client.status().protocols
    except refitd.RefitdError:
        return {}


def _swapped(client: refitd.Client) -> bool:
    try:
        return client.swap("policy", timeout=JOIN_S).outcome == "committed"
    except refitd.RefusedError:  # some members have not registered again
        return False


@pytest.mark.slow
def test_another_major_version_is_refused_at_both_doors_and_named(start_daemon: Callable[..., Daemon]) -> None:
    first = start_daemon()
    other = start_daemon(name="n1", joins=first.endpoint, environment=speaks(major=NEXT))
    with pytest.raises(refitd.ProtocolError, match=rf"this client speaks protocol {HERE}, the daemon {NEXT}\.500: "):
        refitd.connect(other.directory)
    with first.connect() as client:
        assert [node.node for node in client.status().nodes] == ["n0"]
    eventually(
        lambda: f"node n1 speaks protocol {NEXT}.500, this coordinator {HERE}" in other.log(),
        "its log says why",
        JOIN_S,
    )
    status = refitctl(first, "status")
    assert status.returncode == 0
