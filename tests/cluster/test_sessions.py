"""How sessions end: what was said arrives, forked children hold nothing open, handlers and other threads do no harm."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import refitd
from refitd.testing import Daemon, Engine, RunningSwap, eventually, stopped
from tests.support.leaver import WAYS

ROOT = Path(__file__).parents[2]
ANSWER_S = 30.0


class Leavers:
    """Engines that take a version over and leave (tests.support.leaver)."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.leaver", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def start(self, way: str, version: int) -> None:
        """Have one register as replica a; it goes its way once it has taken the version over."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"a {way} {version}\n")
        self._process.stdin.flush()
        assert self._line() == "ready\n"

    def gone(self) -> None:
        """Return when it has ended."""
        assert self._line() == "gone\n"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.kill()
        self._process.wait(ANSWER_S)


class Trainer:
    """A source that publishes and swaps."""

    def __init__(self, daemon: Daemon) -> None:
        self.client = daemon.connect("trainer")
        self.weights = {"w": torch.zeros(64, 64)}
        self.source = self.client.register_source("policy", self.weights)
        self.version = 0

    def publish(self) -> int:
        self.version += 1
        self.weights["w"].fill_(self.version)
        self.source.publish(self.version)
        return self.version

    def targets(self) -> list[str]:
        return [t.replica for model in self.client.status().models for t in model.targets]


@pytest.fixture
def trainer(daemon: Daemon) -> Iterator[Trainer]:
    found = Trainer(daemon)
    yield found
    found.client.close()


@pytest.fixture
def lone(start_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon whose engines get what is asked for, and nothing by themselves."""
    return start_daemon("[deadlines]\ncommit_s = 10.0\n[models.policy]\ncatch_up = false\n")


@pytest.fixture
def leavers(lone: Daemon) -> Iterator[Leavers]:
    found = Leavers(lone.directory)
    yield found
    found.close()


def _leaves_after_a_commit(trainer: Trainer, leavers: Leavers, way: str) -> None:
    version = trainer.version + 1
    leavers.start(way, version)
    trainer.publish()
    report = trainer.client.swap("policy", version, timeout=ANSWER_S)
    assert report.outcome == "committed", way
    leavers.gone()
    eventually(lambda: not trainer.targets(), f"an engine that left by {way} is gone")


def test_an_engine_that_leaves_right_after_its_commit_has_committed(lone: Daemon, leavers: Leavers) -> None:
    trainer = Trainer(lone)
    with trainer.client:
        for way in WAYS:
            _leaves_after_a_commit(trainer, leavers, way)


@pytest.mark.slow
def test_it_has_committed_every_time(lone: Daemon, leavers: Leavers) -> None:
    trainer = Trainer(lone)
    with trainer.client:
        for way in WAYS * 100:
            _leaves_after_a_commit(trainer, leavers, way)


def test_a_stopped_daemon_hears_what_was_said_before_the_end_of_a_process(lone: Daemon, leavers: Leavers) -> None:
    # the engine commits and dies while the daemon does not look: it finds the commit and the hang-up at once
    trainer = Trainer(lone)
    with trainer.client:
        leavers.start("stopped", 1)
        trainer.publish()
        swap = RunningSwap(lone.connect(), "policy", 1, ANSWER_S)
        leavers.gone()
        os.kill(lone.pid, signal.SIGCONT)
        assert swap.result().outcome == "committed"


@pytest.mark.slow
def test_an_interpreter_that_ends_closes_its_clients_in_order(lone: Daemon, leavers: Leavers) -> None:
    trainer = Trainer(lone)
    with trainer.client:
        before = trainer.client.status().nodes[0].arenas
        _leaves_after_a_commit(trainer, leavers, "return")
        eventually(
            lambda: trainer.client.status().nodes[0].arenas == before,
            "a process that ends in order leaves no staging arena behind",
        )


# --- clients that are closed in the middle of things --------------------------------------------------------


