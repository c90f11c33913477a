"""Forked processes: a child keeps nothing open, and its client tells it to connect again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, eventually
from tests.support import programs
from tests.support.flips import Fleet, holds
from tests.support.trainer import ANSWER_S, Trainer

PARENT = """
import multiprocessing, os, sys, torch, refitd
client = refitd.connect(sys.argv[1], name="parent")
target = client.register_target("policy", {"w": torch.zeros(64, 64)}, replica="a")
pid = os.fork()
if pid == 0:
    import signal
    signal.pause()
print(pid, flush=True)
target.wait(99, timeout=600)
"""


def test_a_killed_engine_is_gone_though_a_child_that_it_forked_lives(daemon: Daemon, trainer: Trainer) -> None:
    command = programs.python(daemon, PARENT)
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=programs.ROOT)
    assert engine.stdout is not None
    child = int(engine.stdout.readline())
    try:
        engine.kill()
        engine.wait(ANSWER_S)
        eventually(lambda: not trainer.targets(), "the engine that was killed is gone")
        os.kill(child, 0)  # it lives
        with daemon.connect("again") as client:
            weights = {"w": torch.zeros(64, 64)}
            target = client.register_target("policy", weights, replica="a")
            trainer.publish()
            with Engine(target):
                trainer.client.swap("policy", timeout=ANSWER_S)
            assert torch.all(weights["w"] == trainer.version)
    finally:
        os.kill(child, signal.SIGKILL)
        engine.stdout.close()


def test_versions_flip_and_are_proven_while_a_child_holds_the_arenas_as_they_were(daemon: Daemon) -> None:
    fleet = Fleet(daemon)
    fleet.swap(1)
    child = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    child.start()
    try:
        for number in (2, 3, 4):
            fleet.swap(number)
            assert holds(fleet.live, number) and fleet.trainer.verify("policy").outcome == "proven"
    finally:
        child.kill()
        child.join(ANSWER_S)


def _in_child(client: refitd.Client, target: object, source: object, said: object) -> None:
    found = []
    for call in (client.status, target.poll, lambda: target.wait(1), lambda: source.publish(5)):  # type: ignore[attr-defined]
        try:
            call()
            found.append("it was done")
        except refitd.RefitdError as exc:
            found.append(str(exc))
    client.close()
    said.put(found)  # type: ignore[attr-defined]


def test_a_forked_child_is_told_to_connect_again_and_its_parent_goes_on(daemon: Daemon, trainer: Trainer) -> None:
    weights = {"w": torch.zeros(64, 64)}
    with daemon.connect("engine") as client:
        target = client.register_target("policy", weights, replica="a")
        context = multiprocessing.get_context("fork")
        said = context.Queue()
        child = context.Process(target=_in_child, args=(client, target, trainer.source, said))
        child.start()
        found = said.get(timeout=ANSWER_S)
        child.join(ANSWER_S)
        assert child.exitcode == 0
        assert all(f"belongs to pid {os.getpid()}" in text and "connect again after fork" in text for text in found), (
            found
        )
        trainer.publish()
        with Engine(target):
            trainer.client.swap("policy", timeout=ANSWER_S)
        assert torch.all(weights["w"] == trainer.version)
        # one that is forked now serves nothing: it would not hear that the version is over
        child = context.Process(target=lambda: said.put((target.version, target.fenced)))
        child.start()
        version, fenced = said.get(timeout=ANSWER_S)
        child.join(ANSWER_S)
        assert version is None and "forked" in fenced and target.version == trainer.version


BORN = """
import os, sys, torch, refitd
client = refitd.connect(sys.argv[1], name="born")
target = client.register_target("policy", {"w": torch.zeros(64, 64)}, replica="a")
if os.fork() == 0:
    client.close()
    sys.exit(3)  # with all that an interpreter does at its end
print(os.waitstatus_to_exitcode(os.wait()[1]), client.status().nodes[0].node, target.poll())
"""


@pytest.mark.slow
def test_a_forked_child_ends_without_ending_its_parents_session(daemon: Daemon) -> None:
    ran = programs.run(programs.python(daemon, BORN))
    assert (ran.stdout, ran.stderr) == ("3 n0 None\n", "")


def test_closing_hangs_up_though_a_forked_child_lives(daemon: Daemon, trainer: Trainer) -> None:
    client = daemon.connect("engine")
    client.register_target("policy", {"w": torch.zeros(64, 64)}, replica="a")
    r, w = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(w)
        os.read(r, 1)
        os._exit(0)
    try:
        client.close()
        eventually(lambda: not trainer.targets(), "the closed engine is gone")
    finally:
        os.close(r)
        os.close(w)
        os.waitpid(child, 0)


READS = """
import os, sys, torch, refitd
from refitd.testing import Engine
folder, where = sys.argv[1:3]
client, trainer = refitd.connect(folder, name="serves"), refitd.connect(folder, name="trains")
given = {"w": torch.zeros(300, 70)}
source = trainer.register_source("policy", given)
lent = trainer.register_source("lent", {"w": torch.zeros(4, 4)}, pull=True)
live = client.allocate({"w": ((300, 70), torch.float32)}) if where == "shared" else {"w": torch.zeros(300, 70)}
target = client.register_target("policy", live, replica="a")

def swap(version):
    given["w"].fill_(version)
    source.publish(version)
    with Engine(target):
        trainer.swap("policy", version, timeout=30)

swap(1)
lease = lent.lend(1)
begin, ready = os.pipe()
parent = os.getpid()
if os.fork() == 0:
    os.read(begin, 1)  # the parent has committed version 2
    print(where, "holds", sorted(set(live["w"].flatten().tolist())))
    print("serves", target.version, target.pending, f"forked from pid {parent}" in target.fenced)
    reads = {
        "poll": target.poll, "wait": lambda: target.wait(2), "resume": target.resume, "suspend": target.suspend,
        "verify": lambda: client.verify("policy"), "tensors": lambda: client.tensors("policy"),
        "status": client.status, "next": lambda: source.next_version, "lend": lambda: source.lend(7),
        "ended": lambda: lease.has_ended, "lease": lambda: lease.wait(30), "swap": lambda: client.swap("policy"),
        "again": lambda: client.register_target("policy", live, replica="b"),
        "free": lambda: client.free(live), "allocate": lambda: client.allocate({"x": ((1,), torch.float32)}),
    }
    for name, read in reads.items():
        try:
            print(name, "was done:", read())
        except refitd.RefusedError as exc:
            if f"belongs to pid {parent}" not in str(exc) or "spawn" not in str(exc):
                print(name, exc)
    sys.stdout.flush()
    os._exit(0)
swap(2)
os.write(ready, b"x")
assert os.wait()[1] == 0
assert target.version == 2 and (live["w"] == 2).all() and trainer.verify("policy").outcome == "proven"
lease.withdraw()
"""


@pytest.mark.parametrize("where", ["shared", "private"])
def test_every_read_of_the_api_in_a_forked_child_is_refused_and_names_its_parent(daemon: Daemon, where: str) -> None:
    ran = programs.run(programs.python(daemon, READS, where))
    lines = ran.stdout.splitlines()
    assert lines[1:] == ["serves None None True"], ran.stdout + ran.stderr
    if where == "private":
        assert lines[0] == "private holds [1.0]" and not ran.stderr
    else:
        assert ran.stderr.count("was forked from pid") == 1 and "policy/a:0" in ran.stderr
