"""Start the swap benchmark's processes, and measure their memory."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from refitd.buffers import arena as memory
from refitd.buffers.capacity import memory_limits
from refitd.testing import Daemon, eventually

ANSWER_S = 180.0
BLOCK_BYTES = 1 << 30


class Process:
    """A member process; `ask` sends a command, `answer` returns its answer."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.swap_member"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        self._send(spec)

    def _send(self, command: dict[str, Any]) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(command).encode() + b"\n")
        self._popen.stdin.flush()

    def ask(self, do: str, **arguments: Any) -> None:
        """Send a command: the name of a method of the member, and its arguments."""
        self._send({"do": do, **arguments})

    def answer(self) -> dict[str, Any]:
        """Return the answer to the oldest command that has not been answered.

        Raises:
            TimeoutError: no answer within ANSWER_S.
            RuntimeError: the command failed, or the process has died.
        """
        assert self._popen.stdout is not None
        if not select.select([self._popen.stdout], [], [], ANSWER_S)[0]:
            raise TimeoutError(f"a benchmark process did not answer within {ANSWER_S:.0f} s")
        answer: dict[str, Any] = json.loads(self._popen.stdout.readline() or '{"error": "it has died"}')
        if "error" in answer:
            raise RuntimeError(f"a benchmark process failed: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process."""
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()


def daemon(config: str = "", **options: Any) -> Daemon:
    """Start a daemon with the default configuration and two workers; `options` are passed to Daemon."""
    environment = {"REFITD_LOG__LEVEL": "warning", **options.pop("environment", {})}
    return Daemon(config, workers=2, environment=environment, **options).start()


def daemons(nodes: int, *, verify: bool = True, service: str = "gloo") -> list[Daemon]:
    """Start a daemon with a coordinator and, for two nodes, a second daemon that joins it; options as in a case."""
    transport = f'[transport]\nservice = "{service}"\n'
    first = daemon(f"{transport}[models.bench]\nverify = {str(verify).lower()}\n")
    if nodes == 1:
        return [first]
    found = [first, daemon(name="n1", joins=first.endpoint)]
    with first.connect() as client:
        eventually(lambda: len(client.status().nodes) == nodes, "the second daemon has joined", ANSWER_S)
    return found


class Memcpy:
    """The unit: one thread copying between two prefaulted shared mappings, in blocks of at most 1 GiB."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        fds = [memory.create(block_bytes, "bench") for _ in range(2)]
        self._a, self._b = (memory.MappedArena(fd, block_bytes, write=True) for fd in fds)
        for fd in fds:
            os.close(fd)
        self._a.bytes[:] = 1
        self._block = block_bytes

    def seconds(self, nbytes: int) -> float:
        """Return the seconds that copying `nbytes` takes now."""
        started = time.perf_counter()
        for first in range(0, nbytes, self._block):
            size = min(self._block, nbytes - first)
            np.copyto(self._b.bytes[:size], self._a.bytes[:size])
        return time.perf_counter() - started


def anonymous_bytes(pid: int) -> int:
    """Return the private memory of a process: neither files nor arenas."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no RssAnon; the kernel is older than 4.5")


def available_bytes() -> int:
    """Return the memory left under the tightest limit."""
    return memory_limits()[0].left
