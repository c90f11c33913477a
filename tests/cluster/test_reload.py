"""Removals by operators in a running cluster: keys taken off the list, leftovers of dead processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, eventually
from tests.support.fleet import go_live
from tests.support.keyed import JOIN_S, Head, Nodes, joined, why_not
from tests.support.names import policy
from tests.support.programs import Program, python, refitctl


@pytest.fixture
def nodes(head: Head, tmp_path: Path, start_daemon: Callable[..., Daemon]) -> Nodes:
    return Nodes(head, tmp_path, start_daemon)


@pytest.mark.slow  # test_roles.py has the decisions
def test_keys_come_and_go_without_a_restart(head: Head, nodes: Nodes) -> None:
    a, b = nodes.key("a"), nodes.key("b")
    head.start(a, more="[deadlines]\nlease_s = 2.0\n")
    first, late = nodes.start("a", key=a), nodes.start("b", key=b)
    assert joined(first) == ["a"]
    with first.connect() as trainer, late.connect() as engine:
        head.allow(a, b)
        admitted = refitctl(first, "reload", "--json")
        report = json.loads(admitted.stdout)
        assert (report["admitted"], report["removed"]) == (["a", "b"], [])
        assert joined(late) == ["a", "b"]
        source = trainer.register_source(policy(), {"w": torch.ones(8)})
        here = trainer.register_target(policy(), {"w": torch.zeros(8)}, replica="here")
        there = engine.register_target(policy(), {"w": torch.zeros(8)}, replica="there")
        source.publish(1)
        with Engine(here, there):
            assert trainer.swap(policy(), 1, timeout=30).outcome == "committed"
            head.allow(a)
            assert head.process is not None
            os.kill(head.process.pid, signal.SIGHUP)
            # the removed node's engine loses its permit when the lease ends; the others continue without it
            eventually(lambda: there.version is None, "the engine of the removed node is fenced", JOIN_S)
            eventually(lambda: "taken off" in why_not(engine), "its clients are told why", JOIN_S)
            report = go_live(trainer, source, 2)
            assert [member.replica for member in report.members] == ["here"]
            assert late.log().count("event=coordinator-refused") == 1
            # an unusable list has no effect
            head.allow()
            refused = refitctl(first, "reload")
            assert (refused.returncode, "no key in it" in refused.stderr) == (2, True)
            assert joined(first) == ["a"]
            head.allow(a, b)
            assert refitctl(first, "reload").returncode == 0
            eventually(lambda: there.version == 2, "it is taken back and caught up", JOIN_S)


@pytest.mark.slow
def test_a_standalone_daemon_has_its_coordinator_read_the_keys(
    head: Head, nodes: Nodes, start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    a = nodes.key("a")
    head.allow(head.pair)
    alone = start_daemon(
        f'[coordinator]\nendpoint = "{head.endpoint}"\n[security]\nkey = "{tmp_path / "head.key"}"\n'
        f'server_key = "{head.public_file}"\nallowed = "{tmp_path / "allowed"}"\n',
        name="head",
    )
    late = nodes.start("a", key=a)
    head.allow(head.pair, a)
    os.kill(alone.pid, signal.SIGHUP)
    assert joined(late) == ["a", "head"]


TRAINER = """
from tests.support.names import policy
import sys, torch, refitd
client = refitd.connect(sys.argv[1])
source = client.register_source(policy(), {"w": torch.ones(1 << 18)}, rank=0, world_size=1)
source.publish(1)
print("published", flush=True)
sys.stdin.read()
"""
ENGINE = """
from tests.support.names import policy
import sys, torch, refitd
client = refitd.connect(sys.argv[1])
target = client.register_target(policy(), {"w": torch.zeros(1 << 18)}, replica="a")
while target.poll() is None: pass
print("serves", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_forget_frees_what_dead_processes_have_left_and_nothing_else(daemon: Daemon) -> None:
    with daemon.connect() as client, Program(python(daemon, TRAINER)) as trainer:
        assert trainer.line() == "published"
        with Program(python(daemon, ENGINE)) as engine:
            client.swap(policy(), 1, wait=60, timeout=60)
            assert engine.line() == "serves"
        eventually(lambda: client.status().models[0].targets == (), "the engine is gone")
        kept = daemon.node().arenas
        living = refitctl(daemon, "forget", policy(), "--json")
        assert json.loads(living.stdout)["sources"] == []  # its trainer is alive
        eventually(lambda: daemon.node().arenas == kept - 1, "what was kept of the engine is freed")
        trainer.kill()
        eventually(lambda: not client.status().models[0].sources[0].attached, "the trainer is gone")
        (forgotten,) = client.forget(policy()).sources
        assert "source rank 0" in forgotten
        eventually(lambda: daemon.node().arenas == 0 and client.status().models == (), "nothing is left")
        assert client.history(policy()).swaps[0].version == 1
        assert client.forget(policy()).sources == ()  # the history still has the model; no registration is left
        with pytest.raises(refitd.RefusedError, match="no model 'polcy' is known; known models: policy"):
            client.forget("polcy")
        assert not client.reload().uses_keys


@pytest.mark.slow
def test_who_may_reload_and_what_becomes_of_a_list_that_is_gone(head: Head, nodes: Nodes, tmp_path: Path) -> None:
    a, b = nodes.key("a"), nodes.key("b")

    class Line:
        public_line = f"{b.public_line} roles=trainer,engine"

    head.start(a, Line)  # type: ignore[arg-type]
    operates, trains = nodes.start("a", key=a), nodes.start("b", key=b)
    assert joined(operates) and joined(trains) == ["a", "b"]
    refused = refitctl(trains, "reload")
    assert (refused.returncode, "needs the role operator" in refused.stderr) == (1, True)
    (tmp_path / "allowed").unlink()
    assert head.process is not None
    for _ in range(200):
        os.kill(head.process.pid, signal.SIGHUP)
    eventually(lambda: "event=keys-not-read" in head.log(), "the log says that the list cannot be read")
    missing = refitctl(operates, "reload")
    assert (missing.returncode, "cannot be read" in missing.stderr) == (2, True)
    assert joined(operates) == ["a", "b"]  # the list is unchanged
    head.allow(b)
    own = refitctl(operates, "reload", "--json")  # removes its own node, and still gets the answer
    assert json.loads(own.stdout)["removed"] == ["a"]
