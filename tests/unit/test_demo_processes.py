"""The demo's launcher hears its processes, notices their end, and leaves none of them running."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from refitd_cli.demo.channel import Message
from refitd_cli.demo.processes import DemoFailed, DemoProcesses

CHILD = """
from refitd_cli.demo.channel import Channel, reporting
channel = Channel()
print("noise goes to the log")
with reporting(channel):
    while True:
        match channel.next(20):
            case {"command": "echo", "word": word}:
                channel.emit("echoed", word=word)
            case {"command": "fail"}:
                raise ValueError("out of luck")
            case {"command": "exit"}:
                break
"""


@pytest.fixture
def heard() -> list[tuple[str, Message]]:
    return []


@pytest.fixture
def processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: list[tuple[str, Message]]
) -> Iterator[DemoProcesses]:
    (tmp_path / "demo_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    processes = DemoProcesses(tmp_path, lambda name, message: heard.append((name, message)), lambda what: None)
    try:
        yield processes
    finally:
        processes.stop()
        assert all(child.process.returncode is not None for child in processes.members.values())


def test_commands_reach_children_and_events_come_back(
    processes: DemoProcesses, heard: list[tuple[str, Message]]
) -> None:
    for name in ("one", "two"):
        processes.start(name, "demo_child")
    processes.send(["one", "two"], "echo", word="hello")
    answers = processes.wait("echoed", ["one", "two"], 20)
    assert {name: answer["word"] for name, answer in answers.items()} == {"one": "hello", "two": "hello"}
    assert sorted(name for name, _ in heard) == ["one", "two"]
    processes.dismiss()
    assert "noise goes to the log" in processes.tails()


def test_a_child_that_fails_says_why(processes: DemoProcesses) -> None:
    processes.start("one", "demo_child")
    processes.send(["one"], "fail")
    with pytest.raises(DemoFailed, match="one: ValueError: out of luck"):
        processes.wait("echoed", ["one"], 20)


def test_a_child_that_is_killed_is_named(processes: DemoProcesses) -> None:
    processes.start("one", "demo_child")
    processes.members["one"].process.kill()
    with pytest.raises(DemoFailed, match="one ended unexpectedly, exit status -9"):
        processes.wait("echoed", ["one"], 20)


def test_a_wait_ends_at_its_deadline_and_names_who_is_missing(processes: DemoProcesses) -> None:
    processes.start("one", "demo_child")
    with pytest.raises(DemoFailed, match="no 'echoed' of one within"):
        processes.wait("echoed", ["one"], 0.1)


def test_output_that_is_no_event_is_refused(processes: DemoProcesses) -> None:
    processes.start("one", "this")
    with pytest.raises(DemoFailed, match="one: printed 'The Zen"):
        processes.wait("echoed", ["one"], 20)
