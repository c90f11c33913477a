"""A trainer and its engines, each a process, connected by one of refitd's adapters and driven as by its framework."""

from __future__ import annotations

import signal
from typing import Any

from refitd.testing import Daemon, eventually
from refitd.testing.actors import Actors
from refitd.testing.daemon import free_port
from tests.support.adapter_ranks import Host, values
from tests.support.engine_stand_ins import write_checkpoint

ANSWER_S = 90.0
TRAINER, WALKER = "trainer", "walker"  # a walker is a trainer rank that only takes part in collectives


class Failed(Exception):
    """Some ranks have raised: `by` has the error text by rank."""

    def __init__(self, by: dict[str, str]) -> None:
        super().__init__("\n".join(f"{name}: {text}" for name, text in by.items()))
        self.by = by


class Job:
    """One job: `engines` are names such as "a"; a name returns with a new process after it has left or died.

    Attributes:
        streams: whether the trainer yields tensors one by one.
        closes: whether the framework closes an engine before its process ends.
        ranks: the trainer's ranks.
    """

    streams = False
    closes = True
    ranks: tuple[str, ...] = (TRAINER,)

    def __init__(self, daemon: Daemon, *engines: str) -> None:
        self.daemon, self.engines = daemon, [*engines]
        self.directory, self.checkpoint = str(daemon.directory), write_checkpoint(daemon.folder, values(0))
        self._numbers: dict[str, int] = {}
        self._ports: dict[str, int] = {}
        self._actors = Actors(Host, 0)
        for name in (*engines, *self.ranks):
            self._start(name)

    # --- what differs between frameworks ----------------------------------------------------------------------

    def update(self, step: int, *, fault: str = "", fails: str = "", dies: str = "") -> None:
        """Make a step's tensors live in all engines.

        Args:
            step: the trainer's step.
            fault: what is wrong with the trainer's stream.
            fails: an engine that cannot take the version.
            dies: an engine, or the trainer, that is killed before or during the update.

        Raises:
            Failed: some ranks have raised.
        """
        raise NotImplementedError

    def become(self, name: str) -> tuple[Any, ...]:
        """Return the class in tests/support/adapter_ranks.py of a rank, and its arguments."""
        raise NotImplementedError

    def regroup(self) -> None:
        """Do what the framework does after engines have joined or left."""

    def repair(self) -> None:
        """Do what the framework does after ranks have died, or have lost their daemon."""

    # --- processes ----------------------------------------------------------------------------------------------

    def port(self, name: str) -> int:
        """Return an engine's port, the same for its later processes."""
        return self._ports.setdefault(name, free_port())

    def servers(self) -> list[str]:
        return [f"http://127.0.0.1:{self.port(name)}" for name in self.engines]

    def _start(self, name: str) -> None:
        if name in self._numbers:
            self.kill(name)
            self._actors.replace(self._numbers[name])
        else:
            self._numbers[name] = len(self._numbers)
            self._actors.start(self._numbers[name])
            self._actors.collect([self._numbers[name]], ANSWER_S)
        self._become(name)

    def _become(self, name: str) -> None:
        self._actors.ask(self._numbers[name], "become", *self.become(name), timeout=ANSWER_S)

    def tell(self, name: str, method: str, *given: Any, **named: Any) -> None:
        self._actors.tell(self._numbers[name], "call", method, *given, **named)

    def answers(self, *names: str) -> dict[str, Any]:
        """Return one answer of each rank; raise Failed if some have raised."""
        found = self._actors.collect([self._numbers[name] for name in names], ANSWER_S)
        said = {name: found[self._numbers[name]] for name in names}
        if failed := {name: error for name, (_, error) in said.items() if error}:
            raise Failed(failed)
        return {name: value for name, (value, _) in said.items()}

    def ask(self, name: str, method: str, *given: Any, **named: Any) -> Any:
        self.tell(name, method, *given, **named)
        return self.answers(name)[name]

    def kill(self, *names: str) -> None:
        for name in names:
            self._actors.kill(self._numbers[name])

    def stop(self, name: str) -> None:
        """Stop a process (SIGSTOP); it can still be killed."""
        self._actors.signal(self._numbers[name], signal.SIGSTOP)

    # --- what tests do with any of them -------------------------------------------------------------------------

    def join(self, name: str) -> None:
        """Add an engine, whose process starts with the checkpoint."""
        self.engines.append(name)
        self._start(name)
        self.regroup()

    def leave(self, name: str) -> None:
        """Close an engine, and do not update it afterwards."""
        self.engines.remove(name)
        self.end(name)
        self.regroup()

    def replace(self, *names: str) -> None:
        """Start processes that have been killed."""
        for name in names:
            self._start(name)
        self.repair()

    def holding(self, step: int) -> list[str]:
        """Return the engines that have exactly a step's tensors."""
        return [name for name in self.engines if self.ask(name, "holds", step)]

    def registered(self) -> int:
        """Return the number of the model's replicas."""
        return sum(len(model.targets) for model in self.daemon.status().models if model.model == "policy")

    def late(self) -> list[str]:
        """Return the replicas that have a version to commit."""
        return [
            target.replica
            for model in self.daemon.status().models
            for target in model.targets
            if model.model == "policy" and target.staged is not None
        ]

    def live(self) -> int:
        (found,) = [model.live for model in self.daemon.status().models if model.model == "policy"]
        return -1 if found is None else found

    def end(self, name: str) -> None:
        """Close a rank, twice."""
        if name in self.ranks or self.closes:
            for _ in range(2):
                self.ask(name, "close")
        else:
            self.kill(name)

    def close(self) -> None:
        for name in (*self.ranks, *self.engines):
            self.end(name)

    def kill_all(self) -> None:
        self._actors.close()


