"""MXFP8ReshardTransform: write bfloat16 weights of sources into an engine's existing MXFP8 buffers.

    receivers convert    bfloat16 travels           any split: receivers reassemble blocks that are cut
    senders convert      data and scale travel      half the bytes; every piece must be whole blocks of 32

Both give the same bytes as converting the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from refitd.dtypes import dtype_name
from refitd.errors import RefusedError
from refitd.mxfp8.buffers import CheckedBuffer, check_device, held_of, holds_columns, is_quantized, quantize
from refitd.mxfp8.format import BLOCK, Rounding, Scratch
from refitd.transforms import ReshardTransform, Slices

Box = tuple[tuple[int, int], ...]  # (start, stop) of each dimension


def box_of(name: str, slices: Sequence[slice | int], shape: Sequence[int]) -> Box:
    """Return the box that slices select; raises RefusedError unless it is inside the tensor and all steps are 1."""
    if len(slices) != len(shape):
        raise RefusedError(f"{name}: {_said(slices)} has {len(slices)} dimensions, the tensor has {list(shape)}")
    box = []
    for part, extent in zip(slices, shape, strict=True):
        low, high, step = (part, part + 1, 1) if isinstance(part, int) else (part.start or 0, part.stop, part.step or 1)
        high = extent if high is None else high
        if not 0 <= low < high <= extent or step != 1:
            raise RefusedError(f"{name}: {_said(slices)} is no box inside {list(shape)}")
        box.append((low, high))
    return tuple(box)


class Coverage:
    """The received boxes of one tensor."""

    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self._name = name
        self._shape = tuple(shape)
        self._boxes: npt.NDArray[np.int64] = np.zeros((16, len(shape), 2), np.int64)
        self._count = 0
        self._elements = 0

    @property
    def missing(self) -> int:
        """The number of elements that have not been received."""
        return math.prod(self._shape) - self._elements

    def add(self, box: Box) -> None:
        """Add a received box.

        Raises:
            RefusedError: the box overlaps an earlier one; names both.
        """
        found = self._boxes[: self._count]
        new = np.array(box, np.int64)
        meets = ((found[:, :, 0] < new[:, 1]) & (new[:, 0] < found[:, :, 1])).all(axis=1)
        if meets.any():
            other = [slice(low, high) for low, high in found[int(meets.argmax())].tolist()]
            both = f"{_said([slice(*pair) for pair in box])} and {_said(other)}"
            raise RefusedError(f"{self._name}: {both} overlap, expected every element once; describe no part twice")
        if self._count == len(self._boxes):
            self._boxes = np.concatenate([self._boxes, np.zeros_like(self._boxes)])
        self._boxes[self._count] = new
        self._count += 1
        self._elements += math.prod(high - low for low, high in box)

    def check_complete(self) -> None:
        """Raise RefusedError unless all elements have been received."""
        if self.missing:
            raise RefusedError(
                f"{self._name}: {self.missing} of the {math.prod(self._shape)} elements of {list(self._shape)} are in "
                f"none of the {self._count} pieces received, expected every element once; the sources do not cover it"
            )


def _said(slices: Sequence[slice | int]) -> str:
    parts = (f"{part.start}:{part.stop}" if isinstance(part, slice) else str(part) for part in slices)
    return f"[{', '.join(parts)}]"


@dataclass(frozen=True, eq=False)
class _Cut:
    """One column of blocks that arrive in parts."""

    values: torch.Tensor  # [..., 32]
    arrived: torch.Tensor  # [...] number of arrived elements of each block


@dataclass(eq=False)
class _Receiving:
    """One tensor while its pieces arrive.

    Attributes:
        coverage: which elements have arrived.
        rows: row-major scales: the destination's own, or a buffer that is swizzled once complete.
        cut: columns of blocks that arrive in parts, by the block's number in the row.
    """

    coverage: Coverage
    rows: torch.Tensor
    cut: dict[int, _Cut] = field(default_factory=dict)


class MXFP8ReshardTransform(ReshardTransform):
    """Writes weights into persistent MXFP8 buffers, in place.

    Row-major scales are written with each piece, swizzled ones once the whole tensor has arrived. A tensor is refused
    by name before any transfer if one of its elements would arrive twice or never.

    Raises:
        RefusedError: by the constructor: buffers are invalid; names all of them.
    """

    def __init__(
        self,
        convertible_params: Collection[str],
        persistent_buffers: Mapping[str, object],
        buffer_key_prefix: str = "",
        convert_on_send: bool = False,
        *,
        rounding: Rounding = Rounding.RCEIL,
        dequantize: bool = False,
    ) -> None:
        """Check every buffer.

        Args:
            convertible_params: the parameters to convert, named as in this rank's own module.
            persistent_buffers: the buffers to write, by name without the prefix: MXFP8Buffer, any object with `data`
                and `scale`, or Transformer Engine's MXFP8Tensor. Empty on ranks that only send.
            buffer_key_prefix: a prefix of parameter names that buffer names lack.
            convert_on_send: senders convert; both ends then need the transform.
            rounding: how scales are rounded if a buffer does not say; with `convert_on_send`, the sender's is used.
            dequantize: send sources that are MXFP8 as bfloat16; otherwise they are refused.
        """
        self._names = frozenset(convertible_params)
        self._prefix = buffer_key_prefix
        self._on_send = convert_on_send
        self._rounding = Rounding(rounding)
        self._dequantize = dequantize
        self._keys = sorted(persistent_buffers)
        self._buffers = _checked(self._names, persistent_buffers, buffer_key_prefix, converts=not convert_on_send)
        self._receiving: dict[str, _Receiving] = {}
        self._scratch: dict[str, Scratch] = {}

    def should_transform(self, param_name: str) -> bool:
        """See ReshardTransform.should_transform."""
        return param_name in self._names

    def send_dtype(self, param_name: str, src_param: torch.Tensor, dtype: torch.dtype | str) -> torch.dtype | None:
        """See ReshardTransform.send_dtype: E4M3 if senders convert."""
        if is_quantized(src_param):
            held_of(param_name, src_param)
            if not self._on_send:
                _check_dequantized(param_name, allowed=self._dequantize)
                return torch.bfloat16
        elif self._on_send:
            check_source(param_name, dtype, src_param.device)
        return torch.float8_e4m3fn if self._on_send else None

    def recv_dtype(self, param_name: str, dst_param: torch.Tensor) -> torch.dtype | None:
        """See ReshardTransform.recv_dtype. The module's tensor gives only the shape; it is never written."""
        held = self._held(param_name)
        if held.data.shape != dst_param.shape:
            raise RefusedError(
                f"{param_name}: its persistent buffer has shape {list(held.data.shape)}, expected "
                f"{list(dst_param.shape)}, which the destination module has"
            )
        return torch.float8_e4m3fn if self._on_send else torch.bfloat16

    def prepare_send(self, param_name: str, src_slice: Slices, src_param: torch.Tensor) -> list[torch.Tensor]:
        """See ReshardTransform.prepare_send."""
        if self._on_send and is_quantized(src_param):
            held = held_of(param_name, src_param)
            box = box_of(param_name, src_slice, held.data.shape)
            _check_whole_blocks(param_name, box[-1])
            index = _index(box)
            return [held.data[index], held.rows()[scale_slices(index)]]
        source = ensure_sendable(src_param, dequantize=self._dequantize, name=param_name)
        piece = source[_index(box_of(param_name, src_slice, source.shape))]
        if self._on_send:
            check_source(param_name, piece.dtype, piece.device)
            # the receiver checks that no block is cut; the sender counts every 32 consecutive elements as one
            if piece.shape[-1] % BLOCK:
                piece = piece.reshape(-1)
                _check_whole_blocks(param_name, (0, len(piece)))
            elif piece.stride(-1) != 1:
                piece = piece.contiguous()
            data = torch.empty(piece.shape, dtype=torch.uint8, device=piece.device)
            scale = data.new_empty((*piece.shape[:-1], piece.shape[-1] // BLOCK))
            quantize(piece, data, scale, self._rounding, self._scratch)
            return [data, scale]
        if piece.dtype != torch.bfloat16:
            raise RefusedError(
                f"{param_name}: it is {dtype_name(piece.dtype)}, expected bfloat16; declare it in `casts`"
            )
        return [piece]

    def begin_recv(self, param_name: str, dst_slices: Sequence[Slices]) -> None:
        """See ReshardTransform.begin_recv.

        Raises:
            RefusedError: the pieces do not cover every element once, or senders convert and a piece cuts a block.
        """
        held = self._held(param_name)
        coverage = Coverage(param_name, held.data.shape)
        for slices in dst_slices:
            box = box_of(param_name, slices, held.data.shape)
            if self._on_send:
                _check_whole_blocks(param_name, box[-1])
            coverage.add(box)
        coverage.check_complete()
        self._receiving.pop(param_name, None)  # may be left from a failed transfer
        self._begun(param_name)

    def prepare_recv(self, param_name: str, dst_slice: Slices) -> list[torch.Tensor]:
        """See ReshardTransform.prepare_recv. Converted data and scales are received directly in their destination."""
        held = self._held(param_name)
        index = _index(box := box_of(param_name, dst_slice, held.data.shape))
        if self._on_send:
            _check_whole_blocks(param_name, box[-1])
            return [held.data[index], self._begun(param_name).rows[scale_slices(index)]]
        sizes = [high - low for low, high in box]
        return [torch.empty(sizes, dtype=torch.bfloat16, device=held.data.device)]

    def finalize_recv(self, param_name: str, dst_slice: Slices, recv_buffers: list[torch.Tensor]) -> None:
        """See ReshardTransform.finalize_recv.

        Raises:
            RefusedError: elements of the piece have already arrived.
        """
        held = self._held(param_name)
        box = box_of(param_name, dst_slice, held.data.shape)
        receiving = self._begun(param_name)
        receiving.coverage.add(box)
        if self._on_send:
            _check_whole_blocks(param_name, box[-1])
            index = _index(box)
            places = held.data[index], receiving.rows[scale_slices(index)]
            for place, found in zip(places, recv_buffers, strict=True):
                if found.data_ptr() != place.data_ptr() or found.stride() != place.stride():
                    place.copy_(found.view(torch.uint8).view(place.shape))
        else:
            (values,) = recv_buffers
            self._convert(held, receiving, box, values.view([high - low for low, high in box]))
        if not receiving.coverage.missing:
            held.lay_out(receiving.rows)
            del self._receiving[param_name]

    def finish_recv(self, param_name: str) -> None:
        """See ReshardTransform.finish_recv.

        Raises:
            RefusedError: elements have not arrived.
        """
        receiving = self._receiving.pop(param_name, None)
        if receiving is not None:
            receiving.coverage.check_complete()

    def _held(self, param_name: str) -> CheckedBuffer:
        key = param_name.removeprefix(self._prefix)
        if key not in self._buffers:
            known = ", ".join(self._keys[:5]) or "none"
            raise RefusedError(
                f"{param_name}: no persistent buffer is called {key!r}, there are: {known}; pass one to the transform"
            )
        return self._buffers[key]

    def _begun(self, name: str) -> _Receiving:
        if name not in self._receiving:
            held = self._held(name)
            rows = held.scale if held.scale is not None else held.new_scale()
            self._receiving[name] = _Receiving(Coverage(name, held.data.shape), rows)
        return self._receiving[name]

    def _convert(self, held: CheckedBuffer, receiving: _Receiving, box: Box, values: torch.Tensor) -> None:
        """Convert the whole blocks of a piece, and keep partial blocks until they are complete.

        [20:100]  ->  [20:32] kept, [32:96] converted, [96:100] kept
        """
        rounding = held.rounding or self._rounding
        lead, (low, high) = _index(box[:-1]), box[-1]
        first, last = -(-low // BLOCK) * BLOCK, high // BLOCK * BLOCK
        if first < last:
            whole, blocks = slice(first, last), slice(first // BLOCK, last // BLOCK)
            inner = values[..., first - low : last - low]
            quantize(inner, held.data[*lead, whole], receiving.rows[*lead, blocks], rounding, self._scratch)
        ends = [(low, high)] if first > last else [(low, first), (last, high)]
        for start, stop in ends:
            if start < stop:
                self._join(held, receiving, lead, (start, stop), values[..., start - low : stop - low])

    def _join(
        self, held: CheckedBuffer, receiving: _Receiving, lead: Slices, part: tuple[int, int], values: torch.Tensor
    ) -> None:
        """Keep parts of blocks, and convert the blocks that are now whole. Rows may be cut at different places."""
        block = part[0] // BLOCK
        first = block * BLOCK
        if block not in receiving.cut:
            shape = held.data.shape[:-1]
            room = values.new_empty((*shape, BLOCK))
            receiving.cut[block] = _Cut(room, torch.zeros(shape, dtype=torch.uint8, device=room.device))
        cut = receiving.cut[block]
        cut.values[*lead, part[0] - first : part[1] - first] = values
        cut.arrived[lead] += part[1] - part[0]
        is_whole = cut.arrived[lead] == BLOCK
        blocks = cut.values[lead][is_whole]
        if not len(blocks):
            return
        data = torch.empty(blocks.shape, dtype=torch.uint8, device=blocks.device)
        scale = data.new_empty((len(blocks), 1))
        quantize(blocks, data, scale, held.rounding or self._rounding, self._scratch)
        held.data[*lead, first : first + BLOCK][is_whole] = data
        receiving.rows[..., block][lead][is_whole] = scale[:, 0]


def scale_slices(data_slice: Sequence[slice | int], block_size: int = BLOCK) -> tuple[slice | int, ...]:
    """Return the slices of row-major scales for slices of data; the last dimension counts blocks.

    [4:8, 64:128]  ->  [4:8, 2:4]
    """
    *lead, last = data_slice
    if isinstance(last, int):
        return *lead, last // block_size
    first = None if last.start is None else last.start // block_size
    return *lead, slice(first, None if last.stop is None else -(-last.stop // block_size))


def ensure_sendable(param: torch.Tensor, *, dequantize: bool = False, name: str = "parameter") -> torch.Tensor:
    """Return a detached tensor of a standard dtype; with `dequantize`, MXFP8 becomes bfloat16.

    Raises:
        RefusedError: the tensor is MXFP8 and `dequantize` is not set.
    """
    if not is_quantized(param):
        return param.detach()
    _check_dequantized(name, allowed=dequantize)
    return held_of(name, param).dequantize()


def check_source(name: str, dtype: torch.dtype | str, device: torch.device) -> None:
    """Raise RefusedError unless elements of this dtype can be converted on this device."""
    kinds = ("bfloat16", "float32") if device.type == "cpu" else ("bfloat16",)
    if dtype_name(dtype) not in kinds:
        raise RefusedError(
            f"{name}: it is {dtype_name(dtype)} on {device.type}, and {' or '.join(kinds)} can be converted there; "
            "declare it in `casts`"
        )
    check_device(name, device)


def _checked(
    names: Collection[str], buffers: Mapping[str, object], prefix: str, *, converts: bool
) -> dict[str, CheckedBuffer]:
    """Return the parameters' buffers as CheckedBuffer; raises RefusedError listing every problem."""
    found: dict[str, CheckedBuffer] = {}
    owners: dict[str, str] = {}
    problems = []
    for name in sorted(names):
        key = name.removeprefix(prefix)
        if key not in buffers:
            continue  # only sent here; if it were received, planning would refuse it
        if key in owners:
            problems.append(f"{name} and {owners[key]} both belong to the buffer {key!r}")
            continue
        owners[key] = name
        try:
            found[key] = held_of(name, buffers[key])
            if found[key].is_tiled:
                problems.append(f"{name}: it is FP8, and this transform writes MXFP8; register it with a daemon")
            if converts:
                check_device(name, found[key].data.device)
        except RefusedError as exc:
            problems.append(str(exc))
        if holds_columns(buffers[key]):
            problems.append(f"{name}: it holds column-wise data, too, which would stay as it is; make it row-wise only")
    swizzled = [owners[key] for key, held in found.items() if held.swizzled is not None]
    plain = [owners[key] for key, held in found.items() if held.swizzled is None]
    if swizzled and plain:
        problems.append(f"{swizzled[0]} has swizzled scales and {plain[0]} has not; expected one layout for all")
    places = sorted((held.data.data_ptr(), held.data.numel(), owners[key]) for key, held in found.items())
    for (start, size, name), (following, _, other) in pairwise(places):
        if following < start + size:
            problems.append(f"{name} and {other} share memory; give each a buffer of its own")
    if problems:
        raise RefusedError("; ".join(problems))
    return found


def _check_dequantized(name: str, *, allowed: bool) -> None:
    if not allowed:
        raise RefusedError(
            f"{name}: the source holds it in MXFP8; send it as it is with convert_on_send=True, or allow conversion "
            "to bfloat16 with dequantize=True"
        )


def _check_whole_blocks(name: str, last: tuple[int, int]) -> None:
    if last[0] % BLOCK or last[1] % BLOCK:
        raise RefusedError(
            f"{name}: a piece has {last[0]}:{last[1]} of the last dimension and cuts a block of {BLOCK}, which senders "
            "cannot convert; let receivers do it (convert_on_send=False)"
        )


def _index(box: Box) -> Slices:
    return tuple(slice(low, high) for low, high in box)
