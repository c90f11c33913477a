"""An engine behind a server: python -m tests.support.orphan DIRECTORY DEPTH [PID ...]

With DEPTH, it starts the same program with one less and its own pid; with 0 it registers as replica a, lives with all
of these processes, and polls. It prints its pid once it has registered; then one line per version that it serves, and
the class of the error that ended it, with the version that it then serves.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import refitd
from tests.support.names import policy


def run(directory: str, depth: int, pids: list[int]) -> None:
    if depth:
        command = [sys.executable, "-m", "tests.support.orphan", directory, str(depth - 1), *map(str, pids)]
        subprocess.Popen([*command, str(os.getpid())]).wait()
        return
    import torch  # here, because a server does not need it

    lives_with = refitd.Lifeline({pid: f"server {number}" for number, pid in enumerate(pids)}) if pids else None
    client = refitd.connect(directory, name="orphan", lives_with=lives_with)
    target = client.register_target(policy(), {"w": torch.zeros(64, 64)}, replica="a")
    print(os.getpid(), flush=True)
    try:
        while True:
            if (version := target.poll()) is not None:
                print(f"serves {version}", flush=True)
            time.sleep(0.002)
    except refitd.RefitdError as exc:
        print(type(exc).__name__, target.version, type(target.error).__name__, flush=True)
    try:
        target.wait(99, timeout=60)
    except refitd.RefitdError as exc:
        print(type(exc).__name__, flush=True)
    try:
        client.status()
    except refitd.RefitdError as exc:
        print(type(exc).__name__, flush=True)
    time.sleep(600)  # an orphan stays until a test ends it


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), [int(pid) for pid in sys.argv[3:]])
