"""A process of a cluster: a trainer that publishes when told, or a replica that checks its live version all the time.

    python -m tests.support.breakable_member trainer --directory DIRECTORY [--ranks N]
    python -m tests.support.breakable_member engine --directory DIRECTORY [--ranks N] --replica NAME --way WAY

The ways of a replica:

    polls         has its own tensors
    copies        has tensors in an arena, and copies
    flips         has an arena that is exchanged
    leaves        may leave right after a commit, and registers again
    asked         pauses when asked, and copies during the pause
    flips-asked   pauses when asked, and exchanges arenas
    in-place      pauses when asked, and its live tensors are written
    callback      commits when its controller says so

All ranks of a replica are in this process, and commit together.
Every element of version 7 is 7, so any read shows a mix of versions. Events are lines of JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import refitd
from refitd import ParameterMetadata
from refitd.buffers import mapping
from refitd.client.take_over import ArenaPair

MODEL = "broken"
WAYS = ("polls", "copies", "flips", "leaves", "asked", "flips-asked", "in-place", "callback")
MODES = {"copies": "copy", "flips": "flip", "flips-asked": "flip", "in-place": "in-place"}  # of tensors in arenas
TENSORS, ROWS, COLUMNS = 6, 256, 512  # of 64-bit integers: 6 MiB in all
PATIENCE_S = 5.0  # with a daemon that does not answer
BEAT_S = 0.1
RETRY_S = 0.1
READ_AGAIN_S = 0.02
LEAVES_EVERY = 5  # commits

Tensors = dict[str, torch.Tensor]


def emit(event: str, **fields: Any) -> None:
    """Send an event to the driver; end this process if the driver is gone."""
    try:
        # one write call, because several threads send events
        os.write(1, json.dumps({"event": event, "at": time.time(), **fields}).encode() + b"\n")
    except OSError:
        os._exit(0)


def commands() -> Iterator[dict[str, Any]]:
    """Yield the driver's commands; end this process with the driver."""
    for line in sys.stdin:
        yield json.loads(line)
    os._exit(0)


def shard(rank: int, ranks: int, dim: int) -> tuple[Tensors, list[ParameterMetadata]]:
    """Return one rank's tensors, cut along `dim`, and their descriptions."""
    shape = [ROWS, COLUMNS]
    shape[dim] //= ranks
    tensors = {f"layer.{i}": torch.zeros(tuple(shape), dtype=torch.int64) for i in range(TENSORS)}
    metadata = [
        ParameterMetadata(
            name=name,
            shape=tuple(shape),
            dtype=torch.int64,
            element_size=8,
            is_tp=True,
            partition_dim=dim,
            owner_rank=rank,
            tensor_parallel_group_ranks=list(range(ranks)),
        )
        for name in tensors
    ]
    return tensors, metadata


