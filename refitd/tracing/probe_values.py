"""Values of probe checkpoints: they differ in every bit that a dtype has, and from probe to probe."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]

# Random elements of each dtype that large tensors repeat. Both numbers are prime, so that the rows of a tensor differ;
# each tensor starts at another element. The shorter one serves tensors of at most SMALL elements.
PERIOD, SHORT_PERIOD, SMALL = 1_000_003, 8_191, 2_000

# Index tensors of at most this many elements are permutations; longer ones are random and below it.
MAX_PERMUTED = 1 << 20

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
    """

    number: int
    shapes: Shapes
    mildness: int = 0
    _pieces: dict[torch.dtype, torch.Tensor] = field(default_factory=dict, init=False)

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
        count, seed = prod(shape), zlib.crc32(f"{self.number} {name}".encode())
        if dtype in INTEGERS and self.mildness:
            flat = self._permuted(count, dtype, zlib.crc32(name.encode()))
        else:
            piece = self._piece(dtype)
            start = seed % len(piece)
            parts = [piece[start : start + count]]
            parts += [piece] * ((count - len(parts[0])) // len(piece))
            parts.append(piece[: count - sum(map(len, parts))])
            flat = _bits(torch.empty(count, dtype=dtype))
            torch.cat([_bits(part) for part in parts], out=flat)
            flat = flat.view(dtype)
        if count == 1:
            self._single(flat, seed)
        return flat.reshape(tuple(shape))

    def content(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the value that fills the engine's tensors before its loader runs on this probe."""
        pattern = (0x5A, 0xA5, 0x3C)[self.number % 3]
        if dtype == torch.bool:
            pattern &= 1
        return torch.full((dtype.itemsize,), pattern, dtype=torch.uint8).view(dtype)[0]

    def nbytes(self) -> int:
        """Return the bytes of the random elements that have been made."""
        return sum(piece.nbytes for piece in self._pieces.values())

    def _permuted(self, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        top = 128 if dtype.itemsize == 1 else min(count, MAX_PERMUTED) or 1
        if count <= MAX_PERMUTED:  # another one in each probe, also of two elements
            return (torch.randperm(count, generator=generator) % top).roll(self.number).to(dtype)
        return torch.randint(top, (count,), generator=generator).to(dtype)

    def _single(self, flat: torch.Tensor, seed: int) -> None:
        """Change a lone number, so that it has another sign in each probe."""
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

    def _piece(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._pieces:
            most = max(prod(shape) for shape, held in self.shapes.values() if held == dtype)
            count = PERIOD if most > SMALL else SHORT_PERIOD
            self._pieces[dtype] = _random(count, dtype, self.number, wide=self._is_wide)
        return self._pieces[dtype]


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
