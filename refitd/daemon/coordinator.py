"""The coordinator outside this process: a standalone daemon's child process, and this node's address for it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from refitd.config import Config
from refitd.errors import ConfigError, RefusedError

_STOP_S = 5.0

# A process that ends sooner than this counts as a quick end; each one in a row doubles the pause before a restart.
_QUICK_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0

# A silent coordinator is replaced after this long: sooner if it was stopped (SIGSTOP), because it cannot answer; later
# if not, because it may only be busy.
STOPPED_S, SILENT_S = 8.0, 60.0

# How long status shows the last failure.
_TOLD_S = 600.0


class StartFailed(RefusedError):
    """The daemon cannot start here: its coordinator or a worker ends as soon as it is started."""


def pause_s(quick: int) -> float:
    """Return how many seconds to wait before a restart after `quick` quick ends in a row."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(quick - 1, 10)) if quick > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Happened:
    """One event of the coordinator process, for the log."""

    event: str
    fields: dict[str, object]


class CoordinatorProcess:
    """A child process running `refitd.coordinator` with the daemon's own configuration, and the next metrics port."""

    def __init__(self, config: Config, clock: Callable[[], float]) -> None:
        """Start the process.

        Raises:
            RefusedError: no process can be started.
        """
        self._config = config
        self._clock = clock
        self._settled = False  # once the coordinator has answered, its failures no longer end the daemon
        self._quick = 0
        self._restarts = 0
        self._again_at: float | None = None
        self._last = ""  # how the last process ended
        self._last_at = 0.0
        try:
            self._process: subprocess.Popen[bytes] | None = self._spawn()
        except OSError as exc:
            raise RefusedError(f"no coordinator can be started beside this daemon: {exc.strerror}") from exc

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._started = self._clock()
        process = subprocess.Popen(
            [sys.executable, "-m", "refitd.coordinator"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # carries the reason if it cannot start; the log goes to stderr
            # Ctrl-C reaches the whole process group, but the daemon decides when its coordinator ends
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended already; `watch` reports that
            config = msgspec.structs.replace(self._config, metrics=self._config.metrics.of_coordinator)
            process.stdin.write(msgspec.json.encode(config))
            process.stdin.close()
        return process

    @property
    def problem(self) -> str:
        """The coordinator's problem, for status; "" without one."""
        if not self._last or self._clock() - self._last_at > _TOLD_S:
            return ""
        text = f"the coordinator beside this daemon was started again {self._restarts} times; the last one {self._last}"
        if self._again_at is not None:
            text += f"; the next one is started in {max(0.0, self._again_at - self._clock()):.0f} s"
        return text

    def settle(self) -> None:
        """Note that the coordinator has answered; from now on its failures never end the daemon."""
        self._settled = True

    def watch(self, silent_s: float) -> Happened | None:
        """Restart the process if it ended; kill it if it hangs.

        After quick ends in a row, restarts wait longer and longer. A process that is stopped, or silent for long, is
        killed. The next process reads the decisions from the journal, and the daemon registers its members with it
        again.

        Args:
            silent_s: seconds since the coordinator was last heard (0 while it answers).

        Raises:
            StartFailed: the first process ended before it answered; it cannot run here.
        """
        now = self._clock()
        if self._process is None:
            if self._again_at is not None and now >= self._again_at:
                self._start_again()
            return None
        status = self._process.poll()
        if status is not None:
            return self._ended(status)
        lives_s = now - self._started
        if self._settled and min(silent_s, lives_s) > (STOPPED_S if _is_stopped(self._process.pid) else SILENT_S):
            self._process.kill()
            return Happened("coordinator-killed", {"pid": self._process.pid, "silent_s": silent_s})
        return None

    def _ended(self, status: int) -> Happened:
        assert self._process is not None
        said = _last_words(self._process)
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self._last, self._last_at = f"{how}{': ' if said else ''}{said}", self._clock()
        self._process = None
        if not self._settled:
            raise StartFailed(
                f"the coordinator beside this daemon {self._last}; that was as soon as it had started, see its output "
                "above"
            )
        self._quick = self._quick + 1 if self._clock() - self._started < _QUICK_S else 0
        wait_s = pause_s(self._quick)
        self._again_at = self._clock() + wait_s
        if not wait_s:
            self._start_again()
        return Happened("coordinator-ended", {"how": how, "said": said, "again_in_s": wait_s})

    def _start_again(self) -> None:
        self._again_at = None
        self._restarts += 1
        try:
            self._process = self._spawn()
        except OSError as exc:  # out of memory or processes: this may be temporary
            self._quick += 1
            self._last, self._last_at = f"could not be started: {exc.strerror}", self._clock()
            self._again_at = self._clock() + pause_s(self._quick)

    def reload(self) -> None:
        """Have the process read its list of admitted keys again; a starting process reads it anyway."""
        if self._settled and self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGHUP)

    def stop(self) -> None:
        """Terminate the process; kill it if it does not end in time."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        _last_words(self._process)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _last_words(process: subprocess.Popen[bytes]) -> str:
    """Return what an ended process wrote to its standard output, and close the pipe."""
    assert process.stdout is not None
    with process.stdout as end:
        os.set_blocking(end.fileno(), False)
        try:
            return os.read(end.fileno(), 4000).decode(errors="replace").strip()
        except BlockingIOError:
            return ""


def reachable_address(config: Config) -> str:
    """Return node.address or, if unset, the local address of the route to the coordinator. Send no packet.

    Raises:
        ConfigError: the coordinator's host cannot be looked up, or has no route.
    """
    if config.node.address:
        return config.node.address
    endpoint = urlsplit(config.coordinator_endpoints[0])
    if endpoint.scheme != "tcp" or endpoint.hostname in (None, "*", "0.0.0.0", "::"):
        return "127.0.0.1"
    try:
        family, kind, _, _, there = socket.getaddrinfo(endpoint.hostname, endpoint.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as exc:  # UnicodeError: the name has an empty or too long label
        raise ConfigError(
            f"coordinator.endpoint {config.coordinator_endpoint}: no address of this node leads there: {exc}; check "
            "the endpoint, or set node.address"
        ) from exc
