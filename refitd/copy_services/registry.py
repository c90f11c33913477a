"""The registry of copy services: names, capabilities, missing dependencies, and constructors."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refitd.copy_services import PACKED, Backend, Capabilities
from refitd.errors import ConfigError

if TYPE_CHECKING:
    import importlib.metadata

    from refitd.copy_services import Epoch, ExchangeService, MappedCopyService

# The group of entry points under which packages offer a Backend, or a function that returns one.
ENTRY_POINTS = "refitd.copy_services"
OWN = "refitd"  # the package that contains the backends of this folder


class Registry:
    """Backends by name. An object, owned by its creator and passed on."""

    def __init__(self, backends: Iterable[Backend], more: Callable[[], Iterable[Backend]] = tuple) -> None:
        """Take `backends`; `more` loads further ones when a name is not among these.

        Raises:
            ConfigError: two backends have the same name; a later one does not replace an earlier one.
        """
        self._backends: dict[str, Backend] = {}
        self._more: Callable[[], Iterable[Backend]] = more
        self._add(backends)

    def _add(self, backends: Iterable[Backend]) -> None:
        for backend in backends:
            if backend.name in self._backends:
                raise ConfigError(f"two copy services are named {backend.name!r}; uninstall one of the packages")
            self._backends[backend.name] = backend

    def _load(self) -> None:
        self._add(list(self._more()))
        self._more = tuple

    def __iter__(self) -> Iterator[Backend]:
        self._load()
        return iter(self._backends.values())

    def find(self, name: str) -> Backend:
        """Return a backend that can run here.

        Raises:
            ConfigError: no backend has this name, or it lacks a dependency; says what to install.
        """
        if not isinstance(name, str) or name not in self._backends:
            self._load()
        backend = self._backends.get(name) if isinstance(name, str) else None
        if backend is None:
            raise ConfigError(f"unknown copy service {name!r}; known are {', '.join(sorted(self._backends))}")
        if missing := backend.missing():
            raise ConfigError(f"copy service {name!r} cannot run here: {missing}")
        return backend


@dataclass(frozen=True)
class Offer:
    """A backend that is not loaded yet: the failure of each one can be reported.

    Attributes:
        name: its name.
        package: the distribution that contains it.
        load: returns the backend; raises ConfigError with the package's name if it cannot be loaded.
    """

    name: str
    package: str
    load: Callable[[], Backend]


def installed() -> Registry:
    """Return refitd's own backends and, loaded when needed, the backends of other packages.

    If a backend of another package cannot be loaded, a ConfigError names the package.
    """
    return Registry(_own(), lambda: (offer.load() for offer in _others()))


def offers() -> Iterator[Offer]:
    """Yield the backends of `installed`: refitd's own, then the backends of other packages."""
    for backend in _own():
        yield Offer(backend.name, OWN, partial(_loaded, backend))
    yield from _others()


def _others() -> Iterator[Offer]:
    import importlib.metadata  # this import takes a third of the time of a worker's other imports

    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        package = point.dist.name if point.dist else point.value
        yield Offer(point.name, package, partial(_load, point, package))


def _own() -> list[Backend]:
    return [
        Backend("shm", Capabilities(is_one_sided=True, crosses_nodes=False), lambda: "", mapped=_shm),
        Backend(
            "gloo",
            PACKED,
            lambda: _lacks("torch", "pip install 'refitd[torch]'"),
            over_group=_gloo,
            join=_join_gloo,
        ),
        Backend("nixl", PACKED, lambda: _lacks("nixl", "pip install 'refitd[nixl]'"), join=_join_nixl),
        Backend("nccl", PACKED, _lacks_gpu, over_group=_nccl, join=_join_nccl),
        Backend("nvshmem", PACKED, _lacks_nvshmem, join=_join_nvshmem),
        Backend(
            "cuda",
            Capabilities(is_one_sided=True, crosses_nodes=False, devices=frozenset({"cuda"})),
            _lacks_gpu,
            mapped=partial(_cuda, 0),
            on_device=_cuda,
        ),
    ]


def _loaded(backend: Backend) -> Backend:
    return backend


def _load(point: importlib.metadata.EntryPoint, package: str) -> Backend:
    try:
        found = point.load()
        backend = found() if callable(found) else found
    except Exception as exc:  # a foreign package may raise anything during import
        raise ConfigError(f"copy service {point.name!r} of package {package} cannot be loaded: {exc}") from exc
    if not isinstance(backend, Backend):
        raise ConfigError(f"copy service {point.name!r} of package {package} is no Backend but {backend!r}")
    return backend


def _lacks(module: str, command: str) -> str:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    return "" if found is not None else f"{module} is not installed; `{command}` brings it"


def _lacks_gpu() -> str:
    from refitd.buffers.cuda import visible_devices

    found = [] if visible_devices() else ["no GPU is visible to this process (nvidia-smi, CUDA_VISIBLE_DEVICES)"]
    if not torch_cuda():
        # without --force-reinstall, pip keeps a CPU build of an equal version
        command = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
        found.append(_lacks("torch", command) or f"this torch has no CUDA; `{command}` brings one that has")
    return "; ".join(found)


def _lacks_nvshmem() -> str:
    major = torch_cuda().partition(".")[0] or "13"
    # the wheels for two CUDA majors overwrite each other: name the one that torch was built for
    command = f"pip install nvshmem4py-cu{major} nvidia-nvshmem-cu{major}"
    lacks = _lacks("nvshmem", command).replace("nvshmem", "nvshmem4py", 1)
    return "; ".join(part for part in (_lacks_gpu(), lacks) if part)


def torch_cuda() -> str:
    """Return the CUDA version torch was built for, "" for none, without importing torch, which takes seconds."""
    try:
        spec = importlib.util.find_spec("torch")
        text = Path(spec.origin or "").with_name("version.py").read_text() if spec else ""
    except (ImportError, OSError, ValueError):
        return ""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def _shm() -> MappedCopyService:
    from refitd.copy_services.shm import SharedMemoryService

    return SharedMemoryService()


def _gloo(group: Any) -> ExchangeService:
    from refitd.copy_services.gloo import GlooService

    return GlooService(group)


def _join_gloo(epoch: Epoch) -> ExchangeService:
    from refitd.copy_services.gloo import join

    return join(epoch)


def _join_nixl(epoch: Epoch) -> ExchangeService:
    from refitd.copy_services.nixl import join

    return join(epoch)


def _nccl(group: Any) -> ExchangeService:
    from refitd.copy_services.nccl import NcclService

    return NcclService(group)


def _join_nccl(epoch: Epoch) -> ExchangeService:
    from refitd.copy_services.nccl import join

    return join(epoch)


def _join_nvshmem(epoch: Epoch) -> ExchangeService:
    from refitd.copy_services.nvshmem import join

    return join(epoch)


def _cuda(device: int) -> MappedCopyService:
    from refitd.copy_services.cuda import CudaCopyService

    return CudaCopyService(device)
