"""Patch vLLM's private functions that the adapter needs, and check that this vLLM was tested with it.

An engine's process ends when its server ends, because without the server no other process can reach it:

    API server (or a script's LLM) -> EngineCore -> workers, with tensor parallelism

Each process watches its parent. A worker also watches the API server, because EngineCore may take seconds to end.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import refitd
from refitd import RefusedError

if TYPE_CHECKING:
    import torch

TESTED = ("0.32.",)

# How long a process of a CPU engine sleeps between two checks for the next message.
REST_S = 10e-6


def check_version() -> None:
    """Refuse an untested version of vLLM.

    Raises:
        RefusedError: the version is untested; the error names it and the tested ones.
    """
    import vllm

    if not vllm.__version__.startswith(TESTED):
        raise RefusedError(
            f"vLLM {vllm.__version__} is not among the versions that this adapter was tested with "
            f"({', '.join(v + 'x' for v in TESTED)}); install one of those, or another refitd"
        )


def open_seams() -> None:
    """Patch vLLM: each worker calls its weight transfer engine before a forward pass, and weights are not repacked."""
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager as WorkerLoRAManager
    from vllm.model_executor.layers import utils
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.worker.gpu_worker import Worker

    Worker.execute_model = _before(Worker.execute_model)
    Worker.execute_dummy_batch = _before(Worker.execute_dummy_batch)
    utils.dispatch_cpu_unquantized_gemm = _unpacked(utils.dispatch_cpu_unquantized_gemm)
    _keep_experts()
    MultiprocExecutor._init_executor = _resting(MultiprocExecutor._init_executor)
    WorkerLoRAManager.create_lora_manager = _found_again(WorkerLoRAManager.create_lora_manager)


def rest_between_looks() -> None:
    """Make this process sleep between two checks for a message; called in each process of a CPU engine.

    vLLM's workers and their executor spin for a second after each message, and call `sched_yield` between checks. If
    there are few processors, Linux 6.18 then starves the processes of other sessions, such as trainers and daemons
    (docs/vllm.md).
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = functools.partial(time.sleep, REST_S)


def lora_manager_of(model: torch.nn.Module) -> Any:
    """Return the manager of a model's LoRA adapters; None if the engine was started without LoRA."""
    return getattr(model, "refitd_lora_manager", None)


def check_adapter(manager: Any, folder: str) -> None:
    """Load an adapter through vLLM, which checks it, and drop it.

    Raises:
        RefusedError: the engine cannot serve it (unknown modules, a rank above --max-lora-rank, DoRA).
    """
    from vllm.lora.request import LoRARequest

    try:
        manager._load_adapter(LoRARequest("refitd", 1, folder))
    except Exception as exc:
        raise RefusedError(f"the adapter in {folder} cannot be served: {exc}") from exc


