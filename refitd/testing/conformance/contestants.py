"""The backends that the suite tests, each with the kinds of memory that it supports."""

from __future__ import annotations

from dataclasses import dataclass

from refitd.copy_services import Backend, Capabilities
from refitd.copy_services.registry import installed


@dataclass(frozen=True)
class Contestant:
    """A backend, and the device of the tensors that it is given."""

    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities in the registry."""
        return _backend(self.backend).capabilities

    @property
    def is_shared(self) -> bool:
        """Whether any process reaches the tensors."""
        return self.device == "cpu"

    @property
    def converts(self) -> bool:
        """Whether it converts dtypes during the transfer."""
        return self.device == "cpu" or not self.capabilities.is_one_sided

    @property
    def takes_any_address(self) -> bool:
        """Whether an element's address need not be a multiple of its size; torch's tensors need that."""
        return self.device == "cpu" or self.capabilities.is_one_sided

    def found(self) -> Backend:
        """Return the backend from the registry."""
        return installed().find(self.backend)

    def missing(self) -> str:
        """Return the reason why it cannot be tested here, or ""."""
        backend = _backend(self.backend)
        if missing := backend.missing():
            return missing
        if backend.mapped is None and backend.join is None:
            return f"{self.backend} can neither be made for arenas nor join an epoch; this suite needs one of them"
        if self.device not in ("cpu", "cuda"):
            return f"this suite has no memory on {self.device}; add it to refitd/testing/conformance/services.py"
        if self.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                return "no CUDA device on this machine"
        return ""


def contestants() -> list[Contestant]:
    """Return every installed backend, once for each kind of memory that it declares."""
    return [
        Contestant(backend.name, device) for backend in installed() for device in sorted(backend.capabilities.devices)
    ]


def _backend(name: str) -> Backend:
    return next(backend for backend in installed() if backend.name == name)
