"""MXFP8 and FP8 in torch tensors: buffers of data and scales, and conversions into them, in place, on any device.

Scales are handled only as bytes: torch rounds numbers when it converts them to float8_e8m0fnu, and cannot copy that
dtype on every device.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from refitd.dtypes import dtype_name
from refitd.errors import RefusedError
from refitd.mxfp8 import format as fmt
from refitd.mxfp8.format import BLOCK, TILE, TILE_BLOCKS, TILE_ROWS, Rounding, Scratch, swizzled_bytes, tiles_shape
from refitd.mxfp8.format import quantize_tiles as quantize_tiles_on_host

DATA_DTYPES = (torch.uint8, torch.float8_e4m3fn)
_EXACT = (torch.Tensor, torch.nn.Parameter)
SCALE_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
_WORDS = {torch.bfloat16: (torch.int16, "uint16"), torch.float32: (torch.int32, "uint32")}


@dataclass(frozen=True, eq=False)
class MXFP8Buffer:
    """A tensor in MXFP8 with fixed memory.

    Attributes:
        data: E4M3 elements in the tensor's shape, as uint8 or float8_e4m3fn.
        scale: E8M0 bytes, as uint8 or float8_e8m0fnu: row-major with one for every 32 elements of the last dimension,
            or 1-D and swizzled in tiles of 128 x 4, with all dimensions but the last flattened.
        rounding: how scales are rounded in conversions to this buffer; None uses the transform's.
    """

    data: torch.Tensor
    scale: torch.Tensor
    rounding: Rounding | None = None

    @classmethod
    def empty(cls, shape: tuple[int, ...], *, is_swizzled: bool = False, device: Any = None) -> MXFP8Buffer:
        """Return a buffer of this shape, all zeros."""
        blocks = shape[-1] // BLOCK
        sizes = (swizzled_bytes(math.prod(shape[:-1]), blocks),) if is_swizzled else (*shape[:-1], blocks)
        return cls(
            torch.zeros(shape, dtype=torch.uint8, device=device), torch.zeros(sizes, dtype=torch.uint8, device=device)
        )

    @property
    def is_swizzled(self) -> bool:
        """Whether the scales are swizzled, judged by their shape."""
        return self.scale.ndim == 1 and self.scale.shape != (*self.data.shape[:-1], self.data.shape[-1] // BLOCK)

    def quantize(self, values: torch.Tensor) -> None:
        """Write values (bfloat16 or float32, shaped like `data`) in place."""
        held = held_of("values", self)
        rows = held.scale if held.scale is not None else held.new_scale()
        quantize(values, held.data, rows, self.rounding or Rounding.RCEIL)
        held.lay_out(rows)

    def dequantize(self) -> torch.Tensor:
        """Return the values in bfloat16."""
        return held_of("values", self).dequantize()


@dataclass(frozen=True, eq=False)
class FP8Buffer:
    """A tensor in FP8 with fixed memory: `weight` and `weight_scale_inv` of DeepSeek-V3 and Kimi-K2.

    Attributes:
        data: E4M3 elements in the tensor's shape [..., n, k], as uint8 or float8_e4m3fn.
        scale: float32 [..., ceil(n / 128), ceil(k / 128)], one for each tile of 128 x 128.
    """

    data: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...], *, device: Any = None) -> FP8Buffer:
        """Return a buffer of this shape, all zeros."""
        data = torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device)
        return cls(data, torch.zeros(tiles_shape(shape), device=device))

    def quantize(self, values: torch.Tensor) -> None:
        """Write values (bfloat16, shaped like `data`) in place."""
        held = held_of("values", self)
        assert held.scale is not None
        quantize_tiles(values, held.data, held.scale)

    def dequantize(self) -> torch.Tensor:
        """Return the values in bfloat16."""
        return held_of("values", self).dequantize()


@dataclass(frozen=True, eq=False)
class CheckedBuffer:
    """The checked content of a buffer object, as bytes.

    Attributes:
        data: uint8 in the tensor's shape.
        scale: uint8, row-major, one per block; None if the scales are swizzled. FP8: float32, one per tile.
        swizzled: uint8, 1-D; None if they are not.
        rounding: the buffer's rounding, if it has one.
    """

    data: torch.Tensor
    scale: torch.Tensor | None
    swizzled: torch.Tensor | None
    rounding: Rounding | None

    @property
    def is_tiled(self) -> bool:
        """Whether this is FP8 with tiles of 128 x 128."""
        return self.scale is not None and self.scale.dtype == torch.float32

    def new_scale(self) -> torch.Tensor:
        """Return an uninitialised tensor for row-major scales."""
        return self.data.new_empty((*self.data.shape[:-1], self.data.shape[-1] // BLOCK))

    def lay_out(self, rows: torch.Tensor) -> None:
        """Write row-major scales in swizzled order to `swizzled`, if there is one."""
        if self.swizzled is None:
            return
        rows = rows.reshape(-1, rows.shape[-1])
        if self.swizzled.device.type == "cpu":
            fmt.swizzle(rows.numpy(), self.swizzled.numpy())
            return
        high, wide = -(-rows.shape[0] // TILE_ROWS), -(-rows.shape[1] // TILE_BLOCKS)
        padded = rows.new_zeros((high * TILE_ROWS, wide * TILE_BLOCKS))
        padded[: rows.shape[0], : rows.shape[1]] = rows
        self.swizzled.view(high, wide, 32, 4, 4).copy_(padded.view(high, 4, 32, wide, 4).permute(0, 3, 2, 1, 4))

    def rows(self) -> torch.Tensor:
        """Return the row-major scales; a copy if they are swizzled."""
        if self.scale is not None:
            return self.scale
        assert self.swizzled is not None
        rows = torch.empty_like(self.new_scale(), device="cpu")
        fmt.unswizzle(self.swizzled.cpu().numpy(), rows.view(-1, rows.shape[-1]).numpy())
        return rows.to(self.data.device)

    def dequantize(self) -> torch.Tensor:
        """Return the values in bfloat16."""
        if self.is_tiled and self.scale is not None:
            wide = self.scale.repeat_interleave(TILE, -2)[..., : self.data.shape[-2], :]
            wide = wide.repeat_interleave(TILE, -1)[..., : self.data.shape[-1]]
            return (self.data.view(torch.float8_e4m3fn).float() * wide).bfloat16()
        data, rows = self.data.cpu(), self.rows().cpu()
        found = torch.empty(data.shape, dtype=torch.bfloat16)
        for code, scale, value in _matrices(data, rows, found.view(torch.int16)):
            fmt.dequantize(code.numpy(), scale.numpy(), value.numpy().view("uint16"))
        return found.to(self.data.device)


def is_quantized(value: object) -> bool:
    """Return whether this object holds a tensor in MXFP8."""
    if type(value) in _EXACT and value.dtype not in DATA_DTYPES:  # type: ignore[attr-defined]
        return False  # fast path for nearly all tensors
    parts = _parts(value)
    return parts is not None and parts[0].dtype in DATA_DTYPES


def held_of(name: str, value: object) -> CheckedBuffer:
    """Return the checked content of a buffer object.

    It may be an MXFP8Buffer, an FP8Buffer, any object with such tensors `data` and `scale`, or Transformer Engine's
    MXFP8Tensor. FP8 has scales in float32.

    Raises:
        RefusedError: it is something else, or its data and scales are inconsistent; names it.
    """
    parts = _parts(value)
    if parts is None:
        raise RefusedError(f"{name}: {type(value).__name__} is no MXFP8 tensor; expected one with `data` and `scale`")
    data, scale, may_be_padded, said_swizzled = parts
    if scale.dtype == torch.float32:
        return _tiled(name, data, scale)
    if data.dtype not in DATA_DTYPES or scale.dtype not in SCALE_DTYPES:
        raise RefusedError(
            f"{name}: data is {dtype_name(data.dtype)} and scale {dtype_name(scale.dtype)}, expected float8_e4m3fn and "
            "float8_e8m0fnu, or uint8"
        )
    if data.ndim < 1 or data.shape[-1] % BLOCK or not data.shape[-1]:  # a shard may have no rows
        raise RefusedError(
            f"{name}: its shape is {list(data.shape)}, expected a last dimension that is a multiple of {BLOCK}"
        )
    if not data.is_contiguous() or not scale.is_contiguous() or data.device != scale.device:
        raise RefusedError(f"{name}: data and scale must be contiguous and on one device")
    rounding = getattr(value, "rounding", None)
    if rounding is not None and rounding not in tuple(Rounding):
        raise RefusedError(f"{name}: its rounding is {rounding!r}, expected one of {', '.join(Rounding)}")
    rows, blocks = math.prod(data.shape[:-1]), data.shape[-1] // BLOCK
    flat = swizzled_bytes(rows, blocks)
    plain = (*data.shape[:-1], blocks)
    padded = (-(-rows // TILE_ROWS) * TILE_ROWS, -(-blocks // TILE_BLOCKS) * TILE_BLOCKS)
    data, scale = data.detach().view(torch.uint8), scale.detach().view(torch.uint8)
    known = None if rounding is None else Rounding(rounding)
    if said_swizzled and scale.numel() == flat:
        return CheckedBuffer(data, None, scale.view(-1), known)
    if scale.shape == plain and not said_swizzled:
        return CheckedBuffer(data, scale, None, known)
    if may_be_padded and scale.shape == padded and not said_swizzled:
        return CheckedBuffer(data, scale[:rows, :blocks].unflatten(0, data.shape[:-1] or (1,)).view(plain), None, known)
    if scale.shape == (flat,):
        return CheckedBuffer(data, None, scale, known)
    raise RefusedError(
        f"{name}: the scale of {list(data.shape)} has shape {list(scale.shape)}, expected {list(plain)}, or [{flat}] "
        "where it is swizzled"
    )


def _tiled(name: str, data: torch.Tensor, scale: torch.Tensor) -> CheckedBuffer:
    """Return the checked content of FP8 with tiles; raises like `held_of`."""
    if data.dtype not in DATA_DTYPES or data.ndim < 2 or scale.shape != tiles_shape(tuple(data.shape)):
        raise RefusedError(
            f"{name}: FP8 of {dtype_name(data.dtype)} {list(data.shape)} with float32 scales {list(scale.shape)}, "
            f"expected float8_e4m3fn or uint8 [..., n, k] and one scale for each tile of {TILE} x {TILE}"
        )
    if not data.is_contiguous() or not scale.is_contiguous() or data.device != scale.device:
        raise RefusedError(f"{name}: data and scale must be contiguous and on one device")
    return CheckedBuffer(data.detach().view(torch.uint8), scale.detach(), None, None)


def _parts(value: object) -> tuple[torch.Tensor, torch.Tensor, bool, bool] | None:
    """Return (data, scale, whether scales may be padded, whether the object says that they are swizzled)."""
    # look for scales first: every tensor has `data`, and makes a new tensor for it each time
    scale = getattr(value, "_rowwise_scale_inv", None)
    if isinstance(scale, torch.Tensor) and isinstance(data := getattr(value, "_rowwise_data", None), torch.Tensor):
        return data, scale, True, bool(getattr(value, "_with_gemm_swizzled_scales", False))
    scale = getattr(value, "scale", None)
    if isinstance(scale, torch.Tensor) and isinstance(data := getattr(value, "data", None), torch.Tensor):
        return data, scale, False, False
    return None


def holds_columns(value: object) -> bool:
    """Return whether it also holds the transposed form, which refitd does not write."""
    return getattr(value, "_columnwise_data", None) is not None


def check_device(name: str, device: torch.device) -> None:
    """Raise RefusedError unless MXFP8 conversion works on this device."""
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise RefusedError(f"{name}: it is on {device}; MXFP8 is written on CPUs and CUDA devices")
    if importlib.util.find_spec("triton") is None:
        raise RefusedError(f"{name}: it is on {device}, and converting there needs triton; `pip install triton`")


def quantize(
    values: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    rounding: Rounding,
    scratch: dict[str, Scratch] | None = None,
    keys: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Convert bfloat16 or float32 values into existing uint8 data and row-major scales.

    Args:
        values: any number of dimensions; the last is contiguous and consists of whole blocks.
        data: uint8, same shape and device; the last dimension is contiguous.
        scale: uint8, one for every block.
        rounding: how scales are rounded.
        scratch: memory that the caller keeps between calls; its pages are touched once.
        keys: of `copy_services.digests`, if sums are wanted; the tensors are then matrices.

    Returns:
        With keys, the digests' sums of data and scales.
    """
    words, name = _WORDS[values.dtype]
    if values.device.type != "cpu":
        if values.dtype != torch.bfloat16:
            raise RefusedError(f"values are {dtype_name(values.dtype)}; on {values.device} only bfloat16 is converted")
        from refitd.mxfp8 import kernels

        found: list[torch.Tensor] = []
        for value, code, row in _matrices(values.detach().view(words), data, scale):
            found += kernels.quantize(value, code, row, rounding, keys)
        return found
    memory = {} if scratch is None else scratch
    if name not in memory:
        memory[name] = Scratch.of(name)
    for value, code, row in _matrices(values.detach().view(words), data, scale):
        fmt.quantize(value.numpy().view(name), code.numpy(), row.numpy(), rounding, memory[name])
    return []


