"""Engines that flip: rollbacks, compared and retained arenas, faults; test_go_live.py has what all modes share."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import pytest
import torch

import refitd
from refitd.buffers import arena as arenas
from refitd.buffers import mapping
from refitd.client.commit_state import CommitState, PollSteps
from refitd.protocol.base import Message
from refitd.protocol.local import PrepareCommit
from refitd.testing import Daemon, Engine, RunningSwap, eventually
from refitd.testing.processes import stopped
from tests.support.fleet import go_live
from tests.support.flip_engine import served
from tests.support.flips import SHAPES, Fleet, holds, quietly, version
from tests.support.mapped import staging_arenas
from tests.support.names import policy
from tests.support.passed_on import Start


def test_what_cannot_flip_is_copied_or_refused_by_name(daemons: Start) -> None:
    with daemons()[0].connect() as client:
        client.register_source(policy(), version(1))
        for wrong, problem in {
            "private": "client.allocate",
            "several": "2 arenas",
            "more": "n lies in the same arena, and is not registered",
            "gap": "w lies in the same arena, and is not registered, or not all of it",
        }.items():
            live = version(0)
            if wrong == "several":
                live = {name: client.allocate({name: SHAPES[name]})[name] for name in ("w", "n")} | {"e": live["e"]}
            elif wrong == "more":
                live = {name: tensor for name, tensor in client.allocate(SHAPES).items() if name != "n"}
            elif wrong == "gap":
                whole = client.allocate(SHAPES)
                live = {"w": whole["w"][:, :30], "n": whole["w"][:, 40:]}
            with pytest.raises(refitd.RefusedError, match=problem):
                client.register_target(policy(), live, replica=wrong, mode="flip")
            assert not client.register_target(policy(), live, replica=wrong).flips
        live = client.allocate(SHAPES)
        assert not client.register_target(policy(), live, replica="c", mode="copy").flips
        with pytest.raises(refitd.RefusedError, match="'flip' or 'copy'"):
            client.register_target(policy(), live, replica="d", mode="flop")  # type: ignore[arg-type]
        shared = client.allocate(SHAPES)
        client.register_source("other", shared)
        with pytest.raises(refitd.RefusedError, match="another registration"):
            client.register_target(policy(), shared, replica="e", mode="flip")


def test_a_source_that_lends_tensors_that_flip(daemons: Start) -> None:
    fleet = Fleet(daemons()[0])
    relay = fleet.engine.register_source("relayed", fleet.live)
    live = version(0)
    last = fleet.trainer.register_target("relayed", live, replica="z")
    other = fleet.engine.allocate(SHAPES)
    flipping = fleet.engine.register_target("relayed", other, replica="y")
    for number in (1, 2, 3, 4):
        assert fleet.swap(number).outcome == "committed"
        with Engine(last, flipping), relay.lend(number):
            fleet.trainer.swap("relayed", number, timeout=30)
        assert holds(live, number) and holds(other, number), relay.lending


def test_a_source_registered_first_and_then_a_target_of_the_same_arena(daemons: Start) -> None:
    """A trainer that is also an engine: the source's dict names the arena's tensors before or after they flip."""
    daemon = daemons()[0]
    with daemon.connect() as trainer, daemon.connect() as engine:
        given = {"w": torch.zeros(64)}
        source = trainer.register_source(policy(), given)
        live = engine.allocate({"w": ((64,), torch.float32)})
        named = {"w": torch.zeros(64)}
        relay = engine.register_source("relayed", named)
        target = engine.register_target(policy(), live, replica="a")
        assert target.flips
        out = {"w": torch.zeros(64)}
        last = trainer.register_target("relayed", out, replica="z")
        for number in (1, 2, 3):
            given["w"].fill_(number)
            go_live(trainer, source, number, target)
            named["w"] = live["w"]
            with Engine(last), relay.lend(number):
                trainer.swap("relayed", number, timeout=30)
            assert out["w"].unique() == number, (number, relay.lending)


def compared(daemon: Daemon, version: int) -> bool:
    lines = [line for line in daemon.log().splitlines() if "spare-compared" in line]
    return bool(lines) and f"version={version}" in lines[-1]


def test_a_version_that_was_changed_while_it_was_live_does_not_come_back_by_an_exchange(
    daemons: Start,
) -> None:
    fleet = Fleet(daemon := daemons()[0])
    fleet.swap(1)
    assert fleet.trainer.verify(policy()).outcome == "proven"
    fleet.live["w"][3, 5] = 99.0
    fleet.swap(2)
    with Engine(fleet.target):
        try:
            report = fleet.trainer.rollback(policy(), timeout=30)
        except refitd.SwapFailed as exc:  # the rollback came before the end of the comparison
            assert "w: its memory has changed since version 1 went live" in str(exc)
            assert holds(fleet.live, 2) and fleet.target.version == 2
            report = fleet.trainer.rollback(policy(), timeout=30)
        assert report.bytes > 0, "from the source, which holds it"
        assert holds(fleet.live, 1)
    assert "w: its memory has changed since version 1 went live" in daemon.log()


def test_a_version_that_was_changed_after_it_was_compared_is_found_once_it_is_live_and_not_served(
    daemons: Start,
) -> None:
    fleet = Fleet(daemon := daemons()[0])
    for number in (1, 2):
        fleet.swap(number)
    eventually(lambda: compared(daemon, 1), "the other arena has been compared")
    (address,) = staging_arenas()  # after two exchanges it is not live
    ctypes.memset(address + 1000, 0x5A, 4)  # like a forked child that still maps the old arenas
    with Engine(fleet.target):
        assert fleet.trainer.rollback(policy(), timeout=30).bytes == 0
        eventually(lambda: "its memory has changed since version 1" in fleet.target.fenced, "it is fenced")
        fleet.swap(3)
        eventually(lambda: fleet.target.version == 3, "it serves again")
        assert not fleet.target.fenced and holds(fleet.live, 3)


def test_a_rollback_that_comes_at_once_waits_until_the_other_arena_is_compared(
    daemons: Start,
) -> None:
    fleet = Fleet(daemon := daemons()[0])
    for number in (1, 2):
        fleet.swap(number)
    with Engine(fleet.target):
        for number in (1, 2, 1):
            assert fleet.trainer.rollback(policy(), number, timeout=30).bytes == 0
            assert compared(daemon, number) and holds(fleet.live, number)
    assert fleet.trainer.verify(policy()).outcome == "proven"


def test_an_eviction_in_a_commit_leaves_a_rank_that_serves_nothing(daemons: Start) -> None:
    """The eviction comes after the exchange, and before the commit is reported."""
    evicts: list[int] = []

    def refresh(tensor: torch.Tensor) -> None:
        if evicts and evicts.pop():
            fleet.trainer.evict(policy(), "a")

    fleet = Fleet(daemons()[0], derived={"d": refitd.Derived(torch.zeros(3), ("w",), refresh)})
    fleet.swap(1)
    evicts.append(2)
    with pytest.raises(refitd.RefitdError):
        fleet.swap(2)
    eventually(lambda: fleet.target.version is None, "it serves nothing")
    quietly(fleet.target.close)  # refused while it has not heard of its eviction
    fleet.target = fleet.engine.register_target(policy(), fleet.live, replica="a")
    for number in (3, 4, 5, 6):
        fleet.publish(number)
        with Engine(fleet.target):
            fleet.trainer.swap(policy(), number, timeout=30, queue=True)
        assert holds(fleet.live, number)


def test_a_decision_repeated_at_the_end_of_a_commit(daemons: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new coordinator repeats its decision just after the exchange: the answer must confirm the decision."""
    hear, flipped, heard = CommitState.hear, PollSteps.flipped, []

    def hears(state: CommitState, message: Message) -> None:
        if isinstance(message, PrepareCommit):
            heard.append((state, message))
        hear(state, message)

    def repeated(steps: PollSteps) -> None:
        flipped(steps)
        hear(*heard[-1])

    monkeypatch.setattr(CommitState, "hear", hears)
    monkeypatch.setattr(PollSteps, "flipped", repeated)
    fleet = Fleet(daemons()[0])
    for number in (1, 2, 3):
        fleet.swap(number)
        assert holds(fleet.live, number)
        assert fleet.trainer.verify(policy()).outcome == "proven"


