"""A daemon survives the end, stop or failed start of other processes; only one daemon runs per directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import refitd
from refitd.protocol.reports import StatusReport
from refitd.testing import Daemon, Engine, RunningSwap, eventually, stopped
from tests.support import shards
from tests.support.fleet import go_live
from tests.support.programs import Program, python, refitctl

Start = Callable[..., Daemon]


def answers(client: refitd.Client) -> bool:
    try:
        return bool(client.status().nodes)
    except refitd.RefitdError:
        return False


class Served:
    """A trainer and an engine that has version 1; `swap` brings the next one."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.client = daemon.connect("both")
        self.weights = shards.whole(1)
        self.live = shards.zeros_like(self.weights)
        self.source = self.client.register_source("policy", self.weights)
        self.target = self.client.register_target("policy", self.live, replica="r")
        self.version = 0
        self.publish()
        self.swap()

    def publish(self) -> None:
        self.version += 1
        for tensor in self.weights.values():
            tensor.add_(1)
        self.source.publish(self.version)

    def swap(self) -> None:
        with Engine(self.target):
            self.client.swap("policy", self.version, timeout=60)
        assert shards.equal(self.live, self.weights) and self.target.version == self.version

    def swaps_again(self, timeout: float = 60.0) -> None:
        """Swap the same registrations, and so the same arenas, to a new version."""

        def is_known() -> bool:
            report = self.status()
            return report is not None and any(model.sources and model.targets for model in report.models)

        eventually(is_known, "a coordinator has been told of everybody", timeout)
        self.publish()

        def swapped() -> bool:
            try:
                self.swap()
            except refitd.RefitdError:
                return False
            return True

        eventually(swapped, "a swap goes through", timeout)
        assert self.daemon.is_running

    def status(self) -> StatusReport | None:
        try:
            return self.client.status()
        except refitd.RefitdError:
            return None

    def error(self) -> str:
        try:
            self.client.status()
        except refitd.RefitdError as exc:
            return str(exc)
        return ""


@contextlib.contextmanager
def served(daemon: Daemon) -> Iterator[Served]:
    found = Served(daemon)
    try:
        yield found
    finally:
        found.client.close()


def children(daemon: Daemon, what: str) -> list[int]:
    return sorted(pid for pid, command in daemon.children().items() if what in command)


def kill_each(daemon: Daemon, what: str, times: int) -> None:
    """Kill a process of the daemon and its successors, each as soon as it runs."""
    killed: set[int] = set()
    for _ in range(times):
        eventually(lambda: bool(set(children(daemon, what)) - killed), f"{what} is started again")
        pid = max(set(children(daemon, what)) - killed)
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)


def test_a_daemon_outlives_its_coordinator_however_often_that_is_killed(start_daemon: Start) -> None:
    daemon = start_daemon()
    with served(daemon) as here:
        kill_each(daemon, "refitd.coordinator", 4)
        eventually(lambda: "was ended by SIGKILL" in here.error() or here.status() is not None, "it is told why")
        here.swaps_again()
        report = here.client.status()
        assert any("started again 4 times" in text for text in report.nodes[0].problems), report.nodes[0].problems


@pytest.mark.slow
def test_a_daemon_outlives_a_worker_that_is_killed_again_and_again(start_daemon: Start) -> None:
    daemon = start_daemon()
    with served(daemon) as here:
        kill_each(daemon, "refitd.worker", 7)
        here.swaps_again()


def test_workers_that_were_replaced_on_purpose_are_not_held_against_them(start_daemon: Start) -> None:
    daemon = start_daemon()
    with served(daemon) as here:
        for _ in range(8):
            here.publish()
            with stopped(tuple(children(daemon, "refitd.worker"))):
                swap = RunningSwap(daemon.connect(), "policy")
                swap.wait_phase("stage")
                here.client.abort("policy", "not now")
                with pytest.raises(refitd.RefitFailed, match="not now"):
                    swap.result()
        kill_each(daemon, "refitd.worker", 1)
        here.swaps_again()


