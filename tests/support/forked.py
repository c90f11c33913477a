"""Python programs of tests, forked from a process that has imported torch and refitd: a start costs 0.1 s, not 1 to 3.

The fixture `forked` alters `subprocess`: `python -m refitd...`, `python -m tests.support...` and `python -c CODE` are
forked instead of executed, with the arguments, environment, descriptors, limits and parent that they would have. A
daemon starts its coordinator and its workers in the same way. A test with the mark `real_starts` executes its programs.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import os
import pickle
import resource
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from refitd.service import end
from tests.support.programs import ROOT

# These modules are imported once; a program imports others itself.
IMPORTED = (
    "torch",
    "torch.distributed",
    "refitd.worker.main",
    "refitd.copy_services.gloo",
    "refitd.copy_services.shm",
    "refitd.coordinator.main",
    "refitd.daemon.main",
    "refitd.client",
    "refitd.testing",
    "refitd_cli.commands.serve",
    "refitd_cli.control",
)
EMULATED = ("torch._meta_registrations", "torch.distributed.tensor")  # see tests/support/fake_torch/late.py
PROGRAMS = ("refitd.", "refitd_cli.", "tests.support.")
CODE = "import sys; from tests.support import forked; forked.main(int(sys.argv[1]))"
# Imports depend on variables with these prefixes: programs that differ in one are forked from another process.
READ_EARLY = ("PYTHON", "LD_", "OMP_", "MKL_", "TORCH", "PYTORCH", "TRITON_", "MALLOC_", "LC_", "LANG", "TZ")
READ_EARLY += ("TESTED_MINOR", "TESTED_MAJOR")
PADDING = "FORKED_PADDING"  # a variable that leaves room for a program's environment, where /proc shows it
ROOM = 8 << 10  # bytes of arguments that /proc shows, and bytes of environment beside this process's
LIMITS = range(16)
FORK_S = 120.0  # for the imports and a fork, on a busy machine
KEPT = 3  # processes that have imported; each has about 200 MB

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_CHILD_SUBREAPER = 36
executed = subprocess._fork_exec  # type: ignore[attr-defined]
_lock = threading.Lock()


class Source:
    """The connection to a process that forks programs; `wanted` are the variables that it has imported with."""

    def __init__(
        self, wanted: Mapping[str, str], connection: socket.socket, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.wanted, self.connection, self.process = wanted, connection, process
        self.owner = os.getpid()

    def close(self) -> None:
        """End the process; the programs that it has forked go on."""
        self.connection.close()
        if self.process is not None:
            self.process.wait(20)

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Fork a program and return its pid; it is a child of this process."""
        data = pickle.dumps(request)
        self.connection.settimeout(FORK_S)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # an orphan below this process becomes its child
        try:
            socket.send_fds(self.connection, [struct.pack("I", len(data))], list(fds))
            self.connection.sendall(data)
            (pid,) = struct.unpack("I", _read(self.connection, 4))
            return int(pid)
        finally:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_sources: list[Source] = []
_imported_by = os.getpid()


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise EOFError
        data += more
    return data


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name.startswith(READ_EARLY)}


def start(*given: Any) -> int:
    """Start a program as `_posixsubprocess.fork_exec` does: fork Python programs, execute others."""
    args, _, _, keep, cwd, env = given[:6]
    ends, errpipe, session, group, who, prepare = given[6:12], given[13], *given[15:17], given[17:21], given[21]
    words = [os.fsdecode(word) for word in args]
    is_module = words[1:2] == ["-m"] and words[2].startswith(PROGRAMS)
    is_ours = words[0] == sys.executable and (is_module or (words[1:2] == ["-c"] and words[2] != CODE))
    is_plain = given[2] and group in (-1, None) and all(one in (None, -1) for one in who)
    if not (is_ours and is_plain):
        return int(executed(*given))
    environment = dict(os.environ) if env is None else dict(os.fsdecode(one).split("=", 1) for one in env)
    fds = {number: number for number in keep if number != errpipe}
    for number, fd in enumerate((ends[0], ends[3], ends[5])):
        fds[number] = fd if fd != -1 else number
    request = {
        "words": words,
        "environment": environment,
        "numbers": list(fds),
        "session": session,
        **(_inherited() if prepare is None else _prepared(prepare)),
    }
    if cwd is not None:
        request["folder"] = os.fsdecode(cwd)
    with _lock:
        source = _source(_early(environment))
        try:
            return source.fork(request, list(fds.values())) if source else int(executed(*given))
        except (OSError, EOFError):  # the other process has ended, as it does with its process group
            if source is None:
                raise
            _sources.remove(source)
            source.close()
            return int(executed(*given))


def _inherited() -> dict[str, Any]:
    """Return what a program inherits from this process, besides descriptors."""
    return {
        "folder": os.getcwd(),
        "umask": int(Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0], 8),
        "limits": {number: resource.getrlimit(number) for number in LIMITS},
        "cpus": os.sched_getaffinity(0),
        "ignored": [one for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN],
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
    }


def _prepared(prepare: Callable[[], object]) -> dict[str, Any]:
    """Return what a program inherits from a fork of this process that `prepare` has altered."""
    told, tell = os.pipe()
    if not (pid := os.fork()):
        try:
            prepare()
            os.write(tell, pickle.dumps(_inherited()))
        finally:
            os._exit(0)
    os.close(tell)
    os.waitpid(pid, 0)
    with open(told, "rb") as file:
        found: dict[str, Any] = pickle.load(file)
    return found