def test_unregistered_parts_of_an_arena_keep_their_values(daemons: Start) -> None:
    """The registered views leave a hole, and refitd must not change the bytes in the hole."""
    daemon = daemons()[0]
    with daemon.connect() as trainer, daemon.connect() as engine:
        whole = engine.allocate({"w": ((4, 8), torch.float32)})["w"]
        whole.fill_(5.0)
        source = trainer.register_source("ends", {"ends": torch.ones(2, 8)})
        target = engine.register_target("ends", {"ends": whole[::3]}, replica="a")
        go_live(trainer, source, 1, target, model="ends")
        assert whole[0].unique() == 1 and whole[3].unique() == 1
        assert whole[1].unique() == 5.0 and whole[2].unique() == 5.0, (target.flips, whole)


def test_a_commit_that_is_interrupted_after_the_exchange_is_not_exchanged_back(
    daemons: Start,
) -> None:
    interrupts = [False]

    def refresh(tensor: torch.Tensor) -> None:
        if interrupts[0]:
            interrupts[0] = False
            raise KeyboardInterrupt

    fleet = Fleet(daemons()[0], derived={"d": refitd.Derived(torch.zeros(3), ("w",), refresh)})
    fleet.swap(1)
    interrupts[0] = True
    fleet.publish(2)
    swap = RunningSwap(fleet.trainer, policy(), 2)
    eventually(lambda: fleet.target.pending == 2, "it is decided")
    with pytest.raises(KeyboardInterrupt):
        fleet.target.poll()
    assert fleet.target.version == 2
    swap.result()
    assert fleet.target.poll() is None and holds(fleet.live, 2)


