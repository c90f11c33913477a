"""Replace torch's GPU calls in refitd by calls that work on the memory of fake_cuda.c.

Each of PATCHES names a module of refitd and gives the new values of its attributes. The processes of a test import this
through sitecustomize.py beside it; the test's own process through tests.support.fake_cuda. This module imports torch
and refitd only after refitd itself does.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

# (owner, address, bytes, GPU) of memory on a fake GPU; it is freed with its owner
is_late = False  # whether tensors on GPUs do their work late; in processes that a test starts, FAKE_CUDA_LATE says so
_on_gpu: list[tuple[weakref.ref[Any], int, int, int]] = []


class _Memory:
    """Memory at an address, in the form that numpy accepts; arrays over it keep `owner`."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def tensor_at(address: int, nbytes: int, device: Any, owner: Any = None) -> Any:
    """Replaces refitd.buffers.cuda.tensor_at."""
    import numpy as np
    import torch

    if owner is not None:
        _on_gpu.append((weakref.ref(owner), address, nbytes, device.index))
    found = torch.from_numpy(np.asarray(_Memory(address, nbytes, owner)))
    return late().LateTensor.over(found) if is_late else found


def put_on_gpu(tensor: Any, gpu: int) -> Any:
    """Have a tensor of the test count as private memory on a GPU; return it."""
    _on_gpu.append((weakref.ref(tensor), tensor.data_ptr(), tensor.numel() * tensor.element_size(), gpu))
    return tensor


def _is_there(owner: Any, address: int) -> bool:
    """Whether an arena is still mapped, or a tensor of the test still has this address."""
    if owner is None:
        return False
    return bool(owner.data_ptr() == address) if hasattr(owner, "data_ptr") else bool(getattr(owner, "address", 1))


def gpu_of(tensor: Any) -> int:
    """Replaces refitd.describe.memory.gpu_of."""
    _on_gpu[:] = [known for known in _on_gpu if _is_there(known[0](), known[1])]
    at = tensor.data_ptr()
    return next((gpu for _, start, nbytes, gpu in _on_gpu if start <= at < start + nbytes), -1)


@dataclass(frozen=True)
class Made:
    """A value of PATCHES that needs torch: what this function returns."""

    by: Callable[[], Any]


def late() -> Any:
    """Return the module of late work; it imports torch."""
    return importlib.import_module(f"{__package__}.late" if __package__ else "late")


def _staging() -> Any:
    from refitd.copy_services.packed import PackedExchange

    in_main_memory = PackedExchange._staging

    def on_gpu(self: Any) -> Any:
        found = in_main_memory(self)
        return late().LateTensor.over(late().plain_of(found)) if is_late else found

    return on_gpu


current: dict[str, int] = {}  # "gpu": the current GPU, once there is one


def queue_on(stream: int, work: Callable[[], None]) -> None:
    """Perform a library's work in the order of a stream."""
    late().queue_on(stream, work)


def make_current(device: Any) -> Any:
    """Replaces refitd.copy_services.waits.make_current."""
    import fake_nccl
    import torch

    if device.type == "cuda":
        current["gpu"] = device.index
        fake_nccl.install()
    return torch.device("cpu")


class _NcclPeers:
    """Replaces refitd.copy_services.nccl.Peers: as on a GPU, records travel by collectives."""

    def __new__(cls, *args: Any) -> Any:
        from refitd.copy_services.peers import Peers

        class OnGpu(Peers):
            _is_named = False  # type: ignore[assignment]

        return OnGpu(*args)


PATCHES: dict[str, dict[str, Any]] = {
    "refitd.buffers.cuda": {"tensor_at": tensor_at},
    "refitd.copy_services.registry": {"torch_cuda": lambda: "13.0"},
    "refitd.copy_services.cuda": {"torch": Made(lambda: late().Torch())},
    "refitd.copy_services.nccl": {
        "Peers": _NcclPeers,
        "make_current": make_current,
        "NcclService._staging": Made(_staging),
    },
    "refitd.copy_services.nvshmem": {"make_current": make_current},
    "refitd.copy_services.nixl": {"make_current": make_current},
    "refitd.copy_services.waits": {"torch": Made(lambda: late().Torch())},
    "refitd.describe.memory": {"gpu_of": gpu_of},
    "refitd.daemon.workers": {"SYSFS": Path(os.environ.get("FAKE_SYSFS", "/sys"))},
    "refitd.client.arenas": {"gpu_of": gpu_of, "settle": lambda gpu: None},
    "refitd.client.adopt": {"settle": lambda gpu: None},
    "refitd.client.memory_block": {"gpu_of": gpu_of},
    "refitd.client.tensors": {"gpu_of": gpu_of, "settle": lambda gpu: None},
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of PATCHES in the usual way, and changes them once they have been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, PATCHES[fullname])
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, changes: dict[str, Any]) -> None:
        self._loader = loader
        self._changes = changes

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for at, name, value in _places(module, self._changes):
            getattr(at, name)  # a renamed attribute must fail here; otherwise the test would test the wrong code
            setattr(at, name, value)


def _places(module: ModuleType, changes: dict[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    for path, value in changes.items():
        *owners, name = path.split(".")
        at: Any = module
        for owner in owners:
            at = getattr(at, owner)
        yield at, name, value.by() if isinstance(value, Made) else value


def install() -> None:
    """Change what this process will import."""
    sys.meta_path.insert(0, _Finder())


def apply(replace: Callable[[ModuleType, str, Any], None]) -> None:
    """Change what this process has imported, by a function that undoes it later (monkeypatch.setattr)."""
    for name, changes in PATCHES.items():
        for at, attribute, value in _places(importlib.import_module(name), changes):
            replace(at, attribute, value)
