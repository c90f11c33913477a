"""Refit a LoRA adapter of a vLLM engine: its tensors are a target, and vLLM loads the adapter from them."""

from __future__ import annotations

import os
from typing import Any

import torch

from refitd import RefusedError
from refitd.adapters.vllm.seams import check_adapter, lora_manager_of


class HeldAdapter:
    """One unsharded adapter in this rank's main memory. It has the folder's values until a version is live.

    vLLM's own code fills its adapter slots: it scales B, joins q, k and v, and selects this rank's shard. To make a
    version live, the adapter is dropped from the slots; the next forward pass that needs it loads it from `tensors`.

    Attributes:
        tensors: {name: tensor} under PEFT's names, in the type of the engine's slots.
    """

    def __init__(self, model: torch.nn.Module, folder: str) -> None:
        """Read the adapter, and make the engine load it from this object.

        Args:
            model: vLLM's model.
            folder: an adapter that PEFT saved; requests name it as their adapter's path.

        Raises:
            RefusedError: the engine was started without LoRA, or cannot serve the adapter in this folder.
        """
        self._manager = lora_manager_of(model)
        if self._manager is None:
            raise RefusedError("`lora` is set, and this engine takes no adapters: start it with --enable-lora")
        self._folder = os.path.realpath(folder)
        check_adapter(self._manager, self._folder)
        self.tensors = _read(self._folder, self._manager.lora_config.lora_dtype)
        self._loaded: set[int] = set()  # vLLM's ids of this adapter
        self._version: int | None = None
        self._manager._lora_model_cls = _held_model(self._manager._lora_model_cls, self)

    def check_offered(self, offered: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Raise RefusedError, with the first difference, unless the trainer offers this adapter's tensors."""
        if differ := sorted(self.tensors.keys() ^ offered.keys()):
            where = "the trainer offers" if differ[0] in self.tensors else f"the adapter in {self._folder} has"
            raise RefusedError(
                f"{where} no {differ[0]} ({len(differ)} tensors have only one of the two); offer "
                "refitd.adapters.peft.adapter_tensors(model) of the same adapter"
            )
        for name, tensor in self.tensors.items():
            if tensor.shape != (shape := offered[name][0]):
                raise RefusedError(
                    f"{name}: the trainer offers {list(shape)}, the adapter in {self._folder} has "
                    f"{list(tensor.shape)}; an adapter of another rank is another folder"
                )

    def is_in(self, folder: str) -> bool:
        """Whether this adapter was read from `folder`."""
        return os.path.realpath(folder) == self._folder

    def copies(self, number: int) -> dict[str, torch.Tensor]:
        """Return copies of the tensors for vLLM, which scales them in place; `number` is vLLM's id of the adapter."""
        self._loaded.add(number)
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def serve(self, version: int | None) -> None:
        """Make the next forward pass reload `tensors`, which hold this version; call it between two passes."""
        if version != self._version:
            for number in self._loaded:
                self._manager.remove_adapter(number)
            self._loaded.clear()
            self._version = version


def _held_model(base: type[Any], held: HeldAdapter) -> type[Any]:
    """Return a subclass of vLLM's adapter class that loads the adapter `held` from memory."""

    class FromMemory(base):
        @classmethod
        def from_local_checkpoint(
            cls, lora_dir: str, expected_lora_modules: set[str], peft_helper: Any, **given: Any
        ) -> Any:
            if not held.is_in(lora_dir):
                return super().from_local_checkpoint(lora_dir, expected_lora_modules, peft_helper, **given)
            if given.pop("moe_ep_spec", None) is not None:
                raise RefusedError(f"{lora_dir}: engines whose experts lie on several ranks take no adapters of refitd")
            return cls.from_lora_tensors(tensors=held.copies(given["lora_model_id"]), peft_helper=peft_helper, **given)

    return FromMemory


def _read(folder: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    file = os.path.join(folder, "adapter_model.safetensors")
    if not os.path.isfile(file):
        raise RefusedError(f"lora: {file} does not exist; expected a folder that PEFT's save_pretrained has written")
    return {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