@pytest.mark.parametrize("fails", [0, 1, 2, 3])
@pytest.mark.parametrize("error", [OSError(12, "no"), KeyboardInterrupt()])
def test_an_exchange_that_fails_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, fails: int, error: BaseException
) -> None:
    nbytes = 3 * 4096 + 100
    pair = []
    for value in (1, 2):
        fd = arenas.create(nbytes, "x")
        one = arenas.MappedArena(fd, nbytes, write=True)
        os.close(fd)
        one.bytes[:] = value
        pair.append(one)
    calls = [0]

    class Kernel:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def mremap(self, *given: int) -> int:
            calls[0] += 1
            if calls[0] == fails + 1 and fails < 3:
                raise error
            return int(real.mremap(*given))

    real = mapping._libc
    monkeypatch.setattr(mapping, "_libc", Kernel())
    if fails == 3:
        pair[0].exchange(pair[1])
    else:
        with pytest.raises(refitd.ArenaError if isinstance(error, OSError) else KeyboardInterrupt):
            pair[0].exchange(pair[1])
    monkeypatch.undo()
    first = 2 if fails == 3 else 1
    assert set(pair[0].bytes) == {first} and set(pair[1].bytes) == {3 - first}
    pair[0].bytes[:] = 9
    assert set(pair[1].bytes) == {3 - first}
    pair[0].exchange(pair[1])
    assert set(pair[1].bytes) == {9} and set(pair[0].bytes) == {3 - first}


@pytest.mark.slow
def test_views_casts_and_large_arenas(daemons: Start) -> None:
    daemon = daemons()[0]
    with daemon.connect() as trainer, daemon.connect() as engine:
        given = {"w": torch.zeros(40, 30), "b": torch.zeros(13), "s": torch.zeros(())}
        source = trainer.register_source(policy(), given)
        bases = engine.allocate(
            {
                "w": ((30, 40), torch.bfloat16),
                "b": ((13,), torch.bfloat16),
                "s": ((), torch.bfloat16),
                "z": ((0,), torch.int8),
            }
        )
        live = {"w": bases["w"].t(), "b": bases["b"], "s": bases["s"]}
        target = engine.register_target(policy(), live, replica="a", cast=True)
        big = engine.allocate({"w": ((40, 30), torch.float32), "b": ((13,), torch.float32), "s": ((), torch.float32)})
        other = engine.register_target(policy(), big, replica="b")
        assert other.flips
        for number in range(1, 6):
            given["w"].copy_(torch.arange(1200).reshape(40, 30) % 97 + number)
            given["b"].fill_(number)
            given["s"].fill_(number)
            go_live(trainer, source, number, target, other)
            for name, held in live.items():
                assert torch.equal(held, given[name].to(torch.bfloat16)), (name, number)
                assert torch.equal(big[name], given[name])
        assert trainer.verify(policy()).outcome == "proven"
        with Engine(target, other):
            trainer.rollback(policy(), timeout=30)
        given["b"].fill_(4)
        assert torch.equal(big["b"], given["b"]) and torch.equal(live["b"], given["b"].bfloat16())
        for one in (target, other):
            one.close()
        again = engine.register_target(policy(), big, replica="b")
        with Engine(again):
            eventually(lambda: again.version == 4, "again")
        again.close()
        lent = engine.register_source("lent", big)
        plain = {name: torch.zeros_like(tensor) for name, tensor in big.items()}
        last = trainer.register_target("lent", plain, replica="x")
        with Engine(last), lent.lend(1):
            trainer.swap("lent", 1, timeout=30)
        assert torch.equal(plain["b"], given["b"])
        lent.close()
        engine.free(big)


