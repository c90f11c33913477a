"""Notifications to the service manager: start, life and end of a process; and how a failed start ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from refitd.service import ServiceManager
from refitd.testing.processes import eventually
from tests.support.programs import ended

WAIT_S = 30.0


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.settimeout(WAIT_S)
        yield end


def start(tmp_path: Path, command: list[str], more: str = "") -> subprocess.Popen[str]:
    config = tmp_path / "refitd.toml"
    config.write_text(f'[node]\nruntime_dir = "{tmp_path / "run"}"\nworkers = 1\n{more}')
    env = {name: value for name, value in os.environ.items() if not name.startswith("REFITD_")}
    env |= {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
    arguments = [sys.executable, "-m", "refitd_cli.daemon", *command, "--config", str(config)]
    return subprocess.Popen(arguments, env=env, stderr=subprocess.PIPE, text=True)


def unread_pipes(pid: int) -> list[str]:
    """Return the pipes that the process reads and that have unread bytes."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        link = Path(f"/proc/{pid}/fd/{fd}")
        with contextlib.suppress(FileNotFoundError):  # closed since the listing
            flags = int(Path(f"/proc/{pid}/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8)
            if os.readlink(link).startswith("pipe:") and flags & os.O_ACCMODE == os.O_RDONLY:
                with link.open("rb", buffering=0) as pipe:
                    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
                found += [fd] * (count > 0)
    return found


@pytest.mark.parametrize("command", [["serve", "--standalone"], ["coordinator"]], ids=["daemon", "coordinator"])
def test_a_process_tells_that_it_has_started_lives_and_ends(manager, tmp_path: Path, command: list[str]) -> None:
    with ended(start(tmp_path, command)) as process:
        assert manager.recv(100) == b"READY=1"
        assert [manager.recv(100) for _ in range(2)] == [b"WATCHDOG=1"] * 2
        process.send_signal(signal.SIGHUP)  # a reload without a file to read; the process must not end
        assert [manager.recv(100) for _ in range(2)] == [b"WATCHDOG=1"] * 2
        eventually(lambda: not unread_pipes(process.pid), "what has woken its loop is read, so that it waits again")
        process.terminate()
        while (said := manager.recv(100)) == b"WATCHDOG=1":
            pass
        assert said == b"STOPPING=1"
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize("command", [["serve", "--standalone"], ["coordinator"]], ids=["daemon", "coordinator"])
def test_a_wrong_configuration_ends_the_start_with_status_2_and_no_ready(manager, tmp_path: Path, command) -> None:
    with ended(start(tmp_path, command, "wrokers = 2\n")) as process:
        assert process.wait(WAIT_S) == 2
        assert process.stderr is not None and "wrokers" in process.stderr.read()
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(100)


def test_a_process_that_is_not_ready_gives_no_sign_of_life(manager, tmp_path: Path) -> None:
    told = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"})
    told.alive(1.0), told.ready(), told.alive(2.0)
    assert [manager.recv(100) for _ in range(2)] == [b"READY=1", b"WATCHDOG=1"]


def test_without_a_manager_or_with_one_that_is_gone_nothing_happens(tmp_path: Path) -> None:
    for address in ("", str(tmp_path / "none"), "@no-manager-has-this-name"):
        environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
        told = ServiceManager(environ)
        told.ready(), told.alive(1.0), told.stopping()
        assert environ == {}
