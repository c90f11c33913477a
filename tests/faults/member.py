"""A process of the fault matrix: a trainer that publishes when told, or a replica that reads all the time.

    python -m tests.faults.member trainer DIRECTORY
    python -m tests.faults.member engine DIRECTORY REPLICA WAY      WAY: polls or asked

Every element of version 7 is 7, so that any read shows what is torn. Events are lines of JSON on stdout.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

import refitd

MODEL = "faults"
TENSORS, ROWS, COLUMNS = 4, 256, 512  # of 64-bit integers: 4 MiB in all
BEAT_S = 0.25
RETRY_S = 0.1


def emit(event: str, **fields: Any) -> None:
    """Tell the driver; nobody reads when it is gone, and then this process ends."""
    try:
        os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")  # one call: several threads tell
    except OSError:
        os._exit(0)


def commands() -> Iterator[dict[str, Any]]:
    """Yield what the driver says; the process ends with it."""
    for line in sys.stdin:
        yield json.loads(line)
    os._exit(0)


def tensors() -> dict[str, torch.Tensor]:
    return {f"layer.{i}": torch.zeros((ROWS, COLUMNS), dtype=torch.int64) for i in range(TENSORS)}


class Trainer:
    """Registered all the time; publishes the versions that it is told."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._held = tensors()
        self._client: refitd.Client | None = None
        self._source: Any = None

    def register(self) -> None:
        if self._client is None:
            client = refitd.connect(self._directory, name="trainer", timeout=3)
            try:
                self._source = client.register_source(MODEL, self._held, timeout=3)
            except BaseException:
                client.close()
                raise
            self._client = client

    def publish(self, version: int) -> None:
        self.register()
        for tensor in self._held.values():
            tensor.fill_(version)
        self._source.publish(version, timeout=5)

    def lose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def trainer(directory: str) -> None:
    """Do what the driver says, again and again until it works or `timeout_s` has passed."""
    found = Trainer(directory)
    for command in commands():
        until, version = time.monotonic() + command["timeout_s"], command["version"]
        while True:
            try:
                if version is None:
                    found.register()
                else:
                    found.publish(version)
                emit("published", version=version)
                break
            except refitd.RefitdError as exc:
                # what is held already is published already
                if "is not newer than" in str(exc):
                    emit("published", version=version)
                    break
                if time.monotonic() > until:
                    emit("unpublished", version=version, reason=f"{type(exc).__name__}: {exc}")
                    break
                found.lose()
                time.sleep(RETRY_S)


class Engine:
    """One replica of one rank. `may_commit` is its driver's hand on it."""

    def __init__(self, directory: str, replica: str, way: str) -> None:
        self._directory, self._replica, self._way = directory, replica, way
        self._client: refitd.Client | None = None
        self._target: Any = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._standing = threading.Lock()  # held by whoever reads, and while the engine stands still
        self._stands = False
        self._said: int | None = -1
        self.reads = self.nothing = 0
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.anew = False

    def _register(self) -> None:
        client = refitd.connect(self._directory, name=self._replica, timeout=3)
        try:
            self._tensors = tensors()
            asked: dict[str, Any] = {}
            if self._way == "asked":
                asked = {"on_pause": self._pause, "on_resume": self._go_on}
            self._target = client.register_target(MODEL, self._tensors, replica=self._replica, timeout=3, **asked)
        except BaseException:
            client.close()
            raise
        self._client = client

    def _pause(self, version: int) -> None:
        emit("asked", version=version)
        self.may_commit.wait()
        self._standing.acquire()
        self._stands = True

    def _go_on(self, version: int | None) -> None:
        if self._stands:
            self._stands = False
            self._standing.release()

    def step(self) -> None:
        """Reach a commit point, then read everything."""
        if self.anew:
            self.anew = False
            self.lose()
        if self._client is None:
            self._register()
        if self._way == "polls" and self.may_commit.is_set():
            self._target.poll()
        if self._target.error is not None:
            raise self._target.error
        # an engine that stands still reads nothing, and is alive
        if self._standing.acquire(blocking=False):
            try:
                self._read()
            finally:
                self._standing.release()

    def _read(self) -> None:
        version = self._target.version
        self._say(version)
        if version is None:
            self.nothing += 1
            return
        for name, tensor in self._tensors.items():
            low, high = torch.aminmax(tensor)
            if not int(low) == int(high) == version:
                emit("torn", tensor=name, low=int(low), high=int(high), version=version)
        self.reads += 1

    def _say(self, version: int | None) -> None:
        if version != self._said:
            self._said = version
            emit("serves", version=version)

    def lose(self) -> None:
        """Let go of everything; the next step registers again."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self._go_on(None)
        self._say(None)


def engine(directory: str, replica: str, way: str) -> None:
    """Poll and read until the driver ends it."""
    found = Engine(directory, replica, way)

    def obey() -> None:
        for command in commands():
            match command:
                case {"hold": True}:
                    found.may_commit.clear()
                case {"hold": False}:
                    found.may_commit.set()
                case {"anew": True}:
                    found.anew = True
            emit("obeys", **command)

    threading.Thread(target=obey, daemon=True).start()
    told = 0.0
    while True:
        try:
            found.step()
            time.sleep(0.005)
        except refitd.RefitdError as exc:
            emit("lost", reason=f"{type(exc).__name__}: {exc}"[:300])
            found.lose()
            time.sleep(RETRY_S)
        if time.monotonic() - told > BEAT_S:
            told = time.monotonic()
            emit("reads", reads=found.reads, nothing=found.nothing)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "trainer":
        trainer(sys.argv[2])
    else:
        engine(*sys.argv[2:5])
