"""NeMo-RL's own classes on Ray actors without GPUs, from a checkout: its driver, its policy and vLLM worker mixins.

Our code: the worker groups' calls, the policy's iterator, a loader that keeps what it is given, and the CUDA
functions that ask for the memory of a GPU and wait for its stream.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

SOURCE = "REFITD_NEMO_RL"  # the folder of a checkout that holds nemo_rl/
TRANSPORT = "refitd.adapters.nemo_rl:RefitdTransport"
ROOT = Path(__file__).parents[2]
GPU_BYTES = 20 << 20


def nemo_rl(module: str) -> Any:
    """Return a module of NeMo-RL; skip the __init__ of packages that would load vLLM and Megatron."""
    source = os.environ[SOURCE]
    if source not in sys.path:
        sys.path.insert(0, source)
    for name in ("models", "models.generation", "models.generation.vllm", "models.policy", "weight_sync"):
        full = f"nemo_rl.{name}"
        if full not in sys.modules:
            package = types.ModuleType(full)
            package.__path__ = [str(Path(source, *full.split(".")))]
            sys.modules[full] = package
    return importlib.import_module(f"nemo_rl.{module}")


def without_cuda() -> None:
    here: Any = torch.cuda
    here.current_device = lambda: 0
    here.get_device_properties = lambda device: types.SimpleNamespace(total_memory=GPU_BYTES)
    here.current_stream = lambda: types.SimpleNamespace(synchronize=lambda: None)
    here.nvtx = types.SimpleNamespace(range_push=lambda name: 0, range_pop=lambda: 0)


def policy_class() -> type[Any]:
    base = nemo_rl("models.policy.workers.checkpoint_engine").PolicyCheckpointEngineMixin

    class Policy(base):  # type: ignore[misc,valid-type]
        """A policy worker."""

        def __init__(self, rank: int) -> None:
            without_cuda()
            self.rank, self.step, self.wrong = rank, 0, ""

        def train(self, step: int, wrong: str = "") -> None:
            self.step, self.wrong = step, wrong

        def _checkpoint_engine_weight_iterator(self, kv_scales: Any = None) -> Any:
            from tests.support.adapter_ranks import exported

            return exported(self.step, self.wrong)

    return Policy


def generation_class() -> type[Any]:
    vllm = nemo_rl("models.generation.vllm.checkpoint_engine")

    class Internal(vllm.VllmCheckpointEngineMixin):  # type: ignore[misc,name-defined]
        """The class that runs inside vLLM."""

        def __init__(self) -> None:
            self.loaded: dict[str, torch.Tensor] = {}

        def _load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            self.loaded.update((name, tensor.clone()) for name, tensor in weights)

        def _maybe_process_fp8_kv_cache(self) -> None:
            return

    class Generation(vllm.VllmCheckpointEngineRpcMixin):  # type: ignore[misc,name-defined]
        """A vLLM worker with one internal worker."""

        def __init__(self, rank: int, world_size: int, store: str) -> None:
            without_cuda()
            torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world_size)
            self.internal = Internal()
            self.llm = types.SimpleNamespace(
                collective_rpc=lambda method, args=(): [getattr(self.internal, method)(*args)]
            )

        def holds(self, step: int) -> bool:
            from tests.support.adapter_ranks import equal

            return equal(self.internal.loaded, step)

    return Generation


class PolicyActor:
    """An actor that loads NeMo-RL's class only where it runs: Ray would import it by its full name."""

    def __init__(self, *given: Any) -> None:
        self._worker = policy_class()(*given)

    async def train(self, *given: Any, **named: Any) -> None:
        self._worker.train(*given, **named)

    async def checkpoint_engine_rpc(self, **given: Any) -> Any:
        return await self._worker.checkpoint_engine_rpc(**given)


class GenerationActor:
    """As PolicyActor; calls do not run in an event loop."""

    def __init__(self, *given: Any) -> None:
        self._worker = generation_class()(*given)

    def holds(self, step: int) -> bool:
        return bool(self._worker.holds(step))

    def checkpoint_engine_rpc(self, **given: Any) -> Any:
        return self._worker.checkpoint_engine_rpc(**given)


class WorkerGroup:
    """The calls of NeMo-RL's worker group that the synchronizer makes."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers

    def run_all_workers_single_data(self, method: str, run_rank_0_only_axes: Any = None, **given: Any) -> list[Any]:
        return [getattr(worker, method).remote(**given) for worker in self.workers]

    def run_all_workers_multiple_data(
        self, method: str, run_rank_0_only_axes: Any = None, common_kwargs: Any = None, **given: list[Any]
    ) -> list[Any]:
        return [
            getattr(worker, method).remote(
                **{name: values[i] for name, values in given.items()}, **(common_kwargs or {})
            )
            for i, worker in enumerate(self.workers)
        ]


def synchronizer(settings: dict[str, Any], policy: list[Any], generation: list[Any]) -> Any:
    """Return NeMo-RL's synchronizer for this transport, configured as a user configures it."""
    config = {"refit_transport": TRANSPORT, "refit_cfg": {TRANSPORT: settings}, "vllm_cfg": {"async_engine": False}}
    read = nemo_rl("weight_sync.checkpoint_engine_config").checkpoint_engine_refit_config(config)
    side = types.SimpleNamespace(worker_group=WorkerGroup(policy), prepare_refit_info=lambda: {})
    other = types.SimpleNamespace(
        worker_group=WorkerGroup(generation),
        prepare_refit_info=lambda info: None,
        dp_size=len(generation),
        cfg=config,
    )
    made = nemo_rl("weight_sync.checkpoint_engine_weight_synchronizer")
    return made.CheckpointEngineWeightSynchronizer(side, other, read)
