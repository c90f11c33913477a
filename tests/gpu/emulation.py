"""The environment in which processes find the emulated GPU: a driver over memory files, and torch without CUDA."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping

GPU_BYTES = 1 << 30


def emulated(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with one emulated GPU; it needs a C compiler and pytest."""
    from tests.support import fake_cuda

    def first(path: object, variable: str) -> str:
        return os.pathsep.join([str(path), *filter(None, [environment.get(variable, "")])])

    return {
        **environment,
        "FAKE_CUDA_TAG": uuid.uuid4().hex[:12],
        "FAKE_CUDA_VISIBLE": "0",
        "FAKE_CUDA_BYTES": str(GPU_BYTES),
        "LD_LIBRARY_PATH": first(fake_cuda.driver().parent, "LD_LIBRARY_PATH"),
        "PYTHONPATH": first(fake_cuda.HERE / "fake_torch", "PYTHONPATH"),
        "TRITON_INTERPRET": "1",
    }
