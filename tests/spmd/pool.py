"""Real processes in one gloo group: started once, given many functions to run together, watched by deadlines."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from refitd.testing.actors import Actors, Mailroom


class Pool:
    """`size` processes; `run` has all of them call one function and returns what each returned."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._directory = tempfile.mkdtemp(prefix="rfspmd")
        self._actors = Actors(partial(Rank, size, self._directory), size)

    @property
    def is_alive(self) -> bool:
        """Return whether no call has failed or hung."""
        return self._actors.is_alive

    def run(
        self, function: str, *args: Any, timeout: float = 120.0, ranks: Sequence[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a function, as `start` does, and return the results in order of ranks.

        Raises:
            ActorFailed: a call raised, or did not end in time; the pool is ended.
        """
        self.start(function, *args, ranks=ranks, **kwargs)
        return self.collect(timeout, range(self.size) if ranks is None else ranks)

    def agreed(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function as `run` does; check that all ranks return equal values, and return the value."""
        first, *others = self.run(function, *args, **kwargs)
        assert all(each == first for each in others), (first, others)
        return first

    def start(self, function: str, *args: Any, ranks: Sequence[int] | None = None, **kwargs: Any) -> None:
        """Have ranks (by default all) call function(world, ...): of tests.spmd.cases, or "module:name" beside it."""
        for rank in range(self.size) if ranks is None else ranks:
            self._actors.tell(rank, "call", function, *args, **kwargs)

    def kill(self, rank: int) -> None:
        """End one process without warning."""
        self._actors.kill(rank)

    def close(self) -> None:
        """End every process."""
        self._actors.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def collect(self, timeout: float, ranks: Sequence[int]) -> list[Any]:
        """Return the results of what was started, in this order; raise as `run` does."""
        answers = self._actors.collect(ranks, timeout)
        return [answers[rank] for rank in ranks]


class Rank:
    """One process: a rank of the group that runs the requested functions."""

    def __init__(self, size: int, directory: str, rank: int, room: Mailroom) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.FileStore(f"{directory}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        self._world = importlib.import_module("tests.spmd.cases").World(rank, size)

    def call(self, function: str, *args: Any, **kwargs: Any) -> Any:
        """See Pool.start."""
        module, _, name = function.rpartition(":")
        return getattr(importlib.import_module(f"tests.spmd.{module or 'cases'}"), name)(self._world, *args, **kwargs)