def _found_again(create: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method to store a model's adapter manager where `lora_manager_of` finds it."""

    @functools.wraps(create)
    def chosen(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        made = create(self, model, *args, **kwargs)
        made.refitd_lora_manager = self
        return made

    return chosen


def is_one_of_many(parallel: Any) -> bool:
    """Whether this engine is one of several data-parallel ones of a dense model.

    vLLM configures such an engine as if it were alone (`reconfigure_for_independent_dp_rank`). Only its index and this
    bound still show that there are several.
    """
    return bool(parallel.data_parallel_index or (parallel.elastic_ep_max_dp_size or 1) > 1)


def _before(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a worker's forward pass: a commit point comes before it, and no commit runs during it."""

    @functools.wraps(method)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = getattr(self.weight_transfer_engine, "refitd_step", None)
        if step is None or not getattr(args[0] if args else None, "total_num_scheduled_tokens", 1):
            # An empty batch: not a step, because data-parallel ranks must count only the passes that all of them run.
            return method(self, *args, **kwargs)
        with step():
            return method(self, *args, **kwargs)

    return forward


def _resting(init: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an executor's start, for engines that refitd refits.

    The executor's process ends with its server. On CPUs it sleeps between checks for messages.
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
    """Wrap a dispatch to leave a linear layer's weight in place, for engines that refitd refits.

    On CPUs vLLM packs each weight for its GEMM kernels and drops the original, so versions could not be written to it.
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


log = logging.getLogger("vllm.refitd")

# vLLM's names for its processes, and the names of their parents.
STARTED_BY = {"EngineCore": "the API server", "VllmWorker": "EngineCore"}

# Environment variable with the API server's pid, for EngineCore's workers.
SERVER = "REFITD_VLLM_SERVER"

# How long a process may take to end after SIGTERM.
ENDS_S = 10.0


class ServerLifeline(refitd.Lifeline):
    """Ends this process after its server: by SIGTERM, which vLLM handles, then by SIGKILL."""

    def __init__(self, processes: Mapping[int, str]) -> None:
        super().__init__(processes)
        self.on_end(self._exit)

    def _exit(self, error: refitd.Orphaned) -> None:
        log.error("refitd: %s", error)
        killer = threading.Timer(ENDS_S, os.kill, (os.getpid(), signal.SIGKILL))
        killer.daemon = True
        killer.start()
        os.kill(os.getpid(), signal.SIGTERM)


def live_with_server(*, starts_workers: bool = False) -> ServerLifeline | None:
    """Watch the vLLM process that started this one; return None if none did, or the kernel has no pidfds.

    With `starts_workers`, this process is an EngineCore with worker processes, which also watch the server.

    An engine inside a script's process (VLLM_ENABLE_V1_MULTIPROCESSING=0) ends with the script anyway. A Ray actor is
    started by a raylet, which ends it with its owner.

    Raises:
        Orphaned: the watched process has already ended.
    """
    name = multiprocessing.current_process().name
    what = next((what for prefix, what in STARTED_BY.items() if name.startswith(prefix)), "")
    parent = multiprocessing.parent_process()
    if parent is None or not what:
        return None
    if starts_workers:
        os.environ[SERVER] = str(parent.pid)
    server = os.environ.get(SERVER, "") if name.startswith("VllmWorker") else ""
    try:
        return ServerLifeline.of_parent(what, {int(server): STARTED_BY["EngineCore"]} if server.isdecimal() else None)
    except refitd.RefusedError as exc:
        log.warning("refitd: %s; if it is killed, this engine keeps its replica's name", exc)
        return None


def _keep_experts() -> None:
    """Make vLLM's unquantised CPU experts leave their weights in place, in engines that refitd refits.

    Once the model is loaded, vLLM packs the weights for its grouped GEMM and drops the originals, so versions could
    not be written to them.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

    Experts.process_weights_after_loading = _left(Experts.process_weights_after_loading)
    Experts.apply = _computed(Experts.apply)


def _left(process: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(process)
    def chosen(self: Any, layer: Any) -> None:
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config().weight_transfer_config
        self.refitd_unpacked = config is not None and config.backend == "refitd"
        if not self.refitd_unpacked:
            process(self, layer)

    return chosen


def _computed(apply: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(apply)
    def chosen(self: Any, **given: Any) -> None:  # vLLM names all of them
        if getattr(self, "refitd_unpacked", False):
            _experts(self, **given)
        else:
            apply(self, **given)

    return chosen


def _experts(
    self: Any,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any,
    expert_map: Any,
    apply_router_weight_on_input: bool,
    **others: Any,
) -> None:
    """Write each token's weighted sum over its experts to `output`.

    Args:
        self: vLLM's experts.
        output: [tokens, hidden].
        hidden_states: [tokens, hidden].
        w1: [experts here, 2 * intermediate, hidden].
        w2: [experts here, hidden, intermediate].
        topk_weights: [tokens, k].
        topk_ids: [tokens, k], experts of the whole model.
        activation: vLLM's `MoEActivation`.
        expert_map: [experts of the whole model], each expert's index on this rank or -1; None: all are on this rank.
        apply_router_weight_on_input: whether the tokens are weighted already.
        others: scales and workspaces, ignored.
    """
    import torch
    from torch.nn.functional import linear
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation

    ids = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()]
    total = torch.zeros(output.shape, dtype=torch.float32)
    for expert in ids[ids >= 0].unique().tolist():
        token, k = (ids == expert).nonzero(as_tuple=True)
        up = linear(hidden_states[token], w1[expert], None if self.w1_bias is None else self.w1_bias[expert])
        inner = up.new_empty(len(token), w2.shape[-1])
        apply_moe_activation(activation, inner, up)
        down = linear(inner, w2[expert], None if self.w2_bias is None else self.w2_bias[expert]).float()
        if not apply_router_weight_on_input:
            down *= topk_weights[token, k, None].float()
        total.index_add_(0, token, down)
    output.copy_(total)
