"""Versions go live by exchanging two arenas under the tensors' addresses: whole, proven, again and again."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

import refitd
from refitd.testing import Daemon, Engine, eventually
from tests.support.flips import SHAPES, Fleet, holds, kill_workers, version


def test_versions_flip_under_the_same_addresses_and_are_proven(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    fleet = Fleet(daemon)
    plain = version(0)
    copies = daemon.connect().register_target("policy", plain, replica="copies")
    assert fleet.target.flips and not copies.flips
    for number in range(1, 8):
        assert fleet.swap(number, copies).outcome == "committed"
        assert holds(fleet.live, number) and holds(plain, number)
        assert {name: tensor.data_ptr() for name, tensor in fleet.live.items()} == fleet.addresses
        report = fleet.trainer.verify("policy")
        assert report.outcome == "proven", report
    assert {t.replica: t.mode for t in fleet.trainer.status().models[0].targets} == {"a": "flip", "copies": "copy"}
    fleet.live["w"][3, 5] = 99.0
    report = fleet.trainer.verify("policy")
    assert report.outcome == "differs"
    fleet.target.close()
    assert fleet.live["w"][3, 5] == 99.0, "the tensors keep their values"
    again = fleet.engine.register_target("policy", fleet.live, replica="a")
    with Engine(again, copies):
        eventually(lambda: again.version == 7, "it is caught up")
    assert holds(fleet.live, 7) and again.flips


def test_a_rollback_flips_back_without_any_source(start_daemon: Callable[..., Daemon]) -> None:
    fleet = Fleet(start_daemon())
    other = fleet.engine.allocate(SHAPES)
    second = fleet.engine.register_target("policy", other, replica="b")
    for number in (1, 2):
        fleet.swap(number, second)
    assert fleet.trainer.verify("policy").outcome == "proven"
    fleet.source.close()
    with Engine(fleet.target, second):
        report = fleet.trainer.rollback("policy", timeout=30)
        assert (report.version, report.bytes, report.kind, report.outcome) == (1, 0, "rollback", "committed")
        assert holds(fleet.live, 1) and holds(other, 1) and fleet.target.version == 1
        assert fleet.trainer.verify("policy").outcome == "proven"
        assert fleet.trainer.rollback("policy", 2, timeout=30).version == 2, "and forth"
        assert holds(fleet.live, 2) and holds(other, 2)
    other["w"][0, 0] = 7.0  # it holds what was verified before it was rolled back
    fleet.live["w"].add_(0)
    report_again = fleet.trainer.verify("policy")
    members = {member.replica: member for member in report_again.members}
    assert members["a"].state == "proven"
    # or the comparison after the rollback has found it before
    assert members["b"].state == "differs" or "its memory has changed" in members["b"].reason
    with pytest.raises(refitd.RefusedError, match="no source"):
        fleet.trainer.rollback("policy", 7, timeout=30)


def test_a_rollback_that_is_aborted_can_be_tried_again_and_one_that_is_impossible_moves_bytes(
    start_daemon: Callable[..., Daemon],
) -> None:
    fleet = Fleet(start_daemon())
    refuses: list[int] = []

    def pause(number: int) -> None:
        if refuses:
            raise RuntimeError(f"not {refuses.pop()}")

    paused = fleet.engine.allocate(SHAPES)
    fleet.engine.register_target("policy", paused, replica="p", on_pause=pause)
    for number in (1, 2):
        fleet.swap(number)
    refuses.append(1)
    with Engine(fleet.target):
        with pytest.raises(refitd.SwapFailed, match="not 1"):
            fleet.trainer.rollback("policy", timeout=30)
        assert holds(fleet.live, 2) and fleet.trainer.rollback("policy", timeout=30).bytes == 0
        assert holds(fleet.live, 1) and holds(paused, 1)
        late = version(0)
        joined = fleet.trainer.register_target("policy", late, replica="late")
        with Engine(joined):
            eventually(lambda: joined.version == 1, "it is caught up")
            report = fleet.trainer.rollback("policy", 2, timeout=30)  # forth, with one that copies
        assert report.bytes > 0 and all(holds(live, 2) for live in (fleet.live, paused, late))


def test_workers_that_die_find_the_right_arenas_again(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    fleet = Fleet(daemon)
    for number in (1, 2, 3, 4):
        assert fleet.swap(number).outcome == "committed" and holds(fleet.live, number)
        if number == 3:
            kill_workers(daemon)
        assert fleet.trainer.verify("policy").outcome == "proven"


def test_an_abort_leaves_the_live_arena_alone(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    fleet = Fleet(daemon)

    def refuse(number: int) -> None:
        if number == 2:
            raise RuntimeError("not now")

    other = daemon.connect().register_target("policy", version(0), replica="b", on_pause=refuse)
    assert fleet.swap(1).outcome == "committed"
    fleet.publish(2)
    with Engine(fleet.target), pytest.raises(refitd.SwapFailed):
        fleet.trainer.swap("policy", 2, timeout=30)
    assert fleet.target.version == 1 and holds(fleet.live, 1)
    proofs = {member.replica: member.state for member in fleet.trainer.verify("policy").members}
    assert proofs["a"] == "proven"
    assert fleet.swap(3).outcome == "committed" and holds(fleet.live, 3) and other.version == 3


def test_what_cannot_flip_is_copied_or_refused_by_name(start_daemon: Callable[..., Daemon]) -> None:
    with start_daemon().connect() as client:
        client.register_source("policy", version(1))
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
                client.register_target("policy", live, replica=wrong, mode="flip")
            assert not client.register_target("policy", live, replica=wrong).flips
        live = client.allocate(SHAPES)
        assert not client.register_target("policy", live, replica="c", mode="copy").flips
        with pytest.raises(refitd.RefusedError, match="'flip' or 'copy'"):
            client.register_target("policy", live, replica="d", mode="flop")  # type: ignore[arg-type]
        shared = client.allocate(SHAPES)
        client.register_source("other", shared)
        with pytest.raises(refitd.RefusedError, match="another registration"):
            client.register_target("policy", shared, replica="e", mode="flip")


def test_a_source_over_tensors_that_flip_publishes_what_they_hold_now(start_daemon: Callable[..., Daemon]) -> None:
    """The arena's number means another memory file after each flip; a source that lends it would send the old one."""
    fleet = Fleet(start_daemon())
    relay = fleet.engine.register_source("relayed", fleet.live)
    live = version(0)
    last = fleet.trainer.register_target("relayed", live, replica="z")
    for number in (1, 2, 3):
        assert fleet.swap(number).outcome == "committed"
        relay.publish(number)
        with Engine(last):
            fleet.trainer.swap("relayed", number, timeout=30)
        assert holds(live, number)


