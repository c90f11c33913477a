"""A job as NeMo-RL runs one: a driver that calls checkpoint engines in processes of their own, on both sides at once.

NeMo-RL itself needs Ray, CUDA and Python 3.13. What the driver does is what its `CheckpointEngineWeightSynchronizer`
does, and `CheckpointEngine` has the methods of its base class (commit 7ea279a, `nemo_rl/utils/checkpoint_engines`).
"""

from __future__ import annotations

import queue
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Mapping
from pathlib import Path
from typing import Any

import torch

from refitd.testing import Daemon
from tests.support.breakable import Event, Member

REPLY_S = 90.0


class CheckpointEngine(ABC):
    """What NeMo-RL calls: on the policy side, on the generation side, or on both."""

    shard_expert_weights: bool = False

    def get_target_weight_layout(self) -> dict[str, Any] | None:
        return None

    @abstractmethod
    def prepare(self) -> Any: ...

    @abstractmethod
    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    @abstractmethod
    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    def finalize(self) -> None:
        return

    @abstractmethod
    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None: ...

    @abstractmethod
    def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]: ...


class Failed(Exception):
    """Some ranks have raised: `by` says which, and what."""

    def __init__(self, by: Mapping[str, str]) -> None:
        super().__init__("\n".join(f"{rank}: {text}" for rank, text in by.items()))
        self.by = dict(by)


class Job:
    """Policy ranks p0, p1, ... and generation ranks g0, g1, ...: what the driver holds."""

    def __init__(self, daemon: Daemon, folder: Path, policy: int = 2, generation: int = 2, **settings: Any) -> None:
        self._folder = folder
        self._said: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._settings = {"directory": str(daemon.directory), "timeout_s": 60.0, **settings}
        self.policy = [f"p{rank}" for rank in range(policy)]
        self.generation = [f"g{rank}" for rank in range(generation)]
        self.members = {name: self._member(name).start() for name in (*self.policy, *self.generation)}

    def _member(self, name: str) -> Member:
        command = [sys.executable, "-m", "tests.support.nemo_rl_rank"]
        return Member(name, command, self._folder / f"{name}.log", said=self._said.put)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for name, member in self.members.items():
            member.kill()
            print(f"--- log of {name}\n{member.log()[-3000:]}")

    def kill(self, *names: str) -> None:
        for name in names:
            self.members[name].kill()

    def restart(self, *names: str) -> None:
        """Replace processes, as Ray replaces actors; none: those that have died."""
        for name in names or [n for n, member in self.members.items() if not member.is_running]:
            self.members[name].kill()
            self.members[name].start()

    def ask(self, **commands: dict[str, Any]) -> dict[str, Any]:
        """Tell each rank its command at the same time; return what each has answered.

        Raises:
            Failed: some have raised.
        """
        found: dict[str, Any] = {}
        failed = {}
        for name, command in commands.items():
            self.members[name].tell(**command)
        while len(found) + len(failed) < len(commands):
            try:
                _, name, answer = self._said.get(timeout=REPLY_S)
            except queue.Empty:
                raise AssertionError(f"no answer from {commands.keys() - found.keys() - failed.keys()}") from None
            if "error" in answer:
                failed[name] = answer["error"]
            else:
                found[name] = answer["result"]
        if failed:
            raise Failed(failed)
        return found

    def prepare(self) -> None:
        """Make every rank ready, as the driver does before the first refit and after a `finalize`."""
        ranks = [*self.policy, *self.generation]
        self.ask(**{name: {"do": "init", "settings": self._settings} for name in ranks})
        metadata = self.ask(**{name: {"do": "prepare"} for name in ranks})
        topology = {
            "metadata": [metadata[name] for name in ranks],
            "train_world_size": len(self.policy),
            "rollout_world_size": len(self.generation),
        }
        self.ask(
            **{n: {"do": "join_policy", "worker_rank": rank, **topology} for rank, n in enumerate(self.policy)},
            **{n: {"do": "join_rollout", "rollout_rank": rank, **topology} for rank, n in enumerate(self.generation)},
        )

    def refit(self, step: int, *, without: str = "", tensors: int = 0, **wrong: str) -> dict[str, Any]:
        """Refit all ranks that live, but one; only some tensors; `wrong` says what is wrong with a rank.

        Return what generation ranks have loaded.
        """
        names = [n for n in (*self.policy, *self.generation) if self.members[n].is_running and n != without]
        side = {name: "send" if name in self.policy else "receive" for name in names}
        answers = self.ask(
            **{n: {"do": side[n], "step": step, "tensors": tensors, "wrong": wrong.get(n, "")} for n in names}
        )
        return {name: answers[name] for name in names if name in self.generation}

    def finalize(self) -> None:
        self.ask(**{name: {"do": "finalize"} for name in (*self.policy, *self.generation)})
