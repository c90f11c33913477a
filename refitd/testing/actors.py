"""Real processes that execute calls one at a time and exchange mailbox values; every wait has a deadline."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from refitd.copy_services import Mailbox
from refitd.errors import DeadlineExceeded, PeerLost

START_S = 60.0
GRACE_S = 2.0
_DUMP = signal.SIGUSR1

_context = multiprocessing.get_context("forkserver")
_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Import these modules once, in the process that all others are forked from: importing torch takes seconds.

    It has an effect before the first Actors of this process.
    """
    _preloaded.extend(modules)
    _context.set_forkserver_preload(_preloaded)


preload("torch", "refitd.testing.conformance.member")


class ActorFailed(AssertionError):
    """A process raised an unexpected error, ended, or did not answer; the message has tracebacks and stacks."""


@dataclass(frozen=True)
class _Failed:
    traceback: str


@dataclass
class _Worker:
    process: Any
    pipe: Connection


class Actors:
    """Processes by number. Each makes its own object by `make`; callers call its methods by name."""

    def __init__(self, make: Callable[[int, Mailroom], object], size: int) -> None:
        self._make = make
        self._directory = Path(tempfile.mkdtemp(prefix="rfactors"))
        self._post = _PostOffice()
        self._workers: dict[int, _Worker] = {}
        self.is_alive = True
        for number in range(size):
            self.start(number)
        self.collect(range(size), START_S)

    def start(self, number: int) -> None:
        """Start a process; its first answer, None, means that it is ready."""
        here, there = _context.Pipe()
        mail_here, mail_there = _context.Pipe()
        path = self._stacks(number)
        process = _context.Process(
            target=_serve,
            args=(self._make, number, str(path), there, mail_there, tuple(_preloaded)),
            name=f"actor-{number}",
            daemon=True,
        )
        process.start()
        there.close()
        mail_there.close()
        self._workers[number] = _Worker(process, here)
        self._post.add(number, mail_here)

    def replace(self, number: int) -> None:
        """Start a fresh process after one has been killed."""
        self._workers.pop(number).pipe.close()
        self.start(number)
        self.collect([number], START_S)

    def tell(self, number: int, method: str, *args: Any, **kwargs: Any) -> None:
        """Have one process call a method; its answer is collected later."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, and will not answer
            self._workers[number].pipe.send((method, args, kwargs))

    def ask(self, number: int, method: str, *args: Any, timeout: float = 30.0, **kwargs: Any) -> Any:
        """Have one process call a method, and return its result."""
        self.tell(number, method, *args, **kwargs)
        return self.collect([number], timeout)[number]

    def hand(self, number: int, descriptor: int, method: str, *args: Any) -> None:
        """Have one process call a method, which takes a descriptor with `Mailroom.take_descriptor`."""
        worker = self._workers[number]
        self.tell(number, method, *args)
        send_handle(worker.pipe, descriptor, worker.process.pid)
        self.collect([number], START_S)

    def collect(self, numbers: Any, timeout: float) -> dict[int, Any]:
        """Return one answer of each of these processes.

        Raises:
            ActorFailed: not all have answered in time, or one has failed; all processes are ended.
        """
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        waiting = {self._workers[number].pipe: number for number in numbers}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                number = waiting.pop(pipe)
                try:
                    answers[number] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[number] = _Failed("the process has ended")
                if isinstance(answers[number], _Failed):  # the other processes may be waiting for it
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        said = {n: answer.traceback for n, answer in answers.items() if isinstance(answer, _Failed)}
        said |= {n: f"no answer within {timeout} s; it is at\n{self._stack(n)}" for n in waiting.values()}
        if said:
            self.close()  # the state of the processes is unknown
            raise ActorFailed("\n".join(f"--- process {n}\n{text}" for n, text in sorted(said.items())))
        return answers

    def kill(self, number: int) -> None:
        """End a process without warning; return once it has ended."""
        process = self._workers[number].process
        process.kill()
        process.join(START_S)

    def wait_end(self, number: int) -> None:
        """Return once a process has ended by itself."""
        process = self._workers[number].process
        process.join(START_S)
        assert process.exitcode is not None, f"process {number} has not ended"

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send a signal, SIGSTOP or SIGCONT."""
        os.kill(self._workers[number].process.pid, what)

    def give_up(self, epoch: str) -> None:
        """Notify every mailbox that an epoch has ended, as a daemon does."""
        self._post.deliver((epoch, "", None), list(self._workers))

    def close(self) -> None:
        """End every process."""
        if not self.is_alive:
            return
        self.is_alive = False
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            worker.process.join(START_S)
            worker.pipe.close()
        self._post.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _stacks(self, number: int) -> Path:
        return self._directory / f"stack{number}"

    def _stack(self, number: int) -> str:
        """Have a stuck process write its stack, and read it."""
        process = self._workers[number].process
        if process.pid is None or not process.is_alive():
            return "(the process has ended)"
        path = self._stacks(number)
        before = path.stat().st_size
        os.kill(process.pid, _DUMP)
        os.kill(process.pid, signal.SIGCONT)
        until = time.monotonic() + 2
        while path.stat().st_size == before and time.monotonic() < until:
            time.sleep(0.01)
        return path.read_text()


