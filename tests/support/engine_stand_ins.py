"""Stand-ins for vLLM and SGLang: the modules that the adapters import, and the engines' classes and settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import torch

Init, Update = TypeVar("Init"), TypeVar("Update")


def retry_soon() -> None:
    from refitd.adapters.engines import Retries

    Retries.again_s = Retries.refused_s = 0.1


def modules(held: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    made = {name: ModuleType(name) for name in held}
    for name, module in made.items():
        vars(module).update(held[name])
    return made


class VllmBase(Generic[Init, Update]):
    """As vLLM's WeightTransferEngine."""

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.vllm_config, self.model = vllm_config, model
        self.model_config, self.parallel_config = vllm_config.model_config, vllm_config.parallel_config

    def parse_update_info(self, given: dict[str, Any]) -> Any:
        return vars(type(self))["update_info_cls"](**given)


class VllmTrainerBase(Generic[Init]):
    """As vLLM's TrainerWeightTransferEngine."""

    def __init__(self, *, client: Any, source: Any, is_sender: bool) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender


class Info:
    """As vLLM's dataclasses of settings."""

    rank = 0
    is_sender = True


def vllm_modules(checkpoint: Mapping[str, torch.Tensor]) -> dict[str, ModuleType]:
    """Return what the adapter imports of vLLM; its loader reads `checkpoint`."""
    names = ("WeightTransferInitInfo", "WeightTransferUpdateInfo", "TrainerInitInfo", "VLLMWeightSyncClient")
    base: dict[str, Any] = {name: Info for name in (*names, "WeightSource")}
    base |= {"WeightTransferEngine": VllmBase, "TrainerWeightTransferEngine": VllmTrainerBase}
    loader = SimpleNamespace(get_all_weights=lambda config, model: iter(checkpoint.items()))
    return modules(
        {
            "vllm": {"__version__": "0.32.0"},
            "vllm.config": {"VllmConfig": Info, "set_current_vllm_config": contextlib.nullcontext},
            "vllm.config.weight_transfer": {"WeightTransferConfig": Info},
            "vllm.distributed": {},
            "vllm.distributed.device_communicators": {"shm_broadcast": SimpleNamespace(sched_yield=None)},
            "vllm.distributed.weight_transfer": {},
            "vllm.distributed.weight_transfer.base": base,
            "vllm.model_executor": {},
            "vllm.model_executor.layers": {},
            "vllm.model_executor.layers.attention": {
                "is_deferred_attention_layer": lambda module: hasattr(module, "process_weights_after_loading")
            },
            "vllm.model_executor.model_loader": {"get_model_loader": lambda config: loader},
        }
    )


def vllm_config(settings: dict[str, Any]) -> Any:
    """Return vLLM's configuration of an engine of one rank, with refitd's settings."""
    return SimpleNamespace(
        additional_config={"refitd": settings},
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(tie_word_embeddings=False),
            hf_config=SimpleNamespace(architectures=["Unknown"]),
            quantization=None,
            dtype=torch.bfloat16,
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            enable_expert_parallel=False,
            data_parallel_size=1,
            data_parallel_index=0,
            elastic_ep_max_dp_size=None,
            world_size=1,
            rank=0,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        instance_id="0",
    )


def sglang_modules(dp_rank: int | None) -> tuple[dict[str, ModuleType], dict[str, Callable[..., Any]]]:
    """Return what the adapter imports of SGLang, and the hooks that plugins will register."""
    hooks: dict[str, Callable[..., Any]] = {}

    class HookRegistry:
        @staticmethod
        def register(target: str, hook: Callable[..., Any], kind: object) -> None:
            hooks[target.rpartition(".")[2]] = hook

    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    parallel = SimpleNamespace(dp_rank=dp_rank, world_group=alone)
    registry = {"HookRegistry": HookRegistry, "HookType": SimpleNamespace(BEFORE="before")}
    made = modules(
        {
            "sglang": {"__version__": "0.5.23"},
            "sglang.srt": {},
            "sglang.srt.runtime_context": {"get_parallel": lambda: parallel},
            "sglang.srt.plugins": {},
            "sglang.srt.plugins.hook_registry": registry,
        }
    )
    return made, hooks


def write_checkpoint(folder: Path, checkpoint: dict[str, torch.Tensor]) -> str:
    """Save a checkpoint where SGLang's engines find it."""
    from safetensors.torch import save_file

    save_file(checkpoint, folder / "model.safetensors")
    return str(folder)
