"""One kernel that copies a table of boxes on a GPU, and one that compares both ends of the same table.

Each box of the table has at most three dimensions around a contiguous range of bytes. `boxes.entries` makes it, and
chooses the units in which the box is copied: 16 bytes where the addresses and strides of both ends allow it, otherwise
4, 2 or 1. If only the misalignments of the ends differ, a unit of 4 is joined from two words of the source. Boxes of
one unit are launched together, any number of them. All index arithmetic has 32 bits.

A comparison reads both ends again and counts the differing words of each row. It proves that the destination equals
the source at that time, so it also finds a source that changed during the copy. A digest made while copying would only
show what was loaded, and it would read 16 bytes of keys for each 4 bytes of a box.

Addresses are numbers in the table. Memory of another GPU may be used if it is mapped for this one (peer access).

It has never run on a GPU. `tests/unit/test_kernels.py` compiles every variant; docs/gpu.md has the state of each part.
"""

# no `from __future__ import annotations`: triton then reads every annotation as text, and `tl.constexpr` is one

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from refitd.copy_services.boxes import COLUMNS, UNITS, Kind
from refitd.copy_services.digest_kernel import joined

if TYPE_CHECKING:
    import torch

_NAMES = ("table", "tiles", "differing", "first")


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of the kernel: the kind of its boxes, and whether it copies them or compares their ends."""

    kind: Kind
    is_check: bool

    @property
    def constants(self) -> dict[str, Any]:
        """The kernel's compile-time arguments."""
        return {
            "WORD_BITS": 8 * min(4, self.kind.unit),
            "LANES": max(1, self.kind.unit // 4),
            "IS_FLAT": self.kind.is_flat,
            "IS_SKEWED": self.kind.is_skewed,
            "IS_CHECK": self.is_check,
            "UNITS": UNITS[self.kind.unit],
            "COLUMNS": COLUMNS,
        }

    @property
    def signature(self) -> dict[str, str]:
        """The types of all arguments, for a compilation without tensors."""
        types = dict(zip(_NAMES, ("*i64", "*i32", "*i32", "i32"), strict=True))
        return types | dict.fromkeys(self.constants, "constexpr")


def variants() -> Iterator[Variant]:
    """Yield every variant that `launch` starts."""
    for unit, is_skewed in (*((unit, False) for unit in UNITS), (4, True)):
        for is_flat in (True, False):
            yield from (Variant(Kind(unit, is_flat, is_skewed), is_check) for is_check in (False, True))


def launch(
    kind: Kind, table: "torch.Tensor", tiles: "torch.Tensor", first: int, count: int, differing: "torch.Tensor | None"
) -> None:
    """Copy `count` tiles from tile `first` on, or compare them, in the current stream of the table's GPU.

    Args:
        kind: of all boxes of the table.
        table: int64, [boxes, COLUMNS]; see `boxes.Table`.
        tiles: int32, the box of each tile.
        first: the first tile.
        count: tiles, 1 or more.
        differing: int32, for each row of the job the words that differ, which the comparison adds to; None copies.
    """
    variant = Variant(kind, differing is not None)
    counts = tiles if differing is None else differing  # a copy does not use the argument
    copy_kernel[(count,)](table, tiles, counts, first, **variant.constants)


@triton.jit(do_not_specialize=_NAMES)  # type: ignore[untyped-decorator]  # `Variant` is the only choice of variants
def copy_kernel(  # type: ignore[no-untyped-def]  # triton reads annotations, and refuses all but its own
    table,
    tiles,
    differing,
    first,
    WORD_BITS: tl.constexpr,
    LANES: tl.constexpr,
    IS_FLAT: tl.constexpr,
    IS_SKEWED: tl.constexpr,
    IS_CHECK: tl.constexpr,
    UNITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy or compare one tile of UNITS units; a unit is LANES words."""
    tile = first + tl.program_id(0)
    box = table + tl.load(tiles + tile).to(tl.int64) * COLUMNS
    source = tl.load(box)
    destination = tl.load(box + 1)
    count = tl.load(box + 3).to(tl.int32)
    unit = (tile - tl.load(box + 4).to(tl.int32)) * UNITS + tl.arange(0, UNITS)
    if IS_FLAT:
        read = unit
        written = unit
    else:
        # the box in units: dimensions 0 to 2 from the innermost, around a range of `run` units
        run = tl.load(box + 5).to(tl.int32)
        size_0 = tl.load(box + 6).to(tl.int32)
        size_1 = tl.load(box + 7).to(tl.int32)
        rest = unit // run
        at = unit - rest * run
        outer = rest // size_0
        at_0 = rest - outer * size_0
        at_2 = outer // size_1
        at_1 = outer - at_2 * size_1
        read = at + at_0 * tl.load(box + 8).to(tl.int32) + at_1 * tl.load(box + 9).to(tl.int32)
        read += at_2 * tl.load(box + 10).to(tl.int32)
        written = at + at_0 * tl.load(box + 11).to(tl.int32) + at_1 * tl.load(box + 12).to(tl.int32)
        written += at_2 * tl.load(box + 13).to(tl.int32)
    if WORD_BITS == 32:
        pointer = tl.pointer_type(tl.int32)
    elif WORD_BITS == 16:
        pointer = tl.pointer_type(tl.int16)
    else:
        pointer = tl.pointer_type(tl.int8)
    if IS_SKEWED:
        skew = (source & 3).to(tl.int32)
        source -= skew
    lane = tl.arange(0, LANES)[None, :]
    unit_bytes: tl.constexpr = LANES * WORD_BITS // 8
    sources = tl.multiple_of(source.to(pointer), unit_bytes) + (read.to(tl.int64)[:, None] * LANES + lane)
    destinations = tl.multiple_of(destination.to(pointer), unit_bytes) + (written.to(tl.int64)[:, None] * LANES + lane)
    is_there = (unit < count)[:, None]
    words = tl.load(sources, mask=is_there, other=0)
    if IS_SKEWED:  # both words have bytes of the unit
        words = joined(words, tl.load(sources + 1, mask=is_there, other=0), skew)
    if IS_CHECK:
        found = tl.load(destinations, mask=is_there, other=0)
        wrong = tl.sum(tl.sum((words != found).to(tl.int32), axis=1), axis=0)
        if wrong > 0:
            tl.atomic_add(differing + tl.load(box + 2), wrong)
    else:
        tl.store(destinations, words, mask=is_there)
