"""refitctl and refitd with broken output, descriptors, umask, or an early Ctrl-C: one line and an exit status."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, eventually
from tests.support.names import policy

CTL = [sys.executable, "-m", "refitd_cli.control"]
SERVE = [sys.executable, "-m", "refitd_cli.daemon"]
RUN_S = 60.0


class Ran:
    """How a process ended."""

    def __init__(self, status: int, stderr: str) -> None:
        self.status, self.stderr = status, stderr

    def said(self, *words: str) -> None:
        """Check that the process printed one plain line with these words."""
        assert "Traceback" not in self.stderr and "Exception ignored" not in self.stderr, self.stderr
        assert len(self.stderr.splitlines()) == 1, self.stderr
        for word in words:
            assert word in self.stderr


def ran(command: list[str], shell: str = "", **options: object) -> Ran:
    """Run a command, with redirections of sh; drop its stdout."""
    given: dict[str, object] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "timeout": RUN_S, **options}
    # a file size limit truncates cached bytecode, and every later import of that module fails
    given["env"] = {**os.environ, **given.get("env", {}), "PYTHONDONTWRITEBYTECODE": "1"}  # type: ignore[dict-item]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    ended = subprocess.run(command, text=True, check=False, stdin=subprocess.DEVNULL, **given)  # type: ignore[call-overload]
    return Ran(ended.returncode, ended.stderr or "")


OFTEN = (["status"], ["models"], ["history"], ["doctor"], ["watch", "--count", "1"])


@pytest.mark.parametrize("command", [*OFTEN, ["status", "--json"], ["-h"], ["--version"]], ids=" ".join)
def test_output_that_cannot_be_written_is_one_line_and_exit_1(shared_daemon: Daemon, command: list[str]) -> None:
    asked = [*CTL, *command]
    if not command[0].startswith("-"):
        asked += ["--address", str(shared_daemon.directory)]
    for shell, words in ((">/dev/full", ("No space left",)), (">&-", ("stdout is closed",))):
        found = ran(asked, shell)
        assert found.status == 1
        found.said("refitctl: ", *words)


@pytest.mark.real_starts  # its limit is there from the first import on
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_of_which_a_part_is_written_is_no_success(tmp_path: Path, unbuffered: str) -> None:
    with (tmp_path / "help").open("w") as small:
        found = ran(
            [*CTL, "-h"],
            stdout=small,
            env={"PYTHONUNBUFFERED": unbuffered},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
        )
    assert found.status == 1 and (tmp_path / "help").stat().st_size == 1000
    found.said("refitctl: its output cannot be written: File too large")


def test_reader_that_leaves_ends_a_command_with_one_line(shared_daemon: Daemon) -> None:
    for command in (["status"], ["watch", "--interval", "0.1"], ["doctor", "--json"]):
        read, write = os.pipe()
        os.close(read)
        try:
            found = ran([*CTL, *command, "--address", str(shared_daemon.directory)], stdout=write)
        finally:
            os.close(write)
        assert found.status == 1
        found.said("refitctl: the reader of its output has ended")


def test_head_takes_what_it_wants(shared_daemon: Daemon) -> None:
    whole = f"{' '.join(CTL)} status --address {shared_daemon.directory} | head -1"
    ended = subprocess.run(["sh", "-c", whole], capture_output=True, text=True, timeout=RUN_S, check=False)
    assert ended.returncode == 0 and ended.stdout.startswith("coordinator: pid") and "Traceback" not in ended.stderr


@pytest.mark.parametrize("shell", ["2>&-", "2>/dev/full", "2>&- >&-"])
def test_errors_that_nobody_can_be_told_are_an_exit_status(tmp_path: Path, shell: str) -> None:
    assert ran([*CTL, "status", "--address", str(tmp_path / "none")], shell).status == 1


@pytest.mark.parametrize("what", ["serve", "coordinator"])
def test_services_run_without_any_standard_stream(tmp_path: Path, what: str) -> None:
    directory = tmp_path / "run"
    command = [*SERVE, what, "--runtime-dir", str(directory), *(["--standalone"] if what == "serve" else [])]
    process = subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command])
    try:
        made = directory / ("refitd.sock" if what == "serve" else "coordinator.sock")
        eventually(made.exists, "it listens")
        for fd in ("0", "1", "2"):  # no socket or journal has these descriptor numbers
            assert os.readlink(f"/proc/{process.pid}/fd/{fd}") == "/dev/null"
    finally:
        process.terminate()
        assert process.wait(20) == 0


def limited(count: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


@pytest.mark.real_starts  # its limit is there from the first import on
@pytest.mark.parametrize(
    "count", [*(pytest.param(count, marks=pytest.mark.slow) for count in (6, 7, 9, 12, 14)), 10, 16]
)
def test_too_few_descriptors_are_one_line_that_names_the_limit(
    shared_daemon: Daemon, tmp_path: Path, count: int
) -> None:
    status = ran([*CTL, "status", "--address", str(shared_daemon.directory)], preexec_fn=limited(count))
    if status.status:
        assert status.status == 1
        status.said("refitctl: ", "ulimit -n")
    else:
        assert status.stderr == "" and count >= 14
    for command in (["serve", "--standalone"], ["serve"], ["coordinator"]):
        found = ran([*SERVE, *command, "--runtime-dir", str(tmp_path / "run")], preexec_fn=limited(count))
        assert found.status == 1
        found.said("refitd: ", "ulimit -n")
    assert not (tmp_path / "run").exists()


@pytest.mark.real_starts  # its limit is there from the first import on
def test_umask_that_takes_everything_leaves_a_service_its_own_files(tmp_path: Path) -> None:
    def masked() -> None:
        os.umask(0o777)

    with Daemon(prepare=masked) as daemon:
        modes = {path.name: path.stat().st_mode & 0o777 for path in daemon.directory.iterdir()}
        assert daemon.directory.stat().st_mode & 0o777 == 0o700
        assert all(mode & 0o600 == 0o600 and not mode & 0o077 for mode in modes.values()), modes
        with daemon.connect() as client:
            assert client.status().nodes
    made = ran([*CTL, "keygen", "n0", "--directory", str(tmp_path)], preexec_fn=masked)
    assert made.status == 0 and (tmp_path / "n0.key").stat().st_mode & 0o777 == 0o600


# --- Ctrl-C -------------------------------------------------------------------------------------------------

INTERRUPT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            exec("os.kill(os.getpid(), signal.SIGINT)")  # the interpreter remembers what leaves an exec() of text

sys.meta_path.insert(0, Interrupt())
"""


