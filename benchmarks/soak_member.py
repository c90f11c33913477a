"""A process of the soak: a trainer that publishes when told, or a replica that checks all it serves, all the time.

    python -m benchmarks.soak_member trainer DIRECTORY
    python -m benchmarks.soak_member engine DIRECTORY REPLICA WAY      WAY: private, arena or asked

Every element of every tensor of version 7 is 7: what is torn shows in any read. Events are lines of JSON on stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

import refitd
from refitd import ParameterMetadata

MODEL = "soak"
TENSORS, ROWS, COLUMNS = 6, 256, 512  # of 64-bit integers: 6 MB in all
RANKS = 2  # of the trainer and of every replica
RETRY_S = 0.1


def emit(event: str, **fields: Any) -> None:
    """Tell the driver; nobody reads when it is gone, and then this process ends."""
    try:
        print(json.dumps({"event": event, "at": time.time(), **fields}), flush=True)
    except OSError:
        os._exit(0)


def commands() -> Iterator[dict[str, Any]]:
    """Yield what the driver says; the process ends with it."""
    for line in sys.stdin:
        yield json.loads(line)
    os._exit(0)


def shard(rank: int, dim: int, *, zeros: Any = torch.zeros) -> tuple[dict[str, torch.Tensor], list[ParameterMetadata]]:
    """Return one rank's tensors, cut along `dim`, and their descriptions."""
    shape = [ROWS, COLUMNS]
    shape[dim] //= RANKS
    tensors = {f"layer.{i}": zeros(tuple(shape), dtype=torch.int64) for i in range(TENSORS)}
    metadata = [
        ParameterMetadata(
            name=name,
            shape=tuple(shape),
            dtype=torch.int64,
            element_size=8,
            is_tp=True,
            partition_dim=dim,
            owner_rank=rank,
            tensor_parallel_group_ranks=list(range(RANKS)),
        )
        for name in tensors
    ]
    return tensors, metadata


def trainer(directory: str) -> None:
    """Publish the versions that the driver names; register again when the daemon has gone."""
    held = [shard(rank, dim=1) for rank in range(RANKS)]
    client: refitd.Client | None = None
    sources: list[Any] = []
    for command in commands():
        version, until = command["version"], time.monotonic() + command["timeout_s"]
        while True:
            try:
                if client is None:
                    client = refitd.connect(directory, name="soak trainer", timeout=5)
                    sources = [
                        client.register_source(MODEL, tensors, rank=r, world_size=RANKS, metadata=metadata, timeout=10)
                        for r, (tensors, metadata) in enumerate(held)
                    ]
                for source, (tensors, _) in zip(sources, held, strict=True):
                    for tensor in tensors.values():
                        tensor.fill_(version)
                    source.publish(version)
                emit("published", version=version)
                if command.get("last"):
                    for source in sources:
                        source.close()
                    client.close()
                    emit("closed")
                break
            except refitd.RefitdError as exc:
                if time.monotonic() > until:
                    emit("unpublished", version=version, reason=f"{type(exc).__name__}: {exc}")
                    break
                if client is not None:
                    client.close()
                    client = None
                time.sleep(RETRY_S)


class Engine:
    """One replica: both ranks in this process, polled together unless they are asked."""

    def __init__(self, directory: str, replica: str, way: str) -> None:
        self._directory, self._replica, self._way = directory, replica, way
        self._client: refitd.Client | None = None
        self._targets: list[Any] = []
        self._shards: list[dict[str, torch.Tensor]] = []
        self._standing = threading.Lock()  # held by whoever reads the tensors, and while the stub writes them
        self.reads = self.fenced = self.torn = 0
        self._said: int | None = -1
        self.ends = False

    def _register(self) -> None:
        self._client = refitd.connect(self._directory, name=f"soak {self._replica}", timeout=5)
        self._shards, self._targets = [], []
        for rank in range(RANKS):
            tensors, metadata = shard(rank, dim=0)
            if self._way == "arena":
                shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
                tensors = self._client.allocate(shapes, timeout=10)
            asked: dict[str, Any] = {}
            if self._way == "asked":
                paused = threading.Event()
                asked["on_pause"] = lambda _, e=paused: self._pause(e)
                asked["on_resume"] = lambda _, e=paused: self._go_on(e)
            self._shards.append(tensors)
            self._targets.append(
                self._client.register_target(
                    MODEL,
                    tensors,
                    replica=self._replica,
                    rank=rank,
                    world_size=RANKS,
                    metadata=metadata,
                    timeout=10,
                    **asked,
                )
            )

    # ranks that are asked stand still one by one: reading needs all of them to be moving
    _pausing = 0

    def _pause(self, mine: threading.Event) -> None:
        if not mine.is_set():
            mine.set()
            with self._standing:
                self._pausing += 1

    def _go_on(self, mine: threading.Event) -> None:
        if mine.is_set():
            mine.clear()
            with self._standing:
                self._pausing -= 1

    def step(self) -> None:
        """Reach a commit point, then read everything."""
        if self._client is None:
            self._register()
            with self._standing:
                self._pausing = 0
        if self._way != "asked":
            pending = [-1 if target.pending is None else target.pending for target in self._targets]
            agreed = min(pending) if min(pending) == max(pending) else -1
            for target in self._targets:
                target.poll(lambda _, agreed=agreed: agreed)
        for target in self._targets:
            if target.error is not None:
                raise target.error
        with self._standing:
            if not self._pausing:
                self._read()

    def _read(self) -> None:
        versions = [target.version for target in self._targets]
        if len(set(versions)) > 1:
            # one rank could not follow: the replica serves nothing until both can
            self._say(None)
            self.fenced += 1
            return
        version = versions[0]
        self._say(version)
        if version is None:
            self.fenced += 1
            return
        self.reads += 1
        for rank, tensors in enumerate(self._shards):
            for name, tensor in tensors.items():
                low, high = torch.aminmax(tensor)
                if not int(low) == int(high) == version:
                    self.torn += 1
                    emit("torn", rank=rank, tensor=name, low=int(low), high=int(high), version=version)

    def _say(self, version: int | None) -> None:
        if version != self._said:
            self._said = version
            emit("serves", version=version)

    def lose(self) -> None:
        """Let go of everything; the next step registers again."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self._targets = []
        self._say(None)


def engine(directory: str, replica: str, way: str) -> None:
    """Poll and read until the driver ends it."""
    found = Engine(directory, replica, way)

    def obey() -> None:
        for _ in commands():
            found.ends = True

    threading.Thread(target=obey, daemon=True).start()
    told = time.monotonic()
    while not found.ends:
        try:
            found.step()
            time.sleep(0.002)
        except refitd.RefitdError as exc:
            emit("lost", reason=f"{type(exc).__name__}: {exc}"[:300])
            found.lose()
            time.sleep(RETRY_S)
        if time.monotonic() - told > 1.0:
            told = time.monotonic()
            emit("reads", reads=found.reads, fenced=found.fenced, torn=found.torn)
    emit("reads", reads=found.reads, fenced=found.fenced, torn=found.torn)
    with contextlib.suppress(refitd.RefitdError):
        found.lose()
    emit("closed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "trainer":
        trainer(sys.argv[2])
    else:
        engine(*sys.argv[2:5])
