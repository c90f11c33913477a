"""How a worker ended is told once it has exited; the daemon's loop waits for no exit."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from refitd.daemon import workers
from refitd.testing import eventually

# the socket is closed long before the exit, as with libraries that are slow to unload
SLOW = "import os, sys, time; os.close(int(sys.argv[1])); time.sleep({sleep}); os._exit(7)"


@pytest.mark.parametrize(
    ("sleep", "limit_s", "how"), [(0.5, 60.0, "exited with status 7"), (60, 0.2, "was killed by SIGKILL")]
)
def test_a_worker_that_exits_slowly_has_its_own_status_or_is_killed(
    monkeypatch: pytest.MonkeyPatch, sleep: float, limit_s: float, how: str
) -> None:
    popen = subprocess.Popen

    def starts(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return popen([sys.executable, "-c", SLOW.format(sleep=sleep), *command[3:]], **options)

    monkeypatch.setattr(workers.subprocess, "Popen", starts)
    monkeypatch.setattr(workers, "_EXIT_S", limit_s)
    polled: dict[int, int] = {}
    found = workers.Workers([workers.Kit()], lambda fd, events: polled.update({fd: events}))
    try:
        said: list[Any] = []

        def receives() -> bool:
            found.start_due(time.monotonic())
            said.append(found.receive(0))
            return isinstance(said[-1], str)

        eventually(receives, "its end is told")
        assert said[-1] == how and [] in said[:-1], "it was told before the exit, or its exit was waited for"
        assert {fd for fd, events in polled.items() if events} == {*found.fds}
    finally:
        monkeypatch.undo()
        found.close()
