"""Which ways of moving bytes there are: names, what each can do, what it lacks here, how one is made."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refitd.copy_services.base import PACKED, Capabilities
from refitd.errors import ConfigError

if TYPE_CHECKING:
    import importlib.metadata

    from refitd.copy_services.base import PACKED, MappedCopyService
    from refitd.copy_services.epoch import Epoch
    from refitd.copy_services.exchange import ExchangeService

# Packages offer a Backend, or a function that returns one, under this group of entry points.
ENTRY_POINTS = "refitd.copy_services"
OWN = "refitd"  # the package that has the backends of this folder


@dataclass(frozen=True)
class Backend:
    """One way to move bytes. Nothing it needs is imported before a service is made.

    Attributes:
        name: what configurations and errors call it.
        capabilities: see Capabilities.
        missing: returns "" where it can run here, else what is missing and the command that brings it.
        mapped: makes a one-sided service with so many threads.
        on_device: makes a one-sided service for arenas of a GPU, by its number here.
        over_group: makes a two-sided service over a torch process group (None: the default group).
        join: makes a two-sided service by joining a membership epoch; a fresh process group each time.
    """

    name: str
    capabilities: Capabilities
    missing: Callable[[], str]
    mapped: Callable[[int], MappedCopyService] | None = None
    over_group: Callable[[Any], ExchangeService] | None = None
    join: Callable[[Epoch], ExchangeService] | None = None
    on_device: Callable[[int], MappedCopyService] | None = None


class Registry:
    """Backends by name. Whoever needs one makes it, or is given it."""

    def __init__(self, backends: Iterable[Backend], more: Callable[[], Iterable[Backend]] = tuple) -> None:
        """Take backends, and `more` of them, loaded where a name is not among the first.

        Raises:
            ConfigError: two backends have one name: a later one does not replace an earlier one.
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
            ConfigError: there is none of this name, or it lacks something; the text says what to install.
        """
        if not isinstance(name, str) or name not in self._backends:
            self._load()
        backend = self._backends.get(name) if isinstance(name, str) else None
        if backend is None:
            raise ConfigError(f"unknown copy service {name!r}; there are {', '.join(sorted(self._backends))}")
        if missing := backend.missing():
            raise ConfigError(f"copy service {name!r} cannot run here: {missing}")
        return backend


@dataclass(frozen=True)
class Offer:
    """A backend that is yet to be loaded, for those who want to know of each of them what became of it.

    Attributes:
        name: what it is to be called.
        package: which distribution has it.
        load: returns the backend; raises ConfigError, with the package's name, where it cannot be loaded.
    """

    name: str
    package: str
    load: Callable[[], Backend]


def installed() -> Registry:
    """Return refitd's own backends and those that other packages offer, which are loaded when they are needed.

    Whoever needs them is told by a ConfigError which package offers one that cannot be loaded.
    """
    return Registry(_own(), lambda: (offer.load() for offer in _others()))


def offers() -> Iterator[Offer]:
    """Yield what `installed` loads: refitd's own backends, then those of other packages."""
    for backend in _own():
        yield Offer(backend.name, OWN, partial(_loaded, backend))
    yield from _others()


def _others() -> Iterator[Offer]:
    import importlib.metadata  # takes as long as a third of a worker's other imports

    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        package = point.dist.name if point.dist else point.value
        yield Offer(point.name, package, partial(_load, point, package))


def _own() -> list[Backend]:
    return [
        Backend("shm", Capabilities(is_one_sided=True, crosses_nodes=False), lambda: "", mapped=_shm),
        Backend(
            "gloo",
            PACKED,
            lambda: _lacks("torch", "pip install torch"),
            over_group=_gloo,
            join=_join_gloo,
        ),
        Backend("nccl", PACKED, _lacks_gpu, over_group=_nccl, join=_join_nccl),
        Backend("nvshmem", PACKED, _lacks_nvshmem, join=_join_nvshmem),
        Backend(
            "cuda",
            Capabilities(is_one_sided=True, crosses_nodes=False, devices=frozenset({"cuda"})),
            _lacks_gpu,
            mapped=_first_gpu,
            on_device=_cuda,
        ),
    ]


def _loaded(backend: Backend) -> Backend:
    return backend


def _load(point: importlib.metadata.EntryPoint, package: str) -> Backend:
    try:
        found = point.load()
        backend = found() if callable(found) else found
    except Exception as exc:  # whatever a foreign package raises while it is imported
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
        command = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        found.append(_lacks("torch", command) or f"this torch has no CUDA; `{command}` brings one that has")
    return "; ".join(found)


def _lacks_nvshmem() -> str:
    major = torch_cuda().partition(".")[0] or "13"
    # the wheels for two majors overwrite each other: it must be the one that torch was built for
    lacks = _lacks("nvshmem", f"pip install 'refitd[cuda{major}]'").replace("nvshmem", "nvshmem4py", 1)
    return "; ".join(part for part in (_lacks_gpu(), lacks) if part)


def torch_cuda() -> str:
    """Return the CUDA version torch was built for, "" for none; torch, which takes seconds, is not imported."""
    try:
        spec = importlib.util.find_spec("torch")
        text = Path(spec.origin or "").with_name("version.py").read_text() if spec else ""
    except (ImportError, OSError, ValueError):
        return ""
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def _shm(threads: int) -> MappedCopyService:
    from refitd.copy_services.shm import SharedMemoryService

    return SharedMemoryService(threads)


def _gloo(group: Any) -> ExchangeService:
    from refitd.copy_services.gloo import GlooService

    return GlooService(group)


def _join_gloo(epoch: Epoch) -> ExchangeService:
    from refitd.copy_services.gloo import join

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


def _first_gpu(threads: int) -> MappedCopyService:
    return _cuda(0)


def _cuda(device: int) -> MappedCopyService:
    from refitd.copy_services.cuda import CudaCopyService

    return CudaCopyService(device)  # one stream keeps a GPU busy; threads are for processors