KEEPS = "[node]\nkeep_targets_s = 60.0\n"
slow = pytest.mark.slow


def test_a_changed_version_is_not_restored(daemons: Start) -> None:
    daemon = daemons(KEEPS)[0]
    with served(daemon) as (trainer, engine):
        assert trainer.verify() == "proven"
        engine.damage()
        engine.kill()
        engine.start()
        assert engine.said() == "registered None [0.0]"
        assert engine.said() == "committed 1 [1.0]"  # from the source
        assert trainer.verify() == "proven"
        says = engine.kill()
        assert "version 1, which its predecessor left, is not restored: 1 blocks of 1 tensors" in says
        assert "(w[0:300, :])" in says and "not-restored" in daemon.log()


@slow
def test_a_version_that_cannot_be_compared_in_time_is_not_restored(daemons: Start) -> None:
    daemon = daemons(KEEPS)[0]
    with served(daemon) as (trainer, engine):
        assert trainer.verify() == "proven"
        engine.kill()
        with stopped(daemon.workers()):
            engine.start(timeout=3.0)
            assert engine.said() == "registered None [0.0]"
        assert engine.said() == "committed 1 [1.0]"
        eventually(lambda: trainer.verify() == "proven", "proven")
        assert "have not read its live tensors within 2.7 s" in engine.kill()


@slow
def test_an_engine_may_die_while_its_version_is_compared(daemons: Start) -> None:
    daemon = daemons(KEEPS)[0]
    with served(daemon) as (trainer, engine):
        assert trainer.verify() == "proven"
        engine.kill()
        with stopped(daemon.workers()):
            engine.start()
            # two slots, the retained arena, and the new engine's arena
            eventually(lambda: daemon.node().arenas == 4, "its arena is there")
            time.sleep(0.5)
            engine.kill()
        engine.start()
        assert engine.said() == "registered 1 [1.0]"
        for pid in daemon.workers():  # interrupt the comparison; it must run again
            os.kill(pid, signal.SIGSTOP)
        engine.kill()
        engine.start()
        for pid in daemon.workers():
            os.kill(pid, signal.SIGKILL)
        assert engine.said() == "registered 1 [1.0]"
        assert trainer.verify() == "proven"


@pytest.mark.parametrize("swaps", [pytest.param(1, marks=slow), 2])
def test_an_engine_may_die_while_it_restores(daemons: Start, swaps: int) -> None:
    with served(daemons(KEEPS)[0], swaps) as (trainer, engine):
        engine.kill()
        assert engine.start("dies").wait(30) == 9
        engine.kill()
        engine.start()
        assert engine.said() == f"registered {swaps} [{float(swaps)}]"
        assert trainer.verify() == "proven"


@slow
def test_an_engine_that_dies_in_a_copy_is_not_restored(daemons: Start) -> None:
    with served(daemons(KEEPS)[0], word="torn") as (trainer, engine):
        with pytest.raises(refitd.SwapFailed):
            trainer.swap(2)
        engine.kill()
        engine.start()
        assert engine.said() == "registered None [0.0]"
        assert engine.said() == "committed 2 [2.0]"
        trainer.trainer.rollback(policy(), 1, timeout=60)
        assert engine.said() == "committed 1 [1.0]"


@pytest.mark.parametrize("word", ["sleeps", pytest.param("wakes", marks=slow)])
def test_a_sleeping_engine_that_dies_is_not_restored_from_discarded_tensors(daemons: Start, word: str) -> None:
    with served(daemons(KEEPS)[0], word=word) as (_, engine):
        assert engine.said() == "asleep 1 [77.0]"
        engine.kill()
        engine.start()
        assert engine.said() in ("registered 1 [1.0]", "registered None [0.0]")
