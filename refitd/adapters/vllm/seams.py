"""What the adapter holds on to inside vLLM that is no public interface, and the versions it was tested with."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from refitd import RefusedError
from refitd.adapters.vllm import unpacked_experts
from refitd.adapters.vllm.ends import live_with_server

if TYPE_CHECKING:
    import torch

TESTED = ("0.32.",)

# How long a process of an engine on CPUs sleeps between two looks for the next message.
REST_S = 10e-6


def check_version() -> None:
    """Refuse a vLLM that the seams were not tested with.

    Raises:
        RefusedError: names the version and the tested ones.
    """
    import vllm

    if not vllm.__version__.startswith(TESTED):
        raise RefusedError(
            f"vLLM {vllm.__version__} is not among the versions that this adapter was tested with "
            f"({', '.join(v + 'x' for v in TESTED)}); install one of those, or another refitd"
        )


def open_seams() -> None:
    """Have each worker pass by its weight transfer engine before a forward pass, and keep weights where they are."""
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager as WorkerLoRAManager
    from vllm.model_executor.layers import utils
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.worker.gpu_worker import Worker

    Worker.execute_model = _before(Worker.execute_model)
    Worker.execute_dummy_batch = _before(Worker.execute_dummy_batch)
    utils.dispatch_cpu_unquantized_gemm = _unpacked(utils.dispatch_cpu_unquantized_gemm)
    unpacked_experts.keep()
    MultiprocExecutor._init_executor = _resting(MultiprocExecutor._init_executor)
    WorkerLoRAManager.create_lora_manager = _found_again(WorkerLoRAManager.create_lora_manager)


def rest_between_looks() -> None:
    """Have this process sleep between two looks for a message; called in each process of an engine on CPUs.

    vLLM's workers and their executor look for a second after each message, and call `sched_yield` in between. Where
    processors are few, Linux 6.18 then gives next to nothing to processes of other sessions, trainers and daemons among
    them (docs/vllm.md).
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = functools.partial(time.sleep, REST_S)


def lora_manager_of(model: torch.nn.Module) -> Any:
    """Return the manager of a model's LoRA adapters; None if the engine takes none."""
    return getattr(model, "refitd_lora_manager", None)


def check_adapter(manager: Any, folder: str) -> None:
    """Have vLLM read an adapter with its own checks, and drop it.

    Raises:
        RefusedError: the engine cannot serve it: modules it does not know, a rank above --max-lora-rank, DoRA, say.
    """
    from vllm.lora.request import LoRARequest

    try:
        manager._load_adapter(LoRARequest("refitd", 1, folder))
    except Exception as exc:
        raise RefusedError(f"the adapter in {folder} cannot be served: {exc}") from exc


def _found_again(create: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that leaves a model's manager of adapters where `lora_manager_of` finds it."""

    @functools.wraps(create)
    def chosen(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        made = create(self, model, *args, **kwargs)
        made.refitd_lora_manager = self
        return made

    return chosen


def is_one_of_many(parallel: Any) -> bool:
    """Whether this engine is one of several data-parallel ones of a dense model.

    vLLM makes such an engine believe that it is alone (`reconfigure_for_independent_dp_rank`); beside its index, this
    bound is what still tells how many there are.
    """
    return bool(parallel.data_parallel_index or (parallel.elastic_ep_max_dp_size or 1) > 1)


def _before(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a worker's forward pass with a commit point in front of it; while it runs, nothing is committed."""

    @functools.wraps(method)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = getattr(self.weight_transfer_engine, "refitd_step", None)
        if step is None or not getattr(args[0] if args else None, "total_num_scheduled_tokens", 1):
            # Nothing is computed. Data-parallel ranks must count what they compute together, and nothing else.
            return method(self, *args, **kwargs)
        with step():
            return method(self, *args, **kwargs)

    return forward


def _resting(init: Callable[..., Any]) -> Callable[..., Any]:
    """Return an executor's start for engines that refitd refits.

    Its process ends with its server. On CPUs, it leaves time to other processes.
    """

    @functools.wraps(init)
    def started(self: Any) -> Any:
        config = self.vllm_config.weight_transfer_config
        if config is not None and config.backend == "refitd":
            self.refitd_lifeline = live_with_server(starts_workers=True)
            if self.vllm_config.device_config.device_type == "cpu":
                rest_between_looks()
        return init(self)

    return started


def _unpacked(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a dispatch that leaves a linear layer's weight in place, for engines that refitd refits.

    On CPUs vLLM packs each weight for its GEMM kernels and drops the weight itself: nothing would be left to write to.
    """

    @functools.wraps(dispatch)
    def chosen(layer: Any, remove_weight: bool) -> None:
        import torch
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config().weight_transfer_config
        if config is None or config.backend != "refitd" or layer.weight.ndim != 2:
            dispatch(layer, remove_weight)
        else:
            layer.cpu_linear = torch.nn.functional.linear

    return chosen
