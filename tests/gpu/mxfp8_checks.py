"""The check of MXFP8 on one GPU: the CPU's bytes, the speed, and a CUDA graph over converted weights."""

from __future__ import annotations

import functools

import torch

from refitd.mxfp8.format import Rounding
from tests.gpu.device import GPU
from tests.gpu.outcomes import Outcome, need


def mxfp8(seconds: float) -> Outcome:
    need(triton="triton")
    from refitd.mxfp8 import kernels
    from refitd.mxfp8.buffers import MXFP8Buffer
    from refitd.mxfp8.transform import MXFP8ReshardTransform

    # random bits, with NaNs, infinities and subnormals; and weights
    torch.manual_seed(3)
    count = min(1000, GPU.scaled(8 << 10))
    words = torch.randint(-(1 << 15), 1 << 15, (count, 4096), dtype=torch.int16)
    words[: count // 2] = (torch.randn(count // 2, 4096) * 0.02).to(torch.bfloat16).view(torch.int16)
    for rounding in Rounding:
        here = MXFP8Buffer.empty(tuple(words.shape))
        here = MXFP8Buffer(here.data, here.scale, rounding)
        here.quantize(words.view(torch.bfloat16))
        data, scale = (torch.full_like(part, 0xEE, device=GPU.device) for part in (here.data, here.scale))
        kernels.quantize(words.to(GPU.device), data, scale, rounding)
        assert torch.equal(data.cpu(), here.data), f"{rounding}: data differs"
        assert torch.equal(scale.cpu(), here.scale), f"{rounding}: scales differ"

    rows, columns = GPU.scaled(8192), min(16384, GPU.scaled(1 << 19))
    large = (torch.randn(rows, columns, device=GPU.device) * 0.02).to(torch.bfloat16)
    limit = GPU.copy_rate()
    room = MXFP8Buffer.empty((rows, columns), device=GPU.device)
    step = functools.partial(kernels.quantize, large.view(torch.int16), room.data, room.scale, Rounding.RCEIL)
    # two bytes read and one written, and a scale for 32; a copy reads and writes each byte that it counts
    rate = large.numel() * (3 + 1 / 32) / 2 / GPU.seconds(step) / 1e9
    figures: dict[str, object] = {"device copy GB/s": limit, "row-major GB/s": rate, "of device copy": rate / limit}

    size = min(512, GPU.scaled(1 << 15))
    buffer = MXFP8Buffer.empty((size, size), device=GPU.device)
    transform = MXFP8ReshardTransform({"w"}, {"w": buffer})
    x = torch.randn(16, size, device=GPU.device)
    pointers = buffer.data.data_ptr(), buffer.scale.data_ptr()

    def run() -> torch.Tensor:
        exponent = buffer.scale.to(torch.float32) - 127
        elements = buffer.data.view(torch.float8_e4m3fn).to(torch.float32).view(size, -1, 32)
        return x @ (elements * torch.exp2(exponent)[..., None]).view(size, size).t()

    replay, y = GPU.capture(run)
    for version in range(3):
        weights = (torch.randn(size, size, device=GPU.device) * 0.02).to(torch.bfloat16)
        halves = [(slice(0, size), slice(0, 50)), (slice(0, size), slice(50, size))]  # which cut a block
        transform.begin_recv("w", halves)
        for half in halves:
            (arrived,) = transform.prepare_recv("w", half)
            arrived.copy_(weights[half])
            transform.finalize_recv("w", half, [arrived])
        transform.finish_recv("w")
        replay()
        GPU.synchronize()
        expected = MXFP8Buffer.empty((size, size))
        expected.quantize(weights.cpu())
        assert torch.equal(buffer.data.cpu(), expected.data), f"version {version}: data differs"
        assert torch.equal(buffer.scale.cpu(), expected.scale), f"version {version}: scales differ"
        assert torch.equal(y, run()), f"version {version}: the replay differs from eager"
    assert pointers == (buffer.data.data_ptr(), buffer.scale.data_ptr())
    return Outcome(figures)