def _source(wanted: Mapping[str, str]) -> Source | None:
    """Return the source for an environment, the latest first; only the process that runs tests starts another one."""
    found = next((one for one in _sources if (one.wanted, one.owner) == (wanted, os.getpid())), None)
    if found is None and os.getpid() == _imported_by:
        ours, theirs = socket.socketpair()
        given = {**{name: text for name, text in os.environ.items() if not name.startswith(READ_EARLY)}, **wanted}
        given |= {"OPENBLAS_NUM_THREADS": "1", PADDING: "x" * ROOM}
        command = [sys.executable, "-c", CODE, str(theirs.fileno()), "x" * ROOM]
        process = subprocess.Popen(command, env=given, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        found = Source(wanted, ours, process)
    if found is not None:
        _sources[:] = [found, *(one for one in _sources if one is not found)]
        while len(_sources) > KEPT:
            _sources.pop().close()
    return found


def _serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork programs until the other end closes; return in each of them, with its request and its descriptors."""
    while True:
        header, fds, _, _ = socket.recv_fds(connection, 4, 64)
        if not header:
            os._exit(0)
        request = pickle.loads(_read(connection, *struct.unpack("I", header)))
        told, tell = os.pipe()
        go_on, may_go_on = os.pipe()
        between = os.fork()
        if not between and not (pid := os.fork()):
            for fd in (told, tell, may_go_on, connection.detach()):
                os.close(fd)
            if not os.read(go_on, 1):  # until its parent is the process that asked, or that process has ended
                os._exit(1)
            os.close(go_on)
            return request, fds
        if not between:
            os.write(tell, struct.pack("I", pid))
            os._exit(0)
        os.waitpid(between, 0)
        connection.sendall(os.read(told, 4))
        os.write(may_go_on, b".")
        for fd in (told, tell, go_on, may_go_on, *fds):
            os.close(fd)


def _run_programs(connection: socket.socket) -> NoReturn:
    request, fds = _serve(connection)
    if request["words"][2] == "refitd_cli.daemon":  # it starts programs itself
        split(fds)
    _become(request, fds)
    end(_run(*request["words"][1:3]))


def split(not_given: Sequence[int] = ()) -> None:
    """Fork a process that forks programs for this one; it closes these descriptors."""
    ours, theirs = socket.socketpair()
    if not os.fork():
        for fd in (*not_given, ours.detach()):
            os.close(fd)
        _run_programs(theirs)
    theirs.close()
    _sources.append(Source(_early(os.environ), ours))


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Make this process what an executed one would be."""
    _, how, _, *rest = request["words"]
    if request["session"]:
        os.setsid()
    numbers = request["numbers"]
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for fd in fds]
    for fd in set(fds) - {0, 1, 2}:
        os.close(fd)
    for source in _sources:
        moved = fcntl.fcntl(source.connection.fileno(), fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1)
        source.connection.close()
        source.connection = socket.socket(fileno=moved)
    for number, fd in zip(numbers, high, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cpus"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    for number, limits in request["limits"].items():
        if resource.getrlimit(number) != limits:
            resource.setrlimit(number, limits)
    os.environ.clear()
    os.environ.update(request["environment"])
    _show(request["words"], request["environment"])
    sys.orig_argv = request["words"]
    sys.path[0] = request["folder"] if how == "-m" else ""
    sys.argv = [how, *rest]
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            open(fd, "wb" if fd else "rb", 0 if old.write_through else -1, closefd=False),  # noqa: SIM115
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=old.line_buffering,
            write_through=old.write_through,
        )
        for fd, old in enumerate((sys.stdin, sys.stdout, sys.stderr))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def _show(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have /proc show these arguments and this environment; no pointer to the memory is left in `environ`."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    addresses = list(map(int, fields[45:49]))
    shown = ((addresses[:2], words), (addresses[2:], [f"{name}={text}" for name, text in environment.items()]))
    for (start, stop), texts in shown:
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)
        ctypes.memmove(start, data[: stop - start].ljust(stop - start, b"\0"), stop - start)


def _run(how: str, what: str) -> int:
    """Run `python HOW WHAT`; return the exit status."""
    status = 0
    try:
        if how == "-m":
            sys.modules.pop(what, None)  # else runpy warns
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))
    except SystemExit as exc:
        if exc.code is not None and not isinstance(exc.code, int):
            print(exc.code, file=sys.stderr)
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    return status


def prepare() -> None:
    """Import what programs need, and from now on fork them, in this process and its forks."""
    is_emulated = any(Path(path).name == "fake_torch" for path in sys.path)
    for name in (*IMPORTED, *(EMULATED if is_emulated else ())):
        with contextlib.suppress(ImportError):  # there are tests without torch
            importlib.import_module(name)
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        one.atexit = False  # torch would unload its libraries for 0.3 s
    subprocess._fork_exec = start  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()


def main(number: int) -> NoReturn:
    """Fork programs for the process at the other end of this descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare()
    _run_programs(socket.socket(fileno=number))


@pytest.fixture
def forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the programs that this test starts."""
    if not request.node.get_closest_marker("real_starts"):
        monkeypatch.setattr(subprocess, "_fork_exec", start)


def pytest_unconfigure() -> None:
    """End the processes that fork programs."""
    while _sources:
        _sources.pop().close()
