"""Prove a learned layout: run the real loader on made-up checkpoints (probes), and compare every tensor bit for bit.

The values of probes use every bit that a dtype has, and differ from probe to probe.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from refitd.describe.layout import row_major
from refitd.describe.metadata import ParameterMetadata
from refitd.errors import PlanError, RefusedError
from refitd.tracing.held_bytes import STEP, bytes_of, differing, storage_key
from refitd.tracing.isolation import Isolation
from refitd.tracing.threads import Following
from refitd.tracing.values import site_of
from refitd.tracing.walks import Written

Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]

# Random elements of each dtype that large tensors repeat. Both numbers are prime, so the rows of a tensor differ; each
# tensor starts at another element. The shorter one is for tensors of at most SMALL elements.
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
        mildness: makes the values more usual, for loaders that raise on them. From 1 on, integers are permutations of
            0 to their count, which are valid indices; with 2 all floats are in [0.5, 2).
    """

    number: int
    shapes: Shapes
    mildness: int = 0
    _pieces: dict[tuple[torch.dtype, torch.device], tuple[int, torch.Tensor]] = field(default_factory=dict, init=False)

    @property
    def _is_wide(self) -> bool:
        return self.number % 3 != 2 and self.mildness < 2

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each canonical tensor; the receiver may keep and change it."""
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
        """Return the expected values of a canonical tensor; large ones are not created in memory."""
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
        """Return the bytes of the random elements that have been made."""
        return sum(piece.nbytes for _, piece in self._pieces.values())

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
        if count <= STEP:
            return self.repeated(name, 0, count, CPU).clone()
        period, piece = self._piece(dtype, CPU, 0)
        source, start = _bits(piece), self._seed(name) % period
        flat = torch.empty(count * dtype.itemsize, dtype=torch.uint8).view(source.dtype)
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
    """Return a dense tensor's elements as integers of equal size."""
    return tensor.view(SIGNED.get(tensor.element_size(), torch.uint8))


def _width(dtype: torch.dtype) -> int:
    """Return the number of integers in `_bits` for one element."""
    return 1 if dtype.itemsize in SIGNED else dtype.itemsize


Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

PROBES = 3