class Trainer:
    """Publishes versions on command; registers again after the loss of its daemon."""

    def __init__(self, directory: str, ranks: int) -> None:
        self._directory = directory
        self._held = [shard(rank, ranks, dim=1) for rank in range(ranks)]
        self._client: refitd.Client | None = None
        self._sources: list[Any] = []

    def be_there(self) -> None:
        """Register with the running daemon. Without a publish, the loss of the old one would go unnoticed."""
        if self._client is not None:
            self._client.free(self._client.allocate({"any": ((1,), torch.uint8)}, timeout=PATIENCE_S))
        self.register()

    def register(self) -> None:
        if self._client is not None:
            return
        client = refitd.connect(self._directory, name="trainer", timeout=PATIENCE_S, reconnect=False)
        world = {"world_size": len(self._held), "timeout": PATIENCE_S}
        try:
            self._sources = [
                client.register_source(MODEL, tensors, rank=rank, metadata=metadata, **world)
                for rank, (tensors, metadata) in enumerate(self._held)
            ]
        except BaseException:
            client.close()
            raise
        self._client = client

    def publish(self, version: int) -> None:
        self.register()
        for source, (tensors, _) in zip(self._sources, self._held, strict=True):
            for tensor in tensors.values():
                tensor.fill_(version)
            try:
                source.publish(version, timeout=PATIENCE_S)
            except refitd.RefusedError as exc:
                if "is not newer than" not in str(exc):  # a version that is already live was published before
                    raise

    def lose(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def leave(self) -> None:
        for source in self._sources:
            source.close()
        self.lose()

    def run(self) -> None:
        """Execute the driver's commands, retrying each until it succeeds or `timeout_s` has passed."""
        for command in commands():
            until, version = time.monotonic() + command["timeout_s"], command["version"]
            while True:
                try:
                    if version is None:
                        self.be_there()
                    else:
                        self.publish(version)
                    emit("published", version=version)
                    if command.get("last"):
                        self.leave()
                        emit("closed")
                    break
                except refitd.RefitdError as exc:
                    if time.monotonic() > until:
                        emit("unpublished", version=version, reason=f"{type(exc).__name__}: {exc}")
                        break
                    self.lose()
                    time.sleep(RETRY_S)


class Exchanges:
    """Counts this process's exchanges of arenas; on request, waits or ends inside one.

    A point is "half", where one of the two mappings has moved, or "exchanged", before any process is told.
    """

    def __init__(self) -> None:
        self.count = 0
        self.holds_at = self.dies_at = ""
        self.may_go = threading.Event()
        self._is_begun = False
        remap, flip = mapping.remap, ArenaPair.flip

        def stopped(moves: Sequence[mapping.Move], done: list[int]) -> None:
            if self._is_begun:
                remap(moves, done)
                return
            self._is_begun = True
            remap(moves[:1], done)
            self._reach("half")
            remap(moves[1:], done)

        def flipped(pair: ArenaPair) -> None:
            self._is_begun, before = False, pair.exchanges
            flip(pair)
            self.count += pair.exchanges - before
            self._reach("exchanged")

        mapping.remap = stopped
        ArenaPair.flip = flipped  # type: ignore[method-assign]

    def _reach(self, point: str) -> None:
        if self.dies_at == point:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.holds_at == point:
            self.holds_at = ""
            self.may_go.clear()
            emit("holds", point=point)
            self.may_go.wait()


class Engine:
    """One replica. The driver sets `may_commit`, `anew` and `leaves` (end right after the next commit)."""

    def __init__(self, directory: str, ranks: int, replica: str, way: str) -> None:
        self._directory, self._ranks, self._replica, self._way = directory, ranks, replica, way
        self._client: refitd.Client | None = None
        self._targets: list[Any] = []
        self._shards: list[Tensors] = []
        self._reading = threading.Lock()
        self._still: set[int] = set()  # not empty while the controller pauses this replica; reads are then skipped
        self._said: int | None = -1
        self.reads = self.nothing = self.torn = 0
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.anew = self.leaves = self.ends = False
        self._exchanges = Exchanges()
        self._told_pending: int | None = None
        self._commits = self._steps = 0

    @property
    def _polls(self) -> bool:
        return self._way in ("polls", "copies", "flips", "leaves")

    def _register(self) -> None:
        client = refitd.connect(self._directory, name=self._replica, timeout=PATIENCE_S, reconnect=False)
        self._shards, self._targets, self._still = [], [], set()
        try:
            if not self._polls:
                self._control(client, self._targets, self._still)
            for rank in range(self._ranks):
                self._targets.append(self._register_rank(client, rank))
        except BaseException:
            client.close()
            raise
        self._client = client

    def _control(self, client: refitd.Client, targets: list[Any], still: set[int]) -> None:
        def commit(version: int) -> None:
            while len(targets) < self._ranks:  # they are being registered
                time.sleep(0.001)
            if self._way == "callback":
                self.may_commit.wait()
            with self._reading:
                for target in targets:
                    target.poll()

        client.control_replica(
            MODEL,
            self._replica,
            pause=None if self._way == "callback" else lambda version: self._pause(still, version),
            commit=commit,
            resume=lambda version: self._go_on(still, version),
            timeout=PATIENCE_S,
        )

    def _register_rank(self, client: refitd.Client, rank: int) -> Any:
        tensors, metadata = shard(rank, self._ranks, dim=0)
        options: dict[str, Any] = {}
        if mode := MODES.get(self._way):
            wanted = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
            tensors = client.allocate(wanted, timeout=PATIENCE_S)
            options["mode"] = mode
        self._shards.append(tensors)
        return client.register_target(
            MODEL,
            tensors,
            replica=self._replica,
            rank=rank,
            world_size=self._ranks,
            metadata=metadata,
            timeout=PATIENCE_S,
            **options,
        )

    # `still` belongs to one registration: a late call for an earlier one has no effect

    def _pause(self, still: set[int], version: int) -> None:
        emit("asked", version=version)
        self.may_commit.wait()
        with self._reading:
            still.add(0)

    def _go_on(self, still: set[int], version: int | None) -> None:
        with self._reading:
            still.clear()
            if version is None and still is self._still:
                self._say(None)  # however short that is

    def step(self) -> None:
        """Reach a commit point, then read everything."""
        if self.anew:
            self.anew = False
            self.lose()
        if self._client is None:
            self._register()
        if self._polls and not self.may_commit.is_set():
            self._tell_pending()
        elif self._polls:
            self._steps += 1
            taken = [target.poll(step=self._steps) for target in self._targets]
            if any(version is not None for version in taken):
                self._commits += 1
                if self.leaves or (self._way == "leaves" and self._commits % LEAVES_EVERY == 0):
                    self.leaves = False
                    self.lose()
                    return
        for target in self._targets:
            # the next swap repairs a poisoned target; the engine does not act
            if target.error is not None and not (self._way == "in-place" and target.error.code == "commit"):
                # another error: the target's own, once raised, would keep this frame, and that the target's tensors
                raise refitd.TransportError(f"{type(target.error).__name__}: {target.error}")
        with self._reading:
            if not self._still:
                self._read()

    def _tell_pending(self) -> None:
        pending = {target.pending for target in self._targets}
        version = pending.pop() if len(pending) == 1 else None
        if version is not None and version != self._told_pending:
            self._told_pending = version
            emit("asked", version=version)

    def _read(self) -> None:
        versions = {target.version for target in self._targets}
        # if one rank could not catch up, the replica serves no version until all ranks can
        version = versions.pop() if len(versions) == 1 else None
        self._say(version)
        if version is None:
            self.nothing += 1
            return
        for rank, tensors in enumerate(self._shards):
            for name, tensor in tensors.items():
                low, high = torch.aminmax(tensor)
                if not int(low) == int(high) == version:
                    self.torn += 1
                    emit("torn", rank=rank, tensor=name, low=int(low), high=int(high), version=version)
        self.reads += 1

    def _say(self, version: int | None) -> None:
        if version != self._said:
            self._said = version
            emit("serves", version=version)

    def lose(self) -> None:
        """Drop the registration and the client; the next step registers again."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        with self._reading:
            self._still = set()
            self._say(None)

    def _obey(self) -> None:
        for command in commands():
            match command:
                case {"hold": True}:
                    self.may_commit.clear()
                case {"hold": False}:
                    self._exchanges.holds_at = ""
                    self.may_commit.set()
                    self._exchanges.may_go.set()
                case {"holds_at": point}:
                    self._exchanges.holds_at = point
                case {"dies_at": point}:
                    self._exchanges.dies_at = point
                case {"anew": True}:
                    self.anew = True
                case {"leave": True}:
                    self.leaves = True
                case {"last": True}:
                    self.ends = True
            emit("obeys", **command)

    def run(self) -> None:
        """Poll and read until the driver ends it."""
        threading.Thread(target=self._obey, daemon=True).start()
        told = 0.0
        while not self.ends:
            try:
                self.step()
                time.sleep(READ_AGAIN_S)
            except refitd.RefitdError as exc:
                emit("lost", reason=f"{type(exc).__name__}: {exc}"[:300])
                self.lose()
                time.sleep(RETRY_S)
            if time.monotonic() - told > BEAT_S:
                told = time.monotonic()
                self._beat()
        self._beat()
        self.lose()
        emit("closed")

    def _beat(self) -> None:
        looked = time.time()  # before it is asked: a process that is stopped in between asks later
        versions = {target.version for target in self._targets} if self._client is not None else {None}
        # a rank that still serves an older version counts
        oldest = min((version for version in versions if version is not None), default=None)
        counts = {"reads": self.reads, "nothing": self.nothing, "torn": self.torn, "exchanges": self._exchanges.count}
        emit("reads", **counts, looked=looked, oldest=oldest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("trainer", "engine"))
    parser.add_argument("--directory", required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--replica", default="default")
    parser.add_argument("--way", choices=WAYS, default="polls")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.role == "trainer":
        Trainer(options.directory, options.ranks).run()
    else:
        Engine(options.directory, options.ranks, options.replica, options.way).run()


if __name__ == "__main__":
    main()
