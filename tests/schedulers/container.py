"""A booted Debian container (systemd-nspawn), and commands in it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

BOOT_S = 60.0
COMMAND_S = 120.0
STATUS_NOT_ALLOWED = 77

Done = subprocess.CompletedProcess[str]


class NotAllowed(Exception):
    """This machine does not let the container boot; the message says how it failed."""


class Container:
    """Boots a root folder with systemd in separate namespaces, and stops it when the `with` block ends."""

    def __init__(self, root: Path, shown: dict[Path, str]) -> None:
        """Set the root folder, and the paths of this machine to mount in it read-only."""
        self._root, self._shown = root, shown
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._init = 0

    def __enter__(self) -> Self:
        binds = [f"--bind-ro={here}:{there}" for here, there in self._shown.items()]
        # --volatile: files that a run writes are dropped at its end
        command = [
            *(
                "systemd-nspawn",
                f"--directory={self._root}",
                "--boot",
                "--volatile=overlay",
                "--register=no",
                "--keep-unit",
            ),
            *("--private-network", "--console=pipe", "--quiet", "--hostname=refitd-try", *binds),
        ]
        self._said = tempfile.TemporaryFile()
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said)
        try:
            self._await_boot()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def __call__(self, *command: str, user: str = "root", timeout: float = COMMAND_S, **env: str) -> Done:
        """Run a command to its end; its status is the caller's to judge."""
        settings = [
            f"{name}={value}"
            for name, value in {"PATH": "/opt/refitd/bin:/usr/sbin:/usr/bin:/sbin:/bin", **env}.items()
        ]
        line = [
            *("nsenter", "--target", str(self._init), "--mount", "--uts", "--ipc", "--net", "--pid"),
            *(
                "setpriv",
                f"--reuid={user}",
                f"--regid={user}",
                "--init-groups",
                "env",
                "--ignore-environment",
                *settings,
            ),
            *command,
        ]
        return subprocess.run(
            line, check=False, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )

    def must(self, *command: str, **options: str) -> str:
        """Run a command that has to succeed; return what it printed."""
        done = self(*command, **options)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: status {done.returncode}: {done.stderr or done.stdout}")
        return done.stdout

    def write(self, path: str, text: str, user: str = "root", mode: str = "0644") -> None:
        """Write a file, and the folders above it."""
        self.must("mkdir", "-p", str(Path(path).parent))
        script = f"cat > {path} && chown {user}: {path} && chmod {mode} {path}"
        line = ["nsenter", "--target", str(self._init), "--mount", "--pid", "sh", "-c", script]
        subprocess.run(line, check=True, input=text, text=True, timeout=COMMAND_S)

    def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Return whether it holds within these seconds."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _await_boot(self) -> None:
        assert self._process is not None and self._said is not None
        deadline = time.monotonic() + BOOT_S
        state = "no process"
        while time.monotonic() < deadline and self._process.poll() is None:
            self._init = self._find_init()
            if self._init:
                state = self("systemctl", "is-system-running").stdout.strip()
                if state in ("running", "degraded"):
                    return
            time.sleep(0.2)
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip()
        raise NotAllowed(f"systemd does not boot in a container here ({state or 'it does not answer'}): {said[-2000:]}")

    def _find_init(self) -> int:
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        found = [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd"]
        return found[0] if found else 0

    def _end(self) -> None:
        assert self._process is not None and self._said is not None
        if self._process.poll() is None:
            if self._init:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._init, signal.SIGRTMIN + 4)  # power off (man 1 systemd)
            else:
                self._process.terminate()
            try:
                self._process.wait(40)
            except subprocess.TimeoutExpired:
                self._process.kill()  # the container's processes end with it
                self._process.wait()
        self._said.close()
        for left in ("/run/systemd/nspawn/propagate/" + self._root.name,):
            with contextlib.suppress(OSError):
                os.rmdir(left)
