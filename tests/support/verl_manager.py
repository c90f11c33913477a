"""verl's own manager, workers and Ray: two trainer ranks with sharded tensors update two rollout workers.

    python -m tests.support.verl_manager DIRECTORY-OF-A-DAEMON

It needs verl 0.9 and Ray, and runs on CPUs. The last line that it prints is JSON: the versions and the checks.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout import BaseRollout

MODEL = "policy"
SHAPES = {"model.embed.weight": (256, 64), "model.layers.0.w.weight": (64, 128), "model.norm.weight": (64,)}


def whole(name: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + sorted(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator).bfloat16()


def digests(seed: int) -> dict[str, str]:
    return {name: digest(whole(name, seed)) for name in SHAPES}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


class Trainer(Worker):
    """A trainer rank with the interface of verl's ActorRolloutRefWorker; its tensors are sharded over ranks."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        initialize_global_process_group_ray(timeout_second=60, backend="cpu:gloo")
        self._mesh = init_device_mesh("cpu", (2,))
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=torch.distributed.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )
        self._seed, self._fails = 0, False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, seed: int, fails: bool = False) -> None:
        self._seed, self._fails = seed, fails

    def _exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in SHAPES:
            sharded = distribute_tensor(whole(name, self._seed), self._mesh, [Shard(0)])
            assert isinstance(sharded, DTensor)
            gathered = sharded.full_tensor()  # collective: other ranks wait for a rank that does not iterate
            if self._fails and name == "model.norm.weight":
                gathered = gathered[:-1]
            yield name, gathered
            gathered.zero_()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        return await self.checkpoint_engine.send_weights(self._exported(), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Adapter(BaseRollout):
    """Replaces an inference engine: digests the tensors it receives."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config, self.model_config, self.device_mesh = config, None, None
        self.digests: dict[str, str] = {}
        self.step: int | None = None

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: int | None = None, **kwargs: Any
    ) -> None:
        assert wire_format == "named_tensors"
        self.digests = {name: digest(tensor) async for name, tensor in weights}
        self.step = global_steps


class Rollout(CheckpointEngineWorker):
    """verl's own rollout worker, with that adapter."""

    def __init__(self, rollout_config: RolloutConfig) -> None:
        super().__init__(rollout_config, None, Adapter(rollout_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def found(self) -> tuple[int | None, dict[str, str]]:
        return self.server_adapter.step, self.server_adapter.digests


class Replica:
    """A rollout replica as the manager needs it: workers, and a pause around an update."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def called(**options: Any) -> None:
            self.calls.append(name)

        return called


def group(cls: type, size: int, **arguments: Any) -> RayWorkerGroup:
    pool = RayResourcePool(process_on_nodes=[size], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(cls), **arguments)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, use_gpu=False, device_name="cpu")


def fails(manager: CheckpointEngineManager, step: int) -> str:
    try:
        manager.update_weights(global_steps=step)
    except Exception as exc:
        return str(exc)
    raise AssertionError(f"step {step} was expected to fail")


def main(directory: str) -> None:
    here = str(Path(__file__).parents[2])
    environment = {"env_vars": {"PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 << 20, runtime_env=environment)
    config = CheckpointEngineConfig(
        backend="refitd",
        custom_backend_module="refitd.adapters.verl",
        update_weights_bucket_megabytes=1,
        engine_kwargs={"refitd": {"model": MODEL, "runtime_dir": directory, "timeout": 60.0}},
    )
    rollout_config = RolloutConfig(name="vllm", checkpoint_engine=config)
    actors = group(Trainer, 2, config=config)
    rollouts = group(Rollout, 2, rollout_config=rollout_config)
    replicas = [Replica([worker]) for worker in rollouts.workers]
    manager = CheckpointEngineManager(config=config, actor_wg=actors, replicas=replicas)
    checked = []

    def updates(step: int, seed: int, count: int) -> None:
        actors.train(seed)
        metrics = manager.update_weights(global_steps=step)
        found = [ray.get(worker.found.remote()) for replica in manager.replicas for worker in replica.workers]
        assert found == [(step, digests(seed))] * count, found
        checked.append(metrics["refitd/version"])

    for step in (0, 1, 2):
        updates(step, step + 10, 2)
    actors.train(13, fails=True)
    refused = fails(manager, 3)
    assert "declared were [64]" in refused, refused
    updates(3, 14, 2)  # after the error
    manager.remove_replicas([replicas[1]])
    updates(4, 15, 1)  # one rollout worker fewer
    manager.add_replicas([replicas[1]])
    updates(5, 16, 2)  # it is back
    ray.kill(replicas[1].workers[0])
    lost = fails(manager, 6)
    manager.remove_replicas([replicas[1]])
    updates(6, 17, 1)
    versions = {name: importlib.metadata.version(name) for name in ("verl", "ray", "torch", "tensordict")}
    calls = replicas[0].calls[:4]
    print(json.dumps({"checked": checked, "versions": versions, "lost": lost[:200], "replica": calls}))
    ray.shutdown()


if __name__ == "__main__":
    assert asyncio  # the manager's methods are coroutines that it runs itself
    main(sys.argv[1])
