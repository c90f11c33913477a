"""An engine that ends right after a commit, in a chosen way.

    python -m tests.support.leaver DIRECTORY

Each line on stdin, "REPLICA WAY VERSION", starts an engine. It is forked, because importing torch takes seconds. It
prints "ready" when it is registered, and its parent prints "gone" when it has ended. An engine whose way is "stopped"
stops the daemon before it commits; the daemon later finds all its messages together.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch

import refitd
from tests.support.names import policy

WAYS = (
    "close",
    "with",
    "target.close",
    "return",
    "sys.exit",
    "os._exit",
    "SIGKILL",
    "SIGTERM",
    "exec",
    "in-callback",
)
WAIT_S = 60.0


def run(directory: str) -> None:
    for line in sys.stdin:
        replica, way, version = line.split()
        if os.fork() == 0:
            engine(directory, replica, way, int(version))
            return
        os.wait()
        print("gone", flush=True)


def engine(directory: str, replica: str, way: str, version: int) -> None:
    client = refitd.connect(directory, name=f"leaver-{way}")
    live = {"w": torch.zeros(64, 64)}
    taken = threading.Event()

    def commit(version: int) -> None:
        target.poll()
        client.close()
        taken.set()

    if way == "in-callback":
        client.control_replica(policy(), replica, commit=commit)
    daemon = client.status().nodes[0].pid
    target = client.register_target(policy(), live, replica=replica)
    print("ready", flush=True)
    if way == "stopped":
        while target.pending is None:
            time.sleep(0.001)
        os.kill(daemon, signal.SIGSTOP)
        assert target.poll() == version
        os._exit(0)
    if way == "in-callback":
        assert taken.wait(WAIT_S)
        assert bool((live["w"] == version).all()) and target.version is None  # it is closed
    else:
        assert target.wait(version, timeout=WAIT_S) == version
    match way:
        case "close":
            client.close()
            os._exit(0)
        case "target.close":
            target.close()
            os._exit(0)
        case "with":
            with client:
                pass
            os._exit(0)
        case "sys.exit":
            sys.exit(0)
        case "os._exit":
            os._exit(0)
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        case "exec":
            os.execv("/bin/true", ["true"])
        case "in-callback":
            os._exit(0)


if __name__ == "__main__":
    run(sys.argv[1])
