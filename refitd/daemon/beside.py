"""The coordinator that a standalone daemon runs beside itself: started, watched, started again."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import msgspec

from refitd.buffers.handoff import refuse_if_listening
from refitd.config import Config
from refitd.errors import RefusedError

# One that ends this soon after its start cannot run here at all: starting it again would only hide why.
_QUICK_S = 3.0
_STOP_S = 5.0


class CoordinatorBeside:
    """A child process running `refitd.coordinator` with the daemon's own configuration."""

    def __init__(self, config: Config) -> None:
        """Start it.

        Raises:
            RefusedError: a daemon is running in this directory already, and has its coordinator.
        """
        refuse_if_listening(config.runtime_dir / "refitd.sock")
        self._config = config
        self._start()

    def _start(self) -> None:
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "refitd.coordinator"],
            stdin=subprocess.PIPE,
            # Ctrl-C at a terminal goes to the whole group; the daemon decides when its coordinator ends
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; `restart_if_ended` says so
            self._process.stdin.write(msgspec.json.encode(self._config))
            self._process.stdin.close()

    def restart_if_ended(self) -> int | None:
        """Start it again if it has ended; return its exit status then, None while it runs.

        Its journal tells the new one what was decided, and the daemon introduces every member again.

        Raises:
            RefusedError: it ended as soon as it had been started.
        """
        status = self._process.poll()
        if status is None:
            return None
        if time.monotonic() - self._started < _QUICK_S:
            raise RefusedError(
                f"the coordinator beside this daemon ended with status {status} as soon as it had started; "
                "its output above says why"
            )
        self._start()
        return status

    def stop(self) -> None:
        """End it, by force where it does not end within seconds."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
