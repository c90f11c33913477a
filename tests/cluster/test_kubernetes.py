"""The configuration of configs/kubernetes, run as its pods would: one key for all daemons, probes, PID namespaces."""

from __future__ import annotations

import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from refitd.protocol import keys
from refitd.testing import Coordinator, Daemon, Engine, eventually
from refitd.testing.daemon import free_port
from tests.support.kubernetes import objects
from tests.support.programs import Program, python

OBJECTS = objects()
DATA = OBJECTS["ConfigMap", "refitd-config"]["data"]
JOIN_S = 60.0


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    for name in ("coordinator", "nodes"):
        keys.write(keys.generate(name), tmp_path)
    environment = {
        "REFITD_COORDINATOR__ENDPOINT": f"tcp://127.0.0.1:{free_port()}",
        "REFITD_COORDINATOR__JOURNAL": str(tmp_path / "journal.sqlite"),
        "REFITD_SECURITY__KEY": str(tmp_path / "coordinator.key"),
        "REFITD_SECURITY__ALLOWED": str(tmp_path / "nodes.pub"),
        "REFITD_METRICS__ENDPOINT": f"127.0.0.1:{free_port()}",
        "REFITD_LOG__FORMAT": "text",  # refitd.testing reads it
    }
    found = Coordinator(DATA["coordinator.toml"], environment=environment)
    found.given = environment  # type: ignore[attr-defined]
    yield found.start()
    print(found.log())
    found.remove()


def probe(address: str, pod: tuple[str, str], which: str) -> int:
    """Ask as the kubelet does; return the status."""
    (container,) = OBJECTS[pod]["spec"]["template"]["spec"]["containers"]
    try:
        with urllib.request.urlopen(f"http://{address}{container[which]['httpGet']['path']}", timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as exc:
        return exc.code


@pytest.mark.slow
def test_daemons_with_one_key_join_are_ready_and_swap(
    coordinator: Coordinator, start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    given, daemons, ports = coordinator.given, [], []  # type: ignore[attr-defined]
    for name in ("gpu-0", "gpu-1"):
        ports.append(f"127.0.0.1:{free_port()}")
        environment = {
            "REFITD_NODE__NAME": name,
            "REFITD_NODE__ADDRESS": "127.0.0.1",
            "REFITD_COORDINATOR__ENDPOINT": given["REFITD_COORDINATOR__ENDPOINT"],
            "REFITD_SECURITY__KEY": str(tmp_path / "nodes.key"),
            "REFITD_SECURITY__SERVER_KEY": str(tmp_path / "coordinator.pub"),
            "REFITD_METRICS__ENDPOINT": ports[-1],
            "REFITD_LOG__FORMAT": "text",
        }
        joins = given["REFITD_COORDINATOR__ENDPOINT"]
        daemons.append(start_daemon(DATA["node.toml"], name=name, joins=joins, environment=environment))
    head = given["REFITD_METRICS__ENDPOINT"]
    with daemons[0].connect() as trainer, daemons[1].connect() as far:
        eventually(lambda: len(trainer.status().nodes) == 2, "both have joined", JOIN_S)
        for which in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert probe(head, ("StatefulSet", "refitd-coordinator"), which) == 200
            for port in ports:
                eventually(lambda port=port, which=which: probe(port, ("DaemonSet", "refitd"), which) == 200, which)
        live = {"w": torch.zeros(1000)}
        trainer.register_source("policy", {"w": torch.ones(1000)}).publish(1)
        with Engine(far.register_target("policy", live, replica="a")):
            assert trainer.swap("policy", 1, timeout=JOIN_S).outcome == "committed"
        assert live["w"].unique() == 1.0
        coordinator.stop()
        ready = ("DaemonSet", "refitd"), "readinessProbe"
        eventually(lambda: probe(ports[0], *ready) == 503, "it is not ready without a coordinator", JOIN_S)
        assert probe(ports[0], ready[0], "livenessProbe") == 200


CLIENT = """
import sys, torch, refitd
from refitd.testing import Engine
client = refitd.connect(sys.argv[1])
source = client.register_source("policy", {"w": torch.ones(1 << 18)})
target = client.register_target("policy", {"w": torch.zeros(1 << 18)}, replica="a")
with Engine(target), source.lend(1):
    print(client.swap("policy", 1, timeout=30).outcome, source.lending, flush=True)
found = client.status().models[0]
print(found.sources[0].pid, found.sources[0].mode, flush=True)
sys.stdin.read()
"""
APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
def test_a_client_of_another_pid_namespace_swaps_is_copied_and_its_end_is_noticed() -> None:
    if subprocess.run([*APART, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no PID namespaces here")
    daemon = Daemon(prefix=APART)  # in this namespace the daemon cannot see the client's process
    daemon.start()
    try:
        with daemon.connect() as look:
            with Program(python(daemon, CLIENT)) as client:
                assert [client.line(), client.line()] == ["committed copied", "0 copied"]
            eventually(lambda: look.status().models[0].targets == (), "its end is noticed")
    finally:
        print(daemon.log())
        daemon.remove()
