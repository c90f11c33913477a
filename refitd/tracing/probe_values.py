"""Values of probe checkpoints: they differ in every bit that a dtype has, and from probe to probe."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from refitd.describe.layout import row_major
from refitd.tracing.comparison import STEP
from refitd.tracing.reused import LARGE, Reused

Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]

# Random elements of each dtype that large tensors repeat. Both numbers are prime, and so the rows of a tensor differ;
# each tensor starts at another element. The shorter one serves tensors of at most SMALL elements.
PERIOD, SHORT_PERIOD, SMALL = 1_000_003, 8_191, 2_000

# Index tensors of at most this many elements are permutations; longer ones are random and below it.
MAX_PERMUTED = 1 << 20

CPU = torch.device("cpu")
EMPTY = torch.empty(0)

# dtype -> bits of its exponent, bits of its mantissa
FLOATS = {torch.float64: (11, 52), torch.float32: (8, 23), torch.bfloat16: (8, 7), torch.float16: (5, 10)}
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COMPLEX = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}
INTEGERS = {
    *SIGNED.values(),
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
}


@dataclass(frozen=True)
class Probe:
    """A checkpoint of made-up values. `tensor` gives the same values each time.

    Attributes:
        number: probes of different numbers hold different values. In 0 and 1, floats have any sign and exponent, with
            both zeros and subnormal numbers; in 2 they are in [0.5, 2). Single floats are positive, negative and zero;
            single integers large, small, and zero or negative.
        shapes: shape and dtype of every canonical tensor.
        mildness: for loaders that raise on these. From 1 on, integers are permutations of 0 to their count, which are
            valid indices; with 2 all floats are in [0.5, 2).
        reused: memory for the large tensors.
    """

    number: int
    shapes: Shapes
    mildness: int = 0
    reused: Reused = field(default_factory=Reused)
    _pieces: dict[tuple[torch.dtype, torch.device], tuple[int, torch.Tensor]] = field(default_factory=dict, init=False)

    @property
    def _is_wide(self) -> bool:
        return self.number % 3 != 2 and self.mildness < 2

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each canonical tensor, which is the receiver's to keep and to change."""
        for name in self.shapes:
            yield name, self.tensor(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a new tensor with the values of a canonical one, on the CPU."""
        shape, dtype = self.shapes[name]
        count = prod(shape)
        if dtype in INTEGERS and self.mildness:
            flat = self._permuted(count, dtype, zlib.crc32(name.encode()))
        else:
            flat = self._repeated(name, count, dtype)
        if count == 1:
            self._single(flat, self._seed(name))
        return flat.reshape(tuple(shape))

    def expected(self, name: str) -> torch.Tensor | Repeated:
        """Return the values of a canonical tensor to compare with; large ones are not made."""
        shape, dtype = self.shapes[name]
        if prod(shape) == 1 or (dtype in INTEGERS and self.mildness):
            return self.tensor(name)
        return Repeated(self, name, tuple(shape))

    def content(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the value that fills the engine's tensors before its loader runs on this probe."""
        pattern = (0x5A, 0xA5, 0x3C)[self.number % 3]
        if dtype == torch.bool:
            pattern &= 1
        return torch.full((dtype.itemsize,), pattern, dtype=torch.uint8).view(dtype)[0]

    def nbytes(self) -> int:
        """Return the bytes of the random elements that have been made, and of the memory for tensors."""
        return sum(piece.nbytes for _, piece in self._pieces.values()) + self.reused.nbytes()

    def repeated(self, name: str, at: int, count: int, device: torch.device) -> torch.Tensor:
        """Return `count` adjacent elements of a canonical tensor; they are only read."""
        dtype = self.shapes[name][1]
        period, piece = self._piece(dtype, device, count)
        start = (self._seed(name) + at) % period
        return piece[start : start + count]

    def _seed(self, name: str) -> int:
        return zlib.crc32(f"{self.number} {name}".encode())

    def _repeated(self, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new elements: the random ones, repeated from an offset that depends on the name."""
        if count <= STEP and count * dtype.itemsize < LARGE:
            return self.repeated(name, 0, count, CPU).clone()
        period, piece = self._piece(dtype, CPU, 0)
        source, start = _bits(piece), self._seed(name) % period
        flat = self.reused.empty(count * dtype.itemsize).view(source.dtype)
        period, start = period * _width(dtype), start * _width(dtype)
        head = min(len(flat), period - start)
        whole = (len(flat) - head) // period
        flat[:head].copy_(source[start : start + head])
        flat[head : head + whole * period].view(whole, period).copy_(source[:period].expand(whole, period))
        tail = flat[head + whole * period :]
        tail.copy_(source[: len(tail)])
        return flat.view(dtype)

    def _permuted(self, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        top = 128 if dtype.itemsize == 1 else min(count, MAX_PERMUTED) or 1
        if count <= MAX_PERMUTED:  # another one in each probe, also of two elements
            return (torch.randperm(count, generator=generator) % top).roll(self.number).to(dtype)
        return torch.randint(top, (count,), generator=generator).to(dtype)

    def _single(self, flat: torch.Tensor, seed: int) -> None:
        """Give a lone number another sign in each probe."""
        kind = self.number % 3
        if flat.dtype == torch.bool:
            flat.fill_(kind == 0)
        elif flat.dtype in FLOATS and self.mildness < 2:
            usual = _random(1, flat.dtype, seed, wide=False)
            size = usual * 2.0 ** (5 + seed % 8)
            flat.copy_(size * (1, -1, 0)[kind])
        elif flat.dtype in INTEGERS:
            low = -(seed >> 8 & 1) if flat.dtype.is_signed and not self.mildness else 0
            large = seed % 4 if self.mildness else 5 + seed % (100 if flat.dtype.itemsize == 1 else 30_000)
            flat.copy_(torch.tensor((large, seed >> 8 & 3, low)[kind]))

    def _piece(self, dtype: torch.dtype, device: torch.device, run: int) -> tuple[int, torch.Tensor]:
        """Return the period, and the random elements; the first ones follow again, and each run is a view."""
        period, piece = self._pieces.get((dtype, device), (0, EMPTY))
        if not period or len(piece) - period < run:
            most = max(prod(shape) for shape, held in self.shapes.values() if held == dtype)
            period = PERIOD if most > SMALL else SHORT_PERIOD
            if device == CPU and not len(piece):
                made = _random(period, dtype, self.number, wide=self._is_wide)
            else:
                made = self._piece(dtype, CPU, 0)[1][:period].to(device)
            longest = max(run, min(most, STEP))
            again = _bits(made).repeat(1 + -(-longest // period))[: (period + longest) * _width(dtype)]
            piece = again.view(dtype)
            self._pieces[dtype, device] = period, piece
        return period, piece


@dataclass(frozen=True)
class Repeated:
    """A canonical tensor of a probe. Its boxes are views of the random elements."""

    probe: Probe
    name: str
    shape: tuple[int, ...]

    def box(self, offset: Sequence[int], size: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return a box that spans few elements; it is only read."""
        strides = row_major(self.shape)
        first = sum(o * step for o, step in zip(offset, strides, strict=True))
        span = 1 + sum((n - 1) * step for n, step in zip(size, strides, strict=True))
        run = self.probe.repeated(self.name, first, span, device)
        return run.as_strided(tuple(size), strides, run.storage_offset())


def _random(count: int, dtype: torch.dtype, seed: int, *, wide: bool) -> torch.Tensor:
    """Return random elements of a dtype; floats are finite."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in COMPLEX:
        return _random(2 * count, COMPLEX[dtype], seed, wide=wide).view(dtype)
    if dtype == torch.bool:
        return torch.randint(2, (count,), generator=generator).bool()
    if dtype not in FLOATS:
        data = torch.randint(256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        made = data.view(dtype)
        if dtype.is_floating_point and dtype.itemsize == 1 and not is_packed(dtype):
            data[~torch.isfinite(made.float())] = 1
            if not wide:
                data &= 0x7F
        return made
    exponent, mantissa = FLOATS[dtype]
    bias = (1 << (exponent - 1)) - 1
    low = torch.randint(1 << mantissa, (count,), generator=generator, dtype=torch.int64)
    if not wide:
        high = bias - torch.randint(2, (count,), generator=generator)
        return (high << mantissa | low).to(SIGNED[dtype.itemsize]).view(dtype)
    # one in two has any exponent, the others one around 1; one in 16 is subnormal, and one in 16 is a zero
    high = torch.randint(2 * bias + 1, (count,), generator=generator)
    near = bias + torch.randint(-6, 7, (count,), generator=generator)
    kind = torch.randint(16, (count,), generator=generator)
    high = torch.where(kind < 8, near, high).masked_fill_(kind >= 14, 0)
    low.masked_fill_(kind == 15, 0)
    sign = -torch.randint(2, (count,), generator=generator) << (exponent + mantissa)
    return (sign | high << mantissa | low).to(SIGNED[dtype.itemsize]).view(dtype)


def is_packed(dtype: torch.dtype) -> bool:
    """Whether an element holds several numbers."""
    return dtype == torch.float4_e2m1fn_x2


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements as integers, which all dtypes of this size can be copied as."""
    return tensor.view(SIGNED.get(tensor.element_size(), torch.uint8))


def _width(dtype: torch.dtype) -> int:
    """Return the integers of `_bits` that one element is."""
    return 1 if dtype.itemsize in SIGNED else dtype.itemsize
