"""Real processes in one gloo group: started once, given many functions to run together, watched by deadlines."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START_S = 60.0
GRACE_S = 2.0

# forking a process that has imported torch, and run nothing of it, takes milliseconds; importing takes seconds
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.spmd.preload"])


class PoolFailed(AssertionError):
    """Some process failed or did not answer; the message has each one's traceback."""


@dataclass(frozen=True)
class Failed:
    """What a process answers instead of a result."""

    traceback: str


class Pool:
    """`size` processes; `run` has all of them call one function and returns what each returned."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._directory = Path(tempfile.mkdtemp(prefix="rfspmd"))
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(rank, size, str(self._directory), there), name=f"spmd-{rank}", daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self.is_alive = True
        self._collect(START_S, range(size))

    def run(
        self, function: str, *args: Any, timeout: float = 120.0, ranks: Sequence[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a function, as `start` does, and return the results in order of ranks.

        Raises:
            PoolFailed: a call raised, or did not end in time; the pool is ended.
        """
        self.start(function, *args, ranks=ranks, **kwargs)
        return self._collect(timeout, range(self.size) if ranks is None else ranks)

    def start(self, function: str, *args: Any, ranks: Sequence[int] | None = None, **kwargs: Any) -> None:
        """Have ranks (by default all) call function(world, ...): of tests.spmd.cases, or "module:name" beside it."""
        for rank in range(self.size) if ranks is None else ranks:
            self._pipes[rank].send((function, args, kwargs))

    def kill(self, rank: int) -> None:
        """End one process without warning."""
        self._processes[rank].kill()
        self._processes[rank].join(START_S)

    def close(self) -> None:
        """End every process."""
        if not self.is_alive:
            return
        self.is_alive = False
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(START_S)
            pipe.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _collect(self, timeout: float, ranks: Sequence[int]) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        waiting = {self._pipes[rank]: rank for rank in ranks}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    answers[rank] = Failed("the process has ended")
                if isinstance(answers[rank], Failed):  # the others may be waiting for it
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not waiting and not any(isinstance(answer, Failed) for answer in answers.values()):
            return [answers[rank] for rank in ranks]
        said = {rank: answer.traceback for rank, answer in answers.items() if isinstance(answer, Failed)}
        said |= {rank: f"no answer within {timeout} s; it is at\n{self._stack(rank)}" for rank in waiting.values()}
        self.close()  # who knows where each of them is
        raise PoolFailed("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(said.items())))

    def _stack(self, rank: int) -> str:
        """Have a stuck process write its stack, and read it."""
        path = self._directory / f"stack{rank}"
        before = path.stat().st_size
        pid = self._processes[rank].pid
        if pid is None or not self._processes[rank].is_alive():
            return "(the process has ended)"
        os.kill(pid, _DUMP)
        until = time.monotonic() + 2
        while path.stat().st_size == before and time.monotonic() < until:
            os.sched_yield()
        return path.read_text()


_DUMP = 10  # SIGUSR1


def _serve(rank: int, size: int, directory: str, pipe: Connection) -> None:
    """Join the group, then call what is asked for, for ever."""
    import torch
    import torch.distributed as dist

    with open(f"{directory}/stack{rank}", "w") as stacks:
        faulthandler.register(_DUMP, stacks, all_threads=False)
        try:
            torch.set_num_threads(1)
            store = dist.FileStore(f"{directory}/store", size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
            cases = importlib.import_module("tests.spmd.cases")
            world = cases.World(rank, size)
            pipe.send(None)
        except Exception:
            pipe.send(Failed(traceback.format_exc()))
            return
        while True:
            try:
                function, args, kwargs = pipe.recv()
            except EOFError:
                return
            pipe.send(_answer(function, world, args, kwargs))


def _answer(function: str, world: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        module, _, name = function.rpartition(":")
        return getattr(importlib.import_module(f"tests.spmd.{module or 'cases'}"), name)(world, *args, **kwargs)
    except BaseException:
        return Failed(traceback.format_exc())
