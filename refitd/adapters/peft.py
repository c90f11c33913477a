"""Offer PEFT's LoRA adapters as sources: the adapters alone, or merged into the base model's weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from refitd import ParameterMetadata, RefusedError, unwrapped_name


def adapter_tensors(peft_model: torch.nn.Module, adapter_name: str = "default") -> Mapping[str, torch.Tensor]:
    """Return an adapter's live tensors by PEFT's checkpoint names, for `register_source`.

    They are the tensors that `get_peft_model_state_dict` returns: LoRA's A and B, DoRA's magnitudes, copies of
    `modules_to_save`, but not the base weights of embeddings. DTensors stay DTensors. Each lookup returns the model's
    present tensor, so a registration follows the model. Scaling (`lora_alpha`, `r`) is not included: it does not
    change, and an engine reads it from the adapter's configuration.

    Raises:
        RefusedError: this is not a PEFT model, it has no such adapter, or PEFT computes a tensor when it saves.
    """
    return _AdapterTensors(peft_model, adapter_name)


def merged(peft_model: torch.nn.Module, *, only_trained: bool = False) -> MergedWeights:
    """Return the base model's weights with its active LoRA adapters merged into them, for `declare_source`.

    PEFT's own merge computes them, on a copy of one layer at a time. They equal the weights of `merge_and_unload()` bit
    for bit, and the model's own weights do not change. Linear (also transformers' Conv1D), Embedding and convolution
    layers, parameters of fused experts (`target_parameters`) and `modules_to_save` can be merged, with every variant
    that PEFT can merge (DoRA, rsLoRA). DTensors are gathered: all ranks must iterate, and one publishes.

    Args:
        peft_model: the trainer's model, with LoRA adapters.
        only_trained: skip weights that training does not change, for a source with `partial=True`.

    Raises:
        RefusedError: a layer cannot be merged (for example, it is quantised), or several adapters change one tied
            weight; the error names it.
    """
    return MergedWeights(peft_model, only_trained)


class _AdapterTensors(Mapping[str, torch.Tensor]):
    """A mapping from PEFT's checkpoint names to a model's present tensors."""

    def __init__(self, peft_model: torch.nn.Module, adapter_name: str) -> None:
        from peft import get_peft_model_state_dict

        adapters = _adapters_of(peft_model)
        if adapter_name not in adapters:
            raise RefusedError(f"the model has no adapter {adapter_name!r}; it has {', '.join(adapters) or 'none'}")
        held = {path: tensor for path, tensor in peft_model.state_dict(keep_vars=True).items()}
        # PEFT selects tensors from this state dict, so identity maps each of its names to a parameter
        named = get_peft_model_state_dict(
            peft_model, state_dict=dict(held), adapter_name=adapter_name, save_embedding_layers=False
        )
        path_of = {id(tensor): path for path, tensor in held.items()}
        if made := [name for name, tensor in named.items() if id(tensor) not in path_of]:
            raise RefusedError(
                f"{made[0]}: PEFT computes it when it saves (it gathers, say); there is no such tensor to follow"
            )
        self._model = peft_model
        self._path_of = {unwrapped_name(name): path_of[id(tensor)] for name, tensor in named.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        found: Any = self._model
        for step in self._path_of[name].split("."):
            found = getattr(found, step)
        tensor: torch.Tensor = found
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._path_of)

    def __len__(self) -> int:
        return len(self._path_of)


@dataclass(slots=True)
class _Weight:
    """One weight of the merged model: its names, its present (unmerged) tensor, and its adapted layer."""

    names: list[str]
    tensor: torch.Tensor
    layer: str = ""  # "": not in an adapted layer
    inner: str = ""  # the weight's name in the adapted layer's base layer
    is_trained: bool = False


class MergedWeights:
    """Weights with adapters merged into them; `merged` returns this. Each iteration merges again, layer by layer.

    Attributes:
        shapes: {name: (shape, dtype)} under the base model's names.
        metadata: the weights' descriptions; aliases show which weights are tied.
    """

    def __init__(self, peft_model: torch.nn.Module, only_trained: bool) -> None:
        self._model = peft_model
        self._only_trained = only_trained
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.metadata: list[ParameterMetadata] = []
        for weight in self._weights(self._layers()):
            name, *aliases = weight.names
            shape, dtype = tuple(weight.tensor.shape), weight.tensor.dtype
            self.shapes[name] = shape, dtype
            described = ParameterMetadata(name, shape, dtype, dtype.itemsize, resolved_name=name, aliases=(*aliases,))
            self.metadata.append(described)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor), once for each name of `shapes`; merged tensors are copies."""
        layers = self._layers()
        merged_of, parts = "", {}
        for weight in sorted(self._weights(layers), key=lambda weight: weight.layer):
            if not weight.layer:
                yield weight.names[0], _whole(weight.tensor)
                continue
            if weight.layer != merged_of:
                merged_of, parts = weight.layer, _merged(layers[weight.layer])
            yield weight.names[0], parts[weight.inner]

    def _layers(self) -> dict[str, torch.nn.Module]:
        """Return the layers with adapters, and the copies of `modules_to_save`, by name.

        Raises:
            RefusedError: a layer cannot be merged.
        """
        from peft.tuners.lora import layer as lora
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        for adapter, config in _adapters_of(self._model).items():
            if config.peft_type != "LORA":
                raise RefusedError(f"adapter {adapter!r} is {config.peft_type}; only LoRA is merged")
        known = (lora.Linear, lora.Embedding, lora.Conv1d, lora.Conv2d, lora.Conv3d, lora.ParamWrapper)
        found: dict[str, torch.nn.Module] = {}
        for name, module in _base_of(self._model).named_modules(remove_duplicate=False):
            if _is_inside(name, found) or not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
                continue
            if type(module) not in (*known, ModulesToSaveWrapper):
                kind = f"{type(module).__module__}.{type(module).__name__}"
                raise RefusedError(f"{name}: layers of {kind} are not merged; publish the adapters alone")
            if any(isinstance(part, FSDPModule) for part in module.modules()):
                raise RefusedError(
                    f"{name}: it is, or holds, a unit of FSDP of its own, which cannot be copied; shard what it is in"
                )
            if not _is_adapted(module) and _is_adapted(_kept_module(module)):
                raise RefusedError(f"{name}: it is both in modules_to_save and adapted; it must be one of them")
            found[name] = module
        return found

    def _weights(self, layers: Mapping[str, torch.nn.Module]) -> list[_Weight]:
        """Return the selected weights, each once even if it has several names."""
        every: list[_Weight] = []
        for name, layer in layers.items():
            for inner, tensor in _tensors_in(_kept_module(layer)):
                every.append(_Weight([unwrapped_name(f"{name}.{inner}")], tensor, name, inner, True))
        for name, tensor in _tensors_in(_base_of(self._model)):
            if not _is_inside(name, layers):
                every.append(_Weight([unwrapped_name(name)], tensor, is_trained=tensor.requires_grad))
        weights: dict[int, _Weight] = {}
        for weight in every:
            first = weights.setdefault(id(weight.tensor), weight)
            if first is weight:
                continue
            one, other = (layers.get(each.layer) for each in (first, weight))
            if other is not None and one is not other and (_is_adapted(one) or _is_adapted(other)):
                raise RefusedError(
                    f"{first.names[0]} and {weight.names[0]} are one weight (tied), and each has an adapter; PEFT "
                    "would merge both into it; adapt one of them, or untie them"
                )
            first.names += weight.names
        if meta := [weight.names[0] for weight in weights.values() if weight.tensor.is_meta]:
            raise RefusedError(f"{meta[0]}: it has no memory (offloaded, or on the meta device)")
        return [weight for weight in weights.values() if weight.is_trained or not self._only_trained]