def test_a_client_may_be_closed_by_several_threads_while_requests_are_in_flight(shared_daemon: Daemon) -> None:
    for _ in range(5):
        client = shared_daemon.connect("crowd")
        errors: list[BaseException] = []
        begin = threading.Barrier(6)

        def ask(client: refitd.Client = client, begin: threading.Barrier = begin) -> None:
            begin.wait(ANSWER_S)
            with contextlib.suppress(refitd.PeerLost):
                while True:
                    client.status()

        def close(
            client: refitd.Client = client, begin: threading.Barrier = begin, errors: list[BaseException] = errors
        ) -> None:
            begin.wait(ANSWER_S)
            try:
                client.close()
            except BaseException as exc:
                errors.append(exc)

        threads = [threading.Thread(target=work) for work in (ask, ask, ask, close, close, close)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ANSWER_S)
        assert not any(thread.is_alive() for thread in threads) and not errors
        with pytest.raises(refitd.PeerLost):
            client.status()
        client.close()


# --- forks ------------------------------------------------------------------------------------------------

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
    engine = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(daemon.directory)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
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
    command = [sys.executable, "-c", BORN, str(daemon.directory)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
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


# --- signal handlers --------------------------------------------------------------------------------------

HANDLER = """
import signal, sys, time, torch, refitd, itertools
directory = sys.argv[1]
client = refitd.connect(directory, name="handler")
weights = {"w": torch.zeros(64, 64)}
source = client.register_source("h", weights, slots=2)
live = {"w": torch.zeros(64, 64)}
target = client.register_target("h", live, replica="a")
numbers = itertools.count(1)
done, refused = 0, 0
def handler(signum, frame):
    global done, refused
    try:
        client.status()
        target.poll()
        source.publish(next(numbers) + 100000)
        done += 1
    except refitd.RefusedError:
        refused += 1
    finally:
        if time.monotonic() < until:
            signal.setitimer(signal.ITIMER_REAL, 0.002)  # once each: handlers interrupt each other, too
until = time.monotonic() + float(sys.argv[2])
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.002)
while time.monotonic() < until:
    try:
        client.status()
        target.poll()
        try:
            target.wait(1 << 40, timeout=0.01)
        except refitd.DeadlineExceeded:
            pass
        source.publish(next(numbers) + 100000)
    except refitd.RefusedError:
        pass
signal.setitimer(signal.ITIMER_REAL, 0)
print(done, refused, flush=True)
client.close()
"""


def test_client_calls_in_a_signal_handler_end(daemon: Daemon) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", HANDLER, str(daemon.directory), "3"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    done, _ = map(int, ran.stdout.splitlines()[-1].split())
    assert done > 10


INTERRUPTED = """
import os, signal, sys, torch, refitd
client = refitd.connect(sys.argv[1], name="interrupted")
weights = {"w": torch.zeros(64, 64)}
source = client.register_source("policy", weights)
said = []
def handler(signum, frame):
    for call in (target.poll, lambda: target.wait(1, timeout=5), client.status):
        try:
            call()
            said.append("done")
        except refitd.RefitdError as exc:
            said.append(type(exc).__name__ + ": " + str(exc))
signal.signal(signal.SIGUSR1, handler)
def hook(tensor):
    os.kill(os.getpid(), signal.SIGUSR1)
live = {"w": torch.zeros(64, 64)}
derived = {"d": refitd.Derived(torch.zeros(1), sources=("w",), refresh=hook)}
target = client.register_target("policy", live, replica="a", derived=derived)
source.publish(1)
import threading
swap = threading.Thread(target=lambda: client.swap("policy", timeout=60))
swap.start()
assert target.wait(1, timeout=60) == 1
swap.join()
print(said, flush=True)
"""


def test_a_handler_that_would_wait_for_the_commit_it_interrupts_is_refused(daemon: Daemon) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(daemon.directory)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("RefusedError") == 2 and "'done']" in ran.stdout, ran.stdout


TERMINATED = """
import signal, sys, torch, refitd
client = refitd.connect(sys.argv[1], name="terminated")
target = client.register_target("policy", {"w": torch.zeros(64, 64)}, replica="a")
def handler(signum, frame):
    client.close()
    client.close()
    sys.exit(7)
signal.signal(signal.SIGTERM, handler)
print("ready", flush=True)
while True:
    try:
        target.wait(99, timeout=0.001)  # interrupted anywhere
    except refitd.DeadlineExceeded:
        pass
"""


def test_a_handler_closes_what_its_thread_waits_on(daemon: Daemon, trainer: Trainer) -> None:
    command = [sys.executable, "-c", TERMINATED, str(daemon.directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        _, said = process.communicate(timeout=ANSWER_S)
        assert (process.returncode, said) == (7, "")
    finally:
        process.kill()
    eventually(lambda: not trainer.targets(), "it has left")


# --- answers in time --------------------------------------------------------------------------------------


def test_whoever_asks_for_a_swap_is_answered_in_the_time_that_was_given(daemon: Daemon, start_daemon) -> None:
    slow = start_daemon("[deadlines]\ncommit_s = 60.0\n")
    trainer = Trainer(slow)
    with trainer.client, slow.connect("engine") as engine:
        live = {"w": torch.zeros(64, 64)}
        target = engine.register_target("policy", live, replica="b")
        version = trainer.publish()
        began = time.monotonic()
        with pytest.raises(refitd.RefitFailed, match="decided") as caught:
            trainer.client.swap("policy", timeout=2.0)
        assert time.monotonic() - began < 2.0 + 2.0  # of 60
        report = caught.value.report
        assert report is not None and report.outcome == "decided" and report.version == version
        assert [(m.replica, m.state) for m in report.members] == [("b", "late")]
        assert "b rank 0" in str(caught.value) and caught.value.causes
        # it goes on, and nobody has to ask again
        assert target.wait(version, timeout=ANSWER_S) == version
        eventually(
            lambda: [s.state for s in trainer.client.history("policy").swaps] == ["committed"], "it has committed"
        )


def test_a_swap_that_waits_its_turn_is_answered_in_time_too(start_daemon) -> None:
    daemon = start_daemon("[deadlines]\ncommit_s = 60.0\n")
    trainer = Trainer(daemon)
    with trainer.client, daemon.connect("engine") as engine:
        target = engine.register_target("policy", {"w": torch.zeros(64, 64)}, replica="b")
        trainer.publish()
        with pytest.raises(refitd.SwapFailed) as late:
            trainer.client.swap("policy", timeout=4.0)
        assert late.value.report.outcome == refitd.SwapOutcome.DECIDED
        trainer.publish()
        began = time.monotonic()
        with pytest.raises(refitd.DeadlineExceeded, match="runs for too long"):
            trainer.client.swap("policy", timeout=1.0, queue=True)
        ran = subprocess.run(
            [sys.executable, "-m", "refitd_cli.control", "swap", "policy", "--queue", "--timeout", "1"],
            env={**os.environ, "REFITD_RUNTIME_DIR": str(daemon.directory)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert ran.returncode == 1 and "runs for too long" in ran.stderr
        assert time.monotonic() - began < 15.0  # of 60
        assert target.wait(1, timeout=ANSWER_S) == 1


def test_a_coordinator_that_does_not_answer_keeps_nobody_for_longer_than_asked(
    daemon: Daemon, trainer: Trainer
) -> None:
    with daemon.connect("engine") as engine:
        engine.register_target("policy", {"w": torch.zeros(64, 64)}, replica="b")
        trainer.publish()
        pid = trainer.client.status().coordinator_pid
        with stopped((pid,)):
            began = time.monotonic()
            for ask in (trainer.client.swap, trainer.client.rollback, trainer.client.verify):
                with pytest.raises(refitd.TransportError):  # nobody can say what became of it
                    ask("policy", timeout=0.5)
            assert time.monotonic() - began < 3 * (0.5 + 2.0)


@pytest.mark.slow
def test_refitctl_says_that_a_swap_is_decided_and_goes_on(start_daemon) -> None:
    daemon = start_daemon("[deadlines]\ncommit_s = 60.0\n")
    trainer = Trainer(daemon)
    with trainer.client, daemon.connect("engine") as engine:
        target = engine.register_target("policy", {"w": torch.zeros(64, 64)}, replica="b")
        trainer.publish()
        ran = subprocess.run(
            [sys.executable, "-m", "refitd_cli.control", "swap", "policy", "--timeout", "1"],
            env={**os.environ, "REFITD_RUNTIME_DIR": str(daemon.directory)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert ran.returncode == 1
        assert "is decided and goes on" in ran.stderr and "rank 0 of replica b" in ran.stderr, ran.stderr
        assert target.wait(1, timeout=ANSWER_S) == 1


# --- whose daemon it is -----------------------------------------------------------------------------------

LISTEN = """
import os, sys
sys.path[:0] = eval(sys.argv[1])
from pathlib import Path
import zmq
from refitd.buffers import handoff
from refitd.protocol import local, sidecar
from refitd.protocol.base import PROTOCOL_VERSION
from refitd.protocol.channel import Router
from refitd.protocol.codec import Decoder, encode
uid, directory, endpoint = int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
os.setgroups([]); os.setgid(uid); os.setuid(uid)
os.umask(0)
listener = handoff.listen(directory / "refitd.fds")
router = Router(zmq.Context(), f"ipc://{directory}/refitd.sock")
for name in ("refitd.fds", "refitd.sock"):
    (directory / name).chmod(0o666)
print("ready", flush=True)
decoder = Decoder(local.ClientRequest)
poller = zmq.Poller()
poller.register(router.socket, zmq.POLLIN)
poller.register(listener.fileno(), zmq.POLLIN)
kept = []
while True:
    ready = dict(poller.poll())
    if listener.fileno() in ready:
        kept.append(listener.accept()[0])
        greeting = sidecar.Greeting(token=b"0" * 16, endpoint=endpoint or f"ipc://{directory}/refitd.sock")
        handoff.send(kept[-1], encode(0, greeting))
    if router.socket in ready:
        received = router.receive()
        number, message = decoder.decode(received.frame)
        print(type(message).__name__, flush=True)
        answer = local.Failure(code="refused", message="it is only for show")
        if isinstance(message, local.Hello):
            answer = local.Welcome(protocol=PROTOCOL_VERSION, node="theirs", host="h", coordinator=False)
        router.send(received.identity, number, answer)
"""

VISIT = """
import os, sys
sys.path[:0] = eval(sys.argv[1])
import encodings.idna, refitd, refitd.client, refitd_cli.control, refitd_cli.commands.status, click.testing
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
if sys.argv[3] == "refitctl":
    refitd_cli.control.main(sys.argv[4:], prog_name="refitctl")
try:
    with refitd.connect(sys.argv[3] or None, name="victim", uid=eval(sys.argv[4])) as client:
        print("connected to", client.node)
except refitd.RefitdError as exc:
    print(type(exc).__name__, exc)
"""

# users of this process alone, so that tests of other processes may run beside it
OTHER, VICTIM = 2_000_000_000 + os.getpid(), 2_100_000_000 + os.getpid()


def _visit(uid: int, directory: Path | str, *words: object, **env: str) -> str:
    command = [sys.executable, "-c", VISIT, repr([str(ROOT), *sys.path]), str(uid), str(directory)]
    command += map(str, words or (None,))
    given = {k: v for k, v in os.environ.items() if not k.startswith(("REFITD_", "XDG_"))} | env
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=given)
    return ran.stdout + ran.stderr


class OthersDaemon:
    """What looks like the daemon of another user, in its victim's default directory and open to it."""

    def __init__(self, endpoint: str = "") -> None:
        self.directory = Path(f"/tmp/refitd-{VICTIM}")
        self.directory.mkdir(mode=0o711)
        os.chown(self.directory, OTHER, OTHER)
        command = [
            sys.executable,
            "-c",
            LISTEN,
            repr([str(ROOT), *sys.path]),
            str(OTHER),
            str(self.directory),
            endpoint,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def heard(self) -> list[str]:
        """End it; return the messages that it was sent."""
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait(ANSWER_S)
        with self._process.stdout as said:
            return said.read().split()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(ANSWER_S)
        shutil.rmtree(self.directory)


@pytest.fixture
def listen_as_another_user() -> Iterator[Callable[..., OthersDaemon]]:
    if os.getuid() != 0:
        pytest.skip("only root can start processes of other users")
    started: list[OthersDaemon] = []

    def listen(endpoint: str = "") -> OthersDaemon:
        started.append(OthersDaemon(endpoint))
        return started[-1]

    yield listen
    for one in started:
        one.close()


def test_a_client_says_nothing_to_the_daemon_of_a_user_it_did_not_name(
    listen_as_another_user: Callable[..., OthersDaemon],
) -> None:
    theirs = listen_as_another_user()
    refused = _visit(VICTIM, "")  # found by default, where somebody else was first
    assert "RefusedError" in refused and f"belongs to uid {OTHER}" in refused, refused
    assert f"refitd.connect(..., uid={OTHER})" in refused and f"REFITD_DAEMON_UID={OTHER}" in refused
    assert "RefusedError" in _visit(VICTIM, theirs.directory)
    assert "RefusedError" in _visit(0, theirs.directory), "root, too, is asked whose it means"
    assert f"expected uid {VICTIM}" in _visit(VICTIM, theirs.directory, VICTIM), "one that is stated is the only one"
    assert "REFITD_DAEMON_UID is 'me'" in _visit(VICTIM, theirs.directory, REFITD_DAEMON_UID="me")
    assert "did you mean REFITD_DAEMON_UID" in _visit(VICTIM, theirs.directory, REFITD_DAEMON_UDI="0")
    refused = _visit(VICTIM, "refitctl", "status", "--address", theirs.directory)
    assert f"refitctl --uid {OTHER}" in refused, refused
    # its directory may also look like the victim's own: it is the kernel that says who listens
    os.chown(theirs.directory, VICTIM, VICTIM)
    assert f"the daemon here (pid {theirs._process.pid}) belongs to uid {OTHER}" in _visit(VICTIM, "")
    os.chown(theirs.directory, OTHER, OTHER)
    assert theirs.heard() == []


def test_a_client_that_names_another_users_daemon_is_connected(
    listen_as_another_user: Callable[..., OthersDaemon],
) -> None:
    theirs = listen_as_another_user()
    assert _visit(VICTIM, theirs.directory, OTHER) == "connected to theirs\n"
    assert _visit(VICTIM, theirs.directory, REFITD_DAEMON_UID=str(OTHER)) == "connected to theirs\n"
    said = _visit(VICTIM, "refitctl", "status", "--address", theirs.directory, "--uid", OTHER)
    assert "only for show" in said, said
    assert theirs.heard() == ["Hello", "Hello", "Hello", "GetStatus"]


def test_a_daemon_that_hands_out_a_socket_elsewhere_is_left(
    listen_as_another_user: Callable[..., OthersDaemon], tmp_path: Path
) -> None:
    theirs = listen_as_another_user(f"ipc://{tmp_path}/refitd.sock")
    assert "not in this directory" in _visit(0, theirs.directory, OTHER)
    # and one of somebody else's in the right place
    (theirs.directory / "refitd.sock").unlink()
    with socket.socket(socket.AF_UNIX) as mine:
        mine.bind(str(theirs.directory / "refitd.sock"))
        assert "RefusedError" in _visit(0, theirs.directory, OTHER)
    assert theirs.heard() == []


def test_a_directory_that_others_can_write_to_is_no_daemons(shared_daemon: Daemon, tmp_path: Path) -> None:
    shared_daemon.directory.chmod(0o777)
    try:
        with pytest.raises(refitd.RefusedError, match="mode 777"):
            shared_daemon.connect()
    finally:
        shared_daemon.directory.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(shared_daemon.directory)
    with refitd.connect(link) as client:  # a link of one's own, that one has named
        assert client.node == "n0"
    os.lchown(link, OTHER, OTHER)
    with pytest.raises(refitd.RefusedError, match=f"uid {OTHER}"):
        refitd.connect(link)
