"""The arithmetic of MXFP8: against torchao on bfloat16, against rational numbers on float32, and at its edges."""

from __future__ import annotations

import importlib.util
import math
import os
import struct
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from refitd import RefusedError
from refitd.mxfp8 import format as fmt
from refitd.mxfp8.buffers import check_device
from refitd.mxfp8.format import Rounding, swizzled_bytes
from tests.support import programs
from tests.support.mxfp8 import E4M3, element_of, every_amax, random_values, scale_of, swizzled, words_of

BOTH = pytest.mark.parametrize("rounding", list(Rounding))
NAN, INF = float("nan"), float("inf")


def converted(values: torch.Tensor, rounding: Rounding) -> tuple[np.ndarray, np.ndarray]:
    words = words_of(values)
    data, scales = np.full(words.shape, 0xEE, np.uint8), np.full((len(words), words.shape[1] // 32), 0xEE, np.uint8)
    fmt.quantize(words, data, scales, rounding)
    return data, scales


def block(*values: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a block of 32 that begins with these values and repeats the last one."""
    return torch.tensor([[*values, *[values[-1]] * (32 - len(values))]], dtype=dtype)


@BOTH
@pytest.mark.parametrize("what", ["every amax", *random_values()])
def test_bfloat16_gives_the_bytes_of_torchao(what: str, rounding: Rounding) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao: pip install .[dev]")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    values = every_amax() if what == "every amax" else random_values()[what]
    data, scales = converted(values, rounding)
    theirs = mx.to_mx(values, torch.float8_e4m3fn, 32, config.ScaleCalculationMode[rounding.name])
    their_scales, their_data = (tensor.view(torch.uint8).numpy() for tensor in theirs)
    np.testing.assert_array_equal(scales, their_scales)
    is_nan = np.repeat(scales == fmt.NAN_SCALE, 32, axis=1)
    np.testing.assert_array_equal(data[~is_nan], their_data[~is_nan])
    assert (data[is_nan] == 0x7F).all()  # torchao may return numbers although the scale is NaN


@BOTH
def test_float32_that_bfloat16_can_hold_gives_the_same_bytes(rounding: Rounding) -> None:
    for values in (every_amax(), *random_values().values()):
        for ours, wide in zip(converted(values, rounding), converted(values.float(), rounding), strict=True):
            np.testing.assert_array_equal(ours, wide)


@BOTH
def test_float32_is_rounded_as_rational_numbers_are(rounding: Rounding) -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(24, 32, generator=generator) * torch.exp2(
        torch.randint(-60, 60, (24, 1), generator=generator).float()
    )
    values[::3, 5] *= 2.0**-12  # below the normal numbers of E4M3
    steps = torch.tensor([float(a + b) / 2 for a, b in pairwise(E4M3)])
    ties = torch.cat([steps, -steps, torch.tensor([448.0, 448.0])])[:224].view(7, 32)
    ties[:, 0] = 448  # this makes the scale 1 in either rounding
    ties = torch.cat([ties, torch.nextafter(ties, torch.zeros(())), torch.nextafter(ties, torch.full((), INF))])
    for rows in (values, ties):
        data, scales = converted(rows, rounding)
        for row in range(len(rows)):
            exact = rows[row].tolist()
            assert scales[row, 0] == scale_of(exact, rounding)
            assert data[row].tolist() == [element_of(value, int(scales[row, 0])) for value in exact]


@BOTH
def test_scales_around_every_power_of_two_are_exact(rounding: Rounding) -> None:
    """ceil(log2()) in float32 is one too low just above 448 * 2**k."""
    rows = []
    for k in range(-100, 110, 3):
        for edge in (448.0, 256.0):
            at = torch.tensor(edge * 2.0**k)
            rows += [at, torch.nextafter(at, torch.zeros(())), torch.nextafter(at, torch.full((), INF))]
    values = torch.stack(rows)[:, None].repeat(1, 32)
    _, scales = converted(values, rounding)
    assert scales[:, 0].tolist() == [scale_of([float(row)], rounding) for row in rows]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@BOTH
def test_a_nan_makes_its_block_nan_and_no_other(rounding: Rounding, dtype: torch.dtype) -> None:
    values = torch.cat([block(1.0, NAN, 2.0, dtype=dtype), block(1.0, 2.0, dtype=dtype)])
    data, scales = converted(values, rounding)
    assert scales[0, 0] == 255 and (data[0] == 0x7F).all()
    assert scales[1, 0] < 255 and not (data[1] & 0x7F == 0x7F).any()
    words = np.empty(data.shape, np.uint16)
    fmt.dequantize(data, scales, words)
    assert torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).isnan().all(1).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rounding", "scale"), [(Rounding.RCEIL, 254), (Rounding.FLOOR, 247)])
def test_infinities_are_the_largest_elements_under_the_largest_scale(
    rounding: Rounding, scale: int, dtype: torch.dtype
) -> None:
    data, scales = converted(block(INF, -INF, 1.0, 0.0, dtype=dtype), rounding)
    assert scales[0, 0] == scale
    assert data[0, :4].tolist() == [0x7E, 0xFE, 0, 0]


@BOTH
def test_zeros_keep_their_signs(rounding: Rounding) -> None:
    data, scales = converted(torch.cat([block(0.0, -0.0), block(1.0, -0.0, 0.0)]), rounding)
    assert scales[0, 0] == 0 and data[0, :3].tolist() == [0, 0x80, 0x80]
    assert data[1, 1:3].tolist() == [0x80, 0]


def test_subnormals_as_in_the_module_s_table() -> None:
    tiny = struct.unpack("f", struct.pack("I", 1 << 16))[0]  # the smallest that bfloat16 holds, 2**-133
    for dtype in (torch.bfloat16, torch.float32):
        data, scales = converted(block(tiny, -127 * tiny, dtype=dtype), Rounding.RCEIL)
        assert scales[0, 0] == 0 and data[0, :2].tolist() == [0, 0x80]
        # divided by 2**-126: steps of 2**-9 * 2**-126
        data, scales = converted(block(tiny, -127 * tiny, 4 * tiny, dtype=dtype), Rounding.FLOOR)
        assert scales[0, 0] == 0
        assert data[0, :3].tolist() == [element_of(value / 2, 1) for value in (2 * tiny, -254 * tiny, 8 * tiny)]
    # a subnormal beside a number that the scale follows
    data, scales = converted(block(2.0**-117, 64 * tiny), Rounding.FLOOR)
    assert data[0, :2].tolist() == [element_of(value, int(scales[0, 0])) for value in (2.0**-117, 64 * tiny)]


def test_nothing_is_nothing() -> None:
    for shape in ((0, 64), (4, 0)):
        fmt.quantize(
            np.empty(shape, np.uint16), np.empty(shape, np.uint8), np.empty((shape[0], shape[1] // 32), np.uint8)
        )


def test_shapes_that_do_not_fit_are_refused() -> None:
    words, data, scales = np.zeros((2, 64), np.uint16), np.zeros((2, 64), np.uint8), np.zeros((2, 2), np.uint8)
    with pytest.raises(ValueError, match="blocks of 32"):
        fmt.quantize(words[:, :48], data[:, :48], scales)
    with pytest.raises(ValueError, match=r"int32\[2, 64\]"):
        fmt.quantize(words.astype(np.int32), data, scales)
    with pytest.raises(ValueError, match=r"scales have shape \[2, 1\], expected \[2, 2\]"):
        fmt.quantize(words, data, scales[:, :1])
    with pytest.raises(ValueError, match=r"have shape \[4\], expected \[512\]"):
        fmt.swizzle(scales, np.zeros(4, np.uint8))


def test_dequantizing_gives_what_the_bytes_mean() -> None:
    data = np.arange(256, dtype=np.uint8).repeat(8).reshape(64, 32)
    scales = np.array([0, 1, 100, 127, 128, 200, 254, 255], np.uint8).repeat(8)[:, None]
    words = np.empty(data.shape, np.uint16)
    fmt.dequantize(data, scales, words)
    found = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
    for row in range(64):
        for column in range(32):
            code, scale = int(data[row, column]), int(scales[row, 0])
            if scale == 255 or code & 0x7F == 0x7F:
                assert math.isnan(found[row, column])
                continue
            exact = E4M3[code & 0x7F] * (-1 if code & 0x80 else 1) * 2 ** (scale - 127 + 200)
            wide = torch.tensor(float(exact), dtype=torch.float64) * 2.0**-200
            assert found[row, column] == wide.to(torch.float32).to(torch.bfloat16), (code, scale)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (127, 3), (129, 5), (256, 8), (300, 1), (5, 17)])
def test_swizzled_scales_lie_where_cublas_reads_them(shape: tuple[int, int]) -> None:
    scales = np.random.default_rng(3).integers(0, 256, shape, np.uint8)
    out = np.full(swizzled_bytes(*shape), 0xEE, np.uint8)
    fmt.swizzle(scales, out)
    np.testing.assert_array_equal(out, swizzled(scales))
    back = np.empty_like(scales)
    fmt.unswizzle(out, back)
    np.testing.assert_array_equal(back, scales)


def test_swizzled_scales_are_those_of_torchao() -> None:
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils", reason="needs torchao: pip install .[dev]")
    scales = np.random.default_rng(4).integers(0, 256, (200, 10), np.uint8)
    out = np.empty(swizzled_bytes(200, 10), np.uint8)
    fmt.swizzle(scales, out)
    theirs = utils.to_blocked(torch.from_numpy(scales), use_triton_kernel=False)
    np.testing.assert_array_equal(out, theirs.numpy().reshape(-1))


# --- The kernel writes the bytes of the CPU. Without a GPU it runs in Triton's interpreter, where triton is installed.


HAS_TRITON = importlib.util.find_spec("triton") is not None
COMPARE = """
import numpy as np, torch
from refitd.copy_services import digests
from refitd.mxfp8 import format as fmt, kernels
from tests.support.mxfp8 import every_amax, random_values

def check(words, rounding, skew=0, gap=8):
    # rows that lie apart, from an address that is `skew` elements off
    rows, columns = words.shape
    def apart(dtype, width):
        flat = torch.full((skew + rows * (width + gap),), 0x6E, dtype=dtype)
        return flat[skew:].view(rows, width + gap)[:, :width]
    expected, expected_scales = np.empty(words.shape, np.uint8), np.empty((rows, columns // 32), np.uint8)
    fmt.quantize(words.numpy().view(np.uint16), expected, expected_scales, rounding)
    read, data, scales = apart(torch.int16, columns), apart(torch.uint8, columns), apart(torch.uint8, columns // 32)
    read.copy_(words)
    variant = kernels._variant(read, data, scales, rounding)
    kernels.quantize(read, data, scales, rounding)
    assert (data.numpy() == expected).all(), (words.shape, rounding, skew, gap, "data")
    assert (scales.numpy() == expected_scales).all(), (words.shape, rounding, skew, gap, "scales")
    for each, width in ((data, columns), (scales, columns // 32)):
        whole = each.as_strided((rows - 1, gap), (width + gap, 1), skew + width)
        assert (whole == 0x6E).all(), "bytes between rows changed"
    return variant.vector, variant.is_wide

def check_sums(words, rounding, skew):
    rows, columns = words.shape
    read = torch.zeros(words.numel() + skew, dtype=torch.int16)[skew:].view(rows, columns).copy_(words)
    found = [torch.zeros(rows, columns // width, dtype=torch.uint8) for width in (1, 32)]
    whole = [torch.zeros_like(each) for each in found]
    kernels.quantize(read, *whole, rounding)
    keys = digests.make_keys(WORDS)
    sums = kernels.quantize(read, *found, rounding, keys)
    for each, other, got in zip(found, whole, sums, strict=True):
        assert torch.equal(each, other), (words.shape, rounding, skew)
        digest = digests.DeviceDigest(keys)
        digest.update(each.view(-1))
        assert torch.equal(got, digest.sums()), (words.shape, rounding, skew)
    return len(sums[0]), len(sums[1])

WORDS = 1024
digests.BLOCK_WORDS, digests.BLOCK_BYTES = WORDS, 4 * WORDS

every_word = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
mixed = every_word[torch.randperm(len(every_word), generator=torch.Generator().manual_seed(1))]
rows = torch.cat([every_word.view(-1, 32), mixed.view(-1, 32), every_amax().view(torch.int16)])
some = [values.view(torch.int16).reshape(-1, 32)[:20] for values in random_values().values()]
some = torch.cat([mixed.view(-1, 32)[:100], *some])
for rounding in fmt.Rounding:
    kernels.GROUP = 8192
    assert check(rows, rounding, gap=0) == (8, False)
    kernels.GROUP = 64
    for columns in (32, 96, 5 * 32):
        words = some.reshape(-1)[: some.numel() // columns * columns].view(-1, columns)
        assert check(words, rounding) == (8, False)
        for skew, gap, vector in ((1, 8, 1), (0, 3, 1), (4, 6, 2), (4, 8, 2)):
            assert check(words, rounding, skew, gap) == (vector, False)
        assert min(check_sums(words, rounding, skew)[0] for skew in (0, 1, 4)) > 1
    assert check_sums(mixed[:0].view(0, 96), rounding, 0) == (0, 0)
    kernels._INT32_MAX = 200  # offsets of 64 bits, and several launches
    assert check(some.view(-1)[:96 * 40].view(-1, 96), rounding) == (1, True)
    kernels._INT32_MAX = 2**31 - 1
print("same bytes")
"""


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton: pip install --no-deps triton")
def test_the_kernel_writes_the_bytes_of_the_cpu_in_the_interpreter() -> None:
    ran = programs.run([sys.executable, "-c", COMPARE], env={**os.environ, "TRITON_INTERPRET": "1"})
    assert ran.stdout.strip() == "same bytes", ran.stderr


CONVERSIONS = """
import contextlib, torch
from types import SimpleNamespace
from refitd.addressing.copies import QUANTIZE, QUANTIZE_SWIZZLED, QUANTIZE_TILES, SWIZZLE, ConversionList
from refitd.copy_services import DigestMismatch
from refitd.mxfp8 import kernels
from refitd.worker import device_conversions as conversions

# on the CPU the kernel runs in the interpreter
conversions.quantize = lambda values, data, scale, rounding, scratch, keys: kernels.quantize(
    values.view(torch.int16), data, scale, rounding, keys
)
conversions.on_streams = lambda *arguments: contextlib.nullcontext()
memory = torch.randint(0, 256, (1 << 17,), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
arena = SimpleNamespace(device=0, writable=True, nbytes=len(memory), tensor=memory)
kinds = torch.tensor([QUANTIZE, QUANTIZE_SWIZZLED, SWIZZLE, QUANTIZE_TILES])
one, none = torch.ones(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
places = [0, 8192, 25000, 65536], [32768, 36864, 0, 98304], [46000, 46128, 48000, 120000]
sizes = torch.tensor([[1, 4096], [128, 64], [128, 128], [128, 128]])
columns = (sizes, kinds, none, one, one, *map(torch.tensor, places))
memory[65536:98304].view(torch.bfloat16).fill_(0.3)
job = conversions.DeviceConversionJob(ConversionList(*(column.numpy() for column in columns)), {1: arena})
assert job.run(verify=True, on_progress=lambda done: None).copies == 4

def named(at):
    def spoil(done):
        if done == sum(job._bytes):
            memory[at] += 1
    try:
        job.run(verify=True, on_progress=spoil)
    except DigestMismatch as exc:
        return str(exc).partition(":")[0]

print([named(at) for at in (60000, 32768 + 4095, 46000 + 127, 36864 + 99, 46128 + 5, 48000 + 511, 98304 + 9, 120003)])
"""


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton: pip install --no-deps triton")
def test_data_and_scales_that_change_after_a_conversion_are_noticed() -> None:
    ran = programs.run([sys.executable, "-c", CONVERSIONS], env={**os.environ, "TRITON_INTERPRET": "1"})
    pieces = [0, 0, 1, 1, 2, 3, 3]
    assert ran.stdout.strip() == str([None, *(f"conversion {piece}" for piece in pieces)]), ran.stderr


def test_a_gpu_without_triton_is_refused_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RefusedError, match="w: it is on cuda:0, and converting there needs triton"):
        check_device("w", torch.device("cuda", 0))
    check_device("w", torch.device("cpu"))
