"""A forked program (tests/support/forked.py) finds what an executed one finds, and ends as it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked

LOOK = """
import json, os, resource, signal, sys
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path[0], "folder": os.getcwd(), "parent": os.getppid(),
    "environment": dict(os.environ), "shown": open("/proc/self/environ", errors="replace").read().strip(chr(0)),
    "words": open("/proc/self/cmdline", errors="replace").read().strip(chr(0)), "session": os.getsid(0) == os.getpid(),
    "group": os.getpgid(0) == os.getpid(), "files": sorted(map(int, os.listdir("/proc/self/fd"))),
    "limits": [resource.getrlimit(n) for n in range(16)], "cpus": sorted(os.sched_getaffinity(0)),
    "signals": [str(signal.getsignal(n)) for n in sorted(signal.valid_signals()) if n != signal.SIGINT],
    "interrupt": getattr(signal.getsignal(signal.SIGINT), "__name__", signal.getsignal(signal.SIGINT)),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "umask": os.umask(0), "name": __name__,
    "streams": [(s.fileno(), s.encoding, s.errors, s.line_buffering) for s in (sys.stdin, sys.stdout, sys.stderr)],
    "input": sys.stdin.read(),
}))
"""
ENDS = (
    "import sys; sys.exit(3)",
    "import sys; sys.exit('words')",
    "raise ValueError('words')",
    "import atexit; atexit.register(print, 'last')",
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "raise KeyboardInterrupt",
)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run a program both ways; return what `subprocess.run` returns for each."""

    def run(code: str, *words: str, **options: Any) -> list[subprocess.CompletedProcess[str]]:
        given = {"capture_output": True, "text": True, "cwd": tmp_path, "input": "typed"}
        given |= {"env": dict(os.environ), **options}
        found = []
        for start in (forked.executed, forked.start):
            monkeypatch.setattr(subprocess, "_fork_exec", start)
            found.append(subprocess.run([sys.executable, "-c", code, *words], check=False, **given))
        return found

    return run


@pytest.mark.parametrize("options", [{}, {"start_new_session": True}, {"env": {**os.environ, "REFITD_X": "\udcff"}}])
def test_it_finds_what_an_executed_one_finds(ways: Any, options: dict[str, Any]) -> None:
    reader, writer = os.pipe()
    try:
        executed, found = ways(LOOK, "a", "\udce9", pass_fds=[writer], **options)
    finally:
        os.close(reader)
        os.close(writer)
    assert not executed.stderr and not found.stderr
    wanted, seen = json.loads(executed.stdout), json.loads(found.stdout)
    assert {name: (wanted[name], seen[name]) for name in wanted if wanted[name] != seen[name]} == {}


@pytest.mark.parametrize("code", ENDS)
def test_it_ends_as_an_executed_one_ends(ways: Any, code: str) -> None:
    executed, found = ways(code)
    assert (found.returncode, found.stdout) == (executed.returncode, executed.stdout)
    assert found.stderr.splitlines()[-1:] == executed.stderr.splitlines()[-1:]


def test_it_can_be_killed_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "_fork_exec", forked.start)
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        assert process.poll() is None
        process.kill()
        assert process.wait(20) == -9