OF_STATUS = ("refitd_cli.control", "refitd_cli.group", "refitd.errors", "refitd_cli.commands.status", "refitd.client")
OF_DOCTOR = ("refitd_cli.commands.doctor", "refitd.buffers.cuda", "rich")
OF_SERVE = ("click", "refitd.config", "zmq", "tomllib")
OF_COORDINATOR = ("refitd_cli.session", "refitd.coordinator.main", "sqlite3")


@pytest.mark.real_starts
@pytest.mark.parametrize(
    ("command", "module"),
    [
        ([*CTL, "status"], "click"),
        ([*CTL, "status"], "zmq"),
        ([*SERVE, "serve"], "refitd.daemon.main"),
        *((pytest.param([*CTL, "status"], name, marks=pytest.mark.slow)) for name in OF_STATUS),
        *((pytest.param([*CTL, "doctor"], name, marks=pytest.mark.slow)) for name in OF_DOCTOR),
        *((pytest.param([*SERVE, "serve"], name, marks=pytest.mark.slow)) for name in OF_SERVE),
        *((pytest.param([*SERVE, "coordinator"], name, marks=pytest.mark.slow)) for name in OF_COORDINATOR),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_interrupt_while_it_imports_is_one_line_and_130(tmp_path: Path, command: list[str], module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT.format(name=module))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    where = ["--runtime-dir" if "refitd_cli.daemon" in command else "--address", str(tmp_path / "run")]
    found = ran([*command, *where], env=environment)
    assert found.status == 130, found.stderr
    found.said("interrupted")


def test_interrupted_command_says_so(shared_daemon: Daemon) -> None:
    command = [*CTL, "watch", "--address", str(shared_daemon.directory), "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(ValueError):
            process.stdout.read()
        said = process.stderr.read()
    assert process.returncode == 0 and "Traceback" not in said


def test_names_from_the_command_line_that_are_not_utf_8_are_refused_in_a_line(shared_daemon: Daemon) -> None:
    for command in (["swap", b"caf\xe9"], ["plan", b"\xff"], ["abort", b"\xff"], ["verify", b"\xff"]):
        found = ran([*CTL, *command, "--address", str(shared_daemon.directory)])  # type: ignore[list-item]
        assert found.status == 1
        found.said("not valid Unicode")


# --- names --------------------------------------------------------------------------------------------------

NASTY = "x\x1b[2J\x1b]0;t\x07\n[red]\u202eb\u2028\x9b31m\x7f:boom:"


@pytest.mark.slow
def test_hostile_names_of_a_running_cluster_reach_no_terminal_and_no_log(daemon: Daemon) -> None:
    model, replica, tensor = "model [red]:boom:", "replica [red]:boom:", f"tensor {NASTY}"
    address = ["--address", str(daemon.directory)]
    with daemon.connect(f"client {NASTY}") as client:
        source = client.register_source(model, {tensor: torch.ones(8)})
        target = client.register_target(model, {tensor: torch.zeros(8)}, replica=replica)
        source.publish(1)
        with Engine(target):
            for command, shown in (
                (["swap", model], True),
                (["status"], True),
                (["models"], True),
                (["watch", "--count", "1"], True),
                (["plan", model], True),
                (["manifest", model], True),
                (["verify", model], True),
                (["history"], True),
                (["rollback", model], True),
                (["abort", model, "--reason", NASTY], False),
                (["swap", model, "--version", "7"], False),
            ):
                plain = subprocess.run([*CTL, *command, *address], capture_output=True, timeout=RUN_S, check=False)
                text = plain.stdout.decode() + plain.stderr.decode()
                assert all(char.isprintable() for char in text if char != "\n"), text
                if command[0] in ("swap", "plan", "abort", "manifest"):  # their lines are not folded into cells
                    assert "[red]" in text and ":boom:" in text, (command, text)
                if not shown:
                    assert len(plain.stderr.decode().splitlines()) == 1
                if command[0] == "swap" and shown:
                    source.publish(2)
                found = subprocess.run(
                    [*CTL, *command, "--json", *address], capture_output=True, timeout=RUN_S, check=False
                )
                (line,) = found.stdout.decode().splitlines()
                assert "error" in json.loads(line) or json.dumps(model)[1:-1] in line  # an error quotes it
    log = daemon.log()
    assert all(char.isprintable() for char in log if char != "\n")
    assert all(line.startswith("t=") for line in log.splitlines())


def test_nul_in_a_name_is_a_clear_error(shared_daemon: Daemon) -> None:
    with shared_daemon.connect() as client:
        weights = {"w": torch.zeros(8)}
        for register in (
            lambda: client.register_source("po\0licy", weights),
            lambda: client.register_target(policy(), weights, replica="a\0"),
            lambda: client.register_source(policy(), {"w\0": torch.zeros(8)}),
            lambda: client.swap("po\0licy"),
        ):
            with pytest.raises(refitd.RefusedError, match="NUL character"):
                register()
        for nasty in (NASTY, "a\nb", "a\u202eb"):
            with pytest.raises(refitd.RefusedError, match="holds a control character, or one that cannot be seen"):
                client.register_source(nasty, weights)
            with pytest.raises(refitd.RefusedError, match="choose another name"):
                client.register_target("policy", weights, replica=nasty)
        assert client.status().models == ()
