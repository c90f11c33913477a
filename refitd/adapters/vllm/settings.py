"""The settings of a vLLM engine that refitd refits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo


@dataclass
class RefitdInitInfo(WeightTransferInitInfo):
    """Where to register; also `--additional-config '{"refitd": {...}}'`, which `init_weight_transfer_engine` overrides.

    Attributes:
        model: the model's name in refitd.
        replica: this engine's name; "" is its host and vLLM's instance id. Data-parallel engines of a dense model add
            their index.
        runtime_dir: the daemon's directory; "" is this user's default one.
        follow: commit every decided version between two steps, without a trainer that drives the engine.
        check: compare the engine's weights with its checkpoint before using the layout.
        lora: the folder of a LoRA adapter, as requests name it. Versions of `model` are then this adapter's tensors,
            and the engine's own weights do not change.
        adopt: move weights from main memory into an arena; versions then flip instead of being copied.
        keep_prefix_cache: let new requests use cached prefixes that older versions have computed.
        timeout_s: seconds to wait for the trainer's tensors, and for each version.
    """

    model: str = "policy"
    replica: str = ""
    runtime_dir: str = ""
    follow: bool = False
    check: bool = True
    adopt: bool = True
    lora: str = ""
    keep_prefix_cache: bool = False
    timeout_s: float = 120.0


@dataclass
class RefitdUpdateInfo(WeightTransferUpdateInfo):
    """The version that is live when `update_weights` returns."""

    version: int = 0


def parsed(settings: dict[str, Any]) -> RefitdInitInfo:
    """Return the settings with their defaults.

    Raises:
        ValueError: a setting is unknown, or has another type ("false" would count as true).
    """
    known = {field.name for field in fields(RefitdInitInfo)}
    if unknown := sorted(settings.keys() - known):
        raise ValueError(f"refitd: unknown settings {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    for field in fields(RefitdInitInfo):
        value, kind = settings.get(field.name, field.default), type(field.default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            wanted = {bool: "true or false", str: "a text", float: "a number"}[kind]
            raise ValueError(f"refitd: {field.name} is {value!r} ({type(value).__name__}), expected {wanted}")
    return RefitdInitInfo(**settings)
