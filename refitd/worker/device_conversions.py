"""A worker's conversions to MXFP8 on a GPU: of received tensors in a staging arena, and of copied blocks.

Received tensors were verified when they arrived. With `verify`, the kernel also adds up the digests of the data and
scales that it computes. Once all pieces are converted, these are compared with the digests of the memory, and scales
are swizzled again and compared. FP8 in tiles is converted again instead. This proves that the output arrived in memory,
not that the kernel computes correctly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

import torch

from refitd.addressing.copies import (
    ELEMENT_BYTES,
    QUANTIZE,
    QUANTIZE_SWIZZLED,
    QUANTIZE_TILES,
    SCALE_BYTES,
    SWIZZLE,
    ConversionList,
    CopyList,
    check_piece,
)
from refitd.buffers.arena import MappedArena
from refitd.buffers.cuda import MappedDeviceArena
from refitd.copy_services import DigestMismatch, PreparedJob, RunResult
from refitd.copy_services.digests import DeviceDigests
from refitd.copy_services.pieces import Piece, box_of
from refitd.copy_services.waits import on_streams
from refitd.errors import TransportError
from refitd.mxfp8.buffers import CheckedBuffer, check_device, quantize, quantize_tiles
from refitd.mxfp8.format import BLOCK, ROUNDINGS, Scratch, swizzled_bytes, tiles_shape
from refitd.mxfp8.parts import Converter

_DEFAULT_S = 600.0
_STEP_BYTES = 1 << 20  # of each step of a copy; a multiple of every block


class DeviceConversionJob(PreparedJob):
    """Pieces in arenas on GPUs, converted one after another by each GPU's quantization kernel."""

    def __init__(self, pieces: ConversionList, arenas: Mapping[int, MappedDeviceArena]) -> None:
        """Build the views, and check that every piece is inside its arena.

        Raises:
            TransportError: a piece leaves its arena, or the arena is not writable.
            RefusedError: the GPU has no kernel for a conversion.
        """
        self._bytes = pieces.row_bytes.tolist()
        self._gpus = sorted({arena.device for arena in arenas.values()})
        self._scratch: dict[str, Scratch] = {}
        self._digests: dict[torch.device, DeviceDigests] = {}
        self._pieces = [_piece(pieces, row, arenas, self._scratch) for row in range(len(pieces))]

    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """See PreparedJob.run."""
        started, done = time.perf_counter(), 0
        checks: list[Callable[[], torch.Tensor]] = []
        differ: list[torch.Tensor] = []
        with on_streams(self._gpus, timeout or _DEFAULT_S, "conversions"):
            for convert, nbytes in zip(self._pieces, self._bytes, strict=True):
                checks.append(convert(self._digests if verify else None))
                done += nbytes
                on_progress(done)
            if verify:
                differ = [check() for check in checks]
        if wrong := [row for row, differs in enumerate(differ) if bool(differs)]:
            raise DigestMismatch(
                f"conversion {wrong[0]}: its bytes differ after writing; another process writes to the destination"
            )
        return RunResult(len(self._pieces), done, time.perf_counter() - started)


class BlockCopyJob(PreparedJob):
    """Copies of blocks between arenas of which at least one is on a GPU. They are converted in main memory."""

    def __init__(self, copies: CopyList, arenas: Mapping[int, MappedArena | MappedDeviceArena]) -> None:
        """Build both ends of each copy.

        Raises:
            TransportError: a copy leaves its arena, or the arena is not mapped or not writable.
        """
        used = {number: arenas[number] for number in copies.arenas() if number in arenas}
        self._gpus = sorted({arena.device for arena in used.values() if isinstance(arena, MappedDeviceArena)})
        convert = Converter()

        def end(row: int, side: str, cast: int) -> Piece:
            number = int(getattr(copies, f"{side}_arena")[row])
            if number not in used or (side == "dst" and not used[number].writable):
                raise TransportError(f"copy {row}: arena {number} is not mapped here, or for reading only")
            offset, stride = (getattr(copies, f"{side}_{name}")[row].tolist() for name in ("offset", "stride"))
            box = offset, copies.size[row].tolist(), stride
            return box_of(used[number], *box, cast, int(copies.element_size[row]), f"copy {row}", convert)

        self._ends = [(end(row, "src", int(copies.cast[row])), end(row, "dst", 0)) for row in range(len(copies))]

    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """See PreparedJob.run."""
        started, done = time.perf_counter(), 0
        made, found = (torch.empty(_STEP_BYTES, dtype=torch.uint8) for _ in range(2))
        with on_streams(self._gpus, timeout or _DEFAULT_S, "copies of blocks"):
            for row, (source, destination) in enumerate(self._ends):
                for start in range(0, source.nbytes, _STEP_BYTES):
                    end = min(start + _STEP_BYTES, source.nbytes)
                    source.pack(start, end, made[: end - start])
                    destination.unpack(start, end, made[: end - start])
                    if verify:
                        destination.pack(start, end, found[: end - start])
                        if not torch.equal(found[: end - start], made[: end - start]):
                            raise DigestMismatch(f"copy {row}: its bytes differ after writing", row)
                    done += end - start
                    on_progress(done)
        return RunResult(len(self._ends), done, time.perf_counter() - started)