@pytest.mark.real_starts  # its workers are to import another xxhash
def test_a_daemon_whose_workers_cannot_start_stays_and_refuses_swaps_with_the_reason(
    start_daemon: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(prepare=lambda: os.chdir(tmp_path))
    broken = tmp_path / "xxhash.py"  # processes started here import it instead of the real one
    with served(daemon) as here:
        broken.write_text("raise SystemExit(7)\n")
        kill_each(daemon, "refitd.worker", 1)
        eventually(lambda: any("exited with status 7" in p for p in daemon.node().problems), "status says so")
        here.publish()
        # the daemon retries it now and then, and it dies during the request
        with pytest.raises(refitd.RefitFailed, match="exited with status 7"):
            here.swap()
        assert here.target.version == here.version - 1
        broken.unlink()
        here.swaps_again()
        eventually(lambda: not daemon.node().problems, "status says no more of it")


@pytest.mark.slow
def test_a_coordinator_that_cannot_start_again_leaves_the_daemon_and_its_arenas(
    start_daemon: Start, tmp_path: Path
) -> None:
    journal = tmp_path / "j" / "journal.sqlite"
    journal.parent.mkdir()
    daemon = start_daemon(f'[coordinator]\njournal = "{journal}"\n')
    with served(daemon) as here:
        away = tmp_path / "away"
        journal.parent.rename(away)
        journal.mkdir(parents=True)  # a directory in the file's place fails like a full disk
        kill_each(daemon, "refitd.coordinator", 1)
        eventually(lambda: "journal" in here.error() and "started in" in here.error(), "clients are told why")
        assert daemon.is_running
        journal.rmdir()
        journal.parent.rmdir()
        away.rename(journal.parent)
        here.swaps_again()


@pytest.mark.slow
def test_a_directory_that_was_opened_to_allowed_users_does_not_keep_its_coordinator_from_starting_again(
    start_daemon: Start,
) -> None:
    daemon = start_daemon(f"[node]\nallowed_uids = [{os.getuid() + 4242}]\n")
    with served(daemon) as here:
        for mode in (0o710, 0o750):  # the modes that an access list for these users shows
            daemon.directory.chmod(mode)
            kill_each(daemon, "refitd.coordinator", 1)
            here.swaps_again()
        daemon.directory.chmod(0o770)
        kill_each(daemon, "refitd.coordinator", 1)
        eventually(lambda: "mode 770" in here.error(), "others may write there")
        daemon.directory.chmod(0o710)
        here.swaps_again()


def test_a_coordinator_that_stands_still_is_replaced(start_daemon: Start) -> None:
    daemon = start_daemon()
    with served(daemon) as here:
        (pid,) = children(daemon, "refitd.coordinator")
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: children(daemon, "refitd.coordinator") not in ([pid], []), "there is another one", 60)
        here.swaps_again()


def serves(directory: str, standalone: bool) -> bool:
    try:
        with refitd.connect(directory) as client:
            return not standalone or bool(client.register_source("m", {"w": torch.zeros(4)}))
    except refitd.TransportError:
        return False


@pytest.mark.parametrize("standalone", [True, False])
def test_of_daemons_that_start_at_once_in_one_directory_exactly_one_goes_on(standalone: bool) -> None:
    for _ in range(4 if standalone else 2):
        with tempfile.TemporaryDirectory(prefix="rfd") as directory:
            env = {**os.environ, "REFITD_NODE__RUNTIME_DIR": directory}
            command = [sys.executable, "-m", "refitd_cli.daemon", "serve", *(["--standalone"] if standalone else [])]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            both = [subprocess.Popen(command, env=env, **pipes) for _ in range(3)]
            try:
                eventually(lambda: sum(p.poll() is not None for p in both) == 2, "two give way")  # noqa: B023
                (winner,) = [p for p in both if p.poll() is None]
                for loser in both:
                    if loser is not winner:
                        assert loser.stderr is not None
                        said = loser.stderr.read().decode()
                        assert loser.returncode == 1 and f"(pid {winner.pid}) is already listening" in said, said
                eventually(lambda: serves(directory, standalone), "the winner serves")
                assert winner.poll() is None
            finally:
                for process in both:
                    process.terminate()
                    process.wait(20)
                    assert process.stderr is not None
                    process.stderr.close()
            assert [name for name in os.listdir(directory) if not name.startswith("journal")] == []