def quantize_tiles(values: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> None:
    """Convert bfloat16 values into existing FP8: uint8 `data` of equal shape, float32 `scale` of its tiles.

    Raises:
        RefusedError: the values are not bfloat16.
    """
    if values.dtype != torch.bfloat16 or values.shape != data.shape:
        raise RefusedError(
            f"values are {dtype_name(values.dtype)} {list(values.shape)}, expected bfloat16 {list(data.shape)}"
        )
    matrices = (t.reshape(-1, *t.shape[-2:]) if t.ndim != 3 else t for t in (values.detach(), data, scale))
    for value, code, tile in zip(*matrices, strict=True):
        if value.device.type == "cpu":
            quantize_tiles_on_host(value.view(torch.int16).numpy().view("uint16"), code.numpy(), tile.numpy())
            continue
        for row in range(0, len(value), TILE):  # a stripe of tiles at a time, to bound the memory in float32
            stripe = value[row : row + TILE].float()
            columns = stripe.abs().amax(dim=0)
            amax = torch.nn.functional.pad(columns, (0, -len(columns) % TILE)).view(-1, TILE).amax(dim=1)
            tile[row // TILE] = amax.clamp(1e-4) / 448.0
            stripe /= tile[row // TILE].repeat_interleave(TILE)[: stripe.shape[1]]
            code[row : row + TILE] = stripe.to(torch.float8_e4m3fn).view(torch.uint8)


def _matrices(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield tensors of equal leading dimensions as tuples of matrix views with equal numbers of rows."""
    if tensors[0].ndim == 1:
        yield tuple(tensor[None] for tensor in tensors)
    elif tensors[0].ndim == 2:
        yield tensors
    elif all(tensor.is_contiguous() for tensor in tensors):
        yield tuple(tensor.view(-1, tensor.shape[-1]) for tensor in tensors)
    else:
        for parts in zip(*tensors, strict=True):
            yield from _matrices(*parts)
