"""A worker's conversions on a GPU: convert received tensors in a staging arena on the GPU to MXFP8."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from refitd.addressing.copies import ELEMENT_BYTES, QUANTIZE, SWIZZLE, ConversionList, check_piece
from refitd.buffers.cuda import MappedDeviceArena
from refitd.copy_services import PreparedJob, RunResult
from refitd.copy_services.waits import on_streams
from refitd.errors import TransportError
from refitd.mxfp8.buffers import CheckedBuffer, check_device, quantize
from refitd.mxfp8.format import BLOCK, ROUNDINGS, Scratch, swizzled_bytes

_DEFAULT_S = 600.0


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
    swizzled = None if kind == QUANTIZE else view(scale, swizzled_bytes(rows, blocks))
    if kind == SWIZZLE:
        read = view(source, rows * blocks, here).view(rows, blocks)
        return lambda: CheckedBuffer(read, None, swizzled, None).lay_out(read)
    values = view(source, rows * columns * ELEMENT_BYTES, here).view(torch.bfloat16).view(rows, columns)
    check_device(f"conversion {row}", values.device)
    data = view(int(pieces.data[row]), rows * columns).view(rows, columns)
    held = CheckedBuffer(
        data, view(scale, rows * blocks).view(rows, blocks) if kind == QUANTIZE else None, swizzled, None
    )

    def convert() -> None:
        made = held.scale if held.scale is not None else held.new_scale()
        quantize(values, held.data, made, ROUNDINGS[rounding], scratch)
        held.lay_out(made)

    return convert