ENGINE = """
import sys, time, refitd, torch
from tests.support.flips import SHAPES, holds
client = refitd.connect(sys.argv[1])
live = client.allocate(SHAPES)
target = client.register_target("policy", live, replica="crashes")
assert target.flips
print("restored", target.version, [n for n in range(9) if holds(live, n)], flush=True)
while True:
    if (version := target.poll()) is not None:
        print("committed", version, holds(live, version), flush=True)
    time.sleep(0.002)
"""


def started(daemon: Daemon) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ENGINE, str(daemon.directory)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("swaps", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_engine_that_crashes_after_flips_has_its_weights_again(
    start_daemon: Callable[..., Daemon], swaps: int
) -> None:
    daemon = start_daemon("[node]\nkeep_targets_s = 60.0\n")
    with daemon.connect() as trainer:
        given = version(0)
        source = trainer.register_source("policy", given)
        engine = started(daemon)
        try:
            assert said(engine).startswith("restored None")
            for number in range(1, swaps + 1):
                for name, value in version(number).items():
                    given[name].copy_(value)
                source.publish(number)
                trainer.swap("policy", number, timeout=30)
                assert said(engine) == f"committed {number} True"
            engine.kill()
            engine.wait()
            engine = started(daemon)
            assert said(engine) == f"restored {swaps} [{swaps}]"
            for name, value in version(8).items():
                given[name].copy_(value)
            source.publish(8)
            assert trainer.swap("policy", 8, timeout=30, queue=True).outcome == "committed"
            assert said(engine) == "committed 8 True"
            assert trainer.verify("policy").outcome == "proven"
        finally:
            engine.kill()
            engine.wait()


def test_a_reader_between_commit_points_never_sees_two_versions(start_daemon: Callable[..., Daemon]) -> None:
    fleet = Fleet(start_daemon())
    torn: list[tuple[float, ...]] = []
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            fleet.target.poll()
            seen = {float(value) for tensor in fleet.live.values() if tensor.numel() for value in tensor.unique()}
            if len(seen) > 1:
                torn.append(tuple(seen))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for number in range(1, 40):
            fleet.publish(number)
            assert fleet.trainer.swap("policy", number, timeout=30).outcome == "committed"
    finally:
        stop.set()
        thread.join()
    assert not torn and holds(fleet.live, 39)
