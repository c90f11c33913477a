"""A process with an engine that flips and reports what it serves, and the class that starts and kills it.

    python -m tests.support.flip_engine DIRECTORY TIMEOUT [WORD]

On SIGUSR1 it writes one element of its live tensors, which only swaps may write. The words:

    dies      end while a predecessor's version is restored
    sleeps    suspend after the first commit, and discard the tensors
    wakes     do that, and resume without the contents
    torn      end in the copy of version 2, because the kernel does not exchange
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import refitd
from refitd.client.take_over import ArenaPair
from refitd.testing import Daemon
from tests.support.fleet import FilledFleet
from tests.support.flips import SHAPES, Tensors, values, version
from tests.support.names import policy
from tests.support.programs import Program


class FlipEngine:
    """The engine's successive processes."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._now: Program | None = None

    def start(self, word: str = "", timeout: float = 20.0) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.support.flip_engine", str(self._daemon.directory), str(timeout), word]
        self._now = Program(command, stderr=subprocess.PIPE)
        return self._now.process

    def said(self) -> str:
        """Return its next line: what it did, the version, and the values in its tensors."""
        assert self._now is not None
        return self._now.line()

    def damage(self) -> None:
        assert self._now is not None
        os.kill(self._now.pid, signal.SIGUSR1)
        assert self.said() == "damaged"

    def kill(self) -> str:
        """End the process; return its log."""
        if self._now is None:
            return ""
        process, self._now = self._now.process, None
        process.kill()
        return process.communicate()[1]


class Trainer(FilledFleet):
    """A source whose replica is another process."""

    def __init__(self, client: refitd.Client) -> None:
        super().__init__(client, version(0))
        self.verify = lambda: client.verify(policy()).outcome


@contextmanager
def served(daemon: Daemon, swaps: int = 1, word: str = "") -> Iterator[tuple[Trainer, FlipEngine]]:
    """A trainer, and an engine in which versions 1 to `swaps` went live; they are verified."""
    engine = FlipEngine(daemon)
    with daemon.connect() as client:
        trainer = Trainer(client)
        engine.start(word)
        try:
            assert engine.said() == "registered None [0.0]"
            for number in range(1, swaps + 1):
                trainer.swap(number)
                assert engine.said() == f"committed {number} [{float(number)}]"
            yield trainer, engine
        finally:
            engine.kill()


def main(directory: str, timeout: str, word: str = "") -> None:
    """Serve until the process is killed."""
    if word == "dies":
        ArenaPair.restore = lambda *_: os._exit(9)  # type: ignore[method-assign]
    client = refitd.connect(directory)
    live: Tensors = client.allocate(SHAPES)

    def say(what: str, number: int | None) -> None:
        print(what, number, sorted(values(live)), flush=True)

    def tear(pair: ArenaPair) -> None:
        """End this process when a third of the bytes are copied."""
        address, nbytes = pair.staging
        ctypes.memmove(min(t.data_ptr() for t in live.values() if t.numel()), address, nbytes // 3)
        os._exit(9)

    def damage(*_: object) -> None:
        live["w"][5, 7] = -1
        print("damaged", flush=True)

    signal.signal(signal.SIGUSR1, damage)
    target = client.register_target(policy(), live, replica="a", timeout=float(timeout), mode="flip")
    say("registered", target.version)
    while True:
        if word == "torn" and target.pending == 2:
            ArenaPair.flip = tear  # type: ignore[method-assign]
        if (number := target.poll()) is not None:
            say("committed", number)
            if word in ("sleeps", "wakes"):
                target.suspend()
                for tensor in live.values():
                    tensor.fill_(77)
                if word == "wakes":
                    target.resume(kept=False)
                say("asleep", number)
                time.sleep(60)
        time.sleep(0.002)


if __name__ == "__main__":
    main(*sys.argv[1:])