Digests = dict[torch.device, DeviceDigests]
# Queues a piece's conversion; returns a function that queues its comparison, and returns whether something differs.
Convert = Callable[[Digests | None], Callable[[], torch.Tensor]]


def _piece(
    pieces: ConversionList, row: int, arenas: Mapping[int, MappedDeviceArena], scratch: dict[str, Scratch]
) -> Convert:
    """Return a function that converts a piece."""
    kind, rows, columns, rounding = check_piece(pieces, row)
    here, there, blocks = int(pieces.read[row]), int(pieces.arena[row]), columns // BLOCK
    if not arenas[there].writable:
        raise TransportError(f"conversion {row}: arena {there} is mapped for reading only")

    def view(offset: int, nbytes: int, number: int = there) -> torch.Tensor:
        arena = arenas[number]
        if offset < 0 or offset % ELEMENT_BYTES or offset + nbytes > arena.nbytes:
            raise TransportError(
                f"conversion {row}: bytes {offset}..{offset + nbytes} leave arena {number} of {arena.nbytes} bytes"
            )
        return arena.tensor[offset : offset + nbytes]

    source, scale = int(pieces.source[row]), int(pieces.scale[row])
    swizzled = view(scale, swizzled_bytes(rows, blocks)) if kind in (QUANTIZE_SWIZZLED, SWIZZLE) else None
    if kind == SWIZZLE:
        read = view(source, rows * blocks, here).view(rows, blocks)
        only = CheckedBuffer(read, None, swizzled, None)

        def swizzle(digests: Digests | None) -> Callable[[], torch.Tensor]:
            only.lay_out(read)
            return lambda: _is_swizzled_otherwise(only, read)

        return swizzle
    values = view(source, rows * columns * ELEMENT_BYTES, here).view(torch.bfloat16).view(rows, columns)
    data = view(int(pieces.data[row]), rows * columns).view(rows, columns)
    if kind == QUANTIZE_TILES:
        shape = tiles_shape((rows, columns))
        tiles = view(scale, SCALE_BYTES * prod(shape)).view(torch.float32).view(shape)

        def convert_tiles(digests: Digests | None) -> Callable[[], torch.Tensor]:
            quantize_tiles(values, data, tiles)
            return lambda: _are_other_tiles(values, data, tiles)

        return convert_tiles
    check_device(f"conversion {row}", values.device)
    held = CheckedBuffer(
        data, view(scale, rows * blocks).view(rows, blocks) if kind == QUANTIZE else None, swizzled, None
    )

    def convert(digests: Digests | None) -> Callable[[], torch.Tensor]:
        made = held.scale if held.scale is not None else held.new_scale()
        sums = quantize(values, held.data, made, ROUNDINGS[rounding], scratch, _keys(digests, values))
        held.lay_out(made)

        def check() -> torch.Tensor:
            differs = _is_swizzled_otherwise(held, made)
            for written, expected in zip((held.data, made), sums, strict=False):  # there are sums if a kernel ran
                assert digests is not None
                digest = digests[values.device].new()
                digest.update(written.view(-1))
                differs = differs | (digest.sums() != expected).any()
            return differs

        return check

    return convert


def _keys(digests: Digests | None, values: torch.Tensor) -> torch.Tensor | None:
    """Return the keys for the digest of what is made of these values, None without one."""
    if digests is None:
        return None
    if values.device not in digests:
        digests[values.device] = DeviceDigests(values.device)
    return digests[values.device].keys


def _are_other_tiles(values: torch.Tensor, data: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """Convert values again and return, as one bool on their device, whether data and scales differ."""
    again = torch.empty_like(data), torch.empty_like(tiles)
    quantize_tiles(values, *again)
    return torch.ne(again[0], data).any() | torch.ne(again[1].view(torch.int32), tiles.view(torch.int32)).any()


def _is_swizzled_otherwise(held: CheckedBuffer, rows: torch.Tensor) -> torch.Tensor:
    """Swizzle row-major scales again and return, as one bool on their device, whether the buffer has others."""
    if held.swizzled is None:
        return rows.new_zeros((), dtype=torch.bool)
    again = torch.empty_like(held.swizzled)
    replace(held, swizzled=again).lay_out(rows)
    return torch.ne(again, held.swizzled).any()
