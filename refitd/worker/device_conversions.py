"""A worker's conversions to MXFP8 on a GPU: of received tensors in a staging arena, and of copied blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
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
from refitd.copy_services.pieces import Piece, box_of
from refitd.copy_services.waits import on_streams
from refitd.errors import TransportError
from refitd.mxfp8.blocks import Converter
from refitd.mxfp8.buffers import CheckedBuffer, check_device, quantize, quantize_tiles
from refitd.mxfp8.format import BLOCK, ROUNDINGS, Scratch, swizzled_bytes
from refitd.mxfp8.fp8 import tiles_shape

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
        self._pieces = [_piece(pieces, row, arenas, self._scratch) for row in range(len(pieces))]

    def run(self, *, verify: bool, on_progress: Callable[[int], None], timeout: float | None = None) -> RunResult:
        """See PreparedJob.run. `verify` is ignored, because the input was verified when it arrived."""
        started, done = time.perf_counter(), 0
        with on_streams(self._gpus, timeout or _DEFAULT_S, "conversions"):
            for convert, nbytes in zip(self._pieces, self._bytes, strict=True):
                convert()
                done += nbytes
                on_progress(done)
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


def _piece(
    pieces: ConversionList, row: int, arenas: Mapping[int, MappedDeviceArena], scratch: dict[str, Scratch]
) -> Callable[[], None]:
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
        return lambda: CheckedBuffer(read, None, swizzled, None).lay_out(read)
    values = view(source, rows * columns * ELEMENT_BYTES, here).view(torch.bfloat16).view(rows, columns)
    data = view(int(pieces.data[row]), rows * columns).view(rows, columns)
    if kind == QUANTIZE_TILES:
        shape = tiles_shape((rows, columns))
        tiles = view(scale, SCALE_BYTES * prod(shape)).view(torch.float32).view(shape)
        return lambda: quantize_tiles(values, data, tiles)
    check_device(f"conversion {row}", values.device)
    held = CheckedBuffer(
        data, view(scale, rows * blocks).view(rows, blocks) if kind == QUANTIZE else None, swizzled, None
    )

    def convert() -> None:
        made = held.scale if held.scale is not None else held.new_scale()
        quantize(values, held.data, made, ROUNDINGS[rounding], scratch)
        held.lay_out(made)

    return convert