@dataclass(frozen=True, slots=True)
class Proof:
    """How a layout was proven.

    Attributes:
        probes: checkpoints of made-up values that the real loader has loaded.
        seconds: the time that this took, with the copies of the engine's tensors.
        memory_bytes: main memory for the random elements that the probes' tensors repeat. The copies of the engine's
            tensors are counted in `LoaderTrace.held`.
        without_values: the engine's tensors on the meta device, which have no values to compare.
    """

    probes: int
    seconds: float
    memory_bytes: int
    without_values: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a phrase for logs."""
        return f"proven on {self.probes} probes in {self.seconds:.2f} s, {self.memory_bytes / 1e6:.0f} MB"


@dataclass(frozen=True, slots=True)
class Refuted:
    """A tensor of the engine for which loader and layout differ.

    Attributes:
        source: the canonical tensor at which they differ; "" where the layout says a constant.
        probe: the probe's number, from 1.
    """

    source: str
    probe: int


def prove(
    metadata: Mapping[str, ParameterMetadata],
    untouched: Iterable[str],
    written: Mapping[int, Sequence[Written]],
    others: Iterable[int],
    isolation: Isolation,
    load_fn: Load,
    shapes: Shapes,
) -> tuple[Proof | None, dict[str, Refuted]]:
    """Run a loader on probes, in the engine's own tensors, which are restored afterwards, also on error.

    Args:
        metadata: the layout, by the engine's names.
        untouched: tensors without elements of canonical tensors.
        written: the writes that the trace has recorded, by storage; tensors on the meta device are skipped.
        others: further storages that the loader has written.
        isolation: the saved state of the engine before the trace.
        load_fn: the loader.
        shapes: shape and dtype of every canonical tensor.

    Returns:
        The proof, None if no tensor has values, and the tensors that differ from the layout on some probe.

    Raises:
        PlanError: the loader writes other tensors, or replaces them; by name.
        RefusedError: the loader raises on every kind of values, with its line.
    """
    began = time.perf_counter()
    ones = [one for found in written.values() for one in found if one.tensor.device.type != "meta"]
    held = {one.name: one.tensor for one in ones}
    mine = {name: meta for name, meta in metadata.items() if name in held}
    constant = {one.name for one in ones if one.writes} & {*untouched}
    seen = {key for key, found in written.items() if any(one.writes or one.is_computed for one in found)} | {*others}
    left = [one for one in ones if not one.writes and not one.is_computed and storage_key(one.tensor) in seen]
    without = tuple(name for name in metadata if name not in held)
    refuted: dict[str, Refuted] = {}
    if not held:
        return None, refuted
    before = {one.name: bytes_of(one.tensor).clone() for one in left}
    first: dict[str, torch.Tensor] = {}
    most = 0
    changed: list[str] = []
    try:
        for number in range(PROBES):
            probe = _run(isolation, mine, held, load_fn, Probe(number, shapes), seen)
            changed += [name for name, content in before.items() if not torch.equal(bytes_of(held[name]), content)]
            wanted = ((name, probe.expected(name)) for name in shapes)
            found, _ = differing({n: m for n, m in mine.items() if n not in refuted}, held, wanted)
            refuted |= {name: Refuted(source, number + 1) for name, source in found.items()}
            for name in constant:
                content = bytes_of(held[name]).clone()
                if not torch.equal(first.setdefault(name, content), content):
                    refuted.setdefault(name, Refuted("", number + 1))
            most = max(most, probe.nbytes())
            if number + 1 < PROBES:
                isolation.put_back(seen, mine, is_last=False).check_memory()
    finally:
        changes = isolation.put_back(seen, mine)
    changes.check_memory()
    if changed := list(dict.fromkeys((*changed, *changes.written))):
        raise PlanError(
            f"{', '.join(changed[:5])}: the loader writes {len(changed)} tensors that it did not write when its layout "
            "was learned: its writes depend on values, or on earlier loads; the tensors were restored"
        )
    return Proof(PROBES, time.perf_counter() - began, most, without), refuted


def _run(
    isolation: Isolation,
    metadata: Mapping[str, ParameterMetadata],
    held: Mapping[str, torch.Tensor],
    load_fn: Load,
    probe: Probe,
    seen: Container[int],
) -> Probe:
    """Load one probe into the engine's tensors; with more usual values if the loader raises."""
    error: Exception | None = None
    for mildness in range(3):
        probe = replace(probe, mildness=mildness)
        with torch.no_grad():
            for name in metadata:
                held[name].detach().copy_(probe.content(held[name].dtype).to(held[name].device))
            try:
                with Following(_Unfollowed(seen), {}).run():
                    load_fn(iter(probe))
                return probe
            except PlanError:
                raise
            except Exception as exc:
                error = exc
        isolation.put_back(seen, metadata, is_last=False)
    assert error is not None
    raise RefusedError(
        f"the loader raises on the made-up values of probe {probe.number + 1} of {PROBES}, but did not when its layout "
        f"was learned, at {site_of(error)}: {type(error).__name__}: {error}{_cause(error)}"
    ) from error


def _cause(error: Exception) -> str:
    """Return the cause of an error that torch raises for tensors without values, which probes do not have."""
    if isinstance(error, NotImplementedError) and "meta tensor" in str(error):
        return ". The loader keeps tensors of an earlier load outside the engine; make it drop them, then load again"
    return ""


class _Unfollowed:
    """Runs operators without a tracer; `Following` waits for the threads."""

    functions: TorchFunctionMode | None = None
    is_for_threads = True

    def __init__(self, written: Container[int]) -> None:
        self._written = written

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def is_followed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has memory of the engine."""
        return storage_key(tensor) in self._written
