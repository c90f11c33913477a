"""NeMo-RL's own driver and worker classes on Ray, where a checkout of it and Ray are at hand (docs/nemo_rl.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from refitd.testing import Daemon
from tests.support import nemo_rl_ray

pytestmark = [
    pytest.mark.own_daemon,
    pytest.mark.slow,
    pytest.mark.skipif(nemo_rl_ray.SOURCE not in os.environ, reason=f"{nemo_rl_ray.SOURCE} names no NeMo-RL checkout"),
]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    found = pytest.importorskip("ray")
    paths = os.pathsep.join([str(nemo_rl_ray.ROOT), os.environ[nemo_rl_ray.SOURCE]])
    found.init(num_cpus=8, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    yield found
    found.shutdown()


@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.timeout(400)
def test_nemo_rls_own_synchronizer_refits(ray: Any, daemon: Daemon, tmp_path: Path, releases: bool):
    policy_class = ray.remote(num_cpus=1)(nemo_rl_ray.PolicyActor)
    generation_class = ray.remote(num_cpus=1)(nemo_rl_ray.GenerationActor)
    settings = {
        "runtime_dir": str(daemon.directory),
        "timeout_s": 60.0,
        "update_weights_bucket_memory_ratio": 0.06,
        "release_after_refit": releases,
    }

    def refit(sync: Any, step: int, **wrong: Any) -> None:
        ray.get([worker.train.remote(step, **wrong) for worker in policy])
        sync.sync_weights()
        assert all(ray.get([worker.holds.remote(step) for worker in generation]))

    policy = [policy_class.remote(rank) for rank in range(2)]
    generation = [generation_class.remote(rank, 2, str(tmp_path / "store")) for rank in range(2)]
    try:
        sync = nemo_rl_ray.synchronizer(settings, policy, generation)
        sync.init_communicator()
        for step in (1, 2, 3):
            refit(sync, step)
        with pytest.raises(ray.exceptions.RayTaskError, match="the gather failed"):
            refit(sync, 4, wrong="raises")
        refit(sync, 5)
        for worker in policy:  # the trainer is restarted, its engines stay
            ray.kill(worker)
        policy = [policy_class.remote(rank) for rank in range(2)]
        sync = nemo_rl_ray.synchronizer(settings, policy, generation)
        sync.init_communicator()
        refit(sync, 6)
        ray.kill(generation[1])
        with pytest.raises(ray.exceptions.RayError):
            refit(sync, 7)
    finally:
        for worker in (*policy, *generation):
            ray.kill(worker)