class Streaming(Job):
    """Both sides are workers of the framework, which calls all of them concurrently."""

    streams = True
    ranks = TRAINER, WALKER

    def begin(self) -> None:
        """Do what the framework does before each update."""

    def update(self, step: int, *, fault: str = "", fails: str = "", dies: str = "") -> None:
        self.begin()
        gone = self.ranks if dies == TRAINER else (dies,)
        if dies:
            fault = "dies" if dies == TRAINER else "slow"
        for rank in self.ranks:
            self.tell(rank, "send", step, fault)
        for name in self.engines:
            self.tell(name, "receive", step, "raises" if name == fails else "")
        if dies in self.engines:
            self.kill(dies)
        self.answers(*(name for name in (*self.ranks, *self.engines) if name not in gone))


class VerlJob(Streaming):
    def become(self, name: str) -> tuple[Any, ...]:
        role = {TRAINER: "master", WALKER: "walker"}.get(name, "rollout")
        return "Verl", self.directory, role

    def begin(self) -> None:
        names = [*self.ranks, *self.engines]
        for name in names:
            self.tell(name, "prepare")
        metadata = [*self.answers(*names).values()]
        built = self.ask(TRAINER, "build", len(self.ranks), len(self.engines), metadata)
        for members, given in zip((self.ranks, self.engines), built, strict=True):
            for i, name in enumerate(members):
                self.tell(name, "init", {key: value[i] for key, value in given.items()})
        self.answers(*names)

    def update(self, step: int, *, fault: str = "", fails: str = "", dies: str = "") -> None:
        super().update(step, fault=fault, fails=fails, dies=dies)
        for name in (*self.ranks, *self.engines):
            self.ask(name, "finalize")


class NemoRlJob(Streaming):
    def __init__(self, daemon: Daemon, *engines: str) -> None:
        super().__init__(daemon, *engines)
        self.regroup()

    def become(self, name: str) -> tuple[Any, ...]:
        return "NemoRl", self.directory

    def begin(self) -> None:
        """Return: NeMo-RL prepares its ranks once."""

    def repair(self) -> None:
        self.regroup()

    def regroup(self) -> None:
        names = [*self.ranks, *self.engines]
        for name in names:
            self.ask(name, "close")
        for name in names:
            self.tell(name, "prepare")
        topology = {
            "metadata": [*self.answers(*names).values()],
            "train_world_size": len(self.ranks),
            "rollout_world_size": len(self.engines),
        }
        for rank, name in enumerate(self.ranks):
            self.tell(name, "join", worker_rank=rank, **topology)
        for rank, name in enumerate(self.engines):
            self.tell(name, "join", rollout_rank=rank, **topology)
        self.answers(*names)


class Driving(Job):
    """The trainer calls its engines, which are servers."""

    trainer = ""

    def become(self, name: str) -> tuple[Any, ...]:
        if name == TRAINER:
            return self.trainer, self.directory, self.servers()
        return "VllmEngine", self.directory, name, self.port(name)

    def regroup(self) -> None:
        """Connect the trainer again, to the present servers."""
        self.end(TRAINER)
        self._become(TRAINER)

    def update(self, step: int, *, fault: str = "", fails: str = "", dies: str = "") -> None:
        if dies:
            self.kill(dies)
        if dies == TRAINER:
            return
        if fails:
            self.ask(fails, "fail_once")
        try:
            self.ask(TRAINER, "send", step, fault)
        finally:
            if fails:
                self.ask(fails, "recover")


class TrlJob(Driving):
    trainer = "TrlTrainer"
    streams = True


class VllmJob(Driving):
    trainer = "VllmTrainer"


class SglangJob(Driving):
    closes = False

    def become(self, name: str) -> tuple[Any, ...]:
        if name == TRAINER:
            return "Trainer", self.directory, self.servers(), self.checkpoint
        return "SglangEngine", self.directory, name, self.port(name), self.checkpoint


class FollowingVllmJob(Driving):
    """The engines find the trainer, and take its versions by themselves."""

    def become(self, name: str) -> tuple[Any, ...]:
        if name == TRAINER:
            return "Trainer", self.directory, [], ""
        return "VllmEngine", self.directory, name, 0

    def regroup(self) -> None:
        """Return: neither side knows the other."""

    def update(self, step: int, *, fault: str = "", fails: str = "", dies: str = "") -> None:
        eventually(lambda: self.registered() == len(self.engines), "all engines have registered")
        eventually(lambda: not self.late(), "engines have committed what was decided before")
        super().update(step, fault=fault, fails=fails, dies=dies)


class FollowingSglangJob(FollowingVllmJob):
    closes = False

    def become(self, name: str) -> tuple[Any, ...]:
        if name == TRAINER:
            return super().become(name)
        return "SglangEngine", self.directory, name, 0, self.checkpoint


ADAPTERS: dict[str, type[Job]] = {
    "verl": VerlJob,
    "nemo-rl": NemoRlJob,
    "trl": TrlJob,
    "vllm": VllmJob,
    "vllm-follows": FollowingVllmJob,
    "sglang": SglangJob,
    "sglang-follows": FollowingSglangJob,
}
