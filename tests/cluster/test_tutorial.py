"""The tutorial works as written, with the programs that it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from refitd.testing import Daemon
from tests.support.programs import ended, refitctl

TEXT = (Path(__file__).parents[2] / "docs/tutorial.md").read_text()

pytestmark = [pytest.mark.own_daemon, pytest.mark.slow, pytest.mark.timeout(90)]  # `scripts/docs` runs it


@contextmanager
def program(daemon: Daemon, folder: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the code block that begins with this name."""
    (code,) = re.findall(rf"```python\n(# {name}.*?)```", TEXT, re.DOTALL)
    (folder / name).write_text(code)
    env = os.environ | {"REFITD_RUNTIME_DIR": str(daemon.directory)}
    command = [sys.executable, str(folder / name), *arguments]
    with ended(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)) as process:
        yield process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def rows(version: int) -> str:
    return f"version {version}, rows {[10.0 * version] * 4 + [10.0 * version + 1] * 4}"


def test_the_tutorial_runs_as_it_is_printed(daemon: Daemon, tmp_path: Path) -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(program(daemon, tmp_path, "engine.py", name)) for name in "ab"]
        assert [line(engine) for engine in engines] == ["a: registered, serves None", "b: registered, serves None"]
        other = stack.enter_context(program(daemon, tmp_path, "trainer.py", "1"))
        first = stack.enter_context(program(daemon, tmp_path, "trainer.py", "0"))
        told, _ = first.communicate(timeout=120)
        assert told.splitlines() == [f"trainer: version {version} is live" for version in (1, 2, 3)]
        assert (first.returncode, other.wait(60)) == (0, 0)
        for name, engine in zip("ab", engines, strict=True):
            assert [line(engine) for _ in range(3)] == [f"{name}: {rows(version)}" for version in (1, 2, 3)]
        for command in (("status",), ("verify", "policy"), ("history", "policy"), ("watch", "policy", "--count", "1")):
            assert refitctl(daemon, *command).returncode == 0, command
        engines[1].kill()
        engines[1].wait()
        again = stack.enter_context(program(daemon, tmp_path, "engine.py", "b"))
        assert line(again) == "b: registered, serves 3"
        new = stack.enter_context(program(daemon, tmp_path, "engine.py", "c"))
        assert [line(new) for _ in range(2)] == ["c: registered, serves None", f"c: {rows(3)}"]
        assert "source rank 0" in refitctl(daemon, "forget", "policy").stdout
