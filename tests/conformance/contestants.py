"""The backends that the suite tries, each with the memory that it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from refitd.copy_services.base import Capabilities
from refitd.copy_services.registry import Backend, installed

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Contestant:
    """A backend, and where the tensors lie that it is given."""

    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"

    @property
    def capabilities(self) -> Capabilities:
        """What the registry says of it."""
        return _backend(self.backend).capabilities

    @property
    def is_shared(self) -> bool:
        """Whether any process reaches the tensors, as clients and their lent memory do."""
        return self.device == "cpu"

    @property
    def converts(self) -> bool:
        """Whether it converts numbers on the way."""
        return self.device == "cpu" or not self.capabilities.is_one_sided

    @property
    def takes_any_address(self) -> bool:
        """Whether elements may lie at addresses that are no multiples of them; torch's tensors may not."""
        return self.device == "cpu" or self.capabilities.is_one_sided

    def found(self) -> Backend:
        """Return it as the registry gives it."""
        return installed().find(self.backend)

    def missing(self) -> str:
        """Return why it cannot be tested here, or ""."""
        backend = _backend(self.backend)
        if missing := backend.missing():
            return missing
        if backend.mapped is None and backend.join is None:
            return f"{self.backend} can neither be made for arenas nor join an epoch; this suite needs one of them"
        if self.device not in ("cpu", "cuda"):
            return f"this suite has no memory on {self.device}; add it to tests/conformance/services.py"
        if self.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                return "no CUDA device on this machine"
        return ""


def contestants() -> list[Contestant]:
    """Return every installed backend, once for each kind of memory that it says it takes."""
    return [
        Contestant(backend.name, device) for backend in installed() for device in sorted(backend.capabilities.devices)
    ]


def _backend(name: str) -> Backend:
    return next(backend for backend in installed() if backend.name == name)
