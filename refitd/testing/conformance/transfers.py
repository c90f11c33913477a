"""Values of the suite: transfers with their expected results, orders to processes, and their answers.

Expected results are computed with numpy, without refitd.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refitd.mxfp8.format import Rounding, quantize

Bytes = np.ndarray  # uint8, one dimension

SIZES = {
    "bool": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int64": 8,
    "complex128": 16,
}
# (held, wanted), as refitd.dtypes has them
CASTS = (("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16"), ("float16", "float32"))
# 32 elements as one, which a sender converts to MXFP8: the size of a source's block; (held, wanted), and wanted sizes
BLOCKS = {"bfloat16[32]": 64, "float32[32]": 128}
WANTED = {f"fp8.{r}.{part}": size for r in ("rceil", "floor") for part, size in (("data", 32), ("scale", 1))}
BLOCK_CASTS = tuple((held, wanted) for held in BLOCKS for wanted in WANTED)


def size_of(dtype: str) -> int:
    """Return the bytes of an element or a block."""
    return {**SIZES, **BLOCKS, **WANTED}[dtype]


@dataclass(frozen=True)
class Place:
    """A strided box in the source arena, or the target arena, of a process; all in bytes."""

    process: int
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """One box from one process to another, or to itself."""

    source: Place
    target: Place
    shape: tuple[int, ...]
    dtype: str = "uint8"
    cast_from: str = ""
    task: int = 0
    part: int = 0

    @property
    def held(self) -> str:
        """The dtype at the source."""
        return self.cast_from or self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return int(np.prod(self.shape, dtype=np.int64)) * size_of(self.dtype)


@dataclass(frozen=True)
class Plan:
    """Transfers that are performed together; all use only the first `room` bytes of arenas."""

    transfers: tuple[Transfer, ...]
    room: int

    def arriving(self, process: int) -> int:
        """Bytes that a process receives from others."""
        return sum(t.nbytes for t in self.transfers if t.target.process == process != t.source.process)

    def staying(self, process: int) -> int:
        """Bytes that a process moves to itself."""
        return sum(t.nbytes for t in self.transfers if t.target.process == process == t.source.process)


@dataclass(frozen=True)
class Layout:
    """The layout of a box in memory.

    Attributes:
        order: its dimensions, outermost first; () for the order they have.
        gap: unused elements after each row of each dimension.
        spread: from each element of a row to its next one, in elements.
        skew: bytes from a multiple of 16 to its start.
    """

    order: tuple[int, ...] = ()
    gap: int = 0
    spread: int = 1
    skew: int = 0

    def strides(self, shape: Sequence[int], element: int) -> tuple[int, ...]:
        """Shape (2, 3), 4 bytes: order (0, 1) -> (12, 4); order (1, 0) -> (4, 8); gap 1 -> (16, 4)."""
        strides, step = [0] * len(shape), element * self.spread
        for dim in reversed(self.order or range(len(shape))):
            strides[dim] = step
            step = step * max(1, shape[dim]) + self.gap * element
        return tuple(strides)


class Maker:
    """Places transfers one after the other in memory; no two targets overlap."""

    def __init__(self) -> None:
        self._used: dict[tuple[str, int], int] = defaultdict(int)
        self._transfers: list[Transfer] = []

    def add(
        self,
        source: int,
        target: int,
        shape: Sequence[int],
        dtype: str = "uint8",
        *,
        read: Layout = Layout(),
        write: Layout = Layout(),
        cast_from: str = "",
        task: int | None = None,
        part: int = 0,
    ) -> Transfer:
        """Add one more transfer after the others; `task` is by default a new number."""
        shape = tuple(shape)
        made = Transfer(
            self._place("source", source, shape, size_of(cast_from or dtype), read),
            self._place("target", target, shape, size_of(dtype), write),
            shape,
            dtype,
            cast_from,
            100 + len(self._transfers) if task is None else task,
            part,
        )
        self._transfers.append(made)
        return made

    def _place(self, side: str, process: int, shape: Sequence[int], element: int, layout: Layout) -> Place:
        strides = layout.strides(shape, element)
        offset = self._used[side, process] + layout.skew
        self._used[side, process] = -(-(offset + extent(shape, strides, element) + 16) // 16) * 16
        return Place(process, offset, strides)

    def plan(self) -> Plan:
        """Return the plan; after the last box it has some bytes that must not change."""
        return Plan(tuple(self._transfers), max(self._used.values(), default=0) + 4096)


def extent(shape: Sequence[int], strides: Sequence[int], element: int) -> int:
    """Return the bytes from the first element's start to the last one's end."""
    if 0 in shape:
        return 0
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + element


def view(memory: Bytes, place: Place, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Return a box of elements of a numpy dtype; neither memory nor strides have to be aligned."""
    return np.ndarray(shape, kind, memory.data, place.offset, place.strides)


