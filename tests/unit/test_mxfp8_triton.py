"""The kernel writes the bytes of the CPU. Without a GPU it runs in Triton's interpreter, where triton is installed."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

from refitd import RefusedError
from refitd.transforms.mxfp8_buffers import check_device
from tests.support import programs

HAS_TRITON = importlib.util.find_spec("triton") is not None
COMPARE = """
import numpy as np, torch
from refitd.transforms import mxfp8_format as fmt, mxfp8_triton
from tests.support.mxfp8 import every_amax, random_values

values = random_values()
few = torch.cat([every_amax()[::13].reshape(-1), every_amax()[-64:].reshape(-1)])
few = torch.cat([few, *(each.reshape(-1)[:32 * 300] for each in values.values())])
blocks = len(few) // 96 * 96
for columns in (32, 96):
    words = few[:blocks].view(-1, columns).view(torch.int16)
    count = columns // 32
    for rounding in fmt.Rounding:
        data, scales = np.empty(words.shape, np.uint8), np.empty((len(words), count), np.uint8)
        fmt.quantize(words.numpy().view(np.uint16), data, scales, rounding)
        swizzled = np.empty(fmt.swizzled_bytes(*scales.shape), np.uint8)
        fmt.swizzle(scales, swizzled)
        for is_swizzled, expected in ((False, scales), (True, swizzled)):
            # rows that lie apart
            found = torch.full((len(words), columns + 8), 0xEE, dtype=torch.uint8)[:, :columns]
            out = torch.full(expected.shape, 0xEE, dtype=torch.uint8)
            mxfp8_triton.quantize(words, found, out, rounding, is_swizzled=is_swizzled)
            assert (found.numpy() == data).all(), (columns, rounding, is_swizzled, "data")
            assert (out.numpy() == expected).all(), (columns, rounding, is_swizzled, "scales")
print("same bytes")
"""


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton: pip install --no-deps triton")
def test_the_kernel_writes_the_bytes_of_the_cpu_in_the_interpreter() -> None:
    ran = programs.run([sys.executable, "-c", COMPARE], env={**os.environ, "TRITON_INTERPRET": "1"})
    assert ran.stdout.strip() == "same bytes", ran.stderr


def test_a_gpu_without_triton_is_refused_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RefusedError, match="w: it is on cuda:0, and converting there needs triton"):
        check_device("w", torch.device("cuda", 0))
    check_device("w", torch.device("cpu"))
