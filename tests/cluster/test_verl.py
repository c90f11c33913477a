"""verl's checkpoint engine: a trainer's stream arrives in every rollout worker, or all raise.

Where verl is installed its own base class and registry are used, else the stand-in in tests/support: each test's name
ends in which. scripts/try-verl installs verl and Ray, runs all of this with them, and verl's own manager too.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import refitd
from refitd.testing import Daemon, eventually
from tests.support.verl_worker import MORE, SHAPES, Exported, digest, real_verl, values

ROOT = Path(__file__).parents[2]
VERL = real_verl()
WAIT_S = 60.0
SETTINGS = {"timeout": WAIT_S}

pytestmark = pytest.mark.parametrize("base", [f"verl-{VERL}" if VERL else "stand-in"])


class Worker:
    """A process of tests.support.verl_worker."""

    def __init__(self, daemon: Daemon, role: str) -> None:
        self.role = role
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.verl_worker", str(daemon.directory), role, json.dumps(SETTINGS)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, order: str, *given: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([order, *given]) + "\n")
        self._process.stdin.flush()

    def said(self) -> dict[str, Any]:
        """The answer; {"error": "gone"} if the process has ended. The deadlines of the engine end each wait."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "gone", "text": ""}

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Run:
    """Two trainer ranks and two rollout workers, each a process, that verl's driver would hold."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.all: list[Worker] = []
        self.trainer = [self.worker("master"), self.worker("walker")]
        self.rollout = [self.worker("rollout"), self.worker("rollout")]
        self.ready(*self.all)

    def worker(self, role: str) -> Worker:
        self.all.append(Worker(self.daemon, role))
        return self.all[-1]

    def ready(self, *workers: Worker) -> None:
        for worker in workers:
            assert worker.said() == {"ok": VERL}

    def begin(self) -> None:
        """prepare, build_topology, init_process_group, as verl's manager does before each update."""
        import refitd.adapters.verl as adapter

        workers = [*self.trainer, *self.rollout]
        metadata = [answer["ok"] for answer in each(workers, "prepare")]
        counts = len(self.trainer), len(self.rollout)
        actors, rollouts = adapter.RefitdCheckpointEngine.build_topology(*counts, metadata)
        for given, members in ((actors, self.trainer), (rollouts, self.rollout)):
            for i, worker in enumerate(members):
                worker.ask("init", {key: value[i] for key, value in given.items()})
        assert all(worker.said() == {"ok": None} for worker in workers)

    def send(self, step: int | None, seed: int, how: str = "") -> None:
        for worker in self.trainer:
            worker.ask("send", step, seed, how)
        for worker in self.rollout:
            worker.ask("receive", step)

    def update(self, step: int | None, seed: int, how: str = "") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The answers of the trainer and of the rollout to one update."""
        self.begin()
        self.send(step, seed, how)
        return [worker.said() for worker in self.trainer], [worker.said() for worker in self.rollout]

    def updated(self, step: int | None, seed: int, shapes: dict[str, Any] = SHAPES) -> int:
        """Update, check every byte, and return the version."""
        sent, received = self.update(step, seed, "other" if shapes is MORE else "")
        assert [one["ok"]["walked"] for one in sent] == [len(SHAPES)] * len(self.trainer), sent
        assert received == [{"ok": digest(values(seed, shapes))}] * len(self.rollout)
        workers = [*self.trainer, *self.rollout]
        assert each(workers, "finalize") == [{"ok": None}] * len(workers)
        return int(sent[0]["ok"]["refitd/version"])

    def close(self) -> None:
        for worker in self.all:
            worker.kill()


def each(workers: list[Worker], order: str, *given: Any) -> list[dict[str, Any]]:
    for worker in workers:
        worker.ask(order, *given)
    return [worker.said() for worker in workers]


@pytest.fixture
def run(daemon: Daemon) -> Iterator[Run]:
    found = Run(daemon)
    yield found
    found.close()


def test_every_rollout_worker_gets_the_bytes_of_every_step_and_a_restarted_trainer_goes_on_above(
    run: Run, base: str
) -> None:
    assert [run.updated(step, seed) for step, seed in ((0, 1), (1, 2), (1, 3), (7, 4), (None, 5))] == [1, 2, 3, 7, 8]
    (model,) = run.daemon.status().models
    assert [(source.rank, source.tensors) for source in model.sources] == [(0, len(SHAPES)), (1, 0)]
    assert len({source.pid for source in model.sources}) == 1, "the trainer's other rank has declared nothing"
    assert len(model.targets) == 2 and {target.version for target in model.targets} == {8}

    for worker in run.trainer:
        worker.kill()
    run.trainer = [run.worker("master"), run.worker("walker")]
    run.ready(*run.trainer)
    assert run.updated(5, 6, MORE) == 9, "other shapes, and a step that was live already"
    assert run.updated(12, 7, MORE) == 12


BAD = {
    "raises": ("RuntimeError", "the gather failed"),
    "missing": ("RefusedError", "ended without 1 of 4 tensors: ['layers.0.weight']"),
    "twice": ("RefusedError", "layers.0.weight: the iterator yields it twice"),
    "shape": ("RefusedError", "layers.0.weight: it is [24, 16] float32, declared were [16, 24]"),
    "no pair": ("RefusedError", "expected (name, tensor)"),
}


@pytest.mark.slow
def test_a_stream_that_is_wrong_ends_the_update_on_every_rank_and_the_next_one_works(run: Run, base: str) -> None:
    for how in ("raises", "twice", "no pair"):  # in the first update, which does not know the shapes yet
        check_refused(run, how)
    version = run.updated(1, 1)
    for seed, how in enumerate(BAD, 2):
        check_refused(run, how)
        (model,) = run.daemon.status().models
        assert model.live == version, "nothing of it was decided"
        version, before = run.updated(1, seed), version
        assert version > before


def check_refused(run: Run, how: str) -> None:
    (master, walker), received = run.update(1, 99, how)
    error, says = BAD[how]
    assert master["error"] == error and says in master["text"], master
    walked = 2 if how == "raises" else len(SHAPES)
    assert f"walked {walked}" in master["text"], "every rank takes part in what is collective"
    assert "error" in walker if how == "raises" else walker["ok"]["walked"] == walked
    for answer in received:
        assert answer["error"] == "PeerLost" and "is withdrawn by the trainer" in answer["text"], answer


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_update_and_the_next_one_works_without_it(run: Run, base: str) -> None:
    _, received = run.update(1, 1, "dies")
    assert [answer["error"] for answer in received] == ["PeerLost", "PeerLost"]
    run.trainer = [run.worker("master"), run.worker("walker")]
    run.ready(*run.trainer)
    first = run.updated(1, 2)

    run.begin()
    run.send(2, 3, "slow")
    run.rollout[1].kill()
    answers = [worker.said() for worker in (*run.trainer, run.rollout[0])]
    assert answers[0]["error"] in ("PeerLost", "SwapFailed") and "verl-" in answers[0]["text"], answers
    assert answers[1]["ok"]["walked"] == len(SHAPES)
    assert answers[2]["error"] == "PeerLost"

    run.rollout = run.rollout[:1]
    second = run.updated(2, 4)
    run.rollout.append(run.worker("rollout"))
    run.ready(run.rollout[1])
    assert first < second < run.updated(3, 5)
    left = run.rollout.pop()
    run.updated(4, 6)  # one that verl leaves out is no part of it
    (model,) = run.daemon.status().models
    assert len(model.targets) == 1
    run.rollout.append(left)
    run.updated(5, 7)  # and may come back


@pytest.mark.slow
def test_workers_find_a_daemon_that_was_started_anew(run: Run, base: str) -> None:
    first = run.updated(1, 1)
    run.daemon.kill()
    run.daemon.start()
    assert run.updated(2, 2) > first


# in one process


@pytest.fixture
def engine(daemon: Daemon, base: str) -> Iterator[Callable[..., Any]]:
    import refitd.adapters.verl as adapter

    made: list[Any] = []

    def make(**settings: Any) -> Any:
        given = {"bucket_size": 1 << 20, "directory": str(daemon.directory), "timeout": WAIT_S}
        made.append(adapter.RefitdCheckpointEngine(**(given | settings)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def begin(trainer: Any, *rollout: Any) -> None:
    metadata = [one.prepare() for one in (trainer, *rollout)]
    actors, rollouts = type(trainer).build_topology(1, len(rollout), metadata)
    trainer.init_process_group(**{key: value[0] for key, value in actors.items()})
    for i, one in enumerate(rollout):
        one.init_process_group(**{key: value[i] for key, value in rollouts.items()})


async def received(engine: Any, step: int | None) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() async for name, tensor in engine.receive_weights(global_steps=step)}


async def updated(trainer: Any, rollout: Any, step: int) -> None:
    begin(trainer, rollout)
    _, found = await asyncio.gather(
        trainer.send_weights(iter(values(step).items()), global_steps=step), received(rollout, step)
    )
    assert digest(found) == digest(values(step))
    trainer.finalize()
    rollout.finalize()


@pytest.mark.slow
def test_any_workers_and_any_errors_one_after_the_other(engine: Callable[..., Any], base: str) -> None:
    """Workers come, stay away, come back and start anew, and streams fail, in the same random order each time."""
    chance = random.Random(1)
    trainer, pool = engine(is_master=True), [engine() for _ in range(3)]

    async def update(step: int, how: str, rollout: list[Any]) -> list[Any]:
        begin(trainer, *rollout)
        sending = trainer.send_weights(iter(Exported(step, how)), global_steps=step)
        receiving = [received(one, step) for one in rollout]
        return await asyncio.gather(sending, *receiving, return_exceptions=True)

    last = 0
    for step in range(1, 61):
        if step % 13 == 0:
            trainer.close()
            trainer = engine(is_master=True)
        if step % 7 == 0:
            pool.pop(0).close()
            pool.append(engine())
        how = chance.choice(["", "", "", "raises", "twice"])
        sent, *found = asyncio.run(update(step, how, chance.sample(pool, chance.randint(1, 3))))
        if how:
            assert isinstance(sent, Exception) and all(isinstance(one, refitd.PeerLost) for one in found), (sent, found)
        else:
            assert {digest(one) for one in found} == {digest(values(step))}
            assert last < sent["refitd/version"]
            last = sent["refitd/version"]


def test_nothing_writes_what_the_rollout_still_reads(engine: Callable[..., Any], base: str) -> None:
    async def main() -> None:
        trainer, rollout = engine(is_master=True), engine()
        await updated(trainer, rollout, 1)
        begin(trainer, rollout)
        sending = asyncio.create_task(trainer.send_weights(values(2).items(), global_steps=2))
        reading = rollout.receive_weights(global_steps=2)
        name, view = await anext(reading)
        await sending
        begin(trainer, rollout)
        sending = asyncio.create_task(trainer.send_weights(values(3).items(), global_steps=3))
        await asyncio.sleep(0.5)
        assert not sending.done() and torch.equal(view, values(2)[name])
        await reading.aclose()
        assert digest(await received(rollout, 3)) == digest(values(3))
        await sending

    asyncio.run(main())


def test_a_rollout_that_fails_while_it_reads_takes_part_in_the_next_update(
    engine: Callable[..., Any], base: str
) -> None:
    async def fails(rollout: Any) -> None:
        async for name, _ in rollout.receive_weights(global_steps=1):
            raise RuntimeError(f"the engine cannot load {name}")

    async def main() -> None:
        trainer, rollout = engine(is_master=True), engine()
        begin(trainer, rollout)
        sending = asyncio.create_task(trainer.send_weights(values(1).items(), global_steps=1))
        with pytest.raises(RuntimeError, match="cannot load embed"):
            await fails(rollout)
        await sending
        await updated(trainer, rollout, 2)

    asyncio.run(main())


def test_an_update_that_verl_has_given_up_does_not_end_the_next_one(engine: Callable[..., Any], base: str) -> None:
    async def main() -> None:
        trainer, rollout, absent = engine(is_master=True), engine(), engine()
        begin(trainer, rollout, absent)
        given_up = asyncio.create_task(trainer.send_weights(values(1).items(), global_steps=1))
        waiting = asyncio.create_task(received(rollout, 1))
        await asyncio.sleep(0.5)
        await updated(trainer, rollout, 2)
        for one in (given_up, waiting):
            with pytest.raises(refitd.RefitdError):
                await one
        await updated(trainer, rollout, 3)

    asyncio.run(main())


def test_the_rollout_may_be_on_another_node(nodes: Callable[..., Any], engine: Callable[..., Any], base: str) -> None:
    near, far = nodes(2)

    async def main() -> None:
        trainer = engine(is_master=True, directory=str(near.directory))
        rollout = engine(directory=str(far.directory))
        for step in (1, 2):
            await updated(trainer, rollout, step)

    asyncio.run(main())


def test_memory_is_given_back_between_updates_where_that_is_asked_for(
    daemon: Daemon, engine: Callable[..., Any], base: str
) -> None:
    async def main() -> None:
        trainer, rollout = engine(is_master=True, keep_buffers=False), engine(keep_buffers=False)
        for step in (1, 2):
            await updated(trainer, rollout, step)
            eventually(lambda: daemon.node().arenas == 0, "slots and buffers are free")

    asyncio.run(main())


def test_every_wait_ends_at_its_deadline_and_says_what_for(engine: Callable[..., Any], base: str) -> None:
    async def main() -> None:
        trainer, rollout = engine(is_master=True, timeout=1.0), engine(timeout=1.0)
        begin(trainer, rollout)
        with pytest.raises(refitd.DeadlineExceeded, match=r"version 4 has not come within 1 s \(the trainer has pub"):
            await received(rollout, 4)
        with pytest.raises(refitd.DeadlineExceeded, match=r"1 of 1 rollout workers have not registered: \['verl-"):
            await trainer.send_weights(values(4).items(), global_steps=4)

    asyncio.run(main())


def test_roles_and_models_that_do_not_fit_are_refused(engine: Callable[..., Any], base: str) -> None:
    trainer, rollout, other = engine(is_master=True), engine(), engine(model="other")
    with pytest.raises(refitd.RefusedError, match="role is none, expected sender or walker"):
        asyncio.run(trainer.send_weights([], global_steps=1))
    with pytest.raises(refitd.RefusedError, match=r"name different models: \['other', 'policy'\]"):
        begin(trainer, other)
    with pytest.raises(refitd.RefusedError, match="with is_master=True"):
        begin(rollout, rollout)
    begin(trainer, rollout)
    with pytest.raises(refitd.RefusedError, match="role is sender, expected receiver"):
        asyncio.run(received(trainer, 1))
    with pytest.raises(refitd.RefusedError, match="the trainer yields no tensors"):
        asyncio.run(trainer.send_weights([], global_steps=1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'bucket'"):
        engine(bucket=1)


def test_the_backend_is_registered_and_defines_all_that_verl_calls(base: str) -> None:
    import verl.checkpoint_engine.base
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

    import refitd.adapters.verl as adapter

    is_stand_in = "verl_stand_in" in str(verl.checkpoint_engine.base.__file__)
    assert is_stand_in == (base == "stand-in"), "a test's name says which of them has run"
    assert CheckpointEngineRegistry.get("refitd") is adapter.RefitdCheckpointEngine
    assert issubclass(adapter.RefitdCheckpointEngine, CheckpointEngine)
    assert adapter.RefitdCheckpointEngine.wire_format == "named_tensors"


# scripts/try-verl installs verl and Ray there
PYTHON = Path(os.environ.get("REFITD_VERL_VENV", ROOT / ".venv-verl")) / "bin/python"
installed = pytest.mark.skipif(not PYTHON.exists(), reason="verl and Ray are installed by scripts/try-verl")


@pytest.mark.slow
@installed
@pytest.mark.timeout(600)
def test_verls_own_manager_updates_its_workers_over_ray(daemon: Daemon, base: str) -> None:
    command = [PYTHON, "-m", "tests.support.verl_manager", str(daemon.directory)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = next(json.loads(line) for line in reversed(ran.stdout.splitlines()) if line.startswith("{"))
    assert said["checked"] == sorted(set(said["checked"])) and len(said["checked"]) == 7


@pytest.mark.slow
@installed
def test_verls_configuration_takes_the_examples_overrides(base: str, tmp_path: Path) -> None:
    python = tmp_path / "python3"  # the example runs `python3 -m verl.trainer.main_ppo OVERRIDE...`
    python.write_text(f'#!/bin/sh\nshift 2\nexec {PYTHON} -m tests.support.verl_configuration "$@"\n')
    python.chmod(0o755)
    example = [ROOT / "examples" / "verl_grpo.sh", "model", "train.parquet", "test.parquet", "trainer.save_freq=5"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(example, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == ["refitd.adapters.verl", "RefitdCheckpointEngine", {"timeout": 900}]