class _PostOffice:
    """Delivers mailbox values to all other processes: (epoch, key, value), (epoch, "", None) for an ended epoch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipes: dict[int, Connection] = {}
        self._retired: list[Connection] = []
        self._wake, self._woken = _context.Pipe()
        self._thread = threading.Thread(target=self._carry, name="post", daemon=True)
        self._thread.start()

    def add(self, number: int, pipe: Connection) -> None:
        with self._lock:
            if (old := self._pipes.get(number)) is not None:
                self._retired.append(old)  # the thread may still be waiting for it
            self._pipes[number] = pipe
        self._wake.send(True)

    def deliver(self, letter: tuple[str, str, bytes | None], to: list[int]) -> None:
        with self._lock:
            for number in to:
                with contextlib.suppress(OSError):  # it has ended
                    self._pipes[number].send(letter)

    def close(self) -> None:
        self._wake.send(False)
        self._thread.join(START_S)
        for pipe in [*self._pipes.values(), *self._retired, self._wake, self._woken]:
            pipe.close()

    def _carry(self) -> None:
        gone: set[Connection] = set()
        while True:
            with self._lock:
                senders = {pipe: n for n, pipe in self._pipes.items() if pipe not in gone}
            for ready in wait([self._woken, *senders]):
                assert isinstance(ready, Connection)
                if ready is self._woken:
                    if not ready.recv():
                        return
                    continue
                try:
                    letter = ready.recv()
                except (EOFError, OSError):
                    gone.add(ready)
                    continue
                self.deliver(letter, [n for n in senders.values() if n != senders[ready]])


class Mailroom:
    """A process's end of the mailboxes, and the descriptors passed to it."""

    def __init__(self, pipe: Connection, mail: Connection) -> None:
        self._pipe, self._mail = pipe, mail
        self._found: dict[tuple[str, str], bytes] = {}
        self._over: set[str] = set()

    def mailbox(self, epoch: str) -> PipeMailbox:
        """Return the mailbox of an epoch."""
        return PipeMailbox(epoch, self)

    def take_descriptor(self) -> int:
        """Return the descriptor sent with this call."""
        return recv_handle(self._pipe)

    def is_asked(self) -> bool:
        """Whether another call is waiting."""
        return self._pipe.poll(0)

    def put(self, epoch: str, key: str, value: bytes) -> None:
        """See Mailbox.put."""
        self._mail.send((epoch, key, value))

    def get(self, epoch: str, key: str, timeout: float) -> bytes:
        """See Mailbox.get."""
        deadline = time.monotonic() + timeout
        while (epoch, key) not in self._found:
            if epoch in self._over:
                raise PeerLost("the epoch has been given up")
            if not self._mail.poll(max(0.0, deadline - time.monotonic())):
                raise DeadlineExceeded(f"nobody left {key!r} within {timeout:.1f} s")
            about, name, value = self._mail.recv()
            if value is None:
                self._over.add(about)
            else:
                self._found[about, name] = value
        return self._found[epoch, key]


class PipeMailbox(Mailbox):
    """A Mailbox over pipes, through the process that runs the tests."""

    def __init__(self, epoch: str, room: Mailroom) -> None:
        self._epoch, self._room = epoch, room

    def put(self, key: str, value: bytes) -> None:
        """See Mailbox.put."""
        self._room.put(self._epoch, key, value)

    def get(self, key: str, timeout: float) -> bytes:
        """See Mailbox.get."""
        return self._room.get(self._epoch, key, timeout)


def _serve(
    make: Callable[[int, Mailroom], object],
    number: int,
    stacks: str,
    pipe: Connection,
    mail: Connection,
    preloaded: tuple[str, ...],
) -> None:
    """Execute calls until the connection ends."""
    assert sys.modules.keys() >= set(preloaded), "the fork server could not import all that it should"
    with open(stacks, "w") as file:
        faulthandler.register(_DUMP, file, all_threads=True)
        try:
            worker = make(number, Mailroom(pipe, mail))
            pipe.send(None)
        except Exception:
            pipe.send(_Failed(traceback.format_exc()))
            return
        while True:
            try:
                method, args, kwargs = pipe.recv()
            except EOFError:
                return
            pipe.send(_answer(worker, method, args, kwargs))


def _answer(worker: object, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    try:
        return getattr(worker, method)(*args, **kwargs)
    except BaseException:
        return _Failed(traceback.format_exc())