HUNG = """
import sys, time, torch, refitd
client = refitd.connect(sys.argv[1], name="hung")
def register():
    live = {name: torch.zeros(shape, dtype=eval(dtype)) for name, (shape, dtype) in eval(sys.argv[2]).items()}
    return client.register_target("policy", live, replica="hung")
target = register()
print(target.version, flush=True)
sys.stdin.readline()  # it hangs here and does not poll
try:
    while True:
        target.poll()
        time.sleep(0.001)
except refitd.RefusedError as exc:
    print(target.version, str(exc), flush=True)
again = register()
while again.version is None:
    again.poll()
print(again.version, flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("is_stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_engine_that_hangs_can_be_evicted_and_must_register_again(start_daemon: Start, is_stopped: bool) -> None:
    daemon = start_daemon("[deadlines]\ncommit_s = 4.0\n[models.policy]\ncatch_up = true\n")
    with served(daemon) as here:
        shapes = repr({name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in here.weights.items()})
        with Program(python(daemon, HUNG, shapes)) as hung:
            assert hung.line() == "None"
            if is_stopped:
                os.kill(hung.pid, signal.SIGSTOP)

            # it has a staged, decided version and does not commit it
            def is_blocked() -> bool:
                try:
                    here.publish()
                    here.swap()
                except refitd.RefitFailed:
                    return False
                except refitd.RefusedError as exc:
                    return "has not yet taken over" in str(exc)
                return False

            eventually(is_blocked, "the model is blocked by it", 60)
            evict = ("evict", "policy", "--replica", "hung", "--rank")
            unknown = refitctl(daemon, *evict, "7")
            assert unknown.returncode == 1 and "replica 'hung' rank 0" in unknown.stderr
            ran = refitctl(daemon, *evict, "0")
            assert (
                ran.returncode == 0
                and f"evicted replica 'hung' rank 0 (node n0, host {os.uname().nodename}, pid {hung.pid})" in ran.stdout
            )
            here.publish()
            here.swap()
            if is_stopped:
                os.kill(hung.pid, signal.SIGCONT)
            hung.tell()
            said = hung.line()
            assert said.startswith("None ") and "register_target again" in said, said
            # and it gets the live version like any joining target
            with Engine(here.target):
                assert hung.line() == str(here.version)


@pytest.fixture
def no_memory(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Return a file and a daemon's environment: while the file exists, arenas of "hungry" clients get no memory."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "a C compiler is needed"
    library, held = tmp_path / "no_memory.so", tmp_path / "held"
    source = Path(__file__).parents[1] / "support/no_memory.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    held.touch()
    return held, {"LD_PRELOAD": str(library), "NO_MEMORY_WHILE": str(held)}


@pytest.mark.slow
def test_memory_that_does_not_come_blocks_nobody_else_and_is_named(
    start_daemon: Start, no_memory: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, environment = no_memory
    with monkeypatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        daemon = start_daemon()
    weights = {"w": torch.zeros(1 << 20)}
    with daemon.connect("hungry") as hungry, daemon.connect("other") as other:
        failed: list[Exception] = []

        def register() -> None:
            try:
                hungry.register_source("hungry", weights, timeout=12)
            except refitd.RefitdError as exc:
                failed.append(exc)

        waits = threading.Thread(target=register)
        waits.start()
        # during the wait: any number of sources, targets and clients' arenas
        source = other.register_source("m", weights)
        target = other.register_target("m", {"w": torch.zeros(1 << 20)}, replica="r")
        other.allocate({"w": ((4,), torch.float32)})
        go_live(other, source, 1, target, model="m")
        waits.join(30)
        assert len(failed) == 1 and isinstance(failed[0], refitd.DeadlineExceeded), failed
        assert "hungry/source:0@n0" in str(failed[0]) and "MemAvailable" in str(failed[0])
        held.unlink()
        hungry.register_source("hungry", weights, timeout=60)


def test_a_daemon_that_was_stopped_calls_nobody_silent_for_it(start_daemon: Start) -> None:
    """The daemon resumes before its coordinator: it blames its own pause for the silence, and does not reconnect."""
    daemon = start_daemon(standalone=False)
    coordinator = daemon.start_coordinator()
    with daemon.connect() as trainer, daemon.connect() as client:
        eventually(lambda: answers(trainer), "the coordinator answers")
        tensors = {"w": torch.full((64,), 1.0)}
        source = trainer.register_source("policy", tensors)
        target = client.register_target("policy", {"w": torch.zeros(64)}, replica="a")
        source.publish(1)
        with Engine(target):
            trainer.swap("policy", 1, timeout=60)
            before = len(daemon.log())
            with stopped((coordinator.pid,)):
                with stopped((daemon.pid,)):
                    time.sleep(6.0)
                time.sleep(0.5)
            source.publish(2)  # without waiting
            assert trainer.swap("policy", 2, timeout=60).outcome == "committed"
    log = daemon.log()[before:]
    assert "slow-turn" in log and "coordinator-silent" not in log and "introduced itself" not in log
