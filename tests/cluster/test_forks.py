"""Forked processes: a child inherits no open connection, and its client says to connect again."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
import torch

from refitd.testing import Daemon, Engine, eventually
from tests.support import programs
from tests.support.flips import Fleet, holds
from tests.support.names import policy
from tests.support.trainer import ANSWER_S, Trainer

PARENT = """
from tests.support.names import policy
import multiprocessing, os, sys, torch, refitd
client = refitd.connect(sys.argv[1], name="parent")
target = client.register_target(policy(), {"w": torch.zeros(64, 64)}, replica="a")
pid = os.fork()
if pid == 0:
    import signal
    signal.pause()
print(pid, flush=True)
target.wait(99, timeout=600)
"""


def test_a_killed_engine_is_gone_though_a_child_that_it_forked_lives(daemon: Daemon, trainer: Trainer) -> None:
    engine = programs.Program(programs.python(daemon, PARENT))
    child = int(engine.line())
    try:
        engine.kill()
        eventually(lambda: not trainer.targets(), "the engine that was killed is gone")
        os.kill(child, 0)  # it lives
        with daemon.connect("again") as client:
            weights = {"w": torch.zeros(64, 64)}
            target = client.register_target(policy(), weights, replica="a")
            trainer.publish()
            with Engine(target):
                trainer.client.swap(policy(), timeout=ANSWER_S)
            assert torch.all(weights["w"] == trainer.version)
    finally:
        os.kill(child, signal.SIGKILL)


def test_versions_flip_and_are_proven_while_a_child_holds_the_arenas_as_they_were(daemon: Daemon) -> None:
    fleet = Fleet(daemon)
    fleet.swap(1)
    child = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
    child.start()
    try:
        for number in (2, 3, 4):
            fleet.swap(number)
            assert holds(fleet.live, number) and fleet.trainer.verify(policy()).outcome == "proven"
    finally:
        child.kill()
        child.join(ANSWER_S)


BORN = """
from tests.support.names import policy
import os, sys, torch, refitd
client = refitd.connect(sys.argv[1], name="born")
target = client.register_target(policy(), {"w": torch.zeros(64, 64)}, replica="a")
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
    client.register_target(policy(), {"w": torch.zeros(64, 64)}, replica="a")
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
from tests.support.names import policy
import os, sys, torch, refitd
from tests.support.fleet import go_live
folder, where = sys.argv[1:3]
client, trainer = refitd.connect(folder, name="serves"), refitd.connect(folder, name="trains")
given = {"w": torch.zeros(300, 70)}
source = trainer.register_source(policy(), given)
lent = trainer.register_source("lent", trainer.allocate({"w": ((4, 4), torch.float32)}))
live = client.allocate({"w": ((300, 70), torch.float32)}) if where == "shared" else {"w": torch.zeros(300, 70)}
target = client.register_target(policy(), live, replica="a")

def swap(version):
    given["w"].fill_(version)
    go_live(trainer, source, version, target)

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
        "verify": lambda: client.verify(policy()), "tensors": lambda: client.tensors(policy()),
        "status": client.status, "next": lambda: source.next_version, "lend": lambda: source.lend(7),
        "publish": lambda: source.publish(7),
        "ended": lambda: lease.has_ended, "lease": lambda: lease.wait(30), "swap": lambda: client.swap(policy()),
        "again": lambda: client.register_target(policy(), live, replica="b"),
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
assert target.version == 2 and (live["w"] == 2).all() and trainer.verify(policy()).outcome == "proven"
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
        assert ran.stderr.count("was forked from pid") == 1 and f"model '{policy()}' replica 'a' rank 0" in ran.stderr
