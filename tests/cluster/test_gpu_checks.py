"""The daemon checks of scripts/gpu-check, run with the fake driver to keep them working for machines with a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import refitd
from tests.gpu import service_checks
from tests.support import fake_cuda
from tests.support.fake_torch.device_shim import put_on_gpu


@pytest.mark.slow
@pytest.mark.parametrize("name", ["daemon-crossing", "daemon-mxfp8"])
def test_checks_of_daemons_pass_behind_the_fake_driver(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake_cuda.install(monkeypatch, 2 << 30)
    make_generator, make_buffer = torch.Generator, refitd.MXFP8Buffer.empty

    def buffer(shape: tuple[int, ...], *, is_swizzled: bool, device: Any) -> refitd.MXFP8Buffer:
        made = make_buffer(shape, is_swizzled=is_swizzled)
        put_on_gpu(made.data, 0)
        put_on_gpu(made.scale, 0)
        return made

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch, "Generator", lambda device: make_generator())
    monkeypatch.setattr(refitd.MXFP8Buffer, "empty", buffer)
    figures = service_checks.CHECKS[name](100.0, 1)
    assert figures["MiB"] in (32.0, 64.0)