def _adapters_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the configurations of a model's adapters, by name."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not hasattr(model, "get_base_model"):
        raise RefusedError(f"{type(model).__name__} is no PeftModel; expected what peft.get_peft_model returns")
    return configs


def _base_of(model: Any) -> torch.nn.Module:
    base: torch.nn.Module = model.get_base_model()
    return base


def _is_inside(name: str, layers: Mapping[str, object]) -> bool:
    """Return whether a module or tensor is inside one of these layers."""
    while name:
        name = name.rpartition(".")[0]
        if name in layers:
            return True
    return False


def _is_adapted(layer: Any) -> bool:
    return hasattr(layer, "base_layer")


def _kept_module(layer: Any) -> torch.nn.Module:
    """Return the module that replaces a layer when its adapters are merged."""
    found: torch.nn.Module
    if _is_adapted(layer):
        found = layer.get_base_layer()
    elif not layer.active_adapters:
        found = layer.original_module
    else:
        found = layer.modules_to_save[layer.active_adapters[0]]
    return found


def _tensors_in(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            yield name, tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor gathered, and any other tensor unchanged."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _merged(layer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer's base layer with its adapters merged into them; the layer does not change."""
    if not _is_adapted(layer):
        return {name: _whole(tensor) for name, tensor in _tensors_in(_kept_module(layer))}
    # deepcopy uses an object's entry in `memo` instead of copying it: here gathered weights, without gradients
    memo: dict[int, Any] = {}
    for parameter in layer.parameters():
        memo[id(parameter)] = torch.nn.Parameter(_whole(parameter).clone(), requires_grad=False)
    twin = copy.deepcopy(layer, memo)
    if hasattr(twin, "unload_and_optionally_merge_module"):
        base = twin.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    else:
        twin.merge()
        base = twin.get_base_layer()
    return {name: tensor.detach() for name, tensor in _tensors_in(base)}
