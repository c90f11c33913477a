"""verl's checkpoint engine, in one process; tests/cluster/test_adapters.py has what all adapters do.

With verl installed, the tests use its base class and registry, else the stand-in in tests/support; the end of each
test's name says which. scripts/try-verl installs verl and Ray and runs all of this with them, and with verl's manager.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import refitd
from refitd.testing import Daemon, eventually
from tests.support.adapter_ranks import SHAPES, equal, exported, real_verl, values

ROOT = Path(__file__).parents[2]
VERL = real_verl()
WAIT_S = 60.0

pytestmark = [pytest.mark.parametrize("base", [f"verl-{VERL}" if VERL else "stand-in"]), pytest.mark.own_daemon]


@pytest.fixture
def engine(daemon: Daemon, base: str) -> Iterator[Callable[..., Any]]:
    import refitd.adapters.verl as adapter

    made: list[Any] = []

    def make(**settings: Any) -> Any:
        given = {"bucket_size": 1 << 20, "runtime_dir": str(daemon.directory), "timeout": WAIT_S}
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


async def updated(trainer: Any, rollout: Any, step: int | None, seed: int | None = None, fault: str = "") -> int:
    """Update, check every byte, and return the version."""
    begin(trainer, rollout)
    seed = step if seed is None else seed
    sent, found = await asyncio.gather(
        trainer.send_weights(exported(seed, fault), global_steps=step), received(rollout, step)
    )
    assert fault or equal(found, seed)
    trainer.finalize()
    rollout.finalize()
    return int(sent["refitd/version"])


def test_versions_are_verls_steps_where_those_are_free(daemon: Daemon, engine: Callable[..., Any], base: str) -> None:
    async def main() -> None:
        trainer, rollout = engine(is_master=True), engine()
        steps = (0, 1, 1, 7, None)
        assert [await updated(trainer, rollout, step, seed) for seed, step in enumerate(steps)] == [1, 2, 3, 7, 8]
        (model,) = daemon.status().models
        assert [(source.rank, source.tensors) for source in model.sources] == [(0, len(SHAPES)), (1, 0)]
        trainer.close()
        trainer = engine(is_master=True)
        assert await updated(trainer, rollout, 5, 6, "one") == 9, "other tensors, and a step that was live already"
        assert await updated(trainer, rollout, 12, 7, "one") == 12

    asyncio.run(main())


@pytest.mark.slow
def test_any_workers_and_any_errors_one_after_the_other(engine: Callable[..., Any], base: str) -> None:
    """Workers join, stay away, return and restart, and streams fail, in a random order from a fixed seed."""
    chance = random.Random(1)
    trainer, pool = engine(is_master=True), [engine() for _ in range(3)]

    async def update(step: int, how: str, rollout: list[Any]) -> list[Any]:
        begin(trainer, *rollout)
        sending = trainer.send_weights(exported(step, how), global_steps=step)
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
            assert all(equal(one, step) for one in found)
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
        assert equal(await received(rollout, 3), 3)
        await sending

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
        trainer = engine(is_master=True, runtime_dir=str(near.directory))
        rollout = engine(runtime_dir=str(far.directory))
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
    with pytest.raises(refitd.RefusedError, match="the iterator yields no tensors"):
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