def performed(plan: Plan, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> list[Bytes]:
    """Return the expected bytes of all targets."""
    after = [target.copy() for target in targets]
    for t in plan.transfers:
        wanted = view(after[t.target.process], t.target, t.shape, f"V{size_of(t.dtype)}")
        if not t.cast_from:
            wanted[...] = view(sources[t.source.process], t.source, t.shape, f"V{size_of(t.dtype)}")
            continue
        if t.held in BLOCKS:
            blocks = view(sources[t.source.process], t.source, t.shape, f"V{size_of(t.held)}")
            wanted[...] = converted_blocks(blocks.copy(), t.held, t.dtype).reshape(t.shape)
            continue
        numbers = as_float64(view(sources[t.source.process], t.source, t.shape, f"u{size_of(t.held)}").copy(), t.held)
        wanted[...] = from_float64(numbers, t.dtype).view(f"V{size_of(t.dtype)}").reshape(t.shape)
    return after


def converted_blocks(blocks: np.ndarray, held: str, wanted: str) -> np.ndarray:
    """Return the blocks as a receiver converts them, once the elements are bfloat16."""
    name, (_, rounding, part) = held.partition("[")[0], wanted.split(".")
    words = blocks.reshape(-1, 1).view(np.uint16 if name == "bfloat16" else np.uint32)
    words = words if name == "bfloat16" else from_float64(as_float64(words.view(np.float32), name), "bfloat16")
    data, scale = np.empty(words.shape, np.uint8), np.empty((len(words), 1), np.uint8)
    quantize(words, data, scale, Rounding(rounding))
    return data.view("V32") if part == "data" else scale.view("V1")


def as_float64(words: np.ndarray, dtype: str) -> np.ndarray:
    """Return words as float64, which has every number of these dtypes."""
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return words.view(dtype).astype(np.float64)


def from_float64(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Return the nearest elements as words; round ties to even."""
    numbers = np.atleast_1d(numbers)
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return numbers.astype(dtype).view(f"u{size_of(dtype)}")
    # between the two bfloat16 that are next to a number, both written as float32
    exact = numbers.astype(np.float32).view(np.uint32)
    below = exact & np.uint32(0xFFFF0000)
    above = below + np.uint32(0x10000)
    with np.errstate(invalid="ignore"):
        to_below = np.abs(numbers - below.view(np.float32).astype(np.float64))
        to_above = np.abs(above.view(np.float32).astype(np.float64) - numbers)
    is_even = below & np.uint32(0x10000) == 0
    chosen = np.where((to_below < to_above) | ((to_below == to_above) & is_even) | np.isinf(numbers), below, above)
    return (chosen >> 16).astype(np.uint16)


def put_numbers(plan: Plan, sources: Sequence[Bytes], random: np.random.Generator) -> None:
    """Fill the sources of converting transfers: numbers of every magnitude that both dtypes have, and infinities."""
    for t in plan.transfers:
        if not t.cast_from:
            continue
        count = int(np.prod(t.shape, dtype=np.int64))
        count *= 32 if t.held in BLOCKS else 1
        numbers = random.standard_normal(count) * 2.0 ** random.integers(-12, 12, count)
        numbers[:: 7 if t.held not in BLOCKS else 97] = np.inf
        words = from_float64(numbers, t.held.partition("[")[0]).view(f"V{size_of(t.held)}").reshape(t.shape)
        view(sources[t.source.process], t.source, t.shape, f"V{size_of(t.held)}")[...] = words


TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Orders:
    """How to run a plan, and which faults to inject.

    Attributes:
        verify: whether written bytes are compared with the bytes that were read.
        timeout: seconds.
        refuse: the reason with which this process refuses; two-sided services only.
        loses: whether received bytes are dropped; two-sided services only.
        kill_at: bytes of progress at which the process kills itself.
        stop_at: bytes of progress at which the process stops itself once, until it receives SIGCONT.
        raise_at: bytes of progress at which on_progress raises.
        pause_s: seconds that on_progress takes.
        linger_s: after an error, how long to look for bytes that are still written.
        fails_to_finish: whether `finish` raises; two-sided services only.
        forgets_local_receive: whether to skip noting receives from this process itself; two-sided services only.
        meddles: how to alter received bytes, see services.Between; two-sided services only.
    """

    verify: bool = True
    timeout: float = TIMEOUT_S
    refuse: str = ""
    loses: bool = False
    kill_at: int | None = None
    stop_at: int | None = None
    raise_at: int | None = None
    pause_s: float = 0.0
    linger_s: float = 0.0
    fails_to_finish: bool = False
    forgets_local_receive: bool = False
    meddles: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer of one process to one call.

    Attributes:
        error: name of the class that was raised, "" for none; `said` is its text, `kinds` are its base classes.
        seconds: that the call took.
        progress: the arguments of on_progress.
        received: bytes received from other processes, as counted by the service; `local` has those from this process.
        copy: the row that DigestMismatch names.
        is_usable: whether the service may still be used.
        wrote_late: whether targets changed after the error had been raised.
    """

    error: str = ""
    said: str = ""
    kinds: tuple[str, ...] = ()
    seconds: float = 0.0
    progress: tuple[int, ...] = ()
    received: int = 0
    local: int = 0
    messages: int = 0
    staging_bytes: int = 0
    copy: int = -1
    is_usable: bool = True
    wrote_late: bool = False


@dataclass(frozen=True)
class Vitals:
    """Kernel resources of a process."""

    descriptors: int
    threads: int
    resident_bytes: int


class Stop(Exception):
    """Raised by on_progress."""
