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
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import refitd
from refitd import RefusedError
from refitd.adapters.vllm import kept_weights, versions
from refitd.adapters.vllm.kept_weights import is_refitted

if TYPE_CHECKING:
    import torch

log = logging.getLogger("vllm.refitd")


@dataclass(frozen=True)
class Seams:
    """The differences between versions of vLLM.

    Attributes:
        keep_experts: makes mixtures of experts on CPUs leave their weights in place.
        reports: outputs name the version of their weights.
    """

    keep_experts: Callable[[], None]
    reports: bool


# Tested versions; a newer one has the last one's seams.
TABLE = {
    (0, 27): Seams(kept_weights.keep_layer_experts, reports=False),
    (0, 28): Seams(kept_weights.keep_experts, reports=False),
    (0, 29): Seams(kept_weights.keep_experts, reports=False),
    (0, 30): Seams(kept_weights.keep_experts, reports=False),
    (0, 31): Seams(kept_weights.keep_experts, reports=False),
    (0, 32): Seams(kept_weights.keep_experts, reports=True),
}

# The functions that `open_seams` would patch and this vLLM lacks.
missing: list[str] = []

# How long a process of a CPU engine sleeps between two checks for the next message.
REST_S = 10e-6


def check_version() -> None:
    """Refuse an older vLLM, or one that lacks a function; warn of a newer, untested one, whose layouts are proven.

    Raises:
        RefusedError: names the version, the tested ones, and what is missing.
    """
    import vllm

    version = version_of(vllm.__version__)
    tested = "{}.{} to {}.{}".format(*min(TABLE), *max(TABLE))
    if missing or version < min(TABLE):
        raise RefusedError(
            f"vLLM {vllm.__version__} is not among the versions that this adapter was tested with ({tested})"
            + (f", and lacks what it needs: {missing[0]}" if missing else "")
            + "; install one of those, or another refitd"
        )
    if version > max(TABLE):
        log.warning("refitd: vLLM %s is newer than the tested versions (%s)", vllm.__version__, tested)


def version_of(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def seams_of(version: tuple[int, ...]) -> Seams:
    """Return a version's seams: those of the last tested version that is not newer, or of the first one."""
    return TABLE[max((known for known in TABLE if known <= version), default=min(TABLE))]


def open_seams() -> None:
    """Patch vLLM: each worker calls its weight transfer engine before a forward pass, and weights are not repacked."""
    import vllm
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager as WorkerLoRAManager
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.worker.gpu_worker import Worker

    Worker.execute_model = _before(Worker.execute_model)
    Worker.execute_dummy_batch = _before(Worker.execute_dummy_batch)
    seams = seams_of(version_of(vllm.__version__))
    kept_weights.open_seams(seams.keep_experts)
    MultiprocExecutor.collective_rpc = _answered(MultiprocExecutor.collective_rpc)
    try:
        versions.open_seams(reports=seams.reports)
    except (ImportError, AttributeError) as exc:
        log.warning("refitd: this vLLM's outputs do not name their versions: %s", exc)
    else:
        for executor in (MultiprocExecutor, UniProcExecutor):
            executor._init_executor = _sharing(executor._init_executor)
    MultiprocExecutor._init_executor = _resting(MultiprocExecutor._init_executor)
    WorkerLoRAManager.create_lora_manager = _found_again(WorkerLoRAManager.create_lora_manager)


def is_deferred_attention(module: Any) -> bool:
    """Whether vLLM runs code for this attention layer once all weights are loaded; it may run again."""
    from vllm.model_executor.layers import attention

    if hasattr(attention, "is_deferred_attention_layer"):
        return bool(attention.is_deferred_attention_layer(module))
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # 0.27

    return isinstance(module, AttentionLayerBase) and hasattr(module, "process_weights_after_loading")


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
    bound = getattr(parallel, "elastic_ep_max_dp_size", None)  # since 0.30; before it, the first one counts as alone
    return bool(parallel.data_parallel_index or (bound or 1) > 1)


def _before(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a worker's forward pass: a commit point comes before it, and no commit runs during it."""

    @functools.wraps(method)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = getattr(self.weight_transfer_engine, "refitd_step", None)
        if step is None or not getattr(args[0] if args else None, "total_num_scheduled_tokens", 1):
            # An empty batch: not a step, because data-parallel ranks must count only the passes that all of them run.
            return method(self, *args, **kwargs)
        with step(getattr(args[0], "refitd_batch", None) if args else None):
            return method(self, *args, **kwargs)

    return forward


def _sharing(init: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an executor's start: EngineCore and its workers share the versions of batches, if refitd refits them."""

    @functools.wraps(init)
    def started(self: Any) -> Any:
        if is_refitted(self.vllm_config):
            versions.share(self.vllm_config)
        return init(self)

    return started


# The calls of vLLM's weight transfer; a worker may refuse them.
UPDATES = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


@dataclass(frozen=True)
class Failed:
    """A worker's error in one of these calls."""

    text: str


def _answered(rpc: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an executor's calls of workers: it reads all answers, although some workers raise.

    vLLM stops at the first error. It would then read the other workers' answers as those of its next call.
    """

    @functools.wraps(rpc)
    def called(
        self: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None, **how: Any
    ) -> Any:
        if method not in UPDATES or not is_refitted(self.vllm_config):
            return rpc(self, method, timeout, args, kwargs, **how)
        found = rpc(self, functools.partial(outcome, name=method), timeout, (args, kwargs or {}), None, **how)
        if failed := [one.text for one in found if isinstance(one, Failed)]:
            raise RuntimeError(f"{method} failed on {len(failed)} of {len(found)} workers: {failed[0]}")
        return found

    return called


def outcome(worker: Any, args: Any, kwargs: Any, *, name: str) -> Any:
    """Call a worker's method, in its process; return its error, if it raises."""
    try:
        return getattr(worker, name)(*args, **kwargs)
    except Exception as exc:
        log.exception("refitd: %s failed", name)
        return Failed(f"{type(exc).__name__}: {exc}")


def _resting(init: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an executor's start, for engines that refitd refits.

    The executor's process ends with its server. On CPUs it sleeps between checks for messages.
    """

    @functools.wraps(init)
    def started(self: Any) -> Any:
        if is_refitted(self.vllm_config):
            self.refitd_lifeline = live_with_server(starts_workers=True)
            if self.vllm_config.device_config.device_type == "cpu":
                rest_between_looks()
        return init(self)

    return started


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
